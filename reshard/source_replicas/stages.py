"""Whether files know of the pipeline stages that a strategy tells of.

Ranks of a stage hold the parameters of that stage, and seldom a few tied ones of another. Where the ranks of every
stage hold everything, the strategy is that of a run with a pipeline, and the files are those of one without; slices
that happen to have the same shapes would be put together wrongly.
"""

from __future__ import annotations

from reshard.plan.source import SourceStep
from reshard.strategies import Strategy


def held_by_all_stages(strategy: Strategy, step: SourceStep) -> list[str]:
    """All listed parameters that the files hold, sorted, if the ranks of every pipeline stage hold them all.

    Args:
        strategy: what the checkpoint is said to have been saved with.
        step: the files.

    Returns:
        Nothing where some stage lacks one, where the strategy has one stage, or gives all to every stage.
    """
    listed = set(strategy.parameters) & step.names()
    if len(strategy.stages) < 2 or not listed:
        return []
    for stage in strategy.stages:
        # Files that are built alike share their tensors.
        tensors = {id(index.tensors): index.tensors for index in map(step.indexes.__getitem__, step.loaded(stage))}
        held = set().union(*tensors.values())
        if not listed <= held or listed <= stage.layouts.keys():
            return []
    return sorted(listed)
