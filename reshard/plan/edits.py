"""What is asked of names, packing and types, and the checkpoint that it makes of a source."""

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
from reshard.text.names import as_pattern
from reshard.text.report import Report
from reshard.text.wording import plural, quoted

if TYPE_CHECKING:
    from reshard.layout import View
    from reshard.names import Applied, NameRules
    from reshard.quantised import Quantisation


PLAIN_WEIGHTS, PLAIN_ALL = "weights", "all"
"""Of a trainer's state, what is taken under the names of a model."""

_STATE = "left out: optimizer state follows its weights with --optimizer keep"


@dataclass(frozen=True)
class Words:
    """The words in which edits were asked for, so that they can be typed again.

    Attributes:
        names: the table of rules, a built-in one's name or a path.
        rename: other names.
        config: the file with the model's sizes.
        reverse: whether the table was to be read from right to left.
        optimizer: whether optimizer state was to be kept.
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
    """What is added to tensors of a checkpoint.

    Attributes:
        identity: a text, the same for what adds the same.
        paths: the files that it is read from.
        handles: those through which they are read, and through which the source is to be read, too: files that
            changed since they were first opened are then known, whoever opened them.
    """

    identity: str
    paths: frozenset[str]
    handles: FileHandles

    def fit(self, tensors: Mapping[str, GlobalTensor]) -> Mapping[str, Addition]:
        """What is added to each tensor that gets anything.

        Raises:
            CheckpointError: it does not fit these tensors.
        """

    def is_part(self, name: str) -> bool:
        """Whether a tensor is part of what is added, so that it is not written itself."""


@dataclass(frozen=True)
class Edits:
    """What is asked of names, packing and types.

    Attributes:
        table: rules of names and packing.
        renames: rules that give other names, after the table.
        config: what tells the sizes of the model that rules need.
        reverse: whether the table is read from right to left; None: the way that fits.
        optimizer: whether the table's rules hold for optimizer state, too.
        casts: types that are asked for; of those that concern a tensor the last holds.
        additions: what is added to tensors before they get other names; they are not cast then.
        plain: names of a trainer's state are first made those of a model: ``weights`` leaves optimizer state out,
            ``all`` gives it MindSpore's names; None where names stay.
        trainer: names are last made those of a trainer's state.
        exactly: other names of single tensors, after the rules; None for those that are left out.
        quantisation: how quantised tensors are recognised, and the type that they get before anything else is done to
            them; None where codes and scales are copied as they are.
        words: how it was typed; None where it is not typed with the options of a conversion.
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
            raise UsageError("what is added to tensors goes with neither rules of names nor casts")

    def identity(self, options: Optional[Mapping[str, str]] = None, reverse: bool = False) -> str:
        """All of it as a text, the same for what gives the same tensors.

        Args:
            options: those of the table, whether they were stated or assumed.
            reverse: whether the table is read from right to left, whether that was stated or not.
        """
        table = None
        if self.table is not None:
            # Of a configuration only what the table reads: anything else may be changed between two runs.
            sizes = json.dumps(self.table.size_values(self.config), sort_keys=True)
            table = (self.table.text, sorted((options or {}).items()), reverse, self.optimizer, sizes)
        renames = () if self.renames is None else tuple(rule.where for rule in self.renames.rules)
        additions = None if self.additions is None else self.additions.identity
        quantisation = None if self.quantisation is None else self.quantisation.identity
        return repr((table, renames, self.casts, additions, self.exactly, self.plain, self.trainer, quantisation))

    def possible_names(self, name: str) -> Iterator[Optional[str]]:
        """The names that a tensor may get, whatever the others are; None for one that only the others decide."""
        others = (self.table, self.renames, self.additions, self.quantisation)
        if self.exactly or any(each is not None for each in others):
            yield None
        elif self.plain is None:
            yield from (name, None if self.trainer else name)
        else:
            from reshard.names import possible_plain_names

            yield from possible_plain_names(name, self.plain == PLAIN_ALL)

    def first_names(self, checkpoint: Checkpoint, report: Report) -> dict[str, Optional[str]]:
        """The names that tensors have before anything else: new names by old ones, None for those left out.

        Args:
            checkpoint: the source.
            report: told what is left out.
        """
        if self.plain is None:
            return {}
        from reshard.names import plain_names

        keys = getattr(checkpoint, "nested", {})
        found = plain_names(checkpoint.tensors, checkpoint.objects, keys, self.plain == PLAIN_ALL)
        if found.rooted:
            report.note("names: 'model.' is taken off, which the trainer put before them")
        if found.left_out:
            report.note(
                f"{plural(len(found.left_out), 'tensor')} of the optimizer left out: " + listing(found.left_out)
            )
        return found.names

    def nested(self, names: Collection[str]) -> Optional[Mapping[str, tuple[str, ...]]]:
        """The keys of a trainer's state by the names of its tensors; None where they are the source's."""
        if not self.trainer:
            return None
        from reshard.names import trainer_keys

        return {name: trainer_keys(name) for name in names}

    def last_names(self, names: Collection[str], report: Report) -> dict[str, Optional[str]]:
        """The names that tensors have at the end, likewise.

        Args:
            names: those that they have before.
            report: told of them.
        """
        if not self.trainer:
            return {}
        from reshard.names import trainer_names

        found = trainer_names(names)
        report.note("names: 'model.' is put before those of weights, as in a trainer's state")
        if any(new is not None and new.startswith("optimizer.") for new in found.values()):
            report.note(
                "optimizer.state has no step for each parameter, which MindSpore does not save: torch loads it with "
                "DefaultLoadPlanner(allow_partial_load=True)"
            )
        return found

    def possible_identities(self) -> Iterator[str]:
        """The identities that it may have, whatever the checkpoint's names tell of options and direction.

        Raises:
            NamesError: an option has to be stated.
        """
        if self.table is None:
            yield self.identity()
            return
        from reshard.names import possible_options

        for options in possible_options(self.table, self.config):
            for reverse in (False, True) if self.reverse is None else (self.reverse,):
                yield self.identity(options, reverse)

    def written(self, target: Strategy) -> Callable[[Checkpoint], Written]:
        """What they make of a checkpoint, complete or not; see `forms.form.Reading`.

        Args:
            target: the strategy of the target, which may be `same`.
        """

        def written(checkpoint: Checkpoint) -> Written:
            # What is to be told of edits is told when they are made of the step that is taken.
            made = edited(checkpoint, self, Report(), complete=False)
            return Written(made.tensors, same_layouts(target, made) if target.path == SAME else target, made.unseen)

        return written


