"""What a source becomes under other names, packed otherwise and of other types.

What rules say is taken from `names`, as operations in numbers; how they are carried out, and how elements are cast,
is worked out in `rules` and `rounding`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Optional, Protocol

from reshard.checkpoints import CheckpointIndex, Tensor
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.dtypes import CASTABLE, ITEM_SIZES
from reshard.errors import CheckpointError
from reshard.strategies import Strategy
from reshard.text.globs import Glob
from reshard.text.messages import listing
from reshard.text.names import is_weight
from reshard.text.near_names import near_names
from reshard.text.report import Report
from reshard.text.wording import quoted
from reshard.verification.boxes import Shape
from reshard.verification.rules import Made, lists_of, taken
from reshard.verification.stored import Content, Shards, Source, Stored

if TYPE_CHECKING:
    from reshard.names import Applied, AppliedStep, Rules


class Edits(Protocol):
    """What is asked of names, packing and types; see `plan.edits.Edits`."""

    @property
    def table(self) -> Optional[Rules]:
        """Rules of names and packing."""

    @property
    def renames(self) -> Optional[Rules]:
        """Rules that give other names, after the table."""

    @property
    def config(self) -> Optional[Mapping[str, object]]:
        """What tells the sizes of the model."""

    @property
    def reverse(self) -> Optional[bool]:
        """Whether the table is read from right to left; None: the way that fits."""

    @property
    def optimizer(self) -> bool:
        """Whether the table holds for optimizer state, too."""

    def first_names(self, checkpoint: Checkpoint, report: Report) -> Mapping[str, Optional[str]]:
        """The names that tensors have before the table."""

    def last_names(self, names: Collection[str], report: Report) -> Mapping[str, Optional[str]]:
        """The names that tensors have at the end."""

    @property
    def casts(self) -> Sequence[tuple[Optional[str], str]]:
        """Types, with a pattern of names or, for all weights, None; the last that fits holds."""


class Casts(NamedTuple):
    """`Edits` of types alone."""

    casts: Sequence[tuple[Optional[str], str]]
    table: Optional[Rules] = None
    renames: Optional[Rules] = None
    config: Optional[Mapping[str, object]] = None
    reverse: Optional[bool] = None
    optimizer: bool = False

    def first_names(self, checkpoint: Checkpoint, report: Report) -> Mapping[str, Optional[str]]:
        """None."""
        return {}

    def last_names(self, names: Collection[str], report: Report) -> Mapping[str, Optional[str]]:
        """None."""
        return {}


class _Recipe(NamedTuple):
    """What a tensor is made of: names of the source's tensors, what is done with them, which of the results it is."""

    step: AppliedStep
    number: int


