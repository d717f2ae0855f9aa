"""Making a strategy: rules, shapes and sizes in; what a compile would record out, or what does not follow.

1. Every weight takes the first rule that fits its name. Where a rule leaves open how it is cut, all ways
   are tried; they must come to the same slices.
2. Weights go to stages: layers by number, others by what ``[pipeline]`` says.
3. The optimizer's shards are those that the compiler makes.
4. Optimizer state lies as its weight, and so do accumulated gradients, which pipelines have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from reshard.errors import StrategyError
from reshard.layout import Layout
from reshard.storage.toml_tables import quoted_list, toml_string
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.communication import SERVER, device_count_allowed, forbidden_group
from reshard.strategies.rules.model import DEFAULT_MATRIX, WHOLE, Cut, Reading, Rule, Rules, merged
from reshard.strategies.rules.optimizer_shards import (
    NO_SHARDS,
    ShardSetting,
    UndecidedError,
    shard_record,
)
from reshard.strategies.rules.pipeline import stages_of
from reshard.strategies.rules.placement import Axis, Placement, place, strided_cuts
from reshard.strategies.rules.problems import Problems, UnsettledError
from reshard.strategies.rules.sizes import EXPERTS, NoReadingError, Sizes, product
from reshard.strategies.rules.tensors import FullTensor, ModelTensors
from reshard.text.messages import listing
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.text.products import ExpressionError
from reshard.text.wording import rank_ranges

MODEL = "mp"
# More readings of a rule than so many say nothing.
_MOST_READINGS = 4096


@dataclass(frozen=True)
class Target:
    """The run whose strategy is made.

    Attributes:
        sizes: devices per kind of parallelism.
        shards: how its optimizer shards.
        layers_per_stage: layers per stage, in rounds where the pipeline is interleaved; evenly if None.
        weights_only: without optimizer state and gradients, as for inference.
    """

    sizes: Sizes
    shards: ShardSetting
    layers_per_stage: Optional[tuple[int, ...]] = None
    weights_only: bool = False


@dataclass(frozen=True)
class MadeStage:
    """One stage of a made strategy.

    Attributes:
        number: of the stage.
        first_rank: global rank of its first device.
        layouts: the record per parameter.
        shapes: full shape per parameter.
        axes: per parameter the names of its device matrix's axes.
    """

    number: int
    first_rank: int
    layouts: dict[str, RecordedLayout] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)


def make_strategy(rules: Rules, tensors: ModelTensors, target: Target, where: str) -> list[MadeStage]:
    """Make the strategy of a run that never was.

    Args:
        rules: what is said of the model.
        tensors: the model's tensors.
        target: the run.
        where: where lines that settle something are put, for messages.

    Returns:
        The stages, in order.

    Raises:
        StrategyError: something does not follow, contradicts itself, or would not be compiled.
        UsageError: layers cannot be divided among stages so.
    """
    _check_devices(target)
    _check_shown(rules, target.sizes)
    names = list(tensors.weights)
    states = {} if target.weights_only else _states(rules, tensors)
    problems = Problems()
    placed: dict[str, tuple[Placement, Rule]] = {}
    cut_by: set[str] = set()
    known: dict[tuple[int, ...], Rule] = {}
    cache: dict[object, tuple[Placement, frozenset[str]]] = {}
    for name, tensor in tensors.weights.items():
        try:
            rule = _rule_of(rules, tensor, known)
            key = (id(rule), tensor.shape)
            if key not in cache:
                cache[key] = _placement(rule, tensor, target.sizes, rules.shown_with)
            placed[name] = cache[key][0], rule
            cut_by |= cache[key][1]
        except UnsettledError as problem:
            problems.add(name, problem)
    problems.raise_if_any(rules.path, names, where)
    _check_cutting(rules, target.sizes, cut_by)
    stage_of = stages_of(names, rules.pipeline, target.sizes.stages, target.layers_per_stage, rules.path)
    devices = target.sizes.stage_devices
    made = [MadeStage(number, number * devices) for number in range(target.sizes.stages)]
    for name, (placement, rule) in placed.items():
        stage, tensor = made[stage_of[name]], tensors.weights[name]
        try:
            record = _with_shards(placement, rule, rules, tensors, tensor, stage, target)
        except UnsettledError as problem:
            problems.add(name, problem)
            continue
        prefixes = [f"{prefix}." for prefix in states.get(name, ())]
        if name in states and target.sizes.stages > 1:
            prefixes.append(ACCUMULATED_GRADIENTS)
        axes = tuple(axis.name for axis in placement.axes)
        for prefix in ("", *prefixes):
            stage.layouts[prefix + name] = record
            stage.shapes[prefix + name] = tensor.shape
            stage.axes[prefix + name] = axes
    problems.raise_if_any(rules.path, names, where)
    _check_groups(made, placed, stage_of)
    return made


def _check_devices(target: Target) -> None:
    sizes = target.sizes
    devices = sizes.stage_devices * sizes.stages
    if not device_count_allowed(devices):
        raise StrategyError(
            f"{sizes.text}: {devices} devices; MindSpore's compiler takes 1, 2, 4 or a multiple of {SERVER}",
            hint="choose sizes of such a product",
        )
    if target.shards.size > devices:
        raise StrategyError(
            f"--optimizer-shards {target.shards.size} are more than the {devices} devices, which the compiler refuses",
            hint="-1 shards each weight over all its replicas",
        )


def _check_shown(rules: Rules, sizes: Sizes) -> None:
    """See that the target is not beyond what the rules' sources showed."""
    for one, hint in rules.shown_for:
        try:
            holds = one.holds(sizes)
        except ExpressionError as error:
            raise StrategyError(f"{rules.path}: shown_for: {one.text}: {error}", file=rules.path) from error
        if not holds:
            raise StrategyError(
                f"{rules.path} shows nothing beyond {one.text}, and the target has {sizes.text}",
                file=rules.path,
                hint=hint or f"if its cuts are the same there, take {toml_string(one.text)} out of shown_for",
            )


