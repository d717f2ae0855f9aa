"""Rules from strategies: what they show of a model, and what they do not.

Beyond what was shown nothing is taken for granted: a cut is not taken to grow with its axis, since code may cap it,
and the order of devices is not taken to be the usual one. `Assumption` names what may be assumed all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from reshard.errors import StrategyError
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.model import Pipeline, Rule, Rules, Shown
from reshard.strategies.rules.orders import is_dp_outermost
from reshard.strategies.rules.pipeline import is_numbered
from reshard.strategies.rules.shown import (
    ShownWeight,
    Source,
    layout_for,
    shown_weights,
    unshown_sizes,
)
from reshard.strategies.rules.shown_shards import ShownShards, shown_shards
from reshard.strategies.rules.sizes import NAMES, Sizes, condition
from reshard.strategies.rules.tensors import FullTensor, ModelTensors
from reshard.text.messages import listing

GROWTH = "growth"
DP_OUTERMOST = "dp-outermost"
ASSUMPTIONS = {
    GROWTH: "cuts grow with their axes and whole dimensions stay whole, beyond the largest sizes that were shown",
    DP_OUTERMOST: "data parallel is outermost in the device matrix where no strategy shows the order of devices; "
    "where that is not so, ranks get slices of the right shape that are others'",
}
"""What may be assumed, and what that means."""

_SIZED = ("mp", "cp", "ep")


@dataclass(frozen=True)
class Learned:
    """What sources show.

    Attributes:
        weights: per weight the ways of cutting it.
        shards: per weight whether the optimizer may shard it.
        rules: a rule per weight, the ways in it; of weights without a way none.
        unexplained: weights whose cuts no size explains.
    """

    weights: Mapping[str, ShownWeight]
    shards: Mapping[str, ShownShards]
    rules: Rules
    unexplained: tuple[str, ...]


def learn(
    sources: Sequence[Source], model: ModelTensors, assume: Sequence[str] = (), target: Optional[Sizes] = None
) -> Learned:
    """Read rules out of strategies.

    Args:
        sources: strategies with the sizes of their runs, at least one.
        model: the weights of the first, with their shapes.
        assume: names of `ASSUMPTIONS`.
        target: where these are a source's sizes, its layouts are taken as they are.

    Raises:
        StrategyError: a size that was said cuts nothing, or a layout does not fit its tensor.
    """
    weights = shown_weights(sources, model)
    alike = next((source for source in sources if target is not None and _same(source.sizes, target)), None)
    # Axes of the model's own have no known cuts; its layouts can only be taken as they are.
    own_axes = any(name not in NAMES for source in sources for name in source.sizes.named)
    if not own_axes:
        _check_said(sources, weights)
    shards = shown_shards(sources, model, weights)
    rules = []
    unexplained = []
    for name, weight in weights.items():
        recorded = _recorded(alike, weight.tensor) if alike is not None else None
        readings = weight.readings
        if DP_OUTERMOST in assume:
            readings = tuple(filter(lambda reading: is_dp_outermost(reading.matrix), readings)) or readings
        if not readings and (recorded is None or not own_axes):
            unexplained.append(name)
            continue
        said, shown_for = shards[name]
        where = "what the strategies show"
        rules.append(
            Rule(
                (name,),
                where,
                readings=readings,
                recorded=recorded,
                optimizer_shard=said,
                shard_shown_for=shown_for,
            )
        )
    path = sources[0].strategy.path
    return Learned(
        weights,
        shards,
        Rules(path, tuple(rules), _pipeline(sources, model), shown_for=_shown_for(sources, assume)),
        tuple(unexplained),
    )


def _same(one: Sizes, other: Sizes) -> bool:
    names = {*one.named, *other.named} - {"pp"}
    return all(one.named.get(name) == other.named.get(name) for name in names)


def _check_said(sources: Sequence[Source], weights: Mapping[str, ShownWeight]) -> None:
    for source, names in unshown_sizes(sources, weights.values()).items():
        if any(not weight.readings for weight in weights.values()):
            # What cuts them is not known, which is said of them.
            continue
        name = names[0]
        where = f"{source.strategy.path}: {name}={source.sizes[name]}"
        if name == "cp":
            hint = "count context parallelism that cuts nothing as data parallelism: in dp, without cp"
        else:
            hint = "say the sizes that this run had"
        raise StrategyError(f"{where} cuts no parameter for certain", file=source.strategy.path, hint=hint)


def _recorded(source: Source, tensor: FullTensor) -> Optional[RecordedLayout]:
    """A weight's record in a source, without optimizer shards, one entry per dimension; None if it is not listed."""
    holding = source.holding(tensor.name)
    if not holding:
        return None
    stage, layout = holding[0]
    own = layout_for(layout, tensor, source.strategy.path)
    nested = source.recorded[stage.number][tensor.name].nested or any(len(axes) > 1 for axes in own.tensor_map)
    maps = [axes or (-1,) for axes in own.tensor_map]
    uneven = own.uneven or ()
    return RecordedLayout(
        own.device_matrix,
        tuple(maps) if nested else (tuple(entry[0] for entry in maps),),
        nested,
        split_sizes=uneven,
        split_offsets=tuple(sum(uneven[:index]) for index in range(len(uneven))),
    )


