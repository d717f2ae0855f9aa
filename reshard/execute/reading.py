"""Byte ranges of source files, through explicit reads or memory maps.

Both readers offer the same two methods. Explicit reads are the default: a file that shrinks while it
is read gives an error, where a process that has it mapped is killed, and no page fault costs a round
trip. Memory maps let NumPy gather strided rows without reading what lies between; for files that
nobody writes to.
"""

from __future__ import annotations

import errno
import mmap
from collections import OrderedDict, deque
from typing import NamedTuple, Optional, Protocol

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles, cut_short, reading_error
from reshard.checkpoints.formats.tensors import file_ranges
from reshard.errors import ReshardError, RetryableError
from reshard.execute.casts import Overflowed, Words, cast_words
from reshard.plan.pieces import StoredSlice
from reshard.storage import fill, is_read_only
from reshard.storage.costs import LOCAL, Storage

Bytes = npt.NDArray[np.uint8]

# After this many bytes through maps of all threads pages are given back, so that resident memory stays flat.
_GIVE_BACK = 64 << 20
_LEAST_GIVEN_BACK = 4 << 20
# A look at a few bytes brings in their page, of up to 64 KiB, or as much of smaller ones around it.
_AROUND = 64 << 10
_MAPS = 64
_MOST_WINDOWS = 32
_MOST_REMOTE_WINDOWS = 256
# Where many threads share little memory their windows are smaller than the storage would like, down to this.
_LEAST_WINDOW = 256 << 10
# ... and where many files take turns, as when they are joined, down to this where a request takes a round trip.
_SMALLEST_WINDOW = 4 << 10


class ChosenIo(NamedTuple):
    """How sources are read.

    Attributes:
        way: ``pread`` or ``mmap``.
        why: the reason, as the end of a sentence.
    """

    way: str
    why: str


def choose_io(asked: str, storage: Storage) -> ChosenIo:
    """How to read sources.

    On local disks maps take between 0.8 and 1.1 of the time of explicit reads (`benchmarks/io.py`), within what runs
    differ by: too little for what they risk.

    Args:
        asked: ``auto``, ``mmap`` or ``pread``.
        storage: what the source files lie on.
    """
    if asked == "pread":
        return ChosenIo("pread", "as asked for")
    if not storage.mappable:
        return ChosenIo("pread", "as nothing can be mapped in an object store")
    if asked == "mmap":
        return ChosenIo("mmap", "as asked for")
    if storage.remote:
        return ChosenIo("pread", "as mmap would take a round trip for each page")
    return ChosenIo("pread", "as mmap is hardly quicker on a local disk, and ends the run if a file becomes shorter")


class ByteReader(Protocol):
    """Reads bytes of stored slices; offsets count from the slice's first byte.

    Attributes:
        worth_skipping: a request costs about as much as reading this many bytes that are not needed.
    """

    worth_skipping: int

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on.

        Raises:
            RetryableError: the file vanished, shrank or cannot be read.
        """

    def view(self, source: StoredSlice, start: int, length: int) -> Optional[Bytes]:
        """The bytes as they lie in memory, or None where they have to be read."""


class ExplicitReader:
    """Reads with `pread`, in the requests it is given; for one thread.

    Small tensors lie close together, and a request costs as much as copying many of them, so small
    requests are answered from windows of the file that are kept for a while. Where one that answered a
    single request before there was no room for it any more is asked for again, more and smaller ones are kept.

    Args:
        handles: open source files.
        storage: what they lie on.
        window_bytes: memory for windows; room for one there is always.
    """

    def __init__(self, handles: FileHandles, storage: Storage = LOCAL, window_bytes: int = 1 << 20) -> None:
        self.worth_skipping = storage.worth_skipping
        self._handles = handles
        self._window_size = min(storage.window, max(_LEAST_WINDOW, window_bytes))
        self._small = min(storage.small, self._window_size)
        self._smallest = _SMALLEST_WINDOW if storage.remote else self._window_size
        self._window_bytes = window_bytes
        # By file, and where in it they begin.
        self._windows: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._held = 0
        # Files of the last small requests, of each of which a window should stay.
        self._most = _MOST_REMOTE_WINDOWS if storage.remote else _MOST_WINDOWS
        self._files: deque[str] = deque(maxlen=self._most)

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on."""
        done = 0
        for offset, length in file_ranges(source.extents, start, len(out)):
            part = out[done : done + length]
            if length > self._small or not self._read_small(source, offset, part):
                self._read(source, offset, part)
            done += length

    def _read_small(self, source: StoredSlice, offset: int, out: memoryview) -> bool:
        """Fill ``out`` from a window; False where it does not lie in one."""
        self._files.append(source.path)
        size = self._size_of_windows(len(out))
        number, inside = divmod(offset, size)
        if inside + len(out) > size:
            return False
        key = (source.path, size, number)
        window = self._windows.get(key)
        if window is None:
            try:
                with self._handles.borrow(source.path) as file:
                    window = file.read(number * size, size)
            except OSError as error:
                raise unreadable(source, error) from error
            self._windows[key] = window
            self._held += len(window)
            while len(self._windows) > 1 and (self._held > self._window_bytes or len(self._windows) > self._most):
                _, dropped = self._windows.popitem(last=False)
                self._held -= len(dropped)
        if inside + len(out) > len(window):
            return False
        out[:] = window[inside : inside + len(out)]
        return True

    def _size_of_windows(self, wanted: int) -> int:
        """Bytes of a window: where files take turns, each needs its own, or none would be used twice."""
        size = self._window_size
        files = len(set(self._files))
        while files * size > self._window_bytes and size // 2 >= max(wanted, self._smallest):
            size //= 2
        return size

    def view(self, source: StoredSlice, start: int, length: int) -> Optional[Bytes]:
        """Always None: there is nothing to look at before it is read."""
        return None

    def _read(self, source: StoredSlice, offset: int, out: memoryview) -> None:
        try:
            with self._handles.borrow(source.path) as file:
                fill(file, offset, out, source.rank)
        except OSError as error:
            raise unreadable(source, error) from error


