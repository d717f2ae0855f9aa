"""Keys of alpha_pattern and rank_pattern against the expression of PEFT."""

from __future__ import annotations

import re

import pytest

from reshard.lora.scale import values_of

MODULES = ["layers.1.q", "layers.10.q", "layers.7.v", "a.layers.7.v", "layers.1.xq", "q\n", "", "名.q", "\udcff.q"]
KEYS = [
    *(
        "q",
        "layers.1.q",
        r"^layers\.\d+\.[kv]",
        r"(?=q)q",
        r"layers\.(?P<number>1)\1?\.q",
        "q|v",
        "q)|(v",
        "",
        "(?i:Q)",
    ),
    *(".*", "[^q]+", "名.q", r"(x|q){2,}", "none", "layers"),
]


def expected(keys: list[str], module: str) -> float:
    for value, key in enumerate(keys):
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return -1


@pytest.mark.parametrize("first", range(len(KEYS)))
def test_the_first_matching_key_wins_as_in_peft(first: int) -> None:
    keys = KEYS[first:] + KEYS[:first]
    values = [expected(keys, module) for module in MODULES]
    actual, unused = values_of({key: value for value, key in enumerate(keys)}, MODULES)
    assert [actual.get(module) for module in MODULES] == [None if value < 0 else value for value in values]
    assert unused == [key for key in keys if all(expected([key], module) < 0 for module in MODULES)]


def test_a_module_without_a_matching_expression_uses_its_own_name() -> None:
    assert values_of({"a[0]": 1, "b": 2}, ["a[0]", "b"]) == ({"a[0]": 1, "b": 2}, [])


@pytest.mark.parametrize("key", ["q(", "[", "*q", "a{2,1}", "(" * 100000])
def test_a_key_that_is_not_a_regular_expression_is_an_error(key: str) -> None:
    with pytest.raises(ValueError, match="cannot be matched"):
        values_of({"q": 1, key: 2}, MODULES)
