"""Bytes that a planned conversion moves from each source rank to each target rank.

The plan is cut into parts as in a run. Of parameters with the same layouts only one is counted, and multiplied: that
is fast enough for thousands of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.checkpoints import Data
from reshard.execute import Budget
from reshard.execute.parts import parts_of
from reshard.execute.runs import byte_strides, loops_in_source, runs, span_of
from reshard.layout import intersection, shape_of, volume_of
from reshard.plan.pieces import Piece, SharedRows, StoredSlice, TargetFile, TargetTensor
from reshard.plan.plan import Plan

# Smallest read through a memory map.
_PAGE = 4096


@dataclass
class Transfers:
    """Bytes of tensor contents that a conversion moves.

    Attributes:
        taken: bytes of a target rank's file from a source rank's, by (source, target).
        copied: the part of them that is values copied unchanged.
        read: bytes that requests to a source rank's file cover, by source rank; approximate if they skip gaps.
        requests: ranges of a source rank's file that a target rank's file needs, by (source, target). Targets that are
            written together read a common range once.
        value_requests: the part of them that is values copied unchanged.
    """

    taken: Counter[tuple[int, int]] = field(default_factory=Counter, repr=False)
    copied: Counter[tuple[int, int]] = field(default_factory=Counter, repr=False)
    read: Counter[int] = field(default_factory=Counter, repr=False)
    requests: Counter[tuple[int, int]] = field(default_factory=Counter, repr=False)
    value_requests: Counter[tuple[int, int]] = field(default_factory=Counter, repr=False)

    @property
    def over_read(self) -> float:
        """Bytes read per byte taken, less one: 0.5 if every second byte is not needed or was read before."""
        needed = sum(self.taken.values())
        return sum(self.read.values()) / needed - 1 if needed else 0.0


def transfers_of(plan: Plan, work: Sequence[int], budget: Budget) -> Transfers:
    """The bytes that a conversion moves for some target files, ascending."""
    transfers = Transfers()
    resharded = []
    for file in work:
        holder = plan.form.copied_file(file)
        if holder is None:
            resharded.append(file)
            continue
        size = plan.checkpoint.indexes[holder].size
        transfers.taken[holder, file] += size
        transfers.read[holder] += size
        transfers.requests[holder, file] += 1
    # Of files with the same tensors, one tensor of each kind is counted.
    for section in plan.sections:
        for names, files in plan.by_names(section, resharded).items():
            alike: dict[str, int] = {}
            for kind in plan.kinds_of(section):
                names_of_kind = [tensor.name for tensor in kind.tensors if names is None or tensor.name in names]
                if names_of_kind:
                    alike[names_of_kind[0]] = len(names_of_kind)
            for group in plan.groups(files, budget.limits, alike.keys()):
                _add_group(transfers, group, alike, budget)
    for file in resharded:
        for holder, tensor in plan.values_of(file):
            transfers.taken[holder, file] += tensor.nbytes
            transfers.copied[holder, file] += tensor.nbytes
            transfers.read[holder] += tensor.nbytes
            transfers.requests[holder, file] += 1
            transfers.value_requests[holder, file] += 1
    return transfers


def _stored_bytes(source: StoredSlice, nbytes: int, item_size: int) -> int:
    """Bytes in a file for this many bytes of elements."""
    return nbytes if source.decoding is None else source.decoding.stored_bytes(nbytes // item_size)


def _add_group(transfers: Transfers, group: Sequence[TargetFile], alike: dict[str, int], budget: Budget) -> None:
    for target in group:
        for tensor in target.tensors:
            for piece in tensor.pieces:
                stored = piece.stored_size(tensor.item_size)
                count = _stored_bytes(piece.source, piece.volume * stored, stored)
                pair = piece.source.rank, target.rank
                transfers.taken[pair] += count * alike[tensor.name]
                transfers.requests[pair] += _covered(piece, tensor, budget).ranges * alike[tensor.name]
    for part in parts_of(group, budget.threads):
        # A tensor in several shares is counted once, as a whole.
        for of_members, shared in (share._replace(shares=1).cut() for share in part if share.number == 0):
            if shared is not None:
                _add_shared(transfers, shared, alike[shared.tensors[0].name])
                continue
            for target, segments in zip(group, of_members):
                for segment in segments:
                    if isinstance(segment, Data) and segment.start == 0:
                        tensor = target.tensors[segment.tensor]
                        for piece in tensor.pieces:
                            covered = _stored_bytes(
                                piece.source,
                                _covered(piece, tensor, budget).nbytes,
                                piece.stored_size(tensor.item_size),
                            )
                            transfers.read[piece.source.rank] += covered * alike[tensor.name]


def _add_shared(transfers: Transfers, shared: SharedRows, alike: int) -> None:
    """Rows that are read once for all members."""
    axis = len(shared.outer)
    for source, _ in shared.uses:
        outer = intersection(shared.outer, source.box[:axis])
        if outer is not None:
            elements = volume_of(outer) * volume_of(source.box[axis:])
            transfers.read[source.rank] += (
                _stored_bytes(source, elements * shared.stored_size, shared.stored_size) * alike
            )


class _Covered(NamedTuple):
    """Bytes of a source that are read, or of its mapped pages, and the number of ranges."""

    nbytes: int
    ranges: int


def _covered(piece: Piece, tensor: TargetTensor, budget: Budget) -> _Covered:
    """The ranges of the source that are read for a piece."""
    item_size = piece.stored_size(tensor.item_size)
    counts: Sequence[int] = shape_of(piece.box)
    strides = byte_strides(shape_of(piece.source.box), item_size)
    if piece.region is not None:
        counts, strides = loops_in_source(piece.region, strides)[1:]
    needed = piece.volume * item_size
    number = runs(counts, strides, item_size)
    if number < 2:
        return _Covered(needed, 1 if needed else 0)
    span = span_of(counts, strides, item_size)
    gap = (span - needed) // (number - 1)
    if gap <= (_PAGE if budget.mapped else budget.costs.worth_skipping):
        return _Covered(span, 1)
    if not budget.mapped:
        return _Covered(needed, number)
    return _Covered(min(span, number * (-(-needed // number // _PAGE) + 1) * _PAGE), number)
