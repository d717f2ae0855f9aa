"""Checkpoint 2.0: the form of MindFormers since 1.8, a directory per iteration.

Each iteration has tensor files, of models and of optimizers, and a metadata.json with the layouts of tensors and
the file of every slice. Reading goes from `recognise` and `find_iterations` (names alone) to `read_checkpoint2`
(metadata and headers). Metadata is checked before it is used.
"""

from reshard.forms.checkpoint2.checkpoint import Checkpoint2, LostTensor
from reshard.forms.checkpoint2.iterations import Iteration, find_iterations, recognise
from reshard.forms.checkpoint2.reading import read_checkpoint2, read_iteration, strategy_of

__all__ = [
    "Checkpoint2",
    "Iteration",
    "LostTensor",
    "find_iterations",
    "read_checkpoint2",
    "read_iteration",
    "recognise",
    "strategy_of",
]
