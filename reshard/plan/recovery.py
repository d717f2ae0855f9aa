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
from collections.abc import Mapping, Sequence
from typing import Optional

from reshard.checkpoints import FileHandles
from reshard.errors import IncompleteSourceError, InputError
from reshard.forms.ranks.checkpoint import RankCheckpoint
from reshard.forms.ranks.form import format_asked, rank_names
from reshard.forms.ranks.rank_files import RankFiles
from reshard.forms.target import TargetForm
from reshard.layout.candidates import cuts_of, possible_holders
from reshard.plan.request import Request
from reshard.plan.values import CopiedValue, CopiedValues, same_value
from reshard.strategies import Stage
from reshard.text.messages import listing
from reshard.text.names import belongs_to_rank
from reshard.text.report import Report
from reshard.text.wording import rank_ranges


class Recovery:
    """Which ranks' files are intact, and what the others held.

    Args:
        request: what was asked for; source and target strategy are the same.
        checkpoint: the files that are left.
        handles: open source files.

    Attributes:
        format: of the files to be written.
    """

    def __init__(self, request: Request, checkpoint: RankCheckpoint, handles: FileHandles) -> None:
        self._strategy = request.source
        self._checkpoint = checkpoint
        self._step = checkpoint.source
        self.format = format_asked(request.format, checkpoint, recover=True)
        self._handles = handles
        self._admit = request.filters.admit
        self._lacked: dict[tuple[int, int], list[str]] = {}
        self._held: dict[int, tuple[Counter[str], int]] = {}
        self._holders: dict[tuple[str, int], dict[int, int]] = {}

    def intact(self, rank: int) -> bool:
        """Whether a rank's own file holds all that its stage's ranks have to hold at this step."""
        index = self._step.indexes.get(rank)
        if index is None or index.format != self.format:
            return False
        if self._strategy.is_none:
            return True
        stage = self._strategy.stage_of(rank)
        # Files that are built alike share their tensors, so this is decided once for all of them.
        key = (stage.number, id(index.tensors))
        if key not in self._lacked:
            counts, ranks = self._held_in(stage)
            wanted = {name for name in stage.layouts if name in self._checkpoint.tensors and self._admit(name)}
            wanted.update(name for name, count in counts.items() if ranks > 2 and count == ranks - 1)
            self._lacked[key] = sorted(wanted - index.tensors.keys())
        # What has no elements is left out of most .ckpt files.
        return all(self._is_empty(name, rank, stage) for name in self._lacked[key])

    def _is_empty(self, name: str, rank: int, stage: Stage) -> bool:
        """Whether a rank's slice of what its stage lists has no elements."""
        layout = stage.layouts.get(name)
        if layout is None or name not in self._checkpoint.tensors:
            return False
        return 0 in self._checkpoint.tensors[name].shape or layout.is_empty_by_hand(rank - stage.first_rank)

    def problems(self, ranks: Sequence[int]) -> list[InputError]:
        """Unlisted parameters of lost ranks that nobody can be known to hold as they did."""
        nowhere: dict[int, list[str]] = {}
        for rank in ranks:
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

    def tell(self, ranks: Sequence[int], form: TargetForm, values: CopiedValues, report: Report) -> None:
        """Say how lost ranks' files are named, and what only the lost ranks knew."""
        lost = [rank for rank in ranks if not self.intact(rank)]
        unnamed = [rank for rank in lost if rank not in self._step.found.files]
        if form.names.own and unnamed:
            report.note(
                f"files are not named alike; {rank_ranges(unnamed)} gets a name as most have: "
                f"{form.names.of(unnamed[0])}.{form.format}"
            )
        own = [name for name in values.names if belongs_to_rank(name)]
        if own and lost:
            report.warn(
                listing(own) + f" of {rank_ranges(lost)} belongs to the rank and is lost with it; the copy of another "
                "rank is written instead"
            )
        for stage in self._strategy.stages:
            if self._step.loaded(stage) or not set(lost).intersection(stage.ranks):
                continue
            # Of other stages' parameters a stage holds copies, unlisted, of those that are tied.
            listed = {name for other in self._strategy.stages for name in other.layouts}
            unknown = sorted(name for name in listed - stage.layouts.keys() if self._admit(name))
            if unknown:
                report.warn(
                    f"no rank is left to tell whether {rank_ranges(stage.ranks)} held " + listing(unknown) + ", which "
                    "the strategy lists for other stages only, as it does tied parameters; their files are written "
                    "without"
                )

    def values_of(self, rank: int, values: list[CopiedValue]) -> list[CopiedValue]:
        """What a lost rank gets as it is: what no strategy lists, given, and what only another stage's does."""
        index = self._step.indexes.get(rank)
        if index is not None:
            # Its own file lacks something else.
            values = [
                CopiedValue(value.name, rank, index.tensors[value.name]) if value.name in index.tensors else value
                for value in values
            ]
        found = [
            CopiedValue(name, holder, self._step.indexes[holder].tensors[name])
            for name, holder in self._unlisted(rank).items()
            if holder is not None
        ]
        return values + found

    def _held_in(self, stage: Stage) -> tuple[Counter[str], int]:
        """How many files of a stage hold each name, and how many files there are."""
        if stage.number not in self._held:
            loaded = self._step.loaded(stage)
            alike = Counter(id(self._step.indexes[rank].tensors) for rank in loaded)
            examples = {id(self._step.indexes[rank].tensors): self._step.indexes[rank].tensors for rank in loaded}
            counts: Counter[str] = Counter()
            for key, count in alike.items():
                counts.update(dict.fromkeys(examples[key], count))
            self._held[stage.number] = counts, len(loaded)
        return self._held[stage.number]

    def _unlisted(self, rank: int) -> dict[str, Optional[int]]:
        """What ranks of a lost rank's stage hold and only another stage's strategy lists: whose copy it gets."""
        strategy = self._strategy
        stage = strategy.stage_of(rank)
        counts, ranks = self._held_in(stage)
        listed = {name for other in strategy.stages if other is not stage for name in other.layouts}
        # What not all the others hold need not have been on the lost one, unless no rank holds all it had.
        least = 1 if self._step.deduplicated(stage) else max(1, ranks - 1)
        names = sorted(name for name in listed - stage.layouts.keys() if counts[name] >= least)
        return {name: self._unlisted_holder(name, rank, stage) for name in names}

    def _unlisted_holder(self, name: str, rank: int, stage: Stage) -> Optional[int]:
        """The rank whose tensor is what a rank must have held, itself first; None where none is known to be."""
        own = self._step.indexes.get(rank)
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
        holders = [rank for rank in self._step.loaded(stage) if name in self._step.indexes[rank].tensors]
        if not holders or name not in self._checkpoint.tensors:
            return {}
        full = self._checkpoint.tensors[name]
        shapes = {self._step.indexes[rank].tensors[name].shape for rank in holders}
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
            equal[rank] = next(
                (other for other in first if same_value(self._checkpoint, self._handles, name, other, rank)), rank
            )
            if equal[rank] == rank:
                first.append(rank)
        return equal

    @staticmethod
    def _content_of(way: Sequence[int], local: int, content: Mapping[int, int], first_rank: int) -> Optional[int]:
        """The content, by its lowest holder, that one way gives a local rank; None where no survivor has it."""
        return next((equal for rank, equal in content.items() if way[rank - first_rank] == way[local]), None)


