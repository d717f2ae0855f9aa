"""From words for names and types to what is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from reshard.errors import UsageError
from reshard.forms.registry import form_of
from reshard.plan.edits import Edits, Words, between_forms
from reshard.plan.wanted_types import CastAsked
from reshard.storage import absolute, is_regular_file

_CONFIG = "config.json"


def typed_edits(
    src: str,
    names: Optional[str] = None,
    rename: Sequence[str] = (),
    config: Optional[str] = None,
    reverse: bool = False,
    optimizer: bool = False,
    cast: Sequence[str] = (),
) -> Optional[Edits]:
    """What words ask for; None where names and types stay as they are.

    Args:
        src: the source; its config.json is taken where none is named.
        names: a built-in table of rules, or the file of one.
        rename: other names, ``OLD=NEW``.
        config: what tells the sizes that the table needs.
        reverse: read the table from right to left.
        optimizer: apply it to optimizer state as well.
        cast: ``DTYPE`` or ``GLOB=DTYPE``.

    Raises:
        UsageError: they do not go together, or ask for what there is not.
        ReshardError: a table cannot be read.
    """
    for option, given in (("config", config is not None), ("reverse", reverse), ("optimizer", optimizer)):
        if given and names is None:
            raise UsageError(f"--{option} goes with --names", hint="name a table: `reshard names list`")
    if names is None and not rename and not cast:
        return None
    if names is not None and config is None and is_regular_file(os.path.join(src, _CONFIG)):
        config = os.path.join(src, _CONFIG)
    # Loaded only here: most conversions have no rules.
    from reshard.names import builtin_names, parse_renames, read_config, rules_named

    table = None if names is None else rules_named(names)
    if names is not None and table is not None and table.path not in builtin_names():
        names = absolute(names)
    return Edits(
        table=table,
        renames=parse_renames(rename) if rename else None,
        config=None if config is None else read_config(config),
        reverse=True if reverse else None,
        optimizer=optimizer,
        casts=tuple(map(CastAsked.parse, cast)),
        words=Words(names, tuple(rename), config, reverse, optimizer, tuple(cast)),
    )


def edits_of(src: str, typed: Mapping[str, Any], to: Optional[str] = None) -> Optional[Edits]:
    """What the options of names and types ask for; None where names and types stay as they are.

    Args:
        src: the source; its config.json is taken where none is named.
        typed: the options' values.
        to: the form that is written, whose names may be others than the source's; None where nothing is.

    Raises:
        UsageError: they do not go together, or ask for what there is not.
        ReshardError: a table cannot be read.
    """
    edits = typed_edits(
        src,
        typed["names"],
        typed["rename"],
        typed["config"],
        typed["reverse"],
        typed["optimizer"] is not None,
        typed["cast"],
    )
    return edits if to is None else between_forms(edits, form_of(src), to)
