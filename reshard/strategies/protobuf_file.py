"""The protobuf form of strategy files, and the group_info files that share its messages.

Files are read without the protobuf library, which takes longer to load than a strategy to read. It writes them.
Its message types are created at run time, in a separate descriptor pool and package: a process that imported
MindSpore has its messages registered under the usual names. Names are declared as bytes, with the same
encoding, so that this module reports invalid UTF-8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Optional, Union

from reshard.errors import StrategyError
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem
from reshard.text.wording import quoted

# Field: name, number, type; "*" marks a repeated field, all others are required.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "ParallelStrategy": (("dim", 1, "uint32*"),),
    "DevMatrix": (("dim", 1, "uint32*"),),
    "TensorMap": (("dim", 1, "int32*"),),
    "ParamSplitShape": (("dim", 1, "int64*"),),
    "IndicesOffset": (("dim", 1, "int64*"),),
    "ParallelGroupRanks": (("dim", 1, "uint32*"),),
    "ParallelStrategys": (("stage", 1, "uint32"), ("parallel_strategy", 2, "ParallelStrategy*")),
    "ParallelStrategyItem": (("node_name", 1, "bytes"), ("parallel_strategys", 2, "ParallelStrategys")),
    "ParallelLayouts": (
        ("dev_matrix", 1, "DevMatrix*"),
        ("tensor_map", 2, "TensorMap*"),
        ("param_split_shape", 3, "ParamSplitShape*"),
        ("indices_offset", 4, "IndicesOffset*"),
        ("field", 5, "int32"),
        ("opt_weight_shard_step", 6, "int32"),
        ("opt_weight_shard_size", 7, "int32"),
    ),
    "ParallelLayoutItem": (("param_name", 1, "bytes"), ("parallel_layouts", 2, "ParallelLayouts")),
    "ParallelStrategyMap": (
        ("current_stage", 1, "uint32"),
        ("parallel_strategy_item", 2, "ParallelStrategyItem*"),
        ("parallel_layout_item", 3, "ParallelLayoutItem*"),
    ),
    "ParallelGroupItem": (("group_name", 1, "bytes"), ("parallel_group_ranks", 2, "ParallelGroupRanks")),
}
_PACKAGE = "reshard.strategies"
# Limits above any real file: some seconds, some hundred MB. An item has some hundred
# bytes, a list of ranks some hundred KB, and a file some tens of different layouts.
_MAX_FIELD = 1 << 22
_MAX_FIELDS = 1 << 20
_MAX_DECODED = 1 << 22
# Bits of the types of numbers.
_BITS = {"int32": 32, "int64": 64, "uint32": 32}
Ranks = tuple[int, ...]
_Parts = tuple[bytes, ...]


def parse_strategy(data: bytes, path: str) -> Optional[StrategyFile]:
    """The content of a strategy file, or None for bytes that are not its message.

    Raises:
        StrategyError: its values are damaged.
    """
    try:
        # The whole message is checked before any of its values is.
        stages = [value for number, value in _fields(data) if number == 1 and isinstance(value, int)]
        return _strategy(data, path, stages[-1] & 0xFFFFFFFF) if stages else None
    except _NotAMessage:
        return None


def _strategy(data: bytes, path: str, current_stage: int) -> StrategyFile:
    items: list[StrategyItem] = []
    layouts: dict[str, RecordedLayout] = {}
    # Thousands of operators and parameters share tens of strategies and layouts.
    strategys: dict[_Parts, tuple[int, tuple[Ranks, ...]]] = {}
    distinct: dict[_Parts, RecordedLayout] = {}
    decoded = 0

    def counted(parts: _Parts) -> _Parts:
        nonlocal decoded
        decoded += sum(map(len, parts))
        if decoded > _MAX_DECODED:
            problem = f"{path} holds more numbers than any strategy file ({_MAX_DECODED >> 20} MiB without repetitions)"
            raise StrategyError(problem, file=path)
        return parts

    for number, value in _fields(data):
        if number == 2 and not isinstance(value, int):
            node, parts = _named(value)
            known = strategys.get(parts)
            if known is None:
                stage, repeated = _values("ParallelStrategys", counted(parts))
                known = strategys[parts] = stage, tuple(dims for (dims,) in repeated)
            items.append(StrategyItem(_text(node, path), *known))
        elif number == 3 and not isinstance(value, int):
            label, parts = _named(value)
            # Checkpoints and other strategies have the same names.
            name = sys.intern(_text(label, path))
            if name in layouts:
                raise StrategyError(f"{path} lists parameter {quoted(name)} twice", file=path, parameter=name)
            recorded = distinct.get(parts)
            if recorded is None:
                recorded = distinct[parts] = _recorded(counted(parts), path, name)
            layouts[name] = recorded
    return StrategyFile(path, "protobuf", tuple(items), layouts, current_stage)


def serialize_strategy(file: StrategyFile) -> bytes:
    """The bytes of a strategy file, which MindSpore reads as its own.

    Raises:
        StrategyError: a number does not fit its field.
    """
    message = _message_class("ParallelStrategyMap")(current_stage=file.current_stage)
    name = ""
    try:
        for item in file.items:
            name = item.node
            added = message.parallel_strategy_item.add(node_name=item.node.encode())
            added.parallel_strategys.stage = item.stage
            for strategy in item.strategies:
                added.parallel_strategys.parallel_strategy.add(dim=strategy)
        for name, recorded in file.layouts.items():
            layouts = message.parallel_layout_item.add(param_name=name.encode()).parallel_layouts
            layouts.dev_matrix.add(dim=recorded.device_matrix)
            for entry in recorded.tensor_maps:
                layouts.tensor_map.add(dim=entry)
            if recorded.nested and len(recorded.tensor_maps) == 1:
                # A single map would be read as a flat one.
                layouts.tensor_map.add()
            layouts.param_split_shape.add(dim=recorded.split_sizes)
            layouts.indices_offset.add(dim=recorded.split_offsets)
            layouts.field = recorded.field
            layouts.opt_weight_shard_step = recorded.shard_step
            layouts.opt_weight_shard_size = recorded.shard_size
    except ValueError as error:
        raise StrategyError(f"{quoted(name)} cannot be written to {file.path}: {error}", file=file.path) from error
    return bytes(message.SerializeToString(deterministic=True))


def parse_group_map(data: bytes, path: str) -> Optional[tuple[Ranks, tuple[tuple[str, Ranks], ...]]]:
    """The restore list and the named groups of a group_info file, or None for other bytes.

    Raises:
        StrategyError: a group's name is damaged.
    """
    try:
        outer = list(_fields(data))
        lists = tuple(value for number, value in outer if number == 2 and isinstance(value, bytes))
        if not lists:
            return None
        (restore,) = _values("ParallelGroupRanks", lists)
        items = [_named(value) for number, value in outer if number == 1 and isinstance(value, bytes)]
        groups = [(name, *_values("ParallelGroupRanks", parts)) for name, parts in items]
    except _NotAMessage:
        return None
    return restore, tuple((_text(name, path), ranks) for name, ranks in groups)


def _recorded(parts: _Parts, path: str, name: str) -> RecordedLayout:
    matrices, maps, sizes, offsets, field, shard_step, shard_size = _values("ParallelLayouts", parts)

    def only(entries: Sequence[tuple[Ranks]], label: str) -> Ranks:
        if len(entries) > 1:
            problem = f"{path}: parameter {quoted(name)} has {len(entries)} {label} entries"
            raise StrategyError(problem, file=path, parameter=name)
        return entries[0][0] if entries else ()

    return RecordedLayout(
        device_matrix=only(matrices, "dev_matrix"),
        tensor_maps=tuple(dims for (dims,) in maps),
        nested=len(maps) > 1,
        field=field,
        shard_step=shard_step,
        shard_size=shard_size,
        split_sizes=only(sizes, "param_split_shape"),
        split_offsets=only(offsets, "indices_offset"),
    )


class _NotAMessage(Exception):
    """The bytes are not a message."""


def _named(data: bytes) -> tuple[bytes, _Parts]:
    """The two fields of a message that consists of a name and a message.

    Raises:
        _NotAMessage: the bytes are damaged, or a field is missing.
    """
    name: Optional[bytes] = None
    parts: list[bytes] = []
    for number, value in _fields(data):
        if number == 1 and not isinstance(value, int):
            name = value
        elif number == 2 and not isinstance(value, int):
            parts.append(value)
    if name is None or not parts:
        raise _NotAMessage
    return name, tuple(parts)


def _values(kind: str, parts: _Parts) -> tuple[Any, ...]:
    """The values of a message's fields, in the order of `_MESSAGES`; a tuple for a repeated field.

    Args:
        kind: a message of `_MESSAGES` without fields that are bytes or single messages.
        parts: the occurrences of the message, which the wire format merges.

    Raises:
        _NotAMessage: the bytes are damaged, or a required field is missing.
    """
    occurrences: dict[int, list[Union[int, bytes]]] = {number: [] for _, number, _ in _MESSAGES[kind]}
    for part in parts:
        for number, value in _fields(part):
            # As in the library, a field of another type is an unknown field.
            if number in occurrences:
                occurrences[number].append(value)
    return tuple([_value(declared, occurrences[number]) for _, number, declared in _MESSAGES[kind]])


def _value(declared: str, occurrences: list[Union[int, bytes]]) -> Any:
    kind = declared.rstrip("*")
    if kind not in _BITS:
        messages = [value for value in occurrences if not isinstance(value, int)]
        # Equal dimensions have equal maps.
        values = {message: _values(kind, (message,)) for message in set(messages)}
        return tuple([values[message] for message in messages])
    if kind == declared:
        scalars = [value for value in occurrences if isinstance(value, int)]
        if not scalars:
            raise _NotAMessage
        return _number(kind, scalars[-1])
    numbers: list[int] = []
    for value in occurrences:
        if isinstance(value, int):
            numbers.append(_number(kind, value))
        else:
            position = 0
            while position < len(value):
                number, position = _varint(value, position, 10)
                numbers.append(_number(kind, number))
    return tuple(numbers)


def _number(kind: str, value: int) -> int:
    """The number of a varint, cut and signed as by the library."""
    if value < 1 << 31:
        return value
    bits = _BITS[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind != "uint32" and value >> bits - 1 else value


def _fields(data: bytes) -> Iterator[tuple[int, Union[int, bytes]]]:
    """Number and value of every field of the outermost message.

    Numbers of fixed size are skipped: MindSpore's messages have none. Groups are damage: they have no groups either,
    nor have newer messages of any program.

    Raises:
        _NotAMessage: the bytes are damaged, or have more fields than any real message.
    """
    position, end = 0, len(data)
    count = 0
    while position < end:
        count += 1
        key, position = (data[position], position + 1) if data[position] < 0x80 else _varint(data, position, 5)
        number, wire_type = key >> 3, key & 7
        if not 0 < number < 1 << 29 or count > _MAX_FIELDS:
            raise _NotAMessage
        if wire_type == 0:
            value, position = _varint(data, position, 10)
            yield number, value
        elif wire_type == 2:
            length, start = _varint(data, position, 5)
            position = start + length
            if length > _MAX_FIELD or position > end:
                raise _NotAMessage
            yield number, data[start:position]
        elif wire_type in (1, 5):
            position += 8 if wire_type == 1 else 4
            if position > end:
                raise _NotAMessage
        else:
            raise _NotAMessage


def _varint(data: bytes, position: int, longest: int) -> tuple[int, int]:
    """The number of at most `longest` bytes at a position, and the position after it.

    Raises:
        _NotAMessage: it is longer, or the data ends within it.
    """
    if position < len(data) and data[position] < 0x80:
        # Most numbers.
        return data[position], position + 1
    value = 0
    for shift, byte in zip(range(0, 7 * longest, 7), data[position : position + longest]):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + shift // 7 + 1
    raise _NotAMessage


def _text(name: bytes, path: str) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        problem = f"{path} is damaged: it contains a name that is not UTF-8: {name!r}"
        raise StrategyError(problem, file=path) from None
    if not text:
        raise StrategyError(f"{path} is damaged: it contains an empty name", file=path)
    return text


@cache
def _message_class(name: str) -> Any:
    from google.protobuf import message_factory

    descriptor = _pool().FindMessageTypeByName(f"{_PACKAGE}.{name}")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    older: Any = message_factory
    return older.MessageFactory(_pool()).GetPrototype(descriptor)


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    field_type = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "bytes": field_type.TYPE_BYTES,
        "int32": field_type.TYPE_INT32,
        "int64": field_type.TYPE_INT64,
        "uint32": field_type.TYPE_UINT32,
    }
    file = descriptor_pb2.FileDescriptorProto(name="reshard.proto", package=_PACKAGE, syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, declared in fields:
            kind = declared.rstrip("*")
            label = field_type.LABEL_REPEATED if declared.endswith("*") else field_type.LABEL_REQUIRED
            if kind in scalars:
                described.field.add(name=name, number=number, label=label, type=scalars[kind])
            else:
                described.field.add(
                    name=name,
                    number=number,
                    label=label,
                    type=field_type.TYPE_MESSAGE,
                    type_name=f".{_PACKAGE}.{kind}",
                )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool
