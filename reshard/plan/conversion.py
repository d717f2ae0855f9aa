"""The plan of a conversion: what each target file is made of.

1. Find the step to convert and read what its files hold (`selection`, `parameters`).
2. Sort the parameters: resharded, copied, left out, missing. Every problem is found here, before
   anything is written.
3. On demand, for one target rank at a time: cut every parameter into cells, take each cell from the
   rank that `ReplicaChoice` names (or another that has it), and lay out the file.

The plan of all ranks is never held as objects; `Conversion.target_file` makes one rank's.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Optional, TypeVar, Union
from weakref import WeakValueDictionary

from reshard.checkpoints import (
    FileHandles,
    FileNames,
    OutputTensor,
    Step,
    StepFiles,
    can_hold,
    find_checkpoints,
    format_of,
    lay_out_ckpt,
    lay_out_safetensors,
)
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import CheckpointError, IncompleteSourceError, InputError
from reshard.layout import Box, shape_of, volume_of
from reshard.name_filters import Filters
from reshard.plan.checks import check, problems_of_unlisted
from reshard.plan.copies import CopiedValue, CopiedValues
from reshard.plan.cuts import Cut, Cuts
from reshard.plan.groups import MOST_MEMBERS, reading_groups
from reshard.plan.parameters import Parameter
from reshard.plan.pieces import Piece, StoredSlice, TargetFile, TargetTensor
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.selection import Selection, StepSelector
from reshard.plan.source import SourceStep
from reshard.plan.target_tensors import Alike, FileOrder, Take, TargetTensors
from reshard.report import Report
from reshard.source_ranks import check_ranks
from reshard.storage import exists
from reshard.strategies import Stage, Strategy
from reshard.wording import quoted, rank_ranges


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        src: source tree, file or `{rank}` path, or the file of each rank.
        dst: target directory, or the exact file to write for the one rank asked for.
        source: strategy the checkpoint was saved with.
        target: strategy it is converted to.
        ranks: target ranks asked for, ascending; None for all.
        prefix: target file names begin so; None for the names of the source's files, where ranks stay the same.
        format: ``same``, ``ckpt`` or ``safetensors``.
        step: ``latest`` or ``<epoch>_<step>``.
        fallback: whether ``latest`` may be an older step than the newest, where that is not complete.
        file_suffix: only source files whose stem ends so.
        filters: which parameters are written.
        strict: missing parameters and unlisted tied ones are errors.
        exact_file: ``dst`` is the file itself.
        damaged: source files that count as absent whatever their headers say, and why, by path.
    """

    src: Union[str, Mapping[int, str]]
    dst: str
    source: Strategy
    target: Strategy
    ranks: Optional[tuple[int, ...]] = None
    prefix: Optional[str] = DEFAULT_PREFIX
    format: str = "same"
    step: str = "latest"
    fallback: bool = True
    file_suffix: Optional[str] = None
    filters: Filters = field(default_factory=Filters)
    strict: bool = False
    exact_file: bool = False
    damaged: Mapping[str, str] = field(default_factory=dict)


class Kind(NamedTuple):
    """Parameters that are cut alike and held by the same source ranks, and so are taken alike.

    Attributes:
        cut: how they are cut.
        present: the ranks that hold them, per source stage of the cut.
        item_size: bytes of an element.
        parameters: the parameters, sorted by name, at least one.
    """

    cut: Cut
    present: tuple[frozenset[int], ...]
    item_size: int
    parameters: list[Parameter]

    def box_of(self, local_rank: int) -> Box:
        """The slice of such a parameter that a local rank of the target stage gets."""
        return self.cut.target.slice_box(self.parameters[0].shape, self.cut.slice_of(local_rank))


@dataclass
class Sorted:
    """The parameters by what becomes of them.

    Attributes:
        resharded: in both strategies.
        left_out: only in the source's.
        missing: in the target's, but nowhere in the source files.
        unholdable: in the files, but the target format cannot hold them (text in safetensors).
    """

    resharded: list[str]
    left_out: list[str]
    missing: list[str]
    unholdable: list[str]


C = TypeVar("C", bound="Conversion")


def plan(request: Request, handles: FileHandles, report: Report) -> Conversion:
    """Plan a conversion from headers alone.

    Raises:
        ReshardError: the request cannot be met; nothing has been written.
    """
    return plan_as(Conversion, request, handles, report)


