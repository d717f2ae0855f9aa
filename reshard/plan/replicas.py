"""The choice of the replica of each slice that a target rank reads.

The choice depends on strategies alone, so `rank-list` needs no checkpoint and `by-rank` reads the same ranks:

1. A target rank has *needs*: source slices, each with the source ranks that hold it.
2. Ranks without alternative are chosen first; then, until every need is met, the rank that meets
   most open needs: few files per target rank. Among equal ranks, targets with the same needs
   take turns: balanced shares. Otherwise the lowest rank is chosen.
3. A rank whose needs are all met by others is removed again, so the list has no superfluous rank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from reshard.errors import IncompleteSourceError, LayoutError, StrategyError
from reshard.layout import Layout, Overlap, stand_in_shape, whole
from reshard.strategies import Holding, Stage, Strategy
from reshard.text.messages import block, quoted, rank_ranges
from reshard.text.names import ACCUMULATED_GRADIENTS

Needs = dict[tuple[int, ...], str]
"""What a target rank needs: per part of a tensor the source ranks that hold it, ascending, and a parameter of which it
is a part, for messages."""


def common_dimensions(sources: Sequence[Layout], target: Layout | None) -> tuple[list[Layout], Layout]:
    """Regroup layouts of the JSON writer's expanded form to the same number of dimensions.

    Without a file, only another strategy shows a tensor's own number of dimensions. Every
    grouping that fits all layouts gives the same bytes; this one has most dimensions.

    Args:
        sources: one layout per stage that holds the parameter.
        target: the layout it is converted to; None for one device that holds it whole.

    Raises:
        LayoutError: no grouping fits.
    """
    layouts = [*sources] if target is None else [*sources, target]
    choices = [layout.regroupings() for layout in layouts]
    for dimensions in sorted({len(layout.cuts) for layout in choices[0]}, reverse=True):
        fitting = [[layout for layout in choice if len(layout.cuts) == dimensions] for choice in choices]
        shapes = {layout.recorded_shape for choice in fitting for layout in choice if layout.recorded_shape}
        candidate_shapes: list[tuple[int, ...] | None] = [*sorted(shapes, reverse=True)]
        for shape in candidate_shapes or [None]:
            picked = [
                next((layout for layout in choice if shape is None or layout.recorded_shape in (None, shape)), None)
                for choice in fitting
            ]
            regrouped = [layout for layout in picked if layout is not None]
            if len(regrouped) == len(layouts):
                return (regrouped, whole(dimensions)) if target is None else (regrouped[:-1], regrouped[-1])
    maps = ", ".join(layout.map_text for layout in layouts)
    raise LayoutError(f"tensor maps {maps} cannot lay out one tensor")


class _CutAlike(NamedTuple):
    """Parameters of one target stage that are cut alike in the source and alike in the target."""

    parameter: str
    holdings: tuple[Holding, ...]
    overlap: Overlap
    target: Layout


class ReplicaChoice:
    """The source ranks that each target rank reads, from strategies alone."""

    def __init__(self, source: Strategy, target: Strategy) -> None:
        self.source = source
        self.target = target
        self._kinds: dict[int, list[_CutAlike]] = {}
        self._deciding: dict[int, Needs] = {}
        self._turns: dict[int, list[int]] = {}

    def ranks(self, target_rank: int, available: Collection[int] | None = None) -> tuple[int, ...]:
        """Source ranks that ``target_rank`` needs, ascending; none of them could be left out.

        Args:
            target_rank: global rank in the target strategy.
            available: ranks that can be read; all of them where None.

        Raises:
            IncompleteSourceError: a slice is on no available rank; lists all parameters concerned.
        """
        needs = self.needs(target_rank)
        self._check_common()
        holders: Sequence[Sequence[int]] = [*needs]
        if available is not None:
            usable = set(available)
            lost = {ranks: name for ranks, name in needs.items() if usable.isdisjoint(ranks)}
            if lost:
                raise _unavailable(target_rank, lost)
            holders = [[rank for rank in ranks if rank in usable] for ranks in needs]
        return choose(holders, self.turn(target_rank))

    def _check_common(self) -> None:
        if self.source.is_none or self.target.is_none or any(self._kinds.values()):
            return
        source_names = set(self.source.parameters)
        if source_names and not any(name in source_names for name in self.target.parameters):
            raise StrategyError(
                f"no parameter is in both strategies, {self.source.path} and {self.target.path}",
                hint="pass strategies of the same model",
            )

    def needs(self, target_rank: int) -> Needs:
        """The needs of a target rank; equal needs of several parameters appear once."""
        if self.source.is_none:
            return {(0,): "every parameter"}
        stage = self.target.stage_of(target_rank)
        local = target_rank - stage.first_rank
        needs: Needs = {}
        seen: set[object] = set()
        for kind in self._kinds_of(stage):
            for cell in kind.overlap.cells(kind.target.slice_of_rank[local]):
                key = tuple(
                    (holding.stage.number, id(holding.layout), number)
                    for holding, number in zip(kind.holdings, cell.slices)
                )
                if key not in seen:
                    seen.add(key)
                    ranks = [rank for holding, n in zip(kind.holdings, cell.slices) for rank in holding.holders(n)]
                    needs.setdefault(tuple(sorted(ranks)), kind.parameter)
        for deciding, parameter in self._deciding[stage.number].items():
            needs.setdefault(deciding, parameter)
        return needs

    def turn(self, target_rank: int) -> int:
        """This rank's place among the ranks of its stage that have the same needs."""
        stage = self.target.stage_of(target_rank)
        if stage.number not in self._turns:
            self._turns[stage.number] = self._take_turns(stage)
        return self._turns[stage.number][target_rank - stage.first_rank]

    def _take_turns(self, stage: Stage) -> list[int]:
        # Per rank a number, equal for ranks with the same needs.
        alike: Sequence[int] = [0] * stage.device_count
        for kind in self._kinds_of(stage):
            layout = kind.target
            if layout.device_count != stage.device_count:
                continue
            intervals = [
                [kind.overlap.intervals(dimension, position) for position in range(count)]
                for dimension, count in enumerate(layout.cuts)
            ]
            codes: dict[object, int] = {}
            # In C order, as slices are numbered.
            code_of_slice = [codes.setdefault(need, len(codes)) for need in itertools.product(*intervals)]
            pairs: dict[tuple[int, int], int] = {}
            alike = [
                pairs.setdefault((code, code_of_slice[number]), len(pairs))
                for code, number in zip(alike, layout.slice_of_rank)
            ]
        turns: list[int] = []
        seen: Counter[int] = Counter()
        for code in alike:
            turns.append(seen[code])
            seen[code] += 1
        return turns

    def _kinds_of(self, stage: Stage) -> list[_CutAlike]:
        if stage.number not in self._kinds:
            self._kinds[stage.number] = list(self._find_kinds(stage).values())
        return self._kinds[stage.number]

    def _find_kinds(self, stage: Stage) -> dict[tuple[object, ...], _CutAlike]:
        kinds: dict[tuple[object, ...], _CutAlike] = {}
        if self.source.is_none:
            return kinds
        names = self.source.parameters if self.target.is_none else stage.layouts
        deciding = self._deciding.setdefault(stage.number, {})
        for name in names:
            holders = (holder for holder in self.source.stages if name in holder.layouts)
            holdings = [Holding(holder, holder.layouts[name]) for holder in holders]
            if not holdings:
                continue
            target = None if self.target.is_none else stage.layouts[name]
            ranks = _deciding_ranks(name, holdings, target)
            if ranks:
                deciding.setdefault(ranks, name)
            layouts = [holding.layout for holding in holdings]
            problem: LayoutError | None = None
            fits = False
            for sources, cut in readings(name, layouts, target):
                key = (tuple((h.stage.number, source) for h, source in zip(holdings, sources)), cut)
                try:
                    if key not in kinds:
                        kinds[key] = self._kind(name, holdings, sources, cut)
                    fits = True
                except LayoutError as error:
                    problem = error
            # The wrong one of two readings may not fit.
            if problem is not None and not fits:
                raise StrategyError(
                    f"{quoted(name)}: {problem.message}\n"
                    f"(source strategy {self.source.path}, target strategy {self.target.path})",
                    parameter=name,
                    hint="pass strategies of the same model",
                ) from problem
        return kinds

    def _kind(
        self, name: str, holdings: Sequence[Holding], sources: Sequence[Layout], target: Layout | None
    ) -> _CutAlike:
        grouped, cut = common_dimensions(sources, target)
        shape = stand_in_shape(grouped, cut)
        overlap = Overlap([layout.grid(shape) for layout in grouped], cut.grid(shape))
        regrouped = tuple(Holding(holding.stage, layout) for holding, layout in zip(holdings, grouped))
        return _CutAlike(name, regrouped, overlap, cut)


