"""Which thread writes which part of which target file next.

Threads keep to files of their own as long as there are enough: two threads that write to one file
wait for each other in the kernel, which locks a file while it is written to. When no further group
of files can be begun, idle threads help with those that are still being written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple, Optional

from reshard.execute.parts import Part, parts_of
from reshard.execute.writing import TargetWriter
from reshard.plan.pieces import TargetFile

WriterOf = Callable[[TargetFile], TargetWriter]


class Task(NamedTuple):
    """A part of the files of a group, and their writers."""

    part: Part
    writers: Sequence[TargetWriter]


class _Group:
    """Target files that are written together, with parts that are yet to be handed out."""

    def __init__(self, files: Sequence[TargetFile], threads: int, writer_of: WriterOf) -> None:
        self.writers = [writer_of(target) for target in files]
        self._parts = parts_of(files, threads)
        self._next = next(self._parts)
        self.threads = 0

    def take(self) -> tuple[Task, bool]:
        """The next part, and whether it is the last one."""
        part, following = self._next, next(self._parts, None)
        for writer in self.writers:
            writer.add_part()
            if following is None:
                writer.seal()
        if following is not None:
            self._next = following
        return Task(part, self.writers), following is None


class Schedule:
    """Hands out the parts of all groups; shared by all threads.

    Args:
        groups: groups of target files, planned one by one as they are begun.
        threads: how many there are; the last file is cut so that all of them can help.
        writer_of: makes the writer of a file.
    """

    def __init__(self, groups: Iterable[Sequence[TargetFile]], threads: int, writer_of: WriterOf) -> None:
        self._threads = threads
        self._writer_of = writer_of
        self._groups = iter(groups)
        self._lock = threading.Lock()
        self._open: list[_Group] = []
        self._group_of: dict[int, _Group] = {}
        self._begun: set[TargetWriter] = set()

    def next(self) -> Optional[Task]:
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
            task, last = group.take()
            if last:
                self._open.remove(group)
            return task

    def give_up(self, task: Task) -> None:
        """Hand out no more of a group."""
        with self._lock:
            self._open = [group for group in self._open if group.writers is not task.writers]

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
