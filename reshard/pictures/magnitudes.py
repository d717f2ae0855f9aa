"""Pictures of magnitudes: numbers of elements by power of two, in total and by parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.numbers.statistics import TensorStatistics
from reshard.numbers.widening import ONE
from reshard.pictures.svg import CHARACTER_WIDTH, LINE_HEIGHT, document, paragraph, rectangle, text
from reshard.text.wording import one_line, plural

Counts = npt.NDArray[np.int64]

_MARGIN = 16.0
_PLOT = 560.0
_HEIGHT = 160.0
_ROW = 16.0
_MOST_ROWS = 60
_LONGEST = 48
# Minimum number of powers of two in a picture: wider bars would fill it.
_LEAST = 12
_NUMBER = re.compile(r"[0-9]+")
_COLOURS = {
    "bar": ("fill", "#2f6fd0", "#5b9bff"),
    "half": ("fill", "#d97706", "#f0a030"),
}
# Powers of two that are normal numbers of Float16.
_HALF = (-14, 15)


def magnitudes_picture(title: str, found: Sequence[TensorStatistics]) -> bytes:
    """A histogram of all elements by their binary exponents, and a row of shades for each kind of parameter.

    Args:
        title: name of the checkpoint.
        found: statistics with magnitudes.

    Returns:
        SVG.
    """
    rows = _rows(found)
    total: Counts = sum((counts for _, counts in rows), np.zeros(1, np.int64))
    there = np.flatnonzero(total)
    low, high = (int(there[0]), int(there[-1])) if len(there) else (ONE, ONE)
    low, high = min(low, high - _LEAST + 1), high
    shown = rows[:_MOST_ROWS]
    label = max([len(name) for name, _ in shown], default=0) * CHARACTER_WIDTH + _MARGIN
    left, bar = _MARGIN + label, _PLOT / (high - low + 1)
    body, y = paragraph(_MARGIN, _MARGIN + LINE_HEIGHT, _heading(title, found), left + _PLOT, font_weight="bold")
    y += LINE_HEIGHT / 2
    body += _bars(total, low, high, left, y, bar)
    y += _HEIGHT
    body += _axis(low, high, left, y, bar)
    y += 2.5 * LINE_HEIGHT
    for name, counts in shown:
        body.append(text(_MARGIN, y + _ROW - 4, name))
        body += _shades(counts, low, high, left, y, bar)
        y += _ROW
    if len(rows) > len(shown):
        y += LINE_HEIGHT
        body.append(text(_MARGIN, y, f"and {len(rows) - len(shown)} more kinds of parameters", "soft"))
    y += LINE_HEIGHT
    words = "Powers of two below 1/16384 lose precision in Float16, and numbers from 65520 on are infinite there."
    notes, y = paragraph(_MARGIN, y + LINE_HEIGHT, words, left + _PLOT, "soft")
    return document(left + _PLOT + _MARGIN, y, f"magnitudes of {title}", [*body, *notes], _COLOURS)


def _rows(found: Sequence[TensorStatistics]) -> list[tuple[str, Counts]]:
    """Counts by name, the same tensor of all layers together, in the order of the names."""
    kinds: dict[str, Any] = {}
    for tensor in found:
        name = one_line(_NUMBER.sub("*", tensor.name))
        shown = name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}...{name[-_LONGEST // 2 + 3 :]}"
        if tensor.magnitudes is not None and tensor.magnitudes.any():
            kinds[shown] = kinds.get(shown, 0) + tensor.magnitudes
    return list(kinds.items())


def _heading(title: str, found: Sequence[TensorStatistics]) -> str:
    said: Mapping[str, int] = {
        what: sum(getattr(tensor, key) for tensor in found)
        for key, what in (("zeros", "zero"), ("nan", "NaN"), ("inf", "infinite"))
    }
    others = "".join(f", {count} {what}" for what, count in said.items() if count)
    return f"{title}: {plural(sum(tensor.count for tensor in found), 'element')}{others}"


def _bars(total: Counts, low: int, high: int, left: float, y: float, bar: float) -> list[str]:
    most = int(total.max()) or 1
    whole = int(total.sum()) or 1
    made = []
    for exponent in range(low, high + 1):
        count = int(total[exponent]) if exponent < len(total) else 0
        if count:
            height = max(1.0, _HEIGHT * count / most)
            x = left + (exponent - low) * bar
            made.append(
                rectangle(x, y + _HEIGHT - height, max(1.0, bar - 1), height, "bar", _said(exponent, count, whole))
            )
    return made


def _shades(counts: Counts, low: int, high: int, left: float, y: float, bar: float) -> list[str]:
    most, whole = int(counts.max()), int(counts.sum())
    return [
        rectangle(
            left + (exponent - low) * bar,
            y + 1,
            bar,
            _ROW - 2,
            "bar",
            _said(exponent, int(counts[exponent]), whole),
            # Few are seen, too.
            fill_opacity=0.12 + 0.88 * float(counts[exponent]) / most,
        )
        for exponent in range(low, high + 1)
        if counts[exponent]
    ]


def _axis(low: int, high: int, left: float, y: float, bar: float) -> list[str]:
    """Powers of two below the bars, and the range of Float16."""
    width = bar * (high - low + 1)
    made = [rectangle(left, y, width, 1, "soft")]
    first, last = (max(low, min(high + 1, ONE + power)) for power in (_HALF[0], _HALF[1] + 1))
    if last > first:
        place = (left + (first - low) * bar, y + 3)
        made.append(rectangle(*place, (last - first) * bar, 3, "half", "normal numbers of Float16: 2^-14 to 2^15"))
    step = max(1, round((high - low + 1) / 10))
    for exponent in range(low, high + 1, step):
        x = left + (exponent - low + 0.5) * bar
        made.append(text(x, y + 1.4 * LINE_HEIGHT, f"2^{exponent - ONE}", "soft", text_anchor="middle"))
    return made


def _said(exponent: int, count: int, whole: int) -> str:
    return f"2^{exponent - ONE} to 2^{exponent - ONE + 1}: {plural(count, 'element')} ({count / whole:.2%})"
