"""Edits of names, packing and types, and the checkpoint that they make of a source."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Callable, Optional, Protocol

from reshard.checkpoints import FileHandles, Tensor
from reshard.checkpoints.checkpoint import Addition, Checkpoint, Equal, GlobalTensor
from reshard.checkpoints.edited import EditedCheckpoint, Recipe
from reshard.checkpoints.formats.dtypes import CAST_TO, INT4, dtype_named
from reshard.errors import CheckpointError, UsageError
from reshard.forms.form import Names, Written
from reshard.forms.registry import form_named, form_of
from reshard.plan.wanted_types import CastAsked, cast, tell_casts, warn_of_uncast
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
"""The part of a trainer's state that gets the names of a model."""

_STATE = "left out: optimizer state follows its weights with --optimizer keep"


@dataclass(frozen=True)
class Words:
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
        optimizer: whether the table's rules apply to optimizer state, too.
        casts: requested types; the last match wins.
        additions: additions to tensors under their old names; they exclude casts.
        plain: first change names of a trainer's state to those of a model: ``weights`` skips optimizer state, ``all``
            gives it MindSpore's names; None to keep names.
        trainer: last, change names to those of a trainer's state.
        exactly: other names of single tensors, after the rules; None for skipped ones.
        quantisation: how quantised tensors are recognised, and the type that they get first; None to copy codes and
            scales unchanged.
        words: the options as typed; None for edits without options of a conversion.
    """

    table: Optional[NameRules] = None
    renames: Optional[NameRules] = None
    config: Optional[Mapping[str, object]] = None
    reverse: Optional[bool] = None
    optimizer: bool = False
    casts: tuple[CastAsked, ...] = ()
    additions: Optional[Additions] = None
    exactly: tuple[tuple[str, Optional[str]], ...] = ()
    plain: Optional[str] = None
    trainer: bool = False
    quantisation: Optional[Quantisation] = None
    words: Optional[Words] = field(default=Words(), compare=False)

    def __post_init__(self) -> None:
        if self.additions is not None and (self.table is not None or self.casts):
            raise UsageError("additions to tensors exclude rules of names and casts")

    @property
    def is_empty(self) -> bool:
        """Whether all names, packing and types stay as they are."""
        return self == NO_EDITS

    def identity(self, options: Optional[Mapping[str, str]] = None, reverse: bool = False) -> str:
        """A text; edits that make equal tensors have equal texts.

        Args:
            options: the table's options, stated or default.
            reverse: whether the table is read from right to left.
        """
        table = None
        if self.table is not None:
            # Only the sizes that the table reads: the rest of a configuration may change between two runs.
            sizes = json.dumps(self.table.size_values(self.config), sort_keys=True)
            table = (self.table.text, sorted((options or {}).items()), reverse, self.optimizer, sizes)
        renames = () if self.renames is None else tuple(rule.where for rule in self.renames.rules)
        additions = None if self.additions is None else self.additions.identity
        quantisation = None if self.quantisation is None else self.quantisation.identity
        return repr((table, renames, self.casts, additions, self.exactly, self.plain, self.trainer, quantisation))

    def possible_names(self, name: str) -> Iterator[Optional[str]]:
        """The possible names of a tensor; None for a name that depends on other tensors."""
        others = (self.table, self.renames, self.additions, self.quantisation)
        if self.exactly or any(each is not None for each in others):
            yield None
        elif self.plain is None:
            yield from (name, None if self.trainer else name)
        else:
            from reshard.names import possible_plain_names

            yield from possible_plain_names(name, self.plain == PLAIN_ALL)

    def first_names(self, checkpoint: Checkpoint, report: Report) -> dict[str, Optional[str]]:
        """The first renaming: new names by old ones, None for skipped tensors.

        Args:
            checkpoint: the source.
            report: gets notes on skipped tensors.
        """
        if self.plain is None:
            return {}
        from reshard.names import plain_names

        keys = getattr(checkpoint, "nested", {})
        found = plain_names(checkpoint.tensors, checkpoint.objects, keys, self.plain == PLAIN_ALL)
        if found.rooted:
            report.note("names: the trainer's prefix 'model.' is removed")
        if found.left_out:
            report.note(
                f"{plural(len(found.left_out), 'tensor')} of the optimizer left out: " + listing(found.left_out)
            )
        if found.outside:
            report.note(f"{plural(len(found.outside), 'tensor')} beside the model left out: " + listing(found.outside))
        return found.names

    def nested(self, names: Collection[str]) -> Optional[Mapping[str, tuple[str, ...]]]:
        """The keys of a trainer's state by the names of its tensors; None to keep the source's."""
        if not self.trainer:
            return None
        from reshard.names import trainer_keys

        return {name: trainer_keys(name) for name in names}

    def last_names(self, names: Collection[str], report: Report) -> dict[str, Optional[str]]:
        """The last renaming: new names by old ones.

        Args:
            names: the names before it.
            report: gets notes on the names.
        """
        if not self.trainer:
            return {}
        from reshard.names import trainer_names

        found = trainer_names(names)
        report.note("names: weights get the prefix 'model.', as in a trainer's state")
        if any(new is not None and new.startswith("optimizer.") for new in found.values()):
            report.note(
                "optimizer.state has no step for each parameter, which MindSpore does not save: torch loads it with "
                "DefaultLoadPlanner(allow_partial_load=True)"
            )
        return found

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

    def written(self, target: Strategy) -> Callable[[Checkpoint], Written]:
        """A function that edits a checkpoint, complete or not; see `forms.form.Reading`.

        Args:
            target: the strategy of the target, which may be `same`.
        """

        def written(checkpoint: Checkpoint) -> Written:
            # The notes are printed when the chosen step is edited.
            made = edited(checkpoint, self, Report(), complete=False)
            return Written(made.tensors, same_layouts(target, made) if target.path == SAME else target, made.unseen)

        return written


NO_EDITS = Edits()
"""All names, packing and types stay as they are."""


def edited(checkpoint: Checkpoint, edits: Edits, report: Report, complete: bool = True) -> EditedCheckpoint:
    """The checkpoint that edits make of a source.

    Args:
        checkpoint: the source.
        edits: names, packing and types.
        report: gets notes on skipped tensors.
        complete: whether no slice of the source is missing.

    Raises:
        InputError: they do not fit the source.
    """
    # Loaded only here: most conversions have no rules.
    from reshard.names import apply_rules

    views: Mapping[str, View] = {}
    if edits.quantisation is not None:
        checkpoint, views = _dequantised(checkpoint, edits.quantisation, report)
    made: Mapping[str, Recipe] = {name: Recipe((name,), views.get(name)) for name in checkpoint.tensors}
    kept = {*checkpoint.values(), *checkpoint.without_layout()}
    made, kept = _exactly(made, kept, edits.first_names(checkpoint, report))
    tied: list[Equal] = []
    unseen: dict[str, Optional[str]] = {name: name for name in checkpoint.unseen}
    if edits.additions is not None:
        added = edits.additions.fit(checkpoint.tensors)
        is_part = edits.additions.is_part
        made = {name: replace(each, added=added.get(name)) for name, each in made.items() if not is_part(name)}
        kept = {name for name in kept if not is_part(name)}
        report.note(f"{plural(len(added), 'tensor')} added to: " + listing([*added]))
    identity = edits.identity()
    if edits.table is not None:
        if edits.quantisation is None:
            _check_not_quantised(checkpoint)
        applied = apply_rules(
            edits.table, _shapes(checkpoint, made, kept), edits.config, edits.reverse, edits.optimizer
        )
        identity = edits.identity(applied.options, applied.reversed)
        old, new = edits.table.sides[:: -1 if applied.reversed else 1]
        report.note(f"names and packing by the rules {edits.table.path}: {old} to {new}")
        if applied.tied and not complete:
            one, other = applied.tied[0]
            raise CheckpointError(
                f"{quoted(one)} and {quoted(other)} cannot be compared without the whole source",
                parameter=other,
            )
        tied = _tied(checkpoint, applied)
        made, kept = _ruled(checkpoint, made, kept, applied, edits.table, report)
        unseen = dict.fromkeys(unseen)
    if edits.renames is not None:
        shapes = _shapes(checkpoint, made, kept)
        # New names do not depend on shapes. A rule that fits a parameter of an absent rank is used.
        shapes.update((name, ()) for name in unseen.values() if name is not None)
        applied = apply_rules(edits.renames, shapes, optimizer=True, values=kept.intersection(checkpoint.values()))
        renamed = {each.sources[0]: name for name, each in applied.made.items()}
        unseen = {name: None if old is None else renamed.get(old) for name, old in unseen.items()}
        seen = {name: each for name, each in applied.made.items() if name not in unseen.values()}
        made, kept = _ruled(checkpoint, made, kept, replace(applied, made=seen), edits.renames, report)
    if edits.exactly:
        made, kept = _exactly(made, kept, dict(edits.exactly))
        unseen = dict.fromkeys(unseen)
    last = edits.last_names({*made, *(name for name in unseen.values() if name is not None)}, report)
    if last:
        made, kept = _exactly(made, kept, last)
        unseen = {name: None if new is None else last.get(new, new) for name, new in unseen.items()}
    loose = sorted(name for name in kept if edits.trainer and not is_training_value(name))
    if loose:
        report.warn(
            f"{plural(len(loose), 'single value')} without a layout keeps its name, while a trainer has buffers of a "
            f"model under {quoted('model.' + loose[0])} and so on: " + listing(loose)
        )
    if edits.casts:
        made = cast(checkpoint, made, kept, {name for name in unseen.values() if name is not None}, edits.casts)
        tell_casts(checkpoint, made, report)
        warn_of_uncast(checkpoint, made, kept, edits.casts, report)
    _check_types(checkpoint, made)
    return EditedCheckpoint(checkpoint, made, kept, identity, tied, unseen, edits.nested(made))


def between_forms(edits: Edits, form: str, to: str) -> Edits:
    """The edits with the names that a conversion between two forms gives by itself.

    A trainer's names become those of a model where the target has no others, and a model's names those of a trainer's
    state where the target's trainers expect them. With --rename all names are as typed.

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

    made, recognised = dequantised(checkpoint, quantisation)
    if not recognised.tensors:
        report.warn("--dequantize: no tensor of the source is quantised")
    for scheme, count in describe(recognised).items():
        report.note(f"{plural(count, 'tensor')} dequantised to {quantisation.dtype}: {scheme}")
    if recognised.left_out:
        report.note(f"{len(recognised.left_out)} scales of activations left out: " + listing([*recognised.left_out]))
    return made, {name: _swapped(each.shape) for name, each in recognised.tensors.items() if each.swapped}


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
    packed = [name for name, made in checkpoint.made.items() if made.view is not None]
    if packed:
        raise CheckpointError(
            "the source's strategy has no layouts for packed tensors: " + listing(packed),
            parameter=packed[0],
            hint="pass the target's strategy with --dst-strategy; `reshard strategy make` writes one from rules",
        )
    names = {name: made.sources[0] for name, made in checkpoint.made.items()}
    names.update((name, name) for name in checkpoint.values())
    # Runs with other ranks' files have to get the same strategy.
    names.update((new, name) for name, new in checkpoint.unseen.items() if new is not None)
    stages = (
        replace(stage, layouts={name: stage.layouts[old] for name, old in names.items() if old in stage.layouts})
        for stage in strategy.stages
    )
    return replace(strategy, stages=tuple(stages))


