"""The map of the distributed optimizer's flat buckets: which parameter lies where.

A bucket holds parameters one after the other, without names. Their order is the reverse of ``named_parameters()``; each
begins at a multiple of 64 elements; a parameter is never in two buckets. So lengths decide: those of the candidates in
this order have to be exactly those in the buckets, or there is no map. A map is no proof: that every master, cast to
the type of its weight, is the weight, is compared later, element by element.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

ALIGNMENT = 64
"""Elements: each parameter of a bucket begins at a multiple."""

DEFAULT_BUCKETS = (None, 40_000_000)
"""Elements from which on a bucket is full, where no argument names others; None without a limit."""

# Limits of sizes of buckets that are tried.
_MAX_TRIED = 4096


class Slot(NamedTuple):
    """The place of a parameter: the number of its bucket, and its first element in it."""

    bucket: int
    start: int


def places_by_edges(
    lengths: Sequence[int], buckets: Sequence[Sequence[int]], padded: bool = False
) -> list[Slot] | None:
    """The places of parameters in buckets with recorded edges; None where they do not fit.

    Every parameter begins and ends at an edge, and so does every padding. All other edges are those of data-parallel
    ranks, which cut a bucket evenly.

    Args:
        lengths: elements of each parameter, in the order of the buckets.
        buckets: the edges of each bucket, ascending, from 0 to its size.
        padded: buckets have their padding at the end, as before core 0.15.
    """
    places: list[Slot] = []
    explained: list[set[int]] = [{0, edges[-1]} for edges in buckets]
    known = [frozenset(edges) for edges in buckets]

    def is_full(number: int, position: int, length: int) -> bool:
        if padded:
            return not {aligned(position), aligned(position) + length} <= known[number]
        return buckets[number][-1] in (position, aligned(position))

    number, position = 0, 0
    for length in lengths:
        if number < len(buckets) and position and is_full(number, position, length):
            number, position = number + 1, 0
        start = aligned(position)
        position = start + length
        if number == len(buckets) or not {start, position} <= known[number]:
            return None
        explained[number].update((start, position))
        places.append(Slot(number, start))
    if number != len(buckets) - 1 or not (padded or is_full(number, position, 0)):
        return None
    rest = [sorted(edges - met) for edges, met in zip(known, explained)]
    return places if all(map(_are_cuts, rest, buckets)) else None


def _are_cuts(rest: Sequence[int], edges: Sequence[int]) -> bool:
    """Whether some edges are those of data-parallel ranks: multiples of one number, all of which are edges."""
    if not rest:
        return True
    known = set(edges)
    for parts in range(1, len(edges)):
        length, remainder = divmod(rest[0], parts)
        cut_evenly = not remainder and length and all(edge % length == 0 for edge in rest)
        if cut_evenly and all(edge in known for edge in range(length, edges[-1], length)):
            return True
    return False


def places_by_size(
    lengths: Sequence[int], size: int, alone: Collection[int] = (), bucket_sizes: Sequence[int | None] = ()
) -> list[Slot] | None:
    """The places of parameters in buckets that were joined without the padding at their ends; None if none fit.

    Where several sizes of buckets fit, the first is taken; the proof decides.

    Args:
        lengths: elements of each parameter, in the order of the buckets.
        size: elements of all buckets together.
        alone: numbers of parameters that have a bucket of their own: embeddings that pipeline stages share.
        bucket_sizes: elements from which on a bucket is full, to be tried first; None without a limit.
    """
    tried = itertools.chain(bucket_sizes, DEFAULT_BUCKETS, itertools.islice(_possible_sizes(lengths), _MAX_TRIED))
    for bucket_size in tried:
        places, end = _joined(lengths, alone, bucket_size)
        if end == size:
            return places
    return None


def _possible_sizes(lengths: Sequence[int]) -> Iterator[int]:
    """Sizes at which some bucket is full: those that some neighbouring parameters have together."""
    met: set[int] = set()
    for first in range(len(lengths)):
        position = 0
        for length in lengths[first:]:
            position = aligned(position) + length
            if position not in met:
                met.add(position)
                yield position


def _joined(lengths: Sequence[int], alone: Collection[int], bucket_size: int | None) -> tuple[list[Slot], int]:
    """The places in joined buckets, and the end."""
    places: list[Slot] = []
    begin = position = 0
    for number, length in enumerate(lengths):
        start = aligned(position)
        if number in alone and position:
            # The bucket before is closed with the padding of this parameter.
            begin, start = begin + start, 0
        places.append(Slot(0, begin + start))
        position = start + length
        if number in alone or (bucket_size is not None and position >= bucket_size):
            begin, position = begin + position, 0
    return places, begin + position


def aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
