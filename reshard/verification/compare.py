"""Whether one checkpoint is another one in other slices, and whether its copies agree.

Two checkpoints are compared through sums (see `sums`), from the strategies alone:

1. Every distinct slice of the source and every copy of every slice of the target are summed.
2. Where all copies of a target slice agree and the slices add up to the source's sum, the parameter is right.
3. Of all others, the source's sum over every target slice's own box is made; each rank's copy is right or
   wrong by itself then.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints import Tensor, can_hold, format_of
from reshard.errors import LayoutError
from reshard.layout import Layout
from reshard.strategies import Stage, Strategy
from reshard.verification.fingerprint import check_complete
from reshard.verification.reading import Means, Part, intersection, sum_parts
from reshard.verification.sums import PRIME, Box
from reshard.verification.tree import (
    Parameter,
    Slice,
    Tree,
    belongs_to_rank,
    layout_choices,
    read_headers,
    read_tree,
    slice_shape,
    slices_of,
)
from reshard.wording import rank_ranges


class Difference(NamedTuple):
    """Something that is not as it has to be.

    Attributes:
        kind: ``file`` (missing or damaged), ``missing``, ``extra``, ``type``, ``shape``, ``content``,
            ``replica`` (copies disagree, and which one is wrong is known), ``replicas`` (it is not
            known), ``stages`` (pipeline stages disagree) or ``strategy`` (files do not fit it).
        parameter: the parameter, or None where it is a whole file.
        ranks: the ranks that are wrong, ascending; all that may be where that is not known.
        detail: the rest, to be read after the parameter's name and the ranks.
    """

    kind: str
    parameter: Optional[str]
    ranks: tuple[int, ...]
    detail: str

    def __str__(self) -> str:
        """A line: parameter, ranks, what is wrong."""
        name = "" if self.parameter is None else f"{self.parameter} "
        where = f"on {rank_ranges(self.ranks)}" if self.ranks else ""
        return f"{name}{where}: {self.detail}".lstrip()


def compare_trees(
    source_files: Mapping[int, str],
    source: Strategy,
    target_files: Mapping[int, str],
    target: Strategy,
    means: Means,
    *,
    ranks: Optional[Iterable[int]] = None,
    admit: Optional[Callable[[str], bool]] = None,
) -> list[Difference]:
    """What of a target checkpoint is not what the source makes of it.

    Args:
        source_files: files of the step that was converted, by rank.
        source: their strategy.
        target_files: files of the converted checkpoint, by rank.
        target: their strategy.
        means: what may be used for reading.
        ranks: target ranks to look at; all of the strategy where None.
        admit: which parameters were converted, by name; all where None.

    Returns:
        Every difference, by parameter; none where the target is right.

    Raises:
        IncompleteSourceError: the source lacks a slice.
        InputError: the source does not fit its strategy.
        RetryableError: reading failed.
    """
    wanted = sorted(range(target.device_count) if ranks is None else set(ranks))
    listed = {name for stage in source.stages for name in stage.layouts}
    left_out = listed - {name for stage in target.stages for name in stage.layouts} if not target.is_none else set()

    def converted(name: str) -> bool:
        return name not in left_out and (admit is None or admit(name))

    source_tree = read_tree(source_files, source, means.handles, converted)
    source_tree.check_readings()
    check_complete(source_tree)
    target_tree = read_headers({rank: target_files[rank] for rank in wanted if rank in target_files}, means.handles)
    return _Comparison(source_tree, source, target_tree, target, wanted, means).run(target_files)


class _Copies(NamedTuple):
    """A slice that target ranks hold, and what it has to be.

    Attributes:
        parameter: the source's parameter.
        slice: the target's slice; its holders are those of the right type and shape.
    """

    parameter: Parameter
    slice: Slice


class _Comparison:
    def __init__(
        self, source: Tree, old: Strategy, target: Tree, new: Strategy, ranks: list[int], means: Means
    ) -> None:
        self._source, self._old = source, old
        self._target, self._new = target, new
        self._ranks = ranks
        self._means = means
        self._differences: list[Difference] = []

    def run(self, target_files: Mapping[int, str]) -> list[Difference]:
        """Every difference, whole files first, then by parameter."""
        for rank in self._ranks:
            if rank not in target_files:
                self._add("file", None, [rank], "there is no file")
            elif rank in self._target.damaged:
                self._add("file", None, [rank], self._target.damaged[rank])
        self._check_names()
        copies = [
            copies
            for name, parameter in self._source.parameters.items()
            for stage in self._new.stages
            if self._new.is_none or name in stage.layouts
            for copies in self._slices(parameter, stage)
        ]
        self._compare(copies)
        self._compare_values()
        return sorted(self._differences, key=lambda found: (found.parameter or "", found.kind, found.ranks))

    def _add(self, kind: str, name: Optional[str], ranks: Iterable[int], detail: str) -> None:
        self._differences.append(Difference(kind, name, tuple(sorted(ranks)), detail))

    def _present(self, stage: Stage) -> list[int]:
        """Ranks of a stage whose files were read."""
        last = stage.first_rank + stage.device_count
        return [rank for rank in self._ranks if rank in self._target.indexes and stage.first_rank <= rank < last]

    def _check_names(self) -> None:
        """Names in target files that nothing puts there."""
        extra: dict[str, list[int]] = defaultdict(list)
        for rank, index in self._target.indexes.items():
            listed = self._new.stage_of(rank).layouts
            for name in index.tensors:
                converted = name in self._source.parameters and (self._new.is_none or name in listed)
                if not converted and not self._copied_to(name, rank):
                    extra[name].append(rank)
        for name, ranks in extra.items():
            self._add("extra", name, ranks, "is in the file, but the source and the strategies do not put it there")

    def _copied_to(self, name: str, rank: int) -> bool:
        """Whether a rank gets a value that the source strategy does not list."""
        if name not in self._source.outside:
            return False
        stages = [stage.number for stage in self._new.stages if name in stage.layouts]
        return not stages or self._new.stage_of(rank).number in stages

    def _slices(self, parameter: Parameter, stage: Stage) -> list[_Copies]:
        """The slices of a parameter that a stage's ranks hold rightly cut; all else is told."""
        name = parameter.name
        example = next(held for held in parameter.slices if held.holders)
        sample = self._source.tensor(name, example.holders[0])
        there, shapes = [], {}
        for rank in self._present(stage):
            tensor = self._target.indexes[rank].tensors.get(name)
            if tensor is None:
                self._add("missing", name, [rank], "is not in the file")
            elif (tensor.dtype, tensor.item_size) != (sample.dtype, sample.item_size):
                self._add("type", name, [rank], f"is {tensor.dtype}, but {sample.dtype} in the source")
            else:
                there.append(rank)
                shapes[rank] = tensor.shape
        recorded = Layout((), ((),) * len(parameter.shape)) if self._new.is_none else stage.layouts[name]
        layout = self._layout(parameter, recorded, stage, shapes)
        if layout is None:
            return []
        right = []
        for rank in there:
            expected = slice_shape(layout, parameter.shape, rank - stage.first_rank)
            if shapes[rank] == expected:
                right.append(rank)
            else:
                self._add("shape", name, [rank], f"has shape {list(shapes[rank])}, not {list(expected)}")
        return [_Copies(parameter, held) for held in slices_of(layout, stage, parameter.shape, right)]

    def _layout(
        self, parameter: Parameter, recorded: Layout, stage: Stage, shapes: dict[int, tuple[int, ...]]
    ) -> Optional[Layout]:
        """What the recorded layout means for the parameter, by the shapes that most ranks hold."""
        best: tuple[int, Optional[Layout]] = (-1, None)
        for layout in layout_choices(parameter.name, recorded):
            if len(layout.cuts) != len(parameter.shape) or layout.recorded_shape not in (None, parameter.shape):
                continue
            try:
                fitting = sum(
                    slice_shape(layout, parameter.shape, rank - stage.first_rank) == shape
                    for rank, shape in shapes.items()
                )
            except LayoutError:
                continue
            if fitting > best[0]:
                best = (fitting, layout)
        if best[1] is None:
            detail = f"tensor map {recorded.map_text} does not lay out a tensor of shape {list(parameter.shape)}"
            self._add("strategy", parameter.name, shapes, detail)
        return best[1]

    def _compare(self, copies: list[_Copies]) -> None:
        """Sum both sides; where they are not plainly equal, find out which ranks are wrong."""
        parts: list[Part] = []
        owners: list[tuple[str, int]] = []
        parameters = {parameter.name: parameter for parameter, _ in copies}
        for name, parameter in parameters.items():
            for held in parameter.slices:
                if held.holders:
                    parts.append(self._source.part(name, held.holders[0], parameter.shape, held.box))
                    owners.append((name, held.stage))
        first_copy = len(parts)
        for parameter, held in copies:
            parts += [self._target.part(parameter.name, rank, parameter.shape, held.box) for rank in held.holders]
        sums = sum_parts(parts, self._means)
        source = self._source_sums(parameters, owners, sums)
        coming = iter(sums[first_copy:])
        found = [{rank: next(coming) for rank in held.holders} for _, held in copies]

        plain: dict[tuple[str, int], int] = defaultdict(int)
        doubtful: set[tuple[str, int]] = set()
        for (parameter, held), by_rank in zip(copies, found):
            key = (parameter.name, held.stage)
            if len(set(by_rank.values())) == 1:
                plain[key] += next(iter(by_rank.values()))
            elif by_rank or not _is_empty(held.box):
                doubtful.add(key)
        doubtful |= {key for key, total in plain.items() if total % PRIME != source[key[0]]}
        check = [
            (copy, by_rank)
            for copy, by_rank in zip(copies, found)
            if (copy.parameter.name, copy.slice.stage) in doubtful and by_rank
        ]
        self._find_wrong(check)

    def _source_sums(
        self, parameters: Mapping[str, Parameter], owners: list[tuple[str, int]], sums: list[int]
    ) -> dict[str, int]:
        """The sum of every source parameter, by the first stage that has all of it."""
        by_stage: dict[tuple[str, int], int] = defaultdict(int)
        for owner, total in zip(owners, sums):
            by_stage[owner] = (by_stage[owner] + total) % PRIME
        result = {}
        for name, parameter in parameters.items():
            stages = [parts[0].stage for parts in parameter.whole_stages()]
            if len({by_stage[name, stage] for stage in stages}) > 1:
                self._add("stages", name, (), "the source's pipeline stages hold different values of it")
            result[name] = by_stage[name, stages[0]]
        return result

    def _find_wrong(self, check: list[tuple[_Copies, dict[int, int]]]) -> None:
        """Compare each copy with the source's own sum over the slice's box."""
        parts: list[Part] = []
        owners: list[int] = []
        for number, ((parameter, held), _) in enumerate(check):
            for stored in parameter.whole_stages()[0]:
                common = intersection(held.box, stored.box)
                if not _is_empty(common):
                    rank = stored.holders[0]
                    parts.append(self._source.part(parameter.name, rank, parameter.shape, stored.box, common))
                    owners.append(number)
        expected = [0] * len(check)
        for number, total in zip(owners, sum_parts(parts, self._means)):
            expected[number] = (expected[number] + total) % PRIME
        wrong: dict[str, list[int]] = defaultdict(list)
        for ((parameter, _), by_rank), right in zip(check, expected):
            wrong[parameter.name] += [rank for rank, total in by_rank.items() if total != right]
        for name, ranks in wrong.items():
            if ranks:
                self._add("content", name, ranks, "differs from the source")

    def _compare_values(self) -> None:
        """Values outside the source's strategy: each target rank's copy and the source's."""
        parts: list[Part] = []
        pairs: list[tuple[str, int]] = []
        for name, holders in self._source.outside.items():
            for rank in self._target.indexes:
                if not self._copied_to(name, rank):
                    continue
                origin = rank if belongs_to_rank(name) and rank in holders else holders[0]
                theirs = self._source.tensor(name, origin)
                mine = self._target.indexes[rank].tensors.get(name)
                if mine is None:
                    if can_hold(format_of(self._target.indexes[rank].path), theirs.dtype):
                        self._add("missing", name, [rank], "is not in the file")
                elif _kind(mine) != _kind(theirs):
                    told = f"is {mine.dtype} {list(mine.shape)}, but {theirs.dtype} {list(theirs.shape)} in the source"
                    self._add("type", name, [rank], told)
                else:
                    parts += [self._source.whole_part(name, origin), self._target.whole_part(name, rank)]
                    pairs.append((name, rank))
        sums = sum_parts(parts, self._means)
        wrong: dict[str, list[int]] = defaultdict(list)
        for (name, rank), expected, total in zip(pairs, sums[::2], sums[1::2]):
            if expected != total:
                wrong[name].append(rank)
        for name, ranks in wrong.items():
            self._add("content", name, ranks, "differs from the source")


