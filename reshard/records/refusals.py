"""Errors about a target directory: files in the way, differences from the request, and the command to type."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Sequence
from typing import Optional

from reshard.errors import ReplaceableError, ReshardError, TargetError
from reshard.forms.ranks import FileNames
from reshard.records.commands import EDITS, RecordedCommand
from reshard.records.identity import Identity
from reshard.text.wording import number_ranges, rank_ranges, some_names

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


class Refusals:
    """Errors about a target directory, for one command; every command in their hints works when typed.

    Args:
        root: the directory.
        mine: the requested conversion.
        all_files: the command requests the whole target; otherwise several commands fill the directory.
        adding: other ranks of the same conversion may stay next to replaced ones.
        comparable: `reshard verify` can compare the targets with the source.
        unit: of the numbers of source files, ``rank`` or ``file``.
    """

    def __init__(
        self, root: str, mine: Identity, *, all_files: bool, adding: bool, comparable: bool, unit: str
    ) -> None:
        self._unit = unit
        self._root = root
        self._mine = mine
        self._whole = all_files
        self._adding = adding
        self._comparable = comparable

    def source_files(self, numbers: Iterable[int]) -> str:
        """``source files of ranks 0,2``, or ``source files 0,2`` of a form without ranks."""
        files = rank_ranges(numbers, self._unit)
        return f"source files of {files}" if self._unit == "rank" else f"source {files}"

    @property
    def replace_all(self) -> str:
        """The options that replace everything in the directory."""
        if self._whole:
            return "--overwrite"
        by_rank = self._adding and self._mine.task == "convert"
        return "convert --overwrite" if by_rank else "--overwrite for all ranks"

    def another_conversion(
        self,
        identities: Sequence[Identity],
        commands: Sequence[Sequence[RecordedCommand]],
        command: Optional[RecordedCommand],
        in_the_way: Sequence[str],
    ) -> ReplaceableError:
        """Other conversions have begun in the directory.

        Args:
            identities: the other conversions, at least one.
            commands: the recorded commands of each of them, the last first.
            command: that of this run, if it can be recorded.
            in_the_way: files that a replacement of everything would not replace, because no record matches them.
        """
        theirs, recorded = min(
            zip(identities, commands), key=lambda candidate: len(differing(self._mine, candidate[0]))
        )
        differs = differing(self._mine, theirs)
        options = _differing_options(command, recorded[0]) if command is not None and recorded else {}
        if any(options.values()):
            # A digest of files also differs as a consequence of other options.
            differs = [field for field in differs if options.get(field, [field])]
        merged_here, merged_there = _is_merged(self._mine, [command]), _is_merged(theirs, recorded)
        if merged_here or merged_there:
            where = "" if merged_here and merged_there else " (none here)" if merged_there else " (none there)"
            options["edits"] = [f"the adapter{where}" if where else "the adapter or its --alpha"]
        differences = ", ".join(
            f"{_FIELD_WORDS[field]}{_values(self._mine, theirs, field)}"
            if not options.get(field)
            else ", ".join(options[field])
            for field in differs
        )
        typed = _to_go_on(self._mine, theirs, differs)
        elsewhere = "choose another DST" if self._whole else "choose another DST for all ranks"
        replace = f"replace all of it with {self.replace_all}"
        if in_the_way:
            replace = f"remove {some_names(in_the_way, 3)}, which match no record, and {replace}"
        if typed is None:
            hint = f"repeat the earlier command, {elsewhere}, or {replace}"
            if recorded:
                # The recorded source may be in a store that does not answer now.
                with contextlib.suppress(ReshardError):
                    hint += f"\nthe earlier command: {shlex.join(['reshard', *recorded[0].words(self._root)])}"
            elif merged_there:
                hint += "\nthe earlier command was reshard merge-lora"
        elif differs == ["step"] and not self._whole:
            # In another directory the other ranks would be missing, or of another step than these.
            hint = f"convert every rank with --step {theirs.step}, since a checkpoint has one step; or {replace}"
        else:
            hint = f"to continue it, {typed}; or {elsewhere}, or {replace}"
        return ReplaceableError(
            f"{self._root} holds another conversion, which differs in {differences or 'records that are not ours'}",
            file=self._root,
            hint=hint,
        )

    def foreign(self, names: set[str], recorded: set[str]) -> TargetError:
        """Checkpoints of another conversion would remain next to the new ones; ``recorded`` ones match its records."""
        error_class = TargetError
        hint = "choose another DST, or remove them; otherwise loaders read them as ranks of the new checkpoint"
        if names <= recorded:
            error_class = ReplaceableError
            hint = f"choose another DST, or replace all of it with {self.replace_all}"
        return error_class(
            f"{self._root} holds checkpoints of another conversion: {some_names(sorted(names), 3)}",
            file=os.path.join(self._root, min(names)),
            hint=hint,
        )

    def another_form(self, forms: Sequence[str]) -> TargetError:
        """Checkpoints of other forms would remain next to the new one."""
        return TargetError(
            f"{self._root} holds a checkpoint of the form {' and '.join(forms)}, which loaders may read instead of the "
            "new one",
            file=self._root,
            hint="choose another DST, or remove it",
        )

    def existing(self, ranks: Sequence[int], *, recorded: bool, continuing: bool) -> ReplaceableError:
        """Targets of some ranks exist, modified after they were recorded, or without a record."""
        they_were, them = ("they were", "them") if len(ranks) > 1 else ("it was", "it")
        why = f", modified after {they_were} written" if recorded else ""
        replace = f"replace {them} with --overwrite"
        if continuing and not self._adding:
            replace = f"replace all ranks with {self.replace_all}"
        compare = ""
        if recorded and self._comparable:
            verify = shlex.join(["reshard", "verify", self._root, "--src"])
            compare = f"; if only times differ, as after cp -r, this compares the contents: {verify} SRC"
        return ReplaceableError(
            f"{self._root} already holds {some_names([self._mine.file_of(rank) for rank in ranks], 3)}{why}",
            file=os.path.join(self._root, self._mine.file_of(ranks[0])),
            rank=ranks[0],
            hint=f"choose another DST, remove {them} and run the same command again, or {replace}{compare}",
        )

    def beside(self, names: Sequence[str]) -> ReplaceableError:
        """Targets of other ranks would remain next to the replaced ones."""
        single = "remove single files and run the command without --overwrite"
        if self._mine.task == "convert":
            single = "replace single ones with by-rank --overwrite"
        return ReplaceableError(
            f"{self._root} would keep {some_names(names, 3)} next to the targets that --overwrite replaces",
            file=os.path.join(self._root, names[0]),
            hint=f"replace all ranks with {self.replace_all}, or {single}",
        )

    def live_source(self, ranks: Sequence[int]) -> ReplaceableError:
        """Another run is writing from source files that were modified in the meantime."""
        return ReplaceableError(
            f"another run is writing to {self._root} from {self.source_files(ranks)} that were modified in the "
            "meantime",
            file=self._root,
            rank=min(ranks),
            hint=f"wait until it ends, or stop it; then convert everything with {self.replace_all}",
        )

    def other_source(self, ranks: Sequence[int], how: str = "sizes, headers or contents differ") -> ReplaceableError:
        """The existing targets were made from other source files."""
        return ReplaceableError(
            f"the {self.source_files(ranks)} differ from those of the conversion in {self._root}: {how}",
            file=self._root,
            rank=min(ranks),
            hint=f"choose another DST, convert everything again with {self.replace_all}, or, if targets of both may "
            "be mixed, continue with --accept-changed-source",
        )


def differing(mine: Identity, theirs: Identity) -> list[str]:
    """Attributes in which two conversions differ; names that contain the step differ with it."""
    fields = [field for field in _FIELD_WORDS if getattr(mine, field) != getattr(theirs, field)]
    if "division" in fields and "names" in fields and mine.names.template == theirs.names.template:
        # Files of full weights are numbered: another number of files changes all names.
        fields.remove("names")
    if "step" in fields and "names" in fields and mine.names.prefix is None and theirs.names.prefix is None:
        fields.remove("names")
    return fields


def _is_merged(identity: Identity, commands: Sequence[Optional[RecordedCommand]]) -> bool:
    """Whether merge-lora makes a conversion: it changes weights, and no command is recorded for it."""
    return bool(identity.edits) and not any(commands)


def _values(mine: Identity, theirs: Identity, field: str) -> str:
    if field.endswith("_strategy") or field in ("division", "edits"):
        # A digest is of no use to a reader.
        return ""
    return f" ({_shown(getattr(theirs, field))} there, {_shown(getattr(mine, field))} here)"


# Options behind the digests in an identity, by attribute of `RecordedCommand`.
_OPTIONS = {
    "division": ("max_shard_size",),
    "edits": EDITS,
}


def _differing_options(mine: RecordedCommand, theirs: RecordedCommand) -> dict[str, list[str]]:
    """By attribute the options that differ between two commands, with their values."""
    return {
        field: [
            f"--{name.replace('_', '-')} ({_shown(getattr(theirs, name))} there, {_shown(getattr(mine, name))} here)"
            for name in names
            if getattr(theirs, name) != getattr(mine, name)
        ]
        for field, names in _OPTIONS.items()
    }


def _shown(value: object) -> str:
    if isinstance(value, FileNames):
        value = value.template if value.prefix is None else f"--prefix {shlex.quote(value.prefix)}"
    if isinstance(value, bool):
        return "given" if value else "not given"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
    return (text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...") or "none"


def _to_go_on(mine: Identity, theirs: Identity, differs: Sequence[str]) -> Optional[str]:
    """Options to change so that ``mine`` becomes ``theirs``; None if no options do that."""
    give: list[str] = []
    leave_out: list[str] = []
    for field in differs:
        if field == "step" and theirs.step is not None:
            give.append(f"--step {theirs.step}")
        elif field in ("include", "exclude"):
            needed, typed = getattr(theirs, field), getattr(mine, field)
            give += [f"--{field} {shlex.quote(pattern)}" for pattern in needed]
            leave_out += [f"--{field} {shlex.quote(pattern)}" for pattern in typed if pattern not in needed]
        elif field == "without_ranks":
            give += [f"--without-ranks {number_ranges(theirs.without_ranks)}"] if theirs.without_ranks else []
            leave_out += [] if theirs.without_ranks else ["--without-ranks"]
        elif field == "format" and theirs.task == "convert":
            give.append(f"--format {theirs.format}")
        elif field == "names" and theirs.names.prefix is not None:
            give.append(f"--prefix {shlex.quote(theirs.names.prefix)}")
        elif field == "names" and mine.names.prefix is not None and theirs.task == "recover":
            leave_out.append("--prefix")
        else:
            return None
    advice = [f"give {' '.join(give)}"] if give else []
    advice += [f"leave out {' '.join(leave_out)}"] if leave_out else []
    return " and ".join(advice) or None
