"""The contents of an iteration, from its metadata and the headers of its files.

A tensor is read if both agree. A contradiction is an error of that tensor alone, raised only if the tensor is
needed. Known defects of MindFormers' writers are repaired if the data exists.

Optimizer states: MindSpore's compiler finds the parameter of a state by a few prefixes. FusedAdamW's prefix
(``exp_avg.``) is missing there: the compiler lays out its states of all pipeline stages over the ranks of the last
stage, but the files of their parameter's stage hold them. MindFormers up to 2.0 may not list a state at all. If
listed files are missing, another rank's own file may hold the slice.

Unlisted tensors: MindSpore's compiler lays out trained parameters. Other parameters, and the optimizer's values, are
unlisted in the files of every rank, and no record shows whether such a parameter is whole or cut. It counts as whole
only if its values prove it: a rank's slice of a cut tensor differs from that of its neighbour along an axis that cuts
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from reshard.checkpoints.checkpoint import FileSharding, GlobalTensor, TiedTensors
from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.tensors import Tensor
from reshard.errors import CheckpointError, InputError
from reshard.forms.checkpoint2.metadata import Chunks, Metadata, TensorRecord
from reshard.forms.checkpoint2.placing import (
    IterationFiles,
    Placer,
    RankList,
    TensorPlacement,
    disjoint,
    rank_lists,
    ranks_of_files,
)
from reshard.forms.recorded import tensor_fault
from reshard.forms.request import Means
from reshard.layout import Grid
from reshard.storage import read_range, reading
from reshard.text.messages import as_pattern, listing, plural, some_names
from reshard.text.names import ACCUMULATED_GRADIENTS, is_value, is_weight, state_prefix
from reshard.threads import cached_property


class Remark(Enum):
    """Warnings about tensors that differ from metadata."""

    WITHOUT_DATA = "listed, but in no file (a defect of MindFormers up to 2.0 in pipelines); skipped"
    MOVED = (
        "recorded for files of another pipeline stage, as MindFormers does with FusedAdamW; read from the files of "
        "their parameters' stage"
    )
    MISNUMBERED = "slices numbered wrongly, as MindFormers does where the ranks of a layout have gaps; read by rank"
    OUTSIDE = "listed for files of ranks outside the layout; these copies are skipped"
    REPLACED = "read from unlisted files, because the listed ones are unreadable"
    STATE = "unlisted states of the optimizer; read with the layouts of their parameters"
    WHOLE = "not listed, but in the files of all ranks with the same values; read as whole"


class LostTensor(NamedTuple):
    """A tensor with a slice in no readable file: how many are lost, and the recorded files of these, sorted."""

    name: str
    slices: int
    files: tuple[str, ...]


@dataclass
class IterationContents:
    """The contents of an iteration; attributes as in `Checkpoint2`."""

    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    without_layouts: set[str] = field(default_factory=set)
    lost: dict[str, LostTensor] = field(default_factory=dict)
    faults: dict[str, InputError] = field(default_factory=dict)
    unplaced: dict[str, str] = field(default_factory=dict)
    placements: dict[str, TensorPlacement] = field(default_factory=dict)
    tied: list[TiedTensors] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, placement: TensorPlacement) -> None:
        grid = placement.grid
        if placement.layout is None and is_loose(name, grid.shape):
            self.plain.add(name)
            return
        self.placements[name] = placement
        self.tensors[name] = GlobalTensor(name, tensor.dtype, tensor.item_size, grid.shape, (placement.sharding,))


def is_loose(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor without a layout is a value such as ``global_step``, not a parameter."""
    return math.prod(shape) == 1 and is_value(name, 1)


def whole_contents(files: IterationFiles) -> IterationContents:
    """The contents of a single rank's files: whole tensors."""
    contents = IterationContents()
    for number, index in files.indexes.items():
        for name, tensor in index.tensors.items():
            if name in contents.placements:
                first_path = files.paths[contents.placements[name].readable[0][0]]
                problem = f"is in {first_path}, too, and it is unknown which is right"
                contents.faults[name] = tensor_fault(index.path, name, problem)
                continue
            contents.add(name, tensor, TensorPlacement.whole(tensor.shape, [number], [0]))
    for name in contents.faults:
        del contents.tensors[name], contents.placements[name]
    return contents


