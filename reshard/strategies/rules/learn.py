"""Rules from strategies: the candidates that agree with them, as rules for `derive` or as the text of a file.

Nothing is assumed beyond the strategies: a cut may not grow with its axis, since code may cap it, and the order
of devices may be unusual. `ASSUMPTIONS` are made only on the user's request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

from reshard.errors import StrategyError
from reshard.named_tuple import NamedTuple
from reshard.storage.toml_tables import one_or_list, quoted_list, toml_string
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.candidates import DEFAULT_MATRIX, SIZED, WHOLE
from reshard.strategies.rules.model import NOT_SHOWN, LayoutRule, LayoutRules, Pipeline, Shown
from reshard.strategies.rules.pipeline import is_numbered
from reshard.strategies.rules.shown import (
    ShownShards,
    ShownWeight,
    SourceRun,
    layout_for,
    shown_shards,
    shown_weights,
    unshown_sizes,
)
from reshard.strategies.rules.sizes import NAMES, AxisSizes, condition
from reshard.strategies.rules.tensors import FullTensor, ModelTensors, patterns_for
from reshard.text.messages import listing

GROWTH = "growth"
DP_OUTERMOST = "dp-outermost"
ASSUMPTIONS = {
    GROWTH: "cuts grow with their axes and whole dimensions stay whole, beyond the largest sizes that were shown",
    DP_OUTERMOST: "data parallel is outermost in the device matrix where no strategy shows the order of devices; "
    "if that is wrong, ranks get other ranks' slices of the right shape",
}
"""The assumptions of --assume, and their meaning."""

_WHY = {
    "mp": "code may cap a cut, for example at the number of key and value heads",
    "cp": "the strategies do not show what context parallelism cuts",
    "ep": "the strategies do not show what expert parallelism cuts",
}
_NOT_SHOWN = toml_string(NOT_SHOWN)
# Cuts that a whole dimension may have at other sizes, and the size that must be above 1 for each.
_WIDER = (("mp", "mp"), ("mp*cp", "cp"))
_MP_NOT_SHOWN = "the strategies do not show what model parallelism cuts"


class Learned(NamedTuple):
    """The candidates that agree with the sources.

    Attributes:
        weights: per weight its candidates.
        shards: per weight, whether the optimizer may shard it.
        rules: a rule per weight with its candidates; none for weights without.
        unexplained: weights with cuts that no size explains.
    """

    weights: Mapping[str, ShownWeight]
    shards: Mapping[str, ShownShards]
    rules: LayoutRules
    unexplained: tuple[str, ...]


def learn(
    sources: Sequence[SourceRun], model: ModelTensors, assume: Sequence[str] = (), target: Optional[AxisSizes] = None
) -> Learned:
    """Read rules out of strategies.

    Args:
        sources: strategies with the sizes of their runs, at least one.
        model: the weights of the first, with their shapes.
        assume: names of `ASSUMPTIONS`.
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
        candidates = weight.candidates
        if DP_OUTERMOST in assume:
            candidates = tuple(each for each in candidates if "dp" in each.matrix[0].names) or candidates
        if not candidates and (recorded is None or not own_axes):
            unexplained.append(name)
            continue
        may_shard, shown_for = shards[name]
        rules.append(
            LayoutRule(
                (name,),
                "what the strategies show",
                candidates=candidates,
                recorded=recorded,
                optimizer_shard=may_shard,
                shard_shown_for=shown_for,
            )
        )
    shown = LayoutRules(
        sources[0].strategy.path, tuple(rules), _pipeline(sources, model), shown_for=_shown_for(sources, assume)
    )
    return Learned(weights, shards, shown, tuple(unexplained))


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


def _shown_for(sources: Sequence[SourceRun], assume: Sequence[str]) -> tuple[Shown, ...]:
    """Conditions on a target: no kind of parallelism that no source has, and no wider cuts by mp.

    Code caps cuts by mp, for example at the number of key and value heads. No known code caps others.
    """
    shown = []
    for name in SIZED:
        largest = max(source.sizes[name] for source in sources)
        hint = f"pass a strategy with a larger {name}, too: --also S --also-sizes ..."
        if largest == 1:
            shown.append(Shown(condition(f"{name}<=1"), hint))
        elif name == "mp" and GROWTH not in assume:
            hint += f"; or --assume {GROWTH}: {ASSUMPTIONS[GROWTH]}"
            shown.append(Shown(condition(f"{name}<={largest}"), hint))
    return tuple(shown)


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


