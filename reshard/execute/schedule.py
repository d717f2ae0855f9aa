"""The order in which threads write the parts of target files."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple, Optional

from reshard.execute.parts import Parts
from reshard.execute.writing import TargetWriter
from reshard.plan.pieces import TargetFile


class FileGroup:
    """Target files that are written together, and their parts.

    Attributes:
        writers: of the files.
        parts: the parts of the files, cut at the first use: where worker processes cut them, this process does not.
        begun: number of parts that threads have begun.
        threads: number of threads that write parts.
    """

    def __init__(self, files: Sequence[TargetFile], threads: int, writer_of: Callable[[TargetFile], TargetWriter]):
        self.writers = [writer_of(target) for target in files]
        self.begun = 0
        self.threads = 0
        self._files = files
        self._max_threads = threads
        self._parts: Optional[Parts] = None
        self._lock = threading.Lock()

    @property
    def parts(self) -> Parts:
        """The parts of the files."""
        with self._lock:
            if self._parts is None:
                self._parts = Parts(self._files, self._max_threads, alone=True)
            return self._parts


class Task(NamedTuple):
    """A part of the files of a group, by its number; the files may have fewer parts."""

    group: FileGroup
    number: int


class Schedule:
    """The parts of all groups, for all threads.

    Each thread begins a group of its own while there are enough: the kernel locks a file during each write, so two
    threads that write to one file wait for each other. Later threads join the open group with the fewest threads.

    Args:
        groups: groups of target files, planned one by one as they are begun.
        threads: number of threads; the last file is cut so that all of them can help.
        beside: number of files that may be in writing when a thread begins another group, instead of joining one.
        writer_of: makes the writer of a file.
    """

    def __init__(
        self,
        groups: Iterable[Sequence[TargetFile]],
        threads: int,
        beside: int,
        writer_of: Callable[[TargetFile], TargetWriter],
    ) -> None:
        self._beside = beside
        self._threads = threads
        self._writer_of = writer_of
        self._groups = iter(groups)
        self._lock = threading.Lock()
        self._open: list[FileGroup] = []
        self._group_of: dict[int, FileGroup] = {}
        self._uncommitted: set[TargetWriter] = set()

    def next(self) -> Optional[Task]:
        """The next part for the calling thread; None when all parts are begun.

        Raises:
            ReshardError: planning the next group failed.
        """
        thread = threading.get_ident()
        with self._lock:
            group = self._group_of.get(thread)
            if group is None or group not in self._open:
                group = self._begin() or min(self._open, key=lambda candidate: candidate.threads, default=None)
                if group is None:
                    return None
                group.threads += 1
                self._group_of[thread] = group
            for writer in group.writers:
                writer.add_part()
            group.begun += 1
            return Task(group, group.begun - 1)

    def close(self, group: FileGroup) -> None:
        """Begin no more parts of a group: there are no more, or its files cannot be finished."""
        for writer in group.writers:
            writer.seal()
        with self._lock:
            if group in self._open:
                self._open.remove(group)

    def committed(self, writer: TargetWriter) -> None:
        """A file has its final name."""
        with self._lock:
            self._uncommitted.discard(writer)

    def unfinished(self) -> list[TargetWriter]:
        """Writers of files that were begun and not committed."""
        with self._lock:
            return list(self._uncommitted)

    def _begin(self) -> Optional[FileGroup]:
        if self._open and len(self._uncommitted) > self._beside:
            # A kill loses the files that are being written.
            return None
        files = next(self._groups, None)
        if files is None:
            return None
        group = FileGroup(files, self._threads, self._writer_of)
        self._open.append(group)
        self._uncommitted.update(group.writers)
        return group
