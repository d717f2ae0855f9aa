"""Locks on files of file systems, which the kernel releases when a process dies; waiting for locks of any store.

Some file systems have no locks, on others they do not reach other machines. So a question about a lock
has three results: held, free, unknown.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Callable, Optional

from reshard.errors import RetryableError
from reshard.storage import temporary
from reshard.storage.directories import opened_own
from reshard.storage.store import Notify

MESSAGE_AFTER = 2.0
"""Seconds of waiting for a lock before a message."""
GIVEN_UP_AFTER = 120.0
"""Seconds of waiting for a lock before an error: no run holds one for so long."""

_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_MIN_PAUSE = 0.005


class Waiting:
    """Waits for a lock in growing pauses; counts the time since its creation.

    Args:
        path: path of the lock.
        notify: called once with a message.
        hint: advice for a lock that is held for too long.
        max_pause: maximum seconds of a pause.
        longer: additional seconds before the error.
        holder: returns the holder's name, None if unknown; the time starts again with every new holder.
    """

    def __init__(
        self,
        path: str,
        notify: Notify,
        hint: str,
        max_pause: float = 0.1,
        longer: float = 0.0,
        holder: Callable[[], Optional[str]] = lambda: None,
    ) -> None:
        self._path = path
        self._notify: Optional[Notify] = notify
        self._hint = hint
        self._max_pause = max_pause
        self._longer = longer
        self._holder = holder
        self._last_holder: Optional[str] = ""
        self._began = time.monotonic()
        self._pause = _MIN_PAUSE

    def pause(self) -> None:
        """Wait for a pause.

        Raises:
            RetryableError: the maximum time has passed.
        """
        waited = time.monotonic() - self._began
        limit = GIVEN_UP_AFTER + self._longer
        if waited > limit and self._another_has_it():
            self._began, waited = time.monotonic(), 0.0
        if waited > limit:
            raise RetryableError(
                f"{self._path}: another process has held this lock for {limit:.0f} s", file=self._path, hint=self._hint
            )
        if waited > MESSAGE_AFTER and self._notify is not None:
            self._notify(f"waiting for {self._path}, which another process has locked")
            self._notify = None
        # Imported only here: it slows the start of a command.
        import random

        # Random pauses: waiting processes do not try at the same times.
        time.sleep(self._pause * random.uniform(0.5, 1))
        self._pause = min(2 * self._pause, self._max_pause)

    def _another_has_it(self) -> bool:
        """Whether the holder has changed since the last call.

        Where each step takes a round trip, a hundred runs need minutes to begin one after the other.
        """
        before, self._last_holder = self._last_holder, self._holder()
        return self._last_holder is not None and self._last_holder != before


class FileLock:
    """A lock on an open file.

    Args:
        fd: its descriptor.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def check(self) -> None:
        """The kernel releases it only when its process ends."""

    def release(self) -> None:
        """Release it."""
        os.close(self._fd)


class FileSign:
    """A temporary file.

    Args:
        directory: its directory.
    """

    def __init__(self, directory: str) -> None:
        self._fd, self.path = temporary.create(directory)

    def release(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            temporary.remove(self.path)
        os.close(self._fd)


def share(path: str, notify: Notify) -> FileLock:
    """See `Store.share`."""
    waiting = _waiting(path, notify)
    fd = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        while _is_busy(fd, fcntl.LOCK_SH):
            waiting.pause()
    except BaseException:
        os.close(fd)
        raise
    return FileLock(fd)


@contextlib.contextmanager
def try_lock(path: str) -> Iterator[Optional[bool]]:
    """See `Store.try_lock`."""
    try:
        fd = _open_there(path)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
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
def lock(path: str, again: Callable[[], None], notify: Notify) -> Iterator[Callable[[], None]]:
    """See `Store.lock`."""
    waiting = _waiting(path, notify)
    while True:
        try:
            fd = _open(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            waiting.pause()
            again()
            continue
        try:
            if _is_busy(fd, fcntl.LOCK_EX):
                waiting.pause()
                continue
            if not _still_there(path, fd):
                continue
            yield lambda: None
            return
        finally:
            os.close(fd)


def _waiting(path: str, notify: Notify) -> Waiting:
    return Waiting(
        path, notify, f"`fuser {path}` on each machine that writes there lists the process; end it if it hangs"
    )


def _is_busy(fd: int, kind: int) -> bool:
    """Try to lock; whether another process holds the lock. Without support for locks, none does."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _BUSY
    return False


def _open(path: str, flags: int) -> int:
    with opened_own(os.path.dirname(path)) as fd:
        return os.open(os.path.basename(path), flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=fd)


def _open_there(path: str) -> int:
    try:
        return _open(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # Of another user, or read-only: the lock can be tested where reading suffices for that.
        return _open(path, os.O_RDONLY)


def _still_there(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
