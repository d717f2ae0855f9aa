"""The slices of one parameter on its ranks, and ranges of numbers in words."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from reshard.strategies import Holding, RecordedLayout, Stage
from reshard.strategies.arrangement import Arrangement
from reshard.text.messages import stepped_ranges
from tests.layouts import layouts, shapes
from tests.number_words import numbers_named
from tests.reference import LayoutDict, axes_of, boxes

Parameter = tuple[LayoutDict, list[int], Arrangement]


def arranged(
    layout_record: LayoutDict, shape: list[int], first_rank: int = 0, whole_shape: bool = False
) -> Arrangement:
    recorded = RecordedLayout(
        tuple(layout_record["dev_matrix"]),
        tuple(tuple(axes) or (-1,) for axes in axes_of(layout_record["tensor_map"], len(shape))),
        nested=True,
        tensor_shape=tuple(shape) if whole_shape else None,
        shard_step=layout_record["shard_step"],
        shard_size=layout_record["shard_size"],
        split_sizes=tuple(layout_record["uneven"] or ()),
        split_offsets=tuple(sum(layout_record["uneven"][:at]) for at in range(len(layout_record["uneven"])))
        if layout_record["uneven"]
        else (),
    )
    layout = recorded.layout()
    return Arrangement(Holding(Stage(1, first_rank, layout.device_count, {"w": layout}), layout))


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    shape = draw(shapes(1))
    devices = draw(st.sampled_from([1, 4, 6, 8, 12, 24, 48]))
    layout_record = draw(layouts(devices, shape))
    return layout_record, shape, arranged(layout_record, shape, draw(st.sampled_from([0, 16])), draw(st.booleans()))


@given(parameters())
def test_the_slices_of_an_arrangement_equal_those_of_the_ranks(
    parameter: Parameter,
) -> None:
    layout_record, shape, arrangement = parameter
    contents: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for local, box in enumerate(boxes(layout_record, shape)):
        contents.setdefault(box, []).append(arrangement.holding.stage.first_rank + local)
    actual = {}
    for drawn in arrangement.slices():
        units = [
            1 if reference else size // extent
            for reference, size, extent in zip(arrangement.in_elements, shape, arrangement.extents)
        ]
        actual[tuple((start * unit, stop * unit) for (start, stop), unit in zip(drawn.box, units))] = list(drawn.ranks)
    # Equal to the oracle: the tensor is covered once, and every rank is in one slice.
    assert actual == contents
    assert sum(prod(stop - start for start, stop in box) for box in actual) == prod(shape)


@given(st.sets(st.integers(0, 200)), st.integers(1, 9), st.integers(1, 60), st.integers(1, 6))
def test_stepped_ranges_expand_to_the_same_numbers(odd: set[int], run: int, step: int, times: int) -> None:
    regular = {start + at for start in range(300, 300 + step * times, step) for at in range(run)}
    numbers = odd | regular
    assert numbers_named(stepped_ranges(numbers, most=10**6)) == numbers


def test_stepped_ranges_are_short() -> None:
    assert stepped_ranges(range(0, 512, 8)) == "0-504 step 8"
    assert stepped_ranges(rank for rank in range(512) if rank % 8 < 4) == "0-3..504-507 step 8"
    assert stepped_ranges([0, 4]) == "0,4"
    assert stepped_ranges([1, 2, 3, 7]) == "1-3,7"
    assert stepped_ranges([n * n for n in range(4, 24)], most=3) == "16,25,36 and 17 more"
