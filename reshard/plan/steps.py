"""The step of each parameter, which torch's optimizers save beside its moments; other trainers save one for all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import EditedCheckpoint, Recipe, TiedTensors, stored_checkpoint
from reshard.forms.writing import step_of, without_step
from reshard.layout import Box
from reshard.layout.views import View
from reshard.strategies import Strategy, rows_over
from reshard.text.names import trainer_optimizer

_STEP, _DTYPE = ".step", "Float32"
# Of Adam, which corrects both moments by the step.
_MOMENT = ".exp_avg_sq"


class _Number:
    """A Float32 number, added to zeros; see `Addition`."""

    def __init__(self, number: int) -> None:
        self.paths: frozenset[str] = frozenset()
        self._word = np.float32(number).view(np.uint32)

    def add(self, box: Box, words: npt.NDArray[Any]) -> None:
        words[...] = self._word


def with_steps(
    checkpoint: EditedCheckpoint,
    admit: Callable[[str], bool],
    handles: FileHandles,
) -> EditedCheckpoint:
    """The same tensors of a trainer's state, with the step of each parameter that has moments.

    It is the one that the source's optimizer has for every parameter, or else the step of the training.

    Args:
        checkpoint: tensors under the names of a trainer's state.
        admit: whether a name is written.
        handles: open files.

    Raises:
        CheckpointError: the source has no step.
    """
    moments: dict[str, str] = {}
    for name, recipe in checkpoint.recipes.items():
        step = name[: -len(_MOMENT)] + _STEP
        if trainer_optimizer(name) and name.endswith(_MOMENT) and admit(step):
            moments[step] = recipe.sources[0]
    if not moments:
        return checkpoint
    # Loaded only here: most states of trainers keep their names.
    from reshard.names import trainer_keys

    stored = stored_checkpoint(checkpoint).tensors
    own = [stored[name] for name in sorted(stored) if trainer_optimizer(name) and name.endswith(_STEP)]
    keys = {name: trainer_keys(name) for name in moments}
    if own:
        reason = "every parameter would get the first one's, because rules of names change parameters"
        equal = TiedTensors(own[0], tuple(own[1:]), reason, "leave the optimizer out with --exclude 'optimizer.*'")
        return checkpoint.with_more(dict.fromkeys(moments, Recipe((own[0].name,))), keys, [equal])
    count = step_of(checkpoint, handles)
    if count is None:
        raise without_step(checkpoint.place)
    number, zeros = _Number(count), View.zeros(())
    recipes = {name: Recipe((source,), zeros, _DTYPE, number) for name, source in moments.items()}
    return checkpoint.with_more(recipes, keys, ())


def with_steps_laid_out(strategy: Strategy, names: Collection[str]) -> Strategy:
    """The strategy of a trainer's state, with steps whole wherever moments of their parameters are; none lists them."""
    if strategy.is_placeholder or strategy.is_none:
        return strategy
    steps = {name for name in names if trainer_optimizer(name) and name.endswith(_STEP)}
    stages = []
    for stage in strategy.stages:
        whole = rows_over(stage.device_count, ())
        here = (name for name in steps if name[: -len(_STEP)] + _MOMENT in stage.layouts)
        stages.append(stage._replace(layouts={**dict.fromkeys(here, whole), **stage.layouts}))
    return replace(strategy, stages=tuple(stages)) if steps else strategy