def _ruled(
    checkpoint: Checkpoint,
    made: Mapping[str, Recipe],
    kept: AbstractSet[str],
    applied: Applied,
    rules: NameRules,
    report: Report,
) -> tuple[dict[str, Recipe], set[str]]:
    """Tensors and values after rules.

    Raises:
        CheckpointError: a rule takes an entry without a layout.
    """
    from reshard.names import warning_of

    found: dict[str, Recipe] = {}
    still: set[str] = set()
    for name, (_, sources, view) in applied.made.items():
        if not all(source in made for source in sources):
            if sources == (name,) and view.is_all_of(_stored(checkpoint, name).shape):
                still.add(name)
                continue
            loose = next(source for source in sources if source not in made)
            raise CheckpointError(
                f"{quoted(name)} would be made of {quoted(loose)}, whose layout is unknown",
                parameter=loose,
                hint=f"values keep their names: remove the rule or --rename that matches {loose}, or drop it by a rule",
            )
        if len(sources) == 1 and view.is_all_of(_shape(checkpoint, made[sources[0]])):
            found[name] = made[sources[0]]
        else:
            for number, source in enumerate(sources):
                if made[source].view is None:
                    continue
                # Only the first table packs, and before it only dequantised tensors have a view.
                if made[source].view != _swapped(checkpoint.tensors[made[source].sources[0]].shape):
                    raise CheckpointError(
                        f"{quoted(name)}: {quoted(source)} is already made of parts of tensors", parameter=source
                    )
                view = view.with_swapped_source(number)
            found[name] = Recipe(tuple(made[source].sources[0] for source in sources), view)
    for names, why in ((applied.dropped, "dropped by a rule"), (applied.unspoken, _STATE)):
        if names:
            report.note(f"{len(names)} {why}: " + listing(sorted(names)))
    for note in applied.notes:
        report.note(note)
    warning = warning_of(rules, applied)
    if warning is not None:
        report.warn(warning)
    return found, still


