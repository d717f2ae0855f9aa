"""Files by path or open, in any store: status, reading, writing, and their errors as errors for users.

`os.path.exists` treats every failure as absence: a file server that is down for a second would look like a
missing checkpoint. Here absence is a result and failure an error. Other programs may have put anything at a path,
or be writing it: irregular files are never waited for, small files have a maximum size, and short reads are
continued. Errors name the path and state whether a retry may help.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

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
from reshard.storage.registry import for_each, scheme_of, store_of
from reshard.storage.store import FileStatus, NewFile, ReadableFile, Sending, status_or_none

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
# The kernel's limit of buffers per read.
_MAX_BUFFERS = 1024
# Smaller parts are joined up to this size before they are written.
_WORTH_WRITING = 1 << 20

CHANGED = "it was replaced or changed while it was read"
"""The problem of a source file with another version than at its first open."""

HEAD = 16
"""Bytes that `kind_by_head` needs."""

CIPHERS = {
    b"\xd8\x5e\x3a\x7f": "AES-GCM",
    b"\xd9\x5e\x3a\x7f": "AES-CBC",
    b"\xda\x5e\x3a\x7f": "SM4-CBC",
}
"""MindSpore's name of a `.ckpt`'s encryption mode, by its first bytes."""

MARK_SIZE = 4
"""Bytes that `cipher_of` needs."""

# Keys of the fields of a checkpoint's value: tag, tensor or map tensor.
_VALUE_PARTS = (b"\x0a", b"\x12", b"\x1a")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
# Before 1.6, PyTorch wrote several pickles in a row; the first is a magic number.
_PICKLE_VERSIONS = range(2, 6)
# A Git LFS pointer, in the place of a large file that was not fetched.
_POINTER = b"version https://"


class UnfitError(ValueError):
    """A file has the wrong kind, size or content.

    Attributes:
        problem: stands before the text, which with it follows the file's name, as in ``is larger than ...``.
    """

    problem = ""


def status_error(path: str, error: OSError) -> ReshardError:
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
def reading(path: str, kind: type[InputError] = CheckpointError, hint: str | None = None) -> Iterator[None]:
    """Replace errors of a block that reads a file by errors that name it.

    Args:
        path: the file.
        kind: class of the error for an `UnfitError` or a lasting `OSError`.
        hint: for an `UnfitError`.
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
def writing(path: str, action: str = "written", rank: int | None = None) -> Iterator[None]:
    """Replace an OSError of a block that changes a file by its `writing_error`."""
    try:
        yield
    except OSError as error:
        raise writing_error(path, error, action, rank) from error


def writing_error(path: str, error: OSError, action: str = "written", rank: int | None = None) -> ReshardError:
    """The error for a file or directory that cannot be written or removed: lasting, or worth a retry.

    ``action`` is a participle.
    """
    if error.errno == errno.ENAMETOOLONG:
        return too_long(path)
    reason = error.strerror or str(error)
    if path.startswith(f"{error.filename}{os.sep}"):
        reason = f"its directory {error.filename} cannot be made or opened: {reason}"
    if error.errno in _NO_DIRECTORY:
        problem = f"{path}: may not be {action}: {error.filename or 'its directory'} is a link or no directory"
        return TargetError(problem, file=path, rank=rank, hint="choose another place")
    if is_read_only(error):
        return TargetError(
            f"{path}: may not be {action}: {reason}",
            file=path,
            rank=rank,
            hint=f"choose another place, or get {_right_to_write(path)}",
        )
    if error.errno == errno.ENOENT and error.filename and _holds_no_files(os.path.dirname(error.filename)):
        # /proc and its like answer so: no later try makes a difference.
        problem = f"{path}: cannot be {action}: {reason}; the file system holds no files"
        return TargetError(problem, file=path, rank=rank, hint="choose another place")
    problem, hint = f"cannot be {action}", None
    if error.errno in _FULL:
        # Without inodes no file can be made, whatever space `df -h` shows.
        problem, hint = "no space left", "`df -h` shows free space, `df -i` free inodes (numbers of files)"
    elif error.errno == errno.EFBIG:
        hint = "`ulimit -f` shows the maximum file size of this shell; file systems such as FAT have their own"
    kind = UnwritableError if error.errno in _EVERYWHERE else RetryableError
    return kind(f"{path}: {problem}: {reason}", file=path, rank=rank, hint=hint)


