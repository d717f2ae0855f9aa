"""Files under temporary names, and the removal of those of dead runs.

A temporary file is in its final file's directory, so that renaming it is atomic, and is locked by
the process that writes it. On this machine, a file whose lock is free belongs to a dead process.
Locks may not reach other machines, so a file of another machine must also have been unchanged
for a while. When a process ends, it removes its own temporary files, unless it is
killed: signals are safe at every moment.
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
from typing import Optional

from reshard import signals
from reshard.storage import directories

_UNTOUCHED_SECONDS = 3600.0
# The machine that writes the file, the PID namespace of the process, and its number there.
_NAME = re.compile(r"\.reshard-tmp-(?P<machine>[0-9a-f]{8})-(?P<namespace>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{12}")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

# Maximum new files that were locked by others at once: with more, locks do not work here.
_TIMES = 100

_unfinished: set[str] = set()


def create(directory: str, directory_fd: Optional[int] = None) -> tuple[int, str]:
    """Create and lock a temporary file.

    Args:
        directory: its directory.
        directory_fd: a descriptor of that directory, which may have been renamed.

    Returns:
        Its descriptor, open for reading and writing, and its path.

    Raises:
        OSError: it cannot be created.
    """
    if directory_fd is None:
        with directories.opened(directory) as directory_fd:
            return create(directory, directory_fd)
    times = 0
    while True:
        times += 1
        name = f".reshard-tmp-{machine()}-{namespace()}-{os.getpid()}-{os.urandom(6).hex()}"
        path = os.path.join(directory, name)
        _unfinished.add(path)
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory_fd)
        except OSError:
            _unfinished.discard(path)
            raise
        try:
            if _lock_new(fd) or times > _TIMES:
                os.lstat(name, dir_fd=directory_fd)
                return fd, path
            # Another run tests whether its process is dead, or holds it forever: use another name.
            _drop(fd, path, directory_fd)
        except FileNotFoundError:
            # Removed as a dead run's between creation and lock.
            _drop(fd, path, directory_fd)
        except BaseException:
            _drop(fd, path, directory_fd)
            raise


def _lock_new(fd: int) -> bool:
    """Lock a new file, if no other process has; True on file systems without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _drop(fd: int, path: str, directory_fd: int) -> None:
    os.close(fd)
    with contextlib.suppress(OSError):
        remove(path, directory_fd)


def rename(path: str, final: str, directory_fd: int) -> None:
    """Give a temporary file its final name, in its own directory.

    Raises:
        OSError: it cannot be renamed.
    """
    names = os.path.basename(path), os.path.basename(final)
    os.rename(*names, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    _unfinished.discard(path)


def remove(path: str, directory_fd: Optional[int] = None) -> None:
    """Remove a temporary file of this process.

    Raises:
        OSError: it cannot be removed.
    """
    if directory_fd is None:
        with directories.opened_above(path) as (name, fd):
            os.unlink(name, dir_fd=fd)
    else:
        os.unlink(os.path.basename(path), dir_fd=directory_fd)
    _unfinished.discard(path)


@signals.at_end
def _remove_unfinished() -> None:
    own = f"-{os.getpid()}-"
    for path in list(_unfinished):
        # A forked child leaves its parent's files alone.
        if own in os.path.basename(path):
            with contextlib.suppress(OSError):
                remove(path)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file atomically; flush it and its name to disk.

    Raises:
        OSError: it cannot be written; no partial file remains.
    """
    directory = os.path.dirname(path) or os.curdir
    with directories.opened(directory) as directory_fd:
        fd, unnamed = create(directory, directory_fd)
        try:
            written_bytes = 0
            while written_bytes < len(data):
                written_bytes += os.pwrite(fd, data[written_bytes:], written_bytes)
            os.fsync(fd)
            rename(unnamed, path, directory_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(unnamed, directory_fd)
            raise
        finally:
            os.close(fd)
        directories.sync(directory_fd)


def remove_dead(directory: str, complete: bool = False) -> None:
    """Remove temporary files that no living process is writing.

    Directories that cannot be listed, and links, are ignored.

    Args:
        directory: the directory.
        complete: no file remains to be written there, so a file whose lock is free
            is removed, whichever machine wrote it.
    """
    with contextlib.suppress(OSError), directories.opened(directory) as directory_fd:
        for name in os.listdir(directory_fd):
            match = _NAME.fullmatch(name)
            if match is not None:
                _remove_if_dead(name, directory_fd, match, complete)


def _remove_if_dead(name: str, directory_fd: int, writer: re.Match[str], complete: bool) -> None:
    with contextlib.suppress(OSError):
        # Network file systems allow exclusive locks only on files that are open for writing.
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
        try:
            if _dead(fd, writer, complete):
                os.unlink(name, dir_fd=directory_fd)
        finally:
            os.close(fd)


def _dead(fd: int, writer: re.Match[str], complete: bool) -> bool:
    this_machine = writer["machine"] == machine()
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            return False
        # Each container of a machine has its own process numbers.
        if this_machine and writer["namespace"] == namespace():
            return not os.path.exists(f"/proc/{writer['process']}")
        this_machine = complete = False
    return complete or this_machine or time.time() - os.fstat(fd).st_mtime > _UNTOUCHED_SECONDS


@functools.cache
def machine() -> str:
    """This machine since its start, in a few characters."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read()
    except OSError:
        boot = ""
    return _digits(f"{os.uname().nodename} {boot}")


@functools.cache
def namespace() -> str:
    """The PID namespace of this process, in a few characters."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return _digits(namespace)


def _digits(text: str) -> str:
    """Eight digits for a text. Not hashlib, which loads OpenSSL: some commands need no other digest."""
    return f"{zlib.crc32(text.encode()):08x}"