def _tied(checkpoint: Checkpoint, applied: Applied) -> list[Equal]:
    """Tied tensors, of which rules use one. Rules that move values are refused elsewhere."""
    tensors = checkpoint.tensors
    return [
        Equal(
            tensors[one],
            (tensors[other],),
            "the rules write only the first, as for a tied model",
            "if the model does not tie them, set tie_word_embeddings to false in config.json; options of built-in "
            "rules: reshard names show TABLE",
        )
        for one, other in applied.tied
        if one in tensors and other in tensors
    ]


def _exactly(
    made: Mapping[str, Recipe], kept: AbstractSet[str], names: Mapping[str, Optional[str]]
) -> tuple[dict[str, Recipe], set[str]]:
    """Tensors and values under other names.

    Raises:
        CheckpointError: two tensors would get one name, or a value another.
    """
    still = {name for name in kept if names.get(name, name) is not None}
    found: dict[str, Recipe] = {}
    for name, tensor in made.items():
        new = names.get(name, name)
        if new is None:
            continue
        if new in found or new in still:
            raise CheckpointError(
                f"{quoted(name)}: another tensor would also get the name {quoted(new)}",
                parameter=name,
                hint="give every tensor its own name",
            )
        found[new] = tensor
    renamed = [name for name in sorted(still) if names.get(name, name) != name]
    if renamed:
        raise CheckpointError(
            f"{quoted(renamed[0])}: its layout is unknown; values without a layout keep their names",
            parameter=renamed[0],
            hint="keep its name",
        )
    return found, still


