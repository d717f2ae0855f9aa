"""Files by path or open, whatever store they lie in: what is there, reading it, writing it.

`os.path.exists` and its kin take every failure for absence, so that a file server which is away for a second looks
like a checkpoint that is not there. Here absence is an answer and failure an error. Anybody may have put anything
at a path, or be writing there: what is no regular file is never waited for, small files have a bound, and a read
that gives less than the file has is read on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Callable, Optional, Union

from reshard.errors import InputError, ReshardError, RetryableError, TargetError, UnwritableError, UsageError
from reshard.storage.once import listed
from reshard.storage.registry import for_each, store_of
from reshard.storage.store import DirectoryEntry, Expected, FileStatus, NewFile, ReadableFile, Sending

# Reads in which nothing came, though the file has more.
_TIMES = 3
# Bytes of smaller parts that are put together before they are written.
_WORTH_WRITING = 1 << 20
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_READ_ONLY = (*_FORBIDDEN, errno.EROFS)
# Directories that are written to are reached through no link.
_NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
# What ends the whole run: no other file would fare better.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EVERYWHERE = (*_FULL, errno.EMFILE, errno.ENFILE)
_SHOWN = 300


class UnfitError(ValueError):
    """A file is not what it should be; the text goes on after its name, as in ``is larger than ...``."""


def status_at(path: str, through_links: bool = True) -> Optional[FileStatus]:
    """The status of what a path leads to; None where it leads to nothing.

    Args:
        path: the path.
        through_links: of a symbolic link, what it leads to, else the link.

    Raises:
        UsageError: the path is too long to be one.
        InputError: it may not be looked at.
        RetryableError: it cannot be looked at at this moment.
    """
    try:
        return store_of(path).status(path, through_links)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: no file can have a name with a NUL, or one that cannot be encoded.
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            # Links in a circle lead to nothing, as one to nowhere.
            return None
        raise look_error(path, error) from error


def status_of_each(paths: Sequence[str], through_links: bool = True) -> list[Optional[FileStatus]]:
    """What is at each of several paths, as `status_at` returns it; together where a request takes a round trip.

    Raises:
        ReshardError: as `status_at`.
    """
    return for_each(lambda path: status_at(path, through_links), paths)


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
    return status_at(path, through_links=False) is not None


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


def leads_to_directory(entry: DirectoryEntry) -> bool:
    """Whether an entry of a directory leads to one; a loop of links, as a link to nowhere, leads to nothing.

    Raises:
        OSError: nobody can tell.
    """
    return _leads_to(entry.is_dir)


def leads_to_file(entry: DirectoryEntry) -> bool:
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
        return TargetError(
            f"{path}: may not be {what}{whose}: {reason}",
            file=path,
            rank=rank,
            hint=f"choose another place, or get {store_of(path).missing_right(path)}",
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


def entries_of_each(directories: Iterable[str]) -> Iterator[list[DirectoryEntry]]:
    """What is in each of several directories, in their order; asked for at a time where a request takes a round trip.

    Raises:
        OSError: one cannot be listed.
    """
    return iter(for_each(lambda path: store_of(path).entries(path), list(directories)))


@contextlib.contextmanager
def opened_regular(path: str, through_links: bool = True) -> Iterator[ReadableFile]:
    """A regular file, open for reading while the block runs.

    Args:
        path: the file.
        through_links: it may be a symbolic link to one.

    Raises:
        UnfitError: it is something else.
        OSError: it is not there, or cannot be opened.
    """
    store = store_of(path)
    try:
        if store.special_files:
            # To open a FIFO waits for its writer, and to open a device may do anything.
            _check_regular(store.status(path, through_links))
        file = store.open(path, through_links)
    except IsADirectoryError as error:
        raise UnfitError("is a directory") from error
    except ValueError as error:
        if isinstance(error, UnfitError):
            raise
        # A name with a NUL, or one that cannot be encoded: no file has it.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    try:
        _check_regular(file.status())
        yield file
    finally:
        file.close()


def _check_regular(status: FileStatus) -> None:
    if not status.regular:
        raise UnfitError("is a directory" if status.directory else "is not a regular file")


def read_small(path: str, most: int, through_links: bool = True) -> bytes:
    """The content of a small file.

    Args:
        path: the file.
        most: bytes that it may have.
        through_links: it may be a symbolic link to one.

    Raises:
        UnfitError: it is no regular file, or larger.
        RetryableError: it does not give what it has.
        OSError: it is not there, or cannot be read.
    """
    with opened_regular(path, through_links) as file:
        size = file.size()
        if size > most:
            raise UnfitError(f"is larger than any such file: it has {size:,} bytes, and {most:,} are allowed")
        return read_range(file, 0, size)


def read_range(file: ReadableFile, offset: int, least: int, most: Optional[int] = None) -> bytes:
    """Bytes of an open file from an offset on.

    A read may give less than was asked for, on network file systems above all, and that says nothing of
    the file: it is read on, and what stays missing is an error that may pass, never damage.

    Args:
        file: the file.
        offset: where to begin.
        least: bytes that the file had there when it was opened; all of them are read.
        most: bytes to ask for.

    Raises:
        RetryableError: the file became shorter, or does not give what it has.
        OSError: reading failed.
    """
    data = file.read(offset, max(least, most or 0))
    idle = 0
    while len(data) < least:
        more = file.read(offset + len(data), least - len(data))
        data += more
        if more:
            continue
        idle += 1
        if file.size() < offset + least:
            raise cut_short(file.path)
        if idle == _TIMES:
            raise RetryableError(
                f"{file.path}: cannot be read: it gives {len(data)} bytes at byte {offset}, and has {least}",
                file=file.path,
            )
    return data


def read_each(file: ReadableFile, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Several (offset, bytes) ranges of an open file, all of which it has, in their order.

    Where every read takes a round trip they are read at the same time, else one by one, as they are taken.

    Raises:
        ReshardError, OSError: as `read_range`.
    """
    many = getattr(file, "read_each", None)
    if many is not None and len(ranges) > 1:
        return iter(many(ranges))
    return (read_range(file, offset, count) for offset, count in ranges)


