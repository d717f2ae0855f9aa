"""Tables by their names in options: built-in or files, with options, or single renames; the model's configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Optional

from reshard.errors import NamesError, UsageError
from reshard.names.model import FORWARD, NameRule, NameRules
from reshard.names.options import with_options
from reshard.names.pattern import PatternError, pattern
from reshard.names.sizes import Configuration
from reshard.names.toml_file import read_rules
from reshard.storage import exists, is_directory, is_regular_file, read_json
from reshard.storage.toml_tables import BuiltinFiles
from reshard.text.messages import quoted

RENAME = "rename"
"""The path of a table of renames."""

_FUSED_EXPERTS = "fused_experts"

_BUILTIN = BuiltinFiles(__file__, "table", NamesError, "reshard names list")
_OPTIONS = re.compile(r"(?:,[a-z][a-z0-9_]*=[A-Za-z0-9_]+)+\Z")
_LARGEST_CONFIG = 1 << 22


def builtin_names() -> list[str]:
    """The names of all built-in tables."""
    return _BUILTIN.names()


def rules_named(text_of_user: str) -> NameRules:
    """The table of a file, or a built-in one; options may follow: ``qwen3,gate_up=halves``.

    Raises:
        NamesError: neither exists, or the file is not a table of rules.
        UsageError: the option or its value is unknown.
    """
    options = None if is_regular_file(text_of_user) else _OPTIONS.search(text_of_user)
    table = text_of_user if options is None else text_of_user[: options.start()]
    stated: dict[str, str] = {}
    for text in options[0][1:].split(",") if options is not None else ():
        name, _, value = text.partition("=")
        if name in stated:
            raise UsageError(f"{text_of_user}: {name} is stated twice")
        stated[name] = value
    return with_options(_table(table), stated)


def experts_table(fused: str, config: Optional[Mapping[str, object]]) -> NameRules:
    """The table that gives experts, which transformers 5 fuses, their published names.

    Args:
        fused: the name of such experts.
        config: the model's config.json, if any; its ``model_type`` decides.

    Raises:
        NamesError: no published names are known for the model.
    """
    table = rules_named(_FUSED_EXPERTS)
    (option,) = table.options
    model = None if config is None else str(config.get("model_type"))
    if model in option.values or model in dict(option.config_values):
        return table
    reason = "no config.json shows the model"
    if config is not None:
        reason = f"the table {_FUSED_EXPERTS} lacks model_type {model} of {getattr(config, 'path', 'config.json')}"
    raise NamesError(
        f"{quoted(fused)} holds all experts of a layer, as in transformers 5; published models have other names, and "
        + reason,
        parameter=fused,
        hint="add --config DIR with the config.json of the model, or keep the names with --names none",
    )


def _table(name: str) -> NameRules:
    return replace(read_rules(_BUILTIN.path(name) or name), path=name)


def parse_renames(renames: Sequence[str]) -> NameRules:
    """Rules that rename: ``OLD=NEW``. A ``*`` in NEW stands for the text that the ``*`` in OLD matches.

    Other names are unchanged; optimizer state follows its weight.

    Raises:
        UsageError: a text is not a rename.
    """
    rules = []
    for text in renames:
        old, equals, new = text.partition("=")
        if not equals or not old or not new:
            raise UsageError(f"{text!r} is not a rename such as 'model.*=backbone.*'")
        try:
            left, right = pattern(old), pattern(new)
        except PatternError as error:
            raise UsageError(str(error)) from error
        if left.stars != right.stars or left.numbers != right.numbers:
            raise UsageError(f"{text!r}: both names need the same stars and numbers")
        if left.products or right.products:
            raise UsageError(f"{text!r}: a rename cannot use sizes")
        rules.append(NameRule(f"--rename {text}", (left,), (right,)))
    return NameRules(RENAME, "", ("old names", "new names"), tuple(rules), direction=FORWARD, keeps_others=True)


def read_config(path: str) -> Configuration:
    """Read a config.json.

    Args:
        path: the file, or its directory.

    Raises:
        NamesError: it is missing, or not a JSON object.
        RetryableError: reading failed.
    """
    if is_directory(path):
        path = os.path.join(path, "config.json")
    content = read_json(path, _LARGEST_CONFIG, NamesError)
    if content is None:
        raise NamesError(
            f"{path}: the configuration is missing",
            file=path,
            hint="--config takes the model's config.json or its directory; a table of names goes to --names",
        )
    return Configuration(content, path)


def config_beside(directory: str) -> Optional[Configuration]:
    """The config.json of a directory, if it has one.

    Raises:
        NamesError: it is not a JSON object.
        RetryableError: reading failed.
    """
    path = os.path.join(directory, "config.json")
    return read_config(path) if exists(path) else None
