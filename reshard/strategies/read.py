"""Reading a strategy as a user names it: a file, a merged file, a directory, or none."""

from __future__ import annotations

from typing import Optional

from reshard.errors import StrategyError
from reshard.storage import is_directory
from reshard.strategies.directory import check_gaps, find_stages
from reshard.strategies.model import NONE, Strategy
from reshard.strategies.one_file import read_strategy_file
from reshard.strategies.stages import agreed_stages, records_of


def read_strategy(path: Optional[str]) -> Strategy:
    """Read a strategy.

    Args:
        path: a strategy file, protobuf or JSON, of one stage or merged; a directory with the files
            of all stages, which are merged in memory; ``none``, ``None`` or None for one device
            that holds everything whole.

    Raises:
        StrategyError: nothing there, not a strategy, damaged, incomplete or contradicting itself;
            names file, stage and parameter.
        RetryableError: reading failed.
    """
    if path is None or path in (NONE, "None"):
        return Strategy.none()
    if not path:
        raise StrategyError("the strategy's path is empty", hint="pass none for an unsharded checkpoint")
    if is_directory(path):
        found = find_stages(path)
        return Strategy(found.stages, path, found.notes)
    record = records_of(read_strategy_file(path))
    check_gaps(record)
    return Strategy(agreed_stages({stage.number or 0: [stage] for stage in record.stages}), path)
