"""From words for names and types to what is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

from reshard.checkpoints.formats.dtypes import CAST_TO, dtype_named
from reshard.errors import UsageError
from reshard.plan.edits import Edits, Words
from reshard.plan.wanted_types import CastAsked
from reshard.storage import absolute, is_regular_file

if TYPE_CHECKING:
    from reshard.quantised import Quantisation

_CONFIG = "config.json"


def typed_edits(
    src: str,
    names: Optional[str] = None,
    rename: Sequence[str] = (),
    config: Optional[str] = None,
    reverse: bool = False,
    optimizer: bool = False,
    cast: Sequence[str] = (),
    dequantize: Optional[str] = None,
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
        dequantize: type that quantised tensors get; None where they stay as they are.

    Raises:
        UsageError: they do not go together, or ask for what there is not.
        ReshardError: a table cannot be read.
    """
    for option, given in (("reverse", reverse), ("optimizer", optimizer)):
        if given and names is None:
            raise UsageError(f"--{option} goes with --names", hint="name a table: `reshard names list`")
    if config is not None and names is None and dequantize is None:
        raise UsageError("--config goes with --names or --dequantize", hint="name a table: `reshard names list`")
    if names is None and not rename and not cast and dequantize is None:
        return None
    if names is not None and config is None and is_regular_file(os.path.join(src, _CONFIG)):
        config = os.path.join(src, _CONFIG)
    # Loaded only here: most conversions have no rules.
    from reshard.names import builtin_names, parse_renames, read_config, rules_named

    table = None if names is None else rules_named(names)
    if names is not None and table is not None and table.path not in builtin_names():
        names = absolute(names)
    sizes = None if config is None else read_config(config)
    return Edits(
        table=table,
        renames=parse_renames(rename) if rename else None,
        config=sizes,
        reverse=True if reverse else None,
        optimizer=optimizer,
        casts=tuple(map(CastAsked.parse, cast)),
        quantisation=None if dequantize is None else _quantisation(dequantize, src, sizes),
        words=Words(names, tuple(rename), config, reverse, optimizer, tuple(cast), dequantize),
    )


def _quantisation(dequantize: str, src: str, config: Optional[Mapping[str, object]]) -> Quantisation:
    """How quantised tensors are recognised, from the files beside them.

    Raises:
        UsageError: the type is none that they can get.
        ReshardError: a file cannot be read.
    """
    from reshard.quantised import quantisation_of

    dtype = dtype_named(dequantize)
    if dtype not in CAST_TO:
        raise UsageError(f"--dequantize {dequantize}: is none of {', '.join(CAST_TO)}")
    return quantisation_of(src, dtype, config)


def edits_of(src: str, typed: Mapping[str, Any]) -> Optional[Edits]:
    """What the options of names and types ask for; None where names and types stay as they are.

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
        typed["dequantize"],
    )
