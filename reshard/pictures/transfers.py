"""A heat map of the bytes from each source rank to each target rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard.pictures import svg
from reshard.text.messages import byte_size, plural, rank_ranges

#: Maximum number of rows or columns that a screen shows distinctly; beyond it, neighbouring ranks share one.
MAX_CELLS = 128
_LEVELS = 12
_SIDE = 640
_MAX_CELL = 56
_LEGIBLE_CELL = 46
# Lines between smaller cells would hide them: only lines at the labels are drawn.
_CELL_WITH_LINES = 8
# Width of `stage 12` in pixels.
_STAGE_IN_WORDS = 56
_COLOURS = {"heat": ("fill", "#0550ae", "#79c0ff"), "stage": ("stroke", "#bc4c00", "#f0883e")}

Pairs = Mapping[tuple[int, int], int]
"""A number per pair of source and target rank."""


def transfer_map(
    moved: Pairs,
    sources: int,
    targets: int,
    title: str,
    *,
    source_stages: Sequence[int] = (),
    target_stages: Sequence[int] = (),
    source_noun: str = "rank",
    target_noun: str = "rank",
) -> bytes:
    """Draw the bytes moved from source ranks (rows) to target ranks (columns) as an SVG heat map.

    With more than `MAX_CELLS` ranks on a side, neighbours are added up, and the picture contains a note.

    Args:
        moved: bytes per pair of source and target rank; pairs without bytes may be omitted.
        sources: number of source ranks.
        targets: number of target ranks.
        title: the headline.
        source_stages: first source rank of every pipeline stage; with several, heavier lines separate them.
        target_stages: likewise for the targets.
        source_noun: word for a source, such as ``file`` where there are no ranks.
        target_noun: likewise for the targets.
    """
    down, across = _Axis(sources, source_stages, 18, source_noun), _Axis(targets, target_stages, 44, target_noun)
    cells: dict[tuple[int, int], int] = {}
    for (source, target), size in sorted(moved.items()):
        if size:
            cell = (source // down.ranks_per_cell, target // across.ranks_per_cell)
            cells[cell] = cells.get(cell, 0) + size
    most = max(cells.values(), default=0)

    left, width = 84.0 + down.room_for_stages, max(across.length + 100 + down.room_for_stages, 480)
    body, line = svg.paragraph(16, 26, title, width - 32, style="font-weight:600")
    top = line + 34 + across.room_for_stages
    grid = _CellGrid(down, across, left, top)
    body += [*grid.labels(), grid.lines(), *grid.painted(cells, most), *grid.stage_lines()]
    body.append(svg.rectangle(left, top, across.length, down.length, "line"))
    if min(down.cell, across.cell) >= _LEGIBLE_CELL:
        for cell, size in cells.items():
            body.append(grid.written(cell, byte_size(size), "paper" if _opacity(_level(size, most)) > 0.7 else "ink"))
    line = top + down.length + 28
    for words in _summary(moved, cells, down, across):
        lines, line = svg.paragraph(16, line, words, width - 32, "soft")
        body += lines
    return svg.document(width, line, title, body, _COLOURS)


def _upright(x: float, y: float) -> str:
    """The position of text that is read from below."""
    return f"translate({x:g} {y:g}) rotate(-90)"


class _Axis:
    """The ranks of one side, each in a cell or with some neighbours; lengths are pixels, also between labels."""

    def __init__(self, ranks: int, stages: Sequence[int], distance: int, noun: str) -> None:
        self.ranks = ranks
        self.noun = noun
        self._distance = distance
        self.stages = tuple(stages) if len(stages) > 1 else ()
        self.ranks_per_cell = max(1, math.ceil(ranks / MAX_CELLS))
        self.cells = math.ceil(ranks / self.ranks_per_cell)
        self.cell = min(_MAX_CELL, _SIDE // max(1, self.cells))
        self.length = self.cell * self.cells

    def ranks_of(self, cell: int) -> str:
        """The ranks of a row or column, in words."""
        first = cell * self.ranks_per_cell
        return rank_ranges(range(first, min(first + self.ranks_per_cell, self.ranks)), self.noun)

    def ticks(self) -> list[tuple[float, int]]:
        every = 1
        while every * self.cell < self._distance:
            every *= 2
        return [((number + 0.5) * self.cell, number * self.ranks_per_cell) for number in range(0, self.cells, every)]

    @property
    def room_for_stages(self) -> int:
        """Pixels for `stage_captions`, in addition to the ranks' numbers."""
        return 18 if self.stages else 0

    def borders(self) -> list[float]:
        return [first / self.ranks_per_cell * self.cell for first in self.stages[1:]]

    def stage_captions(self) -> list[tuple[float, str]]:
        """The middles of the pipeline stages and their captions, if all fit."""
        ends = [0.0, *self.borders(), self.length]
        stages = list(itertools.pairwise(ends)) if self.stages else []
        if any(end - start < _STAGE_IN_WORDS for start, end in stages):
            return []
        return [((start + end) / 2, f"stage {number}") for number, (start, end) in enumerate(stages)]

    def lines(self) -> list[float]:
        if self.cell >= _CELL_WITH_LINES:
            return [number * self.cell for number in range(1, self.cells)]
        return [at - self.cell / 2 for at, _ in self.ticks()[1:]]


