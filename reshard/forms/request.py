"""A request: a conversion with its two ends, and the rules of names, packing and types that it applies.

Forms read and write from it; `Means` are what they do it with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.asked import Conversion, Source, Target, Task
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, Packing
from reshard.storage import absolute
from reshard.strategies import Strategy
from reshard.text.globs import Filters
from reshard.text.messages import Report
from reshard.text.names import is_near_experts, trainer_optimizer

if TYPE_CHECKING:
    from reshard.forms.form import EditedStep, Form, Side
    from reshard.lora import Adapter
    from reshard.names import Applied, NameRules, Naming
    from reshard.plan.casts import CastRule
    from reshard.quantised import Quantisation

PLAIN_WEIGHTS, PLAIN_ALL, PLAIN_KNOWN = "weights", "all", "known"
"""The part of a trainer's state that is renamed to a model's names; ``known``: all, as far as they are decided."""


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
        additions: an adapter, added to tensors under their old names; it excludes casts.
        renamed_one_by_one: other names of single tensors, after the rules; None for skipped ones.
        from_trainer: first change names of a trainer's state to those of a model: ``weights`` skips optimizer state,
            ``all`` and ``known`` give it MindSpore's names; None for unchanged names.
        published_names: without a table, give tensors the names that transformers publishes; see
            `tables.with_published_names`.
        to_trainer: last, change names to those of a trainer's state.
        quantisation: how quantised tensors are recognised, and their type after dequantising, the first edit; None to
            copy codes and scales unchanged.
        config_path: the file or directory of the model's configuration, if it was named or is the source's.
        source_packing: of the source, if its records list it.
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
    additions: Adapter | None = None
    renamed_one_by_one: tuple[tuple[str, str | None], ...] = ()
    from_trainer: str | None = None
    published_names: bool = False
    to_trainer: bool = False
    quantisation: Quantisation | None = None
    config_path: str | None = None
    source_packing: Packing | None = None
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
        return self.table_of_side is None or (self.side is not None and self.side.value == self.table_of_side.sides[1])

    @property
    def is_empty(self) -> bool:
        """Whether all names, packing and types are unchanged."""
        # Without a table, these change nothing.
        changes = self._replace(
            config=None, config_path=None, source_packing=None, source_side=None, side=None, exclude=()
        )
        return changes == NO_EDITS

    def identity(self, tables: Sequence[Applied]) -> str:
        """A text; edits, with the tables that were applied, that make equal tensors have equal texts."""
        texts = []
        for each in tables:
            # The rest of a configuration may change between two runs.
            sizes = json.dumps(each.rules.size_values(self.config), sort_keys=True)
            texts.append((each.rules.text, sorted(each.options.items()), each.reversed, self.optimizer, sizes))
        table = texts[0] if len(texts) == 1 else tuple(texts) or None
        renames = () if self.renames is None else tuple(rule.where for rule in self.renames.rules)
        additions = None if self.additions is None else self.additions.identity
        quantisation = None if self.quantisation is None else self.quantisation.identity
        names = (self.renamed_one_by_one, self.from_trainer, self.to_trainer)
        return repr((table, renames, self.casts, additions, *names, quantisation))

    def recorded_options(self, table: NameRules) -> Mapping[str, str]:
        """The options of the table that was asked for, if the source's records list them; none for another."""
        recorded = self.source_packing
        if recorded is None or table is not self.table or recorded.table != recorded_name(table):
            return {}
        return recorded.options

    def possible_names(self, name: str) -> Iterator[str | None]:
        """The possible names of a tensor; None for a name that depends on other tensors."""
        rules = (self.table, self.renames, self.additions, self.quantisation)
        if self.tables and not self.optimizer and trainer_optimizer(name):
            # Rules leave it out.
            return
        if self.renamed_one_by_one or self._may_publish(name) or any(each is not None for each in rules):
            yield None
        elif self.from_trainer is None:
            yield from (name, None if self.to_trainer else name)
        else:
            from reshard.names import possible_plain_names

            for plain in possible_plain_names(name, self.from_trainer != PLAIN_WEIGHTS):
                # State has its name beside its weight.
                beside = (plain, plain.partition(".")[2])
                yield self.naming.add(beside)[plain] if self.to_trainer else plain

    def _may_publish(self, name: str) -> bool:
        if not self.published_names:
            return False
        from reshard.names import may_rename

        return is_near_experts(name) or may_rename(self.config)


NO_EDITS = EditRules()
"""Unchanged names, packing and types."""


def recorded_name(table: NameRules) -> str:
    """A built-in table's name, or the absolute path of a file."""
    from reshard.names import builtin_names

    return table.path if table.path in builtin_names() else absolute(table.path)


@dataclass(frozen=True)
class Means:
    """What every step of a run works with.

    Attributes:
        handles: open files of the source; one cache detects every file that changes meanwhile.
        report: gets warnings and notes.
    """

    handles: FileHandles
    report: Report


class Request(NamedTuple):
    """A conversion and its two ends. Forms ignore attributes that do not concern them.

    Attributes:
        asked: the conversion.
        form: of the source.
        source: strategy the checkpoint was saved with; `none` where the checkpoint records its layouts.
        to: form of the target.
        target: strategy it is converted to; `none` for full tensors, `same` for the source's own.
        edits: other names, packing and types.
        task: what the run does.
        damaged: source files that count as absent, with the reason, by path.
        edit: edits a step, complete or not, and raises an InputError if the edits do not fit; None without edits.
        complete: refuse an incomplete step.
        partial: tensors may be incomplete: only their shapes, or their copies, are read.
    """

    asked: Conversion
    form: Form
    source: Strategy
    to: Form
    target: Strategy
    edits: EditRules = NO_EDITS
    task: Task = Task()
    damaged: Mapping[str, str] = {}
    edit: Callable[[Checkpoint], EditedStep] | None = None
    complete: bool = True
    partial: bool = False

    @classmethod
    def of_source(cls, asked: Source, form: Form, strategy: Strategy | None = None) -> Request:
        """The request to read all of a source, and to write nothing."""
        return cls(Conversion(asked, Target(os.curdir)), form, strategy or Strategy.none(), form, Strategy.none())

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
        return Filters(self.asked.edits.include, self.asked.edits.exclude)

    @property
    def target_ranks(self) -> tuple[int, ...] | None:
        """The requested target ranks, ascending; None for all, and for forms without rank files."""
        return self.asked.files if self.to.options.by_rank else None

    @property
    def on_disk(self) -> bool:
        """Whether a directory is written, not one exact file or none."""
        return not (self.asked.target.is_file or self.task.in_memory)

    @property
    def required(self) -> Callable[[str], bool]:
        """Whether a tensor of the source has to be complete."""
        edits, admit = self.edits, self.filters.admit
        if self.partial or not self.complete:
            return lambda name: False
        if not edits.is_empty:
            # A tensor is required if any of its possible names is written.
            return lambda name: any(new is None or admit(new) for new in edits.possible_names(name))
        target_names = set(self.target.parameters)
        everything = self.target.is_none or self.target.is_placeholder
        return lambda name: admit(name) and (everything or name in target_names)
