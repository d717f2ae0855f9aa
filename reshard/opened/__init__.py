"""Opened checkpoints: tensors by name, each read from its files when it is indexed.

The plan lists the boxes of stored slices of each tensor, and the executor reads them into memory. This room adds
NumPy's indexing. It writes nothing.
"""

from reshard.opened.checkpoint import OpenedCheckpoint
from reshard.opened.opening import open, reading_request
from reshard.opened.tensor import LazyTensor
