"""Parts of parameters that are read to be summed, and how their bytes are read from a file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import NamedTuple, Optional, Protocol

import numpy as np

from reshard.checkpoints import FileHandles, Tensor, reading_error
from reshard.layout import Box
from reshard.storage import ReadableFile, fill

# Runs shorter than this are read with what lies between them, where that is no more than so many times as much and
# all of it so many bytes.
_SHORT, _SPARSE, _SPAN = 16 << 10, 4, 256 << 10


class Content(Protocol):
    """The bytes of a box in C order."""

    def read(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``offset`` on."""


class Readable(Protocol):
    """Elements of a parameter that can be summed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""

    @property
    def box(self) -> Box:
        """The box to sum."""

    @property
    def item_size(self) -> int:
        """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""

    @property
    def paths(self) -> Collection[str]:
        """The files that are read."""

    @property
    def like_type(self) -> Optional[str]:
        """A floating point type, where all that is no number counts as the same."""

    def of_box(self, box: Box) -> Readable:
        """A smaller box of it."""

    def pieces(self, memory: int) -> Iterable[Readable]:
        """The same in boxes that can be read with about so many bytes of memory."""

    def opened(self, handles: FileHandles, memory: int) -> Content:
        """Its bytes."""

    def with_like(self, dtype: Optional[str]) -> Readable:
        """The same with another ``like_type``."""


class Part(NamedTuple):
    """Elements of a parameter, as one file holds them; see `Readable`.

    Attributes:
        path: the file.
        tensor: the slice in it.
        shape: shape of the full parameter.
        held: the box of the parameter that the slice is.
        box: the box to sum, within ``held``.
        like_type: see `Readable`.
    """

    path: str
    tensor: Tensor
    shape: tuple[int, ...]
    held: Box
    box: Box
    like_type: Optional[str] = None

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return self.tensor.item_size

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return self.tensor.item_size * math.prod(stop - start for start, stop in self.box)

    @property
    def paths(self) -> tuple[str, ...]:
        """The file."""
        return (self.path,)

    def of_box(self, box: Box) -> Part:
        """A smaller box of it."""
        return self._replace(box=box)

    def pieces(self, memory: int) -> tuple[Part, ...]:
        """All of it: what is summed a block at a time is read so as well."""
        return (self,)

    def opened(self, handles: FileHandles, memory: int) -> BoxReader:
        """Its bytes."""
        return BoxReader(self, handles)

    def with_like(self, dtype: Optional[str]) -> Part:
        """The same with another ``like_type``."""
        return self._replace(like_type=dtype)


class BoxReader:
    """Reads the bytes of a part's box, which may be scattered over the slice, in C order."""

    def __init__(self, part: Part, handles: FileHandles) -> None:
        self._part = part
        self._handles = handles
        self._extents = part.tensor.extents
        self._ends = list(accumulate(size for _, size in self._extents))
        # The box is runs of `_run` bytes; all dimensions before the last one it cuts tell them apart.
        self._run, stride = part.tensor.item_size, part.tensor.item_size
        self._first = 0
        self._steps: list[tuple[int, int]] = []
        joined = True
        for (start, stop), (low, high) in zip(reversed(part.box), reversed(part.held)):
            self._first += (start - low) * stride
            if joined:
                self._run *= stop - start
            else:
                self._steps.append((stop - start, stride))
            joined = joined and (start, stop) == (low, high)
            stride *= high - low

    def read(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the box's bytes from ``offset`` on."""
        path = self._part.path
        try:
            with self._handles.borrow(path) as file:
                self._read(file, offset, out)
        except OSError as error:
            raise reading_error(path, error) from error

    def _read(self, file: ReadableFile, offset: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            number, inside = divmod(offset + done, self._run)
            several = 1 if inside else self._close_together(number, len(out) - done)
            if several > 1:
                length = several * self._run
                self._read_rows(file, self._start(number), out[done : done + length], several)
            else:
                length = min(self._run - inside, len(out) - done)
                self._read_stored(file, self._start(number) + inside, out[done : done + length])
            done += length

    def _close_together(self, run: int, nbytes: int) -> int:
        """How many short runs, from one on, are read faster with all that lies between them."""
        if not self._steps or self._run >= _SHORT:
            return 1
        size, stride = self._steps[0]
        if stride > _SPARSE * self._run:
            return 1
        return min(nbytes // self._run, size - run % size, _SPAN // stride)

    def _read_rows(self, file: ReadableFile, start: int, out: memoryview, count: int) -> None:
        """Fill ``out`` with so many runs that follow each other evenly."""
        stride = self._steps[0][1]
        span = bytearray(count * stride)
        used = (count - 1) * stride + self._run
        self._read_stored(file, start, memoryview(span)[:used])
        np.frombuffer(out, np.uint8).reshape(count, -1)[:] = np.frombuffer(span, np.uint8).reshape(count, -1)[
            :, : self._run
        ]

    def _start(self, run: int) -> int:
        start = self._first
        for size, stride in self._steps:
            run, position = divmod(run, size)
            start += position * stride
        return start

    def _read_stored(self, file: ReadableFile, start: int, out: memoryview) -> None:
        """Fill ``out`` with the slice's bytes from ``start`` on, through as many extents as that takes."""
        number = bisect_right(self._ends, start)
        done = 0
        while done < len(out):
            offset, size = self._extents[number]
            inside = start + done - (self._ends[number] - size)
            length = min(size - inside, len(out) - done)
            fill(file, offset + inside, out[done : done + length])
            done += length
            number += 1
