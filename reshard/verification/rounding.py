"""Casts of floating point elements, by arithmetic on numbers.

A conversion rounds by shifting bits. Here every element becomes a Float64, which represents the numbers of all other
types exactly. Adding a number so large that all bits beyond the type's are lost makes the processor round to the
nearest, ties to even, once. Subtracting that number again is exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import ITEM_SIZES

Words = npt.NDArray[Any]

_BLOCK = 1 << 14
_EXPONENT = 0x7FF0000000000000


class _Type(NamedTuple):
    """A floating point type.

    Attributes:
        digits: bits of the significand, with the implicit first bit.
        least: the exponent of the smallest normal number, ``2**least``.
    """

    digits: int
    least: int


_TYPES = {
    "Float64": _Type(53, -1022),
    "Float32": _Type(24, -126),
    "Float16": _Type(11, -14),
    "BFloat16": _Type(8, -126),
}
# Larger than the numbers of every target type, which Float64 is not, and far below Float64's largest exponent.
_TOO_LARGE = 2.0**130


def words_as(words: Words, stored: str, dtype: str) -> Words:
    """Elements of one type as another.

    Args:
        words: unsigned words of the elements' size, in any shape.
        stored: their type, one of `dtypes.CASTABLE`.
        dtype: their new type, one of `dtypes.CAST_TO`.

    Returns:
        Unsigned words of the new type's size, in the same shape. NaN stays NaN, with its sign and the leading bits
        of its payload.
    """
    if stored == dtype:
        return words
    result = np.empty(words.size, f"<u{ITEM_SIZES[dtype]}")
    flat = np.ascontiguousarray(words).reshape(-1)
    for first in range(0, flat.size, _BLOCK):
        block = flat[first : first + _BLOCK]
        result[first : first + _BLOCK] = _encoded(_rounded(decoded(block, stored), dtype), block, stored, dtype)
    return result.reshape(words.shape)


def decoded(words: Words, stored: str) -> Words:
    """Elements as Float64; exact.

    Args:
        words: unsigned words of the elements' size, in any shape.
        stored: their type, one of `dtypes.CASTABLE`.
    """
    with np.errstate(invalid="ignore"):
        if stored == "BFloat16":
            # A BFloat16 is the upper 16 bits of a Float32.
            return np.left_shift(words, 16, dtype="<u4", casting="unsafe").view("<f4").astype("<f8")
        return words.view(f"<f{ITEM_SIZES[stored]}").astype("<f8")


def half_unit(sizes: Words, dtype: str) -> Words:
    """The largest distance between a number and the nearest one of a type.

    Args:
        sizes: numbers, as Float64, not negative.
        dtype: a floating point type.
    """
    digits, least = _TYPES[dtype]
    return np.maximum(sizes, 2.0**least) * 2.0**-digits


def largest(dtype: str) -> float:
    """The largest number of a type."""
    words = np.array([_infinite(dtype) - 1], f"<u{ITEM_SIZES[dtype]}")
    return float(decoded(words, dtype)[0])


def same_nans(words: Words, dtype: str) -> None:
    """Set the bits of all NaN to the same value, in place.

    Args:
        words: unsigned words.
        dtype: their floating point type.
    """
    bits = ITEM_SIZES[dtype] * 8
    infinite = _infinite(dtype)
    without_sign = words & ((1 << (bits - 1)) - 1)
    if without_sign.size and without_sign.max() > infinite:
        words[without_sign > infinite] = infinite | (infinite >> 1)


def _infinite(dtype: str) -> int:
    """The bits of infinity."""
    fraction_bits = _TYPES[dtype].digits - 1
    return ((1 << (ITEM_SIZES[dtype] * 8 - 1)) - 1) >> fraction_bits << fraction_bits


def _rounded(numbers: Words, dtype: str) -> Words:
    """Numbers rounded to the digits of a type."""
    digits, least = _TYPES[dtype]
    with np.errstate(invalid="ignore"):
        sizes = np.minimum(np.abs(numbers), _TOO_LARGE)
        # The exponent of the first digit; after scaling, the last digit of the type has the value 1.
        powers = (sizes.view("<u8") & np.uint64(_EXPONENT)).view("<f8")
        np.maximum(powers, 2.0**least, out=powers)
        powers *= 2.0 ** (53 - digits)
        sizes += powers
        sizes -= powers
        return np.copysign(sizes, numbers, out=sizes)


def _encoded(numbers: Words, words: Words, stored: str, dtype: str) -> Words:
    """Rounded numbers as words of a type; infinite if too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "BFloat16":
            encoded = (numbers.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
        else:
            size = ITEM_SIZES[dtype]
            encoded = numbers.astype(f"<f{size}").view(f"<u{size}")
    nans = np.isnan(numbers)
    if nans.any():
        encoded[nans] = _nans(words[nans], stored, dtype)
    return encoded


def _nans(words: Words, stored: str, dtype: str) -> Words:
    """NaN of one type as NaN of another."""
    bits, other_bits = ITEM_SIZES[stored] * 8, ITEM_SIZES[dtype] * 8
    fraction_bits, other_fraction_bits = _TYPES[stored].digits - 1, _TYPES[dtype].digits - 1
    wide = words.astype("<u8")
    sign = wide >> np.uint64(bits - 1) << np.uint64(other_bits - 1)
    payload = wide & np.uint64((1 << fraction_bits) - 1)
    if fraction_bits > other_fraction_bits:
        payload >>= np.uint64(fraction_bits - other_fraction_bits)
    else:
        payload <<= np.uint64(other_fraction_bits - fraction_bits)
    quiet = 1 << (other_fraction_bits - 1)
    nans: Words = (sign | payload | np.uint64(_infinite(dtype) | quiet)).astype(f"<u{other_bits // 8}")
    return nans
