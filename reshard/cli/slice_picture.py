"""The terminal's picture of one parameter: device matrix, and slices with the ranks that hold them.

Colours only repeat the text, so the picture is complete without them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Callable, Optional

from reshard.named_tuple import NamedTuple
from reshard.pictures.slices import Arrangement, Slice, coordinates, shown_positions
from reshard.text.wording import plural

_MAX_MATRIX_ROWS = 8
_MAX_MATRIX_COLUMNS = 16
_MAX_ROWS = 32
_MAX_RULED = 16
# Lines that the slices of a table split by hand share in proportion to their sizes.
_LINES_IN_PROPORTION = 24

#: Colours a text with one of the colours that `Arrangement` numbers.
Paint = Callable[[str, int], str]


class _Cell(NamedTuple):
    """Text of a table, perhaps coloured."""

    text: str
    colour: Optional[int] = None


def picture_lines(arrangement: Arrangement, width: int, paint: Paint) -> list[str]:
    """One stage's picture, in lines of at most ``width`` characters where names of ranks allow it."""
    layout = arrangement.layout
    drawn, slices = arrangement, _grid(arrangement, width, paint)
    if slices is None and layout.shards > 1 and layout.slice_count > _MAX_ROWS:
        # A row then covers many ranks, and all ranks are shown.
        drawn = arrangement.without_shards
        slices = _grid(drawn, width, paint)
    does = (*arrangement.axis_lines(), *arrangement.dimension_lines())
    lines = [
        arrangement.holding.stage.label,
        "",
        f"device matrix {list(layout.device_matrix)}, tensor map {layout.map_text}",
        *(part for line in does for part in _folded(line, width)),
        "",
        *_matrix(arrangement, drawn, width, paint),
        "",
    ]
    summary = [arrangement.summary(), None if drawn is arrangement else arrangement.shard_order()]
    lines += _folded("slices: " + ". ".join(part for part in summary if part), width, "")
    return [*lines, *(slices or _list(drawn, width, paint))]