class LaidOutContents:
    """Reads the contents of the files by metadata."""

    def __init__(self, metadata: Metadata, files: IterationFiles, means: Means) -> None:
        self._metadata = metadata
        self._files = files
        self._means = means
        self._placer = Placer(metadata, files)
        self._elsewhere = Elsewhere(metadata, files, self._placer)
        self._contents = IterationContents()
        # Names by warning.
        self._remarks: dict[Remark, list[str]] = {}

    def read(self) -> IterationContents:
        for name in self._metadata.tensors:
            try:
                self._read(name)
            except InputError as error:
                self._contents.faults[name] = error
        for name, holders in sorted(self._unlisted().items()):
            try:
                self._read_unlisted(name, holders)
            except InputError as error:
                self._contents.faults[name] = error
        self._report_remarks()
        placements = self._contents.placements
        self._contents.without_layouts = {
            name for name in placements if placements[name].layout is None and is_weight(name, placements)
        }
        return self._contents

    def _read(self, name: str) -> None:
        placement = self._placer.place(name)
        tensor = self._placer.tensor(name, placement.contents, placement.grid)
        lacking = [file for file in placement.contents if name not in self._files.indexes[file].tensors]
        if lacking and tensor is None and name.startswith(ACCUMULATED_GRADIENTS):
            self._remark(Remark.WITHOUT_DATA, name)
            return
        moved = self._elsewhere.moved(name) if tensor is None else None
        if moved is not None:
            placement = moved
            tensor = self._placer.tensor(name, placement.contents, placement.grid)
            self._remark(Remark.MOVED, name)
        elif lacking:
            raise self._missing_in_files(name, lacking)
        if placement.misnumbered:
            self._remark(Remark.MISNUMBERED, name)
        if placement.lost:
            placement, tensor = self._replaced(name, placement, tensor)
        elif placement.outside:
            self._remark(Remark.OUTSIDE, name)
        if tensor is not None:
            self._contents.add(name, tensor, placement)

    def _missing_in_files(self, name: str, lacking: Sequence[int]) -> CheckpointError:
        files = some_names([self._files.names[file] for file in lacking], 2)
        problem = f"is not in {files}, for which metadata.json lists it"
        return tensor_fault(self._files.paths[lacking[0]], name, problem, "take the files of one save")

    def _replaced(
        self, name: str, placement: TensorPlacement, tensor: Tensor | None
    ) -> tuple[TensorPlacement, Tensor | None]:
        """A placement with missing slices, completed from other files."""
        replacements = self._elsewhere.replacements(name, placement)
        if replacements:
            files = [file for holders in replacements.values() for file in holders]
            replacement = self._placer.tensor(name, files, placement.grid)
            assert replacement is not None
            if tensor is not None and not tensor.same_type(replacement):
                raise self._missing_in_files(name, files)
            tensor = tensor or replacement
            readable = tuple(tuple(replacements.get(number, files)) for number, files in enumerate(placement.readable))
            more = () if placement.layout is None else ((file, self._elsewhere.rank_of[file]) for file in files)
            placement = replace(placement, readable=readable, rank_of=(*placement.rank_of, *more))
            self._remark(Remark.REPLACED, name)
        lost = placement.lost
        if lost:
            recorded_files = {file for number in lost for file in placement.recorded[number]}
            self._contents.lost[name] = LostTensor(
                name, len(lost), tuple(self._files.names[file] for file in sorted(recorded_files))
            )
        return placement, tensor

    def _unlisted(self) -> dict[str, list[int]]:
        holders: dict[str, list[int]] = {}
        names: dict[int, list[str]] = {}
        for file, index in self._files.indexes.items():
            contents = id(index.tensors)
            if contents not in names:
                names[contents] = [name for name in index.tensors if name not in self._metadata.tensors]
            for name in names[contents]:
                holders.setdefault(name, []).append(file)
        return holders

    def _read_unlisted(self, name: str, holders: Sequence[int]) -> None:
        tensor = self._files.indexes[holders[0]].tensors[name]
        if math.prod(tensor.shape) == 1:
            self._contents.plain.add(name)
            return
        placement = self._elsewhere.unlisted(name, holders)
        is_whole = placement is None
        if placement is not None:
            if placement.lost:
                placement, _ = self._replaced(name, placement, tensor)
            self._remark(Remark.STATE, name)
        else:
            why = doubt_of(name, holders, self._files, self._elsewhere.rank_of, self._stages, self._means.handles)
            if why is not None:
                self._contents.unplaced[name] = why
                return
            placement = TensorPlacement.whole(
                tensor.shape, holders, (self._elsewhere.rank_of[file] for file in holders)
            )
            self._remark(Remark.WHOLE, name)
        self._placer.tensor(name, holders, placement.grid)
        self._contents.add(name, tensor, placement)
        if is_whole and len(holders) > 1:
            self._contents.tied.append(self._whole_copies(name, holders))

    def _whole_copies(self, name: str, holders: Sequence[int]) -> TiedTensors:
        """The copies of an unlisted tensor that counts as whole, each file's by itself."""
        tensor = self._contents.tensors[name]
        grid = Grid.whole(tensor.shape)
        first, *copies = (tensor._replace(shardings=(FileSharding(grid, ((file,),)),)) for file in holders)
        reason = "metadata.json does not list it: its layout is unknown"
        return TiedTensors(first, tuple(copies), reason, f"leave it out: --exclude {as_pattern(name)}")

    @cached_property
    def _stages(self) -> list[RankList]:
        return disjoint(rank_lists(self._metadata))

    def _remark(self, remark: Remark, name: str) -> None:
        self._remarks.setdefault(remark, []).append(name)

    def _report_remarks(self) -> None:
        path, report = self._metadata.path, self._means.report
        for remark, names in self._remarks.items():
            text = f"{path}: {remark.value} ({plural(len(names), 'parameter')}): " + listing(names)
            (report.note if remark is Remark.WITHOUT_DATA else report.warn)(text)
        by_reason: dict[str, list[str]] = {}
        for name, why in self._contents.unplaced.items():
            by_reason.setdefault(why, []).append(name)
        for why, names in by_reason.items():
            report.warn(
                f"{path}: not listed, so its layout is unknown, and {why}; skipped "
                f"({plural(len(names), 'parameter')}): " + listing(names)
            )


