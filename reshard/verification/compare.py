"""Whether one checkpoint is another one in other slices, and whether its copies agree.

Two checkpoints are compared through sums (see `sums`), from the strategies alone:

1. Every distinct slice of the source and every copy of every slice of the target are summed.
2. Where all copies of a target slice agree and the slices add up to the source's sum, the parameter is right.
3. Of all others, the source's sum over every target slice's own box is made; each rank's copy is right or
   wrong by itself then.

All this goes by batches of parameters: what is in memory does not grow with parameters times ranks.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints import CheckpointIndex, Tensor, can_hold, format_of
from reshard.checkpoints.dtypes import INT4
from reshard.errors import LayoutError
from reshard.layout import Layout
from reshard.names import belongs_to_rank
from reshard.strategies import Stage, Strategy
from reshard.verification.fingerprint import check_complete
from reshard.verification.reading import Means, Part, batches, intersection, sum_parts
from reshard.verification.sums import PRIME, Box
from reshard.verification.tree import (
    Parameter,
    Slice,
    Tree,
    layout_choices,
    read_headers,
    read_tree,
    slice_shapes,
    slices_of,
)
from reshard.wording import quoted, rank_ranges


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
        name = "" if self.parameter is None else f"{quoted(self.parameter)} "
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
        target_files: files of the converted checkpoint, by rank; all that there are.
        target: their strategy.
        means: what may be used for reading.
        ranks: target ranks to look at; where None all of the strategy, and there must be no others.
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
    found = _Comparison(source_tree, target_tree, target, wanted, means).run(target_files)
    if ranks is None:
        found = [*_beyond(target_files, target), *found]
    return found


def _beyond(files: Mapping[int, str], strategy: Strategy) -> Iterator[Difference]:
    """Files of ranks that a strategy does not have."""
    for rank in sorted(rank for rank in files if rank >= strategy.device_count):
        yield Difference("file", None, (rank,), f"{files[rank]} is not of this conversion")


class _Copies(NamedTuple):
    """A slice that target ranks hold, and what it has to be.

    Attributes:
        parameter: the source's parameter.
        slice: the target's slice; its holders are those of the right type and shape.
    """

    parameter: Parameter
    slice: Slice


class _Comparison:
    def __init__(self, source: Tree, target: Tree, new: Strategy, ranks: list[int], means: Means) -> None:
        self._source, self._target, self._new = source, target, new
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
        self._check_metadata()
        self._means.progress.begin(self._bytes_to_read(), "verifying")
        try:
            for batch in batches(self._source.parameters.values(), self._parts_of):
                self._compare(
                    [
                        copies
                        for parameter in batch
                        for stage in self._new.stages
                        if self._new.is_none or parameter.name in stage.layouts
                        for copies in self._slices(parameter, stage)
                    ]
                )
            for names in batches(self._source.outside, lambda name: 2 * len(self._ranks)):
                self._compare_values(names)
        finally:
            self._means.progress.end()
        return sorted(self._differences, key=lambda found: (found.parameter or "", found.kind, found.ranks))

    def _parts_of(self, parameter: Parameter) -> int:
        return sum(holding.layout.slice_count for holding in parameter.holdings) + len(self._ranks)

    def _bytes_to_read(self) -> int:
        """Bytes of all copies that are as they should be, and of what they are compared with."""
        total = 0
        for name, parameter in self._source.parameters.items():
            if self._new.is_none or any(name in stage.layouts for stage in self._new.stages):
                slices = (held for held in parameter.slices if held.holders)
                total += sum(self._source.tensor(name, held.holders[0]).nbytes for held in slices)
        for stage, tensors, ranks in self._built_alike():
            total += len(ranks) * sum(
                tensor.nbytes
                for name, tensor in tensors.items()
                if self._is_converted(name, stage) or self._is_copied(name, stage)
            )
        for name in self._source.outside:
            origins = {self._origin(name, rank) for rank in self._values_on(name)}
            total += sum(self._source.tensor(name, origin).nbytes for origin in origins)
        return total

    def _add(self, kind: str, name: Optional[str], ranks: Iterable[int], detail: str) -> None:
        self._differences.append(Difference(kind, name, tuple(sorted(ranks)), detail))

    def _present(self, stage: Stage) -> list[int]:
        """Ranks of a stage whose files were read."""
        return [rank for rank in self._ranks if rank in self._target.indexes and rank in stage.ranks]

    def _built_alike(self) -> Iterator[tuple[Stage, Mapping[str, Tensor], list[int]]]:
        """What files hold, with the ranks of a stage whose files are built so."""
        for tensors, same in self._target.alike():
            for stage in self._new.stages:
                ranks = [rank for rank in same if rank in stage.ranks]
                if ranks:
                    yield stage, tensors, ranks

    def _check_names(self) -> None:
        """Names in target files that nothing puts there."""
        extra: dict[str, list[int]] = defaultdict(list)
        for stage, tensors, ranks in self._built_alike():
            for name in tensors:
                if not self._is_converted(name, stage) and not self._is_copied(name, stage):
                    extra[name] += ranks
        for name, ranks in extra.items():
            self._add("extra", name, ranks, "is in the file, but the source and the strategies do not put it there")

    def _check_metadata(self) -> None:
        """Metadata of target files that tell a reader something else than what is in them."""
        known = {item for index in self._source.indexes.values() for item in index.metadata.items()}
        wrong: dict[str, list[int]] = defaultdict(list)
        for rank, index in self._target.indexes.items():
            for text in _strange_metadata(index, known):
                wrong[text].append(rank)
        for text, ranks in wrong.items():
            self._add("file", None, ranks, text)

    def _is_converted(self, name: str, stage: Stage) -> bool:
        """Whether a stage's ranks get slices of a parameter that the source strategy lists."""
        return name in self._source.parameters and (self._new.is_none or name in stage.layouts)

    def _is_copied(self, name: str, stage: Stage) -> bool:
        """Whether a stage's ranks get a value that the source strategy does not list."""
        if name not in self._source.outside:
            return False
        return name in stage.layouts or not any(name in other.layouts for other in self._new.stages)

    def _values_on(self, name: str) -> list[int]:
        """Ranks that a value outside the source strategy belongs on, and that were read."""
        stages = [stage for stage in self._new.stages if self._is_copied(name, stage)]
        ranks = (rank for stage in stages for rank in self._present(stage))
        return [rank for rank in ranks if name in self._target.indexes[rank].tensors]

    def _origin(self, name: str, rank: int) -> int:
        """The source rank whose copy of a value a target rank gets."""
        holders = self._source.outside[name]
        return rank if belongs_to_rank(name) and rank in holders else holders[0]

    def _slices(self, parameter: Parameter, stage: Stage) -> list[_Copies]:
        """The slices of a parameter that a stage's ranks hold rightly cut; all else is told."""
        name = parameter.name
        sample = self._source.tensor(name, next(parameter.holders))
        wrong: dict[tuple[str, str], list[int]] = defaultdict(list)
        shapes = {}
        for rank in self._present(stage):
            tensor = self._target.indexes[rank].tensors.get(name)
            if tensor is None:
                wrong["missing", "is not in the file"].append(rank)
            elif (tensor.dtype, tensor.item_size) != (sample.dtype, sample.item_size):
                wrong["type", f"is {tensor.dtype}, but {sample.dtype} in the source"].append(rank)
            else:
                shapes[rank] = tensor.shape
        recorded = Layout((), ((),) * len(parameter.shape)) if self._new.is_none else stage.layouts[name]
        layout = self._layout(parameter, recorded, stage, shapes)
        right = []
        if layout is not None:
            expected = slice_shapes(layout, parameter.shape, [rank - stage.first_rank for rank in shapes])
            for (rank, shape), fitting in zip(shapes.items(), expected):
                if shape == fitting:
                    right.append(rank)
                else:
                    wrong["shape", f"has shape {list(shape)}, not {list(fitting)}"].append(rank)
        for (kind, detail), ranks in wrong.items():
            self._add(kind, name, ranks, detail)
        if layout is None:
            return []
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
                expected = slice_shapes(layout, parameter.shape, [rank - stage.first_rank for rank in shapes])
                fitting = sum(map(operator.eq, expected, shapes.values()))
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
        for number, total in zip(owners, sum_parts(parts, self._means, told=False)):
            expected[number] = (expected[number] + total) % PRIME
        wrong: dict[str, list[int]] = defaultdict(list)
        for ((parameter, _), by_rank), right in zip(check, expected):
            wrong[parameter.name] += [rank for rank, total in by_rank.items() if total != right]
        for name, ranks in wrong.items():
            if ranks:
                self._add("content", name, ranks, "differs from the source")

    def _compare_values(self, names: Iterable[str]) -> None:
        """Values outside the source's strategy: each target rank's copy and the source's."""
        parts: list[Part] = []
        places: list[tuple[str, Optional[int], int]] = []
        for name in names:
            there = set(self._values_on(name))
            origins = set()
            for stage in self._new.stages:
                for rank in self._present(stage) if self._is_copied(name, stage) else ():
                    origin = self._origin(name, rank)
                    if rank not in there:
                        self._check_missing_value(name, rank, origin)
                        continue
                    problem = self._value_problem(name, rank, origin)
                    if problem is not None:
                        self._add("type", name, [rank], problem)
                        continue
                    if origin not in origins:
                        origins.add(origin)
                        parts.append(self._source.whole_part(name, origin))
                        places.append((name, None, origin))
                    parts.append(self._target.whole_part(name, rank))
                    places.append((name, rank, origin))
        expected: dict[tuple[str, int], int] = {}
        wrong: dict[str, list[int]] = defaultdict(list)
        # The source's copy comes before the first that is compared with it.
        for (name, target, origin), total in zip(places, sum_parts(parts, self._means)):
            if target is None:
                expected[name, origin] = total
            elif total != expected[name, origin]:
                wrong[name].append(target)
        for name, ranks in wrong.items():
            self._add("content", name, ranks, "differs from the source")

    def _check_missing_value(self, name: str, rank: int, origin: int) -> None:
        if can_hold(format_of(self._target.indexes[rank].path), self._source.tensor(name, origin).dtype):
            self._add("missing", name, [rank], "is not in the file")

    def _value_problem(self, name: str, rank: int, origin: int) -> Optional[str]:
        """In what a rank's value is of another kind than the source's, content aside."""
        mine, theirs = self._target.tensor(name, rank), self._source.tensor(name, origin)
        if _kind(mine) != _kind(theirs):
            return f"is {mine.dtype} {list(mine.shape)}, but {theirs.dtype} {list(theirs.shape)} in the source"
        formats = {self._target.indexes[rank].format, self._source.indexes[origin].format}
        if formats == {"ckpt"} and mine.dims != theirs.dims:
            return f"records dimensions {list(mine.dims)}, but {list(theirs.dims)} in the source"
        return None


