"""The one reader of boxes: the elements of any tensor in memory, copied, cast or edited.

Executor, opened checkpoints, statistics and comparisons of replicas read through a `BoxReader`, and through `in_order`
where threads read ahead. Only verification has its own reader.

Explicit reads are the default: a file that shrinks while it is read is an error, while a process that has it mapped is
killed; and no page fault costs a round trip. Memory maps are for files that no process writes to.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.tensors import file_ranges
from reshard.errors import ReshardError, RetryableError, is_read_only
from reshard.execute.budget import MIN_DECODING_BYTES, MIN_PIECE, Budget
from reshard.execute.runs import NEVER, Places, StoredRun, runs_of_box
from reshard.layout import Box, boxes_of_range, placed, shape_of, volume_of
from reshard.plan.pieces import StoredSlice, TargetTensor
from reshard.storage import between, cut_short, fill, reading_error, scatter
from reshard.threads import cached_property, renew_in_children, thread_pool, wait_for

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future, ThreadPoolExecutor

    import numpy.typing as npt

    from reshard.execute.casts import Overflowed
    from reshard.execute.filling import BlockFiller

_T = TypeVar("_T")
_R = TypeVar("_R")

CHUNK_BYTES = 8 << 20
"""Maximum bytes that one of several threads reads at a time."""
_MIN_CHUNK_BYTES = 1 << 20
_CACHED_BYTES = 1 << 20
# Pieces whose places are used once must be longer by this factor: a place costs 0.1 microseconds.
_NEW_PLACES = 4
# Bytes read through maps of all threads before their pages are released, so that resident memory stays flat.
_RELEASE_AFTER = 64 << 20
_MIN_RELEASED = 4 << 20
# Bytes that a page fault brings in around the bytes that are read.
_AROUND = 64 << 10
_MAX_MAPS = 64
_MAX_WINDOWS = 32
_MAX_REMOTE_WINDOWS = 256
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


class FileReader:
    """Reads boxes of tensors, and elements of stored slices, from files; for one thread.

    Elements of slices are counted in bytes from the slice's first; those of quantised tensors are decoded. Each read is
    a request. Small tensors are close together in files, and a request costs as much as copying many of them: small
    reads are copied from cached windows of the file. Where more files are read in turns than windows fit the memory,
    windows are smaller. Without maps, NumPy gathers strided elements from buffers, into which the gaps are read, too.

    Args:
        budget: sizes of buffers, and memory for windows; one window is always cached.
        overflowed: counts elements that became infinite.

    Attributes:
        block: a buffer for the owner of the reader.
        copied_bytes: bytes to read and write at a time where nothing is gathered: between local files few enough
            to be still in the cache when they are written.
        worth_skipping: bytes whose reading costs as much as a request; longer gaps are skipped.
    """

    def __init__(self, handles: FileHandles, budget: Budget, overflowed: Overflowed = lambda name, count: None) -> None:
        # Unused parts of these buffers are never touched, so they take no memory.
        self._scratch, self.block = map(new_buffer, (budget.scratch_bytes, budget.block_bytes))
        self.copied_bytes = budget.block_bytes if budget.remote else min(budget.block_bytes, _CACHED_BYTES)
        # Places of the last runs in the block.
        self._last_cut: tuple[list[Places], memoryview, list[list[memoryview]]] = ([], self.block, [])
        costs, window_bytes = budget.costs, budget.window_bytes
        self.worth_skipping = costs.worth_skipping
        self._min_piece = NEVER if costs.remote or budget.mapped else MIN_PIECE
        self._handles = handles
        self._window_size = min(costs.window, max(_MIN_WINDOW, window_bytes))
        self._small = min(costs.small, self._window_size)
        self._smallest = _MIN_REMOTE_WINDOW if costs.remote else self._window_size
        self._window_bytes = window_bytes
        # By file, size of windows, and number of the window in the file.
        self._windows: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._cached_bytes = 0
        # Files of the last small reads: a window of each should be cached.
        self._max_windows = _MAX_REMOTE_WINDOWS if costs.remote else _MAX_WINDOWS
        self._files: deque[str] = deque(maxlen=self._max_windows)
        # Least recently used first; each has a descriptor.
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._max_maps = min(_MAX_MAPS, max(1, handles.limit // (4 * budget.threads))) if budget.mapped else 0
        self._release_after = max(_MIN_RELEASED, _RELEASE_AFTER // budget.threads)
        self._mapped_bytes = 0
        # Takes no memory until it is used. The rest is for scales.
        self._decoding_memory = new_buffer(max(budget.decoding_bytes, MIN_DECODING_BYTES) // 3 * 2)
        self._overflowed = overflowed

    @cached_property
    def filler(self) -> BlockFiller:
        # Imported late: NumPy takes longer to load than a small rank takes to copy.
        from reshard.execute.filling import BlockFiller

        return BlockFiller(self, self._scratch, self._overflowed)

    def fill(self, tensor: TargetTensor, box: Box, out: memoryview) -> None:
        """Fill ``out`` with the elements of a box, in C order; see `BlockFiller.fill`."""
        runs = self.runs(tensor, box, kept=out.obj is self.block.obj)
        if runs is None:
            self.filler.fill(tensor, box, out)
            return
        for (source, start, places), outs in zip(runs, self._cut(runs, out)):
            self.scatter(source, start, outs, places.number * places.length)

    def runs(self, tensor: TargetTensor, box: Box, kept: bool = True) -> list[StoredRun] | None:
        """The runs of a box that are read directly to their places; None if it is filled in another way.

        Args:
            box: the box, counted from the tensor's own origin.
            kept: whether the places are in `block`, and used again for the next box.
        """
        factor = 1 if kept else _NEW_PLACES
        return runs_of_box(tensor, box, lambda source: factor * self._min_piece_of(source))

    def _cut(self, runs: Sequence[StoredRun], out: memoryview) -> list[list[memoryview]]:
        """The places of runs in ``out``; a block of equal boxes is cut into places once."""
        places = [each for _, _, each in runs]
        last, memory, cut = self._last_cut
        if memory is not out or last != places:
            cut = [each.of(out) for each in places]
            # Memory of callers is not held.
            if out.obj is self.block.obj:
                self._last_cut = (places, out, cut)
        return cut

    def read_into(self, source: StoredSlice, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of elements from ``start`` on.

        Raises:
            RetryableError: the file vanished, shrank or cannot be read.
        """
        decoding = source.decoding
        if decoding is None:
            self._read_stored(source, start, out)
            return
        overflowed = decoding.read_into(self._read_stored, source, start, out, self._decoding_memory)
        if overflowed:
            self._overflowed(decoding.name, overflowed)

    def _read_stored(self, source: StoredSlice, start: int, out: memoryview) -> None:
        self.scatter(source, start, [out], len(out))

    def _min_piece_of(self, source: StoredSlice) -> int:
        """The minimum bytes of a place for which `scatter` is fast: only local files have it."""
        as_stored = source.decoding is None and self._handles.as_stored(source.path)
        return self._min_piece if as_stored else NEVER

    def scatter(self, source: StoredSlice, start: int, outs: Sequence[memoryview], nbytes: int) -> None:
        """As `read_into`, several buffers one after the other, of ``nbytes`` together; nothing is decoded."""
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

    def _read(self, source: StoredSlice, offset: int, outs: Sequence[memoryview], nbytes: int) -> None:
        try:
            with self._handles.borrow(source.path) as file:
                if len(outs) == 1:
                    fill(file, offset, outs[0], source.rank)
                else:
                    scatter(file, offset, outs, nbytes, source.rank)
        except OSError as error:
            raise unreadable(source, error) from error

    def view(self, source: StoredSlice, start: int, length: int) -> memoryview | None:
        """The bytes in a memory map, or None where they have to be read.

        A contiguous run is never viewed: it is copied once in both ways, and a read avoids page faults.
        """
        if not self._max_maps or source.decoding is not None:
            return None
        ranges = list(file_ranges(source.extents, start, length))
        mapped = self._map_of(source) if len(ranges) == 1 else None
        if mapped is None:
            return None
        offset = ranges[0][0]
        if offset + length > len(mapped):
            raise cut_short(source.path, source.rank)
        self._mapped_bytes += length + _AROUND
        if self._mapped_bytes >= self._release_after:
            for each in self._maps.values():
                each.madvise(mmap.MADV_DONTNEED)
            self._mapped_bytes = 0
        return memoryview(mapped)[offset : offset + length]

    def _map_of(self, source: StoredSlice) -> mmap.mmap | None:
        """The map of a file, or None if it cannot be mapped."""
        mapped = self._maps.get(source.path)
        if mapped is not None:
            self._maps.move_to_end(source.path)
            return mapped
        try:
            with self._handles.borrow(source.path) as file:
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
        if len(self._maps) > self._max_maps:
            # Unmapped when its last array is deleted.
            self._maps.popitem(last=False)
        return mapped


