"""What the runs that fill a target directory were given, so that another can go on without being told again.

``command.<digest>.json`` beside the other records of a conversion holds one such command: paths, made
absolute, and the options that decide what is written and how it is checked; not how much of the machine
is used, and never anything secret. Each different command is there once; the one that was begun last has
the latest time. The identity stays the judge of what is the same conversion: these records only save
typing, and what they say is checked against it like anything that is typed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

from reshard.checkpoints.formats.headers import ALL_FORMATS
from reshard.defaults import MOST_DEVICES
from reshard.errors import RetryableError, TargetError, UsageError
from reshard.forms.ranks import Step
from reshard.forms.registry import FORMS
from reshard.records.identity import short_digest
from reshard.storage import is_absolute, names_in, read_small, store_of, write_whole
from reshard.storage.json_text import parse_json
from reshard.strategies import names_files, shards_of
from reshard.text.wording import number_ranges

VERSION = 1
IS_GIVEN = re.compile(r"command\.[0-9a-f]{16}\.json")
"""The names of such records."""

# Paths and patterns take some hundred bytes each.
_LARGEST = 1 << 20
_MOST = 10_000
_SHOWN = 40
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_CHOICES = {
    "task": ("convert", "recover"),
    "format": ALL_FORMATS,
    "crc": ("auto", "never"),
    "check_replicas": ("auto", "all", "never"),
    "checksum": ("none", "crc32"),
}
_OPTIONAL_TEXTS = ("step", "file_suffix", "prefix", "ranks", "names", "config", "dequantize")
_FLAGS = ("strict", "verify", "lost_only", "reverse", "optimizer")
_PATTERNS = ("include", "exclude", "rename", "cast")
_NUMBERS = ("max_shard_size",)


@dataclass(frozen=True)
class Given:
    """What a run was given.

    Attributes:
        task: ``convert`` or ``recover``.
        src: the source, absolute; may hold ``{rank}``.
        source_strategy: absolute path, or ``none``.
        target_strategy: likewise; that of the source when recovering.
        step: the step that was chosen; None where file names tell none.
        file_suffix: only source files whose stem ends so.
        include: what is written, by name.
        exclude: what is not.
        prefix: of the target files' names; None for names as in the source.
        format: of the target files, as chosen.
        strict: missing parameters are errors.
        crc: ``auto`` or ``never``.
        check_replicas: ``auto``, ``all`` or ``never``.
        checksum: ``none`` or ``crc32``.
        verify: the result is compared with the source afterwards.
        ranks: the target ranks asked for, such as ``0-7,12``; None for all, or a run that is one of several.
        lost_only: when recovering, only ranks that are lost or damaged.
        to: form that is written.
        max_shard_size: bytes of tensors in a file of full weights; None for what is usual.
        names: the table of names, a built-in one's name or an absolute path.
        rename: other names.
        config: absolute path of what tells the model's sizes.
        reverse: the table is read from right to left.
        optimizer: it holds for optimizer state, too.
        cast: types that are asked for.
        dequantize: the type of what was quantised.
        host: where it was typed.
    """

    task: str
    src: str
    source_strategy: str
    target_strategy: str
    step: Optional[str]
    file_suffix: Optional[str]
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    prefix: Optional[str]
    format: str
    strict: bool
    crc: str
    check_replicas: str
    checksum: str
    verify: bool
    ranks: Optional[str]
    lost_only: bool
    to: str = "ranks"
    max_shard_size: Optional[int] = None
    names: Optional[str] = None
    rename: tuple[str, ...] = ()
    config: Optional[str] = None
    reverse: bool = False
    optimizer: bool = False
    cast: tuple[str, ...] = ()
    dequantize: Optional[str] = None
    host: str = dataclasses.field(default_factory=socket.gethostname, compare=False)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that were typed, each once."""
        strategies = filter(names_files, (self.source_strategy, self.target_strategy))
        return tuple(dict.fromkeys((self.src, *strategies)))

    @property
    def rank_numbers(self) -> Optional[tuple[int, ...]]:
        """The target ranks asked for, ascending; None for all."""
        return None if self.ranks is None else _numbers(self.ranks)

    def write(self, directory: str) -> None:
        """Record it, as the last that was begun.

        Raises:
            OSError: it cannot be written.
        """
        said = dataclasses.asdict(self)
        # Who typed it, of many machines, makes no other command.
        host = said.pop("host")
        digest = short_digest(json.dumps(said, sort_keys=True).encode())
        path = os.path.join(directory, f"command.{digest}.json")
        content = (json.dumps({"version": VERSION, **said, "host": host}) + "\n").encode()
        if not store_of(path).touch(path):
            write_whole(path, content)