def _strange_metadata(index: CheckpointIndex, known: set[tuple[str, str]]) -> Iterator[str]:
    """What in the metadata of a safetensors file neither holds for it nor is in the source."""
    for key, text in index.metadata.items():
        tensor = index.tensors.get(key)
        right = {"format": "ms", "remove_redundancy": "False"}.get(key)
        if right is None and tensor is not None and tensor.dtype == INT4:
            right = INT4
        # Every slice is there, whatever the source says; other entries may be the source's.
        same_as_source = key != "remove_redundancy" and (key, text) in known
        if text != right and key != "crc_num" and not same_as_source:
            told = "nothing" if right is None else repr(right)
            yield f"its metadata say {text!r} for {key!r}, not {told}"


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
    return compare_copies(read_tree(files, strategy, means.handles, admit), means)


def compare_copies(tree: Tree, means: Means) -> list[Difference]:
    """Where copies of one slice within a checkpoint that was read differ; see `compare_replicas`.

    Raises:
        ReshardError: a file cannot be read.
    """
    found = [Difference("file", None, (rank,), text) for rank, text in tree.damaged.items()]
    for name, problem in tree.problems.items():
        found.append(Difference("strategy", name, () if problem.rank is None else (problem.rank,), problem.message))
    shared = {name: ranks for name, ranks in tree.outside.items() if len(ranks) > 1 and not belongs_to_rank(name)}
    total = sum(tree.tensor(name, rank).nbytes for name, ranks in shared.items() for rank in ranks)
    for parameter in tree.parameters.values():
        for held in _copied_slices(parameter):
            total += len(held.holders) * tree.tensor(parameter.name, held.holders[0]).nbytes
    means.progress.begin(total, "comparing copies")
    try:
        for batch in batches(tree.parameters.values(), lambda parameter: sum(1 for _ in parameter.holders)):
            found += _differing_slices(tree, batch, means)
        for names in batches(shared, lambda name: len(shared[name])):
            parts = [tree.whole_part(name, rank) for name in names for rank in shared[name]]
            copies = iter(zip(parts, sum_parts(parts, means)))
            for name in names:
                kinds = {}
                for rank in shared[name]:
                    part, number = next(copies)
                    kinds[rank] = (_kind(part.tensor), number)
                found += _minority(name, kinds)
    finally:
        means.progress.end()
    return sorted(found, key=lambda difference: (difference.parameter or "", difference.kind, difference.ranks))


