"""Casting the elements of a tensor, block by block in cache; values that become infinite are counted."""

from __future__ import annotations

import functools
import threading
from typing import Callable, Optional

import numpy as np

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.elements import Words, cast_words, infinite, put_words

# Elements that are cast at a time: with their temporaries they fit into the cache.
_BLOCK = 1 << 16
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
        if self.stored == "Float16":
            # All indices are valid; in its default mode NumPy would write to a copy first.
            np.take(_table(self.dtype), source, out=out, mode="wrap")
            return 0
        together = source.flags.c_contiguous and source.size <= _BLOCK
        narrowed = (self.stored, self.dtype) == ("Float32", "Float16")
        if narrowed and together and _ordinary_float16(source.reshape(-1), out):
            return 0
        put_words(source, self.stored, out, self.dtype)
        if (self.stored, self.dtype) == ("BFloat16", "Float32"):
            return 0
        infinities = int(np.count_nonzero(infinite(out, self.dtype)))
        return infinities - int(np.count_nonzero(infinite(source, self.stored))) if infinities else 0


@functools.cache
def _table(dtype: str) -> Words:
    """All elements of Float16 as another type: faster than one by one."""
    return cast_words(np.arange(1 << 16, dtype="u2"), "Float16", dtype)


def _ordinary_float16(bits: Words, out: Words) -> bool:
    """Cast contiguous Float32 to Float16 if all are finite and stay so; returns whether it did.

    NumPy takes 40 times as long for numbers that become subnormal, such as an optimizer's.
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
