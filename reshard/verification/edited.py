"""The tensors of a source with other names, packing and types.

The rules, as numeric operations, come from `names`. `operations` executes them and casts, with NumPy alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import ShardReading
from reshard.checkpoints.formats.dtypes import CASTABLE, ITEM_SIZES
from reshard.errors import CheckpointError
from reshard.forms.form import Names, Side
from reshard.forms.registry import form_named
from reshard.strategies import Strategy
from reshard.text.globs import Glob, matcher
from reshard.text.messages import Report, listing, quoted
from reshard.text.names import TRAINING_STEP, did_you_mean, is_weight
from reshard.verification.boxes import Box, Shape
from reshard.verification.operations import DerivedTensor, lists_of, needed_sources
from reshard.verification.published import check_published
from reshard.verification.stored import Content, Source, StoredTensor, Words, number_in, value_content

if TYPE_CHECKING:
    from reshard.forms.request import EditRules
    from reshard.names import Applied, Edge, NameRules, SizedOperation


_MOMENT, _STEP = re.compile(r"(.*\boptim(?:izer)?\..+)\.exp_avg_sq"), re.compile(r".*\boptim(izer)?\..+\.step")


class _Recipe(NamedTuple):
    """Operations on tensors of the source, by name, or on those that other operations make; the number of the result.

    Without operations, a tensor of the source.
    """

    operations: tuple[SizedOperation, ...]
    sources: tuple[str | _Recipe, ...]
    number: int = 0


def edited_source(base: Source, edits: EditRules, report: Report, handles: FileHandles) -> Source:
    """A complete source with other names, packing and types.

    Raises:
        InputError: the edits do not fit the source.
    """
    # Imported only here: most checkpoints are compared without rules.
    from reshard.names import (
        FUSED_EXPERTS,
        UnknownNamesError,
        apply_rules,
        family_named,
        naming_of,
        plain_names,
        published_table,
    )

    base.check_read(lambda name: True)
    tied: list[tuple[Content, Content]] = []
    originals: Mapping[str, Content] = base.tensors
    kept_values = set(base.values)
    if edits.quantisation is not None:
        from reshard.verification.computed import dequantised_tensors

        originals, kept_values = dequantised_tensors(base, edits.quantisation, handles)

    def shapes() -> dict[str, Shape]:
        of_tensors = {name: _shape(recipe, originals) for name, recipe in recipes.items()}
        return {**of_tensors, **{name: base.value(name, base.values[name][0]).shape for name in kept_values}}

    recipes = {name: _Recipe((), (name,)) for name in originals}
    if edits.from_trainer is not None:
        plain = plain_names(originals, base.checkpoint.objects, base.checkpoint.nested, edits.from_trainer != "weights")
        recipes = {new: recipes[old] for old, new in plain.names.items() if new is not None}
        if edits.from_trainer == "weights" and edits.source_side is Side.MEGATRON:
            kept_values.discard(TRAINING_STEP)
    published: NameRules | None = None
    if edits.published_names:
        # Names that are not known stay.
        with contextlib.suppress(UnknownNamesError):
            published = published_table(
                edits.config, {name: _shape(recipe, originals) for name, recipe in recipes.items()}
            )
            if published is not None:
                edits = edits._replace(tables=(published,), reverse=False)
    for edge in _path(edits, shapes):
        with family_named(edits.table, edits.config):
            applied = apply_rules(
                edge.rules,
                shapes(),
                edits.config,
                edge.reverse,
                edits.optimizer,
                recorded=edits.recorded_options(edge.rules),
                left_out=matcher(edits.exclude),
            )
        if edge.rules is published and edits.config is not None and published.path != FUSED_EXPERTS:
            check_published(edits.config, applied, shapes())
        tied += [
            (_tied_content(one, recipes[one], originals), _tied_content(two, recipes[two], originals))
            for one, two in applied.tied
            if recipes.keys() >= {one, two} and recipes[one] != recipes[two]
        ]
        recipes, kept_values = _ruled(recipes, kept_values, applied)
        of_rules = ((applied.dropped, "dropped by a rule"), (applied.left_out, "left out"))
        for names, why in (*of_rules, (applied.skipped_state, "optimizer state")):
            if names:
                report.note(f"not compared, {why}: " + listing(sorted(names)))
    if edits.renames is not None:
        values = kept_values - set(base.checkpoint.without_layout())
        applied = apply_rules(edits.renames, shapes(), optimizer=True, values=values)
        recipes, kept_values = _ruled(recipes, kept_values, applied)
    model_names = {name: name for name in recipes}
    if edits.from_trainer is None and form_named(base.checkpoint.form).options.names is not Names.MODEL:
        plain = plain_names(recipes, base.checkpoint.objects, base.checkpoint.nested, True)
        model_names = {name: new or name for name, new in plain.names.items()}
    masters: dict[str, str] = {}
    if edits.side is Side.HUGGINGFACE:
        masters = {name: name[len("main_param.") :] for name in recipes if name.startswith("main_param.")}
    last_names: dict[str, str] = {}
    if edits.to_trainer and edits.side is not None:
        last_names = naming_of(edits.side.value).add(recipes.keys())
    model_names = {last_names.get(name, name): model_names[name] for name in recipes}
    recipes = {last_names.get(name, name): recipe for name, recipe in recipes.items()}
    # A weight without a layout is a tensor, and a value while it keeps its name.
    kept_values = {name for name in kept_values if name in recipes or name not in originals}
    if edits.side is Side.MEGATRON:
        recipes.update(_masters(recipes, originals))
        model_names.update((name, name) for name in recipes.keys() - model_names.keys())
    types = _types({*recipes, *kept_values}, recipes, edits.casts)
    for master, weight in masters.items():
        # Where Float32 is asked for, a weight is its Float32 master, not what was rounded from it.
        place, name = last_names.get(master, master), last_names.get(weight, weight)
        own = {each.dtype for each in _needed(recipes[place], originals).values()}
        if name in recipes and own == {types.get(name)} == {"Float32"}:
            recipes[name] = recipes.pop(place)
    tensors = {name: _content(name, recipe, originals, types.get(name)) for name, recipe in recipes.items()}
    if edits.to_trainer and edits.side is not Side.MEGATRON:
        steps = [base.tensors[name] for name in sorted(base.tensors) if _STEP.fullmatch(name)]
        tied += [(steps[0], each) for each in steps[1:]]
        tensors.update(_steps(base, tensors, steps))
        model_names.update((name, name) for name in tensors.keys() - model_names.keys())
    return replace(
        base,
        tensors=tensors,
        values={name: files for name, files in base.values.items() if name in kept_values},
        origin="by the rules and casts",
        model_names=model_names,
        tied=tied,
        last_names=last_names,
    )


def _path(edits: EditRules, shapes: Callable[[], Mapping[str, Shape]]) -> list[Edge]:
    """The tables that lead from the names of the source to those of the target, which is decided here again."""
    if edits.table is None:
        return []
    # Imported only here: most checkpoints are compared without rules.
    from reshard.names import Edge

    of_side = edits.table_of_side
    if of_side is None:
        return [Edge(edits.table, edits.reverse)]
    path = []
    if edits.source_side is Side.MEGATRON:
        path.append(Edge(of_side, True))
    elif edits.reverse or _is_right(edits.table, shapes()):
        path.append(Edge(edits.table, True))
    if edits.side is Side.MEGATRON:
        path.append(Edge(of_side, False))
    elif edits.side is Side.MINDFORMERS:
        path.append(Edge(edits.table, False))
    return path


def _is_right(rules: NameRules, names: Collection[str]) -> bool:
    """Whether more names, numbers apart, are on the right of a table than on its left."""
    counts = []
    for right in (False, True):
        patterns = {re.sub(r"\{[^}]*\}", "0", each.text) for rule in rules.rules for each in rule.side(right)}
        counts.append(sum(re.sub("[0-9]+", "0", name) in patterns for name in names))
    return counts[1] > counts[0]


def _masters(recipes: Mapping[str, _Recipe], originals: Mapping[str, Content]) -> dict[str, _Recipe]:
    """Master copies that the source lacks: Float32 weights beside moments are their own."""
    masters = {}
    for name in recipes:
        start, moment, weight = name.partition("optimizer.state.exp_avg.")
        master = f"optimizer.state.param.{weight}"
        if start or not moment or master in recipes or weight not in recipes:
            continue
        if {each.dtype for each in _needed(recipes[weight], originals).values()} == {"Float32"}:
            masters[master] = recipes[weight]
    return masters


@dataclass(frozen=True)
class _Step(Content):
    """A step of the training as the Float32 scalar that torch's optimizers have.

    Attributes:
        number: it, or the integer that a file holds.
    """

    number: int | Content

    @property
    def stored_name(self) -> str:
        return self.name

    def paths(self) -> Collection[str]:
        return () if isinstance(self.number, int) else self.number.paths()

    def read(self, box: Box, handles: FileHandles) -> Words:
        number = self.number
        return np.array(number if isinstance(number, int) else number_in(number, handles), "<f4").view("<u4")


def _steps(base: Source, names: Collection[str], own: Sequence[Content]) -> dict[str, Content]:
    """The step of each parameter with moments: that of the source's optimizer, or the training's."""
    steps: dict[str, Content] = {}
    recorded = base.checkpoint.training.get(TRAINING_STEP)
    for name in {f"{match[1]}.step" for match in map(_MOMENT.fullmatch, names) if match}:
        if own:
            steps[name] = replace(own[0], name=name)
        elif TRAINING_STEP in base.values:
            value = value_content(base.indexes, TRAINING_STEP, base.values[TRAINING_STEP][0])
            steps[name] = _Step(name, "Float32", 4, (), value)
        elif type(recorded) is int:
            steps[name] = _Step(name, "Float32", 4, (), recorded)
    return steps


def steps_listed(strategy: Strategy, names: Collection[str]) -> Strategy:
    """A strategy with the step of each parameter of a trainer's state, whole on the ranks of its moments."""
    stages = []
    for stage in strategy.stages:
        layouts = dict(stage.layouts)
        for match in filter(None, map(_MOMENT.fullmatch, stage.layouts)):
            if f"{match[1]}.step" in names:
                whole = replace(layouts[match[0]].without_shards(), tensor_map=(), uneven=None, recorded_shape=None)
                layouts.setdefault(f"{match[1]}.step", whole)
        stages.append(stage._replace(layouts=layouts))
    return replace(strategy, stages=tuple(stages))


