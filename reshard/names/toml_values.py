"""Values of TOML tables, taken as what they should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, TypeVar

from reshard.errors import NamesError
from reshard.names.pattern import PatternError
from reshard.names.sizes import ExpressionError, Product, product
from reshard.text.near_names import near_names
from reshard.text.wording import quoted

Found = TypeVar("Found")


class RuleFile:
    """Takes values out of tables, and refuses those that are of another kind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def wrong(self, where: str, problem: str) -> NamesError:
        """The error about a place in the file."""
        return NamesError(f"{self.path}: {where}: {problem}", file=self.path)

    def keys(self, table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        """Refuse what is unknown."""
        for key in table:
            if key not in known:
                near = near_names(key, known)
                meant = f". Did you mean {near[0]}?" if near else ""
                raise self.wrong(where, f"{quoted(key)} is unknown{meant or '; known: ' + ', '.join(known)}")

    def table(self, table: Mapping[str, Any], key: str) -> dict[str, Any]:
        """A table; empty where the key is absent."""
        value = table.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "is no table")
        return value

    def word(self, name: str, where: str) -> str:
        """A name that can stand in products and patterns."""
        if not name.replace("_", "a").isalnum() or not name.isascii() or name != name.lower() or name[0].isdigit():
            raise self.wrong(where, f"{quoted(name)} is no name of small letters, digits and _")
        return name

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

    def one_of(self, table: Mapping[str, Any], key: str, known: Sequence[str], where: str) -> str:
        """One of some words, the first of them where the key is absent."""
        value = table.get(key, known[0])
        if value not in known:
            raise self.wrong(where, f"{key} is {' or '.join(known)}")
        return str(value)

    def flag(self, table: Mapping[str, Any], key: str, where: str) -> bool:
        """True or false; false where the key is absent."""
        value = table.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(where, f"{key} is neither true nor false")
        return value

    def parsed(self, parse: Callable[[str], Found], text: str, where: str) -> Found:
        """What a text says."""
        try:
            return parse(text)
        except (PatternError, ExpressionError) as error:
            raise self.wrong(where, str(error)) from error

    def product(self, said: Any, where: str) -> Product:
        """A product of sizes; a number is one, too."""
        if type(said) is int and said >= 0:
            said = str(said)
        if not isinstance(said, str):
            raise self.wrong(where, f"{said!r} is no product of sizes such as heads*head_dim")
        return self.parsed(product, said, where)

    def products(self, said: Any, where: str) -> tuple[Product, ...]:
        """One product or a list of them."""
        found = said if isinstance(said, list) else [said]
        if not found:
            raise self.wrong(where, "is empty")
        return tuple(self.product(each, where) for each in found)
