"""What is in a `.safetensors` file, from its header, checked as strictly as the library checks it.

The file is a header length (8 bytes, little-endian), a JSON header, and the tensors' bytes, which
must be covered exactly, without holes or overlaps:

    {"__metadata__": {text: text}, name: {"dtype": ..., "shape": [...], "data_offsets": [from, to]}}

The library itself is not used here because it gives no offsets in the file.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, Optional

from reshard.checkpoints.dtypes import FROM_SAFETENSORS, INT4, ITEM_SIZES, SAFETENSORS_NAMES, SUB_BYTE_TYPES
from reshard.checkpoints.tensors import CheckpointIndex, Tensor
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.storage import read_range
from reshard.wording import quoted

METADATA = "__metadata__"
LENGTH_SIZE = 8
LONGEST_HEADER = 1 << 25
"""Most bytes of a header. The library allows three times as much, but Python's objects take ten
times the bytes, and a quarter of a million tensors fit in this."""

# A tensor has about eight; each may take a hundred bytes when parsed.
_MOST_VALUES = 1 << 21
_LONGEST_NAME = 1 << 14
_MOST_DIMS = 64
_SHOWN = 100

_KNOWN_TYPES = FROM_SAFETENSORS.keys() | SUB_BYTE_TYPES
_LARGEST_NUMBER = (1 << 64) - 1


def read_safetensors_index(fd: int, path: str, size: int) -> CheckpointIndex:
    """Read the header of a safetensors file.

    Args:
        fd: descriptor of the file, open for reading; its position is not used.
        path: name of the file, for messages.
        size: bytes of the file.

    Returns:
        Every tensor, in the order of their bytes in the file.

    Raises:
        DamagedCheckpointError: the file is truncated, or its header is not a valid one.
        CheckpointError: a tensor has a type that cannot be cut at bytes.
        OSError: reading failed.
    """
    header, data_start = _read_header(fd, path, size)
    metadata = _metadata(header.pop(METADATA, None), path)
    entries = [_entry(name, info, path) for name, info in header.items()]
    # Tensors of size zero share their offset with the next one: the sort has to put them first.
    entries.sort(key=lambda entry: (entry[3], entry[4]))
    tensors: dict[str, Tensor] = {}
    position = 0
    for name, dtype, shape, start, stop in entries:
        if start != position:
            fault = "overlaps the tensor before it" if start < position else "leaves a hole before it"
            raise _damaged(path, f"{quoted(name)} begins at byte {start} of the data and {fault}", name)
        position = stop
        if metadata.get(name) == INT4:
            if dtype != "Int8":
                raise _damaged(
                    path, f"{quoted(name)} is marked as Int4 but not stored as {SAFETENSORS_NAMES[INT4]}", name
                )
            dtype = INT4
        extents = ((data_start + start, stop - start),) if stop > start else ()
        tensors[name] = Tensor(name, dtype, shape, shape, extents, stop - start)
    if data_start + position != size:
        raise _damaged(path, f"its tensors end at byte {data_start + position}, but the file has {size} bytes")
    return CheckpointIndex(path, "safetensors", size, tensors, _crc(metadata, path), metadata)


def _read_header(fd: int, path: str, size: int) -> tuple[dict[str, Any], int]:
    if size < LENGTH_SIZE:
        raise _damaged(path, f"it has {size} bytes, less than the length of a header")
    length = int.from_bytes(read_range(fd, path, 0, LENGTH_SIZE), "little")
    if length > LONGEST_HEADER:
        raise _damaged(path, f"its header claims {length} bytes, more than the {LONGEST_HEADER} allowed")
    if LENGTH_SIZE + length > size:
        raise _damaged(path, f"its header claims {length} bytes, but the file has {size}: it is truncated")
    text = read_range(fd, path, LENGTH_SIZE, length)
    if text[:1] != b"{":
        raise _damaged(path, "its header does not begin with '{'")
    if text.count(b",") + text.count(b"[") + text.count(b"{") > _MOST_VALUES:
        raise _damaged(path, f"its header holds more than {_MOST_VALUES} values")

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    return header, LENGTH_SIZE + length


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:_SHOWN]!r} occurs twice")
        found[name] = value
    return found


def _integer(digits: str) -> int:
    # Without a bound, a number of millions of digits takes minutes to convert.
    if len(digits) > 20:
        raise ValueError("a number is too large")
    return int(digits)


def _metadata(found: Any, path: str) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise _damaged(path, f"{METADATA} is not a map of texts")
    for key, value in found.items():
        _check_text(key, path)
        _check_text(value, path)
    return found


def _check_text(text: str, path: str) -> None:
    """Refuse half of a surrogate pair, which JSON can name and no output can show."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _damaged(path, f"{text[:_SHOWN]!r} is no text") from error


def _entry(name: str, info: Any, path: str) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, dtype, shape and range in the data of one tensor, each checked by itself."""
    _check_text(name, path)
    if len(name) > _LONGEST_NAME:
        raise _damaged(path, f"the name {name[:_SHOWN]!r}... is too long")
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise _damaged(path, f"{quoted(name)} needs dtype, shape and data_offsets", name)
    stored, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(stored, str) or stored not in _KNOWN_TYPES:
        raise _damaged(path, f"{quoted(name)} has the unknown type {str(stored)[:_SHOWN]!r}", name)
    if stored in SUB_BYTE_TYPES:
        raise CheckpointError(
            f"{path}: {quoted(name)} has type {stored}, whose elements are not whole bytes; it cannot be converted",
            file=path,
            parameter=name,
        )
    dtype = FROM_SAFETENSORS[stored]
    if not _are_numbers(shape) or len(shape) > _MOST_DIMS:
        raise _damaged(path, f"the shape of {quoted(name)} is not a list of sizes", name)
    if not _are_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"the data_offsets of {quoted(name)} are not a range", name)
    expected = ITEM_SIZES[dtype]
    for size in shape:
        expected *= size
        if expected > _LARGEST_NUMBER:
            raise _damaged(path, f"{quoted(name)} is too large", name)
    start, stop = offsets
    if stop - start != expected:
        raise _damaged(
            path, f"{quoted(name)} has {stop - start} bytes, but {stored} of shape {shape} takes {expected}", name
        )
    return name, dtype, tuple(shape), start, stop


def _are_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(type(entry) is int and 0 <= entry <= _LARGEST_NUMBER for entry in found)


def _crc(metadata: dict[str, str], path: str) -> Optional[int]:
    text = metadata.get("crc_num")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise _damaged(path, f"its crc_num {text[:40]!r} is not a number")
    return int(text)


def _damaged(path: str, what: str, name: Optional[str] = None) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path}: is damaged, or no safetensors file: {what}", file=path, parameter=name)
