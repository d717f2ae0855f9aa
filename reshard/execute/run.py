"""Writing target files: plans in, bytes out.

Target files are planned a group at a time and cut into parts of some tens of MiB. Threads take the parts from a
`Execution`. Each thread writes its parts itself, or has a worker process write them where several cores share the work
(`part_server`). Workers are copies of this process: they plan and cut the same files again, and receive
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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from reshard.checkpoints import FileHandles
from reshard.errors import ReshardError, RetryableError, TargetError, UnwritableError
from reshard.execute.budget import Budget, Progress
from reshard.execute.part_server import PartRequest, PartServer, TargetOf
from reshard.execute.parts import FileGroup, write_part
from reshard.execute.reader import BoxReader, FileReader
from reshard.execute.writing import Finish, TargetWriter
from reshard.plan.pieces import TargetFile
from reshard.processes import Crew, LostWorkerError, may_fork
from reshard.storage import Sending
from reshard.text.messages import plural
from reshard.threads import wait_for

if TYPE_CHECKING:
    from concurrent.futures import Future

# The run ends at this number of failed files: their common cause will fail the others, too.
_MAX_FAILURES = 8


def write_files(
    groups: Iterable[Sequence[TargetFile]],
    handles: FileHandles,
    budget: Budget,
    progress: Progress,
    finish: Finish | None = None,
    checksum: bool = False,
    target_of: TargetOf | None = None,
    samples: Iterable[int] = (),
) -> None:
    """Write all target files.

    After the failure of a file or group, the others are still finished.

    Args:
        groups: target files; those of a group read the same rows. Taken lazily.
        finish: called for a file whose bytes are on disk, before it gets its name.
        checksum: compute a CRC-32 of every target file, and fill in the CRCs inside it.
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
        crew = None
        if target_of is not None and budget.processes > 1 and may_fork():
            others = set(samples).difference(target.rank for target in itertools.chain(*first))
            serve = PartServer(target_of, handles, budget)
            serve.load_for(itertools.chain(*first, map(target_of, others)))
            crew = stack.enter_context(Crew(budget.processes, budget.threads // budget.processes, serve))
        Execution(groups, handles, budget, progress, finish, checksum, crew).run()


class Execution:
    """The threads of a run, and the parts of all groups for them.

    Each thread begins a group of its own while there are enough: the kernel locks a file during each write, so two
    threads that write to one file wait for each other. Later threads join the open group with the fewest threads.

    Args:
        groups: groups of target files, planned one by one as they are begun.
        crew: worker processes that write the parts; None for the threads themselves.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[TargetFile]],
        handles: FileHandles,
        budget: Budget,
        progress: Progress,
        finish: Finish | None,
        checksum: bool,
        crew: Crew | None,
    ) -> None:
        self._groups = iter(groups)
        self._handles = handles
        self._budget = budget
        self._reader = BoxReader(handles, budget, self._overflowed)
        self._progress = progress
        self._finish = finish
        self._checksum = checksum
        self._crew = crew
        self._sending = Sending(budget.uploads) if budget.uploads else None
        self._commits: list[Future[None]] = []
        # Held while a group is planned, which may take long.
        self._planning = threading.Lock()
        self._open: list[FileGroup] = []
        self._group_of: dict[int, FileGroup] = {}
        # Writers of files that were begun and not committed.
        self._uncommitted: set[TargetWriter] = set()
        # When set, no more parts are begun and no more files committed.
        self._stop = threading.Event()
        # For what is counted and reported.
        self._lock = threading.Lock()
        # Threads that have ended, and a queue that wakes the thread which waits for them.
        self._ended: set[threading.Thread] = set()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # Errors of failed files, by number, while the others are finished.
        self._failures: dict[int, ReshardError] = {}

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._work, name=f"reshard-{number}", daemon=True)
            for number in range(self._budget.threads)
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
            unfinished = [*self._uncommitted]
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
                if self._crew is None:
                    write = partial(self._write_here, stack.enter_context(self._reader.reader()))
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

    def _write_parts(self, write: Callable[[FileGroup, int], None]) -> None:
        while not self._stop.is_set():
            following = self._next_part()
            if following is None:
                break
            group, number = following
            try:
                write(group, number)
            except UnwritableError:
                raise
            except RetryableError as error:
                # A source file cannot be read: files that do not need it can still be finished.
                self._close(group)
                for writer in group.writers:
                    writer.fail(error)
            last = self._part_done(group)
            for writer in group.writers:
                if last or writer.error is not None:
                    self._commit_soon(writer)
        wait_for(self._commits)

    def _next_part(self) -> tuple[FileGroup, int] | None:
        """The group and number of the calling thread's next part, which may not exist; None when all are begun.

        Raises:
            ReshardError: planning the next group failed.
        """
        thread = threading.get_ident()
        with self._planning:
            group = self._group_of.get(thread)
            if group is None or group not in self._open:
                group = self._begin_group() or min(self._open, key=lambda candidate: candidate.threads, default=None)
                if group is None:
                    return None
                group.threads += 1
                self._group_of[thread] = group
            group.begun += 1
            return group, group.begun - 1

    def _begin_group(self) -> FileGroup | None:
        limits = self._budget.limits
        if self._open and len(self._uncommitted) > limits.in_flight - limits.most:
            # A kill loses the files that are being written.
            return None
        files = next(self._groups, None)
        if files is None:
            return None
        allocated = self._budget.through_maps
        writers = [TargetWriter(f, self._finish, self._checksum, self._sending, allocated=allocated) for f in files]
        group = FileGroup(files, self._budget.threads, writers)
        self._open.append(group)
        self._uncommitted.update(writers)
        return group

    def _close(self, group: FileGroup) -> None:
        """Begin no more parts of a group: there are no more, or its files cannot be finished."""
        with self._planning:
            if group in self._open:
                self._open.remove(group)

    def _part_done(self, group: FileGroup) -> bool:
        """A part of a group is done; returns whether it was the last."""
        with self._planning:
            group.done += 1
            return group not in self._open and group.done == group.begun

    def _write_here(self, reader: FileReader, group: FileGroup, number: int) -> None:
        part, last = group.take(number)
        if last:
            self._close(group)
        if part is not None:
            for writer in group.writers:
                writer.begin()
            for count in write_part(part, group.writers, reader):
                self._wrote(count)
                if self._stop.is_set():
                    break

    def _write_in_worker(self, group: FileGroup, number: int) -> None:
        """Have a worker process write a part.

        Raises:
            UnwritableError: a file cannot be written, and no other could.
            ReshardError: a source file cannot be read.
        """
        assert self._crew is not None
        receivers: dict[str, Callable[..., None]] = {
            "wrote": self._wrote,
            "overflowed": self._overflowed,
            "last": partial(self._close, group),
        }
        writers = group.writers
        try:
            with contextlib.ExitStack() as stack:
                descriptors = [stack.enter_context(writer.handed_out()) for writer in writers]
                members = [
                    (writer.target.rank, descriptor is not None, writer.mapped)
                    for writer, descriptor in zip(writers, descriptors)
                ]
                request: PartRequest = (members, number, self._checksum)
                files = [descriptor for descriptor in descriptors if descriptor is not None]
                results, versions = self._crew.call(request, files, lambda message: receivers[message[0]](*message[1:]))
        except LostWorkerError as error:
            if self._stop.is_set():
                return
            with self._planning:
                targets = [writer.target for writer in self._uncommitted]
            raise _lost(error, targets, writers[0].target) from error
        for writer, result in zip(writers, results):
            writer.adopt(*result)
        self._handles.see(versions)

    def _wrote(self, count: int) -> None:
        with self._lock:
            self._progress.wrote(count)

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
        if writer.error is None:
            with self._planning:
                self._uncommitted.discard(writer)
            with self._lock:
                self._progress.committed(writer.target.rank, writer.target.layout.size)
            return
        with self._lock:
            self._failures.setdefault(writer.target.rank, writer.error)
            many = len(self._failures) >= _MAX_FAILURES
        if many:
            self._stop.set()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop.set()
        if self._crew is not None:
            # Threads that wait for a worker then end at once.
            self._crew.kill()


def _lost(error: LostWorkerError, targets: Sequence[TargetFile], first: TargetFile) -> ReshardError:
    names = ", ".join(sorted(target.path for target in targets)[:_MAX_FAILURES])
    more = f" and {len(targets) - _MAX_FAILURES} more" if len(targets) > _MAX_FAILURES else ""
    return UnwritableError(
        f"{names}{more}: not written, because {error.message}",
        file=first.path,
        rank=first.rank,
        hint=error.hint,
    )


def _together(failures: list[tuple[int, ReshardError]]) -> ReshardError:
    (_, first), *more = sorted(failures, key=lambda failure: failure[0])
    if more:
        count = plural(len(more), "more file")
        first.message += f"\n{count} not written, the first because of {more[0][1].message}"
    return first
