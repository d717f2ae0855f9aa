"""The contents of a checkpoint file: per name a type, a shape, and a place of bytes.

A file may hold hundreds of thousands of tensors, so `TensorTable` keeps columns and makes a `Tensor` on request.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.checkpoints.formats.dtypes import ITEM_SIZES, NO_ARRAYS, TEXT
from reshard.errors import CheckpointError
from reshard.storage.other_files import GCM
from reshard.text.names import is_value
from reshard.text.wording import quoted

MAX_DIMENSIONS = 30
"""NumPy 1 has arrays of 32 dimensions at the most, and elements are taken apart along further ones."""
MAX_ELEMENTS = 1 << 40
"""Elements of a tensor; sizes of 0 count as 1, as in NumPy's limits."""


def check_shape(path: str, name: str, shape: Sequence[int]) -> None:
    """Refuse a shape beyond computable sizes.

    Raises:
        CheckpointError: it has too many dimensions or elements.
    """
    if len(shape) > MAX_DIMENSIONS:
        problem = f"{len(shape)} dimensions, and reshard supports {MAX_DIMENSIONS}"
    elif math.prod(size or 1 for size in shape) > MAX_ELEMENTS:
        problem = f"the shape {list(shape)}, and reshard supports {MAX_ELEMENTS:,} elements"
    else:
        return
    raise CheckpointError(
        f"{path}: {quoted(name)} has {problem}",
        file=path,
        parameter=name,
        hint="save the checkpoint without this tensor, or with it reshaped",
    )


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

    def same_type(self, other: Tensor) -> bool:
        """Whether two tensors have elements of one type; without elements one of unknown size tells none."""
        if self.dtype != other.dtype:
            return False
        return self.item_size == other.item_size or not (math.prod(self.shape) and math.prod(other.shape))

    @property
    def elements(self) -> int:
        """Its number of elements; text and map tensors count as one."""
        return 1 if self.dtype in NO_ARRAYS else math.prod(self.shape)

    @property
    def is_value(self) -> bool:
        """Whether it is a counter, a learning rate or the like, by its name."""
        return is_value(self.name, self.elements)


@dataclass
class CheckpointIndex:
    """The contents of one checkpoint file, from its headers alone.

    Attributes:
        path: the file.
        format: ``"ckpt"`` or ``"safetensors"``.
        size: bytes of the file when it was read.
        tensors: every entry by name, in the order of their contents. May be empty: a de-duplicated save writes a file
            without entries for a rank that has nothing to save.
        crc: the CRC that the file records, or None.
        metadata: the metadata of a safetensors file; empty for a `.ckpt`.
        cipher: MindSpore's name of the encryption; None without.
        archived: its tensors are archives, each with a CRC of its own, which takes a pass over all contents to check.
    """

    path: str
    format: str
    size: int
    tensors: Mapping[str, Tensor]
    crc: Optional[int] = None
    metadata: dict[str, str] = field(default_factory=dict)
    cipher: Optional[str] = None
    archived: bool = False

    @property
    def checkable(self) -> bool:
        """Whether the file records checksums of all contents: a CRC, or encryption tags."""
        return self.crc is not None or self.cipher == GCM

    def extents(self) -> Iterator[tuple[int, int]]:
        """The (offset, size) pairs of all contents, ascending."""
        return (extent for tensor in self.tensors.values() for extent in tensor.extents if extent[1])


def logical_shape(dtype: str, dims: Sequence[int], nbytes: int) -> tuple[int, ...]:
    """The shape that recorded dimensions mean.

    Args:
        dtype: element type; text is always a scalar.
        dims: dimensions as recorded. [0] with content is a scalar, without content a tensor of
            shape (0,).
        nbytes: size of the content.
    """
    if dtype == TEXT or (tuple(dims) == (0,) and nbytes):
        return ()
    return tuple(dims)


def content_size(dtype: str, dims: Sequence[int], nbytes: int) -> Optional[int]:
    """Bytes of a tensor by type and dimensions; None if unknown.

    Args:
        dtype: element type, known or not.
        dims: dimensions as recorded.
        nbytes: size of the content; decides what [0] means.
    """
    item_size = ITEM_SIZES.get(dtype)
    if item_size is None:
        return None
    return item_size * math.prod(logical_shape(dtype, dims, nbytes))


def file_ranges(extents: Sequence[tuple[int, int]], start: int, length: int) -> Iterator[tuple[int, int]]:
    """The place of a range of a tensor's bytes in its file: (offset, length) runs in order.

    Args:
        extents: (offset, bytes) runs that make up the tensor.
        start: first byte, counted from the tensor's first.
        length: bytes.
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
