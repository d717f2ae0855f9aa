"""Patterns of names in rules, with numbers and stars: ``model.layers.{layer}.mlp.down_proj.weight``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from reshard.names.sizes import product
from reshard.text.products import ExpressionError, Product

_PARTS = re.compile(r"(\*|\{[^{}]*\})")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_DIGITS = re.compile(r"[0-9]+")
_WHOLE_NUMBER = "(?<![0-9])([0-9]+)(?![0-9])"
_CANONICAL = re.compile(r"0|[1-9][0-9]{0,8}")
_ANY = "*"
# Replaces digits in the skeleton of a name, which all layers share.
_SOME = "\0"


class PatternError(ExpressionError):
    """A text is not a pattern of names."""


class NumberPlace(NamedTuple):
    """A number in a pattern.

    Attributes:
        number: its name, such as ``layer``; empty for a size.
        offset: the product to add to it, if any.
    """

    number: str
    offset: Optional[Product]


class Fit(NamedTuple):
    """The numbers and texts of a name that matches a pattern.

    Attributes:
        values: per number.
        stars: the text of each star.
    """

    values: dict[str, int]
    stars: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """Names that differ in numbers or, with stars, in any text.

    Attributes:
        text: in rules.
        parts: in the order of the text: characters, a `NumberPlace`, or None for a star.
    """

    text: str
    parts: tuple[object, ...]

    @property
    def places(self) -> tuple[NumberPlace, ...]:
        """Its numbers."""
        return tuple(part for part in self.parts if isinstance(part, NumberPlace) and part.number)

    @property
    def products(self) -> tuple[Product, ...]:
        """The sizes in it."""
        return tuple(part.offset for part in self.parts if isinstance(part, NumberPlace) and part.offset is not None)

    @property
    def numbers(self) -> frozenset[str]:
        """The names of its numbers."""
        return frozenset(place.number for place in self.places)

    @property
    def stars(self) -> int:
        """The number of its stars."""
        return sum(part is None for part in self.parts)


def pattern(text: str) -> Pattern:
    """Read a pattern.

    ``{layer}`` is a number, ``{mtp+layers}`` a number plus a size, ``{=layers}`` a size, ``*`` any text.

    Raises:
        PatternError: the text is not a pattern.
    """
    if not text:
        raise PatternError("a name is empty")
    parts: list[object] = []
    numbers: set[str] = set()
    for index, part in enumerate(_PARTS.split(text)):
        if index % 2 == 0:
            if "{" in part or "}" in part:
                raise PatternError(f"{text!r} has an unmatched brace")
            if part:
                parts.append(part)
        elif part == _ANY:
            parts.append(None)
        else:
            place = _place(part[1:-1], text)
            if place.number and place.number in numbers:
                raise PatternError(f"{text!r} has {{{place.number}}} twice")
            numbers.add(place.number)
            parts.append(place)
    for before, after in zip(parts, parts[1:]):
        if not isinstance(before, str) and not isinstance(after, str):
            raise PatternError(f"{text!r}: two numbers or stars need a text between them")
        if (isinstance(after, NumberPlace) and isinstance(before, str) and before[-1] in "0123456789") or (
            isinstance(before, NumberPlace) and isinstance(after, str) and after[0] in "0123456789"
        ):
            raise PatternError(f"{text!r}: a number must not be next to a digit")
    return Pattern(text, tuple(parts))


def _place(text: str, pattern_text: str) -> NumberPlace:
    if text.startswith("="):
        name, offset = "", text[1:]
    else:
        name, _, offset = text.partition("+")
    if not _NAME.fullmatch(name) and not text.startswith("="):
        raise PatternError(f"{pattern_text!r}: {{{text}}} is not a number such as {{layer}}")
    try:
        return NumberPlace(name, product(offset) if offset or "+" in text or not name else None)
    except ExpressionError as error:
        raise PatternError(f"{pattern_text!r}: {error}") from error


class SizedPattern:
    """A pattern with the values of its offsets.

    Args:
        pattern: the pattern.
        value: returns the value of a product of sizes; its errors pass.

    Attributes:
        skeleton: its text without digits; None with stars.
    """

    def __init__(self, pattern: Pattern, value: Callable[[Product], int]) -> None:
        self.pattern = pattern
        self._parts: list[object] = []
        for part in pattern.parts:
            if isinstance(part, NumberPlace):
                offset = 0 if part.offset is None else value(part.offset)
                self._parts.append((part.number, offset) if part.number else str(offset))
            else:
                self._parts.append(part)
        # Stars match as little as possible, first ones first, or as much: two matches if there are several.
        stars = ("(.*?)", "(.*)") if None in self._parts else ("",)
        self._expressions = [re.compile(_expression(self._parts, star), re.DOTALL) for star in stars]
        self.skeleton: Optional[str] = None
        if None not in self._parts:
            texts = (_SOME if isinstance(part, tuple) else _DIGITS.sub(_SOME, str(part)) for part in self._parts)
            self.skeleton = "".join(texts)

    def name(self, values: Mapping[str, int], stars: Sequence[str]) -> str:
        """The name with these numbers and texts."""
        texts, star = [], 0
        for part in self._parts:
            if part is None:
                texts.append(stars[star])
                star += 1
            elif isinstance(part, tuple):
                texts.append(str(values[part[0]] + part[1]))
            else:
                texts.append(str(part))
        return "".join(texts)

    def fits(self, name: str) -> list[Fit]:
        """The matches of a name: none, one, or two of several."""
        matches = [match for match in (each.fullmatch(name) for each in self._expressions) if match is not None]
        texts = dict.fromkeys(match.groups() for match in matches)
        return [fit for fit in map(self._fit, texts) if fit is not None]

    def _fit(self, texts: Sequence[str]) -> Optional[Fit]:
        """The numbers and stars with these texts; None for a number that no name has."""
        values, stars = {}, []
        for part, text in zip((part for part in self._parts if not isinstance(part, str)), texts):
            if isinstance(part, tuple):
                value = _number(text, part[1])
                if value is None:
                    return None
                values[part[0]] = value
            else:
                stars.append(text)
        return Fit(values, tuple(stars))


class PatternIndex:
    """A fast search for the patterns that a name matches.

    Args:
        patterns: the patterns.
    """

    def __init__(self, patterns: Iterable[SizedPattern]) -> None:
        self._by_skeleton: dict[str, list[tuple[int, SizedPattern]]] = {}
        self._starred: list[tuple[int, SizedPattern]] = []
        for number, each in enumerate(patterns):
            if each.skeleton is None:
                self._starred.append((number, each))
            else:
                self._by_skeleton.setdefault(each.skeleton, []).append((number, each))

    def fits(self, name: str) -> list[tuple[int, Fit]]:
        """The indices of matching patterns, with the fit; an index comes twice if several fits exist."""
        candidates = [*self._by_skeleton.get(_DIGITS.sub(_SOME, name), ()), *self._starred]
        return [(number, fit) for number, each in candidates for fit in each.fits(name)]


def _expression(parts: Iterable[object], star: str) -> str:
    return "".join(
        star if part is None else _WHOLE_NUMBER if isinstance(part, tuple) else re.escape(str(part)) for part in parts
    )


def _number(digits: str, offset: int) -> Optional[int]:
    if not _CANONICAL.fullmatch(digits):
        return None
    value = int(digits) - offset
    return value if value >= 0 else None
