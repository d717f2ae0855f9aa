"""Directories on file systems, opened part by part from descriptor to descriptor, without following links.

Other users with write access to a target directory could replace a directory in it with a link at any time.
Files elsewhere would then be written, replaced or removed. So all writes go through these descriptors, and a
link in a path is an error. Callers resolve a given path once, with `reshard.storage.unlinked`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from reshard.errors import TargetError

OWN = ".reshard"
"""The directory of all records in a target directory. Links above it are followed, none below."""

_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC


def open_directory(path: str, trusted: str = "", make: bool = False) -> tuple[int, bool]:
    """Open a directory.

    Args:
        path: the directory.
        trusted: the beginning of the path; links in it are followed.
        make: make it and its missing parents.

    Returns:
        Its descriptor, and whether this call made it.

    Raises:
        OSError: it is missing, or cannot be made; with `ENOTDIR` or `ELOOP` a link or a file is in the way. Its
            ``filename`` is the part that failed.
    """
    parts = [part for part in path[len(trusted) :].split(os.sep) if part not in ("", os.curdir)]
    reached = trusted or (os.sep if os.path.isabs(path) else os.curdir)
    created = False
    # Search permission suffices for directories above; the last one is listed and flushed.
    fd = os.open(reached, _DIRECTORY | (os.O_PATH if parts else os.O_RDONLY))
    for place, part in enumerate(parts, start=1):
        reached = os.path.join(reached, part)
        created = False
        flags = _DIRECTORY | os.O_NOFOLLOW | (os.O_PATH if place < len(parts) else os.O_RDONLY)
        try:
            try:
                inner = os.open(part, flags, dir_fd=fd)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
                    created = True
                inner = os.open(part, flags, dir_fd=fd)
        except OSError as error:
            error.filename = reached
            raise
        finally:
            os.close(fd)
        fd = inner
    return fd, created


@contextlib.contextmanager
def opened(path: str, trusted: str = "") -> Iterator[int]:
    """The descriptor of a directory while the block runs.

    Raises:
        OSError: as `open_directory`.
    """
    fd, _ = open_directory(path, trusted)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened_above(path: str) -> Iterator[tuple[str, int]]:
    """The name of a file or directory, and the descriptor of its directory, while the block runs.

    Raises:
        OSError: as `open_directory`.
    """
    above, name = os.path.split(path.rstrip(os.sep))
    with opened(above or os.curdir) as fd:
        yield name, fd


@contextlib.contextmanager
def opened_own(path: str) -> Iterator[int]:
    """The descriptor of a directory of records while the block runs.

    Args:
        path: ``DST/.reshard`` or a directory below it.

    Raises:
        TargetError: a part of the path from there on is a link, or no directory.
        FileNotFoundError: it is missing.
        OSError: it cannot be opened.
    """
    above, mark, _ = path.rpartition(os.sep + OWN)
    trusted = (above or os.sep) if mark else path
    try:
        fd, _ = open_directory(path, trusted)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and error.filename != trusted:
            raise not_ours(error.filename) from error
        raise
    try:
        yield fd
    finally:
        os.close(fd)


def not_ours(path: str) -> TargetError:
    """The error for an entry in the place of a record that no conversion made."""
    return TargetError(
        f"{path} is a link or another kind of file, where a record of reshard belongs",
        file=path,
        hint="remove it, or choose another DST",
    )


def sync(directory_fd: int) -> None:
    """Make creations and renames in a directory survive a crash.

    Raises:
        OSError: it cannot be flushed.
    """
    try:
        os.fsync(directory_fd)
    except OSError as error:
        # Some network file systems cannot flush a directory; they flush it themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def sync_directory(path: str) -> None:
    """Like `sync`, of a directory that is not open."""
    with opened(path) as fd:
        sync(fd)
