"""MindSpore tensors from safetensors files and to bytes, exactly, bfloat16 included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore
import numpy as np

_DTYPES = {
    "BOOL": (mindspore.bool_, np.bool_),
    "I8": (mindspore.int8, np.int8),
    "U8": (mindspore.uint8, np.uint8),
    "I16": (mindspore.int16, np.int16),
    "U16": (mindspore.uint16, np.uint16),
    "U32": (mindspore.uint32, np.uint32),
    "U64": (mindspore.uint64, np.uint64),
    "I32": (mindspore.int32, np.int32),
    "I64": (mindspore.int64, np.int64),
    "F16": (mindspore.float16, np.float16),
    "F32": (mindspore.float32, np.float32),
    "F64": (mindspore.float64, np.float64),
    "BF16": (mindspore.bfloat16, np.uint16),
}


def dtype_of(name: str) -> Any:
    """MindSpore's dtype, from safetensors' name of it."""
    return _DTYPES[name][0]


def read(path: str) -> dict[str, tuple[str, Any]]:
    """Safetensors' dtype name and the array of every tensor of a file; bfloat16 as its bits."""
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    result = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[start:stop], _DTYPES[entry["dtype"]][1]).reshape(entry["shape"])
        result[name] = (entry["dtype"], array)
    return result


def tensor(dtype: str, array: Any) -> Any:
    """A MindSpore tensor of an array as `read` gives it."""
    if dtype == "BF16":
        # Exact: the upper half of a float32 is the bfloat16.
        wide = (array.astype(np.uint32) << 16).view(np.float32)
        return mindspore.Tensor(wide, mindspore.bfloat16)
    return mindspore.Tensor(np.array(array), dtype_of(dtype))


def plain(value: Any) -> Any:
    """The elements of a MindSpore tensor as a NumPy array; bfloat16 as its bits."""
    if value.dtype == mindspore.bfloat16:
        return (np.asarray(value.float().asnumpy()).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(value.asnumpy())
