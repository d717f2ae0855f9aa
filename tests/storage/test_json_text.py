"""JSON files: what is refused beyond the syntax."""

from __future__ import annotations

import json

import pytest

from reshard.storage.json_text import JsonError, parse_json

RIGHT = {
    "numbers": b"[0, -1, 1.5, 1e-7, -2.25E+10, 12345678901234567890]",
    "texts": '["", "a\\"b\\\\c", "é漢😀", "\\u00e9\\ud83d\\ude00", "\\n"]'.encode(),
    "nested": json.dumps({"a": [{"b": {}}, [], [None, True, False]], "c": {"d": 1}}, indent=40).encode(),
}
WRONG = {
    "cut": b'{"a": "b',
    "something behind": b"{} 1",
    "a key twice": b'{"b": 1, "a": {"b": 2}, "a": {}}',
    "a key twice inside": b'[{"a": {"b": 1, "b": 1}}]',
    "half of a surrogate pair": b'{"a": "\\ud83d"}',
    "half of a surrogate pair in a key": b'{"\\udc00": 1}',
    "no UTF-8": b'"\xff"',
    "no number": b"[NaN]",
}


@pytest.mark.parametrize("case", RIGHT)
def test_json_is_read_as_by_the_library(case: str) -> None:
    assert parse_json(RIGHT[case]) == json.loads(RIGHT[case])
    assert parse_json(b"\xef\xbb\xbf" + RIGHT[case]) == json.loads(RIGHT[case])


@pytest.mark.parametrize("case", WRONG)
def test_invalid_json_is_refused(case: str) -> None:
    with pytest.raises(JsonError):
        parse_json(WRONG[case])


def test_the_key_that_is_listed_twice_is_named() -> None:
    with pytest.raises(JsonError, match="'a'"):
        parse_json(WRONG["a key twice"])


def test_names_of_files_may_have_bytes_that_are_not_utf8() -> None:
    text = json.dumps(b"\xff".decode(errors="surrogateescape")).encode()
    assert parse_json(text, file_names=True) == "\udcff"
    with pytest.raises(JsonError):
        parse_json(text)
