"""Tables of TOML that people write: read, and their values taken as what they should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from reshard.errors import InputError
from reshard.text.near_names import near_names
from reshard.text.wording import quoted


class TomlError(ValueError):
    """A text that is no TOML."""


def parse_toml(text: str) -> dict[str, Any]:
    """What a text says.

    Raises:
        TomlError: it is no TOML.
    """
    import sys

    # Loaded only here: few commands read any.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits is a ValueError of Python's, not of TOML.
        raise TomlError(str(error)) from error


class TableReader:
    """Takes values out of tables, and refuses those that are of another kind.

    Args:
        path: the file, for messages.
        error: makes the error of a message about the file.
    """

    def __init__(self, path: str, error: Callable[[str], InputError]) -> None:
        self.path = path
        self._error = error

    def wrong(self, where: str, problem: str) -> InputError:
        """The error about a place in the file."""
        return self._error(f"{self.path}: {where}: {problem}")

    def keys(self, table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        """Refuse what is unknown."""
        for key in table:
            if key not in known:
                near = near_names(key, known)
                meant = f". Did you mean {near[0]}?" if near else ""
                raise self.wrong(where, f"{quoted(key)} is unknown{meant or '; known: ' + ', '.join(known)}")

    def text(self, table: Mapping[str, Any], key: str, where: str) -> Optional[str]:
        """A text, if the key is there."""
        value = table.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(where, f"{key} is no text")
        return value

    def texts(self, table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
        """One text or a list of them."""
        value = table.get(key, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
            raise self.wrong(where, f"{key} is no text, nor a list of texts")
        return tuple(found)

    def flag(self, table: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
        """True or false."""
        value = table.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(where, f"{key} is neither true nor false")
        return value
