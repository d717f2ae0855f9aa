"""Running a conversion: target files in, bytes out.

Target files are planned one at a time and cut into parts of some tens of MiB. A few threads take the
parts in order, so a few target files are open at any moment, each written front to back; copying and
I/O leave the interpreter lock alone. Whoever writes the last part of a file commits it.

Memory: every thread owns one block buffer and one scratch buffer of equal size, and nothing else
that grows with the checkpoint.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

import numpy as np

from reshard.checkpoints import Data, FileHandles, Literal
from reshard.errors import RetryableError
from reshard.execute.boxes import boxes_of_range
from reshard.execute.filling import BlockFiller
from reshard.execute.reading import Reader, make_reader
from reshard.execute.writing import PartBuffer, TargetWriter
from reshard.plan.pieces import TargetFile

# Bytes of a part: large enough that threads seldom meet, small enough to share out one file.
PART_BYTES = 64 << 20
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


class _Part(NamedTuple):
    writer: TargetWriter
    offset: int
    segments: list[Union[Literal, Data]]


def convert(
    targets: Iterable[TargetFile],
    handles: FileHandles,
    options: ExecutionOptions,
    progress: Progress,
    stop: Optional[threading.Event] = None,
) -> None:
    """Write all target files.

    Args:
        targets: what to write; taken lazily.
        handles: open source files.
        options: how.
        progress: told of bytes written and files committed.
        stop: when set, nothing more is begun and nothing more committed.

    Raises:
        ReshardError: a file could not be read or written. Files committed before that are complete;
            nothing else is left behind.
    """
    _Run(handles, options, progress, stop or threading.Event()).run(targets)


class _Run:
    def __init__(
        self, handles: FileHandles, options: ExecutionOptions, progress: Progress, stop: threading.Event
    ) -> None:
        self._handles = handles
        self._options = options
        self._progress = progress
        self._stop = stop
        self._parts: queue.Queue[_Part] = queue.Queue(maxsize=2 * options.jobs)
        # Set when no further part will come.
        self._planned = threading.Event()
        self._lock = threading.Lock()
        self._writers: set[TargetWriter] = set()
        self._error: Optional[BaseException] = None

    def run(self, targets: Iterable[TargetFile]) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"reshard-{number}", daemon=True)
            for number in range(self._options.jobs)
        ]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            for target in targets:
                if self._stop.is_set():
                    break
                self._hand_out(target)
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

    def _hand_out(self, target: TargetFile) -> None:
        writer = TargetWriter(target)
        with self._lock:
            self._writers.add(writer)
        for part in parts_of(writer):
            writer.add_part()
            while not self._stop.is_set():
                try:
                    self._parts.put(part, timeout=0.2)
                    break
                except queue.Full:
                    continue
        if writer.seal():
            self._commit(writer)

    def _work(self) -> None:
        try:
            self._write_parts()
        except BaseException as error:
            self._fail(error)

    def _write_parts(self) -> None:
        reader: Optional[Reader] = None
        block = PartBuffer(np.empty(self._options.block_bytes, dtype=np.uint8))
        scratch = np.empty(self._options.block_bytes, dtype=np.uint8)
        while not self._stop.is_set():
            try:
                part = self._parts.get(timeout=0.05)
            except queue.Empty:
                if self._planned.is_set():
                    return
                continue
            if reader is None:
                maps = self._handles.limit // (4 * self._options.jobs)
                reader = make_reader(self._options.io, self._handles, _example(part), maps)
            self._write_part(part, block, BlockFiller(reader, scratch))
            if part.writer.part_done():
                self._commit(part.writer)

    def _write_part(self, part: _Part, block: PartBuffer, filler: BlockFiller) -> None:
        block.start(part.writer, part.offset)
        for segment in part.segments:
            if isinstance(segment, Literal):
                block.put(segment.data)
                continue
            tensor = part.writer.target.tensors[segment.tensor]
            first, last = segment.start // tensor.item_size, segment.stop // tensor.item_size
            most = max(1, block.size // tensor.item_size)
            for box in boxes_of_range(tensor.shape, first, last, most):
                if self._stop.is_set():
                    return
                elements = 1
                for low, high in box:
                    elements *= high - low
                filler.fill(tensor, box, block.reserve(elements * tensor.item_size))
                self._tell(elements * tensor.item_size)
        block.flush()

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


def parts_of(writer: TargetWriter) -> Iterator[_Part]:
    """Cut a target file into parts of about `PART_BYTES`, at element boundaries."""
    segments: list[Union[Literal, Data]] = []
    offset = size = 0
    for segment in writer.target.layout.segments():
        pending = [segment]
        if isinstance(segment, Data) and segment.stop - segment.start > PART_BYTES:
            tensor = writer.target.tensors[segment.tensor]
            pending = list(_split(segment, _step_bytes(tensor.shape, tensor.item_size)))
        for piece in pending:
            segments.append(piece)
            size += len(piece.data) if isinstance(piece, Literal) else piece.stop - piece.start
            if size >= PART_BYTES:
                yield _Part(writer, offset, segments)
                offset, size, segments = offset + size, 0, []
    if segments:
        yield _Part(writer, offset, segments)


def _step_bytes(shape: tuple[int, ...], item_size: int) -> int:
    """About `PART_BYTES`, as whole outermost rows where they are small enough."""
    row = item_size
    for size in shape[1:]:
        row *= size
    unit = row if row <= PART_BYTES else item_size
    return max(unit, PART_BYTES // unit * unit)


def _split(segment: Data, step: int) -> Iterator[Data]:
    start = segment.start
    while start < segment.stop:
        stop = min(segment.stop, (start // step + 1) * step)
        yield Data(segment.offset + start - segment.start, segment.tensor, start, stop)
        start = stop


def _example(part: _Part) -> str:
    """A source file, to know the kind of its file system."""
    for tensor in part.writer.target.tensors:
        for piece in tensor.pieces:
            return piece.source.path
    return part.writer.target.path


