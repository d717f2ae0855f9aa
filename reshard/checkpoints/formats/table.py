"""Many tensors in few bytes: a table of columns that makes a `Tensor` when one is asked for.

A file may hold hundreds of thousands. Types and shapes are those of tens of kinds, names are shared with
strategies and other files, and what is left is some numbers for each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, KeysView, Mapping

from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.errors import CheckpointError

MOST_TENSORS = 1 << 19
"""Tensors that a file may hold; a conversion takes some 700 bytes of memory for each."""


def too_many(path: str, what: str, most: int) -> CheckpointError:
    """The error for a file that holds more than can be read, and need not be damaged."""
    return CheckpointError(
        f"{path}: holds more than {most:,} {what}: no more can be read of one file",
        file=path,
        hint="save it in more files: more pipeline stages, or weights and optimizer state apart",
    )


_Extents = tuple[tuple[int, int], ...]
_Kind = tuple[str, tuple[int, ...], tuple[int, ...]]


def tensors_named(name: str, indexes: Iterable[CheckpointIndex]) -> list[Tensor]:
    """The tensor of a name in each of some files; one object for files that are built alike.

    Raises:
        KeyError: a file has none.
    """
    known: dict[int, Tensor] = {}
    found = []
    for index in indexes:
        tensor = known.get(id(index.tensors))
        if tensor is None:
            tensor = known[id(index.tensors)] = index.tensors[name]
        found.append(tensor)
    return found


class TensorTable(Mapping[str, Tensor]):
    """Tensors by name, in the order in which they were added."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._kinds: list[_Kind] = []
        self._numbers: dict[_Kind, int] = {}
        self._kind_of = array("I")
        self._offsets = array("Q")
        self._sizes = array("Q")
        # Extents of the few that have several.
        self._pieced: dict[int, _Extents] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], dims: tuple[int, ...], extents: _Extents) -> None:
        """Add a tensor, with the attributes of `Tensor`, whose name is new."""
        place = len(self._places)
        self._places[name] = place
        kind = (dtype, shape, dims)
        number = self._numbers.setdefault(kind, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        self._kind_of.append(number)
        if len(extents) > 1:
            self._pieced[place] = extents
        self._offsets.append(extents[0][0] if extents else 0)
        self._sizes.append(sum(size for _, size in extents))

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        dtype, shape, dims = self._kinds[self._kind_of[place]]
        size = self._sizes[place]
        extents = self._pieced.get(place) if self._pieced else None
        if extents is None:
            extents = ((self._offsets[place], size),) if size else ()
        return Tensor(name, dtype, shape, dims, extents, size)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._places.keys()
