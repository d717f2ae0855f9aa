"""Errors about a target directory: files in the way, differences from the request, and the command to type."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Iterable, Sequence

from reshard.asked import CHANGES
from reshard.errors import ReplaceableError, ReshardError, TargetError
from reshard.forms.ranks.naming import FileNames
from reshard.forms.registry import counted_as
from reshard.records.commands import RecordedCommand
from reshard.records.identity import Identity
from reshard.records.ledger import Ledger
from reshard.text.messages import rank_ranges, some_names

_MAX_SHOWN = 200
_FIELD_WORDS = {
    "source_strategy": "the source strategy",
    "target_strategy": "the target strategy",
    "step": "the step",
    "include": "--include",
    "exclude": "--exclude",
    "format": "the format",
    "names": "the names of the files",
    "task": "the task",
    "form": "the form (--to)",
    "division": "the division into files (--max-shard-size)",
    "without_ranks": "--without-ranks",
    "edits": "names or types (--names, --config, --rename, --cast, --dequantize)",
}
# The fields behind the digests in an identity, and their group.
_FIELDS = {"division": ("target", ("max_shard_size",)), "edits": ("edits", CHANGES)}


class Refusals:
    """Errors about a target directory, for one command.

    Args:
        root: the directory.
        mine: the requested conversion.
        all_files: the command requests the whole target; otherwise several commands fill the directory.
        unit: of the numbers of source files, ``rank`` or ``file``.
        comparable: `reshard verify` can compare the targets with the source.
    """

    def __init__(self, root: str, mine: Identity, all_files: bool, unit: str, comparable: bool) -> None:
        self._unit = unit
        self._comparable = comparable
        self._root = root
        self._mine = mine
        self._whole = all_files

    def source_files(self, numbers: Iterable[int]) -> str:
        """``source files of ranks 0,2``, or ``source files 0,2`` of a form without ranks."""
        files = rank_ranges(numbers, self._unit)
        return f"source files of {files}" if self._unit == "rank" else f"source {files}"

    @property
    def replace_all(self) -> str:
        """The options that replace everything in the directory."""
        return (
            "--overwrite" if self._whole else f"{self._mine.task} --overwrite, for all {counted_as(self._mine.form)}s"
        )

    def another_conversion(self, theirs: Ledger, command: RecordedCommand | None) -> ReplaceableError:
        """Another conversion has begun in the directory.

        Args:
            theirs: its records.
            command: that of this run, if it can be recorded.
        """
        hint = f"choose another DST, or replace all of it with {self.replace_all}"
        recorded: list[RecordedCommand] = []
        # Damaged records are reported by commands that need them, and the recorded source may be out of reach.
        with contextlib.suppress(ReshardError):
            recorded = theirs.commands()
            if recorded:
                hint += f"\nthe earlier command: {shlex.join(['reshard', *recorded[0].words(self._root)])}"
        differences = [
            words
            for field in differing(self._mine, theirs.identity)
            for words in _differences(self._mine, theirs.identity, field, command, recorded)
        ]
        return ReplaceableError(
            f"{self._root} holds another conversion, which differs in "
            + (", ".join(differences) or "the model's other files"),
            file=self._root,
            hint=hint,
        )

    def foreign(self, names: Collection[str]) -> TargetError:
        """Checkpoints without a record, or modified since, would remain next to the new ones."""
        return TargetError(
            f"{self._root} holds checkpoints that no record of reshard matches: {some_names(sorted(names), 3)}",
            file=os.path.join(self._root, min(names)),
            hint="choose another DST, or remove them; otherwise loaders read them as part of the new checkpoint",
        )

    def another_form(self, forms: Sequence[str]) -> TargetError:
        """Checkpoints of other forms would remain next to the new one."""
        return TargetError(
            f"{self._root} holds a checkpoint of the form {' and '.join(forms)}, which loaders may read instead of the "
            "new one",
            file=self._root,
            hint="choose another DST, or remove it",
        )

    def existing(self, ranks: Sequence[int], *, modified: bool) -> ReplaceableError:
        """Targets of some ranks exist, modified after they were recorded, or without a record."""
        they_were, them = ("they were", "them") if len(ranks) > 1 else ("it was", "it")
        why = f", modified after {they_were} written" if modified else ""
        compare = ""
        if modified and self._comparable:
            verify = shlex.join(["reshard", "verify", self._root, "--src"])
            compare = f"; if only times differ, as after cp -r, this compares the contents: {verify} SRC"
        return ReplaceableError(
            f"{self._root} already holds {some_names([self._mine.file_of(rank) for rank in ranks], 3)}{why}",
            file=os.path.join(self._root, self._mine.file_of(ranks[0])),
            rank=ranks[0],
            hint=f"choose another DST, or replace {them} with --overwrite{compare}",
        )

    def other_source(self, ranks: Sequence[int], how: str) -> ReplaceableError:
        """The existing targets were made from other source files."""
        return ReplaceableError(
            f"the {self.source_files(ranks)} differ from those of the conversion in {self._root}: {how} differ",
            file=self._root,
            rank=min(ranks),
            hint=f"choose another DST, or convert everything again with {self.replace_all}",
        )


def differing(mine: Identity, theirs: Identity) -> list[str]:
    """Attributes in which two conversions differ; names that contain the step differ with it."""
    fields = [field for field in _FIELD_WORDS if getattr(mine, field) != getattr(theirs, field)]
    if "division" in fields and "names" in fields and mine.names.template == theirs.names.template:
        # Files of full weights are numbered: another number of files changes all names.
        fields.remove("names")
    if "step" in fields and "names" in fields and mine.names.prefix is None and theirs.names.prefix is None:
        fields.remove("names")
    return fields or ["ranks"]


def _differences(
    mine: Identity,
    theirs: Identity,
    field: str,
    command: RecordedCommand | None,
    recorded: Sequence[RecordedCommand],
) -> list[str]:
    """An attribute, or the options behind its digest, with both values."""
    if field == "edits" and (command is None or not recorded):
        # merge-lora records no command.
        return ["the adapter, names or types"]
    if command is not None and recorded and field in _FIELDS:
        group, names = _FIELDS[field]
        recorded_group, asked_group = getattr(recorded[0].asked, group), getattr(command.asked, group)
        # A digest also differs as a consequence of other options.
        different = [name for name in names if getattr(recorded_group, name) != getattr(asked_group, name)]
        return [f"--{name.replace('_', '-')}{_both(recorded_group, asked_group, name)}" for name in different]
    # A digest is of no use to a reader.
    digest = field.endswith("_strategy") or field in _FIELDS
    return [_FIELD_WORDS.get(field, field) + ("" if digest else _both(theirs, mine, field))]


def _both(theirs: object, mine: object, name: str) -> str:
    return f" ({_shown(getattr(theirs, name))} there, {_shown(getattr(mine, name))} here)"


def _shown(value: object) -> str:
    if isinstance(value, FileNames):
        value = value.template if value.prefix is None else f"--prefix {shlex.quote(value.prefix)}"
    if isinstance(value, bool):
        return "given" if value else "not given"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
    return (text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...") or "none"
