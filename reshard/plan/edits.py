"""A request: a conversion with its two ends, and the rules of names, packing and types that options ask for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.asked import Conversion, Edits, Target, Task
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Addition, GlobalTensor
from reshard.checkpoints.formats.dtypes import CAST_TO, dtype_named
from reshard.errors import UsageError
from reshard.forms.form import Form, Names, Side
from reshard.forms.registry import form_of
from reshard.storage import absolute, is_directory, is_regular_file
from reshard.strategies import Strategy
from reshard.text.globs import Filters
from reshard.text.names import is_near_experts, trainer_optimizer

if TYPE_CHECKING:
    from reshard.names import NameRules, Naming
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


AppliedTable = tuple["NameRules", Mapping[str, str], bool]
"""A table that was applied, all its options, and whether it was read from right to left."""


class EditRules(NamedTuple):
    """Other names, packing and types.

    Attributes:
        tables: rules of names and packing: those that were asked for and, where an end is on a side that has a table
            for all model families, this one; see `tables.path_of`.
        renames: rules that give other names, after the tables.
        config: the model's sizes for the rules, and its type.
        reverse: whether the table is read from right to left; None: the direction that fits.
        optimizer: whether the table's rules also apply to optimizer state.
        casts: requested types; the last match wins.
        additions: additions to tensors under their old names; they exclude casts.
        renamed_one_by_one: other names of single tensors, after the rules; None for skipped ones.
        from_trainer: first change names of a trainer's state to those of a model: ``weights`` skips optimizer state,
            ``all`` and ``known`` give it MindSpore's names; None for unchanged names.
        published_experts: without a table, give fused experts their published names; see `tables.for_experts`.
        to_trainer: last, change names to those of a trainer's state.
        quantisation: how quantised tensors are recognised, and their type after dequantising, the first edit; None to
            copy codes and scales unchanged.
        config_path: the file or directory of the model's configuration, if it was named or is the source's.
        source_packing: the `packing` that the source's records list; empty without records of a table.
        source_side: whose names the source's form has.
        side: whose names the target's loaders expect; None if nothing is written.
        exclude: patterns of names that are left out if no table lists them.
    """

    tables: tuple[NameRules, ...] = ()
    renames: NameRules | None = None
    config: Mapping[str, object] | None = None
    reverse: bool | None = None
    optimizer: bool = False
    casts: tuple[CastRule, ...] = ()
    additions: Additions | None = None
    renamed_one_by_one: tuple[tuple[str, str | None], ...] = ()
    from_trainer: str | None = None
    published_experts: bool = False
    to_trainer: bool = False
    quantisation: Quantisation | None = None
    config_path: str | None = None
    source_packing: tuple[str, ...] = ()
    source_side: Side | None = None
    side: Side | None = None
    exclude: tuple[str, ...] = ()

    @property
    def table(self) -> NameRules | None:
        """The table that was asked for."""
        return self.tables[0] if self.tables else None

    @property
    def table_of_side(self) -> NameRules | None:
        """The table of all model families, where an end is on its side."""
        return self.tables[1] if len(self.tables) > 1 else None

    @property
    def naming(self) -> Naming:
        """The names that trainers on the side of the target have."""
        from reshard.names import naming_of

        return naming_of("" if self.side is None else self.side.value)

    @property
    def has_masters(self) -> bool:
        """Whether the target's trainers have master copies beside weights; see `Side`."""
        return self.side is not None and self.side.has_masters

    @property
    def keeps_objects(self) -> bool:
        """Whether objects of the source have a meaning beside the tensors: those of its side have none on another."""
        return self.table_of_side is None or self.side is Side(self.table_of_side.sides[1])

    @property
    def is_empty(self) -> bool:
        """Whether all names, packing and types are unchanged."""
        # Without a table, these change nothing.
        changes = self._replace(
            config=None, config_path=None, source_packing=(), source_side=None, side=None, exclude=()
        )
        return changes == NO_EDITS

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
        names = (self.renamed_one_by_one, self.from_trainer, self.to_trainer)
        return repr((table, renames, self.casts, additions, *names, quantisation))

    def recorded_options(self, table: NameRules) -> Mapping[str, str]:
        """The options of the table that was asked for, if the source's records list them; none for another."""
        recorded = dict(text.split("=", 1) for text in self.source_packing)
        if table is not self.table or recorded.get("table") != recorded_name(table):
            return {}
        return {key[len("option ") :]: value for key, value in recorded.items() if key.startswith("option ")}

    def possible_names(self, name: str) -> Iterator[str | None]:
        """The possible names of a tensor; None for a name that depends on other tensors."""
        rules = (self.table, self.renames, self.additions, self.quantisation)
        if self.tables and not self.optimizer and trainer_optimizer(name):
            # Rules leave it out.
            return
        by_others = self.renamed_one_by_one or (self.published_experts and is_near_experts(name))
        if by_others or any(each is not None for each in rules):
            yield None
        elif self.from_trainer is None:
            yield from (name, None if self.to_trainer else name)
        else:
            from reshard.names import possible_plain_names

            for plain in possible_plain_names(name, self.from_trainer != PLAIN_WEIGHTS):
                # State has its name beside its weight.
                beside = (plain, plain.partition(".")[2])
                yield self.naming.add(beside)[plain] if self.to_trainer else plain


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
        edits = edits._replace(published_experts=True, config=config, config_path=config_path)
    if edits.renames is not None:
        return edits
    plain = None
    trains = source.names is not Names.MODEL
    if trains and target.names is Names.MODEL:
        plain = PLAIN_ALL if target.mindspore or edits.optimizer else PLAIN_WEIGHTS
    elif trains and (edits.table is not None or to.training is not None):
        plain, trains = PLAIN_ALL, False
    return edits._replace(from_trainer=plain, to_trainer=not trains and target.names is Names.TRAINER)


