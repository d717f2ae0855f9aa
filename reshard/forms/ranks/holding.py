"""The ranks that hold the slices of a parameter."""

from __future__ import annotations

from typing import NamedTuple, cast

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.layout import Box, Grid, Layout
from reshard.strategies import Stage


class Holding(NamedTuple):
    """One stage that holds a parameter, and its layout there."""

    stage: Stage
    layout: Layout

    def ranks(self, slice_number: int) -> list[int]:
        """Global ranks that hold a slice, ascending."""
        first = self.stage.first_rank
        return [first + rank for rank in self.layout.holders(slice_number)]

    def slice_of(self, rank: int) -> int:
        """The slice that a global rank of this stage holds."""
        return self.layout.slice_of_rank[rank - self.stage.first_rank]


class StageSharding(NamedTuple):
    """One stage that holds a tensor of a known shape; see `checkpoint.Sharding`.

    Attributes:
        stage: the stage.
        layout: the real layout there.
        grid: the boxes of its slices.
    """

    stage: Stage
    layout: Layout
    grid: Grid

    @property
    def holding(self) -> Holding:
        """Stage and layout alone."""
        return Holding(self.stage, self.layout)

    def holders(self, slice_number: int) -> list[int]:
        """Global ranks that hold a slice, ascending."""
        return self.holding.ranks(slice_number)

    def stored_box(self, slice_number: int) -> Box:
        """The box of a slice in the full tensor."""
        return self.grid.slice_box(slice_number)

    def slice_of(self, rank: int) -> int:
        """The slice that a global rank of this stage holds."""
        return self.holding.slice_of(rank)


def stage_shardings(tensor: GlobalTensor) -> tuple[StageSharding, ...]:
    """The shardings of a tensor of a rank tree."""
    return cast("tuple[StageSharding, ...]", tensor.shardings)