def edited(checkpoint: Checkpoint, edits: Edits, report: Report, complete: bool = True) -> EditedCheckpoint:
    """The checkpoint that edits make of a source.

    Args:
        checkpoint: the source.
        edits: what is asked.
        report: told what is left out.
        complete: whether all slices of the source are there.

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
                f"whether {quoted(one)} and {quoted(other)} are equal cannot be told without the whole source",
                parameter=other,
            )
        tied = _tied(checkpoint, applied)
        made, kept = _ruled(checkpoint, made, kept, applied, edits.table, report)
        unseen = dict.fromkeys(unseen)
    if edits.renames is not None:
        shapes = _shapes(checkpoint, made, kept)
        # New names do not depend on shapes. A rule that fits a parameter of an absent rank is used.
        shapes.update((name, ()) for name in unseen.values() if name is not None)
        applied = apply_rules(edits.renames, shapes, optimizer=True)
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
    if edits.casts:
        made = cast(checkpoint, made, kept, {name for name in unseen.values() if name is not None}, edits.casts)
        tell_casts(checkpoint, made, report)
        warn_of_uncast(checkpoint, made, kept, edits.casts, report)
    _check_types(checkpoint, made)
    return EditedCheckpoint(checkpoint, made, kept, identity, tied, unseen, edits.nested(made))


def between_forms(edits: Optional[Edits], form: str, to: str) -> Optional[Edits]:
    """What is asked, and the names that a conversion between two forms gives by itself.

    A trainer's names become those of a model where the target has no others, and a model's names those of a trainer's
    state where the target's trainers expect them. With --rename all names are as typed.

    Args:
        edits: what is asked.
        form: of the source.
        to: of the target.
    """
    source, target = form_named(form).options, form_named(to).options
    if edits is not None and edits.renames is not None:
        return edits
    plain = None
    if source.names is not Names.MODEL and target.names is Names.MODEL:
        plain = PLAIN_ALL if target.mindspore else PLAIN_WEIGHTS
    trainer = source.names is Names.MODEL and target.names is Names.TRAINER
    return replace(edits or Edits(), plain=plain, trainer=trainer) if plain or trainer else edits


def _dequantised(
    checkpoint: Checkpoint, quantisation: Quantisation, report: Report
) -> tuple[Checkpoint, dict[str, View]]:
    """The source with numbers in place of codes and scales, and views of the tensors whose dimensions are swapped."""
    # Loaded only here: most conversions have nothing quantised.
    from reshard.layout import View
    from reshard.quantised import dequantised, describe

    made, recognised = dequantised(checkpoint, quantisation)
    if not recognised.tensors:
        report.warn("--dequantize: no tensor of the source is quantised")
    for scheme, count in describe(recognised).items():
        report.note(f"{plural(count, 'tensor')} dequantised to {quantisation.dtype}: {scheme}")
    if recognised.left_out:
        report.note(f"{len(recognised.left_out)} scales of activations left out: " + listing([*recognised.left_out]))
    swapped = {name: each.shape for name, each in recognised.tensors.items() if each.swapped}
    views = {
        name: View.whole(0, shape).transpose((*range(len(shape) - 2), len(shape) - 1, len(shape) - 2))
        for name, shape in swapped.items()
    }
    return made, views


def _check_not_quantised(checkpoint: Checkpoint) -> None:
    """Refuse weights of which scales are part: rules of names would move one without the other.

    Raises:
        CheckpointError: there are such weights.
    """
    from reshard.quantised import looks_quantised, stored_tensors

    if looks_quantised(stored_tensors(checkpoint)):
        raise CheckpointError(
            f"{checkpoint.place}: holds quantised weights, which rules of names cannot convert",
            file=checkpoint.place,
            hint="add --dequantize BFloat16",
        )


def same_layouts(strategy: Strategy, checkpoint: EditedCheckpoint) -> Strategy:
    """The strategy that cuts what was made as that was cut which it is made of.

    Args:
        strategy: of what it is made of.
        checkpoint: what was made.

    Raises:
        CheckpointError: tensors are packed otherwise, so that the strategy does not say how they are cut.
    """
    packed = [name for name, made in checkpoint.made.items() if made.view is not None]
    if packed:
        raise CheckpointError(
            "how the source is cut does not say how to cut what is packed otherwise: " + listing(packed),
            parameter=packed[0],
            hint="name the target's strategy with --dst-strategy; `reshard strategy make` writes one from rules",
        )
    names = {name: made.sources[0] for name, made in checkpoint.made.items()}
    names.update((name, name) for name in checkpoint.values())
    # Runs that have the files of other ranks have to find the same strategy.
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
    """What rules make of tensors and values.

    Raises:
        CheckpointError: they move what nothing lays out.
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
                f"{quoted(name)} is to be made of {quoted(loose)}, but nothing says how that is laid out",
                parameter=loose,
                hint=f"values keep their names: let no OLD of --rename and no rule but one that drops it fit {loose}",
            )
        if len(sources) == 1 and view.is_all_of(_shape(checkpoint, made[sources[0]])):
            found[name] = made[sources[0]]
        elif any(made[source].view is not None for source in sources):
            swapped = next(source for source in sources if made[source].view is not None)
            raise CheckpointError(
                f"{quoted(name)}: rules of packing cannot be applied to {quoted(swapped)}, which is swapped",
                parameter=swapped,
                hint="convert with --dequantize first, and with --names after that",
            )
        else:
            # Only the first table packs; what follows it gives other names.
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
    """The tensors of which rules take one for several; values among them are refused with all rules that move them."""
    tensors = checkpoint.tensors
    return [
        Equal(
            tensors[one],
            (tensors[other],),
            "the rules write only one of them, as of a tied model",
            "if the model does not tie them, say so in config.json (tie_word_embeddings); options of built-in rules: "
            "reshard names show TABLE",
        )
        for one, other in applied.tied
        if one in tensors and other in tensors
    ]


