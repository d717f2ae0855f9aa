"""Numbers of the page in few characters: repeated values, and holders of slices as sums of strides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from reshard.numbers.widening import ONE

Numbers = npt.NDArray[np.int64]


def repeats(values: Iterable[Any]) -> list[Any]:
    """Values as ``[value, count, value, count ...]``."""
    runs: list[Any] = []
    for value in values:
        if runs and runs[-2] == value:
            runs[-1] += 1
        else:
            runs += [value, 1]
    return runs


def strides(values: Sequence[int]) -> Optional[list[int]]:
    """Numbers as ``[first, count, stride, count, stride ...]``, the innermost count first.

    The numbers are the first one plus every sum of multiples of the strides, each below its count, like the ranks of a
    slice. None for other numbers.
    """
    array: Numbers = np.asarray(values, np.int64)
    if not len(array):
        return None
    form = [int(array[0])]
    remaining = array
    while len(remaining) > 1:
        stride = int(remaining[1] - remaining[0])
        unequal = np.flatnonzero(np.diff(remaining) != stride)
        count = int(unequal[0]) + 1 if len(unequal) else len(remaining)
        if len(remaining) % count:
            return None
        form += [count, stride]
        remaining = remaining[::count]
    return form if np.array_equal(from_strides(form), array) else None


def from_strides(form: Sequence[int]) -> Numbers:
    """The numbers that `strides` returned."""
    numbers: Numbers = np.array([form[0]], np.int64)
    for count, stride in zip(form[1::2], form[2::2]):
        steps: Numbers = np.arange(count, dtype=np.int64) * stride
        numbers = (steps[:, np.newaxis] + numbers).reshape(-1)
    return numbers


def levels(magnitudes: Optional[Numbers]) -> Optional[list[Any]]:
    """Counts by binary exponent as the lowest exponent and a digit from 0 to 8 for each, relative to the largest.

    A digit is 0 only for exponents without elements. None without counts.
    """
    present: Any = np.flatnonzero(magnitudes) if magnitudes is not None else []
    if magnitudes is None or not len(present):
        return None
    low, high = int(present[0]), int(present[-1])
    counts = magnitudes[low : high + 1]
    digits = np.ceil(counts * (8 / int(counts.max()))).astype(np.int64)
    return [low - ONE, "".join(map(str, digits.tolist()))]
