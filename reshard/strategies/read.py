"""Reading a strategy as a user names it: a file, a merged file, a directory, or none.

Every rank may have written its own file to a directory: contents are compared first, so that identical copies
are parsed once. Files that are not strategies are skipped, with a note. A merged file is used only without files of
single stages; if these are complete, it is skipped. If the directory itself holds no strategies, those in its
``rank_0/``, ``rank_1/`` ... are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Optional, Union

from reshard.errors import StrategyError, UsageError
from reshard.storage import is_directory, names_in, real
from reshard.strategies.model import NONE, RecordedLayout, Stage, Strategy, StrategyFile
from reshard.strategies.one_file import RECORD, OtherFile, parse, read_bytes, read_strategy_file
from reshard.strategies.stages import (
    FileRecord,
    StageRecord,
    agreed_stages,
    missing_stages,
    missing_text,
    preferred,
    records_of,
    same_content,
    stage_list,
)
from reshard.text.messages import Report, some_names
from reshard.text.names import natural_order

_RANK_DIRECTORY = "(rank_|rank|)[0-9]+"


def read_strategy(path: Optional[str]) -> Strategy:
    """Read a strategy.

    Args:
        path: a strategy file, protobuf or JSON, of one stage or merged; a directory with the files
            of all stages, which are merged in memory; ``none``, ``None`` or None for one device
            that holds everything whole.

    Raises:
        StrategyError: missing, not a strategy, damaged, incomplete or contradicting itself;
            names file, stage and parameter.
        RetryableError: reading failed.
    """
    if path is None or path in (NONE, "None"):
        return Strategy.none()
    return read_recorded(path)[0]


def read_recorded(path: str) -> tuple[Strategy, dict[int, Mapping[str, RecordedLayout]]]:
    """A strategy, and per stage the unchanged records of one of its files, protobuf if possible.

    Raises:
        StrategyError, RetryableError: as `read_strategy`.
    """
    if not path:
        raise StrategyError("the strategy's path is empty", hint="pass none for an unsharded checkpoint")
    if is_directory(path):
        from_directory = find_stages(path)
        recorded = {
            number: preferred(records, "protobuf").recorded for number, records in from_directory.records.items()
        }
        return Strategy(from_directory.stages, path, from_directory.notes), recorded
    record = records_of(read_strategy_file(path))
    check_gaps(record)
    stages = agreed_stages({stage.number or 0: [stage] for stage in record.stages})
    return Strategy(stages, path), {stage.number or 0: stage.recorded for stage in record.stages}


def required_strategies(source: Optional[str], target: Optional[str]) -> tuple[str, str]:
    """The values of --src-strategy and --dst-strategy.

    Raises:
        UsageError: one is missing; the default 'none' would silently copy slices as whole tensors.
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
        return "add --dst-strategy FILE or DIR for the layout of the target, same for that of a sharded source"
    return f"rank files do not record how they are cut: add {option} FILE or DIR"


class FoundStages(NamedTuple):
    """The stages of a directory.

    Attributes:
        stages: in order, without a gap.
        records: per stage the content of each file, to write it again.
        notes: the skipped files.
    """

    stages: tuple[Stage, ...]
    records: dict[int, list[StageRecord]]
    notes: tuple[str, ...]


def find_stages(directory: str, leave_out: Optional[str] = None) -> FoundStages:
    """Find and check the stages of a directory.

    Args:
        directory: its files are read; those of the rank directories in it only if none of them is a strategy.
        leave_out: a file to skip.

    Raises:
        StrategyError: no stage, stages missing, copies that disagree, damaged files.
    """
    names = _names_in(directory, leave_out)
    files, notes = _read_files(directory, names)
    of_ranks = [] if files else [name for name in names if _is_of_rank(os.path.join(directory, name))]
    if of_ranks:
        below = [
            os.path.join(rank, name)
            for rank in of_ranks
            for name in _names_in(os.path.join(directory, rank), leave_out)
        ]
        files, notes = _read_files(directory, [*(name for name in names if name not in of_ranks), *below])
    if not files:
        detail = f": {'; '.join(notes)}" if notes else ""
        raise StrategyError(
            f"{directory} holds no strategy files{detail}",
            file=directory,
            hint="pass a strategy file, the directory that holds such files, or none for an unsharded checkpoint",
        )
    merged = [file for file in files if file.merged]
    unnumbered = [file for file in files if not file.numbers]
    single = [file for file in files if file.numbers and not file.merged]
    if unnumbered and (merged or single):
        raise StrategyError(
            f"{directory}: {_names(unnumbered)} has no strategy items that give its stage, and the directory also "
            f"contains {_names([*single, *merged])}",
            file=unnumbered[0].file.path,
            hint="pass one file instead of the directory",
        )
    if single:
        records = _of_single(directory, single, merged)
    elif merged:
        records = _of_merged(directory, merged)
    else:
        records = {0: [file.stages[0] for file in unnumbered]}
    stages = agreed_stages(records)
    notes += [_skipped_merged(file, stages) for file in merged if single]
    return FoundStages(stages, records, tuple(notes))


