"""Whether the files of a step hold every slice, and which are lost where they do not.

A step is complete when every stage has ranks with it and of every parameter found at that step
every slice is found. A parameter that no file holds was not saved and does not count, except where
the save was de-duplicated and a rank of that stage is absent, which may have been the one that held
it. What has no elements is never missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.forms.ranks.holding import stage_shardings
from reshard.layout import Grid, Overlap
from reshard.strategies import Stage, Strategy
from reshard.text.messages import Message, listing
from reshard.text.wording import plural, rank_ranges

_MOST_GROUPS = 8


class Lost(NamedTuple):
    """A parameter of which a slice is on no readable rank.

    Attributes:
        parameter: its name.
        groups: per lost slice the ranks that would have held it; one rank of each is needed.
    """

    parameter: str
    groups: frozenset[frozenset[int]]

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks that would have held a lost slice."""
        return frozenset(rank for group in self.groups for rank in group)


def lost_slices(tensors: Iterable[GlobalTensor], step: SourceStep) -> list[Lost]:
    """Parameters of which some slice is on no rank whose file was read."""
    result = []
    known: dict[object, frozenset[frozenset[int]]] = {}
    for tensor in tensors:
        present = step.present(tensor)
        key = (tensor.shape, stage_shardings(tensor)[0].layout, len(tensor.shardings), present)
        if len(tensor.shardings) > 1 or key not in known:
            known[key] = _holders_of_lost(tensor, present)
        if known[key]:
            result.append(Lost(tensor.name, known[key]))
    return result


def _holders_of_lost(tensor: GlobalTensor, present: Sequence[frozenset[int]]) -> frozenset[frozenset[int]]:
    shardings = stage_shardings(tensor)
    layouts = [sharding.layout for sharding in shardings]
    held = []
    for sharding, ranks in zip(shardings, present):
        local = [rank - sharding.stage.first_rank for rank in ranks]
        held.append(set(sharding.layout.slice_of_rank[local].tolist()))
    if any(len(slices) == layout.slice_count for slices, layout in zip(held, layouts)):
        return frozenset()
    lost: set[frozenset[int]] = set()
    for cell in Overlap([sharding.grid for sharding in shardings], Grid.whole(tensor.shape)).cells(0):
        if not any(number in slices for number, slices in zip(cell.slices, held)):
            held_by = (sharding.holders(number) for sharding, number in zip(shardings, cell.slices))
            lost.add(frozenset(rank for ranks in held_by for rank in ranks))
    return frozenset(lost)


def unread_parameters(source: Strategy, step: SourceStep, stages: Iterable[Stage], found: set[str]) -> list[Lost]:
    """Parameters that were found nowhere but may have been on an absent rank (de-duplicated saves)."""
    result: dict[str, set[int]] = {}
    # Of a stage with one file left nothing but the other stages' files tells it.
    if source.is_none or not any(step.deduplicated(stage) for stage in source.stages):
        return []
    for stage in stages:
        absent = step.absent(stage)
        for name in stage.layouts if absent else ():
            if name not in found:
                result.setdefault(name, set()).update(absent)
    return [Lost(name, frozenset([frozenset(ranks)])) for name, ranks in result.items()]


def explain(lost: Sequence[Lost], most: int) -> list[Message]:
    """One line per ranks that would have held something: how many parameters, and which.

    Args:
        lost: what is lost.
        most: patterns of names in a line at the most.
    """
    by_groups: dict[frozenset[frozenset[int]], list[str]] = {}
    for parameter, groups in lost:
        by_groups.setdefault(groups, []).append(parameter)
    return [
        f"{plural(len(names), 'parameter')} with a slice on no readable rank, which {_in_words(groups)} would have "
        "held: " + listing(names, most)
        for groups, names in sorted(by_groups.items(), key=lambda item: sorted(map(sorted, item[0])))
    ]


def cure(lost: Iterable[Lost]) -> Optional[str]:
    """Which ranks have to be brought back, in words; None where nothing is lost."""
    groups = frozenset(group for item in lost for group in item.groups)
    return f"bring back {_in_words(groups)}" if groups else None


def _in_words(groups: frozenset[frozenset[int]]) -> str:
    """``ranks 1,5`` where each is needed; ``one of ranks 0,4 and one of ranks 1,5`` where replicas would do."""
    alone = {rank for group in groups if len(group) == 1 for rank in group}
    # Of a group with a rank that is needed anyway there is one then.
    several = sorted(sorted(group) for group in groups if group.isdisjoint(alone))
    words = [rank_ranges(alone)] if alone else []
    words += [f"one of {rank_ranges(group)}" for group in several[:_MOST_GROUPS]]
    if len(several) > _MOST_GROUPS:
        words.append(f"one each of {len(several) - _MOST_GROUPS} more groups of replicas")
    return " and ".join(words)
