"""Files under temporary names, and the removal of temporary files of dead runs.

A temporary file is in its final file's directory, so that renaming it is atomic, and is locked by the process that
writes it. On this machine, a file whose lock is free belongs to a dead process. Locks may not reach other machines, or
not work: a file of another machine must also have been unchanged for an hour. When a process ends, it removes its own
temporary files, unless it is killed: signals are safe at every moment.

Locks of other files are here too. Some file systems have none, on others they do not reach other machines: then nothing
is held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import time
import zlib
from collections.abc import Iterator

from reshard import signals
from reshard.errors import RetryableError
from reshard.storage.store import Notify

MESSAGE_AFTER = 2.0
"""Seconds of waiting for a lock before a message."""
GIVEN_UP_AFTER = 120.0
"""Seconds of waiting for a lock before an error: no run holds one for so long."""

_MAX_PAUSE = 0.1
_UNCHANGED_SECONDS = 3600.0
# The machine that writes the file, since its start.
_NAME = re.compile(r"\.reshard-tmp-(?P<machine>[0-9a-f]{8})-[0-9a-f]{12}")
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
# Maximum new files that were locked by others at once: with more, locks do not work here.
_TIMES = 100

# Paths of unfinished files, each with the process that writes it: a forked child leaves its parent's files alone.
_unfinished: set[tuple[int, str]] = set()


def create(directory: str) -> tuple[int, str]:
    """Create and lock a temporary file: its descriptor, open for reading and writing, and its path."""
    for times in range(_TIMES + 1):
        path = os.path.join(directory, f".reshard-tmp-{machine()}-{os.urandom(6).hex()}")
        _unfinished.add((os.getpid(), path))
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError:
            _unfinished.discard((os.getpid(), path))
            raise
        # Another run may test the lock of a new file before it is locked here, and remove the file.
        if (try_lock(fd) or times == _TIMES) and os.path.lexists(path):
            return fd, path
        os.close(fd)
        with contextlib.suppress(OSError):
            remove(path)
    raise FileNotFoundError(errno.ENOENT, "temporary files are removed at once", directory)


def try_lock(fd: int) -> bool:
    """Lock an open file; whether no other process has locked it. True on file systems without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _BUSY
    return True


def rename(path: str, final: str) -> None:
    """Give a temporary file its final name, in its own directory, and flush that to disk."""
    os.rename(path, final)
    _unfinished.discard((os.getpid(), path))
    sync_directory(os.path.dirname(final))


def remove(path: str) -> None:
    os.unlink(path)
    _unfinished.discard((os.getpid(), path))


def _remove_unfinished() -> None:
    for process, path in list(_unfinished):
        if process == os.getpid():
            with contextlib.suppress(OSError):
                remove(path)


signals.at_end.append(_remove_unfinished)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file atomically; flush it and its name to disk. No partial file remains."""
    fd, unnamed = create(os.path.dirname(path))
    try:
        fill(fd, data)
        rename(unnamed, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(unnamed)
        raise
    finally:
        os.close(fd)


def fill(fd: int, data: bytes) -> None:
    """Write all bytes of a new file, and flush them to disk."""
    written_bytes = 0
    while written_bytes < len(data):
        written_bytes += os.pwrite(fd, data[written_bytes:], written_bytes)
    os.fsync(fd)


def remove_dead(directory: str) -> None:
    """Remove temporary files that no living process is writing; a directory that cannot be listed is ignored."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory or os.curdir):
            match = _NAME.fullmatch(name)
            if match is not None:
                _remove_if_dead(os.path.join(directory, name), match["machine"] == machine())


def _remove_if_dead(path: str, of_this_machine: bool) -> None:
    with contextlib.suppress(OSError):
        # Network file systems allow exclusive locks only on files that are open for writing.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            unchanged = time.time() - os.fstat(fd).st_mtime > _UNCHANGED_SECONDS
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Without locks, the age decides alone.
                if error.errno in _BUSY or not unchanged:
                    return
            if of_this_machine or unchanged:
                os.unlink(path)
        finally:
            os.close(fd)


@functools.cache
def machine() -> str:
    """This machine since its start, in a few characters."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read()
    except OSError:
        boot = ""
    # Not hashlib, which loads OpenSSL: some commands need no other digest.
    return f"{zlib.crc32(f'{os.uname().nodename} {boot}'.encode()):08x}"


def make_directory(path: str) -> bool:
    """Make a directory and its missing parents; whether it was missing."""
    if os.path.isdir(path):
        return False
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        # Parents that are missing are made first: the nearest name that exists is no directory.
        while path and not os.path.lexists(path):
            path = os.path.dirname(path)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
    return True


def sync_directory(path: str) -> None:
    """Make creations and renames in a directory survive a crash."""
    fd = os.open(path or os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot flush a directory; they flush it themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def lock(path: str, notify: Notify) -> Iterator[None]:
    """See `Store.lock`."""
    began, pause, notified = time.monotonic(), 0.005, False
    while True:
        make_directory(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                # Its last holder may have removed it, with its directory.
                if try_lock(fd) and os.path.samestat(os.stat(path), os.fstat(fd)):
                    yield
                    return
            finally:
                os.close(fd)
        waited = time.monotonic() - began
        if waited > GIVEN_UP_AFTER:
            raise RetryableError(
                f"{path}: another process has held this lock for {GIVEN_UP_AFTER:.0f} s",
                file=path,
                hint=f"`fuser {path}` on each machine that writes there lists the process; end it if it hangs",
            )
        if waited > MESSAGE_AFTER and not notified:
            notified = True
            notify(f"waiting for {path}, which another process has locked")
        # Random pauses: waiting processes do not try at the same times.
        time.sleep(pause * (0.5 + os.urandom(1)[0] / 512))
        pause = min(2 * pause, _MAX_PAUSE)
