"""Where elements come from, against NumPy on whole arrays, and tiles of any size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reshard.verification.origins import Shape, lists_of, needed, origins

from reshard.names import Applied, apply_rules, parse_rules
from tests.layouts import examples
from tests.names.naive import Array, redone
from tests.names.test_properties import RandomRule, random_rules


def gathered(applied: Applied, name: str, arrays: dict[str, Array], box: Any) -> Array:
    """A box of a tensor, each element looked up where it is said to come from; every element once."""
    step = next(step for step in applied.steps if name in step.targets)
    shapes = [arrays[source].shape for source in step.sources]
    number = step.targets.index(name)
    lists = lists_of(step.operations, tuple(shapes))
    allowed = needed(step.operations, len(shapes), number, lists)
    found = np.zeros([stop - start for start, stop in box], np.int64)
    times = np.zeros(found.shape, np.int64)
    for origin in origins(step.operations, shapes, number, box):
        assert origin.tensor in allowed
        source = arrays[step.sources[origin.tensor]]
        for places in np.ndindex(*(axis.length for axis in origin.axes)):
            there, here = {}, {}
            for axis, place in zip(origin.axes, places):
                there.update({dimension: int(indices[place]) for dimension, indices in axis.there.items()})
                here.update({dimension: int(indices[place]) for dimension, indices in axis.here.items()})
            at = tuple(here[dimension] for dimension in range(len(box)))
            found[at] = source[tuple(there[dimension] for dimension in range(source.ndim))]
            times[at] += 1
    assert times.max(initial=0) <= 1
    assert (found[times == 0] == 0).all()
    return found


def boxes(draw: Any, shape: Shape) -> Any:
    """A box of at least one element."""
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return tuple(box)


@examples(150)
@given(random_rules(), st.data())
def test_elements_come_from_where_numpy_takes_them(rule: RandomRule, data: st.DataObject) -> None:
    arrays = dict(rule.arrays) if data.draw(st.booleans(), label="forth") else dict(rule.made)
    shapes = {name: array.shape for name, array in arrays.items()}
    applied = apply_rules(parse_rules(rule.text, "random.toml"), shapes, rule.config)
    expected = redone(applied, arrays)
    for name, array in expected.items():
        if not math.prod(array.shape):
            continue
        box = boxes(data.draw, array.shape)
        np.testing.assert_array_equal(
            gathered(applied, name, arrays, box), array[tuple(slice(*interval) for interval in box)], name
        )
