"""Damage to valid files: random bytes, or the structure of protobuf, JSON and pickles."""

from __future__ import annotations

import json
import pickle
import pickletools
import struct
from random import Random
from typing import Any

from tests.wire import fields, varint

NUMBERS = [0, 1, 2, 3, 5, 8, 63, 64, 127, 128, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
NAMES = ["w", "", "0-w", "1-w", "\0", "../x", "é", "crc_num", "__metadata__", "Int4", "str", "Float32", "U8", "x" * 99]

Node = tuple[int, int, Any]


def mutated(seed: bytes, others: list[bytes], random: Random) -> bytes:
    """One to four changes of a valid file, of which parts of the others may become a part."""
    data = seed
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        if data[:1] == b"{" and random.random() < 0.7:
            data = changed_json(data, random)
        elif data[8:9] == b"{" and random.random() < 0.7:
            header = changed_json(data[8 : 8 + int.from_bytes(data[:8], "little")], random)
            data = struct.pack("<Q", len(header)) + header + data[8 + int.from_bytes(data[:8], "little") :]
        elif data[:1] == pickle.PROTO and random.random() < 0.7:
            data = changed_pickle(data, random)
        elif random.random() < 0.5:
            data = changed_message(data, random)
        else:
            data = changed_bytes(data, others, random)
    return data[: 1 << 16]


def changed_bytes(data: bytes, others: list[bytes], random: Random) -> bytes:
    """The bytes with one blind change."""
    at = random.randrange(len(data) + 1)
    end = min(len(data), at + random.choice([1, 1, 2, 4, 8, 16, 100]))
    kind = random.randrange(8)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[end:]
    if kind == 2:
        return data[:end] + data[at:end] * random.choice([1, 2, 40]) + data[end:]
    if kind == 3:
        other = random.choice(others)
        begin = random.randrange(len(other) + 1)
        return data[:at] + other[begin : begin + random.choice([4, 20, 10**6])] + data[end:]
    if kind == 4:
        return data[:at] + varint(random.choice(NUMBERS)) + data[end:]
    if kind == 5:
        odd = [b"\0", b"\x7f", b"\x80", b"\xff", b"{", b"[", b'"', b"\xff" * 11]
        return data[:at] + random.choice(odd) + data[end:]
    if kind == 6 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    return data[:at] + bytes(random.randrange(256) for _ in range(random.randrange(9))) + data[at:]


def tree_of(message: bytes, depth: int = 5) -> list[Node] | bytes:
    """The fields of a message, each (number, wire type, value); bytes that are no message as they are."""
    try:
        actual = list(fields(message))
    except (AssertionError, IndexError):
        return message
    if any(number == 0 for number, _ in actual) or not actual or not depth:
        return message
    return [
        (number, 0, value) if isinstance(value, int) else (number, 2, tree_of(value, depth - 1))
        for number, value in actual
    ]


def bytes_of(tree: list[Node] | bytes) -> bytes:
    """The message of a tree, every length as it has to be."""
    if isinstance(tree, bytes):
        return tree
    out = b""
    for number, kind, value in tree:
        out += varint(number << 3 | kind)
        if kind == 0:
            out += varint(value)
        elif kind == 2:
            inner = bytes_of(value)
            out += varint(len(inner)) + inner
        else:
            out += bytes(8 if kind == 1 else 4 if kind == 5 else 0)
    return out


def changed_message(data: bytes, random: Random) -> bytes:
    """A message with one field dropped, doubled, moved or given another value or type; bytes otherwise."""
    tree = tree_of(data)
    if isinstance(tree, bytes):
        return changed_bytes(data, [data], random)
    here = tree
    while True:
        place = random.randrange(len(here))
        number, kind, value = here[place]
        if kind != 2 or not isinstance(value, list) or random.random() < 0.25:
            break
        here = value
    change = random.randrange(7)
    if change < 3:
        _rearrange(here, place, change, random)
    elif change == 3:
        here[place] = (random.choice([1, 2, 3, 4, 7, 15, 2**28]), kind, value)
    elif change == 4:
        here[place] = (number, random.choice([1, 3, 4, 5, 6, 7]), value)
    elif kind == 0:
        here[place] = (number, 0, random.choice(NUMBERS))
    else:
        here[place] = (number, 2, random.choice(NAMES).encode() if change == 5 else b"")
    return bytes_of(tree)


def _rearrange(items: list[Any], place: int, change: int, random: Random, first: int = 0) -> None:
    """Drop (0), repeat (1) or move (2) one of several items; those before ``first`` keep their places."""
    if change == 1:
        items[place:place] = [items[place]] * random.choice([1, 1, 2, 70])
        return
    item = items.pop(place)
    if change == 2:
        items.insert(random.randrange(first, len(items) + 1), item)


def changed_json(data: bytes, random: Random) -> bytes:
    """JSON with one value replaced, dropped or doubled; bytes where it is none."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return changed_bytes(data, [data], random)
    here: Any = content
    while isinstance(here, (dict, list)) and here:
        place: Any = random.choice(list(here)) if isinstance(here, dict) else random.randrange(len(here))
        inner = here[place]
        if not (isinstance(inner, (dict, list)) and inner) or random.random() < 0.25:
            change = random.randrange(4)
            if isinstance(inner, str) and inner[:1] == "{" and random.random() < 0.75:
                # JSON in JSON, as in the metadata of safetensors files.
                here[place] = changed_json(inner.encode(), random).decode(errors="replace")
            elif change == 0:
                del here[place]
            elif change == 1 and isinstance(here, dict):
                here[random.choice(NAMES)] = inner
            elif isinstance(here, list) and change == 1:
                here.extend([inner] * random.choice([1, 2, 70]))
            else:
                odd: list[Any] = [None, True, 1.5, -1, float("nan"), "", [], {}, [[]], [[1, 0]], {"a": 1}, [0] * 70]
                here[place] = random.choice([*odd, *NUMBERS, *NAMES])
            break
        here = inner
    text = json.dumps(content)
    if random.random() < 0.1:
        # What json.dumps would not write: a key twice, half of a surrogate pair.
        text = text.replace('"w', '"\\ud800', 1) if random.random() < 0.5 else text.replace("{", '{"w":1,"w":2,', 1)
    return text.encode()


def changed_pickle(data: bytes, random: Random) -> bytes:
    """A pickle with one operation dropped, doubled, moved or replaced by one of its kind; bytes where it is none."""
    try:
        places = [(operation.name, at or 0) for operation, _, at in pickletools.genops(data)]
    except (ValueError, Warning):
        return changed_bytes(data, [data], random)
    ends = [at for _, at in places[1:]] + [places[-1][1] + 1]
    # Frames contain lengths, which no change would fit.
    operations = [(name, data[at:end]) for (name, at), end in zip(places, ends) if name != "FRAME"]
    place = random.randrange(1, len(operations))
    name, _ = operations[place]
    change = random.randrange(8)
    if change < 3:
        _rearrange(operations, place, change, random, 1)
    elif change < 5 or not any(kind in name for kind in ("INT", "UNICODE")):
        # Of one kind: another number, text, class, or value that was stored before.
        operations[place] = random.choice([each for each in operations if each[0][:6] == name[:6]])
    else:
        value = random.choice(NAMES) if "UNICODE" in name else random.choice([-1, *NUMBERS])
        operations[place] = (name, pickle.dumps(value, 2)[2:-1].removesuffix(b"q\0"))
    return b"".join(content for _, content in operations)
