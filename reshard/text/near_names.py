"""What somebody may have meant by a name that does not exist: names and paths that are spelled nearly so."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Optional

# To compare a longer one with thousands of others, or one with more others, would take seconds.
_LONGEST = 1000
_MOST = 5000
_MOST_TOLD = 3
# Shorter, it begins too much.
_LEAST = 3
# Marks of {rank} and of wildcards: what they stand for is no name that could be mistyped.
_WILD = frozenset("*?[{")


def near_names(typed: str, names: Iterable[str]) -> list[str]:
    """Those of the names that are spelled nearly like one, whatever their capitals: a few, the nearest first."""
    # Loaded only here: needed only where something is wrong.
    from difflib import get_close_matches

    if len(typed) > _LONGEST:
        return []
    spelled: dict[str, str] = {}
    for name in names:
        spelled.setdefault(name.lower(), name)
        if len(spelled) >= _MOST:
            break
    # Where only an ending was left out, others that are merely alike are not meant.
    longer = sorted((name for name in spelled if name.startswith(typed.lower())), key=len)[:_MOST_TOLD]
    near = longer if longer and len(typed) >= _LEAST else get_close_matches(typed.lower(), spelled, _MOST_TOLD)
    return [spelled[name] for name in near]


def path_meant(path: str) -> Optional[str]:
    """``did you mean ...?`` with paths that exist, where one that does not is spelled nearly so, or None."""
    near = _near_paths(path)[:_MOST_TOLD]
    return f"did you mean {' or '.join(near)}?" if near else None


def _near_paths(path: str) -> list[str]:
    if "://" in path:
        # In a store, which is not asked for what may have been meant.
        return []
    parent, name, rest = _missing_part(path)
    if not name or _WILD.intersection(name):
        return []
    try:
        with os.scandir(parent or os.curdir) as entries:
            names = [entry.name for entry in entries if name.startswith(".") or not entry.name.startswith(".")]
    except OSError:
        return []
    found = [os.path.join(parent, near) for near in near_names(name, names)]
    if not rest:
        return found
    # What lies below the mistyped part may be right, or mistyped as well.
    found = [near for near in found if os.path.isdir(near)]
    whole = [os.path.join(near, rest) for near in found]
    there = [near for near in whole if _WILD.intersection(rest) or os.path.lexists(near)]
    return there or [near for path in whole for near in _near_paths(path)] or found


def _missing_part(path: str) -> tuple[str, str, str]:
    """The part of a path that exists, the first name below it that does not, and what follows."""
    rest = ""
    parent, name = os.path.split(path.rstrip(os.sep))
    while parent and not os.path.lexists(parent):
        rest = os.path.join(name, rest) if rest else name
        above, name = os.path.split(parent.rstrip(os.sep))
        if above == parent:
            return parent, "", rest
        parent = above
    return parent, name, rest
