"""Open source files: each opened once, a bounded number at a time, shared by all threads."""

from __future__ import annotations

import contextlib
import errno
import itertools
import resource
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from reshard.storage import CHANGED, FileStatus, OpenFile, ReadableFile, changed_meanwhile, store_of
from reshard.threads import ThreadLock

# Half of the process's limit: outputs, pipes and libraries need the other half.
_SHARE_OF_LIMIT = 2
_MOST_HANDLES = 1024


class Placement(Protocol):
    """Places of the tensors of a file, by which it is read."""

    @property
    def beside(self) -> Collection[str]:
        """Other files with elements of its tensors."""

    def placed(self, file: ReadableFile, handles: FileHandles) -> ReadableFile:
        """The file with its tensors at these places."""


class _Handle:
    """An open file, the threads that use it, and the lock for opening it."""

    def __init__(self) -> None:
        self.opened: OpenFile | None = None
        self.users = 0
        self.opening = ThreadLock()


class FileHandles:
    """A cache of files open for reading that closes the least recently used ones.

    Files in use are never closed: more than ``limit`` files may be open while threads use them.

    Attributes:
        limit: maximum of open files.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = default_limit() if limit is None else max(1, limit)
        self._lock = ThreadLock()
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._placements: dict[str, Placement] = {}
        # The status of every file at its first open, which differs after a replacement or a write: a writer can set the
        # time of last modification, but not the time of last change.
        self._first_seen: dict[str, FileStatus] = {}
        # Files whose reads all check the opened version.
        self._pinned: set[str] = set()

    @contextlib.contextmanager
    def borrow(self, path: str) -> Iterator[ReadableFile]:
        """The file ``path``, open for reading while the block runs; an `OSError` if it changed since its first open."""
        with self._lock:
            handle = self._handles.get(path)
            if handle is None:
                handle = self._handles[path] = _Handle()
            handle.users += 1
            self._handles.move_to_end(path)
            self._close_idle(self.limit)
        try:
            # Opening may take long on a network file system, so only this file's users wait for it.
            with handle.opening:
                if handle.opened is None:
                    handle.opened = self.open_file(path)
            placement = self._placements.get(path)
            yield handle.opened if placement is None else placement.placed(handle.opened, self)
        finally:
            with self._lock:
                handle.users -= 1
                if handle.opened is None and not handle.users:
                    del self._handles[path]
                self._close_idle(self.limit)

    def place(self, path: str, placement: Placement) -> None:
        """Make `borrow` return the file with its tensors at these places."""
        self._placements[path] = placement

    def as_stored(self, path: str) -> bool:
        """Whether the file that `borrow` returns has its bytes as they are stored."""
        return path not in self._placements

    def close(self) -> None:
        """Close every file that is not in use."""
        with self._lock:
            self._close_idle(0)

    def __enter__(self) -> FileHandles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_again(self, path: str) -> OpenFile:
        store = store_of(path)
        try:
            return store.open(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # Other code used up the descriptors: close some and retry once.
            self.close()
            return store.open(path)

    def open_file(self, path: str) -> OpenFile:
        """Open a file for `borrow`; the only place that opens source files."""
        file = self._open_again(path)
        try:
            status = file.status()
            with self._lock:
                if self._first_seen.setdefault(path, status) != status:
                    raise OSError(errno.ESTALE, CHANGED, path)
                if file.pinned:
                    self._pinned.add(path)
        except OSError:
            file.close()
            raise
        return file

    @property
    def seen(self) -> int:
        """The number of distinct files opened so far; see `seen_after`."""
        return len(self._first_seen)

    def seen_after(self, count: int) -> dict[str, FileStatus]:
        """The versions of files first opened after the first ``count`` files."""
        with self._lock:
            return dict(itertools.islice(self._first_seen.items(), count, None))

    def see(self, versions: Mapping[str, FileStatus]) -> None:
        """Add the versions of files that a worker process opened; other versions than here are a `RetryableError`."""
        with self._lock:
            changed = [
                path for path, version in versions.items() if self._first_seen.setdefault(path, version) != version
            ]
        for path in changed:
            raise changed_meanwhile(path, CHANGED)

    def check_unchanged(self, paths: Iterable[str]) -> None:
        """Check that files are unchanged since their first open, by name and by open handle.

        Then all reads so far are of one version. Else it is a `ReshardError`.
        """
        paths = list(paths)
        beside = (self._placements[path].beside for path in paths if path in self._placements)
        for path in dict.fromkeys([*paths, *itertools.chain.from_iterable(beside)]):
            first_seen = self._first_seen.get(path)
            if first_seen is None or path in self._pinned:
                continue
            try:
                # NFS caches attributes for up to a minute, but an open fetches them from the server.
                file = self._open_again(path)
                try:
                    versions = [file.status()]
                finally:
                    file.close()
                with self._lock:
                    handle = self._handles.get(path)
                    if handle is not None and handle.opened is not None:
                        versions.append(handle.opened.status())
            except OSError as error:
                raise changed_meanwhile(path, f"cannot be opened any more: {error.strerror or error}") from error
            if any(version != first_seen for version in versions):
                raise changed_meanwhile(path, CHANGED)

    def _close_idle(self, keep: int) -> None:
        surplus = len(self._handles) - keep
        if surplus <= 0:
            return
        idle = [path for path, handle in self._handles.items() if not handle.users]
        for path in idle[:surplus]:
            handle = self._handles.pop(path)
            if handle.opened is not None:
                handle.opened.close()


def default_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_HANDLES
    return max(8, min(soft // _SHARE_OF_LIMIT, _MOST_HANDLES))
