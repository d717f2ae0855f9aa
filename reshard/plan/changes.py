"""Differences between two strategies, without checkpoints.

Parameters that are cut alike in the source and alike in the target change alike: a model has tens of
kinds. The overlap of its layouts determines how the slices of a kind move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.errors import LayoutError
from reshard.layout import Layout, Overlap, stand_in_shape
from reshard.plan.replicas import choose, common_dimensions
from reshard.strategies import Holding, Strategy

# Maximum number of cells to examine, where several stages hold a parameter.
_MAX_CELLS = 1 << 16

UNCHANGED, MOVED, CUT_DIFFERENTLY, CONTRADICTING = "unchanged", "moved", "cut_differently", "contradicting"
EFFECTS = (UNCHANGED, MOVED, CUT_DIFFERENTLY, CONTRADICTING)
"""Every target rank has its slice already; other ranks have it; other slices; layouts that fit no common tensor."""


class Span(NamedTuple):
    """The minimum and maximum of a number that differs from slice to slice."""

    least: int
    most: int


@dataclass(frozen=True)
class Move:
    """How the slices of one target stage are made.

    Attributes:
        source: the source stage whose slices overlap the fewest others: fewest have to be joined.
        target: the target stage.
        joined: per dimension, source slices that overlap a target slice.
        divided: per dimension, target slices that overlap a source slice.
        ranks_read: source ranks that a target rank reads for one parameter; for a sample of slices, where several
            source stages hold very many.
        unchanged: every rank holds the same slice before and after.
    """

    source: Holding
    target: Holding
    joined: tuple[Span, ...]
    divided: tuple[Span, ...]
    ranks_read: Span
    unchanged: bool


@dataclass
class Change:
    """Parameters that change alike.

    Attributes:
        sources: the stages that hold them in the source.
        targets: the stages that hold them in the target.
        moves: one per target stage; none if a problem exists.
        problem: why the layouts cannot be of one tensor.
        names: the parameters.
    """

    sources: tuple[Holding, ...]
    targets: tuple[Holding, ...]
    moves: tuple[Move, ...] = ()
    problem: Optional[str] = None
    names: list[str] = field(default_factory=list)

    @property
    def unchanged(self) -> bool:
        """The same ranks of the same stages hold the same slices before and after."""
        stages = [
            [(holding.stage.number, holding.stage.first_rank, holding.stage.device_count) for holding in holdings]
            for holdings in (self.sources, self.targets)
        ]
        return self.problem is None and stages[0] == stages[1] and all(move.unchanged for move in self.moves)

    @property
    def effect(self) -> str:
        """The effect on the slices: one of `EFFECTS`."""
        if self.problem is not None:
            return CONTRADICTING
        if all(move.unchanged for move in self.moves):
            return UNCHANGED
        cut = any(span.most > 1 for move in self.moves for span in (*move.joined, *move.divided))
        return CUT_DIFFERENTLY if cut else MOVED


@dataclass(frozen=True)
class Changes:
    """Differences and equal parts of two strategies.

    Attributes:
        changes: kinds of parameters in both, those with most parameters first, unchanged ones last.
        left_out: parameters only in the source.
        missing: parameters only in the target.
    """

    changes: list[Change]
    left_out: list[str]
    missing: list[str]

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
        before = {name: () for name in after}
    if target.is_none:
        after = {name: () for name in before}
    # Holdings distinguish layouts with equal cuts, so a kind may occur several times.
    by_layouts: dict[object, Change] = {}
    kinds: dict[object, Change] = {}
    for name, numbered in before.items():
        if name not in after:
            continue
        key = tuple((number, id(layout)) for number, layout in (*numbered, (-1, None), *after[name]))
        change = by_layouts.get(key)
        if change is None:
            first = _change(source, target, numbered, after[name])
            change = by_layouts[key] = kinds.setdefault(
                (_cuts(first.sources), _cuts(first.targets), first.problem), first
            )
        change.names.append(name)
    return Changes(
        sorted(kinds.values(), key=lambda change: (change.unchanged, -len(change.names))),
        [name for name in before if name not in after],
        [name for name in after if name not in before],
    )


_NumberedLayouts = tuple[tuple[int, Layout], ...]


def _holders(strategy: Strategy) -> dict[str, _NumberedLayouts]:
    holders: dict[str, list[tuple[int, Layout]]] = {}
    for number, stage in enumerate(strategy.stages):
        for name, layout in stage.layouts.items():
            holders.setdefault(name, []).append((number, layout))
    return {name: tuple(numbered) for name, numbered in holders.items()}


def _cuts(holdings: Sequence[Holding]) -> tuple[object, ...]:
    return tuple(
        (holding.stage.number, cut.device_matrix, cut.tensor_map, cut.shards, cut.uneven)
        for holding in holdings
        for cut in [holding.layout]
    )


def _change(source: Strategy, target: Strategy, before: _NumberedLayouts, after: _NumberedLayouts) -> Change:
    sources = tuple(Holding(source.stages[number], layout) for number, layout in before)
    targets = tuple(Holding(target.stages[number], layout) for number, layout in after)
    try:
        overlaps: dict[Optional[Layout], _Overlapping] = {}
        moves = tuple(_move(source, target, sources, holding, overlaps) for holding in targets or (None,))
    except LayoutError as error:
        recorded = (holding.layout.recorded_shape for holding in (*sources, *targets))
        shapes = sorted({str(list(shape)) for shape in recorded if shape is not None})
        of_shape = f" of shape {' or '.join(shapes)}" if shapes else ""
        return Change(sources, targets, problem=error.message + of_shape)
    if not sources:
        sources = (moves[0].source,)
    # Messages and counts use the source as it is regrouped for the first target.
    return Change(sources, tuple(move.target for move in moves), moves)


class _Overlapping(NamedTuple):
    """The part of a move that depends on layouts alone; stages with equal cuts share it.

    Attributes:
        sources: the sources' layouts, regrouped.
        goal: the target's layout, regrouped.
        joined: per source layout and dimension, its slices that overlap a target slice.
        ranks_read: source ranks that a target rank reads.
        shape: of an example tensor with these cuts.
    """

    sources: tuple[Layout, ...]
    goal: Layout
    joined: dict[Layout, tuple[Span, ...]]
    ranks_read: Span
    shape: tuple[int, ...]


def _overlapping(sources: Sequence[Holding], target_layout: Optional[Layout]) -> _Overlapping:
    if sources:
        layouts, goal = common_dimensions([holding.layout for holding in sources], target_layout)
    else:
        assert target_layout is not None
        (goal,), undivided = common_dimensions([target_layout], None)
        layouts = [undivided]
    shape = stand_in_shape(layouts, goal)
    grids = [layout.grid(shape) for layout in layouts]
    overlap = Overlap(grids, goal.grid(shape))
    spans = _slices_met(overlap)
    most_slices = math.prod(span.most for span in spans)
    if len(layouts) == 1:
        # A rank holds one slice of its stage, so no rank meets two needs.
        ranks_read = Span(math.prod(span.least for span in spans), most_slices)
    else:
        holdings = [Holding(holding.stage, layout) for holding, layout in zip(sources, layouts)]
        slices = range(0, goal.slice_count, max(1, goal.slice_count * most_slices * len(holdings) // _MAX_CELLS))
        counts = [_ranks_read(overlap, holdings, number) for number in slices]
        ranks_read = Span(min(counts), max(counts))
    joined = {layout: _slices_met(Overlap([grid], overlap.target)) for layout, grid in zip(layouts, grids)}
    return _Overlapping(tuple(layouts), goal, joined, ranks_read, shape)


def _move(
    source: Strategy,
    target: Strategy,
    sources: Sequence[Holding],
    target_holding: Optional[Holding],
    overlaps: dict[Optional[Layout], _Overlapping],
) -> Move:
    layout = None if target_holding is None else target_holding.layout
    if layout not in overlaps:
        overlaps[layout] = _overlapping(sources, layout)
    overlapping = overlaps[layout]
    stages = [holding.stage for holding in sources] or [source.stages[0]]
    holdings = [Holding(stage, layout) for stage, layout in zip(stages, overlapping.sources)]
    goal = Holding(target.stages[0] if target_holding is None else target_holding.stage, overlapping.goal)
    unchanged = [_is_unchanged(holding, goal) for holding in holdings]
    fit = {layout: sum(span.most for span in spans) for layout, spans in overlapping.joined.items()}
    best, _ = min(zip(holdings, unchanged), key=lambda pair: (fit[pair[0].layout], not pair[1]))
    return Move(
        best,
        goal,
        overlapping.joined[best.layout],
        _slices_met(Overlap([goal.layout.grid(overlapping.shape)], best.layout.grid(overlapping.shape))),
        overlapping.ranks_read,
        any(unchanged),
    )


def _slices_met(overlap: Overlap) -> tuple[Span, ...]:
    """Per dimension the number of source slices that overlap a target slice."""
    spans = []
    for dimension, cuts in enumerate(overlap.target.cuts):
        counts = [last - first for first, last in (overlap.intervals(dimension, at) for at in range(cuts))]
        spans.append(Span(min(counts), max(counts)))
    return tuple(spans)


def _ranks_read(overlap: Overlap, holdings: Sequence[Holding], number: int) -> int:
    needs = [
        sorted(rank for holding, at in zip(holdings, cell.slices) for rank in holding.ranks(at))
        for cell in overlap.cells(number)
    ]
    return len(choose(needs, 0))


def _is_unchanged(source: Holding, target: Holding) -> bool:
    """Whether every rank of the target stage holds the same slice in the source stage."""
    before, after = source.layout, target.layout
    first = target.stage.first_rank - source.stage.first_rank
    return (
        0 <= first < before.device_count
        and before.cuts == after.cuts
        and before.uneven == after.uneven
        and before.slice_of_rank[first : first + after.device_count] == after.slice_of_rank
    )
