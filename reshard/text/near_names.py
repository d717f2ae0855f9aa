"""Names and paths that are similar to a missing one, for advice."""

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
# Marks of {rank} and of wildcards, which match no mistyped name.
_WILD = frozenset("*?[{")


def near_names(typed: str, names: Iterable[str]) -> list[str]:
    """A few similar names, nearest first, ignoring case."""
    # Loaded only here: needed only where something is wrong.
    from difflib import get_close_matches

    if len(typed) > _LONGEST:
        return []
    spelled: dict[str, str] = {}
    for name in names:
        spelled.setdefault(name.lower(), name)
        if len(spelled) >= _MOST:
            break
    # If only an ending is missing, other similar names are unlikely.
    longer = sorted((name for name in spelled if name.startswith(typed.lower())), key=len)[:_MOST_TOLD]
    near = longer if longer and len(typed) >= _LEAST else get_close_matches(typed.lower(), spelled, _MOST_TOLD)
    return [spelled[name] for name in near]


def path_meant(path: str) -> Optional[str]:
    """``did you mean ...?`` with paths that exist, where one that does not is spelled nearly so, or None."""
    near = _near_paths(path)[:_MOST_TOLD]
    return f"did you mean {' or '.join(near)}?" if near else None


def _near_paths(path: str) -> list[str]:
    if "://" in path:
        # An object store is not searched for similar names.
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
    # Parts below the mistyped one may be right, or mistyped as well.
    found = [near for near in found if os.path.isdir(near)]
    whole = [os.path.join(near, rest) for near in found]
    there = [near for near in whole if _WILD.intersection(rest) or os.path.lexists(near)]
    return there or [near for path in whole for near in _near_paths(path)] or found


def _missing_part(path: str) -> tuple[str, str, str]:
    """The existing part of a path, the first missing name, and the rest."""
    rest = ""
    parent, name = os.path.split(path.rstrip(os.sep))
    while parent and not os.path.lexists(parent):
        rest = os.path.join(name, rest) if rest else name
        above, name = os.path.split(parent.rstrip(os.sep))
        if above == parent:
            return parent, "", rest
        parent = above
    return parent, name, rest
