"""Master copies of weights: those of a mixed-precision optimizer, and Float32 weights that are their own masters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from reshard.checkpoints.checkpoint import Checkpoint, EditedCheckpoint, Recipe
from reshard.errors import CheckpointError
from reshard.plan.casts import CastRule, RequestedTypes
from reshard.text.messages import Report, listing, plural

_MOMENT, MASTER = "optimizer.state.exp_avg.", "optimizer.state.param."
_MODELS_MASTER, _FULL = "main_param.", "Float32"


def as_weights(
    base: Checkpoint,
    recipes: Mapping[str, Recipe],
    last: Mapping[str, str | None],
    casts: Sequence[CastRule],
    report: Report,
) -> Mapping[str, Recipe]:
    """The same tensors, with master copies as the weights that are cast to Float32.

    PyTorch's trainers keep Float32 parameters, which are their own masters.

    Args:
        base: the source.
        recipes: its tensors, named as in a model and in MindSpore's optimizers.
        last: the names to write, by these.
        casts: the requested types.
        report: gets a note on masters in either place.
    """
    requested = RequestedTypes(casts, {last.get(name) or name for name in recipes})
    used: dict[str, str] = {}
    rounded = 0
    for master in recipes:
        weight = master[len(_MODELS_MASTER) :]
        if master != _MODELS_MASTER + weight or weight not in recipes or _types_of(base, recipes[master]) != {_FULL}:
            continue
        if requested.of(last.get(weight) or weight) == _FULL:
            used[weight] = master
        else:
            rounded += _types_of(base, recipes[weight]) != {_FULL}
    if used:
        report.note(f"{plural(len(used), 'weight')} in Float32: the source's master copies, not its rounded weights")
    if rounded:
        text = f"{plural(rounded, 'weight')} rounded, beside Float32 master copies"
        report.note(f"{text}: --cast Float32 writes these as the weights")
    gone = {*used.values()}
    return {name: recipes[used.get(name, name)] for name in recipes if name not in gone}


def _types_of(base: Checkpoint, recipe: Recipe) -> set[str]:
    return {base.tensors[source].dtype for source in recipe.sources}


def with_masters(base: Checkpoint, recipes: Mapping[str, Recipe]) -> Mapping[str, Recipe]:
    """The same tensors, and a master copy of each Float32 weight that has moments and none."""
    made = {}
    for name in recipes:
        weight = name[len(_MOMENT) :]
        if not name.startswith(_MOMENT) or weight not in recipes or MASTER + weight in recipes:
            continue
        if _types_of(base, recipes[weight]) == {_FULL}:
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
            f"masters, and the type that they are trained in is not stated: {listing(sorted(unstated))}",
            file=checkpoint.place,
            parameter=min(unstated),
            hint="add --cast BFloat16, Float16 or Float32; to convert weights alone: --exclude 'optimizer.*'",
        )
