"""Keys of alpha_pattern and rank_pattern against the expression of PEFT, as Python's `re` matches it."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.lora.module_patterns import KeyPattern, KeyPatternError, KeyPatterns

ATOMS = st.sampled_from([*"aab..^$x{}", r"\.", r"\d", r"\W", "[ab]", "[^a]", "[]a]", r"[a\]b]", "{}"])
COUNTS = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "??"])


def sequences(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counted = st.tuples(parts, COUNTS).map("".join)
    return st.lists(st.lists(counted, max_size=3).map("".join), min_size=1, max_size=2).map("|".join)


# Two levels: Python's own matching takes too long for more.
GROUPS = sequences(ATOMS).flatmap(lambda inner: st.sampled_from([f"({inner})", f"(?:{inner})"]))
KEYS = sequences(st.one_of(ATOMS, ATOMS, GROUPS))


@given(KEYS, st.lists(st.text("aab..x1{\n", max_size=6), max_size=5))
def test_a_key_matches_the_same_modules_as_in_peft(key: str, names: list[str]) -> None:
    try:
        expression = re.compile(rf"(.*\.)?({key})$")
    except re.error:
        with pytest.raises(KeyPatternError):
            KeyPattern(key)
        return
    try:
        pattern = KeyPattern(key)
    except KeyPatternError:
        # Possessive since Python 3.11.
        assume("+" not in key)
        raise
    for name in names:
        assert pattern.matches(name)[0] == (expression.match(name) is not None), (key, name)


def test_the_first_matching_key_wins() -> None:
    patterns = KeyPatterns({"layers.1.q": 1, "q": 2, r"^layers\.\d+\.[kv]": 3, "none": 4})
    modules = ["layers.1.q", "layers.10.q", "layers.7.v", "a.layers.7.v", "layers.1.xq"]
    assert [patterns.value(module) for module in modules] == [1, 2, 3, None, None]
    assert patterns.unused(modules) == ["none"]


@pytest.mark.parametrize(
    "key", ["(?i)a", "(a)\\1", "(?=a)a", "(?P<n>a)", "a\\b", "(" * 31 + "a" + ")" * 31, "a" * 1001]
)
def test_unsupported_patterns_are_an_error(key: str) -> None:
    with pytest.raises(KeyPatternError):
        KeyPattern(key)


def test_matching_all_keys_and_modules_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.lora.module_patterns.MAX_STEPS", 100_000)
    patterns = KeyPatterns({f".*.*x{number}": 1 for number in range(500)})
    with pytest.raises(KeyPatternError, match="too long"):
        for number in range(10**9):
            patterns.value("a" * 100 + str(number))
