"""Comparison of converted rank directories with their source.

The box of each tensor in each rank's file follows from the source and the target's strategy alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from reshard.checkpoints import CheckpointIndex, can_hold, files_alike, format_of
from reshard.errors import LayoutError
from reshard.forms.ranks.checkpoint import RankCheckpoint
from reshard.forms.ranks.tree import StepFiles
from reshard.strategies import Stage, Strategy
from reshard.text.names import belongs_to_rank
from reshard.verification.boxes import shape_of, target_boxes, volume_of
from reshard.verification.converted import TargetComparison, layout_in, strange_metadata
from reshard.verification.files import library_differences
from reshard.verification.reading import Comparison, Difference, Reading
from reshard.verification.stored import Content, SliceSet, Source, by_box


def compare_ranks(
    source: Source,
    files: Mapping[int, str],
    target: Strategy,
    means: Reading,
    *,
    ranks: Iterable[int] | None = None,
    admit: Callable[[str], bool] = lambda name: True,
    recovered: bool = False,
) -> tuple[list[Difference], set[str]]:
    """Compare rank directories with their source, which has the names and types of the target.

    Without ``ranks``, all of the strategy are compared, and files of other ranks are differences. A recovery may copy
    other entries than a conversion; see `_Values`.

    Returns:
        Every difference, whole files first, then by parameter; and the names in all compared files.

    Raises:
        InputError: the source lacks slices that the target ranks need, or does not fit its strategy.
        RetryableError: reading failed.
    """
    compared = sorted(range(target.device_count) if ranks is None else set(ranks))
    present = {rank: files[rank] for rank in compared if rank in files}
    written = RankCheckpoint(StepFiles(None, present), means.handles)
    beyond = [rank for rank in sorted(files) if ranks is None and rank >= target.device_count]
    differences = [Difference("file", None, (rank,), f"{files[rank]} is not of this conversion") for rank in beyond]
    for rank in compared:
        if rank not in written.indexes:
            differences.append(Difference("file", None, (rank,), written.damaged.get(rank, "is missing")))
    differences += _RankFiles(source, written.indexes, target, means, admit, recovered).run()
    for rank, index in written.indexes.items():
        differences += [Difference("file", None, (rank,), text) for text in library_differences(index)]
    return differences, written.names()


class _RankFiles(TargetComparison):
    def __init__(
        self,
        source: Source,
        indexes: Mapping[int, CheckpointIndex],
        strategy: Strategy,
        means: Reading,
        admit: Callable[[str], bool],
        recovered: bool,
    ) -> None:
        super().__init__(source, indexes, strategy, means, admit)
        self._converted = frozenset(self._names)
        self._copied = _Values(source.indexes, self._value_files, self._converted, strategy, recovered)
        # A target file may be a copy of the source's, which may omit empty slices.
        self._may_omit = recovered
        # Per stage, the compared ranks with readable files.
        self._present = {
            stage.number: [rank for rank in sorted(indexes) if rank in stage.ranks] for stage in strategy.stages
        }
        self._ways: dict[object, SliceSet] = {}
        self._known_metadata = self.source_metadata

    def _is_converted(self, name: str, stage: Stage) -> bool:
        """Whether a stage's ranks must hold slices of a tensor."""
        return name in self._converted and (self._new.is_none or name in stage.layouts)

    def _check_names(self) -> None:
        extra: dict[str, list[int]] = defaultdict(list)
        for group in files_alike(self._indexes):
            for stage in self._new.stages:
                ranks = [rank for rank in group if rank in stage.ranks]
                for name in self._indexes[group[0]].tensors if ranks else ():
                    if not self._is_converted(name, stage):
                        extra[name] += [rank for rank in ranks if not self._copied.origins(name, rank)]
        for name, ranks in extra.items():
            if ranks:
                self._add("extra", name, "is not expected in this file by the source and the strategies", ranks)

    def _strange_metadata(self, number: int, index: CheckpointIndex) -> Iterable[str]:
        return strange_metadata(index, self._known_metadata, self._copied.metadata(number))

    def _slices(self, content: Content) -> Iterator[Comparison]:
        for stage in self._new.stages:
            if self._is_converted(content.name, stage) and self._present[stage.number]:
                yield from self._slices_in(stage, content)

    def _slices_in(self, stage: Stage, content: Content) -> Iterator[Comparison]:
        name, present = content.name, self._present[stage.number]
        try:
            layout = layout_in(stage, content, self._new)
            boxes = target_boxes(layout, content.shape)
        except LayoutError as error:
            self._add("strategy", name, error.message, present)
            return
        wrong: dict[tuple[str, str], list[int]] = defaultdict(list)
        right = []
        for rank in present:
            box, tensor = boxes[rank - stage.first_rank], self._indexes[rank].tensors.get(name)
            if tensor is None:
                # Sources and .ckpt files omit empty slices.
                if volume_of(box) or not (self._may_omit or self._indexes[rank].format == "ckpt"):
                    wrong["missing", "is not in the file"].append(rank)
            elif tensor.dtype != content.dtype or (tensor.elements and tensor.item_size != content.item_size):
                wrong["type", f"is {tensor.dtype}, but {content.dtype} {self._source.origin}"].append(rank)
            elif tensor.shape != shape_of(box):
                wrong["shape", f"has shape {list(tensor.shape)}, not {list(shape_of(box))}"].append(rank)
            else:
                right.append(rank)
        for (kind, detail), ranks in wrong.items():
            self._add(kind, name, detail, ranks)
        key = (layout, content.shape, stage.number, tuple(right))
        if key not in self._ways:
            self._ways[key] = SliceSet(stage.number, by_box(boxes, stage.ranks, zip(right, right)))
        yield Comparison(content, self._ways[key], self._indexes, stage.number)

    def _values(self) -> Iterator[tuple[str, int, Sequence[int]]]:
        for name in self._copied.names:
            for rank, index in self._indexes.items():
                origins = self._copied.origins(name, rank)
                if origins and name in index.tensors:
                    yield name, rank, origins
                elif origins and self._copied.is_needed(name, rank) and self._can_hold(index, name, origins[0]):
                    self._add("missing", name, "is not in the file", [rank])

    def _can_hold(self, index: CheckpointIndex, name: str, origin: int) -> bool:
        return can_hold(format_of(index.path), self._source.value(name, origin).dtype)


