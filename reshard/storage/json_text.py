"""Untrusted JSON: parsed strictly, in bounded memory; values are checked when they are read.

`parse_json` is for small files. `JsonStream` is for large ones: only one item at a time is an object in memory.
Accepted values can be printed and written again: no duplicate keys, no NaN, no absurdly long numbers, no text
with half of a surrogate pair.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Container, Iterator
from typing import Any, Callable, NoReturn, Optional

from reshard.storage.file_errors import UnfitError
from reshard.text.wording import quoted

_SPACE = re.compile(r"[ \t\n\r]*")
# The only spelling of half of a surrogate pair.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_VALUES = 1 << 22
# Digits of a 64-bit number, with its sign.
_MAX_DIGITS = 20
_MAX_ITEM = 1 << 20
# Maximum length of numbers, flags and null.
_MAX_TOKEN_LENGTH = 32
# A number ends only if so many characters follow: ``1`` may become ``1e-5``.
_NUMBER_GOES_ON = 3
_SHOWN = 40
_MAX_DEPTH = 100
_NOTHING: frozenset[str] = frozenset()


class JsonError(UnfitError):
    """The text is not JSON, or has unexpected values."""

    problem = "is damaged: "


def parse_json(data: bytes, most_values: int = _MAX_VALUES, file_names: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        data: the text, UTF-8.
        most_values: maximum number of values; each may take a hundred bytes.
        file_names: accept bytes that are not UTF-8, as Python represents them in names of files.

    Raises:
        JsonError: it is not JSON, has a duplicate key, or too many values.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > most_values:
        raise JsonError(f"it holds more than {most_values} values")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeError:
        raise JsonError("its text is not valid UTF-8") from None
    try:
        value, end = _decoded(text, _after_space(text, 0), "surrogateescape" if file_names else "strict")
    except _UnendedError as error:
        raise JsonError(str(error)) from None
    if _after_space(text, end) < len(text):
        raise JsonError("it is not valid JSON (something follows after its end)")
    return value


class JsonStream:
    """Reads a large text, an object or array at a time; earlier text is not kept.

    Args:
        read: returns the next bytes of the text, none at its end.
        most_item: maximum characters of one value.

    Raises:
        JsonError: from every method: the text is not JSON, or the next value has another type.
    """

    def __init__(self, read: Callable[[], bytes], most_item: int = _MAX_ITEM) -> None:
        self._read = read
        self._most_item = most_item
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text = ""
        self._position = 0
        self._ended = False

    def members(self, earlier_keys: Optional[Container[str]] = None) -> Iterator[str]:
        """The keys of the next object; the caller reads each value before the next key.

        Args:
            earlier_keys: earlier keys, if the caller keeps them; a duplicate of one is an error.
        """
        self._expect("{", "an object")
        own_keys: set[str] = set()
        if self._next() == "}":
            self._position += 1
            return
        while True:
            if self._next() != '"':
                raise JsonError("it is not valid JSON (a key is expected)")
            key = self.value()
            if key in (own_keys if earlier_keys is None else earlier_keys):
                raise _twice(key)
            if earlier_keys is None:
                own_keys.add(key)
            self._expect(":", "a colon")
            yield key
            if self._ends("}"):
                return

    def elements(self) -> Iterator[None]:
        """Once for each element of the next array; the caller reads each before the next."""
        self._expect("[", "an array")
        if self._next() == "]":
            self._position += 1
            return
        while True:
            yield
            if self._ends("]"):
                return

    def peek(self) -> str:
        """The first character of the next value; empty at the end."""
        return self._next()

    def value(self, most: Optional[int] = None) -> Any:
        """The next value.

        Args:
            most: maximum characters, if more than for others.
        """
        self._next()
        most = self._most_item if most is None else most
        while True:
            try:
                value, end = _decoded(self._text, self._position)
                if self._ended or len(self._text) - end >= _NUMBER_GOES_ON:
                    self._position = end
                    return value
            except _UnendedError as error:
                if self._ended:
                    raise JsonError(str(error)) from None
            if len(self._text) - self._position > most:
                begins = quoted(self._text[self._position : self._position + _SHOWN])
                raise JsonError(f"a value is longer than {most} characters, or has no end: {begins}")
            # Doubled each time: a long value is not scanned too often.
            length = 2 * (len(self._text) - self._position)
            self._more()
            while len(self._text) < length and not self._ended:
                self._more()

    def matching(self, pattern: re.Pattern[str]) -> Optional[re.Match[str]]:
        """The next value if it matches a pattern; None if it has to be read by another method.

        Args:
            pattern: matches exactly one JSON object or array.
        """
        self._next()
        match = pattern.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        return match

    def skip(self, depth: int = 0) -> None:
        """Skip the next value; none of it is kept, whatever its size."""
        if depth > _MAX_DEPTH:
            raise JsonError("its JSON is nested too deeply")
        begins = self._next()
        if begins == "{":
            for _ in self.members(_NOTHING):
                self.skip(depth + 1)
        elif begins == "[":
            for _ in self.elements():
                self.skip(depth + 1)
        else:
            self.value()

    def end(self) -> None:
        """Check that only space follows."""
        if self._next():
            raise JsonError("it is not valid JSON (something follows after its end)")

    def _next(self) -> str:
        """The next character that is not space, without skipping it; empty at the end."""
        while True:
            self._position = _after_space(self._text, self._position)
            if self._position < len(self._text):
                return self._text[self._position]
            if self._ended:
                return ""
            self._more()

    def _expect(self, mark: str, description: str) -> None:
        if self._next() != mark:
            raise JsonError(f"it is not valid JSON ({description} is expected)")
        self._position += 1

    def _ends(self, mark: str) -> bool:
        """Skip a comma or the closing mark of an object or array; whether it was the closing mark."""
        character = self._next()
        if character not in (",", mark) or not character:
            raise JsonError(f"it is not valid JSON (a comma or {mark} is expected)")
        self._position += 1
        return character == mark

    def _more(self) -> None:
        data = self._read()
        self._ended = not data
        try:
            text = self._decode(data, self._ended)
        except UnicodeError:
            raise JsonError("its text is not valid UTF-8") from None
        self._text = self._text[self._position :] + text
        self._position = 0


class _UnendedError(ValueError):
    """Text that is not JSON, but may become JSON with more text."""


def _decoded(text: str, start: int, errors: str = "strict") -> tuple[Any, int]:
    """The value at a position of the text, and its end; ``errors`` are those of its encoding."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _SURROGATE.search(text, start, end):
            json.dumps(value, ensure_ascii=False).encode(errors=errors)
        return value, end
    except UnicodeError:
        raise JsonError("it holds half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise JsonError("its JSON is nested too deeply") from None
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        # More text cannot cure an error before the end.
        unended = error.msg.startswith("Unterminated") or error.pos > len(text) - _MAX_TOKEN_LENGTH
        kind = _UnendedError if unended else JsonError
        raise kind(f"it is not valid JSON ({error})") from None


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise _twice(key)
        members[key] = value
    return members


def _twice(key: str) -> JsonError:
    return JsonError(f"it lists {quoted(key)} twice")


def _integer(digits: str) -> int:
    # Without a limit, a number of millions of digits takes minutes to convert.
    if len(digits) > _MAX_DIGITS:
        raise JsonError("it holds a number that is too large")
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_constant=_constant)