def _folded(text: str, width: int, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


def _matrix(arrangement: Arrangement, drawn: Arrangement, width: int, paint: Paint) -> list[str]:
    """Rank numbers in the device matrix: columns are its last axis, rows all others."""
    sizes = arrangement.layout.device_matrix or (1,)
    columns, rows = sizes[-1], math.prod(sizes[:-1])
    positions = shown_positions(rows, _MAX_MATRIX_ROWS)
    labels = [
        "..."
        if row is None
        else ", ".join(
            f"{arrangement.axis_name(len(sizes) - 1 - place)}: {at}"
            for place, at in enumerate(coordinates(row, sizes[:-1]))
        )
        for row in positions
    ]
    indent = max(map(len, labels)) + 2
    last = arrangement.layout.device_count - 1
    widest = max(len(arrangement.rank_label(last)), len(str(columns))) + 2
    across = shown_positions(columns, max(3, min(_MAX_MATRIX_COLUMNS, (width - indent - 9) // widest)))
    heads = "".join(("..." if at is None else str(at)).rjust(widest) for at in across)
    head = f"{arrangement.axis_name(0)}:"
    lines = [f"{'':{indent}}  {head:7}{heads}"]
    for row, label in zip(positions, labels):
        cells = []
        for column in across:
            if row is None or column is None:
                cells.append("...".rjust(widest))
                continue
            local = row * columns + column
            rank_text = arrangement.rank_label(local)
            cells.append(" " * (widest - len(rank_text)) + paint(rank_text, drawn.colour_of_rank(local)))
        lines.append(f"  {label:{indent}}{'':{max(7, len(head))}}{''.join(cells)}")
    if arrangement.layout.copies > 1:
        lines += _folded(arrangement.label_in_words(last), width)
    return lines


def _grid(arrangement: Arrangement, width: int, paint: Paint) -> Optional[list[str]]:
    """Two cut dimensions as rows and columns; None for other numbers, or without room."""
    cut = arrangement.cut_dimensions
    if len(cut) != 2 or arrangement.layout.cuts[cut[1]] > width:
        return None
    down, across = cut
    place = [0] * len(arrangement.layout.cuts)
    columns = range(arrangement.layout.cuts[across])
    head = [f"dim {down}", *(arrangement.interval(across, at) for at in columns)]
    rows, heights, ends = [], [], []
    for row in shown_positions(arrangement.layout.cuts[down], _MAX_ROWS):
        if row is None:
            rows.append([_Cell("...") for _ in head])
            heights.append(1)
            ends.append(True)
            continue
        place[down] = row
        cells = [_Cell(_place(arrangement, down, row))]
        for column in columns:
            place[across] = column
            cells.append(_holders(arrangement, arrangement.at(place)))
        rows.append(cells)
        heights.append(_height(arrangement, down, row))
        ends.append(_ends(arrangement, down, row))
    widths = [max(len(head[at]), *(len(row[at].text) for row in rows)) for at in range(len(head))]
    if sum(widths) + 3 * len(widths) + 1 > width:
        return None
    return [f"{'':{widths[0] + 5}}dim {across}", *_boxed(head, rows, widths, heights, ends, paint)]


def _list(arrangement: Arrangement, width: int, paint: Paint) -> list[str]:
    """A row per slice."""
    cut = arrangement.cut_dimensions
    count = arrangement.layout.slice_count
    positions = shown_positions(count, _MAX_ROWS)
    head = [*(f"dim {dimension}" for dimension in cut), "held by"] if cut else ["whole tensor, held by"]
    rows, heights, ends = [], [], []
    for number in positions:
        if number is None:
            hidden = _Cell(f"{plural(count - len(positions) + 1, 'more slice')}, see --json")
            rows.append([*(_Cell("...") for _ in cut), hidden])
            heights.append(1)
            ends.append(True)
            continue
        drawn = arrangement.slice(number)
        intervals = [_Cell(_place(arrangement, dimension, drawn.place[dimension])) for dimension in cut]
        rows.append([*intervals, _holders(arrangement, drawn)])
        first = cut[0] if cut else None
        heights.append(1 if first is None else _height(arrangement, first, drawn.place[first]))
        ends.append(first is not None and _ends(arrangement, first, drawn.place[first]) and len(cut) == 1)
    widths = [max(len(head[at]), *(len(row[at].text) for row in rows)) for at in range(len(head))]
    room = max(16, width - sum(widths[:-1]) - 3 * len(widths) - 1)
    widths[-1] = min(widths[-1], room)
    return _boxed(head, rows, widths, heights, ends, paint)


def _holders(arrangement: Arrangement, drawn: Slice) -> _Cell:
    return _Cell(arrangement.holders_text(drawn), arrangement.colour(drawn.place))


def _place(arrangement: Arrangement, dimension: int, position: int) -> str:
    """The place of a slice along a dimension, and its optimizer shard."""
    return arrangement.interval(dimension, position) + ("" if dimension else arrangement.shard_text(position))


def _height(arrangement: Arrangement, dimension: int, position: int) -> int:
    """Lines for a slice along a dimension: one, or in proportion where slices differ in size."""
    uneven = arrangement.layout.uneven
    if dimension or uneven is None or len(uneven) > _MAX_ROWS:
        return 1
    return max(1, round(_LINES_IN_PROPORTION * uneven[position] / max(1, sum(uneven))))


def _ends(arrangement: Arrangement, dimension: int, position: int) -> bool:
    """Whether a line is drawn after a slice: between few slices, but not between optimizer shards."""
    shards = 1 if dimension else arrangement.layout.shards
    ruled = shards > 1 or arrangement.layout.cuts[dimension] <= _MAX_RULED
    return ruled and (position + 1) % shards == 0


def _boxed(
    head: Sequence[str],
    rows: Sequence[Sequence[_Cell]],
    widths: Sequence[int],
    heights: Sequence[int],
    ends: Sequence[bool],
    paint: Paint,
) -> list[str]:
    def rule(start: str, middle: str, end: str) -> str:
        return start + middle.join("─" * (width + 2) for width in widths) + end

    lines = ["  " + "   ".join(f"{text:{width}}" for text, width in zip(head, widths)).rstrip(), rule("┌", "┬", "┐")]
    for number, (row, height) in enumerate(zip(rows, heights)):
        folded = [textwrap.wrap(cell.text, width) or [""] for cell, width in zip(row, widths)]
        for line in range(max(height, *map(len, folded))):
            cells = []
            for cell, texts, width in zip(row, folded, widths):
                part = texts[line] if line < len(texts) else ""
                shown = paint(part, cell.colour) if part and cell.colour is not None else part
                cells.append(f" {shown}{' ' * (width - len(part))} ")
            lines.append("│" + "│".join(cells) + "│")
        if ends[number] and number < len(rows) - 1:
            lines.append(rule("├", "┼", "┤"))
    return [*lines, rule("└", "┴", "┘")]
