"""Open source files: each opened once, a bounded number at a time, shared by all threads."""

from __future__ import annotations

import contextlib
import errno
import itertools
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Optional

from reshard.checkpoints.decryption import DecryptedFiles, Decryption
from reshard.checkpoints.placed import PlacedFile, Placement
from reshard.errors import CheckpointError, ReshardError, RetryableError
from reshard.storage import FileStatus, OpenFile, ReadableFile, store_of, too_long

# Half of what the process may open: the rest is for outputs, pipes and whatever else is loaded.
_SHARE_OF_LIMIT = 2
_MOST_HANDLES = 1024

_CHANGED = "it was replaced or changed while it was read"

_BEING_WRITTEN = "another process is writing to it"

# Errors that the same call will give again; anything else (stale handle, I/O error) may pass.
_LASTING = {
    errno.EACCES: "may not be read",
    errno.EPERM: "may not be read",
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "does not exist",
    errno.EISDIR: "is a directory",
    errno.ELOOP: "is a loop of symbolic links",
    errno.ENXIO: "is not a file",
    errno.ENODEV: "is not a file",
}


def changed_meanwhile(path: str, how: str) -> RetryableError:
    """The error to show for a file that is no longer what was read of it."""
    return RetryableError(
        f"{path}: {how}",
        file=path,
        hint="wait until nothing writes to it any more, then give the same command again",
    )


def reading_error(path: str, error: OSError) -> ReshardError:
    """The error to show for a failed read of ``path``: lasting, or worth a retry."""
    if error.errno == errno.ENAMETOOLONG:
        return too_long(path)
    if error.errno == errno.EBUSY:
        return changed_meanwhile(path, error.strerror or "is in use")
    lasting = _LASTING.get(error.errno or 0)
    if lasting is not None:
        return CheckpointError(f"{path}: {lasting}", file=path)
    return RetryableError(f"{path}: cannot be read: {error.strerror or error}", file=path)


class FileVersion(NamedTuple):
    """What tells a file from another that was put in its place, and from itself before it was written to.

    A writer can set the time of last modification, but not that of last change.

    Attributes:
        device: what it lies on, as this machine numbers it.
        inode: its number there.
        size: bytes.
        modified: time of last modification, in nanoseconds.
        changed: what becomes another with every change, see `FileStatus`.
    """

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: FileStatus) -> FileVersion:
        """The version of a file with this status."""
        return cls(status.device, status.inode, status.size, status.modified, status.changed)


class _Handle:
    """An open file, what is read through it, the threads that use it, and the lock under which it is opened."""

    def __init__(self) -> None:
        self.opened: Optional[OpenFile] = None
        self.file: Optional[ReadableFile] = None
        self.users = 0
        self.opening = threading.Lock()