def rules_text(learned: Learned, sources: Sequence[SourceRun], model: ModelTensors, shapes_known: bool) -> str:
    """The rules as a file, with marks for open values.

    Args:
        learned: the candidates.
        sources: the strategies.
        model: the weights.
        shapes_known: whether their shapes are known; if not, a whole dimension may be one that did not divide.
    """
    largest = {name: max(source.sizes[name] for source in sources) for name in ("mp", "cp")}
    wider = "" if shapes_known else "".join(f"|{cut}?" for cut, name in _WIDER if largest[name] > 1)
    shards = {name: _shard_text(shown) for name, shown in learned.shards.items()}
    no_shards = all(shard == _NOT_SHOWN for shard in shards.values())
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, weight in learned.weights.items():
        lines = tuple(_layout_lines(weight, wider, largest["mp"] > 1)) or (_layout_words(sources, name),)
        if weight.candidates:
            shard = None if no_shards else shards[name]
            lines += () if shard is None else (f"optimizer_shard = {shard}",)
            lines += ("trained = false",) if model.states and name not in model.states else ()
        groups.setdefault(lines, []).append(name)
    text = list(_head(learned, sources, model, no_shards))
    for lines, names in groups.items():
        match = f"match = {one_or_list(patterns_for(names, list(model.weights)))}"
        if learned.weights[names[0]].candidates:
            text += ["", "[[parameter]]", match, *lines]
        else:
            text += ["", f"# No size explains {lines[0]}. Add a rule for it:", "# [[parameter]]", f"# {match}"]
    return "\n".join(text) + "\n"


def _head(learned: Learned, sources: Sequence[SourceRun], model: ModelTensors, no_shards: bool) -> Iterator[str]:
    shown_by = ", ".join(f"{source.strategy.path} ({source.sizes.text})" for source in sources)
    yield f"# Rules for `reshard strategy make`, as shown by {shown_by}"
    yield f"shown_with = {quoted_list([source.sizes.text for source in sources])}"
    shown_for = learned.rules.shown_for
    if shown_for:
        yield ""
        yield "# Beyond these, the rules are unknown. Remove a condition if they are valid beyond it."
        yield "shown_for = ["
        for condition, _ in shown_for:
            name = condition.text.partition("<=")[0]
            why = _MP_NOT_SHOWN if condition.text == "mp<=1" else _WHY[name]
            yield f"    {toml_string(condition.text)},  # {why}"
        yield "]"
    if no_shards:
        yield ""
        yield "# The strategies do not show which parameters opt out of optimizer shards: true or false, also in rules"
        yield f"optimizer_shard = {_NOT_SHOWN}"
    states = Counter(model.states.values())
    if states:
        yield ""
        yield f"optimizer_states = {quoted_list(states.most_common(1)[0][0])}"
    yield ""
    yield "[pipeline]"
    pipeline = learned.rules.pipeline
    names = list(model.weights)
    for key, placed in (("first", pipeline.first), ("last", pipeline.last)):
        yield f"{key} = {quoted_list(patterns_for(placed, names))}"
    unplaced = [name for name in names if name not in (*pipeline.first, *pipeline.last) and not is_numbered(name)]
    if unplaced:
        yield "# The strategies do not show the stage of these; for several stages, put each in one of the lists:"
        yield from (f"#     {toml_string(pattern)}," for pattern in patterns_for(unplaced, names))


def _layout_words(sources: Sequence[SourceRun], name: str) -> str:
    layout = next(layout for source in sources for _, layout in source.holding(name))
    return f"device matrix {list(layout.device_matrix)}, tensor map {layout.map_text}"


def _layout_lines(weight: ShownWeight, wider: str, mp_shown: bool) -> Iterator[str]:
    """The lines of a weight's candidates; none without candidates.

    Args:
        weight: the weight.
        wider: the other cuts that a whole dimension may have.
        mp_shown: whether a strategy shows the cuts of model parallelism.
    """
    candidates = weight.candidates
    if all(cut == WHOLE for candidate in candidates for cut in candidate.cuts):
        candidates = candidates[:1]
    matrices = [quoted_list([axis.text for axis in matrix]) for matrix in dict.fromkeys(c.matrix for c in candidates)]
    if len(matrices) > 1:
        yield "# The strategies do not show the order of devices:"
        yield f"matrix = [{', '.join(matrices)}]"
    elif candidates and candidates[0].matrix != DEFAULT_MATRIX:
        yield f"matrix = {matrices[0]}"
    if candidates:
        cuts = [dict.fromkeys(cut.text for cut in of) for of in zip(*(candidate.cuts for candidate in candidates))]
        entries = ["|".join(of) if mp_shown or list(of) != [WHOLE.text] else NOT_SHOWN for of in cuts]
        yield f"map = {quoted_list([entry + wider if entry == WHOLE.text else entry for entry in entries])}"
    if any(candidate.nested for candidate in candidates):
        yield "nested = true"


def _shard_text(shown: ShownShards) -> Optional[str]:
    """The value of optimizer_shard; None for the default."""
    may_shard, shown_for = shown
    if may_shard is None or shown_for is not None:
        return _NOT_SHOWN
    if isinstance(may_shard, bool):
        return None if may_shard else "false"
    return toml_string(may_shard.text)
