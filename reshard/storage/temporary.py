"""Files under temporary names, and the removal of those that dead runs left.

A temporary file lies in its final file's directory, so that renaming it is atomic, and is locked by
the process that writes it. One of this machine whose lock can be had belongs to a process that is
gone. Locks may not reach other machines, so a file of another one must also have lain untouched for
a while. Those of this process that are not renamed or removed when it ends are removed then, unless it is
killed: no moment at which a signal comes is a bad one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import platform
import re
import time
from typing import NamedTuple, Optional

from reshard import signals
from reshard.storage import directories

_UNTOUCHED_SECONDS = 3600.0
_NAME = re.compile(r"\.reshard-tmp-([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-[0-9a-f]{12}")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

# New files that somebody else locked at once: more are no accident, and locks that tell nothing.
_TIMES = 100

_unfinished: set[str] = set()


def create(directory: str, directory_fd: Optional[int] = None) -> tuple[int, str]:
    """Create and lock a temporary file.

    Args:
        directory: where.
        directory_fd: a descriptor of that directory, which may have got another name meanwhile.

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
            # Somebody looks whether it is a dead run's, or holds it for ever: another name.
            _drop(fd, path, directory_fd)
        except FileNotFoundError:
            # Taken for a dead run's between creating and locking it.
            _drop(fd, path, directory_fd)
        except BaseException:
            _drop(fd, path, directory_fd)
            raise


def _lock_new(fd: int) -> bool:
    """Lock a file that was just made, if nobody has done so before; where there are no locks, nobody has."""
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
    """Give a temporary file its final name, in the directory that it was created in.

    Raises:
        OSError: it cannot have it.
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
        directories.remove_file(path)
    else:
        os.unlink(os.path.basename(path), dir_fd=directory_fd)
    _unfinished.discard(path)


@signals.at_end
def _remove_unfinished() -> None:
    for path in list(_unfinished):
        with contextlib.suppress(OSError):
            remove(path)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file so that under its name it is whole, or not there; flushed to disk, and so is its name.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    directory = os.path.dirname(path) or os.curdir
    with directories.opened(directory) as directory_fd:
        fd, unnamed = create(directory, directory_fd)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
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

    A directory that cannot be listed, or that is a link, has none that matter.

    Args:
        directory: where.
        complete: nothing is left to be written there, so that a file whose lock can be had is nobody's,
            whichever machine it is of.
    """
    with contextlib.suppress(OSError), directories.opened(directory) as directory_fd:
        for name in os.listdir(directory_fd):
            match = _NAME.fullmatch(name)
            if match is not None:
                _remove_if_dead(name, directory_fd, _Writer(*match.groups()), complete)


class _Writer(NamedTuple):
    """Who writes a temporary file, by its name.

    Attributes:
        machine: as `machine` says.
        namespace: that the process is numbered in, as `namespace` says.
        process: its number there.
    """

    machine: str
    namespace: str
    process: str


def _remove_if_dead(name: str, directory_fd: int, writer: _Writer, complete: bool) -> None:
    with contextlib.suppress(OSError):
        # Network file systems lock alone only what may be written.
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
        try:
            if _dead(fd, writer, complete):
                os.unlink(name, dir_fd=directory_fd)
        finally:
            os.close(fd)


def _dead(fd: int, writer: _Writer, complete: bool) -> bool:
    here = writer.machine == machine()
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            return False
        # Containers of one machine number their processes each for itself.
        if here and writer.namespace == namespace():
            return not os.path.exists(f"/proc/{writer.process}")
        here = complete = False
    return complete or here or time.time() - os.fstat(fd).st_mtime > _UNTOUCHED_SECONDS


@functools.cache
def machine() -> str:
    """This machine, since it was started, in a few characters."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()
    except OSError:
        boot = ""
    return hashlib.sha256(f"{platform.node()} {boot}".encode()).hexdigest()[:8]


@functools.cache
def namespace() -> str:
    """The PID namespace of this process, in a few characters."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(namespace.encode()).hexdigest()[:8]
