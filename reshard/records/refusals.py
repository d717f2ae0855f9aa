"""Errors about a target directory: files in the way, differences from the request, and the command to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence

from reshard.errors import ReplaceableError, TargetError
from reshard.forms.registry import counted_as
from reshard.records.record import Record, differences
from reshard.text.messages import rank_ranges, some_names


class Refusals:
    """Errors about a target directory, for one command.

    Args:
        root: the directory.
        mine: the requested conversion.
        all_files: the command requests the whole target; otherwise several commands fill the directory.
        unit: of the numbers of source files, ``rank`` or ``file``.
        comparable: `reshard verify` can compare the targets with the source.
    """

    def __init__(self, root: str, mine: Record, all_files: bool, unit: str, comparable: bool) -> None:
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
        command = f"{self._mine.command} --overwrite, for all {counted_as(self._mine.form)}s"
        return "--overwrite" if self._whole else command

    def another_conversion(self, theirs: Record) -> ReplaceableError:
        """Another conversion has begun in the directory."""
        hint = f"choose another DST, or replace all of it with {self.replace_all}"
        if theirs.is_repeatable:
            hint += f"\nthe earlier command: {shlex.join(['reshard', *theirs.words(self._root)])}"
        differing = ", ".join(differences(self._mine, theirs))
        return ReplaceableError(
            f"{self._root} holds another conversion, which differs in {differing}", file=self._root, hint=hint
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
