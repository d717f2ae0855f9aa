"""What the runs that fill a target directory were given, so that another can go on without being told again.

``command.<digest>.json``, next to the other records of a conversion, holds one command: absolute paths,
and the options that determine what is written and how it is checked. It holds no limits of resources
and no secrets. Each distinct command has one file; the last one begun has the latest time.
The identity still decides which runs are the same conversion: these records only save
typing, and their values are checked against it like typed ones.
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
from reshard.defaults import MAX_DEVICES
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
"""The names of command records."""

# Enough for paths and patterns of some hundred bytes each.
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
    """A command.

    Attributes:
        task: ``convert`` or ``recover``.
        src: the source, absolute; may hold ``{rank}``.
        source_strategy: absolute path, or ``none``.
        target_strategy: likewise; that of the source when recovering.
        step: the chosen step; None if file names contain none.
        file_suffix: only source files whose stem ends so.
        include: patterns of written parameters.
        exclude: patterns of skipped parameters.
        prefix: prefix of the target files' names; None for names as in the source.
        format: of the target files, as chosen.
        strict: missing parameters are errors.
        crc: ``auto`` or ``never``.
        check_replicas: ``auto``, ``all`` or ``never``.
        checksum: ``none`` or ``crc32``.
        verify: the result is compared with the source at the end.
        ranks: the requested target ranks, such as ``0-7,12``; None for all, or for one of several processes.
        lost_only: when recovering, only ranks that are lost or damaged.
        to: the target form.
        max_shard_size: bytes of tensors in a file of full weights; None for the default.
        names: the table of names, a built-in one's name or an absolute path.
        rename: additional renamings.
        config: absolute path of the file with the model's sizes.
        reverse: the table is applied from right to left.
        optimizer: the table applies to optimizer state, too.
        cast: requested types.
        dequantize: the type of what was quantised.
        host: the host where it was typed.
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
        """The typed paths, without duplicates."""
        strategies = filter(names_files, (self.source_strategy, self.target_strategy))
        return tuple(dict.fromkeys((self.src, *strategies)))

    @property
    def rank_numbers(self) -> Optional[tuple[int, ...]]:
        """The requested target ranks, ascending; None for all."""
        return None if self.ranks is None else _numbers(self.ranks)

    def write(self, directory: str) -> None:
        """Write the record, and make it the latest.

        Raises:
            OSError: it cannot be written.
        """
        said = dataclasses.asdict(self)
        # The host is excluded: the same command from two hosts is one command.
        host = said.pop("host")
        digest = short_digest(json.dumps(said, sort_keys=True).encode())
        path = os.path.join(directory, f"command.{digest}.json")
        content = (json.dumps({"version": VERSION, **said, "host": host}) + "\n").encode()
        if not store_of(path).touch(path):
            write_whole(path, content)


def given_in(directory: str) -> list[Given]:
    """The recorded commands in a directory, the latest first.

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
    """The target ranks that any of these commands requested, ascending; None for all."""
    asked = [given.rank_numbers for given in commands]
    return None if None in asked else tuple(sorted({rank for numbers in asked for rank in numbers or ()}))


_AGAIN = "run the command that began the conversion again"


def _read(path: str) -> Given:
    try:
        said = parse_json(read_small(path, _LARGEST, through_links=False))
        if isinstance(said, dict) and said.get("version") not in (None, VERSION):
            raise TargetError(
                f"{path}: version {str(said['version'])[:_SHOWN]} is not supported by this version of reshard",
                file=path,
                hint="use the version of reshard that wrote it, or a newer one",
            )
        return _parsed(said)
    except ValueError as error:
        raise TargetError(f"{path}: is damaged: {error}", file=path, hint=_AGAIN) from error


def _parsed(said: Any) -> Given:
    """The command in a record.

    Raises:
        ValueError: the record differs from any that a run writes.
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
            raise ValueError(f"{name} is not an absolute path")
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
        if last < first or last >= MAX_DEVICES or (found and first <= found[-1]):
            raise ValueError(f"ranks are {text!r}"[:200])
        found.extend(range(first, last + 1))
    if number_ranges(found) != text:
        raise ValueError(f"ranks are {text!r}"[:200])
    return tuple(found)