def stored_parts(source: Source) -> dict[str, StoredTensor]:
    """The tensors in files that other tensors of a source are computed from, by name."""
    parts = [tensor for tensor in source.tensors.values() if not isinstance(tensor, StoredTensor)]
    stored: dict[str, StoredTensor] = {}
    seen: set[int] = set()
    while parts:
        for each in getattr(parts.pop(), "sources", ()):
            if isinstance(each, StoredTensor):
                stored[each.name] = each
            elif id(each) not in seen:
                seen.add(id(each))
                parts.append(each)
    return stored


def same_layouts(source: Source, strategy: Strategy) -> Strategy:
    """The strategy of a source before its edits, with the new names.

    Raises:
        CheckpointError: tensors are packed differently, so the strategy has no layouts for them.
    """
    packed = sorted(
        name for name, each in source.tensors.items() if isinstance(each, DerivedTensor) and each.operations
    )
    if packed:
        raise CheckpointError(
            "the source's layouts do not fit tensors that are packed differently: " + listing(packed),
            parameter=packed[0],
            hint="add the target's strategy: --dst-strategy",
        )
    before = {name: name for name in source.values}
    for name, tensor in source.tensors.items():
        before[name] = tensor.sources[0].name if isinstance(tensor, DerivedTensor) else tensor.stored_name  # type: ignore[attr-defined]
    return strategy.with_layouts(lambda old: {name: old[first] for name, first in before.items() if first in old})


