"""What a source becomes under other names, packed otherwise and of other types: a tree of tensors to compare with.

What rules say is taken from `names`, as operations in numbers; how they are done, and how elements are cast, is
worked out here and in `made`, without anything that plans or carries out conversions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Optional

from reshard.checkpoints import Tensor
from reshard.checkpoints.formats.dtypes import CASTABLE, ITEM_SIZES
from reshard.errors import CheckpointError
from reshard.layout import Box, whole
from reshard.strategies import Stage, Strategy
from reshard.text.globs import Glob
from reshard.text.messages import listing
from reshard.text.names import is_weight
from reshard.text.near_names import near_names
from reshard.text.report import Report
from reshard.text.wording import quoted
from reshard.verification.made import MadePart, Recipe
from reshard.verification.origins import lists_of, needed, origins
from reshard.verification.parameter import Holding, Parameter, Shards, Slice, shared
from reshard.verification.parts import Readable
from reshard.verification.products import Product
from reshard.verification.tree import Tree

if TYPE_CHECKING:
    from reshard.names import Applied, AppliedStep, Rules

# What tells most of a tensor made of several comes first: what files show, then what they might.
_TELLING = (Shards.NOT_MADE, Shards.MADE, Shards.UNDECIDED, Shards.NOT_RECORDED)


class Edits(NamedTuple):
    """What was asked of names, packing and types.

    Attributes:
        table: rules of names and packing.
        renames: rules that give other names, after the table.
        config: what tells the sizes of the model.
        reverse: whether the table is read from right to left; None: the way that fits.
        optimizer: whether the table holds for optimizer state, too.
        casts: types that are asked for, with a pattern of names or, for all weights, None; the last that fits holds.
    """

    table: Optional[Rules]
    renames: Optional[Rules]
    config: Optional[Mapping[str, object]]
    reverse: Optional[bool]
    optimizer: bool
    casts: Sequence[tuple[Optional[str], str]]


class _Made(NamedTuple):
    """What a tensor is made of: names of the source's tensors, and what is done with them to make a list."""

    step: AppliedStep
    number: int


@dataclass
class EditedTree(Tree):
    """The files of a source, with the tensors that are made of what they hold.

    Attributes:
        base: the source.
        stored_names: names in the files of tensors that only have other names.
        recipes: how all others are made.
        tied: names in the source of tensors of which only the first is taken, and which should be equal.
        paths: the files that recipes read, as far as they were asked for.
        products: what an adapter added, by the name of the weight.
    """

    base: Tree = field(default_factory=lambda: Tree({}, {}))
    stored_names: dict[str, str] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    tied: tuple[tuple[str, str], ...] = ()
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    products: Mapping[str, Product] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Everything that is made, and the values beside it."""
        return {*self.parameters, *self.outside}

    @property
    def told_by(self) -> str:
        """Words for where types are told."""
        return "by the rules and casts"

    def tensor(self, name: str, rank: int) -> Tensor:
        """A rank's tensor of a name."""
        return super().tensor(self.stored_names.get(name, name), rank)

    def sample(self, parameter: Parameter) -> Tensor:
        """A tensor as a file would hold all of it."""
        recipe = self.recipes.get(parameter.name)
        if recipe is None:
            return super().sample(parameter)
        nbytes = math.prod(recipe.shape) * recipe.item_size
        return Tensor(recipe.name, recipe.dtype, recipe.shape, recipe.shape, ((0, nbytes),), nbytes)

    def like_type(self, name: str) -> Optional[str]:
        """The floating point type of a parameter of which all that is no number counts as the same."""
        recipe = self.recipes.get(name)
        return recipe.dtype if recipe is not None and recipe.cast else None

    def product(self, name: str) -> Optional[Product]:
        """What an adapter added to a parameter."""
        return self.products.get(name)

    def same_layouts(self, strategy: Strategy) -> Strategy:
        """The source's strategy under the names that tensors have here.

        Raises:
            CheckpointError: tensors are packed otherwise, so that it does not say how they are cut.
        """
        packed = sorted(name for name, recipe in self.recipes.items() if recipe.operations)
        if packed:
            raise CheckpointError(
                "how the source is cut does not say how what is packed otherwise was cut: " + listing(packed),
                parameter=packed[0],
                hint="name the target's strategy with --dst-strategy",
            )
        before = {name: self.stored_names.get(name, name) for name in self.names}
        before.update((name, recipe.sources[0].name) for name, recipe in self.recipes.items())
        stages = (
            replace(stage, layouts={name: stage.layouts[old] for name, old in before.items() if old in stage.layouts})
            for stage in strategy.stages
        )
        return replace(strategy, stages=tuple(stages))

    def slice_part(self, parameter: Parameter, held: Slice) -> Readable:
        """What has to be read for a slice that some rank holds."""
        recipe = self.recipes.get(parameter.name)
        return super().slice_part(parameter, held) if recipe is None else self._made_part(recipe, held.box)

    def parts(self, parameter: Parameter, boxes: Iterable[Box]) -> Iterator[tuple[int, Readable]]:
        """What has to be read for some boxes of a parameter, with the number of the box."""
        recipe = self.recipes.get(parameter.name)
        if recipe is None:
            yield from super().parts(parameter, boxes)
            return
        for number, box in enumerate(boxes):
            yield number, self._made_part(recipe, box)

    def _made_part(self, recipe: Recipe, box: Box) -> MadePart:
        paths = self.paths.get(recipe.name)
        if paths is None:
            ranks = {held.holders[0] for source in recipe.sources for held in source.slices if held.holders}
            paths = self.paths[recipe.name] = tuple(self.indexes[rank].path for rank in sorted(ranks))
        return MadePart(recipe, self.base, box, paths)


