"""Strategies in protobuf: every encoding of their fields is read, damage at any depth is none."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.internal import api_implementation

from reshard.strategies.files import parse_protobuf
from reshard.strategies.model import RecordedLayout, StrategyItem
from tests.strategy_writing import numbers
from tests.wire import field, varint

END_OF_GROUP = 4
# There, tags and lengths may have more than 5 bytes.
not_in_pure_python = pytest.mark.skipif(
    api_implementation.Type() == "python", reason="the library in pure Python reads some damage"
)


def strategy(item: bytes = b"", layouts: bytes = b"") -> bytes:
    """A strategy file with an item, and a layout that is complete but for more fields."""
    item = field(1, "MatMul-0") + field(2, field(1, 0)) + item
    whole = field(1, numbers([2])) + field(5, 1) + field(6, 2) + field(7, 3)
    return field(1, 0) + field(2, item) + field(3, field(1, "w") + field(2, whole) + field(2, layouts))


RECORDED = RecordedLayout((2,), (), field=1, shard_step=2, shard_size=3)
# Additions to a layout, and what they change.
LAYOUTS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "a negative number in 10 bytes": (field(2, numbers([-1])), {"tensor_maps": ((-1,),)}),
    "a negative number in 5 bytes": (field(2, b"\x08\xff\xff\xff\xff\x0f"), {"tensor_maps": ((-1,),)}),
    "a number of more bytes than it needs": (field(2, b"\x08\x83\x80\x00"), {"tensor_maps": ((3,),)}),
    "packed and single numbers": (field(2, field(1, b"\x01\x02") + numbers([3])), {"tensor_maps": ((1, 2, 3),)}),
    "more than 32 bits of 32": (field(2, numbers([2**32 + 5])), {"tensor_maps": ((5,),)}),
    "64 bits": (field(3, numbers([2**40, -(2**40)])), {"split_sizes": (2**40, -(2**40))}),
    "two maps": (field(2, numbers([1])) + field(2, b""), {"tensor_maps": ((1,), ()), "nested": True}),
    "the last of several": (field(5, 4) + field(5, 5), {"field": 5}),
    "known fields of other types": (field(2, 1) + field(6, b"\x09") + field(1, 7), {}),
    "unknown fields": (
        field(9, 1) + field(10, b"x") + varint(7 << 3 | 1) + bytes(8) + varint(7 << 3 | 5) + bytes(4),
        {},
    ),
}
DAMAGED = {
    "a number of 11 bytes": b"\x50" + b"\x80" * 10 + b"\x00",
    "an unfinished number": b"\x50\x80",
    "field 0": b"\x00\x00",
    "an unfinished field": b"\x52\x02\x08",
    "a tag of 6 bytes": b"\xd0\x80\x80\x80\x80\x00\x01",
    "a length of 6 bytes": b"\x52\x80\x80\x80\x80\x80\x00",
    "another wire type": b"\x56",
    "an end of a group": varint(9 << 3 | END_OF_GROUP),
}


@pytest.mark.parametrize(("added", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_numbers_and_fields_are_read_in_every_encoding(added: bytes, changes: dict[str, Any]) -> None:
    file = parse_protobuf(strategy(layouts=added), "path")
    assert file is not None and file.layouts == {"w": RECORDED._replace(**changes)}


@not_in_pure_python
@pytest.mark.parametrize("added", DAMAGED.values(), ids=DAMAGED)
def test_damage_at_any_depth_is_no_strategy(added: bytes) -> None:
    deepest = strategy(layouts=field(2, added))
    for data in (strategy() + added, strategy(added), strategy(field(2, added)), strategy(layouts=added), deepest):
        assert parse_protobuf(data, "path") is None


@pytest.mark.parametrize("numbers", [b"\x80", b"\x80" * 10 + b"\x00", b"\x01\xff"])
def test_damaged_packed_numbers_are_no_strategy(numbers: bytes) -> None:
    data = strategy(layouts=field(2, field(1, numbers)))
    assert parse_protobuf(data, "path") is None


def test_occurrences_of_a_message_are_merged() -> None:
    more = field(2, field(1, 7) + field(2, numbers([4, 1]))) + field(2, field(2, numbers([2, 2])))
    file = parse_protobuf(strategy(item=more), "path")
    assert file is not None and file.items == (StrategyItem("MatMul-0", 7, ((4, 1), (2, 2))),)
    # An unfinished occurrence is damage, even if the next one would finish it.
    assert parse_protobuf(strategy(item=field(2, b"\x12\x02\x08") + field(2, b"\x04")), "path") is None


@pytest.mark.parametrize("lacking", ["node_name", "stage", "current_stage", "field"])
def test_a_strategy_without_a_required_field_is_none(lacking: str) -> None:
    whole = {"node_name": field(1, "n"), "stage": field(1, 0), "current_stage": field(1, 0), "field": field(5, 0)}

    def data(**kept: bytes) -> bytes:
        layouts = kept["field"] + field(6, 0) + field(7, 0)
        item = field(2, kept["node_name"] + field(2, kept["stage"]))
        return kept["current_stage"] + item + field(3, field(1, "w") + field(2, layouts))

    assert parse_protobuf(data(**whole), "path") is not None
    assert parse_protobuf(data(**{**whole, lacking: b""}), "path") is None