def plan_as(kind: type[C], request: Request, handles: FileHandles, report: Report) -> C:
    """Plan a kind of conversion from headers alone.

    Raises:
        ReshardError: the request cannot be met; nothing has been written.
    """
    choice = ReplicaChoice(request.source, request.target)
    selector = StepSelector(request.source, request.target, request.ranks, request.filters, handles, report)
    candidates, steps = _candidates(request, handles)
    selection = selector.select(_with_damage(candidates, request.damaged), steps)
    return kind(request, choice, selection, handles, report)


def _candidates(request: Request, handles: FileHandles) -> tuple[Iterable[StepFiles], Sequence[Optional[Step]]]:
    """The steps that may be taken, newest first, and all there are to choose from where the user named none."""
    if not isinstance(request.src, str):
        beyond = [rank for rank in request.src if not 0 <= rank < request.source.device_count]
        if beyond:
            raise CheckpointError(
                f"{rank_ranges(beyond)} given, but the source strategy has {request.source.device_count} devices",
                rank=beyond[0],
            )
        for rank, path in request.src.items():
            if not exists(path):
                raise CheckpointError(f"{path}: does not exist (rank {rank})", file=path, rank=rank)
        return [StepFiles(None, dict(request.src))], ()
    tree = find_checkpoints(request.src, request.file_suffix)
    check_ranks(tree, request.source, handles)
    candidates = tree.candidates(request.step)
    if request.step != "latest":
        return candidates, ()
    return candidates if request.fallback else itertools.islice(candidates, 1), tree.steps


def _with_damage(candidates: Iterable[StepFiles], damaged: Mapping[str, str]) -> Iterator[StepFiles]:
    """Candidates that know which of their files are damaged, given why, by path."""
    for candidate in candidates:
        known = {rank: damaged[path] for rank, path in candidate.files.items() if path in damaged}
        yield replace(candidate, damaged=known)


