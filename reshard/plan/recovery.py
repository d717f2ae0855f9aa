"""The plan of a recovery: the same layout again, with what is lost made from replicas.

A rank whose file holds everything that its stage has at this step keeps that file, byte for byte,
whatever else it holds. Any other rank gets the file that a conversion to the same strategy would
write, parameter by parameter from whichever ranks have its slices; and what ranks of its stage hold
although only another stage's strategy lists it (tied embeddings): its own, where its file has it, or
that of a rank that is known to hold the same.

Files are named as in the source, so that they can be put back into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Optional

from reshard.checkpoints import FileHandles, FileNames, lay_out_copy
from reshard.errors import IncompleteSourceError, InputError
from reshard.layout.candidates import cuts_of, possible_holders
from reshard.messages import listing
from reshard.names import belongs_to_rank
from reshard.plan.conversion import Conversion, Request
from reshard.plan.copies import CopiedValue
from reshard.plan.pieces import Piece, StoredSlice, TargetFile, TargetTensor
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.selection import Selection
from reshard.report import Report
from reshard.strategies import Stage
from reshard.wording import rank_ranges


class Recovery(Conversion):
    """A planned recovery; source and target strategy are the same."""

    _of_several_formats = (
        "name the files of one format, as in 'ckpt/rank_{rank}/*.ckpt'; ranks that have none then count as lost"
    )

    def __init__(
        self, request: Request, choice: ReplicaChoice, selection: Selection, handles: FileHandles, report: Report
    ) -> None:
        self._lacked: dict[tuple[int, int], list[str]] = {}
        self._held: dict[int, tuple[Counter[str], int]] = {}
        self._holders: dict[tuple[str, int], dict[int, int]] = {}
        super().__init__(request, choice, selection, handles, report)

    def intact(self, rank: int) -> bool:
        """Whether a rank's own file holds all that its stage's ranks have to hold at this step."""
        index = self.step.indexes.get(rank)
        if index is None or index.format != self.format:
            return False
        if self.request.source.is_none:
            return True
        stage = self.request.source.stage_of(rank)
        # Files that are built alike share their tensors, so this is decided once for all of them.
        key = (stage.number, id(index.tensors))
        if key not in self._lacked:
            counts, ranks = self._held_in(stage)
            wanted = {*self.resharded_of(stage)}
            wanted.update(name for name, count in counts.items() if ranks > 2 and count == ranks - 1)
            self._lacked[key] = sorted(wanted - index.tensors.keys())
        # What has no elements is left out of most .ckpt files.
        return all(self._is_empty(name, rank, stage) for name in self._lacked[key])

    def _names(self) -> FileNames:
        """Names as in the source, lost ranks' as their siblings have, unless others were asked for."""
        found = self.step.found.names
        return super()._names() if found is None or self.request.prefix is not None else found

    def _is_empty(self, name: str, rank: int, stage: Stage) -> bool:
        """Whether a rank's slice of what its stage lists has no elements."""
        layout = stage.layouts.get(name)
        if layout is None or name not in self.parameters:
            return False
        return 0 in self.parameters[name].shape or layout.is_empty_by_hand(rank - stage.first_rank)

    @property
    def lost(self) -> list[int]:
        """Ranks without an intact file, ascending."""
        return [rank for rank in range(self.request.source.device_count) if not self.intact(rank)]

    def check(self) -> None:
        """Find every problem before anything is written, and say what only the lost ranks knew."""
        super().check()
        lost = [rank for rank in self.ranks if not self.intact(rank)]
        unnamed = [rank for rank in lost if rank not in self.step.found.files]
        if self.names.own and unnamed:
            self._report.note(
                f"files are not named alike; {rank_ranges(unnamed)} gets a name as most have: "
                f"{self.names.of(unnamed[0])}.{self.format}"
            )
        own = [name for name in self.copies.names if belongs_to_rank(name)]
        if own and lost:
            self._report.warn(
                listing(own) + f" of {rank_ranges(lost)} belongs to the rank and is lost with it; the copy of another "
                "rank is written instead"
            )

    def problems_of_unlisted(self) -> list[InputError]:
        """Unlisted parameters of lost ranks that nobody can be known to hold as they did."""
        nowhere: dict[int, list[str]] = {}
        for rank in self.ranks:
            if not self.intact(rank):
                names = [name for name, holder in self._unlisted(rank).items() if holder is None]
                if names:
                    nowhere[rank] = names
        if not nowhere:
            return []
        names = sorted(set().union(*nowhere.values()))
        return [
            IncompleteSourceError(
                f"{rank_ranges(nowhere)} held " + listing(names) + ", which the strategy lists for another stage only, "
                "and of no rank that is left it is certain that it holds the same",
                rank=min(nowhere),
                parameter=names[0],
                hint="recover the other ranks with --ranks",
            )
        ]

    def copied_values(self, rank: int) -> list[CopiedValue]:
        """What a rank gets as it is: what no strategy lists, and what only another stage's does."""
        values = super().copied_values(rank)
        if self.intact(rank):
            return values
        index = self.step.indexes.get(rank)
        if index is not None:
            # Its own file lacks something else.
            values = [
                CopiedValue(value.name, rank, index.tensors[value.name]) if value.name in index.tensors else value
                for value in values
            ]
        found = [
            CopiedValue(name, holder, self.step.indexes[holder].tensors[name])
            for name, holder in self._unlisted(rank).items()
            if holder is not None
        ]
        return values + found

    def target_groups(self) -> Iterator[list[TargetFile]]:
        """Lost ranks' files like a conversion's; then the intact ones, each by itself."""
        yield from self.groups_of([rank for rank in self.ranks if not self.intact(rank)])
        for rank in self.ranks:
            if self.intact(rank):
                yield [self.target_file(rank)]

    def _grouped(self) -> Sequence[int]:
        return [rank for rank in self._asked if not self.intact(rank)]

    def target_file(self, rank: int, names: Optional[Collection[str]] = None) -> TargetFile:
        """What one rank's file is made of."""
        if not self.intact(rank):
            return super().target_file(rank, names)
        index = self.step.indexes[rank]
        box = ((0, index.size),)
        source = StoredSlice(index.path, rank, ((0, index.size),), box)
        pieces = (Piece(source, box),) if index.size else ()
        whole = TargetTensor(index.path, 1, box, pieces)
        return TargetFile(rank, self.path(rank), lay_out_copy(index.size), (whole,), frozenset([index.path]))

    def data_bytes_by_rank(self) -> dict[int, int]:
        """Bytes of every rank's file, of tensor contents where it is made anew."""
        sizes = super().data_bytes_by_rank()
        return {rank: self.step.indexes[rank].size if self.intact(rank) else size for rank, size in sizes.items()}

    def file_bytes(self, ranks: Sequence[int]) -> dict[int, int]:
        """Size of the file of each of some ranks."""
        sizes = super().file_bytes([rank for rank in ranks if not self.intact(rank)])
        return {rank: sizes[rank] if rank in sizes else self.step.indexes[rank].size for rank in ranks}

    def _held_in(self, stage: Stage) -> tuple[Counter[str], int]:
        """How many files of a stage hold each name, and how many files there are."""
        if stage.number not in self._held:
            loaded = self.step.loaded(stage)
            alike = Counter(id(self.step.indexes[rank].tensors) for rank in loaded)
            examples = {id(self.step.indexes[rank].tensors): self.step.indexes[rank].tensors for rank in loaded}
            counts: Counter[str] = Counter()
            for key, count in alike.items():
                counts.update(dict.fromkeys(examples[key], count))
            self._held[stage.number] = counts, len(loaded)
        return self._held[stage.number]

    def _unlisted(self, rank: int) -> dict[str, Optional[int]]:
        """What ranks of a lost rank's stage hold and only another stage's strategy lists: whose copy it gets."""
        strategy = self.request.source
        stage = strategy.stage_of(rank)
        counts, ranks = self._held_in(stage)
        listed = {name for other in strategy.stages if other is not stage for name in other.layouts}
        # What not all the others hold need not have been on the lost one, unless no rank holds all it had.
        least = 1 if self.step.deduplicated(stage) else max(1, ranks - 1)
        names = sorted(name for name in listed - stage.layouts.keys() if counts[name] >= least)
        return {name: self._unlisted_holder(name, rank, stage) for name in names}

    def _unlisted_holder(self, name: str, rank: int, stage: Stage) -> Optional[int]:
        """The rank whose tensor is what a rank must have held, itself first; None where none is known to be."""
        own = self.step.indexes.get(rank)
        if own is not None and name in own.tensors:
            return rank
        key = (name, stage.number)
        if key not in self._holders:
            self._holders[key] = self._holders_of(name, stage)
        return self._holders[key].get(rank)

    def _holders_of(self, name: str, stage: Stage) -> dict[int, int]:
        """Per rank of a stage a rank whose tensor it must hold too, as far as that is known for certain.

        Nothing records how the tensor is cut; that some ranks agree proves nothing. But its slices follow
        some layout: where all layouts that what is left allows give a rank the slice of the same
        survivors, it held that.
        """
        holders = [rank for rank in self.step.loaded(stage) if name in self.step.indexes[rank].tensors]
        if not holders or name not in self.parameters:
            return {}
        full = self.parameters[name]
        shapes = {self.step.indexes[rank].tensors[name].shape for rank in holders}
        cuts = cuts_of(full.shape, shapes.pop()) if len(shapes) == 1 else None
        ways = None if cuts is None else possible_holders(stage.device_count, cuts)
        if not ways:
            return {}
        content = self._contents(name, holders)
        fitting = [way for way in ways if _explains(way, content, stage.first_rank)]
        known = {}
        for rank in stage.ranks:
            same = {self._content_of(way, rank - stage.first_rank, content, stage.first_rank) for way in fitting}
            only = same.pop() if len(same) == 1 else None
            if only is not None:
                known[rank] = only
        return known

    def _contents(self, name: str, holders: Sequence[int]) -> dict[int, int]:
        """Per rank the lowest rank that holds an equal tensor of this name."""
        first: list[int] = []
        equal: dict[int, int] = {}
        for rank in holders:
            equal[rank] = next((other for other in first if self.copies.same(name, other, rank)), rank)
            if equal[rank] == rank:
                first.append(rank)
        return equal

    @staticmethod
    def _content_of(way: Sequence[int], local: int, content: Mapping[int, int], first_rank: int) -> Optional[int]:
        """The content, by its lowest holder, that one way gives a local rank; None where no survivor has it."""
        return next((equal for rank, equal in content.items() if way[rank - first_rank] == way[local]), None)


def _explains(way: Sequence[int], content: Mapping[int, int], first_rank: int) -> bool:
    """Whether ranks to which a way gives the same slice hold equal tensors."""
    of_slice: dict[int, int] = {}
    return all(of_slice.setdefault(way[rank - first_rank], equal) == equal for rank, equal in content.items())