class RecoveredFiles(RankFiles):
    """The files of all ranks, of which intact ones are taken over; see `TargetForm`.

    Args:
        request: what was asked for.
        checkpoint: the files that are left.
        recovery: which of them are intact.
    """

    def __init__(self, request: Request, checkpoint: RankCheckpoint, recovery: Recovery) -> None:
        # Named as in the source, unless another prefix was asked for.
        names = checkpoint.source.found.names if request.prefix is None else None
        names = rank_names(request.prefix, checkpoint) if names is None else names
        super().__init__(request.target, checkpoint.tensors, recovery.format, names)
        self._recovery = recovery

    def taken_over(self, file: int) -> Optional[int]:
        """A rank's own file where it is intact."""
        return file if self._recovery.intact(file) else None


class ValuesOfRecovery:
    """Values of a recovery; see `plan.ValuesOfFiles`.

    Args:
        values: those that every rank gets.
        recovery: what lost ranks held besides.
    """

    def __init__(self, values: CopiedValues, recovery: Recovery) -> None:
        self._values = values
        self._recovery = recovery

    def of(self, file: int) -> list[CopiedValue]:
        """What one rank gets."""
        values = self._values.of(file)
        return values if self._recovery.intact(file) else self._recovery.values_of(file, values)


def _explains(way: Sequence[int], content: Mapping[int, int], first_rank: int) -> bool:
    """Whether ranks to which a way gives the same slice hold equal tensors."""
    of_slice: dict[int, int] = {}
    return all(of_slice.setdefault(way[rank - first_rank], equal) == equal for rank, equal in content.items())
