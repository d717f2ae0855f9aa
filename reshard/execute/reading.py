"""Byte ranges of source files, through explicit reads or memory maps.

Both readers have the same two methods. Explicit reads are the default: a file that shrinks while it is read is an
error, while a process that has it mapped is killed; and no page fault costs a round trip. Memory maps let NumPy gather
strided rows without reading the gaps; they are for files that no process writes to.
"""

from __future__ import annotations

import errno
import mmap
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Protocol

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.tensors import file_ranges
from reshard.errors import ReshardError, RetryableError, is_read_only
from reshard.execute.runs import NEVER
from reshard.plan.pieces import StoredSlice
from reshard.storage import between, cut_short, fill, reading_error, scatter
from reshard.storage.costs import LOCAL, Storage

if TYPE_CHECKING:
    from reshard.execute.casts import Overflowed

# Bytes read through maps of all threads before their pages are released, so that resident memory stays flat.
_RELEASE_AFTER = 64 << 20
_MIN_RELEASED = 4 << 20
# Bytes that a page fault brings in around the bytes that are read.
_AROUND = 64 << 10
_MAX_MAPS = 64
_MAX_WINDOWS = 32
_MAX_REMOTE_WINDOWS = 256
MIN_DECODING_BYTES = 4 << 10
"""Minimum memory in which a thread decodes quantised elements."""
# Minimum bytes of pieces that the kernel copies to their places; NumPy gathers shorter ones. A read of 1 MiB to places
# of 256 B, 512 B, 1, 2, 4 and 16 KiB takes 0.32, 0.26, 0.25, 0.22, 0.18 and 0.18 ns per byte; a read and a gather
# take 0.22 ns, and 0.24 to 0.28 ns in blocks of 8 MiB. Without NumPy, a process starts 0.04 s earlier.
MIN_PIECE = 1 << 10

# Minimum size of windows where many threads share little memory.
_MIN_WINDOW = 256 << 10
# Minimum size of windows on remote storage where many files are read in turns, as when they are joined.
_MIN_REMOTE_WINDOW = 4 << 10


