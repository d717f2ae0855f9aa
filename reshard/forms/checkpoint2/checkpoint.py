"""One iteration of Checkpoint 2.0, from its metadata and the headers of its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from reshard.errors import CheckpointError, IncompleteSourceError, InputError
from reshard.forms.checkpoint2.contents import LaidOutContents, LostTensor, whole_contents
from reshard.forms.checkpoint2.form import ADAPTER, choose, read_common
from reshard.forms.checkpoint2.metadata import read_metadata
from reshard.forms.checkpoint2.placing import IterationFiles, RankList, TensorPlacement, disjoint
from reshard.forms.form import Description
from reshard.forms.recorded import RecordedCheckpoint
from reshard.forms.request import Means, Request
from reshard.forms.tracker import Iteration
from reshard.layout import Box, Layout
from reshard.storage import exists
from reshard.strategies import SAME, Stage, Strategy
from reshard.text.messages import Message, block, listing, plural, rank_ranges, some_names

# Of names, in a line of an error.
_MOST_PATTERNS = 6

_HINT = "pass the target's strategy instead of same"


@dataclass
class Checkpoint2(RecordedCheckpoint):
    """An iteration.

    Holder numbers count the listed or existing files: model files first, then optimizer files, each
    in the order of their names. A lost slice has no holders.

    Attributes:
        absent: by name of a listed file, the reason why it cannot be read.
        lost: tensors with a slice in no readable file, by name.
        unplaced: by name of a tensor without a recorded layout, the reason why it is not read.
        placements: the placement of every tensor, by name.
        metadata_names: names of the tensors in metadata.json; None without it.
    """

    absent: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, LostTensor] = field(default_factory=dict)
    unplaced: Mapping[str, str] = field(default_factory=dict)
    placements: Mapping[str, TensorPlacement] = field(default_factory=dict)
    metadata_names: frozenset[str] | None = None

    def layouts(self) -> dict[RankList, dict[str, Layout]]:
        """The layouts of tensors over the ranks of the save.

        Returns:
            Per pipeline stage, by its ranks in the order of the device matrices, the layouts by name; stages
            in the order of their first ranks. A whole tensor is in each stage with a rank that holds it. Tensors on
            only some of a stage's ranks are skipped.
        """
        by_stage: dict[RankList, dict[str, Layout]] = {ranks: {} for ranks in _stages(self.placements.values())}
        members = {ranks: frozenset(ranks) for ranks in by_stage}
        for name, placement in self.placements.items():
            if placement.layout is not None:
                if placement.ranks in by_stage:
                    by_stage[placement.ranks][name] = placement.layout
                continue
            for ranks, layouts in by_stage.items():
                if not members[ranks].isdisjoint(placement.ranks):
                    layouts[name] = Layout((len(ranks),), ((),) * len(placement.grid.edges))
        return by_stage

    def strategy(self) -> Strategy:
        stages: list[Stage] = []
        first = 0
        for ranks, layouts in self.layouts().items():
            if ranks != tuple(range(first, first + len(ranks))):
                raise CheckpointError(
                    f"{self.place}: lays tensors out over {rank_ranges(ranks)}; a stage would begin at rank {first} "
                    "and have no gaps",
                    file=self.place,
                    hint=_HINT,
                )
            stages.append(Stage(len(stages), first, len(ranks), layouts, (self.place,)))
            first += len(ranks)
        if not stages:
            raise CheckpointError(
                f"{self.place}: does not record the layouts of tensors", file=self.place, hint=f"{_HINT}, or none"
            )
        laid_out = set().union(*(stage.layouts.keys() for stage in stages))
        scattered = sorted(self.tensors.keys() - laid_out)
        if scattered:
            raise CheckpointError(
                f"{self.place}: lays {plural(len(scattered), 'parameter')} out over a part of a stage's ranks, which "
                "no strategy can: " + listing(scattered),
                file=self.place,
                parameter=scattered[0],
                hint=_HINT,
            )
        return Strategy(tuple(stages), SAME)

    def saved_layout(self, name: str) -> TensorPlacement | None:
        """As metadata.json records it; without that file, by the placement of whole tensors."""
        return self.placements.get(name) if self.metadata_names is None or name in self.metadata_names else None

    def boxes_of(self, name: str) -> Iterator[tuple[Box, int]]:
        placement = self.placements[name]
        for number, files in enumerate(placement.readable):
            yield from ((placement.grid.slice_box(number), file) for file in files)

    def describe(self) -> Description:
        incomplete: InputError | None = None
        try:
            self.check()
        except InputError as error:
            incomplete = error
        unplaced = None
        if self.unplaced:
            names = listing(sorted(self.unplaced))
            unplaced = f"{plural(len(self.unplaced), 'tensor')} of unknown layout left out: {names}"
        return Description(
            {name: len(placement.ranks) for name, placement in self.placements.items()},
            {name: lost.slices for name, lost in self.lost.items()},
            incomplete,
            unplaced,
        )

    def check(self, required: Callable[[str], bool] | None = None) -> None:
        super().check(required)
        lost = [item for item in self.lost.values() if required is None or required(item.name)]
        if lost:
            headline = f"{self.label} in {self.place} is not complete:"
            raise IncompleteSourceError(
                block(headline, ["  " + line for line in self._explained(lost)]),
                parameter=lost[0].name,
                hint="bring the files back, or name another iteration with --step",
            )

    def _explained(self, lost: Iterable[LostTensor]) -> list[Message]:
        by_files: dict[tuple[str, ...], list[str]] = {}
        for item in lost:
            by_files.setdefault(item.files, []).append(item.name)
        lines = []
        for files, names in by_files.items():
            expected_in = f"{some_names(files)} should hold" if files else "no file is recorded to hold"
            line = f"{plural(len(names), 'parameter')} with a slice in no readable file, which {expected_in}: "
            lines.append(line + listing(names, _MOST_PATTERNS))
        needed = dict.fromkeys(name for files in by_files for name in files)
        return [*lines, *(Message(self.absent[name]) for name in needed if name in self.absent)]


def _stages(placements: Iterable[TensorPlacement]) -> list[RankList]:
    """The ranks of every pipeline stage, those of layouts first."""
    laid_out: set[RankList] = set()
    unsharded: set[RankList] = set()
    for placement in placements:
        (unsharded if placement.layout is None else laid_out).add(placement.ranks)
    stages = disjoint(laid_out)
    covered = {rank for stage in stages for rank in stage}
    return sorted([*stages, *disjoint(ranks for ranks in unsharded if covered.isdisjoint(ranks))], key=min)


def read_checkpoint2(request: Request, means: Means) -> Checkpoint2:
    """Read the requested iteration, by default the last finished one."""
    candidates = choose(request.src, request.asked.source.step, means.report)
    if not request.complete:
        return _read_iteration(candidates[0], request, means)
    refused: InputError | None = None
    for iteration in candidates:
        try:
            checkpoint = _read_iteration(iteration, request, means)
            checkpoint.check(request.required)
        except InputError as error:
            if len(candidates) == 1:
                raise
            refused = refused or error
            means.report.warn(f"{iteration.label} is not complete and is skipped: {error.message}")
            continue
        return checkpoint
    assert refused is not None
    raise refused


def _read_iteration(iteration: Iteration, request: Request, means: Means) -> Checkpoint2:
    """Read an iteration, complete or not; the errors as in `read_checkpoint2`."""
    metadata = read_metadata(iteration.path)
    metadata_files = None if metadata is None else metadata.files
    files = IterationFiles(iteration.path, metadata_files, means, request.damaged)
    laid_out = None if metadata is None else LaidOutContents(metadata, files, means)
    contents = whole_contents(files) if laid_out is None else laid_out.read()
    common = read_common(iteration.path)
    adapter = os.path.join(iteration.path, ADAPTER)
    if exists(adapter):
        means.report.note(
            f"{adapter} binds these LoRA parameters to the files of their base model by a fingerprint; it belongs to "
            "this form only and is not carried over"
        )
    step = iteration.number
    if step is None and isinstance(common.get("global_step"), int):
        step = common["global_step"]
    return Checkpoint2(
        form="checkpoint2",
        step=None if step is None else str(step),
        label=iteration.label,
        place=iteration.path,
        files=files.paths,
        indexes=files.indexes,
        absent=files.absent,
        training=common,
        metadata_names=None if metadata is None else frozenset(metadata.tensors),
        **vars(contents),
    )
