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
from typing import NamedTuple

from reshard.asked import Conversion
from reshard.errors import TargetError, UsageError
from reshard.records.identity import short_digest
from reshard.storage import is_absolute, names_in, read_json, reading, status_at, write_whole
from reshard.storage.json_text import Fields, JsonError
from reshard.strategies import names_files
from reshard.text.messages import quoted

VERSION = 2

# Enough for paths and patterns of some hundred bytes each.
_MAX_BYTES = 1 << 20
_MAX_RECORDS = 10_000
_SHOWN = 40
_MAX_MESSAGE = 200


class RecordedCommand(NamedTuple):
    """A command.

    Attributes:
        asked: the conversion with absolute paths and the chosen step and format, but without the target's path; its
            files are None for one of several processes.
        host: the host where it was typed.
        task: ``convert`` or ``recover``.
        verify: the result was to be verified.
        lost_only: only lost ranks were to be recovered.
        packing: the table of names, its options and sizes, as ``KEY=VALUE``; of the source, if no table was requested.
    """

    asked: Conversion
    host: str
    task: str = "convert"
    verify: bool = False
    lost_only: bool = False
    packing: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the source and of strategies, without duplicates."""
        strategies = (self.asked.source.strategy, self.asked.target.strategy)
        return tuple(dict.fromkeys((self.asked.source.path, *(s for s in strategies if s and names_files(s)))))

    def words(self, dst: str) -> list[str]:
        """The command, with paths as they are recorded."""
        asked, recovery = self.asked, self.task == "recover"
        target = os.path.join(os.curdir, dst) if dst.startswith("-") else dst
        words = [word for group in asked.groups for word in group.words()]
        if recovery:
            words = [re.sub("^--src-strategy=", "--strategy=", word) for word in words]
            if asked.target.prefix is not None and not any(word.startswith("--prefix=") for word in words):
                words.append(f"--prefix={asked.target.prefix}")
        flags = [flag for flag, given in (("--verify", self.verify), ("--lost-only", self.lost_only)) if given]
        return [self.task, asked.source.path, target, *words, *flags]

    def write(self, directory: str) -> None:
        """Write the record, and make it the latest.

        Raises:
            OSError: it cannot be written.
        """
        content = {"version": VERSION, **self._asdict(), "asked": self.asked.to_json()}
        # The host is excluded: the same command from two hosts is one command.
        host = content.pop("host")
        digest = short_digest(json.dumps(content, sort_keys=True).encode())
        path = os.path.join(directory, f"command.{digest}.json")
        write_whole(path, (json.dumps({**content, "host": host}) + "\n").encode())


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
        raise TargetError(f"{directory}: holds {len(names)} records of commands", file=directory, hint=_HINT)
    commands: list[tuple[int, str, RecordedCommand]] = []
    for path in [os.path.join(directory, name) for name in names]:
        status, command = status_at(path), _read(path)
        # Another run may have removed it since the listing.
        if status is not None and command is not None:
            commands.append((status.modified, path, command))
    return [command for _, _, command in sorted(commands, key=lambda entry: entry[:2], reverse=True)]


def requested_ranks(commands: Iterable[RecordedCommand]) -> tuple[int, ...] | None:
    """The target ranks that any of these commands requested, ascending; None for all."""
    ranks = [command.asked.files for command in commands]
    return None if None in ranks else tuple(sorted({rank for numbers in ranks for rank in numbers or ()}))


_HINT = "run the command that began the conversion again"


def _read(path: str) -> RecordedCommand | None:
    content = read_json(path, _MAX_BYTES, TargetError, _HINT, through_links=False, file_names=True)
    if content is None:
        return None
    version = content.pop("version", None)
    if version != VERSION:
        raise TargetError(
            f"{path}: version {str(version)[:_SHOWN]} is not supported by this version of reshard",
            file=path,
            hint="use the version of reshard that wrote it, or a newer one",
        )
    with reading(path, TargetError, _HINT):
        try:
            return _parsed(Fields(content, "the record"))
        except UsageError as error:
            raise JsonError(error.message[:_MAX_MESSAGE]) from error


def _parsed(fields: Fields) -> RecordedCommand:
    """The command in a record.

    Raises:
        JsonError, UsageError: no run writes such a record.
    """
    unknown = set(fields).difference(RecordedCommand._fields)
    if unknown:
        raise JsonError(f"{quoted(min(unknown))} is unknown")
    task, packing = fields.text("task"), fields.texts("packing")
    asked = Conversion.from_json(dict(fields.fields("asked").items()))
    command = RecordedCommand(
        asked, fields.text("host"), task, fields.flag("verify"), fields.flag("lost_only"), packing
    )
    if task not in ("convert", "recover") or (command.lost_only and task != "recover"):
        raise JsonError(f"task is {quoted(task)}")
    if not all("=" in text for text in packing) or (packing and not packing[0].startswith("table=")):
        raise JsonError(f"packing is {packing!r}")
    for path in command.paths:
        if not is_absolute(path):
            raise JsonError(f"{quoted(path)} is not an absolute path")
    return command