class _CellGrid(NamedTuple):
    """The cells, and their place in the picture."""

    down: _Axis
    across: _Axis
    left: float
    top: float

    def labels(self) -> list[str]:
        down, across, left, top = self
        title_top = top - 26 - across.room_for_stages
        labels = [
            svg.text(left + across.length / 2, title_top, f"target {across.noun}", text_anchor="middle"),
            svg.text(0, 0, f"source {down.noun}", text_anchor="middle", transform=_upright(24, top + down.length / 2)),
        ]
        labels += [svg.text(left + at, top - 8, str(rank), "soft", text_anchor="middle") for at, rank in across.ticks()]
        labels += [svg.text(left - 8, top + at + 4, str(rank), "soft", text_anchor="end") for at, rank in down.ticks()]
        for at, words in across.stage_captions():
            labels.append(svg.text(left + at, top - 26, words, "soft", text_anchor="middle"))
        for at, words in down.stage_captions():
            place = _upright(left - 48, top + at)
            labels.append(svg.text(0, 0, words, "soft", text_anchor="middle", transform=place))
        return labels

    def painted(self, cells: Pairs, most: int) -> list[str]:
        """One path per level of colour: far smaller than an element per cell."""
        levels: dict[int, list[tuple[int, int]]] = {}
        for cell, size in cells.items():
            levels.setdefault(_level(size, most), []).append(cell)
        return [self._area(levels[level], _opacity(level)) for level in sorted(levels)]

    def _area(self, cells: Iterable[tuple[int, int]], opacity: float) -> str:
        """Some of the cells in one colour; the lines between them stay free, so that equal cells are distinct."""
        height, width = self.down.cell, self.across.cell
        line, column_line = (int(size >= _CELL_WITH_LINES) for size in (height, width))
        shape = f"h{width - column_line}v{height - line}h-{width - column_line}z"
        return svg.element(
            "path",
            d="".join(f"M{column * width + column_line} {row * height + line}{shape}" for row, column in sorted(cells)),
            class_="heat",
            fill_opacity=opacity,
            shape_rendering="crispEdges",
            transform=self._place,
        )

    def lines(self) -> str:
        return self._ruled(self.down.lines(), self.across.lines(), "line", 1)

    def stage_lines(self) -> list[str]:
        if not self.down.stages and not self.across.stages:
            return []
        return [self._ruled(self.down.borders(), self.across.borders(), "stage", 3)]

    def written(self, cell: tuple[int, int], words: str, class_: str) -> str:
        x = self.left + (cell[1] + 0.5) * self.across.cell
        y = self.top + (cell[0] + 0.5) * self.down.cell + 4
        return svg.text(x, y, words, class_, text_anchor="middle", style="font-size:10px")

    @property
    def _place(self) -> str:
        return f"translate({self.left:g} {self.top:g})"

    def _ruled(self, rows: Iterable[float], columns: Iterable[float], class_: str, width: float) -> str:
        # `_area` leaves these pixels free.
        d = "".join(f"M0 {at + 0.5:g}h{self.across.length}" for at in rows)
        d += "".join(f"M{at + 0.5:g} 0v{self.down.length}" for at in columns)
        return svg.element("path", d=d, class_=class_, fill="none", stroke_width=width, transform=self._place)


def _level(size: int, most: int) -> int:
    return -(-size * _LEVELS // most)


def _opacity(level: int) -> float:
    return 0.06 + 0.94 * level / _LEVELS


def _summary(moved: Pairs, cells: Pairs, down: _Axis, across: _Axis) -> list[str]:
    pairs = sum(1 for size in moved.values() if size)
    of = down.ranks * across.ranks
    lines = [
        f"{byte_size(sum(moved.values()))} from {plural(down.ranks, f'source {down.noun}')} to "
        f"{plural(across.ranks, f'target {across.noun}')}; {pairs} of {of} pairs exchange data."
    ]
    if down.ranks_per_cell * across.ranks_per_cell > 1:
        lines.append(
            f"Neighbours are added up: a cell is {plural(down.ranks_per_cell, f'source {down.noun}')} by "
            f"{plural(across.ranks_per_cell, f'target {across.noun}')}, and is labelled by the first."
        )
    if cells:
        (row, column), size = max(cells.items(), key=lambda item: item[1])
        lines.append(
            f"The strongest colour is {byte_size(size)}, as from source {down.ranks_of(row)} "
            f"to target {across.ranks_of(column)}."
        )
    return lines
