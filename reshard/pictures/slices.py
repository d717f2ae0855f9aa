"""The slices of one parameter and the ranks that hold them, and their picture, in proportion.

Only JSON strategies contain the full shape. The unit of a dimension of unknown size is a slice: ``1/8..2/8``.
"""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard.layout import Box
from reshard.layout.grid import place_of
from reshard.pictures import svg
from reshard.strategies import Holding
from reshard.text.messages import plural, some_numbers, stepped_ranges, stepped_rank_ranges
from reshard.threads import cached_property

_WIDTH = 860
_MARGIN = 16.0
_MAX_ROWS = 32
_MAX_COLUMNS = 16
_MAX_PANELS = 8
_ROW = 22
_GAP = 18.0
# Degrees between neighbouring hues: the golden angle, so that few hues are far apart, whatever their number.
_TURN = 137.50776


class Slice(NamedTuple):
    """One slice, or one whole tensor-parallel slice with all its optimizer shards, and the ranks that hold it.

    The box is in units of `Arrangement.extents`; the place is the position per dimension.
    """

    box: Box
    place: tuple[int, ...]
    ranks: tuple[int, ...]


class Arrangement:
    """The slices of one parameter on the ranks of one stage.

    Attributes:
        extents: size of every dimension: elements if known, otherwise its number of slices.
        in_elements: per dimension, whether its size is in elements.
        readings: other readings of the file, in words.

    Raises:
        LayoutError: the recorded shape does not divide by the cuts.
    """

    def __init__(self, holding: Holding) -> None:
        layout, *alternatives = holding.layout.regroupings() or [holding.layout]
        self.holding = holding._replace(layout=layout)
        self.layout = layout
        self.readings = tuple(
            f"the file can also mean shape {list(alternative.recorded_shape or ())}, tensor map {alternative.map_text}"
            for alternative in alternatives
        )
        shape: Sequence[int | None] = layout.recorded_shape or [None] * len(layout.cuts)
        known_sizes = [sum(layout.uneven) if layout.uneven and not d else size for d, size in enumerate(shape)]
        self.in_elements = tuple(size is not None for size in known_sizes)
        self.extents = tuple(cuts if size is None else size for size, cuts in zip(known_sizes, layout.cuts))
        self._edges = [layout.boundaries(dimension, size) for dimension, size in enumerate(self.extents)]

    @cached_property
    def without_shards(self) -> Arrangement:
        return Arrangement(self.holding._replace(layout=self.layout.without_shards()))

    @property
    def cut_dimensions(self) -> list[int]:
        return [dimension for dimension, cuts in enumerate(self.layout.cuts) if cuts > 1]

    def slice(self, number: int) -> Slice:
        index = self.layout.slice_index(number)
        box = tuple((edges[at], edges[at + 1]) for edges, at in zip(self._edges, index))
        return Slice(box, index, tuple(self.holding.holders(number)))

    def at(self, index: Sequence[int]) -> Slice:
        number = 0
        for position, cuts in zip(index, self.layout.cuts):
            number = number * cuts + position
        return self.slice(number)

    def slices(self) -> Iterator[Slice]:
        return map(self.slice, range(self.layout.slice_count))

    def interval(self, dimension: int, position: int) -> str:
        """The interval of a slice along a dimension: ``8..16``, or ``1/8..2/8`` if the size is unknown."""
        if self.layout.cuts[dimension] == 1:
            return "whole"
        start, stop = self._edges[dimension][position : position + 2]
        of = "" if self.in_elements[dimension] else f"/{self.extents[dimension]}"
        return f"{start}{of}..{stop}{of}"

    def length(self, dimension: int, position: int) -> int:
        start, stop = self._edges[dimension][position : position + 2]
        return stop - start

    def axis_lines(self) -> list[str]:
        cut_by = {axis: dimension for dimension, axes in enumerate(self.layout.tensor_map) for axis in axes}
        lines = []
        for place, size in enumerate(self.layout.device_matrix):
            axis = len(self.layout.device_matrix) - 1 - place
            if size == 1:
                does = "nothing"
            elif axis in cut_by:
                does = f"cuts dimension {cut_by[axis]} in {size}"
            elif self.layout.shards == 1:
                does = "repeats slices: replicas"
            elif self.layout.shards == self.layout.replica_count:
                does = "repeats slices: optimizer shards"
            else:
                does = f"repeats slices: {self.layout.shards} optimizer shards and their replicas"
            lines.append(f"axis {axis} of size {size}: {does}")
        return lines

    def dimension_lines(self) -> list[str]:
        lines = []
        for dimension, axes in enumerate(self.layout.tensor_map):
            size = f" of {self.extents[dimension]}" if self.in_elements[dimension] else ""
            cuts = self.layout.tensor_cuts[dimension]
            if dimension == 0 and self.layout.uneven is not None:
                parts = [f"cut by hand into {some_numbers(self.layout.uneven)}"]
            else:
                over = f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"
                parts = [f"cut in {cuts} over {over}"] if cuts > 1 else []
            if dimension == 0 and self.layout.shards > 1:
                parts.append(f"cut in {self.layout.shards} optimizer shards")
            lines.append(f"dimension {dimension}{size}: {', then '.join(parts) or 'whole'}")
        return lines

    def summary(self) -> str:
        slices = self.layout.slice_count
        copies = self.layout.copies
        if slices == 1:
            return "whole on its rank" if copies == 1 else f"whole on every rank: {copies} identical copies"
        return f"{slices} slices, each on " + (f"{copies} ranks: identical copies" if copies > 1 else "one rank")

    def shard_text(self, position: int) -> str:
        """The optimizer shard at a position of dimension 0; empty without shards."""
        shards = self.layout.shards
        return f", shard {position % shards + 1} of {shards}" if shards > 1 else ""

    def shard_order(self) -> str | None:
        """The order of optimizer shards on a slice's ranks, for pictures that do not distinguish shards."""
        shards, group = self.layout.shards, self.layout.replica_count
        if shards == 1:
            return None
        each = "one on each of its ranks" if shards == group else f"each on {group // shards} of its ranks"
        over = "" if shards == group else ", repeatedly"
        return (
            f"Optimizer shards are not distinguished here: along dimension 0 every box is cut in {shards}, "
            f"{each}, in the order of the ranks{over}"
        )


