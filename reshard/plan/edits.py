"""A request: a conversion with its two ends, and the rules of names, packing and types that options ask for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reshard.asked import Conversion, Edits, Target, Task
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Addition, Checkpoint, GlobalTensor
from reshard.checkpoints.formats.dtypes import CAST_TO, dtype_named
from reshard.errors import CheckpointError, UsageError
from reshard.forms.form import EditedStep, Form, Names, Side
from reshard.forms.registry import form_named, form_of
from reshard.storage import absolute, is_directory, is_regular_file
from reshard.strategies import SAME, Strategy
from reshard.text.globs import Filters, Globs
from reshard.text.messages import Report, as_glob, listing, plural, quoted
from reshard.text.names import TRAINING_STEP, fused_expert, is_near_experts, trainer_optimizer

if TYPE_CHECKING:
    from reshard.names import Applied, NameRules
    from reshard.plan.casts import CastRule
    from reshard.quantised import Quantisation


PLAIN_WEIGHTS, PLAIN_ALL, PLAIN_KNOWN = "weights", "all", "known"
"""The part of a trainer's state that is renamed to a model's names; ``known``: all, as far as they are decided."""


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


class Link(NamedTuple):
    """A table of a chain, and the direction that it is read in; None for the one that fits."""

    rules: NameRules
    reverse: bool | None


Chain = tuple[Link, ...]
"""Tables that follow each other: each takes the tensors that the one before makes."""

AppliedTable = tuple["NameRules", Mapping[str, str], bool]
"""A table that was applied, all its options, and whether it was read from right to left."""


class EditRules(NamedTuple):
    """Other names, packing and types.

    Attributes:
        table: rules of names and packing.
        megatron: the rules between Hugging Face's names and Megatron's, where an end is Megatron's: see `chains`.
        renames: rules that give other names, after the table.
        config: the model's sizes for the rules, and its type.
        reverse: whether the table is read from right to left; None: the direction that fits.
        optimizer: whether the table's rules also apply to optimizer state.
        casts: requested types; the last match wins.
        additions: additions to tensors under their old names; they exclude casts.
        plain: first change names of a trainer's state to those of a model: ``weights`` skips optimizer state, ``all``
            and ``known`` give it MindSpore's names; None for unchanged names.
        experts: without a table, give fused experts their published names; see `for_experts`.
        trainer: last, change names to those of a trainer's state.
        exactly: other names of single tensors, after the rules; None for skipped ones.
        quantisation: how quantised tensors are recognised, and their type after dequantising, the first edit; None to
            copy codes and scales unchanged.
        config_path: the file or directory of the model's configuration, if it was named or is the source's.
        source_packing: the `packing` that the source's records list; empty without records of a table.
        source_side: whose names the source's form has.
        side: whose names the target's loaders expect; None if nothing is written.
        exclude: patterns of Megatron's names that no table lists, and that are left out.
    """

    table: NameRules | None = None
    megatron: NameRules | None = None
    renames: NameRules | None = None
    config: Mapping[str, object] | None = None
    reverse: bool | None = None
    optimizer: bool = False
    casts: tuple[CastRule, ...] = ()
    additions: Additions | None = None
    exactly: tuple[tuple[str, str | None], ...] = ()
    plain: str | None = None
    experts: bool = False
    trainer: bool = False
    quantisation: Quantisation | None = None
    config_path: str | None = None
    source_packing: tuple[str, ...] = ()
    source_side: Side | None = None
    side: Side | None = None
    exclude: tuple[str, ...] = ()

    @property
    def keeps_objects(self) -> bool:
        """Whether objects of the source have a meaning beside the tensors: Megatron's have none under others' names."""
        return self.megatron is None or self.side is Side.MEGATRON

    @property
    def is_empty(self) -> bool:
        """Whether all names, packing and types are unchanged."""
        # Without a table, these change nothing.
        changes = self._replace(
            config=None, config_path=None, source_packing=(), source_side=None, side=None, exclude=()
        )
        return changes == NO_EDITS

    def chains(self) -> Sequence[Chain]:
        """The possible chains of tables.

        Megatron's table leads to Hugging Face's names, and a family's on to MindFormers'; to Megatron, they lead the
        other way.
        """
        if self.table is None:
            return ((),)
        if self.megatron is None:
            return ((Link(self.table, self.reverse),),)
        last: Chain = ()
        if self.side is Side.MEGATRON:
            last = (Link(self.megatron, False),)
        elif self.side is Side.MINDFORMERS:
            last = (Link(self.table, False),)
        if self.source_side is Side.MEGATRON:
            return ((Link(self.megatron, True), *last),)
        from_mindformers = (Link(self.table, True), *last)
        return (from_mindformers,) if self.reverse else (last, from_mindformers)

    def chain(self, shapes: Mapping[str, tuple[int, ...]]) -> Chain:
        """The tables for tensors of these names and shapes.

        Raises:
            NamesError: the names are neither Hugging Face's nor MindFormers'.
            UsageError: no table of the chain has a stated option.
        """
        chain, *others = self.chains()
        if others and self.table is not None:
            from reshard.names import is_reversed

            if is_reversed(self.table, shapes, self.config, self.recorded_options):
                (chain,) = others
        if self.table is not None and self.megatron is not None:
            applied = {name for link in chain for name, _ in link.rules.chosen}
            unused = [f"{name}={value}" for name, value in self.table.chosen if name not in applied]
            if unused:
                raise UsageError(
                    f"--names {self.table.path}: {unused[0]} is an option of MindFormers' names, which neither source "
                    "nor target has",
                    hint=f"leave out {','.join(unused)}",
                )
        return chain

    def identity(self, tables: Sequence[AppliedTable] = ()) -> str:
        """A text; edits that make equal tensors have equal texts.

        Args:
            tables: those of the chain.
        """
        texts = []
        for rules, options, reverse in tables:
            # The rest of a configuration may change between two runs.
            sizes = json.dumps(rules.size_values(self.config), sort_keys=True)
            texts.append((rules.text, sorted(options.items()), reverse, self.optimizer, sizes))
        table = texts[0] if len(texts) == 1 else tuple(texts) or None
        renames = () if self.renames is None else tuple(rule.where for rule in self.renames.rules)
        additions = None if self.additions is None else self.additions.identity
        quantisation = None if self.quantisation is None else self.quantisation.identity
        return repr((table, renames, self.casts, additions, self.exactly, self.plain, self.trainer, quantisation))

    @property
    def recorded_options(self) -> Mapping[str, str]:
        """The options of the same table that the source's records list."""
        recorded = dict(text.split("=", 1) for text in self.source_packing)
        if self.table is None or recorded.get("table") != recorded_name(self.table):
            return {}
        return {key[len("option ") :]: value for key, value in recorded.items() if key.startswith("option ")}

    def apply_table(self, link: Link, shapes: Mapping[str, tuple[int, ...]]) -> Applied:
        """Apply rules of names and packing to tensors of these shapes; see `names.apply_rules`."""
        # Loaded only here: most conversions have no rules.
        from reshard.names import apply_rules

        return apply_rules(
            link.rules,
            shapes,
            self.config,
            link.reverse,
            self.optimizer,
            recorded=self.recorded_options if link.rules is self.table else {},
            to_huggingface=self.side is Side.HUGGINGFACE and self.megatron is None,
            left_out=Globs(self.exclude).match if link.rules is self.megatron and link.reverse else None,
        )

    def possible_names(self, name: str) -> Iterator[str | None]:
        """The possible names of a tensor; None for a name that depends on other tensors."""
        rules = (self.table, self.renames, self.additions, self.quantisation)
        if self.table is not None and not self.optimizer and trainer_optimizer(name):
            # Rules leave it out.
            return
        if self.exactly or any(each is not None for each in rules) or (self.experts and is_near_experts(name)):
            yield None
        elif self.plain is None:
            yield from (name, None if self.trainer else name)
        else:
            from reshard.names import megatron_names, possible_plain_names

            for plain in possible_plain_names(name, self.plain != PLAIN_WEIGHTS):
                # State has its name beside its weight.
                beside = (plain, plain.partition(".")[2])
                yield megatron_names(beside)[plain] if self.trainer and self.side is Side.MEGATRON else plain

    def first_names(self, names: Collection[str], checkpoint: Checkpoint, report: Report) -> dict[str, str | None]:
        """The first renaming: new names by old ones, None for skipped tensors.

        Args:
            names: of all tensors, dequantised.
            checkpoint: the source, whose objects and recorded keys decide.
            report: gets notes on skipped tensors.

        Raises:
            CheckpointError: nothing shows which names are the model's.
        """
        if self.plain is None:
            return {}
        from reshard.names import plain_names

        keys = checkpoint.nested
        renamed = plain_names(names, checkpoint.objects, keys, self.plain != PLAIN_WEIGHTS)
        if renamed.prefix:
            report.note(f"names: the trainer's prefix {quoted(renamed.prefix)} is removed")
        if renamed.undecided and self.plain != PLAIN_KNOWN:
            first, *others = (f"'{as_glob(beginning)}*" for beginning in renamed.undecided)
            words = [f"--rename {first}=*'", *(f"--exclude {each}'" for each in others)]
            raise CheckpointError(
                f"{checkpoint.place}: names begin with {' and '.join(map(quoted, renamed.undecided))}, and neither the "
                "checkpoint nor its optimizer state shows whether the names in the model do",
                file=checkpoint.place,
                hint=f"`reshard convert` removes it with {' '.join(words)} and keeps all names with --rename '*=*'",
            )
        if renamed.left_out:
            report.note(
                f"{plural(len(renamed.left_out), 'tensor')} of the optimizer left out: " + listing(renamed.left_out)
            )
            steps = any(name.endswith(".step") for name in renamed.left_out)
            if steps and self.side is Side.MINDFORMERS and TRAINING_STEP not in checkpoint.values():
                report.warn(
                    f"steps of parameters are left out and there is no {TRAINING_STEP}, so MindSpore's optimizer "
                    "corrects moments as in its first steps"
                )
        if renamed.outside:
            report.warn(
                f"{plural(len(renamed.outside), 'tensor')} beside the model left out: " + listing(renamed.outside)
            )
        if self.plain == PLAIN_WEIGHTS and self.source_side is Side.MEGATRON and TRAINING_STEP in checkpoint.values():
            # Read with the optimizer's state, which is left out.
            return {**renamed.names, TRAINING_STEP: None}
        return renamed.names

    def for_experts(self, names: Iterable[str]) -> EditRules:
        """These edits, with the table for experts that transformers 5 fuses where the model has some.

        Args:
            names: of all tensors after the first renaming.

        Raises:
            NamesError: no published names are known for the model.
            UsageError: an adapter is added, too.
        """
        if not self.experts:
            return self
        from reshard.names import experts_table

        fused = fused_expert(names)
        if fused is None:
            return self._replace(experts=False)
        if self.additions is not None:
            raise UsageError(
                f"{quoted(fused)} holds all experts of a layer, as in transformers 5, and merge-lora does not give "
                "them the names of published models",
                parameter=fused,
                hint="convert BASE first: reshard convert BASE BASE2 --to huggingface --config DIR",
            )
        return self._replace(experts=False, table=experts_table(fused, self.config), reverse=False)

    def model_names(self, names: Collection[str], checkpoint: Checkpoint) -> dict[str, str]:
        """The names in the model by names after the first renaming, which may still be those of a trainer's state.

        Args:
            names: of tensors.
            checkpoint: the source.
        """
        if self.plain is not None or form_named(checkpoint.form).options.names is Names.MODEL:
            return {name: name for name in names}
        from reshard.names import plain_names

        renamed = plain_names(names, checkpoint.objects, checkpoint.nested, True)
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
            return {**recorded, **{name: trainer_keys(name) for name in names}}
        keys_by_name = {name: trainer_keys(name) for name in names if name not in recorded}
        return {**recorded, **{name: keys for name, keys in keys_by_name.items() if keys[0] in roots}}

    def last_names(self, names: Collection[str], report: Report) -> dict[str, str | None]:
        """The last renaming: new names by old ones.

        Args:
            names: the names before it.
            report: gets notes on the names.
        """
        if not self.trainer:
            return {}
        from reshard.names import megatron_names, trainer_names

        if self.side is Side.MEGATRON:
            if self.table is None and self.source_side is not Side.MEGATRON:
                raise UsageError(
                    "Megatron has other names and packing than the source",
                    hint=f"{_name_the_family()}, with --config for the config.json of the model; --rename '*=*' keeps "
                    "all names",
                )
            return megatron_names(names)
        renamed = trainer_names(names)
        report.note("names: weights get the prefix 'model.', as in a trainer's state")
        return renamed

    def laid_out(self, target: Strategy, names: Collection[str]) -> Strategy:
        """The target's strategy for the names of a trainer's state; strategies list those of the model.

        Args:
            target: the strategy.
            names: of all tensors that are written.
        """
        listed = set(target.parameters)
        if target.is_placeholder or target.is_none or listed.issuperset(names):
            return target
        from reshard.names import megatron_name_before, name_before

        before = megatron_name_before if self.side is Side.MEGATRON else name_before
        after = {before(name): name for name in names}
        # Without a renaming, tensors may have the names that the strategy lists. Other state, such as moments.w, keeps
        # its name in a trainer's state.
        changed = {name for before, name in after.items() if before != name}
        if not self.trainer and not (listed.isdisjoint(changed) and len(after) == len(names)):
            return target
        renamed = target.with_layouts(lambda layouts: {after.get(name, name): one for name, one in layouts.items()})
        return replace(renamed, original=target)

    def step_editor(self, target: Strategy) -> Callable[[Checkpoint], EditedStep]:
        """A function that edits a checkpoint, complete or not; see `forms.form.ReadRequest`.

        Args:
            target: the strategy of the target, which may be `same`.
        """
        # Loaded only here: most conversions edit nothing.
        from reshard.plan.editing import edited, same_layouts

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