def fill(file: ReadableFile, offset: int, out: memoryview, rank: Optional[int] = None) -> None:
    """Fill ``out`` with the bytes of an open file from an offset on.

    Args:
        file: the file, which had these bytes when it was opened.
        offset: where to begin.
        out: where they go.
        rank: whose file it is, for messages.

    Raises:
        RetryableError: the file became shorter.
        OSError: reading failed.
    """
    done = 0
    while done < len(out):
        count = file.read_into(offset + done, out[done:])
        if count == 0:
            raise cut_short(file.path, rank)
        done += count


def cut_short(path: str, rank: Optional[int] = None) -> RetryableError:
    """The error to show for a file that ended earlier than when it was opened."""
    whose = f" (rank {rank})" if rank is not None else ""
    return RetryableError(
        f"{path}: became shorter while it was read{whose}",
        file=path,
        rank=rank,
        hint="wait until nothing writes the source any more, then give the same command again",
    )


def new_file(path: str, size: int, expected: Optional[Expected] = None, sending: Optional[Sending] = None) -> NewFile:
    """Begin to write a file, in a directory that is made where it is not there; see `Store.new_file`.

    Raises:
        OSError: it cannot be written.
    """
    return store_of(path).new_file(path, size, expected, sending)


def write_parts(path: str, size: int, parts: Iterable[Union[bytes, memoryview]]) -> int:
    """Write a file part by part; it gets its name when the last part has come.

    Args:
        path: the file; its directory is made where it is missing.
        size: bytes of all parts.
        parts: what is written, in order; an error that comes from them is passed on.

    Returns:
        A CRC-32 of all.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    offset = crc = 0
    with contextlib.closing(new_file(path, size)) as file:
        try:
            for data in _gathered(parts):
                file.write(offset, data)
                offset, crc = offset + len(data), zlib.crc32(data, crc)
            if offset != size or file.finish().size != size:
                raise OSError(errno.EIO, f"it is not of the {size:,} bytes that it should have", path)
            file.publish()
        finally:
            file.discard()
    return crc


def _gathered(parts: Iterable[Union[bytes, memoryview]]) -> Iterator[memoryview]:
    """The same bytes in parts that are worth a request."""
    held = bytearray()
    for part in parts:
        data = memoryview(part).cast("B")
        if not held and len(data) >= _WORTH_WRITING:
            yield data
            continue
        held += data
        if len(held) >= _WORTH_WRITING:
            yield memoryview(held)
            held = bytearray()
    yield memoryview(held)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file so that under its name it is whole, or not there; for good. Its directory has to be there.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    store_of(path).write_whole(path, data)


def make_directory(path: str) -> bool:
    """Make a directory, and those above it, unless it is there; whether it was made. Object stores need none.

    Raises:
        OSError: it cannot be made.
    """
    return store_of(path).make_directory(path)


def remove_file(path: str) -> None:
    """Remove a file, if it is there.

    Raises:
        OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        store_of(path).remove(path)
