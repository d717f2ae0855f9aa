"""Files by path or open, in any store: status, reading, writing.

`os.path.exists` treats every failure as absence: a file server that is down for a second would look like a
missing checkpoint. Here absence is a result and failure an error. Other programs may have put anything at a path,
or be writing it: irregular files are never waited for, small files have a maximum size, and short reads are
continued.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable, Optional, Union

from reshard.errors import CheckpointError, InputError, RetryableError
from reshard.storage.file_errors import UnfitError, cut_short, inspecting, reading, status_error
from reshard.storage.listing_cache import cached_entry
from reshard.storage.registry import for_each, store_of
from reshard.storage.store import FileStatus, NewFile, ReadableFile, Sending

# Maximum empty reads in a row before the end of the file.
_TIMES = 3
# The kernel's limit of buffers per read.
_MAX_BUFFERS = 1024
# Smaller parts are joined up to this size before they are written.
_WORTH_WRITING = 1 << 20


def status_at(path: str, through_links: bool = True) -> Optional[FileStatus]:
    """The status of a path; None if nothing is there.

    Args:
        path: the path.
        through_links: follow symbolic links; else the status of the link.

    Raises:
        UsageError: the path is too long to be one.
        InputError: permission is denied.
        RetryableError: its status cannot be read at the moment.
    """
    try:
        return store_of(path).status(path, through_links)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # ValueError: no file can have a name with a NUL, or one that cannot be encoded.
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            # A circle of links counts as missing, like a dangling link.
            return None
        raise status_error(path, error) from error


def status_of_each(paths: Sequence[str], through_links: bool = True) -> list[Optional[FileStatus]]:
    """The status of each of several paths, as `status_at` returns it; concurrently where requests take a round trip.

    Raises:
        ReshardError: as `status_at`.
    """
    return for_each(lambda path: status_at(path, through_links), paths)


def exists(path: str) -> bool:
    """Whether anything is at a path, a dangling link included.

    Raises:
        ReshardError: as `status_at`.
    """
    return status_at(path, through_links=False) is not None


def is_directory(path: str) -> bool:
    """Whether a path leads to a directory.

    Raises:
        ReshardError: as `status_at`.
    """
    entry = cached_entry(path)
    if entry is not None:
        return entry.is_dir()
    status = status_at(path)
    return status is not None and status.directory


def is_regular_file(path: str) -> bool:
    """Whether a path leads to a regular file.

    Raises:
        ReshardError: as `status_at`.
    """
    entry = cached_entry(path)
    if entry is not None:
        return entry.is_file()
    status = status_at(path)
    return status is not None and status.regular


def names_in(directory: str) -> list[str]:
    """The names in a directory, sorted; empty if there is no directory.

    Raises:
        ReshardError: it cannot be listed; as `status_at`.
    """
    with inspecting(directory), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(entry.name for entry in store_of(directory).entries(directory))
    return []


def leads_to(kind: Callable[[], bool]) -> bool:
    """Whether an entry of a directory is of a kind, or a link to one; a circle of links is not.

    Args:
        kind: `DirectoryEntry.is_dir` or `DirectoryEntry.is_file` of the entry.

    Raises:
        OSError: its status cannot be read.
    """
    try:
        return kind()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


@contextlib.contextmanager
def opened_regular(path: str, through_links: bool = True) -> Iterator[ReadableFile]:
    """A regular file, open for reading while the block runs.

    Args:
        path: the file.
        through_links: follow symbolic links.

    Raises:
        UnfitError: it is something else.
        OSError: it is missing, or cannot be opened.
    """
    store = store_of(path)
    try:
        if store.special_files:
            # Opening a FIFO waits for its writer; opening a device can have any effect.
            _check_regular(store.status(path, through_links))
        file = store.open(path, through_links)
    except IsADirectoryError as error:
        raise UnfitError("is a directory") from error
    except ValueError as error:
        if isinstance(error, UnfitError):
            raise
        # No file can have a name with a NUL, or one that cannot be encoded.
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
        most: maximum size in bytes.
        through_links: follow symbolic links.

    Raises:
        UnfitError: it is not a regular file, or larger.
        RetryableError: reads end before its size.
        OSError: it is missing, or cannot be read.
    """
    with opened_regular(path, through_links) as file:
        size = file.size()
        if size > most:
            raise UnfitError(f"is larger than any such file: it has {size:,} bytes, and {most:,} are allowed")
        return read_range(file, 0, size)


