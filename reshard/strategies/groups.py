"""group_info files: which ranks hold the same checkpoint, and the communication groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from reshard.errors import StrategyError
from reshard.storage import read_range
from reshard.strategies import protobuf_file
from reshard.strategies.one_file import LARGEST_GROUP_INFO, OtherFile, opened, read_bytes


@dataclass(frozen=True)
class GroupInfo:
    """What one rank's group_info file says.

    Attributes:
        file: its path.
        restore_ranks: ranks whose checkpoint is identical to this rank's; a lower bound, empty
            where unknown.
        groups: communication groups, name and ranks, in file order; names may repeat.
    """

    file: str
    restore_ranks: tuple[int, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]


def read_group_info(path: str) -> GroupInfo:
    """Read a group_info file.

    Raises:
        StrategyError: missing, not readable, or no group_info file.
        RetryableError: reading failed.
    """
    with opened(path) as file:
        size = 0 if isinstance(file, OtherFile) else file.size()
        data = b"" if isinstance(file, OtherFile) else read_range(file, 0, min(size, LARGEST_GROUP_INFO))
    is_strategy = protobuf_file.parse_strategy(data, path) is not None
    # A strategy's items would pass for rank lists.
    if data and size <= LARGEST_GROUP_INFO and not is_strategy:
        found = protobuf_file.parse_group_map(data, path)
        if found is not None:
            return GroupInfo(path, *found)
    kind = "a strategy file" if is_strategy else _kind(path, data)
    raise StrategyError(
        f"{path} is not a group_info file" + (f": it is {kind}" if kind else ""),
        file=path,
        hint="pass the file that MindSpore wrote where GROUP_INFO_FILE pointed",
    )


def _kind(path: str, data: bytes) -> Optional[str]:
    other = read_bytes(path)
    if isinstance(other, OtherFile):
        return other.kind
    return None if data else "empty"
