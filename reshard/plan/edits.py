"""Edits of names, packing and types, and the checkpoint that they make of a source."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Callable, Optional, Protocol

from reshard.checkpoints import FileHandles, Tensor
from reshard.checkpoints.checkpoint import Addition, Checkpoint, GlobalTensor, TiedTensors
from reshard.checkpoints.edited import EditedCheckpoint, Recipe
from reshard.checkpoints.formats.dtypes import CAST_TO, INT4, dtype_named
from reshard.errors import CheckpointError, UsageError
from reshard.forms.form import EditedStep, Names
from reshard.forms.registry import form_named, form_of
from reshard.plan.casts import CastRule, cast, note_casts, warn_of_uncast
from reshard.storage import absolute, is_regular_file
from reshard.strategies import SAME, Strategy
from reshard.text.messages import listing
from reshard.text.names import as_pattern, is_training_value
from reshard.text.report import Report
from reshard.text.wording import plural, quoted

if TYPE_CHECKING:
    from reshard.layout import View
    from reshard.names import Applied, NameRules
    from reshard.quantised import Quantisation


PLAIN_WEIGHTS, PLAIN_ALL = "weights", "all"
"""The part of a trainer's state that is renamed to a model's names."""

_STATE = "left out: optimizer state follows its weights with --optimizer keep"


@dataclass(frozen=True)
class TypedEdits:
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
        if renamed.rooted:
            report.note("names: the trainer's prefix 'model.' is removed")
        if renamed.left_out:
            report.note(
                f"{plural(len(renamed.left_out), 'tensor')} of the optimizer left out: " + listing(renamed.left_out)
            )
        if renamed.outside:
            report.warn(
                f"{plural(len(renamed.outside), 'tensor')} beside the model left out: " + listing(renamed.outside)
            )
        return renamed.names

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
            replace(stage, layouts={after.get(name, name): layout for name, layout in stage.layouts.items()})
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
    # Loaded only here: most conversions have no rules.
    from reshard.names import apply_rules

    views: Mapping[str, View] = {}
    if edits.quantisation is not None:
        checkpoint, views = _dequantised(checkpoint, edits.quantisation, report)
    recipes: Mapping[str, Recipe] = {name: Recipe((name,), views.get(name)) for name in checkpoint.tensors}
    values = {*checkpoint.values(), *checkpoint.without_layout()}
    recipes, values = _exactly(recipes, values, edits.first_names(checkpoint.tensors, checkpoint, report))
    tied: list[TiedTensors] = []
    unseen: dict[str, Optional[str]] = {name: name for name in checkpoint.unseen}
    if edits.additions is not None:
        recipes, values = _with_additions(checkpoint, recipes, values, edits.additions, report)
    identity = edits.identity()
    if edits.table is not None:
        if edits.quantisation is None:
            _check_not_quantised(checkpoint)
        applied = apply_rules(
            edits.table, _shapes(checkpoint, recipes, values), edits.config, edits.reverse, edits.optimizer
        )
        identity = edits.identity(applied.options, applied.reversed)
        old, new = edits.table.sides[:: -1 if applied.reversed else 1]
        report.note(f"names and packing by the rules {edits.table.path}: {old} to {new}")
        if applied.tied and not complete:
            first, second = applied.tied[0]
            raise CheckpointError(
                f"{quoted(first)} and {quoted(second)} cannot be compared without the whole source",
                parameter=second,
            )
        tied = _tied(checkpoint, applied)
        recipes, values = _ruled(checkpoint, recipes, values, applied, edits.table, report)
        unseen = dict.fromkeys(unseen)
    if edits.renames is not None:
        recipes, values, unseen = _renamed(checkpoint, recipes, values, unseen, edits.renames, report)
    if edits.exactly:
        recipes, values = _exactly(recipes, values, dict(edits.exactly))
        unseen = dict.fromkeys(unseen)
    last = edits.last_names({*recipes, *(name for name in unseen.values() if name is not None)}, report)
    if last:
        recipes, values = _exactly(recipes, values, last)
        unseen = {name: None if new is None else last.get(new, new) for name, new in unseen.items()}
    if edits.trainer:
        _warn_of_buffers(values, report)
    if edits.casts:
        recipes = cast(checkpoint, recipes, values, {name for name in unseen.values() if name is not None}, edits.casts)
        note_casts(checkpoint, recipes, report)
        warn_of_uncast(checkpoint, recipes, values, edits.casts, report)
    _check_types(checkpoint, recipes)
    return EditedCheckpoint(
        checkpoint, recipes, values, identity, tied, unseen, edits.nested(recipes, getattr(checkpoint, "nested", {}))
    )


def _with_additions(
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    values: AbstractSet[str],
    additions: Additions,
    report: Report,
) -> tuple[dict[str, Recipe], set[str]]:
    added, is_part = additions.fit(checkpoint.tensors), additions.is_part
    report.note(f"{plural(len(added), 'tensor')} added to: " + listing([*added]))
    remaining = {name: replace(recipe, added=added.get(name)) for name, recipe in recipes.items() if not is_part(name)}
    return remaining, {name for name in values if not is_part(name)}


def _renamed(
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    values: AbstractSet[str],
    unseen: Mapping[str, Optional[str]],
    renames: NameRules,
    report: Report,
) -> tuple[dict[str, Recipe], set[str], dict[str, Optional[str]]]:
    """Tensors, values and unseen names after rules that give other names."""
    from reshard.names import apply_rules

    shapes = _shapes(checkpoint, recipes, values)
    # New names do not depend on shapes. A rule that fits a parameter of an absent rank is used.
    shapes.update((name, ()) for name in unseen.values() if name is not None)
    applied = apply_rules(renames, shapes, optimizer=True, values={*values}.intersection(checkpoint.values()))
    new_names = {recipe.sources[0]: name for name, recipe in applied.views.items()}
    unseen = {name: None if old is None else new_names.get(old) for name, old in unseen.items()}
    present = {name: recipe for name, recipe in applied.views.items() if name not in unseen.values()}
    return *_ruled(checkpoint, recipes, values, replace(applied, views=present), renames, report), unseen


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
    packed = [name for name, recipe in checkpoint.recipes.items() if recipe.view is not None]
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
        replace(stage, layouts={name: stage.layouts[old] for name, old in names.items() if old in stage.layouts})
        for stage in strategy.stages
    )
    return replace(strategy, stages=tuple(stages))


def _ruled(
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    values: AbstractSet[str],
    applied: Applied,
    rules: NameRules,
    report: Report,
) -> tuple[dict[str, Recipe], set[str]]:
    """Tensors and values after rules.

    Raises:
        CheckpointError: a rule takes an entry without a layout.
    """
    from reshard.names import warning_of

    ruled_recipes: dict[str, Recipe] = {}
    ruled_values: set[str] = set()
    for name, (_, sources, view) in applied.views.items():
        if not all(source in recipes for source in sources):
            if sources == (name,) and view.is_all_of(_stored(checkpoint, name).shape):
                ruled_values.add(name)
                continue
            no_layout = next(source for source in sources if source not in recipes)
            raise CheckpointError(
                f"{quoted(name)} would be made of {quoted(no_layout)}, whose layout is unknown",
                parameter=no_layout,
                hint=f"values keep their names: remove the rule or --rename that matches {no_layout}, or drop it "
                "by a rule",
            )
        if len(sources) == 1 and view.is_all_of(_shape(checkpoint, recipes[sources[0]])):
            ruled_recipes[name] = recipes[sources[0]]
        else:
            for number, source in enumerate(sources):
                source_view = recipes[source].view
                if source_view is None:
                    continue
                # Only the first table packs, and before it only dequantised tensors have a view.
                if source_view != _swapped(checkpoint.tensors[recipes[source].sources[0]].shape):
                    raise CheckpointError(
                        f"{quoted(name)}: {quoted(source)} is already made of parts of tensors", parameter=source
                    )
                view = view.with_swapped_source(number)
            ruled_recipes[name] = Recipe(tuple(recipes[source].sources[0] for source in sources), view)
    for names, reason in ((applied.dropped, "dropped by a rule"), (applied.skipped_state, _STATE)):
        if names:
            report.note(f"{len(names)} {reason}: " + listing(sorted(names)))
    for note in applied.notes:
        report.note(note)
    warning = warning_of(rules, applied)
    if warning is not None:
        report.warn(warning)
    return ruled_recipes, ruled_values


def _tied(checkpoint: Checkpoint, applied: Applied) -> list[TiedTensors]:
    """Tied tensors, of which rules use one. Rules that move values are refused elsewhere."""
    tensors = checkpoint.tensors
    return [
        TiedTensors(
            tensors[first],
            (tensors[second],),
            "the rules write only the first, as for a tied model",
            "if the model does not tie them, set tie_word_embeddings to false in config.json; options of built-in "
            "rules: reshard names show TABLE",
        )
        for first, second in applied.tied
        if first in tensors and second in tensors
    ]


def _exactly(
    recipes: Mapping[str, Recipe], values: AbstractSet[str], names: Mapping[str, Optional[str]]
) -> tuple[dict[str, Recipe], set[str]]:
    """Tensors and values under other names.

    Raises:
        CheckpointError: two tensors would get one name, or a value another.
    """
    remaining = {name for name in values if names.get(name, name) is not None}
    renamed_recipes: dict[str, Recipe] = {}
    for name, recipe in recipes.items():
        new = names.get(name, name)
        if new is None:
            continue
        if new in renamed_recipes or new in remaining:
            raise CheckpointError(
                f"{quoted(name)}: another tensor would also get the name {quoted(new)}",
                parameter=name,
                hint="give every tensor its own name",
            )
        renamed_recipes[new] = recipe
    renamed = [name for name in sorted(remaining) if names.get(name, name) != name]
    if renamed:
        raise CheckpointError(
            f"{quoted(renamed[0])}: its layout is unknown; values without a layout keep their names",
            parameter=renamed[0],
            hint="keep its name",
        )
    return renamed_recipes, remaining


def _shapes(
    checkpoint: Checkpoint, recipes: Mapping[str, Recipe], values: AbstractSet[str]
) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors and values."""
    shapes = {name: _shape(checkpoint, recipe) for name, recipe in recipes.items()}
    shapes.update((name, _stored(checkpoint, name).shape) for name in values)
    return shapes