def renamed(strategy: Strategy, names: Mapping[str, str | None]) -> Strategy:
    """A strategy with new names by old ones; other names are unchanged."""
    return strategy.with_layouts(lambda layouts: {names.get(name) or name: one for name, one in layouts.items()})


def _shapes(recipe: _Recipe, originals: Mapping[str, Content]) -> tuple[Shape, ...]:
    """The shapes of a recipe's sources."""
    return tuple(
        originals[source].shape if isinstance(source, str) else _shape(source, originals) for source in recipe.sources
    )


def _shape(recipe: _Recipe, originals: Mapping[str, Content]) -> Shape:
    return lists_of(recipe.operations, _shapes(recipe, originals))[-1][recipe.number]


def _needed(recipe: _Recipe, originals: Mapping[str, Content]) -> dict[str, Content]:
    """The tensors of the source that a result may have elements of, by name."""
    needed: dict[str, Content] = {}
    for number in sorted(needed_sources(recipe.operations, _shapes(recipe, originals), recipe.number)):
        source = recipe.sources[number]
        needed.update({source: originals[source]} if isinstance(source, str) else _needed(source, originals))
    return needed


def _content(name: str, recipe: _Recipe, originals: Mapping[str, Content], requested: str | None) -> Content:
    """An edited tensor, cast to a requested type.

    Raises:
        CheckpointError: its elements cannot be cast.
    """
    used = [*_needed(recipe, originals).values()]
    if requested is not None:
        used = [_as_type(each, requested) for each in used]
    types = {source.dtype: source for source in used}
    cast = requested is not None and types.keys() != {requested} and any("Float" in dtype for dtype in types)
    if not recipe.operations and not cast:
        return replace(used[0], name=name)
    dtype, item_size = used[0].dtype, used[0].item_size
    if cast:
        assert requested is not None
        for stored, source in types.items():
            if stored != requested and stored not in CASTABLE:
                raise CheckpointError(
                    f"{quoted(name)}: elements of type {stored} ({quoted(source.name)}) cannot be cast to {requested}",
                    parameter=name,
                    hint="select tensors to cast with --cast 'GLOB=DTYPE'",
                )
        dtype, item_size = requested, ITEM_SIZES[requested]
    made: dict[int, DerivedTensor] = {}
    shards = ShardReading.of_all([source.shards for source in used])

    def derived(recipe: _Recipe) -> DerivedTensor:
        """Every operation on elements of the last type: each is rounded once."""
        sources: list[Content] = []
        for source in recipe.sources:
            if isinstance(source, str):
                content = originals[source]
                sources.append(content if requested is None else _as_type(content, requested))
            else:
                if id(source) not in made:
                    made[id(source)] = derived(source)
                sources.append(made[id(source)])
        shape = _shape(recipe, originals)
        return DerivedTensor(
            name, dtype, item_size, shape, tuple(sources), recipe.operations, recipe.number, cast, shards
        )

    return derived(recipe)