def _holds_no_files(directory: str) -> bool:
    """Whether a directory is of a file system without space for files, such as /proc."""
    try:
        return os.statvfs(directory or os.curdir).f_blocks == 0
    except OSError:
        return False


def _right_to_write(path: str) -> str:
    if scheme_of(path):
        return "the permissions that docs/stores.md lists"
    parent = os.path.dirname(path)
    while parent and not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    places = [parent or os.curdir, *([path] if os.path.lexists(path) else [])]
    return f"write permission: `{shlex.join(['ls', '-ld', *places])}` shows owner and rights"


def too_long(path: str) -> UsageError:
    shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}..."
    return UsageError(
        f"{shown}: is too long for a path",
        file=path,
        hint="use a shorter path, or one relative to the current directory",
    )


def cut_short(path: str, rank: int | None = None) -> RetryableError:
    """The error for a file that became shorter while it was open."""
    return RetryableError(
        f"{path}: became shorter while it was read",
        file=path,
        rank=rank,
        hint="wait until no program writes to the source, then run the same command again",
    )


def status_at(path: str, through_links: bool = True) -> FileStatus | None:
    """The status of a path; None if nothing is there.

    Raises:
        UsageError: the path is too long to be one.
        InputError: permission is denied.
        RetryableError: its status cannot be read at the moment.
    """
    with inspecting(path):
        return status_or_none(lambda: store_of(path).status(path, through_links))


def status_of_each(paths: Sequence[str], through_links: bool = True) -> list[FileStatus | None]:
    """The status of each of several paths, as `status_at` returns it; concurrently where requests take a round trip."""
    return for_each(lambda path: status_at(path, through_links), paths)


def exists(path: str) -> bool:
    """Whether anything is at a path, a dangling link included."""
    return status_at(path, through_links=False) is not None


def is_directory(path: str) -> bool:
    entry = store_of(path).listed(path)
    if entry is not None:
        return entry.is_dir()
    status = status_at(path)
    return status is not None and status.directory


def is_regular_file(path: str) -> bool:
    entry = store_of(path).listed(path)
    if entry is not None:
        return entry.is_file()
    status = status_at(path)
    return status is not None and status.regular


def names_in(directory: str) -> list[str]:
    """The names in a directory, sorted; empty if there is no directory."""
    with inspecting(directory), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(entry.name for entry in store_of(directory).entries(directory))
    return []


def directories_in(directory: str) -> list[str]:
    """The names of directories in a directory, sorted.

    Raises:
        CheckpointError: there is no directory.
        RetryableError: listing failed in a way that may pass.
    """
    with reading(directory):
        return sorted(entry.name for entry in store_of(directory).entries(directory) if leads_to(entry.is_dir))


def leads_to(kind: Callable[[], bool]) -> bool:
    """The result of `DirectoryEntry.is_dir` or `is_file`; a circle of links is neither."""
    try:
        return kind()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


@contextlib.contextmanager
def opened_regular(path: str, through_links: bool = True) -> Iterator[ReadableFile]:
    """A regular file, open for reading while the block runs; an `UnfitError` if it is something else."""
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
    """The content of a regular file of at most ``most`` bytes, else an `UnfitError`."""
    with opened_regular(path, through_links) as file:
        size = file.size()
        if size > most:
            raise UnfitError(f"is larger than any such file: it has {size:,} bytes, and {most:,} are allowed")
        return read_range(file, 0, size)


