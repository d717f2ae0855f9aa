"""Whether files know of the pipeline stages that a strategy tells of.

Ranks of a stage hold the parameters of that stage, and seldom a few tied ones of another. Where they hold most of
what only other stages should, the stages are those of another run; slices that happen to have the same shapes would
be put together wrongly.
"""

from __future__ import annotations

from reshard.forms.ranks.checkpoint import SourceStep
from reshard.strategies import Strategy

# Tied parameters, at the most.
_FEW = 3


def misplaced(strategy: Strategy, step: SourceStep) -> list[str]:
    """Parameters that ranks of a pipeline stage hold though only others list them, sorted, if they are most.

    Args:
        strategy: what the checkpoint is said to have been saved with.
        step: the files.
    """
    listed = set(strategy.parameters) & step.names()
    found: set[str] = set()
    for stage in strategy.stages:
        # Files that are built alike share their tensors.
        tensors = {id(step.indexes[rank].tensors): step.indexes[rank].tensors for rank in step.loaded(stage)}
        for names in tensors.values():
            found |= listed & names.keys() - stage.layouts.keys()
    return sorted(found) if len(found) > max(_FEW, len(listed) // 2) else []
