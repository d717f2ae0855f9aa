"""Possible layouts of tensors without a recorded layout."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.layout.candidates import MAX_CANDIDATES, cuts_of, possible_holders
from tests.layouts import examples, layouts
from tests.reference import boxes


@examples(40)
@given(st.data())
def test_candidates_of_slices_contain_their_layout(data: st.DataObject) -> None:
    devices = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    shape = data.draw(st.sampled_from([(24,), (24, 12), (8, 4, 6), ()]))
    layout_record = data.draw(layouts(devices, shape))
    assume(not layout_record["uneven"])
    contents = boxes(layout_record, shape)
    numbers = {box: number for number, box in enumerate(sorted(set(contents)))}
    cuts = cuts_of(shape, [stop - start for start, stop in contents[0]])
    assert cuts is not None
    ways = possible_holders(devices, cuts)
    assert ways is not None and tuple(numbers[box] for box in contents) in ways
    assert len(set(ways)) == len(ways)


def test_slices_that_do_not_divide_a_tensor_have_no_candidate() -> None:
    assert cuts_of((6, 4), (4, 4)) is None
    assert cuts_of((6, 4), (0, 4)) is None
    assert cuts_of((6, 4), (6,)) is None
    assert possible_holders(4, (3,)) == []


def test_too_many_candidate_layouts_are_refused() -> None:
    assert possible_holders(2**14, (2**7,)) is None
    ways = possible_holders(4096, (2,))
    assert ways is not None and len(ways) < MAX_CANDIDATES
