"""Locks on files, which the kernel gives up when a process dies, and what stands for them in object stores.

Some file systems have none, and on some they do not reach other machines; so there are three answers
to whether somebody else holds a lock: yes, no, and nobody knows. In an object store every process that shares
a lock has an object beside it, see `reshard.storage.s3.leases`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Callable, Optional, Protocol

from reshard.errors import RetryableError
from reshard.records.record_files import opened
from reshard.storage import UnfitError, in_object_store, look_error, read_small, store_of, temporary

if TYPE_CHECKING:
    from reshard.storage.s3 import S3Store

TOLD_AFTER = 2.0
"""Seconds of waiting for a lock until somebody is told."""
GIVEN_UP_AFTER = 120.0
"""Seconds of waiting for a lock until it is an error: nobody of ours holds one for so long."""

# Objects of dead processes of other machines count for as long; and they are told by another clock, in seconds.
_OTHER_CLOCK = 15.0
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_LEAST_PAUSE = 0.005
_MOST_PAUSE = 0.1
# Each costs two requests.
_MOST_PAUSE_OF_OBJECTS = 0.5
_LONGEST_HOLDER = 200

_HINT_OF_OBJECTS = "its content begins with a digest of the machine and the process that has it; end that if it hangs"

OBJECTS_OF_THE_LIVING = ("lock.", "sign.")
"""What the names of objects in directories of records begin with that say that somebody lives."""

Tell = Callable[[str], None]
"""Told, once, what is waited for."""


class _Wait:
    """Waits for a lock in pauses; the time is that since it was made."""

    def __init__(self, path: str, tell: Tell) -> None:
        self._path = path
        self._tell: Optional[Tell] = tell
        self._began = time.monotonic()
        self._pause = _LEAST_PAUSE
        self._object = in_object_store(path)
        self._holder = b""

    def pause(self) -> None:
        """Wait a moment.

        Raises:
            RetryableError: it has been long enough.
        """
        waited = time.monotonic() - self._began
        limit = GIVEN_UP_AFTER + (_OTHER_CLOCK if self._object else 0.0)
        if waited > limit and self._is_anothers_now():
            waited = 0.0
        if waited > limit:
            raise RetryableError(
                f"{self._path}: another process has held this lock for {limit:.0f} s",
                file=self._path,
                hint=_HINT_OF_OBJECTS
                if self._object
                else f"`fuser {self._path}` on each machine that writes there tells which; end it if it hangs",
            )
        if waited > TOLD_AFTER and self._tell is not None:
            self._tell(f"waiting for {self._path}, which another process has locked")
            self._tell = None
        # Those who wait do not ask in step.
        time.sleep(self._pause * (random.uniform(0.5, 1) if self._object else 1))
        self._pause = min(2 * self._pause, _MOST_PAUSE_OF_OBJECTS if self._object else _MOST_PAUSE)

    def _is_anothers_now(self) -> bool:
        """Whether an object says that another process has the lock than at the last look; that begins the time anew.

        With a round trip for every step, a hundred runs take minutes to begin one after the other.
        """
        if not self._object:
            return False
        before = self._holder
        try:
            self._holder = read_small(self._path, _LONGEST_HOLDER).split(b" ")[0]
        except (OSError, UnfitError):
            return False
        if self._holder == before:
            return False
        self._began = time.monotonic()
        return True


class Lock(Protocol):
    """A lock that is held."""

    def check(self) -> None:
        """Insist that it is still held: in an object store another run removes it when this one was silent for long.

        Raises:
            OSError: it is not, or nobody can tell.
        """

    def release(self) -> None:
        """Give it up."""


class Sign(Protocol):
    """A file that is there until it is released."""

    def release(self) -> None:
        """Remove it."""

    @property
    def path(self) -> str:
        """Of the file."""


class _FileSign:
    def __init__(self, directory: str) -> None:
        self._fd, self.path = temporary.create(directory)

    def release(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            temporary.remove(self.path)
        os.close(self._fd)


def sign_in(directory: str) -> Sign:
    """A file in a directory that is there until it is released, or this process has died.

    Raises:
        OSError: it cannot be made.
    """
    return _objects(directory).lease(f"{directory}/sign") if in_object_store(directory) else _FileSign(directory)


class _FileLock:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def check(self) -> None:
        """The kernel gives it up with its process alone."""

    def release(self) -> None:
        """Give it up."""
        os.close(self._fd)


def shared(path: str, tell: Tell) -> Lock:
    """Hold a lock beside others who share it, waiting for it; the file is made if need be.

    Where there are no locks, nothing is held.

    Args:
        path: the file to lock.
        tell: told when it takes long.

    Raises:
        RetryableError: another holds it alone for too long.
        OSError: the file cannot be made.
    """
    if in_object_store(path):
        return _objects(path).lease(path)
    wait = _Wait(path, tell)
    fd = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        while _is_busy(fd, fcntl.LOCK_SH):
            wait.pause()
    except BaseException:
        os.close(fd)
        raise
    return _FileLock(fd)


@contextlib.contextmanager
def try_alone(path: str) -> Iterator[Optional[bool]]:
    """Hold a lock alone: True where it is held, False where another has it, None where nobody knows.

    A file that does not exist is locked by nobody. In an object store it is only looked who has it.

    Raises:
        ReshardError: it cannot be opened.
    """
    if in_object_store(path):
        try:
            directory, _, name = path.rpartition("/")
            alone = not any(_objects(path).leases_in(directory, f"{name}."))
        except OSError as error:
            raise look_error(path, error) from error
        yield alone
        return
    try:
        fd = _open_there(path)
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
def locked(path: str, again: Callable[[], None], tell: Tell) -> Iterator[Callable[[], None]]:
    """Hold a lock alone, waiting for it; without locks, hold nothing.

    The block is given what insists that it is still held, and raises `OSError` if not: in an object store another
    run has it when this one was silent for long.

    Args:
        path: the file to lock, made if need be. Who holds it may remove it.
        again: makes the file's directory again, should it have been removed meanwhile.
        tell: told when it takes long.

    Raises:
        RetryableError: another holds it for too long.
        OSError: it cannot be had.
    """
    wait = _Wait(path, tell)
    if in_object_store(path):
        with _objects(path).held_alone(path, wait.pause, tell) as check:
            yield check
        return
    while True:
        try:
            fd = _open(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            wait.pause()
            again()
            continue
        try:
            if _is_busy(fd, fcntl.LOCK_EX):
                wait.pause()
                continue
            if not _still_there(path, fd):
                continue
            yield lambda: None
            return
        finally:
            os.close(fd)


def remove_dead(directory: str) -> None:
    """Remove what dead runs left in a directory of records: temporary files, or objects that say that they live."""
    if in_object_store(directory):
        _objects(directory).remove_dead_leases(directory)
    else:
        store_of(directory).remove_dead(directory, complete=False)


def _objects(path: str) -> S3Store:
    # Loaded where it is needed: it takes half a second.
    from reshard.storage.s3 import s3_store

    return s3_store(path)


def _is_busy(fd: int, kind: int) -> bool:
    """Try to lock; whether somebody else's lock is in the way. Where there are no locks, nobody's is."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _BUSY
    return False


def _open(path: str, flags: int) -> int:
    with opened(os.path.dirname(path)) as fd:
        return os.open(os.path.basename(path), flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=fd)


def _open_there(path: str) -> int:
    try:
        return _open(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # Of another user, or not to be written by anybody: it can be asked, where reading suffices for that.
        return _open(path, os.O_RDONLY)


def _still_there(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
