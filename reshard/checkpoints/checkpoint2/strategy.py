"""The strategy that an iteration of Checkpoint 2.0 was saved with, as far as its metadata tells."""

from __future__ import annotations

from reshard.checkpoints.checkpoint2.checkpoint2 import Checkpoint2
from reshard.errors import CheckpointError
from reshard.strategies import SAME, Stage, Strategy
from reshard.text.messages import listing
from reshard.text.wording import plural, rank_ranges

_HINT = "pass the target's strategy instead of same"


def strategy_of(checkpoint: Checkpoint2) -> Strategy:
    """How tensors are laid out over the ranks that an iteration was saved by.

    Raises:
        CheckpointError: metadata does not tell, or not of every tensor, or its stages are no runs of ranks that
            follow each other.
    """
    stages: list[Stage] = []
    first = 0
    for ranks, layouts in checkpoint.layouts().items():
        if ranks != tuple(range(first, first + len(ranks))):
            raise CheckpointError(
                f"{checkpoint.place}: lays tensors out over {rank_ranges(ranks)}; a stage would begin at rank {first} "
                "and have no gaps",
                file=checkpoint.place,
                hint=_HINT,
            )
        stages.append(Stage(len(stages), first, len(ranks), layouts, (checkpoint.place,)))
        first += len(ranks)
    if not stages:
        raise CheckpointError(
            f"{checkpoint.place}: does not say how tensors are laid out",
            file=checkpoint.place,
            hint=f"{_HINT}, or none",
        )
    laid_out = set().union(*(stage.layouts.keys() for stage in stages))
    scattered = sorted(checkpoint.tensors.keys() - laid_out)
    if scattered:
        raise CheckpointError(
            f"{checkpoint.place}: lays {plural(len(scattered), 'parameter')} out over a part of a stage's ranks, which "
            "no strategy can: " + listing(scattered),
            file=checkpoint.place,
            parameter=scattered[0],
            hint=_HINT,
        )
    return Strategy(tuple(stages), SAME)
