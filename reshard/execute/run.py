"""Running a conversion: target files in, bytes out.

Target files are planned a group at a time and cut into parts of some tens of MiB. Threads take the parts from a
`Schedule`. Each thread writes its parts itself, or has a worker process write them where several cores share the work
(`processes`, `part_server`). Workers are copies of this process: they plan and cut the same files again, and receive
only numbers and descriptors. This process creates, flushes, records and renames the files; the thread that finishes
the last part of a file commits it.

Memory: each thread that writes parts owns a block buffer, a scratch buffer and some windows for small reads. Nothing
else grows with the checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Callable, Optional

from reshard.checkpoints import FileHandles
from reshard.errors import ReshardError, RetryableError, TargetError, UnwritableError
from reshard.execute.options import ExecutionOptions, Progress
from reshard.execute.part_writing import PartWriter
from reshard.execute.reader import BoxReader
from reshard.execute.schedule import Schedule, Task
from reshard.execute.writing import Finish, TargetWriter
from reshard.plan.pieces import TargetFile
from reshard.processes import LostWorkerError, may_fork, private_bytes
from reshard.storage import Sending
from reshard.text.messages import plural
from reshard.threads import wait_for

if TYPE_CHECKING:
    from concurrent.futures import Future

    from reshard.execute.part_server import PartProcesses, TargetOf

# The run ends at this number of failed files: their common cause will fail the others, too.
_MAX_FAILURES = 8


def convert(
    groups: Iterable[Sequence[TargetFile]],
    handles: FileHandles,
    options: ExecutionOptions,
    progress: Progress,
    finish: Finish = lambda target, status, crc: None,
    target_of: Optional[TargetOf] = None,
    samples: Iterable[int] = (),
) -> None:
    """Write all target files.

    After the failure of a file or group, the others are still finished.

    Args:
        groups: target files; those of a group read the same rows. Taken lazily.
        handles: open source files.
        options: CPUs, memory and storage.
        progress: counts bytes written and files committed.
        finish: called for a file whose bytes are on disk, before it gets its name.
        target_of: plans the same files again, in worker processes; without it there are none.
        samples: numbers of files that may need other modules than the first group; workers share what they need.

    Raises:
        ReshardError: a file could not be read or written. Files committed before that are complete;
            nothing else is left behind.
    """
    groups = iter(groups)
    # The first plan fills caches that all plans share: each worker would fill them again.
    first = list(itertools.islice(groups, 1))
    groups = itertools.chain(first, groups)
    with contextlib.ExitStack() as stack:
        processes = None
        if target_of is not None and may_fork():
            options = options.shared(private_bytes())
            if options.processes > 1:
                # Imported late: a small rank is written by this process alone.
                from reshard.execute.part_server import PartProcesses

                others = set(samples).difference(target.rank for target in itertools.chain(*first))
                sampled = itertools.chain(*first, map(target_of, others))
                processes = stack.enter_context(PartProcesses(target_of, handles, options, sampled))
        _Execution(groups, handles, options, progress, finish, processes).run()


class _Execution:
    def __init__(
        self,
        groups: Iterable[Sequence[TargetFile]],
        handles: FileHandles,
        options: ExecutionOptions,
        progress: Progress,
        finish: Finish,
        processes: Optional[PartProcesses],
    ) -> None:
        self._finish = finish
        self._processes = processes
        self._sending = Sending(options.uploads) if options.uploads else None
        self._commits: list[Future[None]] = []
        self._schedule = Schedule(
            groups, options.threads, max(0, options.in_flight - options.together), self._writer_of
        )
        self._handles = handles
        self._options = options
        self._reader = BoxReader(handles, options, self._overflowed)
        self._progress = progress
        # When set, no more parts are begun and no more files committed.
        self._stop = threading.Event()
        self._lock = threading.Lock()
        # Threads that have ended, and a queue that wakes the thread which waits for them.
        self._ended: set[threading.Thread] = set()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._error: Optional[BaseException] = None
        # Errors of failed files, by number, while the others are finished.
        self._failures: dict[int, ReshardError] = {}

    def run(self) -> None:
        """Start the threads and wait until all files are written, or the run failed."""
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
            # After a signal, too: the threads may still be writing.
            while self._at_work(threads):
                try:
                    self._wait_for(threads)
                except BaseException as error:
                    self._fail(error)
            unfinished = self._schedule.unfinished()
            for writer in unfinished:
                writer.discard()
            if self._sending is not None:
                self._sending.close()
        if self._error is not None:
            raise self._error
        if self._failures:
            raise _together(list(self._failures.items()))
        if unfinished:
            # Without a known error: a missing file is never a success.
            target = unfinished[0].target
            raise RetryableError(f"{target.path}: was not finished", file=target.path, rank=target.rank)

    def _work(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                write = self._write_in_worker
                if self._processes is None:
                    worker = stack.enter_context(self._reader.worker())
                    write = partial(
                        self._write_here,
                        PartWriter(worker, self._handles, self._stop.is_set, self._wrote, self._copied),
                    )
                self._write_parts(write)
        except BaseException as error:
            self._fail(error)
        finally:
            self._ended.add(threading.current_thread())
            self._wake.put(None)

    def _at_work(self, threads: Iterable[threading.Thread]) -> bool:
        # Not is_alive: until Python 3.13 it is False for a thread whose join was interrupted by a signal.
        return any(thread.ident is not None and thread not in self._ended for thread in threads)

    def _wait_for(self, threads: Iterable[threading.Thread]) -> None:
        """Wait for threads, with a timeout each time, so that a signal is handled while waiting."""
        while self._at_work(threads):
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=0.2)

    def _write_parts(self, write: Callable[[Task], None]) -> None:
        while not self._stop.is_set():
            task = self._schedule.next()
            if task is None:
                break
            writers = task.group.writers
            try:
                write(task)
            except UnwritableError:
                raise
            except RetryableError as error:
                # A source file cannot be read: files that do not need it can still be finished.
                self._schedule.close(task.group)
                for writer in writers:
                    writer.fail(error)
            for writer in writers:
                if writer.part_done() or writer.error is not None:
                    self._commit_soon(writer)
        wait_for(self._commits)

    def _write_here(self, parts: PartWriter, task: Task) -> None:
        part, last = task.group.parts.take(task.number)
        if last:
            self._schedule.close(task.group)
        if part is not None:
            for writer in task.group.writers:
                writer.begin()
            parts.write(part, task.group.writers)

    def _write_in_worker(self, task: Task) -> None:
        """Have a worker process write a part.

        Raises:
            UnwritableError: a file cannot be written, and no other could.
            ReshardError: a source file cannot be read.
        """
        assert self._processes is not None
        receivers: dict[str, Callable[..., None]] = {
            "wrote": self._wrote,
            "copied": self._copied,
            "overflowed": self._overflowed,
            "last": partial(self._schedule.close, task.group),
        }
        try:
            self._processes.write(task.group.writers, task.number, lambda message: receivers[message[0]](*message[1:]))
        except LostWorkerError as error:
            if self._stop.is_set():
                return
            targets = [writer.target for writer in self._schedule.unfinished()]
            raise _lost(error, targets, task.group.writers[0].target) from error

    def _wrote(self, count: int) -> None:
        with self._lock:
            self._progress.wrote(count)

    def _copied(self, count: int) -> None:
        with self._lock:
            self._progress.copied(count)

    def _overflowed(self, name: str, count: int) -> None:
        with self._lock:
            self._progress.overflowed(name, count)

    def _commit_soon(self, writer: TargetWriter) -> None:
        """Commit a file; for stores that take files in parts, in a thread that sends, after the parts."""
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
            many = len(self._failures) >= _MAX_FAILURES
        if many:
            self._stop.set()

    def _writer_of(self, target: TargetFile) -> TargetWriter:
        checksum, allocated = self._options.checksum, self._options.through_maps
        return TargetWriter(target, self._finish, checksum, self._sending, allocated=allocated)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop.set()
        if self._processes is not None:
            # Threads that wait for a worker then end at once.
            self._processes.kill()


def _lost(error: LostWorkerError, targets: Sequence[TargetFile], first: TargetFile) -> ReshardError:
    """The error for files that cannot be finished because a worker died."""
    names = ", ".join(sorted(target.path for target in targets)[:_MAX_FAILURES])
    more = f" and {len(targets) - _MAX_FAILURES} more" if len(targets) > _MAX_FAILURES else ""
    return UnwritableError(
        f"{names}{more}: not written, because {error.message}",
        file=first.path,
        rank=first.rank,
        hint=error.hint,
    )


def _together(failures: list[tuple[int, ReshardError]]) -> ReshardError:
    """One error for several failed files."""
    (_, first), *more = sorted(failures, key=lambda failure: failure[0])
    if more:
        count = plural(len(more), "more file")
        first.message += f"\n{count} not written, the first because of {more[0][1].message}"
    return first