def recorded_name(table: NameRules) -> str:
    """A built-in table's name, or the absolute path of a file."""
    from reshard.names import builtin_names

    return table.path if table.path in builtin_names() else absolute(table.path)


def edits_to_model(form: Form) -> EditRules:
    """The edits that give tensors of a source the names in the model, and MindSpore's names for optimizer state."""
    return NO_EDITS if form.options.names is Names.MODEL else EditRules(from_trainer=PLAIN_KNOWN)


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
    if target is not None and to.training is not None and rules.table_of_side is not None:
        from reshard.names import with_options

        options = {**to.training.table_options(target, rules.config), **dict(rules.table_of_side.chosen)}
        rules = rules._replace(tables=(rules.tables[0], with_options(rules.table_of_side, options)))
    return between_forms(rules, src, form_of(src), to, keep=asked.names is not None)


def _asked_rules(src: str, asked: Edits, to: Form | None, step: str, args: str | None) -> EditRules:
    names, config, exactly = asked.names, asked.config, asked.exactly
    for option, is_set in (("reverse", asked.reverse), ("optimizer", asked.optimizer is not None)):
        if is_set and names in (None, NO_TABLE):
            raise UsageError(f"--{option} needs --names", hint="name a table: `reshard names list`")
    if not asked.changes:
        return NO_EDITS._replace(renamed_one_by_one=exactly)
    if not (is_directory(src) or form_of(src).options.by_rank):
        # An index or the one file of a model.
        src = os.path.dirname(src)
    form, named = form_of(src), names not in (None, NO_TABLE)
    if named and config is None and is_regular_file(os.path.join(src, _CONFIG)):
        config = os.path.join(src, _CONFIG)
    # Loaded only here: most conversions have no rules.
    from reshard.names import merged, parse_renames, read_config, tables_named
    from reshard.plan.casts import CastRule
    from reshard.records.ledger import packing_of

    tables: tuple[NameRules, ...] = ()
    if names is not None and named:
        target = form if to is None else to
        tables = tables_named(names, form.options.side.value, target.options.side.value)
    stated = None if config is None else read_config(config)
    sizes: Mapping[str, object] | None = stated
    target_training = None if to is None else to.training
    recorded: Mapping[str, object] | None = None
    if named and form.training is not None:
        of_source = None if to is None or target_training is not None else args
        recorded = form.training.configuration(src, step, of_source)
    if named and recorded is None and target_training is not None and args is not None:
        recorded = target_training.stated_configuration(args)
    if recorded is not None:
        sizes = merged(recorded, stated, set().union(*(rules.config_keys for rules in tables)))
    by_form = any(rules.families and rules.sides[1] == form.options.side.value for rules in tables)
    if by_form and asked.reverse:
        raise UsageError(f"--reverse: the names of {form.name} decide the direction", hint="leave it out")
    return EditRules(
        tables=tables,
        renames=parse_renames(asked.rename) if asked.rename else None,
        config=sizes,
        reverse=True if asked.reverse else None,
        optimizer=asked.optimizer is not None,
        casts=tuple(map(CastRule.parse, asked.cast)),
        renamed_one_by_one=exactly,
        quantisation=None if asked.dequantize is None else _quantisation(asked.dequantize, src, sizes),
        config_path=config,
        source_packing=packing_of(src) if tables else (),
        source_side=form.options.side,
        exclude=asked.exclude if tables else (),
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
