"""The plan of a recovery: the same layout, with lost slices from replicas.

An intact file, which holds everything that its stage has at this step, is copied byte for byte. Any other rank
gets the file that a conversion to the same strategy writes, each parameter from a rank with its slice. Ranks may
also hold parameters that only another stage's strategy lists (tied embeddings): these come from the rank's own
file, or from a rank with a certain replica.

Files have the names of the source, so that they can be copied back into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from reshard.checkpoints import FileHandles, files_alike
from reshard.errors import IncompleteSourceError, InputError
from reshard.forms.ranks.checkpoint import RankCheckpoint, rank_checkpoint_of
from reshard.forms.ranks.form import RankFiles, rank_names, target_format
from reshard.forms.request import Means, Request
from reshard.forms.target import TargetForm
from reshard.layout.candidates import cuts_of, possible_holders
from reshard.plan.checks import check
from reshard.plan.plan import Plan
from reshard.plan.planner import check_numbers, read_source, sort
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.values import CopiedValue, CopiedValues, same_value
from reshard.strategies import Stage
from reshard.text.messages import Report, listing, rank_ranges
from reshard.text.names import belongs_to_rank


def plan_recovery(request: Request, means: Means) -> Plan:
    """Plan a recovery from headers, and from the contents of copies that may be replicas.

    Raises:
        ReshardError: the request cannot be met; nothing has been written.
    """
    checkpoint = rank_checkpoint_of(read_source(request, means))
    assert checkpoint is not None
    recovery = Recovery(request, checkpoint, means.handles)
    files = RecoveredFiles(request, checkpoint, recovery)
    check_numbers(request, files)
    values = CopiedValues(request, checkpoint, files, means)
    values.warn_of_differing(means.report)
    treatment = sort(request, checkpoint, files, values)
    choice = ReplicaChoice(request.source, request.target)
    plan = Plan(request, checkpoint, files, partial(recovery.values_of, values=values), treatment, choice)
    check(plan, values, means.report, recovery.problems(plan.requested))
    recovery.note(plan.requested, files, values, means.report)
    return plan


class Recovery:
    """Intact files of ranks, and the contents of the others.

    Attributes:
        format: of the files to be written.
    """

    def __init__(self, request: Request, checkpoint: RankCheckpoint, handles: FileHandles) -> None:
        self._strategy = request.source
        self._checkpoint = checkpoint
        self.format = target_format(request.asked.target.format, checkpoint, recover=True)
        self._handles = handles
        self._admit = request.filters.admit
        self._lacked: dict[tuple[int, int], list[str]] = {}
        self._held: dict[int, tuple[Counter[str], int]] = {}
        self._holders: dict[tuple[str, int], dict[int, int]] = {}

    def intact(self, rank: int) -> bool:
        """Whether a rank's own file holds everything that its stage has at this step."""
        index = self._checkpoint.indexes.get(rank)
        if index is None or index.format != self.format:
            return False
        if self._strategy.is_none:
            return True
        stage = self._strategy.stage_of(rank)
        # Files with equal headers share their tensors, and one answer.
        key = (stage.number, id(index.tensors))
        if key not in self._lacked:
            counts, ranks = self._held_in(stage)
            required = {name for name in stage.layouts if name in self._checkpoint.tensors and self._admit(name)}
            required.update(name for name, count in counts.items() if ranks > 2 and count == ranks - 1)
            self._lacked[key] = sorted(required - index.tensors.keys())
        # Most .ckpt files leave out tensors without elements.
        return all(self._is_empty(name, rank, stage) for name in self._lacked[key])

    def _is_empty(self, name: str, rank: int, stage: Stage) -> bool:
        """Whether a rank's slice of a listed parameter has no elements."""
        layout = stage.layouts.get(name)
        if layout is None or name not in self._checkpoint.tensors:
            return False
        return 0 in self._checkpoint.tensors[name].shape or layout.is_empty_by_hand(rank - stage.first_rank)

    def problems(self, ranks: Sequence[int]) -> list[InputError]:
        """Unlisted parameters of lost ranks without a certain replica."""
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
                "and no surviving rank is certain to hold a replica",
                rank=min(nowhere),
                parameter=names[0],
                hint="recover the other ranks with --ranks",
            )
        ]

    def note(self, ranks: Sequence[int], files: TargetForm, values: CopiedValues, report: Report) -> None:
        """Note the new names of lost files; warn of contents that only lost ranks had."""
        lost = [rank for rank in ranks if not self.intact(rank)]
        unnamed = [rank for rank in lost if rank not in self._checkpoint.step_files.files]
        if files.names.own and unnamed:
            report.note(
                f"file names differ in their prefixes; {rank_ranges(unnamed)} gets the most frequent one: "
                f"{files.names.of(unnamed[0])}.{files.format}"
            )
        belonging = [name for name in values.names if belongs_to_rank(name)]
        if belonging and lost:
            report.warn(
                listing(belonging)
                + f" of {rank_ranges(lost)} belongs to the rank and is lost with it; the copy of another "
                "rank is written instead"
            )
        for stage in self._strategy.stages:
            if self._checkpoint.loaded(stage) or not set(lost).intersection(stage.ranks):
                continue
            # A stage holds unlisted copies of other stages' tied parameters.
            listed_names = {name for each in self._strategy.stages for name in each.layouts}
            unknown = sorted(name for name in listed_names - stage.layouts.keys() if self._admit(name))
            if unknown:
                report.warn(
                    f"{rank_ranges(stage.ranks)} may have held copies of " + listing(unknown) + ", as of tied "
                    "parameters; the strategy lists them for other stages only and no file of this stage is left, "
                    "so the new files lack them"
                )

    def values_of(self, rank: int, values: CopiedValues) -> list[CopiedValue]:
        """The copied entries of a rank: of a lost one also parameters that only another stage's strategy lists."""
        of_rank = values.of(rank)
        if self.intact(rank):
            return of_rank
        index = self._checkpoint.indexes.get(rank)
        if index is not None:
            # Its own file survives, but lacks other parameters.
            of_rank = [
                (rank, index.tensors[tensor.name]) if tensor.name in index.tensors else (holder, tensor)
                for holder, tensor in of_rank
            ]
        unlisted = [
            (holder, self._checkpoint.indexes[holder].tensors[name])
            for name, holder in self._unlisted(rank).items()
            if holder is not None
        ]
        return of_rank + unlisted

    def _held_in(self, stage: Stage) -> tuple[Counter[str], int]:
        """Per name the number of a stage's files that hold it, and the number of files."""
        if stage.number not in self._held:
            loaded = self._checkpoint.loaded(stage)
            counts: Counter[str] = Counter()
            for ranks in files_alike({rank: self._checkpoint.indexes[rank] for rank in loaded}):
                counts.update(dict.fromkeys(self._checkpoint.indexes[ranks[0]].tensors, len(ranks)))
            self._held[stage.number] = counts, len(loaded)
        return self._held[stage.number]

    def _unlisted(self, rank: int) -> dict[str, int | None]:
        """The rank whose copy a lost rank gets, per parameter that only another stage's strategy lists."""
        strategy = self._strategy
        stage = strategy.stage_of(rank)
        counts, ranks = self._held_in(stage)
        listed_elsewhere = {name for other in strategy.stages if other is not stage for name in other.layouts}
        # A parameter that other ranks of the stage lack may have been missing on the lost rank, too.
        least = 1 if self._checkpoint.deduplicated(stage) else max(1, ranks - 1)
        names = sorted(name for name in listed_elsewhere - stage.layouts.keys() if counts[name] >= least)
        return {name: self._unlisted_holder(name, rank, stage) for name in names}

    def _unlisted_holder(self, name: str, rank: int, stage: Stage) -> int | None:
        """The rank with a certain replica of a rank's tensor, itself first; None without one."""
        index = self._checkpoint.indexes.get(rank)
        if index is not None and name in index.tensors:
            return rank
        key = (name, stage.number)
        if key not in self._holders:
            self._holders[key] = self._holders_of(name, stage)
        return self._holders[key].get(rank)

    def _holders_of(self, name: str, stage: Stage) -> dict[int, int]:
        """Per rank of a stage a rank with a certain replica.

        No strategy records how the tensor is cut, and equal contents on some ranks prove no replica. But its
        slices follow some layout: where all layouts that fit the surviving files give a rank the slice of the
        same survivors, the rank held that slice.
        """
        holders = [rank for rank in self._checkpoint.loaded(stage) if name in self._checkpoint.indexes[rank].tensors]
        if not holders or name not in self._checkpoint.tensors:
            return {}
        full = self._checkpoint.tensors[name]
        shapes = {self._checkpoint.indexes[rank].tensors[name].shape for rank in holders}
        cuts = cuts_of(full.shape, shapes.pop()) if len(shapes) == 1 else None
        ways = None if cuts is None else possible_holders(stage.device_count, cuts)
        if not ways:
            return {}
        content = self._contents(name, holders)
        fitting = [way for way in ways if _explains(way, content, stage.first_rank)]
        replicas = {}
        for rank in stage.ranks:
            contents = {self._content_of(way, rank - stage.first_rank, content, stage.first_rank) for way in fitting}
            sole_content = contents.pop() if len(contents) == 1 else None
            if sole_content is not None:
                replicas[rank] = sole_content
        return replicas

    def _contents(self, name: str, holders: Sequence[int]) -> dict[int, int]:
        """Per rank the lowest rank that holds an equal tensor of this name."""
        first: list[int] = []
        equal: dict[int, int] = {}
        for rank in holders:
            replicas = (one for one in first if same_value(self._checkpoint, self._handles, name, one, rank))
            equal[rank] = next(replicas, rank)
            if equal[rank] == rank:
                first.append(rank)
        return equal

    @staticmethod
    def _content_of(way: Sequence[int], local: int, content: Mapping[int, int], first_rank: int) -> int | None:
        """The content, by its lowest holder, that one way gives a local rank; None where no survivor has it."""
        slice_number = way[local]
        return next((equal for rank, equal in content.items() if way[rank - first_rank] == slice_number), None)


class RecoveredFiles(RankFiles):
    """The files of all ranks; intact ones are copied. See `TargetForm`."""

    def __init__(self, request: Request, checkpoint: RankCheckpoint, recovery: Recovery) -> None:
        # Named as in the source, unless --prefix is given.
        prefix = request.asked.target.prefix
        names = checkpoint.step_files.names if prefix is None else None
        names = rank_names(prefix, checkpoint) if names is None else names
        super().__init__(request.target, checkpoint.tensors, recovery.format, names)
        self._recovery = recovery

    def copied_file(self, file: int) -> int | None:
        """The rank's own file, if it is intact."""
        return file if self._recovery.intact(file) else None


def _explains(way: Sequence[int], content: Mapping[int, int], first_rank: int) -> bool:
    """Whether ranks to which a way gives the same slice hold equal tensors."""
    of_slice: dict[int, int] = {}
    return all(of_slice.setdefault(way[rank - first_rank], equal) == equal for rank, equal in content.items())
