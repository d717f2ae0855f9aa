"""One iteration of Checkpoint 2.0, from its metadata and the headers of its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints.checkpoint import FileSharding, GlobalTensor, TiedTensors
from reshard.errors import IncompleteSourceError
from reshard.forms.checkpoint2.placing import RankList, TensorPlacement, disjoint
from reshard.forms.recorded import RecordedCheckpoint
from reshard.layout import Grid, Layout
from reshard.text.messages import Message, as_pattern, block, listing, plural, some_names

# Of names, in a line of an error.
_MOST_PATTERNS = 6


class LostTensor(NamedTuple):
    """A tensor with a slice in no readable file.

    Attributes:
        name: of the tensor.
        slices: how many are lost.
        files: recorded files of lost slices, sorted; empty without any.
    """

    name: str
    slices: int
    files: tuple[str, ...]


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
        unlisted: by name of a tensor that metadata.json does not list and that counts as whole, its files.
    """

    absent: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, LostTensor] = field(default_factory=dict)
    unplaced: Mapping[str, str] = field(default_factory=dict)
    placements: Mapping[str, TensorPlacement] = field(default_factory=dict)
    metadata_names: Optional[frozenset[str]] = None
    unlisted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tied_tensors(self) -> Sequence[TiedTensors]:
        """Unlisted tensors that count as whole: each file's copy by itself."""
        return [
            TiedTensors(
                *self._copies(name, files),
                reason="metadata.json does not list it: its layout is unknown",
                hint=f"leave it out: --exclude {as_pattern(name)}",
            )
            for name, files in self.unlisted.items()
            if len(files) > 1
        ]

    def _copies(self, name: str, files: Sequence[int]) -> tuple[GlobalTensor, tuple[GlobalTensor, ...]]:
        tensor = self.tensors[name]
        grid = Grid.whole(tensor.shape)
        first, *copies = (tensor._replace(shardings=(FileSharding(grid, ((file,),)),)) for file in files)
        return first, tuple(copies)

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

    def check(self, required: Optional[Callable[[str], bool]] = None) -> None:
        """Check that every needed tensor is completely readable.

        Args:
            required: whether a tensor is needed, by name; by default all.

        Raises:
            InputError: metadata and files contradict each other; lists all these tensors.
            IncompleteSourceError: no readable file holds some slices; lists all these tensors and files.
        """
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
        """Lost slices and unreadable files, a line each."""
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
