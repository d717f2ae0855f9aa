"""Making a strategy: rules, shapes and sizes in; the records of a compile out, or an error with what is undecided.

1. Every weight has the first rule that matches its name. Where the rule leaves its cuts open, all candidates are
   tried; they must give the same slices.
2. Weights go to stages: layers by number, others by ``[pipeline]``.
3. The optimizer's shards are those that the compiler makes.
4. Optimizer state and, in pipelines, accumulated gradients have the layout of their weight.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.errors import StrategyError, UsageError
from reshard.layout import Layout
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.candidates import (
    DEFAULT_MATRIX,
    WHOLE,
    AxisSizes,
    Candidate,
    NoCandidateError,
    slices_by_device,
)
from reshard.strategies.rules.optimizer_shards import (
    NO_SHARDS,
    SERVER,
    ShardSetting,
    UndecidedError,
    device_count_allowed,
    forbidden_group,
    shard_record,
)
from reshard.strategies.rules.rules import LAYER, LayoutRule, LayoutRules, Pipeline
from reshard.strategies.rules.tensors import FullTensor, ModelTensors, patterns_for
from reshard.text.globs import Glob, matcher
from reshard.text.messages import block, listing, plural, quoted, rank_ranges
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.text.products import ExpressionError

_LAYER_NUMBER = re.compile(r"(?:^|(?<=\.))(0|[1-9][0-9]{0,5})(?=\.)")


@dataclass(frozen=True)
class TargetRun:
    """The run whose strategy is made.

    Attributes:
        sizes: devices per kind of parallelism.
        shards: sharding by its optimizer.
        layers_per_stage: layers per stage, in rounds if the pipeline is interleaved; None for an even division.
        weights_only: without optimizer state and gradients, as for inference.
    """

    sizes: AxisSizes
    shards: ShardSetting
    layers_per_stage: tuple[int, ...] | None = None
    weights_only: bool = False


@dataclass(frozen=True)
class MadeStage:
    """One stage of a made strategy.

    Attributes:
        number: number of the stage.
        first_rank: global rank of its first device.
        layouts: the record per parameter.
        shapes: full shape per parameter.
    """

    number: int
    first_rank: int
    layouts: dict[str, RecordedLayout] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Unsettled(NamedTuple):
    """A value that rules leave open.

    Attributes:
        problem: in words.
        settled_by: per possibility, the lines of a rule without its match; none if rules cannot settle the value.
        comment: the comment above these lines.
        options: options that settle the value, one of them correct for the run; then no lines are printed.
    """

    problem: str
    settled_by: tuple[tuple[str, ...], ...] = ()
    comment: str = ""
    options: tuple[str, ...] = ()


class UnsettledError(Exception):
    """Rules leave a value of one parameter open; its arguments are those of `Unsettled`."""

    @property
    def unsettled(self) -> Unsettled:
        return Unsettled(*self.args)


class _Placed(NamedTuple):
    """A weight's layout and its record, without optimizer shards.

    Attributes:
        layout: the layout.
        nested: whether the record has a map per dimension.
        rule: the rule.
        cut_by: the sizes that cut the weight.
        may_shard: whether the optimizer may shard it, None if unknown.
    """

    layout: Layout
    nested: bool
    rule: LayoutRule
    cut_by: frozenset[str]
    may_shard: bool | None


def make_strategy(rules: LayoutRules, tensors: ModelTensors, target: TargetRun, where: str) -> list[MadeStage]:
    """Make the strategy of a run that was never compiled.

    Args:
        rules: rules of the model.
        tensors: tensors of the model.
        target: the run.
        where: file for the lines of an open value, for messages.

    Returns:
        The stages, in order.

    Raises:
        StrategyError: a value is undecided, contradicts another, or would not be compiled.
        UsageError: layers cannot be divided among stages in this way.
    """
    _check_devices(target)
    names = list(tensors.weights)
    states = {} if target.weights_only else _states(rules, tensors, where)
    unsettled: dict[Unsettled, list[str]] = {}
    placed: dict[str, _Placed] = {}
    cache: dict[object, _Placed] = {}
    for name, tensor in tensors.weights.items():
        try:
            rule = rules.rule_for(name)
            key = (id(rule), tensor.shape)
            if key not in cache:
                cache[key] = _placed(rule, tensor.shape, target.sizes, rules.shown)
            placed[name] = cache[key]
        except UnsettledError as problem:
            unsettled.setdefault(problem.unsettled, []).append(name)
    _check_settled(unsettled, rules.path, names, where)
    _check_cutting(rules, target.sizes, {size for each in placed.values() for size in each.cut_by}, where)
    stage_of = stages_of(names, rules.pipeline, target.sizes.stages, target.layers_per_stage, rules.path, where)
    devices = target.sizes.stage_devices
    stages = [MadeStage(number, number * devices) for number in range(target.sizes.stages)]
    for name, each in placed.items():
        stage, tensor = stages[stage_of[name]], tensors.weights[name]
        try:
            record = _with_shards(each, tensors, tensor, stage.first_rank, target)
        except UnsettledError as problem:
            unsettled.setdefault(problem.unsettled, []).append(name)
            continue
        prefixes = [f"{prefix}." for prefix in states.get(name, ())]
        if name in states and target.sizes.stages > 1:
            prefixes.append(ACCUMULATED_GRADIENTS)
        for prefix in ("", *prefixes):
            stage.layouts[prefix + name] = record
            stage.shapes[prefix + name] = tensor.shape
    _check_settled(unsettled, rules.path, names, where)
    _check_groups({name: (each.layout, stages[stage_of[name]].first_rank) for name, each in placed.items()})
    return stages


def _check_devices(target: TargetRun) -> None:
    sizes = target.sizes
    devices = sizes.stage_devices * sizes.stages
    if not device_count_allowed(devices):
        raise StrategyError(
            f"{sizes.text}: {devices} devices; MindSpore's compiler takes 1, 2, 4 or a multiple of {SERVER}",
            hint="choose sizes with one of these products",
        )
    if target.shards.size > devices:
        raise StrategyError(
            f"--optimizer-shards {target.shards.size} is more than the {devices} devices; the compiler refuses that",
            hint="-1 shards each weight over all its replicas",
        )


def _states(rules: LayoutRules, tensors: ModelTensors, where: str) -> Mapping[str, Sequence[str]]:
    if tensors.other_shapes:
        raise StrategyError(
            f"{tensors.path}: optimizer state of another shape than its weight's; its cut is unknown: "
            + listing(tensors.other_shapes),
            file=tensors.path,
            parameter=tensors.other_shapes[0],
            hint="add --weights-only to leave optimizer state out",
        )
    if tensors.states:
        return tensors.states
    if rules.optimizer_states is not None:
        prefixes = [prefix.rstrip(".") for prefix in rules.optimizer_states]
        return {name: prefixes for name in tensors.weights if rules.rule_for(name).trained}
    raise StrategyError(
        f"{tensors.path} lists no optimizer state, and no rules name optimizer_states",
        file=tensors.path,
        hint="add --weights-only for a target without optimizer state, or put the prefixes of its state at the top of "
        f'{where}:\noptimizer_states = ["adam_m", "adam_v"]',
    )


def _placed(rule: LayoutRule, shape: tuple[int, ...], sizes: AxisSizes, shown: Mapping[str, int]) -> _Placed:
    """The layout of a weight.

    Raises:
        UnsettledError: the rule has candidates with different slices, or none, or strategies do not show them so far.
    """
    if rule.recorded is not None:
        may_shard = _may_shard(rule, rule.candidates, sizes)
        return _Placed(rule.recorded.layout(), rule.recorded.nested, rule, frozenset(sizes.named), may_shard)
    layouts: dict[object, tuple[Candidate, Layout]] = {}
    refused: dict[str, None] = {}
    impossible: dict[str, None] = {}
    candidates = list(_candidates(rule, shape))
    beyond = [f"{name} above {most}" for name, most in shown.items() if rule.candidates and sizes[name] > most]
    if beyond:
        problem = f"no strategy has {' or '.join(beyond)}; add one with --also S --also-sizes ..., or state the cuts"
        raise UnsettledError(problem, tuple(_lines_of(candidates)), "where these cuts grow with their axes")
    for candidate in candidates:
        try:
            layout = candidate.layout(shape, sizes)
        except NoCandidateError as error:
            impossible[str(error)] = None
        except ExpressionError as error:
            refused[str(error)] = None
        else:
            layouts.setdefault(slices_by_device(layout), (candidate, layout))
    ways = tuple(_lines_of([candidate for candidate, _ in layouts.values()]))
    if refused or not layouts:
        # One of the refused candidates may be the correct one.
        raise UnsettledError(f"{rule.where}: {'; '.join(refused or impossible)}", ways, "for another cut")
    if len(layouts) > 1:
        raise UnsettledError(f"{rule.where} can mean {len(layouts)} layouts", ways, "either", rule.switches)
    ((candidate, layout),) = layouts.values()
    cutting = [cut for cut, slices in zip(candidate.cuts, layout.tensor_cuts) if slices > 1]
    cut_by = frozenset(name for cut in cutting for factor in cut.factors for name in factor.names)
    return _Placed(layout, candidate.nested, rule, cut_by, _may_shard(rule, candidates, sizes))


def _may_shard(rule: LayoutRule, candidates: Sequence[Candidate], sizes: AxisSizes) -> bool | None:
    answers = {rule.optimizer_shard[candidate.is_capped(sizes)] for candidate in candidates}
    return answers.pop() if len(answers) == 1 else rule.optimizer_shard[0] if not candidates else None


def _candidates(rule: LayoutRule, shape: tuple[int, ...]) -> Iterable[Candidate]:
    """All candidates of a rule, the first written one first."""
    if rule.candidates:
        return rule.candidates
    if not rule.has_cuts:
        uncut = _toml(["None"] * len(shape))
        raise UnsettledError(
            f"no rule fits (shape {list(shape)})",
            ((f"map = {uncut}",),),
            'for a whole tensor; "mp" for a dimension that mp cuts',
        )
    entries = ((WHOLE,),) * len(shape) if rule.entries is None else rule.entries
    if len(entries) != len(shape):
        raise UnsettledError(
            f"{rule.where}: map has {len(entries)} entries, and the tensor {len(shape)} dimensions "
            f"(shape {list(shape)})"
        )
    both = itertools.product(rule.matrices, itertools.product(*entries))
    return (Candidate(matrix, cuts, rule.nested) for matrix, cuts in both)


def _lines_of(candidates: Sequence[Candidate]) -> Iterator[tuple[str, ...]]:
    """Per candidate, the lines of its rule."""
    several = len({candidate.matrix for candidate in candidates}) > 1
    for matrix, cuts, nested in candidates:
        lines = [f"map = {_toml([cut.text for cut in cuts])}"]
        if several or matrix != DEFAULT_MATRIX:
            lines.insert(0, f"matrix = {_toml([axis.text for axis in matrix])}")
        yield (*lines, "nested = true") if nested else tuple(lines)


def _with_shards(
    placed: _Placed, tensors: ModelTensors, tensor: FullTensor, first_rank: int, target: TargetRun
) -> RecordedLayout:
    """The record, with the optimizer's shards."""
    unsharded = RecordedLayout.of(placed.layout, placed.nested)
    if placed.may_shard is False:
        return unsharded
    dtype = placed.rule.dtype or tensor.dtype
    item_size = tensors.item_sizes.get(dtype) if dtype is not None else None
    if dtype is not None and item_size is None:
        raise UnsettledError(f"{dtype} is not an element type of MindSpore")
    try:
        step, size = shard_record(placed.layout, first_rank, tensor.shape, item_size, target.shards)
    except UndecidedError as error:
        settled_by = () if item_size is not None else (('dtype = "Float32"',),)
        raise UnsettledError(str(error), settled_by, "its element type in training") from error
    if (step, size) != NO_SHARDS and placed.may_shard is None:
        raise UnsettledError(
            "whether the optimizer may shard them is unknown",
            (("optimizer_shard = false",), ("optimizer_shard = true",)),
            "either",
        )
    return unsharded._replace(shard_step=step, shard_size=size)


