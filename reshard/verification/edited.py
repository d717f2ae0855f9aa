"""The tensors of a source with other names, packing and types.

The rules, as numeric operations, come from `names`. `rules` executes them and `rounding` casts, both with NumPy alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Optional

from reshard.checkpoints import CheckpointIndex, Tensor
from reshard.checkpoints.formats.dtypes import CASTABLE, ITEM_SIZES
from reshard.errors import CheckpointError
from reshard.strategies import Strategy
from reshard.text.globs import Glob
from reshard.text.messages import Report, listing, quoted
from reshard.text.names import is_weight, near_names
from reshard.verification.boxes import Shape
from reshard.verification.rules import DerivedTensor, lists_of, needed_sources
from reshard.verification.stored import Content, Shards, StoredSource, StoredTensor

if TYPE_CHECKING:
    from reshard.names import Applied, SizedOperation
    from reshard.plan.edits import Edits


class _Recipe(NamedTuple):
    """Operations on tensors of the source, and the number of the result."""

    operations: tuple[SizedOperation, ...]
    sources: tuple[str, ...]
    number: int = 0


class EditedSource:
    """A complete source with other names, packing and types; see `stored.StoredSource`.

    Args:
        base: the source.
        edits: the names, packing and types.
        report: gets notes on entries that rules skip.

    Attributes:
        base: the source.
        indexes: the headers of its files.
        tensors: the edited tensors, by name.
        values: the remaining values, with their files.
        listed_names: names of the tensors.
        tied: pairs of the source's tensors that should be equal, dequantised; only the first is used.
        model_names: names in the model by name, where others are those of a trainer's state.

    Raises:
        InputError: the edits do not fit the source.
    """

    origin = "by the rules and casts"

    def __init__(self, base: StoredSource, edits: Edits, report: Report) -> None:
        # Imported only here: most checkpoints are compared without rules.
        from reshard.names import apply_rules

        base.check_read(lambda name: True)
        self.base = base
        self.checkpoint = base.checkpoint
        self.indexes: Mapping[int, CheckpointIndex] = base.indexes
        self.tied: tuple[tuple[Content, Content], ...] = ()
        self._originals: Mapping[str, Content] = base.tensors
        kept_values = set(base.values)
        if edits.quantisation is not None:
            from reshard.verification.quantised import dequantised_tensors

            self._originals, kept_values = dequantised_tensors(base, edits.quantisation)
        recipes = {name: _Recipe((), (name,)) for name in self._originals}
        # The conversion has noted which tensors it left out.
        first = edits.first_names(self._originals, base.checkpoint, Report())
        if first:
            recipes = {new: recipes[old] for old, new in first.items() if new is not None}
        edits = edits.for_experts(recipes)
        if edits.table is not None:
            applied = edits.apply_table(self._shapes(recipes, kept_values))
            # Rules do not see the names in the files where an earlier renaming changed them.
            contents = {name: self._originals[recipe.sources[0]] for name, recipe in recipes.items()}
            pairs = (pair for pair in applied.tied if contents.keys() >= set(pair))
            self.tied = tuple((contents[first], contents[second]) for first, second in pairs)
            recipes, kept_values = _ruled(recipes, kept_values, applied)
            for names, why in ((applied.dropped, "dropped by a rule"), (applied.skipped_state, "optimizer state")):
                if names:
                    report.note(f"not compared, {why}: " + listing(sorted(names)))
        if edits.renames is not None:
            values = kept_values - set(base.checkpoint.without_layout())
            applied = apply_rules(edits.renames, self._shapes(recipes, kept_values), optimizer=True, values=values)
            recipes, kept_values = _ruled(recipes, kept_values, applied)
        model_names = edits.model_names(recipes.keys(), base.checkpoint)
        # New names by the ones before the last renaming.
        self._last_names = edits.last_names(recipes.keys(), Report())
        self.model_names = {self._last_names.get(name) or name: model_names[name] for name in recipes}
        recipes = {self._last_names.get(name) or name: recipe for name, recipe in recipes.items()}
        self.values = {name: files for name, files in base.values.items() if name in kept_values}
        types = _types({*recipes, *kept_values}, recipes, edits.casts)
        self.tensors: dict[str, Content] = {
            name: self._content(name, recipe, types.get(name)) for name, recipe in recipes.items()
        }
        self.listed_names: Collection[str] = self.tensors.keys()

    @property
    def names(self) -> set[str]:
        """The names of all tensors and values."""
        return {*self.tensors, *self.values}

    def value(self, name: str, file: int) -> Tensor:
        """The header of a value in a file."""
        return self.indexes[file].tensors[name]

    def used(self) -> dict[str, StoredTensor]:
        """The source's tensors that edited tensors are computed from, by name."""
        derived: list[Content] = [
            source
            for tensor in self.tensors.values()
            if not isinstance(tensor, StoredTensor)
            for source in (tensor.sources if isinstance(tensor, DerivedTensor) else [tensor])
        ]
        stored = itertools.chain.from_iterable(getattr(each, "sources", [each]) for each in derived)
        return {each.name: each for each in stored if isinstance(each, StoredTensor)}

    def same_layouts(self, strategy: Strategy) -> Strategy:
        """The source's strategy with the new names.

        Raises:
            CheckpointError: tensors are packed differently, so the strategy has no layouts for them.
        """
        packed = sorted(name for name, one in self.tensors.items() if isinstance(one, DerivedTensor) and one.operations)
        if packed:
            raise CheckpointError(
                "the source's layouts do not fit tensors that are packed differently: " + listing(packed),
                parameter=packed[0],
                hint="add the target's strategy: --dst-strategy",
            )
        before = {name: name for name in self.values}
        for name, tensor in self.tensors.items():
            before[name] = tensor.sources[0].name if isinstance(tensor, DerivedTensor) else tensor.stored_name  # type: ignore[attr-defined]
        return strategy.with_layouts(lambda old: {name: old[first] for name, first in before.items() if first in old})

    def laid_out(self, strategy: Strategy) -> Strategy:
        """A strategy of the target that lists names before the last renaming, with the names after it."""
        unchanged = strategy.is_placeholder or strategy.is_none or not self._last_names
        if unchanged or self.tensors.keys() <= set(strategy.parameters):
            return strategy
        return renamed(strategy, self._last_names)

    def _shapes(self, recipes: Mapping[str, _Recipe], kept_values: Collection[str]) -> dict[str, Shape]:
        """The shapes of tensors and values."""
        shapes = {name: self._lists(recipe)[-1][recipe.number] for name, recipe in recipes.items()}
        return {**shapes, **{name: self.value(name, self.base.values[name][0]).shape for name in kept_values}}

    def _lists(self, recipe: _Recipe) -> list[list[Shape]]:
        return lists_of(recipe.operations, [self._originals[source].shape for source in recipe.sources])

    def _content(self, name: str, recipe: _Recipe, requested: Optional[str]) -> Content:
        """An edited tensor.

        Raises:
            CheckpointError: its elements cannot be cast.
        """
        sources = [self._originals[source] for source in recipe.sources]
        if requested is not None:
            # Dequantised elements are rounded once, to the last type.
            sources = [
                source
                if isinstance(source, StoredTensor)
                else replace(source, dtype=requested, item_size=ITEM_SIZES[requested])
                for source in sources
            ]
        lists = self._lists(recipe)
        used = [sources[number] for number in sorted(needed_sources(recipe.operations, lists[0], recipe.number))]
        types = {source.dtype: source for source in used}
        cast = requested is not None and types.keys() != {requested} and any("Float" in dtype for dtype in types)
        if not recipe.operations and not cast:
            return replace(sources[0], name=name)
        dtype, item_size = used[0].dtype, used[0].item_size
        if cast:
            assert requested is not None
            for stored, source in types.items():
                if stored != requested and stored not in CASTABLE:
                    raise CheckpointError(
                        f"{quoted(name)}: elements of type {stored} ({quoted(source.name)}) cannot be cast to "
                        f"{requested}",
                        parameter=name,
                        hint="select tensors to cast with --cast 'GLOB=DTYPE'",
                    )
            dtype, item_size = requested, ITEM_SIZES[requested]
        shape, shards = lists[-1][recipe.number], _of_all([source.shards for source in used])
        return DerivedTensor(
            name, dtype, item_size, shape, tuple(sources), recipe.operations, recipe.number, cast, shards
        )


