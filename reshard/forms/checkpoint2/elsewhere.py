"""Slices in files that metadata.json does not list for them, and unlisted tensors.

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

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints.files import FileHandles
from reshard.forms.checkpoint2.files import IterationFiles
from reshard.forms.checkpoint2.metadata import Chunks, Metadata, TensorRecord
from reshard.forms.checkpoint2.placing import Placer, RankList, TensorPlacement, ranks_of_files
from reshard.storage import read_range, reading
from reshard.text.names import state_prefix
from reshard.threads import cached_property


class Elsewhere:
    """Finds slices in unlisted files.

    Args:
        metadata: metadata of all tensors.
        files: the files, their headers read.
        placer: places tensors.
    """

    def __init__(self, metadata: Metadata, files: IterationFiles, placer: Placer) -> None:
        self._metadata = metadata
        self._files = files
        self._placer = placer

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that wrote a file, by holder number, where known."""
        return ranks_of_files(self._metadata, self._files)

    def moved(self, name: str) -> Optional[TensorPlacement]:
        """The layout of a tensor that no recorded file holds.

        Returns:
            Its layout over the ranks of its parameter; None if it is not an optimizer state, or
            files of other ranks hold it too.

        Raises:
            LayoutError: the layout does not fit these ranks.
        """
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

    def unlisted(self, name: str, holders: Sequence[int]) -> Optional[TensorPlacement]:
        """The layout of an optimizer state that metadata does not list.

        Returns:
            The layout of its parameter; None if it is not a state, or its files do not fit that layout.

        Raises:
            LayoutError: the layout of its parameter contradicts itself.
        """
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

    def _placed(self, name: str, record: TensorRecord, holders: Sequence[int]) -> Optional[TensorPlacement]:
        assert record.layout is not None
        ranks = [self.rank_of.get(file, -1) for file in holders]
        if not holders or not set(ranks) <= set(record.layout.rank_list):
            return None
        return self._placer.place_by_rank(name, record, dict(zip(holders, ranks)))

    def _holders(self, name: str) -> list[int]:
        return [file for file, index in self._files.indexes.items() if name in index.tensors]

    def _owner(self, name: str) -> Optional[TensorRecord]:
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


class UnlistedVerdict(NamedTuple):
    """Whether an unlisted tensor is whole.

    Attributes:
        is_whole: it is whole in every file.
        why: else, the reason why its layout is unknown.
    """

    is_whole: bool
    why: str = ""


def judge(
    name: str,
    holders: Sequence[int],
    files: IterationFiles,
    rank_of: dict[int, int],
    stages: Sequence[RankList],
    handles: FileHandles,
) -> UnlistedVerdict:
    """Whether a tensor of several elements is whole in every file that holds it.

    Args:
        name: of the tensor.
        holders: the files that hold it.
        files: all files, their headers read.
        rank_of: the rank of each file, where known.
        stages: the ranks of every pipeline stage, in the order of the device matrices.
        handles: where to borrow files from.

    Raises:
        ReshardError: reading failed.
    """
    tensors = [files.indexes[file].tensors[name] for file in holders]
    if len({(tensor.dtype, tensor.shape) for tensor in tensors}) > 1:
        return UnlistedVerdict(False, "its shapes differ")
    if not tensors[0].nbytes:
        return UnlistedVerdict(False, "it has no elements")
    by_rank = {rank_of[file]: file for file in holders if file in rank_of}
    if len(by_rank) < len(holders):
        return UnlistedVerdict(False, "the ranks of its files are unknown")
    compared: dict[int, None] = {}
    cuttable = False
    for stage in stages:
        if by_rank.keys().isdisjoint(stage):
            continue
        # Neighbours along any axis of any device matrix: their distance divides the number of ranks.
        neighbours = [rank for at, rank in enumerate(stage) if at == 0 or len(stage) % at == 0]
        if not by_rank.keys() >= set(neighbours):
            return UnlistedVerdict(False, "it is missing in files that would decide it")
        compared.update(dict.fromkeys(by_rank[rank] for rank in neighbours))
        cuttable = cuttable or len(stage) > 1
    if not compared or not by_rank.keys() <= {rank for stage in stages for rank in stage}:
        return UnlistedVerdict(False, "its files are of ranks without any recorded layout")
    samples = (_sample(name, file, files, handles) for file in compared)
    first = next(samples)
    if any(sample != first for sample in samples):
        return UnlistedVerdict(False, "ranks hold different values of it")
    size = tensors[0].item_size
    if cuttable and first == first[:size] * (len(first) // size):
        return UnlistedVerdict(False, "its elements are all the same")
    return UnlistedVerdict(True)


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
