"""The plan of a recovery: the same layout again, with what is lost made from replicas.

A rank whose file holds everything that its stage has at this step keeps that file, byte for byte,
whatever else it holds. Any other rank gets the file that a conversion to the same strategy would
write: parameter by parameter from whichever ranks have its slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from reshard.checkpoints import lay_out_copy
from reshard.plan.conversion import Conversion
from reshard.plan.pieces import Piece, StoredSlice, TargetFile, TargetTensor


class Recovery(Conversion):
    """A planned recovery; source and target strategy are the same."""

    def intact(self, rank: int) -> bool:
        """Whether a rank's own file holds all that its stage has at this step."""
        index = self.step.indexes.get(rank)
        if index is None or index.format != self.format:
            return False
        if self.request.source.is_none:
            return True
        stage = self.request.source.stage_of(rank)
        return all(name in index.tensors for name in self.resharded_of(stage))

    @property
    def lost(self) -> list[int]:
        """Ranks without an intact file, ascending."""
        return [rank for rank in range(self.request.source.device_count) if not self.intact(rank)]

    def target_groups(self) -> Iterator[list[TargetFile]]:
        """Lost ranks' files like a conversion's; then the intact ones, each by itself."""
        asked = self.ranks
        try:
            self.ranks = tuple(rank for rank in asked if not self.intact(rank))
            yield from super().target_groups()
        finally:
            self.ranks = asked
        for rank in asked:
            if self.intact(rank):
                yield [self.target_file(rank)]

    def target_file(self, rank: int, leader: Optional[int] = None) -> TargetFile:
        """What one rank's file is made of."""
        if not self.intact(rank):
            return super().target_file(rank, leader)
        index = self.step.indexes[rank]
        box = ((0, index.size),)
        source = StoredSlice(index.path, rank, ((0, index.size),), box)
        pieces = (Piece(source, box),) if index.size else ()
        whole = TargetTensor(index.path, 1, box, pieces)
        return TargetFile(rank, self.path(rank), lay_out_copy(index.size), (whole,))

    def data_bytes_by_rank(self) -> dict[int, int]:
        """Bytes of every rank's file, of tensor contents where it is made anew."""
        sizes = super().data_bytes_by_rank()
        return {rank: self.step.indexes[rank].size if self.intact(rank) else size for rank, size in sizes.items()}