class FileHandles:
    """A cache of files open for reading that closes the least recently used ones.

    A file in use is never closed; so if more than ``limit`` files are in use at one moment,
    all of them stay open until they are given back.

    Attributes:
        limit: most files kept open.
        opened: how often a file was opened so far.
    """

    def __init__(self, limit: Optional[int] = None, decryption: Optional[Decryption] = None) -> None:
        """Prepare.

        Args:
            limit: most files kept open; by default a share of what the process may open.
            decryption: the key of encrypted files.
        """
        self.limit = default_limit() if limit is None else max(1, limit)
        self.opened = 0
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._decrypted = None if decryption is None else DecryptedFiles(decryption)
        self._placements: dict[str, Placement] = {}
        # Of every file when it was first opened.
        self._first_seen: dict[str, FileVersion] = {}
        # Files of which every read insists on the version that was opened.
        self._pinned: set[str] = set()

    @contextlib.contextmanager
    def borrow(self, path: str) -> Iterator[ReadableFile]:
        """The file ``path``, open for reading while the block runs.

        Raises:
            CheckpointError: it is encrypted, and cannot be decrypted with the key that there is.
            OSError: the file cannot be opened, or is another one than when it was opened before; see
                `reading_error`.
        """
        with self._lock:
            handle = self._handles.setdefault(path, _Handle())
            handle.users += 1
            self._handles.move_to_end(path)
            self._close_idle(self.limit)
        try:
            # Opening may take long on a network file system, so only this file's users wait for it.
            with handle.opening:
                if handle.opened is None:
                    handle.opened = self.open_file(path)
                if handle.file is None:
                    handle.file = handle.opened if self._decrypted is None else self._decrypted.open(handle.opened)
            placement = self._placements.get(path)
            yield handle.file if placement is None else PlacedFile(handle.file, placement)
        finally:
            with self._lock:
                handle.users -= 1
                if handle.opened is None and not handle.users:
                    del self._handles[path]
                self._close_idle(self.limit)

    def place(self, path: str, placement: Placement) -> None:
        """From now on `borrow` gives a file that is read by the places of its tensors."""
        self._placements[path] = placement

    def close(self) -> None:
        """Close every file that is not in use."""
        with self._lock:
            self._close_idle(0)

    def __enter__(self) -> FileHandles:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def _anew(self, path: str) -> OpenFile:
        store = store_of(path)
        try:
            return store.open(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # Somebody else took the descriptors that we counted on: make room and try once more.
            self.close()
            return store.open(path)

    def open_file(self, path: str) -> OpenFile:
        """Open a file that is not open yet, as `borrow` does for all who read; who counts what is opened looks here.

        Raises:
            OSError: it cannot be opened, or is another one than when it was opened before.
        """
        file = self._anew(path)
        try:
            if path not in self._first_seen and file.being_written():
                raise OSError(errno.EBUSY, _BEING_WRITTEN, path)
            self._check_unchanged(path, file.status())
        except OSError:
            file.close()
            raise
        with self._lock:
            self.opened += 1
            if file.pinned:
                self._pinned.add(path)
        return file

    def _check_unchanged(self, path: str, status: FileStatus) -> None:
        """Refuse a file of which the header, or a part of the contents, was read when it was another one."""
        seen = FileVersion.of(status)
        with self._lock:
            first_seen = self._first_seen.setdefault(path, seen)
        if seen != first_seen:
            raise OSError(errno.ESTALE, _CHANGED, path)

    @property
    def seen(self) -> int:
        """How many files were opened so far; see `seen_after`."""
        return len(self._first_seen)

    def seen_after(self, count: int) -> dict[str, FileVersion]:
        """Files that were opened for the first time after so many others, as they were then."""
        with self._lock:
            return dict(itertools.islice(self._first_seen.items(), count, None))

    def see(self, versions: Mapping[str, FileVersion]) -> None:
        """Take over what a copy of this in another process has seen.

        Raises:
            RetryableError: a file was another one here.
        """
        with self._lock:
            changed = [path for path, seen in versions.items() if self._first_seen.setdefault(path, seen) != seen]
        for path in changed:
            raise changed_meanwhile(path, _CHANGED)

    def check_unchanged(self, paths: Iterable[str]) -> None:
        """Insist that files are still what they were when they were first opened, by name and where they are open.

        What was read of them till now is then of one version.

        Raises:
            ReshardError: a file was written to, replaced or removed meanwhile, or cannot be looked at.
        """
        for path in paths:
            first_seen = self._first_seen.get(path)
            if first_seen is None or path in self._pinned:
                continue
            try:
                # NFS may tell of a file what it was a minute ago, but asks the server when it is opened.
                file = self._anew(path)
                try:
                    versions = [FileVersion.of(file.status())]
                finally:
                    file.close()
                with self._lock:
                    handle = self._handles.get(path)
                    if handle is not None and handle.opened is not None:
                        versions.append(FileVersion.of(handle.opened.status()))
            except OSError as error:
                raise changed_meanwhile(path, f"cannot be looked at any more: {error.strerror or error}") from error
            if any(version != first_seen for version in versions):
                raise changed_meanwhile(path, _CHANGED)

    def _close_idle(self, keep: int) -> None:
        """Close the longest unused files until ``keep`` are left, as far as they are idle."""
        surplus = len(self._handles) - keep
        if surplus <= 0:
            return
        idle = [path for path, handle in self._handles.items() if not handle.users]
        for path in idle[:surplus]:
            handle = self._handles.pop(path)
            if handle.opened is not None:
                handle.opened.close()


def default_limit() -> int:
    """How many files are kept open where nobody says how many: a share of what the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_HANDLES
    return max(8, min(soft // _SHARE_OF_LIMIT, _MOST_HANDLES))
