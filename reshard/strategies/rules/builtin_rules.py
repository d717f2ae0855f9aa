"""Rules that come with the program, for families of models whose code is public."""

from __future__ import annotations

import os
from dataclasses import replace

from reshard.errors import StrategyError
from reshard.storage import exists, is_regular_file
from reshard.strategies.rules.model import Rules
from reshard.strategies.rules.toml_file import read_rules
from reshard.text.near_names import near_names

_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "builtin")
_ENDING = ".toml"


def builtin_names() -> list[str]:
    """The names of all built-in rules."""
    return sorted(name[: -len(_ENDING)] for name in os.listdir(_DIRECTORY) if name.endswith(_ENDING))


def builtin_title(name: str) -> str:
    """What built-in rules are for, in a line."""
    first, *_ = read_rules(_path(name)).text.split("\n")
    return first.lstrip("# ")


def is_builtin(named: str) -> bool:
    """Whether a name is one of built-in rules, and no file's."""
    return named in builtin_names() and not is_regular_file(named)


def rules_named(named: str) -> Rules:
    """The rules of a file, or built-in ones of a name that is no file's.

    Raises:
        StrategyError: there are neither, or the file says something that rules cannot say.
    """
    if not is_builtin(named):
        if not exists(named) and not named.endswith(_ENDING):
            known = builtin_names()
            near = near_names(named, known)
            meant = f". Did you mean {near[0]}?" if near else ""
            raise StrategyError(
                f"{named}: there is no such file, and no built-in rules of this name{meant}",
                file=named,
                hint="reshard strategy rules --list names the built-in ones",
            )
        return read_rules(named)
    return replace(read_rules(_path(named)), path=named)


def _path(name: str) -> str:
    return os.path.join(_DIRECTORY, name + _ENDING)
