"""Casts of floating point elements, by arithmetic on the numbers themselves.

A conversion rounds by shifting bits. Here every element is a Float64, which represents the numbers of all other types
exactly. The processor rounds the sum with a number so large that all bits beyond the type's are lost: to the nearest,
ties to even, once. The subtraction of the large number is exact.
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

    digits: bits of a number's digits, with the implicit first one.
        digits: bits of a number's digits, with the first, which is not stored.
        least: the exponent of its least normal number, ``2**least``.
    """

    digits: int
    least: int


_TYPES = {
    "Float64": _Type(53, -1022),
    "Float32": _Type(24, -126),
    "Float16": _Type(11, -14),
    "BFloat16": _Type(8, -126),
}
# Beyond the numbers of every type except Float64, which is no target of casts, and far below the largest exponent.
_TOO_LARGE = 2.0**130


def words_as(words: Words, stored: str, dtype: str) -> Words:
    """Elements of one type as another.

    Args:
        words: unsigned words of the elements' size, in any shape.
        stored: their type, one of `dtypes.CASTABLE`.
        dtype: their new type, one of `dtypes.CAST_TO`.

    Returns:
        Unsigned words of the other type's size, in the same shape. NaN stays NaN, of the same sign, with as many of
        its other bits as the type has.
    """
    if stored == dtype:
        return words
    result = np.empty(words.size, f"<u{ITEM_SIZES[dtype]}")
    flat = np.ascontiguousarray(words).reshape(-1)
    for first in range(0, flat.size, _BLOCK):
        some = flat[first : first + _BLOCK]
        result[first : first + _BLOCK] = _encoded(_rounded(decoded(some, stored), dtype), some, stored, dtype)
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
        sizes: numbers, as Float64, none of them negative.
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
    kept = _TYPES[dtype].digits - 1
    return ((1 << (ITEM_SIZES[dtype] * 8 - 1)) - 1) >> kept << kept


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
    none = np.isnan(numbers)
    if none.any():
        encoded[none] = _nans(words[none], stored, dtype)
    return encoded


def _nans(words: Words, stored: str, dtype: str) -> Words:
    """NaN of one type as NaN of another."""
    bits, other_bits = ITEM_SIZES[stored] * 8, ITEM_SIZES[dtype] * 8
    kept, other_kept = _TYPES[stored].digits - 1, _TYPES[dtype].digits - 1
    wide = words.astype("<u8")
    sign = wide >> np.uint64(bits - 1) << np.uint64(other_bits - 1)
    payload = wide & np.uint64((1 << kept) - 1)
    if kept > other_kept:
        payload >>= np.uint64(kept - other_kept)
    else:
        payload <<= np.uint64(other_kept - kept)
    quiet = 1 << (other_kept - 1)
    nans: Words = (sign | payload | np.uint64(_infinite(dtype) | quiet)).astype(f"<u{other_bits // 8}")
    return nans
