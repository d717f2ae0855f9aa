"""One file: a strategy, a group_info file, or another kind; and the record of a made strategy.

The first bytes identify most other kinds, so that a checkpoint of tens of GB is never read in full. A file with the
first bytes or the name of a strategy that cannot be parsed is damaged, which is an error. Any other file is an
`OtherFile`, which is skipped in a directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple, Optional, Union

from reshard.errors import StrategyError
from reshard.storage import ReadableFile, UnfitError, opened_regular, read_range, reading
from reshard.storage.files import cipher_of, is_ckpt, kind_by_head
from reshard.strategies import protobuf_file
from reshard.strategies.model import StrategyFile
from reshard.text.names import similar_path_hint

# Real files have some ten KB per hundred parameters. Parsed JSON takes several times its size.
MAX_STRATEGY = 2**26
MAX_GROUP_INFO = 2**23
_HEAD = 32


RECORD = ".made"
"""The ending of the record of a made strategy.

The file is JSON, but is not named so: MindSpore refuses to merge a directory with both .ckpt and .json files."""

RANK = "{rank}"
"""The mark of a stage's first rank in the path of a made strategy's files."""

ENDINGS = (".ckpt", ".json")


class OtherFile(NamedTuple):
    """A file that is not a strategy.

    Attributes:
        path: the file.
        kind: its kind in words, such as ``a checkpoint``; None if unknown.
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
        if kind == "a checkpoint" and size <= MAX_GROUP_INFO:
            # Its groups look like values of a checkpoint.
            content = read_range(file, 0, size)
            kind = kind if protobuf_file.parse_group_map(content, path) is None else "a group_info file"
        if kind is not None:
            return OtherFile(path, kind)
        if size <= MAX_STRATEGY:
            return read_range(file, 0, size)
        if _must_be_strategy(path, head):
            raise StrategyError(
                f"{path} is larger than any strategy file ({MAX_STRATEGY >> 20} MiB)",
                file=path,
                hint="pass a strategy file, not a checkpoint",
            )
        return OtherFile(path, "too large for a strategy")


def parse(path: str, data: bytes) -> Union[StrategyFile, OtherFile]:
    """The strategy in the bytes of a file.

    Raises:
        StrategyError: it is damaged.
    """
    if not data:
        if path.endswith((".ckpt", ".json")):
            raise StrategyError(f"{path} is empty", file=path, hint="write it again, or remove it")
        return OtherFile(path, "empty")
    if _looks_like_json(data):
        # Loaded only here: MindSpore writes protobuf by default.
        from reshard.strategies import json_file

        return json_file.parse_strategy(data, path) or OtherFile(path, "JSON without parameter layouts")
    parsed = protobuf_file.parse_strategy(data, path)
    if parsed is not None:
        return parsed
    if _must_be_strategy(path, data):
        raise StrategyError(
            f"{path} is damaged: it cannot be read as a strategy file",
            file=path,
            hint="it may be truncated, or not a strategy at all; write it again, or remove it",
        )
    return OtherFile(path)


def parsed(path: str, data: Union[bytes, OtherFile]) -> Union[StrategyFile, OtherFile, None]:
    """The same for the result of `read_bytes`; None for an empty file, whatever its name.

    Raises:
        StrategyError: the strategy is damaged.
    """
    if isinstance(data, OtherFile):
        return data
    return parse(path, data) if data else None


def read_strategy_file(path: str) -> StrategyFile:
    """One strategy file, protobuf or JSON.

    Raises:
        StrategyError: it is missing, damaged, or something else.
        RetryableError: reading failed.
    """
    data = read_bytes(path)
    file = data if isinstance(data, OtherFile) else parse(path, data)
    if isinstance(file, OtherFile):
        detail = "" if file.kind is None else f": it is {file.kind}"
        raise StrategyError(
            f"{path} is not a strategy file{detail}",
            file=path,
            hint="pass a strategy file, a directory of strategy files, or none for an unsharded checkpoint",
        )
    return file


@contextlib.contextmanager
def opened(path: str) -> Iterator[Union[ReadableFile, OtherFile]]:
    """A regular file, open for reading; an `OtherFile` for any other kind.

    Raises:
        StrategyError: missing or not readable.
        RetryableError: opening or reading it failed.
    """
    with reading(path, StrategyError), contextlib.ExitStack() as stack:
        try:
            file: Union[ReadableFile, OtherFile] = stack.enter_context(opened_regular(path))
        except UnfitError as error:
            file = OtherFile(path, str(error).replace("is ", "", 1))
        except FileNotFoundError as error:
            problem = f"{path}: no file or directory has this name"
            raise StrategyError(problem, file=path, hint=similar_path_hint(path)) from error
        yield file


def _looks_like_json(data: bytes) -> bool:
    return data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _must_be_strategy(path: str, data: bytes) -> bool:
    # MindSpore writes field 1, current_stage, first.
    return data[:1] == b"\x08" or ("strategy" in os.path.basename(path) and path.endswith((".ckpt", ".json")))


def _kind_by_head(head: bytes, size: int) -> Optional[str]:
    if cipher_of(head) is not None:
        return "an encrypted checkpoint"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "a safetensors file"
    if is_ckpt(head):
        return "a checkpoint"
    return kind_by_head(head)


class GroupInfo(NamedTuple):
    """The content of one rank's group_info file.

    Attributes:
        file: its path.
        restore_ranks: ranks with the same checkpoint as this rank; a lower bound, empty
            if unknown.
        groups: communication groups, name and ranks, in file order; names may repeat.
    """

    file: str
    restore_ranks: tuple[int, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]


def read_group_info(path: str) -> GroupInfo:
    """Read a group_info file.

    Raises:
        StrategyError: missing, not readable, or not a group_info file.
        RetryableError: reading failed.
    """
    with opened(path) as file:
        size = 0 if isinstance(file, OtherFile) else file.size()
        data = b"" if isinstance(file, OtherFile) else read_range(file, 0, min(size, MAX_GROUP_INFO))
    is_strategy = protobuf_file.parse_strategy(data, path) is not None
    # Items of a strategy have the same structure as rank lists.
    if data and size <= MAX_GROUP_INFO and not is_strategy:
        content = protobuf_file.parse_group_map(data, path)
        if content is not None:
            return GroupInfo(path, *content)
    kind = "a strategy file" if is_strategy else _kind(path, data)
    raise StrategyError(
        f"{path} is not a group_info file" + (f": it is {kind}" if kind else ""),
        file=path,
        hint="pass the complete file that MindSpore wrote where GROUP_INFO_FILE pointed",
    )


def _kind(path: str, data: bytes) -> Optional[str]:
    content = read_bytes(path)
    if isinstance(content, OtherFile):
        return content.kind
    return None if data else "empty"


def record_path(out: str) -> str:
    """The path of the record of a made strategy.

    Args:
        out: its file, its directory, or a path with `RANK` in it, as it was typed.
    """
    if out.endswith(ENDINGS) and RANK not in out:
        return out + RECORD
    return os.path.join(os.path.dirname(out) if RANK in out else out, "strategy" + RECORD)