NO_TABLE = "none"
"""--names none: names stay, those of fused experts too."""

NO_EDITS = EditRules()
"""Unchanged names, packing and types."""


def between_forms(edits: EditRules, src: str, form: Form, to: Form, keep: bool = False) -> EditRules:
    """The edits, with the renaming that a conversion between two forms implies.

    A trainer's names become those of a model where the target has only these, or where a table needs them, and a
    model's names those of a trainer's state where the target's trainers expect them. --rename turns this off.
    Fused experts of PyTorch's trainers get their published names, unless --names is given.

    Args:
        edits: the requested edits.
        src: the source; its config.json is the default.
        form: of the source.
        to: of the target.
        keep: --names is given, perhaps as none.

    Raises:
        ReshardError: the configuration cannot be read.
    """
    source, target = form.options, to.options
    edits = edits._replace(source_side=source.side, side=target.side)
    published = target.names is Names.MODEL and target.side is Side.HUGGINGFACE
    if published and not source.mindspore and form.name != to.name and not keep:
        config, config_path = edits.config, edits.config_path
        # verl stores the configuration in a directory of its own.
        for path in (os.path.join(src, _CONFIG), os.path.join(src, "huggingface", _CONFIG)):
            if config is None and is_regular_file(path):
                from reshard.names import read_config

                config, config_path = read_config(path), path
        edits = edits._replace(experts=True, config=config, config_path=config_path)
    if edits.renames is not None:
        return edits
    plain = None
    trains = source.names is not Names.MODEL
    if trains and target.names is Names.MODEL:
        plain = PLAIN_ALL if target.mindspore or edits.optimizer else PLAIN_WEIGHTS
    elif trains and (edits.table is not None or target.side is Side.MEGATRON):
        plain, trains = PLAIN_ALL, False
    trainer = not trains and target.names is Names.TRAINER
    return edits._replace(plain=plain, trainer=trainer) if plain or trainer else edits


