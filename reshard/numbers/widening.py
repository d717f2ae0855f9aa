"""Elements of files as numbers to compute with.

NumPy computes with no bfloat16 and no 8-bit floats: the one is the upper half of a Float32, the others
are looked up. Float64 holds all of them exactly, and all integers up to 32 bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]

AT_ONCE = 1 << 16
"""Elements that are computed with at a time: as many as a core's cache holds, with what is made of them."""

FLOATS = ("Float16", "BFloat16", "Float32", "Float64")
_PLAIN = {"Float16": "<f2", "Float32": "<f4", "Float64": "<f8"}
INTEGERS = {"Int16": "<i2", "UInt16": "<u2", "Int32": "<i4", "UInt32": "<u4", "Int64": "<i8", "UInt64": "<u8"}
COMPLEX = {"Complex64": "<c8", "Complex128": "<c16"}

_FLOAT16_INF = 0x7C00
_FLOAT16_MINUS_INF = 0xFC00
# The sign, and 15 bits less far up than a Float32 has room for.
_FLOAT16_BITS = np.int32(0x0FFFFFFF - (1 << 31))
_FLOAT16_SCALE = np.float32(2.0 ** (127 - 15))


class _Float8(NamedTuple):
    """A type of 8-bit floats.

    Attributes:
        mantissa: its bits.
        bias: of the exponent.
        ieee: the largest exponent is of infinities and NaN.
        negative_zero: there is one; else its bits are the only NaN.
    """

    mantissa: int
    bias: int
    ieee: bool
    negative_zero: bool


_FLOAT8 = {
    "Float8E4M3FN": _Float8(3, 7, False, True),
    "Float8E5M2": _Float8(2, 15, True, True),
    "Float8E4M3FNUZ": _Float8(3, 8, False, False),
    "Float8E5M2FNUZ": _Float8(2, 16, False, False),
}
_EXPONENTS = "Float8E8M0"
BYTES = ("Bool", "Int8", "UInt8", "Int4", _EXPONENTS, *_FLOAT8)
"""Types of one byte, which are looked up."""


def is_number(dtype: str) -> bool:
    """Whether elements of a type are numbers that this module knows."""
    return dtype in FLOATS or dtype in INTEGERS or dtype in COMPLEX or dtype in BYTES


@functools.cache
def table(dtype: str) -> Doubles:
    """What a byte of one of the `BYTES` types stands for: 256 rows of one number, of two for Int4."""
    codes = np.arange(256)
    if dtype == "Int4":
        halves = np.stack([codes & 15, codes >> 4], axis=1)
        made: Doubles = np.where(halves > 7, halves - 16, halves).astype(np.float64)
        return made
    if dtype == "Int8":
        values = codes.astype(np.uint8).view(np.int8).astype(np.float64)
    elif dtype == "Bool":
        values = (codes != 0).astype(np.float64)
    elif dtype == _EXPONENTS:
        values = np.ldexp(1.0, codes - 127)
        values[255] = np.nan
    elif dtype in _FLOAT8:
        values = _float8(_FLOAT8[dtype], codes)
    else:
        values = codes.astype(np.float64)
    return values.reshape(256, 1)


def _float8(kind: _Float8, codes: npt.NDArray[np.int64]) -> Doubles:
    top = (1 << (7 - kind.mantissa)) - 1
    exponent = codes >> kind.mantissa & top
    fraction = codes & (1 << kind.mantissa) - 1
    # Numbers of exponent 0 have no leading 1.
    significand = np.where(exponent > 0, fraction + (1 << kind.mantissa), fraction).astype(np.float64)
    values: Doubles = np.ldexp(significand, np.maximum(exponent, 1) - kind.bias - kind.mantissa)
    if kind.ieee:
        values[exponent == top] = np.nan
        values[(exponent == top) & (fraction == 0)] = np.inf
    elif kind.negative_zero:
        values[(codes & 127) == 127] = np.nan
    values = np.where(codes > 127, -values, values)
    if not kind.negative_zero:
        values[128] = np.nan
    return values


def in_numpy(array: Array, dtype: str) -> Array:
    """Elements as NumPy knows them by itself: of types that it lacks, exactly as many Float32.

    Args:
        array: elements, of any dtype of their size, in one dimension.
        dtype: MindSpore's name of their type.
    """
    raw: Bytes = array.view(np.uint8)
    if dtype == "BFloat16":
        singles: Array = np.left_shift(raw.view("<u2"), 16, dtype=np.uint32).view(np.float32)
        return singles
    if dtype.startswith("Float8"):
        looked_up: Array = table(dtype)[raw, 0].astype(np.float32)
        return looked_up
    return array


class Widener:
    """Makes numbers of elements, `AT_ONCE` at the most at a time; for one thread.

    What it gives lies in room that the next call takes again.
    """

    def __init__(self) -> None:
        self._single = np.zeros(AT_ONCE, np.float32)
        self._double = np.empty(AT_ONCE, np.float64)

    def floats(self, raw: Bytes, dtype: str) -> Array:
        """One of the `FLOATS` types as Float32 or Float64, whichever holds it."""
        if dtype == "BFloat16":
            halves = raw.view("<u2")
            words = self._single[: len(halves)].view(np.uint32)
            np.copyto(words, halves)
            np.left_shift(words, 16, out=words)
            return self._single[: len(halves)]
        if dtype == "Float16":
            return self._from_float16(raw)
        return raw.view(_PLAIN[dtype])

    def _from_float16(self, raw: Bytes) -> Array:
        singles = self._single[: len(raw) // 2]
        # As integers of either sign, numbers that are not finite are above all others.
        finite = raw.view("<i2").max(initial=0) < _FLOAT16_INF and raw.view("<u2").max(initial=0) < _FLOAT16_MINUS_INF
        if not finite:
            np.copyto(singles, raw.view("<f2"))
            return singles
        # Sign, exponent and fraction where a Float32 has them; what its exponents begin with is multiplied in. That is
        # some times as quick as NumPy's own way.
        words = singles.view(np.int32)
        np.copyto(words, raw.view("<i2"))
        np.left_shift(words, 13, out=words)
        np.bitwise_and(words, _FLOAT16_BITS, out=words)
        return np.multiply(singles, _FLOAT16_SCALE, out=singles)

    def doubles(self, raw: Bytes, dtype: str) -> Array:
        """Any type as Float64, a complex one as Complex128; of Int4 both numbers of every byte."""
        if dtype in COMPLEX:
            return raw.view(COMPLEX[dtype]).astype(np.complex128)
        if dtype in BYTES:
            known = table(dtype)
            return known[raw].reshape(-1)
        found = raw.view(INTEGERS[dtype]) if dtype in INTEGERS else self.floats(raw, dtype)
        return self.double(found)

    def double(self, numbers: Array) -> Doubles:
        """Numbers as Float64."""
        if numbers.dtype == np.float64:
            return numbers
        doubles = self._double[: len(numbers)]
        np.copyto(doubles, numbers, casting="unsafe")
        return doubles