def edited_tree(base: Tree, edits: Edits, report: Report) -> EditedTree:
    """The tree that edits make of a source, which has to be complete.

    Args:
        base: the source, with all of its names.
        edits: what was asked.
        report: told what rules leave out.

    Raises:
        InputError: they do not fit the source.
    """
    # Loaded only here: most checkpoints are compared under their own names.
    from reshard.names import AppliedStep, apply_rules, warning_of

    base.check_readings()
    made = {name: _Made(AppliedStep("", (), (name,), (name,)), 0) for name in base.parameters}
    kept = set(base.outside)
    tied: tuple[tuple[str, str], ...] = ()
    if edits.table is not None:
        shapes = {name: parameter.shape for name, parameter in base.parameters.items()}
        shapes.update((name, _value(base, name).shape) for name in kept)
        applied = apply_rules(edits.table, shapes, edits.config, edits.reverse, edits.optimizer)
        warning = warning_of(edits.table, applied)
        if warning is not None:
            report.warn(warning)
        made, kept = _ruled(base, made, kept, applied)
        tied = tuple(pair for pair in applied.tied if all(name in base.parameters for name in pair))
        for names, why in ((applied.dropped, "dropped by a rule"), (applied.unspoken, "optimizer state")):
            if names:
                report.note(f"not compared, {why}: " + listing(sorted(names)))
    if edits.renames is not None:
        shapes = {name: _shape(base, one) for name, one in made.items()}
        shapes.update((name, _value(base, name).shape) for name in kept)
        made, kept = _ruled(base, made, kept, apply_rules(edits.renames, shapes, optimizer=True))
    casts = _Casts(edits.casts, {*made, *kept})
    outside = {name: ranks for name, ranks in base.outside.items() if name in kept}
    tree = EditedTree(base.indexes, base.damaged, {}, {}, outside, base, tied=tied)
    for name, one in made.items():
        _add(tree, name, one, casts.of(name))
    casts.check(made)
    return tree


def _ruled(
    base: Tree, made: Mapping[str, _Made], kept: set[str], applied: Applied
) -> tuple[dict[str, _Made], set[str]]:
    """What rules make of tensors and values.

    Raises:
        CheckpointError: they move what nothing lays out.
    """
    found: dict[str, _Made] = {}
    still: set[str] = set()
    for step in applied.steps:
        loose = [source for source in step.sources if source not in made]
        if loose:
            if step.sources != step.targets or step.operations:
                raise CheckpointError(
                    f"{quoted(step.targets[0])} is to be made of {quoted(loose[0])}, but nothing says how that is laid "
                    "out",
                    parameter=loose[0],
                    hint="values keep their names",
                )
            still.update(loose)
        elif not step.operations:
            found.update((target, made[source]) for target, source in zip(step.targets, step.sources))
        else:
            sources = [made[source] for source in step.sources]
            # Only the first table packs; what follows it gives other names.
            assert not any(source.step.operations for source in sources)
            taken = step._replace(sources=tuple(source.step.sources[0] for source in sources))
            found.update((target, _Made(taken, number)) for number, target in enumerate(step.targets))
    return found, still & kept


