"""The commands of the runs that fill a target directory, so that `resume` works without typing them again.

``command.<digest>.json``, next to the other records of a conversion, contains one command: absolute paths, and the
options that determine what is written and how it is checked. It contains no limits of resources and no secrets.
Each distinct command has one file; the last one begun has the latest time.
The identity still decides which runs are the same conversion: values of these records are checked against it
like typed ones.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import NamedTuple, Optional

from reshard.checkpoints.formats.headers import ALL_FORMATS
from reshard.defaults import CHOICES, DEFAULT_PREFIX, MAX_DEVICES
from reshard.errors import TargetError, UsageError
from reshard.forms import DEFAULT_FORM, FORM_CLASSES
from reshard.forms.ranks.naming import Step
from reshard.forms.registry import form_named, form_of
from reshard.records.identity import attributes_of, short_digest
from reshard.storage import is_absolute, names_in, read_json, reading, status_at, write_whole
from reshard.storage.json_text import Fields, JsonError
from reshard.strategies import AS_CUT, names_files, shards_of, target_words
from reshard.text.messages import number_ranges, quoted

VERSION = 1
EDITS = ("names", "config", "reverse", "optimizer", "dequantize", "rename", "cast")
"""The options of names and types."""

# Enough for paths and patterns of some hundred bytes each.
_MAX_BYTES = 1 << 20
_MAX_RECORDS = 10_000
_SHOWN = 40
_MAX_MESSAGE = 200
_RANGE = "([0-9]{1,9})(?:-([0-9]{1,9}))?"
_CHOICES = {
    "task": ("convert", "recover"),
    "format": ALL_FORMATS,
    "to": tuple(FORM_CLASSES),
    "optimizer": (None, "keep"),
    **{name: CHOICES[name] for name in ("crc", "check_replicas", "checksum")},
}
# Attributes whose options depend on the task or the form; those of others are as `option_words` writes them.
_BY_TASK = ("task", "src", "source_strategy", "target_strategy", "format", "prefix", "packing", "host")


class RecordedCommand(NamedTuple):
    """A command; other attributes than these are the options of that name, with their defaults.

    Attributes:
        task: ``convert`` or ``recover``.
        src: the source, absolute; may contain ``{rank}``.
        source_strategy: absolute path, ``none``, or ``as cut`` where only the format changes.
        target_strategy: likewise; that of the source when recovering.
        format: of the target files, as chosen.
        host: the host where it was typed.
        step: the chosen step; None if file names contain none.
        prefix: None for names as in the source.
        without_ranks: source ranks that count as lost, such as ``3,7``; None without any.
        ranks: the requested target ranks, such as ``0-7,12``; None for all, or for one of several processes.
        names: a built-in table of names, or an absolute path.
        config: absolute path.
        packing: the table of names, its options and sizes, as ``KEY=VALUE``; of the source, if no table was requested.
    """

    task: str
    src: str
    source_strategy: str
    target_strategy: str
    format: str
    host: str
    to: str = DEFAULT_FORM
    max_shard_size: Optional[int] = None
    step: Optional[str] = None
    file_suffix: Optional[str] = None
    without_ranks: Optional[str] = None
    ranks: Optional[str] = None
    names: Optional[str] = None
    config: Optional[str] = None
    reverse: bool = False
    optimizer: Optional[str] = None
    dequantize: Optional[str] = None
    rename: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    prefix: Optional[str] = DEFAULT_PREFIX
    crc: str = CHOICES["crc"][0]
    check_replicas: str = CHOICES["check_replicas"][0]
    checksum: str = CHOICES["checksum"][0]
    verify: bool = False
    lost_only: bool = False
    packing: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The typed paths, without duplicates."""
        strategies = filter(names_files, (self.source_strategy, self.target_strategy))
        return tuple(dict.fromkeys((self.src, *strategies)))

    @property
    def rank_numbers(self) -> Optional[tuple[int, ...]]:
        """The requested target ranks, ascending; None for all."""
        return None if self.ranks is None else _numbers(self.ranks)

    def option_words(self, names: Optional[Iterable[str]] = None) -> list[str]:
        """Options of the same names in `convert` and `recover`, as words; defaults are left out.

        Args:
            names: only these attributes; by default all such options.
        """
        words: list[str] = []
        for name, value in self._asdict().items():
            if name in _BY_TASK or value == self._field_defaults.get(name):
                continue
            if names is None or name in names:
                option = f"--{name.replace('_', '-')}"
                values = value if isinstance(value, tuple) else (value,)
                words += [option] if value is True else [f"{option}={each}" for each in values]
        return words

    def words(self, dst: str) -> list[str]:
        """The command, with paths as they are recorded."""
        target = os.path.join(os.curdir, dst) if dst.startswith("-") else dst
        words = [self.task, self.src, target]
        recovery = self.task == "recover"
        to = form_named(self.to).options
        if recovery:
            words.append(f"--strategy={self.source_strategy}")
        else:
            if form_named(form_of(self.src)).options.needs_strategy and self.source_strategy != AS_CUT:
                words.append(f"--src-strategy={self.source_strategy}")
            if to.cut and self.target_strategy != AS_CUT:
                words.append("=".join(target_words(self.target_strategy)))
            words += [f"--format={self.format}"] if len(to.formats) > 1 else []
        if self.prefix is not None and (self.prefix != DEFAULT_PREFIX or recovery):
            words.append(f"--prefix={self.prefix}")
        return words + self.option_words()

    def write(self, directory: str) -> None:
        """Write the record, and make it the latest.

        Raises:
            OSError: it cannot be written.
        """
        content = self._asdict()
        # The host is excluded: the same command from two hosts is one command.
        host = content.pop("host")
        digest = short_digest(json.dumps(content, sort_keys=True).encode())
        path = os.path.join(directory, f"command.{digest}.json")
        write_whole(path, (json.dumps({"version": VERSION, **content, "host": host}) + "\n").encode())