def _shown_for(sources: Sequence[Source], assume: Sequence[str]) -> tuple[Shown, ...]:
    """What must be true of a target: no kind of parallelism that no source has, and no wider cuts by mp.

    Code caps cuts by mp, at the number of key and value heads for one. Of other kinds no such code is known.
    """
    shown = []
    for name in _SIZED:
        largest = max(source.sizes[name] for source in sources)
        hint = f"pass a strategy with a larger {name}, too: --also S --also-sizes ..."
        if largest == 1:
            shown.append(Shown(condition(f"{name}<=1"), hint))
        elif name == "mp" and GROWTH not in assume:
            hint += f"; or --assume {GROWTH}: {ASSUMPTIONS[GROWTH]}"
            shown.append(Shown(condition(f"{name}<={largest}"), hint))
    return tuple(shown)


def _pipeline(sources: Sequence[Source], model: ModelTensors) -> Pipeline:
    """Which weights outside the layers are on the first stage, and which on the last."""
    first, last = [], []
    for name in model.weights:
        if is_numbered(name):
            continue
        of_pipelines = [source for source in sources if source.sizes.stages > 1 and source.holding(name)]
        places = [([stage.number for stage, _ in source.holding(name)], source) for source in of_pipelines]
        if places and all(numbers == [0] for numbers, _ in places):
            first.append(name)
        elif places and all(numbers == [source.sizes.stages - 1] for numbers, source in places):
            last.append(name)
    return Pipeline(tuple(first), tuple(last))


def uneven_source(sources: Sequence[Source], layers: Mapping[str, int]) -> Optional[str]:
    """A source whose layers are not divided evenly among its stages, in words; None if there is none."""
    for source in sources:
        counts = [len({layers[name] for name in stage.layouts if name in layers}) for stage in source.strategy.stages]
        if len(set(counts)) > 1:
            return f"{source.strategy.path} has {', '.join(map(str, counts))} layers per stage"
    return None


def check_explained(learned: Learned, stated: Sequence[Rule], sources: Sequence[Source]) -> None:
    """See that of weights whose cuts no size explains it is stated how they are cut."""
    left = [name for name in learned.unexplained if not any(rule.matches(name) and rule.says_cuts for rule in stated)]
    if left:
        layout = next(layout for source in sources for _, layout in source.holding(left[0]))
        raise StrategyError(
            f"{sources[0].strategy.path}: no size explains device matrix {list(layout.device_matrix)}, tensor map "
            f"{layout.map_text}: " + listing(left),
            file=sources[0].strategy.path,
            parameter=left[0],
            hint="check the sizes that were said. A model with a device grid of its own has names of its own for its "
            "axes, as in x=2,y=4, and is derived for the same sizes alone",
        )
