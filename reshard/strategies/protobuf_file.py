"""The protobuf form of strategy files, and the group_info files that share its messages.

Message types are created at run time, in a separate descriptor pool and package: a process that imported MindSpore
has its messages registered under the usual names. Names are declared as bytes, with the same
encoding, so that this module reports invalid UTF-8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
# bytes, a list of ranks some hundred KB.
_MAX_FIELD = 1 << 22
_MAX_FIELDS = 1 << 20
_MAX_NUMBERS = 1 << 22
Ranks = tuple[int, ...]


def parse_strategy(data: bytes, path: str) -> Optional[StrategyFile]:
    """The content of a strategy file, or None for bytes that are not its message.

    Raises:
        StrategyError: its values are damaged.
    """
    if not _is_message(data):
        return None
    stages = [value for number, value in _fields(data) if number == 1 and isinstance(value, int)]
    if not stages:
        return None
    items: list[StrategyItem] = []
    layouts: dict[str, RecordedLayout] = {}
    distinct: dict[bytes, RecordedLayout] = {}
    numbers = 0
    for number, value in _fields(data):
        if number == 2 and not isinstance(value, int):
            item = _parsed("ParallelStrategyItem", value)
            if item is None:
                return None
            strategys = item.parallel_strategys
            strategies = tuple(tuple(strategy.dim) for strategy in strategys.parallel_strategy)
            items.append(StrategyItem(_text(item.node_name, path), strategys.stage, strategies))
            numbers += sum(len(entry) + 1 for entry in strategies)
        elif number == 3 and not isinstance(value, int):
            parts = _layout_item(value)
            if parts is None:
                return None
            # Checkpoints and other strategies have the same names.
            name = sys.intern(_text(parts[0], path))
            if name in layouts:
                raise StrategyError(f"{path} lists parameter {quoted(name)} twice", file=path, parameter=name)
            recorded = distinct.get(parts[1])
            if recorded is None:
                # Thousands of parameters share tens of layouts.
                message = _parsed("ParallelLayouts", parts[1])
                if message is None:
                    return None
                recorded = distinct[parts[1]] = _recorded(message, path, name)
                numbers += sum(len(entry) + 1 for entry in recorded.tensor_maps)
                numbers += len(recorded.device_matrix) + len(recorded.split_sizes) + len(recorded.split_offsets)
            layouts[name] = recorded
        if numbers > _MAX_NUMBERS:
            raise StrategyError(f"{path} holds more numbers than any strategy file ({_MAX_NUMBERS})", file=path)
    return StrategyFile(path, "protobuf", tuple(items), layouts, stages[-1] & 0xFFFFFFFF)


def _layout_item(data: bytes) -> Optional[tuple[bytes, bytes]]:
    """A ParallelLayoutItem's name, and the message of its layouts; None if the bytes are damaged or one is missing."""
    name: Optional[bytes] = None
    layouts: Optional[bytes] = None
    try:
        for number, value in _fields(data):
            if number == 1 and not isinstance(value, int):
                name = value
            elif number == 2 and not isinstance(value, int):
                # In the wire format, parts of one message are concatenated.
                layouts = value if layouts is None else layouts + value
    except _NotAMessage:
        return None
    return None if name is None or layouts is None else (name, layouts)


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
    if not _is_message(data):
        return None
    outer = list(_fields(data))
    lists = [value for number, value in outer if number == 2 and isinstance(value, bytes)]
    if not lists:
        return None
    # In the wire format, parts of one message are concatenated.
    restore = _parsed("ParallelGroupRanks", b"".join(lists))
    items = [_parsed("ParallelGroupItem", value) for number, value in outer if number == 1 and isinstance(value, bytes)]
    if restore is None or any(item is None for item in items):
        return None
    groups = tuple((_text(item.group_name, path), tuple(item.parallel_group_ranks.dim)) for item in items)
    return tuple(restore.dim), groups


def _recorded(layouts: Any, path: str, name: str) -> RecordedLayout:
    def only(parts: Any, label: str) -> tuple[int, ...]:
        if len(parts) > 1:
            problem = f"{path}: parameter {quoted(name)} has {len(parts)} {label} entries"
            raise StrategyError(problem, file=path, parameter=name)
        return tuple(parts[0].dim) if parts else ()

    return RecordedLayout(
        device_matrix=only(layouts.dev_matrix, "dev_matrix"),
        tensor_maps=tuple(tuple(entry.dim) for entry in layouts.tensor_map),
        nested=len(layouts.tensor_map) > 1,
        field=layouts.field,
        shard_step=layouts.opt_weight_shard_step,
        shard_size=layouts.opt_weight_shard_size,
        split_sizes=only(layouts.param_split_shape, "param_split_shape"),
        split_offsets=only(layouts.indices_offset, "indices_offset"),
    )


class _NotAMessage(Exception):
    """The bytes are not a message."""


def _is_message(data: bytes) -> bool:
    """Whether the bytes are a message, with at most as many fields as a real one."""
    count = 0
    try:
        for _ in _fields(data):
            count += 1
            if count > _MAX_FIELDS:
                return False
    except _NotAMessage:
        return False
    return True


def _fields(data: bytes) -> Iterator[tuple[int, Union[int, bytes]]]:
    """Number and value of every field of the outermost message.

    The library may take fifty times the bytes of a message that contains millions of empty messages,
    so it receives them one by one.

    Raises:
        _NotAMessage: the bytes are damaged.
    """
    position, end = 0, len(data)

    def varint() -> int:
        nonlocal position
        byte = data[position]
        position += 1
        if byte < 0x80:
            return byte
        value = byte & 0x7F
        for shift in range(7, 70, 7):
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise _NotAMessage

    try:
        while position < end:
            key = varint()
            number, wire_type = key >> 3, key & 7
            if not 0 < number < 1 << 29:
                raise _NotAMessage
            if wire_type == 0:
                yield number, varint()
            elif wire_type == 2:
                length = varint()
                start, position = position, position + length
                if length > _MAX_FIELD or position > end:
                    raise _NotAMessage
                yield number, data[start:position]
            elif wire_type in (1, 5):
                position += 8 if wire_type == 1 else 4
                if position > end:
                    raise _NotAMessage
            else:
                raise _NotAMessage
    except IndexError:
        raise _NotAMessage from None


def _text(name: bytes, path: str) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        problem = f"{path} is damaged: it contains a name that is not UTF-8: {name!r}"
        raise StrategyError(problem, file=path) from None
    if not text:
        raise StrategyError(f"{path} is damaged: it contains an empty name", file=path)
    return text


def _parsed(kind: str, data: bytes) -> Any:
    """The message, or None if the bytes are damaged or lack a required field."""
    from google.protobuf.message import DecodeError

    message = _message_class(kind)()
    try:
        message.ParseFromString(data)
    except (DecodeError, ValueError, RuntimeError, SystemError):
        # protobuf 3.20 reports some damage as SystemError.
        return None
    return message if message.IsInitialized() else None


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