def _states(rules: Rules, tensors: ModelTensors) -> Mapping[str, Sequence[str]]:
    if tensors.other_shapes:
        raise StrategyError(
            f"{tensors.path}: optimizer state of another shape than its weight's; how it is cut is not known: "
            + listing(tensors.other_shapes),
            file=tensors.path,
            parameter=tensors.other_shapes[0],
            hint="--weights-only leaves optimizer state out",
        )
    if tensors.states:
        return tensors.states
    if rules.optimizer_states is not None:
        prefixes = [prefix.rstrip(".") for prefix in rules.optimizer_states]
        return {
            name: prefixes
            for name in tensors.weights
            if merged([rule for rule in rules.rules if rule.matches(name)]).trained
        }
    raise StrategyError(
        f"{tensors.path} lists no optimizer state, and {rules.path} has no optimizer_states",
        file=rules.path,
        hint="add --weights-only for a target without optimizer state, or put this line at the top of the rules "
        '(built-in ones: reshard strategy rules NAME > FILE):\noptimizer_states = ["adam_m", "adam_v"]',
    )


def _rule_of(rules: Rules, tensor: FullTensor, known: dict[tuple[int, ...], Rule]) -> Rule:
    """The first rule that fits, with what is said of it before.

    Raises:
        UnsettledError: none fits.
    """
    fitting: list[Rule] = []
    for rule in rules.rules:
        if rule.matches(tensor.name):
            fitting.append(rule)
            if rule.says_cuts and rule.said is None:
                break
    key = tuple(map(id, fitting))
    if key not in known:
        known[key] = merged(fitting)
    if known[key].says_cuts:
        return known[key]
    whole = quoted_list(["None"] * len(tensor.shape))
    raise UnsettledError(
        f"no rule fits (shape {list(tensor.shape)})",
        [[f"map = {whole}"]],
        'if it is whole; "mp" in the place of a dimension that mp cuts',
    )


def _placement(
    rule: Rule, tensor: FullTensor, sizes: Sizes, shown_with: Sequence[Sizes]
) -> tuple[Placement, frozenset[str]]:
    """Where the slices lie, and which sizes cut.

    Raises:
        UnsettledError: the rule can mean different slices, or none.
    """
    if rule.recorded is not None:
        return _as_recorded(rule.recorded), frozenset(sizes.named)
    found: dict[object, tuple[Reading, Placement]] = {}
    refused: dict[str, None] = {}
    impossible: dict[str, None] = {}
    for reading in _allowed(list(_readings(rule, tensor, sizes)), rule, tensor, shown_with):
        try:
            placed = place(reading.matrix, reading.cuts, tensor.shape, sizes, reading.nested, rule.split_sizes)
        except NoReadingError as error:
            impossible[str(error)] = None
        except ExpressionError as error:
            refused[str(error)] = None
        else:
            found.setdefault(strided_cuts(placed.layout), (reading, placed))
    ways = [reading for reading, _ in found.values()]
    if refused or not found:
        # A way that does not compile may be the true one.
        raise UnsettledError(f"{rule.where}: {'; '.join(refused or impossible)}", _ways(ways), "if it is cut otherwise")
    if len(found) > 1:
        options = [f"--set {switch}={value}" for switch, value, _ in rule.variants]
        raise UnsettledError(f"{rule.where} can mean {len(found)} layouts", _ways(ways), "either", options)
    ((reading, placed),) = found.values()
    cutting = [cut for cut, slices in zip(reading.cuts, placed.layout.tensor_cuts) if slices > 1]
    return placed, frozenset(name for cut in cutting for factor in cut.factors for name in factor.names)


def _readings(rule: Rule, tensor: FullTensor, sizes: Sizes) -> Iterator[Reading]:
    """All ways in which a rule can be meant, the one that is written first first."""
    if rule.readings:
        yield from rule.readings
        return
    entries = ((WHOLE,),) * len(tensor.shape) if rule.entries is None else rule.entries
    if len(entries) != len(tensor.shape):
        raise UnsettledError(
            f"{rule.where}: map has {len(entries)} entries, and the tensor {len(tensor.shape)} dimensions "
            f"(shape {list(tensor.shape)})"
        )
    alternatives = [_everything(sizes) if entry is None else entry for entry in entries]
    for number, (matrix, cuts) in enumerate(itertools.product(rule.matrices, itertools.product(*alternatives))):
        if number >= _MOST_READINGS:
            raise UnsettledError(f"{rule.where} can mean more than {_MOST_READINGS} layouts")
        yield Reading(matrix, cuts, rule.nested)