class Elsewhere:
    """Finds slices in unlisted files."""

    def __init__(self, metadata: Metadata, files: IterationFiles, placer: Placer) -> None:
        self._metadata = metadata
        self._files = files
        self._placer = placer

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that wrote a file, by holder number, where known."""
        return ranks_of_files(self._metadata, self._files)

    def moved(self, name: str) -> TensorPlacement | None:
        """The layout of a state over its parameter's ranks, if only files of these ranks hold it."""
        record = self._metadata.tensors[name]
        owner = self._owner(name)
        if owner is None or owner.layout is None or record.layout is None:
            return None
        ranks = owner.layout.rank_list
        # A state with its parameter's shape has the parameter's layout.
        alike = record.layout._replace(rank_list=ranks) == owner.layout
        if ranks == record.layout.rank_list or (owner.shape == record.shape and not alike):
            return None
        return self._placed(name, record._replace(layout=record.layout._replace(rank_list=ranks)), self._holders(name))

    def unlisted(self, name: str, holders: Sequence[int]) -> TensorPlacement | None:
        """The layout of its parameter for an unlisted optimizer state; None if its files do not fit."""
        owner = self._owner(name) if state_prefix(name, self._metadata.tensors) else None
        if owner is None or owner.layout is None:
            return None
        placement = self._placed(name, TensorRecord("", owner.shape, None, owner.layout, Chunks((), ())), holders)
        if placement is None:
            return None
        shapes = {self._files.indexes[file].tensors[name].shape for file in holders}
        return placement if shapes == {placement.slice_shape} else None

    def replacements(self, name: str, placement: TensorPlacement) -> dict[int, list[int]]:
        """Unlisted files that hold a lost slice of a tensor, by the slice's number."""
        holders: dict[int, list[int]] = {}
        positions = {rank: position for position, rank in enumerate(placement.ranks)}
        for file in self._holders(name):
            position = positions.get(self.rank_of.get(file, -1))
            if position is not None:
                number = 0 if placement.layout is None else int(placement.layout.slice_of_rank[position])
                holders.setdefault(number, []).append(file)
        return {number: holders[number] for number in placement.lost if number in holders}

    def _placed(self, name: str, record: TensorRecord, holders: Sequence[int]) -> TensorPlacement | None:
        assert record.layout is not None
        ranks = [self.rank_of.get(file, -1) for file in holders]
        if not holders or not set(ranks) <= set(record.layout.rank_list):
            return None
        return self._placer.place_by_rank(name, record, dict(zip(holders, ranks)))

    def _holders(self, name: str) -> list[int]:
        return [file for file, index in self._files.indexes.items() if name in index.tensors]

    def _owner(self, name: str) -> TensorRecord | None:
        """The metadata of a state's parameter; None without one."""
        tensors = self._metadata.tensors
        return next((tensors[owner] for owner in _owners(name) if owner in tensors), None)


