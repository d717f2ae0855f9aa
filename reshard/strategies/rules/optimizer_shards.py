"""The optimizer shards that MindSpore's compiler makes, and the groups of devices that it allows on Ascend.

A server has eight devices. A group must have the same devices on each of its servers: one, all eight, an aligned four,
two pairs of devices that are four apart, or two that are four apart or in the same half. The compiler refuses a grid
with other groups, and silently makes no optimizer shards over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.layout import Layout

SERVER = 8
"""Devices of a server."""

IntArray = npt.NDArray[np.int64]


def device_count_allowed(devices: int) -> bool:
    return devices in (1, 2, 4) or devices % SERVER == 0


def groups_allowed(groups: IntArray) -> bool | None:
    """Whether groups may communicate; None if only some may.

    Args:
        groups: global ranks, shape (groups, members), each row ascending.
    """
    allowed = _allowed(groups)
    return bool(allowed[0]) if allowed.all() or not allowed.any() else None


def _allowed(groups: IntArray) -> npt.NDArray[np.bool_]:
    """Per group whether it may communicate, shape (groups,)."""
    server, local = np.divmod(groups, SERVER)
    # Positions in the flattened array where another server, or another group, begins.
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
    """A group of replicas, or of ranks with the parts of one dimension, that may not communicate; empty if all may.

    Args:
        layout: without optimizer shards.
        offset: the stage's first rank among the devices of its server.
    """
    ranks = np.arange(layout.device_count, dtype=np.int64)
    sizes = layout.device_matrix[::-1]
    groups = [replica_groups(layout, offset)]
    for axes in layout.tensor_map:
        # Ranks that differ only in their part of this dimension.
        strides = [(int(np.prod(sizes[:axis], dtype=np.int64)), sizes[axis]) for axis in axes]
        remainder = ranks - sum((ranks // stride % size * stride for stride, size in strides), np.zeros_like(ranks))
        count = int(np.prod([size for _, size in strides], dtype=np.int64))
        groups.append(np.argsort(remainder, kind="stable").astype(np.int64).reshape(-1, count) + offset)
    for each in groups:
        forbidden = np.flatnonzero(~_allowed(each))
        if forbidden.size:
            return tuple(each[forbidden[0]].tolist())
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


DEFAULT_THRESHOLD = 64
"""MindSpore's default threshold in KiB: smaller tensors are not sharded."""


class ShardSetting(NamedTuple):
    """The optimizer sharding of a run.

    Attributes:
        size: configured shards per weight; -1: as many as replicas, 0: none.
        threshold: smaller tensors are not sharded, in KiB.
    """

    size: int
    threshold: int = DEFAULT_THRESHOLD


class UndecidedError(ValueError):
    """It is unknown whether a weight would be sharded."""


NO_SHARDS = (0, 0)


def shard_record(
    layout: Layout, first_rank: int, shape: Sequence[int], item_size: int | None, setting: ShardSetting
) -> tuple[int, int]:
    """Step and size that the compiler records for a weight that may be sharded; 0 and 0 if it is not.

    Args:
        layout: without optimizer shards.
        first_rank: first rank of the stage.
        shape: shape of the full tensor.
        item_size: bytes of an element; None if unknown.
        setting: setting of the run.

    Raises:
        UndecidedError: it depends on an unknown value.
    """
    possible = possible_record(layout, first_rank, shape, setting.size)
    if possible == NO_SHARDS:
        return possible
    elements = 1
    for size in shape:
        elements *= size
    least, most = (item_size, item_size) if item_size is not None else (1, 8)
    if elements * most < setting.threshold << 10:
        return NO_SHARDS
    if elements * least < setting.threshold << 10:
        raise UndecidedError(
            f"its element type decides whether it is sharded: {elements} elements, threshold {setting.threshold} KiB"
        )
    return possible


def possible_record(layout: Layout, first_rank: int, shape: Sequence[int], configured: int) -> tuple[int, int]:
    """Step and size for a weight above the threshold.

    Raises:
        UndecidedError: the compiler would treat the ranks of the stage differently.
    """
    replicas = layout.replica_count
    if not configured or not shape or replicas == 1:
        return NO_SHARDS
    if layout.uneven is not None:
        raise UndecidedError("it is split by hand, and optimizer shards of hand-split tables are unknown")
    # MindSpore ignores configured sizes of 1 and less.
    size = min(configured, replicas) if configured > 1 else replicas
    if replicas % size or shape[0] % (layout.tensor_cuts[0] * size):
        return NO_SHARDS
    step = _step(layout, first_rank % 8, size, configured > 1)
    if step is None:
        return NO_SHARDS
    return step, size if configured > 1 else -1


@lru_cache(maxsize=4096)
def _step(layout: Layout, offset: int, size: int, configured: bool) -> int | None:
    """The recorded step, None if the groups may not communicate."""
    groups = replica_groups(layout, offset)
    verdicts = [groups_allowed(groups.reshape(-1, size))]
    mirrors = groups.shape[1] // size
    if configured and mirrors > 1:
        # The same part of every shard group; instead of it, the compiler checks the ranks at a distance.
        verdicts.append(groups_allowed(groups.reshape(-1, mirrors, size).transpose(0, 2, 1).reshape(-1, mirrors)))
        distance = layout.device_count // mirrors
        verdicts.append(groups_allowed(np.add.outer(np.arange(distance), np.arange(mirrors) * distance) + offset))
    if None in verdicts or (False in verdicts[1:] and True in verdicts[1:]):
        raise UndecidedError("the compiler would shard it on some ranks only")
    if False in verdicts:
        return None
    first, *_, last = groups[0].tolist()
    step: int = (last - first) // (groups.shape[1] - 1)
    return step