def _check_cutting(rules: LayoutRules, sizes: AxisSizes, cut_by: set[str], where: str) -> None:
    for name in ("mp", "ep"):
        if sizes[name] > 1 and name not in cut_by:
            raise StrategyError(
                f"{rules.path}: {name}={sizes[name]} cuts no parameter",
                file=rules.path,
                hint=f"leave {name} out of the sizes, or add a rule with a cut by {name} to {where}",
            )


def _check_groups(placed: Mapping[str, tuple[Layout, int]]) -> None:
    """Refuse layouts, given with the first rank of their stage, whose groups the compiler refuses."""
    checked: set[tuple[Layout, int]] = set()
    for name, (layout, first_rank) in placed.items():
        offset = first_rank % SERVER
        if (layout, offset) in checked:
            continue
        checked.add((layout, offset))
        group = forbidden_group(layout, offset)
        if group:
            ranks = [rank + first_rank - offset for rank in group]
            raise StrategyError(
                f"{name!r}: device matrix {list(layout.device_matrix)} has {rank_ranges(ranks)} as a group, which "
                "MindSpore's compiler refuses on Ascend",
                parameter=name,
                hint=f"every server of {SERVER} must have the same devices of a group: all, a half, or pairs of them",
            )


def _check_settled(
    unsettled_groups: Mapping[Unsettled, Sequence[str]], path: str, all_names: Sequence[str], where: str
) -> None:
    """Refuse open values of rules.

    Args:
        unsettled_groups: the parameters by open value.
        path: the rules.
        all_names: all parameters, so that printed patterns match no others.
        where: the place for the printed lines.

    Raises:
        StrategyError: names every group and prints the lines that would settle it.
    """
    if not unsettled_groups:
        return
    count = sum(map(len, unsettled_groups.values()))
    groups = []
    hints = []
    options = dict.fromkeys(option for unsettled in unsettled_groups for option in unsettled.options)
    if options:
        hints.append(f"add the option that is correct for the run: {' or '.join(options)}")
    for unsettled, names in unsettled_groups.items():
        lines = ""
        if not unsettled.options:
            patterns = patterns_for(names, all_names)
            match = f"match = {_toml(patterns[0] if len(patterns) == 1 else patterns)}"
            for number, way in enumerate(unsettled.settled_by):
                comment = f"# {'or' if number else unsettled.comment}"
                lines += "".join(f"\n    {line}" for line in (comment, "[[parameter]]", match, *way))
        groups.append(f"{unsettled.problem}: {plural(len(names), 'parameter')}: " + listing(names) + lines)
    if any(one.settled_by and not one.options for one in unsettled_groups):
        hints.append(f"put the correct lines into {where}, before other [[parameter]] tables")
    raise StrategyError(
        block(f"{path} does not settle {plural(count, 'parameter')}:", groups),
        file=path,
        parameter=next(iter(unsettled_groups.values()))[0],
        hint="\n".join(hints) or None,
    )


