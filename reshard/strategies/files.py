"""One file: a strategy, a group_info file, or another kind.

The first bytes identify most other kinds, so that a checkpoint of tens of GB is never read in full. A file with the
first bytes or the name of a strategy that cannot be parsed is damaged, which is an error. Any other file is an
`OtherFile`, which is skipped in a directory.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Optional, Union

from reshard.errors import StrategyError
from reshard.storage import UnfitError, opened_regular, read_range, reading
from reshard.storage.files import cipher_of, is_ckpt, kind_by_head
from reshard.strategies.formats import parse_group_map, parse_json_strategy, parse_protobuf
from reshard.strategies.model import StrategyFile
from reshard.text.names import similar_path_hint

# Real files have some ten KB per hundred parameters. Parsed JSON takes several times its size.
MAX_STRATEGY = 2**26
_MAX_GROUP_INFO = 2**23
_HEAD = 32

RECORD = ".made"
"""The ending of the record of a made strategy.

The file is JSON, but is not named so: MindSpore refuses to merge a directory with both .ckpt and .json files."""

ENDINGS = (".ckpt", ".json")


class OtherFile(NamedTuple):
    """A file that is not a strategy: its kind in words, None if unknown; the content of a group_info file."""

    kind: Optional[str] = None
    content: bytes = b""


def read_content(path: str) -> Union[bytes, OtherFile]:
    """The content of a file that may be a strategy."""
    with reading(path, StrategyError):
        try:
            with opened_regular(path) as file:
                size = file.size()
                head = read_range(file, 0, min(size, _HEAD))
                kind = _kind_by_head(head, size)
                content = b""
                if size <= (MAX_STRATEGY if kind is None else _MAX_GROUP_INFO if kind == "a checkpoint" else 0):
                    content = read_range(file, 0, size)
        except UnfitError as error:
            return OtherFile(str(error).replace("is ", "", 1))
        except FileNotFoundError as error:
            problem = f"{path}: no file or directory has this name"
            raise StrategyError(problem, file=path, hint=similar_path_hint(path)) from error
    # Groups of ranks look like values of a checkpoint.
    if kind == "a checkpoint" and content and parse_group_map(content, path) is not None:
        return OtherFile("a group_info file", content)
    if kind is not None:
        return OtherFile(kind)
    if size <= MAX_STRATEGY:
        return content
    if _must_be_strategy(path, head):
        raise StrategyError(
            f"{path} is larger than any strategy file ({MAX_STRATEGY >> 20} MiB)",
            file=path,
            hint="pass a strategy file, not a checkpoint",
        )
    return OtherFile("too large for a strategy")


def parse(path: str, data: bytes) -> Union[StrategyFile, OtherFile]:
    """The strategy in the bytes of a file.

    Raises:
        StrategyError: it is damaged.
    """
    if not data:
        if path.endswith(ENDINGS):
            raise StrategyError(f"{path} is empty", file=path, hint="write it again, or remove it")
        return OtherFile("empty")
    if data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return parse_json_strategy(data, path) or OtherFile("JSON without parameter layouts")
    strategy = parse_protobuf(data, path)
    if strategy is not None:
        return strategy
    if _must_be_strategy(path, data):
        raise StrategyError(
            f"{path} is damaged: it cannot be read as a strategy file",
            file=path,
            hint="it may be truncated, or not a strategy at all; write it again, or remove it",
        )
    return OtherFile()


def read_strategy_file(path: str) -> StrategyFile:
    """One strategy file, protobuf or JSON.

    Raises:
        StrategyError: it is missing, damaged, or something else.
        RetryableError: reading failed.
    """
    data = read_content(path)
    file = data if isinstance(data, OtherFile) else parse(path, data)
    if isinstance(file, OtherFile):
        detail = "" if file.kind is None else f": it is {file.kind}"
        raise StrategyError(
            f"{path} is not a strategy file{detail}",
            file=path,
            hint="pass a strategy file, a directory of strategy files, or none for an unsharded checkpoint",
        )
    return file


def _must_be_strategy(path: str, data: bytes) -> bool:
    # MindSpore writes field 1, current_stage, first.
    return data[:1] == b"\x08" or ("strategy" in os.path.basename(path) and path.endswith(ENDINGS))


def _kind_by_head(head: bytes, size: int) -> Optional[str]:
    if cipher_of(head) is not None:
        return "an encrypted checkpoint"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "a safetensors file"
    return "a checkpoint" if is_ckpt(head) else kind_by_head(head)


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
    content = read_content(path)
    data, kind = (content.content, content.kind) if isinstance(content, OtherFile) else (content, None)
    # Items of a strategy have the same structure as rank lists.
    if parse_protobuf(data, path) is not None:
        kind = "a strategy file"
    elif data:
        groups = parse_group_map(data, path)
        if groups is not None:
            return GroupInfo(path, *groups)
    elif kind is None:
        kind = "empty"
    raise StrategyError(
        f"{path} is not a group_info file" + (f": it is {kind}" if kind else ""),
        file=path,
        hint="pass the complete file that MindSpore wrote where GROUP_INFO_FILE pointed",
    )
