"""An opened checkpoint: its tensors by name, each read when it is asked for, from where it lies.

The plan says which boxes of which stored slices a tensor is made of, and the executor fills boxes of it
in memory; here is what NumPy's users expect around that. Nothing is ever written.
"""

from reshard.opened.checkpoint import OpenedCheckpoint, ReadingEffort
from reshard.opened.opening import open, open_requested, reading_request
from reshard.opened.tensor import LazyTensor, numpy_dtype

__all__ = [
    "LazyTensor",
    "OpenedCheckpoint",
    "ReadingEffort",
    "numpy_dtype",
    "open",
    "open_requested",
    "reading_request",
]
