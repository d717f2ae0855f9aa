"""Whether the files of one step hold what was saved, or what some target ranks need of it.

This is the judgement of verification, made from the strategy and the files of all ranks, parameter by parameter;
it asks nobody else.

* A parameter that some file holds: every element that is needed is on some readable rank.
* A parameter that the strategy lists and no file holds was not saved and does not count. But it may have been on
  an absent rank where the save was *de-duplicated*, or where nothing is left of its stage's parameters: it is lost.

What has no elements is never lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Callable, NamedTuple, Optional

import numpy as np

from reshard.errors import IncompleteSourceError, LayoutError
from reshard.layout import Box, Layout, intersection, whole_box
from reshard.strategies import Stage, Strategy
from reshard.text.messages import Message, block, listing
from reshard.text.wording import plural, rank_ranges
from reshard.verification.edited import EditedTree
from reshard.verification.parameter import Holding, Parameter, Shards, is_empty
from reshard.verification.tree import Tree

CURE = "bring back a rank that holds each of these slices"


class Lost(NamedTuple):
    """A parameter that is needed, and is not there.

    Attributes:
        parameter: its name.
        found: whether some file holds a part of it.
        detail: the rest, to be read after the parameter's name.
    """

    parameter: str
    found: bool
    detail: str


class Needs:
    """What target ranks need of a source.

    Args:
        target: the target's strategy; `none` needs everything.
        ranks: the target ranks; all of them where None.
    """

    def __init__(self, target: Strategy, ranks: Optional[Iterable[int]] = None) -> None:
        chosen = None if ranks is None else set(ranks)
        self._everything = target.is_none
        self._in_pipeline = len(target.stages) > 1
        self._stages: list[tuple[Stage, list[int]]] = []
        for stage in target.stages:
            local = [rank - stage.first_rank for rank in stage.ranks if chosen is None or rank in chosen]
            if local:
                self._stages.append((stage, local))

    def __contains__(self, name: str) -> bool:
        """Whether some of the ranks get a parameter."""
        return any(True for _ in self._getting(name))

    def shards(self, name: str) -> bool:
        """Whether an optimizer shard of it is recorded for some of the ranks."""
        return not self._everything and any(stage.layouts[name].shards > 1 for stage, _ in self._getting(name))

    def boxes(self, parameter: Parameter) -> list[Box]:
        """The boxes of a parameter that the ranks get."""
        boxes: dict[Box, None] = {}
        for stage, local in self._getting(parameter.name):
            if len(local) == stage.device_count:
                return [whole_box(parameter.shape)]
            try:
                layout = parameter.target_layout(stage.layouts[parameter.name], self._in_pipeline)
            except LayoutError:
                # Whoever compares the two says so.
                continue
            numbers = np.unique(layout.slice_of_rank[local]).tolist()
            if len(numbers) == layout.slice_count:
                return [whole_box(parameter.shape)]
            boxes.update((layout.slice_box(parameter.shape, number), None) for number in numbers)
        return list(boxes)

    def _getting(self, name: str) -> Iterator[tuple[Stage, list[int]]]:
        return ((stage, local) for stage, local in self._stages if self._everything or name in stage.layouts)


def converted_part(
    tree: Tree, source: Strategy, target: Strategy, ranks: Iterable[int], admit: Optional[Callable[[str], bool]] = None
) -> tuple[Tree, list[Lost]]:
    """What of a source was converted.

    Args:
        tree: all files and names of the step that was converted, or what was made of them.
        source: the strategy of the files.
        target: the target's; `none` takes everything.
        ranks: the target ranks.
        admit: which parameters were converted, by name; all where None.

    Returns:
        The tree with the names alone that were converted, and parameters that no source file holds though
        an absent rank may have held them.

    Raises:
        IncompleteSourceError: the source lacks what the target ranks need.
        InputError: the source does not fit its strategy.
    """
    edited = isinstance(tree, EditedTree)
    left_out: set[str] = set()
    if not target.is_none:
        # `none` lists whatever its file holds.
        whole = edited or source.is_none
        left_out.update(tree.parameters if whole else (name for stage in source.stages for name in stage.layouts))
        left_out.difference_update(name for stage in target.stages for name in stage.layouts)

    def converted(name: str) -> bool:
        return name not in left_out and (admit is None or admit(name))

    if edited:
        # Its source was complete.
        needs = Needs(target, ranks)
        wanted = (parameter for name, parameter in tree.parameters.items() if name in needs and converted(name))
        needed = [item for parameter in wanted for item in _lost_parts(parameter, needs)]
    else:
        check_comparable(tree, source)
        needed = lost(tree, source, Needs(target, ranks), converted)
    tree = tree.only(converted)
    tree.check_readings()
    refuse(item for item in needed if item.found)
    return tree, [item for item in needed if not item.found]


def check_complete(tree: Tree, strategy: Strategy, needs: Needs, admit: Optional[Callable[[str], bool]] = None) -> None:
    """Refuse a tree that lacks something that is needed; see `lost`.

    Raises:
        IncompleteSourceError: says what is lost, and which ranks would have held it.
    """
    check_comparable(tree, strategy)
    refuse(lost(tree, strategy, needs, admit))


def refuse(found: Iterable[Lost]) -> None:
    """Refuse what is lost.

    Raises:
        IncompleteSourceError: something is.
    """
    lines = told(found)
    if lines:
        text = lines[0] if len(lines) == 1 else block("what is compared is not all there:", lines)
        raise IncompleteSourceError(text, hint=CURE)


def told(found: Iterable[Lost]) -> list[Message]:
    """A line per reason: which parameters, and which ranks would have held them."""
    by_detail: dict[str, list[str]] = defaultdict(list)
    for name, _, detail in found:
        by_detail[detail].append(name)
    return [listing(sorted(names)) + f": {detail}" for detail, names in by_detail.items()]


def lost(tree: Tree, strategy: Strategy, needs: Needs, admit: Optional[Callable[[str], bool]] = None) -> list[Lost]:
    """What target ranks need and no readable file holds, or may not hold.

    Args:
        tree: the files of one step, with all of their names.
        strategy: what it was saved with.
        needs: what is needed.
        admit: tells which names are looked at; all of them where None.
    """
    wanted = [name for name in tree.parameters if name in needs and (admit is None or admit(name))]
    found = [item for name in wanted for item in _lost_parts(tree.parameters[name], needs)]
    for name, ranks in _never_found(tree, strategy).items():
        if name in needs and (admit is None or admit(name)):
            where = rank_ranges(ranks)
            absent = "is absent" if len(ranks) == 1 else "are absent"
            found.append(Lost(name, False, f"no readable file has it; {where}, which {absent}, may have had it"))
    return found


def _lost_parts(parameter: Parameter, needs: Needs) -> Iterator[Lost]:
    name, cells = parameter.name, parameter.cells
    if parameter.shards is Shards.UNDECIDED and needs.shards(name):
        where = rank_ranges(parameter.deciding)
        yield Lost(name, True, f"whether its optimizer shards are made only files of {where} tell, and none has it")
    if cells.whole:
        return
    boxes = [box for box in needs.boxes(parameter) if cells.lost_in(box)]
    ranks = {
        rank
        for part in parameter.slices
        if not part.holders and any(intersection(part.box, box) is not None for box in boxes)
        for rank in part.ranks
    }
    if boxes:
        yield Lost(name, True, f"slices are in no readable file; {rank_ranges(ranks)} would have them")


def _never_found(tree: Tree, strategy: Strategy) -> dict[str, set[int]]:
    """Parameters that no file holds but absent ranks may have held, with these ranks."""
    deduplicated = is_deduplicated(tree)
    silent = []
    told: set[str] = set()
    for stage in strategy.stages:
        files = [tree.indexes[rank].tensors for rank in stage.ranks if rank in tree.indexes]
        saved = any(not stage.layouts.keys().isdisjoint(tensors) for tensors in files)
        if len(files) == stage.device_count or (saved and not deduplicated):
            # What one rank of the stage saved, and what not, all of them did; so did other stages' ranks.
            told.update(stage.layouts)
        else:
            silent.append(stage)
    found: dict[str, set[int]] = defaultdict(set)
    for stage in silent:
        for name, layout in stage.layouts.items():
            known = name in told or name in tree.parameters or name in tree.problems
            if not known and not _is_of_nothing(layout):
                found[name].update(rank for rank in stage.ranks if rank not in tree.indexes)
    return found


def is_deduplicated(tree: Tree) -> bool:
    """Whether each slice was saved by only some of the ranks that hold it.

    It was where a file says so, be it the only one that is left; files in .ckpt never do. And it was where of the
    files of one stage some hold a parameter and others do not, though they have elements of it.
    """
    if any(index.metadata.get("remove_redundancy") == "True" for index in tree.indexes.values()):
        return True
    return any(
        _lacked(holding, parameter.shape, tree)
        for parameter in tree.parameters.values()
        for holding in parameter.holdings
    )


def _lacked(holding: Holding, shape: tuple[int, ...], tree: Tree) -> bool:
    """Whether a readable file of a stage lacks its slice of a parameter that another one has."""
    stage, layout, holders = holding
    readable = [rank for rank in stage.ranks if rank in tree.indexes]
    if len(readable) == len(holders):
        return False
    lacking = set(readable).difference(holders)
    boxes = (layout.slice_box(shape, int(layout.slice_of_rank[rank - stage.first_rank])) for rank in lacking)
    return not all(is_empty(box) for box in boxes)


def _is_of_nothing(layout: Layout) -> bool:
    """Whether a strategy says that a parameter has no elements; few record its shape."""
    return (layout.uneven is not None and not any(layout.uneven)) or 0 in (layout.recorded_shape or ())


def check_comparable(tree: Tree, strategy: Strategy) -> None:
    """Refuse files that cannot be those of a strategy at all.

    Raises:
        IncompleteSourceError: none is readable, or they hold nothing that the strategy lists.
    """
    problem = why_not_comparable(tree, strategy)
    if problem is not None:
        raise IncompleteSourceError(problem, hint="pass the strategy that this checkpoint was saved with")


def why_not_comparable(tree: Tree, strategy: Strategy) -> Optional[str]:
    """Why the files of a step cannot be those of a strategy at all; None where they may be."""
    if not tree.indexes:
        return "no file is readable"
    listed = {name for stage in strategy.stages for name in stage.layouts}
    if listed and not tree.parameters and not tree.problems:
        count = plural(len(listed), "parameter")
        return f"none of the {count} of {strategy.path} is in the files: they are of different models"
    return None
