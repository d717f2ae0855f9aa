"""Running a conversion: target files in, bytes out.

Target files are planned a group at a time and cut into parts of some tens of MiB. A few threads take
the parts in order, so a few target files are open at any moment, each written front to back; copying
and I/O leave the interpreter lock alone. Whoever writes the last part of a file commits it.

Memory: every thread owns one block buffer and one scratch buffer of equal size, and nothing else
that grows with the checkpoint.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

import numpy as np

from reshard.checkpoints import Data, FileHandles, Literal
from reshard.errors import RetryableError
from reshard.execute.boxes import boxes_of_range
from reshard.execute.filling import BlockFiller
from reshard.execute.parts import Part, SharedRows, parts_of
from reshard.execute.reading import Bytes, Reader, make_reader
from reshard.execute.writing import PartBuffer, TargetWriter
from reshard.plan.pieces import TargetFile, TargetTensor

# Larger blocks than this make nothing faster.
MOST_BLOCK_BYTES = 8 << 20
LEAST_BLOCK_BYTES = 4 << 10


@dataclass(frozen=True)
class ExecutionOptions:
    """How bytes are moved; none of this changes what is written.

    Attributes:
        jobs: threads.
        max_memory: bytes that all buffers together may take.
        io: ``auto``, ``mmap`` or ``pread``.
    """

    jobs: int
    max_memory: int = 256 << 20
    io: str = "auto"

    @property
    def block_bytes(self) -> int:
        """Bytes of each of the two buffers of a thread."""
        share = self.max_memory // (2 * self.jobs)
        return max(LEAST_BLOCK_BYTES, min(MOST_BLOCK_BYTES, share))


class Progress:
    """Told what has been done; does nothing by itself. Called from several threads, one at a time."""

    def begin(self, total: int) -> None:
        """``total`` bytes of tensor contents will be written."""

    def wrote(self, count: int) -> None:
        """So many bytes of tensor contents are ready to be written."""

    def committed(self, target: TargetFile) -> None:
        """A target file has its final name."""

    def end(self) -> None:
        """Nothing more will come."""


def convert(
    groups: Iterable[Sequence[TargetFile]],
    handles: FileHandles,
    options: ExecutionOptions,
    progress: Progress,
) -> None:
    """Write all target files.

    Args:
        groups: what to write, files that read the same rows together; taken lazily.
        handles: open source files.
        options: how.
        progress: told of bytes written and files committed.

    Raises:
        ReshardError: a file could not be read or written. Files committed before that are complete;
            nothing else is left behind.
    """
    _Run(handles, options, progress).run(groups)


class _Run:
    def __init__(self, handles: FileHandles, options: ExecutionOptions, progress: Progress) -> None:
        self._handles = handles
        self._options = options
        self._progress = progress
        # When set, nothing more is begun and nothing more committed.
        self._stop = threading.Event()
        self._parts: queue.Queue[_Task] = queue.Queue(maxsize=2 * options.jobs)
        # Set when no further part will come.
        self._planned = threading.Event()
        self._lock = threading.Lock()
        self._writers: set[TargetWriter] = set()
        self._error: Optional[BaseException] = None

    def run(self, groups: Iterable[Sequence[TargetFile]]) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"reshard-{number}", daemon=True)
            for number in range(self._options.jobs)
        ]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            for group in groups:
                if self._stop.is_set():
                    break
                self._hand_out(group)
            self._planned.set()
            for thread in started:
                # With a timeout, so that a signal is handled while waiting.
                while thread.is_alive():
                    thread.join(0.2)
        except BaseException as error:
            self._fail(error)
        finally:
            self._stop_threads(started)
            left = list(self._writers)
            for writer in left:
                writer.discard()
        if self._error is not None:
            raise self._error
        if left:
            # Whatever the reason: a file that was asked for and is not there is never a success.
            target = left[0].target
            raise RetryableError(
                f"{target.path}: was not finished (rank {target.rank})", file=target.path, rank=target.rank
            )

    def _stop_threads(self, threads: Iterable[threading.Thread]) -> None:
        """Wait for the threads to end, also when asked to hurry: they may still be writing."""
        if not self._planned.is_set():
            self._stop.set()
            self._planned.set()
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join(0.2)
                except BaseException as error:
                    self._fail(error)

    def _hand_out(self, group: Sequence[TargetFile]) -> None:
        writers = [TargetWriter(target) for target in group]
        with self._lock:
            self._writers.update(writers)
        for part in parts_of(group):
            for writer in writers:
                writer.add_part()
            while not self._stop.is_set():
                try:
                    self._parts.put(_Task(part, writers), timeout=0.2)
                    break
                except queue.Full:
                    continue
        for writer in writers:
            if writer.seal():
                self._commit(writer)

    def _work(self) -> None:
        try:
            self._write_parts()
        except BaseException as error:
            self._fail(error)

    def _write_parts(self) -> None:
        reader: Optional[Reader] = None
        block = np.empty(self._options.block_bytes, dtype=np.uint8)
        scratch = np.empty(self._options.block_bytes, dtype=np.uint8)
        while not self._stop.is_set():
            try:
                task = self._parts.get(timeout=0.05)
            except queue.Empty:
                if self._planned.is_set():
                    return
                continue
            if reader is None:
                maps = self._handles.limit // (4 * self._options.jobs)
                reader = make_reader(self._options.io, self._handles, _example(task.writers), maps)
            self._write_part(task, block, BlockFiller(reader, scratch))
            for writer in task.writers:
                if writer.part_done():
                    self._commit(writer)

    def _write_part(self, task: _Task, block: Bytes, filler: BlockFiller) -> None:
        share = len(block) // len(task.writers)
        buffers = [PartBuffer(block[n * share : (n + 1) * share]) for n in range(len(task.writers))]
        for buffer, writer, offset in zip(buffers, task.writers, task.part.offsets):
            buffer.start(writer, offset)
        for stretch in task.part.stretches:
            if stretch.shared is None:
                for buffer, writer, segments in zip(buffers, task.writers, stretch.segments):
                    self._write_alone(segments, writer.target.tensors, buffer, filler)
            else:
                for buffer, segments in zip(buffers, stretch.segments):
                    for segment in segments:
                        buffer.expect(segment.offset)
                        if isinstance(segment, Literal):
                            buffer.put(segment.data)
                self._write_shared(stretch.shared, buffers, filler)
            if self._stop.is_set():
                return
        for buffer in buffers:
            buffer.flush()

    def _write_alone(
        self,
        segments: Sequence[Union[Literal, Data]],
        tensors: Sequence[TargetTensor],
        buffer: PartBuffer,
        filler: BlockFiller,
    ) -> None:
        for segment in segments:
            buffer.expect(segment.offset)
            if isinstance(segment, Literal):
                buffer.put(segment.data)
                continue
            tensor = tensors[segment.tensor]
            first, last = segment.start // tensor.item_size, segment.stop // tensor.item_size
            most = max(1, buffer.size // tensor.item_size)
            for box in boxes_of_range(tensor.shape, first, last, most):
                if self._stop.is_set():
                    return
                count = math.prod(high - low for low, high in box) * tensor.item_size
                filler.fill(tensor, box, buffer.reserve(count))
                self._tell(count)

    def _write_shared(self, shared: SharedRows, buffers: Sequence[PartBuffer], filler: BlockFiller) -> None:
        most = min(
            filler.most_shared_rows(shared),
            *(buffer.size // row for buffer, row in zip(buffers, shared.row_bytes)),
        )
        if most < 1:
            # Not even a row fits for everyone at once: each member by itself.
            for tensor, row, buffer in zip(shared.tensors, shared.row_bytes, buffers):
                data = Data(buffer.position, 0, shared.first * row, shared.last * row)
                self._write_alone([data], (tensor,), buffer, filler)
            return
        for rows in boxes_of_range(shared.outer_shape, shared.first, shared.last, most):
            if self._stop.is_set():
                return
            count = math.prod(high - low for low, high in rows)
            rooms = [buffer.reserve(count * row) for buffer, row in zip(buffers, shared.row_bytes)]
            filler.fill_shared(shared, rows, rooms)
            self._tell(sum(len(room) for room in rooms))

    def _tell(self, count: int) -> None:
        with self._lock:
            self._progress.wrote(count)

    def _commit(self, writer: TargetWriter) -> None:
        if self._stop.is_set():
            return
        writer.commit()
        with self._lock:
            self._writers.discard(writer)
            self._progress.committed(writer.target)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop.set()


class _Task(NamedTuple):
    """A part of the files of a group, and their writers."""

    part: Part
    writers: Sequence[TargetWriter]


def _example(writers: Sequence[TargetWriter]) -> str:
    """A source file, to know the kind of its file system."""
    for writer in writers:
        for tensor in writer.target.tensors:
            for piece in tensor.pieces:
                return piece.source.path
    return writers[0].target.path
