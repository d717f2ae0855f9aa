"""Elements of all types as arrays of numbers, and as elements of another type.

NumPy lacks bfloat16 and 8-bit floats; ml_dtypes has them. It is imported when such a type is needed, because most
conversions need none.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import DTYPES

Words = npt.NDArray[Any]
"""Elements as unsigned integers of their size."""

_BFLOAT16 = "BFloat16"


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype of a type in `DTYPES`, NumPy's or that of ml_dtypes."""
    row = DTYPES[dtype]
    if row.numpy is not None:
        return np.dtype(row.numpy)
    import ml_dtypes

    extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, str(row.extended)))
    return extended


@functools.cache
def table(dtype: str) -> npt.NDArray[np.float32]:
    """The numbers of all 256 words of an 8-bit float: a look-up is several times as fast as the cast of ml_dtypes."""
    numbers: npt.NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float32)
    return numbers


def widen(words: Words, dtype: str) -> npt.NDArray[Any]:
    """Elements as numbers of NumPy: those of types that it lacks as equal Float32, others in their own type.

    Text and unknown types stay as they are.
    """
    if dtype == _BFLOAT16:
        return words.view(numpy_dtype(dtype)).astype(np.float32)
    row = DTYPES.get(dtype)
    if row is None:
        return words
    return table(dtype)[words.view("u1")] if row.numpy is None else words.view(row.numpy)


def cast_words(source: Words, stored: str, dtype: str) -> Words:
    """Elements of one type as another, rounded once to the nearest, ties to even.

    NaN stays NaN, with other bits. Values too large become infinite.

    Args:
        source: words, in any shape and memory layout.
        stored: their type, one of `dtypes.CASTABLE`.
        dtype: the new type, one of `dtypes.CAST_TO`.
    """
    out = np.empty(source.shape, f"u{DTYPES[dtype].size}")
    put_words(source, stored, out, dtype)
    return out


def put_words(source: Words, stored: str, out: Words, dtype: str) -> None:
    """Cast elements into an array of words of the same shape; see `cast_words`."""
    if (stored, dtype) == ("Float64", _BFLOAT16):
        # ml_dtypes rounds to Float32 first.
        source, stored = _narrowed_to_odd(source), "Float32"
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.copyto(out.view(numpy_dtype(dtype)), source.view(numpy_dtype(stored)), casting="unsafe")


def _narrowed_to_odd(source: Words) -> Words:
    """Float64 as Float32 with a sticky last bit: a second rounding then gives the correctly rounded value."""
    wide = source.view("f8")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = wide.astype("f4")
        back = narrow.astype("f8")
    bits = narrow.view("u4")
    inexact = (back != wide) & ~np.isnan(wide)
    # Truncate first: values rounded away from zero go back by one. Then the last bit marks lost bits.
    away = inexact & (np.abs(back) > np.abs(wide))
    bits[away] -= 1
    bits[inexact] |= 1
    return bits


def infinite(words: Words, dtype: str) -> npt.NDArray[np.bool_]:
    """Which elements are infinite; dtype is one of `dtypes.CASTABLE`."""
    one, infinity = words.dtype.type(1), np.array([np.inf], numpy_dtype(dtype)).view(words.dtype)
    # Shifted, the words have no sign. NumPy 1 cannot shift UInt64 by a Python integer.
    flags: npt.NDArray[np.bool_] = np.left_shift(words, one) == np.left_shift(infinity, one)
    return flags
