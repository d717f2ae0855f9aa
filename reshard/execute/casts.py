"""Casting floating point elements from one type to another, block by block in cache.

Rounding is to the nearest, ties to even, and once: from Float64 to BFloat16 there is no stop at Float32 that
rounds first. NaN stays NaN. Values too large become infinite and are counted.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import DTYPES, ITEM_SIZES, NUMPY_NAMES

Words = npt.NDArray[Any]

# Elements that are cast at a time; with all that is worked out on the way they stay in the cache.
_BLOCK = 1 << 15
_ROOMS = threading.local()


Overflowed = Callable[[str, int], None]
"""Counts elements of a tensor, by its name, that became infinite."""


class Cast:
    """How the elements of one tensor are cast.

    Args:
        stored: their type in the source, one of `dtypes.CASTABLE`.
        dtype: the type that they get, another, one of `dtypes.CAST_TO`.
        name: of the tensor.
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
            out: words of the type that they get, in as many dimensions.
        """
        overflowed = 0
        if source.flags.c_contiguous and out.flags.c_contiguous:
            taken, given = source.reshape(-1), out.reshape(-1)
            for first in range(0, len(taken), _BLOCK):
                overflowed += self._block(taken[first : first + _BLOCK], given[first : first + _BLOCK])
        elif source.size > _BLOCK and source.ndim > 1:
            # Along the outermost axis that has several.
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
        """Cast some elements; how many became infinite."""
        if self.stored == "Float32" and self.dtype == "BFloat16" and source.flags.c_contiguous:
            if _narrow_ordinary(source.reshape(-1), out):
                return 0
        elif self.stored == "BFloat16" and self.dtype == "Float32":
            out[...] = source
            np.left_shift(out, 16, out=out)
            return 0
        out[...] = cast_words(source, self.stored, self.dtype)
        if self.stored == "Float16":
            return 0
        became = int(np.count_nonzero((out & self._without_sign) == self._infinity))
        return became - _infinities(source, self.stored) if became else 0


def _narrow_ordinary(bits: Words, out: Words) -> bool:
    """Cast Float32 to BFloat16 where nothing is infinite, none or becomes so; whether that is true.

    The common case, in few steps over memory that stays in the cache.
    """
    if len(bits) > _BLOCK:
        return False
    room = _room(len(bits))
    np.bitwise_and(bits, 0x7FFFFFFF, out=room)
    if room.max(initial=0) >= 0x7F7F8000:
        return False
    np.right_shift(bits, 16, out=room)
    np.bitwise_and(room, 1, out=room)
    np.add(room, bits, out=room)
    np.add(room, 0x7FFF, out=room)
    np.right_shift(room, 16, out=room)
    out[...] = room.reshape(out.shape)
    return True


def _room(count: int) -> Words:
    """Memory of this thread for some words."""
    found: Optional[Words] = getattr(_ROOMS, "words", None)
    if found is None:
        found = _ROOMS.words = np.empty(_BLOCK, "u4")
    return found[:count]


def cast_words(source: Words, stored: str, dtype: str) -> Words:
    """Elements of one type as another, both as unsigned words of their size."""
    if dtype == "BFloat16":
        if stored == "Float64":
            return _to_bfloat16(_narrowed_to_odd(source))
        return _to_bfloat16(_floats(source, stored).astype("f4", copy=False).view("u4"))
    with np.errstate(over="ignore", invalid="ignore"):
        made = _floats(source, stored).astype(NUMPY_NAMES[dtype])
    words: Words = made.view(f"u{made.itemsize}")
    return words


def _floats(source: Words, stored: str) -> Words:
    """Words as numbers; BFloat16 as Float32, which represents all of its values."""
    if stored == "BFloat16":
        wide: Words = source.astype("u4")
        wide <<= 16
        return wide.view("f4")
    found: Words = source.view(NUMPY_NAMES[stored])
    return found


def _to_bfloat16(bits: Words) -> Words:
    """Float32 as BFloat16, to the nearest, ties to even."""
    upper = bits >> 16
    rounded: Words = ((bits + (0x7FFF + (upper & 1))) >> 16).astype("u2")
    none = (bits & 0x7FFFFFFF) > 0x7F800000
    if none.any():
        # Rounding could turn NaN into infinity; the quiet bit keeps it NaN.
        rounded[none] = (upper[none] | 0x40).astype("u2")
    return rounded


def _narrowed_to_odd(source: Words) -> Words:
    """Float64 as Float32 with a sticky last bit, so that a second rounding is right."""
    wide = source.view("f8")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("f4")
        back = narrow.astype("f8")
    bits = narrow.view("u4").copy()
    inexact = (back != wide) & ~np.isnan(wide)
    # Truncate first: values rounded away from zero go back by one. Then the last bit records lost bits.
    away = inexact & (np.abs(back) > np.abs(wide))
    bits[away] -= 1
    bits[inexact] |= 1
    return bits


def _infinities(source: Words, stored: str) -> int:
    return int(np.count_nonzero(np.isinf(_floats(source, stored))))
