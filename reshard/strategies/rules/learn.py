"""Rules from strategies: the candidates that agree with them.

Nothing is assumed beyond the strategies: a cut may not grow with its axis, since code may cap it, and the order
of devices may be unusual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from reshard.errors import StrategyError
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.candidates import SIZED
from reshard.strategies.rules.model import LayoutRule, LayoutRules, Pipeline
from reshard.strategies.rules.pipeline import is_numbered
from reshard.strategies.rules.shown import (
    ShownWeight,
    SourceRun,
    layout_for,
    shown_shards,
    shown_weights,
    unshown_sizes,
)
from reshard.strategies.rules.sizes import NAMES, AxisSizes
from reshard.strategies.rules.tensors import FullTensor, ModelTensors
from reshard.text.messages import listing


class Learned(NamedTuple):
    """The candidates that agree with the sources.

    Attributes:
        weights: per weight its candidates.
        rules: a rule per weight with its candidates; none for weights without.
        unexplained: weights with cuts that no size explains.
    """

    weights: Mapping[str, ShownWeight]
    rules: LayoutRules
    unexplained: tuple[str, ...]


def learn(sources: Sequence[SourceRun], model: ModelTensors, target: Optional[AxisSizes] = None) -> Learned:
    """Read rules out of strategies.

    Args:
        sources: strategies with the sizes of their runs, at least one.
        model: the weights of the first, with their shapes.
        target: if equal to a source's sizes, its layouts are copied.

    Raises:
        StrategyError: a size of a source cuts nothing, or a layout does not fit its tensor.
    """
    weights = shown_weights(sources, model)
    alike = next((source for source in sources if target is not None and _same(source.sizes, target)), None)
    # The cuts of a model's own axes are unknown; layouts with them can only be copied.
    own_axes = any(name not in NAMES for source in sources for name in source.sizes.named)
    if not own_axes:
        _check_sizes_cut(sources, weights)
    shards = shown_shards(sources, model, weights)
    rules = []
    unexplained = []
    for name, weight in weights.items():
        recorded = _recorded(alike, weight.tensor) if alike is not None else None
        if not weight.candidates and (recorded is None or not own_axes):
            unexplained.append(name)
            continue
        rules.append(
            LayoutRule(
                (name,),
                "what the strategies show",
                candidates=weight.candidates,
                recorded=recorded,
                optimizer_shard=shards[name],
            )
        )
    path = sources[0].strategy.path
    shown = LayoutRules(path, tuple(rules), _pipeline(sources, model), shown=_shown(sources))
    return Learned(weights, shown, tuple(unexplained))


def _same(first: AxisSizes, second: AxisSizes) -> bool:
    names = {*first.named, *second.named} - {"pp"}
    return all(first.named.get(name) == second.named.get(name) for name in names)


def _check_sizes_cut(sources: Sequence[SourceRun], weights: Mapping[str, ShownWeight]) -> None:
    for source, names in unshown_sizes(sources, weights.values()).items():
        if any(not weight.candidates for weight in weights.values()):
            # `check_explained` reports these weights.
            continue
        name = names[0]
        where = f"{source.strategy.path}: {name}={source.sizes[name]}"
        if name == "cp":
            hint = "count context parallelism that cuts nothing as data parallelism: in dp, without cp"
        else:
            hint = "give the sizes of this run"
        raise StrategyError(f"{where} cuts no parameter with certainty", file=source.strategy.path, hint=hint)


def _recorded(source: SourceRun, tensor: FullTensor) -> Optional[RecordedLayout]:
    """A weight's record in a source, without optimizer shards, one entry per dimension; None if it is not listed."""
    holding = source.holding(tensor.name)
    if not holding:
        return None
    stage, layout = holding[0]
    reading = layout_for(layout, tensor, source.strategy.path)
    return RecordedLayout.of(reading, source.recorded[stage.number][tensor.name].nested or None)


def _shown(sources: Sequence[SourceRun]) -> dict[str, int]:
    """The sizes beyond which cuts are unknown: code caps those by mp, for example at the key and value heads.

    No known code caps others, but a size of 1 does not show what it cuts.
    """
    largest = {name: max(source.sizes[name] for source in sources) for name in SIZED}
    return {name: size for name, size in largest.items() if name == "mp" or size == 1}


def _pipeline(sources: Sequence[SourceRun], model: ModelTensors) -> Pipeline:
    """The weights outside the layers on the first stage and on the last."""
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


def uneven_source(sources: Sequence[SourceRun], layers: Mapping[str, int]) -> Optional[str]:
    """A message about a source with uneven layers per stage; None if all are even."""
    for source in sources:
        counts = [len({layers[name] for name in stage.layouts if name in layers}) for stage in source.strategy.stages]
        if len(set(counts)) > 1:
            return f"{source.strategy.path} has {', '.join(map(str, counts))} layers per stage"
    return None


def check_explained(learned: Learned, stated: Sequence[LayoutRule], sources: Sequence[SourceRun]) -> None:
    """Refuse weights whose cuts no size explains, unless a stated rule gives them.

    Raises:
        StrategyError: names them.
    """
    missing = [name for name in learned.unexplained if not any(rule.matches(name) and rule.has_cuts for rule in stated)]
    if missing:
        layout = next(layout for source in sources for _, layout in source.holding(missing[0]))
        raise StrategyError(
            f"{sources[0].strategy.path}: no size explains device matrix {list(layout.device_matrix)}, tensor map "
            f"{layout.map_text}: " + listing(missing),
            file=sources[0].strategy.path,
            parameter=missing[0],
            hint="check the sizes. A model with a device grid of its own has names of its own for its "
            "axes, as in x=2,y=4, and is derived for the same sizes alone",
        )