class Fields:
    """The members of an object, with checked types.

    Args:
        content: the object.
        where: name of the object, for messages.

    Raises:
        JsonError: it is not an object, or a member is missing or has another type.
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

    def integer(self, key: str, low: int, end: int) -> int:
        """A whole number from ``low`` to before ``end``."""
        return _whole(self._of(key), self._label(key), low, end)

    def text(self, key: str) -> str:
        """A text."""
        value = self._of(key)
        if not isinstance(value, str):
            raise JsonError(f"{self._label(key)} is not a text")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._of(key)
        if not isinstance(value, bool):
            raise JsonError(f"{self._label(key)} is neither true nor false")
        return value

    def is_null(self, key: str) -> bool:
        """Whether a member exists and is null."""
        return self._content.get(key, "") is None

    def optional_text(self, key: str) -> Optional[str]:
        """A text or null."""
        return None if self.is_null(key) else self.text(key)

    def entries(self, key: str) -> list[Any]:
        """A list of anything."""
        value = self._of(key)
        if not isinstance(value, list):
            raise JsonError(f"{self._label(key)} is not a list")
        return value

    def integers(self, key: str, low: int, end: int) -> tuple[int, ...]:
        """A list of whole numbers from ``low`` to before ``end``."""
        return integers(self.entries(key), self._label(key), low, end)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        entries = self.entries(key)
        if not all(isinstance(entry, str) for entry in entries):
            raise JsonError(f"{self._label(key)} holds something that is not a text")
        return tuple(entries)

    def fields(self, key: str) -> Fields:
        """An object."""
        return Fields(self._of(key), self._label(key))

    def members(self, key: str) -> Iterator[tuple[str, Fields]]:
        """An object of named objects."""
        for name, item in self.fields(key)._content.items():
            if not name:
                raise JsonError(f"{self._label(key)} holds an empty name")
            yield name, Fields(item, f"{key}, {quoted(name)}")

    def _of(self, key: str) -> Any:
        if key not in self._content:
            raise JsonError(f"{self._label(key)} is missing")
        return self._content[key]

    def _label(self, key: str) -> str:
        return f"{self._where}: {key}"


def integers(value: Any, label: str, low: int, end: int) -> tuple[int, ...]:
    """A list of whole numbers from ``low`` to before ``end``.

    Raises:
        JsonError: it is something else.
    """
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