def read_json(
    path: str,
    most: int,
    kind: type[InputError] = CheckpointError,
    hint: str | None = None,
    file_names: bool = False,
) -> dict[str, Any] | None:
    """The object in a JSON file of at most ``most`` bytes; None if the file is missing.

    Args:
        path: the file.
        most: maximum size in bytes.
        kind: class of the error for a file that is unfit, damaged or no JSON object.
        hint: of that error.
        file_names: accept bytes that are not UTF-8, as Python represents them in names of files.
    """
    # Imported here: it slows the start of a command.
    from reshard.storage.json_text import JsonError, parse_json

    with reading(path, kind, hint):
        try:
            content = parse_json(read_small(path, most), file_names=file_names)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not isinstance(content, dict):
            raise JsonError("it is not an object")
        return content


def read_range(file: ReadableFile, offset: int, least: int, most: int | None = None) -> bytes:
    """Bytes of an open file from an offset on: at least the ``least`` that it had there when it was opened.

    A read may return fewer bytes than requested, above all on network file systems. That is no sign of damage:
    reading continues, and missing bytes are an error that a retry may cure.
    """
    data = file.read(offset, max(least, most or 0))
    while len(data) < least:
        more = file.read(offset + len(data), least - len(data))
        if not more:
            raise cut_short(file.path)
        data += more
    return data


def read_each(file: ReadableFile, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Several (offset, bytes) ranges of an open file, all of which it has, in their order.

    Concurrently where every read takes a round trip, else one by one, on demand.
    """
    many = getattr(file, "read_each", None)
    if many is not None and len(ranges) > 1:
        return iter(many(ranges))
    return (read_range(file, offset, count) for offset, count in ranges)


def fill(file: ReadableFile, offset: int, out: memoryview, rank: int | None = None) -> None:
    """Fill ``out`` with bytes that an open file had from an offset on when it was opened."""
    position = 0
    while position < len(out):
        count = file.read_into(offset + position, out[position:])
        if count == 0:
            raise cut_short(file.path, rank)
        position += count


def scatter(file: ReadableFile, offset: int, outs: Sequence[memoryview], nbytes: int, rank: int | None = None) -> None:
    """As `fill`, several buffers of ``nbytes`` together, one after the other: in one read each 1024, where possible."""
    read: Callable[[int, Sequence[memoryview]], int] | None = getattr(file, "scatter", None)
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


def new_file(path: str, size: int, sending: Sending | None = None) -> NewFile:
    return store_of(path).new_file(path, size, sending)


def write_parts(path: str, size: int, parts: Iterable[bytes | memoryview]) -> int:
    """Write a file part by part, in a directory that is made if missing; the CRC-32 of the whole file.

    It gets its name after the last part. No partial file remains.
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


def _gathered(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
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
    """Write a small file atomically and durably, in an existing directory; no partial file remains."""
    store_of(path).write_whole(path, data)


def remove_file(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        store_of(path).remove(path)


def cipher_of(head: bytes) -> str | None:
    """The encryption mode of a `.ckpt` with this head."""
    return CIPHERS.get(head[:MARK_SIZE])


def is_ckpt(head: bytes) -> bool:
    """Whether this head is of an unencrypted `.ckpt`; strategies have a number in its place."""
    # A message in field 1, whose length takes up to ten bytes; in it, a field of a value.
    length = next((position for position in range(1, 11) if head[position : position + 1] < b"\x80"), 10)
    return head[:1] == b"\x0a" and head[length + 1 : length + 2] in _VALUE_PARTS


def kind_by_head(head: bytes) -> str | None:
    """The kind of another program's file with this head; None if unknown."""
    if head.startswith(_ZIP):
        return "a zip archive, as PyTorch saves"
    if head[:1] == b"\x80" and len(head) > 1 and head[1] in _PICKLE_VERSIONS:
        return "a Python pickle, as old versions of PyTorch save"
    if head.startswith(_POINTER):
        return "a Git LFS pointer, for which `git lfs pull` fetches the file itself"
    return None


def kind_of(path: str) -> str | None:
    """The kind of the file at a path; None if unknown or unreadable."""
    with contextlib.suppress(OSError, UnfitError), opened_regular(path) as file:
        return kind_by_head(file.read(0, HEAD))
    return None
