"""The one reader of boxes: the elements of any tensor in memory, copied, cast or edited.

Executor, opened checkpoints, statistics and comparisons of replicas read through a `BoxReader`, and through `in_order`
where threads read ahead. Only verification has its own reader.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar

from reshard.checkpoints import FileHandles
from reshard.execute.options import ExecutionOptions
from reshard.execute.reading import FileReader, make_reader, new_buffer
from reshard.execute.runs import Run, runs_of_box
from reshard.layout import Box, boxes_of_range, placed, shape_of, volume_of
from reshard.plan.pieces import TargetTensor
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


class Worker:
    """Reads, for one thread at a time.

    Args:
        reader: reads stored bytes.
        options: memory and storage.
        overflowed: counts elements that a cast made infinite.

    Attributes:
        block: a buffer for the owner of the worker.
        copied_bytes: bytes to read and write at a time where nothing is gathered: between local files so few that they
            are still in the cache when they are written.
    """

    def __init__(self, reader: FileReader, options: ExecutionOptions, overflowed: Overflowed) -> None:
        # Unused parts of these buffers are never touched, so they take no memory.
        self._scratch, self.block = map(new_buffer, (options.scratch_bytes, options.block_bytes))
        local = not (options.storage.remote or options.target.remote)
        self.copied_bytes = min(options.block_bytes, _CACHED_BYTES) if local else options.block_bytes
        self._reader = reader
        self._overflowed = overflowed
        # Places of the last runs in the block.
        self._places: tuple[list[tuple[int, int, int, int]], memoryview, list[list[memoryview]]] = ([], self.block, [])

    @cached_property
    def filler(self) -> BlockFiller:
        """Fills boxes whose elements are gathered or computed."""
        # Imported late: NumPy takes longer to load than a small rank takes to copy.
        from reshard.execute.filling import BlockFiller

        return BlockFiller(self._reader, self._scratch, self._overflowed)

    def fill(self, tensor: TargetTensor, box: Box, out: memoryview) -> None:
        """Fill ``out`` with the elements of a box, in C order; see `BlockFiller.fill`."""
        runs = self.runs(tensor, box, kept=out.obj is self.block.obj)
        if runs is None:
            self.filler.fill(tensor, box, out)
            return
        for run, places in zip(runs, self._places_of(runs, out)):
            self._reader.scatter(run.source, run.start, places, run.number * run.length)

    def runs(self, tensor: TargetTensor, box: Box, kept: bool = True) -> Optional[list[Run]]:
        """The runs of a box that are read directly to their places; None if it is filled in another way.

        Args:
            tensor: the tensor.
            box: the box, counted from the tensor's own origin.
            kept: whether the places are in `block`, and used again for the next box.
        """
        factor = 1 if kept else _NEW_PLACES
        return runs_of_box(tensor, box, lambda source: factor * self._reader.min_piece(source))

    def _places_of(self, runs: Sequence[Run], out: memoryview) -> list[list[memoryview]]:
        """The places of runs in ``out``; a block of equal boxes is cut into places once."""
        key = [(run.offset, run.length, run.number, run.stride) for run in runs]
        last, memory, places = self._places
        if memory is not out or last != key:
            places = [run.places(out) for run in runs]
            # Memory of callers is not held.
            if out.obj is self.block.obj:
                self._places = (key, out, places)
        return places


class BoxReader:
    """Reads boxes of tensors, for any number of threads.

    The memory limits the number of workers: a thread waits while all of them are in use.

    Args:
        handles: open source files.
        options: CPUs, memory and storage.
        overflowed: counts elements that a cast made infinite; called by several threads.
        threads: maximum number of threads that read at a time; by default that of the options.

    Attributes:
        threads: maximum number of threads that read at a time.
        options: the options.
        overflowed: counts elements that a cast made infinite.
    """

    def __init__(
        self,
        handles: FileHandles,
        options: ExecutionOptions,
        overflowed: Overflowed = lambda name, count: None,
        threads: Optional[int] = None,
    ) -> None:
        self.threads = threads or options.threads
        self.options = options
        self._handles = handles
        self.overflowed = overflowed
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Begin without workers and threads, at first and in forked children."""
        self._change = threading.Condition()
        self._idle: list[Worker] = []
        self._workers = 0
        self._pool: Optional[ThreadPoolExecutor] = None

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that read for others. Their tasks must not wait for the pool."""
        with self._change:
            if self._pool is None:
                self._pool = thread_pool(self.threads, "reshard-read")
            return self._pool

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """A worker for this thread; waits while all are in use."""
        with self._change:
            while not self._idle and self._workers >= self.threads:
                self._change.wait()
            worker = self._idle.pop() if self._idle else None
            self._workers += worker is None
        try:
            if worker is None:
                worker = self.new_worker()
            yield worker
        finally:
            with self._change:
                if worker is None:
                    self._workers -= 1
                else:
                    self._idle.append(worker)
                self._change.notify()

    def new_worker(self) -> Worker:
        """A worker for the caller alone."""
        options = self.options
        maps = max(1, self._handles.limit // (4 * options.threads))
        reader = make_reader(
            options.storage,
            options.mapped,
            self._handles,
            options.window_bytes,
            maps,
            options.threads,
            self._count_overflow,
            options.decoding_bytes,
        )
        return Worker(reader, options, self._count_overflow)

    def _count_overflow(self, name: str, count: int) -> None:
        self.overflowed(name, count)

    def share(self, processes: int) -> None:
        """Divide the memory among copies of this reader in several processes."""
        self.options = self.options._replace(jobs=processes, processes=processes)

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
        """As `read`, in this thread alone."""
        with self.worker() as worker:
            worker.fill(tensor, box, out)

    def gather(self, tensor: TargetTensor, box: Box, index: tuple[slice, ...], out: npt.NDArray[Any]) -> None:
        """Read selected elements of a box, also into an array that is not contiguous.

        Args:
            tensor: the tensor.
            box: the elements to read.
            index: the elements to copy to ``out``, as an index into the array of the box.
            out: the array to fill; of elements of the tensor's size.

        Raises:
            ReshardError: a file cannot be read, or was modified.
        """
        import numpy as np

        with self.worker() as worker:
            nbytes = volume_of(box) * tensor.item_size
            # A single element may be a long text.
            room = worker.block[:nbytes] if nbytes <= len(worker.block) else memoryview(bytearray(nbytes))
            worker.fill(tensor, box, room)
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
    stop: Optional[threading.Event] = None,
) -> Iterator[tuple[_T, list[_R]]]:
    """Have threads work ahead on tasks, within a bound, and yield the results in the order of the tasks.

    Args:
        pool: the threads.
        tasks: taken one by one, as they are begun.
        begin: returns the parts of a task, each for one thread.
        memory: maximum sum of the sizes of tasks that are begun and not yet yielded; or a single task.
        size: returns the size of a task.
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