def _copied_slices(parameter: Parameter) -> list[Slice]:
    """The slices of a parameter that can be compared with something."""
    tied = len(parameter.holdings) > 1
    return [held for held in parameter.slices if len(held.holders) > 1 or (held.holders and tied)]


def _differing_slices(tree: Tree, parameters: Iterable[Parameter], means: Means) -> Iterator[Difference]:
    compared = [(parameter, held) for parameter in parameters for held in _copied_slices(parameter)]
    parts = [
        tree.part(parameter.name, rank, parameter.shape, held.box)
        for parameter, held in compared
        for rank in held.holders
    ]
    coming = iter(sum_parts(parts, means))
    stages: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    doubtful = set()
    by_name: dict[str, Parameter] = {}
    for parameter, held in compared:
        name = by_name.setdefault(parameter.name, parameter).name
        copies = {rank: next(coming) for rank in held.holders}
        stages[name][held.stage] += Counter(copies.values()).most_common(1)[0][0]
        for difference in _minority(name, copies):
            doubtful.add(name)
            yield difference
    for name, totals in stages.items():
        if name not in doubtful and len(totals) > 1:
            whole = {parts[0].stage for parts in by_name[name].whole_stages()}
            if len({totals[stage] % PRIME for stage in whole & set(totals)}) > 1:
                yield Difference("stages", name, (), "pipeline stages hold different values of it")


