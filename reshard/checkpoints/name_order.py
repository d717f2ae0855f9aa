"""The order of names and of files, with the numbers in them taken as numbers: layer 10 after layer 9."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PIECES = re.compile(r"[0-9]+|[^0-9]+")
# A longer one is no number of a layer, and would take long to convert.
_MOST_DIGITS = 18

Key = tuple[tuple[int, int, str], ...]


def natural_order(names: Iterable[str]) -> list[str]:
    """Names sorted so that ``part10`` comes after ``part9``."""
    return sorted(names, key=lambda name: (_natural_key(name), name))


def _natural_key(text: str) -> Key:
    return tuple((0, int(piece), "") if _is_number(piece) else (1, 0, piece) for piece in _PIECES.findall(text))


def layers_in_order(names: Iterable[str]) -> list[str]:
    """Names in the order given, but numbers ascending wherever names agree up to a number.

    Files hold names in any order, such as layer 10 before layer 2, or a few tensors of every layer. What
    belongs to a layer comes out together, where the first of all layers stood, in the order in which it was given.

    Args:
        names: each once.
    """
    # Per beginning of names: where its continuations first came. Numbers count as one continuation.
    places: dict[tuple[int, str], int] = {}

    def key(name: str) -> Key:
        found = []
        place = 0
        for piece in _PIECES.findall(name):
            number = _is_number(piece)
            first = places.setdefault((place, "" if number else piece), len(places) + 1)
            found.append((first, int(piece) if number else 0, piece if number else ""))
            place = places.setdefault((first, piece), len(places) + 1) if number else first
        return tuple(found)

    return sorted(names, key=key)


def _is_number(piece: str) -> bool:
    return piece[0] in "0123456789" and len(piece) <= _MOST_DIGITS
