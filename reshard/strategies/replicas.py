"""Groups of ranks whose checkpoints are identical, from a strategy or from group_info files.

A strategy is exact: ranks of one stage are replicas if they hold the same slice of every
parameter that the stage lists. The lists of group_info files are correct but can be incomplete, or
empty; lists that share a rank are joined.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.defaults import MAX_DEVICES
from reshard.errors import StrategyError
from reshard.layout import Layout
from reshard.storage import absolute
from reshard.strategies.files import GroupInfo
from reshard.strategies.model import Stage, Strategy
from reshard.text.messages import listing, rank_ranges
from reshard.text.names import ACCUMULATED_GRADIENTS

_OWN_DIRECTORY = re.compile(r"(?:ckpt_dir|rank_)([0-9]{1,9})")
_OWN_NAME = re.compile(r".*rank_([0-9]{1,9})")


class ReplicaGroup(NamedTuple):
    """Ranks whose checkpoints are identical.

    Attributes:
        ranks: global ranks, ascending; one alone if it has no known replica.
        stage: their pipeline stage; None if only group_info files were read.
    """

    ranks: tuple[int, ...]
    stage: int | None = None


class Replicas(NamedTuple):
    """All groups, ordered by their first rank, with notes for the user."""

    groups: tuple[ReplicaGroup, ...]
    notes: tuple[str, ...]


def replicas_of_strategy(strategy: Strategy) -> Replicas:
    """The groups of a strategy's layouts; every rank is in one of them."""
    groups: list[ReplicaGroup] = []
    notes = list(strategy.notes)
    for stage in strategy.stages:
        keys = _slices_held(stage.layouts.values(), stage.device_count)
        groups += _groups(stage, keys)
        plain = {
            name: layout.without_shards() if name.startswith(ACCUMULATED_GRADIENTS) else layout
            for name, layout in stage.layouts.items()
        }
        claimed = [name for name, layout in stage.layouts.items() if layout.shards != plain[name].shards]
        if claimed and keys.max() != _slices_held(plain.values(), stage.device_count).max():
            notes.append(
                f"stage {stage.number}: without the optimizer shards that are recorded for "
                + listing(claimed, 3)
                + ", and which often do not exist, more ranks would be replicas"
            )
    return Replicas(tuple(groups), tuple(notes))


def replicas_of_group_infos(infos: Sequence[GroupInfo]) -> Replicas:
    """The groups in group_info files; lists that share a rank are joined.

    Ranks without a list are in no group.

    Raises:
        StrategyError: files contradict each other, or their own place.
    """
    notes: list[str] = []
    info_of: dict[int, GroupInfo] = {}
    groups: list[set[int]] = []
    for info in infos:
        own_rank = _own_rank(info.file)
        if not info.restore_ranks:
            whose = "" if own_rank is None else f" of rank {own_rank}"
            notes.append(f"{info.file}: lists no ranks: the replicas{whose} are unknown")
            continue
        _check(info, own_rank)
        if own_rank is not None:
            earlier = info_of.setdefault(own_rank, info)
            if set(earlier.restore_ranks) != set(info.restore_ranks):
                raise StrategyError(
                    f"rank {own_rank}: {earlier.file} lists {sorted(earlier.restore_ranks)}, "
                    f"but {info.file} lists {sorted(info.restore_ranks)}",
                    file=info.file,
                    rank=own_rank,
                    hint="pass the files of one run",
                )
        ranks = set(info.restore_ranks)
        sharing = [group for group in groups if not group.isdisjoint(ranks)]
        groups = [*(group for group in groups if group.isdisjoint(ranks)), ranks.union(*sharing)]
    if groups:
        notes.append("group_info files may omit replicas; --strategy lists all")
    in_order = sorted(tuple(sorted(group)) for group in groups)
    return Replicas(tuple(map(ReplicaGroup, in_order)), tuple(notes))


def _slices_held(layouts: Iterable[Layout], devices: int) -> npt.NDArray[np.int64]:
    """A number per local rank, shape (devices,); equal for ranks with the same slices."""
    keys = np.zeros(devices, dtype=np.int64)
    # Thousands of parameters share tens of layouts.
    for layout in set(layouts):
        # Renumbered each time: the product stays below the square of the device count.
        pairs = keys * layout.slice_count + np.asarray(layout.slice_of_rank)
        keys = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        if int(keys.max()) == devices - 1:
            break
    return keys


def _groups(stage: Stage, keys: npt.NDArray[np.int64]) -> list[ReplicaGroup]:
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    # As lists: a million separate ranks would be a million arrays.
    ranks: list[int] = (order + stage.first_rank).tolist()
    bounds: list[int] = [0, *edges.tolist(), len(ranks)]
    members = sorted(tuple(ranks[start:end]) for start, end in itertools.pairwise(bounds))
    return [ReplicaGroup(group, stage.number) for group in members]


def _own_rank(path: str) -> int | None:
    """The rank that wrote a group_info file, if its path contains it."""
    directory, name = os.path.split(absolute(path))
    match = _OWN_DIRECTORY.fullmatch(os.path.basename(directory)) or _OWN_NAME.fullmatch(os.path.splitext(name)[0])
    return int(match[1]) if match is not None else None


def _check(info: GroupInfo, own_rank: int | None) -> None:
    largest = max(info.restore_ranks)
    if largest >= MAX_DEVICES:
        problem = f"{info.file} is damaged: it lists rank {largest}, more than any cluster has"
        raise StrategyError(problem, file=info.file, rank=largest)
    if own_rank is not None and own_rank not in info.restore_ranks:
        raise StrategyError(
            f"{info.file} is in the place of rank {own_rank}'s file, but lists {rank_ranges(info.restore_ranks)}",
            file=info.file,
            rank=own_rank,
            hint="pass the files of one run, each in its original place",
        )
