"""Weights in strategies: their candidates that agree with all strategies, and their optimizer shards.

A strategy records in numbers which devices hold which slices. The parallelism behind a cut follows from the sizes of
the run, often not uniquely: data parallel 1 does not show the order of devices, model parallel 1 none of its
cuts. So all candidates are kept that give these slices at the sizes of every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from reshard.errors import StrategyError
from reshard.layout import Layout
from reshard.strategies.model import RecordedLayout, Stage, Strategy
from reshard.strategies.rules.candidates import SIZED, Candidate, Observation, candidates_showing, slices_by_device
from reshard.strategies.rules.model import MayShard
from reshard.strategies.rules.optimizer_shards import NO_SHARDS, UndecidedError, possible_record
from reshard.strategies.rules.sizes import AxisSizes
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
        """Refuse sizes that contradict the strategy."""
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
        """Whether the optimizer shards anything."""
        return any(layout.shard_size for stage in self.strategy.stages for layout in stage.layouts.values())

    def holding(self, name: str) -> list[tuple[Stage, Layout]]:
        """The stages that list a parameter."""
        return [(stage, stage.layouts[name]) for stage in self.strategy.stages if name in stage.layouts]


@dataclass(frozen=True)
class ShownWeight:
    """One weight in the sources.

    Attributes:
        tensor: the weight.
        candidates: all candidates that agree with the sources, the likeliest first; empty if none does.
    """

    tensor: FullTensor
    candidates: tuple[Candidate, ...]


def model_of(source: SourceRun, shapes: Optional[ModelTensors]) -> ModelTensors:
    """The weights that a strategy lists, with their shapes and their optimizer state.

    Args:
        source: the strategy.
        shapes: the model's tensors; if None, all dimensions get a size that everything divides.

    Raises:
        StrategyError: a weight's shape is unknown.
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


def shown_weights(sources: Sequence[SourceRun], model: ModelTensors) -> dict[str, ShownWeight]:
    """The candidates of every weight.

    Raises:
        StrategyError: a layout does not fit the weight's shape, or sources contradict each other.
    """
    cache: dict[object, tuple[Candidate, ...]] = {}
    weights = {}
    for name, tensor in model.weights.items():
        observed = _observed(sources, tensor)
        key = (tensor.shape, tuple(observed))
        if key not in cache:
            cache[key] = candidates_showing(tensor.shape, observed)
        weights[name] = ShownWeight(tensor, cache[key])
    return weights


def unshown_sizes(sources: Sequence[SourceRun], shown: Iterable[ShownWeight]) -> dict[SourceRun, list[str]]:
    """Sizes of a source's run that cut none of its weights with certainty.

    Context parallelism that cuts nothing cannot be distinguished from data parallelism; it must be counted as such.
    """
    uncut = {source: [name for name in SIZED if source.sizes[name] > 1] for source in sources}
    for weight in shown:
        certain = [set(candidate.cut_by) for candidate in weight.candidates]
        for source, names in uncut.items():
            if names and certain and source.holding(weight.tensor.name):
                uncut[source] = [name for name in names if not all(name in cut_by for cut_by in certain)]
    return {source: names for source, names in uncut.items() if names}


def _observed(sources: Sequence[SourceRun], tensor: FullTensor) -> list[Observation]:
    """The observed cuts of a weight, without duplicates."""
    observed: dict[Observation, None] = {}
    for source in sources:
        for stage, layout in source.holding(tensor.name):
            reading = layout_for(layout, tensor, source.strategy.path)
            recorded = source.recorded[stage.number][tensor.name]
            nested = None if recorded.tensor_shape is not None and not recorded.nested else recorded.nested
            observed[Observation(source.sizes, slices_by_device(reading), reading.device_matrix, nested)] = None
    return list(observed)


def layout_for(layout: Layout, tensor: FullTensor, path: str) -> Layout:
    """The layout, optimizer shards aside, with an entry per dimension of the tensor.

    Raises:
        StrategyError: it does not lay out a tensor of this shape.
    """
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


def shown_shards(
    sources: Sequence[SourceRun], model: ModelTensors, weights: Mapping[str, ShownWeight]
) -> dict[str, MayShard]:
    """Per weight, the optimizer shards that sources show.

    A weight without shards has opted out only if it is large enough, divisible, and in a run whose optimizer
    shards.
    """
    evidence = [(source, _ShardingRun(source, model)) for source in sources if source.has_shards]
    shards: dict[str, MayShard] = {}
    for name, weight in weights.items():
        # Code may opt a weight out where its cut is capped.
        observed: dict[bool, set[bool]] = {False: set(), True: set()}
        for source, run in evidence:
            capped = any(candidate.is_capped(source.sizes) for candidate in weight.candidates)
            for stage, layout in source.holding(name):
                shown = run.may_shard(weight.tensor, stage, layout)
                if shown is not None:
                    observed[capped].add(shown)
        below, beyond = (next(iter(shown)) if len(shown) == 1 else None for shown in observed.values())
        shards[name] = below, beyond
    return shards


class _ShardingRun:
    """The optimizer sharding of a source, as far as its strategy shows it."""

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

    def _bytes(self, tensor: FullTensor) -> Optional[int]:
        size = self._model.item_sizes.get(tensor.dtype) if tensor.dtype is not None else None
        return None if size is None else math.prod(tensor.shape) * size

    def may_shard(self, tensor: FullTensor, stage: Stage, layout: Layout) -> Optional[bool]:
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
