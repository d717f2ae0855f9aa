"""Reading one file that should be a strategy, or saying what it is instead.

A file's first bytes tell most other kinds apart, so that a checkpoint of tens of GB is never read
to learn that it is none. What begins or is named like a strategy and cannot be parsed is damaged,
which is an error; anything else is an `OtherFile`, and whoever looks through a directory may pass
it over.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional, Union

from reshard.errors import ReshardError, RetryableError, StrategyError
from reshard.storage import ReadableFile, UnfitError, opened_regular, read_range, too_long
from reshard.storage.other_files import cipher_of, is_ckpt, kind_by_head
from reshard.strategies import json_file, protobuf_file
from reshard.strategies.model import StrategyFile
from reshard.text.near_names import path_meant

# Real ones have some ten KB per hundred parameters. Parsed JSON takes several times its size.
LARGEST_PROTOBUF = 2**26
LARGEST_JSON = 2**26
LARGEST_GROUP_INFO = 2**23
_HEAD = 32
_WRONG_PATH = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


@dataclass(frozen=True)
class OtherFile:
    """A file that is no strategy.

    Attributes:
        path: the file.
        kind: what it is, such as ``a checkpoint``; None where that cannot be told.
    """

    path: str
    kind: Optional[str] = None


def read_bytes(path: str) -> Union[bytes, OtherFile]:
    """The content of a file that may be a strategy.

    Raises:
        StrategyError: missing, not readable or too large.
        RetryableError: reading failed.
    """
    with opened(path) as file:
        if isinstance(file, OtherFile):
            return file
        size = file.size()
        head = read_range(file, 0, min(size, _HEAD))
        kind = _kind_by_head(head, size)
        if kind == "a checkpoint" and size <= LARGEST_GROUP_INFO:
            # Its groups look like the values of a checkpoint.
            content = read_range(file, 0, size)
            kind = kind if protobuf_file.parse_group_map(content, path) is None else "a group_info file"
        if kind is not None:
            return OtherFile(path, kind)
        limit = LARGEST_JSON if _looks_like_json(head) else LARGEST_PROTOBUF
        if size <= limit:
            return read_range(file, 0, size)
        if _must_be_one(path, head):
            raise StrategyError(
                f"{path} is larger than any strategy file ({limit >> 20} MiB)",
                file=path,
                hint="pass a strategy file, not a checkpoint",
            )
        return OtherFile(path, "too large for one")


def parse(path: str, data: bytes) -> Union[StrategyFile, OtherFile]:
    """The strategy that the bytes of a file hold.

    Raises:
        StrategyError: it is damaged.
    """
    if not data:
        if path.endswith((".ckpt", ".json")):
            raise StrategyError(f"{path} is empty", file=path, hint="write it again, or remove it")
        return OtherFile(path, "empty")
    if _looks_like_json(data):
        return json_file.parse_strategy(data, path) or OtherFile(path, "JSON without parameter layouts")
    parsed = protobuf_file.parse_strategy(data, path)
    if parsed is not None:
        return parsed
    if _must_be_one(path, data):
        raise StrategyError(
            f"{path} is damaged: it cannot be read as a strategy file",
            file=path,
            hint="it may be truncated, or not a strategy at all; write it again, or remove it",
        )
    return OtherFile(path)


def read_strategy_file(path: str) -> StrategyFile:
    """One strategy file, protobuf or JSON.

    Raises:
        StrategyError: it is missing, damaged, or something else.
        RetryableError: reading failed.
    """
    data = read_bytes(path)
    found = data if isinstance(data, OtherFile) else parse(path, data)
    if isinstance(found, OtherFile):
        detail = "" if found.kind is None else f": it is {found.kind}"
        raise StrategyError(
            f"{path} is not a strategy file{detail}",
            file=path,
            hint="pass a strategy file, a directory of strategy files, or none for an unsharded checkpoint",
        )
    return found


@contextlib.contextmanager
def opened(path: str) -> Iterator[Union[ReadableFile, OtherFile]]:
    """A regular file, open for reading; an `OtherFile` where it is none.

    Raises:
        StrategyError: missing or not readable.
        RetryableError: opening or reading it failed.
    """
    with contextlib.ExitStack() as stack:
        try:
            try:
                file: Union[ReadableFile, OtherFile] = stack.enter_context(opened_regular(path))
            except UnfitError as error:
                file = OtherFile(path, str(error).replace("is ", "", 1))
            yield file
        except OSError as error:
            raise read_error(path, error) from error


def read_error(path: str, error: OSError) -> ReshardError:
    """What a failure to open or read a file or directory means for the user."""
    if isinstance(error, FileNotFoundError):
        return StrategyError(f"{path}: there is no such file or directory", file=path, hint=path_meant(path))
    if error.errno == errno.ENAMETOOLONG:
        return too_long(path)
    kind = StrategyError if error.errno in _WRONG_PATH else RetryableError
    return kind(f"{path} cannot be read: {error.strerror}", file=path)


def _looks_like_json(data: bytes) -> bool:
    return data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _must_be_one(path: str, data: bytes) -> bool:
    # Field 1, current_stage, is the first thing that MindSpore writes.
    return data[:1] == b"\x08" or ("strategy" in os.path.basename(path) and path.endswith((".ckpt", ".json")))


def _kind_by_head(head: bytes, size: int) -> Optional[str]:
    if cipher_of(head) is not None:
        return "an encrypted checkpoint"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "a safetensors file"
    if is_ckpt(head):
        return "a checkpoint"
    return kind_by_head(head)
