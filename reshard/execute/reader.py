"""The one reader of boxes: whatever a tensor is made of, its elements in memory.

Executor, opened checkpoints, statistics and comparisons of replicas all read through a `BoxReader`, and those
that read many things at once go through `in_order`; only verification has its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, Callable, NamedTuple, Optional, TypeVar

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.execute.casts import Overflowed
from reshard.execute.filling import BlockFiller
from reshard.execute.options import ExecutionOptions
from reshard.execute.reading import Bytes, make_reader
from reshard.layout import Box, boxes_of_range, shape_of, volume_of
from reshard.plan.pieces import TargetTensor

Array = npt.NDArray[Any]
_T = TypeVar("_T")
_R = TypeVar("_R")

CHUNK_BYTES = 8 << 20
"""Bytes that one thread reads at a time where several read, at the most."""
_MIN_CHUNK_BYTES = 1 << 20


class Worker(NamedTuple):
    """Reads, for one thread at a time.

    Attributes:
        filler: fills boxes.
        block: a buffer for whoever has the worker.
    """

    filler: BlockFiller
    block: Bytes


class BoxReader:
    """Reads boxes of tensors, for any number of threads.

    There are never more workers than the memory allows: a thread waits while all of them are in use.

    Args:
        handles: open source files.
        options: CPUs, memory and what the files lie on.
        overflowed: told of elements that a cast made infinite, by several threads.
        threads: how many read at a time; by default as the options say.

    Attributes:
        threads: how many read at a time.
        options: the options.
        overflowed: told of elements that a cast made infinite.
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
        self._change = threading.Condition()
        self._idle: list[Worker] = []
        self._made = 0
        self._pool: Optional[ThreadPoolExecutor] = None

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads that read for others. What they do must not wait for the pool."""
        with self._change:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "reshard-read")
            return self._pool

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """A worker for this thread; waits while all are in use."""
        with self._change:
            while not self._idle and self._made >= self.threads:
                self._change.wait()
            worker = self._idle.pop() if self._idle else None
            self._made += worker is None
        try:
            if worker is None:
                worker = self.new_worker()
            yield worker
        finally:
            with self._change:
                if worker is None:
                    self._made -= 1
                else:
                    self._idle.append(worker)
                self._change.notify()

    def new_worker(self) -> Worker:
        """A worker that nobody else will get."""
        options = self.options
        maps = max(1, self._handles.limit // (4 * options.threads))
        reader = make_reader(
            options.storage,
            options.mapped,
            self._handles,
            options.window_bytes,
            maps,
            options.threads,
            self._tell_overflow,
        )
        # A part of a buffer that nobody uses is never touched, and so takes no memory.
        scratch, block = (np.empty(options.block_bytes, np.uint8) for _ in range(2))
        return Worker(BlockFiller(reader, scratch, self._tell_overflow), block)

    def _tell_overflow(self, name: str, count: int) -> None:
        self.overflowed(name, count)

    def share(self, processes: int) -> None:
        """Divide the memory among copies of this in so many processes."""
        self.options = replace(self.options, jobs=processes, processes=processes)

    def read(self, tensor: TargetTensor, box: Box, out: memoryview) -> None:
        """Fill ``out`` with the bytes of a box, in C order; by several threads where it is large.

        Args:
            tensor: the tensor, copied, cast or edited.
            box: which elements, counted from the first one of the tensor's own box.
            out: exactly their bytes.

        Raises:
            ReshardError: a file cannot be read, or is not what it was.
        """
        if self.threads > 1 and len(out) > self.chunk_bytes(len(out)):
            for _ in in_order(self.pool, [self.parts(tensor, box, out)], list, 1):
                pass
        else:
            self.read_alone(tensor, box, out)

    def parts(self, tensor: TargetTensor, box: Box, out: memoryview) -> Iterator[Callable[[], None]]:
        """What each of several threads has to do to read a large box."""
        first = 0
        most = max(1, self.chunk_bytes(len(out)) // tensor.item_size)
        for part in boxes_of_range(shape_of(box), 0, volume_of(box), most):
            last = first + volume_of(part) * tensor.item_size
            placed = tuple((start + low, start + high) for (start, _), (low, high) in zip(box, part))
            yield partial(self.read_alone, tensor, placed, out[first:last])
            first = last

    def chunk_bytes(self, nbytes: int) -> int:
        """Bytes that one thread reads at a time of so many, so that all threads have some."""
        return min(CHUNK_BYTES, max(_MIN_CHUNK_BYTES, nbytes // self.threads))

    def read_alone(self, tensor: TargetTensor, box: Box, out: memoryview) -> None:
        """Likewise, by this thread."""
        with self.worker() as worker:
            worker.filler.fill(tensor, box, out)

    def gather(self, tensor: TargetTensor, box: Box, taken: tuple[slice, ...], out: Array) -> None:
        """Read a box of which not everything is taken, or whose elements go to places apart.

        Args:
            tensor: the tensor.
            box: which elements are read.
            taken: which of them are taken: an index into the array of the box.
            out: where they go; of elements of the tensor's size.

        Raises:
            ReshardError: a file cannot be read, or is not what it was.
        """
        with self.worker() as worker:
            nbytes = volume_of(box) * tensor.item_size
            # A single element may be a long text.
            room = worker.block[:nbytes] if nbytes <= len(worker.block) else np.empty(nbytes, np.uint8)
            worker.filler.fill(tensor, box, room.data)
            out[...] = room.view(out.dtype).reshape(shape_of(box))[taken]

    def close(self) -> None:
        """End the threads; what they are reading is finished first."""
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
    """Have threads work ahead on tasks, within a bound, and give the results in the order of the tasks.

    Args:
        pool: the threads.
        tasks: taken one by one, as they are begun.
        begin: gives the parts of a task, each for one thread.
        memory: how much may be under way, or done and not yet taken; or a single task.
        size: how much of it a task takes.
        stop: set when nobody waits for results any more: parts that take long look at it.

    Yields:
        Each task, and what its parts returned.

    Raises:
        BaseException: whatever a part raised; by then no part is at work any more.
    """
    coming: deque[tuple[_T, list[Future[_R]]]] = deque()
    waiting = iter(tasks)
    following = next(waiting, None)
    held = 0
    try:
        while following is not None or coming:
            while following is not None and (not coming or held + size(following) <= memory):
                held += size(following)
                futures: list[Future[_R]] = []
                coming.append((following, futures))
                # One by one: where a part cannot be started, those before it are known to be at work.
                futures.extend(pool.submit(part) for part in begin(following))
                following = next(waiting, None)
            task, futures = coming[0]
            results = [future.result() for future in futures]
            coming.popleft()
            held -= size(task)
            yield task, results
            del task, futures, results
    finally:
        if stop is not None:
            stop.set()
        left: Sequence[Future[_R]] = [future for _, futures in coming for future in futures]
        for future in left:
            future.cancel()
        # Nobody may write to an array that its owner believes to have back.
        wait(left)
