"""Running a conversion: target files in, bytes out.

Target files are planned a group at a time and cut into parts of some tens of MiB, which a few threads
take (see `schedule`); copying and I/O leave the interpreter lock alone. Whoever writes the last part
of a file commits it.

Memory: every thread owns one block buffer, one scratch buffer of equal size and some windows for small
reads, and nothing else that grows with the checkpoint.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Optional, Union

import numpy as np

from reshard.checkpoints import Data, FileHandles, Literal
from reshard.defaults import MAX_MEMORY
from reshard.errors import ReshardError, RetryableError, TargetError, UnwritableError
from reshard.execute.boxes import boxes_of_range
from reshard.execute.filling import BlockFiller
from reshard.execute.parts import SharedRows
from reshard.execute.reading import Bytes, ChosenIo, choose_io, make_reader
from reshard.execute.schedule import Schedule, Task
from reshard.execute.writing import Expect, Finish, PartBuffer, TargetWriter
from reshard.layout import volume_of
from reshard.plan.pieces import TargetFile, TargetTensor
from reshard.storage import Sending
from reshard.storage.costs import LOCAL, Storage
from reshard.text.wording import plural

# Larger blocks than this make nothing faster.
MOST_BLOCK_BYTES = 8 << 20
LEAST_BLOCK_BYTES = 4 << 10
# Of smaller ones there are more requests and calls.
_FAIR_BLOCK_BYTES = 1 << 20
_MOST_WAITING = 64
# Requests under way per CPU, of whatever size.
_FEW = 4
# What windows of small reads need where several files are joined and each window costs a round trip.
_WINDOW_BYTES = 256 << 10
# So many files that fail are no accident of theirs.
_MOST_FAILURES = 8


@dataclass(frozen=True)
class ExecutionOptions:
    """How bytes are moved; none of this changes what is written.

    Attributes:
        jobs: CPUs to keep busy.
        max_memory: bytes that all buffers together may take.
        io: what was asked for: ``auto``, ``mmap`` or ``pread``.
        storage: what the source files lie on.
        checksum: compute a CRC-32 of every target file.
        target: what the target files lie on.
        together: target files that are written together at the most.
        part_bytes: bytes that the target's store holds of a file until they are written together; 0 for none.
    """

    jobs: int
    max_memory: int = MAX_MEMORY
    io: str = "auto"
    storage: Storage = LOCAL
    checksum: bool = False
    target: Storage = LOCAL
    together: int = 1
    part_bytes: int = 0

    @property
    def threads(self) -> int:
        """Threads; where requests take a round trip there are more of them than CPUs, as most wait."""
        wanted = max(self.jobs, self._under_way(self.storage))
        if not self.part_bytes:
            return max(wanted, self._under_way(self.target))
        # Parts are sent by threads of their own, which get the memory that these leave. A few more threads than CPUs
        # keep them busy: a thread that fills parts competes with many that send.
        wanted = max(wanted, min(_FEW * self.jobs, self._under_way(self.target)))
        return min(wanted, max(1, self.max_memory // 2 // self._least_share))

    @property
    def uploads(self) -> int:
        """Parts that are sent at a time, by threads of their own; 0 where the target's store takes files whole."""
        if not self.part_bytes:
            return 0
        room = self.max_memory - self.threads * self._least_share
        return max(1, min(self._under_way(self.target), room // self.part_bytes))

    @property
    def _buffer_memory(self) -> int:
        """Bytes that are not held by parts on their way."""
        return max(self.least_memory, self.max_memory - self.uploads * self.part_bytes)

    def _under_way(self, storage: Storage) -> int:
        """Requests to storage worth having under way."""
        most = _MOST_WAITING
        if storage.large:
            # What they bring together has its bound in memory: more requests are smaller ones.
            most = min(most, max(self.jobs * _FEW, self.max_memory // (2 * storage.large)))
        return min(most, self.jobs * storage.in_flight)

    @property
    def least_memory(self) -> int:
        """Bytes that the buffers take at least."""
        return 2 * LEAST_BLOCK_BYTES + self._held_bytes + self.part_bytes

    @property
    def _held_bytes(self) -> int:
        return self.storage.held + self._held_by_target

    @property
    def _held_by_target(self) -> int:
        # Threads meet in the middle of a part, so there may be two of each file.
        return self.together * 2 * self.part_bytes

    @property
    def _least_share(self) -> int:
        """Bytes of a thread with blocks that are large enough to be quick."""
        return self._held_bytes + 2 * _FAIR_BLOCK_BYTES

    @property
    def chosen_io(self) -> ChosenIo:
        """How sources are read, and why."""
        return choose_io(self.io, self.storage)

    @property
    def mapped(self) -> bool:
        """Whether sources are looked at through memory maps; never unasked, see `reading`."""
        return self.chosen_io.way == "mmap"

    @property
    def window_bytes(self) -> int:
        """Bytes of a thread's windows for small reads: an eighth of its share, or more of it on network disks."""
        share = max(0, self._buffer_memory // self.threads - self._held_by_target)
        return max(share // 8, min(_WINDOW_BYTES, share // 4)) if self.storage.large else share // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of each of the two buffers of a thread."""
        share = (self._buffer_memory // self.threads - self.window_bytes - self._held_bytes) // 2
        return max(LEAST_BLOCK_BYTES, min(MOST_BLOCK_BYTES, share))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of all threads together."""
        buffers = self.threads * (2 * self.block_bytes + self.window_bytes + self._held_bytes)
        return buffers + self.uploads * self.part_bytes


class Progress:
    """Told what has been done; does nothing by itself. Called from several threads, one at a time."""

    def begin(self, total: int, doing: str) -> None:
        """``total`` bytes are to be done; ``doing`` is the word for it, such as ``writing``."""

    def wrote(self, count: int) -> None:
        """So many of these bytes are done."""

    def committed(self, rank: int, size: int) -> None:
        """The file of a target rank, of so many bytes, has its final name."""

    def overflowed(self, name: str, count: int) -> None:
        """So many elements of a target tensor became infinite when they were cast."""

    def end(self) -> None:
        """Nothing more will come."""


def convert(
    groups: Iterable[Sequence[TargetFile]],
    handles: FileHandles,
    options: ExecutionOptions,
    progress: Progress,
    finish: Finish = lambda target, status, crc, named: None,
    expected: Expect = lambda target: None,
) -> None:
    """Write all target files.

    What fails for one file or group does not keep the others from being finished.

    Args:
        groups: what to write, files that read the same rows together; taken lazily.
        handles: open source files.
        options: how.
        progress: told of bytes written and files committed.
        finish: called for a file whose bytes are on disk, before it gets its name and after.
        expected: says what a file may replace.

    Raises:
        ReshardError: a file could not be read or written. Files committed before that are complete;
            nothing else is left behind.
    """
    _Run(groups, handles, options, progress, finish, expected).run()


class _Run:
    def __init__(
        self,
        groups: Iterable[Sequence[TargetFile]],
        handles: FileHandles,
        options: ExecutionOptions,
        progress: Progress,
        finish: Finish,
        expected: Expect,
    ) -> None:
        self._finish = finish
        self._expected = expected
        self._sending = Sending(options.uploads) if options.uploads else None
        self._commits: list[Future[None]] = []
        self._schedule = Schedule(groups, options.threads, self._writer_of)
        self._handles = handles
        self._options = options
        self._progress = progress
        # When set, nothing more is begun and nothing more committed.
        self._stop = threading.Event()
        self._lock = threading.Lock()
        # Threads that have ended, and a sign to the one that waits for them.
        self._ended: set[threading.Thread] = set()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._error: Optional[BaseException] = None
        # Files that were given up, while others are finished.
        self._failures: dict[int, ReshardError] = {}

    def run(self) -> None:
        """Start the threads and wait until everything is written, or something failed."""
        threads = [
            threading.Thread(target=self._work, name=f"reshard-{number}", daemon=True)
            for number in range(self._options.threads)
        ]
        try:
            for thread in threads:
                thread.start()
            self._wait_for(threads)
        except BaseException as error:
            self._fail(error)
        finally:
            # Also when asked to hurry: they may still be writing.
            while self._at_work(threads):
                try:
                    self._wait_for(threads)
                except BaseException as error:
                    self._fail(error)
            left = self._schedule.unfinished()
            for writer in left:
                writer.discard()
            if self._sending is not None:
                self._sending.close()
        if self._error is not None:
            raise self._error
        if self._failures:
            raise _together(list(self._failures.items()))
        if left:
            # Whatever the reason: a file that was asked for and is not there is never a success.
            target = left[0].target
            raise RetryableError(f"{target.path}: was not finished", file=target.path, rank=target.rank)

    def _work(self) -> None:
        try:
            self._write_parts()
        except BaseException as error:
            self._fail(error)
        finally:
            self._ended.add(threading.current_thread())
            self._wake.put(None)

    def _at_work(self, threads: Iterable[threading.Thread]) -> bool:
        # Not is_alive: until Python 3.13, a thread whose join was interrupted by a signal is said to be dead.
        return any(thread.ident is not None and thread not in self._ended for thread in threads)

    def _wait_for(self, threads: Iterable[threading.Thread]) -> None:
        """Wait for threads, with a timeout each time, so that a signal is handled while waiting."""
        while self._at_work(threads):
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=0.2)

    def _write_parts(self) -> None:
        options = self._options
        maps = max(1, self._handles.limit // (4 * options.threads))
        reader = make_reader(
            options.storage, options.mapped, self._handles, options.window_bytes, maps, options.threads
        )
        block = np.empty(options.block_bytes, dtype=np.uint8)
        filler = BlockFiller(reader, np.empty(options.block_bytes, dtype=np.uint8), self._overflowed)
        while not self._stop.is_set():
            task = self._schedule.next()
            if task is None:
                break
            try:
                self._write_part(task, block, filler)
            except UnwritableError:
                raise
            except RetryableError as error:
                # A source file cannot be read: what does not need it can still be finished.
                self._schedule.give_up(task)
                for writer in task.writers:
                    writer.fail(error)
            for writer in task.writers:
                if writer.part_done() or writer.error is not None:
                    self._commit_soon(writer)
        wait(self._commits)

    def _write_part(self, task: Task, block: Bytes, filler: BlockFiller) -> None:
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
                count = volume_of(box) * tensor.item_size
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
            count = volume_of(rows)
            rooms = [buffer.reserve(count * row) for buffer, row in zip(buffers, shared.row_bytes)]
            filler.fill_shared(shared, rows, rooms)
            self._tell(sum(len(room) for room in rooms))

    def _tell(self, count: int) -> None:
        with self._lock:
            self._progress.wrote(count)

    def _overflowed(self, name: str, count: int) -> None:
        with self._lock:
            self._progress.overflowed(name, count)

    def _commit_soon(self, writer: TargetWriter) -> None:
        """Commit a file; where that takes round trips, in a thread that sends, after its parts."""
        if self._sending is None:
            return self._commit(writer)

        def commit() -> None:
            try:
                self._commit(writer)
            except BaseException as error:
                self._fail(error)

        self._commits.append(self._sending.submit(commit))
        return None

    def _commit(self, writer: TargetWriter) -> None:
        if self._stop.is_set():
            return
        if writer.error is None:
            try:
                self._handles.check_unchanged(writer.target.source_paths)
            except ReshardError as error:
                writer.fail(error)
        try:
            writer.commit()
        except TargetError as error:
            writer.fail(error)
        with self._lock:
            if writer.error is None:
                self._schedule.committed(writer)
                self._progress.committed(writer.target.rank, writer.target.layout.size)
                return
            self._failures.setdefault(writer.target.rank, writer.error)
            many = len(self._failures) >= _MOST_FAILURES
        if many:
            self._stop.set()

    def _writer_of(self, target: TargetFile) -> TargetWriter:
        return TargetWriter(target, self._finish, self._options.checksum, self._expected(target), self._sending)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop.set()


def _together(failures: list[tuple[int, ReshardError]]) -> ReshardError:
    """One error for files that failed, each for its own reason."""
    (_, first), *others = sorted(failures, key=lambda failure: failure[0])
    if others:
        count = plural(len(others), "more file")
        first.message += f"\n{count} not written, the first because of {others[0][1].message}"
    return first
