"""One iteration of Checkpoint 2.0, from its metadata and the headers of its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints.checkpoint import Equal, FileSharding, GlobalTensor, RecordedCheckpoint
from reshard.errors import IncompleteSourceError
from reshard.forms.checkpoint2.placing import RankList, TensorPlacement, disjoint
from reshard.layout import Grid, Layout
from reshard.text.messages import Message, block, listing
from reshard.text.names import as_pattern
from reshard.text.wording import plural, some_names

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
    in the order of their names. A slice that is lost has no holders.

    Attributes:
        absent: why a listed file cannot be read, by its name.
        lost: tensors with a slice in no readable file, by name.
        unplaced: tensors without a recorded layout, with the reason why they are not read, by name.
        placements: how tensors are laid out, by name.
        listed: names of the tensors in metadata.json; None without it.
        unlisted: tensors that it does not describe and that are taken as whole, with the files that hold them.
    """

    absent: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, LostTensor] = field(default_factory=dict)
    unplaced: Mapping[str, str] = field(default_factory=dict)
    placements: Mapping[str, TensorPlacement] = field(default_factory=dict)
    listed: Optional[frozenset[str]] = None
    unlisted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def equal(self) -> Sequence[Equal]:
        """Unlisted tensors that are taken as whole: each file's copy by itself."""
        return [
            Equal(
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
        first, *others = (tensor._replace(shardings=(FileSharding(grid, ((file,),)),)) for file in files)
        return first, tuple(others)

    def layouts(self) -> dict[RankList, dict[str, Layout]]:
        """How tensors are laid out over the ranks that the checkpoint was saved by.

        Returns:
            Per pipeline stage, by its ranks in the order of the device matrices, the layouts by name; stages
            in the order of their first ranks. A tensor that is whole on every rank is in each stage with such a
            rank. Tensors on only some of a stage's ranks are skipped.
        """
        found: dict[RankList, dict[str, Layout]] = {ranks: {} for ranks in _stages(self.placements.values())}
        members = {ranks: frozenset(ranks) for ranks in found}
        for name, placement in self.placements.items():
            if placement.layout is not None:
                if placement.ranks in found:
                    found[placement.ranks][name] = placement.layout
                continue
            for ranks, layouts in found.items():
                if not members[ranks].isdisjoint(placement.ranks):
                    layouts[name] = Layout((len(ranks),), ((),) * len(placement.grid.edges))
        return found

    def check(self, wanted: Optional[Callable[[str], bool]] = None) -> None:
        """Check that every needed tensor is completely readable.

        Args:
            wanted: whether a name is needed; by default all are.

        Raises:
            InputError: metadata and files contradict each other; lists all tensors concerned.
            IncompleteSourceError: slices are in no readable file; lists all tensors and files concerned.
        """
        super().check(wanted)
        lost = [item for item in self.lost.values() if wanted is None or wanted(item.name)]
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
            held = f"{some_names(files)} should hold" if files else "no file is recorded to hold"
            told = f"{plural(len(names), 'parameter')} with a slice in no readable file, which {held}: "
            lines.append(told + listing(names, _MOST_PATTERNS))
        needed = dict.fromkeys(name for files in by_files for name in files)
        return [*lines, *(Message(self.absent[name]) for name in needed if name in self.absent)]


def _stages(placements: Iterable[TensorPlacement]) -> list[RankList]:
    """The ranks of every pipeline stage, those of layouts first."""
    laid_out: set[RankList] = set()
    whole: set[RankList] = set()
    for placement in placements:
        (whole if placement.layout is None else laid_out).add(placement.ranks)
    stages = disjoint(laid_out)
    covered = {rank for stage in stages for rank in stage}
    return sorted([*stages, *disjoint(ranks for ranks in whole if covered.isdisjoint(ranks))], key=min)
