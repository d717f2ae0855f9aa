"""A tensor of an opened checkpoint: shape and type from headers, elements read on demand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import DTYPES, TEXT
from reshard.checkpoints.formats.elements import numpy_dtype
from reshard.execute.reader import CHUNK_BYTES, BoxReader
from reshard.layout import boxes_of_range
from reshard.opened.contents import TensorEntry
from reshard.opened.indexing import Selection, into, readings, select
from reshard.plan.pieces import TargetTensor

if TYPE_CHECKING:
    from reshard.opened.checkpoint import OpenedCheckpoint

Array = npt.NDArray[Any]

_UNSIGNED = (1, 2, 4, 8)
# Text is UTF-32, as in NumPy.
_CHARACTER = 4


class LazyTensor:
    """A tensor that is read when it is indexed, from any number of files; for any number of threads.

    It supports NumPy's basic indices: integers, slices with any step, ``...`` and None.

    Args:
        owner: the opened checkpoint.
        entry: name, type and shape.

    Attributes:
        name: its name.
        shape: elements per dimension.
        dtype: dtype of its arrays; types that NumPy lacks are those of the package ml_dtypes.
        dtype_name: MindSpore's name of the type, such as ``BFloat16``.
    """

    def __init__(self, owner: OpenedCheckpoint, entry: TensorEntry) -> None:
        self.name = entry.name
        self.shape = entry.shape
        self.dtype_name = entry.dtype
        self.dtype: np.dtype[Any] = array_dtype(entry.dtype, entry.item_size)
        self._owner = owner
        self._item_size = entry.item_size
        self._target: Optional[TargetTensor] = None

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._item_size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self._item_size

    @property
    def target(self) -> TargetTensor:
        """Its stored pieces, for reading in other blocks."""
        if self._target is None:
            self._target = self._owner.target(self.name)
        return self._target

    def __getitem__(self, index: Any) -> Any:
        """The array of an index, as in NumPy; a scalar if every dimension has a position.

        Raises:
            IndexError: the index is not a basic one, or out of bounds.
            ReshardError: a file cannot be read.
        """
        selection = select(index, self.shape)
        array = self.empty(selection.shape)
        _read(self._owner.reader, self.target, selection, array)
        return array[selection.finish]

    def read_into(self, array: Array, index: Any = ...) -> None:
        """Read into an array; without another copy if it is in C order.

        Args:
            array: has the shape of ``tensor[index]`` and the tensor's dtype.
            index: elements to read, by default all.

        Raises:
            IndexError: the array has another shape.
            TypeError: it has another type, or is read-only.
            ReshardError: a file cannot be read; the array's content is then undefined.
        """
        selection = select(index, self.shape)
        if array.dtype != self.dtype:
            raise TypeError(f"{self.name} is {self.dtype_name}: an array of {self.dtype} is needed, not {array.dtype}")
        if not array.flags.writeable:
            raise TypeError(f"the array for {self.name} is read-only")
        _read(self._owner.reader, self.target, selection, into(array, selection))

    def blocks(self, index: Any = ..., most: int = CHUNK_BYTES) -> Iterator[Array]:
        """The elements of ``tensor[index]`` in C order, a few at a time.

        Args:
            index: elements to read, by default all.
            most: maximum bytes of an array, or one element.

        Yields:
            Arrays of one dimension, each the caller's own.

        Raises:
            IndexError: the index is not a basic one, or out of bounds.
            ReshardError: a file cannot be read.
        """
        selection = select(index, self.shape)
        turned = selection.turned
        target, reader = self.target, self._owner.reader
        count = math.prod(selection.shape)
        for box in boxes_of_range(selection.shape, 0, count, max(1, most // max(1, self._item_size))):
            part = selection.part(box)
            array = self.empty(part.shape)
            _read(reader, target, part, array)
            yield np.ascontiguousarray(array[turned]).reshape(-1)

    def empty(self, shape: tuple[int, ...]) -> Array:
        """An uninitialised array for elements of this tensor."""
        return np.empty(shape, self.dtype)

    def __array__(self, dtype: Optional[npt.DTypeLike] = None, copy: Optional[bool] = None) -> Array:
        """All of it, for `numpy.asarray`."""
        if copy is False:
            raise ValueError(f"{self.name} is in files and cannot be returned without a copy")
        array: Array = self[...]
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LazyTensor {self.name!r}: {self.dtype_name} {list(self.shape)}>"

    # Methods of the slices of safetensors.

    def get_shape(self) -> list[int]:
        """Its shape, as a list."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """MindSpore's name of its type."""
        return self.dtype_name


def _read(reader: BoxReader, tensor: TargetTensor, selection: Selection, out: Array) -> None:
    """Read a selection into an array of its shape and the tensor's element size, with any strides."""
    most, skip = reader.budget.block_bytes, reader.budget.storage.worth_skipping
    for box, chosen, part in readings(selection, tensor.shape, tensor.item_size, out, most, skip):
        if chosen is None:
            reader.read(tensor, box, part.reshape(-1).view(np.uint8).data)
        else:
            reader.gather(tensor, box, chosen, part)


def array_dtype(name: str, item_size: int) -> np.dtype[Any]:
    """The dtype of arrays of a type; of one that is unknown here, unsigned integers or plain bytes of its size.

    Args:
        name: MindSpore's name of the type.
        item_size: bytes of an element; a text is one element.
    """
    if name == TEXT:
        return np.dtype(f"<U{item_size // _CHARACTER}")
    if name in DTYPES:
        return numpy_dtype(name)
    return np.dtype(f"<u{item_size}" if item_size in _UNSIGNED else f"V{item_size}")
