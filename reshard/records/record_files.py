"""Files and directories of records, reached without following any link from ``DST/.reshard`` on.

Whoever may write to a target directory could put a link there in the place of a directory of records,
and have files elsewhere listed, made and removed. So every step down is taken from the descriptor of
the directory above; a link, or anything else that no run of ours makes, is refused by name. Object stores
have no links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Callable

from reshard.errors import ReshardError, TargetError
from reshard.storage import for_each, in_object_store, look_error, remove_file, store_of, write_error, write_whole

DIRECTORY = ".reshard"
IN_ORDER = ("plan.json", "replaced")
"""What goes last when records are removed, in this order: what says which conversion it is, and that it is replaced."""


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor of a directory of records, while the block runs.

    Args:
        path: ``DST/.reshard`` or a directory below it.

    Raises:
        TargetError: a part of the path from there on is a link, or no directory.
        FileNotFoundError: it is not there.
        OSError: it cannot be opened.
    """
    destination, _, below = path.rpartition(os.sep + DIRECTORY)
    fd = os.open(destination or os.sep, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        reached = destination
        for part in (DIRECTORY, *filter(None, below.split(os.sep))):
            reached = os.path.join(reached, part)
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                inner = os.open(part, flags, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise not_ours(reached) from error
                raise
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def not_ours(path: str) -> TargetError:
    """The error for what no run of ours has made."""
    return TargetError(
        f"{path} is not a directory or file of its own, as records are",
        file=path,
        hint="remove it, or choose another DST",
    )


def check_directory(path: str) -> None:
    """Insist that a directory of records is one of its own, if it is there.

    Raises:
        TargetError: as `opened`.
        OSError: it cannot be opened.
    """
    if not in_object_store(path):
        with contextlib.suppress(FileNotFoundError), opened(path):
            pass


def listed(path: str) -> list[str]:
    """The names in a directory of records that is there: nothing is removed because a file server does not find it.

    Raises:
        TargetError: as `opened`.
        OSError: it cannot be listed, or is not found.
    """
    if in_object_store(path):
        return [entry.name for entry in store_of(path).entries(path)]
    with opened(path) as fd:
        return os.listdir(fd)


def names_in(path: str) -> list[str]:
    """The names in a directory of records, sorted; none where it is not there.

    Raises:
        TargetError: as `opened`.
        ReshardError: it cannot be listed.
    """
    try:
        return sorted(listed(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise look_error(path, error) from error


def check_file(path: str) -> None:
    """Insist that a file of records is a file of its own, if it is there.

    Raises:
        TargetError: it, or a directory that it is in, is a link or something else.
        OSError: it cannot be looked at.
    """
    if in_object_store(path):
        return
    try:
        with opened(os.path.dirname(path)) as fd:
            status = os.stat(os.path.basename(path), dir_fd=fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(status.st_mode):
        raise not_ours(path)


def make_directory(path: str) -> None:
    """Make a directory of records, unless it is there.

    Raises:
        TargetError: as `opened`.
        OSError: it cannot be made.
    """
    if in_object_store(path):
        store_of(path).make_directory(path)
        return
    with opened(os.path.dirname(path)) as fd, contextlib.suppress(FileExistsError):
        os.mkdir(os.path.basename(path), dir_fd=fd)
    with opened(path):
        pass


def make_empty(path: str) -> None:
    """Make an empty file, unless it is there.

    Raises:
        ReshardError: it cannot be made.
    """
    try:
        if in_object_store(path):
            write_whole(path, b"")
            return
        with opened(os.path.dirname(path)) as fd:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            os.close(os.open(os.path.basename(path), flags, 0o666, dir_fd=fd))
    except OSError as error:
        raise not_ours(path) if error.errno == errno.ELOOP else unwritable(path, error) from error


def remove(path: str) -> None:
    """Remove a file, if it is there.

    Raises:
        ReshardError: it cannot be removed.
    """
    try:
        if in_object_store(path):
            remove_file(path)
            return
        with opened(os.path.dirname(path)) as fd:
            os.unlink(os.path.basename(path), dir_fd=fd)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unwritable(path, error) from error


def remove_directory(path: str, ours: Callable[[str], bool]) -> None:
    """Remove the files of a directory whose names are ours, and the directory, if it is empty then.

    What cannot be removed stays.

    Raises:
        TargetError: as `opened`.
    """
    if in_object_store(path):
        with contextlib.suppress(OSError):
            # Those that tell nothing by their order go together.
            names = list(filter(ours, names_in(path)))
            together = [name for name in names if name not in IN_ORDER]
            for_each(remove_file, [f"{path}/{name}" for name in together])
            for name in names:
                if name in IN_ORDER:
                    remove_file(f"{path}/{name}")
            store_of(path).remove_directory(path)
        return
    with contextlib.suppress(OSError):
        with opened(path) as fd:
            for name in sorted(filter(ours, os.listdir(fd)), key=lambda name: (name in IN_ORDER, name)):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=fd)
        with opened(os.path.dirname(path)) as above:
            os.rmdir(os.path.basename(path), dir_fd=above)


def unwritable(path: str, error: OSError) -> ReshardError:
    """The error to show where a record cannot be written."""
    return write_error(path, error)
