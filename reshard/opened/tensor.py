"""A tensor of an opened checkpoint: shape and type from headers, elements read on demand.

Indices are NumPy's basic ones: integers, slices with any step, ``...`` and None. Along each dimension, an index
selects positions at equal distances. After reading, another index reverses or drops dimensions of the array.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import DTYPES, TEXT
from reshard.checkpoints.formats.elements import numpy_dtype
from reshard.execute.reader import CHUNK_BYTES, BoxReader
from reshard.layout import Box, boxes_of_range, volume_of
from reshard.plan.pieces import TargetTensor

if TYPE_CHECKING:
    from reshard.opened.checkpoint import OpenedCheckpoint, TensorEntry

Array = npt.NDArray[Any]

_UNSIGNED = (1, 2, 4, 8)
# Text is UTF-32, as in NumPy.
_CHARACTER = 4
_NO_INDEX = "only integers, slices (`:`), ellipsis (`...`) and None are valid indices of a tensor that is read lazily"


class LazyTensor:
    """A tensor that is read when it is indexed, from any number of files; for any number of threads.

    It supports NumPy's basic indices: integers, slices with any step, ``...`` and None.

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
        self._target: TargetTensor | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self._item_size

    @property
    def nbytes(self) -> int:
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
        return np.empty(shape, self.dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
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
        return list(self.shape)

    def get_dtype(self) -> str:
        """MindSpore's name of its type."""
        return self.dtype_name


def array_dtype(name: str, item_size: int) -> np.dtype[Any]:
    """The dtype of arrays of a MindSpore type; of one that is unknown here, unsigned integers or bytes of its size.

    A text is one element.
    """
    if name == TEXT:
        return np.dtype(f"<U{item_size // _CHARACTER}")
    if name in DTYPES:
        return numpy_dtype(name)
    return np.dtype(f"<u{item_size}" if item_size in _UNSIGNED else f"V{item_size}")


class ChosenAxis(NamedTuple):
    """The chosen positions of a dimension, ascending: the first one, their distance, and their number."""

    start: int
    step: int
    length: int

    @property
    def span(self) -> tuple[int, int]:
        """The first position, and one past the last."""
        return self.start, self.start + ((self.length - 1) * self.step + 1 if self.length else 0)


class Selection(NamedTuple):
    """The elements of an index.

    Attributes:
        axes: the positions per dimension of the tensor.
        finish: an index into the array of these elements, which reverses and drops dimensions.
    """

    axes: tuple[ChosenAxis, ...]
    finish: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of chosen elements, before `finish`."""
        return tuple(axis.length for axis in self.axes)

    @property
    def finished_shape(self) -> tuple[int, ...]:
        """Shape of the array after `finish`."""
        stand_in = np.broadcast_to(np.zeros((), np.uint8), self.shape)
        return np.shape(stand_in[self.finish])

    @property
    def turned(self) -> tuple[slice, ...]:
        """The part of `finish` that reverses dimensions."""
        kept = (part for part in self.finish if part is not None and part is not Ellipsis)
        return tuple(part if isinstance(part, slice) else slice(None) for part in kept)

    def part(self, box: Box) -> Selection:
        """A box of the selection, counted in the finished order; its `finish` only reverses dimensions."""
        axes = []
        for (start, step, length), (low, high), turn in zip(self.axes, box, self.turned):
            first = length - high if turn.step == -1 else low
            axes.append(ChosenAxis(start + first * step, step, high - low))
        return Selection(tuple(axes), self.turned)


def select(index: Any, shape: Sequence[int]) -> Selection:
    """The elements that an index of a tensor of this shape selects.

    Raises:
        IndexError: the index is not a basic one, or out of bounds.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    count = sum(part is not Ellipsis and part is not None for part in parts)
    ellipses = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if count > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dimensions, but {count} were indexed")
    place = ellipses[0] if ellipses else len(parts)
    parts[place : place + 1] = [slice(None)] * (len(shape) - count)
    axes: list[ChosenAxis] = []
    finish: list[Any] = []
    for part in parts:
        finishing = None
        if part is not None:
            axis, finishing = _one(part, shape[len(axes)], len(axes))
            axes.append(axis)
        finish.append(finishing)
    # As in NumPy, an ellipsis makes the result an array, even if it has one element.
    return Selection(tuple(axes), (*finish, Ellipsis) if ellipses else tuple(finish))


def _one(part: Any, size: int, number: int) -> tuple[ChosenAxis, Any]:
    """The positions along one dimension, and its part of `Selection.finish`."""
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        count = len(range(start, stop, step))
        if not count:
            return ChosenAxis(0, 1, 0), slice(None)
        if step > 0:
            return ChosenAxis(start, step, count), slice(None)
        return ChosenAxis(start + (count - 1) * step, -step, count), slice(None, None, -1)
    if isinstance(part, (bool, np.bool_)):
        raise IndexError(_NO_INDEX)
    try:
        position = operator.index(part)
    except TypeError as error:
        raise IndexError(_NO_INDEX) from error
    if not -size <= position < size:
        raise IndexError(f"index {position} is out of bounds for axis {number} with size {size}")
    return ChosenAxis(position % size, 1, 1), 0


def _read(reader: BoxReader, tensor: TargetTensor, selection: Selection, out: Array) -> None:
    """Read a selection into an array of its shape and the tensor's element size, with any strides.

    Small gaps between positions are read with them; larger ones are skipped. A box whose elements do not go to the
    array in order has at most the bytes of a block.
    """
    if math.prod(selection.shape) == 0:
        return
    shape, item_size = tensor.shape, tensor.item_size
    most, skip = reader.budget.block_bytes, reader.budget.costs.worth_skipping
    rows = [math.prod(shape[axis + 1 :]) * item_size for axis in range(len(shape))]
    pending = [(selection.axes, out)]
    while pending:
        axes, place = pending.pop()
        apart = next((a for a, axis in enumerate(axes) if _far(axis, rows[a], skip)), None)
        box = tuple(axis.span for axis in axes)
        if apart is None:
            steps = [axis.step if axis.length > 1 else 1 for axis in axes]
            if max(steps, default=1) == 1 and place.flags.c_contiguous:
                reader.read(tensor, box, place.reshape(-1).view(np.uint8).data)
                continue
            if volume_of(box) * item_size <= most or volume_of(box) == 1:
                reader.gather(tensor, box, tuple(slice(None, None, step) for step in steps), place)
                continue
            apart = next(a for a, axis in enumerate(axes) if axis.length > 1)
        # In halves, the first on top of the stack: files are read sequentially.
        half = axes[apart].length // 2
        pending += [_part(axes, place, apart, half, axes[apart].length), _part(axes, place, apart, 0, half)]


def _far(axis: ChosenAxis, row: int, skip: int) -> bool:
    """Whether positions of a dimension are so far apart that each is read separately."""
    return axis.length > 1 and axis.step > 1 and (axis.step - 1) * row > skip


def _part(
    axes: tuple[ChosenAxis, ...], out: Array, number: int, first: int, last: int
) -> tuple[tuple[ChosenAxis, ...], Array]:
    """The positions ``first`` to ``last`` of one dimension, and their place in the result."""
    start, step, _ = axes[number]
    some = ChosenAxis(start + first * step, step, last - first)
    place = (*(slice(None) for _ in axes[:number]), slice(first, last))
    return (*axes[:number], some, *axes[number + 1 :]), out[place]


def into(array: Array, selection: Selection) -> Array:
    """A view of a finished array that has the shape of the selection before `finish`.

    Raises:
        IndexError: the array has another shape.
    """
    expected = selection.finished_shape
    if array.shape != expected:
        raise IndexError(f"an array of shape {expected} is needed, not {array.shape}")
    back = {0: np.newaxis, None: 0}
    parts = [part if isinstance(part, slice) else back[part] for part in selection.finish if part is not Ellipsis]
    # With an ellipsis, the result is a view even if it has one element.
    view: Array = array[(*parts, Ellipsis)]
    return view
