"""The checkpoint that edits of names, packing and types make of a source.

Tables of names, and codes, have modules that few edits load.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.checkpoints import FileHandles, Tensor
from reshard.checkpoints.checkpoint import Checkpoint, EditedCheckpoint, GlobalTensor, Packing, Recipe, TiedTensors
from reshard.checkpoints.formats.dtypes import INT4, TEXT
from reshard.errors import CheckpointError, UsageError
from reshard.forms.form import EditedStep, Side
from reshard.forms.request import EditRules
from reshard.layout.views import View
from reshard.plan.casts import cast
from reshard.plan.masters import as_weights, with_masters
from reshard.plan.trainers import keys_for_trainer, laid_out, names_for_trainer, names_from_trainer, names_in_model
from reshard.strategies import SAME, Strategy
from reshard.text.messages import Report, as_pattern, listing, plural, quoted
from reshard.text.names import is_training_value

if TYPE_CHECKING:
    from reshard.names import Applied, SizedOperation
    from reshard.quantised import Quantised

_DROPPED, _EXCLUDED = "dropped by a rule", "left out by --exclude"
_STATE = "left out: optimizer state follows its weights with --optimizer keep"


class Editing:
    """The tensors and values of a source, which edits change one after the other: `STEPS` are methods of this class.

    Args:
        checkpoint: the source.
        edits: the edits.
        report: gets notes.
        complete: whether the checkpoint is the whole source.
        contents: whether elements are read, not only names and shapes: packing that changes no shape need not be known.
        handles: open files, which have the shapes of some quantised tensors; None where only names count.

    Attributes:
        edits: the edits; a step may choose a table for later ones.
        recipes: the tensors, by their new names.
        values: the names of values, and of weights without a layout.
        unseen: the new name of each parameter that only absent ranks hold; None if unknown.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        edits: EditRules,
        report: Report,
        complete: bool = True,
        contents: bool = True,
        handles: FileHandles | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self.edits = edits
        self._report = report
        self._complete = complete
        self._handles = handles
        self._contents = contents
        self.recipes: Mapping[str, Recipe] = {name: Recipe((name,)) for name in checkpoint.tensors}
        self.values: AbstractSet[str] = {*checkpoint.values(), *checkpoint.without_layout()}
        self.unseen: Mapping[str, str | None] = {name: name for name in checkpoint.unseen}
        self._applied: list[Applied] = []
        # Tied tensors, of which rules use one.
        self._tied: Sequence[TiedTensors] = ()
        self._packing: Packing | None = None

    def edited(self) -> EditedCheckpoint:
        """The checkpoint that the edits make of the source.

        Raises:
            InputError: the edits do not fit the source.
        """
        if self.edits.additions is not None and (self.edits.tables or self.edits.casts):
            raise UsageError("additions to tensors exclude rules of names and casts")
        for option, step in STEPS:
            if option is None or getattr(self.edits, option):
                step(self)
        checkpoint, nested = self._checkpoint, self._checkpoint.nested
        if nested or self.edits.to_trainer:
            nested = keys_for_trainer(self.edits, self.recipes, nested)
        with_objects = self.edits.keeps_objects
        if checkpoint.objects and not with_objects:
            form, count = checkpoint.form, plural(len(checkpoint.objects), "object")
            self._report.note(f"{count} of {form} left out: names are not those of {form}")
        return EditedCheckpoint(
            checkpoint,
            self.recipes,
            self.values,
            self.edits.identity(self._applied),
            self._tied,
            self.unseen,
            nested,
            self._packing,
            with_objects,
        )

    @property
    def unseen_names(self) -> set[str]:
        """The known new names of parameters that only absent ranks hold."""
        return {name for name in self.unseen.values() if name is not None}

    def dequantise(self) -> None:
        """Replace codes and scales by the numbers that they stand for."""
        from reshard.quantised import dequantised, describe

        assert self.edits.quantisation is not None
        self._checkpoint, recognised = dequantised(self._checkpoint, self.edits.quantisation, self._handles)
        if not recognised.tensors:
            self._report.warn("--dequantize: no tensor of the source is quantised")
        for scheme, count in describe(recognised).items():
            self._report.note(f"{plural(count, 'tensor')} dequantised to {self.edits.quantisation.dtype}: {scheme}")
        if recognised.left_out:
            left_out = f"{len(recognised.left_out)} scales of activations left out: "
            self._report.note(left_out + listing([*recognised.left_out]))
        others = {name: each for name, each in recognised.tensors.items() if each.swapped or each.columns is not None}
        views = {name: _in_model(each) for name, each in others.items()}
        self.recipes = {name: Recipe((name,), views.get(name)) for name in self._checkpoint.tensors}
        self.values = {*self._checkpoint.values(), *self._checkpoint.without_layout()}

    def name_as_in_model(self) -> None:
        """Remove the words of a trainer's state from names."""
        self._rename(names_from_trainer(self.edits, self._checkpoint.tensors, self._checkpoint, self._report))

    def publish_names(self) -> None:
        """Choose the table of the names that transformers publishes, where they are others."""
        from reshard.plan.tables import with_published_names

        shapes = {name: self._shape(recipe) for name, recipe in self.recipes.items()}
        self.edits = with_published_names(self.edits, shapes, self._report)

    def _rename(self, names: Mapping[str, str | None]) -> None:
        """Give tensors other names; None skips a tensor. Values keep their names.

        A weight without a layout is a tensor and a value; under another name it is a tensor.
        """
        remaining = {
            name
            for name in self.values
            if (new := names.get(name, name)) == name or (new is not None and name not in self.recipes)
        }
        recipes: dict[str, Recipe] = {}
        for name, recipe in self.recipes.items():
            new = names.get(name, name)
            if new is None:
                continue
            if new in recipes or (new in remaining and new != name):
                raise CheckpointError(
                    f"{quoted(name)}: another tensor would also get the name {quoted(new)}",
                    parameter=name,
                    hint="give every tensor its own name",
                )
            recipes[new] = recipe
        renamed = [name for name in sorted(remaining) if names.get(name, name) != name]
        if renamed:
            raise CheckpointError(
                f"{quoted(renamed[0])}: its layout is unknown; values without a layout keep their names",
                parameter=renamed[0],
                hint="keep its name",
            )
        self.recipes, self.values = recipes, remaining

    def add(self) -> None:
        """Add to tensors, by their names in the model, and remove the tensors of the additions."""
        additions = self.edits.additions
        assert additions is not None
        model_names = names_in_model(self.edits, self.recipes, self._checkpoint)
        tensors = {
            model_names[name]: self._checkpoint.tensors[recipe.sources[0]] for name, recipe in self.recipes.items()
        }
        added, is_part = additions.fit(tensors), additions.is_part
        self._report.note(f"{plural(len(added), 'tensor')} added to: " + listing([*added]))
        self.recipes = {
            name: recipe._replace(added=added.get(model_names[name]))
            for name, recipe in self.recipes.items()
            if not is_part(name)
        }
        self.values = {name for name in self.values if not is_part(name)}

    def apply_tables(self) -> None:
        """Apply rules of names and packing."""
        from reshard.plan.tables import apply_table, path_of

        if self.edits.quantisation is None:
            _check_not_quantised(self._checkpoint)
        for edge in path_of(self.edits, self._shapes()):
            applied = apply_table(self.edits, edge, self._shapes(), self._contents)
            self._apply_table(applied)
            self._applied.append(applied)
        self.unseen = dict.fromkeys(self.unseen)

    def _apply_table(self, applied: Applied) -> None:
        from reshard.names import HUB_SIDE, family_advice
        from reshard.plan.tables import check_packing, packing_of

        edits, report, table = self.edits, self._report, applied.rules
        old, new = table.sides[:: -1 if applied.reversed else 1]
        report.note(f"names and packing by the rules {table.path}: {old} to {new}")
        if applied.tied and not self._complete:
            first, second = applied.tied[0]
            raise CheckpointError(
                f"{quoted(first)} and {quoted(second)} cannot be compared without the whole source",
                parameter=second,
            )
        packing = packing_of(edits, applied)
        # Form and names determine all packing of a table for all model families.
        is_recorded = table is edits.table
        if old != HUB_SIDE and is_recorded and edits.source_packing is not None:
            check_packing(self._checkpoint.place, edits.source_packing, packing, table, report)
        self._packing = packing if new != HUB_SIDE and is_recorded else None
        if applied.left_out and (advice := family_advice(edits.table, edits.config)):
            report.warn(f"weights that the rules {table.path} lack are left out, and {advice}")
        # Rules that move values are refused elsewhere.
        recipes = self.recipes
        tied = [self._compared(*pair) for pair in applied.tied if recipes.keys() >= {*pair}]
        self._tied = [*self._tied, *filter(None, tied)]
        self._apply(applied)

    def _compared(self, first: str, second: str) -> TiedTensors | None:
        """Tensors of which rules use the first; None if a table before has made both of the same elements."""
        recipes = [self.recipes[first], self.recipes[second]]
        if recipes[0] == recipes[1]:
            return None
        if any(recipe.view is not None for recipe in recipes):
            raise CheckpointError(
                f"{quoted(first)} and {quoted(second)} are made of parts of tensors, which cannot be compared",
                parameter=second,
            )
        # By the names in the files, which an earlier renaming may have changed.
        representative, copy = (self._checkpoint.tensors[recipe.sources[0]] for recipe in recipes)
        return TiedTensors(
            representative,
            (copy,),
            "the rules write only the first, as for a tied model",
            "if the model does not tie them, set tie_word_embeddings to false in config.json; options of built-in "
            "rules: reshard names show TABLE",
        )

    def apply_renames(self) -> None:
        """Apply rules that give other names."""
        from reshard.names import apply_rules

        renames = self.edits.renames
        assert renames is not None
        # New names do not depend on shapes. A rule that fits a parameter of an absent rank is used.
        shapes = {**self._shapes(), **dict.fromkeys(self.unseen_names, ())}
        values = {*self.values}.intersection(self._checkpoint.values())
        applied = apply_rules(renames, shapes, optimizer=True, values=values)
        new_names = {step.sources[0]: step.targets[0] for step in applied.steps}
        self.unseen = {name: None if old is None else new_names.get(old) for name, old in self.unseen.items()}
        present = tuple(step for step in applied.steps if self.unseen_names.isdisjoint(step.targets))
        self._apply(replace(applied, steps=present))

    def _apply(self, applied: Applied) -> None:
        """Set the tensors and values after rules; refuse rules that take an entry without a layout."""
        recipes: dict[str, Recipe] = {}
        values: set[str] = set()
        for step in applied.steps:
            loose = {source for source in step.sources if source not in self.recipes}
            operands = [self.recipes.get(source) or Recipe((source,)) for source in step.sources]
            for name, recipe in zip(step.targets, self._made(step.operations, operands)):
                no_layout = next((source for source in recipe.sources if source in loose), None)
                if no_layout is None:
                    recipes[name] = recipe
                elif recipe == Recipe((name,)):
                    values.add(name)
                else:
                    raise CheckpointError(
                        f"{quoted(name)} would be made of {quoted(no_layout)}, whose layout is unknown",
                        parameter=no_layout,
                        hint=f"values keep their names: remove the rule or --rename that matches {no_layout}, or drop "
                        "it by a rule",
                    )
        reasons = ((applied.dropped, _DROPPED), (applied.left_out, _EXCLUDED), (applied.skipped_state, _STATE))
        for names, reason in reasons:
            if names:
                self._report.note(f"{len(names)} {reason}: " + listing(sorted(names)))
        for note in applied.notes:
            self._report.note(note)
        self.recipes, self.values = recipes, values

    def _made(self, operations: tuple[SizedOperation, ...], operands: Sequence[Recipe]) -> Iterable[Recipe]:
        """The tensors that operations make of others, which may be parts of several in files."""
        if not operations:
            return operands
        from reshard.names import results

        stored = [*dict.fromkeys(itertools.chain.from_iterable(each.sources for each in operands))]
        number_of = {name: number for number, name in enumerate(stored)}
        parts = tuple(
            (self._shape(each) if each.view is None else each.view, tuple(number_of[name] for name in each.sources))
            for each in operands
        )
        made = []
        for numbers, view in results(operations, parts):
            sources = tuple(stored[number] for number in numbers)
            is_whole = len(sources) == 1 and view.is_all_of(self._shape_in_files(sources[0]))
            made.append(Recipe(sources, None if is_whole else view))
        return made

    def _shape(self, recipe: Recipe) -> tuple[int, ...]:
        return self._shape_in_files(recipe.sources[0]) if recipe.view is None else recipe.view.shape

    def _shape_in_files(self, name: str) -> tuple[int, ...]:
        tensor = self._checkpoint.tensors.get(name)
        return tuple(_stored(self._checkpoint, name).shape if tensor is None else tensor.shape)

    def rename_one_by_one(self) -> None:
        """Give single tensors other names."""
        self._rename(dict(self.edits.renamed_one_by_one))
        self.unseen = dict.fromkeys(self.unseen)

    def name_for_trainer(self) -> None:
        """Give the names of a trainer's state, where weights in Float32 may be their own masters."""
        edits, report = self.edits, self._report
        new_names: Mapping[str, str | None] = {}
        if edits.to_trainer:
            new_names = names_for_trainer(edits, {*self.recipes, *self.unseen_names}, report)
        if edits.side is Side.HUGGINGFACE:
            self.recipes = as_weights(self._checkpoint, self.recipes, new_names, edits.casts, report)
        if not edits.to_trainer:
            return
        self._rename(new_names)
        self.unseen = {name: None if new is None else new_names.get(new, new) for name, new in self.unseen.items()}
        groups = sorted(name for name in self._checkpoint.objects if "param_groups" in name)
        if groups:
            report.warn(
                "parameter groups keep the names of the source's parameters, and torch does not find them: "
                + listing(groups)
            )
        _warn_of_buffers(self._checkpoint, self.values, report)

    def add_masters(self) -> None:
        """Add the master copies that the target's trainers have beside weights."""
        self.recipes = with_masters(self._checkpoint, self.recipes)

    def cast(self) -> None:
        """Give tensors the requested types."""
        casts, checkpoint, report = self.edits.casts, self._checkpoint, self._report
        self.recipes = cast(checkpoint, self.recipes, self.values, self.unseen_names, casts, report)

    def check(self) -> None:
        """Refuse empty names, tensors of mixed types, and views that divide a byte."""
        for name, recipe in self.recipes.items():
            sources = [self._checkpoint.tensors[source] for source in recipe.sources]
            if recipe.view is not None:
                _check_packed(name, sources, recipe.view)
            types = {source.dtype: quoted(source.name) for source in sources}
            if recipe.dtype is None and len(types) > 1:
                parts = " and ".join(f"{source}, which is {dtype}" for dtype, source in types.items())
                raise CheckpointError(
                    f"{quoted(name)} would be made of {parts}",
                    parameter=name,
                    hint=f"choose a type with --cast {as_pattern(name)}=DTYPE",
                )
        if "" in self.recipes:
            name = self.recipes[""].sources[0]
            raise CheckpointError(f"{quoted(name)}: its new name would be empty", parameter=name)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: self._shape(recipe) for name, recipe in self.recipes.items()}
        shapes.update((name, _stored(self._checkpoint, name).shape) for name in self.values)
        return shapes