def _shapes(checkpoint: Checkpoint, made: Mapping[str, Recipe], kept: AbstractSet[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors and values."""
    shapes = {name: _shape(checkpoint, tensor) for name, tensor in made.items()}
    shapes.update((name, _stored(checkpoint, name).shape) for name in kept)
    return shapes


def _shape(checkpoint: Checkpoint, made: Recipe) -> tuple[int, ...]:
    return checkpoint.tensors[made.sources[0]].shape if made.view is None else made.view.shape


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """The header of a value, from the first file that holds it."""
    return checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]


def _check_types(checkpoint: Checkpoint, made: Mapping[str, Recipe]) -> None:
    """Refuse tensors that would mix types, or divide bytes.

    Raises:
        CheckpointError: a tensor would.
    """
    for name, tensor in made.items():
        if tensor.view is not None:
            _check_packed(name, [checkpoint.tensors[source] for source in tensor.sources], tensor.view)
        if tensor.dtype is None and len(tensor.sources) > 1:
            types = {checkpoint.tensors[source].dtype: source for source in tensor.sources}
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
    """The edits of options, empty where names and types stay as they are.

    Args:
        src: the source; its config.json is the default.
        names: a built-in table of rules, or the file of one.
        rename: other names, ``OLD=NEW``.
        config: the file with the sizes that the table needs.
        reverse: read the table from right to left.
        optimizer: apply it to optimizer state as well.
        cast: ``DTYPE`` or ``GLOB=DTYPE``.
        dequantize: type for quantised tensors; None to copy them unchanged.

    Raises:
        UsageError: options contradict each other, or name an unknown type.
        ReshardError: a table cannot be read.
    """
    for option, given in (("reverse", reverse), ("optimizer", optimizer)):
        if given and names is None:
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
        casts=tuple(map(CastAsked.parse, cast)),
        quantisation=None if dequantize is None else _quantisation(dequantize, src, sizes),
        words=Words(names, tuple(rename), config, reverse, optimizer, tuple(cast), dequantize),
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
