"""Whether the files of a step fit the strategy: ranks, slices, and unlisted parameters.

A step is complete if every stage has ranks with it, and the files hold every slice of every parameter that they
hold at all. A parameter in no file was not saved and does not count, unless the save was de-duplicated and a rank
of its stage is absent: that rank may have held it. Slices without elements are never missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints import FileHandles, read_index
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError, InputError
from reshard.forms.ranks import SourceTree
from reshard.forms.ranks.checkpoint import RankCheckpoint, SourceStep, stage_shardings
from reshard.layout import Grid, Overlap
from reshard.strategies import Stage, Strategy
from reshard.text.messages import Message, Report, listing, number_ranges, plural, rank_ranges

_MOST_GROUPS = 8


class LostParameter(NamedTuple):
    """A parameter with a slice on no readable rank.

    Attributes:
        parameter: its name.
        groups: per lost slice the ranks that should hold it; one rank of each group is needed.
    """

    parameter: str
    groups: frozenset[frozenset[int]]

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks that should hold a lost slice."""
        return frozenset(rank for group in self.groups for rank in group)


def lost_slices(tensors: Iterable[GlobalTensor], step: SourceStep) -> list[LostParameter]:
    """Parameters with a slice that no read file holds."""
    result = []
    lost_by_kind: dict[object, frozenset[frozenset[int]]] = {}
    for tensor in tensors:
        present = step.present(tensor)
        key = (tensor.shape, stage_shardings(tensor)[0].layout, len(tensor.shardings), present)
        if len(tensor.shardings) > 1 or key not in lost_by_kind:
            lost_by_kind[key] = _holders_of_lost(tensor, present)
        if lost_by_kind[key]:
            result.append(LostParameter(tensor.name, lost_by_kind[key]))
    return result


def _holders_of_lost(tensor: GlobalTensor, present: Sequence[frozenset[int]]) -> frozenset[frozenset[int]]:
    shardings = stage_shardings(tensor)
    layouts = [sharding.layout for sharding in shardings]
    present_slices = []
    for sharding, ranks in zip(shardings, present):
        present_slices.append({sharding.slice_of(rank) for rank in ranks})
    if any(len(slices) == layout.slice_count for slices, layout in zip(present_slices, layouts)):
        return frozenset()
    lost: set[frozenset[int]] = set()
    for cell in Overlap([sharding.grid for sharding in shardings], Grid.whole(tensor.shape)).cells(0):
        if not any(number in slices for number, slices in zip(cell.slices, present_slices)):
            holder_lists = (sharding.holders(number) for sharding, number in zip(shardings, cell.slices))
            lost.add(frozenset(rank for ranks in holder_lists for rank in ranks))
    return frozenset(lost)


def unread_parameters(
    source: Strategy, step: SourceStep, stages: Iterable[Stage], present: set[str]
) -> list[LostParameter]:
    """Parameters in no file that an absent rank may have held (de-duplicated saves)."""
    result: dict[str, set[int]] = {}
    # A stage with a single file shows a de-duplicated save only in the other stages' files.
    if source.is_none or not any(step.deduplicated(stage) for stage in source.stages):
        return []
    for stage in stages:
        absent = step.absent(stage)
        for name in stage.layouts if absent else ():
            if name not in present:
                result.setdefault(name, set()).update(absent)
    return [LostParameter(name, frozenset([frozenset(ranks)])) for name, ranks in result.items()]


def explain(lost: Sequence[LostParameter], most: int) -> list[Message]:
    """One line per group of ranks: the number and names of the parameters that they should hold.

    Args:
        lost: the lost parameters.
        most: limit of name patterns in a line.
    """
    by_groups: dict[frozenset[frozenset[int]], list[str]] = {}
    for parameter, groups in lost:
        by_groups.setdefault(groups, []).append(parameter)
    return [
        f"{plural(len(names), 'parameter')} with a missing slice, which {_in_words(groups)} should "
        "hold: " + listing(names, most)
        for groups, names in sorted(by_groups.items(), key=lambda item: sorted(map(sorted, item[0])))
    ]


def cure(lost: Iterable[LostParameter]) -> Optional[str]:
    """Advice on the ranks to restore; None if nothing is lost."""
    groups = frozenset(group for item in lost for group in item.groups)
    return f"restore {_in_words(groups)}" if groups else None