STEPS: tuple[tuple[str | None, Callable[[Editing], None]], ...] = (
    ("quantisation", Editing.dequantise),
    ("from_trainer", Editing.name_as_in_model),
    ("published_names", Editing.publish_names),
    ("additions", Editing.add),
    ("tables", Editing.apply_tables),
    ("renames", Editing.apply_renames),
    ("renamed_one_by_one", Editing.rename_one_by_one),
    (None, Editing.name_for_trainer),
    ("has_masters", Editing.add_masters),
    ("casts", Editing.cast),
    (None, Editing.check),
)
"""What is applied, in this order, and the attribute of `EditRules` that asks for it; None for what always is."""


def step_editor(edits: EditRules, target: Strategy, handles: FileHandles) -> Callable[[Checkpoint], EditedStep]:
    """A function that edits a checkpoint, complete or not; see `forms.request.Request`.

    Args:
        edits: the edits.
        target: the strategy of the target, which may be `same`.
        handles: open files.
    """

    def edit(checkpoint: Checkpoint) -> EditedStep:
        # The notes are printed when the chosen step is edited.
        result = Editing(checkpoint, edits, Report(), complete=False, handles=handles).edited()
        strategy = target
        if target.path == SAME:
            strategy = same_layouts(target, result)
        elif edits.to_trainer:
            # Parameters that no file has are needed if the target's strategy lists them.
            strategy = laid_out(edits, target, {*result.tensors, *filter(None, result.unseen.values())})
        return EditedStep(result.tensors, strategy, result.unseen)

    return edit


