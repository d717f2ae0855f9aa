"""Windows that serve small requests, and prediction of the next ones."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from reshard.storage.s3.windows import Jumps, Windows

JUMP = 1 << 20


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 200), st.integers(1, 50)), max_size=40), st.data())
def test_windows_return_the_read_bytes_or_nothing(kept: list[tuple[str, int, int]], data: st.DataObject) -> None:
    windows: Windows[str] = Windows(most=120)
    content = {name: bytes((ord(name) + n) % 256 for n in range(300)) for name in "abc"}
    for name, start, size in kept:
        windows.keep(name, start, content[name][start : start + size])
        assert windows.last(name) == (start, start + size, size)
        assert windows.find(name, start, size) == content[name][start : start + size]
    name, offset, count = data.draw(st.tuples(st.sampled_from("abc"), st.integers(0, 200), st.integers(0, 60)))
    assert windows.find(name, offset, count) in (None, content[name][offset : offset + count])


def rounds(offsets: list[int]) -> int:
    """The number of waits of a reader of these offsets in order."""
    jumps = Jumps()
    expected: set[int] = set()
    waited = 0
    for offset in offsets:
        ahead = jumps.to(offset)
        reference = any(abs(offset - place) <= 4096 for place in expected)
        waited += not reference or bool(ahead)
        expected.update(ahead)
    return waited


def test_windows_predict_records_of_equal_layers() -> None:
    layer = [4 * JUMP, 4 * JUMP + 7, 11 * JUMP, JUMP, 11 * JUMP + 3]
    offsets = list(accumulate(layer * 60))
    # Names of later layers have a digit more, and something else follows the last one.
    offsets = [offset + 3 * number for number, offset in enumerate(offsets)] + [offsets[-1] + 77 * JUMP]
    assert rounds(offsets) < len(offsets) / 8


@given(st.lists(st.integers(0, 1 << 40), max_size=60))
def test_windows_accept_requests_in_any_order(offsets: list[int]) -> None:
    assert 0 <= rounds(offsets) <= len(offsets)


@given(st.lists(st.integers(1, 1 << 30), max_size=60))
def test_predictions_are_after_the_current_position(lengths: list[int]) -> None:
    jumps = Jumps()
    for offset in accumulate(lengths):
        ahead = jumps.to(offset)
        assert len(ahead) <= 64 and ahead == sorted(ahead) and all(place > offset for place in ahead)
