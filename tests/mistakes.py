"""Wrong places of a slice's bytes, for `verify` to find; they replace `StoredSlice`."""

from __future__ import annotations

from reshard.checkpoints.checkpoint import Decoding
from reshard.layout import Box
from reshard.plan.pieces import StoredSlice

Extents = tuple[tuple[int, int], ...]


def another_rank(path: str, rank: int, extents: Extents, box: Box, decoding: Decoding | None = None) -> StoredSlice:
    """The slice is taken from the next rank's file."""
    return StoredSlice(path.replace(f"rank_{rank}", f"rank_{(rank + 1) % 4}"), rank, extents, box, decoding)


def off_by_one(path: str, rank: int, extents: Extents, box: Box, decoding: Decoding | None = None) -> StoredSlice:
    """The slice is taken from one element too early."""
    return StoredSlice(path, rank, tuple((offset - 4, size) for offset, size in extents), box, decoding)


def swapped_rows(path: str, rank: int, extents: Extents, box: Box, decoding: Decoding | None = None) -> StoredSlice:
    """The second half of the slice is taken before the first."""
    halves = [((offset, size // 2), (offset + size // 2, size - size // 2)) for offset, size in extents]
    return StoredSlice(path, rank, tuple(part for first, second in halves for part in (second, first)), box, decoding)
