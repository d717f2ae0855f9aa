"""Making a strategy: rules, shapes and sizes in; the records of a compile out, or an error with what is undecided.

1. Every weight has the first rule that matches its name. Where the rule leaves its cuts open, all candidates are
   tried; they must give the same slices.
2. Weights go to stages: layers by number, others by ``[pipeline]``.
3. The optimizer's shards are those that the compiler makes.
4. Optimizer state and, in pipelines, accumulated gradients have the layout of their weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.errors import StrategyError
from reshard.layout import Layout
from reshard.storage.toml_tables import one_or_list, quoted_list
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.candidates import (
    DEFAULT_MATRIX,
    WHOLE,
    Candidate,
    NamedLayout,
    slices_by_device,
)
from reshard.strategies.rules.model import LayoutRule, LayoutRules
from reshard.strategies.rules.optimizer_shards import (
    NO_SHARDS,
    SERVER,
    ShardSetting,
    UndecidedError,
    device_count_allowed,
    forbidden_group,
    shard_record,
)
from reshard.strategies.rules.pipeline import stages_of
from reshard.strategies.rules.sizes import AxisSizes, NoCandidateError
from reshard.strategies.rules.tensors import FullTensor, ModelTensors, patterns_for
from reshard.text.messages import Message, joined, listing, plural, rank_ranges
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.text.products import ExpressionError

_MAX_GROUPS = 8


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
    layers_per_stage: Optional[tuple[int, ...]] = None
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
    """Rules leave a value of one parameter open.

    Attributes:
        unsettled: the open value.
    """

    def __init__(self, *unsettled: object) -> None:
        super().__init__(*unsettled)
        self.unsettled = Unsettled(*unsettled)  # type: ignore[arg-type]


class _Placed(NamedTuple):
    """A weight's layout, its rule, the sizes that cut it, and whether the optimizer may shard it, None if unknown."""

    layout: NamedLayout
    rule: LayoutRule
    cut_by: frozenset[str]
    may_shard: Optional[bool]


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
            record = _with_shards(each, rules.dtype, tensors, tensor, stage.first_rank, target)
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
    """Per weight the prefixes of its optimizer state."""
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
        layout = NamedLayout.unnamed(rule.recorded)
        return _Placed(layout, rule, frozenset(sizes.named), _may_shard(rule, rule.candidates, sizes))
    layouts: dict[object, tuple[Candidate, NamedLayout]] = {}
    refused: dict[str, None] = {}
    impossible: dict[str, None] = {}
    candidates = list(_candidates(rule, shape))
    beyond = [f"{name} above {most}" for name, most in shown.items() if rule.candidates and sizes[name] > most]
    if beyond:
        problem = f"no strategy has {' or '.join(beyond)}; add one with --also S --also-sizes ..., or state the cuts"
        raise UnsettledError(problem, tuple(_lines_of(candidates)), "where these cuts grow with their axes")
    for candidate in candidates:
        try:
            layout = candidate.layout(shape, sizes, rule.split_sizes)
        except NoCandidateError as error:
            impossible[str(error)] = None
        except ExpressionError as error:
            refused[str(error)] = None
        else:
            layouts.setdefault(slices_by_device(layout.layout), (candidate, layout))
    ways = tuple(_lines_of([candidate for candidate, _ in layouts.values()]))
    if refused or not layouts:
        # One of the refused candidates may be the correct one.
        raise UnsettledError(f"{rule.where}: {'; '.join(refused or impossible)}", ways, "for another cut")
    if len(layouts) > 1:
        raise UnsettledError(f"{rule.where} can mean {len(layouts)} layouts", ways, "either", rule.switches)
    ((candidate, layout),) = layouts.values()
    cutting = [cut for cut, slices in zip(candidate.cuts, layout.layout.tensor_cuts) if slices > 1]
    cut_by = frozenset(name for cut in cutting for factor in cut.factors for name in factor.names)
    return _Placed(layout, rule, cut_by, _may_shard(rule, candidates, sizes))


def _may_shard(rule: LayoutRule, candidates: Sequence[Candidate], sizes: AxisSizes) -> Optional[bool]:
    """Whether the optimizer may shard a weight; None if unknown."""
    answers = {rule.optimizer_shard[candidate.is_capped(sizes)] for candidate in candidates}
    return answers.pop() if len(answers) == 1 else rule.optimizer_shard[0] if not candidates else None


