"""Patterns of names in rules, with numbers and stars: ``model.layers.{layer}.mlp.down_proj.weight``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.text.products import ExpressionError, Product, product

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
    """A number in a pattern: its name, such as ``layer``, empty for a size; the product to add to it, if any."""

    number: str
    offset: Product | None


class Fit(NamedTuple):
    """A name that matches a pattern: the values of its numbers, and the text of each star."""

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
    def numbers(self) -> tuple[str, ...]:
        """The names of its numbers, in order."""
        return tuple(part.number for part in self.parts if isinstance(part, NumberPlace) and part.number)

    @property
    def sizes(self) -> set[str]:
        places = [part for part in self.parts if isinstance(part, NumberPlace)]
        return {name for place in places if place.offset is not None for name in place.offset.names}

    @property
    def stars(self) -> int:
        return self.parts.count(None)


def pattern(text: str) -> Pattern:
    """Read a pattern.

    ``{layer}`` is a number, ``{mtp+layers}`` a number plus a size, ``{=layers}`` a size, ``*`` any text.
    """
    if not text:
        raise PatternError("a name is empty")
    parts: list[object] = []
    for index, part in enumerate(_PARTS.split(text)):
        if index % 2:
            parts.append(None if part == _ANY else _place(part[1:-1], text))
        elif "{" in part or "}" in part:
            raise PatternError(f"{text!r} has an unmatched brace")
        elif part:
            parts.append(part)
    for before, after in itertools.pairwise(parts):
        if not isinstance(before, str) and not isinstance(after, str):
            raise PatternError(f"{text!r}: two numbers or stars need a text between them")
        if (isinstance(after, NumberPlace) and isinstance(before, str) and before[-1] in "0123456789") or (
            isinstance(before, NumberPlace) and isinstance(after, str) and after[0] in "0123456789"
        ):
            raise PatternError(f"{text!r}: a number must not be next to a digit")
    read = Pattern(text, tuple(parts))
    for number in read.numbers:
        if read.numbers.count(number) > 1:
            raise PatternError(f"{text!r} has {{{number}}} twice")
    return read


def _place(text: str, pattern_text: str) -> NumberPlace:
    name, mark, offset = ("", *text.partition("=")[1:]) if text.startswith("=") else text.partition("+")
    if mark != "=" and not _NAME.fullmatch(name):
        raise PatternError(f"{pattern_text!r}: {{{text}}} is not a number such as {{layer}}")
    try:
        return NumberPlace(name, product(offset) if mark else None)
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
        stars = ("(.*?)", "(.*)") if pattern.stars else ("",)
        self._expressions = [
            re.compile(
                "".join(
                    star if part is None else re.escape(part) if isinstance(part, str) else _WHOLE_NUMBER
                    for part in self._parts
                ),
                re.DOTALL,
            )
            for star in stars
        ]
        self.skeleton: str | None = None
        if not pattern.stars:
            texts = (_DIGITS.sub(_SOME, part) if isinstance(part, str) else _SOME for part in self._parts)
            self.skeleton = "".join(texts)

    def name(self, values: Mapping[str, int], stars: Sequence[str]) -> str:
        remaining = iter(stars)
        texts = []
        for part in self._parts:
            if part is None:
                texts.append(next(remaining))
            else:
                texts.append(str(values[part[0]] + part[1]) if isinstance(part, tuple) else str(part))
        return "".join(texts)

    def fits(self, name: str) -> list[Fit]:
        """The matches of a name: none, one, or two of several."""
        matches = [match for match in (each.fullmatch(name) for each in self._expressions) if match is not None]
        texts = dict.fromkeys(match.groups() for match in matches)
        return [fit for fit in map(self._fit, texts) if fit is not None]

    def _fit(self, texts: Sequence[str]) -> Fit | None:
        """The numbers and stars with these texts; None for a number that no name has."""
        values, stars = {}, []
        for part, text in zip((part for part in self._parts if not isinstance(part, str)), texts):
            if not isinstance(part, tuple):
                stars.append(text)
                continue
            number, offset = part
            if not _CANONICAL.fullmatch(text) or int(text) < offset:
                return None
            values[number] = int(text) - offset
        return Fit(values, tuple(stars))


class PatternIndex:
    """A fast search for the patterns that a name matches."""

    def __init__(self, patterns: Iterable[SizedPattern]) -> None:
        self._by_skeleton: dict[str | None, list[tuple[int, SizedPattern]]] = {}
        for number, each in enumerate(patterns):
            self._by_skeleton.setdefault(each.skeleton, []).append((number, each))

    def fits(self, name: str) -> list[tuple[int, Fit]]:
        """The indices of matching patterns, with the fit; an index comes twice if several fits exist."""
        skeleton = _DIGITS.sub(_SOME, name)
        # Patterns with stars have no skeleton.
        candidates = [*self._by_skeleton.get(skeleton, ()), *self._by_skeleton.get(None, ())]
        return [(number, fit) for number, each in candidates for fit in each.fits(name)]
