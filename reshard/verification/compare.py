"""Whether one checkpoint is another one in other slices.

The two are compared through sums (see `sums`), from the strategies alone:

1. Every distinct slice of the source and every copy of every slice of the target are summed.
2. Where all copies of a target slice agree and the slices add up to the source's sum, the parameter is right.
3. Of all others, the source's sum over every target slice's own box is made; each rank's copy is right or
   wrong by itself then. So it is from the beginning where only some target ranks are compared.

What of the source is lost, how its parameters are cut and how the target's have to be follows from both
strategies and all files of the source; what the target happens to hold plays no part.

All this goes by batches of parameters: what is in memory does not grow with parameters times ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Callable, Optional

import numpy as np

from reshard.checkpoints import CheckpointIndex, Tensor, can_hold, format_of
from reshard.checkpoints.formats.dtypes import INT4
from reshard.errors import LayoutError
from reshard.layout import Layout, whole
from reshard.strategies import Stage, Strategy
from reshard.verification.completeness import Lost, converted_part, refuse
from reshard.verification.contents import Contents, Copies
from reshard.verification.difference import Difference, kind_of_tensor
from reshard.verification.library import library_differences
from reshard.verification.parameter import Parameter, slice_shapes, slices_of
from reshard.verification.parts import Part
from reshard.verification.reading import Means, batches, sum_parts
from reshard.verification.tree import Tree, read_tree, read_tree_headers
from reshard.verification.values import RecoveredValues, Values


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
    """What of a target checkpoint is not what the source makes of it; see `compare_converted`."""
    tree = read_tree(source_files, source, means.handles)
    return compare_converted(tree, source, target_files, target, means, ranks=ranks, admit=admit)


def compare_converted(
    tree: Tree,
    source: Strategy,
    target_files: Mapping[int, str],
    target: Strategy,
    means: Means,
    *,
    ranks: Optional[Iterable[int]] = None,
    admit: Optional[Callable[[str], bool]] = None,
    recovered: bool = False,
) -> list[Difference]:
    """What of a target checkpoint is not what the source makes of it.

    Args:
        tree: all files and names of the step that was converted.
        source: their strategy.
        target_files: files of the converted checkpoint, by rank; all that there are.
        target: their strategy.
        means: what may be used for reading.
        ranks: target ranks to look at; where None all of the strategy, and there must be no others.
        admit: which parameters were converted, by name; all where None.
        recovered: the target is what a recovery gives back (see `values.RecoveredValues`).

    Returns:
        Every difference, by parameter; none where the target is right.

    Raises:
        IncompleteSourceError: the source lacks what the target ranks need.
        InputError: the source does not fit its strategy.
        RetryableError: reading failed.
    """
    wanted = sorted(range(target.device_count) if ranks is None else set(ranks))
    tree, never_found = converted_part(tree, source, target, wanted, admit)
    target_tree = read_tree_headers(
        {rank: target_files[rank] for rank in wanted if rank in target_files}, means.handles
    )
    values = RecoveredValues(tree, target) if recovered else Values(tree, target)
    comparison = _Comparison(tree, target_tree, target, wanted, means, values)
    comparison.miss(never_found)
    found = comparison.run(target_files)
    for rank, index in target_tree.indexes.items():
        found += [Difference("file", None, (rank,), text) for text in library_differences(index)]
    if ranks is None:
        found = [*_beyond(target_files, target), *found]
    return found


def _beyond(files: Mapping[int, str], strategy: Strategy) -> Iterator[Difference]:
    """Files of ranks that a strategy does not have."""
    for rank in sorted(rank for rank in files if rank >= strategy.device_count):
        yield Difference("file", None, (rank,), f"{files[rank]} is not of this conversion")


class _Comparison:
    def __init__(
        self, source: Tree, target: Tree, new: Strategy, ranks: list[int], means: Means, values: Values
    ) -> None:
        self._source, self._target, self._new, self._values = source, target, new, values
        self._ranks = ranks
        # Per stage the ranks to look at, counted within it.
        self._local = {
            stage.number: [rank - stage.first_rank for rank in ranks if rank in stage.ranks] for stage in new.stages
        }
        self._means = means
        self._contents = Contents(source, target, means)
        self._differences = self._contents.differences

    def miss(self, needed: Iterable[Lost]) -> None:
        """Parameters that no source file holds though an absent rank may have held them.

        Raises:
            IncompleteSourceError: the target holds one, so that the source cannot tell whether it is right.
        """
        indexes = self._target.indexes.values()
        refuse(item for item in needed if any(item.parameter in index.tensors for index in indexes))
        for name, _, detail in needed:
            stages = [stage for stage in self._new.stages if self._new.is_none or name in stage.layouts]
            ranks = [rank for stage in stages for rank in self._present(stage)]
            if ranks:
                self._add("missing", name, ranks, f"is not in the file, and in the source {detail}")

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
                self._contents.compare(
                    [
                        copies
                        for parameter in batch
                        for stage in self._stages_of(parameter.name)
                        for copies in self._slices(parameter, stage)
                    ]
                )
            for names in batches(self._values.names, lambda name: 2 * len(self._ranks)):
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
            item_size = self._source.sample(parameter).item_size
            add_up = False
            for stage in self._stages_of(name):
                with contextlib.suppress(LayoutError):
                    layout = self._layout(parameter, stage)
                    if self._alone(parameter, layout, stage):
                        _, some = np.unique(layout.slice_of_rank[self._local[stage.number]], return_index=True)
                        shapes = slice_shapes(layout, parameter.shape, [self._local[stage.number][at] for at in some])
                        total += item_size * sum(map(math.prod, shapes))
                    else:
                        add_up = True
            if add_up:
                total += sum(part.nbytes for _, part in self._contents.stored(parameter))
        for stage, tensors, ranks in self._built_alike():
            total += len(ranks) * sum(
                tensor.nbytes for name, tensor in tensors.items() if self._is_converted(name, stage)
            )
        for name in self._values.names:
            origins: set[int] = set()
            for rank in self._present_anywhere:
                if name in self._target.indexes[rank].tensors:
                    mine = self._values.origins(name, rank)
                    total += self._target.tensor(name, rank).nbytes if mine else 0
                    origins.update(mine)
            total += sum(self._source.tensor(name, origin).nbytes for origin in origins)
        return total

    def _add(self, kind: str, name: Optional[str], ranks: Iterable[int], detail: str) -> None:
        self._differences.append(Difference(kind, name, tuple(sorted(ranks)), detail))

    def _stages_of(self, name: str) -> list[Stage]:
        """The stages that get a parameter and of which ranks are looked at."""
        stages = (stage for stage in self._new.stages if self._new.is_none or name in stage.layouts)
        return [stage for stage in stages if self._local[stage.number]]

    def _present(self, stage: Stage) -> list[int]:
        """Ranks of a stage whose files were read."""
        return [rank for rank in self._ranks if rank in self._target.indexes and rank in stage.ranks]

    @property
    def _present_anywhere(self) -> list[int]:
        """Ranks of all stages whose files were read."""
        return [rank for rank in self._ranks if rank in self._target.indexes]

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
                if not self._is_converted(name, stage):
                    extra[name] += [rank for rank in ranks if not self._values.origins(name, rank)]
        for name, ranks in extra.items():
            if ranks:
                self._add("extra", name, ranks, "is in the file, but the source and the strategies do not put it there")

    def _check_metadata(self) -> None:
        """Metadata of target files that tell a reader something else than what is in them."""
        known = {item for index in self._source.indexes.values() for item in index.metadata.items()}
        wrong: dict[str, list[int]] = defaultdict(list)
        for rank, index in self._target.indexes.items():
            for text in strange_metadata(index, known, self._values.metadata(rank)):
                wrong[text].append(rank)
        for text, ranks in wrong.items():
            self._add("file", None, ranks, text)

    def _is_converted(self, name: str, stage: Stage) -> bool:
        """Whether a stage's ranks get slices of a parameter that the source strategy lists."""
        return name in self._source.parameters and (self._new.is_none or name in stage.layouts)

    def _slices(self, parameter: Parameter, stage: Stage) -> list[Copies]:
        """The slices of a parameter that a stage's ranks hold rightly cut; all else is told."""
        name = parameter.name
        sample = self._source.sample(parameter)
        wrong: dict[tuple[str, str], list[int]] = defaultdict(list)
        lacking = []
        shapes = {}
        for rank in self._present(stage):
            tensor = self._target.indexes[rank].tensors.get(name)
            if tensor is None:
                lacking.append(rank)
            elif not tensor.same_type(sample):
                wrong["type", f"is {tensor.dtype}, but {sample.dtype} {self._source.told_by}"].append(rank)
            else:
                shapes[rank] = tensor.shape
        layout = None
        right = []
        try:
            layout = self._layout(parameter, stage)
        except LayoutError as error:
            wrong["strategy", error.message] += [*shapes, *lacking]
        else:
            missing = self._not_empty(layout, parameter, stage, lacking)
            if missing:
                wrong["missing", "is not in the file"] = missing
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
        alone = self._alone(parameter, layout, stage)
        return [Copies(parameter, held, alone) for held in slices_of(layout, stage, parameter.shape, right)]

    def _not_empty(self, layout: Layout, parameter: Parameter, stage: Stage, lacking: list[int]) -> list[int]:
        """Of ranks that lack a parameter those that must have it: sources and .ckpt files leave out empty slices."""
        shapes = slice_shapes(layout, parameter.shape, [rank - stage.first_rank for rank in lacking])
        return [
            rank
            for rank, shape in zip(lacking, shapes)
            if math.prod(shape) or not (self._values.keeps_files or self._target.indexes[rank].format == "ckpt")
        ]

    def _layout(self, parameter: Parameter, stage: Stage) -> Layout:
        """How a target stage has to cut a parameter.

        Raises:
            LayoutError: the target's strategy does not fit the parameter.
        """
        if self._new.is_none:
            return whole(len(parameter.shape))
        return parameter.target_layout(stage.layouts[parameter.name], len(self._new.stages) > 1)

    def _alone(self, parameter: Parameter, layout: Layout, stage: Stage) -> bool:
        """Whether slices of a target stage are compared one by one; see `Copies`."""
        local = self._local[stage.number]
        some = len(local) < stage.device_count and len(set(layout.slice_of_rank[local].tolist())) < layout.slice_count
        return some or not parameter.cells.of_one_stage

    def _compare_values(self, names: Iterable[str]) -> None:
        """Values that are copied: each target rank's copy and the source's."""
        parts: list[Part] = []
        # Where among the parts a target rank's copy stands, and the source's that it may be.
        places: list[tuple[str, int, int, list[int]]] = []
        summed: dict[tuple[str, int], int] = {}
        for name in names:
            for rank in self._present_anywhere:
                origins = self._values.origins(name, rank)
                if not origins:
                    continue
                if name not in self._target.indexes[rank].tensors:
                    self._check_missing_value(name, rank, origins[0])
                    continue
                problems = {origin: self._value_problem(name, rank, origin) for origin in origins}
                fitting = [origin for origin, problem in problems.items() if problem is None]
                if not fitting:
                    self._add("type", name, [rank], problems[origins[0]] or "")
                    continue
                for origin in fitting:
                    if (name, origin) not in summed:
                        summed[name, origin] = len(parts)
                        parts.append(self._source.whole_part(name, origin))
                places.append((name, rank, len(parts), [summed[name, origin] for origin in fitting]))
                parts.append(self._target.whole_part(name, rank))
        sums = sum_parts(parts, self._means)
        wrong: dict[str, list[int]] = defaultdict(list)
        for name, rank, mine, allowed in places:
            if sums[mine] not in {sums[at] for at in allowed}:
                wrong[name].append(rank)
        for name, ranks in wrong.items():
            self._add("content", name, ranks, "differs from the source")

    def _check_missing_value(self, name: str, rank: int, origin: int) -> None:
        held = can_hold(format_of(self._target.indexes[rank].path), self._source.tensor(name, origin).dtype)
        if held and self._values.is_needed(name, rank):
            self._add("missing", name, [rank], "is not in the file")

    def _value_problem(self, name: str, rank: int, origin: int) -> Optional[str]:
        """In what a rank's value is of another kind than the source's, content aside."""
        mine, theirs = self._target.tensor(name, rank), self._source.tensor(name, origin)
        if kind_of_tensor(mine) != kind_of_tensor(theirs):
            return f"is {mine.dtype} {list(mine.shape)}, but {theirs.dtype} {list(theirs.shape)} in the source"
        formats = {self._target.indexes[rank].format, self._source.indexes[origin].format}
        if formats == {"ckpt"} and mine.dims != theirs.dims:
            return f"records dimensions {list(mine.dims)}, but {list(theirs.dims)} in the source"
        return None


def strange_metadata(
    index: CheckpointIndex, known: set[tuple[str, str]], allowed: Mapping[str, str], format: str = "ms"
) -> Iterator[str]:
    """What in the metadata of a safetensors file neither holds for it nor is in the source, nor is allowed anyway.

    Args:
        index: the file.
        known: what the source's metadata say.
        allowed: what they may say anyway.
        format: what they say of the framework that the file is for.
    """
    for key, text in index.metadata.items():
        tensor = index.tensors.get(key)
        right = {"format": format, "remove_redundancy": "False"}.get(key)
        if right is None and tensor is not None and tensor.dtype == INT4:
            right = INT4
        # Every slice is there, whatever the source says; other entries may be the source's.
        same_as_source = allowed.get(key) == text or (key != "remove_redundancy" and (key, text) in known)
        if text != right and key != "crc_num" and not same_as_source:
            told = "nothing" if right is None else repr(right)
            yield f"its metadata say {text!r} for {key!r}, not {told}"