def _shape(checkpoint: Checkpoint, recipe: Recipe) -> tuple[int, ...]:
    return checkpoint.tensors[recipe.sources[0]].shape if recipe.view is None else recipe.view.shape


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """The header of a value, from the first file that holds it."""
    return checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]


def _check_types(checkpoint: Checkpoint, recipes: Mapping[str, Recipe]) -> None:
    """Refuse tensors of mixed types, and views that divide a byte.

    Raises:
        CheckpointError: a tensor is refused.
    """
    for name, recipe in recipes.items():
        if recipe.view is not None:
            _check_packed(name, [checkpoint.tensors[source] for source in recipe.sources], recipe.view)
        if recipe.dtype is None and len(recipe.sources) > 1:
            types = {checkpoint.tensors[source].dtype: source for source in recipe.sources}
            if len(types) > 1:
                parts = " and ".join(f"{quoted(source)}, which is {dtype}" for dtype, source in types.items())
                raise CheckpointError(
                    f"{quoted(name)} would be made of {parts}",
                    parameter=name,
                    hint=f"choose a type with --cast {as_pattern(name)}=DTYPE",
                )


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
    if names is not None and config is None and is_regular_file(os.path.join(src, _CONFIG)):
        config = os.path.join(src, _CONFIG)
    # Loaded only here: most conversions have no rules.
    from reshard.names import builtin_names, parse_renames, read_config, rules_named

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
