"""From the options of names and types to what is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Optional

from reshard.errors import UsageError
from reshard.plan.edits import CastAsked, Edits, Words
from reshard.storage import is_regular_file

_CONFIG = "config.json"


def edits_of(src: str, typed: Mapping[str, Any]) -> Optional[Edits]:
    """What the options ask for; None where names and types stay as they are.

    Args:
        src: the source; its config.json is taken where none is named.
        typed: the options' values.

    Raises:
        UsageError: they do not go together, or ask for what there is not.
        ReshardError: a table cannot be read.
    """
    names, renames, casts = typed["names"], tuple(typed["rename"]), tuple(typed["cast"])
    needs_names = [
        option
        for option, value in (
            ("--config", typed["config"]),
            ("--reverse", typed["reverse"]),
            ("--optimizer", typed["optimizer"]),
        )
        if value and names is None
    ]
    if needs_names:
        raise UsageError(f"{needs_names[0]} goes with --names", hint="name a table: `reshard names list`")
    if names is None and not renames and not casts:
        return None
    config = typed["config"]
    if names is not None and config is None and is_regular_file(os.path.join(src, _CONFIG)):
        config = os.path.join(src, _CONFIG)
    # Loaded only here: most conversions have no rules.
    from reshard.names import parse_renames, read_config, rules_named

    return Edits(
        table=None if names is None else rules_named(names),
        renames=parse_renames(renames) if renames else None,
        config=None if config is None else read_config(config),
        reverse=True if typed["reverse"] else None,
        optimizer=typed["optimizer"] is not None,
        casts=tuple(map(CastAsked.parse, casts)),
        words=Words(names, renames, config, typed["reverse"], typed["optimizer"] is not None, casts),
    )