class Conversion:
    """A planned conversion.

    Attributes:
        request: what was asked for.
        step: the source files of the step that is converted.
        ranks: target ranks to write, ascending.
        format: format of the target files.
        names: their names.
        parameters: the source's parameters, as the files hold them, by name.
        copies: values that are copied as they are.
        stages: the target stages that these ranks are in, by number.
        sorted: the parameters by what becomes of them.
        most_together: target files that are written together at the most.
    """

    _of_several_formats = "choose the target's with --format ckpt or --format safetensors"

    def __init__(
        self,
        request: Request,
        choice: ReplicaChoice,
        selection: Selection,
        handles: FileHandles,
        report: Report,
    ) -> None:
        self.request = request
        self.step: SourceStep = selection.step
        self.ranks = request.ranks if request.ranks is not None else tuple(range(request.target.device_count))
        self._asked = self.ranks
        self._choice = choice
        self.parameters = selection.parameters
        self._report = report
        self._cuts = Cuts(request.target)
        self._kinds: dict[int, Sequence[Kind]] = {}
        self._orders: WeakValueDictionary[object, FileOrder] = WeakValueDictionary()
        self._last_order: Optional[FileOrder] = None
        self.most_together = MOST_MEMBERS
        self.format = self._format()
        self.names = self._names()
        self.copies = CopiedValues(
            request.source, request.target, self.step, selection.listed, request.filters, handles, report
        )
        self.stages = {request.target.stage_of(rank).number: request.target.stage_of(rank) for rank in self.ranks}
        self.sorted = self._sort(selection.listed)
        self.check()

    @property
    def copied(self) -> list[str]:
        """Names copied as they are to target ranks, sorted."""
        return [name for name in self.copies.names if name not in set(self.sorted.unholdable)]

    def path(self, rank: int) -> str:
        """The final name of a target rank's file."""
        if self.request.exact_file:
            return self.request.dst
        name = f"{self.names.of(rank)}.{self.format}"
        # The target directory may be a link, a directory in it may not.
        return os.path.join(self.request.dst if os.path.dirname(name) else os.path.realpath(self.request.dst), name)

    def target_groups(self) -> Iterator[list[TargetFile]]:
        """The plan of every target rank, made a group at a time; a group's files are written together."""
        yield from self.groups_of(self.ranks)

    def groups_of(self, ranks: Sequence[int], names: Optional[Collection[str]] = None) -> Iterator[list[TargetFile]]:
        """Like `target_groups`, of some of the target ranks, ascending, and of some parameters alone."""
        for members in self.reading_groups(ranks, self.most_together):
            yield [self.target_file(rank, names) for rank in members]

    def reading_groups(self, ranks: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
        """Some of the target ranks, ascending, in groups of ``most`` at the most that read the same rows."""
        for stage in self.stages.values():
            cuts = {kind.cut.number: kind.cut for kind in self.kinds_of(stage)}.values()
            yield from reading_groups(_ranks_of(stage, ranks), stage, cuts, most)

    def kinds_of(self, stage: Stage) -> Sequence[Kind]:
        """The parameters that a target stage gets, by kind."""
        if stage.number not in self._kinds:
            kinds: dict[tuple[object, ...], Kind] = {}
            for name in self.resharded_of(stage):
                parameter = self.parameters[name]
                cut = self.cut_of(name, stage)
                present = tuple(self.step.ranks_with(name, holding.stage) for holding in parameter.holdings)
                key = (cut.number, parameter.dtype, parameter.item_size, present)
                if key not in kinds:
                    kinds[key] = Kind(cut, present, parameter.item_size, [])
                kinds[key].parameters.append(parameter)
            self._kinds[stage.number] = tuple(kinds.values())
        return self._kinds[stage.number]

    def data_bytes(self) -> int:
        """Bytes of tensor contents in all target files together."""
        return sum(self.data_bytes_by_rank().values())

    def data_bytes_by_rank(self) -> dict[int, int]:
        """Bytes of tensor contents in the file of every target rank."""
        total = {rank: sum(value.tensor.nbytes for value in self.copied_values(rank)) for rank in self.ranks}
        for stage in self.stages.values():
            ranks = _ranks_of(stage, self.ranks)
            for kind in self.kinds_of(stage):
                for rank, nbytes in self.slice_bytes(kind, stage, ranks).items():
                    total[rank] += nbytes * len(kind.parameters)
        return total

    def slice_bytes(self, kind: Kind, stage: Stage, ranks: Iterable[int]) -> dict[int, int]:
        """Bytes of the slice of one parameter of a kind that each of some ranks of a target stage gets."""
        # Many ranks have the same slice.
        known: dict[int, int] = {}
        found = {}
        for rank in ranks:
            number = kind.cut.slice_of(rank - stage.first_rank)
            if number not in known:
                known[number] = volume_of(kind.box_of(rank - stage.first_rank)) * kind.item_size
            found[rank] = known[number]
        return found

    def file_bytes(self, ranks: Sequence[int]) -> dict[int, int]:
        """Size of the file of each of some target ranks; files of tensors of the same sizes are laid out once."""
        known: dict[object, int] = {}
        found = {}
        for stage in self.stages.values():
            for rank in _ranks_of(stage, ranks):
                copied = (value.tensor for value in self.copied_values(rank))
                key = (
                    stage.number,
                    tuple((tensor.name, tensor.dtype, tensor.dims, tensor.nbytes) for tensor in copied),
                    tuple(shape_of(kind.box_of(rank - stage.first_rank)) for kind in self.kinds_of(stage)),
                )
                if key not in known:
                    known[key] = self.target_file(rank).layout.size
                found[rank] = known[key]
        return found

    @functools.cached_property
    def _leaders(self) -> dict[int, int]:
        """The rank whose replicas each target rank prefers, because they read the same rows.

        It does not depend on which ranks are still to be written, nor on how many together: every part
        of a run reads the files that were chosen, and checked, for all of it.
        """
        groups = self.reading_groups(self._grouped(), MOST_MEMBERS)
        return {rank: members[0] for members in groups for rank in members}

    def _grouped(self) -> Sequence[int]:
        """Target ranks that may be written together, of those asked for, ascending."""
        return self._asked

    def target_file(self, rank: int, names: Optional[Collection[str]] = None) -> TargetFile:
        """What one target rank's file is made of.

        Args:
            rank: the target rank.
            names: only these parameters, and nothing that is copied; by default everything.
        """
        stage = self.request.target.stage_of(rank)
        leader = self._leaders[rank]
        base = [self._base(leader)] + ([self._base(rank)] if rank != leader else [])
        kinds = [kind for kind in self.kinds_of(stage) if names is None or _has_any(kind, names)]
        alike = [Alike(kind.item_size, *self._take(rank, leader, kind, base)) for kind in kinds]
        unholdable = set(self.sorted.unholdable)
        copied = self.copied_values(rank) if names is None else ()
        single = [value for value in copied if value.name not in unholdable]
        tensors = []
        for _, source, stored in single:
            box = ((0, stored.nbytes),)
            piece = Piece(StoredSlice(self.step.files[source], source, stored.extents, box), box)
            tensors.append(TargetTensor(stored.name, 1, box, (piece,) if stored.nbytes else ()))
        order = self._order(stage, kinds, [shape_of(one.box) for one in alike], single, names)
        ranks = {take.rank for one in alike for take in one.takes} | {value.rank for value in single}
        return TargetFile(
            rank,
            self.path(rank),
            order.layout,
            TargetTensors(order, alike, tensors, self._stored),
            frozenset(self.step.files[source] for source in ranks),
        )

    def copied_values(self, rank: int) -> list[CopiedValue]:
        """What a target rank gets as it is."""
        return self.copies.of(rank).values

    def _order(
        self,
        stage: Stage,
        kinds: Sequence[Kind],
        shapes: Sequence[tuple[int, ...]],
        single: Sequence[CopiedValue],
        names: Optional[Collection[str]],
    ) -> FileOrder:
        """How a file of these tensors is laid out; ranks of one stage mostly have the same, which they share."""
        copied = tuple((value.name, value.tensor.dtype, value.tensor.dims, value.tensor.nbytes) for value in single)
        key = (stage.number, tuple(shapes), copied, None if names is None else frozenset(names))
        found = self._orders.get(key)
        if found is None:
            found = self._orders[key] = self._make_order(kinds, shapes, single, names)
        # Others stay as long as a file that is being written has them.
        self._last_order = found
        return found

    def _make_order(
        self,
        kinds: Sequence[Kind],
        shapes: Sequence[tuple[int, ...]],
        single: Sequence[CopiedValue],
        names: Optional[Collection[str]],
    ) -> FileOrder:
        values = [stored for _, _, stored in single]
        entries = [
            (parameter.name, number)
            for number, kind in enumerate(kinds)
            for parameter in kind.parameters
            if names is None or parameter.name in names
        ]
        entries += ((stored.name, len(kinds) + number) for number, stored in enumerate(values))
        # Names decide the order, so that it does not depend on which source files are read; within
        # .safetensors wider elements come first, which keeps every tensor aligned.
        if self.format == "safetensors":
            widths = [kind.item_size if math.prod(shape) else 0 for kind, shape in zip(kinds, shapes)]
            widths += (stored.item_size if stored.nbytes and math.prod(stored.shape) else 0 for stored in values)
            entries.sort(key=lambda entry: (-widths[entry[1]], entry[0]))
        else:
            entries.sort(key=lambda entry: entry[0])
        sizes = [math.prod(shape) * kind.item_size for kind, shape in zip(kinds, shapes)]
        outputs = []
        for name, number in entries:
            if number < len(kinds):
                # Parameters of one kind are of one type.
                dtype = kinds[number].parameters[0].dtype
                outputs.append(OutputTensor(name, dtype, shapes[number], sizes[number]))
            else:
                stored = values[number - len(kinds)]
                dims = stored.dims if self.format == "ckpt" else stored.shape
                outputs.append(OutputTensor(name, stored.dtype, dims, stored.nbytes))
        layout = lay_out_safetensors(outputs) if self.format == "safetensors" else lay_out_ckpt(outputs)
        return FileOrder([name for name, _ in entries], array("I", (number for _, number in entries)), layout)

    def files_read(self) -> dict[str, bool]:
        """Source files with a checksum that are read, and whether all of their contents are.

        Only files that record a CRC matter here, so the plan of all targets is walked only where
        there are any.
        """
        recorded = {self.step.files[rank]: index for rank, index in self.step.indexes.items() if index.crc is not None}
        if not recorded:
            return {}
        used: dict[tuple[str, tuple[tuple[int, int], ...]], tuple[int, set[Box]]] = {}
        targets = (target for group in self.target_groups() for target in group)
        for target in targets:
            for tensor in target.tensors:
                for piece in tensor.pieces:
                    if piece.source.path in recorded:
                        entry = used.setdefault((piece.source.path, piece.source.extents), (tensor.item_size, set()))
                        entry[1].add(piece.box)
        # Copied values are compared over all files, so all of them are read.
        copied = set(self.copies.names)
        return {
            path: all(
                name in copied
                or tensor.nbytes == 0
                or _bytes_used(*used.get((path, tensor.extents), (0, set()))) >= tensor.nbytes
                for name, tensor in recorded[path].tensors.items()
            )
            for path in sorted({path for path, _ in used})
        }

    def _format(self) -> str:
        if self.request.format != "same":
            return self.request.format
        formats = {format_of(path): path for path in self.step.files.values()}
        if len(formats) > 1:
            raise CheckpointError(
                f"source files have different formats: {' and '.join(sorted(formats.values()))}",
                hint=self._of_several_formats,
            )
        return next(iter(formats))

    def _names(self) -> FileNames:
        return FileNames.numbered(DEFAULT_PREFIX if self.request.prefix is None else self.request.prefix)

    def resharded_of(self, stage: Stage) -> list[str]:
        """Names that a target stage gets, sorted."""
        if self.request.target.is_none:
            return self.sorted.resharded
        return [name for name in self.sorted.resharded if name in stage.layouts]

    def _sort(self, listed: set[str]) -> Sorted:
        target = self.request.target
        admit = self.request.filters.admit
        wanted = set().union(*(stage.layouts.keys() for stage in self.stages.values()))
        resharded = sorted(name for name in self.parameters if admit(name) and (target.is_none or name in wanted))
        left_out: list[str] = []
        if not target.is_none:
            everywhere = set().union(*(stage.layouts.keys() for stage in target.stages))
            left_out = sorted(name for name in listed & self.step.names() if name not in everywhere)
        copied = set(self.copies.names)
        # As a target, `none` wants whatever the source's files hold.
        asked = listed & self.step.names() if target.is_none else wanted
        missing = sorted(name for name in asked if admit(name) and name not in self.parameters and name not in copied)
        unholdable = sorted(
            name
            for name, tensor in self.copies.examples()
            if tensor.dtype == "str" and not can_hold(self.format, tensor.dtype)
        )
        return Sorted(resharded, left_out, missing, unholdable)

    def cut_of(self, name: str, stage: Stage) -> Cut:
        """How a parameter is cut for the ranks of a target stage.

        Raises:
            CheckpointError: the target layout does not fit it.
        """
        return self._cuts.of(self.parameters[name], stage)

    def check(self) -> None:
        """Find every problem there is before anything is written.

        Raises:
            InputError: all problems in one.
        """
        check(self, self._report)

    def problems_of_unlisted(self) -> list[InputError]:
        """Parameters that a stage's ranks hold although only another stage's strategy lists them."""
        return problems_of_unlisted(self, self._report)

    def _base(self, rank: int) -> tuple[int, ...]:
        try:
            return self._choice.ranks(rank, self.step.indexes)
        except IncompleteSourceError:
            # Something that the strategies list is not there; what the files hold was found complete.
            return ()

    def _take(self, rank: int, leader: int, kind: Kind, base: Sequence[Sequence[int]]) -> tuple[Box, tuple[Take, ...]]:
        """The target slice of a kind of parameter, and where each of its cells is taken from."""
        cut, shape = kind.cut, kind.parameters[0].shape
        number = cut.slice_of(rank - self.request.target.stage_of(rank).first_rank)
        turn = self._choice.turn(leader)
        takes = []
        for box, slices in cut.overlap.cells(number):
            holders: list[tuple[int, int]] = []
            for index, (holding, slice_number, ranks) in enumerate(zip(cut.holdings, slices, kind.present)):
                holders += [(held, index) for held in holding.ranks(slice_number) if held in ranks]
            if not holders:
                name = kind.parameters[0].name
                raise IncompleteSourceError(
                    f"a slice of {quoted(name)} for target rank {rank} is on no readable rank",
                    rank=rank,
                    parameter=name,
                )
            for chosen in base:
                preferred = [holder for holder in holders if holder[0] in chosen]
                if preferred:
                    source, index = preferred[(cut.number + turn) % len(preferred)]
                    break
            else:
                source, index = holders[turn % len(holders)]
            takes.append(Take(box, source, cut.holdings[index].layout.slice_box(shape, slices[index])))
        return kind.box_of(rank - self.request.target.stage_of(rank).first_rank), tuple(takes)

    def _stored(self, name: str, rank: int, box: Box) -> StoredSlice:
        return StoredSlice(self.step.files[rank], rank, self.step.indexes[rank].tensors[name].extents, box)


def _ranks_of(stage: Stage, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if rank in stage.ranks]


def _has_any(kind: Kind, names: Collection[str]) -> bool:
    return any(parameter.name in names for parameter in kind.parameters)


def _bytes_used(item_size: int, boxes: set[Box]) -> int:
    return item_size * sum(volume_of(box) for box in boxes)
