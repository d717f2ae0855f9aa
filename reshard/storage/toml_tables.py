"""Files of rules in TOML: reading them, and checking their tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from reshard.errors import InputError
from reshard.storage import UnfitError, exists, is_regular_file, read_small, reading
from reshard.text.messages import quoted
from reshard.text.names import near_names, similar_path_hint
from reshard.text.products import ExpressionError

Parsed = TypeVar("Parsed")

_LARGEST = 1 << 22
_ENDING = ".toml"

# Words and check for each kind of value.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("a value", lambda value: True),
    "text": ("a text", lambda value: isinstance(value, str)),
    "texts": ("a text or a list of texts", lambda value: all(isinstance(text, str) and text for text in value)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "table": ("a table", lambda value: isinstance(value, dict)),
    "tables": ("a list of tables", lambda value: all(isinstance(each, dict) for each in value)),
}

Schema = Mapping[str, tuple[str, Any]]
"""The keys of a table, each with the kind of its value, and the default. Texts are returned as a tuple."""


class TomlFile:
    """A file of rules; its errors are of class ``error``."""

    def __init__(self, path: str, error: type[InputError]) -> None:
        self.path = path
        self._error = error

    def read(self) -> str:
        with reading(self.path, self._error, "pass a file of rules"):
            try:
                return read_small(self.path, _LARGEST).decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise UnfitError("is not UTF-8; this is not a file of rules") from error
            except FileNotFoundError as error:
                problem = f"{self.path}: this file of rules is missing"
                raise self._error(problem, file=self.path, hint=similar_path_hint(self.path)) from error

    def parse(self, text: str) -> dict[str, Any]:
        import sys

        # Imported here: most commands read no rules.
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            return tomllib.loads(text)
        except ValueError as error:
            raise self._error(f"{self.path} is not TOML: {error}", file=self.path) from error

    def values(self, table: Mapping[str, Any], schema: Schema, where: str) -> dict[str, Any]:
        """The value of every key of a schema, defaults included.

        ``where`` is the place of the table in the file. An unknown key or a value of another kind is an error.
        """
        for key in table:
            if key not in schema:
                raise self.wrong(where, f"{quoted(key)} is unknown{did_you_mean(key, schema)}")
        values = {}
        for key, (kind, default) in schema.items():
            value = values[key] = table.get(key, default)
            if key not in table:
                continue
            if kind == "texts" and isinstance(value, str):
                value = [value]
            words, fits = _KINDS[kind]
            if (kind in ("texts", "tables") and not isinstance(value, list)) or not fits(value):
                raise self.wrong(where, f"{key} must be {words}")
            values[key] = tuple(value) if kind == "texts" else value
        return values

    def parsed(self, parse: Callable[[str], Parsed], texts: Iterable[str], where: str) -> tuple[Parsed, ...]:
        try:
            return tuple(map(parse, texts))
        except ExpressionError as error:
            raise self.wrong(where, str(error)) from error

    def wrong(self, where: str, problem: str) -> InputError:
        return self._error(f"{self.path}: {where}: {problem}", file=self.path)


class BuiltinFiles:
    """Files of rules in the package, which users name without directory and ending.

    Args:
        module: path of a module; the files are in ``builtin`` next to it.
        kind: their name in messages.
        error: the class of errors.
        listed_by: the command that lists them.
        meant: what to type in place of names that are others' here.
    """

    def __init__(
        self, module: str, kind: str, error: type[InputError], listed_by: str, meant: Mapping[str, str] = {}
    ) -> None:
        self._directory = os.path.join(os.path.dirname(os.path.abspath(module)), "builtin")
        self._kind = kind
        self._error = error
        self._listed_by = listed_by
        self._meant = meant

    def names(self) -> list[str]:
        return sorted(name[: -len(_ENDING)] for name in os.listdir(self._directory) if name.endswith(_ENDING))

    def path(self, text: str) -> str | None:
        """The path of the built-in file with this name; None if the text is a path; an error for unknown names."""
        names = self.names()
        # A model's directory may have the name of its table.
        if text in names and not is_regular_file(text):
            return os.path.join(self._directory, text + _ENDING)
        if not exists(text) and not text.endswith(_ENDING):
            raise self._error(
                f"{text}: no file and no built-in {self._kind} has this name" + did_you_mean(text, names),
                file=text,
                hint=self._meant.get(text) or f"{self._listed_by} lists the built-in ones",
            )
        return None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest one, or all of them."""
    known = list(names)
    near: Sequence[str] = near_names(name, known)
    return f". Did you mean {near[0]}?" if near else f"; known: {', '.join(known) or 'none'}"
