"""What is at a path: nothing, something, or nobody can tell at this moment.

`os.path.exists` and its kin take every failure for absence, so that a file server which is away for
a second looks like a checkpoint that is not there. Here absence is an answer and failure an error.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Sequence
from typing import Callable, Optional

from reshard.errors import InputError, ReshardError, RetryableError, TargetError, UnwritableError, UsageError
from reshard.storage.once import listed
from reshard.storage.status import FileStatus
from reshard.storage.store import Entry, for_each, in_object_store, store_of

_FORBIDDEN = (errno.EACCES, errno.EPERM)
_READ_ONLY = (*_FORBIDDEN, errno.EROFS)
# Directories that are written to are reached through no link.
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
# What ends the whole run: no other file would fare better.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EVERYWHERE = (*_FULL, errno.EMFILE, errno.ENFILE)
_SHOWN = 300


def status_at(path: str) -> Optional[FileStatus]:
    """The status of what a path leads to, through links; None where it leads to nothing.

    Raises:
        UsageError: the path is too long to be one.
        InputError: it may not be looked at.
        RetryableError: it cannot be looked at at this moment.
    """
    try:
        return store_of(path).status(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: no file can have a name with a NUL, or one that cannot be encoded.
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            # Links in a circle lead to nothing, as one to nowhere.
            return None
        raise look_error(path, error) from error


def link_at(path: str) -> Optional[FileStatus]:
    """The status of what stands at a path, be it a link; None where there is nothing.

    Raises:
        ReshardError: as `status_at`.
    """
    try:
        return store_of(path).status(path, through_links=False)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise look_error(path, error) from error


def status_of_each(paths: Sequence[str], through_links: bool = True) -> list[Optional[FileStatus]]:
    """What is at each of several paths, as `status_at` or `link_at` say; asked at a time where it takes a round trip.

    Raises:
        ReshardError: as `status_at`.
    """
    look = status_at if through_links else link_at
    return for_each(look, paths)


def names_in_each(directories: Sequence[str]) -> list[list[str]]:
    """The names in each of several directories, as `names_in` says; likewise.

    Raises:
        ReshardError: as `names_in`.
    """
    return for_each(names_in, directories)


def exists(path: str) -> bool:
    """Whether something stands at a path, be it a link that leads to nothing.

    Raises:
        ReshardError: as `status_at`.
    """
    return link_at(path) is not None


def is_directory(path: str) -> bool:
    """Whether a path leads to a directory.

    Raises:
        ReshardError: as `status_at`.
    """
    entry = listed(path)
    if entry is not None:
        return entry.is_dir()
    found = status_at(path)
    return found is not None and found.directory


def is_regular_file(path: str) -> bool:
    """Whether a path leads to a regular file.

    Raises:
        ReshardError: as `status_at`.
    """
    entry = listed(path)
    if entry is not None:
        return entry.is_file()
    found = status_at(path)
    return found is not None and found.regular


def names_in(directory: str) -> list[str]:
    """The names in a directory, sorted; none where there is no directory.

    Raises:
        ReshardError: it cannot be listed; as `status_at`.
    """
    try:
        return sorted(entry.name for entry in store_of(directory).entries(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise look_error(directory, error) from error


def leads_to_directory(entry: Entry) -> bool:
    """Whether an entry of a directory leads to one; a loop of links, as a link to nowhere, leads to nothing.

    Raises:
        OSError: nobody can tell.
    """
    return _leads_to(entry.is_dir)


def leads_to_file(entry: Entry) -> bool:
    """Whether an entry of a directory leads to a regular file; likewise.

    Raises:
        OSError: nobody can tell.
    """
    return _leads_to(entry.is_file)


def _leads_to(kind: Callable[[], bool]) -> bool:
    try:
        return kind()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def look_error(path: str, error: OSError) -> ReshardError:
    """The error to show where nobody can tell what is at a path."""
    if error.errno == errno.ENAMETOOLONG:
        return too_long(path)
    if error.errno in _FORBIDDEN:
        return InputError(f"{path}: may not be looked at: {error.strerror}", file=path)
    return RetryableError(f"{path}: cannot be looked at: {error.strerror or error}", file=path)


def writing_error(path: str, error: OSError, what: str = "written", rank: Optional[int] = None) -> ReshardError:
    """The error to show where a file or directory cannot be written or removed: lasting, or worth a retry.

    Args:
        path: of the file.
        error: what the system says.
        what: cannot be done to it.
        rank: whose file it is, if it is a rank's.
    """
    if error.errno == errno.ENAMETOOLONG:
        return too_long(path)
    whose = "" if rank is None else f" (rank {rank})"
    reason = error.strerror or error
    if error.errno in _NO_DIRECTORY:
        return TargetError(
            f"{path}: may not be {what}{whose}: {error.filename or 'its directory'} is a link or no directory",
            file=path,
            rank=rank,
            hint="remove what stands in the place of a directory, or choose another place",
        )
    if is_read_only(error):
        directory = shlex.quote(os.path.dirname(path) or os.curdir)
        what_it_takes = "the permissions that docs/stores.md lists"
        rights = f"a right to write there: `ls -ld {directory}` shows owner and rights"
        return TargetError(
            f"{path}: may not be {what}{whose}: {reason}",
            file=path,
            rank=rank,
            hint=f"choose another place, or get {what_it_takes if in_object_store(path) else rights}",
        )
    said = "no space is left" if error.errno in _FULL else f"cannot be {what}"
    kind = UnwritableError if error.errno in _EVERYWHERE else RetryableError
    return kind(f"{path}: {said}{whose}: {reason}", file=path, rank=rank)


def is_read_only(error: OSError) -> bool:
    """Whether an error tells of rights, or of a read-only file system, which no retry changes."""
    return error.errno in _READ_ONLY


def too_long(path: str) -> UsageError:
    """The error for a path that the system takes for too long."""
    shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}..."
    return UsageError(f"{shown}: is too long for a path", file=path, hint="give a shorter one, or one relative to here")
