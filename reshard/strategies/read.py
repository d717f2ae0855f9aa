"""Reading a strategy as a user names it: a file, a merged file, a directory, or none.

1. A file is merged if every parameter is named ``<number>-<name>`` and these numbers are the stages of its strategy
   items; otherwise it is the file of one stage, which its items give. Names and items that contradict each other are
   an error.
2. In a directory, every rank may have written its own file: contents are compared first, so that identical copies are
   parsed once. Files that are not strategies are skipped, with a note. If the directory itself holds no strategies,
   those in its ``rank_0/``, ``rank_1/`` ... are used.
3. Merged files, and the files of single stages together, must have the same stages. All records of a stage must
   agree on every parameter; values that only one form records come from the record that has them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from reshard.defaults import MAX_DEVICES, MAX_STAGES
from reshard.errors import LayoutError, ReshardError, StrategyError, UsageError
from reshard.layout import Layout
from reshard.storage import is_directory, names_in, real
from reshard.strategies.files import CHECKPOINT, ENDINGS, RECORD, OtherFile, parse, read_content, read_strategy_file
from reshard.strategies.model import NONE, RecordedLayout, Stage, Strategy, StrategyFile
from reshard.text.messages import Report, joined, listing, plural, quoted, some_names
from reshard.text.names import natural_order

_RANK_DIRECTORY = re.compile("(rank_|rank|)[0-9]+")
_MOST_DISAGREEING = 2
_PREFIXED = re.compile(r"(0|[1-9][0-9]{0,9})-(.+)", re.DOTALL)


class StageRecord(NamedTuple):
    """One stage in one file.

    Attributes:
        number: the stage; None for a file without strategy items.
        file: the file; ``paths`` also names its identical copies.
        recorded: layouts as in the file, by name without stage prefix.
        layouts: the same in normal form.
    """

    number: int | None
    file: StrategyFile
    paths: tuple[str, ...]
    recorded: Mapping[str, RecordedLayout]
    layouts: Mapping[str, Layout]


def read_strategy(path: str | None) -> Strategy:
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
    return Strategy.none() if path is None or path in (NONE, "None") else read_records(path)[0]


def read_recorded(path: str) -> tuple[Strategy, dict[int, Mapping[str, RecordedLayout]]]:
    """A strategy, and per stage the unchanged records of one of its files, protobuf if possible.

    Raises:
        StrategyError, RetryableError: as `read_strategy`.
    """
    strategy, records = read_records(path)
    return strategy, {number: preferred(of_stage, "protobuf").recorded for number, of_stage in records.items()}


def typed_strategy(path: str, report: Report) -> Strategy:
    """The strategy at a path; its notes go to the report."""
    strategy = read_strategy(path)
    for note in strategy.notes:
        report.note(note)
    return strategy


def required_strategies(source: str | None, target: str | None) -> tuple[str, str]:
    """The values of --src-strategy and --dst-strategy.

    Raises:
        UsageError: one is missing; the default 'none' would silently copy slices as whole tensors.
    """
    if source is not None and target is not None:
        return source, target
    options = {"--src-strategy": source, "--dst-strategy": target}
    missing = [option for option, value in options.items() if value is None]
    why = "rank files do not record how they are cut: add --src-strategy FILE or DIR"
    if len(missing) == 2:
        why += " for the source, and --dst-strategy FILE or DIR for the target"
    elif source is not None:
        why = "add --dst-strategy FILE or DIR for the layout of the target, same for that of a sharded source"
    raise UsageError(
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
        hint=f"{why}, or pass none for an unsharded checkpoint",
    )


def read_records(path: str, leave_out: str | None = None) -> tuple[Strategy, dict[int, list[StageRecord]]]:
    """A strategy, and per stage its records in all files.

    Args:
        path: a file, or a directory; files of the rank directories in it are read only if it has no strategies.
        leave_out: a file of the directory to skip.

    Raises:
        StrategyError, RetryableError: as `read_strategy`.
    """
    if not path:
        raise StrategyError("the strategy's path is empty", hint="pass none for an unsharded checkpoint")
    notes: list[str] = []
    if is_directory(path):
        found, notes = _records_in(path, leave_out)
    else:
        found = list(stage_records(read_strategy_file(path)))
    unnumbered = [record for record in found if record.number is None]
    if unnumbered and len(unnumbered) < len(found):
        raise StrategyError(
            f"{path}: {_names(unnumbered)} has no strategy items that give its stage, and the directory also "
            f"contains {_names([record for record in found if record.number is not None])}",
            file=unnumbered[0].file.path,
            hint="pass one file instead of the directory",
        )
    records: dict[int, list[StageRecord]] = {}
    for record in found:
        records.setdefault(record.number or 0, []).append(record)
    missing = _missing_stages(records)
    if missing:
        raise StrategyError(
            f"{path} has {_stage_list(sorted(records))} only ({_names(found)}); "
            f"{_stage_list(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            file=path,
            hint="pass a merged file, or the directory with the files of all stages",
        )
    return Strategy(_agreed_stages(records), path, tuple(notes)), records


def preferred(records: Sequence[StageRecord], form: str) -> StageRecord:
    """The record in a file of a form among several of a stage, or else the first."""
    return next((record for record in records if record.file.form == form), records[0])


def _records_in(directory: str, leave_out: str | None) -> tuple[list[StageRecord], list[str]]:
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
        hint = "pass a strategy file, the directory that holds such files, or none for an unsharded checkpoint"
        if notes and all(note.endswith(f"({CHECKPOINT})") for note in notes):
            detail = ""
            hint = (
                "this is the checkpoint, not its strategy: pass the one that MindSpore wrote (reshard suggest "
                f"{shlex.quote(directory)} looks for it), or none for an unsharded checkpoint"
            )
        raise StrategyError(f"{directory} holds no strategy files{detail}", file=directory, hint=hint)
    # Merged JSON may lack items of the stages, so their own files are the first.
    files.sort(key=lambda file: is_merged(file[0]))
    found: list[StageRecord] = []
    stages: dict[str, set[int | None]] = {}
    for file, paths in files:
        records = list(stage_records(file, paths))
        found += records
        stages.setdefault(file.path if is_merged(file) else "", set()).update(record.number for record in records)
    if len(set(map(frozenset, stages.values()))) > 1 and all(record.number is not None for record in found):
        raise StrategyError(
            f"{directory}: {_names(found)}: merged files have other stages than the files beside them",
            file=directory,
            hint="pass one merged file, or keep the files of one run in the directory",
        )
    return found, notes


def _names_in(directory: str, leave_out: str | None) -> list[str]:
    left_out = real(leave_out) if leave_out is not None else None
    # Records of made strategies are skipped without a note.
    names = [name for name in names_in(directory) if not name.endswith(RECORD)]
    # rank_2 before rank_10.
    return natural_order([name for name in names if left_out != real(os.path.join(directory, name))])


def _is_of_rank(path: str) -> bool:
    return _RANK_DIRECTORY.fullmatch(os.path.basename(path)) is not None and is_directory(path)


def _read_files(directory: str, names: Iterable[str]) -> tuple[list[tuple[StrategyFile, list[str]]], list[str]]:
    """The strategies among files, each with the paths of its identical copies; notes about the skipped files."""
    # Loaded only here: a single file needs no digest.
    from hashlib import sha256

    skipped: dict[str, list[str]] = {}
    # Content and name's ending both determine the kind of a file.
    parsed: dict[tuple[bytes, str], StrategyFile | OtherFile] = {}
    copies: dict[tuple[bytes, str], list[str]] = {}
    for name in names:
        path = os.path.join(directory, name)
        # Editors, file systems and unfinished writes leave hidden files.
        data = OtherFile("hidden") if os.path.basename(name).startswith(".") else read_content(path)
        if isinstance(data, OtherFile):
            file: StrategyFile | OtherFile = data
        else:
            key = (sha256(data).digest(), os.path.splitext(name)[1])
            file = parsed[key] if key in parsed else parsed.setdefault(key, parse(path, data))
            copies.setdefault(key, []).append(path)
        if isinstance(file, OtherFile):
            skipped.setdefault(file.kind or "not a strategy", []).append(name)
    files = [(file, copies[key]) for key, file in parsed.items() if isinstance(file, StrategyFile)]
    return files, [f"{directory}: skipped {some_names(names)} ({kind})" for kind, names in skipped.items()]


def _names(records: Sequence[StageRecord]) -> str:
    return some_names([_name(path) for path in dict.fromkeys(path for record in records for path in record.paths)])


def _name(path: str) -> str:
    directory, name = os.path.split(path)
    rank = os.path.basename(directory)
    return os.path.join(rank, name) if _RANK_DIRECTORY.fullmatch(rank) else name


def is_merged(file: StrategyFile) -> bool:
    """Whether the names of all parameters carry a stage."""
    return all(map(_PREFIXED.fullmatch, file.layouts))


def stage_records(file: StrategyFile, paths: Sequence[str] = ()) -> Iterator[StageRecord]:
    """Separate the stages of a file and check their layouts.

    Args:
        file: the file.
        paths: the file and its identical copies; empty for the file alone.

    Raises:
        StrategyError: names and items contradict each other, or a layout or device count does.
    """
    paths = tuple(paths) or (file.path,)
    if not file.layouts:
        raise StrategyError(
            f"{file.path} lists no parameter layouts",
            file=file.path,
            hint="pass the file that MindSpore wrote when the network was compiled",
        )
    of_items = sorted({item.stage for item in file.items})
    if not is_merged(file):
        if len(of_items) > 1:
            unprefixed = [name for name in file.layouts if not _PREFIXED.fullmatch(name)]
            raise StrategyError(
                f"{file.path} has strategy items of {_stage_list(of_items)}, as a merged file has, but not "
                "every parameter is named <stage>-<name>: " + listing(unprefixed),
                file=file.path,
                parameter=unprefixed[0],
                hint="merge the stages' own files again with reshard merge-pipeline",
            )
        yield _stage_record(of_items[0] if of_items else None, file, paths, file.layouts)
        return
    of_stage: dict[int, dict[str, RecordedLayout]] = {}
    for name, recorded in file.layouts.items():
        number, _, parameter = name.partition("-")
        of_stage.setdefault(int(number), {})[parameter] = recorded
    _check_prefixes(file, of_items, sorted(of_stage))
    for stage, layouts in sorted(of_stage.items()):
        yield _stage_record(stage, file, paths, layouts)


def _check_prefixes(file: StrategyFile, of_items: list[int], of_names: list[int]) -> None:
    # Items of JSON are keyed by node name, so a later stage's may have overwritten an earlier one's.
    fits = set(of_items) <= set(of_names) if file.form == "json" else of_items == of_names
    if not (fits if of_items else not _missing_stages(of_names)):
        items = f"its strategy items are of {_stage_list(of_items)}" if of_items else "it has no strategy items"
        raise StrategyError(
            f"{file.path} names its parameters <stage>-<name> with {_stage_list(of_names)}, but {items}",
            file=file.path,
            hint="merge the stages' own files again with reshard merge-pipeline",
        )


def _stage_record(
    number: int | None, file: StrategyFile, paths: tuple[str, ...], recorded: Mapping[str, RecordedLayout]
) -> StageRecord:
    where = file.path if number is None else f"{file.path}: stage {number}"
    layouts: dict[str, Layout] = {}
    counts: dict[int, list[str]] = {}
    for name, record in recorded.items():
        try:
            layouts[name] = _normal_form(record)
        except LayoutError as error:
            problem = f"{where}: parameter {quoted(name)}: {error.message}"
            raise StrategyError(problem, file=file.path, parameter=name) from error
        counts.setdefault(layouts[name].device_count, []).append(name)
    if len(counts) > 1:
        detail = joined("; ", [f"{count}: " + listing(names, 3) for count, names in sorted(counts.items())])
        raise StrategyError(
            f"{where}: device matrices contradict each other in the number of devices (" + detail + ")",
            file=file.path,
            parameter=min(counts.values(), key=len)[0],
        )
    return StageRecord(number, file, paths, recorded, layouts)


@lru_cache(maxsize=4096)
def _normal_form(record: RecordedLayout) -> Layout:
    # Thousands of parameters share tens of layouts: one object each, computed once.
    return record.layout()


def _agreed_stages(records: Mapping[int, Sequence[StageRecord]]) -> tuple[Stage, ...]:
    """One stage of each number, with ranks counted through all stages.

    Raises:
        StrategyError: records of a stage disagree, or there are more stages or devices than any cluster has.
    """
    stages: list[Stage] = []
    first_rank = 0
    for number, copies in sorted(records.items()):
        layouts = dict(copies[0].layouts)
        for place, record in enumerate(copies[1:], 1):
            differing = sorted(layouts.keys() ^ record.layouts.keys())
            for name in () if differing else layouts:
                agreed = _agreed(layouts[name], record.layouts[name])
                if agreed is None:
                    differing.append(name)
                else:
                    layouts[name] = agreed
            if differing:
                raise _disagreement(number, differing, copies, place)
        count = next(iter(layouts.values())).device_count
        paths = tuple(dict.fromkeys(path for record in copies for path in record.paths))
        stages.append(Stage(number, first_rank, count, layouts, paths))
        first_rank += count
        if first_rank > MAX_DEVICES or len(stages) > MAX_STAGES:
            raise StrategyError(
                f"{paths[0]}: no cluster has as many as {first_rank} devices in {plural(len(stages), 'stage')}",
                file=paths[0],
            )
    return tuple(stages)


def _disagreement(number: int, names: Sequence[str], records: Sequence[StageRecord], place: int) -> StrategyError:
    """The error for a record that disagrees with those before it."""
    hint = f"name one of: {', '.join(record.file.path for record in records)}; or keep only the files of one run"
    if records[0].number is None:
        # Usually written by hand: MindSpore's own have items.
        hint += "; files of different pipeline stages record their stage in parallel_strategy_item, which these lack"
    paths = " and ".join(record.file.path for record in records[: place + 1])
    return StrategyError(
        f"stage {number}: {paths} disagree on the layout of " + listing(names, _MOST_DISAGREEING),
        file=records[place].file.path,
        parameter=names[0],
        hint=hint,
    )


@lru_cache(maxsize=4096)
def _agreed(first: Layout, second: Layout) -> Layout | None:
    """The layout that both describe, with the details of either; None if they differ."""
    expandable = first.expandable and second.expandable
    # An expanded map and the tensor's own: the latter groups the former.
    first, second = _grouped_like(first, second), _grouped_like(second, first)
    shapes = {layout.recorded_shape for layout in (first, second) if layout.recorded_shape is not None}
    plain, other_plain = (replace(layout, recorded_shape=None, expandable=False) for layout in (first, second))
    if plain != other_plain or len(shapes) > 1:
        return None
    return replace(plain, recorded_shape=shapes.pop() if shapes else None, expandable=expandable)


def _grouped_like(layout: Layout, pattern: Layout) -> Layout:
    if layout.expandable and layout.tensor_map != pattern.tensor_map:
        for candidate in layout.without_shards().regroupings():
            if candidate.tensor_map == pattern.tensor_map:
                return replace(candidate, shard_size=layout.shard_size, shard_step=layout.shard_step)
    return layout


def _missing_stages(numbers: Iterable[int]) -> list[int]:
    """Stages that are missing before the last of ``numbers``; at most the first ten."""
    missing: list[int] = []
    expected = 0
    for number in sorted(numbers):
        missing.extend(range(expected, min(number, expected + 10)))
        expected = number + 1
    return missing[:10]


def _stage_list(numbers: Sequence[int]) -> str:
    """``stage 1``, ``stages 0, 1 and 3``."""
    words = [str(number) for number in numbers]
    return f"stage {words[0]}" if len(words) == 1 else f"stages {', '.join(words[:-1])} and {words[-1]}"


# Files to open in a directory; those with "strateg" in their names are the first.
_MAX_FILES = 64
_WORD = "strateg"


def strategies_in(directories: Sequence[str]) -> list[Strategy]:
    """The strategies in some directories, each content once.

    Files and directories of stages are read whose names do not rule that out; directories in them only if their names
    contain "strateg". What cannot be read is skipped.
    """
    strategies: list[Strategy] = []
    for directory in directories:
        for strategy in _strategies_in(directory):
            if not any(equal_layouts(strategy, other) for other in strategies):
                strategies.append(strategy)
    return strategies


def equal_layouts(strategy: Strategy, other: Strategy) -> bool:
    """Whether two strategies have the same layouts. Recorded shapes do not count: only JSON has them."""
    return len(strategy.stages) == len(other.stages) and all(
        stage.ranks == its.ranks
        and stage.layouts.keys() == its.layouts.keys()
        and all(
            replace(layout, recorded_shape=None) == replace(its.layouts[name], recorded_shape=None)
            for name, layout in stage.layouts.items()
        )
        for stage, its in zip(strategy.stages, other.stages)
    )


def _strategies_in(directory: str, nested: bool = False) -> Iterator[Strategy]:
    """The strategies in a directory of any kind; in a nested one, those of its subdirectories of any name."""
    names: list[str] = []
    with suppress(ReshardError):
        names = sorted(names_in(directory or os.curdir), key=lambda name: _WORD not in name.lower())
    for path in [os.path.join(directory, name) for name in names if nested or _WORD in name.lower()]:
        if path.endswith(ENDINGS) or not is_directory(path):
            continue
        try:
            yield read_strategy(path)
        except ReshardError:
            if not nested:
                yield from _strategies_in(path, nested=True)
    stages = False
    files = [name for name in names if name.endswith(ENDINGS) and not name.startswith(".")]
    for path in [os.path.join(directory, name) for name in files[:_MAX_FILES]]:
        try:
            yield read_strategy(path)
        except ReshardError:
            with suppress(ReshardError):
                read_strategy_file(path)
                stages = True
    if stages:
        with suppress(ReshardError):
            yield read_strategy(directory or os.curdir)