def _in_words(groups: frozenset[frozenset[int]]) -> str:
    """``ranks 1,5`` if each is needed; ``one of ranks 0,4 and one of ranks 1,5`` for replicas."""
    alone = {rank for group in groups if len(group) == 1 for rank in group}
    # A rank that is needed alone satisfies every other group with it.
    several = sorted(sorted(group) for group in groups if group.isdisjoint(alone))
    words = [rank_ranges(alone)] if alone else []
    words += [f"one of {rank_ranges(group)}" for group in several[:_MOST_GROUPS]]
    if len(several) > _MOST_GROUPS:
        words.append(f"one each of {len(several) - _MOST_GROUPS} more groups of replicas")
    return " and ".join(words)


# Pairs of pipeline stages with a line each.
_MOST_STAGES = 2


def warn_of_unlisted(checkpoint: RankCheckpoint, source: Strategy, report: Report) -> None:
    """Warn of parameters that a stage's ranks hold although only another stage's strategy lists them."""
    stages = source.stages
    step = checkpoint.source
    if len(stages) < 2:
        return
    by_stages: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    everywhere = step.names().intersection(name for stage in stages for name in stage.layouts)
    full_stages = 0
    for stage in stages:
        stored: set[str] = set()
        for names in {frozenset(step.indexes[rank].tensors) for rank in step.loaded(stage)}:
            stored |= names
        full_stages += everywhere <= stored
        for name in sorted((stored & everywhere) - stage.layouts.keys()):
            listed_by = tuple(listing_stage.number for listing_stage in stages if name in listing_stage.layouts)
            by_stages.setdefault((stage.number, listed_by), []).append(name)
    if full_stages == len({number for number, _ in by_stages}) == len(stages):
        report.warn(
            f"ranks of every pipeline stage hold all {len(everywhere)} parameters, which the source strategy shares "
            f"out among {len(stages)} stages: is it the strategy of another run?"
        )
    elif len(by_stages) > _MOST_STAGES:
        # A line per pair of stages could fill a screen.
        unlisted = sorted({name for names in by_stages.values() for name in names})
        numbers = f"stages {number_ranges(number for number, _ in by_stages)}"
        report.warn(_unlisted_text(checkpoint, numbers, "other stages", unlisted))
    else:
        for (number, listed_by), unlisted in by_stages.items():
            elsewhere = f"stage {', '.join(map(str, listed_by))}"
            report.warn(_unlisted_text(checkpoint, f"stage {number}", elsewhere, unlisted))


def _unlisted_text(checkpoint: RankCheckpoint, stage: str, elsewhere: str, unlisted: Sequence[str]) -> str:
    text = f"ranks of pipeline {stage} hold " + listing(unlisted)
    are_read, them = ("it is read", "it") if len(unlisted) == 1 else ("they are read", "them")
    text += (
        f", which the source strategy lists only for {elsewhere}; {are_read} from there, and the target's last stage "
        f"may expect {them} too"
    )
    nowhere = [name for name in unlisted if name not in checkpoint.tensors]
    if nowhere:
        text += f"; in no file of {elsewhere} is " + listing(nowhere) + ", which counts as missing"
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
        stranger = None if source.is_none else _stranger(tree, source, handles)
        if stranger is not None:
            raise CheckpointError(
                f"is {source.path} the strategy of another network? It lists no tensor of {stranger}, and "
                f"{tree.root} has {rank_ranges(beyond)} beyond its {source.device_count} devices",
                file=stranger,
                rank=beyond[0],
                hint="pass the strategy that this checkpoint was saved with",
            )
        devices = "one device (strategy none)" if source.is_none else f"{source.device_count} devices ({source.path})"
        raise CheckpointError(
            f"{tree.root} has checkpoints of {rank_ranges(beyond)}, but the source strategy has {devices}",
            file=tree.root,
            rank=beyond[0],
            hint="pass the strategy that this checkpoint was saved with"
            if source.is_none
            else "is the last pipeline stage's strategy file missing?",
        )


def _stranger(tree: SourceTree, source: Strategy, handles: FileHandles) -> Optional[str]:
    """The first readable file, if the strategy lists none of its tensors."""
    for file in tree.files:
        with contextlib.suppress(InputError):
            tensors = read_index(handles, file.path).tensors
            return file.path if tensors and tensors.keys().isdisjoint(source.parameters) else None
    return None
