"""Codes of quantised elements as numbers: ``float32(code) * scale``, rounded once to the type asked for.

The product in Float32 of a code (at most 8 significant bits) and a scale is what the published dequantisers compute, so
results are equal bit for bit. There are two ways to compute it:

* `Factors`: vector arithmetic on blocks of codes, the faster one, where no element overflows.
* `Tables`: a byte has 256 values, so the results of all bytes under a scale are computed once, and bytes are looked up.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import DTYPES
from reshard.layout import Box, shape_of

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[Any]
CastWords = Callable[[Words, str], Words]

E2M1 = "E2M1"
"""Codes of four bits, two in a byte, the low ones first: a sign, two bits of exponent, one of mantissa."""

EXPONENTS = ("Float8E8M0", "UInt8")
"""Types of scales that are exponents of two."""

FLOATS = ("Float32", "BFloat16", "Float16")

SCALE_TYPES = (*FLOATS, *EXPONENTS)
"""Types of scales."""

OFFSET_TYPES = (*FLOATS, "Int8")
"""Types of zero points."""

BLOCK = 1 << 16
"""Elements that are decoded at a time: their indices, of 8 bytes within NumPy, or their products stay in the cache."""

# Minimum elements of a block that ends with a row of scales.
_MIN_BLOCK = 1 << 14
_ROOMS = threading.local()


class Float8(NamedTuple):
    """How the bits of a byte become the bits of a number of Float32.

    Attributes:
        shift: moves exponent and mantissa of the byte to their places in Float32.
        mask: clears copies of the sign between sign and exponent.
        bias: the power of two that the numbers are too small by, since the exponents have another bias.
        special: the least code, without sign, of an infinity or NaN.
    """

    shift: int
    mask: int
    bias: int
    special: int


FLOAT8 = {"Float8E4M3FN": Float8(20, 0x87F00000, 120, 0x7F), "Float8E5M2": Float8(21, 0x8FE00000, 112, 0x7C)}
"""Codes that `Factors` multiplies beside Int8."""

# The least word of Float32 that becomes infinite as BFloat16.
_BECOMES_INFINITE = 0x7F7F8000
# The least number of Float32 with all of its digits.
_LEAST_NORMAL = 2.0**-126
# Minimum elements per product for which the products of scales are checked for ties.
_MIN_SHARING = 8


def decode_scales(words: Words, dtype: str) -> Floats:
    """Scales, or zero points, as Float32; exact.

    Args:
        words: unsigned words of the size of their type, in any shape.
        dtype: one of `SCALE_TYPES` or `OFFSET_TYPES`.
    """
    if dtype in EXPONENTS:
        bits = words.astype("u4")
        # The exponent 0 stands for 2**-127, which is subnormal in Float32; 255 for NaN.
        values: Floats = np.left_shift(bits, 23).view("f4").copy()
        values[bits == 0] = np.float32(2.0**-127)
        values[bits == 255] = np.nan
    elif dtype == "BFloat16":
        values = np.left_shift(words, 16, dtype="u4", casting="unsafe").view("f4")
    else:
        values = words.view({"Float16": "f2", "Int8": "i1"}.get(dtype, "f4")).astype("f4")
    return values


def scale_box(box: Box, block: Sequence[int]) -> Box:
    """The scales that some elements need.

    Args:
        box: the elements.
        block: elements per scale, per dimension.
    """
    return tuple((low // size, -(-high // size)) for (low, high), size in zip(box, block))


class Tables(NamedTuple):
    """The elements of every byte of codes under some scales.

    Attributes:
        words: 256 per table, one table after the other; a word holds all elements of its byte.
        overflows: per word how many of its elements became infinite.
        overflowing: per table whether any did.
    """

    words: Words
    overflows: Bytes
    overflowing: Words


def tables_of(code: str, scales: Floats, dtype: str, cast: CastWords, offsets: Optional[Floats] = None) -> Tables:
    """A table for each of some scales.

    Args:
        code: one of `CODES`.
        scales: in any shape; tables are in C order.
        dtype: type of the elements.
        cast: returns words of Float32 as words of a type.
        offsets: what is subtracted from the codes first, in the shape of the scales; None for nothing.
    """
    values = CODES[code]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        shifted = values if offsets is None else values - offsets.reshape(-1, 1, 1)
        words = cast((shifted * scales.reshape(-1, 1, 1)).view("u4"), dtype)
    layout = DTYPES[dtype].layout
    assert layout is not None
    overflows = np.zeros(words.shape[:2], "u1")
    became = (words & layout.without_sign) == layout.infinity
    if became.any():
        (became & np.isfinite(values)).sum(axis=-1, out=overflows)
    words = words.reshape(-1).view(f"u{words.itemsize * words.shape[-1]}")
    return Tables(words, overflows.reshape(-1), np.any(overflows, axis=1))


@functools.cache
def tables_of_exponents(code: str, dtype: str, cast: CastWords) -> Tables:
    """A table for each scale of one byte that is an exponent of two."""
    return tables_of(code, decode_scales(np.arange(256, dtype="u1"), EXPONENTS[0]), dtype, cast)


class Factors(NamedTuple):
    """Scales as factors of codes.

    Attributes:
        code: of the elements.
        values: the factors, in the shape of the scales.
        ties: whether a product may lie in the middle between two numbers of BFloat16.
    """

    code: str
    values: Floats
    ties: bool

    def part(self, index: tuple[slice, ...]) -> Factors:
        """The factors of some of the scales."""
        return self._replace(values=self.values[index])


def factors_of(code: str, scales: Floats, dtype: str, elements: int) -> Optional[Factors]:
    """Factors for some scales; None where vector arithmetic does not give the exact results, or not faster.

    Args:
        code: one of `CODES`.
        scales: positive numbers, in any shape.
        dtype: type of the elements.
        elements: the number of elements that will be multiplied.
    """
    if code not in _MULTIPLIED or dtype not in ("Float32", "BFloat16"):
        return None
    least, largest, significands = _MULTIPLIED[code]
    bits = FLOAT8.get(code)
    power = np.float32(1 if bits is None else 2.0**bits.bias)
    # Without subnormal numbers, as some libraries set the processor, small codes would become zero.
    if bits is not None and np.uint32(1 << bits.shift).view("f4") * power != least:
        return None
    with np.errstate(over="ignore", under="ignore"):
        factors = scales * power
        if not np.isfinite(factors).all() or (largest * scales.max()).view("u4") >= _BECOMES_INFINITE:
            return None
        ties = True
        # Products with codes and with significands, which are at least a half, must be normal numbers.
        normal = min(least, np.float32(0.5)) * scales.min() >= _LEAST_NORMAL
        if normal and scales.size * len(significands) * _MIN_SHARING <= elements:
            # Products of numbers that differ by a power of two have the same digits.
            products = significands * scales.reshape(-1, 1)
            ties = bool((products.view("u4").astype("u2") == 0x8000).any())
    return Factors(code, factors, ties)


def multiply(codes: Bytes, factors: Factors, block: Sequence[int], box: Box, out: Words) -> None:
    """Multiply the elements of a box by their scales.

    Args:
        codes: bytes of the box.
        factors: of the scales of ``scale_box(box, block)``, in that shape.
        block: elements per scale, per dimension.
        box: which elements of the tensor they are; at least one dimension.
        out: words of Float32 or BFloat16, of the shape of the box, C-contiguous.
    """
    rows, columns = math.prod(codes.shape[:-1]), codes.shape[-1]
    flat_codes, flat_out = codes.reshape(rows, columns), out.reshape(rows, columns)
    spread = _Spread(factors.values, block, box, 1)
    most = max(1, BLOCK // max(1, columns))
    with np.errstate(invalid="ignore", under="ignore"):
        last = 0
        while last < rows:
            first = last
            last, values = spread.over(first, most)
            part = flat_out[first:last]
            words = part if part.itemsize == 4 else _room(part.size, 0).reshape(part.shape)
            _expand(flat_codes[first:last], factors.code, words)
            numbers = words.view("f4")
            np.multiply(numbers, values, out=numbers)
            if part.itemsize == 2:
                _round_to_bfloat16(words, factors.ties, part)


def _expand(codes: Bytes, code: str, out: Words) -> None:
    """Codes as numbers of Float32; those of `FLOAT8` times ``2**-bias``."""
    bits = FLOAT8.get(code)
    if bits is None:
        np.copyto(out.view("f4"), codes.view("i1"))
        return
    np.copyto(out.view("i4"), codes.view("i1"))
    np.left_shift(out, bits.shift, out=out)
    np.bitwise_and(out, bits.mask, out=out)
    if codes.view("i1").max() >= bits.special or codes.max() >= bits.special | 0x80:
        places = (codes & 0x7F) >= bits.special
        out.view("f4")[places] = CODES[code][codes[places], 0]


def _round_to_bfloat16(words: Words, ties: bool, out: Words) -> None:
    """Float32 to the nearest BFloat16, ties to even; the words are overwritten.

    NaN must be the one of NumPy, and no finite number may become infinite.
    """
    if ties:
        odd = _room(words.size, 1).reshape(words.shape)
        np.right_shift(words, 16, out=odd)
        np.bitwise_and(odd, 1, out=odd)
        np.add(words, odd, out=words)
    np.add(words, 0x7FFF if ties else 0x8000, out=words)
    np.right_shift(words, 16, out=words)
    np.copyto(out, words, casting="unsafe")


def _room(count: int, number: int) -> Words:
    """Memory of this thread for words of Float32."""
    rooms: Optional[list[Words]] = getattr(_ROOMS, "words", None)
    if rooms is None:
        rooms = _ROOMS.words = [np.empty(0, "u4"), np.empty(0, "u4")]
    if len(rooms[number]) < count:
        rooms[number] = np.empty(count, "u4")
    return rooms[number][:count]


def dequantise(codes: Bytes, tables: Tables, numbers: Words, block: Sequence[int], box: Box, out: Words) -> int:
    """Look up the elements of a box.

    Args:
        codes: bytes of the box, with half as many in the last dimension for `E2M1`.
        tables: results of all bytes.
        numbers: the table of each scale of ``scale_box(box, block)``, in that shape.
        block: elements per scale, per dimension.
        box: which elements of the tensor they are; at least one dimension. It begins, ends and changes scales between
            bytes.
        out: unsigned words of the type asked for, of the shape of the box, C-contiguous.

    Returns:
        How many elements became infinite.
    """
    if not codes.size:
        return 0
    rows = math.prod(codes.shape[:-1])
    flat_codes = codes.reshape(rows, -1)
    flat_out = out.reshape(-1).view(tables.words.dtype).reshape(flat_codes.shape)
    dtype = np.dtype("u2" if len(tables.words) <= 1 << 16 else "u4")
    starts = numbers.astype(dtype) * dtype.type(256)
    spread = _Spread(starts, block, box, shape_of(box)[-1] // codes.shape[-1])
    most = max(1, BLOCK // flat_codes.shape[1])
    room = np.empty((min(most, rows), flat_codes.shape[1]), dtype)
    overflows = tables.overflows if tables.overflowing[numbers].any() else None
    overflowed = last = 0
    while last < rows:
        first = last
        last, values = spread.over(first, most)
        indices = room[: last - first]
        np.copyto(indices, flat_codes[first:last])
        np.add(indices, values, out=indices)
        # All indices are valid; in its default mode NumPy would write to a copy first.
        np.take(tables.words, indices, out=flat_out[first:last], mode="wrap")
        if overflows is not None:
            overflowed += int(overflows[indices].sum())
    return overflowed


class _Spread:
    """For each byte of a box, seen as rows of its last dimension, the value of its scale.

    Args:
        values: of the scales of ``scale_box(box, block)``, in that shape.
        block: elements per scale, per dimension.
        box: the elements.
        per_byte: elements of a byte.
    """

    def __init__(self, values: Words, block: Sequence[int], box: Box, per_byte: int) -> None:
        rows = np.zeros(1, np.intp)
        for (low, high), (first, last), size in zip(box[:-1], scale_box(box, block)[:-1], block):
            along = np.arange(low, high) // size - first
            rows = (rows[:, None] * (last - first) + along).reshape(-1)
        # Per row of elements its row of scales.
        self._rows = rows
        (low, high), (first, last), size = box[-1], scale_box(box, block)[-1], block[-1]
        self._lengths = np.full(last - first, size // per_byte)
        self._lengths[0] -= (low - first * size) // per_byte
        self._lengths[-1] -= (last * size - high) // per_byte
        self._columns = int(self._lengths.sum())
        # NumPy is several times as fast where all repeats are equal.
        self._equal = bool((self._lengths == self._lengths[0]).all())
        self._values = values.reshape(-1, last - first)
        self._recent: tuple[int, Words] = -1, self._values[:0]

    def over(self, first: int, most: int) -> tuple[int, Words]:
        """The values for rows from the first on, in a shape that broadcasts to these, and the end of the rows."""
        rows = self._rows[first : first + most]
        differ = np.flatnonzero(rows != rows[0])
        # Most rows of a block share one row of scales. Where it ends, so does the block, unless that makes it small or
        # rows have one scale, which is not repeated.
        count = int(differ[0]) if len(differ) else len(rows)
        if len(self._lengths) == 1 or (count < len(rows) and count * self._columns < _MIN_BLOCK):
            return first + len(rows), self._repeated(self._values[rows])
        row = int(rows[0])
        if self._recent[0] != row:
            self._recent = row, self._repeated(self._values[row : row + 1])
        return first + count, self._recent[1]

    def _repeated(self, values: Words) -> Words:
        if len(self._lengths) == 1:
            return values
        repeated: Words = np.repeat(values, self._lengths[0] if self._equal else self._lengths, axis=1)
        return repeated


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


def _e4m3() -> Floats:
    values = _table(4, 3, 7)
    values[[0x7F, 0xFF]] = np.nan
    return values[:, None]


def _e5m2() -> Floats:
    values = _table(5, 2, 15)
    values[[0x7C, 0xFC]] = np.inf, -np.inf
    values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values[:, None]


def _e2m1() -> Floats:
    values, codes = _table(2, 1, 1), np.arange(256)
    return np.stack([values[codes & 15], values[codes >> 4]], axis=1)


CODES: Mapping[str, Floats] = {
    "Float8E4M3FN": _e4m3(),
    "Float8E5M2": _e5m2(),
    "Int8": np.arange(256).astype("u1").view("i1").astype("f4")[:, None],
    E2M1: _e2m1(),
}
"""Per code that can be decoded the numbers of every byte: 256 rows of one number, of two for `E2M1`."""


class _Numbers(NamedTuple):
    """Finite numbers of a code, without sign: the least one above zero, the largest one, and their significands."""

    least: np.float32
    largest: np.float32
    significands: Floats


def _numbers_of(code: str) -> _Numbers:
    sizes = np.abs(CODES[code][np.isfinite(CODES[code])])
    sizes = sizes[sizes > 0]
    return _Numbers(sizes.min(), sizes.max(), np.unique(np.frexp(sizes)[0]))


_MULTIPLIED = {code: _numbers_of(code) for code in (*FLOAT8, "Int8")}