def recorded_name(table: NameRules) -> str:
    """A built-in table's name, or the absolute path of a file."""
    from reshard.names import builtin_names

    return table.path if table.path in builtin_names() else absolute(table.path)


def edits_to_model(form: Form) -> EditRules:
    """The edits that give tensors of a source the names in the model, and MindSpore's names for optimizer state."""
    return NO_EDITS if form.options.names is Names.MODEL else EditRules(plain=PLAIN_KNOWN)


_CONFIG = "config.json"


def edit_rules(
    src: str, asked: Edits, to: Form | None = None, step: str = "latest", target: Target | None = None
) -> EditRules:
    """The rules of names, packing and types that are asked for; empty for unchanged ones.

    Args:
        src: the source; its config.json is the default.
        asked: what is asked.
        to: the form of the target, which may have other names; None if nothing is written.
        step: the step of the source, whose configuration may be recorded.
        target: what is asked of the target, which may decide options of a table.

    Raises:
        UsageError: options contradict each other, or name an unknown type.
        ReshardError: a table cannot be read.
    """
    rules = _asked_rules(src, asked, to, step, None if target is None else target.args)
    if to is None:
        return rules
    if target is not None and rules.megatron is not None:
        from reshard.names import with_options

        options = to.table_options(target, rules.config)
        stated = dict(rules.megatron.chosen)
        rules = rules._replace(megatron=with_options(rules.megatron, {**options, **stated}))
    return between_forms(rules, src, form_of(src), to, keep=asked.names is not None)


