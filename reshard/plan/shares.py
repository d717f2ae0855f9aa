"""Dividing target ranks among several runs."""

from __future__ import annotations

from collections.abc import Mapping


def share_of(sizes: Mapping[int, int], index: int, count: int) -> tuple[int, ...]:
    """The ranks that one of ``count`` runs writes, ascending.

    Neighbouring ranks stay together, since they tend to read the same source files, and the shares
    are as equal in bytes as that allows. Every rank is in exactly one share.

    Args:
        sizes: bytes of every rank's file.
        index: which run, from 0.
        count: how many there are.
    """
    total = sum(sizes.values())
    chosen = []
    before = 0
    for rank, size in sorted(sizes.items()):
        # A rank goes to the share in which its middle lies.
        middle = 2 * before + size
        if total:
            if min(count - 1, middle * count // (2 * total)) == index:
                chosen.append(rank)
        elif rank % count == index:
            chosen.append(rank)
        before += size
    return tuple(chosen)
