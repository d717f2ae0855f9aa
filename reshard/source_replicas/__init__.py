"""Checks of a source strategy against the bytes in the files, before anything is written.

`choice` chooses bytes and ranks, `samples` and `compare` compare replicas, `distinct` compares slices that should
differ, and `outcome` contains the results and their messages. A conversion calls `compare_replicas` and
`compare_slices` once each, and for forms that record their layouts `check_copies`.
"""

from reshard.source_replicas.compare import check_copies, compare_replicas
from reshard.source_replicas.distinct import Distinctness, SameSlices, compare_slices, misplaced, ranks_by_content
from reshard.source_replicas.outcome import Differing, ReplicaCheck, ReplicaComparison

__all__ = [
    "Differing",
    "Distinctness",
    "ReplicaCheck",
    "ReplicaComparison",
    "SameSlices",
    "check_copies",
    "compare_replicas",
    "compare_slices",
    "misplaced",
    "ranks_by_content",
]