def _value(base: Tree, name: str) -> Tensor:
    """A value in the lowest file that has it."""
    return base.tensor(name, base.outside[name][0])


def _shapes(base: Tree, step: AppliedStep) -> tuple[tuple[int, ...], ...]:
    return tuple(base.parameters[source].shape for source in step.sources)


def _shape(base: Tree, made: _Made) -> tuple[int, ...]:
    return lists_of(made.step.operations, _shapes(base, made.step))[-1][made.number]


def _add(tree: EditedTree, name: str, made: _Made, asked: Optional[str]) -> None:
    """Add a tensor to a tree.

    Raises:
        CheckpointError: its elements cannot be cast, or are of several types.
    """
    base, step = tree.base, made.step
    sources = [base.parameters[source] for source in step.sources]
    shapes = _shapes(base, step)
    lists = lists_of(step.operations, shapes)
    numbers = sorted(needed(step.operations, len(sources), made.number, lists))
    types = {sources[number].dtype: sources[number] for number in numbers}
    cast = asked is not None and types.keys() != {asked} and any("Float" in dtype for dtype in types)
    if not step.operations and not cast:
        tree.stored_names[name] = sources[0].name
        tree.parameters[name] = replace(sources[0], name=name)
        return
    shape: tuple[int, ...] = lists[-1][made.number]
    if cast:
        assert asked is not None
        for dtype, source in types.items():
            if dtype != asked and dtype not in CASTABLE:
                raise CheckpointError(
                    f"{quoted(name)}: elements of type {dtype} ({quoted(source.name)}) cannot be cast to {asked}",
                    parameter=name,
                    hint="name those that are to be cast with --cast 'GLOB=DTYPE'",
                )
        dtype, item_size = asked, ITEM_SIZES[asked]
    else:
        sample = sources[numbers[0]]
        if len(types) > 1 and 0 not in shape:
            # It may have elements of fewer tensors than the operations join on the way.
            found = origins(step.operations, shapes, made.number, tuple((0, 1) for _ in shape))
            sample = sources[found[0].tensor] if found else sample
        dtype, item_size = sample.dtype, base.sample(sample).item_size
    tree.recipes[name] = Recipe(name, shape, dtype, item_size, tuple(sources), step.operations, made.number, cast)
    whole_tensor = Parameter(name, dtype, shape, (Holding(Stage(0, 0, 1, {}), shared(whole(len(shape))), (0,)),))
    # Whether recorded optimizer shards are made, any of the sources may tell.
    telling = min((sources[number] for number in numbers), key=lambda each: _TELLING.index(each.shards))
    tree.parameters[name] = replace(whole_tensor, shards=telling.shards, deciding=telling.deciding)


class _Casts:
    """Which type each tensor gets."""

    def __init__(self, asked: Sequence[tuple[Optional[str], str]], known: Collection[str]) -> None:
        self._known = known
        self._asked = [(None if pattern is None else Glob(pattern), dtype) for pattern, dtype in asked]
        self._met = [False] * len(asked)

    def of(self, name: str) -> Optional[str]:
        """The type that is asked for, for a tensor of this name; the last that fits holds."""
        found = None
        for number, (glob, dtype) in enumerate(self._asked):
            if is_weight(name, self._known) if glob is None else glob.matches(name):
                self._met[number] = True
                found = dtype
        return found

    def check(self, names: Iterable[str]) -> None:
        """Refuse patterns that fit no name.

        Raises:
            CheckpointError: there is one.
        """
        for (glob, dtype), met in zip(self._asked, self._met):
            if glob is not None and not met:
                near = near_names(glob.pattern, [*names])
                raise CheckpointError(
                    f"--cast {glob.pattern}={dtype}: no tensor of the source gets such a name",
                    hint=f"did you mean {' or '.join(map(quoted, near))}?" if near else None,
                )
