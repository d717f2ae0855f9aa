"""Codes of quantised elements as numbers: ``float32(code) * scale``, rounded once to the type asked for.

Codes are decoded a block of rows at a time, small enough for the innermost caches. A product in Float32 of a code (at
most 8 significant bits) and a scale is what the published dequantisers compute, so results are equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np
import numpy.typing as npt

from reshard.layout import Box, shape_of

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[Any]

E2M1 = "E2M1"
"""Codes of four bits, two in a byte, the low ones first: a sign, two bits of exponent, one of mantissa."""

CODES = ("Float8E4M3FN", "Float8E5M2", "Int8", E2M1)
"""Codes of elements that can be decoded."""

SCALE_TYPES = ("Float32", "BFloat16", "Float16", "Float8E8M0", "UInt8")
"""Types of scales. UInt8 holds exponents, as Float8E8M0 does."""

# Elements that are decoded at a time: their Float32 values and one more array of that size stay in the cache.
_BLOCK = 1 << 16
# Bits of Float8E4M3FN at their places in Float32 are numbers too small by the difference of the exponents' biases.
_E4M3_FACTOR = np.float32(2.0 ** (127 - 7))
_E4M3_SIGN_AND_REST = np.int32(-0x78000001)


def decode_scales(words: Words, dtype: str) -> Floats:
    """Scales as Float32; exact.

    Args:
        words: unsigned words of the size of their type, in any shape.
        dtype: one of `SCALE_TYPES`.
    """
    if dtype in ("Float8E8M0", "UInt8"):
        bits = words.astype("u4")
        # The exponent 0 stands for 2**-127, which is subnormal in Float32; 255 for NaN.
        values: Floats = np.left_shift(bits, 23).view("f4").copy()
        values[bits == 0] = np.float32(2.0**-127)
        values[bits == 255] = np.nan
    elif dtype == "BFloat16":
        values = np.left_shift(words, 16, dtype="u4", casting="unsafe").view("f4")
    else:
        values = words.view("f2" if dtype == "Float16" else "f4").astype("f4")
    return values


def decode_codes(codes: Bytes, code: str, out: Floats) -> np.float32:
    """Elements as Float32, but for a power of two.

    Args:
        codes: bytes, in any number of dimensions.
        code: one of `CODES`.
        out: the values, of the shape of ``codes``, with the last dimension twice as long for `E2M1`.

    Returns:
        What the values have to be multiplied with, which is exact. A scale times this factor saves a pass over memory.
    """
    if code == "Int8":
        out[...] = codes.view("i1")
    elif code == E2M1:
        np.take(_E2M1_PAIRS, codes, out=out.view("u8"), mode="clip")
    elif code == "Float8E4M3FN":
        bits = out.view("i4")
        # The sign is extended over the bits above the exponent, which are then cleared.
        bits[...] = codes.view("i1")
        np.left_shift(bits, 20, out=bits)
        np.bitwise_and(bits, _E4M3_SIGN_AND_REST, out=bits)
        sizes = codes & 0x7F
        if sizes.max(initial=0) == 0x7F:
            out[sizes == 0x7F] = np.nan
        return _E4M3_FACTOR
    else:
        np.take(_E5M2, codes, out=out, mode="clip")
    return np.float32(1)


def scale_box(box: Box, block: Sequence[int]) -> Box:
    """The scales that some elements need.

    Args:
        box: the elements.
        block: elements per scale, per dimension.
    """
    return tuple((low // size, -(-high // size)) for (low, high), size in zip(box, block))


def dequantise(
    codes: Bytes,
    code: str,
    scales: Floats,
    block: Sequence[int],
    box: Box,
    out: Words,
    cast: Callable[[Words, Words], None],
    offsets: Optional[Floats] = None,
) -> None:
    """Decode the elements of a box, multiply them with their scales, and write them in the type asked for.

    Args:
        codes: bytes of the box, with half as many in the last dimension for `E2M1`, where the box is even there.
        code: one of `CODES`.
        scales: those of ``scale_box(box, block)``.
        block: elements per scale, per dimension.
        box: which elements of the tensor they are; at least one dimension.
        out: unsigned words of the type asked for, of the shape of the box, C-contiguous.
        cast: writes words of Float32 as words of that type.
        offsets: what is subtracted from the elements first, laid out as the scales are; None for nothing.
    """
    shape = shape_of(box)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if not rows or not columns:
        return
    flat_codes, flat_out = codes.reshape(rows, -1), out.reshape(rows, columns)
    spread = _Spread(box, block)
    most = max(1, _BLOCK // columns)
    room = np.empty((min(most, rows), columns), "f4")
    for first in range(0, rows, most):
        last = min(first + most, rows)
        values = room[: last - first]
        factor = decode_codes(flat_codes[first:last], code, values)
        multipliers = spread.over(scales, first, last)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if offsets is None and factor != 1 and (scaled := multipliers * factor).max() < np.inf:
                multipliers = scaled
            elif factor != 1:
                np.multiply(values, factor, out=values)
            if offsets is not None:
                np.subtract(values, spread.over(offsets, first, last), out=values)
            np.multiply(values, multipliers, out=values)
        cast(values.view("u4"), flat_out[first:last])


class _Spread:
    """Which scale belongs to which element of a box, seen as rows of its last dimension."""

    def __init__(self, box: Box, block: Sequence[int]) -> None:
        numbers = np.zeros((1,), np.intp)
        for (low, high), (first, last), size in zip(box[:-1], scale_box(box, block)[:-1], block):
            along = np.arange(low, high) // size - first
            numbers = (numbers[:, None] * (last - first) + along).reshape(-1)
        # Per row of elements its row of scales.
        self._rows = numbers
        (low, high), size = box[-1], block[-1]
        edges = np.unique(np.clip(np.arange(low // size, -(-high // size) + 1) * size, low, high))
        self._lengths = np.diff(edges)

    def over(self, scales: Floats, first: int, last: int) -> Floats:
        """The scales of some rows, in a shape that broadcasts to these."""
        rows = self._rows[first:last]
        # Most rows of a block share one row of scales, which is spread once.
        chosen = rows[:1] if rows[0] == rows[-1] and (rows == rows[0]).all() else rows
        found: Floats = scales.reshape(-1, len(self._lengths))[chosen]
        if len(self._lengths) == 1:
            return found
        return np.repeat(found, self._lengths, axis=1)


def _table(exponent: int, mantissa: int, bias: int) -> Floats:
    """The numbers of all codes of a floating point type with a sign and subnormals, as if none were special."""
    codes = np.arange(1 << (1 + exponent + mantissa))
    power, digits = codes >> mantissa & ((1 << exponent) - 1), codes & ((1 << mantissa) - 1)
    sizes = np.where(
        power == 0,
        digits * 2.0 ** (1 - bias - mantissa),
        (digits + (1 << mantissa)) * 2.0 ** (power - float(bias + mantissa)),
    )
    return np.where(codes >> (exponent + mantissa), -sizes, sizes).astype("f4")


def _e5m2() -> Floats:
    values = _table(5, 2, 15)
    values[[0x7C, 0xFC]] = np.inf, -np.inf
    values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


def _e2m1_pairs() -> npt.NDArray[np.uint64]:
    """Per byte its two numbers, as one word."""
    values, codes = _table(2, 1, 1), np.arange(256)
    return np.stack([values[codes & 15], values[codes >> 4]], axis=1).view("u8")[:, 0]


_E5M2 = _e5m2()
_E2M1_PAIRS = _e2m1_pairs()
