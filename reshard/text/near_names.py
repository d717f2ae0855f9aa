"""Names and paths that are similar to a missing one, for advice."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Optional

# Comparing a longer name with thousands of others, or one name with more, takes seconds.
_MAX_LENGTH = 1000
_MAX_NAMES = 5000
_MAX_SUGGESTIONS = 3
# Minimum prefix length: shorter prefixes match too many names.
_MIN_PREFIX = 3
# Marks of {rank} and of wildcards, which match no mistyped name.
_WILD = frozenset("*?[{")


def near_names(typed: str, names: Iterable[str]) -> list[str]:
    """A few similar names, nearest first, ignoring case."""
    # Loaded only here: a run without mistakes does not need it.
    from difflib import get_close_matches

    if len(typed) > _MAX_LENGTH:
        return []
    spelled: dict[str, str] = {}
    for name in names:
        spelled.setdefault(name.lower(), name)
        if len(spelled) >= _MAX_NAMES:
            break
    # If only an ending is missing, other similar names are unlikely.
    longer = sorted((name for name in spelled if name.startswith(typed.lower())), key=len)[:_MAX_SUGGESTIONS]
    near = (
        longer if longer and len(typed) >= _MIN_PREFIX else get_close_matches(typed.lower(), spelled, _MAX_SUGGESTIONS)
    )
    return [spelled[name] for name in near]


def similar_path_hint(path: str) -> Optional[str]:
    """``did you mean ...?`` with existing paths that are similar to a missing one, or None."""
    near = _near_paths(path)[:_MAX_SUGGESTIONS]
    return f"did you mean {' or '.join(near)}?" if near else None


def _near_paths(path: str) -> list[str]:
    if "://" in path:
        # An object store is not searched for similar names.
        return []
    parent, name, below = _missing_part(path)
    if not name or _WILD.intersection(name):
        return []
    try:
        with os.scandir(parent or os.curdir) as entries:
            names = [entry.name for entry in entries if name.startswith(".") or not entry.name.startswith(".")]
    except OSError:
        return []
    near_directories = [os.path.join(parent, near) for near in near_names(name, names)]
    if not below:
        return near_directories
    # Parts below the mistyped one may be mistyped as well.
    near_directories = [near for near in near_directories if os.path.isdir(near)]
    completed = [os.path.join(near, below) for near in near_directories]
    existing = [near for near in completed if _WILD.intersection(below) or os.path.lexists(near)]
    return existing or [near for path in completed for near in _near_paths(path)] or near_directories


def _missing_part(path: str) -> tuple[str, str, str]:
    """The existing part of a path, the first missing name, and the rest."""
    below = ""
    parent, name = os.path.split(path.rstrip(os.sep))
    while parent and not os.path.lexists(parent):
        below = os.path.join(name, below) if below else name
        above, name = os.path.split(parent.rstrip(os.sep))
        if above == parent:
            return parent, "", below
        parent = above
    return parent, name, below
