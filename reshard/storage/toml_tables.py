"""Files of rules in TOML: reading, checking against a schema, writing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple, TypeVar

from reshard.errors import InputError
from reshard.storage import UnfitError, exists, is_regular_file, read_small, reading
from reshard.text.messages import quoted
from reshard.text.names import near_names, similar_path_hint
from reshard.text.products import ExpressionError

Parsed = TypeVar("Parsed")

_ENDING = ".toml"


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


# Words and check for each kind of value.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("a value", lambda value: True),
    "text": ("a text", lambda value: isinstance(value, str)),
    "texts": (
        "a text or a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(text, str) and text for text in value),
    ),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "sizes": (
        "a list of sizes",
        lambda value: isinstance(value, list) and all(type(size) is int and 0 < size < 2**62 for size in value),
    ),
    "table": ("a table", lambda value: isinstance(value, dict)),
    "tables": ("a list of tables", _is_tables),
}


class TomlKey(NamedTuple):
    """The allowed values of a key.

    Attributes:
        kind: a key of `_KINDS`; lists of texts are returned as tuples, a single text as a tuple of one.
        default: the value where the key is absent.
        required: whether it must be present.
        allowed: the allowed texts; empty for any.
        description: description of the value, for messages; empty for the kind's.
    """

    kind: str
    default: Any = None
    required: bool = False
    allowed: tuple[str, ...] = ()
    description: str = ""


Schema = Mapping[str, TomlKey]
"""The keys of a table."""


class TomlFile:
    """A file of rules.

    Args:
        path: the file, for messages.
        error: the class of its errors.
        examples: hint that points to an example.
    """

    def __init__(self, path: str, error: type[InputError], examples: str) -> None:
        self.path = path
        self._error = error
        self._examples = examples

    def read(self, largest: int) -> str:
        """The content.

        Args:
            largest: maximum size in bytes.

        Raises:
            InputError: the file is missing, larger, or not UTF-8.
            RetryableError: reading failed.
        """
        with reading(self.path, self._error, "pass a file of rules"):
            try:
                return read_small(self.path, largest).decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise UnfitError("is not UTF-8; this is not a file of rules") from error
            except FileNotFoundError as error:
                problem = f"{self.path}: this file of rules is missing"
                raise self._error(problem, file=self.path, hint=similar_path_hint(self.path)) from error

    def parse(self, text: str) -> dict[str, Any]:
        """The tables in a text.

        Raises:
            InputError: the text is not TOML.
        """
        import sys

        # Imported here: most commands read no rules.
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            # Python raises ValueError for a number of thousands of digits.
            raise self._error(f"{self.path} is not TOML: {error}", file=self.path, hint=self._examples) from error

    def values(self, table: Mapping[str, Any], schema: Schema, where: str) -> dict[str, Any]:
        """The value of every key of a schema, defaults included.

        Args:
            table: the table.
            schema: its keys.
            where: the place of the table in the file, for messages.

        Raises:
            InputError: a key is unknown or missing, or its value is of another kind.
        """
        for key in table:
            if key not in schema:
                raise self.wrong(where, f"{quoted(key)} is unknown{did_you_mean(key, schema)}")
        return {key: self._value(table, key, key_schema, where) for key, key_schema in schema.items()}

    def _value(self, table: Mapping[str, Any], key: str, schema: TomlKey, where: str) -> Any:
        if key not in table:
            if schema.required:
                raise self.wrong(where, f"{key} is missing")
            return schema.default
        value = table[key]
        if schema.kind == "texts" and isinstance(value, str):
            value = [value]
        words, fits = _KINDS[schema.kind]
        if not fits(value) or (schema.allowed and value not in schema.allowed):
            raise self.wrong(where, f"{key} must be {schema.description or ' or '.join(schema.allowed) or words}")
        return tuple(value) if schema.kind in ("texts", "sizes") else value

    def parsed(self, parse: Callable[[str], Parsed], texts: Sequence[str], where: str) -> tuple[Parsed, ...]:
        """The values of texts.

        Raises:
            InputError: a text is invalid.
        """
        try:
            return tuple(map(parse, texts))
        except ExpressionError as error:
            raise self.wrong(where, str(error)) from error

    def wrong(self, where: str, problem: str) -> InputError:
        """The error about a place in the file."""
        return self._error(f"{self.path}: {where}: {problem}", file=self.path)


class BuiltinFiles:
    """Files of rules in the package, which users name without directory and ending.

    Args:
        module: path of a module; the files are in ``builtin`` next to it.
        kind: their name in messages.
        error: the class of errors.
        listed_by: the command that lists them.
    """

    def __init__(self, module: str, kind: str, error: type[InputError], listed_by: str) -> None:
        self._directory = os.path.join(os.path.dirname(os.path.abspath(module)), "builtin")
        self._kind = kind
        self._error = error
        self._listed_by = listed_by

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(name[: -len(_ENDING)] for name in os.listdir(self._directory) if name.endswith(_ENDING))

    def path(self, name: str) -> str:
        """The path of a built-in file."""
        return os.path.join(self._directory, name + _ENDING)

    def has(self, text: str) -> bool:
        """Whether a text is a built-in name, and not a path: a model's directory may have the same name."""
        return text in self.names() and not is_regular_file(text)

    def check_exists(self, path: str) -> None:
        """Refuse a text that is neither a built-in name nor an existing path.

        Raises:
            InputError: with the nearest built-in name.
        """
        if not exists(path) and not path.endswith(_ENDING):
            raise self._error(
                f"{path}: no file and no built-in {self._kind} has this name"
                + did_you_mean(path, self.names(), list_all=False),
                file=path,
                hint=f"{self._listed_by} lists the built-in ones",
            )


def did_you_mean(name: str, names: Iterable[str], list_all: bool = True) -> str:
    """The end of a sentence about an unknown name: the nearest one, or all of them where ``list_all``."""
    names = list(names)
    near = near_names(name, names)
    if near:
        return f". Did you mean {near[0]}?"
    return f"; known: {', '.join(names) or 'none'}" if list_all else ""


def toml_string(text: str) -> str:
    """A text in quotes, with escapes of both JSON and TOML."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def quoted_list(texts: Sequence[str]) -> str:
    """``["a", "b"]``."""
    return f"[{', '.join(map(toml_string, texts))}]"


def one_or_list(texts: Sequence[str]) -> str:
    """A text alone, or a list of them."""
    return toml_string(texts[0]) if len(texts) == 1 else quoted_list(texts)
