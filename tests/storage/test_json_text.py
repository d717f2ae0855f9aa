"""JSON parsed in windows equals JSON parsed at once."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from reshard.storage.json_text import JsonError, JsonStream, parse_json

RIGHT = {
    "numbers": b"[0, -1, 1.5, 1e-7, -2.25E+10, 12345678901234567890]",
    "a number alone": b"-1.5e-3",
    "texts": '["", "a\\"b\\\\c", "é漢😀", "\\u00e9\\ud83d\\ude00", "\\n"]'.encode(),
    "nested": json.dumps({"a": [{"b": {}}, [], [None, True, False]], "c": {"d": 1}}, indent=40).encode(),
    "spaces": b" " * 70 + b'{ "a"' + b" " * 70 + b":" + b" " * 70 + b"1" + b" " * 70 + b"}",
}
WRONG = {
    "cut in a number": b"[1, 2, -",
    "cut in a text": b'{"a": "b',
    "cut in a word": b"[tru",
    "cut behind a comma": b"[1," + b" " * 70,
    "a number that goes wrong": b"[1.]",
    "a number with an exponent that is none": b"[1e-]",
    "something behind": b"{} 1",
    "a key twice": b'{"a": 1, "a": 2}',
    "half of a surrogate pair": b'{"a": "\\ud83d"}',
}


def walked(stream: JsonStream) -> Any:
    kind = stream.peek()
    if kind == "{":
        return {key: walked(stream) for key in stream.members()}
    if kind == "[":
        return [walked(stream) for _ in stream.elements()]
    return stream.value()


def read_all(text: bytes, window: int, walk: bool) -> Any:
    file = io.BytesIO(text)
    stream = JsonStream(lambda: file.read(window))
    actual = walked(stream) if walk else stream.value()
    stream.end()
    return actual


@pytest.mark.parametrize("walk", [True, False])
@pytest.mark.parametrize("case", RIGHT)
def test_json_read_in_windows_equals_json_read_at_once(case: str, walk: bool) -> None:
    text = RIGHT[case]
    for window in range(1, len(text) + 2):
        assert read_all(text, window, walk) == parse_json(text) == json.loads(text)


@pytest.mark.parametrize("walk", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_invalid_json_is_refused_in_windows_and_at_once(case: str, walk: bool) -> None:
    text = WRONG[case]
    with pytest.raises(JsonError):
        parse_json(text)
    for window in range(1, len(text) + 2):
        with pytest.raises(JsonError):
            read_all(text, window, walk)


def test_an_endless_number_takes_bounded_memory() -> None:
    endless = iter([b"1." + b"5" * 1000] + [b"5" * 1000] * 10_000)
    with pytest.raises(JsonError, match="longer than 5000 characters"):
        JsonStream(lambda: next(endless), 5000).value()
    assert next(endless, None) is not None
