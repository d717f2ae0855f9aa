"""Files that are read as if every tensor lay at a place of its own in them, in C order.

A distributed checkpoint of PyTorch records which tensors a file holds, and not where in it their bytes are: that
is in the file, beside the bytes. So a plan takes the places that a `Placement` gives out, from metadata alone,
and where the bytes really are is looked up when they are first read.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.archives import (
    HEAD,
    Archive,
    ArchiveEntry,
    Elements,
    archived_tensor,
    archived_tensors,
    c_strides,
    check_entry,
)
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.safetensors_index import read_safetensors_index
from reshard.checkpoints.formats.tensors import Tensor
from reshard.errors import DamagedCheckpointError
from reshard.layout import Box, boxes_of_range
from reshard.storage import FileStatus, ReadableFile, costs_of, fill
from reshard.text.messages import quoted
from reshard.threads import ThreadLock

if TYPE_CHECKING:
    from reshard.checkpoints.files import FileHandles

# Limits of one read of elements out of C order: bytes, or a multiple of the requested bytes.
_SPAN_BYTES = 1 << 20
_SPAN_FACTOR = 4
_OTHER_SAVE = "the files and the metadata are not of one save: copy the checkpoint again"


class Run(NamedTuple):
    """Elements of a record, in C order, that are part of a tensor joined from several.

    Attributes:
        path: the file, which may be another one than that of the tensor.
        offset: where the record begins.
        length: bytes of the record.
        first: the first element.
        elements: how many there are.
        located: where the record's elements are; None if that is looked up when they are read.
    """

    path: str
    offset: int
    length: int
    first: int
    elements: int
    located: Elements | None = None


class Stored(NamedTuple):
    """A tensor of a file, as metadata describes it.

    Attributes:
        name: its name, for messages.
        dtype: MindSpore's name of its type.
        shape: elements per dimension.
        offset: where the record begins that holds it; 0 where the file has a header of its own.
        length: bytes of that record; -1 where the file has a header of its own.
        key: its name in the header of the file.
        data: its bytes, for a number that the file has in a pickle; None for a tensor.
        runs: the runs that it is joined from, of records of any files; empty for a record.
        strides: elements from one to the next of the joined ones, per dimension; None where they are in C order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    length: int = -1
    key: str = ""
    data: bytes | None = None
    runs: tuple[Run, ...] = ()
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Placement:
    """Places of the tensors of a file, for any number of threads.

    Args:
        path: the file.
        tensors: its tensors, records in the order of their offsets; all of them are records, or none is. Those with
            bytes of their own, or joined from runs, come last.
        located: where the elements of each are that is not such; empty if that is looked up when they are read.

    Attributes:
        size: the end of the last place.
        beside: other files with elements of its tensors.
    """

    def __init__(self, path: str, tensors: Sequence[Stored], located: Sequence[Elements] = ()) -> None:
        self.size = 0
        self.beside = frozenset(run.path for stored in tensors for run in stored.runs) - {path}
        self._path = path
        self._tensors = tensors
        self._starts = array("Q")
        self._given = located
        self._located: dict[int, Elements] = dict(enumerate(located))
        self._of_runs: dict[Run, Elements] = {}
        self._reading = ThreadLock()
        for stored in tensors:
            # So far apart as the records are, windows of the file are windows of these places.
            self._starts.append(self.size)
            self.size += max(stored.nbytes, stored.length)

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self._path, self._tensors, self._given)

    def placed(self, file: ReadableFile, handles: FileHandles) -> PlacedFile:
        return PlacedFile(file, self, handles)

    def tensors(self) -> Iterator[Tensor]:
        for stored, start in zip(self._tensors, self._starts):
            nbytes = stored.nbytes
            extents = ((start, nbytes),) if nbytes else ()
            yield Tensor(stored.name, stored.dtype, stored.shape, stored.shape, extents, nbytes)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Per tensor in a range of places its number, its first place and its bytes."""
        for number in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            if self._starts[number] >= stop:
                return
            yield number, self._starts[number], self._tensors[number].nbytes

    def around(self, first: int, last: int) -> tuple[int, int] | None:
        """From where to where the records of some tensors lie; None where they are no records."""
        begin, end = self._tensors[first], self._tensors[last]
        return None if min(begin.length, end.length) < 0 else (begin.offset, end.offset + end.length)

    def data(self, number: int) -> bytes | None:
        """The bytes of a number that the file has in a pickle; None for a tensor."""
        return self._tensors[number].data

    def joined(self, number: int, file: ReadableFile, handles: FileHandles) -> tuple[_Joined, Elements] | None:
        """The runs of a tensor as one file, and where its elements are in that; None for others.

        Raises:
            CheckpointError: a record does not hold a run.
        """
        stored = self._tensors[number]
        if not stored.runs:
            return None
        strides = c_strides(stored.shape) if stored.strides is None else stored.strides
        joined = _Joined(file, handles, [(run, self._of_run(stored, run, file, handles)) for run in stored.runs])
        return joined, Elements(stored.dtype, stored.shape, strides, 0, ArchiveEntry(0, joined.size(), None))

    def _of_run(self, stored: Stored, run: Run, file: ReadableFile, handles: FileHandles) -> Elements:
        elements = run.located or self._of_runs.get(run)
        if elements is None:
            with _stored_file(handles, run.path, file) as other:
                elements = self._of_runs[run] = archived_tensor(other, run.offset, run.length)
        count = math.prod(elements.shape)
        if elements.dtype != stored.dtype or not elements.in_order or run.first + run.elements > count:
            raise DamagedCheckpointError(
                f"{run.path}: a record of {quoted(stored.name)} has {count} elements of {elements.dtype} in the file, "
                f"and {run.first + run.elements} of {stored.dtype} by the metadata",
                file=run.path,
                parameter=stored.name,
                hint=_OTHER_SAVE,
            )
        return elements

    def locate(self, file: ReadableFile, number: int) -> Elements:
        """Where the elements of a tensor are, by its number, in the file or in a part of it that was read already.

        Raises:
            CheckpointError: nothing there is such a tensor.
        """
        elements = self._located.get(number)
        if elements is None:
            stored = self._tensors[number]
            if stored.length >= 0:
                elements = archived_tensor(file, stored.offset, stored.length)
                self._check(stored, elements)
                self._located[number] = elements
            else:
                with self._reading:
                    if number not in self._located:
                        self._located.update(enumerate(self._by_header(file)))
                elements = self._located[number]
        return elements

    def _by_header(self, file: ReadableFile) -> list[Elements]:
        """Where the elements of all tensors are, in a file with one header, whatever its name ends in."""
        keys = [stored.key for stored in self._tensors if stored.data is None]
        if file.read(0, len(HEAD)) == HEAD:
            archived = archived_tensors(file, keys)
            located = [archived[key] for key in keys]
        else:
            tensors = read_safetensors_index(file, file.size()).tensors
            located = [self._in_safetensors(tensors.get(key), key) for key in keys]
        for stored, elements in zip(self._tensors, located):
            self._check(stored, elements)
        return located

    def _in_safetensors(self, tensor: Tensor | None, key: str) -> Elements:
        if tensor is None:
            raise DamagedCheckpointError(f"{self._path}: does not hold {quoted(key)}", file=self._path, parameter=key)
        offset = tensor.extents[0][0] if tensor.extents else 0
        strides = c_strides(tensor.shape)
        return Elements(tensor.dtype, tensor.shape, strides, offset, ArchiveEntry(offset, tensor.nbytes, None))

    def _check(self, tensor: Stored, elements: Elements) -> None:
        # Megatron's local tensors have fewer dimensions than their boxes, which begin with ones.
        # For a tensor without elements, metadata lists the full shape.
        shapes = [
            [size for size in shape if size != 1] if math.prod(shape) else [0]
            for shape in (tensor.shape, elements.shape)
        ]
        if tensor.dtype != elements.dtype or shapes[0] != shapes[1]:
            raise DamagedCheckpointError(
                f"{self._path}: {quoted(tensor.name)} is {elements.dtype} {list(elements.shape)} in the file, and "
                f"{tensor.dtype} {list(tensor.shape)} by the metadata",
                file=self._path,
                parameter=tensor.name,
                hint=_OTHER_SAVE,
            )

    def check(
        self,
        file: ReadableFile,
        handles: FileHandles,
        tensors: Iterable[Tensor],
        block_bytes: int,
        on_block: Callable[[int], None],
    ) -> None:
        """Compare the bytes of tensors with the CRCs beside them, where there are any, and records as a whole.

        Args:
            file: the file.
            handles: open files, for records in other files.
            tensors: the tensors, of these places.
            block_bytes: bytes to read at a time; several small records are read at once.
            on_block: called with the bytes checked since the last time.
        """
        numbers = sorted(bisect_right(self._starts, tensor.extents[0][0]) - 1 for tensor in tensors if tensor.nbytes)
        buffer = memoryview(bytearray(block_bytes))
        self._check_runs(file, handles, numbers, buffer, on_block)
        numbers = [at for at in numbers if self._tensors[at].data is None and not self._tensors[at].runs]
        checked: set[ArchiveEntry] = set()
        near, stop = file, 0
        for at, number in enumerate(numbers):
            begin, end = self.around(number, number) or (0, 0)
            if end > stop:
                for last in numbers[at + 1 :]:
                    if self._tensors[last].offset + self._tensors[last].length - begin > block_bytes:
                        break
                    end = self._tensors[last].offset + self._tensors[last].length
                near, stop = (_Ahead(file, begin, end), end) if end - begin <= block_bytes else (file, end)
            entry, stored = self.locate(near, number).entry, self._tensors[number]
            with _naming(stored, self._path):
                if stored.length >= 0:
                    Archive(near, stored.offset, stored.length).check(buffer, on_block)
                # Tensors may share a storage.
                elif entry not in checked and not check_entry(near, entry, buffer, on_block):
                    raise DamagedCheckpointError(f"{self._path}: is damaged: the CRC-32 of its storage is another one")
            checked.add(entry)

    def _check_runs(
        self,
        file: ReadableFile,
        handles: FileHandles,
        numbers: Sequence[int],
        buffer: memoryview,
        on_block: Callable[[int], None],
    ) -> None:
        """Check the records that tensors are joined from, each once; bytes of the tensors are counted."""
        checked: set[tuple[str, int]] = set()
        for stored in (self._tensors[number] for number in numbers):
            for run in stored.runs:
                if (run.path, run.offset) in checked:
                    continue
                checked.add((run.path, run.offset))
                with _naming(stored, run.path), _stored_file(handles, run.path, file) as other:
                    Archive(other, run.offset, run.length).check(buffer, lambda count: on_block(0))
            if stored.runs:
                on_block(stored.nbytes)


class PlacedFile:
    """A file, read by the places of its tensors; zeros between them.

    Attributes:
        stored: the file as it is stored.
    """

    descriptor: int | None = None

    def __init__(self, file: ReadableFile, placement: Placement, handles: FileHandles) -> None:
        self.path = file.path
        self.stored = file
        self._placement = placement
        self._handles = handles

    def size(self) -> int:
        return self._placement.size

    def status(self) -> FileStatus:
        return self.stored.status()

    def read(self, offset: int, count: int) -> bytes:
        out = memoryview(bytearray(max(0, min(count, self._placement.size - offset))))
        self.read_into(offset, out)
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> int:
        stop = min(offset + len(out), self._placement.size)
        parts = list(self._placement.within(offset, stop))
        file = self._near(parts, stop - offset) if len(parts) > 1 else self.stored
        position = offset
        for number, start, nbytes in parts:
            begin, end = max(start, offset), min(start + nbytes, stop)
            if begin >= end:
                continue
            out[position - offset : begin - offset] = bytes(begin - position)
            self._copy(file, number, begin - start, out[begin - offset : end - offset])
            position = end
        out[position - offset : stop - offset] = bytes(stop - position)
        return stop - offset

    def _near(self, parts: Sequence[tuple[int, int, int]], count: int) -> ReadableFile:
        """The file, with several small records of it read at once."""
        span = self._placement.around(parts[0][0], parts[-1][0])
        if span is None or not 0 < span[1] - span[0] <= max(_SPAN_BYTES, _SPAN_FACTOR * count):
            return self.stored
        return _Ahead(self.stored, *span)

    def _copy(self, file: ReadableFile, number: int, inside: int, out: memoryview) -> None:
        """Fill ``out`` with bytes of a tensor, from one of them on."""
        data = self._placement.data(number)
        if data is not None:
            out[:] = data[inside : inside + len(out)]
            return
        joined = self._placement.joined(number, self.stored, self._handles)
        file, elements = joined or (file, self._placement.locate(file, number))
        if elements.in_order:
            fill(file, elements.offset + inside, out)
            return
        # Whole elements, of which the first and the last may stand out.
        item = ITEM_SIZES[elements.dtype]
        first, last = inside // item, -(-(inside + len(out)) // item)
        boxes = boxes_of_range(elements.shape, first, last, last - first)
        chunk = b"".join(_box(file, elements, box, item).tobytes() for box in boxes)
        out[:] = chunk[inside - first * item : inside - first * item + len(out)]

    def located(self, place: int) -> Elements:
        """Where the elements of the tensor are in the file that begins at a place."""
        return self._placement.locate(self.stored, next(self._placement.within(place, place + 1))[0])

    def locate_all(self) -> None:
        for number, _, _ in self._placement.within(0, self._placement.size + 1):
            if self._placement.data(number) is None and not self._placement.joined(number, self.stored, self._handles):
                self._placement.locate(self.stored, number)

    def check(self, tensors: Iterable[Tensor], block_bytes: int, on_block: Callable[[int], None]) -> None:
        self._placement.check(self.stored, self._handles, tensors, block_bytes, on_block)


@contextlib.contextmanager
def _naming(stored: Stored, path: str) -> Iterator[None]:
    """Add the name of a tensor to the error of damage in a file."""
    try:
        yield
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{error.message} (tensor {quoted(stored.name)})", file=path, parameter=stored.name
        ) from error


@contextlib.contextmanager
def _stored_file(handles: FileHandles, path: str, file: ReadableFile) -> Iterator[ReadableFile]:
    """A file as it is stored; ``file`` if it is that."""
    if path == file.path:
        yield file
        return
    with handles.borrow(path) as other:
        yield other.stored if isinstance(other, PlacedFile) else other


class _Joined:
    """Runs of records, one after the other, as a file."""

    descriptor: int | None = None

    def __init__(self, file: ReadableFile, handles: FileHandles, runs: Sequence[tuple[Run, Elements]]) -> None:
        self.path = file.path
        self._file = file
        self._handles = handles
        # Per run its file and its first byte there; and where each begins here.
        self._places: list[tuple[str, int]] = []
        self._starts = [0]
        for run, elements in runs:
            item = ITEM_SIZES[elements.dtype]
            self._places.append((run.path, elements.offset + run.first * item))
            self._starts.append(self._starts[-1] + run.elements * item)

    def size(self) -> int:
        return self._starts[-1]

    def status(self) -> FileStatus:
        return self._file.status()

    def read(self, offset: int, count: int) -> bytes:
        out = memoryview(bytearray(max(0, min(count, self.size() - offset))))
        return bytes(out[: self.read_into(offset, out)])

    def read_into(self, offset: int, out: memoryview) -> int:
        position, stop = offset, min(offset + len(out), self.size())
        while position < stop:
            number = bisect_right(self._starts, position) - 1
            path, place = self._places[number]
            end = min(stop, self._starts[number + 1])
            first, part = place + position - self._starts[number], out[position - offset : end - offset]
            if path == self.path:
                fill(self._file, first, part)
            else:
                with _stored_file(self._handles, path, self._file) as file:
                    fill(file, first, part)
            position = end
        return max(0, stop - offset)


class _Ahead:
    """A file of which some bytes were read already."""

    descriptor: int | None = None

    def __init__(self, file: ReadableFile, start: int, stop: int) -> None:
        self.path = file.path
        self._file = file
        self._start = start
        self._data = memoryview(bytearray(stop - start))
        fill(file, start, self._data)

    def size(self) -> int:
        return self._file.size()

    def status(self) -> FileStatus:
        return self._file.status()

    def read(self, offset: int, count: int) -> bytes:
        inside = offset - self._start
        if inside >= 0 and inside + count <= len(self._data):
            return bytes(self._data[inside : inside + count])
        return self._file.read(offset, count)

    def read_into(self, offset: int, out: memoryview) -> int:
        inside = offset - self._start
        if inside >= 0 and inside + len(out) <= len(self._data):
            out[:] = self._data[inside : inside + len(out)]
            return len(out)
        return self._file.read_into(offset, out)


def _box(file: ReadableFile, elements: Elements, box: Box, item: int) -> npt.NDArray[Any]:
    """The elements of a box, each as one word of its size, in the shape of the box."""
    shape = [stop - start for start, stop in box]
    strides = [0 if size == 1 else stride for size, stride in zip(shape, elements.strides)]
    far: list[int] = []
    limit = max(_SPAN_BYTES, _SPAN_FACTOR * math.prod(shape) * item)
    if _span(shape, strides, far, item) > _SPAN_FACTOR * math.prod(shape) * item:
        # Requests cost less than most of what lies between these elements.
        worth_skipping = costs_of(file.path).worth_skipping
        far = [dimension for dimension, stride in enumerate(strides) if stride * item > worth_skipping]
    span = _span(shape, strides, far, item)
    counts = [shape[dimension] for dimension in far]
    if span * math.prod(counts) > limit:
        widest = max(range(len(shape)), key=lambda dimension: strides[dimension])
        start, stop = box[widest]
        middle = (start + stop) // 2
        halves = ((*box[:widest], part, *box[widest + 1 :]) for part in ((start, middle), (middle, stop)))
        return np.concatenate([_box(file, elements, half, item) for half in halves], widest)
    first = elements.offset + sum(start * stride for (start, _), stride in zip(box, elements.strides)) * item
    data = np.empty((*counts, span), np.uint8)
    for place in np.ndindex(*counts):
        offset = sum(number * strides[dimension] for number, dimension in zip(place, far)) * item
        fill(file, first + offset, data[place].data)
    steps = [stride * item for stride in strides]
    for dimension, step in zip(far, data.strides):
        steps[dimension] = step
    # Words, not rows of bytes: they are copied much faster.
    words = np.dtype(f"u{item}") if item in (1, 2, 4, 8) else np.dtype(f"V{item}")
    return np.ndarray(shape, words, data, strides=steps)


def _span(shape: Sequence[int], strides: Sequence[int], far: Sequence[int], item: int) -> int:
    """Bytes from the first element to the last, without some dimensions."""
    near = (dimension for dimension in range(len(shape)) if dimension not in far)
    return (1 + sum((shape[dimension] - 1) * strides[dimension] for dimension in near)) * item