class MappedReader:
    """Looks at files through memory maps, and gives their pages back; for one thread."""

    def __init__(
        self, handles: FileHandles, explicit: ByteReader, most_maps: int = _MAPS, give_back: int = _GIVE_BACK
    ) -> None:
        """Prepare.

        Args:
            handles: open files.
            explicit: for what is read.
            most_maps: files mapped at a time.
            give_back: bytes looked at after which pages are given back.
        """
        self.worth_skipping = explicit.worth_skipping
        self._handles = handles
        self._explicit = explicit
        self._maps = _Maps(most_maps, give_back)

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on."""
        # A contiguous run is copied once either way, and a read spares the page faults.
        self._explicit.read_into(source, start, out)

    def view(self, source: StoredSlice, start: int, length: int) -> Optional[Bytes]:
        """The bytes in the map, or None where they are not in one piece."""
        ranges = list(file_ranges(source.extents, start, length))
        if len(ranges) != 1:
            return None
        offset = ranges[0][0]
        mapped = self._maps.of(source, self._handles)
        if mapped is None:
            return None
        if offset + length > len(mapped):
            raise cut_short(source.path, source.rank)
        self._maps.look(length)
        return np.frombuffer(mapped, dtype=np.uint8, count=length, offset=offset)


class _Maps:
    """A few memory maps, least recently used first, and how much was looked at through them."""

    def __init__(self, most: int, give_back: int) -> None:
        self._most = max(1, most)
        self._give_back = give_back
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._looked_at = 0

    def of(self, source: StoredSlice, handles: FileHandles) -> Optional[mmap.mmap]:
        """The map of a file, or None where no more files can be mapped, or this one cannot."""
        found = self._maps.get(source.path)
        if found is not None:
            self._maps.move_to_end(source.path)
            return found
        try:
            with handles.borrow(source.path) as file:
                if file.descriptor is None:
                    return None
                found = mmap.mmap(file.descriptor, 0, prot=mmap.PROT_READ)
        except OSError as error:
            # Too many descriptors or maps, or a file system without: it can still be read.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV):
                return None
            raise unreadable(source, error) from error
        except ValueError as error:
            raise cut_short(source.path, source.rank) from error
        self._maps[source.path] = found
        if len(self._maps) > self._most:
            # Unmapped when its last array is gone.
            self._maps.popitem(last=False)
        return found

    def look(self, length: int) -> None:
        """Count what is about to be looked at; give all pages back when it has become much."""
        self._looked_at += length + _AROUND
        if self._looked_at >= self._give_back:
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
            self._looked_at = 0


class ElementReader:
    """Reads elements: those of quantised tensors are decoded, all others are bytes as they are stored; for one thread.

    Args:
        stored: reads stored bytes.
        overflowed: called with elements that became infinite.
    """

    def __init__(self, stored: ByteReader, overflowed: Overflowed) -> None:
        self.worth_skipping = stored.worth_skipping
        self._stored = stored
        self._overflowed = overflowed

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of elements from ``start`` on."""
        decoding = source.decoding
        if decoding is None:
            self._stored.read_into(source, start, out)
            return
        overflowed = decoding.read_into(self._stored.read_into, source, start, out, _from_float32)
        if overflowed:
            self._overflowed(decoding.name, overflowed)

    def view(self, source: StoredSlice, start: int, length: int) -> Optional[Bytes]:
        """The bytes as they lie in memory, or None where they have to be read."""
        return None if source.decoding is not None else self._stored.view(source, start, length)


def _from_float32(words: Words, dtype: str) -> Words:
    return cast_words(words, "Float32", dtype)


def make_reader(
    storage: Storage,
    mapped: bool,
    handles: FileHandles,
    window_bytes: int,
    most_maps: int,
    threads: int = 1,
    overflowed: Overflowed = lambda name, count: None,
) -> ByteReader:
    """A reader for one thread.

    Args:
        storage: what the source files lie on.
        mapped: look at files through memory maps where that spares copying.
        handles: open source files.
        window_bytes: memory for windows, in which small requests are answered.
        most_maps: files mapped at a time; a map holds a descriptor.
        threads: how many threads have a reader.
        overflowed: called with elements that become infinite where they are decoded.
    """
    reader: ByteReader = ExplicitReader(handles, storage, window_bytes)
    if mapped:
        reader = MappedReader(handles, reader, min(_MAPS, most_maps), max(_LEAST_GIVEN_BACK, _GIVE_BACK // threads))
    return ElementReader(reader, overflowed)


def unreadable(source: StoredSlice, error: Exception) -> ReshardError:
    """The error for a file that cannot be read any more."""
    if isinstance(error, OSError) and is_read_only(error):
        return reading_error(source.path, error)
    return RetryableError(
        f"{source.path}: cannot be read (rank {source.rank}): {error}", file=source.path, rank=source.rank
    )
