"""Reading the short form of many numbers."""

from __future__ import annotations

import re


def numbers_named(text: str) -> set[int]:
    """The numbers that `stepped_ranges` put into words, read as a person would."""
    actual: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?(?:\.\.(\d+)-(\d+))?(?: step (\d+))?", part)
        assert match is not None, part
        first, last, start, stop, step = (None if number is None else int(number) for number in match.groups())
        assert first is not None
        if start is not None:
            assert last is not None and stop is not None and step is not None
            assert stop - start == last - first
            for at in range(first, start + 1, step):
                actual.update(range(at, at + last - first + 1))
        else:
            actual.update(range(first, (first if last is None else last) + 1, step or 1))
    return actual