class _Values:
    """The entries that a conversion or a recovery copies: by default, those without a layout in the source.

    A recovery copies a complete file of the source unchanged, even if its entries differ from other ranks'. The file of
    a lost rank gets every value, and the entries of its stage's ranks that the strategy lists only for other stages.
    Any copy of these may have been in the lost file.

    Attributes:
        names: of all these entries.
    """

    def __init__(
        self,
        indexes: Mapping[int, CheckpointIndex],
        files: Mapping[str, tuple[int, ...]],
        tensors: Collection[str],
        target: Strategy,
        recovered: bool,
    ) -> None:
        self._indexes, self._files, self._target, self._recovered = indexes, files, target, recovered
        everywhere = frozenset(stage.number for stage in target.stages)
        self._stages = {
            name: frozenset(stage.number for stage in target.stages if name in stage.layouts) or everywhere
            for name in files
        }
        # Per stage of a recovery, the entries in files of its ranks that the strategy lists only for other stages.
        self._unlisted: dict[int, set[str]] = {stage.number: set() for stage in target.stages}
        for ranks in files_alike(indexes) if recovered and not target.is_none else ():
            held = indexes[ranks[0]].tensors.keys()
            for stage in {stage.number: stage for stage in map(target.stage_of, ranks)}.values():
                self._unlisted[stage.number] |= (held - stage.layouts.keys()).intersection(tensors)
        self.names = [*files, *sorted(set().union(*self._unlisted.values()))]

    def origins(self, name: str, rank: int) -> tuple[int, ...]:
        """The source ranks whose copy a target rank may hold; empty if it gets no copy."""
        stage, own = self._target.stage_of(rank), (rank,) if self._holds(rank, name) else ()
        if name not in self._files:
            if name not in self._unlisted[stage.number]:
                return ()
            return own or tuple(candidate for candidate in stage.ranks if self._holds(candidate, name))
        if self._recovered and own:
            return own
        if stage.number not in self._stages[name]:
            return ()
        if self._target.is_as_cut:
            return own
        holders = self._files[name]
        return (rank if belongs_to_rank(name) and rank in holders else holders[0],)

    def is_needed(self, name: str, rank: int) -> bool:
        """Whether a target rank that has origins for a value must hold it."""
        if not self._recovered:
            return True
        if rank in self._indexes:
            return self._holds(rank, name)
        present = [one for one in self._target.stage_of(rank).ranks if one in self._indexes]
        return name in self._files or all(self._holds(one, name) for one in present)

    def metadata(self, rank: int) -> Mapping[str, str]:
        """Metadata that a target rank's file may always have."""
        copied = self._recovered or self._target.is_as_cut
        return self._indexes[rank].metadata if copied and rank in self._indexes else {}

    def _holds(self, rank: int, name: str) -> bool:
        return rank in self._indexes and name in self._indexes[rank].tensors
