"""Rules from strategies: the candidates that agree with them.

A strategy records in numbers which devices hold which slices. The parallelism behind a cut follows from the sizes of
the run, often not uniquely: data parallel 1 does not show the order of devices, model parallel 1 none of its
cuts. So all candidates are kept that give these slices at the sizes of every strategy. Nothing is assumed beyond the
strategies: a cut may not grow with its axis, since code may cap it, and the order of devices may be unusual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import StrategyError
from reshard.layout import Layout
from reshard.strategies.model import RecordedLayout, Stage, Strategy
from reshard.strategies.rules.candidates import (
    NAMES,
    SIZED,
    AxisSizes,
    Candidate,
    Observation,
    candidates_showing,
    slices_by_device,
)
from reshard.strategies.rules.make import is_numbered
from reshard.strategies.rules.optimizer_shards import NO_SHARDS, UndecidedError, possible_record
from reshard.strategies.rules.rules import LayoutRule, LayoutRules, MayShard, Pipeline
from reshard.strategies.rules.tensors import FullTensor, ModelTensors, belonging_to_weights, states_by_weight
from reshard.text.messages import listing, plural, quoted
from reshard.text.names import ACCUMULATED_GRADIENTS


@dataclass(frozen=True, eq=False)
class SourceRun:
    """A strategy and the sizes of its run.

    Attributes:
        strategy: the strategy.
        recorded: per stage the records of its file, unchanged.
        sizes: of the run.

    Raises:
        StrategyError: the sizes contradict the strategy.
    """

    strategy: Strategy
    recorded: Mapping[int, Mapping[str, RecordedLayout]]
    sizes: AxisSizes

    def __post_init__(self) -> None:
        strategy, sizes = self.strategy, self.sizes
        counts = {stage.device_count for stage in strategy.stages}
        if len(strategy.stages) != sizes.stages:
            stages = plural(len(strategy.stages), "stage")
            raise self._wrong(f"has {stages}, and {sizes.text} has {sizes.stages}")
        if counts != {sizes.stage_devices}:
            devices = " and ".join(str(count) for count in sorted(counts))
            raise self._wrong(f"has {devices} devices in a stage, and {sizes.text} are {sizes.stage_devices}")

    def _wrong(self, problem: str) -> StrategyError:
        return StrategyError(
            f"{self.strategy.path} {problem}", file=self.strategy.path, hint="give the sizes of this run"
        )

    @property
    def has_shards(self) -> bool:
        return any(layout.shard_size for stage in self.strategy.stages for layout in stage.layouts.values())

    def holding(self, name: str) -> list[tuple[Stage, Layout]]:
        return [(stage, stage.layouts[name]) for stage in self.strategy.stages if name in stage.layouts]


def model_of(source: SourceRun, shapes: ModelTensors | None) -> ModelTensors:
    """The weights that a strategy lists, with their shapes and their optimizer state.

    Args:
        source: the strategy.
        shapes: the model's tensors; if None, all dimensions get a size that everything divides.
    """
    parameters: dict[str, None] = dict.fromkeys(source.strategy.parameters)
    belonging = belonging_to_weights(parameters)
    weights: dict[str, FullTensor] = {}
    missing: list[str] = []
    dividing = source.sizes.stage_devices**2
    for name in parameters:
        if name in belonging:
            continue
        if shapes is None:
            dimensions = len(source.holding(name)[0][1].tensor_map)
            weights[name] = FullTensor(name, (dividing,) * dimensions)
        elif name in shapes.weights:
            weights[name] = shapes.weights[name]
        elif not name.startswith(ACCUMULATED_GRADIENTS):
            missing.append(name)
    if missing and shapes is not None:
        raise StrategyError(
            f"{shapes.path} lacks {plural(len(missing), 'parameter')} of {source.strategy.path}: " + listing(missing),
            file=shapes.path,
            parameter=missing[0],
            hint="pass the shapes of the same model",
        )
    states = states_by_weight(belonging)
    if shapes is None:
        return ModelTensors(source.strategy.path, weights, states)
    return ModelTensors(shapes.path, weights, states, shapes.item_sizes, shapes.other_shapes)


def _candidates_of(sources: Sequence[SourceRun], model: ModelTensors) -> dict[str, tuple[Candidate, ...]]:
    """Per weight all candidates that agree with the sources, the likeliest first; none if no size explains its cut."""
    cache: dict[object, tuple[Candidate, ...]] = {}
    candidates = {}
    for name, tensor in model.weights.items():
        observed = _observed(sources, tensor)
        key = (tensor.shape, tuple(observed))
        if key not in cache:
            cache[key] = candidates_showing(tensor.shape, observed)
        candidates[name] = cache[key]
    return candidates


def _observed(sources: Sequence[SourceRun], tensor: FullTensor) -> list[Observation]:
    """The observed cuts of a weight, without duplicates."""
    observed: dict[Observation, None] = {}
    for source in sources:
        for stage, layout in source.holding(tensor.name):
            reading = _layout_for(layout, tensor, source.strategy.path)
            recorded = source.recorded[stage.number][tensor.name]
            nested = None if recorded.tensor_shape is not None and not recorded.nested else recorded.nested
            observed[Observation(source.sizes, slices_by_device(reading), reading.device_matrix, nested)] = None
    return list(observed)


def _layout_for(layout: Layout, tensor: FullTensor, path: str) -> Layout:
    """The layout, optimizer shards aside, with an entry per dimension of the tensor."""
    # JSON may be read in several ways. Without --shapes, the shape is only one that everything divides.
    readings = [one for one in layout.without_shards().regroupings() if len(one.tensor_map) == len(tensor.shape)]
    for reading in (*(one for one in readings if one.recorded_shape == tensor.shape), *readings):
        return reading
    raise StrategyError(
        f"{path}: {quoted(tensor.name)}: tensor map {layout.map_text} does not lay out shape {list(tensor.shape)}",
        file=path,
        parameter=tensor.name,
        hint="pass the shapes of the same model",
    )


def _shown_shards(
    sources: Sequence[SourceRun], model: ModelTensors, candidates: Mapping[str, Sequence[Candidate]]
) -> dict[str, MayShard]:
    """Per weight, the optimizer shards that sources show.

    A weight without shards has opted out only if it is large enough, divisible, and in a run whose optimizer
    shards.
    """
    evidence = [(source, _ShardingRun(source, model)) for source in sources if source.has_shards]
    shards: dict[str, MayShard] = {}
    for name, of_weight in candidates.items():
        # Code may opt a weight out where its cut is capped.
        observed: dict[bool, set[bool]] = {False: set(), True: set()}
        for source, run in evidence:
            capped = any(candidate.is_capped(source.sizes) for candidate in of_weight)
            for stage, layout in source.holding(name):
                shown = run.may_shard(model.weights[name], stage, layout)
                if shown is not None:
                    observed[capped].add(shown)
        below, beyond = (next(iter(shown)) if len(shown) == 1 else None for shown in observed.values())
        shards[name] = below, beyond
    return shards


class _ShardingRun:
    def __init__(self, source: SourceRun, model: ModelTensors) -> None:
        self._model = model
        sharded = [
            (model.weights[name], layout)
            for stage in source.strategy.stages
            for name, layout in stage.layouts.items()
            if layout.shard_size and name in model.weights
        ]
        sizes = {layout.shard_size for _, layout in sharded}
        self._all_replicas = -1 in sizes
        self._largest = max(sizes, default=0)
        # The configured number is the shards of a weight with more replicas than shards.
        self._exact = any(layout.shard_size < layout.replica_count for _, layout in sharded)
        known_bytes = (self._bytes(tensor) for tensor, _ in sharded)
        self._sufficient = min((size for size in known_bytes if size is not None), default=None)

    def _bytes(self, tensor: FullTensor) -> int | None:
        size = self._model.item_sizes.get(tensor.dtype) if tensor.dtype is not None else None
        return None if size is None else math.prod(tensor.shape) * size

    def may_shard(self, tensor: FullTensor, stage: Stage, layout: Layout) -> bool | None:
        """Whether the optimizer may shard a weight; None if its layout does not show it."""
        if layout.shard_size:
            return True
        size = self._bytes(tensor)
        if size is None or self._sufficient is None or size < self._sufficient:
            return None
        replicas = layout.replica_count
        if not (self._all_replicas or self._exact or replicas <= self._largest):
            return None
        configured = -1 if self._all_replicas else min(self._largest, max(replicas, 2))
        try:
            record = possible_record(layout.without_shards(), stage.first_rank, tensor.shape, configured)
        except UndecidedError:
            return None
        return None if record == NO_SHARDS else False


def learn(
    sources: Sequence[SourceRun],
    model: ModelTensors,
    target: AxisSizes | None = None,
    stated: Sequence[LayoutRule] = (),
) -> LayoutRules:
    """A rule per weight with the candidates that agree with the strategies.

    Args:
        sources: strategies with the sizes of their runs, at least one.
        model: the weights of the first, with their shapes.
        target: if equal to a source's sizes, its layouts are copied.
        stated: rules of weights that may have cuts that no size explains.

    Raises:
        StrategyError: no size explains the cuts of a weight, or a size cuts no weight with certainty.
    """
    candidates = _candidates_of(sources, model)
    alike = next((source for source in sources if target is not None and _same(source.sizes, target)), None)
    # The cuts of a model's own axes are unknown; layouts with them can only be copied.
    own_axes = any(name not in NAMES for source in sources for name in source.sizes.named)
    # Weights without candidates are reported below.
    if not own_axes and all(candidates.values()):
        for source in sources:
            _check_sizes_cut(source, candidates)
    shards = _shown_shards(sources, model, candidates)
    rules = []
    unexplained = []
    for name, of_weight in candidates.items():
        recorded = _recorded(alike, model.weights[name]) if alike is not None else None
        if not of_weight and (recorded is None or not own_axes):
            if not any(rule.matches(name) and rule.has_cuts for rule in stated):
                unexplained.append(name)
            continue
        where = "what the strategies show"
        rules.append(LayoutRule((name,), where, candidates=of_weight, recorded=recorded, optimizer_shard=shards[name]))
    if unexplained:
        raise _unexplained(unexplained, sources)
    path = sources[0].strategy.path
    return LayoutRules(path, tuple(rules), _pipeline(sources, model), shown=_shown(sources))


def _same(first: AxisSizes, second: AxisSizes) -> bool:
    names = {*first.named, *second.named} - {"pp"}
    return all(first.named.get(name) == second.named.get(name) for name in names)


def _check_sizes_cut(source: SourceRun, candidates: Mapping[str, Sequence[Candidate]]) -> None:
    """Refuse sizes of a source's run that cut none of its weights with certainty.

    Context parallelism that cuts nothing cannot be distinguished from data parallelism; it must be counted as such.
    """
    of_source = [of_weight for name, of_weight in candidates.items() if source.holding(name)]
    for name in SIZED:
        if source.sizes[name] == 1 or any(all(name in each.cut_by for each in of_weight) for of_weight in of_source):
            continue
        where = f"{source.strategy.path}: {name}={source.sizes[name]}"
        hint = "give the sizes of this run"
        equal = [other for other in SIZED if other != name and source.sizes[other] == source.sizes[name]]
        if equal:
            hint += (
                f"; equal sizes of {' and '.join([name, *equal])} cannot be told apart: add a strategy of the model "
                "for other sizes with --also FILE --also-sizes ..."
            )
        if name == "cp":
            hint = "count context parallelism that cuts nothing as data parallelism: in dp, without cp"
        raise StrategyError(f"{where} cuts no parameter with certainty", file=source.strategy.path, hint=hint)


def _recorded(source: SourceRun, tensor: FullTensor) -> RecordedLayout | None:
    """A weight's record in a source, without optimizer shards, one entry per dimension; None if it is not listed."""
    holding = source.holding(tensor.name)
    if not holding:
        return None
    stage, layout = holding[0]
    reading = _layout_for(layout, tensor, source.strategy.path)
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


def uneven_source(sources: Sequence[SourceRun], layers: Mapping[str, int]) -> str | None:
    """A message about a source with uneven layers per stage; None if all are even."""
    for source in sources:
        counts = [len({layers[name] for name in stage.layouts if name in layers}) for stage in source.strategy.stages]
        if len(set(counts)) > 1:
            return f"{source.strategy.path} has {', '.join(map(str, counts))} layers per stage"
    return None


def _unexplained(names: Sequence[str], sources: Sequence[SourceRun]) -> StrategyError:
    """The error of weights with cuts that no size explains."""
    layout = next(layout for source in sources for _, layout in source.holding(names[0]))
    return StrategyError(
        f"{sources[0].strategy.path}: no size explains device matrix {list(layout.device_matrix)}, tensor map "
        f"{layout.map_text}: " + listing(names),
        file=sources[0].strategy.path,
        parameter=names[0],
        hint="check the sizes. A model with a device grid of its own has names of its own for its "
        "axes, as in x=2,y=4, and is derived for the same sizes alone",
    )
