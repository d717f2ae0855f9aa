"""Strategy files are read and written as by the protobuf library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import StrategyError
from reshard.strategies import RecordedLayout, StrategyFile, StrategyItem
from reshard.strategies.protobuf_file import parse_group_map, parse_strategy, serialize_strategy
from tests.layouts import examples
from tests.wire import field, varint

FIELDS = {
    "Unsigned": [("dim", 1, "uint32*")],
    "Signed": [("dim", 1, "int32*")],
    "Long": [("dim", 1, "int64*")],
    "Strategys": [("stage", 1, "uint32"), ("strategy", 2, "Unsigned*")],
    "Item": [("node_name", 1, "bytes"), ("strategys", 2, "Strategys")],
    "Layouts": [
        ("dev_matrix", 1, "Unsigned*"),
        ("tensor_map", 2, "Signed*"),
        ("split_shape", 3, "Long*"),
        ("offsets", 4, "Long*"),
        ("field", 5, "int32"),
        ("step", 6, "int32"),
        ("size", 7, "int32"),
    ],
    "LayoutItem": [("name", 1, "bytes"), ("layouts", 2, "Layouts")],
    "Map": [("stage", 1, "uint32"), ("item", 2, "Item*"), ("layout", 3, "LayoutItem*")],
    "GroupItem": [("name", 1, "bytes"), ("ranks", 2, "Unsigned")],
    "GroupMap": [("group", 1, "GroupItem*"), ("restore", 2, "Unsigned")],
}


def library() -> dict[str, Any]:
    """Message classes of the library."""
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "bytes": kinds.TYPE_BYTES,
        "int32": kinds.TYPE_INT32,
        "int64": kinds.TYPE_INT64,
        "uint32": kinds.TYPE_UINT32,
    }
    file = descriptor_pb2.FileDescriptorProto(name="tests.proto", package="tests", syntax="proto2")
    for message, fields in FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, declared in fields:
            kind = declared.rstrip("*")
            label = kinds.LABEL_REPEATED if declared.endswith("*") else kinds.LABEL_REQUIRED
            typed: dict[str, Any] = {"type": scalars.get(kind, kinds.TYPE_MESSAGE)}
            if kind not in scalars:
                typed["type_name"] = f".tests.{kind}"
            described.field.add(name=name, number=number, label=label, **typed)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    older: Any = message_factory
    of = getattr(older, "GetMessageClass", None) or older.MessageFactory(pool).GetPrototype
    return {name: of(pool.FindMessageTypeByName(f"tests.{name}")) for name in FIELDS}


LIBRARY = library()
NUMBERS = st.one_of(st.integers(0, 300), st.integers(-(2**31), 2**32), st.integers(-(2**63), 2**64 - 1))
NOISE = st.one_of(
    st.builds(lambda number, value: field(number, value), st.integers(8, 40), st.integers(0, 300)),
    st.builds(lambda number, value: field(number, value), st.integers(8, 40), st.binary(max_size=3)),
    st.just(varint(9 << 3 | 5) + bytes(4)),
    st.just(varint(9 << 3 | 1) + bytes(8)),
)


@st.composite
def messages(draw: st.DrawFn, kind: str) -> bytes:
    """Bytes of a message: fields in any order and number, lists packed or not, some fields of a wrong type."""
    parts = []
    for _, number, declared in FIELDS[kind]:
        name = declared.rstrip("*")
        count = draw(st.sampled_from([0, 1, 2, 3] if declared.endswith("*") else [1, 1, 1, 1, 1, 1, 2, 0]))
        for _ in range(count):
            if draw(st.integers(0, 30)) == 0:
                value: Any = draw(st.one_of(st.integers(0, 9), st.binary(max_size=2)))
            elif name in FIELDS:
                value = draw(messages(name))
            elif name == "bytes":
                value = draw(st.text("abc.é", min_size=1, max_size=8)).encode()
            elif declared.endswith("*") and draw(st.booleans()):
                value = b"".join(varint(each) for each in draw(st.lists(NUMBERS, max_size=3)))
            else:
                value = draw(NUMBERS)
            parts.append(field(number, value))
    parts += draw(st.lists(NOISE, max_size=1))
    return b"".join(draw(st.permutations(parts)))


@st.composite
def damaged(draw: st.DrawFn, kind: str) -> tuple[bytes, bool]:
    """Bytes of a message, sometimes cut short and with another byte; and whether they are."""
    data = bytearray(draw(messages(kind)))
    damage = bool(data) and draw(st.integers(0, 3)) == 0
    if damage:
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        del data[draw(st.integers(1, len(data))) :]
    return bytes(data), damage


def by_library(kind: str, data: bytes) -> Optional[Any]:
    """The message, or None if the bytes are not one."""
    message = LIBRARY[kind]()
    try:
        message.ParseFromString(data)
    except (DecodeError, ValueError, RuntimeError, SystemError):
        return None
    return message if message.IsInitialized() else None


def test_strategies_are_read_as_by_the_library() -> None:
    accepted = refused = 0

    @examples(400)
    @given(damaged("Map"))
    def check(drawn: tuple[bytes, bool]) -> None:
        data, damage = drawn
        nonlocal accepted, refused
        expected = by_library("Map", data)
        try:
            actual = parse_strategy(data, "s.ckpt")
        except StrategyError:
            # Messages in order whose content is wrong, such as two layouts of one name.
            return
        if expected is None or actual is None:
            # Damage may make an unknown field a group, which the library skips.
            assert actual is None and (expected is None or damage)
            refused += 1
            return
        accepted += 1
        assert actual.current_stage == expected.stage
        assert list(actual.items) == [
            StrategyItem(
                item.node_name.decode(),
                item.strategys.stage,
                tuple(tuple(each.dim) for each in item.strategys.strategy),
            )
            for item in expected.item
        ]
        assert actual.layouts == {item.name.decode(): recorded(item.layouts) for item in expected.layout}

    check()
    assert accepted and refused


def recorded(layouts: Any) -> RecordedLayout:
    """A layout of the library, which has at most one matrix, shape and list of offsets."""
    matrix, shape, offsets = (
        tuple(parts[0].dim) if parts else () for parts in (layouts.dev_matrix, layouts.split_shape, layouts.offsets)
    )
    maps = tuple(tuple(part.dim) for part in layouts.tensor_map)
    return laid_out(matrix, maps, layouts.field, layouts.step, layouts.size, shape, offsets)


def laid_out(
    matrix: Sequence[int],
    maps: Sequence[Sequence[int]],
    field: int,
    step: int,
    size: int,
    shape: Sequence[int],
    offsets: Sequence[int],
) -> RecordedLayout:
    """A layout as it is read from a file."""
    return RecordedLayout(
        tuple(matrix),
        tuple(map(tuple, maps)),
        nested=len(maps) > 1,
        field=field,
        shard_step=step,
        shard_size=size,
        split_sizes=tuple(shape),
        split_offsets=tuple(offsets),
    )


def test_groups_are_read_as_by_the_library() -> None:
    accepted = refused = 0

    @examples(400)
    @given(damaged("GroupMap"))
    def check(drawn: tuple[bytes, bool]) -> None:
        data, damage = drawn
        nonlocal accepted, refused
        expected = by_library("GroupMap", data)
        try:
            actual = parse_group_map(data, "g.pb")
        except StrategyError:
            return
        if expected is None or actual is None:
            assert actual is None and (expected is None or damage)
            refused += 1
            return
        accepted += 1
        assert actual == (
            tuple(expected.restore.dim),
            tuple((group.name.decode(), tuple(group.ranks.dim)) for group in expected.group),
        )

    check()
    assert accepted and refused


LISTS = st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple)
SIGNED = st.integers(-(2**31), 2**31 - 1)
LONG = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple)
LAYOUTS = st.builds(laid_out, LISTS, st.lists(st.lists(SIGNED, max_size=3)), SIGNED, SIGNED, SIGNED, LONG, LONG)


def test_strategies_are_written_as_by_the_library() -> None:
    names = st.text("abcé.", min_size=1, max_size=6)
    items = st.lists(st.builds(StrategyItem, names, st.integers(0, 2**32 - 1), st.lists(LISTS, max_size=3).map(tuple)))

    @examples(200)
    @given(st.integers(0, 2**32 - 1), items, st.dictionaries(names, LAYOUTS, max_size=3))
    def check(stage: int, items: list[StrategyItem], layouts: dict[str, RecordedLayout]) -> None:
        message = LIBRARY["Map"](stage=stage)
        for item in items:
            added = message.item.add(node_name=item.node.encode()).strategys
            added.stage = item.stage
            for strategy in item.strategies:
                added.strategy.add(dim=strategy)
        for name, layout in layouts.items():
            added = message.layout.add(name=name.encode()).layouts
            added.dev_matrix.add(dim=layout.device_matrix)
            for entry in layout.tensor_maps:
                added.tensor_map.add(dim=entry)
            added.split_shape.add(dim=layout.split_sizes)
            added.offsets.add(dim=layout.split_offsets)
            added.field, added.step, added.size = layout.field, layout.shard_step, layout.shard_size
        file = StrategyFile("s.ckpt", "protobuf", tuple(items), layouts, stage)
        assert serialize_strategy(file) == message.SerializeToString(deterministic=True)

    check()


@pytest.mark.parametrize("stage", [-1, 2**32])
def test_a_number_that_does_not_fit_its_field_is_refused(stage: int) -> None:
    with pytest.raises(StrategyError, match="does not fit"):
        serialize_strategy(StrategyFile("s.ckpt", "protobuf", (), {}, stage))
