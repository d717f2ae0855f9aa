"""The stages that a strategy file describes, and the agreement of their copies.

1. A file is merged if every parameter is named ``<number>-<name>`` and these numbers are the
   stages of its strategy items; otherwise it is the file of one stage, which its items give.
   Names and items that contradict each other are an error.
2. Every layout is checked, and all layouts of a stage must have the same number of devices.
3. Copies of a stage, of any form, must agree on every parameter. Values that only one form
   records come from the copy that has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Optional

from reshard.defaults import MAX_DEVICES, MAX_SLICE_NUMBERS, MAX_STAGES
from reshard.errors import LayoutError, StrategyError
from reshard.layout import Layout
from reshard.strategies.model import RecordedLayout, Stage, StrategyFile, StrategyItem
from reshard.text.messages import joined, listing, plural, quoted

_PREFIXED = re.compile(r"(0|[1-9][0-9]{0,9})-(.+)", re.DOTALL)


class StageRecord(NamedTuple):
    """One stage in one file.

    Attributes:
        number: the stage; None for a file without strategy items.
        file: the file; ``paths`` also names its identical copies.
        items: the stage's operators.
        recorded: layouts as in the file, by name without stage prefix.
        layouts: the same in normal form.
    """

    number: Optional[int]
    file: StrategyFile
    paths: tuple[str, ...]
    items: tuple[StrategyItem, ...]
    recorded: Mapping[str, RecordedLayout]
    layouts: Mapping[str, Layout]

    @property
    def device_count(self) -> int:
        """Devices of the stage."""
        return next(iter(self.layouts.values())).device_count


class FileRecord(NamedTuple):
    """The stages of one file: several if it is merged, one otherwise."""

    file: StrategyFile
    paths: tuple[str, ...]
    merged: bool
    stages: tuple[StageRecord, ...]

    @property
    def numbers(self) -> list[int]:
        """The numbers of its stages, as far as recorded."""
        return sorted(stage.number for stage in self.stages if stage.number is not None)


def records_of(file: StrategyFile, paths: Sequence[str] = ()) -> FileRecord:
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
    split = {name: _PREFIXED.fullmatch(name) for name in file.layouts}
    unprefixed = [name for name, match in split.items() if match is None]
    if unprefixed:
        if len(of_items) > 1:
            raise StrategyError(
                f"{file.path} has strategy items of {stage_list(of_items)}, as a merged file has, but not "
                "every parameter is named <stage>-<name>: " + listing(unprefixed),
                file=file.path,
                parameter=unprefixed[0],
                hint="merge the stages' own files again with reshard merge-pipeline",
            )
        number = of_items[0] if of_items else None
        stage = _stage_record(number, file, paths, file.items, file.layouts)
        return FileRecord(file, paths, False, (stage,))
    of_stage: dict[int, dict[str, RecordedLayout]] = {}
    for name, match in split.items():
        assert match is not None
        of_stage.setdefault(int(match[1]), {})[match[2]] = file.layouts[name]
    _check_prefixes(file, of_items, sorted(of_stage))
    items: dict[int, list[StrategyItem]] = {number: [] for number in sorted(of_stage)}
    for item in file.items:
        items[item.stage].append(item)
    stages = tuple(
        _stage_record(number, file, paths, tuple(own_items), of_stage[number]) for number, own_items in items.items()
    )
    return FileRecord(file, paths, True, stages)


def agreed_stages(copies: Mapping[int, Sequence[StageRecord]]) -> tuple[Stage, ...]:
    """One stage of each number, with ranks counted through all stages.

    Args:
        copies: the records of every stage, numbers without a gap.

    Raises:
        StrategyError: copies disagree, or there are more stages or devices than any cluster has.
    """
    if len(copies) > MAX_STAGES:
        path = next(iter(copies.values()))[0].paths[0]
        raise StrategyError(
            f"{path} is of {len(copies)} pipeline stages, and no pipeline has more than {MAX_STAGES}", file=path
        )
    stages: list[Stage] = []
    first_rank = slice_numbers = 0
    for number in sorted(copies):
        records = copies[number]
        layouts = dict(records[0].layouts)
        for position, record in enumerate(records[1:], 1):
            _check_same_parameters(number, records[0], record)
            agreed = {name: _agreed(layout, record.layouts[name]) for name, layout in layouts.items()}
            differing = [name for name, layout in agreed.items() if layout is None]
            if differing:
                raise _disagreement(number, differing, records[:position], record)
            layouts = {name: layout for name, layout in agreed.items() if layout is not None}
        paths = tuple(dict.fromkeys(path for record in records for path in record.paths))
        stages.append(Stage(number, first_rank, records[0].device_count, layouts, paths))
        first_rank += records[0].device_count
        if first_rank > MAX_DEVICES:
            problem = f"{paths[0]}: all stages together have more than {MAX_DEVICES} devices"
            raise StrategyError(problem, file=paths[0])
        slice_numbers += len(set(layouts.values())) * records[0].device_count
        if slice_numbers > MAX_SLICE_NUMBERS:
            raise StrategyError(
                f"{paths[0]}: {plural(len(set(layouts.values())), 'different layout')} of "
                f"{plural(records[0].device_count, 'device')}: "
                f"their product, over all stages, is more than the limit of {MAX_SLICE_NUMBERS}",
                file=paths[0],
                hint="MindSpore compiles tens of different layouts; pass the strategy file that it wrote",
            )
    return tuple(stages)


def preferred(records: Sequence[StageRecord], form: str) -> StageRecord:
    """The file of a form among several of a stage, or else the first."""
    return next((record for record in records if record.file.form == form), records[0])


def same_content(one: FileRecord, stages: Iterable[Stage]) -> bool:
    """Whether a merged file has the same layouts as ``stages``."""
    of_stage = {record.number: record.layouts for record in one.stages}
    return all(
        stage.number in of_stage
        and of_stage[stage.number].keys() == stage.layouts.keys()
        and all(_agreed(layout, of_stage[stage.number][name]) for name, layout in stage.layouts.items())
        for stage in stages
    )


def missing_stages(numbers: Iterable[int]) -> list[int]:
    """Stages that are missing before the last of ``numbers``; at most the first ten."""
    missing: list[int] = []
    expected = 0
    for number in sorted(set(numbers)):
        missing.extend(range(expected, min(number, expected + 10)))
        expected = number + 1
    return missing[:10]


def stage_list(numbers: Sequence[int]) -> str:
    """``stage 1``, ``stages 0, 1 and 3``."""
    words = [str(number) for number in numbers]
    return f"stage {words[0]}" if len(words) == 1 else f"stages {', '.join(words[:-1])} and {words[-1]}"


def missing_text(numbers: Sequence[int]) -> str:
    """``stage 1 is missing``, ``stages 0 and 3 are missing``."""
    return f"{stage_list(numbers)} {'is' if len(numbers) == 1 else 'are'} missing"


def _check_prefixes(file: StrategyFile, of_items: list[int], of_names: list[int]) -> None:
    description = f"{file.path} names its parameters <stage>-<name> with {stage_list(of_names)}"
    problem = None
    if not of_items:
        if missing_stages(of_names):
            problem = f"{description}, but has no strategy items, and {missing_text(missing_stages(of_names))}"
    elif file.form == "json":
        # Items are keyed by node name, so a later stage's may have overwritten an earlier one's.
        if not set(of_items) <= set(of_names):
            problem = f"{description}, but its strategy items are of {stage_list(of_items)}"
    elif of_items != of_names:
        problem = f"{description}, but its strategy items are of {stage_list(of_items)}"
    if problem is not None:
        raise StrategyError(
            problem, file=file.path, hint="merge the stages' own files again with reshard merge-pipeline"
        )


def _stage_record(
    number: Optional[int],
    file: StrategyFile,
    paths: Sequence[str],
    items: tuple[StrategyItem, ...],
    recorded: Mapping[str, RecordedLayout],
) -> StageRecord:
    where = file.path if number is None else f"{file.path}: stage {number}"
    layouts: dict[str, Layout] = {}
    problems: list[tuple[str, str]] = []
    for name, record in recorded.items():
        try:
            layouts[name] = _normal_form(record)
        except LayoutError as error:
            problems.append((name, error.message))
    if problems:
        name, problem = problems[0]
        text = f"{where}: parameter {quoted(name)}: {problem}"
        if len(problems) > 1:
            further = listing([parameter for parameter, _ in problems[1:]], 3)
            text += f" (and {plural(len(problems) - 1, 'more parameter')}: " + further + ")"
        raise StrategyError(text, file=file.path, parameter=name)
    counts: dict[int, list[str]] = {}
    for name, layout in layouts.items():
        counts.setdefault(layout.device_count, []).append(name)
    if len(counts) > 1:
        detail = joined("; ", [f"{count}: " + listing(names, 3) for count, names in sorted(counts.items())])
        raise StrategyError(
            f"{where}: device matrices contradict each other in the number of devices (" + detail + ")",
            file=file.path,
            parameter=min(counts.values(), key=len)[0],
        )
    return StageRecord(number, file, tuple(paths), items, recorded, layouts)


@lru_cache(maxsize=4096)
def _normal_form(record: RecordedLayout) -> Layout:
    # Thousands of parameters share tens of layouts: one object each, computed once.
    return record.layout()


def _check_same_parameters(number: int, first: StageRecord, second: StageRecord) -> None:
    for having, lacking in ((first, second), (second, first)):
        names = [name for name in having.layouts if name not in lacking.layouts]
        if names:
            raise StrategyError(
                f"stage {number}: {having.file.path} and {lacking.file.path} disagree: "
                "only the first lists " + listing(names),
                file=lacking.file.path,
                parameter=names[0],
                hint=_disagreement_hint(first),
            )


def _disagreement_hint(record: StageRecord) -> str:
    hint = "keep the files of one run in the directory"
    if record.number is None:
        # Usually written by hand: MindSpore's own have items.
        hint += "; files of different pipeline stages record their stage in parallel_strategy_item, which these lack"
    return hint


def _disagreement(
    number: int, names: Sequence[str], earlier: Sequence[StageRecord], differing: StageRecord
) -> StrategyError:
    first = next(
        (
            record
            for record in earlier
            if any(_agreed(record.layouts[name], differing.layouts[name]) is None for name in names)
        ),
        earlier[0],
    )
    return StrategyError(
        f"stage {number}: {first.file.path} and {differing.file.path} disagree on the layout of " + listing(names),
        file=differing.file.path,
        parameter=names[0],
        hint=_disagreement_hint(differing),
    )


@lru_cache(maxsize=4096)
def _agreed(first: Layout, second: Layout) -> Optional[Layout]:
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
    if not layout.expandable or layout.tensor_map == pattern.tensor_map:
        return layout
    for candidate in layout.without_shards().regroupings():
        if candidate.tensor_map == pattern.tensor_map:
            return replace(candidate, shard_size=layout.shard_size, shard_step=layout.shard_step)
    return layout
