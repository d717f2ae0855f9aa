"""Tables that follow each other: views of a conversion and verification's operations, against NumPy on whole arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.forms.request import NO_EDITS
from reshard.layout.views import View
from reshard.names import Applied, apply_rules, parse_rules
from reshard.plan.editing import Editing
from reshard.text.messages import Report
from reshard.verification import edited
from reshard.verification.boxes import Box
from reshard.verification.stored import SliceSet, StoredTensor
from tests.layouts import examples
from tests.names.naive import Array, elements, redone
from tests.names.test_properties import RandomRule, random_rules


def turned(arrays: Mapping[str, Array]) -> str:
    """A table that transposes and splits what another made."""
    rules = []
    for number, (name, array) in enumerate(arrays.items()):
        do, to = '"transpose"', [f"turned.{number}"]
        if array.ndim and array.shape[0] % 2 == 0:
            do, to = '[{ split = 0 }, "transpose"]', [f"turned.{number}.a", f"turned.{number}.b"]
        rules.append(f"[[rule]]\nfrom = {name!r}\nto = {to}\ndo = {do}\n")
    return 'direction = "forward"\n' + "".join(rules)


def chain_of(rule: RandomRule) -> tuple[list[Applied], list[dict[str, Array]]]:
    """A table there, back and there again, then another one: what is applied, and what NumPy makes of it."""
    steps, arrays = [], [dict(rule.arrays)]
    for reverse in (False, True, False):
        shapes = {name: array.shape for name, array in arrays[-1].items()}
        steps.append(apply_rules(parse_rules(rule.text, "random.toml"), shapes, rule.config, reverse))
        arrays.append(redone(steps[-1], arrays[-1]))
    shapes = {name: array.shape for name, array in arrays[-1].items()}
    steps.append(apply_rules(parse_rules(turned(arrays[-1]), "turned.toml"), shapes))
    arrays.append(redone(steps[-1], arrays[-1]))
    return steps, arrays


@examples(100)
@given(random_rules())
def test_views_of_a_chain_have_the_elements_of_the_last_table(rule: RandomRule) -> None:
    steps, arrays = chain_of(rule)
    tensors = {name: SimpleNamespace(shape=array.shape) for name, array in arrays[0].items()}
    checkpoint: Any = SimpleNamespace(tensors=tensors, values=list, without_layout=list, unseen=())
    editing = Editing(checkpoint, NO_EDITS, Report())
    for step, expected in zip(steps, arrays[1:]):
        editing._apply(step)
        assert editing.recipes.keys() == expected.keys()
        for name, recipe in editing.recipes.items():
            sources = [arrays[0][source] for source in recipe.sources]
            np.testing.assert_array_equal(
                elements(recipe.view or View.whole(0, sources[0].shape), sources), expected[name], name
            )


@examples(100)
@given(random_rules(), st.data())
def test_operations_of_a_chain_give_the_elements_of_the_last_table_in_any_box(
    rule: RandomRule, data: st.DataObject
) -> None:
    steps, arrays = chain_of(rule)

    def read(stored: StoredTensor, box: Box, handles: object) -> Any:
        return arrays[0][stored.name][tuple(slice(*interval) for interval in box)].astype("<u8")

    originals = {
        name: StoredTensor(name, "UInt64", 8, array.shape, name, (SliceSet(0, {}),), {})
        for name, array in arrays[0].items()
    }
    recipes = {name: edited._Recipe((), (name,)) for name in originals}
    for step in steps:
        recipes, _ = edited._ruled(recipes, (), step)
    assert recipes.keys() == arrays[-1].keys()
    with mock.patch.object(StoredTensor, "read", read):
        for name, recipe in recipes.items():
            content, expected = edited._content(name, recipe, originals, None), arrays[-1][name]
            assert content.shape == expected.shape
            if math.prod(expected.shape):
                intervals = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in expected.shape]
                box = tuple((low, high) for low, high in intervals)
                if all(low < high for low, high in box):
                    actual = content.read(box, None)  # type: ignore[arg-type]
                    part = expected[tuple(slice(*interval) for interval in box)]
                    np.testing.assert_array_equal(actual.reshape(part.shape), part, name)
