"""A map of which source ranks give how many bytes to which target ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from reshard.pictures import svg
from reshard.wording import byte_size, plural, rank_ranges

#: More rows or columns than this cannot be told apart on a screen: neighbouring ranks share one.
MOST_CELLS = 128
_LEVELS = 12
_SIDE = 640
_LARGEST_CELL = 56
_LEGIBLE_CELL = 46
_COLOURS = {"heat": ("fill", "#0550ae", "#79c0ff")}


def transfer_map(moved: Mapping[tuple[int, int], int], sources: int, targets: int, title: str) -> bytes:
    """Draw the bytes moved from source ranks (rows) to target ranks (columns) as an SVG heat map.

    Where there are more than `MOST_CELLS` ranks on a side, neighbours are added up, and the picture
    says so.

    Args:
        moved: bytes per pair of source and target rank; pairs that move nothing may be left out.
        sources: number of source ranks.
        targets: number of target ranks.
        title: what is converted, in a line.

    Returns:
        The SVG file's content.

    Raises:
        ValueError: a rank is beyond the number of ranks.
    """
    beyond = [pair for pair in moved if not (0 <= pair[0] < sources and 0 <= pair[1] < targets)]
    if beyond:
        raise ValueError(f"ranks {beyond[0]} are beyond {sources} source and {targets} target ranks")
    down, across = _Axis(sources), _Axis(targets)
    cells: dict[tuple[int, int], int] = {}
    for (source, target), size in moved.items():
        if size:
            cell = (source // down.ranks_per_cell, target // across.ranks_per_cell)
            cells[cell] = cells.get(cell, 0) + size
    most = max(cells.values(), default=0)

    left, width = 84.0, max(across.length + 100, 480)
    body, line = svg.paragraph(16, 26, title, width - 32, style="font-weight:600")
    top = line + 34
    body += [
        svg.text(left + across.length / 2, top - 26, "target rank", text_anchor="middle"),
        svg.text(
            0,
            0,
            "source rank",
            text_anchor="middle",
            transform=f"translate(24 {top + down.length / 2:g}) rotate(-90)",
        ),
    ]
    body += [svg.text(left + at, top - 8, str(rank), "soft", text_anchor="middle") for at, rank in across.ticks(44)]
    body += [svg.text(left - 8, top + at + 4, str(rank), "soft", text_anchor="end") for at, rank in down.ticks(18)]
    body += _painted(cells, most, down.cell, across.cell, left, top)
    body.append(svg.rectangle(left, top, across.length, down.length, "line"))

    line = top + down.length + 28
    if most:
        body += _legend(most, left, line)
        line += 44
    for words in _summary(moved, cells, down, across):
        lines, line = svg.paragraph(16, line, words, width - 32, "soft")
        body += lines
    return svg.document(width, line, title, body, _COLOURS)


class _Axis:
    """The ranks of one side.

    Attributes:
        ranks: how many there are.
        ranks_per_cell: neighbours that share a row or column.
        cells: rows or columns.
        cell: their height or width.
        length: of the whole side.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.ranks_per_cell = max(1, math.ceil(ranks / MOST_CELLS))
        self.cells = math.ceil(ranks / self.ranks_per_cell)
        self.cell = min(_LARGEST_CELL, _SIDE // max(1, self.cells))
        self.length = self.cell * self.cells

    def ranks_of(self, cell: int) -> str:
        """The ranks of a row or column, in words."""
        first = cell * self.ranks_per_cell
        return rank_ranges(range(first, min(first + self.ranks_per_cell, self.ranks)))

    def ticks(self, distance: int) -> list[tuple[float, int]]:
        """Places along the side that are at least ``distance`` apart, and the first rank there."""
        every = 1
        while every * self.cell < distance:
            every *= 2
        return [((number + 0.5) * self.cell, number * self.ranks_per_cell) for number in range(0, self.cells, every)]


def _painted(
    cells: Mapping[tuple[int, int], int], most: int, height: int, width: int, left: float, top: float
) -> list[str]:
    """One path per level of colour, which is far smaller than an element per cell."""
    paths: dict[int, list[str]] = {}
    written = []
    for (row, column), size in sorted(cells.items()):
        level = _level(size, most)
        paths.setdefault(level, []).append(f"M{column * width} {row * height}h{width}v{height}h-{width}z")
        if min(height, width) >= _LEGIBLE_CELL:
            middle = (left + (column + 0.5) * width, top + (row + 0.5) * height + 4)
            colour = "paper" if _opacity(level) > 0.7 else "ink"
            written.append(svg.text(*middle, byte_size(size), colour, text_anchor="middle", style="font-size:10px"))
    painted = [
        svg.element(
            "path",
            d="".join(found),
            class_="heat",
            fill_opacity=_opacity(level),
            shape_rendering="crispEdges",
            transform=f"translate({left:g} {top:g})",
        )
        for level, found in sorted(paths.items())
    ]
    return [*painted, *written]


def _level(size: int, most: int) -> int:
    return -(-size * _LEVELS // most)


def _opacity(level: int) -> float:
    return 0.06 + 0.94 * level / _LEVELS


def _legend(most: int, left: float, top: float) -> list[str]:
    step = 20
    body = [
        svg.rectangle(left + step * number, top - 12, step, 12, "heat", fill_opacity=_opacity(level))
        for number, level in enumerate(range(1, _LEVELS + 1))
    ]
    body.append(svg.text(left, top + svg.LINE_HEIGHT, "more than 0", "soft"))
    body.append(svg.text(left + step * _LEVELS, top + svg.LINE_HEIGHT, byte_size(most), "soft", text_anchor="end"))
    return body


def _summary(
    moved: Mapping[tuple[int, int], int], cells: Mapping[tuple[int, int], int], down: _Axis, across: _Axis
) -> list[str]:
    pairs = sum(1 for size in moved.values() if size)
    said = [
        f"{byte_size(sum(moved.values()))} from {plural(down.ranks, 'source rank')} to "
        f"{plural(across.ranks, 'target rank')}; {pairs} of {down.ranks * across.ranks} pairs move anything."
    ]
    if down.ranks_per_cell * across.ranks_per_cell > 1:
        said.append(
            f"Neighbouring ranks are added up: a cell is {plural(down.ranks_per_cell, 'source rank')} by "
            f"{plural(across.ranks_per_cell, 'target rank')}, and is labelled by the first."
        )
    if cells:
        (row, column), size = max(cells.items(), key=lambda item: item[1])
        said.append(
            f"The strongest colour stands for {byte_size(size)}, as from source {down.ranks_of(row)} "
            f"to target {across.ranks_of(column)}."
        )
    return said
