r"""Keys of alpha_pattern and rank_pattern, with PEFT's matches, but in bounded time.

PEFT uses the first key for which ``re.match(rf"(.*\.)?({key})$", module)`` succeeds. Python's `re` backtracks: some
keys take exponential time. Here all possible matches advance together, one character of the name at a time.
"""

from __future__ import annotations

import re
import string
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Optional, Union

from reshard.text.wording import quoted

MAX_KEY_LENGTH = 1000
"""Characters of a key."""
MAX_STATES = 5000
"""States of a key's automaton; a counted repetition copies its states."""
MAX_DEPTH = 30
"""Depth of nested groups."""
MAX_STEPS = 20_000_000
"""Visited states of all keys and modules: some seconds."""

# Without these characters `re` does not backtrack.
_BRANCHING = frozenset("*+?{[(|\\")
# Characters that `re` compares in the time of one step.
_CHARACTERS_PER_STEP = 1024
_COUNTED = re.compile(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}")
_ESCAPES = frozenset(string.punctuation + " dDwWsS")
_SUPPORTED = (
    r"supported are characters, '.', '[a-z]', '\d', '\w', '\s', '^', '$', '|', '(...)', '(?:...)', '*', '+', '?' and "
    "'{2,3}'"
)

_ONE, _BEGIN, _END, _SPLIT, _MATCH = range(5)
_Test = Union[str, "re.Pattern[str]"]


class KeyPatternError(ValueError):
    """A key is not a regular expression, or not a supported one."""


class _Node(NamedTuple):
    """A part of an expression.

    Attributes:
        kind: ``_ONE`` character, ``_BEGIN`` or ``_END`` of the name, ``_SPLIT`` into alternatives, or ``_MATCH`` for a
            sequence, which may be repeated.
        test: a character, or an expression for one.
        parts: of alternatives and sequences.
        least: minimum number of repetitions.
        most: maximum number; None for any number.
    """

    kind: int
    test: _Test = ""
    parts: tuple[_Node, ...] = ()
    least: int = 1
    most: Optional[int] = 1


class _State(NamedTuple):
    """A state of an automaton: the kind of a node, the test of one character, and the states that follow."""

    kind: int
    test: _Test
    following: tuple[int, ...]


class KeyPattern:
    """One key.

    Args:
        key: the text in the configuration.

    Raises:
        KeyPatternError: it is not a supported regular expression.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        if len(key) > MAX_KEY_LENGTH:
            raise KeyPatternError(f"{quoted(key)} is longer than {MAX_KEY_LENGTH} characters")
        # The expression of PEFT, so that unbalanced parentheses have the same effect.
        text = rf"(.*\.)?({key})$"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled = re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise KeyPatternError(
                f"{quoted(key)} is not a regular expression: {getattr(error, 'msg', error)}"
            ) from error
        self._plain = None if _BRANCHING & set(key) else compiled
        self._states = [_State(_MATCH, "", ())]
        self._built = 0
        self._first = 0 if self._plain is not None else self._build(_Parser(key, text).parse(), 0)

    def matches(self, module: str) -> tuple[bool, int]:
        """Whether a module's name matches, and the number of steps."""
        if self._plain is not None:
            return self._plain.match(module) is not None, 1 + len(module) * len(self.key) // _CHARACTERS_PER_STEP
        states = self._reached([self._first], module, 0)
        steps = len(states)
        for place, character in enumerate(module):
            if 0 in states or not states:
                break
            reached: list[int] = []
            for number in states:
                kind, test, following = self._states[number]
                if kind == _ONE and (test == character if isinstance(test, str) else test.match(character)):
                    reached += following
            states = self._reached(reached, module, place + 1)
            steps += len(states)
        return 0 in states, steps

    def _reached(self, numbers: list[int], text: str, place: int) -> set[int]:
        """The states reachable without another character."""
        reached: set[int] = set()
        while numbers:
            number = numbers.pop()
            if number in reached:
                continue
            reached.add(number)
            kind, _, following = self._states[number]
            at_end = place >= len(text) - 1 and text[place:] in ("", "\n")
            if kind == _SPLIT or (kind == _BEGIN and not place) or (kind == _END and at_end):
                numbers += following
        return reached

    def _add(self, kind: int, test: _Test, following: tuple[int, ...]) -> int:
        self._states.append(_State(kind, test, following))
        return len(self._states) - 1

    def _build(self, node: _Node, following: int) -> int:
        """Add the states of a node before another state; returns the first."""
        first = following
        if node.most is None:
            first = self._add(_SPLIT, "", ())
            self._states[first] = _State(_SPLIT, "", (self._build_once(node, first), following))
        else:
            for _ in range(node.most - node.least):
                first = self._add(_SPLIT, "", (self._build_once(node, first), following))
        for _ in range(node.least):
            first = self._build_once(node, first)
        return first

    def _build_once(self, node: _Node, following: int) -> int:
        # Counted by node, since an empty group adds no states however often it is repeated.
        self._built += 1
        if self._built > MAX_STATES:
            raise KeyPatternError(f"{quoted(self.key)} repeats too much")
        if node.kind == _MATCH:
            for part in reversed(node.parts):
                following = self._build(part, following)
            return following
        if node.kind == _SPLIT:
            return self._add(_SPLIT, "", tuple(self._build(part, following) for part in node.parts))
        return self._add(node.kind, node.test, (following,))