def _unavailable(target_rank: int, lost: Needs) -> IncompleteSourceError:
    lines = [
        f"a slice of {quoted(name)} that only source {rank_ranges(ranks)} held" for ranks, name in sorted(lost.items())
    ]
    return IncompleteSourceError(
        block(f"target rank {target_rank} needs slices that no available rank has:", lines),
        rank=target_rank,
        parameter=next(iter(lost.values())),
        hint="bring back one rank of each line",
    )


def readings(name: str, sources: Sequence[Layout], target: Layout | None) -> list[tuple[list[Layout], Layout | None]]:
    """The possible readings of a parameter's layouts.

    Accumulated gradients are often stored without the optimizer shard that their layout records.
    Only the files decide, so without files both readings count.
    """
    result = [(list(sources), target)]
    if name.startswith(ACCUMULATED_GRADIENTS):
        plain = [layout.without_shards() for layout in sources]
        cut = target.without_shards() if target is not None else None
        if plain != result[0][0] or cut != target:
            result.append((plain, cut))
    return result


def _deciding_ranks(name: str, holdings: Sequence[Holding], target: Layout | None) -> tuple[int, ...]:
    """Ranks, ascending; a file of one of them decides whether recorded optimizer shards are real.

    Empty where the target records no shards, and where every stage that holds the parameter records some, so that
    any file decides.
    """
    if not name.startswith(ACCUMULATED_GRADIENTS) or target is None or target.shards == 1:
        return ()
    sharded = [holding for holding in holdings if holding.layout.shards > 1]
    if len(sharded) == len(holdings):
        return ()
    return tuple(rank for holding in sharded for rank in holding.stage.ranks)


