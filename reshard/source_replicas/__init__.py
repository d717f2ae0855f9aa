"""Checks of a source strategy against the bytes in the files, before anything is written."""

from reshard.source_replicas.compare import Differing, ReplicaCheck, ReplicaComparison, check_copies, compare_replicas
from reshard.source_replicas.contradictions import check_slices, check_stages, hint_of_swap

__all__ = [
    "Differing",
    "ReplicaCheck",
    "ReplicaComparison",
    "check_copies",
    "check_slices",
    "check_stages",
    "compare_replicas",
    "hint_of_swap",
]
