"""Differences between two strategies, without checkpoints.

Parameters that are cut alike in the source and alike in the target change alike: a model has tens of kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.errors import LayoutError
from reshard.layout import Layout
from reshard.plan.replicas import common_dimensions
from reshard.strategies import Holding, Stage, Strategy

UNCHANGED, MOVED, CUT_DIFFERENTLY, CONTRADICTING = "unchanged", "moved", "cut_differently", "contradicting"
EFFECTS = (UNCHANGED, MOVED, CUT_DIFFERENTLY, CONTRADICTING)
"""Every target rank has its slice already; other ranks have it; other slices; layouts that fit no common tensor."""


@dataclass
class Change:
    """Parameters that change alike.

    Attributes:
        effect: one of `EFFECTS`.
        problem: why the layouts cannot be of one tensor.
        sources: the stages that hold them in the source, each layout once per stage.
        targets: the stages that hold them in the target.
        names: the parameters.
    """

    effect: str
    problem: str | None
    sources: list[Holding]
    targets: list[Holding]
    names: list[str] = field(default_factory=list)


class Changes(NamedTuple):
    """Differences and equal parts of two strategies.

    Attributes:
        changes: kinds of parameters in both, those with most parameters first, unchanged ones last.
        left_out: parameters only in the source.
        missing: parameters only in the target.
        equal: whether every rank holds the same by both.
    """

    changes: list[Change]
    left_out: list[str]
    missing: list[str]
    equal: bool

    def by_effect(self) -> dict[str, list[str]]:
        """Parameters in both, by the effect on their slices."""
        return {
            effect: [name for change in self.changes if change.effect == effect for name in change.names]
            for effect in EFFECTS
        }


def changes_between(source: Strategy, target: Strategy) -> Changes:
    """Compare two strategies; `none` holds every parameter of the other one whole."""
    before, after = _holders(source), _holders(target)
    if source.is_none:
        before = dict.fromkeys(after, ())
    if target.is_none:
        after = dict.fromkeys(before, ())
    # Thousands of parameters share tens of layout objects.
    compared: dict[object, Change] = {}
    kinds: dict[object, Change] = {}
    equal = [stage.ranks for stage in source.stages] == [stage.ranks for stage in target.stages]
    for name in before:
        if name not in after:
            continue
        key = (
            tuple((holding.stage.number, id(holding.layout)) for holding in before[name]),
            tuple((holding.stage.number, id(holding.layout)) for holding in after[name]),
        )
        if key not in compared:
            one = _change(source, target, before[name], after[name])
            kind = kinds.setdefault((one.effect, one.problem, _cuts(one.sources), _cuts(one.targets)), one)
            for holdings, more in ((kind.sources, one.sources), (kind.targets, one.targets)):
                holdings += [holding for holding in more if _place(holding) not in map(_place, holdings)]
            stages = [[holding.stage.number for holding in holdings] for holdings in (one.sources, one.targets)]
            equal = equal and one.effect == UNCHANGED and stages[0] == stages[1]
            compared[key] = kind
        compared[key].names.append(name)
    left_out = [name for name in before if name not in after]
    missing = [name for name in after if name not in before]
    return Changes(
        sorted(kinds.values(), key=lambda change: (change.effect == UNCHANGED, -len(change.names))),
        left_out,
        missing,
        equal and not left_out and not missing,
    )


def _holders(strategy: Strategy) -> dict[str, Sequence[Holding]]:
    holders: dict[str, list[Holding]] = {}
    for stage in strategy.stages:
        for name, layout in stage.layouts.items():
            holders.setdefault(name, []).append(Holding(stage, layout))
    return {**holders}


def _cut(layout: Layout) -> tuple[object, ...]:
    return layout.device_matrix, layout.tensor_map, layout.shards, layout.uneven


def _cuts(holdings: Sequence[Holding]) -> frozenset[object]:
    return frozenset(_cut(holding.layout) for holding in holdings)


def _place(holding: Holding) -> tuple[object, ...]:
    return holding.stage.number, _cut(holding.layout)


def _change(source: Strategy, target: Strategy, before: Sequence[Holding], after: Sequence[Holding]) -> Change:
    sources, targets, effects = [*before], [], set()
    goals: list[tuple[Stage, Layout | None]] = [(holding.stage, holding.layout) for holding in after]
    try:
        for stage, wanted in goals or [(target.stages[0], None)]:
            layouts, goal = _regrouped([each.layout for each in before], wanted)
            stages = [each.stage for each in before] or [source.stages[0]]
            sources = [Holding(each, layout) for each, layout in zip(stages, layouts)]
            targets.append(Holding(stage, goal))
            effects.add(min(_effect(each, targets[-1]) for each in sources))
    except LayoutError as error:
        recorded = (holding.layout.recorded_shape for holding in (*before, *after))
        shapes = sorted({str(list(shape)) for shape in recorded if shape is not None})
        of_shape = f" of shape {' or '.join(shapes)}" if shapes else ""
        return Change(CONTRADICTING, error.message + of_shape, [*before], [*after])
    return Change(EFFECTS[max(effects)], None, sources, targets)


def _regrouped(sources: Sequence[Layout], target: Layout | None) -> tuple[list[Layout], Layout]:
    """The layouts of one tensor with a common number of dimensions; of `none` whole ones."""
    if sources or target is None:
        return common_dimensions(sources, target)
    (goal,), whole = common_dimensions([target], None)
    return [whole], goal


def _effect(source: Holding, target: Holding) -> int:
    """The effect of one stage's slices on those of another one, as a place in `EFFECTS`."""
    before, after = source.layout, target.layout
    if before.cuts != after.cuts or before.uneven != after.uneven:
        return EFFECTS.index(CUT_DIFFERENTLY)
    first = target.stage.first_rank - source.stage.first_rank
    stays = (
        0 <= first < before.device_count
        and before.slice_of_rank[first : first + after.device_count] == after.slice_of_rank
    )
    return EFFECTS.index(UNCHANGED if stays else MOVED)
