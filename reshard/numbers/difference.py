"""Differences of two checkpoints in names, shapes, types and numbers.

Blocks are compared as bytes first, and only blocks that differ are subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.dtypes import INT4
from reshard.execute import Progress
from reshard.numbers.sweep import Location, SweepBlock, SweepItem, location_of, sweep
from reshard.numbers.widening import AT_ONCE, INTEGERS, doubles, is_number
from reshard.opened import LazyTensor, OpenedCheckpoint
from reshard.opened.checkpoint import in_file_order

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

# Smaller blocks: this computation holds more temporaries per block.
_AT_ONCE = AT_ONCE // 2
_LONG = ("Int64", "UInt64")


@dataclass(frozen=True)
class TensorPair:
    """A tensor in both checkpoints, with the same shape.

    Attributes:
        name: its name.
        dtypes: MindSpore's names of its types in A and B.
        shape: of the full tensor.
        identical: type and all bytes are equal.
        differing: elements whose values differ; NaN equals NaN. None if the type has no numbers.
        nan: numbers of elements that are NaN in A only, and in B only.
        max_abs: the largest absolute difference of elements that are NaN in neither; for finite elements at most the
            largest Float64.
        max_rel: the largest difference relative to the larger absolute value.
        at: index of the first largest absolute difference, or else of an element that is NaN on one side.
        first_nonfinite: the first element that is NaN on one side or differs infinitely, in A and in B.
    """

    name: str
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    identical: bool
    differing: int | None = 0
    nan: tuple[int, int] = (0, 0)
    max_abs: float = 0.0
    max_rel: float = 0.0
    at: tuple[int, ...] | None = None
    first_nonfinite: tuple[Location, Location] | None = field(default=None, compare=False)

    @property
    def nonfinite_words(self) -> str:
        """What is NaN or infinite in one only: ``1 NaN in B only``; empty without such elements."""
        if self.first_nonfinite is None:
            return ""
        sides = [f"{count} NaN in {side} only" for side, count in zip("AB", self.nan) if count]
        return " and ".join(sides) or "an infinite difference"


@dataclass(frozen=True)
class Differences:
    """Names that only A or B has, sorted; tensors of different shapes, with both; and all others, by name."""

    only_a: list[str]
    only_b: list[str]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    pairs: list[TensorPair]

    @property
    def differing(self) -> list[TensorPair]:
        return [pair for pair in self.pairs if not pair.identical]

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.shapes or self.differing)


@dataclass
class _PartialDifference:
    """Differences of some elements of a pair; ``at`` and ``first_nonfinite`` count elements in C order."""

    identical: bool = True
    differing: int = 0
    nan_a: int = 0
    nan_b: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    at: int | None = None
    first_nonfinite: int | None = None


def differences(a: OpenedCheckpoint, b: OpenedCheckpoint, max_memory: int, progress: Progress) -> Differences:
    """Compare two checkpoints, of any forms, layouts and steps; every element is read once."""
    common = [name for name in a if name in b]
    shapes = {name: (a[name].shape, b[name].shape) for name in common if a[name].shape != b[name].shape}
    alike = [name for name in common if name not in shapes]
    # Text and unknown types have no numbers: their bytes are compared.
    opaque = {name for name in alike if not _comparable(a[name], b[name])}
    order = in_file_order(a.contents, alike)
    paths = in_file_order(b.contents, alike).paths
    names = [name for name in order.names if name not in opaque]
    items = [SweepItem((a[name], b[name])) for name in names]
    parts = sweep(items, [a, b], _compared, max_memory, progress)
    pairs = [_together(item, some) for item, some in zip(items, parts)]
    for name in opaque:
        equal = (
            a[name].dtype_name == b[name].dtype_name and a.get_tensor(name).tobytes() == b.get_tensor(name).tobytes()
        )
        dtypes = (a[name].dtype_name, b[name].dtype_name)
        pairs.append(TensorPair(name, dtypes, a[name].shape, equal, 0 if equal else None))
    a.check_unchanged(order.paths)
    b.check_unchanged(paths)
    return Differences(
        [name for name in a if name not in b],
        [name for name in b if name not in a],
        shapes,
        sorted(pairs, key=lambda pair: pair.name),
    )


def _comparable(a: LazyTensor, b: LazyTensor) -> bool:
    """Whether the difference of two tensors can be computed; a byte of Int4 is two numbers."""
    packed = (a.dtype_name == INT4) != (b.dtype_name == INT4)
    return is_number(a.dtype_name) and is_number(b.dtype_name) and not packed


def _together(item: SweepItem, parts: Sequence[_PartialDifference]) -> TensorPair:
    a, b = item.tensors
    largest = max(parts, key=lambda part: part.max_abs, default=None)
    if largest is not None and largest.at is None:
        largest = next((part for part in parts if part.at is not None), None)
    at = None if largest is None or largest.at is None else np.unravel_index(largest.at, a.shape)
    bad = next((part.first_nonfinite for part in parts if part.first_nonfinite is not None), None)
    return TensorPair(
        name=a.name,
        dtypes=(a.dtype_name, b.dtype_name),
        shape=a.shape,
        identical=a.dtype_name == b.dtype_name and all(part.identical for part in parts),
        differing=sum(part.differing for part in parts),
        nan=(sum(part.nan_a for part in parts), sum(part.nan_b for part in parts)),
        max_abs=max((part.max_abs for part in parts), default=0.0),
        max_rel=max((part.max_rel for part in parts), default=0.0),
        at=None if at is None else tuple(int(position) for position in at),
        first_nonfinite=None if bad is None else (location_of(a.target, bad), location_of(b.target, bad)),
    )


def _compared(item: SweepItem, blocks: Iterator[SweepBlock]) -> _PartialDifference:
    a, b = item.tensors
    same_type = a.dtype_name == b.dtype_name
    partial = _PartialDifference()
    with np.errstate(all="ignore"):
        for first, (a_block, b_block) in blocks:
            count = len(a_block) // a.itemsize
            for start in range(0, count, _AT_ONCE):
                a_bytes = a_block[start * a.itemsize : (start + _AT_ONCE) * a.itemsize]
                b_bytes = b_block[start * b.itemsize : (start + _AT_ONCE) * b.itemsize]
                if same_type and _same(a_bytes, b_bytes):
                    continue
                partial.identical = False
                _compare(partial, first + start, (a_bytes, a.dtype_name), (b_bytes, b.dtype_name))
    return partial


def _compare(partial: _PartialDifference, first: int, a_raw: tuple[Bytes, str], b_raw: tuple[Bytes, str]) -> None:
    a, b = doubles(*a_raw), doubles(*b_raw)
    if a_raw[1] == b_raw[1] and a_raw[1] in _LONG:
        distance = _exact_distances(a_raw[0], b_raw[0], a_raw[1]).astype(np.float64)
    else:
        distance = np.abs(a - b)
    most = distance.max()
    nan = None
    if not np.isfinite(most):
        nan = np.isnan(a) != np.isnan(b)
        # Equal infinities, and NaN on both sides, are equal.
        distance[(a == b) | (np.isnan(a) & np.isnan(b)) | nan] = 0
        # Finite numbers do not differ infinitely, even where their difference is too large for Float64.
        distance[np.isinf(distance) & np.isfinite(a) & np.isfinite(b)] = np.finfo(np.float64).max
        most = distance.max()
    # Int4 has two numbers in a byte.
    packed = 2 if a_raw[1] == INT4 else 1
    differing = int(np.count_nonzero(distance != 0))
    if nan is not None and nan.any():
        only_a = int(np.count_nonzero(nan & np.isnan(a)))
        only = int(np.count_nonzero(nan))
        partial.nan_a += only_a
        partial.nan_b += only - only_a
        partial.differing += only
        if partial.at is None:
            partial.at = first + int(nan.argmax()) // packed
    if nan is not None and partial.first_nonfinite is None:
        bad = nan | np.isinf(distance)
        if bad.any():
            partial.first_nonfinite = first + int(bad.argmax()) // packed
    if not differing:
        return
    partial.differing += differing
    relative = distance / np.maximum(np.abs(a), np.abs(b))
    if nan is not None:
        # Elements that are infinite on one side.
        relative[np.isnan(relative) & (distance > 0)] = np.inf
    largest = float(relative.max())
    # 0 / 0 is NaN and does not count.
    partial.max_rel = max(partial.max_rel, float(np.fmax.reduce(relative)) if np.isnan(largest) else largest)
    if most > partial.max_abs:
        partial.max_abs = float(most)
        partial.at = first + int(distance.argmax()) // packed


def _same(a: Bytes, b: Bytes) -> bool:
    """Whether all bytes are equal."""
    if len(a) % 8 == 0:
        return bool((a.view(np.uint64) == b.view(np.uint64)).all())
    return bool((a == b).all())


def _exact_distances(a_bytes: Bytes, b_bytes: Bytes, dtype: str) -> npt.NDArray[np.uint64]:
    """The distances of 64-bit integers, which Float64 cannot represent."""
    a, b = a_bytes.view(INTEGERS[dtype]), b_bytes.view(INTEGERS[dtype])
    # Exact modulo 2^64: distances are smaller.
    distances: npt.NDArray[np.uint64] = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    return distances
