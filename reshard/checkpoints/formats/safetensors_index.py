"""The contents of a `.safetensors` file from its header, with all checks of the library.

The file is a header length (8 bytes, little-endian), a JSON header, and the tensors' bytes, without holes or
overlaps:

    {"__metadata__": {text: text}, name: {"dtype": ..., "shape": [...], "data_offsets": [from, to]}}

The library itself is not used here because it returns no offsets in the file.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from reshard.checkpoints.formats.dtypes import FROM_SAFETENSORS, INT4, ITEM_SIZES, SAFETENSORS_NAMES, SUB_BYTE_TYPES
from reshard.checkpoints.formats.tensors import LENGTH_SIZE, LONGEST_HEADER, METADATA, CheckpointIndex, TensorTable
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.storage import ReadableFile, read_range
from reshard.storage.json_text import JsonError, parse_json
from reshard.text.messages import quoted

_SHOWN = 100

_KNOWN_TYPES = FROM_SAFETENSORS.keys() | SUB_BYTE_TYPES


def read_safetensors_index(file: ReadableFile, size: int) -> CheckpointIndex:
    """Read the header of a safetensors file of ``size`` bytes: its tensors in the order of their bytes.

    Tensors of elements that are not whole bytes are a `CheckpointError`.
    """
    path = file.path
    length = _header_length(file, size)
    data = read_range(file, LENGTH_SIZE, length)
    if not data.startswith(b"{"):
        raise _damaged(path, "its header does not begin with '{'")
    try:
        entries = parse_json(data)
    except JsonError as error:
        raise _damaged(path, f"its header: {error}") from error
    metadata = entries.pop(METADATA, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, f"{METADATA} is not a map of texts")
    table = _table(entries, metadata, LENGTH_SIZE + length, file, size)
    return CheckpointIndex(path, "safetensors", size, table, _crc(metadata, path), metadata)


def _header_length(file: ReadableFile, size: int) -> int:
    if size < LENGTH_SIZE:
        raise _damaged(file.path, f"it has {size} bytes, less than the length of a header")
    length = int.from_bytes(read_range(file, 0, LENGTH_SIZE), "little")
    if length > LONGEST_HEADER:
        raise _damaged(file.path, f"its header claims {length} bytes, more than the {LONGEST_HEADER} allowed")
    if LENGTH_SIZE + length > size:
        raise _damaged(file.path, f"its header claims {length} bytes, but the file has {size}: it is truncated")
    return length


def _table(
    entries: dict[str, Any], metadata: dict[str, str], data_start: int, file: ReadableFile, size: int
) -> TensorTable:
    """The tensors in the order of their bytes, after a check for holes and overlaps."""
    path = file.path
    checked = [(*_entry(name, info, path), name) for name, info in entries.items()]
    # A tensor of size zero has the offset of the next tensor, and comes before it.
    checked.sort(key=lambda entry: entry[:2])
    tensors = TensorTable()
    position = 0
    for start, stop, dtype, shape, name in checked:
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
        # Strategies and other files have the same names.
        tensors.add(sys.intern(name), dtype, shape, shape, extents)
    if data_start + position != size:
        raise _damaged(path, f"its tensors end at byte {data_start + position}, but the file has {size} bytes")
    return tensors


def _entry(name: str, info: Any, path: str) -> tuple[int, int, str, tuple[int, ...]]:
    """The checked range in the data, dtype and shape of one tensor."""
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
    if not _are_numbers(shape):
        raise _damaged(path, f"the shape of {quoted(name)} is not a list of sizes", name)
    if not _are_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"the data_offsets of {quoted(name)} are not a range", name)
    expected = ITEM_SIZES[dtype] * math.prod(shape)
    start, stop = offsets
    if stop - start != expected:
        raise _damaged(
            path, f"{quoted(name)} has {stop - start} bytes, but {stored} of shape {shape} takes {expected}", name
        )
    return start, stop, dtype, tuple(shape)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)


def _crc(metadata: dict[str, str], path: str) -> int | None:
    text = metadata.get("crc_num")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise _damaged(path, f"its crc_num {text[:40]!r} is not a number")
    return int(text)


def _damaged(path: str, problem: str, name: str | None = None) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path}: is damaged, or no safetensors file: {problem}", file=path, parameter=name)
