"""The protobuf form of strategy files, and the group_info files that share its messages.

The wire format is read and written here, not by the protobuf library. These few messages need a small part of it, the
library takes as long to load as a strategy takes to read, and a hostile file may make it take fifty times its size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Optional, Union

from reshard.errors import StrategyError
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem
from reshard.text.wording import quoted

# Field: name, number, type. "list" is a message whose field 1 is a list of numbers. A field with "*" is repeated; all
# others are required.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "ParallelStrategys": (("stage", 1, "uint32"), ("parallel_strategy", 2, "list uint32*")),
    "ParallelStrategyItem": (("node_name", 1, "bytes"), ("parallel_strategys", 2, "ParallelStrategys")),
    "ParallelLayouts": (
        ("dev_matrix", 1, "list uint32*"),
        ("tensor_map", 2, "list int32*"),
        ("param_split_shape", 3, "list int64*"),
        ("indices_offset", 4, "list int64*"),
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
    "ParallelGroupItem": (("group_name", 1, "bytes"), ("parallel_group_ranks", 2, "list uint32")),
}
# Bits, and whether numbers are signed.
_NUMBERS = {"uint32": (32, False), "int32": (32, True), "int64": (64, True)}
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
            strategys = item["parallel_strategys"]
            strategies = strategys["parallel_strategy"]
            items.append(StrategyItem(_text(item["node_name"], path), strategys["stage"], strategies))
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
    name = ""
    try:
        items = []
        for item in file.items:
            name = item.node
            strategys = {"stage": item.stage, "parallel_strategy": item.strategies}
            items.append({"node_name": name.encode(), "parallel_strategys": strategys})
        layouts = []
        for name, recorded in file.layouts.items():
            # A single map would be read as a flat one.
            end = [()] if recorded.nested and len(recorded.tensor_maps) == 1 else []
            described = {
                "dev_matrix": [recorded.device_matrix],
                "tensor_map": [*recorded.tensor_maps, *end],
                "param_split_shape": [recorded.split_sizes],
                "indices_offset": [recorded.split_offsets],
                "field": recorded.field,
                "opt_weight_shard_step": recorded.shard_step,
                "opt_weight_shard_size": recorded.shard_size,
            }
            layouts.append({"param_name": name.encode(), "parallel_layouts": _encoded("ParallelLayouts", described)})
        content = {
            "current_stage": file.current_stage,
            "parallel_strategy_item": items,
            "parallel_layout_item": layouts,
        }
        return _encoded("ParallelStrategyMap", content)
    except ValueError as error:
        raise StrategyError(f"{quoted(name)} cannot be written to {file.path}: {error}", file=file.path) from error


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
    try:
        # In the wire format, parts of one message are concatenated.
        restore = _numbers(b"".join(lists), "uint32")
        items = [_decoded("ParallelGroupItem", value) for number, value in outer if number == 1]
    except _NotAMessage:
        return None
    return restore, tuple((_text(item["group_name"], path), item["parallel_group_ranks"]) for item in items)


def _recorded(layouts: Mapping[str, Any], path: str, name: str) -> RecordedLayout:
    def only(field: str) -> tuple[int, ...]:
        parts: tuple[tuple[int, ...], ...] = layouts[field]
        if len(parts) > 1:
            problem = f"{path}: parameter {quoted(name)} has {len(parts)} {field} entries"
            raise StrategyError(problem, file=path, parameter=name)
        return parts[0] if parts else ()

    return RecordedLayout(
        device_matrix=only("dev_matrix"),
        tensor_maps=layouts["tensor_map"],
        nested=len(layouts["tensor_map"]) > 1,
        field=layouts["field"],
        shard_step=layouts["opt_weight_shard_step"],
        shard_size=layouts["opt_weight_shard_size"],
        split_sizes=only("param_split_shape"),
        split_offsets=only("indices_offset"),
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
    """Number and value of every field of the outermost message; numbers of fixed size are skipped.

    Raises:
        _NotAMessage: the bytes are damaged.
    """
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise _NotAMessage
        if wire_type == 0:
            value, position = _varint(data, position)
            yield number, value
        elif wire_type == 2:
            length, start = _varint(data, position)
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


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    try:
        byte = data[position]
        if byte < 0x80:
            return byte, position + 1
        value = byte & 0x7F
        for length in range(1, 10):
            byte = data[position + length]
            value |= (byte & 0x7F) << 7 * length
            if byte < 0x80:
                return value, position + length + 1
    except IndexError:
        pass
    raise _NotAMessage


def _decoded(kind: str, value: Union[int, bytes]) -> dict[str, Any]:
    """The fields of a message by name.

    Raises:
        _NotAMessage: the bytes are damaged, or lack a required field.
    """
    if isinstance(value, int):
        raise _NotAMessage
    parts: dict[int, list[Union[int, bytes]]] = {}
    for number, part in _fields(value):
        parts.setdefault(number, []).append(part)
    message: dict[str, Any] = {}
    for name, number, declared in _MESSAGES[kind]:
        type, repeated = declared.rstrip("*"), declared.endswith("*")
        # A field of another wire type is an unknown field.
        values = [part for part in parts.get(number, ()) if isinstance(part, int) == (type in _NUMBERS)]
        if not values and not repeated:
            raise _NotAMessage
        if type in _NUMBERS:
            message[name] = _number(values[-1], type)
        elif type == "bytes":
            message[name] = values[-1]
        elif repeated:
            message[name] = tuple(_numbers(part, type.partition(" ")[2]) for part in values)
        else:
            joined = b"".join(part for part in values if isinstance(part, bytes))
            numbers = type.partition(" ")[2]
            message[name] = _numbers(joined, numbers) if numbers else _decoded(type, joined)
    return message


def _numbers(data: Union[int, bytes], type: str) -> tuple[int, ...]:
    """The numbers of a list, which may be packed.

    Raises:
        _NotAMessage: the bytes are damaged.
    """
    assert isinstance(data, bytes)
    numbers = []
    for number, value in _fields(data):
        if number != 1:
            continue
        if isinstance(value, int):
            numbers.append(_number(value, type))
            continue
        position = 0
        while position < len(value):
            packed, position = _varint(value, position)
            numbers.append(_number(packed, type))
    return tuple(numbers)


def _number(value: Union[int, bytes], type: str) -> int:
    """A varint as a number of a type, which keeps its lowest bits."""
    assert isinstance(value, int)
    bits, signed = _NUMBERS[type]
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> bits - 1 else value


def _encoded(kind: str, message: Mapping[str, Any]) -> bytes:
    """The bytes of a message, given its fields by name; inner messages may be encoded already.

    Raises:
        ValueError: a number does not fit its field.
    """
    data = bytearray()
    for name, number, declared in _MESSAGES[kind]:
        type = declared.rstrip("*")
        for value in message[name] if declared.endswith("*") else [message[name]]:
            if type in _NUMBERS:
                data += _key(number, 0) + _encoded_number(value, type)
                continue
            if type.startswith("list "):
                value = b"".join(_key(1, 0) + _encoded_number(each, type[len("list ") :]) for each in value)
            elif not isinstance(value, bytes):
                value = _encoded(type, value)
            data += _key(number, 2) + _encoded_varint(len(value)) + value
    return bytes(data)


def _key(number: int, wire_type: int) -> bytes:
    return _encoded_varint(number << 3 | wire_type)


def _encoded_number(value: int, type: str) -> bytes:
    bits, signed = _NUMBERS[type]
    if not (-(1 << bits - 1) <= value < 1 << bits - 1 if signed else 0 <= value < 1 << bits):
        raise ValueError(f"{value} does not fit a number of type {type}")
    return _encoded_varint(value & (1 << 64) - 1)


def _encoded_varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _text(name: bytes, path: str) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        problem = f"{path} is damaged: it contains a name that is not UTF-8: {name!r}"
        raise StrategyError(problem, file=path) from None
    if not text:
        raise StrategyError(f"{path} is damaged: it contains an empty name", file=path)
    return text


def _parsed(kind: str, data: bytes) -> Optional[dict[str, Any]]:
    """The fields of a message, or None if the bytes are damaged or lack a required field."""
    try:
        return _decoded(kind, data)
    except _NotAMessage:
        return None
