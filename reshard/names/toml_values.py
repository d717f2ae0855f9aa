"""Values of TOML tables, taken as what they should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, TypeVar

from reshard.errors import NamesError
from reshard.names.pattern import PatternError
from reshard.names.sizes import product
from reshard.storage.toml_tables import TableReader
from reshard.text.products import ExpressionError, Product
from reshard.text.wording import quoted

Found = TypeVar("Found")


class RuleFile(TableReader):
    """Takes values out of the tables of a file of rules."""

    def __init__(self, path: str) -> None:
        super().__init__(path, lambda message: NamesError(message, file=path))

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

    def one_of(self, table: Mapping[str, Any], key: str, known: Sequence[str], where: str) -> str:
        """One of some words, the first of them where the key is absent."""
        value = table.get(key, known[0])
        if value not in known:
            raise self.wrong(where, f"{key} is {' or '.join(known)}")
        return str(value)

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
