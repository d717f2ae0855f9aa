"""The slices of one parameter as SVG: device matrix, and the tensor in proportion, in the same colours."""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from reshard.pictures import svg
from reshard.pictures.slices import Arrangement, Slice, coordinates, shown_positions
from reshard.text.messages import plural, stepped_ranges

_WIDTH = 860
_MARGIN = 16.0
_MAX_ROWS = 32
_MAX_COLUMNS = 16
_MAX_PANELS = 8
_MAX_MATRIX = 16
_ROW = 22
_GAP = 18.0
_SMALL = 10
_MAX_HEIGHT = 700.0
_MIN_STRIPE = 2.0

# Degrees between neighbouring hues: the golden angle, so that few hues are far apart, whatever their number.
_TURN = 137.50776
# Lightness and saturation on light and on dark pages; each is changed a little from one round of hues to the next.
_ON_LIGHT, _ON_DARK = (0.83, 0.75), (0.26, 0.45)
_ROUND = 10


class _Colours:
    """A colour for every different slice that is drawn.

    Attributes:
        used: colours by class, as for `svg.document`.
    """

    def __init__(self) -> None:
        self.used: dict[str, tuple[str, str, str]] = {}
        self._classes: dict[object, str] = {}
        self._taken: set[str] = set()
        self._hues = itertools.count()

    def of(self, drawn: Arrangement, index: Sequence[int]) -> str:
        """The class of the slice at a position; slices of several stages are equal if their boxes are."""
        key = tuple(drawn.interval(dimension, at) for dimension, at in enumerate(index))
        if key not in self._classes:
            name = f"slice{len(self._classes)}"
            light, dark = next(pair for pair in map(_pair, self._hues) if self._taken.isdisjoint(pair))
            self._taken.update((light, dark))
            self._classes[key] = name
            self.used[name] = ("fill", light, dark)
        return self._classes[key]


def _pair(number: int) -> tuple[str, str]:
    """The colour of a number on light and on dark pages."""
    hue, darker = number * _TURN % 360 / 360, number // _ROUND % 5 * 0.03
    return _hex(hue, _ON_LIGHT[0] - darker, _ON_LIGHT[1]), _hex(hue, _ON_DARK[0] + darker, _ON_DARK[1])


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


class _Band(NamedTuple):
    """A row or column of slices, or the place of the omitted ones."""

    position: Optional[int]
    start: float
    size: float


def parameter_picture(name: str, arrangements: Sequence[Arrangement]) -> bytes:
    """Draw the slices of one parameter on the ranks of its stages.

    Args:
        name: the parameter.
        arrangements: one per stage that holds it.

    Returns:
        The SVG file's content.
    """
    body, line = svg.paragraph(_MARGIN, 26, name, _WIDTH - 2 * _MARGIN, style="font-weight:600")
    colours = _Colours()
    for arrangement in arrangements:
        parts, line = _stage(arrangement, colours, line + 8)
        body += parts
    return svg.document(_WIDTH, line, name, body, colours.used)


def _stage(arrangement: Arrangement, colours: _Colours, line: float) -> tuple[list[str], float]:
    layout = arrangement.layout
    room = _WIDTH - 2 * _MARGIN
    headlines = [
        (arrangement.holding.stage.label, "ink"),
        (f"device matrix {list(layout.device_matrix)}, tensor map {layout.map_text}", "ink"),
        *((words, "soft") for words in (*arrangement.axis_lines(), *arrangement.dimension_lines())),
    ]
    body = []
    for words, colour in headlines:
        parts, line = svg.paragraph(_MARGIN, line, words, room, colour)
        body += parts
    distinguished = layout.shards == 1 or layout.cuts[0] <= _MAX_ROWS
    drawn = arrangement if distinguished else arrangement.without_shards
    parts, line = _matrix(arrangement, drawn, colours, line + 12)
    body += parts
    notes = [*arrangement.readings, arrangement.summary()]
    if not distinguished:
        notes.append(str(arrangement.shard_order()))
    notes.append("A rank has the colour of the box that it holds; every other box has another colour.")
    for words in notes:
        parts, line = svg.paragraph(_MARGIN, line, words, room)
        body += parts
    parts, line = _tensor(arrangement, drawn, colours, line + 10)
    return [*body, *parts], line