def _toml(value: str | Sequence[str]) -> str:
    return json.dumps(value, ensure_ascii=False)


def stages_of(
    names: Sequence[str], pipeline: Pipeline, stages: int, chunks: Sequence[int] | None, path: str, where: str
) -> dict[str, int]:
    """The stage of every parameter.

    Args:
        names: the weights, without optimizer state.
        pipeline: the patterns of the first and last stage and of layers.
        stages: number of stages.
        chunks: layers per stage; several rounds of the stages if the pipeline is interleaved.
        path: the rules, for messages.
        where: the file that gets missing rules, for messages.
    """
    if chunks is not None and (len(chunks) % stages or not chunks):
        raise UsageError(
            f"--layers-per-stage has {plural(len(chunks), 'number')}, and there are {stages} stages: give a number "
            "for each, or several rounds of them where they are interleaved (vpp, pp_interleave_num)"
        )
    if stages == 1:
        return dict.fromkeys(names, 0)
    of_first, of_last = matcher(pipeline.first), matcher(pipeline.last)
    of_layers = layer_numbers(names, pipeline, path, where)
    layers = sorted(set(of_layers.values()))
    stage_of_layer = _stage_of_layer(layers, stages, chunks)
    stage_by_name: dict[str, int] = {}
    unsettled: list[str] = []
    for name in names:
        on_first, on_last = of_first(name), of_last(name)
        if on_first and on_last:
            raise StrategyError(
                f"{path}: [pipeline]: {quoted(name)} is on the first stage and on the last", file=path, parameter=name
            )
        if on_first or on_last:
            stage_by_name[name] = 0 if on_first else stages - 1
        elif name in of_layers:
            stage_by_name[name] = stage_of_layer[of_layers[name]]
        else:
            unsettled.append(name)
    if unsettled:
        patterns = _toml(patterns_for(unsettled, names))
        raise StrategyError(
            f"{path}: the stage of {plural(len(unsettled), 'parameter')} outside the layers is missing: "
            + listing(unsettled),
            file=path,
            parameter=unsettled[0],
            hint=f"add each to one of these, in {where}:\n[pipeline]\nfirst = {patterns}\nlast = {patterns}",
        )
    empty = sorted(set(range(stages)) - set(stage_by_name.values()))
    if empty:
        raise UsageError(f"{plural(len(layers), 'layer')} in {stages} stages: stage {empty[0]} has no parameter")
    return stage_by_name


