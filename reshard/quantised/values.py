"""Codes of quantised elements as numbers: ``float32(code) * scale``, rounded once to the type asked for.

The product in Float32 of a code (at most 8 significant bits) and a scale is what the published dequantisers compute, so
results are equal bit for bit. There are two ways to compute it:

* `multiply`: vector arithmetic on blocks of codes, the faster one, where no element overflows.
* `Tables`: a byte has 256 values, so the results of all bytes under a scale are computed once, and bytes are looked up.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.elements import cast_words, infinite, numpy_dtype, widen
from reshard.layout import Box, shape_of

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[Any]
Rows = npt.NDArray[np.intp]

E2M1 = "E2M1"
"""Codes of four bits, two in a byte, the low ones first: a sign, two bits of exponent, one of mantissa."""

INT4, INT8 = "Int4+8", "Int8+128"
"""Codes that are stored as number + 8, two in a byte, the low ones first, and as number + 128."""

EXPONENTS = ("Float8E8M0", "UInt8")
"""Types of scales that are exponents of two."""

CODES = ("Float8E4M3FN", "Float8E5M2", "Int8", E2M1, INT4, INT8)
"""Types of codes that can be decoded."""

FLOATS = ("Float32", "BFloat16", "Float16")

SCALE_TYPES = (*FLOATS, *EXPONENTS)
"""Types of scales."""

OFFSET_TYPES = (*FLOATS, "Int8")
"""Types of zero points."""

MAX_TABLES = 256
"""Maximum number of tables in which elements are looked up together: their words have indices of two bytes."""

# Tables that are made at a time: each has temporary arrays of some KiB.
_TABLES_AT_A_TIME = 16

MEMORY_PER_BYTE = 16
"""Bytes of working memory for a byte of codes, at least: an index, and a word for each of two elements."""

# Minimum average of bytes whose rows have equal scales, if they are decoded together.
_MIN_TOGETHER = 1 << 14
# Maximum length of rows that NumPy copies to a buffer where they are repeated.
_MAX_SHORT = 1 << 12
# Maximum bytes of values that are repeated for each element.
_MAX_REPEATED = 1 << 18


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
"""Codes that are multiplied as bits."""

# The least words of Float32 that become infinite.
_BECOMES_INFINITE = {"Float32": 0x7F7F8000, "BFloat16": 0x7F7F8000, "Float16": 0x477FF000}
# The largest size of finite numbers of codes that are multiplied.
_LARGEST = {
    "Float8E4M3FN": np.float32(448),
    "Float8E5M2": np.float32(57344),
    "Int8": np.float32(128),
    INT4: np.float32(8),
    INT8: np.float32(128),
}


def decode_scales(words: Words, dtype: str) -> Floats:
    """Words of one of the `SCALE_TYPES` or `OFFSET_TYPES`, in any shape, as Float32; exact."""
    return widen(words, EXPONENTS[0] if dtype in EXPONENTS else dtype).astype("f4")


def scale_box(box: Box, block: Sequence[int]) -> Box:
    """The scales that a box of elements needs, with ``block`` elements per scale."""
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


def tables_of(code: str, scales: Floats, dtype: str, offsets: Floats | None = None) -> Tables:
    """A table for each of some scales.

    Args:
        code: one of `CODES`.
        scales: in any shape; tables are in C order.
        dtype: type of the elements.
        offsets: what is subtracted from the codes first, in the shape of the scales; None for nothing.
    """
    values, flat_scales = numbers_of(code), scales.reshape(-1, 1, 1)
    all_words = np.empty((len(flat_scales), *values.shape), f"u{ITEM_SIZES[dtype]}")
    overflows = np.zeros(all_words.shape[:2], "u1")
    for first in range(0, len(flat_scales), _TABLES_AT_A_TIME):
        part = slice(first, first + _TABLES_AT_A_TIME)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            shifted = values if offsets is None else values - offsets.reshape(-1, 1, 1)[part]
            all_words[part] = cast_words((shifted * flat_scales[part]).view("u4"), "Float32", dtype)
        became = infinite(all_words[part], dtype)
        if became.any():
            (became & np.isfinite(values)).sum(axis=-1, out=overflows[part])
    words = all_words.reshape(-1).view(f"u{all_words.itemsize * all_words.shape[-1]}")
    return Tables(words, overflows.reshape(-1), np.any(overflows, axis=1))


@functools.cache
def tables_of_exponents(code: str, dtype: str) -> Tables:
    """A table for each scale of one byte that is an exponent of two."""
    return tables_of(code, decode_scales(np.arange(256, dtype="u1"), EXPONENTS[0]), dtype)


def factors_of(code: str, scales: Floats, dtype: str) -> Floats | None:
    """Factors of codes for some positive scales; None where vector arithmetic does not give the exact results."""
    # Float16 is cast slowly: of codes with few scales, tables are faster.
    if code not in _LARGEST or (dtype == "Float16" and code not in (INT4, INT8)):
        return None
    bits = FLOAT8.get(code)
    power = np.float32(1 if bits is None else 2.0**bits.bias)
    # Without subnormal numbers, as some libraries set the processor, small codes would become zero.
    if bits is not None and not np.uint32(1 << bits.shift).view("f4") * power:
        return None
    with np.errstate(over="ignore", under="ignore"):
        factors: Floats = scales * power
        if not np.isfinite(factors).all() or (_LARGEST[code] * scales.max()).view("u4") >= _BECOMES_INFINITE[dtype]:
            return None
    return factors


def multiply(
    codes: Bytes, code: str, factors: Floats, dtype: str, block: Sequence[int], box: Box, out: Words, memory: Bytes
) -> None:
    """Multiply the elements of a box by their scales.

    Args:
        codes: bytes of the box, in C order; they may be the last bytes of ``out``.
        code: of the elements.
        factors: of the scales of ``scale_box(box, block)``, in that shape.
        dtype: type of the elements.
        block: elements per scale, per dimension.
        box: which elements of the tensor they are; at least one dimension. It begins and ends between bytes.
        out: unsigned words of that type for the box, in C order.
        memory: working memory, `MEMORY_PER_BYTE` for each element of a row or more.
    """
    columns = shape_of(box)[-1]
    signed = codes.view("i1")
    bits = FLOAT8.get(code)
    special = bits is not None and bool(signed.max() >= bits.special or codes.max() >= bits.special | 0x80)
    table = numbers_of(code)
    per_byte = table.shape[1]
    looked_up = code in (INT4, INT8)
    # Bytes that are looked up have indices of eight bytes.
    most = len(memory) // (8 + 4 * per_byte) if looked_up else 0
    indices, products = memory[: 8 * most].view("i8"), memory[8 * most : len(memory) // 4 * 4].view("u4")
    with np.errstate(invalid="ignore", under="ignore"):
        for part, values in _spread(factors, block, box, 1, per_byte * most or len(products)):
            words = out[part] if out.itemsize == 4 else products[: part.stop - part.start]
            numbers = words.view("f4")
            if looked_up:
                wide = indices[: len(words) // per_byte]
                np.copyto(wide, codes[part.start // per_byte : part.stop // per_byte])
                # The numbers of a byte are copied as one word.
                pairs = f"u{4 * per_byte}"
                np.take(table.view(pairs)[:, 0], wide, out=words.view(pairs), mode="wrap")
            elif bits is None:
                np.copyto(numbers, signed[part])
            else:
                if special:
                    places = np.flatnonzero((codes[part] & 0x7F) >= bits.special)
                    specials = table[codes[part][places], 0]
                # Exponent and mantissa at their places in Float32: the numbers times 2**-bias.
                np.copyto(words.view("i4"), signed[part])
                np.left_shift(words, bits.shift, out=words)
                np.bitwise_and(words, bits.mask, out=words)
                if special:
                    numbers[places] = specials
            grid = numbers.reshape(-1, max(columns, values.shape[1]))
            np.multiply(grid, values, out=grid)
            if out.itemsize == 2:
                np.copyto(out[part].view(numpy_dtype(dtype)), numbers, casting="unsafe")


def dequantise(
    codes: Bytes, tables: Tables, numbers: Words, block: Sequence[int], box: Box, out: Words, memory: Bytes
) -> int:
    """Look up the elements of a box.

    Args:
        codes: bytes of the box, in C order, half as many as elements for codes of four bits; they may be the last bytes
            of ``out``.
        tables: results of all bytes, at most `MAX_TABLES` tables.
        numbers: the table of each scale of ``scale_box(box, block)``, in that shape.
        block: elements per scale, per dimension.
        box: which elements of the tensor they are; at least one dimension. It begins, ends and changes scales between
            bytes.
        out: unsigned words of the type asked for, in C order.
        memory: working memory, `MEMORY_PER_BYTE` for each byte of a row or more.

    Returns:
        How many elements became infinite.
    """
    assert len(tables.overflowing) <= MAX_TABLES
    per_byte = len(out) // len(codes)
    columns = shape_of(box)[-1] // per_byte
    results = out.view(tables.words.dtype)
    # Two kinds of indices for a byte, of eight and of two bytes.
    most = len(memory) // (8 + 2)
    places, indices = memory[: 8 * most].view("i8"), memory[8 * most : 10 * most].view("u2")
    overflows = tables.overflows if tables.overflowing.take(numbers).any() else None
    overflowed = 0
    starts = np.left_shift(numbers, 8, dtype="u2", casting="unsafe")
    for part, values in _spread(starts, block, box, per_byte, most):
        wide, narrow = places[: part.stop - part.start], indices[: part.stop - part.start]
        np.copyto(narrow, codes[part])
        grid = narrow.reshape(-1, max(columns, values.shape[1]))
        np.add(grid, values, out=grid)
        np.copyto(wide, narrow)
        # All indices are valid; in its default mode NumPy would write to a copy first.
        np.take(tables.words, wide, out=results[part], mode="wrap")
        if overflows is not None:
            overflowed += int(overflows[wide].sum())
    return overflowed


def _spread(values: Words, block: Sequence[int], box: Box, per_byte: int, most: int) -> Iterator[tuple[slice, Words]]:
    """The values of the scales of a box, some rows of its last dimension at a time.

    Args:
        values: of the scales of ``scale_box(box, block)``, in that shape.
        block: elements per scale, per dimension.
        box: the elements.
        per_byte: elements of a byte.
        most: maximum number of bytes at a time; at least a row.

    Yields:
        Which bytes of the box, and the values of their scales. Bytes and values broadcast to each other as rows of one
        row of the box, or of as many as the values have.
    """
    # Per row of elements its row of scales.
    where = np.zeros(1, np.intp)
    for (low, high), (first, last), size in zip(box[:-1], scale_box(box, block)[:-1], block):
        where = (where[:, None] * (last - first) + (np.arange(low, high) // size - first)).reshape(-1)
    (low, high), (first, last), size = box[-1], scale_box(box, block)[-1], block[-1]
    lengths = np.full(last - first, size // per_byte)
    lengths[0] -= (low - first * size) // per_byte
    lengths[-1] -= (last * size - high) // per_byte
    # NumPy is several times as fast where all repeats are equal.
    repeats = int(lengths[0]) if (lengths == lengths[0]).all() else lengths
    values = values.reshape(-1, last - first)
    columns = (high - low) // per_byte
    most = max(1, most // columns)
    # Rows of the same scales are decoded together, unless they are few.
    edges = [0, *(np.flatnonzero(where[1:] != where[:-1]) + 1).tolist(), len(where)]
    several = len(lengths) > 1
    same = len(edges) == 2 or (several and len(where) * columns >= _MIN_TOGETHER * len(edges))
    if several and not same:
        most = max(1, min(most, _MAX_REPEATED // (columns * values.itemsize)))
    for begin, end in itertools.pairwise(edges) if same else [(0, len(where))]:
        count = end - begin
        # NumPy takes twice as long where it repeats short rows itself.
        fold = 1 << (_MAX_SHORT // columns).bit_length() if same and several else 1
        if fold > min(most, count):
            fold = 1
        # Tiles of about equal sizes.
        tiles = -(-count // most)
        rows = min(most // fold, -(-count // (fold * tiles))) * fold
        for first in range(begin, end, rows):
            last = min(first + rows, end)
            if not same or first == begin:
                repeated = values[where[first : first + fold if same else last]]
                if several:
                    repeated = repeated.repeat(repeats, axis=1)
                if same:
                    repeated = repeated.reshape(1, -1)
            whole = (last - first) % fold == 0
            yield slice(first * columns, last * columns), repeated if whole else repeated[:, :columns]


# The numbers of codes without a sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.cache
def numbers_of(code: str) -> Floats:
    """The numbers of every byte of one of `CODES`: 256 rows of one number, of two for codes of four bits."""
    codes = np.arange(256, dtype="u1")
    if code == INT8:
        return codes.astype("f4")[:, None] - 128
    if code not in (E2M1, INT4):
        return widen(codes, code).astype("f4")[:, None]
    values = np.array([*_E2M1, *(-value for value in _E2M1)] if code == E2M1 else range(-8, 8), "f4")
    return np.stack([values[codes & 15], values[codes >> 4]], axis=1)