def _candidates(rule: LayoutRule, shape: tuple[int, ...]) -> Iterable[Candidate]:
    """All candidates of a rule, the first written one first."""
    if rule.candidates:
        return rule.candidates
    if not rule.has_cuts:
        uncut = quoted_list(["None"] * len(shape))
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
        lines = [f"map = {quoted_list([cut.text for cut in cuts])}"]
        if several or matrix != DEFAULT_MATRIX:
            lines.insert(0, f"matrix = {quoted_list([axis.text for axis in matrix])}")
        yield (*lines, "nested = true") if nested else tuple(lines)


def _with_shards(
    placed: _Placed,
    default_dtype: Optional[str],
    tensors: ModelTensors,
    tensor: FullTensor,
    first_rank: int,
    target: TargetRun,
) -> RecordedLayout:
    """The record, with the optimizer's shards.

    Raises:
        UnsettledError: it is unknown whether the weight is sharded.
    """
    layout = placed.layout
    if placed.may_shard is False:
        return layout.recorded()
    dtype = placed.rule.dtype or tensor.dtype or default_dtype
    item_size = tensors.item_sizes.get(dtype) if dtype is not None else None
    if dtype is not None and item_size is None:
        raise UnsettledError(f"{dtype} is not an element type of MindSpore")
    try:
        record = shard_record(layout.layout, first_rank, tensor.shape, item_size, target.shards)
    except UndecidedError as error:
        settled_by = () if item_size is not None else (('dtype = "Float32"',),)
        raise UnsettledError(str(error), settled_by, "its element type in training") from error
    if record != NO_SHARDS and placed.may_shard is None:
        raise UnsettledError(
            "whether the optimizer may shard them is unknown",
            (("optimizer_shard = false",), ("optimizer_shard = true",)),
            "either",
        )
    return layout.recorded(*record)


def _check_cutting(rules: LayoutRules, sizes: AxisSizes, cut_by: set[str], where: str) -> None:
    for name in ("mp", "ep"):
        if sizes[name] > 1 and name not in cut_by:
            raise StrategyError(
                f"{rules.path}: {name}={sizes[name]} cuts no parameter",
                file=rules.path,
                hint=f"leave {name} out of the sizes, or add a rule with a cut by {name} to {where}",
            )


def _check_groups(placed: Mapping[str, tuple[NamedLayout, int]]) -> None:
    """Refuse layouts, given with the first rank of their stage, whose groups the compiler refuses."""
    checked: set[tuple[Layout, int]] = set()
    for name, (named_layout, first_rank) in placed.items():
        layout, offset = named_layout.layout, first_rank % SERVER
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
    texts: list[str] = [f"{path} does not settle {plural(count, 'parameter')}:"]
    for unsettled, names in unsettled_groups.items():
        lines = "".join(f"\n    {line}" for line in _lines(unsettled, names, all_names))
        texts.append(f"{unsettled.problem}: {plural(len(names), 'parameter')}: " + listing(names) + lines)
    more = len(unsettled_groups) - _MAX_GROUPS
    shown = joined("\n", texts[: _MAX_GROUPS + 1])
    if more > 0:
        shown += f"\nand {plural(more, 'more group')} of parameters"
    hints = []
    options = dict.fromkeys(option for unsettled in unsettled_groups for option in unsettled.options)
    if options:
        hints.append(f"add the option that is correct for the run: {' or '.join(options)}")
    if any(one.settled_by and not one.options for one in unsettled_groups):
        hints.append(f"put the correct lines into {where}, before other [[parameter]] tables")
    raise StrategyError(
        Message(shown, joined("\n", texts).full, shown.shortened or more > 0),
        file=path,
        parameter=next(iter(unsettled_groups.values()))[0],
        hint="\n".join(hints) or None,
    )


def _lines(unsettled: Unsettled, names: Sequence[str], all_names: Sequence[str]) -> Iterator[str]:
    """The rules that settle a value, with a comment above each."""
    if unsettled.options:
        return
    match = f"match = {one_or_list(patterns_for(names, all_names))}"
    for number, way in enumerate(unsettled.settled_by):
        comment = unsettled.comment if number == 0 else "or"
        yield from (f"# {comment}",) if comment else ()
        yield from ("[[parameter]]", match, *way)
