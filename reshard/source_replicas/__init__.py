"""Whether a source strategy fits the bytes in the files, checked before anything is written.

`choice` chooses bytes and ranks, `samples` and `compare` compare replicas, `distinct` compares slices that should
differ, and `outcome` words the result. A conversion calls `compare_replicas` and `compare_slices` once each.
"""

from reshard.source_replicas.compare import compare_replicas, holders_alike
from reshard.source_replicas.distinct import Distinctness, SameSlices, compare_slices, misplaced
from reshard.source_replicas.outcome import Differing, ReplicaCheck, ReplicaComparison

__all__ = [
    "Differing",
    "Distinctness",
    "ReplicaCheck",
    "ReplicaComparison",
    "SameSlices",
    "compare_replicas",
    "compare_slices",
    "holders_alike",
    "misplaced",
]