def is_command(name: str) -> bool:
    """Whether a file is the record of a command, by its name."""
    return re.fullmatch(r"command\.[0-9a-f]{16}\.json", name) is not None


def commands_in(directory: str) -> list[RecordedCommand]:
    """The recorded commands in a directory, the latest first.

    Raises:
        TargetError: a record is damaged, or of another version.
        RetryableError: one cannot be read.
    """
    names = [name for name in names_in(directory) if is_command(name)]
    if len(names) > _MAX_RECORDS:
        raise TargetError(f"{directory}: holds {len(names)} records of commands", file=directory, hint=_AGAIN)
    commands: list[tuple[int, str, RecordedCommand]] = []
    for path in [os.path.join(directory, name) for name in names]:
        status, command = status_at(path), _read(path)
        # Another run may have removed it since the listing.
        if status is not None and command is not None:
            commands.append((status.modified, path, command))
    return [command for _, _, command in sorted(commands, key=lambda entry: entry[:2], reverse=True)]


def requested_ranks(commands: Iterable[RecordedCommand]) -> Optional[tuple[int, ...]]:
    """The target ranks that any of these commands requested, ascending; None for all."""
    ranks = [command.rank_numbers for command in commands]
    return None if None in ranks else tuple(sorted({rank for numbers in ranks for rank in numbers or ()}))


_AGAIN = "run the command that began the conversion again"


def _read(path: str) -> Optional[RecordedCommand]:
    content = read_json(path, _MAX_BYTES, TargetError, _AGAIN, through_links=False, file_names=True)
    if content is None:
        return None
    version = content.pop("version", None)
    if version != VERSION:
        raise TargetError(
            f"{path}: version {str(version)[:_SHOWN]} is not supported by this version of reshard",
            file=path,
            hint="use the version of reshard that wrote it, or a newer one",
        )
    with reading(path, TargetError, _AGAIN):
        try:
            return _parsed(Fields(content, "the record"))
        except UsageError as error:
            raise JsonError(error.message[:_MAX_MESSAGE]) from error


def _parsed(fields: Fields) -> RecordedCommand:
    """The command in a record.

    Raises:
        JsonError, UsageError: no run writes such a record.
    """
    values = attributes_of(RecordedCommand, fields)
    for name, value in values.items():
        if name in _CHOICES and value not in _CHOICES[name]:
            raise JsonError(f"{name} is {quoted(str(value))}")
        if any("\0" in text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str)):
            raise JsonError(f"{name} contains a NUL character")
    for strategy in (values["source_strategy"], values["target_strategy"]):
        shards_of(strategy)
        if names_files(strategy) and not is_absolute(strategy):
            raise JsonError(f"{quoted(strategy)} is not an absolute path")
    packing = values.get("packing", ())
    if not all("=" in text for text in packing) or (packing and not packing[0].startswith("table=")):
        raise JsonError(f"packing is {packing!r}")
    if not is_absolute(values["src"]):
        raise JsonError("src is not an absolute path")
    command = RecordedCommand(**values)
    # Raises for ranks of another spelling.
    _ = command.rank_numbers, command.without_ranks and _numbers(command.without_ranks)
    if command.step is not None and not re.fullmatch("[0-9]{1,18}", command.step):
        Step.parse(command.step)
    if command.lost_only and command.task != "recover":
        raise JsonError("lost_only goes with recover")
    return command


def _numbers(text: str) -> tuple[int, ...]:
    """Ranks as `number_ranges` writes them."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(_RANGE, part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last >= MAX_DEVICES or (numbers and first <= numbers[-1]):
            raise JsonError(f"ranks are {quoted(text)}")
        numbers.extend(range(first, last + 1))
    if number_ranges(numbers) != text:
        raise JsonError(f"ranks are {quoted(text)}")
    return tuple(numbers)
