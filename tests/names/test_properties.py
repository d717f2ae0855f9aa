"""Random rules equal NumPy on whole arrays and are reversible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import NamesError
from reshard.names import apply_rules, parse_rules
from tests.layouts import examples
from tests.names.naive import Array, arrays_of, assert_equal, made_by, numbered, redone


@dataclass
class RandomRule:
    """A rule, its input tensors, and NumPy's result."""

    text: str
    config: dict[str, object]
    arrays: dict[str, Array]
    made: dict[str, Array]
    tied: int


class _Chain:
    """Columns of tensors to which random operations are done, in NumPy and in words."""

    def __init__(self, draw: Any, columns: list[list[Array]]) -> None:
        self.draw = draw
        self.columns = columns
        self.stacked = False
        self.said: list[str] = []
        self.sizes: dict[str, int] = {}
        self.tied = 1

    def size(self, value: int) -> str:
        """A name for a size."""
        name = f"s{len(self.sizes)}"
        self.sizes[name] = value
        return name

    def dimension(self) -> int:
        return int(self.draw(st.integers(0, self.columns[0][0].ndim - 1)))

    def each(self, change: Any) -> None:
        self.columns = [[change(array) for array in column] for column in self.columns]

    def transpose(self) -> None:
        order = list(self.draw(st.permutations(range(self.columns[0][0].ndim))))
        self.said.append(f"{{ transpose = {order} }}")
        self.each(lambda array: array.transpose(order))

    def turn(self) -> None:
        self.said.append('"transpose"')
        self.each(lambda array: array.T)

    def reshape(self) -> None:
        shape = self.columns[0][0].shape
        if any(array.shape != shape for column in self.columns for array in column):
            return
        if self.draw(st.booleans()) and len(shape) > 1:
            # Two dimensions become one; the name of the first is a size, or the other's is.
            place = self.draw(st.integers(0, len(shape) - 2))
            names = [f"d{number}" for number in range(len(shape))]
            names[place] = self.size(shape[place])
            after = [*names[:place], f"{names[place]}*{names[place + 1]}", *names[place + 2 :]]
            new = (*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])
        else:
            place = self.draw(st.integers(0, len(shape) - 1))
            factor = self.draw(st.sampled_from([n for n in range(1, shape[place] + 1) if shape[place] % n == 0]))
            names = [f"d{number}" for number in range(len(shape))]
            outer = self.size(factor)
            after = [*names[:place], outer, "inner", *names[place + 1 :]]
            names[place] = f"{outer}*inner"
            new = (*shape[:place], factor, shape[place] // factor, *shape[place + 1 :])
        self.said.append(f"{{ reshape = {names}, to = {after} }}".replace("'", '"'))
        self.each(lambda array: array.reshape(new))

    def concat(self) -> None:
        dimension = self.dimension()
        lengths = [column[0].shape[dimension] for column in self.columns]
        others = {(*c[0].shape[:dimension], *c[0].shape[dimension + 1 :]) for c in self.columns}
        if len(self.columns) == 1 or len(others) > 1 or self.tied > 1:
            return
        parts = ""
        if len(set(lengths)) > 1 or self.draw(st.booleans()):
            parts = ", parts = [" + ", ".join(f'"{self.size(length)}"' for length in lengths) + "]"
        self.said.append(f"{{ concat = {dimension}{parts} }}")
        self.columns = [[np.concatenate(arrays, dimension) for arrays in zip(*self.columns)]]

    def interleave(self) -> None:
        dimension = self.dimension()
        shape = self.columns[0][0].shape
        if len(self.columns) == 1 or self.tied > 1 or any(column[0].shape != shape for column in self.columns):
            return
        block = self.draw(st.sampled_from([n for n in range(1, shape[dimension] + 1) if shape[dimension] % n == 0]))
        self.said.append(f"{{ interleave = {dimension}, block = {block} }}")
        groups = shape[dimension] // block
        self.columns = [
            [
                np.concatenate(
                    [x for t in zip(*(np.split(a, groups, dimension) for a in arrays)) for x in t], dimension
                )
                for arrays in zip(*self.columns)
            ]
        ]

    def stack(self) -> None:
        if self.stacked:
            return
        dimension = int(self.draw(st.integers(0, self.columns[0][0].ndim)))
        self.said.append(f'{{ stack = "expert", dimension = {dimension} }}')
        self.columns = [[np.stack(column, dimension)] for column in self.columns]
        self.stacked = True

    def pad(self) -> None:
        dimension = self.dimension()
        length = self.columns[0][0].shape[dimension]
        if any(array.shape[dimension] != length for column in self.columns for array in column):
            return
        multiple = self.draw(st.integers(1, 5))
        true = self.size(length)
        self.said.append(f'{{ pad = {dimension}, size = "{true}", multiple = {multiple} }}')
        more = -length % multiple
        self.each(lambda a: np.pad(a, [(0, more if place == dimension else 0) for place in range(a.ndim)]))

    def copy(self) -> None:
        if len(self.columns) > 1 or self.tied > 1:
            return
        self.tied = self.draw(st.integers(2, 3))
        self.said.append('"copy"')
        self.columns = self.columns * self.tied


@st.composite
def random_rules(draw: Any) -> RandomRule:
    columns, experts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = list(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    differs = draw(st.integers(0, len(shape) - 1)) if draw(st.booleans()) else None
    shapes = {}
    for column in range(columns):
        here = [*shape]
        if differs is not None:
            here[differs] = draw(st.integers(1, 6))
        for expert in range(experts):
            shapes[f"model.{expert}.part_{column}"] = tuple(here)
    arrays = numbered(shapes)
    chain = _Chain(draw, [[arrays[f"model.{e}.part_{c}"] for e in range(experts)] for c in range(columns)])
    every = ["transpose", "turn", "reshape", "concat", "interleave", "stack", "pad", "copy"]
    for kind in draw(st.lists(st.sampled_from(every), max_size=6)):
        getattr(chain, kind)()
    left = ", ".join(f'"model.{{expert}}.part_{column}"' for column in range(columns))
    where = "net" if chain.stacked else "net.{expert}"
    right = ", ".join(f'"{where}.made_{column}"' for column in range(len(chain.columns)))
    sizes = "\n".join(f'{name} = "{name}"' for name in chain.sizes)
    text = f"""
[sizes]
{sizes}
[[rule]]
from = [{left}]
to = [{right}]
do = [{", ".join(chain.said)}]
"""
    created = {
        f"net.made_{column}" if chain.stacked else f"net.{expert}.made_{column}": array
        for column, arrays_ in enumerate(chain.columns)
        for expert, array in enumerate(arrays_)
    }
    return RandomRule(text, dict(chain.sizes), arrays, created, chain.tied)


@examples(300)
@given(random_rules())
def test_rules_equal_numpys_operations_and_are_reversible(rule: RandomRule) -> None:
    table = parse_rules(rule.text, "random.toml")
    shapes = {name: array.shape for name, array in rule.arrays.items()}

    applied = apply_rules(table, shapes, rule.config)

    assert not applied.reversed
    assert_equal(arrays_of(applied, rule.arrays), rule.made)
    assert_equal(redone(applied, rule.arrays), rule.made)

    back = apply_rules(table, {name: array.shape for name, array in rule.made.items()}, rule.config)

    assert back.reversed
    assert_equal(arrays_of(back, rule.made), rule.arrays)
    assert_equal(redone(back, rule.made), rule.arrays)
    assert bool(back.tied) == (rule.tied > 1)


@given(random_rules())
def test_rules_use_every_element_once(rule: RandomRule) -> None:
    shapes = {name: array.shape for name, array in rule.arrays.items()}

    arrays = arrays_of(apply_rules(parse_rules(rule.text, "random.toml"), shapes, rule.config), rule.arrays)

    used = np.concatenate([array.ravel() for array in arrays.values()])
    expected = np.concatenate([array.ravel() for array in rule.arrays.values()])
    np.testing.assert_array_equal(np.sort(used[used > 0]), np.sort(np.tile(expected, rule.tied)))


_COUNTS = """
[sizes]
layers = "layers"
experts = "experts"
[numbers]
layer = "layers"
expert = "experts"
"""
_CASES = (
    _COUNTS
    + """
[[blocks.block]]
from = "a.{layer}"
to = "b.{layer}"
[[rule]]
from = "{block}.norm"
to = "{block}.mlp.norm"
choice = "mlp"
case = "dense"
[[rule]]
from = "{block}.up"
to = "{block}.mlp.up"
choice = "mlp"
case = "dense"
[[rule]]
from = "{block}.norm"
to = "{block}.norm"
choice = "mlp"
case = "experts"
[[rule]]
from = "{block}.expert.{expert}"
to = "{block}.each.{expert}"
choice = "mlp"
case = "experts"
"""
)


def _with_state(names: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in names.items() for prefix in ("", "adam_m.")}


def test_a_name_of_several_cases_follows_the_other_names_and_its_state_follows_it() -> None:
    config: dict[str, object] = {"layers": 2, "experts": 2}
    left: dict[str, tuple[int, ...]] = {"a.0.norm": (3,), "a.0.up": (4,), "a.1.norm": (3,)}
    left.update({"a.1.expert.0": (5,), "a.1.expert.1": (5,)})
    rules = parse_rules(_CASES, "cases.toml")
    applied = apply_rules(rules, _with_state(left), config, optimizer=True)

    right = {"b.0.mlp.norm", "b.0.mlp.up", "b.1.norm", "b.1.each.0", "b.1.each.1"}
    assert made_by(applied).keys() == right | {f"adam_m.{name}" for name in right}
    made = {name: each.view.shape for name, each in made_by(applied).items()}
    back = apply_rules(rules, made, config, optimizer=True)
    assert {name: each.view.shape for name, each in made_by(back).items()} == _with_state(left)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a.0.norm"], "none of dense, experts is present for layer 0"),
        (["a.0.norm", "a.0.up", "a.0.expert.0", "a.0.expert.1"], "both dense and experts are present for layer 0"),
        (["a.0.norm", "a.0.expert.0"], r"missing: 'a\.0\.expert\.1'"),
        (["a.0.expert.0", "a.0.expert.1"], r"missing: 'a\.0\.norm'"),
    ],
)
def test_a_case_is_complete_for_each_value_of_the_numbers(names: list[str], problem: str) -> None:
    shapes = dict.fromkeys(names, (3,))
    with pytest.raises(NamesError, match=problem):
        apply_rules(parse_rules(_CASES, "cases.toml"), shapes, {"layers": 1, "experts": 2})


