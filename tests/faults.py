"""System calls that fail while a command runs."""

from __future__ import annotations

import builtins
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS: dict[str, list[tuple[Any, str]]] = {
    "open": [(os, "open"), (builtins, "open")],
    "read": [(os, "pread"), (os, "preadv"), (mmap, "mmap")],
    "write": [(os, "pwrite"), (os, "fsync"), (os, "ftruncate")],
    "names": [(os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "link")],
    "status": [(os, "stat"), (os, "lstat"), (os, "fstat"), (os, "statvfs")],
    "lists": [(os, "listdir"), (os, "scandir")],
    "locks": [(fcntl, "flock")],
}
ERRORS = {
    "open": [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOENT],
    "read": [errno.EIO, errno.ESTALE],
    "write": [errno.EIO, errno.ENOSPC],
    "names": [errno.EIO, errno.ENOSPC, errno.EROFS],
    "status": [errno.EIO, errno.ENOENT, errno.ESTALE],
    "lists": [errno.EIO, errno.EACCES, errno.EMFILE],
    "locks": [errno.ENOLCK, errno.EIO],
}


class Faults:
    """Counts calls on files below a directory and lets one of them fail."""

    def __init__(self, root: Path, fails_at: int | None, fault: Callable[[], None]) -> None:
        self.root, self.fails_at, self.fault = str(root), fails_at, fault
        self.calls = 0
        self._lock = threading.Lock()

    def concerns(self, first: object, directory: int | None = None) -> bool:
        """Whether a call's first argument is a file below the directory, or an open one."""
        if isinstance(first, int):
            return first > 2
        if directory is not None:
            return os.readlink(f"/proc/self/fd/{directory}").startswith(self.root)
        return isinstance(first, (str, os.PathLike)) and os.fspath(first).startswith(self.root)

    def wrap(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            # Only calls of the program count, not those of pytest or click.
            if args and self.concerns(args[0], options.get("dir_fd", options.get("src_dir_fd"))):
                with self._lock:
                    self.calls += 1
                    now = self.calls == self.fails_at
                if now:
                    self.fault()
            return plain(*args, **options)

        return call


@contextmanager
def failing(kind: str, root: Path, at: int | None, number: int) -> Iterator[Faults]:
    """While this runs, the ``at``-th call of a kind fails with an error of this number."""

    def fault() -> None:
        raise OSError(number, os.strerror(number))

    faults = Faults(root, at, fault)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS[kind]:
            patch.setattr(module, name, faults.wrap(getattr(module, name)))
        yield faults