def _matrix(arrangement: Arrangement, drawn: Arrangement, colours: _Colours, top: float) -> tuple[list[str], float]:
    sizes = arrangement.layout.device_matrix or (1,)
    columns, rows = sizes[-1], math.prod(sizes[:-1])
    last = arrangement.layout.device_count - 1
    width = max(34.0, (len(arrangement.rank_label(last)) + 2) * (svg.CHARACTER_WIDTH + 0.6))
    row_axes = ", ".join(str(axis) for axis in range(len(sizes) - 1, 0, -1))
    rows_of = f"{'axis' if len(sizes) == 2 else 'axes'} {row_axes}, rows"
    if arrangement.axis_names:
        rows_of = f"{', '.join(arrangement.axis_names[:-1])}, rows"
    columns_of = f"{arrangement.axis_name(0)}, columns"
    widest = max(len(columns_of), len(rows_of) + sum(len(str(size)) + 1 for size in sizes[:-1]))
    left = _MARGIN + 20 + widest * svg.CHARACTER_WIDTH
    body = [svg.text(_MARGIN, top + 12, columns_of, "soft")]
    if len(sizes) > 1:
        body.append(svg.text(_MARGIN, top + 13 + _ROW, rows_of, "soft"))
    across = shown_positions(columns, max(3, min(_MAX_MATRIX, int((_WIDTH - left - _MARGIN) / width))))
    for place, column in enumerate(across):
        label_of_column = "…" if column is None else str(column)
        body.append(svg.text(left + (place + 0.5) * width, top + 12, label_of_column, "soft", text_anchor="middle"))
    line = top + 20
    for row in shown_positions(rows, _MAX_MATRIX):
        if row is None:
            body.append(svg.text(left + width / 2, line + 12, "…", "soft", text_anchor="middle"))
            line += _GAP
            continue
        at = ",".join(str(number) for number in coordinates(row, sizes[:-1]))
        body.append(svg.text(left - 8, line + 15, at, "soft", text_anchor="end"))
        for place, column in enumerate(across):
            if column is not None:
                local = row * columns + column
                fill = colours.of(drawn, drawn.layout.slice_index(int(drawn.layout.slice_of_rank[local])))
                x = left + place * width
                body.append(svg.rectangle(x, line, width - 2, _ROW - 2, fill))
                label = arrangement.rank_label(local)
                body.append(svg.text(x + width / 2 - 1, line + 14, label, text_anchor="middle"))
        line += _ROW
    if arrangement.layout.copies > 1:
        words = arrangement.label_in_words(last)
        body.append(svg.text(left, line + 14, words, "soft"))
        line += svg.LINE_HEIGHT
    return body, line + 24


def _tensor(arrangement: Arrangement, drawn: Arrangement, colours: _Colours, top: float) -> tuple[list[str], float]:
    """The tensor, or a panel per slice of the dimensions without a direction in the picture."""
    stripes = arrangement.layout.shards // drawn.layout.shards
    cuts = drawn.layout.cuts
    dimensions = arrangement.cut_dimensions
    # Dimension 0 runs downwards and others to the right, as in printed matrices.
    plane = [d for d in dimensions if d == 0][:1] + [d for d in dimensions if d != 0][-1:]
    if len(plane) == 1 and len(dimensions) > 1:
        plane = dimensions[-2:]
    down = plane[0] if plane and (len(plane) == 2 or plane[0] == 0) else None
    across = plane[-1] if plane and plane[-1] != down else None
    further = [dimension for dimension in dimensions if dimension not in plane]
    panels = math.prod(cuts[dimension] for dimension in further)
    body: list[str] = []
    line = top
    for panel in shown_positions(panels, _MAX_PANELS):
        if panel is None:
            left_out = plural(panels - _MAX_PANELS + 1, "more panel")
            body.append(svg.text(_MARGIN, line + 12, f"… {left_out} left out", "soft"))
            line += svg.LINE_HEIGHT + 8
            continue
        place = [0] * len(cuts)
        for dimension, at in zip(further, coordinates(panel, [cuts[dimension] for dimension in further])):
            place[dimension] = at
        if further:
            where = ", ".join(f"dimension {d} at {drawn.interval(d, place[d])}" for d in further)
            body.append(svg.text(_MARGIN, line + 12, where))
            line += svg.LINE_HEIGHT + 4
        parts, line = _panel(drawn, colours, place, down, across, stripes, line)
        body += parts
    return body, line