def renamed(strategy: Strategy, names: Mapping[str, Optional[str]]) -> Strategy:
    """A strategy with new names by old ones; other names are unchanged."""
    return strategy.with_layouts(lambda layouts: {names.get(name) or name: one for name, one in layouts.items()})


def _of_all(readings: Sequence[Shards]) -> Shards:
    """The `Shards` of a tensor from those of its sources; any source that shows them decides."""
    decided = [each for each in readings if not each.unrecorded and not each.undecided]
    undecided = () if decided else tuple(sorted({rank for each in readings for rank in each.undecided}))
    return Shards(any(each.plain for each in decided), not decided and not undecided, undecided)


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
            sources = [recipes[source] for source in step.sources]
            # Only the first table packs; later rules only rename.
            assert not any(source.operations for source in sources)
            names = tuple(source.sources[0] for source in sources)
            recipes_by_name.update(
                (name, _Recipe(step.operations, names, number)) for number, name in enumerate(step.targets)
            )
    return recipes_by_name, remaining_values & set(kept_values)


def _types(
    all_names: Collection[str], names: Collection[str], casts: Sequence[tuple[Optional[str], str]]
) -> dict[str, str]:
    """The requested types, by name.

    Args:
        all_names: the names of all tensors and values.
        names: the names of the tensors.
        casts: types, each with a pattern of names or, for all weights, None; the last match wins.

    Raises:
        CheckpointError: a pattern matches no name.
    """
    types: dict[str, str] = {}
    for pattern, dtype in casts:
        glob = None if pattern is None else Glob(pattern)
        matching = [name for name in names if (is_weight(name, all_names) if glob is None else glob.matches(name))]
        if pattern is not None and not matching:
            near = near_names(pattern, [*names])
            raise CheckpointError(
                f"--cast {pattern}={dtype}: matches no tensor",
                hint=f"did you mean {' or '.join(map(quoted, near))}?" if near else None,
            )
        types.update(dict.fromkeys(matching, dtype))
    return types