def _of_single(
    directory: str, single: Sequence[FileRecord], merged: Sequence[FileRecord]
) -> dict[int, list[StageRecord]]:
    records: dict[int, list[StageRecord]] = {}
    for file in single:
        records.setdefault(file.numbers[0], []).append(file.stages[0])
    missing = missing_stages(records)
    beyond = [file for file in merged if not set(file.numbers) <= records.keys()]
    if merged and (missing or beyond):
        has_more = (beyond or merged)[0]
        lacking = missing or sorted(set(has_more.numbers) - records.keys())
        raise StrategyError(
            f"{directory}: {missing_text(lacking)} with {_names(single)}, and {has_more.file.path} is a "
            f"merged file of {stage_list(has_more.numbers)}",
            file=has_more.file.path,
            hint=f"pass the merged file itself: {has_more.file.path}",
        )
    if missing:
        raise StrategyError(
            f"{directory}: {missing_text(missing)}; the directory contains only "
            f"{stage_list(sorted(records))} ({_names(single)})",
            file=directory,
            hint="add the missing stages' files, or run the command that writes them again",
        )
    return records


def _of_merged(directory: str, merged: Sequence[FileRecord]) -> dict[int, list[StageRecord]]:
    first = merged[0]
    check_gaps(first)
    for file in merged[1:]:
        if file.numbers != first.numbers:
            raise StrategyError(
                f"{directory} holds merged files of different stages: {first.file.path} has "
                f"{stage_list(first.numbers)}, {file.file.path} has {stage_list(file.numbers)}",
                file=file.file.path,
                hint="pass one file instead of the directory",
            )
    records: dict[int, list[StageRecord]] = {}
    for file in merged:
        for number, stage in zip(file.numbers, file.stages):
            records.setdefault(number, []).append(stage)
    return records


def check_gaps(file: FileRecord) -> None:
    """Refuse a file, merged or not, that lacks stages.

    Raises:
        StrategyError: names the missing stages.
    """
    missing = missing_stages(file.numbers)
    if missing:
        raise StrategyError(
            f"{file.file.path} has {stage_list(file.numbers)} only; {missing_text(missing)}",
            file=file.file.path,
            hint="pass a merged file, or the directory with the files of all stages",
        )


def _names_in(directory: str, leave_out: Optional[str]) -> list[str]:
    names = names_in(directory)
    left_out = real(leave_out) if leave_out is not None else None
    # Records of made strategies are skipped without a note.
    names = [name for name in names if not name.endswith(RECORD)]
    remaining = [name for name in names if left_out != real(os.path.join(directory, name))]
    # rank_2 before rank_10.
    return natural_order(remaining)


def _is_of_rank(path: str) -> bool:
    return re.fullmatch(_RANK_DIRECTORY, os.path.basename(path)) is not None and is_directory(path)


def _read_files(directory: str, names: Iterable[str]) -> tuple[list[FileRecord], list[str]]:
    # Loaded only here: a single file needs no digest.
    from hashlib import sha256

    skipped: dict[str, list[str]] = {}
    # Content and name's ending both determine the kind of a file.
    parsed: dict[tuple[bytes, str], Union[StrategyFile, OtherFile]] = {}
    copies: dict[tuple[bytes, str], list[str]] = {}
    for name in names:
        path = os.path.join(directory, name)
        # Editors, file systems and unfinished writes leave hidden files.
        data = OtherFile(path, "hidden") if os.path.basename(name).startswith(".") else read_bytes(path)
        if isinstance(data, OtherFile):
            file: Union[StrategyFile, OtherFile] = data
        else:
            key = (sha256(data).digest(), os.path.splitext(name)[1])
            file = parsed[key] if key in parsed else parsed.setdefault(key, parse(path, data))
            copies.setdefault(key, []).append(path)
        if isinstance(file, OtherFile):
            skipped.setdefault(file.kind or "not a strategy", []).append(name)
    files = [records_of(file, copies[key]) for key, file in parsed.items() if isinstance(file, StrategyFile)]
    return files, [f"{directory}: skipped {some_names(names)} ({kind})" for kind, names in skipped.items()]


def _skipped_merged(file: FileRecord, stages: Iterable[Stage]) -> str:
    name = os.path.basename(file.file.path)
    differs = "" if same_content(file, stages) else ", from which it differs"
    return f"{os.path.dirname(file.file.path)}: skipped {name} (a merged file next to its stages{differs})"


def _names(files: Sequence[FileRecord]) -> str:
    return some_names([_name(path) for file in files for path in file.paths])


def _name(path: str) -> str:
    """A file's name, with its rank directory if it is in one: files of ranks share one name."""
    directory, name = os.path.split(path)
    rank = os.path.basename(directory)
    return os.path.join(rank, name) if re.fullmatch(_RANK_DIRECTORY, rank) else name


def typed_strategy(path: str, report: Report) -> Strategy:
    """The strategy at a path; its notes go to the report.

    Raises:
        ReshardError: it cannot be read.
    """
    strategy = read_strategy(path)
    for note in strategy.notes:
        report.note(note)
    return strategy
