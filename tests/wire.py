"""The protobuf wire format, written and read naively."""

from __future__ import annotations

from collections.abc import Iterator

FieldValue = int | bytes


def varint(number: int) -> bytes:
    """`number` as a varint; negative numbers as their 64-bit two's complement."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: int | str | bytes) -> bytes:
    """One field: integers as varints, text and bytes (messages too) with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint_at(message: bytes, position: int) -> tuple[int, int]:
    """The varint at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def fields(message: bytes) -> Iterator[tuple[int, FieldValue]]:
    """The fields of a message: number, and an int or the bytes."""
    position = 0
    while position < len(message):
        key, position = varint_at(message, position)
        kind = key & 7
        if kind == 0:
            value, position = varint_at(message, position)
            yield key >> 3, value
        elif kind == 2:
            length, position = varint_at(message, position)
            assert position + length <= len(message), "a field ends beyond its message"
            yield key >> 3, message[position : position + length]
            position += length
        else:
            raise AssertionError(f"wire type {kind} does not occur in MindSpore's files")


def messages(message: bytes, number: int) -> list[bytes]:
    """All length-delimited fields of one number."""
    return [value for key, value in fields(message) if key == number and isinstance(value, bytes)]


def integers(message: bytes, number: int = 1) -> list[int]:
    """All varint fields of one number, as signed 64-bit numbers."""
    values = [value for key, value in fields(message) if key == number and isinstance(value, int)]
    return [value - (1 << 64) if value >= 1 << 63 else value for value in values]
