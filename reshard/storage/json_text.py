"""JSON as anybody may have written it: parsed strictly, in bounded memory, its values checked as they are taken.

`parse_json` is for small files, `JsonStream` for large ones, of which one item at a time is an object
in memory. What is accepted can be printed and written again: no key comes twice, no number is NaN or
absurdly long, no text holds half of a surrogate pair.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Container, Iterator
from typing import Any, Callable, NoReturn, Optional

from reshard.text.wording import quoted

_SPACE = re.compile(r"[ \t\n\r]*")
# Half of a surrogate pair can only be spelled so.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MOST_VALUES = 1 << 22
# As many as a 64-bit number can have, and a sign.
_MOST_DIGITS = 20
_MOST_ITEM = 1 << 20
# A value that is no text and has no parts is shorter.
_LONGEST_TOKEN = 32
# So many characters behind a number tell that it has ended: ``1`` may become ``1e-5``.
_NUMBER_GOES_ON = 3
_SHOWN = 40
_MOST_DEPTH = 100
_NOTHING: frozenset[str] = frozenset()
_WINDOW = 1 << 18


class JsonError(ValueError):
    """The text is no JSON, or not what it should say; in words that can follow ``is damaged:``."""


def parse_json(data: bytes, most_values: int = _MOST_VALUES) -> Any:
    """What a text says.

    Args:
        data: the text, UTF-8.
        most_values: values that it may hold; each may take a hundred bytes.

    Raises:
        JsonError: it is no JSON, or says a thing twice, or holds too much.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > most_values:
        raise JsonError(f"it holds more values than any such file ({most_values})")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeError:
        raise JsonError("its text is not valid UTF-8") from None
    try:
        found, end = _decoded(text, _after_space(text, 0))
    except _UnendedError as error:
        raise JsonError(str(error)) from None
    if _after_space(text, end) < len(text):
        raise JsonError("it is not valid JSON (something follows after its end)")
    return found


