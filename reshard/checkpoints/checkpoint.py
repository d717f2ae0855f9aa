"""A checkpoint as the plan sees it, whatever its form: global tensors, stored as boxes in files.

The files of a checkpoint are numbered; the number is the file's *holder number*. In a tree of rank
directories it is the rank. A tensor is cut by one grid or by several (stages that share it), and each box
of a grid is held by any number of files: replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional, Protocol

from reshard.checkpoints.tensors import CheckpointIndex
from reshard.layout import Grid


class Sharding(Protocol):
    """A grid over a tensor, and who holds each of its boxes."""

    @property
    def grid(self) -> Grid:
        """How the tensor is cut."""

    def holders(self, slice_number: int) -> Sequence[int]:
        """The files that are said to hold a box of the grid, ascending."""


@dataclass(frozen=True)
class FileSharding:
    """A sharding that is known file by file.

    Attributes:
        grid: how the tensor is cut.
        held_by: per box of the grid the files that hold it, ascending.
    """

    grid: Grid
    held_by: tuple[tuple[int, ...], ...]

    def holders(self, slice_number: int) -> Sequence[int]:
        """The files that hold a box of the grid, ascending."""
        return self.held_by[slice_number]


class GlobalTensor(NamedTuple):
    """A tensor of a checkpoint, all of its slices together.

    Attributes:
        name: its name in the files.
        dtype: MindSpore's name of its element type.
        item_size: bytes of one element.
        shape: shape of the full tensor.
        shardings: the ways in which files hold it, at least one; any of them will do.
    """

    name: str
    dtype: str
    item_size: int
    shape: tuple[int, ...]
    shardings: tuple[Sharding, ...]


class Checkpoint(Protocol):
    """One step of a source, as its headers and its metadata tell.

    Attributes:
        form: ``ranks``, ``checkpoint2``, ``unified`` or ``huggingface``.
        step: the step in words of its form, such as ``3_10`` or ``20``; None where nothing tells.
        label: how the step is called in messages.
        place: the directory that all of its files lie below.
        files: path of every file that counts, by holder number.
        indexes: what is in each of them.
        tensors: what is laid out, by name.
    """

    form: str
    step: Optional[str]
    label: str
    place: str
    files: Mapping[int, str]
    indexes: Mapping[int, CheckpointIndex]
    tensors: Mapping[str, GlobalTensor]

    def values(self) -> Sequence[str]:
        """Names that files hold and that are not laid out: scalars, text; sorted."""

    def holders(self, name: str) -> list[int]:
        """The files that hold an entry of this name, ascending."""
