"""The strategy that an iteration of Checkpoint 2.0 was saved with, as far as its metadata tells."""

from __future__ import annotations

from reshard.checkpoints.checkpoint2.checkpoint2 import Checkpoint2
from reshard.errors import CheckpointError
from reshard.strategies import SAME, Stage, Strategy
from reshard.wording import rank_ranges


def strategy_of(checkpoint: Checkpoint2) -> Strategy:
    """How tensors are laid out over the ranks that an iteration was saved by.

    Raises:
        CheckpointError: metadata does not tell, or its stages are no runs of ranks that follow each other.
    """
    stages: list[Stage] = []
    first = 0
    for ranks, layouts in checkpoint.layouts().items():
        if ranks != tuple(range(first, first + len(ranks))):
            raise CheckpointError(
                f"{checkpoint.place}: lays tensors out over {rank_ranges(ranks)}, which do not follow rank {first - 1}",
                file=checkpoint.place,
                hint="pass the target's strategy instead of same",
            )
        stages.append(Stage(len(stages), first, len(ranks), layouts, (checkpoint.place,)))
        first += len(ranks)
    if not stages:
        raise CheckpointError(
            f"{checkpoint.place}: does not say how tensors are laid out",
            file=checkpoint.place,
            hint="pass the target's strategy instead of same, or none",
        )
    return Strategy(tuple(stages), SAME)