def choose(needs: Sequence[Sequence[int]], turn: int) -> tuple[int, ...]:
    """A small set of ranks that meets every need, without a superfluous rank.

    Args:
        needs: per need the ranks that meet it, ascending, at least one.
        turn: number of this target among the targets with these needs, which take turns among equal ranks.
    """
    chosen = {ranks[0] for ranks in needs if len(ranks) == 1}
    chosen.update(_greedy([ranks for ranks in needs if chosen.isdisjoint(ranks)], turn))
    met_by = [len(chosen.intersection(ranks)) for ranks in needs]
    needs_of: dict[int, list[int]] = {rank: [] for rank in chosen}
    for number, ranks in enumerate(needs):
        for rank in chosen.intersection(ranks):
            needs_of[rank].append(number)
    for rank in sorted(chosen, reverse=True):
        if all(met_by[number] > 1 for number in needs_of[rank]):
            chosen.discard(rank)
            for number in needs_of[rank]:
                met_by[number] -= 1
    return tuple(sorted(chosen))


def _greedy(needs: Sequence[Sequence[int]], turn: int) -> Iterator[int]:
    """Ranks by greedy choice: each meets most of the needs still open; equal ranks in turn, in ascending order.

    Each pair of a need and a rank is visited once, however many ranks are chosen.
    """
    needs_of: dict[int, list[int]] = {}
    for number, ranks in enumerate(needs):
        for rank in ranks:
            needs_of.setdefault(rank, []).append(number)
    opened = {rank: len(numbers) for rank, numbers in needs_of.items()}
    # Ranks by a number of open needs that they had: it only decreases, so each rank is in one list until it is chosen.
    by_count: dict[int, list[int]] = {}
    for rank, count in opened.items():
        by_count.setdefault(count, []).append(rank)
    met = [False] * len(needs)
    for most in range(max(by_count, default=0), 0, -1):
        ranks = by_count.pop(most, [])
        equals = sorted(rank for rank in ranks if opened[rank] == most)
        first = turn % max(1, len(equals))
        for pick in (*equals[first:], *equals[:first]):
            if opened[pick] < most:
                continue
            yield pick
            for number in needs_of[pick]:
                for rank in () if met[number] else needs[number]:
                    opened[rank] -= 1
                met[number] = True
        for rank in ranks:
            by_count.setdefault(opened[rank], []).append(rank)
