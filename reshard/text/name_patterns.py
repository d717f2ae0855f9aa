"""Many parameter names in few lines: layers and optimizer states that differ in a number or prefix.

`{,adam_m.,adam_v.}blocks.{0-30}.dense{1-3}.weight` means 279 names. A pattern is exact: each of
its combinations is one of the names.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import NamedTuple, Union

from reshard.text.names import state_prefix
from reshard.text.wording import one_line, plural, stepped_ranges

# Only numbers in the form of str(int): a range determines their text.
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")


class NamePattern(NamedTuple):
    """A pattern, and the number of names that it matches."""

    text: str
    size: int


def name_patterns(names: Iterable[str], parameters: Container[str] = ()) -> list[NamePattern]:
    """Patterns that together match each of the names once, sorted by text.

    Args:
        names: the names, each once.
        parameters: all parameters; a prefix and a dot before one of them marks its optimizer state.
    """
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in names:
        prefix = name[: name.find(".") + 1]
        if name[len(prefix) :] not in parameters:
            prefix = state_prefix(name, parameters)
        parts = _NUMBER.split(name[len(prefix) :])
        alike.setdefault(tuple(parts[::2]), []).append((*parts[1::2], prefix))
    sortable = []
    for texts, rows in alike.items():
        for *numbers, prefixes in _merged(rows):
            count = len(prefixes)
            text = texts[0]
            for values, after in zip(numbers, texts[1:]):
                count *= len(values)
                ranges = stepped_ranges(map(int, values), most=len(values))
                text += (ranges if len(values) == 1 else f"{{{ranges}}}") + after
            state = ",".join(sorted(prefixes))
            sortable.append(
                ((text, state), NamePattern((state if len(prefixes) == 1 else f"{{{state}}}") + text, count))
            )
    return [pattern for _, pattern in sorted(sortable)]


def _merged(rows: list[tuple[str, ...]]) -> list[tuple[frozenset[str], ...]]:
    """Rows as products of sets: for each column, rows that are equal in all others are merged."""
    products: list[tuple[Union[str, frozenset[str]], ...]] = [*rows]
    for place in range(len(rows[0])):
        values: dict[tuple[Union[str, frozenset[str]], ...], list[str]] = {}
        for row in products:
            value = row[place]
            assert isinstance(value, str)
            values.setdefault((*row[:place], *row[place + 1 :]), []).append(value)
        products = [(*remaining[:place], frozenset(merged), *remaining[place:]) for remaining, merged in values.items()]
    return products  # type: ignore[return-value]


def pattern_lines(names: Iterable[str], parameters: Container[str], most: int) -> list[str]:
    """Up to ``most`` patterns with their counts, a line each, then the number of omitted names."""
    patterns = name_patterns(names, parameters)
    width = max((len(str(pattern.size)) for pattern in patterns), default=0)
    lines = [f"{pattern.size:>{width}}  {one_line(pattern.text)}" for pattern in patterns[:most]]
    omitted = sum(pattern.size for pattern in patterns[most:])
    return [*lines, f"... and {plural(omitted, 'more name')}"] if omitted else lines
