"""Dividing target ranks among several runs, or into work items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


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


def bundles(groups: Iterable[tuple[int, ...]], sizes: Mapping[int, int], count: int) -> Iterator[tuple[int, ...]]:
    """Groups of ranks put together, in their order, into bundles of about a ``count``-th of all bytes.

    No group is divided. A bundle holds more than that only where a single group does, and there are
    fewer than two bundles for each of ``count``.

    Args:
        groups: ranks that stay together; at least one in each.
        sizes: bytes of every rank's file.
        count: how many bundles there should be.
    """
    fair = sum(sizes.values()) / count
    bundle: list[int] = []
    held = 0
    for group in groups:
        size = sum(sizes[rank] for rank in group)
        if bundle and held + size > fair:
            yield tuple(bundle)
            bundle, held = [], 0
        bundle += group
        held += size
    if bundle:
        yield tuple(bundle)