def _exactly(
    made: Mapping[str, Recipe], kept: AbstractSet[str], names: Mapping[str, Optional[str]]
) -> tuple[dict[str, Recipe], set[str]]:
    """The same under other names.

    Raises:
        CheckpointError: two tensors would have the same name, or a value would have another.
    """
    still = {name for name in kept if names.get(name, name) is not None}
    found: dict[str, Recipe] = {}
    for name, tensor in made.items():
        new = names.get(name, name)
        if new is None:
            continue
        if new in found or new in still:
            raise CheckpointError(
                f"{quoted(name)}: something else would have the name {quoted(new)}, too",
                parameter=name,
                hint="every tensor needs a name of its own",
            )
        found[new] = tensor
    renamed = [name for name in sorted(still) if names.get(name, name) != name]
    if renamed:
        raise CheckpointError(
            f"{quoted(renamed[0])}: nothing says how it is laid out; such values keep their names",
            parameter=renamed[0],
            hint="leave its name as it is",
        )
    return found, still


def _shapes(checkpoint: Checkpoint, made: Mapping[str, Recipe], kept: AbstractSet[str]) -> dict[str, tuple[int, ...]]:
    """Of tensors and values."""
    shapes = {name: _shape(checkpoint, tensor) for name, tensor in made.items()}
    shapes.update((name, _stored(checkpoint, name).shape) for name in kept)
    return shapes


