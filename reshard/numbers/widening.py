"""Stored elements as numbers, block by block, and their binary exponents.

Float64 holds all floats exactly, and all integers up to 32 bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import CASTABLE, DTYPES, INT4, NUMPY_NAMES
from reshard.checkpoints.formats.elements import widen

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

AT_ONCE = 1 << 16
"""Elements per block: they and intermediate results fit a core's cache."""

FLOATS = CASTABLE
INTEGERS = {name: numpy for name, numpy in NUMPY_NAMES.items() if numpy[:2] in ("<i", "<u")}
COMPLEX = {name: numpy for name, numpy in NUMPY_NAMES.items() if numpy.startswith("<c")}
BYTES = tuple(row.name for row in DTYPES.values() if row.size == 1)
"""Types of one byte, which are looked up in tables."""

_FLOAT16_INF = 0x7C00
_FLOAT16_MINUS_INF = 0xFC00
# The sign, and 15 bits at a lower position than in a Float32.
_FLOAT16_BITS = np.int32(0x0FFFFFFF - (1 << 31))
_FLOAT16_SCALE = np.float32(2.0 ** (127 - 15))

EXPONENTS = 2048
"""Number of exponents of a Float64."""
ONE = 1023
"""The exponent of 1.0 in the bits of a Float64."""
_SHIFT = 52


def is_number(dtype: str) -> bool:
    """Whether elements of a type are numbers that this module supports."""
    return dtype in FLOATS or dtype in INTEGERS or dtype in COMPLEX or dtype in BYTES


@functools.cache
def table(dtype: str) -> Doubles:
    """The numbers of all bytes of one of the `BYTES` types: 256 rows of one number, of two for Int4."""
    codes = np.arange(256, dtype=np.uint8)
    if dtype == INT4:
        halves = np.stack([codes & 15, codes >> 4], axis=1).astype(np.float64)
        pairs: Doubles = np.where(halves > 7, halves - 16, halves)
        return pairs
    numbers: Array = codes != 0 if dtype == "Bool" else widen(codes, dtype)
    return numbers.astype(np.float64).reshape(256, 1)


def floats(raw: Bytes, dtype: str) -> Array:
    """One of the `FLOATS` types as Float32 or Float64, whichever can represent it."""
    if dtype != "Float16":
        return widen(raw, dtype)
    # As signed integers, numbers that are not finite are above all others.
    if raw.view("<i2").max(initial=0) >= _FLOAT16_INF or raw.view("<u2").max(initial=0) >= _FLOAT16_MINUS_INF:
        return raw.view("<f2").astype(np.float32)
    # Sign, exponent and fraction at their places in a Float32; a multiplication corrects the exponent. That is
    # several times as fast as NumPy's conversion.
    words = raw.view("<i2").astype(np.int32)
    np.left_shift(words, 13, out=words)
    np.bitwise_and(words, _FLOAT16_BITS, out=words)
    singles = words.view(np.float32)
    return np.multiply(singles, _FLOAT16_SCALE, out=singles)


def doubles(raw: Bytes, dtype: str) -> Array:
    """Any type as Float64, a complex one as Complex128; of Int4 both numbers of every byte."""
    if dtype in COMPLEX:
        return raw.view(COMPLEX[dtype]).astype(np.complex128)
    if dtype in BYTES:
        return table(dtype)[raw].reshape(-1)
    numbers = raw.view(INTEGERS[dtype]) if dtype in INTEGERS else floats(raw, dtype)
    return numbers.astype(np.float64, copy=False)


def exponents(numbers: Array) -> Counts:
    """The exponent of every number, as in the bits of a Float64."""
    bits = np.ascontiguousarray(numbers, np.float64).view(np.uint64) >> np.uint64(_SHIFT)
    # As signed numbers, which bincount needs.
    exponent_bits: Counts = bits.view(np.int64)
    return np.bitwise_and(exponent_bits, EXPONENTS - 1, out=exponent_bits)
