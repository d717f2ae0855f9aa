"""The checkpoint that edits of names, packing and types make of a source."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.checkpoints import Tensor
from reshard.checkpoints.checkpoint import Checkpoint, EditedCheckpoint, GlobalTensor, Recipe, TiedTensors
from reshard.checkpoints.formats.dtypes import INT4, TEXT
from reshard.errors import CheckpointError, NamesError, UsageError
from reshard.forms.form import Side
from reshard.layout.views import View
from reshard.plan.casts import cast
from reshard.plan.edits import Additions, AppliedTable, EditRules, recorded_name
from reshard.storage import absolute
from reshard.strategies import Strategy
from reshard.text.messages import Report, as_pattern, listing, plural, quoted
from reshard.text.names import is_training_value

if TYPE_CHECKING:
    from reshard.names import Applied, NameRules, SizedOperation
    from reshard.quantised import Quantisation

_STATE = "left out: optimizer state follows its weights with --optimizer keep"


def edited(checkpoint: Checkpoint, edits: EditRules, report: Report, complete: bool = True) -> EditedCheckpoint:
    """The checkpoint that edits make of a source.

    Raises:
        InputError: the edits do not fit the source.
    """
    if edits.additions is not None and (edits.table is not None or edits.casts):
        raise UsageError("additions to tensors exclude rules of names and casts")
    views: Mapping[str, View] = {}
    if edits.quantisation is not None:
        checkpoint, views = _dequantised(checkpoint, edits.quantisation, report)
    editing = _Editing(checkpoint, views, report)
    editing.rename(edits.first_names(checkpoint.tensors, checkpoint, report))
    edits = edits.for_experts(editing.recipes)
    if edits.additions is not None:
        editing.add(edits.additions, edits.model_names(editing.recipes, checkpoint))
    identity = edits.identity() if edits.table is None else editing.apply_tables(edits, complete)
    if edits.renames is not None:
        editing.apply_renames(edits.renames)
    if edits.exactly:
        editing.rename(dict(edits.exactly))
        editing.unseen = dict.fromkeys(editing.unseen)
    last = edits.last_names({*editing.recipes, *editing.unseen_names}, report)
    if edits.side is Side.HUGGINGFACE:
        from reshard.plan.masters import as_weights

        editing.recipes = as_weights(checkpoint, editing.recipes, last, edits.casts, report)
    if last:
        editing.rename(last)
        editing.unseen = {name: None if new is None else last.get(new, new) for name, new in editing.unseen.items()}
    groups = sorted(name for name in checkpoint.objects if "param_groups" in name)
    if edits.trainer and groups:
        report.warn(
            "parameter groups keep the names of the source's parameters, and torch does not find them: "
            + listing(groups)
        )
    if edits.trainer:
        _warn_of_buffers(checkpoint, editing.values, report)
    if edits.side is Side.MEGATRON:
        from reshard.plan.masters import with_masters

        editing.recipes = with_masters(checkpoint, editing.recipes)
    if edits.casts:
        editing.recipes = cast(checkpoint, editing.recipes, editing.values, editing.unseen_names, edits.casts, report)
    editing.check_types()
    if "" in editing.recipes:
        name = editing.recipes[""].sources[0]
        raise CheckpointError(f"{quoted(name)}: its new name would be empty", parameter=name)
    nested = edits.nested(editing.recipes, checkpoint.nested)
    if checkpoint.objects and not edits.keeps_objects:
        report.note(f"{plural(len(checkpoint.objects), 'object')} of Megatron left out: names are not Megatron's")
    return EditedCheckpoint(
        checkpoint,
        editing.recipes,
        editing.values,
        identity,
        editing.tied,
        editing.unseen,
        nested,
        editing.packing,
        edits.keeps_objects,
    )


class _Editing:
    """The tensors and values of a source, which edits change one after the other.

    Args:
        views: views of tensors whose dimensions are swapped.

    Attributes:
        unseen: the new name of each parameter that only absent ranks hold; None if unknown.
        tied: tied tensors, of which rules use one.
        packing: the table that gave the names, see `EditedCheckpoint.packing`.
    """

    def __init__(self, checkpoint: Checkpoint, views: Mapping[str, View], report: Report) -> None:
        self._checkpoint = checkpoint
        self._report = report
        self.recipes: Mapping[str, Recipe] = {name: Recipe((name,), views.get(name)) for name in checkpoint.tensors}
        self.values: AbstractSet[str] = {*checkpoint.values(), *checkpoint.without_layout()}
        self.unseen: Mapping[str, str | None] = {name: name for name in checkpoint.unseen}
        self.tied: Sequence[TiedTensors] = ()
        self.packing: tuple[str, ...] = ()

    @property
    def unseen_names(self) -> set[str]:
        """The known new names of parameters that only absent ranks hold."""
        return {name for name in self.unseen.values() if name is not None}

    def rename(self, names: Mapping[str, str | None]) -> None:
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

    def add(self, additions: Additions, model_names: Mapping[str, str]) -> None:
        """Add to tensors, by their names in the model, and remove the tensors of the additions."""
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

    def apply_tables(self, edits: EditRules, complete: bool) -> str:
        """Apply rules of names and packing; returns the identity of the edits."""
        if edits.quantisation is None:
            _check_not_quantised(self._checkpoint)
        settled: list[AppliedTable] = []
        for link in edits.chain(self._shapes()):
            applied = edits.apply_table(link, self._shapes())
            self._apply_table(link.rules, applied, edits, complete)
            settled.append((link.rules, applied.options, applied.reversed))
        self.unseen = dict.fromkeys(self.unseen)
        return edits.identity(settled)

    def _apply_table(self, table: NameRules, applied: Applied, edits: EditRules, complete: bool) -> None:
        # Loaded only here: most conversions have no rules.
        from reshard.names import HUB_SIDE

        old, new = table.sides[:: -1 if applied.reversed else 1]
        self._report.note(f"names and packing by the rules {table.path}: {old} to {new}")
        if applied.tied and not complete:
            first, second = applied.tied[0]
            raise CheckpointError(
                f"{quoted(first)} and {quoted(second)} cannot be compared without the whole source",
                parameter=second,
            )
        packing = _packing(edits, table, applied)
        if old != HUB_SIDE and table is not edits.megatron:
            _check_packing(self._checkpoint.place, edits.source_packing, packing, table.packing_options, self._report)
        # Form and names determine all of Megatron's packing.
        self.packing = () if new == HUB_SIDE or table is edits.megatron else packing
        # Rules that move values are refused elsewhere.
        recipes = self.recipes
        tied = [self._tied(first, second) for first, second in applied.tied if first in recipes and second in recipes]
        self.tied = [*self.tied, *filter(None, tied)]
        self._apply(applied)

    def _tied(self, first: str, second: str) -> TiedTensors | None:
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

    def apply_renames(self, renames: NameRules) -> None:
        from reshard.names import apply_rules

        # New names do not depend on shapes. A rule that fits a parameter of an absent rank is used.
        shapes = {**self._shapes(), **dict.fromkeys(self.unseen_names, ())}
        values = {*self.values}.intersection(self._checkpoint.values())
        applied = apply_rules(renames, shapes, optimizer=True, values=values)
        new_names = {view.sources[0]: name for name, view in applied.views.items()}
        self.unseen = {name: None if old is None else new_names.get(old) for name, old in self.unseen.items()}
        present = tuple(step for step in applied.steps if self.unseen_names.isdisjoint(step.targets))
        self._apply(replace(applied, steps=present))

    def _apply(self, applied: Applied) -> None:
        """Set the tensors and values after rules; refuse rules that take an entry without a layout."""
        recipes: dict[str, Recipe] = {}
        values: set[str] = set()
        # Layers are made alike.
        known: dict[object, Sequence[tuple[tuple[int, ...], View]]] = {}
        for step in applied.steps:
            loose = {source for source in step.sources if source not in self.recipes}
            operands = [self.recipes.get(source) or Recipe((source,)) for source in step.sources]
            for name, recipe in zip(step.targets, self._made(step.operations, operands, known)):
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
        for names, reason in ((applied.dropped, "dropped by a rule"), (applied.skipped_state, _STATE)):
            if names:
                self._report.note(f"{len(names)} {reason}: " + listing(sorted(names)))
        for note in applied.notes:
            self._report.note(note)
        self.recipes, self.values = recipes, values

    def _made(
        self,
        operations: Sequence[SizedOperation],
        operands: Sequence[Recipe],
        known: dict[object, Sequence[tuple[tuple[int, ...], View]]],
    ) -> Iterable[Recipe]:
        """The tensors that operations make of others, which may be parts of several in files."""
        if not operations:
            return operands
        # Loaded only here: most conversions have no rules.
        from reshard.names import viewed

        stored = [*dict.fromkeys(itertools.chain.from_iterable(each.sources for each in operands))]
        number_of = {name: number for number, name in enumerate(stored)}
        parts = [
            (self._shape(each) if each.view is None else each.view, tuple(number_of[name] for name in each.sources))
            for each in operands
        ]
        key = (operations, *parts)
        if key not in known:
            views = [
                (part if isinstance(part, View) else View.whole(0, part)).with_sources(numbers)
                for part, numbers in parts
            ]
            known[key] = [view.with_needed_sources() for view in viewed(operations, views)]
        made = []
        for numbers, view in known[key]:
            sources = tuple(stored[number] for number in numbers)
            is_whole = len(sources) == 1 and view.is_all_of(self._shape_in_files(sources[0]))
            made.append(Recipe(sources, None if is_whole else view))
        return made

    def _shape(self, recipe: Recipe) -> tuple[int, ...]:
        return self._shape_in_files(recipe.sources[0]) if recipe.view is None else recipe.view.shape

    def _shape_in_files(self, name: str) -> tuple[int, ...]:
        tensor = self._checkpoint.tensors.get(name)
        return tuple(_stored(self._checkpoint, name).shape if tensor is None else tensor.shape)

    def check_types(self) -> None:
        """Refuse tensors of mixed types, and views that divide a byte."""
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

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: self._shape(recipe) for name, recipe in self.recipes.items()}
        shapes.update((name, _stored(self._checkpoint, name).shape) for name in self.values)
        return shapes


def _packing(edits: EditRules, table: NameRules, applied: Applied) -> tuple[str, ...]:
    """The applied table, its typed and its decisive options, and the sizes, as ``KEY=VALUE``."""
    texts = [f"table={recorded_name(table)}"]
    if edits.config_path is not None:
        texts.append(f"config={absolute(edits.config_path)}")
    recorded = table.packing_options.union(name for name, _ in table.chosen)
    texts += (f"option {name}={applied.options[name]}" for name in sorted(recorded))
    return (*texts, *(f"size {name}={value}" for name, value in applied.sizes.items()))


def words_of_packing(packing: Sequence[str]) -> list[str]:
    """The options --names and --config of a recorded `EditedCheckpoint.packing`."""
    values = dict(text.split("=", 1) for text in packing)
    options = (f"{key.split()[1]}={value}" for key, value in values.items() if key.startswith("option "))
    config = ["--config", values["config"]] if "config" in values else []
    return ["--names", ",".join([values["table"], *options]), *config]


def _check_packing(
    place: str, recorded: Sequence[str], packing: Sequence[str], options: Collection[str], report: Report
) -> None:
    """Compare the decisive options and the sizes of a table with those that its records list.

    Other values give the right names and shapes with the wrong numbers.

    Raises:
        NamesError: the same table has other values.
    """
    old, new = (dict(text.split("=", 1) for text in texts) for texts in (recorded, packing))
    compared = {f"option {name}" for name in options}
    differing = [
        key for key in new if (key in compared or key.startswith("size ")) and old.get(key, new[key]) != new[key]
    ]
    if not differing:
        return
    was, is_now = (", ".join(f"{key.split()[1]}={values[key]}" for key in differing) for values in (old, new))
    message = f"{place}: was converted with {was} by the rules {old['table']}, and {is_now} would be applied"
    hint = f"use the recorded options: {shlex.join(words_of_packing(recorded))}"
    if old["table"] == new["table"]:
        raise NamesError(message, file=place, hint=hint)
    report.warn(f"{message}; {hint}")


def _warn_of_buffers(checkpoint: Checkpoint, values: AbstractSet[str], report: Report) -> None:
    """Warn of values that may be buffers of a model: a trainer has these under other names. Text is no buffer."""
    names = sorted(name for name in values if not is_training_value(name))
    names = [name for name in names if not checkpoint.holders(name) or _stored(checkpoint, name).dtype != TEXT]
    if names:
        report.warn(
            f"single values keep their names, and a trainer has buffers of a model under {quoted('model.' + names[0])} "
            "and so on: " + listing(names)
        )


def _dequantised(
    checkpoint: Checkpoint, quantisation: Quantisation, report: Report
) -> tuple[Checkpoint, dict[str, View]]:
    """The dequantised source, and views of tensors whose dimensions are swapped."""
    # Loaded only here: most conversions have nothing quantised.
    from reshard.quantised import dequantised, describe

    dequantised_checkpoint, recognised = dequantised(checkpoint, quantisation)
    if not recognised.tensors:
        report.warn("--dequantize: no tensor of the source is quantised")
    for scheme, count in describe(recognised).items():
        report.note(f"{plural(count, 'tensor')} dequantised to {quantisation.dtype}: {scheme}")
    if recognised.left_out:
        report.note(f"{len(recognised.left_out)} scales of activations left out: " + listing([*recognised.left_out]))
    views = {name: _swapped(each.shape) for name, each in recognised.tensors.items() if each.swapped}
    return dequantised_checkpoint, views


def _swapped(shape: Sequence[int]) -> View:
    """A tensor with its last two dimensions swapped, given its stored shape."""
    return View.whole(0, shape).transpose((*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))


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