def unreadable(source: StoredSlice, error: Exception) -> ReshardError:
    if isinstance(error, OSError) and is_read_only(error):
        return reading_error(source.path, error)
    return RetryableError(f"{source.path}: cannot be read: {error}", file=source.path, rank=source.rank)


class BoxReader:
    """Reads boxes of tensors, for any number of threads.

    The memory limits the number of readers: a thread waits while all of them are in use.

    Args:
        overflowed: counts elements that a cast made infinite; called by several threads.
        threads: maximum number of threads that read at a time; by default that of the budget.
    """

    def __init__(
        self,
        handles: FileHandles,
        budget: Budget,
        overflowed: Overflowed = lambda name, count: None,
        threads: int | None = None,
    ) -> None:
        self.threads = threads or budget.threads
        self.budget = budget
        self._handles = handles
        self.overflowed = overflowed
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Begin without readers and threads, at first and in forked children."""
        self._change = threading.Condition()
        self._idle: list[FileReader] = []
        self._readers = 0
        self._pool: ThreadPoolExecutor | None = None

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that read for others. Their tasks must not wait for the pool."""
        with self._change:
            if self._pool is None:
                self._pool = thread_pool(self.threads, "reshard-read")
            return self._pool

    @contextlib.contextmanager
    def reader(self) -> Iterator[FileReader]:
        """A reader for this thread; waits while all are in use."""
        with self._change:
            while not self._idle and self._readers >= self.threads:
                self._change.wait()
            reader = self._idle.pop() if self._idle else None
            self._readers += reader is None
        try:
            if reader is None:
                reader = self.new_reader()
            yield reader
        finally:
            with self._change:
                if reader is None:
                    self._readers -= 1
                else:
                    self._idle.append(reader)
                self._change.notify()

    def new_reader(self) -> FileReader:
        """A reader for the caller alone."""
        return FileReader(self._handles, self.budget, self._count_overflow)

    def _count_overflow(self, name: str, count: int) -> None:
        # Looked up at every call: worker processes replace it.
        self.overflowed(name, count)

    def read(self, tensor: TargetTensor, box: Box, out: memoryview) -> None:
        """Fill ``out`` with the bytes of a box, in C order; by several threads where it is large.

        Args:
            tensor: the tensor, copied, cast or edited.
            box: which elements, counted from the first one of the tensor's own box.
            out: exactly their bytes.

        Raises:
            ReshardError: a file cannot be read, or was modified.
        """
        if self.threads > 1 and len(out) > self.chunk_bytes(len(out)):
            for _ in in_order(self.pool, [self.parts(tensor, box, out)], list, 1):
                pass
        else:
            self.read_alone(tensor, box, out)

    def parts(self, tensor: TargetTensor, box: Box, out: memoryview) -> Iterator[Callable[[], None]]:
        """The tasks that read a large box, for several threads."""
        first = 0
        most = max(1, self.chunk_bytes(len(out)) // tensor.item_size)
        for part in boxes_of_range(shape_of(box), 0, volume_of(box), most):
            last = first + volume_of(part) * tensor.item_size
            yield partial(self.read_alone, tensor, placed(part, box), out[first:last])
            first = last

    def chunk_bytes(self, nbytes: int) -> int:
        """Bytes that one thread reads at a time of ``nbytes``, so that all threads have work."""
        return min(CHUNK_BYTES, max(_MIN_CHUNK_BYTES, nbytes // self.threads))

    def read_alone(self, tensor: TargetTensor, box: Box, out: memoryview) -> None:
        with self.reader() as reader:
            reader.fill(tensor, box, out)

    def gather(self, tensor: TargetTensor, box: Box, index: tuple[slice, ...], out: npt.NDArray[Any]) -> None:
        """Read selected elements of a box, also into an array that is not contiguous.

        Args:
            index: the elements to copy to ``out``, as an index into the array of the box.
            out: the array to fill; of elements of the tensor's size.

        Raises:
            ReshardError: a file cannot be read, or was modified.
        """
        import numpy as np

        with self.reader() as reader:
            nbytes = volume_of(box) * tensor.item_size
            # A single element may be a long text.
            room = reader.block[:nbytes] if nbytes <= len(reader.block) else memoryview(bytearray(nbytes))
            reader.fill(tensor, box, room)
            out[...] = np.ndarray(shape_of(box), out.dtype, room)[index]

    def close(self) -> None:
        """End the threads after their current tasks."""
        with self._change:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def in_order(
    pool: Executor,
    tasks: Iterable[_T],
    begin: Callable[[_T], Iterable[Callable[[], _R]]],
    memory: int,
    size: Callable[[_T], int] = lambda task: 1,
    stop: threading.Event | None = None,
) -> Iterator[tuple[_T, list[_R]]]:
    """Have threads work ahead on tasks, within a bound, and yield the results in the order of the tasks.

    Args:
        tasks: taken one by one, as they are begun.
        begin: returns the parts of a task, each for one thread.
        memory: maximum sum of the sizes of tasks that are begun and not yet yielded; or a single task.
        stop: set when no more results are needed, so that long parts can end early.

    Yields:
        Each task, and the results of its parts.

    Raises:
        BaseException: raised by a part; all parts have ended by then.
    """
    begun: deque[tuple[_T, list[Future[_R]]]] = deque()
    waiting = iter(tasks)
    following = next(waiting, None)
    size_of_begun = 0
    try:
        while following is not None or begun:
            while following is not None and (not begun or size_of_begun + size(following) <= memory):
                size_of_begun += size(following)
                futures: list[Future[_R]] = []
                begun.append((following, futures))
                # One by one: if a part cannot be started, the futures of those before it are in the list.
                futures.extend(pool.submit(part) for part in begin(following))
                following = next(waiting, None)
            task, futures = begun[0]
            results = [future.result() for future in futures]
            begun.popleft()
            size_of_begun -= size(task)
            yield task, results
            del task, futures, results
    finally:
        if stop is not None:
            stop.set()
        unfinished: Sequence[Future[_R]] = [future for _, futures in begun for future in futures]
        for future in unfinished:
            future.cancel()
        # After this, no part may write to arrays of the caller.
        wait_for(unfinished)
