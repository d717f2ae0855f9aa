"""Tensors that files hold and metadata.json does not list.

MindSpore's compiler lays out what is trained. Parameters that are not, and the optimizer's values, lie in the
files of every rank, unlisted, and nothing tells whether such a parameter is whole there or cut. It is taken as
whole where the values show that it is not cut: a rank's slice differs from that of its neighbour along an axis
that cuts the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reshard.checkpoints.files import FileHandles, reading_error
from reshard.forms.checkpoint2.files import IterationFiles
from reshard.forms.checkpoint2.ranks import RankList
from reshard.storage import read_range

# Read of a file: all, or pieces at equal distances.
_SAMPLE = 1 << 16
_PIECES = 16


class Cut(NamedTuple):
    """Whether an unlisted tensor is cut.

    Attributes:
        whole: it is not.
        why: why nobody can tell, in words that go on after ``left out:``.
    """

    whole: bool
    why: str = ""


def judge(
    name: str,
    holders: Sequence[int],
    files: IterationFiles,
    rank_of: dict[int, int],
    stages: Sequence[RankList],
    handles: FileHandles,
) -> Cut:
    """Whether a tensor of several elements is whole in every file that holds it.

    Args:
        name: of the tensor.
        holders: the files that hold it.
        files: all files, their headers read.
        rank_of: the rank of each file, where it is known.
        stages: the ranks of every pipeline stage, in the order of the device matrices.
        handles: where to borrow files from.

    Raises:
        ReshardError: reading failed.
    """
    tensors = [files.indexes[file].tensors[name] for file in holders]
    if len({(tensor.dtype, tensor.shape) for tensor in tensors}) > 1:
        return Cut(False, "its shapes differ")
    if not tensors[0].nbytes:
        return Cut(False, "it has no elements")
    by_rank = {rank_of[file]: file for file in holders if file in rank_of}
    if len(by_rank) < len(holders):
        return Cut(False, "the ranks of its files are not known")
    compared: dict[int, None] = {}
    cuttable = False
    for stage in stages:
        if by_rank.keys().isdisjoint(stage):
            continue
        # One step along any axis of any device matrix: its distance divides the number of ranks.
        telling = [rank for at, rank in enumerate(stage) if at == 0 or len(stage) % at == 0]
        if not by_rank.keys() >= set(telling):
            return Cut(False, "it is not in the files of all ranks that would tell")
        compared.update(dict.fromkeys(by_rank[rank] for rank in telling))
        cuttable = cuttable or len(stage) > 1
    if not compared or not by_rank.keys() <= {rank for stage in stages for rank in stage}:
        return Cut(False, "its files are of ranks that nothing is laid out over")
    samples = (_sample(name, file, files, handles) for file in compared)
    first = next(samples)
    if any(sample != first for sample in samples):
        return Cut(False, "ranks hold different values of it")
    size = tensors[0].item_size
    if cuttable and first == first[:size] * (len(first) // size):
        return Cut(False, "its elements are all the same")
    return Cut(True)


def _sample(name: str, file: int, files: IterationFiles, handles: FileHandles) -> bytes:
    """Bytes of a tensor, the same places in every file."""
    path, tensor = files.paths[file], files.indexes[file].tensors[name]
    ((offset, size),) = tensor.extents
    pieces = [(0, size)]
    if size > _SAMPLE:
        length = _SAMPLE // _PIECES
        step = (size - length) // (_PIECES - 1) // tensor.item_size * tensor.item_size
        pieces = [(step * number, length) for number in range(_PIECES)]
    try:
        with handles.borrow(path) as opened:
            return b"".join(read_range(opened, offset + start, length) for start, length in pieces)
    except OSError as error:
        raise reading_error(path, error) from error