def _as_type(content: Content, dtype: str) -> Content:
    """A tensor in files as it is; dequantised elements are rounded once, to the last type."""
    return content if isinstance(content, StoredTensor) else replace(content, dtype=dtype, item_size=ITEM_SIZES[dtype])


def _tied_content(name: str, recipe: _Recipe, originals: Mapping[str, Content]) -> Content:
    first = recipe.sources[0]
    # Rules do not see the names in the files where an earlier renaming changed them.
    return _content(first if isinstance(first, str) and not recipe.operations else name, recipe, originals, None)


def _ruled(
    recipes: Mapping[str, _Recipe], kept_values: Collection[str], applied: Applied
) -> tuple[dict[str, _Recipe], set[str]]:
    """The tensors and values after rules.

    Raises:
        CheckpointError: an operation of the rules has a source without a layout.
    """
    recipes_by_name: dict[str, _Recipe] = {}
    remaining_values: set[str] = set()
    for step in applied.steps:
        loose = [source for source in step.sources if source not in recipes]
        if loose:
            if step.sources != step.targets or step.operations:
                raise CheckpointError(
                    f"{quoted(step.targets[0])} needs {quoted(loose[0])}, whose layout is unknown",
                    parameter=loose[0],
                    hint="values keep their names",
                )
            remaining_values.update(loose)
        elif not step.operations:
            recipes_by_name.update((target, recipes[source]) for target, source in zip(step.targets, step.sources))
        else:
            operands = (recipes[source] for source in step.sources)
            sources = tuple(operand if operand.operations else operand.sources[0] for operand in operands)
            recipes_by_name.update(
                (name, _Recipe(step.operations, sources, number)) for number, name in enumerate(step.targets)
            )
    return recipes_by_name, remaining_values & set(kept_values)


def _types(
    all_names: Collection[str], names: Collection[str], casts: Sequence[tuple[str | None, str]]
) -> dict[str, str]:
    """The requested types of tensors by name; the last match wins.

    Args:
        all_names: the names of all tensors and values.
        names: the names of the tensors.
        casts: types, each with a pattern of names or, for all weights, None.

    Raises:
        CheckpointError: a pattern matches no name.
    """
    types: dict[str, str] = {}
    for pattern, dtype in casts:
        glob = None if pattern is None else Glob(pattern)
        matching = [name for name in names if (is_weight(name, all_names) if glob is None else glob.matches(name))]
        if pattern is not None and not matching:
            raise CheckpointError(f"--cast {pattern}={dtype}: matches no tensor", hint=did_you_mean(pattern, names))
        types.update(dict.fromkeys(matching, dtype))
    return types