@given(st.lists(st.integers(1, 3), min_size=3, max_size=3), st.integers(0, 1), st.integers(0, 2), st.booleans())
def test_two_numbers_are_stacked_in_their_order(counts: list[int], inner: int, outer: int, named: bool) -> None:
    layers, experts, rows = counts
    text = f"""{_COUNTS}
[[rule]]
from = ["a.{{layer}}.{{expert}}.x", "a.{{layer}}.{{expert}}.y"]
to = "b"
do = ["concat", {{ stack = "expert", dimension = {inner} }}, {{ stack = "layer", dimension = {outer} }}]
"""
    names = [f"a.{layer}.{expert}.{one}" for layer in range(layers) for expert in range(experts) for one in "xy"]
    arrays = numbered(dict.fromkeys(names, (rows,)))
    # The number of layers may be unknown; names and shapes show it.
    config: dict[str, object] = {"experts": experts, **({"layers": layers} if named else {})}
    rules = parse_rules(text, "two.toml")

    applied = apply_rules(rules, {name: array.shape for name, array in arrays.items()}, config)

    joined = [
        [np.concatenate([arrays[f"a.{layer}.{expert}.{one}"] for one in "xy"]) for expert in range(experts)]
        for layer in range(layers)
    ]
    expected = np.stack([np.stack(each, inner) for each in joined], outer)
    outputs = arrays_of(applied, arrays)
    assert_equal(outputs, {"b": expected})
    assert_equal(redone(applied, arrays), outputs)
    back = apply_rules(rules, {"b": expected.shape}, config)
    assert_equal(arrays_of(back, outputs), arrays)
    assert_equal(redone(back, outputs), arrays)
    with pytest.raises(NamesError):
        apply_rules(rules, {"b": expected.shape}, {**config, "experts": experts + 1})
    with pytest.raises(NamesError, match="the size experts"):
        apply_rules(rules, {"b": expected.shape}, {"layers": layers})