def _owners(name: str) -> Iterator[str]:
    """Possible names of a state's parameter, the longest first."""
    position = name.find(".")
    while position >= 0:
        yield name[position + 1 :]
        position = name.find(".", position + 1)


# Read of a file: all, or pieces at equal distances.
_SAMPLE = 1 << 16
_PIECES = 16


def doubt_of(
    name: str,
    holders: Sequence[int],
    files: IterationFiles,
    rank_of: dict[int, int],
    stages: Sequence[RankList],
    handles: FileHandles,
) -> str | None:
    """Why it is unknown whether a tensor of several elements is whole in every file that holds it; None if it is.

    Args:
        name: of the tensor.
        holders: the files that hold it.
        files: all files.
        rank_of: the rank of each file, where known.
        stages: the ranks of every pipeline stage, in the order of the device matrices.
        handles: open files.
    """
    tensors = [files.indexes[file].tensors[name] for file in holders]
    if len({(tensor.dtype, tensor.shape) for tensor in tensors}) > 1:
        return "its shapes differ"
    if not tensors[0].nbytes:
        return "it has no elements"
    by_rank = {rank_of[file]: file for file in holders if file in rank_of}
    if len(by_rank) < len(holders):
        return "the ranks of its files are unknown"
    compared: dict[int, None] = {}
    cuttable = False
    for stage in stages:
        if by_rank.keys().isdisjoint(stage):
            continue
        # Neighbours along any axis of any device matrix: their distance divides the number of ranks.
        neighbours = [rank for at, rank in enumerate(stage) if at == 0 or len(stage) % at == 0]
        if not by_rank.keys() >= set(neighbours):
            return "it is missing in files that would decide it"
        compared.update(dict.fromkeys(by_rank[rank] for rank in neighbours))
        cuttable = cuttable or len(stage) > 1
    if not compared or not by_rank.keys() <= {rank for stage in stages for rank in stage}:
        return "its files are of ranks without any recorded layout"
    samples = (_sample(name, file, files, handles) for file in compared)
    first = next(samples)
    if any(sample != first for sample in samples):
        return "ranks hold different values of it"
    size = tensors[0].item_size
    if cuttable and first == first[:size] * (len(first) // size):
        return "its elements are all the same"
    return None


def _sample(name: str, file: int, files: IterationFiles, handles: FileHandles) -> bytes:
    """Bytes of a tensor, from the same places in every file."""
    path, tensor = files.paths[file], files.indexes[file].tensors[name]
    ((offset, size),) = tensor.extents
    pieces = [(0, size)]
    if size > _SAMPLE:
        length = _SAMPLE // _PIECES
        step = (size - length) // (_PIECES - 1) // tensor.item_size * tensor.item_size
        pieces = [(step * number, length) for number in range(_PIECES)]
    with reading(path), handles.borrow(path) as opened:
        return b"".join(read_range(opened, offset + start, length) for start, length in pieces)
