"""Edits of names, packing and types, and the checkpoint that they make of a source."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Protocol

from reshard.checkpoints import FileHandles, Tensor
from reshard.checkpoints.checkpoint import Addition, Checkpoint, GlobalTensor, TiedTensors
from reshard.checkpoints.edited import EditedCheckpoint, Recipe
from reshard.checkpoints.formats.dtypes import CAST_TO, INT4, dtype_named
from reshard.errors import CheckpointError, NamesError, UsageError
from reshard.forms.form import EditedStep, Names
from reshard.forms.registry import form_named, form_of
from reshard.plan.casts import CastRule, cast
from reshard.storage import absolute, is_directory, is_regular_file
from reshard.strategies import SAME, Strategy
from reshard.text.messages import listing
from reshard.text.names import as_glob, as_pattern, is_training_value
from reshard.text.report import Report
from reshard.text.wording import plural, quoted

if TYPE_CHECKING:
    from reshard.layout import View
    from reshard.names import Applied, NameRules
    from reshard.quantised import Quantisation


PLAIN_WEIGHTS, PLAIN_ALL = "weights", "all"
"""The part of a trainer's state that is renamed to a model's names."""

# The side of tables whose tensors no option changes.
_UNPACKED = "huggingface"
# Megatron's objects of a whole checkpoint.
_MEGATRON = frozenset(["common.pt", "common_state"])

_STATE = "left out: optimizer state follows its weights with --optimizer keep"


class TypedEdits(NamedTuple):
    """The options of edits as typed, for records and resume.

    Attributes:
        names: the table of rules, a built-in one's name or a path.
        rename: other names.
        config: the file with the model's sizes.
        reverse: --reverse.
        optimizer: --optimizer keep.
        cast: types.
        dequantize: the type that quantised tensors get.
    """

    names: Optional[str] = None
    rename: tuple[str, ...] = ()
    config: Optional[str] = None
    reverse: bool = False
    optimizer: bool = False
    cast: tuple[str, ...] = ()
    dequantize: Optional[str] = None


class Additions(Protocol):
    """Additions to tensors of a checkpoint, such as an adapter.

    Attributes:
        identity: a text; equal additions have equal texts.
        paths: its files.
        handles: the open files of additions and source; one cache detects every file that changes meanwhile.
    """

    identity: str
    paths: frozenset[str]
    handles: FileHandles

    def fit(self, tensors: Mapping[str, GlobalTensor]) -> Mapping[str, Addition]:
        """The addition of each tensor that has one.

        Raises:
            CheckpointError: the additions do not fit these tensors.
        """

    def is_part(self, name: str) -> bool:
        """Whether a tensor belongs to the additions and is not written itself."""


@dataclass(frozen=True)
class Edits:
    """Other names, packing and types.

    Attributes:
        table: rules of names and packing.
        renames: rules that give other names, after the table.
        config: the model's sizes for the rules.
        reverse: whether the table is read from right to left; None: the direction that fits.
        optimizer: whether the table's rules also apply to optimizer state.
        casts: requested types; the last match wins.
        additions: additions to tensors under their old names; they exclude casts.
        plain: first change names of a trainer's state to those of a model: ``weights`` skips optimizer state, ``all``
            gives it MindSpore's names; None for unchanged names.
        trainer: last, change names to those of a trainer's state.
        exactly: other names of single tensors, after the rules; None for skipped ones.
        quantisation: how quantised tensors are recognised, and their type after dequantising, the first edit; None to
            copy codes and scales unchanged.
        typed: the options as typed; None for edits without options of a conversion.
        source_packing: the `packing` that the source's records list; empty without records of a table.
    """

    table: Optional[NameRules] = None
    renames: Optional[NameRules] = None
    config: Optional[Mapping[str, object]] = None
    reverse: Optional[bool] = None
    optimizer: bool = False
    casts: tuple[CastRule, ...] = ()
    additions: Optional[Additions] = None
    exactly: tuple[tuple[str, Optional[str]], ...] = ()
    plain: Optional[str] = None
    trainer: bool = False
    quantisation: Optional[Quantisation] = None
    typed: Optional[TypedEdits] = field(default=TypedEdits(), compare=False)
    source_packing: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.additions is not None and (self.table is not None or self.casts):
            raise UsageError("additions to tensors exclude rules of names and casts")

    @property
    def is_empty(self) -> bool:
        """Whether all names, packing and types are unchanged."""
        return self == NO_EDITS

    def identity(self, options: Optional[Mapping[str, str]] = None, reverse: bool = False) -> str:
        """A text; edits that make equal tensors have equal texts.

        Args:
            options: the table's options, stated or default.
            reverse: whether the table is read from right to left.
        """
        table = None
        if self.table is not None:
            # The rest of a configuration may change between two runs.
            sizes = json.dumps(self.table.size_values(self.config), sort_keys=True)
            table = (self.table.text, sorted((options or {}).items()), reverse, self.optimizer, sizes)
        renames = () if self.renames is None else tuple(rule.where for rule in self.renames.rules)
        additions = None if self.additions is None else self.additions.identity
        quantisation = None if self.quantisation is None else self.quantisation.identity
        return repr((table, renames, self.casts, additions, self.exactly, self.plain, self.trainer, quantisation))

    def possible_names(self, name: str) -> Iterator[Optional[str]]:
        """The possible names of a tensor; None for a name that depends on other tensors."""
        rules = (self.table, self.renames, self.additions, self.quantisation)
        if self.exactly or any(each is not None for each in rules):
            yield None
        elif self.plain is None:
            yield from (name, None if self.trainer else name)
        else:
            from reshard.names import possible_plain_names

            yield from possible_plain_names(name, self.plain == PLAIN_ALL)

    def first_names(self, names: Collection[str], checkpoint: Checkpoint, report: Report) -> dict[str, Optional[str]]:
        """The first renaming: new names by old ones, None for skipped tensors.

        Args:
            names: of all tensors, dequantised.
            checkpoint: the source, whose objects and recorded keys decide.
            report: gets notes on skipped tensors.
        """
        if self.plain is None:
            return {}
        from reshard.names import plain_names

        keys = getattr(checkpoint, "nested", {})
        renamed = plain_names(names, checkpoint.objects, keys, self.plain == PLAIN_ALL)
        if renamed.prefix:
            report.note(f"names: the trainer's prefix {quoted(renamed.prefix)} is removed")
        if renamed.kept:
            first, *others = (f"'{as_glob(str(key))}.*" for key in renamed.kept)
            words = [f"--rename {first}=*'", *(f"--exclude {each}'" for each in others)]
            report.warn(
                f"names: no key of the saved state is known to be the model's, so all stay: {listing(renamed.kept)}; "
                f"to convert the tensors of one: {' '.join(words)}"
            )
        if self.plain == PLAIN_WEIGHTS and not _MEGATRON.isdisjoint(name.split("/")[0] for name in checkpoint.objects):
            report.warn("names and stacked layers are Megatron's and stay: transformers does not load them")
        if renamed.left_out:
            report.note(
                f"{plural(len(renamed.left_out), 'tensor')} of the optimizer left out: " + listing(renamed.left_out)
            )
        if renamed.outside:
            report.warn(
                f"{plural(len(renamed.outside), 'tensor')} beside the model left out: " + listing(renamed.outside)
            )
        return renamed.names

    def model_names(self, names: Collection[str], checkpoint: Checkpoint) -> dict[str, str]:
        """The names in the model by names after the first renaming, which may still be those of a trainer's state.

        Args:
            names: of tensors.
            checkpoint: the source.
        """
        if self.plain is not None or form_named(checkpoint.form).options.names is Names.MODEL:
            return {name: name for name in names}
        from reshard.names import plain_names

        renamed = plain_names(names, checkpoint.objects, getattr(checkpoint, "nested", {}), True)
        return {name: new or name for name, new in renamed.names.items()}

    def nested(self, names: Collection[str], recorded: Mapping[str, tuple[Any, ...]]) -> Mapping[str, tuple[Any, ...]]:
        """The keys of a trainer's state by the names of its tensors.

        Args:
            names: of the tensors after these edits.
            recorded: the keys in the source. Names that these edits gave have keys where the source has their root.
        """
        roots = {keys[0] for keys in recorded.values() if len(keys) > 1}
        if not self.trainer and not roots:
            return recorded
        from reshard.names import trainer_keys

        if self.trainer:
            return {name: trainer_keys(name) for name in names}
        keys_by_name = {name: trainer_keys(name) for name in names if name not in recorded}
        return {**recorded, **{name: keys for name, keys in keys_by_name.items() if keys[0] in roots}}

    def last_names(self, names: Collection[str], report: Report) -> dict[str, Optional[str]]:
        """The last renaming: new names by old ones.

        Args:
            names: the names before it.
            report: gets notes on the names.
        """
        if not self.trainer:
            return {}
        from reshard.names import trainer_names

        renamed = trainer_names(names)
        report.note("names: weights get the prefix 'model.', as in a trainer's state")
        return renamed

    def note_optimizer(self, names: Iterable[str], report: Report) -> None:
        """Note how torch loads the optimizer state of a trainer's state.

        Args:
            names: of the tensors that are written.
            report: gets the note.
        """
        if self.trainer and any(name.startswith("optimizer.") for name in names):
            report.note(
                "optimizer.state has no step for each parameter, which MindSpore does not save: torch loads it with "
                "DefaultLoadPlanner(allow_partial_load=True)"
            )

    def laid_out(self, target: Strategy, names: Collection[str]) -> Strategy:
        """The target's strategy for the names of a trainer's state; strategies list those of the model.

        Args:
            target: the strategy.
            names: of all tensors that are written.
        """
        listed = set(target.parameters)
        if target.is_placeholder or target.is_none or listed.issuperset(names):
            return target
        from reshard.names import name_before

        after = {name_before(name): name for name in names}
        # Without a renaming, tensors may have the names that the strategy lists.
        if not self.trainer and not (listed.isdisjoint(names) and len(after) == len(names)):
            return target
        stages = (
            stage._replace(layouts={after.get(name, name): layout for name, layout in stage.layouts.items()})
            for stage in target.stages
        )
        return replace(target, stages=tuple(stages), original=target)

    def possible_identities(self) -> Iterator[str]:
        """All possible identities, since names decide options and direction.

        Raises:
            NamesError: an option is missing.
        """
        if self.table is None:
            yield self.identity()
            return
        from reshard.names import possible_options

        for options in possible_options(self.table, self.config):
            for reverse in (False, True) if self.reverse is None else (self.reverse,):
                yield self.identity(options, reverse)

    def step_editor(self, target: Strategy) -> Callable[[Checkpoint], EditedStep]:
        """A function that edits a checkpoint, complete or not; see `forms.form.ReadRequest`.

        Args:
            target: the strategy of the target, which may be `same`.
        """

        def edit(checkpoint: Checkpoint) -> EditedStep:
            # The notes are printed when the chosen step is edited.
            result = edited(checkpoint, self, Report(), complete=False)
            # Parameters that no file has are needed if the target's strategy lists them.
            names = {*result.tensors, *filter(None, result.unseen.values())}
            laid_out = target
            if target.path == SAME:
                laid_out = same_layouts(target, result)
            elif self.trainer:
                laid_out = self.laid_out(target, names)
            return EditedStep(result.tensors, laid_out, result.unseen)

        return edit


NO_EDITS = Edits()
"""Unchanged names, packing and types."""


def edited(checkpoint: Checkpoint, edits: Edits, report: Report, complete: bool = True) -> EditedCheckpoint:
    """The checkpoint that edits make of a source.

    Args:
        checkpoint: the source.
        edits: names, packing and types.
        report: gets notes on skipped tensors.
        complete: whether no slice of the source is missing.

    Raises:
        InputError: the edits do not fit the source.
    """
    views: Mapping[str, View] = {}
    if edits.quantisation is not None:
        checkpoint, views = _dequantised(checkpoint, edits.quantisation, report)
    editing = _Editing(checkpoint, views, report)
    editing.rename(edits.first_names(checkpoint.tensors, checkpoint, report))
    if edits.additions is not None:
        editing.add(edits.additions, edits.model_names(editing.recipes, checkpoint))
    identity = edits.identity() if edits.table is None else editing.apply_table(edits.table, edits, complete)
    if edits.renames is not None:
        editing.apply_renames(edits.renames)
    if edits.exactly:
        editing.rename(dict(edits.exactly))
        editing.unseen = dict.fromkeys(editing.unseen)
    last = edits.last_names({*editing.recipes, *editing.unseen_names}, report)
    if last:
        editing.rename(last)
        editing.unseen = {name: None if new is None else last.get(new, new) for name, new in editing.unseen.items()}
    if edits.trainer:
        _warn_of_buffers(editing.values, report)
    if edits.casts:
        editing.recipes = cast(checkpoint, editing.recipes, editing.values, editing.unseen_names, edits.casts, report)
    editing.check_types()
    nested = edits.nested(editing.recipes, getattr(checkpoint, "nested", {}))
    return EditedCheckpoint(
        checkpoint,
        editing.recipes,
        editing.values,
        identity,
        editing.tied,
        editing.unseen,
        nested,
        editing.packing,
    )


class _Editing:
    """The tensors and values of a source, which edits change one after the other.

    Args:
        checkpoint: the source.
        views: views of tensors whose dimensions are swapped.
        report: gets notes and warnings.

    Attributes:
        recipes: the tensors.
        values: names of copied values.
        unseen: the new name of each parameter that only absent ranks hold; None if unknown.
        tied: tied tensors, of which rules use one.
        packing: the table that gave the names, see `EditedCheckpoint.packing`.
    """

    def __init__(self, checkpoint: Checkpoint, views: Mapping[str, View], report: Report) -> None:
        self._checkpoint = checkpoint
        self._report = report
        self.recipes: Mapping[str, Recipe] = {name: Recipe((name,), views.get(name)) for name in checkpoint.tensors}
        self.values: AbstractSet[str] = {*checkpoint.values(), *checkpoint.without_layout()}
        self.unseen: Mapping[str, Optional[str]] = {name: name for name in checkpoint.unseen}
        self.tied: Sequence[TiedTensors] = ()
        self.packing: tuple[str, ...] = ()

    @property
    def unseen_names(self) -> set[str]:
        """The known new names of parameters that only absent ranks hold."""
        return {name for name in self.unseen.values() if name is not None}

    def rename(self, names: Mapping[str, Optional[str]]) -> None:
        """Give tensors other names; None skips a tensor. Values keep their names."""
        remaining = {name for name in self.values if names.get(name, name) is not None}
        recipes: dict[str, Recipe] = {}
        for name, recipe in self.recipes.items():
            new = names.get(name, name)
            if new is None:
                continue
            if new in recipes or new in remaining:
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

    def apply_table(self, table: NameRules, edits: Edits, complete: bool) -> str:
        """Apply rules of names and packing; returns the identity of the edits."""
        # Loaded only here: most conversions have no rules.
        from reshard.names import apply_rules

        if edits.quantisation is None:
            _check_not_quantised(self._checkpoint)
        applied = apply_rules(table, self._shapes(), edits.config, edits.reverse, edits.optimizer)
        old, new = table.sides[:: -1 if applied.reversed else 1]
        self._report.note(f"names and packing by the rules {table.path}: {old} to {new}")
        if applied.tied and not complete:
            first, second = applied.tied[0]
            raise CheckpointError(
                f"{quoted(first)} and {quoted(second)} cannot be compared without the whole source",
                parameter=second,
            )
        packing = _packing(edits, applied)
        if old != _UNPACKED:
            _check_packing(self._checkpoint.place, edits.source_packing, packing, table.packing_options, self._report)
        self.packing = () if new == _UNPACKED else packing
        tensors, recipes = self._checkpoint.tensors, self.recipes
        # By the names in the files, which an earlier renaming may have changed. Rules that move values are refused
        # elsewhere.
        self.tied = [
            TiedTensors(
                tensors[recipes[first].sources[0]],
                (tensors[recipes[second].sources[0]],),
                "the rules write only the first, as for a tied model",
                "if the model does not tie them, set tie_word_embeddings to false in config.json; options of built-in "
                "rules: reshard names show TABLE",
            )
            for first, second in applied.tied
            if first in recipes and second in recipes
        ]
        self._apply(applied, table, edits.source_packing)
        self.unseen = dict.fromkeys(self.unseen)
        return edits.identity(applied.options, applied.reversed)

    def apply_renames(self, renames: NameRules) -> None:
        """Apply rules that give other names."""
        from reshard.names import apply_rules

        # New names do not depend on shapes. A rule that fits a parameter of an absent rank is used.
        shapes = {**self._shapes(), **dict.fromkeys(self.unseen_names, ())}
        values = {*self.values}.intersection(self._checkpoint.values())
        applied = apply_rules(renames, shapes, optimizer=True, values=values)
        new_names = {view.sources[0]: name for name, view in applied.views.items()}
        self.unseen = {name: None if old is None else new_names.get(old) for name, old in self.unseen.items()}
        present = {name: view for name, view in applied.views.items() if name not in self.unseen_names}
        self._apply(replace(applied, views=present), renames)

    def _apply(self, applied: Applied, rules: NameRules, recorded: Collection[str] = ()) -> None:
        """Set the tensors and values after rules; refuse rules that take an entry without a layout.

        Args:
            applied: the names and views.
            rules: that were applied.
            recorded: the packing of the source.
        """
        from reshard.names import warning_of

        recipes: dict[str, Recipe] = {}
        values: set[str] = set()
        for name, (_, sources, view) in applied.views.items():
            no_layout = next((source for source in sources if source not in self.recipes), None)
            if no_layout is None:
                recipes[name] = self._packed(name, sources, view)
            elif sources == (name,) and view.is_all_of(_stored(self._checkpoint, name).shape):
                values.add(name)
            else:
                raise CheckpointError(
                    f"{quoted(name)} would be made of {quoted(no_layout)}, whose layout is unknown",
                    parameter=no_layout,
                    hint=f"values keep their names: remove the rule or --rename that matches {no_layout}, or drop it "
                    "by a rule",
                )
        for names, reason in ((applied.dropped, "dropped by a rule"), (applied.skipped_state, _STATE)):
            if names:
                self._report.note(f"{len(names)} {reason}: " + listing(sorted(names)))
        for note in applied.notes:
            self._report.note(note)
        warning = warning_of(rules, applied, recorded)
        if warning is not None:
            self._report.warn(warning)
        self.recipes, self.values = recipes, values

    def _packed(self, name: str, sources: Sequence[str], view: View) -> Recipe:
        """A tensor that rules make of others; refuse sources that are made of others themselves."""
        if len(sources) == 1 and view.is_all_of(self._shape(self.recipes[sources[0]])):
            return self.recipes[sources[0]]
        for number, source in enumerate(sources):
            source_view = self.recipes[source].view
            if source_view is None:
                continue
            # Only the first table packs, and before it only dequantised tensors have a view.
            if source_view != _swapped(self._checkpoint.tensors[self.recipes[source].sources[0]].shape):
                raise CheckpointError(
                    f"{quoted(name)}: {quoted(source)} is already made of parts of tensors", parameter=source
                )
            view = view.with_swapped_source(number)
        return Recipe(tuple(self.recipes[source].sources[0] for source in sources), view)

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
        """The shapes of tensors and values."""
        shapes = {name: self._shape(recipe) for name, recipe in self.recipes.items()}
        shapes.update((name, _stored(self._checkpoint, name).shape) for name in self.values)
        return shapes

    def _shape(self, recipe: Recipe) -> tuple[int, ...]:
        return self._checkpoint.tensors[recipe.sources[0]].shape if recipe.view is None else recipe.view.shape


def _packing(edits: Edits, applied: Applied) -> tuple[str, ...]:
    """The applied table, its typed and its decisive options, and the sizes, as ``KEY=VALUE``."""
    from reshard.names import builtin_names

    assert edits.table is not None
    path = edits.table.path
    texts = [f"table={path if path in builtin_names() else absolute(path)}"]
    if edits.typed is not None and edits.typed.config is not None:
        texts.append(f"config={absolute(edits.typed.config)}")
    recorded = edits.table.packing_options.union(name for name, _ in edits.table.chosen)
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


def _warn_of_buffers(values: AbstractSet[str], report: Report) -> None:
    """Warn of values that may be buffers of a model: a trainer has these under other names."""
    names = sorted(name for name in values if not is_training_value(name))
    if names:
        report.warn(
            f"single values keep their names, and a trainer has buffers of a model under {quoted('model.' + names[0])} "
            "and so on: " + listing(names)
        )


def between_forms(edits: Edits, form: str, to: str) -> Edits:
    """The edits, with the renaming that a conversion between two forms implies.

    A trainer's names become those of a model where the target has only these, and a model's names those of a trainer's
    state where the target's trainers expect them. --rename turns this off.

    Args:
        edits: the requested edits.
        form: of the source.
        to: of the target.
    """
    source, target = form_named(form).options, form_named(to).options
    if edits.renames is not None:
        return edits
    plain = None
    if source.names is not Names.MODEL and target.names is Names.MODEL:
        plain = PLAIN_ALL if target.mindspore else PLAIN_WEIGHTS
    trainer = source.names is Names.MODEL and target.names is Names.TRAINER
    return replace(edits, plain=plain, trainer=trainer) if plain or trainer else edits


def edits_to_model(form: str) -> Edits:
    """The edits that give tensors the names in the model, and MindSpore's names for optimizer state.

    Args:
        form: of the source.
    """
    return NO_EDITS if form_named(form).options.names is Names.MODEL else Edits(plain=PLAIN_ALL, typed=None)


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
    from reshard.layout import View

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

    Args:
        strategy: the source's strategy.
        checkpoint: the edited checkpoint.

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
    stages = (
        stage._replace(layouts={name: stage.layouts[old] for name, old in names.items() if old in stage.layouts})
        for stage in strategy.stages
    )
    return replace(strategy, stages=tuple(stages))


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """The header of a value, from the first file that holds it."""
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


_CONFIG = "config.json"


def typed_edits(
    src: str,
    names: Optional[str] = None,
    rename: Sequence[str] = (),
    config: Optional[str] = None,
    reverse: bool = False,
    optimizer: bool = False,
    cast: Sequence[str] = (),
    dequantize: Optional[str] = None,
) -> Edits:
    """The edits of options; empty for unchanged names and types.

    Args:
        src: the source; its config.json is the default.
        names: a built-in table of rules, or the file of one.
        rename: other names, ``OLD=NEW``.
        config: the file with the model's sizes.
        reverse: read the table from right to left.
        optimizer: apply it also to optimizer state.
        cast: ``DTYPE`` or ``GLOB=DTYPE``.
        dequantize: type for quantised tensors; None to copy them unchanged.

    Raises:
        UsageError: options contradict each other, or name an unknown type.
        ReshardError: a table cannot be read.
    """
    for option, is_set in (("reverse", reverse), ("optimizer", optimizer)):
        if is_set and names is None:
            raise UsageError(f"--{option} needs --names", hint="name a table: `reshard names list`")
    if config is not None and names is None and dequantize is None:
        raise UsageError("--config needs --names or --dequantize", hint="name a table: `reshard names list`")
    if names is None and not rename and not cast and dequantize is None:
        return NO_EDITS
    if not (is_directory(src) or form_named(form_of(src)).options.by_rank):
        # An index or the one file of a model.
        src = os.path.dirname(src)
    if names is not None and config is None and is_regular_file(os.path.join(src, _CONFIG)):
        config = os.path.join(src, _CONFIG)
    # Loaded only here: most conversions have no rules.
    from reshard.names import builtin_names, parse_renames, read_config, rules_named
    from reshard.records.ledger import packing_of

    table = None if names is None else rules_named(names)
    if names is not None and table is not None and table.path not in builtin_names():
        names = absolute(names)
    sizes = None if config is None else read_config(config)
    return Edits(
        table=table,
        renames=parse_renames(rename) if rename else None,
        config=sizes,
        reverse=True if reverse else None,
        optimizer=optimizer,
        casts=tuple(map(CastRule.parse, cast)),
        quantisation=None if dequantize is None else _quantisation(dequantize, src, sizes),
        typed=TypedEdits(names, tuple(rename), config, reverse, optimizer, tuple(cast), dequantize),
        source_packing=() if names is None else packing_of(src),
    )


def _quantisation(dequantize: str, src: str, config: Optional[Mapping[str, object]]) -> Quantisation:
    """How quantised tensors are recognised, from the source's other files.

    Raises:
        UsageError: the type is not floating point.
        ReshardError: a file cannot be read.
    """
    from reshard.quantised import quantisation_of

    dtype = dtype_named(dequantize) if isinstance(dequantize, str) else None
    if dtype not in CAST_TO:
        raise UsageError(f"--dequantize {dequantize}: is none of {', '.join(CAST_TO)}")
    return quantisation_of(src, dtype, config)


def edits_of(src: str, typed: Mapping[str, Any], to: Optional[str] = None) -> Edits:
    """The edits of options as click names them; see `typed_edits`.

    Args:
        src: the source; its config.json is the default.
        typed: the options' values.
        to: the form of the target, which may have other names; None if nothing is written.

    Raises:
        UsageError: options contradict each other, or name an unknown type.
        ReshardError: a table cannot be read.
    """
    edits = typed_edits(
        src,
        typed["names"],
        typed["rename"],
        typed["config"],
        typed["reverse"],
        typed["optimizer"] is not None,
        typed["cast"],
        typed["dequantize"],
    )
    return edits if to is None else between_forms(edits, form_of(src), to)
