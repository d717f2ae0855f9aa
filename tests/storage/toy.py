"""A store outside the package: flat names in one directory, ``toy://a/b`` as the file ``a%2Fb``.

It is one class and one line, ``STORES["toy"] = lambda path: store``. CONTRIBUTING.md lists what it implements.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote
from uuid import uuid4

from reshard.storage import DirectoryEntry, FileStatus, NewFile, OpenFile, Sending, Store
from reshard.storage.s3.store import ObjectEntry
from reshard.storage.store import LOCAL, Costs

SCHEME = "toy://"


class ToyStore(Store):
    """Whole files by name; directories are what names have in common before a slash.

    Attributes:
        published: called before a new file gets its name.
    """

    def __init__(self, root: Path) -> None:
        self._files, self._new = root / "files", root / "new"
        for directory in (self._files, self._new):
            directory.mkdir(parents=True)
        self.published: Callable[[str], None] = lambda path: None

    def keys(self, prefix: str) -> list[str]:
        """All names that begin so, without the scheme, sorted; ``a/`` marks an empty directory."""
        return sorted(key for key in map(unquote, os.listdir(self._files)) if key.startswith(prefix))

    def file(self, key: str) -> Path:
        """Where the bytes of a name lie."""
        return self._files / quote(key, safe="")

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """What is at a path."""
        with contextlib.suppress(FileNotFoundError):
            return FileStatus.of(os.stat(self.file(_key(path))))
        if not self.keys(_below(path)):
            raise _missing(path)
        return FileStatus(False, True, size=0, modified=0, changed=0, device=1, inode=hash(_key(path)))

    def entries(self, directory: str) -> list[DirectoryEntry]:
        """The next part of all names below."""
        below = _below(directory)
        keys = self.keys(below)
        if not keys:
            raise _missing(directory)
        directories = {name: bool(slash) for name, slash, _ in (key[len(below) :].partition("/") for key in keys)}
        return [ObjectEntry(name, directory) for name, directory in directories.items() if name]

    def open(self, path: str, through_links: bool = True) -> OpenFile:
        """Open the file."""
        try:
            return _ToyOpenFile(path, os.open(self.file(_key(path)), os.O_RDONLY))
        except FileNotFoundError:
            if self.keys(_below(path)):
                raise IsADirectoryError(errno.EISDIR, "is a directory", path) from None
            raise _missing(path) from None

    def costs(self, path: str) -> Costs:
        """As of a local disk."""
        return LOCAL

    def new_file(self, path: str, size: int, sending: Sending | None = None) -> NewFile:
        """A file beside the others."""
        return _ToyFile(self, path, self._new / uuid4().hex)

    def write_whole(self, path: str, data: bytes) -> None:
        """Write a file beside the others, then name it."""
        new = self._new / uuid4().hex
        new.write_bytes(data)
        os.replace(new, self.file(_key(path)))

    def create(self, path: str, data: bytes) -> bool:
        """A file beside the others, named if no other has its name."""
        new = self._new / uuid4().hex
        new.write_bytes(data)
        try:
            os.link(new, self.file(_key(path)))
        except FileExistsError:
            return False
        finally:
            os.unlink(new)
        return True

    def remove(self, path: str) -> None:
        """Remove the file."""
        os.unlink(self.file(_key(path)))


def _key(path: str) -> str:
    return path[len(SCHEME) :].rstrip("/")


def _below(path: str) -> str:
    return f"{_key(path)}/"


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


class _ToyOpenFile:
    descriptor = None
    pinned = False

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def status(self) -> FileStatus:
        return FileStatus.of(os.fstat(self._fd))

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self._fd, count, offset)

    def read_into(self, offset: int, out: memoryview) -> int:
        return os.preadv(self._fd, [out], offset)

    def close(self) -> None:
        os.close(self._fd)


class _ToyFile(NewFile):
    def __init__(self, store: ToyStore, path: str, new: Path) -> None:
        self._store = store
        self._path = path
        self._new = new
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def write(self, offset: int, data: memoryview) -> None:
        assert os.pwrite(self._fd, data, offset) == len(data)

    def finish(self) -> FileStatus:
        return FileStatus.of(os.fstat(self._fd))

    def publish(self) -> None:
        self._store.published(self._path)
        os.replace(self._new, self._store.file(_key(self._path)))

    def discard(self) -> None:
        self._new.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)
