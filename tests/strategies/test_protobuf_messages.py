"""Strategies and groups in protobuf are read as the protobuf library reads them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Union

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import StrategyError
from reshard.strategies.model import RecordedLayout, StrategyItem
from reshard.strategies.protobuf_file import _MESSAGES, _PACKAGE, _message_class, _pool, parse_group_map, parse_strategy
from tests.strategy_writing import numbers
from tests.wire import field, varint, varint_at

FIELD = descriptor_pb2.FieldDescriptorProto
GROUP, END_OF_GROUP = 3, 4
# There, tags and lengths may have more than 5 bytes.
not_in_pure_python = pytest.mark.skipif(
    api_implementation.Type() == "python", reason="the library in pure Python reads some damage"
)
KINDS = {
    **_MESSAGES,
    "ParallelGroupMap": (
        ("parallel_group_item", 1, "ParallelGroupItem*"),
        ("ckpt_restore_rank_list", 2, "ParallelGroupRanks"),
    ),
}


REFUSED = "refused"


class Refused(Exception):
    """A message that the program refuses for its values."""


# The oracle: the library reads the whole file.


def by_library(kind: str, data: bytes) -> Any:
    """The message, or None if the library refuses it."""
    declare_group_map()
    message = _message_class(kind)()
    try:
        message.ParseFromString(data)
    except (DecodeError, ValueError, RuntimeError, SystemError):
        # protobuf 3.20 reports some damage as SystemError.
        return None
    return message if message.IsInitialized() else None


def strategy_by_library(data: bytes) -> Any:
    message = by_library("ParallelStrategyMap", data)
    if message is None:
        return None
    items = []
    for item in message.parallel_strategy_item:
        strategys = item.parallel_strategys
        strategies = tuple(tuple(strategy.dim) for strategy in strategys.parallel_strategy)
        items.append(StrategyItem(text(item.node_name), strategys.stage, strategies))
    layouts: dict[str, RecordedLayout] = {}
    for item in message.parallel_layout_item:
        parts = item.parallel_layouts
        name = text(item.param_name)
        if name in layouts:
            raise Refused
        layouts[name] = RecordedLayout(
            device_matrix=only(parts.dev_matrix),
            tensor_maps=tuple(tuple(entry.dim) for entry in parts.tensor_map),
            nested=len(parts.tensor_map) > 1,
            field=parts.field,
            shard_step=parts.opt_weight_shard_step,
            shard_size=parts.opt_weight_shard_size,
            split_sizes=only(parts.param_split_shape),
            split_offsets=only(parts.indices_offset),
        )
    return tuple(items), layouts, message.current_stage


def groups_by_library(data: bytes) -> Any:
    message = by_library("ParallelGroupMap", data)
    if message is None:
        return None
    items = message.parallel_group_item
    groups = tuple((text(item.group_name), tuple(item.parallel_group_ranks.dim)) for item in items)
    return tuple(message.ckpt_restore_rank_list.dim), groups


@cache
def declare_group_map() -> None:
    """Declare the outermost message of a group_info file, which the program does not need: it does not write one."""
    file = descriptor_pb2.FileDescriptorProto(name="groups.proto", package=_PACKAGE, dependency=["reshard.proto"])
    described = file.message_type.add(name="ParallelGroupMap")
    for name, number, declared in KINDS["ParallelGroupMap"]:
        label = FIELD.LABEL_REPEATED if declared.endswith("*") else FIELD.LABEL_REQUIRED
        kind = f".{_PACKAGE}.{declared.rstrip('*')}"
        described.field.add(name=name, number=number, label=label, type=FIELD.TYPE_MESSAGE, type_name=kind)
    _pool().AddSerializedFile(file.SerializeToString())


def text(name: bytes) -> str:
    try:
        decoded = name.decode()
    except UnicodeDecodeError:
        raise Refused from None
    if not decoded:
        raise Refused
    return decoded


def only(parts: Any) -> tuple[int, ...]:
    if len(parts) > 1:
        raise Refused
    return tuple(parts[0].dim) if parts else ()


def strategy_by_us(data: bytes) -> Any:
    file = parse_strategy(data, "path")
    return file and (file.items, file.layouts, file.current_stage)


def groups_by_us(data: bytes) -> Any:
    return parse_group_map(data, "path")


# Random messages, with all that the wire format permits and some that it does not.

rarely = st.sampled_from([False] * 79 + [True])


@st.composite
def varints(draw: st.DrawFn, number: int, longest: int) -> bytes:
    """A varint, rarely with bytes that it does not need, up to one more than the library reads."""
    data = varint(number)
    extra = draw(st.integers(0, longest + 1 - len(data))) if draw(rarely) else 0
    return data if not extra else data[:-1] + bytes([data[-1] | 0x80]) + b"\x80" * (extra - 1) + b"\x00"


integers = (
    st.integers(0, 40) | st.integers(-3, -1) | st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, -(2**63)])
)


@st.composite
def fields_of(draw: st.DrawFn, number: int, declared: str) -> bytes:
    """One field, rarely of another wire type than declared."""
    kind = declared.rstrip("*")
    wire_type = (
        draw(st.sampled_from([0, 1, 2, 5])) if draw(rarely) else 0 if kind in ("int32", "int64", "uint32") else 2
    )
    tag = draw(varints(number << 3 | wire_type, 5))
    if wire_type == 0:
        return tag + draw(varints(draw(integers), 10))
    if wire_type != 2:
        return tag + bytes(8 if wire_type == 1 else 4)
    if kind in KINDS:
        data = draw(messages(kind))
    elif kind == "bytes":
        data = draw(st.sampled_from([b"w", b"x", b"layer.w", "\u00fc".encode()]) | st.text(min_size=1).map(str.encode))
    else:
        data = b"".join(draw(st.lists(integers.flatmap(lambda value: varints(value, 10)), max_size=3)))
    return tag + draw(varints(len(data), 5)) + data


@st.composite
def messages(draw: st.DrawFn, kind: str) -> bytes:
    known = [(number, declared) for _, number, declared in KINDS[kind]]
    repeated = [entry for entry in known if entry[1].endswith("*") or kind == "ParallelLayoutItem"]
    chosen = [entry for entry in known if not draw(rarely)] + draw(
        st.lists(st.sampled_from(repeated or known), max_size=2)
    )
    if draw(st.booleans()):
        chosen = draw(st.permutations(chosen))
    parts = [draw(fields_of(number, declared)) for number, declared in chosen]
    if draw(rarely):
        parts.insert(draw(st.integers(0, len(parts))), draw(fields_of(draw(st.integers(0, 20)), "bytes")))
    return b"".join(parts)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    data = bytearray(draw(whole))
    if data and not draw(st.integers(0, 2)):
        for _ in range(draw(st.integers(0, 3))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        if draw(st.booleans()):
            del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


def walk(data: bytes) -> Iterator[tuple[int, int, Union[int, bytes]]]:
    """Number, wire type and value of every field of an undamaged message, to the first group."""
    position = 0
    while position < len(data):
        key, position = varint_at(data, position)
        wire_type = key & 7
        if wire_type == 0:
            value, position = varint_at(data, position)
            yield key >> 3, wire_type, value
            continue
        size = {1: 8, 5: 4, GROUP: 0}.get(wire_type)
        if size is None:
            size, position = varint_at(data, position)
        yield key >> 3, wire_type, data[position : position + size]
        if wire_type == GROUP:
            return
        position += size


def has_group(kind: str, data: bytes) -> bool:
    """Whether an undamaged message, or one of its messages, has a group."""
    kinds = {number: declared.rstrip("*") for _, number, declared in KINDS[kind]}
    return any(
        wire_type == GROUP
        or (
            wire_type == 2
            and kinds.get(number) in KINDS
            and isinstance(value, bytes)
            and has_group(kinds[number], value)
        )
        for number, wire_type, value in walk(data)
    )


def outcome(parse: Any, data: bytes) -> Any:
    try:
        return parse(data)
    except (StrategyError, Refused):
        return REFUSED


def agree(kind: str, by_us: Any, by_library: Any, data: bytes) -> None:
    expected, result = outcome(by_library, data), outcome(by_us, data)
    if expected is None:
        # A damaged name may be found before other damage.
        assert result in (None, REFUSED)
    elif has_group(kind, data):
        assert result in (None, expected)
    else:
        assert result == expected


@not_in_pure_python
@given(damaged(messages("ParallelStrategyMap")))
def test_strategies_are_read_as_by_the_library(data: bytes) -> None:
    agree("ParallelStrategyMap", strategy_by_us, strategy_by_library, data)


@not_in_pure_python
@given(damaged(messages("ParallelGroupMap")))
def test_groups_are_read_as_by_the_library(data: bytes) -> None:
    agree("ParallelGroupMap", groups_by_us, groups_by_library, data)


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
    "a group": varint(9 << 3 | GROUP) + varint(9 << 3 | END_OF_GROUP),
}


@pytest.mark.parametrize(("added", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_numbers_and_fields_are_read_in_every_encoding(added: bytes, changes: dict[str, Any]) -> None:
    file = parse_strategy(strategy(layouts=added), "path")
    assert file is not None and file.layouts == {"w": RECORDED._replace(**changes)}
    agree("ParallelStrategyMap", strategy_by_us, strategy_by_library, strategy(layouts=added))


@not_in_pure_python
@pytest.mark.parametrize("added", DAMAGED.values(), ids=DAMAGED)
def test_damage_at_any_depth_is_no_strategy(added: bytes) -> None:
    deepest = strategy(layouts=field(2, added))
    for data in (strategy() + added, strategy(added), strategy(field(2, added)), strategy(layouts=added), deepest):
        assert parse_strategy(data, "path") is None
        agree("ParallelStrategyMap", strategy_by_us, strategy_by_library, data)


@pytest.mark.parametrize("numbers", [b"\x80", b"\x80" * 10 + b"\x00", b"\x01\xff"])
def test_damaged_packed_numbers_are_no_strategy(numbers: bytes) -> None:
    data = strategy(layouts=field(2, field(1, numbers)))
    assert parse_strategy(data, "path") is None
    agree("ParallelStrategyMap", strategy_by_us, strategy_by_library, data)


def test_occurrences_of_a_message_are_merged() -> None:
    more = field(2, field(1, 7) + field(2, numbers([4, 1]))) + field(2, field(2, numbers([2, 2])))
    file = parse_strategy(strategy(item=more), "path")
    assert file is not None and file.items == (StrategyItem("MatMul-0", 7, ((4, 1), (2, 2))),)
    # An unfinished occurrence is damage, even if the next one would finish it.
    assert parse_strategy(strategy(item=field(2, b"\x12\x02\x08") + field(2, b"\x04")), "path") is None


@pytest.mark.parametrize("lacking", ["node_name", "stage", "current_stage", "field"])
def test_a_strategy_without_a_required_field_is_none(lacking: str) -> None:
    whole = {"node_name": field(1, "n"), "stage": field(1, 0), "current_stage": field(1, 0), "field": field(5, 0)}

    def data(**kept: bytes) -> bytes:
        layouts = kept["field"] + field(6, 0) + field(7, 0)
        item = field(2, kept["node_name"] + field(2, kept["stage"]))
        return kept["current_stage"] + item + field(3, field(1, "w") + field(2, layouts))

    assert parse_strategy(data(**whole), "path") is not None
    assert parse_strategy(data(**{**whole, lacking: b""}), "path") is None
