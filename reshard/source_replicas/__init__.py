"""Whether ranks that a source strategy says hold the same do so, found out before anything is written.

`choice` says which bytes of which ranks tell, `samples` and `compare` compare them, `outcome` says what came of it;
`distinct` compares what should differ. A conversion calls
`compare_replicas` and `compare_slices` once, and knows nothing of how.
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
