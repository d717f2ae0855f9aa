"""Locks on files, which the kernel gives up when a process dies.

Some file systems have none, and on some they do not reach other machines; so there are three answers
to whether somebody else holds a lock: yes, no, and nobody knows.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Callable, Optional

from reshard.storage import look_error

_PATIENCE = 60.0
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


class Lock:
    """A lock that is held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def shared(cls, path: str) -> Lock:
        """Hold a lock beside others who share it; the file is made if need be.

        Raises:
            OSError: the file cannot be made.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)
        return cls(fd)

    def release(self) -> None:
        """Give it up."""
        os.close(self._fd)


@contextlib.contextmanager
def try_alone(path: str) -> Iterator[Optional[bool]]:
    """Hold a lock alone: True where it is held, False where another has it, None where nobody knows.

    A file that does not exist is locked by nobody.

    Raises:
        ReshardError: it cannot be opened.
    """
    try:
        fd = _open(path)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    except OSError as error:
        raise look_error(path, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            answer: Optional[bool] = True
        except OSError as error:
            answer = False if error.errno in _BUSY else None
        yield answer
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(path: str, again: Callable[[], None]) -> Iterator[None]:
    """Hold a lock alone, waiting for it; without locks, hold nothing.

    Args:
        path: the file to lock, made if need be. Who holds it may remove it.
        again: makes the file's directory again, should it have been removed meanwhile.

    Raises:
        OSError: it cannot be had, or another takes too long.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            again()
            continue
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _BUSY:
                    if time.monotonic() > deadline:
                        raise OSError(errno.ETIMEDOUT, "another run holds it for too long", path) from error
                    time.sleep(0.005)
                    continue
            else:
                if not _still_there(path, fd):
                    continue
            yield
            return
        finally:
            os.close(fd)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # Of another user, or not to be written by anybody: it can be asked, where reading suffices for that.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _still_there(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
