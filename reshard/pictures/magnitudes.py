"""Pictures of magnitudes: elements per power of two, of all parameters together and by parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from reshard.named_tuple import NamedTuple
from reshard.numbers.statistics import TensorStatistics
from reshard.numbers.widening import EXPONENTS, ONE
from reshard.pictures.svg import CHARACTER_WIDTH, LINE_HEIGHT, document, paragraph, rectangle, text
from reshard.text.names import is_value
from reshard.text.wording import one_line, plural, some_names

Counts = npt.NDArray[np.int64]

_MARGIN = 16.0
_PLOT = 560.0
_HEIGHT = 160.0
_ROW = 16.0
_MAX_ROWS = 60
_MAX_LENGTH = 48
# Minimum number of powers of two in a picture: wider bars would fill it.
_MIN_EXPONENTS = 12
_NUMBER = re.compile(r"[0-9]+")
_COLOURS = {
    "bar": ("fill", "#2f6fd0", "#5b9bff"),
    "half": ("fill", "#d97706", "#f0a030"),
    "bad": ("fill", "#b42318", "#ff938a"),
}
# Powers of two that are normal numbers of Float16.
_HALF = (-14, 15)


def magnitudes_picture(title: str, statistics: Sequence[TensorStatistics]) -> bytes:
    """A histogram of all elements by their binary exponents, and a row of shades for each kind of parameter.

    Args:
        title: name of the checkpoint.
        statistics: statistics with magnitudes.

    Returns:
        SVG.
    """
    values = [tensor for tensor in statistics if is_value(tensor.name, tensor.count)]
    rows = _rows([tensor for tensor in statistics if tensor not in values])
    total: Counts = sum((row.counts for row in rows), np.zeros(EXPONENTS, np.int64))
    present = np.flatnonzero(total)
    low, high = (int(present[0]), int(present[-1])) if len(present) else (ONE, ONE)
    low, high = min(low, high - _MIN_EXPONENTS + 1), high
    shown = rows[:_MAX_ROWS]
    label = max([len(row.label) for row in shown], default=0) * CHARACTER_WIDTH + _MARGIN
    left, bar = _MARGIN + label, _PLOT / (high - low + 1)
    body, y = paragraph(_MARGIN, _MARGIN + LINE_HEIGHT, _heading(title, statistics), left + _PLOT, font_weight="bold")
    y += LINE_HEIGHT / 2
    body += _bars(total, low, high, left, y, bar)
    y += _HEIGHT
    body += _axis(low, high, left, y, bar)
    y += 2.5 * LINE_HEIGHT
    for row in shown:
        body.append(text(_MARGIN, y + _ROW - 4, row.label, "bad" if row.bad else "ink"))
        body += _shades(row.counts, low, high, left, y, bar)
        y += _ROW
    if len(rows) > len(shown):
        y += LINE_HEIGHT
        body.append(text(_MARGIN, y, f"and {len(rows) - len(shown)} more kinds of parameters", "soft"))
    y += LINE_HEIGHT
    for words in _legend(values):
        lines, y = paragraph(_MARGIN, y + LINE_HEIGHT, words, left + _PLOT, "soft")
        body += lines
        y -= LINE_HEIGHT
    y += LINE_HEIGHT
    return document(left + _PLOT + _MARGIN, y, f"magnitudes of {title}", body, _COLOURS)


class _Row(NamedTuple):
    """Parameters whose names differ only in numbers.

    Attributes:
        label: the name, followed by the numbers of NaN and infinite elements above 0.
        counts: elements by exponent.
        bad: whether some elements are NaN or infinite.
    """

    label: str
    counts: Counts
    bad: bool


def _rows(statistics: Sequence[TensorStatistics]) -> list[_Row]:
    """Counts by name, all layers together: first rows with NaN or Inf, then in the order of the names."""
    kinds: dict[str, list[TensorStatistics]] = {}
    for tensor in statistics:
        name = one_line(_NUMBER.sub("*", tensor.name))
        shown = name if len(name) <= _MAX_LENGTH else f"{name[: _MAX_LENGTH // 2]}...{name[-_MAX_LENGTH // 2 + 3 :]}"
        kinds.setdefault(shown, []).append(tensor)
    rows = []
    for name, tensors in kinds.items():
        counts = np.sum([each.magnitudes for each in tensors if each.magnitudes is not None], axis=0, dtype=np.int64)
        nan, inf = sum(each.nan for each in tensors), sum(each.inf for each in tensors)
        marks = [f"{count} {label}" for count, label in ((nan, "NaN"), (inf, "Inf")) if count]
        if marks or np.any(counts):
            rows.append(_Row(f"{name}: {', '.join(marks)}" if marks else name, np.atleast_1d(counts), bool(marks)))
    return sorted(rows, key=lambda row: not row.bad)


def _legend(values: Sequence[TensorStatistics]) -> list[str]:
    """The meaning of bars, rows and colours, and the omitted tensors."""
    lines = [
        "Bars: all elements, by powers of two. Rows: the elements of one kind of parameter, all layers together; the "
        "darkest field has the most of its row. Zeros, NaN and infinite elements are not in bars and rows.",
        "Red names: some elements are NaN or infinite.",
        "Orange line: normal numbers of Float16. Powers of two below 1/16384 lose precision there, and numbers from "
        "65520 on are infinite.",
    ]
    if values:
        lines.append(
            f"Not drawn, because these are counters and settings: {some_names([one_line(v.name) for v in values])}"
        )
    return lines


def _heading(title: str, statistics: Sequence[TensorStatistics]) -> str:
    counts: Mapping[str, int] = {
        label: sum(getattr(tensor, key) for tensor in statistics)
        for key, label in (("zeros", "zero"), ("nan", "NaN"), ("inf", "infinite"))
    }
    counted = "".join(f", {count} {label}" for label, count in counts.items() if count)
    return f"{title}: {plural(sum(tensor.count for tensor in statistics), 'element')}{counted}"


def _bars(total: Counts, low: int, high: int, left: float, y: float, bar: float) -> list[str]:
    most = int(total.max()) or 1
    elements = int(total.sum()) or 1
    rectangles = []
    for exponent in range(low, high + 1):
        count = int(total[exponent]) if exponent < len(total) else 0
        if count:
            height = max(1.0, _HEIGHT * count / most)
            x = left + (exponent - low) * bar
            rectangles.append(
                rectangle(
                    x, y + _HEIGHT - height, max(1.0, bar - 1), height, "bar", _described(exponent, count, elements)
                )
            )
    return rectangles


def _shades(counts: Counts, low: int, high: int, left: float, y: float, bar: float) -> list[str]:
    most, elements = int(counts.max()), int(counts.sum())
    return [
        rectangle(
            left + (exponent - low) * bar,
            y + 1,
            bar,
            _ROW - 2,
            "bar",
            _described(exponent, int(counts[exponent]), elements),
            # A few elements stay visible.
            fill_opacity=0.12 + 0.88 * float(counts[exponent]) / most,
        )
        for exponent in range(low, high + 1)
        if counts[exponent]
    ]


def _axis(low: int, high: int, left: float, y: float, bar: float) -> list[str]:
    """Powers of two below the bars, and the range of Float16."""
    width = bar * (high - low + 1)
    marks = [rectangle(left, y, width, 1, "soft")]
    first, last = (max(low, min(high + 1, ONE + power)) for power in (_HALF[0], _HALF[1] + 1))
    if last > first:
        place = (left + (first - low) * bar, y + 3)
        marks.append(rectangle(*place, (last - first) * bar, 3, "half", "normal numbers of Float16: 2^-14 to 2^15"))
    step = max(1, round((high - low + 1) / 10))
    for exponent in range(low, high + 1, step):
        x = left + (exponent - low + 0.5) * bar
        marks.append(text(x, y + 1.4 * LINE_HEIGHT, f"2^{exponent - ONE}", "soft", text_anchor="middle"))
    return marks


def _described(exponent: int, count: int, elements: int) -> str:
    return f"2^{exponent - ONE} to 2^{exponent - ONE + 1}: {plural(count, 'element')} ({count / elements:.2%})"
