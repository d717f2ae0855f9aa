"""The contents of a checkpoint file: per name a type, a shape, and ranges of bytes.

A file may hold hundreds of thousands of tensors, so `TensorTable` keeps columns and creates a `Tensor` on demand.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from typing import NamedTuple

from reshard.checkpoints.formats.dtypes import ITEM_SIZES, NO_ARRAYS, TEXT
from reshard.text.names import is_value

METADATA = "__metadata__"
"""The name of the metadata in the header of a safetensors file."""
LENGTH_SIZE = 8
"""Bytes of the length before this header."""
LONGEST_HEADER = 100_000_000
"""Maximum bytes of this header, as in the library."""


class Tensor(NamedTuple):
    """One entry of a checkpoint file.

    Attributes:
        name: parameter name.
        dtype: MindSpore's name of the element type; ``"str"`` is text, ``"MapTensor"`` a map tensor.
        shape: logical shape in elements; () for scalars, text and map tensors.
        dims: shape as the file records it: a `.ckpt` may record a scalar as [0], and text always is.
        extents: (offset, size) pairs, in bytes of the file; joined they are the tensor in C order.
        nbytes: sum of the extents' sizes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    extents: tuple[tuple[int, int], ...]
    nbytes: int

    @property
    def item_size(self) -> int:
        """Bytes of one element; for a type of unknown size, bytes divided by elements."""
        elements = math.prod(self.shape)
        return self.nbytes // elements if elements else ITEM_SIZES.get(self.dtype, 1)

    @property
    def header(self) -> tuple[str, tuple[int, ...], int]:
        """Type, shape and bytes, which must agree before contents are compared."""
        return self.dtype, self.shape, self.nbytes

    def same_type(self, other: Tensor) -> bool:
        """Whether two tensors have elements of one type; a type of unknown size needs elements to compare sizes."""
        if self.dtype != other.dtype:
            return False
        return self.item_size == other.item_size or not (math.prod(self.shape) and math.prod(other.shape))

    @property
    def elements(self) -> int:
        """Its number of elements; text and map tensors count as one."""
        return 1 if self.dtype in NO_ARRAYS else math.prod(self.shape)

    @property
    def is_value(self) -> bool:
        """Whether it is a counter, a learning rate or similar, by its name."""
        return is_value(self.name, self.elements)


class CheckpointIndex(NamedTuple):
    """The contents of one checkpoint file, from its headers alone.

    Attributes:
        path: the file.
        format: ``"ckpt"`` or ``"safetensors"``.
        size: bytes of the file at the time of reading.
        tensors: every entry by name, in the order of their contents. May be empty: a de-duplicated save writes an
            empty file for a rank without slices.
        crc: the recorded CRC, or None.
        metadata: the metadata of a safetensors file; empty for a `.ckpt`.
        archived: its tensors may be entries of archives, each with a CRC of its own.
    """

    path: str
    format: str
    size: int
    tensors: Mapping[str, Tensor]
    crc: int | None = None
    metadata: Mapping[str, str] = {}
    archived: bool = False

    @property
    def checkable(self) -> bool:
        """Whether the file records checksums of all contents: a CRC."""
        return self.crc is not None

    @property
    def check_bytes(self) -> int:
        """Bytes to read to check it, or its tensors in archives."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) if self.archived else self.size

    def extents(self) -> Iterator[tuple[int, int]]:
        """The (offset, size) pairs of all contents, ascending."""
        return (extent for tensor in self.tensors.values() for extent in tensor.extents if extent[1])


def unchecked(indexes: Iterable[CheckpointIndex], checked: set[object]) -> list[CheckpointIndex]:
    """Files with checksums, archives with their tensors, that are not in ``checked``; they are added to it."""
    new = []
    for index in indexes:
        if index.archived:
            tensors = {
                name: tensor for name, tensor in index.tensors.items() if (index.path, tensor.extents) not in checked
            }
            checked.update((index.path, tensor.extents) for tensor in tensors.values())
            if tensors:
                new.append(index._replace(tensors=tensors))
        elif index.checkable and index.path not in checked:
            checked.add(index.path)
            new.append(index)
    return new


def logical_shape(dtype: str, dims: Sequence[int], nbytes: int) -> tuple[int, ...]:
    """The shape for recorded dimensions.

    [0] is a scalar with content, and a tensor of shape (0,) without; text is always a scalar.
    """
    if dtype == TEXT or (tuple(dims) == (0,) and nbytes):
        return ()
    return tuple(dims)


def content_size(dtype: str, dims: Sequence[int], nbytes: int) -> int | None:
    """Bytes of a tensor by type and dimensions; None for an unknown type. With ``nbytes``, [0] is a scalar."""
    item_size = ITEM_SIZES.get(dtype)
    if item_size is None:
        return None
    return item_size * math.prod(logical_shape(dtype, dims, nbytes))


def file_ranges(extents: Sequence[tuple[int, int]], start: int, length: int) -> Iterator[tuple[int, int]]:
    """The place of a range of a tensor's bytes in its file: (offset, length) runs in order.

    ``extents`` are (offset, bytes) runs in the file, joined the tensor; ``start`` is an offset in the tensor.
    """
    if len(extents) == 1:
        yield extents[0][0] + start, length
        return
    starts = [0]
    for _, size in extents:
        starts.append(starts[-1] + size)
    number = bisect_right(starts, start) - 1
    while length > 0:
        offset, size = extents[number]
        skip = start - starts[number]
        count = min(length, size - skip)
        if count > 0:
            yield offset + skip, count
        start += count
        length -= count
        number += 1


_Extents = tuple[tuple[int, int], ...]
_Kind = tuple[str, tuple[int, ...], tuple[int, ...]]


def tensors_named(name: str, indexes: Iterable[CheckpointIndex]) -> list[Tensor]:
    """The tensor of a name in each of some files; one object for files of equal structure."""
    tensor_of: dict[int, Tensor] = {}
    tensors = []
    for index in indexes:
        tensor = tensor_of.get(id(index.tensors))
        if tensor is None:
            tensor = tensor_of[id(index.tensors)] = index.tensors[name]
        tensors.append(tensor)
    return tensors


def files_alike(indexes: Mapping[int, CheckpointIndex]) -> list[list[int]]:
    """The numbers of files, ascending, grouped by equal structure: such files share their tensors."""
    groups: dict[int, list[int]] = {}
    for number, index in sorted(indexes.items()):
        groups.setdefault(id(index.tensors), []).append(number)
    return list(groups.values())


class TensorTable(Mapping[str, Tensor]):
    """Tensors by name, in the order of addition."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._kinds: list[_Kind] = []
        self._numbers: dict[_Kind, int] = {}
        self._kind_of = array("I")
        self._offsets = array("Q")
        self._sizes = array("Q")
        # Extents of tensors with several.
        self._pieced: dict[int, _Extents] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], dims: tuple[int, ...], extents: _Extents) -> None:
        """Add a tensor with a new name; the arguments are the attributes of `Tensor`."""
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
        return self._places.keys()
