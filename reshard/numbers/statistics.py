"""Statistics of tensors: counts of NaN, infinities and zeros; minimum, maximum, mean and norm of finite elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.execute import Progress
from reshard.numbers.sweep import Location, SweepBlock, SweepItem, location_of, sweep
from reshard.numbers.widening import (
    AT_ONCE,
    BYTES,
    COMPLEX,
    EXPONENTS,
    FLOATS,
    INTEGERS,
    exponents,
    floats,
    is_number,
    table,
)
from reshard.opened import OpenedCheckpoint
from reshard.opened.checkpoint import in_file_order

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Number = int | float

# Maximum numbers per call of BLAS: for more, it starts threads.
_DOT = 1 << 12


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor.

    Attributes:
        name: its name.
        dtype: MindSpore's name of its type.
        shape: of the full tensor.
        count: number of elements; Int4 has two per byte.
        nan: number of NaN.
        inf: number of infinite elements.
        zeros: number of zeros.
        min: the least finite element; None if there is none, and for complex numbers.
        max: the largest, likewise.
        mean: of the finite elements; None if there are none, and for complex numbers.
        norm: the square root of the sum of the squares of the finite elements.
        first_nonfinite: the first element that is NaN or infinite, and its place in the files; None if there is none.
        magnitudes: numbers of finite elements except zeros, by binary exponent as in the bits of a
            Float64; None if not requested.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nan: int
    inf: int
    zeros: int
    min: Number | None
    max: Number | None
    mean: float | None
    norm: float
    first_nonfinite: Location | None = field(default=None, compare=False)
    magnitudes: Counts | None = field(default=None, compare=False)


class _PartialStatistics:
    """Sums over some elements of a tensor: lists of numbers, until all are added.

    Extended precision holds the sums of all Float64 numbers and of their squares.
    """

    def __init__(self, magnitudes: bool) -> None:
        self.nan = self.inf = self.zeros = self.finite = 0
        self.low: Number | None = None
        self.high: Number | None = None
        self.totals: list[Any] = []
        self.squares: list[Any] = []
        # The number of the first element that is not finite, in C order.
        self.first_nonfinite: int | None = None
        self.exponents = np.zeros(EXPONENTS, np.int64) if magnitudes else None

    def bad(self, place: int) -> None:
        """Record an element that is not finite."""
        if self.first_nonfinite is None:
            self.first_nonfinite = place

    def widen(self, low: Any, high: Any, integers: bool) -> None:
        """Extend the range of numbers to ``low`` and ``high``."""
        least, most = (int(low), int(high)) if integers else (float(low), float(high))
        self.low = least if self.low is None else min(self.low, least)
        self.high = most if self.high is None else max(self.high, most)

    def count_exponents(self, doubles: npt.NDArray[np.float64]) -> None:
        """Count finite numbers except zeros."""
        if self.exponents is not None:
            self.exponents += np.bincount(exponents(doubles[doubles != 0]), minlength=EXPONENTS)

    def finished(self) -> _PartialStatistics:
        """Itself, with one number for each sum, since there may be very many parts."""
        self.totals, self.squares = [_sum(self.totals)], [_sum(self.squares)]
        return self


def statistics_of(
    checkpoint: OpenedCheckpoint, max_memory: int, progress: Progress, magnitudes: bool = False, copies: bool = False
) -> list[TensorStatistics]:
    """The statistics of every numeric tensor, sorted by name; every element counts once.

    Args:
        checkpoint: its tensors are read whole.
        max_memory: maximum bytes of buffers, in addition to those of the checkpoint.
        progress: counts bytes.
        magnitudes: also count elements by exponent.
        copies: read every copy of each tensor, and return the statistics of the one with the most NaN and infinite
            elements, the first of equal ones.

    Raises:
        ReshardError: a file cannot be read, or was modified.
    """
    names = [name for name, tensor in checkpoint.items() if is_number(tensor.dtype_name)]
    order = in_file_order(checkpoint.contents, names)
    tensors = {name: checkpoint[name] for name in order.names}
    numbers = {name: checkpoint.contents.copies(name) if copies else 1 for name in tensors}
    items = [
        SweepItem((tensor,), copy)
        for copy in range(max(numbers.values(), default=0))
        for name, tensor in tensors.items()
        if copy < numbers[name]
    ]
    compute = partial(_computed, magnitudes=magnitudes)
    parts = sweep(items, [checkpoint], compute, max_memory, progress)
    checkpoint.check_unchanged(None if copies else order.paths)
    worst: dict[str, TensorStatistics] = {}
    for item, some in zip(items, parts):
        statistics = _together(checkpoint, item, some, magnitudes)
        name = statistics.name
        if name not in worst or statistics.nan + statistics.inf > worst[name].nan + worst[name].inf:
            worst[name] = statistics
    return [worst[name] for name in sorted(worst)]


def _together(
    checkpoint: OpenedCheckpoint, item: SweepItem, parts: Sequence[_PartialStatistics], magnitudes: bool
) -> TensorStatistics:
    """The statistics of a copy of a tensor, from those of its parts in order."""
    (tensor,) = item.tensors
    first = next((part.first_nonfinite for part in parts if part.first_nonfinite is not None), None)
    finite = sum(part.finite for part in parts)
    nan, inf = sum(part.nan for part in parts), sum(part.inf for part in parts)
    counts = [part.exponents for part in parts if part.exponents is not None]
    plain = tensor.dtype_name not in COMPLEX
    total, squares = _sum([part.totals[0] for part in parts]), _sum([part.squares[0] for part in parts])
    return TensorStatistics(
        name=tensor.name,
        dtype=tensor.dtype_name,
        shape=tensor.shape,
        count=finite + nan + inf,
        nan=nan,
        inf=inf,
        zeros=sum(part.zeros for part in parts),
        min=min((part.low for part in parts if part.low is not None), default=None),
        max=max((part.high for part in parts if part.high is not None), default=None),
        mean=float(total / finite) if finite and plain else None,
        norm=float(np.sqrt(squares)),
        first_nonfinite=None if first is None else location_of(checkpoint.target(tensor.name, item.copy), first),
        magnitudes=np.sum([np.zeros(EXPONENTS, np.int64), *counts], axis=0) if magnitudes else None,
    )


def _computed(item: SweepItem, blocks: Iterator[SweepBlock], magnitudes: bool) -> _PartialStatistics:
    """The statistics of some elements of a tensor."""
    dtype = item.tensors[0].dtype_name
    if dtype in BYTES:
        counts = np.zeros(256, np.int64)
        bad: npt.NDArray[np.bool_] = np.logical_not(np.isfinite(table(dtype)).all(axis=1))
        first_nonfinite: int | None = None
        for block in blocks:
            for place, raw in _slices(block, 1):
                block_counts = np.bincount(raw, minlength=256)
                counts += block_counts
                if first_nonfinite is None and block_counts[bad].any():
                    first_nonfinite = place + int(bad[raw].argmax())
        sums = _of_counts(counts, dtype, magnitudes)
        sums.first_nonfinite = first_nonfinite
        return sums
    sums = _PartialStatistics(magnitudes)
    width = ITEM_SIZES[dtype]
    with np.errstate(all="ignore"):
        for block in blocks:
            for place, raw in _slices(block, width):
                if dtype in FLOATS:
                    _add_floats(sums, floats(raw, dtype), place)
                elif dtype in INTEGERS:
                    _add(sums, raw.view(INTEGERS[dtype]))
                else:
                    _add_complex(sums, raw.view(COMPLEX[dtype]), place)
    return sums.finished()


def _of_counts(counts: Counts, dtype: str, magnitudes: bool) -> _PartialStatistics:
    """The statistics of elements, from the number of each byte."""
    sums = _PartialStatistics(magnitudes)
    for values in table(dtype).T:
        finite = np.isfinite(values)
        present = finite & (counts > 0)
        sums.nan += int(counts[np.isnan(values)].sum())
        sums.inf += int(counts[np.isinf(values)].sum())
        sums.zeros += int(counts[values == 0].sum())
        sums.finite += int(counts[finite].sum())
        if present.any():
            sums.widen(values[present].min(), values[present].max(), integers=not dtype.startswith("Float"))
        weighted = values[present] * counts[present]
        sums.totals += weighted.tolist()
        sums.squares += (weighted * values[present]).tolist()
        if sums.exponents is not None:
            nonzero = present & (values != 0)
            np.add.at(sums.exponents, exponents(values[nonzero]), counts[nonzero])
    return sums.finished()


def _add_floats(sums: _PartialStatistics, numbers: Array, place: int) -> None:
    # NaN propagates into both, so they reveal every element that is not finite.
    low, high = numbers.min(), numbers.max()
    if np.isfinite(low) and np.isfinite(high):
        _add(sums, numbers, low, high)
        return
    finite = np.isfinite(numbers)
    sums.bad(place + int(finite.argmin()))
    nan = int(np.count_nonzero(np.isnan(numbers)))
    sums.nan += nan
    sums.inf += len(numbers) - int(np.count_nonzero(finite)) - nan
    finite_numbers = numbers[finite]
    if len(finite_numbers):
        _add(sums, finite_numbers)


def _add(sums: _PartialStatistics, numbers: Array, low: Any = None, high: Any = None) -> None:
    """Add finite numbers, whose range may be known."""
    count = len(numbers)
    integers = numbers.dtype.kind in "iu"
    sums.widen(numbers.min() if low is None else low, numbers.max() if high is None else high, integers)
    doubles = numbers.astype(np.float64, copy=False)
    sums.zeros += int(np.count_nonzero(numbers == 0))
    sums.count_exponents(doubles)
    sums.finite += count
    wide = numbers.astype(np.longdouble) if numbers.dtype == np.float64 else doubles
    sums.totals.append(_integer_sum(numbers) if integers else wide.sum())
    sums.squares.append(_squares(wide))


def _integer_sum(numbers: Array) -> int:
    """The exact sum of at most `AT_ONCE` integers."""
    if numbers.dtype.itemsize < 8:
        return int(numbers.sum(dtype=np.int64))
    # In halves, which do not overflow.
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _squares(numbers: Array) -> Any:
    """The sum of squares; for many numbers, BLAS would start threads, and the result would depend on their number."""
    if numbers.dtype == np.longdouble:
        return (numbers * numbers).sum()
    even = len(numbers) - len(numbers) % _DOT
    rows = numbers[:even].reshape(-1, _DOT)
    tail = numbers[even:]
    products = np.matmul(rows[:, np.newaxis, :], rows[:, :, np.newaxis]).reshape(-1)
    return math.fsum([*products, np.dot(tail, tail)])


def _sum(numbers: Sequence[Any]) -> Any:
    """The sum, exact for integers."""
    return (
        sum(numbers) if all(isinstance(number, int) for number in numbers) else np.array(numbers, np.longdouble).sum()
    )


def _add_complex(sums: _PartialStatistics, numbers: Array, place: int) -> None:
    nan = np.isnan(numbers)
    finite = np.isfinite(numbers)
    if not finite.all():
        sums.bad(place + int(finite.argmin()))
    sums.nan += int(np.count_nonzero(nan))
    sums.inf += int(np.count_nonzero(~nan & ~finite))
    sums.zeros += int(np.count_nonzero(numbers == 0))
    sums.finite += int(np.count_nonzero(finite))
    finite_numbers = numbers[finite].astype(np.complex128)
    if len(finite_numbers):
        sums.squares.append(_squares(finite_numbers.view(np.float64).astype(np.longdouble)))
    sums.count_exponents(np.abs(finite_numbers))


def _slices(block: SweepBlock, width: int) -> Iterator[tuple[int, Bytes]]:
    """A block's bytes in parts of `AT_ONCE` elements, and the number of each part's first element."""
    raw = block.raws[0]
    for first in range(0, len(raw), AT_ONCE * width):
        yield block.first + first // width, raw[first : first + AT_ONCE * width]
