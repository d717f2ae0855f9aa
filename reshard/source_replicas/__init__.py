"""Checks of a source strategy against the bytes in the files, before anything is written.

`choice` chooses bytes and ranks, `samples` and `everything` compare replicas, `distinct` compares slices that should
differ, and `comparison` contains the results and their messages.
"""

from reshard.source_replicas.compare import check_copies, compare_replicas
from reshard.source_replicas.comparison import Differing, ReplicaCheck, ReplicaComparison
from reshard.source_replicas.distinct import check_slices, check_stages

__all__ = [
    "Differing",
    "ReplicaCheck",
    "ReplicaComparison",
    "check_copies",
    "check_slices",
    "check_stages",
    "compare_replicas",
]
