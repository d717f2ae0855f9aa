"""From the options of names and types to what is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from reshard.plan.edits import Edits
from reshard.plan.typed_edits import typed_edits


def edits_of(src: str, typed: Mapping[str, Any]) -> Optional[Edits]:
    """What `options.edits` ask for; None where names and types stay as they are.

    Args:
        src: the source; its config.json is taken where none is named.
        typed: the options' values.

    Raises:
        UsageError: they do not go together, or ask for what there is not.
        ReshardError: a table cannot be read.
    """
    return typed_edits(
        src,
        typed["names"],
        typed["rename"],
        typed["config"],
        typed["reverse"],
        typed["optimizer"] is not None,
        typed["cast"],
    )
