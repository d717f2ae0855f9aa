"""Which groups of devices may communicate: what MindSpore's compiler demands of them on Ascend.

A server has eight devices. A group must have the same of them on each of its servers, and these must be one, all
eight, an aligned four, two pairs of devices that are four apart, or two that are four apart or in the same half.
A grid of other groups is not compiled; an optimizer shard over them is silently not made.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Optional

import numpy as np
import numpy.typing as npt

from reshard.layout import Layout

SERVER = 8
"""Devices of a server."""

IntArray = npt.NDArray[np.int64]


def device_count_allowed(devices: int) -> bool:
    """Whether the compiler takes a cluster of so many devices."""
    return devices in (1, 2, 4) or devices % SERVER == 0


def groups_allowed(groups: IntArray) -> Optional[bool]:
    """Whether groups may communicate; None where some may and others not.

    Args:
        groups: global ranks, shape (groups, members), each row ascending.
    """
    found = _allowed(groups)
    return bool(found[0]) if found.all() or not found.any() else None


def _allowed(groups: IntArray) -> npt.NDArray[np.bool_]:
    """Per group whether it may communicate, shape (groups,)."""
    server, local = np.divmod(groups, SERVER)
    # Where in the flattened array another server, or another group, begins.
    first = np.ones(groups.shape, dtype=bool)
    first[:, 1:] = server[:, 1:] != server[:, :-1]
    starts = np.flatnonzero(first)
    masks = np.add.reduceat((1 << local).reshape(-1), starts)
    of_group = starts // groups.shape[1]
    like_first = masks == masks[np.searchsorted(of_group, of_group)]
    return np.logical_and.reduceat(like_first & _ALLOWED[masks], np.searchsorted(of_group, np.arange(len(groups))))


def replica_groups(layout: Layout, first_rank: int) -> IntArray:
    """Global ranks that hold the same slice, shape (slices, replicas), ascending, optimizer sharding aside."""
    slices = layout.without_shards().slice_of_rank
    order = np.argsort(slices, kind="stable").astype(np.int64)
    return order.reshape(-1, layout.replica_count) + first_rank


@lru_cache(maxsize=1024)
def forbidden_group(layout: Layout, offset: int) -> tuple[int, ...]:
    """A group of replicas, or of ranks with the parts of a dimension, that may not communicate; empty if all may.

    Args:
        layout: without optimizer shards.
        offset: the stage's first rank among the devices of its server.
    """
    ranks = np.arange(layout.device_count, dtype=np.int64)
    sizes = layout.device_matrix[::-1]
    groups = [replica_groups(layout, offset)]
    for axes in layout.tensor_map:
        # Ranks that differ in nothing but their part of this dimension.
        strides = [(int(np.prod(sizes[:axis], dtype=np.int64)), sizes[axis]) for axis in axes]
        rest = ranks - sum((ranks // stride % size * stride for stride, size in strides), np.zeros_like(ranks))
        count = int(np.prod([size for _, size in strides], dtype=np.int64))
        groups.append(np.argsort(rest, kind="stable").astype(np.int64).reshape(-1, count) + offset)
    for found in groups:
        forbidden = np.flatnonzero(~_allowed(found))
        if forbidden.size:
            return tuple(found[forbidden[0]].tolist())
    return ()


def _four_apart(local: list[int]) -> bool:
    return local[3] % 4 == local[1] % 4 and local[2] % 4 == local[0] % 4


def _mask_allowed(mask: int) -> bool:
    local = [device for device in range(SERVER) if mask >> device & 1]
    if len(local) == 4:
        return local in ([0, 1, 2, 3], [4, 5, 6, 7]) or _four_apart(local)
    if len(local) == 2:
        return local[1] - local[0] == 4 or local[0] // 4 == local[1] // 4
    return len(local) in (1, SERVER)


_ALLOWED = np.array([_mask_allowed(mask) for mask in range(1 << SERVER)])