def _minority(name: str, copies: Mapping[int, Hashable]) -> Iterator[Difference]:
    """The ranks whose copy is not that of most."""
    ranked = Counter(copies.values()).most_common(2)
    if len(ranked) == 1:
        return
    if ranked[0][1] > ranked[1][1]:
        wrong = [rank for rank, copy in copies.items() if copy != ranked[0][0]]
        most = rank_ranges(set(copies) - set(wrong))
        yield Difference("replica", name, tuple(wrong), f"differs from the copies on {most}")
    else:
        yield Difference("replicas", name, tuple(copies), "copies differ, and no majority tells which is wrong")


def not_held(tree: Tree, strategy: Strategy) -> dict[str, list[int]]:
    """Ranks, ascending, whose files lack a parameter that other ranks' files hold and theirs could too.

    A de-duplicated save is so by intention, and conversions take the copy of any rank.
    """
    lacking: dict[str, list[int]] = defaultdict(list)
    for tensors, same in tree.alike():
        for stage in strategy.stages:
            ranks = [rank for rank in same if 0 <= rank - stage.first_rank < stage.device_count]
            for name in stage.layouts if ranks else ():
                if name in tree.parameters and name not in tensors:
                    lacking[name] += ranks
    return {name: sorted(ranks) for name, ranks in sorted(lacking.items())}


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...], int]:
    return tensor.dtype, tensor.shape, tensor.nbytes


def _is_empty(box: Box) -> bool:
    return not math.prod(stop - start for start, stop in box)
