"""JSON by the library, with duplicate keys refused; typed values of its objects.

Accepted values can be printed and written again: no NaN, no text with half of a surrogate pair.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator
from typing import Any, NoReturn, TypeVar

from reshard.storage.files import UnfitError
from reshard.text.messages import quoted

_T = TypeVar("_T")
# The only spelling of half of a surrogate pair.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(UnfitError):
    """The text is not JSON, or has unexpected values."""

    problem = "is damaged: "


def parse_json(data: bytes, file_names: bool = False, compact: Callable[[dict[str, Any]], None] | None = None) -> Any:
    """The value of a JSON text in UTF-8; a duplicate key is an error.

    Args:
        data: the text.
        file_names: accept bytes that are not UTF-8, as Python represents them in names of files.
        compact: changes each object before the next is read.
    """

    def members_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise JsonError(f"it lists {quoted(key)} twice")
        if compact is not None:
            compact(members)
        return members

    try:
        text = data.decode("utf-8-sig")
    except UnicodeError:
        raise JsonError("its text is not valid UTF-8") from None
    try:
        value = json.loads(text, object_pairs_hook=members_of, parse_constant=_constant)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape" if file_names else "strict")
    except JsonError:
        raise
    except UnicodeError:
        raise JsonError("it holds half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise JsonError(f"it is not valid JSON ({error})") from None
    return value


def _constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON")


class Fields:
    """The members of an object, with checked types; ``where`` names it in messages.

    A missing member or one of another type is a `JsonError`.
    """

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise JsonError(f"{where} is not an object")
        self._content: dict[str, Any] = content
        self._where = where

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def items(self) -> ItemsView[str, Any]:
        """The members, unchecked."""
        return self._content.items()

    def integer(self, key: str, low: int, end: int) -> int:
        """A whole number from ``low`` to before ``end``."""
        return _whole(self._of(key), self._label(key), low, end)

    def text(self, key: str) -> str:
        return self._typed(key, str, "is not a text")

    def flag(self, key: str) -> bool:
        return self._typed(key, bool, "is neither true nor false")

    def is_null(self, key: str) -> bool:
        return self._content.get(key, "") is None

    def optional_text(self, key: str) -> str | None:
        return None if self.is_null(key) else self.text(key)

    def entries(self, key: str) -> list[Any]:
        return self._typed(key, list, "is not a list")

    def integers(self, key: str, low: int, end: int) -> tuple[int, ...]:
        """A list of whole numbers from ``low`` to before ``end``."""
        return integers(self.entries(key), self._label(key), low, end)

    def texts(self, key: str) -> tuple[str, ...]:
        entries = self.entries(key)
        if not all(isinstance(entry, str) for entry in entries):
            raise JsonError(f"{self._label(key)} holds something that is not a text")
        return tuple(entries)

    def fields(self, key: str) -> Fields:
        return Fields(self._of(key), self._label(key))

    def members(self, key: str) -> Iterator[tuple[str, Fields]]:
        """An object of named objects."""
        for name, item in self.fields(key)._content.items():
            if not name:
                raise JsonError(f"{self._label(key)} holds an empty name")
            yield name, Fields(item, f"{key}, {quoted(name)}")

    def _typed(self, key: str, kind: type[_T], otherwise: str) -> _T:
        value = self._of(key)
        if not isinstance(value, kind):
            raise JsonError(f"{self._label(key)} {otherwise}")
        return value

    def _of(self, key: str) -> Any:
        if key not in self._content:
            raise JsonError(f"{self._label(key)} is missing")
        return self._content[key]

    def _label(self, key: str) -> str:
        return f"{self._where}: {key}"


def integers(value: Any, label: str, low: int, end: int) -> tuple[int, ...]:
    """A list of whole numbers from ``low`` to before ``end``; anything else is a `JsonError`."""
    if not isinstance(value, list):
        raise JsonError(f"{label} is not a list of numbers")
    return tuple(_whole(entry, label, low, end) for entry in value)


def _whole(value: Any, label: str, low: int, end: int) -> int:
    # JSON's true is an int in Python.
    if not isinstance(value, int) or isinstance(value, bool):
        raise JsonError(f"{label} holds something that is not a whole number")
    if not low <= value < end:
        raise JsonError(f"{label} holds a number out of range")
    return value