def _shape(checkpoint: Checkpoint, made: Recipe) -> tuple[int, ...]:
    return checkpoint.tensors[made.sources[0]].shape if made.view is None else made.view.shape


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """A value in the lowest file that has it."""
    return checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]


def _check_types(checkpoint: Checkpoint, made: Mapping[str, Recipe]) -> None:
    """Refuse tensors that would be made of elements of several types, or of parts of bytes.

    Raises:
        CheckpointError: there is one.
    """
    for name, tensor in made.items():
        if tensor.view is not None:
            _check_packed(name, [checkpoint.tensors[source] for source in tensor.sources], tensor.view)
        if tensor.dtype is None and len(tensor.sources) > 1:
            types = {checkpoint.tensors[source].dtype: source for source in tensor.sources}
            if len(types) > 1:
                told = " and ".join(f"{quoted(source)}, which is {dtype}" for dtype, source in types.items())
                raise CheckpointError(
                    f"{quoted(name)} would be made of {told}",
                    parameter=name,
                    hint=f"choose a type with --cast {as_pattern(name)}=DTYPE",
                )


def _check_packed(name: str, sources: Sequence[GlobalTensor], view: View) -> None:
    """Refuse to move single elements of Int4: a byte holds two that are neighbours in the last dimension.

    Raises:
        CheckpointError: the view does so.
    """
    packed = next((source for source in sources if source.dtype == INT4), None)
    if packed is not None and not view.keeps_rows([source.shape for source in sources]):
        raise CheckpointError(
            f"{quoted(name)} would be made of single elements of {quoted(packed.name)}, which is Int4: a byte holds "
            "two neighbours in the last dimension, and reshard does not unpack them",
            parameter=packed.name,
            hint='leave it out: give it a rule of its own in a copy of the table, with do = "drop"',
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
) -> Optional[Edits]:
    """What words ask for; None where names and types stay as they are.

    Args:
        src: the source; its config.json is taken where none is named.
        names: a built-in table of rules, or the file of one.
        rename: other names, ``OLD=NEW``.
        config: what tells the sizes that the table needs.
        reverse: read the table from right to left.
        optimizer: apply it to optimizer state as well.
        cast: ``DTYPE`` or ``GLOB=DTYPE``.
        dequantize: type that quantised tensors get; None where they stay as they are.

    Raises:
        UsageError: they do not go together, or ask for what there is not.
        ReshardError: a table cannot be read.
    """
    for option, given in (("reverse", reverse), ("optimizer", optimizer)):
        if given and names is None:
            raise UsageError(f"--{option} goes with --names", hint="name a table: `reshard names list`")
    if config is not None and names is None and dequantize is None:
        raise UsageError("--config goes with --names or --dequantize", hint="name a table: `reshard names list`")
    if names is None and not rename and not cast and dequantize is None:
        return None
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
    """How quantised tensors are recognised, from the files beside them.

    Raises:
        UsageError: the type is none that they can get.
        ReshardError: a file cannot be read.
    """
    from reshard.quantised import quantisation_of

    dtype = dtype_named(dequantize)
    if dtype not in CAST_TO:
        raise UsageError(f"--dequantize {dequantize}: is none of {', '.join(CAST_TO)}")
    return quantisation_of(src, dtype, config)


def edits_of(src: str, typed: Mapping[str, Any], to: Optional[str] = None) -> Optional[Edits]:
    """What the options of names and types ask for; None where names and types stay as they are.

    Args:
        src: the source; its config.json is taken where none is named.
        typed: the options' values.
        to: the form that is written, whose names may be others than the source's; None where nothing is.

    Raises:
        UsageError: they do not go together, or ask for what there is not.
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
