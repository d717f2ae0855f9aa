"""Reading a strategy as a user names it: a file, a merged file, a directory, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from reshard.errors import StrategyError, UsageError
from reshard.storage import is_directory
from reshard.strategies.directory import check_gaps, find_stages
from reshard.strategies.model import NONE, RecordedLayout, Strategy
from reshard.strategies.one_file import read_strategy_file
from reshard.strategies.stages import agreed_stages, preferred, records_of


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
    return read_recorded(path)[0]


def read_recorded(path: str) -> tuple[Strategy, dict[int, Mapping[str, RecordedLayout]]]:
    """Read a strategy, and per stage what a file of it records, word for word; protobuf where there is one.

    Raises:
        StrategyError, RetryableError: as `read_strategy`.
    """
    if not path:
        raise StrategyError("the strategy's path is empty", hint="pass none for an unsharded checkpoint")
    if is_directory(path):
        found = find_stages(path)
        recorded = {number: preferred(records, "protobuf").recorded for number, records in found.records.items()}
        return Strategy(found.stages, path, found.notes), recorded
    record = records_of(read_strategy_file(path))
    check_gaps(record)
    stages = agreed_stages({stage.number or 0: [stage] for stage in record.stages})
    return Strategy(stages, path), {stage.number or 0: stage.recorded for stage in record.stages}


def required_strategies(source: Optional[str], target: Optional[str]) -> tuple[str, str]:
    """The values of --src-strategy and --dst-strategy.

    Raises:
        UsageError: one was left out; guessing 'none' would silently copy slices as whole tensors.
    """
    if source is not None and target is not None:
        return source, target
    options = {"--src-strategy": source, "--dst-strategy": target}
    missing = [option for option, value in options.items() if value is None]
    raise UsageError(
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
        hint=f"{_why_missing(missing[0])}, or pass none for an unsharded checkpoint",
    )


def _why_missing(option: str) -> str:
    if option == "--dst-strategy":
        return "add --dst-strategy FILE or DIR for the layout of the target"
    return f"rank files do not record how they are cut: add {option} FILE or DIR"