def _warn_of_buffers(checkpoint: Checkpoint, values: AbstractSet[str], report: Report) -> None:
    """Warn of values that may be buffers of a model: a trainer has these under other names. Text is no buffer."""
    names = sorted(name for name in values if not is_training_value(name))
    names = [name for name in names if not checkpoint.holders(name) or _stored(checkpoint, name).dtype != TEXT]
    if names:
        report.warn(
            f"single values keep their names, and a trainer has buffers of a model under {quoted('model.' + names[0])} "
            "and so on: " + listing(names)
        )


def _in_model(tensor: Quantised) -> View:
    """The model's tensor of a stored one, whose last two dimensions are swapped or whose rows end in padding."""
    stored, last = View.whole(0, tensor.shape), len(tensor.shape) - 1
    if tensor.swapped:
        return stored.transpose((*range(last - 1), last, last - 1))
    assert tensor.columns is not None
    return stored.part(last, 0, tensor.columns)


def _check_not_quantised(checkpoint: Checkpoint) -> None:
    """Refuse quantised weights: rules of names would separate codes and scales.

    Raises:
        CheckpointError: a weight is quantised.
    """
    from reshard.quantised import looks_quantised, stored_tensors

    if looks_quantised(stored_tensors(checkpoint)):
        raise CheckpointError(
            f"{checkpoint.place}: rules of names cannot convert quantised weights",
            file=checkpoint.place,
            hint="add --dequantize BFloat16",
        )


