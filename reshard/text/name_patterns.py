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
    """Names written as one, and how many they are."""

    text: str
    size: int


def name_patterns(names: Iterable[str], known: Container[str] = ()) -> list[NamePattern]:
    """Patterns that together match each of the names once, sorted by text.

    Args:
        names: the names, each once.
        known: all parameters; a prefix and a dot before one of them marks its optimizer state.
    """
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in names:
        prefix = name[: name.find(".") + 1]
        if name[len(prefix) :] not in known:
            prefix = state_prefix(name, known)
        parts = _NUMBER.split(name[len(prefix) :])
        alike.setdefault(tuple(parts[::2]), []).append((*parts[1::2], prefix))
    found = []
    for texts, rows in alike.items():
        for *numbers, prefixes in _merged(rows):
            count = len(prefixes)
            text = texts[0]
            for values, after in zip(numbers, texts[1:]):
                count *= len(values)
                said = stepped_ranges(map(int, values), most=len(values))
                text += (said if len(values) == 1 else f"{{{said}}}") + after
            state = ",".join(sorted(prefixes))
            found.append(((text, state), NamePattern((state if len(prefixes) == 1 else f"{{{state}}}") + text, count)))
    return [pattern for _, pattern in sorted(found)]


def _merged(rows: list[tuple[str, ...]]) -> list[tuple[frozenset[str], ...]]:
    """Rows as products of sets: place by place, rows that are equal elsewhere are merged."""
    found: list[tuple[Union[str, frozenset[str]], ...]] = [*rows]
    for place in range(len(rows[0])):
        values: dict[tuple[Union[str, frozenset[str]], ...], list[str]] = {}
        for row in found:
            value = row[place]
            assert isinstance(value, str)
            values.setdefault((*row[:place], *row[place + 1 :]), []).append(value)
        found = [(*rest[:place], frozenset(here), *rest[place:]) for rest, here in values.items()]
    return found  # type: ignore[return-value]


def pattern_lines(names: Iterable[str], known: Container[str], most: int) -> list[str]:
    """The patterns with their counts, a line each; how many names are left out after ``most``."""
    found = name_patterns(names, known)
    width = max((len(str(pattern.size)) for pattern in found), default=0)
    lines = [f"{pattern.size:>{width}}  {one_line(pattern.text)}" for pattern in found[:most]]
    left = sum(pattern.size for pattern in found[most:])
    return [*lines, f"... and {plural(left, 'more name')}"] if left else lines