def _allowed(
    readings: Sequence[Reading], rule: Rule, tensor: FullTensor, shown_with: Sequence[Sizes]
) -> Sequence[Reading]:
    """Those of several readings that come to what was shown: to the same slices as the first."""
    if len(readings) == 1 or rule.readings:
        return readings
    kept = list(readings)
    for sizes in shown_with:
        shown = [_slices_of(reading, rule, tensor, sizes) for reading in kept]
        kept = [reading for reading, slices in zip(kept, shown) if slices == shown[0]]
    return kept


def _slices_of(reading: Reading, rule: Rule, tensor: FullTensor, sizes: Sizes) -> object:
    try:
        found = place(reading.matrix, reading.cuts, tensor.shape, sizes, reading.nested, rule.split_sizes)
    except ExpressionError:
        return None
    return strided_cuts(found.layout)


def _everything(sizes: Sizes) -> tuple[Cut, ...]:
    """What a dimension of which nothing is shown may be cut over, as far as is known from the field."""
    names = [MODEL, EXPERTS, f"{MODEL}*cp"] if sizes["cp"] > 1 else [MODEL, EXPERTS]
    cuts = [Cut((product(name),), where_divides=True) for name in names if product(name).whole(sizes) > 1]
    return (WHOLE, *cuts)


def _ways(readings: Sequence[Reading]) -> Iterator[list[str]]:
    several = len({reading.matrix for reading in readings}) > 1
    for matrix, cuts, nested in readings:
        yield [
            *(
                [f"matrix = {quoted_list([axis.text for axis in matrix])}"]
                if several or matrix != DEFAULT_MATRIX
                else []
            ),
            f"map = {quoted_list([cut.text for cut in cuts])}",
            *(["nested = true"] if nested else []),
        ]


def _as_recorded(recorded: RecordedLayout) -> Placement:
    axes = tuple(
        Axis(f"axis {len(recorded.device_matrix) - 1 - place}", size)
        for place, size in enumerate(recorded.device_matrix)
    )
    return Placement(axes, recorded.dimensions, recorded.nested, recorded.split_sizes if recorded.split_offsets else ())


def _with_shards(
    placement: Placement,
    rule: Rule,
    rules: Rules,
    tensors: ModelTensors,
    tensor: FullTensor,
    stage: MadeStage,
    target: Target,
) -> RecordedLayout:
    """The record, with the optimizer's shards.

    Raises:
        UnsettledError: whether it is sharded does not follow.
    """
    try:
        may_shard = rule.may_shard(target.sizes)
    except ExpressionError as error:
        raise UnsettledError(f"{rule.where}: optimizer_shard: {error}") from error
    if may_shard is False:
        return placement.recorded()
    dtype = rule.dtype or tensor.dtype or rules.dtype
    item_size = tensors.item_sizes.get(dtype) if dtype is not None else None
    if dtype is not None and item_size is None:
        raise UnsettledError(f"{dtype} is no element type that MindSpore has")
    try:
        record = shard_record(placement.layout, stage.first_rank, tensor.shape, item_size, target.shards)
    except UndecidedError as error:
        raise UnsettledError(
            str(error), () if item_size is not None else (('dtype = "Float32"',),), "its element type in training"
        ) from error
    if record != NO_SHARDS and may_shard is None:
        raise UnsettledError(
            "whether the optimizer may shard them is not shown",
            (("optimizer_shard = false",), ("optimizer_shard = true",)),
            "either",
        )
    return placement.recorded(*record)


def _check_cutting(rules: Rules, sizes: Sizes, cut_by: set[str]) -> None:
    for name in (MODEL, EXPERTS):
        if sizes[name] > 1 and name not in cut_by:
            raise StrategyError(
                f"{rules.path}: {name}={sizes[name]} cuts no parameter",
                file=rules.path,
                hint=f"leave {name} out of the sizes, or say what it cuts",
            )


def _check_groups(
    made: Sequence[MadeStage], placed: Mapping[str, tuple[Placement, Rule]], stage_of: Mapping[str, int]
) -> None:
    seen: set[tuple[Layout, int]] = set()
    for name, (placement, _) in placed.items():
        stage = made[stage_of[name]]
        offset = stage.first_rank % SERVER
        if (placement.layout, offset) in seen:
            continue
        seen.add((placement.layout, offset))
        group = forbidden_group(placement.layout, offset)
        if group:
            ranks = [rank + stage.first_rank - offset for rank in group]
            raise StrategyError(
                f"{name!r}: device matrix {list(placement.device_matrix)} has {rank_ranges(ranks)} as a group, which "
                "MindSpore's compiler refuses on Ascend",
                parameter=name,
                hint=f"every server of {SERVER} must have the same devices of a group: all, a half, or pairs of them",
            )
