"""Checks of a source strategy against the bytes in the files, before anything is written."""

from reshard.source_replicas.compare import ReplicaCheck, check_copies, compare_replicas
from reshard.source_replicas.contradictions import check_slices, check_stages, hint_of_swap
