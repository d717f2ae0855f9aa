"""Checkpoint files byte by byte, for tests: records of any shape, right or wrong.

A tensor is an array, or (dtype, dims, content) where a test needs what NumPy does not have or what a
file should not hold. Nothing here uses the code under test.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.wire import field, varint

Parts = tuple[str, Sequence[int], bytes]
Source = npt.NDArray[Any] | Parts

DTYPES = {
    "bool": "Bool",
    "int8": "Int8",
    "uint8": "UInt8",
    "int16": "Int16",
    "uint16": "UInt16",
    "int32": "Int32",
    "uint32": "UInt32",
    "int64": "Int64",
    "uint64": "UInt64",
    "float16": "Float16",
    "float32": "Float32",
    "float64": "Float64",
    "complex64": "Complex64",
}
STORED = {
    **{dtype: dtype.replace("UInt", "U").replace("Int", "I").replace("Float", "F") for dtype in DTYPES.values()},
    "Bool": "BOOL",
    "BFloat16": "BF16",
    "Complex64": "C64",
    "Int4": "I8",
    "F8_E4M3": "F8_E4M3",
    "F8_E5M2": "F8_E5M2",
    "Float8E4M3FN": "F8_E4M3",
    "Float8E5M2": "F8_E5M2",
    "Float8E8M0": "F8_E8M0",
}


def parts(tensor: Source) -> Parts:
    """dtype, dims and content of a tensor; an array's are what MindSpore would record."""
    if isinstance(tensor, tuple):
        return tensor
    return DTYPES[tensor.dtype.name], tensor.shape, tensor.tobytes()


def text(content: str) -> Parts:
    """A text entry, as `append_dict` writes it."""
    return "str", (0,), (content or "\0").encode("utf-32-le")


def tensor_message(dtype: str, dims: Sequence[int], content: bytes) -> bytes:
    return b"".join(field(1, dim) for dim in dims) + field(2, dtype) + field(3, content)


def record(name: str, dtype: str, dims: Sequence[int], content: bytes) -> bytes:
    """One `Checkpoint` message of one value."""
    return field(1, field(1, name) + field(2, tensor_message(dtype, dims, content)))


def map_record(name: str, tensors: Iterable[npt.NDArray[Any]]) -> bytes:
    """A hash-table parameter: keys, values and states, with NumPy's type names."""
    inner = b"".join(field(1, tensor_message(str(a.dtype), a.shape, a.tobytes())) for a in tensors)
    return field(1, field(1, name) + field(3, inner))


def trailer(data: bytes) -> bytes:
    return b"crc_num" + zlib.crc32(data).to_bytes(10, "big")


def ckpt_bytes(tensors: Mapping[str, Source], record_limit: int | None = None, crc: bool = False) -> bytes:
    """A `.ckpt` file; with `record_limit` (bytes) larger tensors take several records, but not text."""
    data = b""
    for name, tensor in tensors.items():
        dtype, dims, content = parts(tensor)
        limit = max(len(content), 1) if record_limit is None or dtype == "str" else record_limit
        for start in range(0, max(len(content), 1), limit):
            data += record(name, dtype, dims, content[start : start + limit])
    return data + trailer(data) if crc else data


def write_ckpt(path: Path, tensors: Mapping[str, Source], record_limit: int | None = None, crc: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ckpt_bytes(tensors, record_limit, crc))
    return path


def header_bytes(header: str | bytes | Mapping[str, Any], pad: int = 8) -> bytes:
    """A safetensors header with its length before it."""
    data = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    data += b" " * (-len(data) % pad)
    return struct.pack("<Q", len(data)) + data


def safetensors_bytes(tensors: Mapping[str, Source], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file; `metadata` as it is, with the marks of Int4 tensors."""
    header: dict[str, Any] = {}
    body = b""
    marks = dict(metadata or {})
    for name, tensor in tensors.items():
        dtype, dims, content = parts(tensor)
        offsets = [len(body), len(body) + len(content)]
        header[name] = {"dtype": STORED[dtype], "shape": list(dims), "data_offsets": offsets}
        body += content
        if dtype == "Int4":
            marks[name] = "Int4"
    if marks:
        header = {"__metadata__": marks, **header}
    return header_bytes(header) + body


def write_safetensors(path: Path, tensors: Mapping[str, Source], metadata: Mapping[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return path


def write_sparse(path: Path, pieces: Iterable[bytes | int]) -> Path:
    """A file of the given bytes and holes (ints, in bytes), which take no space on disk."""
    with open(path, "wb") as file:
        for piece in pieces:
            if isinstance(piece, int):
                file.seek(piece, 1)
            else:
                file.write(piece)
        file.truncate(file.tell())
    return path


def sparse_record(name: str, dtype: str, dims: Sequence[int], size: int) -> Iterator[bytes | int]:
    """A record whose content is a hole of `size` bytes."""
    yield record_head(name, dtype, dims, size)
    yield size


def record_head(name: str, dtype: str, dims: Sequence[int], size: int) -> bytes:
    """What comes before the content of a record, for content of `size` bytes."""
    inner = b"".join(field(1, dim) for dim in dims) + field(2, dtype) + varint(3 << 3 | 2) + varint(size)
    value = field(1, name) + varint(2 << 3 | 2) + varint(len(inner) + size) + inner
    return varint(1 << 3 | 2) + varint(len(value) + size) + value


def random_arrays(seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """A tensor of every type that NumPy has, of several ranks, all with different bytes."""
    random = np.random.RandomState(seed)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for number, dtype in enumerate(DTYPES):
        shape = [(), (1,), (7,), (3, 5), (2, 3, 4)][number % 5]
        size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
        content = random.randint(0, 2 if dtype == "bool" else 256, size, dtype="u1").tobytes()
        arrays[f"layer{number}.{dtype}"] = np.frombuffer(content, dtype).reshape(shape)
    return arrays
