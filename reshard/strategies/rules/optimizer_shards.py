"""Which optimizer shards the compiler makes of a weight, and how it records them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Optional

import numpy as np

from reshard.layout import Layout
from reshard.strategies.rules.communication import groups_allowed, replica_groups

DEFAULT_THRESHOLD = 64
"""KiB below which MindSpore does not shard, unless it is told otherwise."""


class ShardSetting(NamedTuple):
    """How the optimizer of a run shards.

    Attributes:
        size: configured shards per weight; -1 is as many as there are replicas, 0 is none at all.
        threshold: smaller tensors are not sharded, in KiB.
    """

    size: int
    threshold: int = DEFAULT_THRESHOLD


class UndecidedError(ValueError):
    """It cannot be told whether a weight would be sharded."""


NO_SHARDS = (0, 0)


def shard_record(
    layout: Layout, first_rank: int, shape: Sequence[int], item_size: Optional[int], setting: ShardSetting
) -> tuple[int, int]:
    """Step and size that the compiler records of a weight that may be sharded; 0 and 0 where it is not.

    Args:
        layout: without optimizer shards.
        first_rank: of the stage.
        shape: the full tensor's.
        item_size: bytes of an element; None where nobody has said it.
        setting: the run's.

    Raises:
        UndecidedError: it depends on what is not known.
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
        raise UndecidedError("it is split by hand, and nothing is known of optimizer shards of such tables")
    # MindSpore ignores configured sizes of 1 and less.
    size = min(configured, replicas) if configured > 1 else replicas
    if replicas % size or shape[0] % (layout.tensor_cuts[0] * size):
        return NO_SHARDS
    step = _step(layout, first_rank % 8, size, configured > 1)
    if step is None:
        return NO_SHARDS
    return step, size if configured > 1 else -1


@lru_cache(maxsize=4096)
def _step(layout: Layout, offset: int, size: int, configured: bool) -> Optional[int]:
    """The recorded step, None where the groups may not communicate."""
    groups = replica_groups(layout, offset)
    verdicts = [groups_allowed(groups.reshape(-1, size))]
    mirrors = groups.shape[1] // size
    if configured and mirrors > 1:
        # The same part of every shard group, and what the compiler takes for it: ranks a distance apart.
        verdicts.append(groups_allowed(groups.reshape(-1, mirrors, size).transpose(0, 2, 1).reshape(-1, mirrors)))
        distance = layout.device_count // mirrors
        verdicts.append(groups_allowed(np.add.outer(np.arange(distance), np.arange(mirrors) * distance) + offset))
    if None in verdicts or (False in verdicts[1:] and True in verdicts[1:]):
        raise UndecidedError("the compiler would shard it on some ranks and not on others")
    if False in verdicts:
        return None
    first, *_, last = groups[0].tolist()
    step: int = (last - first) // (groups.shape[1] - 1)
    return step