def _panel(
    drawn: Arrangement,
    colours: _Colours,
    place: list[int],
    down: Optional[int],
    across: Optional[int],
    stripes: int,
    top: float,
) -> tuple[list[str], float]:
    rows = 1 if down is None else drawn.layout.cuts[down]
    labels = [] if down is None else [drawn.interval(down, at) for at in (0, rows - 1)]
    left = _MARGIN + (0 if down is None else max(92.0, 12 + max(map(len, labels)) * svg.CHARACTER_WIDTH))
    height = float(max(3, min(rows, _MAX_ROWS)) * _ROW * (2 if stripes > 1 else 1))
    if down is not None and drawn.layout.uneven is not None:
        # High enough to label the smallest slice, unless it is very small.
        sizes = [drawn.length(down, at) for at in range(rows)]
        height = max(height, min(_MAX_HEIGHT, _ROW * sum(sizes) / max(1, min(sizes))))
    body = []
    if down is not None:
        body.append(svg.text(_MARGIN, top + 12, f"dimension {down}", "soft"))
    if across is not None:
        body.append(svg.text(left, top + 12, f"dimension {across}", "soft"))
    top += 20 if down is not None or across is not None else 4
    columns = _bands(drawn, across, left, _WIDTH - _MARGIN - left, _MAX_COLUMNS)
    if across is not None:
        body += list(_column_labels(drawn, across, columns, top + 12))
        top += 20
    bands = _bands(drawn, down, top, height, _MAX_ROWS)
    for row in bands:
        if down is not None and row.size >= 12:
            label = "…" if row.position is None else drawn.interval(down, row.position)
            body.append(svg.text(left - 8, row.start + row.size / 2 + 4, label, "soft", text_anchor="end"))
        for column in columns:
            if row.position is None or column.position is None:
                continue
            if down is not None:
                place[down] = row.position
            if across is not None:
                place[across] = column.position
            body += _box(drawn, colours, drawn.at(place), stripes, column.start, row.start, column.size, row.size)
    body += list(_left_out(drawn, down, across, left, top + height + 14))
    return body, top + height + 30


def _bands(drawn: Arrangement, dimension: Optional[int], start: float, room: float, most: int) -> list[_Band]:
    """Rows or columns in true proportion; omitted ones share one narrow band."""
    if dimension is None:
        return [_Band(0, start, room)]
    positions = shown_positions(drawn.layout.cuts[dimension], most)
    sizes = [0 if at is None else drawn.length(dimension, at) for at in positions]
    gaps = positions.count(None)
    # An empty dimension has no proportions.
    total = sum(sizes) or len(sizes)
    bands = []
    for at, size in zip(positions, sizes if sum(sizes) else [1] * len(sizes)):
        length = _GAP if at is None else (room - gaps * _GAP) * size / total
        bands.append(_Band(at, start, length))
        start += length
    return bands


def _column_labels(drawn: Arrangement, dimension: int, columns: Sequence[_Band], line: float) -> Iterator[str]:
    for band in columns:
        label = "…" if band.position is None else drawn.interval(dimension, band.position)
        if len(label) * svg.CHARACTER_WIDTH <= band.size:
            yield svg.text(band.start + band.size / 2, line, label, "soft", text_anchor="middle")


def _left_out(
    drawn: Arrangement, down: Optional[int], across: Optional[int], left: float, line: float
) -> Iterator[str]:
    notes = []
    for dimension, most in ((down, _MAX_ROWS), (across, _MAX_COLUMNS)):
        if dimension is not None and drawn.layout.cuts[dimension] > most:
            count = drawn.layout.cuts[dimension] - most + 1
            notes.append(f"{count} of {drawn.layout.cuts[dimension]} slices of dimension {dimension} are left out")
    if notes:
        yield svg.text(left, line, "; ".join(notes), "soft")


def _box(
    drawn: Arrangement,
    colours: _Colours,
    slice_: Slice,
    stripes: int,
    x: float,
    y: float,
    width: float,
    height: float,
) -> Iterator[str]:
    """A slice with its ranks; if they do not fit, a pointer on it shows them."""
    ranks = drawn.holders_text(slice_)
    shards = drawn.layout.shards
    shard = drawn.shard_text(slice_.place[0]) if slice_.place else ""
    # The shards of a slice are close together, slices are apart.
    height -= 3 if shards > 1 and (slice_.place[0] + 1) % shards == 0 else 0
    box = (x + 0.5, y + 0.5, max(0.5, width - 1), max(0.5, height - 1))
    class_ = colours.of(drawn, slice_.place)
    where = ", ".join(f"dimension {d} {drawn.interval(d, at)}" for d, at in enumerate(slice_.place))
    yield svg.rectangle(*box, class_, f"{where}: {ranks}{shard}")
    if stripes > 1 and height / stripes >= _MIN_STRIPE:
        lines = "".join(f"M{x:g} {y + height * at / stripes:.6g}h{width:g}" for at in range(1, stripes))
        yield svg.element("path", d=lines, class_="line", stroke_width=0.5)
    short = stepped_ranges(slice_.ranks)
    first = f"{slice_.ranks[0]}{',…' if len(slice_.ranks) > 1 else ''}"
    normal = svg.FONT_SIZE
    fitting = ((ranks + shard, normal), (ranks, normal), (short, normal), (short, _SMALL), (first, _SMALL))
    for label, size in fitting:
        if (len(label) + 1) * svg.CHARACTER_WIDTH * size / normal <= width and height >= 13:
            style = f"font-size:{size}px" if size == _SMALL else None
            yield svg.text(x + width / 2, y + height / 2 + 4, label, text_anchor="middle", style=style)
            return
