"""Errors about a target directory: files in the way, differences from the request, and the command to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence

from reshard.errors import ReplaceableError, TargetError
from reshard.forms.registry import counted_as
from reshard.records.record import Record, differences
from reshard.text.messages import rank_ranges, some_names


def source_files(numbers: Iterable[int], unit: str) -> str:
    """``source files of ranks 0,2``, or ``source files 0,2`` of a form without ranks."""
    files = rank_ranges(numbers, unit)
    return f"source files of {files}" if unit == "rank" else f"source {files}"


def replacing(mine: Record, whole: bool) -> str:
    """The options that replace everything in a directory.

    Args:
        mine: the requested conversion.
        whole: the command requests the whole target; otherwise several commands fill the directory.
    """
    return "--overwrite" if whole else f"{mine.command} --overwrite, for all {counted_as(mine.form)}s"


def another_conversion(root: str, mine: Record, theirs: Record, whole: bool) -> ReplaceableError:
    """Another conversion has begun in the directory."""
    hint = f"choose another DST, or replace all of it with {replacing(mine, whole)}"
    words = theirs.words(root)
    # The same command is refused again: the strategy's file, or the ranks that --lost-only finds, are others now.
    if theirs.is_repeatable and words != mine.words(root):
        hint += f"\nthe earlier command: {shlex.join(['reshard', *words])}"
    differing = ", ".join(differences(mine, theirs))
    return ReplaceableError(f"{root} holds another conversion, which differs in {differing}", file=root, hint=hint)


def foreign(root: str, names: Collection[str]) -> TargetError:
    """Checkpoints without a record, or modified since, would remain next to the new ones."""
    return TargetError(
        f"{root} holds checkpoints that no record of reshard matches: {some_names(sorted(names), 3)}",
        file=os.path.join(root, min(names)),
        hint="they may be the source of another conversion, and exist nowhere else: choose another DST; remove them "
        "only if they are not needed: loaders would read them as part of the new checkpoint",
    )


def another_form(root: str, forms: Sequence[str]) -> TargetError:
    """Checkpoints of other forms would remain next to the new one."""
    return TargetError(
        f"{root} holds a checkpoint of the form {' and '.join(forms)}, which loaders may read instead of the new one",
        file=root,
        hint="choose another DST, or remove it",
    )


def existing(root: str, mine: Record, ranks: Sequence[int], *, modified: bool, comparable: bool) -> ReplaceableError:
    """Targets of some ranks exist, modified after they were recorded, or without a record.

    Args:
        comparable: `reshard verify` can compare the targets with the source.
    """
    they_were, them = ("they were", "them") if len(ranks) > 1 else ("it was", "it")
    why = f", modified after {they_were} written" if modified else ""
    compare = ""
    if modified and comparable:
        verify = shlex.join(["reshard", "verify", root, "--src"])
        compare = f"; if only times differ, as after cp -r, this compares the contents: {verify} SRC"
    return ReplaceableError(
        f"{root} already holds {some_names([mine.file_of(rank) for rank in ranks], 3)}{why}",
        file=os.path.join(root, mine.file_of(ranks[0])),
        rank=ranks[0],
        hint=f"choose another DST, or replace {them} with --overwrite{compare}",
    )


def other_source(root: str, files: str, rank: int, how: str, replace: str) -> ReplaceableError:
    """The existing targets were made from other source files.

    Args:
        files: `source_files`, the first of ``rank``.
        how: what differs.
        replace: the options that replace everything, from `replacing`.
    """
    verb = "differs" if files.startswith("source file ") else "differ"
    return ReplaceableError(
        f"the {files} {verb} from those of the conversion in {root}: {how} differ",
        file=root,
        rank=rank,
        hint=f"choose another DST, or convert everything again with {replace}",
    )


def damaged_sources(root: str, files: str, rank: int, replace: str) -> ReplaceableError:
    """Existing targets may be made from source files that are damaged.

    Args:
        files: `source_files`, the first of ``rank``.
        replace: the options that replace everything, from `replacing`.
    """
    return ReplaceableError(
        f"{root} holds targets for which {files} may have been read, damaged by the recorded CRC",
        file=root,
        rank=rank,
        hint=f"choose another DST, or convert everything again with {replace}",
    )
