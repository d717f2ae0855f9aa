"""What strategies show of a model: per weight every way of cutting it that agrees with all of them.

A strategy says which devices hold which slices, in numbers. Which parallelism made a cut follows from the sizes of
its run, and often not alone: with data parallel 1 the order of devices is not shown, with model parallel 1 nothing of
its cuts. So per weight all named cuts known from the field are kept that give these very slices at the sizes of every
strategy. Where they come to the same slices for a target, it follows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from reshard.errors import StrategyError
from reshard.layout import Layout
from reshard.strategies.model import RecordedLayout, Stage, Strategy
from reshard.strategies.rules.model import WHOLE, Cut, Reading
from reshard.strategies.rules.orders import experts_across_model, matrices_for, strides
from reshard.strategies.rules.placement import Placement, Strided, place, strided_cuts
from reshard.strategies.rules.sizes import Sizes, product
from reshard.strategies.rules.tensors import FullTensor, ModelTensors, belonging_to_weights, states_by_weight
from reshard.text.messages import listing
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.text.products import ExpressionError
from reshard.text.wording import plural, quoted

_MP, _CP, _EP, _MP_CP = product("mp"), product("cp"), product("ep"), product("mp*cp")
_SIZED = ("mp", "cp", "ep")


@dataclass(frozen=True, eq=False)
class Source:
    """A strategy and the sizes of its run.

    Attributes:
        strategy: the strategy.
        recorded: per stage what its file records, word for word.
        sizes: of the run.

    Raises:
        StrategyError: the sizes are not those of the strategy.
    """

    strategy: Strategy
    recorded: Mapping[int, Mapping[str, RecordedLayout]]
    sizes: Sizes

    def __post_init__(self) -> None:
        """Refuse sizes that are not the strategy's."""
        strategy, sizes = self.strategy, self.sizes
        counts = {stage.device_count for stage in strategy.stages}
        if len(strategy.stages) != sizes.stages:
            stages = plural(len(strategy.stages), "stage")
            raise self._wrong(f"has {stages}, and {sizes.text} says {sizes.stages}")
        if counts != {sizes.stage_devices}:
            has = " and ".join(str(count) for count in sorted(counts))
            raise self._wrong(f"has {has} devices in a stage, and {sizes.text} are {sizes.stage_devices}")

    def _wrong(self, problem: str) -> StrategyError:
        return StrategyError(
            f"{self.strategy.path} {problem}", file=self.strategy.path, hint="say the sizes that this run had"
        )

    def holding(self, name: str) -> list[tuple[Stage, Layout]]:
        """The stages that list a parameter."""
        return [(stage, stage.layouts[name]) for stage in self.strategy.stages if name in stage.layouts]


@dataclass(frozen=True)
class ShownWeight:
    """What sources show of one weight.

    Attributes:
        tensor: the weight.
        readings: all ways of cutting it that agree with the sources, the likeliest first; empty where none does.
        capped: the cap of a cut that is narrower than its axis, if there is one.
    """

    tensor: FullTensor
    readings: tuple[Reading, ...]
    capped: Optional[int] = None


def model_of(source: Source, shapes: Optional[ModelTensors], others: Sequence[Source] = ()) -> ModelTensors:
    """The weights that a strategy lists, with their shapes and the optimizer state that it lists for them.

    Args:
        source: the strategy.
        shapes: the model's tensors; if None, all dimensions are of a size that everything divides.
        others: strategies that will be compared.

    Raises:
        StrategyError: a weight's shape is not known.
    """
    listed: dict[str, None] = dict.fromkeys(source.strategy.parameters)
    belonging = belonging_to_weights(listed)
    weights: dict[str, FullTensor] = {}
    missing: list[str] = []
    dividing = math.prod(one.sizes.stage_devices for one in (source, *others)) ** 2
    for name in listed:
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
            f"{shapes.path} does not have {plural(len(missing), 'parameter')} that {source.strategy.path} lists: "
            + listing(missing),
            file=shapes.path,
            parameter=missing[0],
            hint="pass the shapes of the same model",
        )
    states = states_by_weight(belonging)
    if shapes is None:
        return ModelTensors(source.strategy.path, weights, states)
    return ModelTensors(shapes.path, weights, states, shapes.item_sizes, shapes.other_shapes)


def shown_weights(sources: Sequence[Source], model: ModelTensors) -> dict[str, ShownWeight]:
    """What the sources show of every weight.

    Raises:
        StrategyError: a layout does not fit the weight's shape, or sources contradict each other.
    """
    cache: dict[object, tuple[tuple[Reading, ...], Optional[int]]] = {}
    found = {}
    for name, tensor in model.weights.items():
        observed = _observed(sources, tensor)
        key = (tensor.shape, tuple(observed))
        if key not in cache:
            cache[key] = _readings(tensor.shape, observed)
        found[name] = ShownWeight(tensor, *cache[key])
    return found


def unshown_sizes(sources: Sequence[Source], shown: Iterable[ShownWeight]) -> dict[Source, list[str]]:
    """Sizes that were said of a source, and that cut none of its weights.

    Context parallelism that cuts nothing cannot be told from data parallelism; it must be counted as such.
    """
    said = {source: [name for name in _SIZED if source.sizes[name] > 1] for source in sources}
    for weight in shown:
        certain = [cutting(reading) for reading in weight.readings]
        for source, names in said.items():
            if names and certain and source.holding(weight.tensor.name):
                said[source] = [name for name in names if not all(name in cutting for cutting in certain)]
    return {source: names for source, names in said.items() if names}


