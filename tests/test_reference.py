"""The naive reference equals the slices that MindSpore cut."""

from __future__ import annotations

import numpy as np
import pytest

from tests import cases
from tests.reference import boxes, cut, shard_step, slices, uncovered
from tests.trees import arrays, layout, single


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in cases.EVERYWHERE])
def test_the_reference_equals_mindspores_slices(name: str) -> None:
    case = cases.load(name)
    full = arrays(case.full(offset=False))
    several_stages = len(case.strategy) > 1
    ranks = slices(case.strategy, full, case.unsharded if several_stages else ())
    compared = 0
    for rank in case.slices["ranks"]:
        for parameter, array in ranks[rank].items():
            expected = case.expected(parameter, rank)
            if expected is None:
                assert any(stage["layouts"][parameter]["uneven"] for stage in case.strategy)
                continue
            assert (list(array.shape), cases.sha256_16(array)) == (expected[0], expected[1]), (
                rank,
                parameter,
            )
            compared += 1
    assert compared


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in cases.EVERYWHERE])
def test_recorded_shard_steps_equal_those_of_the_groups(name: str) -> None:
    case = cases.load(name)
    for stage in case.strategy:
        for parameter, layout_ in stage["layouts"].items():
            if layout_["shard_size"] and layout_["shard_step"]:
                assert shard_step(layout_, case.shapes[parameter]) == layout_["shard_step"], parameter


def test_uneven_slices_follow_the_recorded_sizes() -> None:
    table = layout([4], [0, -1], uneven=[10, 20, 30, 4])
    starts = [box[0] for box in boxes(table, (64, 8))]
    assert starts == [(0, 10), (10, 30), (30, 60), (60, 64)]


def test_all_slices_assemble_the_tensor_and_one_less_does_not() -> None:
    strategy = single({"w": layout([2, 2], [0, -1], -1, 2)})
    assert uncovered(strategy, strategy, {"w": (8, 2)}, None, range(4)) == set()
    for lost in range(4):
        assert uncovered(strategy, strategy, {"w": (8, 2)}, None, set(range(4)) - {lost}) == {"w"}


def test_zero_dimensional_tensors_are_never_cut() -> None:
    array = np.array(7)
    (box, _) = boxes(layout([2], []), ())
    assert cut(array, box).shape == ()
