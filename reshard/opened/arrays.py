"""Elements as NumPy has them: the dtype of every type that files hold, as far as there is one.

NumPy has no bfloat16 and no 8-bit floats. The package ml_dtypes has; where it is not installed, or too
old, such elements are unsigned integers of their size, and the dtype's metadata has their name.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from reshard.checkpoints.formats.dtypes import TEXT

_NUMPY = {
    "Bool": "?",
    "Int4": "i1",
    "Int8": "i1",
    "UInt8": "u1",
    "Int16": "<i2",
    "UInt16": "<u2",
    "Int32": "<i4",
    "UInt32": "<u4",
    "Int64": "<i8",
    "UInt64": "<u8",
    "Float16": "<f2",
    "Float32": "<f4",
    "Float64": "<f8",
    "Complex64": "<c8",
    "Complex128": "<c16",
}
EXTENDED = {
    "BFloat16": "bfloat16",
    "Float8E4M3FN": "float8_e4m3fn",
    "Float8E5M2": "float8_e5m2",
    "Float8E8M0": "float8_e8m0fnu",
    "Float8E4M3FNUZ": "float8_e4m3fnuz",
    "Float8E5M2FNUZ": "float8_e5m2fnuz",
}
"""Types that NumPy lacks, and what ml_dtypes calls them."""
_UNSIGNED = (1, 2, 4, 8)
# Text is stored as UTF-32, which is how NumPy holds it.
_CHARACTER = 4


def numpy_dtype(name: str, item_size: int) -> np.dtype[Any]:
    """The dtype that stands for a type.

    Args:
        name: MindSpore's name of the type.
        item_size: bytes of an element; all of a text is one.
    """
    if name == TEXT:
        return np.dtype(f"<U{item_size // _CHARACTER}")
    known = _NUMPY.get(name)
    if known is not None:
        return np.dtype(known)
    return extended_dtype(name) or stand_in(name, item_size)


def extended_dtype(name: str) -> Optional[np.dtype[Any]]:
    """What ml_dtypes calls a type that NumPy lacks; None where it is not installed, or does not have it."""
    if name not in EXTENDED:
        return None
    try:
        import ml_dtypes
    except ImportError:
        return None
    found = getattr(ml_dtypes, EXTENDED[name], None)
    return None if found is None else np.dtype(found)


def stand_in(name: str, item_size: int) -> np.dtype[Any]:
    """Unsigned integers, or plain bytes, for a type that NumPy lacks; ``metadata["name"]`` is its name."""
    plain = f"<u{item_size}" if item_size in _UNSIGNED else f"V{item_size}"
    # NumPy's stubs know only the second argument of what is no alias.
    make: Any = np.dtype
    made: np.dtype[Any] = make(plain, metadata={"name": name})
    return made


def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype for arrays that are handed out: without metadata, of which `numpy.save` warns."""
    return dtype if dtype.metadata is None else np.dtype(dtype.str)
