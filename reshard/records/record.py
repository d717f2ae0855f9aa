"""A conversion as its target directory records it.

The record of the first run stands in ``plan.json``, and in the manifest. Runs with an equal `Record.identity` fill one
directory together: what they are asked decides the same bytes, where strategies, tables and configurations are compared
by content. What decides no byte, such as paths and checks, is that of the first run: `resume` and `verify` read it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.asked import (
    TEXTS,
    VALUE,
    Conversion,
    Option,
    Task,
    fields_of,
    from_json,
    groups_of,
    to_json,
    words_of,
)
from reshard.checkpoints.checkpoint import Packing
from reshard.checkpoints.formats.headers import ALL_FORMATS
from reshard.defaults import MAX_DEVICES
from reshard.errors import UsageError
from reshard.forms.ranks.naming import FileNames
from reshard.layout import Layout
from reshard.records.sources import digest_of
from reshard.storage import UnfitError, is_absolute
from reshard.storage.json_text import Fields, JsonError
from reshard.strategies import Strategy, names_files
from reshard.text.messages import quoted

VERSION = 3
"""Of plan.json and of the manifest."""

# The recorded attributes of a task; the others are of one run.
_FLAGS = frozenset(["recover", "lost_only", "merge", "by_function", "verify"])
_MAX_MESSAGE = 200
# What is compared by a digest of its content.
_CONTENTS = {
    "source_strategy": "the source strategy",
    "target_strategy": "the target strategy",
    "edits": "the adapter, or the rules of names and types, which --args and --config complete",
    "division": "the division into files, or config.json and the files beside it",
}


class Record(NamedTuple):
    """A conversion.

    Attributes:
        asked: the conversion with absolute paths and the chosen step, form and format, but without the target's path;
            its files are None for one of several processes.
        step: the converted step; None if file names contain none.
        file_count: the number of target files of the whole conversion.
        names: of the target files.
        format: their ending.
        task: of the first run, as far as others repeat it.
        digests: of both strategies as read (``same`` for the source's under other names), of the names and types that
            were given, with the rules and sizes behind them, and of the division of tensors into files, with what
            options decide beside tensors, if the strategy does not determine it; the last two may be empty.
        packing: of the target; that of the source, if no table was requested.
        lost: the lost target ranks, ascending, if only these are recovered.
    """

    asked: Conversion
    step: str | None
    file_count: int
    names: FileNames
    format: str
    task: Task
    digests: Mapping[str, str]
    packing: Packing | None = None
    lost: tuple[int, ...] = ()

    @property
    def form(self) -> str:
        """The name of the target's form."""
        return str(self.asked.target.form)

    @property
    def command(self) -> str:
        """The command that makes it."""
        return "recover" if self.task.recover else "merge-lora" if self.task.merge else "convert"

    @property
    def pattern(self) -> str:
        """The names of its files, as they are asked for where they can be."""
        return self.names.template if self.names.prefix is None else f"--prefix {self.names.prefix}"

    @property
    def identity(self) -> str:
        """A text, equal for runs that may fill one directory together."""
        asked = to_json(self.asked, identity=True)
        content = {**self.to_json(), "asked": asked, "task": self.task.recover, "packing": None}
        return json.dumps(content, sort_keys=True)

    @property
    def wanted(self) -> Sequence[int]:
        """The target ranks of the complete conversion, ascending."""
        return self.lost or range(self.file_count)

    @property
    def is_repeatable(self) -> bool:
        """Whether a command line repeats the conversion, so that `resume` works."""
        return not (self.task.merge or self.task.by_function)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the source and of strategies, without duplicates."""
        strategies = (self.asked.source.strategy, self.asked.target.strategy)
        return tuple(dict.fromkeys((self.asked.source.path, *(s for s in strategies if s and names_files(s)))))

    def file_of(self, rank: int) -> str:
        """A target file, relative to the target directory."""
        return f"{self.names.of(rank)}.{self.format}"

    def words(self, dst: str) -> list[str]:
        """The command, with paths as they are recorded."""
        asked, task = self.asked, self.task
        target = os.path.join(os.curdir, dst) if dst.startswith("-") else dst
        words = [word for group in groups_of(asked) for word in words_of(group)]
        if task.recover:
            words = [re.sub("^--src-strategy=", "--strategy=", word) for word in words_of(asked.source)]
            words += [*words_of(asked.edits, ["allow_missing"]), *words_of(asked.effort), *words_of(asked, ["files"])]
            words += words_of(asked.target, ["checksum"])
            words += [] if asked.target.prefix is None else [f"--prefix={asked.target.prefix}"]
        flags = [flag for flag, given in (("--verify", task.verify), ("--lost-only", task.lost_only)) if given]
        return [self.command, asked.source.path, target, *words, *flags]

    def to_json(self) -> dict[str, Any]:
        """The JSON record, which `from_fields` reads."""
        task = [flag for flag, value in self.task._asdict().items() if value and flag in _FLAGS]
        names, packing = self.names.to_fields(), self.packing and self.packing._asdict()
        return {**self._asdict(), "asked": to_json(self.asked), "names": names, "packing": packing, "task": task}

    @classmethod
    def from_fields(cls, fields: Fields) -> Record:
        """The conversion of a JSON record.

        Raises:
            JsonError: no run writes such a record.
        """
        unknown = set(fields).difference(cls._fields)
        if unknown:
            raise JsonError(f"{quoted(min(unknown))} is unknown")
        task, digests = fields.texts("task"), fields.fields("digests")
        if not _FLAGS.issuperset(task):
            raise JsonError(f"task is {task!r}")
        try:
            asked = from_json(Conversion, dict(fields.fields("asked").items()))
        except UsageError as error:
            raise JsonError(error.message[:_MAX_MESSAGE]) from error
        record = cls(
            asked,
            fields.optional_text("step"),
            fields.integer("file_count", 1, MAX_DEVICES + 1),
            FileNames.from_fields(fields.fields("names")),
            fields.text("format"),
            Task(**dict.fromkeys(task, True)),
            {name: digests.text(name) for name in _CONTENTS},
            None if fields.is_null("packing") else _packing(fields.fields("packing")),
            fields.integers("lost", 0, MAX_DEVICES),
        )
        if asked.target.form is None:
            raise JsonError("it records no form")
        if record.format not in ALL_FORMATS:
            raise JsonError(f"{quoted(record.format)} is not a format")
        for path in record.paths:
            if not is_absolute(path):
                raise JsonError(f"{quoted(path)} is not an absolute path")
        return record


def _packing(fields: Fields) -> Packing:
    options, sizes = fields.fields("options"), fields.fields("sizes")
    return Packing(
        fields.text("table"),
        fields.optional_text("config"),
        {name: options.text(name) for name in options},
        {name: sizes.integer(name, 0, 1 << 62) for name in sizes},
    )


def read_record(fields: Fields) -> Record:
    """The conversion in a plan or a manifest.

    Raises:
        UnfitError: the file is damaged, or of another version.
    """
    version = fields.integer("version", 0, 1 << 31)
    if version != VERSION:
        raise UnfitError(f"is a record of version {version}, not of version {VERSION}")
    return Record.from_fields(fields.fields("conversion"))


def old_hint(directory: str) -> str:
    """How a directory is checked whose records another version of reshard wrote."""
    return f"its files are compared by: reshard verify {shlex.quote(directory)} --src SRC, with the options of convert"


def strategy_digest(strategy: Strategy) -> str:
    """A digest of a strategy's content as read, independent of its files."""
    return digest_of(_strategy_parts(strategy.original or strategy))


def _strategy_parts(strategy: Strategy) -> Iterator[bytes]:
    texts: dict[Layout, bytes] = {}
    for stage in strategy.stages:
        yield f"{stage.number} {stage.first_rank} {stage.device_count}\n".encode()
        for name in sorted(stage.layouts):
            layout = stage.layouts[name]
            text = texts.get(layout)
            if text is None:
                text = texts[layout] = repr(dataclasses.astuple(layout)).encode()
            yield name.encode(errors="surrogateescape") + b"\0" + text + b"\n"


def differences(mine: Record, theirs: Record) -> list[str]:
    """What differs in two conversions; what only follows from something else is left out."""
    contents = [name for name in _CONTENTS if mine.digests[name] != theirs.digests[name]]
    words: list[str] = []
    for here, there in zip(groups_of(mine.asked), groups_of(theirs.asked)):
        for name, (option, _) in fields_of(type(here)).items():
            if {VALUE, *contents} & {*option.identity.split()}:
                words += _both(option.names[0], *(_typed(option, getattr(each, name)) for each in (there, here)))
    words += _both("the step", theirs.step, mine.step)
    words += _both("the format", theirs.format, mine.format)
    words += _both("the task", theirs.command, mine.command)
    words = words or _both("the lost ranks of --lost-only", theirs.lost, mine.lost)
    words = words or [_CONTENTS[name] for name in contents]
    return words or _both("the names of the files", theirs.pattern, mine.pattern) or ["the number of files"]


def _both(what: str, there: object, here: object) -> list[str]:
    return [] if there == here else [f"{what} ({_shown(there)} there, {_shown(here)} here)"]


def _typed(option: Option, value: Any) -> object:
    """A value as it is typed."""
    return value if not value or value is True or option.kind is TEXTS else option.kind.words(value)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
    return (text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}...") or "none"
