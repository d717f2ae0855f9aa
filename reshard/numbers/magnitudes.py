"""How many numbers there are of every binary exponent.

Exponents of Float32, and so of all narrower floats and integers, are single bytes. Counting is slow whatever is
counted, so two of them are counted at a time, as one number of 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.numbers.widening import AT_ONCE

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

EXPONENTS = 2048
"""Exponents that a Float64 may have, as its bits count them."""
ONE = 1023
"""The exponent of 1.0 there."""
_SHIFT = 52

_SINGLE_SHIFT = 23
_SINGLE_ONE = 127
# The least exponent of a Float32 is of zeros and of numbers below its normal ones, the largest of no finite number.
_SINGLES = slice(1, 255)
# Exponents that wait to be counted: each count goes through a table of 64 Ki pairs.
_TOGETHER = 4 * AT_ONCE
_PAIRS = 1 << 16


class Magnitudes:
    """Counts finite numbers but zeros by their exponents; for one thread."""

    def __init__(self) -> None:
        self._counts = np.zeros(EXPONENTS, np.int64)
        # Byte by byte: the exponents of Float32 that wait, without the sign before them.
        self._waiting = np.empty(_TOGETHER, np.uint8)
        self._filled = 0
        self._words = np.empty(AT_ONCE, np.uint32)

    def add(self, numbers: Array) -> int:
        """Count some numbers.

        Args:
            numbers: `AT_ONCE` at the most, all finite, in one dimension; Float32, integers of 16 bits, or Float64.

        Returns:
            How many of them are zero.
        """
        if numbers.dtype.itemsize <= 4:
            return self._add_singles(np.ascontiguousarray(numbers, np.float32))
        zeros = len(numbers) - int(np.count_nonzero(numbers))
        self._counts += np.bincount(exponents(numbers), minlength=EXPONENTS)
        self._counts[0] -= zeros
        return zeros

    def weigh(self, doubles: npt.NDArray[np.float64], counts: Counts) -> None:
        """Count every number so many times; there is no zero among them."""
        np.add.at(self._counts, exponents(doubles), counts)

    def taken(self) -> Counts:
        """The counts so far, by the exponent that a Float64 has; what is counted from now on begins at zero."""
        self._count_waiting()
        taken, self._counts = self._counts, np.zeros(EXPONENTS, np.int64)
        return taken

    def _add_singles(self, singles: npt.NDArray[np.float32]) -> int:
        count = len(singles)
        if self._filled + count > _TOGETHER:
            self._count_waiting()
        bits = np.right_shift(singles.view(np.uint32), _SINGLE_SHIFT, out=self._words[:count])
        found = self._waiting[self._filled : self._filled + count]
        # The sign is lost above the byte.
        np.copyto(found, bits, casting="unsafe")
        self._filled += count
        if np.count_nonzero(found) == count:
            return 0
        least = singles[found == 0]
        # Float64 gives each of those that are not zero an exponent of its own.
        small = least[least != 0]
        if len(small):
            self._counts += np.bincount(exponents(small), minlength=EXPONENTS)
        return len(least) - len(small)

    def _count_waiting(self) -> None:
        waiting = self._waiting[: self._filled]
        even = len(waiting) & ~1
        pairs = np.bincount(waiting[:even].view(np.uint16), minlength=_PAIRS).reshape(256, 256)
        singles = pairs.sum(axis=0) + pairs.sum(axis=1) + np.bincount(waiting[even:], minlength=256)
        first = ONE - _SINGLE_ONE
        self._counts[first + _SINGLES.start : first + _SINGLES.stop] += singles[_SINGLES]
        self._filled = 0


def exponents(numbers: Array) -> Counts:
    """The exponent of every number, as the bits of a Float64 count it."""
    bits = np.ascontiguousarray(numbers, np.float64).view(np.uint64) >> np.uint64(_SHIFT)
    # As signed numbers, which counting takes as they are.
    found: Counts = bits.view(np.int64)
    return np.bitwise_and(found, EXPONENTS - 1, out=found)
