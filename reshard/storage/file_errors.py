"""Errors of files, with the path, as errors for users; each states whether a retry may help."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Optional

from reshard.errors import (
    FORBIDDEN,
    CheckpointError,
    InputError,
    ReshardError,
    RetryableError,
    TargetError,
    UnwritableError,
    UsageError,
    is_read_only,
)
from reshard.storage.registry import store_of

# Paths of written directories must not contain links.
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
# Errors that end the whole run: every other file would fail, too.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EVERYWHERE = (*_FULL, errno.EMFILE, errno.ENFILE)
# Permanent errors; others (stale handle, I/O error) may pass.
_LASTING = {
    errno.EACCES: "may not be read",
    errno.EPERM: "may not be read",
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "does not exist",
    errno.EISDIR: "is a directory",
    errno.ELOOP: "is a loop of symbolic links",
    errno.ENXIO: "is not a file",
    errno.ENODEV: "is not a file",
}
_SHOWN = 300


class UnfitError(ValueError):
    """A file has the wrong kind, size or content.

    Attributes:
        problem: stands before the text, which with it follows the file's name, as in ``is larger than ...``.
    """

    problem = ""


def status_error(path: str, error: OSError) -> ReshardError:
    """The error for a path whose status cannot be read."""
    if error.errno == errno.ENAMETOOLONG:
        return too_long(path)
    if error.errno in FORBIDDEN:
        return InputError(f"{path}: no permission to read its status: {error.strerror}", file=path)
    return RetryableError(f"{path}: its status cannot be read: {error.strerror or error}", file=path)


def changed_meanwhile(path: str, problem: str) -> RetryableError:
    """The error for a file that changed after its first read."""
    return RetryableError(
        f"{path}: {problem}",
        file=path,
        hint="wait until nothing writes to it any more, then give the same command again",
    )


def reading_error(path: str, error: OSError, kind: type[InputError] = CheckpointError) -> ReshardError:
    """The error to show for a failed read of ``path``: of this kind if lasting, else worth a retry."""
    if error.errno == errno.ENAMETOOLONG:
        return too_long(path)
    if error.errno == errno.EBUSY:
        return changed_meanwhile(path, error.strerror or "is in use")
    lasting = _LASTING.get(error.errno or 0)
    if lasting is not None:
        return kind(f"{path}: {lasting}", file=path)
    return RetryableError(f"{path}: cannot be read: {error.strerror or error}", file=path)


@contextlib.contextmanager
def reading(path: str, kind: type[InputError] = CheckpointError, hint: Optional[str] = None) -> Iterator[None]:
    """Replace errors of a block that reads a file by errors that name it.

    Args:
        path: the file.
        kind: class of the error for an `UnfitError` or a lasting `OSError`.
        hint: for an `UnfitError`.

    Raises:
        ReshardError: for an `OSError`, as `reading_error`.
    """
    try:
        yield
    except OSError as error:
        raise reading_error(path, error, kind) from error
    except UnfitError as error:
        raise kind(f"{path}: {error.problem}{error}", file=path, hint=hint) from error


@contextlib.contextmanager
def inspecting(path: str) -> Iterator[None]:
    """Replace an OSError of a block that reads the status of a file by its `status_error`."""
    try:
        yield
    except OSError as error:
        raise status_error(path, error) from error


@contextlib.contextmanager
def writing(path: str, action: str = "written", rank: Optional[int] = None) -> Iterator[None]:
    """Replace an OSError of a block that changes a file by its `writing_error`."""
    try:
        yield
    except OSError as error:
        raise writing_error(path, error, action, rank) from error


def writing_error(path: str, error: OSError, action: str = "written", rank: Optional[int] = None) -> ReshardError:
    """The error for a file or directory that cannot be written or removed: lasting, or worth a retry.

    Args:
        path: of the file.
        error: of the system.
        action: the failed action, a participle.
        rank: rank or number of the file, if it has one; its path shows it to users.
    """
    if error.errno == errno.ENAMETOOLONG:
        return too_long(path)
    reason = error.strerror or str(error)
    if path.startswith(f"{error.filename}{os.sep}"):
        reason = f"its directory {error.filename} cannot be made or opened: {reason}"
    if error.errno in _NO_DIRECTORY:
        obstacle = error.filename or "its directory"
        advice = "remove this link or file, or choose another place"
        while error.filename and obstacle and not os.path.lexists(obstacle):
            # A file above the directory of the target may be anything, such as the source.
            obstacle, advice = os.path.dirname(obstacle), "choose another place"
        return TargetError(
            f"{path}: may not be {action}: {obstacle} is a link or no directory",
            file=path,
            rank=rank,
            hint=advice,
        )
    if is_read_only(error):
        return TargetError(
            f"{path}: may not be {action}: {reason}",
            file=path,
            rank=rank,
            hint=f"choose another place, or get {store_of(path).missing_right(path)}",
        )
    problem, hint = f"cannot be {action}", None
    if error.errno in _FULL:
        # Without inodes no file can be made, whatever space `df -h` shows.
        problem, hint = "no space left", "`df -h` shows free space, `df -i` free inodes (numbers of files)"
    elif error.errno == errno.EFBIG:
        hint = "`ulimit -f` shows the maximum file size of this shell; file systems such as FAT have their own"
    kind = UnwritableError if error.errno in _EVERYWHERE else RetryableError
    return kind(f"{path}: {problem}: {reason}", file=path, rank=rank, hint=hint)


def too_long(path: str) -> UsageError:
    """The error for a path that is longer than the system allows."""
    shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}..."
    return UsageError(
        f"{shown}: is too long for a path",
        file=path,
        hint="use a shorter path, or one relative to the current directory",
    )


def cut_short(path: str, rank: Optional[int] = None) -> RetryableError:
    """The error for a file that became shorter while it was open."""
    return RetryableError(
        f"{path}: became shorter while it was read",
        file=path,
        rank=rank,
        hint="wait until no program writes to the source, then run the same command again",
    )