def read_json(
    path: str,
    most: int,
    kind: type[InputError] = CheckpointError,
    hint: Optional[str] = None,
    through_links: bool = True,
    file_names: bool = False,
) -> Optional[dict[str, Any]]:
    """The object in a small JSON file; None if the file is missing.

    Args:
        path: the file.
        most: maximum size in bytes.
        kind: class of the error for a file that is unfit, damaged or no JSON object.
        hint: for such an error.
        through_links: follow symbolic links.
        file_names: accept bytes that are not UTF-8, as Python represents them in names of files.

    Raises:
        ReshardError: as `reading`.
    """
    # Imported here: it slows the start of a command.
    from reshard.storage.json_text import JsonError, parse_json

    with reading(path, kind, hint):
        try:
            content = parse_json(read_small(path, most, through_links), file_names=file_names)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not isinstance(content, dict):
            raise JsonError("it is not an object")
        return content


def read_range(file: ReadableFile, offset: int, least: int, most: Optional[int] = None) -> bytes:
    """Bytes of an open file from an offset on.

    A read may return fewer bytes than requested, above all on network file systems. That is no sign of damage:
    reading continues, and bytes that stay missing are an error that a retry may cure.

    Args:
        file: the open file.
        offset: first byte.
        least: bytes from there to the end of the file when it was opened; all of them are read.
        most: maximum bytes to read.

    Raises:
        RetryableError: the file became shorter, or reads end before its size.
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
                f"{file.path}: cannot be read: a read at byte {offset} returned {len(data)} of {least} bytes",
                file=file.path,
            )
    return data


def read_each(file: ReadableFile, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Several (offset, bytes) ranges of an open file, all of which it has, in their order.

    Concurrently where every read takes a round trip, else one by one, on demand.

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
        out: buffer for the bytes.
        rank: rank of the file, for messages.

    Raises:
        RetryableError: the file became shorter.
        OSError: reading failed.
    """
    position = 0
    while position < len(out):
        count = file.read_into(offset + position, out[position:])
        if count == 0:
            raise cut_short(file.path, rank)
        position += count


def scatter(
    file: ReadableFile, offset: int, outs: Sequence[memoryview], nbytes: int, rank: Optional[int] = None
) -> None:
    """As `fill`, several buffers one after the other: in one read each 1024, where the file has these bytes.

    Args:
        file: the file, which had these bytes when it was opened.
        offset: where to begin.
        outs: buffers for the bytes.
        nbytes: bytes of all buffers.
        rank: rank of the file, for messages.

    Raises:
        RetryableError: the file became shorter.
        OSError: reading failed.
    """
    read: Optional[Callable[[int, Sequence[memoryview]], int]] = getattr(file, "scatter", None)
    if read is None:
        for out in outs:
            fill(file, offset, out, rank)
            offset += len(out)
        return
    position = 0
    while position < nbytes:
        count = read(offset + position, outs[:_MAX_BUFFERS])
        if count == 0:
            raise cut_short(file.path, rank)
        position += count
        if position < nbytes:
            outs = between(outs, count, nbytes)


def between(outs: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """The memory of bytes ``start`` to ``stop``, at most all, of buffers that are filled one after the other."""
    parts = []
    for out in outs:
        if start < len(out) and stop > 0:
            parts.append(out[max(0, start) : stop])
        start, stop = start - len(out), stop - len(out)
    return parts


def new_file(path: str, size: int, sending: Optional[Sending] = None) -> NewFile:
    """Begin to write a file, in a directory that is made if missing; see `Store.new_file`.

    Raises:
        OSError: it cannot be written.
    """
    return store_of(path).new_file(path, size, sending)


def write_parts(path: str, size: int, parts: Iterable[Union[bytes, memoryview]]) -> int:
    """Write a file part by part; it gets its name after the last part.

    Args:
        path: the file; its directory is made if missing.
        size: bytes of all parts.
        parts: contents in order; their errors are passed on.

    Returns:
        The CRC-32 of the whole file.

    Raises:
        OSError: it cannot be written; no partial file remains.
    """
    offset = crc = 0
    with contextlib.closing(new_file(path, size)) as file:
        try:
            for data in _gathered(parts):
                file.write(offset, data)
                offset, crc = offset + len(data), zlib.crc32(data, crc)
            if offset != size or file.finish().size != size:
                raise OSError(errno.EIO, f"its size is not {size:,} bytes", path)
            file.publish()
        finally:
            file.discard()
    return crc


def _gathered(parts: Iterable[Union[bytes, memoryview]]) -> Iterator[memoryview]:
    """The same bytes, with small parts joined."""
    buffer = bytearray()
    for part in parts:
        data = memoryview(part).cast("B")
        if not buffer and len(data) >= _WORTH_WRITING:
            yield data
            continue
        buffer += data
        if len(buffer) >= _WORTH_WRITING:
            yield memoryview(buffer)
            buffer = bytearray()
    yield memoryview(buffer)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file atomically and durably. Its directory has to exist.

    Raises:
        OSError: it cannot be written; no partial file remains.
    """
    store_of(path).write_whole(path, data)


def remove_file(path: str) -> None:
    """Remove a file if it exists.

    Raises:
        OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        store_of(path).remove(path)
