"""Master copies of weights for a mixed-precision optimizer, made of Float32 weights that are their own masters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from reshard.checkpoints.checkpoint import Checkpoint, EditedCheckpoint, Recipe
from reshard.errors import CheckpointError
from reshard.plan.casts import CastRule, RequestedTypes
from reshard.text.messages import listing, plural

_MOMENT, MASTER = "optimizer.state.exp_avg.", "optimizer.state.param."


def with_masters(base: Checkpoint, recipes: Mapping[str, Recipe]) -> Mapping[str, Recipe]:
    """The same tensors, and a master copy of each Float32 weight that has moments and none."""
    made = {}
    for name in recipes:
        weight = name[len(_MOMENT) :]
        if not name.startswith(_MOMENT) or weight not in recipes or MASTER + weight in recipes:
            continue
        if {base.tensors[source].dtype for source in recipes[weight].sources} == {"Float32"}:
            made[MASTER + weight] = recipes[weight]
    return {**recipes, **made} if made else recipes


def check_masters(checkpoint: EditedCheckpoint, casts: Sequence[CastRule], admit: Callable[[str], bool]) -> None:
    """Refuse weights that become master copies, and whose own type nothing states.

    Args:
        checkpoint: the tensors to write, under their new names.
        casts: the requested types.
        admit: whether a name is written.

    Raises:
        CheckpointError: the type of some weights is not stated.
    """
    recipes = checkpoint.recipes
    requested = RequestedTypes(casts, recipes.keys() | set(checkpoint.values()))
    unstated = []
    for name in filter(admit, recipes):
        weight = name[len(MASTER) :]
        if not name.startswith(MASTER) or weight not in recipes:
            continue
        master, own = recipes[name], recipes[weight]
        # Another source is a master copy of the source's own.
        if (master.sources, master.view) == (own.sources, own.view) and requested.of(weight) is None:
            unstated.append(weight)
    if unstated:
        raise CheckpointError(
            f"{checkpoint.place}: {plural(len(unstated), 'Float32 weight')} without a master copy become their own "
            f"masters, and the type that Megatron trains them in is not stated: {listing(sorted(unstated))}",
            file=checkpoint.place,
            parameter=min(unstated),
            hint="add --cast BFloat16, Float16 or Float32; to convert weights alone: --exclude 'optimizer.*'",
        )