def new_buffer(nbytes: int) -> memoryview:
    """A buffer that is filled from files and written to files.

    It begins with a page: the kernel copies up to three times slower where the target begins a few bytes behind the
    source, counted within a page. NumPy's memory begins 16 bytes behind a page, bytes of files often at one.
    """
    # Private: a process that forks must not share it with its child.
    return memoryview(mmap.mmap(-1, max(1, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]


class ChosenIo(NamedTuple):
    """The way in which sources are read.

    Attributes:
        way: ``pread`` or ``mmap``.
        why: the reason, as the end of a sentence.
    """

    way: str
    why: str


def choose_io(requested: str, storage: Storage) -> ChosenIo:
    """The way in which to read sources.

    On local disks maps take 0.8 to 1.1 of the time of explicit reads (`benchmarks/io.py`). Runs differ as much, so
    maps are not worth their risk: a file that becomes shorter ends the run.

    Args:
        requested: ``auto``, ``mmap`` or ``pread``.
        storage: storage of the source files.
    """
    if requested == "pread":
        return ChosenIo("pread", "as requested")
    if not storage.mappable:
        return ChosenIo("pread", "as nothing can be mapped in an object store")
    if requested == "mmap":
        return ChosenIo("mmap", "as requested")
    if storage.remote:
        return ChosenIo("pread", "as mmap would take a round trip for each page")
    return ChosenIo("pread", "as mmap is hardly quicker on a local disk")


class ByteReader(Protocol):
    """Reads bytes of stored slices; offsets count from the slice's first byte.

    Attributes:
        worth_skipping: bytes whose reading costs as much as a request; longer gaps are skipped.
    """

    worth_skipping: int

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on.

        Raises:
            RetryableError: the file vanished, shrank or cannot be read.
        """

    def view(self, source: StoredSlice, start: int, length: int) -> Optional[memoryview]:
        """The bytes in a memory map, or None where they have to be read."""


class FileReader(ByteReader, Protocol):
    """Reads files, also to places that are far apart in memory, in one request."""

    def min_piece(self, source: StoredSlice) -> int:
        """The minimum bytes of a place for which `scatter` is fast."""

    def scatter(self, source: StoredSlice, start: int, outs: Sequence[memoryview], nbytes: int) -> None:
        """As `read_into`, several buffers one after the other, of ``nbytes`` together."""


class ExplicitReader:
    """Reads with `pread`, a request for each call; for one thread.

    Small tensors are close together in files, and a request costs as much as copying many of them. So small reads are
    copied from windows of the file, which are cached. Where more files are read in turns than windows fit the memory,
    windows are smaller.

    Args:
        handles: open source files.
        storage: storage of the files.
        window_bytes: memory for windows; one window is always cached.
    """

    def __init__(self, handles: FileHandles, storage: Storage = LOCAL, window_bytes: int = 1 << 20) -> None:
        self.worth_skipping = storage.worth_skipping
        self._min_piece = NEVER if storage.remote else MIN_PIECE
        self._handles = handles
        self._window_size = min(storage.window, max(_MIN_WINDOW, window_bytes))
        self._small = min(storage.small, self._window_size)
        self._smallest = _MIN_REMOTE_WINDOW if storage.remote else self._window_size
        self._window_bytes = window_bytes
        # By file, size of windows, and number of the window in the file.
        self._windows: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._cached_bytes = 0
        # Files of the last small reads: a window of each should be cached.
        self._max_windows = _MAX_REMOTE_WINDOWS if storage.remote else _MAX_WINDOWS
        self._files: deque[str] = deque(maxlen=self._max_windows)

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on."""
        self.scatter(source, start, [out], len(out))

    def min_piece(self, source: StoredSlice) -> int:
        """The minimum bytes of a place; only local files have it, unless they are decoded."""
        return self._min_piece if self._handles.as_stored(source.path) else NEVER

    def scatter(self, source: StoredSlice, start: int, outs: Sequence[memoryview], nbytes: int) -> None:
        """Fill buffers one after the other."""
        first = 0
        for offset, length in file_ranges(source.extents, start, nbytes):
            parts = outs if length == nbytes else between(outs, first, first + length)
            if length > self._small or not self._read_small(source, offset, parts, length):
                self._read(source, offset, parts, length)
            first += length

    def _read_small(self, source: StoredSlice, offset: int, outs: Sequence[memoryview], nbytes: int) -> bool:
        """Fill buffers from a window; False if the bytes are not in one window."""
        self._files.append(source.path)
        size = self._size_of_windows(nbytes)
        number, inside = divmod(offset, size)
        if inside + nbytes > size:
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
            self._cached_bytes += len(window)
            while len(self._windows) > 1 and (
                self._cached_bytes > self._window_bytes or len(self._windows) > self._max_windows
            ):
                _, dropped = self._windows.popitem(last=False)
                self._cached_bytes -= len(dropped)
        if inside + nbytes > len(window):
            return False
        for out in outs:
            out[:] = window[inside : inside + len(out)]
            inside += len(out)
        return True

    def _size_of_windows(self, min_size: int) -> int:
        """Bytes of a window: where files are read in turns, a window of each must fit the memory to be reused."""
        size = self._window_size
        files = len(set(self._files))
        while files * size > self._window_bytes and size // 2 >= max(min_size, self._smallest):
            size //= 2
        return size

    def view(self, source: StoredSlice, start: int, length: int) -> Optional[memoryview]:
        """None: nothing is mapped."""
        return None

    def _read(self, source: StoredSlice, offset: int, outs: Sequence[memoryview], nbytes: int) -> None:
        try:
            with self._handles.borrow(source.path) as file:
                if len(outs) == 1:
                    fill(file, offset, outs[0], source.rank)
                else:
                    scatter(file, offset, outs, nbytes, source.rank)
        except OSError as error:
            raise unreadable(source, error) from error


class MappedReader:
    """Reads strided bytes through memory maps and releases their pages; for one thread."""

    def __init__(
        self,
        handles: FileHandles,
        explicit: FileReader,
        most_maps: int = _MAX_MAPS,
        release_after: int = _RELEASE_AFTER,
    ) -> None:
        """Prepare.

        Args:
            handles: open files.
            explicit: reads contiguous bytes.
            most_maps: maximum number of mapped files.
            release_after: bytes read before pages are released.
        """
        self.worth_skipping = explicit.worth_skipping
        self._handles = handles
        self._explicit = explicit
        self._maps = _Maps(most_maps, release_after)

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on."""
        # A contiguous run is copied once in both ways, and a read avoids page faults.
        self._explicit.read_into(source, start, out)

    def min_piece(self, source: StoredSlice) -> int:
        """No place is large enough: NumPy copies from the map."""
        return NEVER

    def scatter(self, source: StoredSlice, start: int, outs: Sequence[memoryview], nbytes: int) -> None:
        """Fill buffers one after the other."""
        self._explicit.scatter(source, start, outs, nbytes)

    def view(self, source: StoredSlice, start: int, length: int) -> Optional[memoryview]:
        """The bytes in the map, or None if they are not contiguous in the file."""
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
        return memoryview(mapped)[offset : offset + length]


class _Maps:
    """A few memory maps, least recently used first, and the bytes read through them."""

    def __init__(self, most: int, release_after: int) -> None:
        self._most = max(1, most)
        self._release_after = release_after
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._bytes_read = 0

    def of(self, source: StoredSlice, handles: FileHandles) -> Optional[mmap.mmap]:
        """The map of a file, or None if it cannot be mapped."""
        mapped = self._maps.get(source.path)
        if mapped is not None:
            self._maps.move_to_end(source.path)
            return mapped
        try:
            with handles.borrow(source.path) as file:
                if file.descriptor is None:
                    return None
                mapped = mmap.mmap(file.descriptor, 0, prot=mmap.PROT_READ)
        except OSError as error:
            # Too many descriptors or maps, or a file system without maps: the file can still be read.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV):
                return None
            raise unreadable(source, error) from error
        except ValueError as error:
            raise cut_short(source.path, source.rank) from error
        self._maps[source.path] = mapped
        if len(self._maps) > self._most:
            # Unmapped when its last array is deleted.
            self._maps.popitem(last=False)
        return mapped

    def look(self, length: int) -> None:
        """Count bytes that will be read; release all pages after many."""
        self._bytes_read += length + _AROUND
        if self._bytes_read >= self._release_after:
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
            self._bytes_read = 0


class ElementReader:
    """Reads elements; those of quantised tensors are decoded. For one thread.

    Args:
        stored: reads stored bytes.
        memory: bytes of memory for decoding; fewer than `MIN_DECODING_BYTES` count as so many.
        overflowed: counts elements that became infinite.
    """

    def __init__(self, stored: FileReader, memory: int, overflowed: Overflowed) -> None:
        self.worth_skipping = stored.worth_skipping
        # Takes no memory until it is used. The rest is for scales.
        self._memory = new_buffer(max(memory, MIN_DECODING_BYTES) // 3 * 2)
        self._stored = stored
        self._overflowed = overflowed

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of elements from ``start`` on."""
        decoding = source.decoding
        if decoding is None:
            self._stored.read_into(source, start, out)
            return
        overflowed = decoding.read_into(self._stored.read_into, source, start, out, self._memory)
        if overflowed:
            self._overflowed(decoding.name, overflowed)

    def min_piece(self, source: StoredSlice) -> int:
        """The minimum bytes of a place; elements that are decoded have none."""
        return NEVER if source.decoding is not None else self._stored.min_piece(source)

    def scatter(self, source: StoredSlice, start: int, outs: Sequence[memoryview], nbytes: int) -> None:
        """Fill buffers one after the other, with elements that are not decoded."""
        self._stored.scatter(source, start, outs, nbytes)

    def view(self, source: StoredSlice, start: int, length: int) -> Optional[memoryview]:
        """The bytes in a memory map, or None where they have to be read."""
        return None if source.decoding is not None else self._stored.view(source, start, length)


def make_reader(
    storage: Storage,
    mapped: bool,
    handles: FileHandles,
    window_bytes: int,
    most_maps: int,
    threads: int = 1,
    overflowed: Overflowed = lambda name, count: None,
    decoding_bytes: int = 0,
) -> FileReader:
    """A reader for one thread.

    Args:
        storage: storage of the source files.
        mapped: read files through memory maps where that saves a copy.
        handles: open source files.
        window_bytes: memory for windows of small reads.
        most_maps: maximum number of mapped files; a map holds a descriptor.
        threads: number of threads that have a reader.
        overflowed: counts elements that become infinite where they are decoded.
        decoding_bytes: memory for decoding.
    """
    reader: FileReader = ExplicitReader(handles, storage, window_bytes)
    if mapped:
        reader = MappedReader(handles, reader, min(_MAX_MAPS, most_maps), max(_MIN_RELEASED, _RELEASE_AFTER // threads))
    return ElementReader(reader, decoding_bytes, overflowed)


def unreadable(source: StoredSlice, error: Exception) -> ReshardError:
    """The error for a file that can no longer be read."""
    if isinstance(error, OSError) and is_read_only(error):
        return reading_error(source.path, error)
    return RetryableError(f"{source.path}: cannot be read: {error}", file=source.path, rank=source.rank)
