"""Patterns as in a shell, matched in linear time for any pattern and text; ``--include`` and ``--exclude``.

``*`` is any text, ``?`` one character, ``[a-c]`` one of a set, ``[!a-c]`` or ``[^a-c]`` one outside it. A
regular expression with many stars may take exponential time; here the pieces between stars are searched one after
the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

from reshard.named_tuple import NamedTuple

# Without the guards, `*{number}` would match only the 2 of x12.
_NUMBER = r"(?<![0-9])([0-9]+)(?![0-9])"


def pattern_of(text: str) -> str:
    """The pattern that matches only this text."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in text)


def expression_of(pattern: str) -> str:
    """The regular expression of a pattern without stars."""
    (piece,) = _pieces(pattern, "")
    return piece.expression


class _Piece(NamedTuple):
    """The part between two stars: its characters if literal, and its expression."""

    literal: Optional[str]
    expression: str


class Glob:
    """One pattern.

    Args:
        pattern: the pattern.
        number: a placeholder for a whole number; none if empty.

    Attributes:
        pattern: the pattern.
        head: its characters before the first wildcard.
        literal: whether it has no wildcard.
    """

    def __init__(self, pattern: str, number: str = "") -> None:
        self.pattern = pattern
        self._pieces = _pieces(pattern, number)
        first = self._pieces[0]
        self.literal = len(self._pieces) == 1 and first.literal is not None
        wild = re.search(r"[*?\[]", pattern)
        self.head = pattern if self.literal else pattern[: wild.start()] if wild is not None else ""
        self._expressions = [re.compile(piece.expression, re.DOTALL) for piece in self._pieces]
        self._last = re.compile(f"(?:{self._pieces[-1].expression})\\Z", re.DOTALL)

    def matches(self, text: str) -> bool:
        """Whether the whole text fits."""
        first, last = self._pieces[0], self._pieces[-1]
        if len(self._pieces) == 1:
            return text == first.literal if first.literal is not None else self._last.match(text) is not None
        # Most patterns have literal ends, which are fast to compare.
        if last.literal is not None and not text.endswith(last.literal):
            return False
        if first.literal is not None and not text.startswith(first.literal):
            return False
        return self.numbers(text) is not None

    def numbers(self, text: str) -> Optional[list[tuple[int, int]]]:
        """The positions of the numbers in a text, in order; None if it does not match.

        Stars are greedy, the first one first.
        """
        first = self._expressions[0].match(text)
        if first is None:
            return None
        if len(self._expressions) == 1:
            return _groups(first) if first.end() == len(text) else None
        last_match = self._last.search(text, first.end())
        if last_match is None:
            return None
        matches = [last_match]
        for piece, expression in zip(self._pieces[-2:0:-1], self._expressions[-2:0:-1]):
            # Pieces as far right as possible leave most text for the stars before them.
            before = _rightmost(piece, expression, text, first.end(), matches[-1].start())
            if before is None:
                return None
            matches.append(before)
        return [span for match in (first, *reversed(matches)) for span in _groups(match)]


class Globs:
    """Several patterns, of which a text may match any; an index by their heads skips most.

    Args:
        patterns: the patterns.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._literals: set[str] = set()
        self._by_head: dict[str, list[Glob]] = {}
        for pattern in dict.fromkeys(patterns):
            glob = Glob(pattern)
            if glob.literal:
                self._literals.add(glob.head)
            else:
                self._by_head.setdefault(glob.head, []).append(glob)
        self._lengths = sorted({len(head) for head in self._by_head})

    def match(self, text: str) -> bool:
        """Whether the whole text fits one of them."""
        return next(self.matching(text), None) is not None

    def matching(self, text: str) -> Iterator[str]:
        """The patterns that the whole text fits."""
        if text in self._literals:
            yield text
        for length in self._lengths:
            if length > len(text):
                return
            yield from (glob.pattern for glob in self._by_head.get(text[:length], ()) if glob.matches(text))


class Filters:
    """Patterns that select the parameters to write; they never decide the step.

    Args:
        include: of the written parameters; empty for all.
        exclude: of skipped parameters; exclusion wins.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self.include = include
        self.exclude = exclude
        self._included = Globs(include)
        self._excluded = Globs(exclude)

    def admit(self, name: str) -> bool:
        """Whether a parameter of this name is written."""
        if self.exclude and self._excluded.match(name):
            return False
        return not self.include or self._included.match(name)


def _groups(match: re.Match[str]) -> list[tuple[int, int]]:
    return [match.span(group + 1) for group in range(match.re.groups)]


def _rightmost(piece: _Piece, expression: re.Pattern[str], text: str, start: int, stop: int) -> Optional[re.Match[str]]:
    """The last match of a piece between two positions."""
    if piece.literal is not None:
        at = text.rfind(piece.literal, start, stop)
        return expression.match(text, at) if at >= 0 else None
    for at in range(stop, start - 1, -1):
        match = expression.match(text, at)
        if match is not None and match.end() <= stop:
            return match
    return None


def _pieces(pattern: str, number: str) -> list[_Piece]:
    """The pieces between the stars; several stars side by side are one."""
    pieces: list[list[tuple[Optional[str], str]]] = [[]]
    position = 0
    while position < len(pattern):
        if number and pattern.startswith(number, position):
            pieces[-1].append((None, _NUMBER))
            position += len(number)
            continue
        character = pattern[position]
        position += 1
        # A closing bracket right after the opening one belongs to the set.
        first = position + (pattern[position : position + 1] in ("!", "^"))
        closing = pattern.find("]", first + 1) if character == "[" else -1
        if character == "*":
            if pieces[-1] or len(pieces) == 1:
                pieces.append([])
        elif character == "?":
            pieces[-1].append((None, "."))
        elif closing > 0:
            pieces[-1].append((None, _set(pattern[position:closing])))
            position = closing + 1
        else:
            pieces[-1].append((character, re.escape(character)))
    return [
        _Piece(
            None if any(literal is None for literal, _ in piece) else "".join(literal or "" for literal, _ in piece),
            "".join(expression for _, expression in piece),
        )
        for piece in pieces
    ]


def _set(inside: str) -> str:
    """The regular expression of a bracket expression."""
    negated = inside[0] in "!^"
    members = []
    position = int(negated)
    while position < len(inside):
        first, last = inside[position], inside[position]
        if inside[position + 1 : position + 2] == "-" and position + 2 < len(inside):
            last = inside[position + 2]
            position += 2
        position += 1
        # A range such as z-a is empty, as in a shell.
        if first <= last:
            members.append(f"{re.escape(first)}-{re.escape(last)}")
    if not members:
        return "." if negated else "(?!)"
    return f"[{'^' if negated else ''}{''.join(members)}]"