class JsonStream:
    """Walks a large text, an object or array at a time; what is walked into is not kept.

    Args:
        read: gives the next bytes of the text, none at its end.
        most_item: characters that one value may have.

    Raises:
        JsonError: from every method, where the text is no JSON, or something else than asked for.
    """

    def __init__(self, read: Callable[[], bytes], most_item: int = _MOST_ITEM) -> None:
        self._read = read
        self._most_item = most_item
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text = ""
        self._position = 0
        self._ended = False

    def members(self, known: Optional[Container[str]] = None) -> Iterator[str]:
        """The keys of the object that comes next; each one's value is to be taken before the next key.

        Args:
            known: keys that were taken, where the caller keeps them; none of them may come again.
        """
        self._expect("{", "an object")
        taken: set[str] = set()
        if self._next() == "}":
            self._position += 1
            return
        while True:
            if self._next() != '"':
                raise JsonError("it is not valid JSON (a key is expected)")
            key = self.value()
            if key in (taken if known is None else known):
                raise _twice(key)
            if known is None:
                taken.add(key)
            self._expect(":", "a colon")
            yield key
            if self._ends("}"):
                return

    def elements(self) -> Iterator[None]:
        """Once for each element of the array that comes next; each is to be taken before the next."""
        self._expect("[", "an array")
        if self._next() == "]":
            self._position += 1
            return
        while True:
            yield
            if self._ends("]"):
                return

    def peek(self) -> str:
        """The first character of what comes next; empty at the end."""
        return self._next()

    def value(self, most: Optional[int] = None) -> Any:
        """The value that comes next, whatever it is.

        Args:
            most: characters that it may have, if more than others.
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
            # Twice as much each time, so that a long value is not looked through too often.
            wanted = 2 * (len(self._text) - self._position)
            self._more()
            while len(self._text) < wanted and not self._ended:
                self._more()

    def matching(self, pattern: re.Pattern[str]) -> Optional[re.Match[str]]:
        """The value that comes next, where it is written as is usual; None: it is to be taken otherwise.

        Args:
            pattern: of no other text than one JSON object or array, which it tells the end of.
        """
        self._next()
        match = pattern.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        return match

    def skip(self, depth: int = 0) -> None:
        """Step over the value that comes next; it is not kept, whatever its size."""
        if depth > _MOST_DEPTH:
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
        """Check that nothing follows."""
        if self._next():
            raise JsonError("it is not valid JSON (something follows after its end)")

    def _next(self) -> str:
        """The next character that is no space, without stepping over it; empty at the end."""
        while True:
            self._position = _after_space(self._text, self._position)
            if self._position < len(self._text):
                return self._text[self._position]
            if self._ended:
                return ""
            self._more()

    def _expect(self, mark: str, what: str) -> None:
        if self._next() != mark:
            raise JsonError(f"it is not valid JSON ({what} is expected)")
        self._position += 1

    def _ends(self, mark: str) -> bool:
        """Step over a comma or the mark that ends an object or array; whether it was the latter."""
        found = self._next()
        if found not in (",", mark) or not found:
            raise JsonError(f"it is not valid JSON (a comma or {mark} is expected)")
        self._position += 1
        return found == mark

    def _more(self) -> None:
        data = self._read()
        self._ended = not data
        try:
            read = self._decode(data, self._ended)
        except UnicodeError:
            raise JsonError("its text is not valid UTF-8") from None
        self._text = self._text[self._position :] + read
        self._position = 0


def windows_of(data: bytes) -> Callable[[], bytes]:
    """What reads bytes that are in memory for a `JsonStream`; a mark of UTF-8 at their begin is left out."""
    position = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0

    def read() -> bytes:
        nonlocal position
        start, position = position, position + _WINDOW
        return data[start:position]

    return read


class _UnendedError(ValueError):
    """Text that is no JSON, and might become it with what follows."""


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The value at a place of the text, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _SURROGATE.search(text, start, end):
            json.dumps(value, ensure_ascii=False).encode()
        return value, end
    except UnicodeError:
        raise JsonError("it holds half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise JsonError("its JSON is nested too deeply") from None
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        # What is wrong in the middle stays wrong; a text that has no end may get one.
        unended = error.msg.startswith("Unterminated") or error.pos > len(text) - _LONGEST_TOKEN
        kind = _UnendedError if unended else JsonError
        raise kind(f"it is not valid JSON ({error})") from None


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _twice(key)
        found[key] = value
    return found


def _twice(key: str) -> JsonError:
    return JsonError(f"it lists {quoted(key)} twice")


def _integer(digits: str) -> int:
    # Without a bound, a number of millions of digits takes minutes to convert.
    if len(digits) > _MOST_DIGITS:
        raise JsonError("it holds a number that is too large")
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_constant=_constant)


class Fields:
    """The members of an object, taken as what they should be.

    Args:
        content: the object.
        where: what it is, for messages.

    Raises:
        JsonError: it is none, or a member is missing or something else.
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
        return _whole(self._of(key), self._said(key), low, end)

    def text(self, key: str) -> str:
        """A text."""
        found = self._of(key)
        if not isinstance(found, str):
            raise JsonError(f"{self._said(key)} is not a text")
        return found

    def flag(self, key: str) -> bool:
        """True or false."""
        found = self._of(key)
        if not isinstance(found, bool):
            raise JsonError(f"{self._said(key)} is neither true nor false")
        return found

    def is_null(self, key: str) -> bool:
        """Whether a member is there and null."""
        return self._content.get(key, "") is None

    def optional_text(self, key: str) -> Optional[str]:
        """A text or null."""
        return None if self.is_null(key) else self.text(key)

    def entries(self, key: str) -> list[Any]:
        """A list of anything."""
        found = self._of(key)
        if not isinstance(found, list):
            raise JsonError(f"{self._said(key)} is not a list")
        return found

    def integers(self, key: str, low: int, end: int) -> tuple[int, ...]:
        """A list of whole numbers from ``low`` to before ``end``."""
        return integers(self.entries(key), self._said(key), low, end)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        found = self.entries(key)
        if not all(isinstance(entry, str) for entry in found):
            raise JsonError(f"{self._said(key)} holds something that is not a text")
        return tuple(found)

    def fields(self, key: str) -> Fields:
        """An object."""
        return Fields(self._of(key), self._said(key))

    def members(self, key: str) -> Iterator[tuple[str, Fields]]:
        """An object of named objects."""
        for name, item in self.fields(key)._content.items():
            if not name:
                raise JsonError(f"{self._said(key)} holds an empty name")
            yield name, Fields(item, f"{key}, {quoted(name)}")

    def _of(self, key: str) -> Any:
        if key not in self._content:
            raise JsonError(f"{self._said(key)} is missing")
        return self._content[key]

    def _said(self, key: str) -> str:
        return f"{self._where}: {key}"


def integers(found: Any, what: str, low: int, end: int) -> tuple[int, ...]:
    """A list of whole numbers from ``low`` to before ``end``.

    Raises:
        JsonError: it is something else.
    """
    if not isinstance(found, list):
        raise JsonError(f"{what} is not a list of numbers")
    return tuple(_whole(entry, what, low, end) for entry in found)


def _whole(found: Any, what: str, low: int, end: int) -> int:
    # JSON's true is an int to Python.
    if not isinstance(found, int) or isinstance(found, bool):
        raise JsonError(f"{what} holds something that is not a whole number")
    if not low <= found < end:
        raise JsonError(f"{what} holds a number out of range")
    return found
