"""What a planned conversion moves: from which source rank to which target rank how many bytes.

Found out from the plan that a run carries out, cut into parts as a run cuts it; but of parameters
that are taken alike only one is walked through, so that it stays quick for thousands of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.checkpoints import Data
from reshard.execute import ExecutionOptions
from reshard.execute.filling import byte_strides, loops_in_source, runs, span_of
from reshard.execute.parts import SharedRows, parts_of
from reshard.layout import intersection, shape_of, volume_of
from reshard.plan.pieces import Piece, StoredSlice, TargetFile, TargetTensor
from reshard.plan.plan import Plan, in_section

# Where files are looked at through memory maps, this much is read at a time at least.
_PAGE = 4096


@dataclass
class Transfers:
    """Bytes of tensor contents that a conversion moves.

    Attributes:
        taken: bytes that a target rank's file takes from a source rank's, by (source, target).
        copied: of these, the bytes of values that are copied as they are.
        read: bytes that requests to a source rank's file cover, by source rank; approximate where
            they skip over what is not needed.
        requests: ranges of a source rank's file that hold what a target rank's file takes, by (source, target). Targets
            that are written together read a common range once.
        value_requests: of these, the ranges of values that are copied as they are.
    """

    taken: Counter[tuple[int, int]] = field(default_factory=Counter)
    copied: Counter[tuple[int, int]] = field(default_factory=Counter)
    read: Counter[int] = field(default_factory=Counter)
    requests: Counter[tuple[int, int]] = field(default_factory=Counter)
    value_requests: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def over_read(self) -> float:
        """Bytes read per byte taken, less one: 0.5 if every second byte is not needed or was read before."""
        taken = sum(self.taken.values())
        return sum(self.read.values()) / taken - 1 if taken else 0.0


def transfers_of(plan: Plan, work: Sequence[int], execution: ExecutionOptions) -> Transfers:
    """What a conversion moves for some target files, ascending."""
    found = Transfers()
    made = []
    for file in work:
        holder = plan.form.copied_file(file)
        if holder is None:
            made.append(file)
            continue
        size = plan.checkpoint.indexes[holder].size
        found.taken[holder, file] += size
        found.read[holder] += size
        found.requests[holder, file] += 1
    # Files of which each holds other tensors are walked through whole; of the others one tensor of each kind is.
    alone = [file for file in made if plan.form.names_in(file) is not None]
    together = [file for file in made if plan.form.names_in(file) is None]
    for section in plan.sections:
        here = in_section(section, together)
        if here:
            alike = {kind.tensors[0].name: len(kind.tensors) for kind in plan.kinds_of(section)}
            for group in plan.groups(here, names=alike.keys()):
                _add_group(found, group, alike, execution)
    for group in plan.groups(alone, names=plan.checkpoint.tensors.keys()):
        _add_group(found, group, dict.fromkeys(plan.checkpoint.tensors, 1), execution)
    for file in made:
        for value in plan.values_of(file):
            found.taken[value.holder, file] += value.tensor.nbytes
            found.copied[value.holder, file] += value.tensor.nbytes
            found.read[value.holder] += value.tensor.nbytes
            found.requests[value.holder, file] += 1
            found.value_requests[value.holder, file] += 1
    return found


def _stored_bytes(source: StoredSlice, nbytes: int, item_size: int) -> int:
    """Bytes in a file of so many bytes of elements."""
    return nbytes if source.decoding is None else source.decoding.stored_bytes(nbytes // item_size)


def _add_group(
    found: Transfers, group: Sequence[TargetFile], alike: dict[str, int], execution: ExecutionOptions
) -> None:
    for target in group:
        for tensor in target.tensors:
            for piece in tensor.pieces:
                stored = piece.stored_size(tensor.item_size)
                count = _stored_bytes(piece.source, piece.volume * stored, stored)
                pair = piece.source.rank, target.rank
                found.taken[pair] += count * alike[tensor.name]
                found.requests[pair] += _covered(piece, tensor, execution).ranges * alike[tensor.name]
    for part in parts_of(group, execution.threads):
        for stretch in part.stretches:
            if stretch.shared is not None:
                if stretch.shared.first == 0:
                    _add_shared(found, stretch.shared, alike[stretch.shared.tensors[0].name])
                continue
            for target, segments in zip(group, stretch.segments):
                for segment in segments:
                    # A tensor that is written in several parts is counted with the first.
                    if isinstance(segment, Data) and segment.start == 0:
                        tensor = target.tensors[segment.tensor]
                        for piece in tensor.pieces:
                            covered = _stored_bytes(
                                piece.source,
                                _covered(piece, tensor, execution).nbytes,
                                piece.stored_size(tensor.item_size),
                            )
                            found.read[piece.source.rank] += covered * alike[tensor.name]


def _add_shared(found: Transfers, shared: SharedRows, alike: int) -> None:
    """Rows that are read once, whole, for all members."""
    axis = len(shared.outer)
    for source, _ in shared.uses:
        outer = intersection(shared.outer, source.box[:axis])
        if outer is not None:
            elements = volume_of(outer) * volume_of(source.box[axis:])
            found.read[source.rank] += _stored_bytes(source, elements * shared.stored_size, shared.stored_size) * alike


class _Covered(NamedTuple):
    """Bytes of a source that are read, or lie in the pages that are looked at, and in how many ranges."""

    nbytes: int
    ranges: int


def _covered(piece: Piece, tensor: TargetTensor, execution: ExecutionOptions) -> _Covered:
    """What is read of the source for a piece."""
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
    if gap <= (_PAGE if execution.mapped else execution.storage.worth_skipping):
        return _Covered(span, 1)
    if not execution.mapped:
        return _Covered(needed, number)
    return _Covered(min(span, number * (-(-needed // number // _PAGE) + 1) * _PAGE), number)