def _name_the_family() -> str:
    from reshard.names import megatron_families

    *families, last = megatron_families()
    return f"name the family of the model: --names {', '.join(families)} or {last}"


def _asked_rules(src: str, asked: Edits, to: Form | None, step: str, args: str | None) -> EditRules:
    names, config, exactly = asked.names, asked.config, asked.exactly
    for option, is_set in (("reverse", asked.reverse), ("optimizer", asked.optimizer is not None)):
        if is_set and names in (None, NO_TABLE):
            raise UsageError(f"--{option} needs --names", hint="name a table: `reshard names list`")
    if not asked.changes:
        return NO_EDITS._replace(exactly=exactly)
    if not (is_directory(src) or form_of(src).options.by_rank):
        # An index or the one file of a model.
        src = os.path.dirname(src)
    form, named = form_of(src), names not in (None, NO_TABLE)
    if named and config is None and is_regular_file(os.path.join(src, _CONFIG)):
        config = os.path.join(src, _CONFIG)
    # Loaded only here: most conversions have no rules.
    from reshard.names import MEGATRON, chained_rules, merged, parse_renames, read_config, rules_named
    from reshard.plan.casts import CastRule
    from reshard.records.ledger import packing_of

    table, megatron = None, None
    if names is not None and named:
        if names.partition(",")[0] == MEGATRON:
            raise UsageError(
                f"--names {names}: the table {MEGATRON} follows from Megatron's form",
                hint=_name_the_family(),
            )
        target = None if to is None else to.options.side
        if Side.MEGATRON in (form.options.side, target):
            table, megatron = chained_rules(names, target is Side.MINDFORMERS)
        else:
            table = rules_named(names)
    stated = None if config is None else read_config(config)
    sizes: Mapping[str, object] | None = stated
    of_source = None if to is None or to.options.arguments else args
    recorded = form.configuration(src, step, of_source) if named else None
    if recorded is None and named and to is not None and args is not None:
        recorded = to.stated_configuration(args)
    if recorded is not None:
        tables = [rules for rules in (table, megatron) if rules is not None]
        sizes = merged(recorded, stated, set().union(*(rules.config_keys for rules in tables)))
    if megatron is not None and asked.reverse and form.options.side is Side.MEGATRON:
        raise UsageError("--reverse: the names of a Megatron checkpoint decide the direction", hint="leave it out")
    return EditRules(
        table=table,
        megatron=megatron,
        renames=parse_renames(asked.rename) if asked.rename else None,
        config=sizes,
        reverse=True if asked.reverse else None,
        optimizer=asked.optimizer is not None,
        casts=tuple(map(CastRule.parse, asked.cast)),
        exactly=exactly,
        quantisation=None if asked.dequantize is None else _quantisation(asked.dequantize, src, sizes),
        config_path=config,
        source_packing=() if table is None else packing_of(src),
        source_side=form.options.side,
        exclude=asked.exclude if megatron is not None else (),
    )


