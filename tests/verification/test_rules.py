"""Rules of verification, box by box, against NumPy on whole arrays."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.names import Applied, apply_rules, parse_rules
from reshard.verification.boxes import Box, Shape
from reshard.verification.operations import DerivedTensor, lists_of, needed_sources
from reshard.verification.stored import SliceSet, StoredTensor
from tests.layouts import examples
from tests.names.naive import redone
from tests.names.test_properties import RandomRule, random_rules


def boxes(draw: Any, shape: Shape) -> Box:
    """A box of at least one element."""
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return tuple(box)


@examples(150)
@given(random_rules(), st.data())
def test_naive_rules_equal_numpy_in_any_box(rule: RandomRule, data: st.DataObject) -> None:
    arrays = dict(rule.arrays) if data.draw(st.booleans(), label="forth") else dict(rule.made)
    shapes = {name: array.shape for name, array in arrays.items()}
    applied = apply_rules(parse_rules(rule.text, "random.toml"), shapes, rule.config)
    expected = redone(applied, arrays)
    for name, array in expected.items():
        if math.prod(array.shape):
            check_box(applied, arrays, name, array, boxes(data.draw, array.shape))


def check_box(applied: Applied, arrays: Mapping[str, Any], name: str, array: Any, box: Box) -> None:
    """One box of a derived tensor has the expected elements, and only needed sources are read."""
    read: set[str] = set()

    def read_array(stored: StoredTensor, box: Box, handles: object) -> Any:
        read.add(stored.name)
        return arrays[stored.name][tuple(slice(*interval) for interval in box)].astype("<u8")

    step = next(step for step in applied.steps if name in step.targets)
    number = step.targets.index(name)
    sources = tuple(
        StoredTensor(source, "UInt64", 8, arrays[source].shape, source, (SliceSet(0, {}),), {})
        for source in step.sources
    )
    before = tuple(source.shape for source in sources)
    assert lists_of(step.operations, before)[-1][number] == array.shape
    created = DerivedTensor(name, "UInt64", 8, array.shape, sources, step.operations, number, False)
    with mock.patch.object(StoredTensor, "read", read_array):
        actual = created.read(box, None)  # type: ignore[arg-type]
    np.testing.assert_array_equal(actual, array[tuple(slice(*interval) for interval in box)], name)
    assert read <= {step.sources[each] for each in needed_sources(step.operations, before, number)}


SIZES = {"a": 4, "b": 2, "c": 3}


@pytest.mark.parametrize(
    "before, after",
    [
        ("a b", "a*b"),
        ("a*c", "a c"),
        ("b c a", "b*c a"),
        ("a b*c", "a*b c"),
        ("c a*b c", "c a b*c"),
        ("a b*c", "b a*c"),
    ],
)
def test_a_naive_reshape_equals_numpy_in_every_box(before: str, after: str) -> None:
    old, new = (
        tuple(math.prod(SIZES[name] for name in one.split("*")) for one in names.split()) for names in (before, after)
    )
    arrays = {"w": np.arange(math.prod(old)).reshape(old)}
    operation = f"{{ reshape = {json.dumps(before.split())}, to = {json.dumps(after.split())} }}"
    sizes = "".join(f'{name} = "{name}"\n' for name in SIZES)
    text = f'[sizes]\n{sizes}[[rule]]\nfrom = ["w"]\nto = ["v"]\ndo = [{operation}]\n'
    applied = apply_rules(parse_rules(text, "reshape.toml"), {"w": old}, SIZES)
    intervals = [itertools.combinations(range(size + 1), 2) for size in new]
    for box in itertools.product(*intervals):
        check_box(applied, arrays, "v", arrays["w"].reshape(new), box)
