"""Natural order of names and files: numbers in them are compared as numbers, layer 10 after layer 9."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PIECES = re.compile(r"[0-9]+|[^0-9]+")
# Longer digits are not the number of a layer, and are slow to convert.
_MAX_DIGITS = 18
# Replaces a number; other pieces of a name contain no digit.
_NUMBER = "0"


def natural_order(names: Iterable[str]) -> list[str]:
    """Names in natural order: ``part10`` after ``part9``."""
    return sorted(names, key=lambda name: (_natural_key(name), name))


def _natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(piece), "") if _is_number(piece) else (1, 0, piece) for piece in _PIECES.findall(text))


def layers_in_order(names: Iterable[str]) -> list[str]:
    """Names in their original order, but with numbers ascending where names agree up to a number.

    Files hold names in any order, such as layer 10 before layer 2, or a few tensors of every layer. The result has
    the names of a layer together, at the place of the first layer, in their original order.

    Args:
        names: each once.
    """
    # Per prefix of several names the number of the first name with it.
    first: dict[str, int] = {}

    def key(name: str, number: int) -> tuple[int, ...]:
        numbers: list[int] = []
        for match in _PIECES.finditer(name):
            piece, end = match[0], match.end()
            if _is_number(piece):
                # All numbers at a place count as one continuation; 01 comes after 1.
                numbers += first.setdefault(name[: match.start()] + _NUMBER, number), int(piece), len(piece)
            elif end < len(name):
                numbers.append(first.setdefault(name[:end], number))
            else:
                numbers.append(number)
        return tuple(numbers)

    keys = {name: key(name, number) for number, name in enumerate(names)}
    return sorted(keys, key=keys.__getitem__)


def _is_number(piece: str) -> bool:
    return piece[0] in "0123456789" and len(piece) <= _MAX_DIGITS
