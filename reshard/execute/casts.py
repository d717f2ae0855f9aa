"""Casting floating point elements from one type to another, block by block in cache.

Rounding is to the nearest, ties to even, and once: from Float64 to BFloat16 there is no stop at Float32 that
rounds first. NaN stays NaN. Values too large become infinite and are counted.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import DTYPES, ITEM_SIZES, NUMPY_NAMES

Words = npt.NDArray[Any]

# Elements that are cast at a time: with their temporaries they fit into the cache.
_BLOCK = 1 << 16
# To look up single elements is only faster where they are fewer than one in this number.
_MIN_COMPUTED = 16
_ROOMS = threading.local()


Overflowed = Callable[[str, int], None]
"""Receives the name of a tensor and the number of its elements that became infinite."""


class Cast:
    """The cast of the elements of one tensor.

    Args:
        stored: their type in the source, one of `dtypes.CASTABLE`.
        dtype: the new type, one of `dtypes.CAST_TO`.
        name: name of the tensor.
        overflowed: called with the number of elements that become infinite.
    """

    def __init__(self, stored: str, dtype: str, name: str, overflowed: Overflowed) -> None:
        self.stored = stored
        self.dtype = dtype
        self.stored_size = ITEM_SIZES[stored]
        layout = DTYPES[dtype].layout
        assert layout is not None
        self._without_sign, self._infinity = layout.without_sign, layout.infinity
        self._name = name
        self._overflowed = overflowed

    def put(self, source: Words, out: Words) -> None:
        """Cast elements of one word each.

        Args:
            source: words of the stored type, in any memory layout.
            out: words of the new type, of the same shape.
        """
        overflowed = 0
        if source.flags.c_contiguous and out.flags.c_contiguous:
            flat_source, flat_out = source.reshape(-1), out.reshape(-1)
            for first in range(0, len(flat_source), _BLOCK):
                overflowed += self._block(flat_source[first : first + _BLOCK], flat_out[first : first + _BLOCK])
        elif source.size > _BLOCK and source.ndim > 1:
            # Along the outermost axis longer than 1.
            axis = next(number for number, size in enumerate(source.shape) if size > 1)
            rows = max(1, _BLOCK // (source.size // source.shape[axis]))
            for first in range(0, source.shape[axis], rows):
                part = (*(slice(None),) * axis, slice(first, first + rows))
                if rows == 1:
                    self.put(source[part], out[part])
                else:
                    overflowed += self._block(source[part], out[part])
        else:
            overflowed += self._block(source, out)
        if overflowed:
            self._overflowed(self._name, overflowed)

    def _block(self, source: Words, out: Words) -> int:
        """Cast some elements; the number that became infinite."""
        together = source.flags.c_contiguous and source.size <= _BLOCK
        if together and _cast_ordinary(self.stored, self.dtype, source.reshape(-1), out):
            return 0
        if self.stored == "BFloat16" and self.dtype == "Float32":
            out[...] = source
            np.left_shift(out, 16, out=out)
            return 0
        if self.stored_size == 2:
            table = _table(self.stored, self.dtype)
            others = None
            if together and out.flags.c_contiguous and (self.stored, self.dtype) == ("BFloat16", "Float16"):
                others = _normal_float16(source.reshape(-1), out.reshape(-1))
            if others is None:
                # All indices are valid; in its default mode NumPy would write to a copy first.
                np.take(table, source, out=out, mode="wrap")
            else:
                source = source.reshape(-1)[others]
                values = table[source]
                out.reshape(-1)[others] = values
                # Only these can be infinite.
                out = values
        else:
            out[...] = cast_words(source, self.stored, self.dtype)
        if self.stored == "Float16":
            return 0
        infinities = int(np.count_nonzero((out & self._without_sign) == self._infinity))
        return infinities - _infinities(source, self.stored) if infinities else 0


@functools.cache
def _table(stored: str, dtype: str) -> Words:
    """All elements of a type of two bytes as another type."""
    return cast_words(np.arange(1 << 16, dtype="u2"), stored, dtype)


def _cast_ordinary(stored: str, dtype: str, source: Words, out: Words) -> bool:
    """Cast contiguous elements if all are finite and stay so; returns whether it did.

    This common case takes few steps over memory that stays in the cache.
    """
    if stored == "Float32" and dtype == "BFloat16":
        return _ordinary_bfloat16(source, out)
    if stored == "Float32" and dtype == "Float16":
        return _ordinary_float16(source, out)
    if stored != "Float64" or dtype != "BFloat16":
        return False
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        bits = source.view("f8").astype("f4").view("u4")
    if not _ordinary_bfloat16(bits, out):
        return False
    # The second rounding is only wrong where the first one ended in the middle between two elements.
    middle = np.flatnonzero(bits.astype("u2") == 0x8000)
    if len(middle):
        out[np.unravel_index(middle, out.shape)] = cast_words(source[middle], stored, dtype)
    return True


def _normal_float16(source: Words, out: Words) -> Optional[npt.NDArray[np.intp]]:
    """Cast BFloat16 to Float16 where elements are normal numbers in both: only the bias of the exponent differs.

    Returns:
        Places of the other elements, which are not cast; None if there are many, and none is cast.
    """
    room = _rooms(len(source))[0].view("u2")[: len(source)]
    # Twice the word has no sign; 0x3880 is the least normal number of Float16, 0x4780 the first beyond the largest.
    np.left_shift(source, 1, out=room)
    np.subtract(room, 2 * 0x3880, out=room)
    others = room >= 2 * (0x4780 - 0x3880)
    if np.count_nonzero(others) > len(source) // _MIN_COMPUTED:
        return None
    np.left_shift(room, 2, out=out)
    np.add(out, 0x0400, out=out)
    np.bitwise_and(source, 0x8000, out=room)
    np.bitwise_or(out, room, out=out)
    return np.flatnonzero(others)


def _ordinary_bfloat16(bits: Words, out: Words) -> bool:
    """Float32 to BFloat16; see `_cast_ordinary`."""
    # As signed numbers, all with a sign are below those without; as unsigned ones, above.
    if bits.view("i4").max(initial=0) >= 0x7F7F8000 or bits.max(initial=0) >= 0xFF7F8000:
        return False
    room, _ = _rooms(len(bits))
    np.right_shift(bits, 16, out=room)
    np.bitwise_and(room, 1, out=room)
    np.add(room, bits, out=room)
    np.add(room, 0x7FFF, out=room)
    np.right_shift(room, 16, out=room)
    out[...] = room.reshape(out.shape)
    return True


def _ordinary_float16(bits: Words, out: Words) -> bool:
    """Float32 to Float16; see `_cast_ordinary`.

    Added to 2**13 times the power of two below it, or the least one of Float16, a number is rounded to the digits that
    Float16 has: they are the last bits of the sum.
    """
    room, powers = _rooms(len(bits))
    np.bitwise_and(bits, 0x7FFFFFFF, out=room)
    # From 65520 on, half way to the next power of two, elements become infinite.
    if room.max(initial=0) >= 0x477FF000:
        return False
    np.bitwise_and(room, 0x7F800000, out=powers)
    np.maximum(powers, 0x38800000, out=powers)
    np.add(powers, 13 << 23, out=powers)
    sums = room.view("f4")
    np.add(sums, powers.view("f4"), out=sums)
    np.subtract(room, powers, out=room)
    # The digits begin with a one, which counts as a step of the exponent; those of subnormal numbers do not.
    np.subtract(powers, 0x38800000 + (13 << 23), out=powers)
    np.right_shift(powers, 13, out=powers)
    np.add(room, powers, out=room)
    np.right_shift(bits, 16, out=powers)
    np.bitwise_and(powers, 0x8000, out=powers)
    np.bitwise_or(room, powers, out=room)
    out[...] = room.reshape(out.shape)
    return True


def _rooms(count: int) -> Words:
    """Memory of this thread for two arrays of words."""
    rooms: Optional[Words] = getattr(_ROOMS, "words", None)
    if rooms is None:
        rooms = _ROOMS.words = np.empty((2, _BLOCK), "u4")
    return rooms[:, :count]


def cast_words(source: Words, stored: str, dtype: str) -> Words:
    """Elements of one type as another, both as unsigned words of their size."""
    if dtype == "BFloat16":
        if stored == "Float64":
            return _to_bfloat16(_narrowed_to_odd(source))
        return _to_bfloat16(_floats(source, stored).astype("f4", copy=False).view("u4"))
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = _floats(source, stored).astype(NUMPY_NAMES[dtype])
    words: Words = numbers.view(f"u{numbers.itemsize}")
    return words


def _floats(source: Words, stored: str) -> Words:
    """Words as numbers; BFloat16 as Float32, which represents all of its values."""
    if stored == "BFloat16":
        wide: Words = source.astype("u4")
        wide <<= 16
        return wide.view("f4")
    numbers: Words = source.view(NUMPY_NAMES[stored])
    return numbers


def _to_bfloat16(bits: Words) -> Words:
    """Float32 as BFloat16, to the nearest, ties to even."""
    upper = bits >> 16
    rounded: Words = ((bits + (0x7FFF + (upper & 1))) >> 16).astype("u2")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        # Rounding could turn NaN into infinity; the quiet bit keeps it NaN.
        rounded[nan] = (upper[nan] | 0x40).astype("u2")
    return rounded


def _narrowed_to_odd(source: Words) -> Words:
    """Float64 as Float32 with a sticky last bit: a second rounding then gives the correctly rounded value."""
    wide = source.view("f8")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("f4")
        back = narrow.astype("f8")
    bits = narrow.view("u4").copy()
    inexact = (back != wide) & ~np.isnan(wide)
    # Truncate first: values rounded away from zero go back by one. Then the last bit marks lost bits.
    away = inexact & (np.abs(back) > np.abs(wide))
    bits[away] -= 1
    bits[inexact] |= 1
    return bits


def _infinities(source: Words, stored: str) -> int:
    return int(np.count_nonzero(np.isinf(_floats(source, stored))))
