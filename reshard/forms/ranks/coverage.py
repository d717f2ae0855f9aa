"""Whether the files of a step fit the strategy: ranks, slices, and unlisted parameters.

A step is complete when every stage has ranks with it and of every parameter found at that step
every slice is found. A parameter that no file holds was not saved and does not count, except where
the save was de-duplicated and a rank of that stage is absent, which may have been the one that held
it. Slices without elements are never missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints import FileHandles, read_index
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError, InputError
from reshard.forms.ranks import SourceTree
from reshard.forms.ranks.checkpoint import RankCheckpoint, SourceStep
from reshard.forms.ranks.holding import stage_shardings
from reshard.layout import Grid, Overlap
from reshard.strategies import Stage, Strategy
from reshard.text.messages import Message, listing
from reshard.text.report import Report
from reshard.text.wording import number_ranges, plural, rank_ranges

_MOST_GROUPS = 8


class LostParameter(NamedTuple):
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


def lost_slices(tensors: Iterable[GlobalTensor], step: SourceStep) -> list[LostParameter]:
    """Parameters of which some slice is on no rank whose file was read."""
    result = []
    known: dict[object, frozenset[frozenset[int]]] = {}
    for tensor in tensors:
        present = step.present(tensor)
        key = (tensor.shape, stage_shardings(tensor)[0].layout, len(tensor.shardings), present)
        if len(tensor.shardings) > 1 or key not in known:
            known[key] = _holders_of_lost(tensor, present)
        if known[key]:
            result.append(LostParameter(tensor.name, known[key]))
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


def unread_parameters(
    source: Strategy, step: SourceStep, stages: Iterable[Stage], found: set[str]
) -> list[LostParameter]:
    """Parameters that were found nowhere but may have been on an absent rank (de-duplicated saves)."""
    result: dict[str, set[int]] = {}
    # A stage with a single file left shows it only in the other stages' files.
    if source.is_none or not any(step.deduplicated(stage) for stage in source.stages):
        return []
    for stage in stages:
        absent = step.absent(stage)
        for name in stage.layouts if absent else ():
            if name not in found:
                result.setdefault(name, set()).update(absent)
    return [LostParameter(name, frozenset([frozenset(ranks)])) for name, ranks in result.items()]


def explain(lost: Sequence[LostParameter], most: int) -> list[Message]:
    """One line per ranks that would have held something: how many parameters, and which.

    Args:
        lost: the lost parameters.
        most: patterns of names in a line at the most.
    """
    by_groups: dict[frozenset[frozenset[int]], list[str]] = {}
    for parameter, groups in lost:
        by_groups.setdefault(groups, []).append(parameter)
    return [
        f"{plural(len(names), 'parameter')} without a slice that {_in_words(groups)} should "
        "hold: " + listing(names, most)
        for groups, names in sorted(by_groups.items(), key=lambda item: sorted(map(sorted, item[0])))
    ]


def cure(lost: Iterable[LostParameter]) -> Optional[str]:
    """Advice on the ranks to restore; None if nothing is lost."""
    groups = frozenset(group for item in lost for group in item.groups)
    return f"restore {_in_words(groups)}" if groups else None


def _in_words(groups: frozenset[frozenset[int]]) -> str:
    """``ranks 1,5`` where each is needed; ``one of ranks 0,4 and one of ranks 1,5`` where replicas would do."""
    alone = {rank for group in groups if len(group) == 1 for rank in group}
    # A group with a rank that is needed anyway needs no other.
    several = sorted(sorted(group) for group in groups if group.isdisjoint(alone))
    words = [rank_ranges(alone)] if alone else []
    words += [f"one of {rank_ranges(group)}" for group in several[:_MOST_GROUPS]]
    if len(several) > _MOST_GROUPS:
        words.append(f"one each of {len(several) - _MOST_GROUPS} more groups of replicas")
    return " and ".join(words)


# Pairs of pipeline stages with a line each.
_MOST_STAGES = 2


def problems_of_unlisted(
    checkpoint: RankCheckpoint, source: Strategy, strict: bool, report: Report
) -> list[InputError]:
    """Parameters that a stage's ranks hold although only another stage's strategy lists them."""
    stages = source.stages
    step = checkpoint.source
    if len(stages) < 2:
        return []
    by_stages: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    everywhere = step.names().intersection(name for stage in stages for name in stage.layouts)
    whole = 0
    for stage in stages:
        held: set[str] = set()
        for names in {frozenset(step.indexes[rank].tensors) for rank in step.loaded(stage)}:
            held |= names
        whole += everywhere <= held
        for name in sorted((held & everywhere) - stage.layouts.keys()):
            listed_by = tuple(other.number for other in stages if name in other.layouts)
            by_stages.setdefault((stage.number, listed_by), []).append(name)
    told: list[tuple[str, str]] = []
    if whole == len({number for number, _ in by_stages}) == len(stages):
        text = (
            f"ranks of every pipeline stage hold all {len(everywhere)} parameters, which the source strategy shares "
            f"out among {len(stages)} stages: is it the strategy of another run?"
        )
        told.append((text, next(iter(by_stages.values()))[0]))
    elif len(by_stages) > _MOST_STAGES:
        # A line per pair of stages would fill a screen.
        unlisted = sorted({name for names in by_stages.values() for name in names})
        numbers = f"stages {number_ranges(number for number, _ in by_stages)}"
        told.append((_said_of_unlisted(checkpoint, numbers, "other stages", unlisted), unlisted[0]))
    else:
        for (number, listed_by), unlisted in by_stages.items():
            elsewhere = f"stage {', '.join(map(str, listed_by))}"
            told.append((_said_of_unlisted(checkpoint, f"stage {number}", elsewhere, unlisted), unlisted[0]))
    if strict:
        return [CheckpointError(text, parameter=name, hint="without --strict this is a warning") for text, name in told]
    for text, _ in told:
        report.warn(text)
    return []


def _said_of_unlisted(checkpoint: RankCheckpoint, stage: str, elsewhere: str, unlisted: Sequence[str]) -> str:
    text = f"ranks of pipeline {stage} hold " + listing(unlisted)
    taken, them = ("it is taken", "it") if len(unlisted) == 1 else ("they are taken", "them")
    text += (
        f", which the source strategy lists only for {elsewhere}; {taken} from there, and the target's last stage may "
        f"be expecting {them} too"
    )
    nowhere = [name for name in unlisted if name not in checkpoint.tensors]
    if nowhere:
        text += f"; in no file of {elsewhere} is " + listing(nowhere) + ", so that is not converted"
    return text


def check_ranks(tree: SourceTree, source: Strategy, handles: FileHandles) -> None:
    """Refuse a tree with ranks beyond the source strategy.

    Raises:
        CheckpointError: ranks beyond the strategy's devices, or one file where there must be several.
    """
    if tree.single_file and source.device_count > 1:
        # Report an invalid file first.
        read_index(handles, tree.root)
        raise CheckpointError(
            f"{tree.root} is one file, but {source.path} lays parameters out over {source.device_count} devices",
            file=tree.root,
            hint="pass the directory of all ranks' checkpoints, or --src-strategy none for an unsharded checkpoint",
        )
    beyond = [rank for rank in tree.ranks if rank >= source.device_count]
    if beyond:
        held = "one device (strategy none)" if source.is_none else f"{source.device_count} devices ({source.path})"
        raise CheckpointError(
            f"{tree.root} has checkpoints of {rank_ranges(beyond)}, but the source strategy has {held}",
            file=tree.root,
            rank=beyond[0],
            hint="pass the strategy that this checkpoint was saved with"
            if source.is_none
            else "is the last pipeline stage's strategy file missing?",
        )