class EditedSource:
    """What edits make of a source, which has to be complete; see `stored.Source`.

    Attributes:
        base: the source.
        indexes: what is in its files.
        tensors: what is made, by name.
        values: names of values that are kept, with the files that have them.
        listed: names of what is made.
        tied: names in the source of tensors of which only the first is taken, and which should be equal.
    """

    told_by = "by the rules and casts"

    def __init__(self, base: Source, edits: Edits, report: Report) -> None:
        """Find out.

        Args:
            base: the source.
            edits: what was asked.
            report: told what rules leave out.

        Raises:
            InputError: they do not fit the source.
        """
        # Loaded only here: most checkpoints are compared under their own names.
        from reshard.names import AppliedStep, apply_rules, warning_of

        base.check_read(lambda name: True)
        self.base = base
        self.checkpoint = base.checkpoint
        self.indexes: Mapping[int, CheckpointIndex] = base.indexes
        self.listed: Collection[str] = ()
        self.tied: tuple[tuple[str, str], ...] = ()
        recipes = {name: _Recipe(AppliedStep("", (), (name,), (name,)), 0) for name in base.tensors}
        kept = set(base.values)
        first = edits.first_names(base.checkpoint, report)
        if first:
            recipes = {new: recipes[old] for old, new in first.items() if new is not None}
        if edits.table is not None:
            shapes: dict[str, Shape] = {name: tensor.shape for name, tensor in base.tensors.items()}
            shapes.update((name, base.value(name, files[0]).shape) for name, files in base.values.items())
            applied = apply_rules(edits.table, shapes, edits.config, edits.reverse, edits.optimizer)
            warning = warning_of(edits.table, applied)
            if warning is not None:
                report.warn(warning)
            recipes, kept = _ruled(recipes, kept, applied)
            self.tied = tuple(pair for pair in applied.tied if all(name in base.tensors for name in pair))
            for names, why in ((applied.dropped, "dropped by a rule"), (applied.unspoken, "optimizer state")):
                if names:
                    report.note(f"not compared, {why}: " + listing(sorted(names)))
        if edits.renames is not None:
            shapes = {name: self._shapes(recipe.step)[-1][recipe.number] for name, recipe in recipes.items()}
            shapes.update((name, base.value(name, base.values[name][0]).shape) for name in kept)
            recipes, kept = _ruled(recipes, kept, apply_rules(edits.renames, shapes, optimizer=True))
        last = edits.last_names(recipes.keys(), Report())
        recipes = {last.get(name) or name: recipe for name, recipe in recipes.items()}
        self.values = {name: files for name, files in base.values.items() if name in kept}
        casts = _Casts(edits.casts, {*recipes, *kept})
        self.tensors: dict[str, Content] = {
            name: self._made(name, recipe, casts.of(name)) for name, recipe in recipes.items()
        }
        casts.check(recipes)
        self.listed = self.tensors.keys()

    @property
    def names(self) -> set[str]:
        """Everything that is made, and the values beside it."""
        return {*self.tensors, *self.values}

    def value(self, name: str, file: int) -> Tensor:
        """A file's copy of a value."""
        return self.indexes[file].tensors[name]

    def used(self) -> dict[str, Stored]:
        """The tensors of the source that others are made of, by name."""
        found: dict[str, Stored] = {}
        for tensor in self.tensors.values():
            for source in tensor.sources if isinstance(tensor, Made) else ():
                found[source.name] = source
        return found

    def same_layouts(self, strategy: Strategy) -> Strategy:
        """The source's strategy under the names that tensors have here.

        Raises:
            CheckpointError: tensors are packed otherwise, so that it does not say how they are cut.
        """
        packed = sorted(name for name, one in self.tensors.items() if isinstance(one, Made) and one.operations)
        if packed:
            raise CheckpointError(
                "how the source is cut does not say how what is packed otherwise was cut: " + listing(packed),
                parameter=packed[0],
                hint="name the target's strategy with --dst-strategy",
            )
        before = {name: name for name in self.values}
        for name, tensor in self.tensors.items():
            before[name] = tensor.sources[0].name if isinstance(tensor, Made) else tensor.stored_name  # type: ignore[attr-defined]
        stages = (
            replace(stage, layouts={name: stage.layouts[old] for name, old in before.items() if old in stage.layouts})
            for stage in strategy.stages
        )
        return replace(strategy, stages=tuple(stages))

    def _shapes(self, step: AppliedStep) -> list[list[Shape]]:
        return lists_of(step.operations, [self.base.tensors[source].shape for source in step.sources])

    def _made(self, name: str, recipe: _Recipe, asked: Optional[str]) -> Content:
        """A tensor.

        Raises:
            CheckpointError: its elements cannot be cast, or are of several types.
        """
        step = recipe.step
        sources = [self.base.tensors[source] for source in step.sources]
        assert all(isinstance(source, Stored) for source in sources)
        shapes = self._shapes(step)
        shape = shapes[-1][recipe.number]
        used = [sources[number] for number in sorted(taken(step.operations, shapes[0], recipe.number))]
        types = {source.dtype: source for source in used}
        cast = asked is not None and types.keys() != {asked} and any("Float" in dtype for dtype in types)
        if not step.operations and not cast:
            assert isinstance(sources[0], Stored)
            return replace(sources[0], name=name)
        dtype, item_size = used[0].dtype, used[0].item_size
        if cast:
            assert asked is not None
            for stored, source in types.items():
                if stored != asked and stored not in CASTABLE:
                    raise CheckpointError(
                        f"{quoted(name)}: elements of type {stored} ({quoted(source.name)}) cannot be cast to {asked}",
                        parameter=name,
                        hint="name those that are to be cast with --cast 'GLOB=DTYPE'",
                    )
            dtype, item_size = asked, ITEM_SIZES[asked]
        stored_sources = tuple(source for source in sources if isinstance(source, Stored))
        shards = _of_all([source.shards for source in used])
        return Made(name, dtype, item_size, shape, stored_sources, step.operations, recipe.number, cast, shards)


def _of_all(readings: Sequence[Shards]) -> Shards:
    """Whether recorded optimizer shards are made, of a tensor made of several; any that tells does."""
    telling = [each for each in readings if not each.unrecorded and not each.undecided]
    undecided = () if telling else tuple(sorted({rank for each in readings for rank in each.undecided}))
    return Shards(any(each.plain for each in telling), not telling and not undecided, undecided)


def _ruled(
    recipes: Mapping[str, _Recipe], kept: Collection[str], applied: Applied
) -> tuple[dict[str, _Recipe], set[str]]:
    """What rules make of tensors and values.

    Raises:
        CheckpointError: they move what nothing lays out.
    """
    found: dict[str, _Recipe] = {}
    still: set[str] = set()
    for step in applied.steps:
        loose = [source for source in step.sources if source not in recipes]
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
            found.update((target, recipes[source]) for target, source in zip(step.targets, step.sources))
        else:
            sources = [recipes[source] for source in step.sources]
            # Only the first table packs; what follows it gives other names.
            assert not any(source.step.operations for source in sources)
            made = step._replace(sources=tuple(source.step.sources[0] for source in sources))
            found.update((target, _Recipe(made, number)) for number, target in enumerate(step.targets))
    return found, still & set(kept)


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