def same_layouts(strategy: Strategy, checkpoint: EditedCheckpoint) -> Strategy:
    """The source's strategy under the new names.

    Raises:
        CheckpointError: packed tensors have other layouts.
    """
    stored = checkpoint.base.tensors
    packed = [
        name
        for name, recipe in checkpoint.recipes.items()
        if recipe.view is not None or stored[recipe.sources[0]].name_in_files != recipe.sources[0]
    ]
    if packed:
        raise CheckpointError(
            "the source's strategy has no layouts for packed tensors: " + listing(packed),
            parameter=packed[0],
            hint="pass the target's strategy with --dst-strategy; `reshard strategy make` writes one from rules",
        )
    names = {name: recipe.sources[0] for name, recipe in checkpoint.recipes.items()}
    names.update((name, name) for name in checkpoint.values())
    # Runs that read other ranks' files need the same strategy.
    names.update((new, name) for name, new in checkpoint.unseen.items() if new is not None)
    return strategy.with_layouts(lambda old: {name: old[before] for name, before in names.items() if before in old})


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    return checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]


def _check_packed(name: str, sources: Sequence[GlobalTensor], view: View) -> None:
    """Refuse views that separate the two Int4 elements of a byte.

    Raises:
        CheckpointError: the view separates them.
    """
    packed = next((source for source in sources if source.dtype == INT4), None)
    if packed is not None and not view.keeps_rows([source.shape for source in sources]):
        raise CheckpointError(
            f"{quoted(name)} would be made of single elements of {quoted(packed.name)}, which is Int4: a byte holds "
            "two neighbours in the last dimension, and reshard does not unpack them",
            parameter=packed.name,
            hint='skip it: in a copy of the table, add a rule for it with do = "drop"',
        )