def compare_replicas(
    files: Mapping[int, str], strategy: Strategy, means: Means, admit: Optional[Callable[[str], bool]] = None
) -> list[Difference]:
    """Where copies of one slice within a checkpoint differ.

    With three or more copies the rank that differs from most is named, with two both are. Ranks may be
    missing: what is there is compared.

    Args:
        files: files of one step, by rank.
        strategy: their strategy.
        means: what may be used for reading.
        admit: which parameters are compared, by name; all where None.

    Returns:
        Every difference, by parameter; none where all copies agree.

    Raises:
        ReshardError: a file is missing or cannot be read.
    """
    tree = read_tree(files, strategy, means.handles, admit)
    found = [Difference("file", None, (rank,), text) for rank, text in tree.damaged.items()]
    for name, problem in tree.problems.items():
        found.append(Difference("strategy", name, () if problem.rank is None else (problem.rank,), problem.message))
    parts: list[Part] = []
    groups: list[tuple[str, Optional[int], tuple[int, ...]]] = []
    for name, parameter in tree.parameters.items():
        tied = len({held.stage for held in parameter.slices}) > 1
        for held in parameter.slices:
            if len(held.holders) > 1 or (held.holders and tied):
                parts += [tree.part(name, rank, parameter.shape, held.box) for rank in held.holders]
                groups.append((name, held.stage, held.holders))
    for name, ranks in tree.outside.items():
        if len(ranks) > 1 and not belongs_to_rank(name):
            parts += [tree.whole_part(name, rank) for rank in ranks]
            groups.append((name, None, ranks))
    coming = iter(zip(parts, sum_parts(parts, means)))
    stages: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for name, stage, ranks in groups:
        copies = {}
        for rank in ranks:
            part, total = next(coming)
            copies[rank] = (_kind(part.tensor), total)
        ranked = Counter(copies.values()).most_common()
        if stage is not None:
            stages[name][stage] += ranked[0][0][1]
        if len(ranked) == 1:
            continue
        if ranked[0][1] > ranked[1][1]:
            wrong = [rank for rank, copy in copies.items() if copy != ranked[0][0]]
            most = rank_ranges(set(ranks) - set(wrong))
            found.append(Difference("replica", name, tuple(wrong), f"differs from the copies on {most}"))
        else:
            found.append(Difference("replicas", name, ranks, "copies differ, and no majority tells which is wrong"))
    doubtful = {difference.parameter for difference in found}
    for name, totals in stages.items():
        whole = {held[0].stage for held in tree.parameters[name].whole_stages()}
        if name not in doubtful and len({totals[stage] % PRIME for stage in whole & set(totals)}) > 1:
            found.append(Difference("stages", name, (), "pipeline stages hold different values of it"))
    return sorted(found, key=lambda difference: (difference.parameter or "", difference.kind, difference.ranks))


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...], int]:
    return tensor.dtype, tensor.shape, tensor.nbytes


def _is_empty(box: Box) -> bool:
    return not math.prod(stop - start for start, stop in box)
