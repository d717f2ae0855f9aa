"""Filling boxes of tensors in memory: a few workers that read, for any number of threads that ask.

A worker has a reader and its buffers, and there are never more of them than the memory allows: who asks
while all are at work waits. Large boxes are divided among the threads of a pool.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.execute import ExecutionOptions
from reshard.execute.boxes import boxes_of_range
from reshard.execute.casts import Overflowed
from reshard.execute.filling import BlockFiller
from reshard.execute.reading import make_reader
from reshard.layout import Box, shape_of, volume_of
from reshard.opened.indexing import Selection, readings
from reshard.plan.pieces import TargetTensor
from reshard.storage.costs import Storage

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 8 << 20
"""What one thread reads at a time of what several read, at the most."""
_LEAST_CHUNK_BYTES = 1 << 20


class Worker(NamedTuple):
    """Reads, for one thread at a time.

    Attributes:
        filler: fills boxes.
        block: room for what is read and only partly taken.
    """

    filler: BlockFiller
    block: Bytes


class Engine:
    """Reads boxes of tensors.

    Args:
        handles: open source files.
        options: CPUs, memory and what the files lie on.
        overflowed: told of elements that a cast made infinite, by several threads.

    Attributes:
        threads: how many read at a time.
    """

    def __init__(self, handles: FileHandles, options: ExecutionOptions, overflowed: Overflowed) -> None:
        self.threads = options.threads
        self._handles = handles
        self._overflowed = overflowed
        self._options = replace(options, storage=_asked_for_little(options.storage))
        self._change = threading.Condition()
        self._idle: list[Worker] = []
        self._made = 0
        self._pool: Optional[ThreadPoolExecutor] = None

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """A worker for this thread; waits while all are at work."""
        with self._change:
            while not self._idle and self._made >= self.threads:
                self._change.wait()
            worker = self._idle.pop() if self._idle else None
            self._made += worker is None
        try:
            if worker is None:
                worker = self._new()
            yield worker
        finally:
            with self._change:
                if worker is None:
                    self._made -= 1
                else:
                    self._idle.append(worker)
                self._change.notify()

    def _new(self) -> Worker:
        options = self._options
        maps = max(1, self._handles.limit // (4 * options.threads))
        reader = make_reader(
            options.storage, options.mapped, self._handles, options.window_bytes, maps, options.threads
        )
        # The room of a part that is not read at once is never touched, and so takes no memory.
        scratch, block = (np.empty(options.block_bytes, np.uint8) for _ in range(2))
        return Worker(BlockFiller(reader, scratch, self._overflowed), block)

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Have a thread of the pool do something."""
        with self._change:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "reshard-read")
            return self._pool.submit(work, *arguments)

    def read(self, tensor: TargetTensor, selection: Selection, out: Array) -> None:
        """Read what is selected of a tensor.

        Args:
            tensor: the tensor.
            selection: what of it.
            out: an array of the selection's shape, of elements of the tensor's size; anyhow strided.

        Raises:
            ReshardError: a file cannot be read, or is not what it was.
        """
        most, skip = self._options.block_bytes, self._options.storage.worth_skipping
        for box, taken, part in readings(selection, tensor.shape, tensor.item_size, out, most, skip):
            if taken is None:
                self.fill(tensor, box, part.reshape(-1).view(np.uint8))
            else:
                self._gather(tensor, box, taken, part)

    def fill(self, tensor: TargetTensor, box: Box, out: Bytes) -> None:
        """Fill ``out`` with the bytes of a box, in C order; by several threads where it is large."""
        most = self.chunk_bytes(len(out))
        chunks = list(chunks_of(box, tensor.item_size, most)) if len(out) > most and self.threads > 1 else []
        if len(chunks) < 2:
            self.fill_alone(tensor, box, out)
            return
        wait_for([self.submit(self.fill_alone, tensor, part, out[first:last]) for part, first, last in chunks])

    def chunk_bytes(self, nbytes: int) -> int:
        """What one thread reads at a time of so many bytes, so that all threads have some."""
        return min(CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, nbytes // self.threads))

    def fill_alone(self, tensor: TargetTensor, box: Box, out: Bytes) -> None:
        """Likewise, by this thread."""
        with self.worker() as worker:
            worker.filler.fill(tensor, box, out.data)

    def _gather(self, tensor: TargetTensor, box: Box, taken: tuple[slice, ...], out: Array) -> None:
        """Read a box of which not everything is taken, or that goes to places apart, through room for a block."""
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


def chunks_of(box: Box, item_size: int, most: int) -> Iterator[tuple[Box, int, int]]:
    """A box in parts of so many bytes at the most, each with its first byte and the byte behind its last."""
    first = 0
    shape = shape_of(box)
    for part in boxes_of_range(shape, 0, volume_of(box), max(1, most // item_size)):
        last = first + volume_of(part) * item_size
        yield tuple((start + low, start + high) for (start, _), (low, high) in zip(box, part)), first, last
        first = last


def wait_for(futures: Sequence[Future[None]]) -> None:
    """Wait until all is read; where something fails, what was not begun is left.

    Raises:
        ReshardError: something could not be read.
    """
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        # Nobody may write to an array that its owner believes to have back.
        wait(futures)
        raise


def _asked_for_little(storage: Storage) -> Storage:
    """Storage from which only some bytes may be asked for: no request reads more beside them than it is worth."""
    window = min(storage.window, storage.worth_skipping)
    return storage._replace(window=window, small=min(storage.small, window // 4))
