"""Running a conversion: target files in, bytes out.

Target files are planned a group at a time and cut into parts of some tens of MiB, which a few threads
take (see `parts`); copying and I/O leave the interpreter lock alone. Whoever writes the last part
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
from typing import Optional, Union

from reshard.checkpoints import Data, FileHandles, Literal
from reshard.errors import ReshardError, RetryableError, TargetError, UnwritableError
from reshard.execute.filling import BlockFiller
from reshard.execute.options import ExecutionOptions, Progress
from reshard.execute.parts import Schedule, SharedRows, Task
from reshard.execute.reader import BoxReader
from reshard.execute.reading import Bytes
from reshard.execute.writing import Expect, Finish, PartBuffer, TargetWriter
from reshard.layout import boxes_of_range, volume_of
from reshard.plan.pieces import TargetFile, TargetTensor
from reshard.storage import Sending
from reshard.text.wording import plural

# So many files that fail are no accident of theirs.
_MOST_FAILURES = 8


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
    _Execution(groups, handles, options, progress, finish, expected).run()


class _Execution:
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
        self._reader = BoxReader(handles, options, self._overflowed)
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
            with self._reader.worker() as (filler, block):
                self._write_parts(filler, block)
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

    def _write_parts(self, filler: BlockFiller, block: Bytes) -> None:
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
