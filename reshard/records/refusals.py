"""Errors for a directory that another conversion was begun in: what differs, and what to type."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Optional

from reshard.checkpoints import FileNames
from reshard.errors import TargetError
from reshard.records.identity import Identity
from reshard.wording import some_names

_MOST_SHOWN = 200
_SAID = {
    "source_strategy": "the source strategy",
    "target_strategy": "the target strategy",
    "step": "the step",
    "include": "--include",
    "exclude": "--exclude",
    "format": "the format",
    "names": "the names of the files",
    "task": "what is done",
}


def another_conversion(
    destination: str,
    mine: Identity,
    others: Sequence[Identity],
    *,
    whole: bool,
    replace_all: str,
    in_the_way: Sequence[str],
) -> TargetError:
    """The error for a directory that other conversions were begun in.

    Args:
        destination: the directory.
        mine: what was asked for.
        others: what is there, at least one.
        whole: all that the directory is to hold is asked for; else it is filled by several commands.
        replace_all: what to type so that everything is replaced.
        in_the_way: files that are not replaced then, because nothing records them as they are.
    """
    theirs = min(others, key=lambda other: len(differing(mine, other)))
    differs = differing(mine, theirs)
    said = ", ".join(f"{_SAID[field]}{_values(mine, theirs, field)}" for field in differs)
    typed = _to_go_on(mine, theirs, differs)
    elsewhere = "choose another DST" if whole else "choose another DST for all ranks"
    replace = f"replace all of it with {replace_all}"
    if in_the_way:
        replace = f"remove {some_names(in_the_way, 3)}, which no record knows as it is, and {replace}"
    if typed is None:
        hint = f"give the command that was given before, {elsewhere}, or {replace}"
    elif differs == ["step"] and not whole:
        # In another directory the other ranks would stay behind, or be of another step than these.
        hint = f"give every rank --step {theirs.step}, since a checkpoint is of one step; or {replace}"
    else:
        hint = f"to go on with it, {typed}; or {elsewhere}, or {replace}"
    return TargetError(
        f"{destination} holds another conversion, which differs in {said or 'records that are not ours'}",
        file=destination,
        hint=hint,
    )


def differing(mine: Identity, theirs: Identity) -> list[str]:
    """In which attributes two conversions differ; names that hold the step differ with it."""
    found = [field for field in _SAID if getattr(mine, field) != getattr(theirs, field)]
    if "step" in found and "names" in found and mine.names.prefix is None and theirs.names.prefix is None:
        found.remove("names")
    return found


def _values(mine: Identity, theirs: Identity, field: str) -> str:
    if field.endswith("_strategy"):
        return ""
    return f" ({_shown(getattr(theirs, field))} there, {_shown(getattr(mine, field))} here)"


def _shown(value: object) -> str:
    if isinstance(value, FileNames):
        value = value.template if value.prefix is None else f"--prefix {shlex.quote(value.prefix)}"
    said = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
    return (said if len(said) <= _MOST_SHOWN else f"{said[:_MOST_SHOWN]}...") or "none"


def _to_go_on(mine: Identity, theirs: Identity, differs: Sequence[str]) -> Optional[str]:
    """What has to be typed otherwise so that ``mine`` becomes ``theirs``; None where nothing that is known does it."""
    give: list[str] = []
    leave_out: list[str] = []
    for field in differs:
        if field == "step" and theirs.step is not None:
            give.append(f"--step {theirs.step}")
        elif field in ("include", "exclude"):
            wanted, typed = getattr(theirs, field), getattr(mine, field)
            give += [f"--{field} {shlex.quote(pattern)}" for pattern in wanted]
            leave_out += [f"--{field} {shlex.quote(pattern)}" for pattern in typed if pattern not in wanted]
        elif field == "format" and theirs.task == "convert":
            give.append(f"--format {theirs.format}")
        elif field == "names" and theirs.names.prefix is not None:
            give.append(f"--prefix {shlex.quote(theirs.names.prefix)}")
        elif field == "names" and mine.names.prefix is not None and theirs.task == "recover":
            leave_out.append("--prefix")
        else:
            return None
    said = [f"give {' '.join(give)}"] if give else []
    said += [f"leave out {' '.join(leave_out)}"] if leave_out else []
    return " and ".join(said) or None