def is_numbered(name: str) -> bool:
    return _LAYER_NUMBER.search(name) is not None


def layer_numbers(names: Iterable[str], pipeline: Pipeline, path: str, where: str) -> dict[str, int]:
    """The layer of every parameter of a layer."""
    of_first, of_last = matcher(pipeline.first), matcher(pipeline.last)
    inside = [name for name in names if not of_first(name) and not of_last(name)]
    if pipeline.layers:
        globs = [Glob(pattern, LAYER) for pattern in pipeline.layers]
        numbers = {}
        for name in inside:
            spans = next((spans for glob in globs for spans in [glob.numbers(name)] if spans), None)
            if spans:
                numbers[name] = int(name[slice(*spans[0])])
        return numbers
    numbers = {}
    before: dict[str, str] = {}
    for name in inside:
        number = _LAYER_NUMBER.search(name)
        if number is not None:
            numbers[name] = int(number[1])
            before.setdefault(name[: number.start()], name)
    if len(before) > 1:
        patterns = _toml([f"{prefix}{LAYER}.*" for prefix in before])
        raise StrategyError(
            f"{path}: names have numbers in several places; the place of the layer number is missing: "
            + listing(list(before.values())),
            file=path,
            hint=f"keep the patterns of layers, in {where}:\n[pipeline]\nlayers = {patterns}",
        )
    return numbers


def _stage_of_layer(layers: Sequence[int], stages: int, chunks: Sequence[int] | None) -> dict[int, int]:
    if layers and layers[-1] - layers[0] + 1 != len(layers):
        missing = sorted(set(range(layers[0], layers[-1])) - set(layers))
        raise StrategyError(f"layers are numbered {layers[0]} to {layers[-1]}, but layer {missing[0]} is missing")
    if chunks is None:
        if len(layers) % stages:
            raise UsageError(
                f"{len(layers)} layers do not divide evenly into {stages} stages",
                hint="give the layers of each stage, like MindFormers' offset or num_layer_list: --layers-per-stage "
                + ",".join(str(len(layers) // stages + (stage < len(layers) % stages)) for stage in range(stages)),
            )
        chunks = [len(layers) // stages] * stages
    if sum(chunks) != len(layers):
        raise UsageError(f"--layers-per-stage has {sum(chunks)} layers in total, and the model has {len(layers)}")
    of_chunks = [chunk % stages for chunk, count in enumerate(chunks) for _ in range(count)]
    return dict(zip(layers, of_chunks))