def _quantisation(dequantize: str, src: str, config: Mapping[str, object] | None) -> Quantisation:
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


class Request(NamedTuple):
    """A conversion and its two ends.

    Attributes:
        asked: the conversion.
        form: of the source.
        source: strategy the checkpoint was saved with; `none` where the checkpoint records its layouts.
        to: form of the target.
        target: strategy it is converted to; `none` for full tensors, `same` for the source's own.
        edits: other names, packing and types.
        task: what the run does.
        damaged: source files that count as absent, with the reason, by path.
    """

    asked: Conversion
    form: Form
    source: Strategy
    to: Form
    target: Strategy
    edits: EditRules = NO_EDITS
    task: Task = Task()
    damaged: Mapping[str, str] = {}

    def with_edits(self, edits: EditRules) -> Request:
        """The conversion with edits, which may need more of a source than a rewrite of its files."""
        renamed = edits.table is not None
        return self._replace(edits=edits, form=self.form.for_target(self.asked.source, self.to, renamed))

    @property
    def src(self) -> str:
        """The source."""
        return self.asked.source.path

    @property
    def dst(self) -> str:
        """The target directory, or the file itself."""
        return self.asked.target.path

    @property
    def filters(self) -> Filters:
        """The selection of names."""
        return self.asked.edits.filters

    @property
    def target_ranks(self) -> tuple[int, ...] | None:
        """The requested target ranks, ascending; None for all, and for forms without rank files."""
        return self.asked.files if self.to.options.by_rank else None
