"""Running a conversion: target files in, bytes out.

Target files are planned a group at a time and cut into parts of some tens of MiB. Threads take the parts: each
writes them itself, or, where several cores are to be kept busy, has a worker process of its own write them (see
`processes`). Workers are copies of this process, so they plan and cut the same files by themselves and are handed
numbers and descriptors alone. Files are made, flushed, recorded and renamed here; whoever sees the last part of
a file done commits it.

Memory: everyone who writes parts owns one block buffer, one scratch buffer of equal size and some windows for small
reads, and nothing else that grows with the checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.files import FileVersion
from reshard.errors import ReshardError, RetryableError, TargetError, UnwritableError
from reshard.execute.options import ExecutionOptions, Progress
from reshard.execute.part_writing import PartWriter
from reshard.execute.parts import Parts
from reshard.execute.reader import BoxReader
from reshard.execute.writing import Expect, Finish, PartDone, TargetWriter
from reshard.plan.pieces import TargetFile
from reshard.processes import Crew, LostWorkerError, Notify, may_fork, private_bytes
from reshard.storage import Sending
from reshard.storage.new_local_file import WrittenFile
from reshard.text.wording import plural

# So many files that fail are no accident of theirs.
_MOST_FAILURES = 8
# So many writers of one file wait for each other, in the kernel, longer than page faults take.
_CROWD = 4
# Bytes that a worker writes before it tells.
_WORTH_TELLING = 8 << 20

TargetOf = Callable[[int], TargetFile]
"""Plans a target file, given its number."""


def convert(
    groups: Iterable[Sequence[TargetFile]],
    handles: FileHandles,
    options: ExecutionOptions,
    progress: Progress,
    finish: Finish = lambda target, status, crc, named: None,
    expected: Expect = lambda target: None,
    target_of: Optional[TargetOf] = None,
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
        target_of: plans the same files again, in worker processes; without it there are none.

    Raises:
        ReshardError: a file could not be read or written. Files committed before that are complete;
            nothing else is left behind.
    """
    groups = iter(groups)
    # What plans share is made with the first, before there are workers that would each make it.
    first = list(itertools.islice(groups, 1))
    groups = itertools.chain(first, groups)
    with contextlib.ExitStack() as stack:
        crew = None
        if target_of is not None and may_fork():
            options = options.shared(private_bytes())
            if options.processes > 1:
                serve = _Server(target_of, handles, options)
                crew = stack.enter_context(Crew(options.processes, options.threads // options.processes, serve))
        _Execution(groups, handles, options, progress, finish, expected, crew).run()


class _Group:
    """Target files that are written together, with parts that are yet to be handed out.

    Attributes:
        writers: of the files.
        parts: what they are cut into; not looked at where workers cut them.
        taken: parts that were handed out.
        threads: how many write them.
    """

    def __init__(self, files: Sequence[TargetFile], threads: int, writer_of: Callable[[TargetFile], TargetWriter]):
        self.writers = [writer_of(target) for target in files]
        self.taken = 0
        self.threads = 0
        self._files = files
        self._threads = threads
        self._parts: Optional[Parts] = None
        self._lock = threading.Lock()

    @property
    def parts(self) -> Parts:
        """Likewise."""
        with self._lock:
            if self._parts is None:
                self._parts = Parts(self._files, self._threads, alone=True)
            return self._parts


class _Task(NamedTuple):
    """A part of the files of a group, by its number; there may be no such part."""

    group: _Group
    number: int


class _Schedule:
    """Hands out the parts of all groups; shared by all threads.

    Threads keep to files of their own as long as there are enough: two that write to one file wait for each other in
    the kernel, which locks a file while it is written to. When no further group of files can be begun, idle threads
    help with those that are still being written.

    Args:
        groups: groups of target files, planned one by one as they are begun.
        threads: how many there are; the last file is cut so that all of them can help.
        writer_of: makes the writer of a file.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[TargetFile]],
        threads: int,
        writer_of: Callable[[TargetFile], TargetWriter],
    ) -> None:
        self._threads = threads
        self._writer_of = writer_of
        self._groups = iter(groups)
        self._lock = threading.Lock()
        self._open: list[_Group] = []
        self._group_of: dict[int, _Group] = {}
        self._begun: set[TargetWriter] = set()

    def next(self) -> Optional[_Task]:
        """The next part for the calling thread; None when everything has been handed out.

        Raises:
            ReshardError: planning the next group failed.
        """
        thread = threading.get_ident()
        with self._lock:
            group = self._group_of.get(thread)
            if group is None or group not in self._open:
                group = self._begin() or min(self._open, key=lambda one: one.threads, default=None)
                if group is None:
                    return None
                group.threads += 1
                self._group_of[thread] = group
            for writer in group.writers:
                writer.add_part()
            group.taken += 1
            return _Task(group, group.taken - 1)

    def close(self, group: _Group) -> None:
        """Hand out no more of a group: there are no more parts, or it is given up."""
        for writer in group.writers:
            writer.seal()
        with self._lock:
            if group in self._open:
                self._open.remove(group)

    def committed(self, writer: TargetWriter) -> None:
        """A file has its final name."""
        with self._lock:
            self._begun.discard(writer)

    def unfinished(self) -> list[TargetWriter]:
        """Writers of files that were begun and not committed."""
        with self._lock:
            return list(self._begun)

    def _begin(self) -> Optional[_Group]:
        files = next(self._groups, None)
        if files is None:
            return None
        group = _Group(files, self._threads, self._writer_of)
        self._open.append(group)
        self._begun.update(group.writers)
        return group


class _Execution:
    def __init__(
        self,
        groups: Iterable[Sequence[TargetFile]],
        handles: FileHandles,
        options: ExecutionOptions,
        progress: Progress,
        finish: Finish,
        expected: Expect,
        crew: Optional[Crew],
    ) -> None:
        self._finish = finish
        self._expected = expected
        self._crew = crew
        self._sending = Sending(options.uploads) if options.uploads else None
        self._commits: list[Future[None]] = []
        self._schedule = _Schedule(groups, options.threads, self._writer_of)
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
            with contextlib.ExitStack() as stack:
                write = self._write_there
                if self._crew is None:
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
        # Not is_alive: until Python 3.13, a thread whose join was interrupted by a signal is said to be dead.
        return any(thread.ident is not None and thread not in self._ended for thread in threads)

    def _wait_for(self, threads: Iterable[threading.Thread]) -> None:
        """Wait for threads, with a timeout each time, so that a signal is handled while waiting."""
        while self._at_work(threads):
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=0.2)

    def _write_parts(self, write: Callable[[_Task], None]) -> None:
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
                # A source file cannot be read: what does not need it can still be finished.
                self._schedule.close(task.group)
                for writer in writers:
                    writer.fail(error)
            for writer in writers:
                if writer.part_done() or writer.error is not None:
                    self._commit_soon(writer)
        wait(self._commits)

    def _write_here(self, parts: PartWriter, task: _Task) -> None:
        part, last = task.group.parts.take(task.number)
        if last:
            self._schedule.close(task.group)
        if part is not None:
            for writer in task.group.writers:
                writer.begin()
            parts.write(part, task.group.writers)

    def _write_there(self, task: _Task) -> None:
        """Have a worker process write a part.

        Raises:
            UnwritableError: a file cannot be written, and no other could.
            ReshardError: a source file cannot be read.
        """
        assert self._crew is not None
        writers = task.group.writers
        told: dict[str, Callable[..., None]] = {
            "wrote": self._wrote,
            "copied": self._copied,
            "overflowed": self._overflowed,
            "ends": partial(self._schedule.close, task.group),
        }
        with contextlib.ExitStack() as stack:
            descriptors = [stack.enter_context(writer.handed_out()) for writer in writers]
            members = [
                _Member(writer.target.rank, descriptor is not None, writer.mapped, writer.copies)
                for writer, descriptor in zip(writers, descriptors)
            ]
            request = _Request(members, task.number, writers[0].checksums is not None)
            given = [descriptor for descriptor in descriptors if descriptor is not None]
            try:
                done, seen = self._crew.call(request, given, lambda message: told[message[0]](*message[1:]))
            except LostWorkerError as error:
                if self._stop.is_set():
                    return
                targets = [writer.target for writer in self._schedule.unfinished()]
                raise _lost(error, targets, writers[0].target) from error
        for writer, one in zip(writers, done):
            writer.adopt(one)
        self._handles.see(seen)

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
        options = self._options
        crowd = self._crew is not None and options.threads >= _CROWD * options.files
        return TargetWriter(
            target, self._finish, options.checksum, self._expected(target), self._sending, allocated=crowd
        )

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._stop.set()
        if self._crew is not None:
            # Whoever waits for a worker hears of it at once.
            self._crew.kill()


class _Member(NamedTuple):
    """A file of a group, as a worker hears of it.

    Attributes:
        rank: its number.
        given: whether a descriptor of it comes along; without one it is not written.
        mapped: whether it is written through maps.
        copies: whether its file system copies ranges of files.
    """

    rank: int
    given: bool
    mapped: bool
    copies: bool


class _Request(NamedTuple):
    """What a worker is to write: a part of some files, by its number."""

    members: Sequence[_Member]
    number: int
    checksum: bool


class _Server:
    """Writes parts in worker processes, for the threads of an execution.

    Args:
        target_of: plans the files.
        handles: open source files.
        options: how, for all processes together.
    """

    def __init__(self, target_of: TargetOf, handles: FileHandles, options: ExecutionOptions) -> None:
        self._target_of = target_of
        self._handles = handles
        self._options = options
        self._own = threading.local()

    def __call__(
        self, request: _Request, descriptors: Sequence[int], tell: Notify
    ) -> tuple[list[PartDone], dict[str, FileVersion]]:
        """Write a part; what came of it, per file, and source files that were opened first here."""
        given = iter(descriptors)
        with contextlib.ExitStack() as stack:
            files = [WrittenFile(next(given)) if member.given else None for member in request.members]
            for file in files:
                if file is not None:
                    stack.callback(file.close)
            own = self._own
            if not hasattr(own, "worker"):
                reader = BoxReader(self._handles, self._options, lambda *told: own.tell(("overflowed", *told)))
                own.worker, own.parts = reader.new_worker(), None
            own.tell = tell
            ranks = [member.rank for member in request.members]
            if own.parts is None or own.ranks != ranks or own.number >= request.number:
                own.parts = Parts([self._target_of(rank) for rank in ranks], self._options.threads, alone=False)
            own.ranks, own.number = ranks, request.number
            known = self._handles.seen
            part, last = own.parts.take(request.number)
            if last:
                tell(("ends",))
            writers = [
                TargetWriter(target, _finished, request.checksum, file=file, mapped=member.mapped, copies=member.copies)
                for target, file, member in zip(own.parts.files, files, request.members)
            ]
            for writer, file in zip(writers, files):
                if file is None:
                    writer.fail(RetryableError(f"{writer.target.path}: was given up", file=writer.target.path))
            if part is not None:
                with _Untold(tell) as untold:
                    PartWriter(
                        own.worker,
                        self._handles,
                        lambda: False,
                        untold.add,
                        lambda count: tell(("copied", count)),
                    ).write(part, writers)
            return [writer.done for writer in writers], self._handles.seen_after(known)


class _Untold:
    """Tells of bytes when there are many."""

    def __init__(self, tell: Notify) -> None:
        self._tell = tell
        self._bytes = 0

    def add(self, count: int) -> None:
        """So many more are done."""
        self._bytes += count
        if self._bytes >= _WORTH_TELLING:
            self._flush()

    def _flush(self) -> None:
        if self._bytes:
            self._tell(("wrote", self._bytes))
            self._bytes = 0

    def __enter__(self) -> _Untold:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()


def _finished(*_: object) -> None:
    """Files are finished, and recorded, by the process that has made them."""


def _lost(error: LostWorkerError, targets: Sequence[TargetFile], first: TargetFile) -> ReshardError:
    """The error for files that cannot be finished because a worker died."""
    names = ", ".join(sorted(target.path for target in targets)[:_MOST_FAILURES])
    more = f" and {len(targets) - _MOST_FAILURES} more" if len(targets) > _MOST_FAILURES else ""
    return UnwritableError(
        f"{names}{more}: not written, since {error.message}",
        file=first.path,
        rank=first.rank,
        hint=error.hint,
    )


def _together(failures: list[tuple[int, ReshardError]]) -> ReshardError:
    """One error for files that failed, each for its own reason."""
    (_, first), *others = sorted(failures, key=lambda failure: failure[0])
    if others:
        count = plural(len(others), "more file")
        first.message += f"\n{count} not written, the first because of {others[0][1].message}"
    return first