def shown_positions(count: int, most: int) -> list[int | None]:
    """All positions if they are few; else the first ones, None for the omitted ones, and the last."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


class _Colours:
    """A colour for every different slice that is drawn, by class, as for `svg.document`."""

    def __init__(self) -> None:
        self.used: dict[str, tuple[str, str, str]] = {}
        self._classes: dict[object, str] = {}
        self._taken: set[str] = set()
        self._hues = itertools.count()

    def of(self, drawn: Arrangement, place: Sequence[int]) -> str:
        """The class of the slice at a position; slices of several stages are equal if their boxes are."""
        key = tuple(drawn.interval(dimension, at) for dimension, at in enumerate(place))
        if key not in self._classes:
            pair = next(pair for pair in map(_pair, self._hues) if self._taken.isdisjoint(pair))
            self._taken.update(pair)
            self._classes[key] = f"slice{len(self._classes)}"
            self.used[self._classes[key]] = ("fill", *pair)
        return self._classes[key]


def _pair(number: int) -> tuple[str, str]:
    """The colour of a number on light and on dark pages; lightness changes a little from round to round of hues."""
    hue, darker = number * _TURN % 360 / 360, number // 10 % 5 * 0.03
    return _hex(hue, 0.83 - darker, 0.75), _hex(hue, 0.26 + darker, 0.45)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


class _Band(NamedTuple):
    """A row or column of slices, or the place of the omitted ones."""

    position: int | None
    start: float
    size: float


def parameter_picture(name: str, arrangements: Sequence[Arrangement]) -> bytes:
    """An SVG file of the slices of one parameter on the ranks of its stages."""
    body, line = svg.paragraph(_MARGIN, 26, name, _WIDTH - 2 * _MARGIN, style="font-weight:600")
    colours = _Colours()
    for arrangement in arrangements:
        parts, line = _stage(arrangement, colours, line + 8)
        body += parts
    return svg.document(_WIDTH, line, name, body, colours.used)


def _stage(arrangement: Arrangement, colours: _Colours, line: float) -> tuple[list[str], float]:
    """The layout in words, and the tensor, or a panel per slice of all cut dimensions but the last two."""
    layout = arrangement.layout
    drawn = arrangement if layout.shards == 1 or layout.cuts[0] <= _MAX_ROWS else arrangement.without_shards
    headlines = [
        (arrangement.holding.stage.label, "ink"),
        (f"device matrix {list(layout.device_matrix)}, tensor map {layout.map_text}", "ink"),
        *((words, "soft") for words in (*arrangement.axis_lines(), *arrangement.dimension_lines())),
        *((words, "ink") for words in (*arrangement.readings, arrangement.summary())),
    ]
    if drawn is not arrangement:
        headlines.append((str(arrangement.shard_order()), "ink"))
    body: list[str] = []
    for words, colour in headlines:
        parts, line = svg.paragraph(_MARGIN, line, words, _WIDTH - 2 * _MARGIN, colour)
        body += parts
    line += 10
    further = drawn.cut_dimensions[:-2]
    cuts = [drawn.layout.cuts[dimension] for dimension in further]
    for panel in shown_positions(math.prod(cuts), _MAX_PANELS):
        if panel is None:
            left_out = plural(math.prod(cuts) - _MAX_PANELS + 1, "more panel")
            body.append(svg.text(_MARGIN, line + 12, f"… {left_out} left out", "soft"))
            line += svg.LINE_HEIGHT + 8
            continue
        place: dict[int | None, int] = dict(zip(further, place_of(panel, cuts)))
        if further:
            where = ", ".join(f"dimension {d} at {drawn.interval(d, at)}" for d, at in zip(further, place.values()))
            body.append(svg.text(_MARGIN, line + 12, where))
            line += svg.LINE_HEIGHT + 4
        parts, line = _panel(drawn, colours, place, line)
        body += parts
    return body, line


def _panel(drawn: Arrangement, colours: _Colours, place: dict[int | None, int], top: float) -> tuple[list[str], float]:
    """The last two cut dimensions; dimension 0 runs downwards, as in printed matrices."""
    plane = drawn.cut_dimensions[-2:]
    down = plane[0] if len(plane) == 2 or plane == [0] else None
    across = plane[-1] if plane and plane[-1] != down else None
    rows = 1 if down is None else drawn.layout.cuts[down]
    labels = [] if down is None else [drawn.interval(down, at) for at in (0, rows - 1)]
    left = _MARGIN + (0 if down is None else max(92.0, 12 + max(map(len, labels)) * svg.CHARACTER_WIDTH))
    height = float(max(3, min(rows, _MAX_ROWS)) * _ROW)
    body = []
    for dimension, x in ((down, _MARGIN), (across, left)):
        if dimension is not None:
            body.append(svg.text(x, top + 12, f"dimension {dimension}", "soft"))
    top += 20
    columns = _bands(drawn, across, left, _WIDTH - _MARGIN - left, _MAX_COLUMNS)
    if across is not None:
        for column in columns:
            label = "…" if column.position is None else drawn.interval(across, column.position)
            if len(label) * svg.CHARACTER_WIDTH <= column.size:
                body.append(svg.text(column.start + column.size / 2, top + 12, label, "soft", text_anchor="middle"))
        top += 20
    for row in _bands(drawn, down, top, height, _MAX_ROWS):
        if down is not None and row.size >= 12:
            label = "…" if row.position is None else drawn.interval(down, row.position)
            body.append(svg.text(left - 8, row.start + row.size / 2 + 4, label, "soft", text_anchor="end"))
        for column in columns:
            if row.position is not None and column.position is not None:
                at = {**place, down: row.position, across: column.position}
                one = drawn.at([at.get(dimension, 0) for dimension in range(len(drawn.layout.cuts))])
                body += _box(drawn, colours, one, column.start, row.start, column.size, row.size)
    notes = []
    for dimension, most in ((down, _MAX_ROWS), (across, _MAX_COLUMNS)):
        count = 0 if dimension is None else drawn.layout.cuts[dimension]
        if count > most:
            notes.append(f"{count - most + 1} of {count} slices of dimension {dimension} are left out")
    if notes:
        body.append(svg.text(left, top + height + 14, "; ".join(notes), "soft"))
    return body, top + height + 30


def _bands(drawn: Arrangement, dimension: int | None, start: float, room: float, most: int) -> list[_Band]:
    """Rows or columns in true proportion; omitted ones share one narrow band."""
    if dimension is None:
        return [_Band(0, start, room)]
    positions = shown_positions(drawn.layout.cuts[dimension], most)
    sizes = [0 if at is None else drawn.length(dimension, at) for at in positions]
    if not any(sizes):
        # An empty dimension has no proportions.
        sizes = [1] * len(positions)
    bands = []
    for at, size in zip(positions, sizes):
        length = _GAP if at is None else (room - positions.count(None) * _GAP) * size / sum(sizes)
        bands.append(_Band(at, start, length))
        start += length
    return bands


def _box(
    drawn: Arrangement, colours: _Colours, one: Slice, x: float, y: float, width: float, height: float
) -> Iterator[str]:
    """A slice with its ranks; if they do not fit, a pointer on it shows them."""
    ranks, shards = stepped_rank_ranges(one.ranks), drawn.layout.shards
    shard = drawn.shard_text(one.place[0]) if one.place else ""
    # The shards of a slice are close together, slices are apart.
    height -= 3 if shards > 1 and (one.place[0] + 1) % shards == 0 else 0
    where = ", ".join(f"dimension {d} {drawn.interval(d, at)}" for d, at in enumerate(one.place))
    yield svg.rectangle(
        x + 0.5,
        y + 0.5,
        max(0.5, width - 1),
        max(0.5, height - 1),
        colours.of(drawn, one.place),
        f"{where}: {ranks}{shard}",
    )
    first = f"{one.ranks[0]}{',…' if len(one.ranks) > 1 else ''}"
    for label in (ranks + shard, ranks, stepped_ranges(one.ranks), first):
        if (len(label) + 1) * svg.CHARACTER_WIDTH <= width and height >= 13:
            yield svg.text(x + width / 2, y + height / 2 + 4, label, text_anchor="middle")
            return