def given_in(directory: str) -> list[Given]:
    """What runs were given, by the records in a directory, the last that was begun first.

    Raises:
        TargetError: a record is damaged, or of another version.
        RetryableError: one cannot be read.
    """
    try:
        names = [name for name in names_in(directory) if IS_GIVEN.fullmatch(name)]
        if len(names) > _MOST:
            raise TargetError(f"{directory}: holds {len(names)} records of commands", file=directory, hint=_AGAIN)
        paths = [os.path.join(directory, name) for name in names]
        read = [(store_of(path).status(path).modified, path, _read(path)) for path in paths]
    except OSError as error:
        path = error.filename or directory
        raise RetryableError(f"{path}: cannot be read: {error.strerror or error}", file=path) from error
    return [given for _, _, given in sorted(read, key=lambda entry: entry[:2], reverse=True)]


def asked_ranks(commands: Iterable[Given]) -> Optional[tuple[int, ...]]:
    """The target ranks that any of these runs was asked for, ascending; None for all."""
    asked = [given.rank_numbers for given in commands]
    return None if None in asked else tuple(sorted({rank for numbers in asked for rank in numbers or ()}))


_AGAIN = "give the command that began the conversion again"


def _read(path: str) -> Given:
    try:
        said = parse_json(read_small(path, _LARGEST, through_links=False))
        if isinstance(said, dict) and said.get("version") not in (None, VERSION):
            raise TargetError(
                f"{path}: is of version {str(said['version'])[:_SHOWN]}, which is not known here",
                file=path,
                hint="use the version of reshard that wrote it, or a newer one",
            )
        return _parsed(said)
    except ValueError as error:
        raise TargetError(f"{path}: is damaged: {error}", file=path, hint=_AGAIN) from error


def _parsed(said: Any) -> Given:
    """What a record says.

    Raises:
        ValueError: it says anything that no run writes.
    """
    names = [field.name for field in dataclasses.fields(Given)]
    if not isinstance(said, dict) or said.keys() != {"version", *names}:
        raise ValueError("not the keys of a command")
    for name in names:
        value = said[name]
        if name in _FLAGS:
            fits = isinstance(value, bool)
        elif name in _CHOICES:
            fits = value in _CHOICES[name]
        elif name == "to":
            fits = any(value == form.name for form in FORMS)
        elif name in _NUMBERS:
            fits = value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63)
        elif name in _PATTERNS:
            fits = isinstance(value, list) and all(_is_text(item) for item in value)
        else:
            fits = _is_text(value) or (name in _OPTIONAL_TEXTS and value is None)
        if not fits:
            raise ValueError(f"{name} is {value!r}"[:200])
    for name in ("src", "source_strategy", "target_strategy"):
        if name != "src":
            _check_shards(said[name])
        if not is_absolute(said[name]) and (name == "src" or names_files(said[name])):
            raise ValueError(f"{name} is no absolute path")
    if said["ranks"] is not None:
        _numbers(said["ranks"])
    if said["step"] is not None and not re.fullmatch("[0-9]{1,18}", said["step"]):
        try:
            Step.parse(said["step"])
        except UsageError as error:
            raise ValueError(error.message[:200]) from error
    if said["lost_only"] and said["task"] != "recover":
        raise ValueError("lost_only goes with recover")
    del said["version"]
    return Given(**{**said, **{name: tuple(said[name]) for name in _PATTERNS}})


def _check_shards(path: str) -> None:
    try:
        shards_of(path)
    except UsageError as error:
        raise ValueError(error.message[:200]) from error


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _numbers(text: str) -> tuple[int, ...]:
    """Ranks as `number_ranges` writes them."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last >= MOST_DEVICES or (found and first <= found[-1]):
            raise ValueError(f"ranks are {text!r}"[:200])
        found.extend(range(first, last + 1))
    if number_ranges(found) != text:
        raise ValueError(f"ranks are {text!r}"[:200])
    return tuple(found)