class _Parser:
    """Reads an expression that Python's `re` accepts.

    Args:
        key: for messages.
        text: the expression.
    """

    def __init__(self, key: str, text: str) -> None:
        self._key = key
        self._text = text
        self._place = 0
        self._depth = 0

    def parse(self) -> _Node:
        """The expression up to the end of the text or group."""
        alternatives = [self._sequence()]
        while self._next("|"):
            alternatives.append(self._sequence())
        return alternatives[0] if len(alternatives) == 1 else _Node(_SPLIT, parts=tuple(alternatives))

    def _sequence(self) -> _Node:
        parts = []
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            parts.append(self._repeated(self._one()))
        return _Node(_MATCH, parts=tuple(parts))

    def _next(self, text: str) -> bool:
        """Skip this text if it comes next; returns whether it did."""
        is_next = self._text.startswith(text, self._place)
        self._place += len(text) if is_next else 0
        return is_next

    def _one(self) -> _Node:
        if self._next("("):
            self._depth += 1
            if self._depth > MAX_DEPTH or (self._next("?") and not self._next(":")):
                raise self._unsupported()
            inner = self.parse()
            self._place += 1
            self._depth -= 1
            return inner
        character = self._text[self._place]
        if character == "\\":
            if self._text[self._place + 1] not in _ESCAPES:
                raise self._unsupported()
            return self._test(self._text[self._place : self._place + 2])
        if character in ".[":
            # A closing bracket at the beginning is a member of the class.
            end = re.compile(r"\.|\[\^?\]?(?:[^]\\]|\\.)*\]", re.DOTALL).match(self._text, self._place)
            assert end is not None
            return self._test(end[0])
        self._place += 1
        return _Node({"^": _BEGIN, "$": _END}.get(character, _ONE), character)

    def _test(self, text: str) -> _Node:
        """A class of characters, tested by `re`."""
        self._place += len(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Node(_ONE, re.compile(text))

    def _repeated(self, node: _Node) -> _Node:
        """A node with its repetition."""
        counts: tuple[int, Optional[int]]
        counted = _COUNTED.match(self._text, self._place)
        if counted is not None:
            self._place = counted.end()
            least, comma, most = counted.groups()
            counts = int(least or 0), int(most) if most else (None if comma else int(least))
        else:
            sign = next((sign for sign in "*+?" if self._next(sign)), None)
            if sign is None:
                return node
            counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        # Lazy repetitions match the same names as greedy ones.
        self._next("?")
        if self._next("+"):
            raise self._unsupported()
        return _Node(_MATCH, parts=(node,), least=counts[0], most=counts[1])

    def _unsupported(self) -> KeyPatternError:
        return KeyPatternError(f"{quoted(self._key)}: merge-lora does not support this expression; {_SUPPORTED}")


class KeyPatterns:
    """The values of alpha_pattern or rank_pattern.

    Args:
        values: by key, in the order of the file.

    Raises:
        KeyPatternError: a key cannot be used.
    """

    def __init__(self, values: Optional[Mapping[str, float]] = None) -> None:
        self._values = dict(values or {})
        self._patterns = [KeyPattern(key) for key in self._values]
        self._steps = 0
        self._keys: dict[str, Optional[str]] = {}

    def value(self, module: str) -> Optional[float]:
        """The value of the first key that matches a module; None without a match.

        Raises:
            KeyPatternError: matching takes too long.
        """
        if module not in self._keys:
            # If no expression matches, PEFT looks up the name itself.
            own_key = module if module in self._values else None
            self._keys[module] = next(
                (pattern.key for pattern in self._patterns if self._fits(pattern, module)), own_key
            )
        key = self._keys[module]
        return None if key is None else self._values[key]

    def unused(self, modules: Iterable[str]) -> list[str]:
        """The keys without a matching module.

        Raises:
            KeyPatternError: matching takes too long.
        """
        names = list(modules)
        for name in names:
            self.value(name)
        used = set(self._keys.values())
        return [
            each.key
            for each in self._patterns
            if each.key not in used and not any(self._fits(each, name) for name in names)
        ]

    def _fits(self, pattern: KeyPattern, module: str) -> bool:
        is_match, steps = pattern.matches(module)
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise KeyPatternError(f"{quoted(pattern.key)} and the other keys take too long to match: simplify them")
        return is_match
