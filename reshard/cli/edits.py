"""From the options of names and types to what is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from reshard.plan.edits import CastAsked, Edits, Words


def edits_of(typed: Mapping[str, Any]) -> Optional[Edits]:
    """What the options ask for; None where names and types stay as they are.

    Raises:
        UsageError: they ask for what there is not.
    """
    if not typed["cast"]:
        return None
    casts = tuple(map(CastAsked.parse, typed["cast"]))
    return Edits(casts, Words(cast=tuple(typed["cast"])))