def cutting(reading: Reading) -> set[str]:
    """The sizes that cut."""
    return {name for cut in reading.cuts for factor in cut.factors for name in factor.names}


class _Observed(NamedTuple):
    """How one weight lies in one stage of a source; JSON does not tell whether it is nested."""

    sizes: Sizes
    slices: tuple[tuple[Strided, ...], ...]
    device_matrix: tuple[int, ...]
    nested: Optional[bool]


def _observed(sources: Sequence[Source], tensor: FullTensor) -> list[_Observed]:
    """How a weight lies, once per source and way."""
    found: dict[_Observed, None] = {}
    for source in sources:
        for stage, layout in source.holding(tensor.name):
            own = layout_for(layout, tensor, source.strategy.path)
            recorded = source.recorded[stage.number][tensor.name]
            nested = None if recorded.tensor_shape is not None and not recorded.nested else recorded.nested
            found[_Observed(source.sizes, strided_cuts(own), own.device_matrix, nested)] = None
    return list(found)


def _readings(shape: tuple[int, ...], observed: Sequence[_Observed]) -> tuple[tuple[Reading, ...], Optional[int]]:
    """All ways of cutting a shape that give what was observed, the likeliest first, and the cap of a narrow cut."""
    largest = {name: max(one.sizes[name] for one in observed) for name in _SIZED}
    nested = all(one.nested for one in observed)
    cuts = [_cuts(dimension, size, observed, largest) for dimension, size in enumerate(shape)]
    found: dict[Reading, bool] = {}
    for chosen in itertools.product(*cuts):
        by_dimension = [name for cut in chosen for factor in cut.factors for name in sorted(factor.names)]
        if {"ep", "mp"} <= {*by_dimension} and by_dimension.index("mp") < by_dimension.index("ep"):
            # Experts are the first dimension. Where both sizes are alike, the other reading comes to the same.
            continue
        for matrix in matrices_for(by_dimension, largest):
            reading = Reading(matrix, chosen, nested)
            placed = [_placed(reading, shape, one.sizes) for one in observed]
            if all(one and strided_cuts(one.layout) == seen.slices for one, seen in zip(placed, observed)):
                found[reading] = all(
                    one and one.device_matrix == seen.device_matrix for one, seen in zip(placed, observed)
                )
    # Experts that lie across model parallel ranks are cut through the Layout interface, which writes nested maps. That
    # of MindSpore 2.10 writes flat ones, and there it has to be stated: it would explain sizes that are not the run's.
    if any(one.nested is False for one in observed):
        found = {reading: same for reading, same in found.items() if not _across_model(reading)}
    caps = {cut.most for reading in found for cut in reading.cuts if cut.most is not None}
    distinct: dict[object, Reading] = {}
    for reading in sorted(found, key=lambda reading: not found[reading]):
        distinct.setdefault((reading.cuts, strides(reading.matrix, reading.cuts)), reading)
    return tuple(distinct.values()), caps.pop() if len(caps) == 1 else None


def _across_model(reading: Reading) -> bool:
    return "ep" in cutting(reading) and "mp" not in cutting(reading) and experts_across_model(reading.matrix)


def _placed(reading: Reading, shape: tuple[int, ...], sizes: Sizes) -> Optional[Placement]:
    try:
        return place(reading.matrix, reading.cuts, shape, sizes, reading.nested, ())
    except ExpressionError:
        return None


def _cuts(dimension: int, size: int, observed: Sequence[_Observed], largest: Mapping[str, int]) -> list[Cut]:
    """The named cuts of a dimension that make as many slices as were observed.

    Sizes that are 1 in all sources are left out: of larger ones nothing is shown anyway.
    """
    names = [name for name, counts in ((_MP, "mp"), (_MP_CP, "cp"), (_EP, "ep")) if largest[counts] > 1]
    slices = [math.prod(count for _, count in one.slices[dimension]) for one in observed]
    found = [WHOLE] if set(slices) == {1} else []
    for name in names:
        wanted = [name.whole(one.sizes) for one in observed]
        if all(count == want for count, want in zip(slices, wanted)):
            found.append(Cut((name,)))
        elif all(count == (1 if size % want else want) for count, want in zip(slices, wanted)):
            found.append(Cut((name,), where_divides=True))
    for most in sorted({count for count, one in zip(slices, observed) if 1 < count < one.sizes["mp"]}):
        if all(count == min(one.sizes["mp"], most) for count, one in zip(slices, observed)):
            found.append(Cut((_MP,), most))
    return found


def layout_for(layout: Layout, tensor: FullTensor, path: str) -> Layout:
    """The layout, optimizer shards aside, with an entry per dimension of the tensor.

    Raises:
        StrategyError: it does not lay out a tensor of this shape.
    """
    readings = [one for one in layout.without_shards().regroupings() if len(one.tensor_map) == len(tensor.shape)]
    # JSON may be read in several ways; without --shapes the tensor's shape only stands for all that can be cut so.
    for reading in (*(one for one in readings if one.recorded_shape == tensor.shape), *readings):
        return reading
    raise StrategyError(
        f"{path}: {quoted(tensor.name)}: tensor map {layout.map_text} does not lay out shape {list(tensor.shape)}",
        file=path,
        parameter=tensor.name,
        hint="pass the shapes of the same model",
    )
