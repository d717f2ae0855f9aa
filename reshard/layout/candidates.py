"""All possible layouts of a tensor without a recorded layout.

The full shape and the shape of a rank's slice give the number of slices per dimension. The slices of the ranks depend
on a device matrix, the axes of each dimension, and an optimizer shard; all combinations are tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from reshard.errors import LayoutError
from reshard.layout.layout import Layout

MAX_CANDIDATES = 20_000
"""Limit of layouts to try."""


def cuts_of(shape: Sequence[int], slice_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The number of equal slices per dimension; None if slices are not equal."""
    if len(shape) != len(slice_shape) or any(part < 1 or size % part for size, part in zip(shape, slice_shape)):
        return None
    return tuple(size // part for size, part in zip(shape, slice_shape))


def possible_holders(device_count: int, cuts: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """All distributions of slices over devices: the slice number of each device, in C order of ``cuts``.

    Args:
        cuts: slices per dimension, optimizer shards included.

    Returns:
        Distinct distributions; None if there are too many layouts to try.
    """
    if device_count % math.prod(cuts):
        return []
    # Counted first: creating layouts of thousands of devices takes half a minute.
    if sum(1 for _ in islice(_layouts(device_count, cuts), MAX_CANDIDATES + 1)) > MAX_CANDIDATES:
        return None
    return list(dict.fromkeys(tuple(layout.slice_of_rank) for layout in _layouts(device_count, cuts)))


def _layouts(device_count: int, cuts: tuple[int, ...]) -> Iterator[Layout]:
    for matrix in _orders(Counter(_prime_factors(device_count))):
        for shards in (count for count in range(1, cuts[0] + 1) if cuts[0] % count == 0) if cuts else (1,):
            tensor_cuts = (cuts[0] // shards, *cuts[1:]) if cuts else ()
            for tensor_map in _maps(matrix, tensor_cuts, frozenset(range(len(matrix)))):
                try:
                    yield Layout(matrix, tensor_map, shards if shards > 1 else 0)
                except LayoutError:
                    # The replicas do not divide into so many shards.
                    continue


def _maps(
    matrix: tuple[int, ...], cuts: tuple[int, ...], free: frozenset[int]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Tensor maps over free axes with this number of slices per dimension."""
    if not cuts:
        yield ()
        return
    for axes in _chains(matrix, cuts[0], free):
        for later_axes in _maps(matrix, cuts[1:], free.difference(axes)):
            yield (axes, *later_axes)


def _chains(matrix: tuple[int, ...], count: int, free: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """Ordered choices of axes, counted from the right, whose sizes multiply to ``count``."""
    if count == 1:
        yield ()
        return
    for axis in sorted(free):
        size = matrix[len(matrix) - 1 - axis]
        if count % size == 0:
            for later_axes in _chains(matrix, count // size, free - {axis}):
                yield (axis, *later_axes)


def _orders(sizes: Counter[int]) -> Iterator[tuple[int, ...]]:
    """Every distinct order of some sizes."""
    if not sizes:
        yield ()
    for size in sorted(sizes):
        for later_sizes in _orders(sizes - Counter([size])):
            yield (size, *later_sizes)


def _prime_factors(number: int) -> list[int]:
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors + ([number] if number > 1 else [])
