"""Matches of a checkpoint's names with rules: the rule, the side, and the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.names.model import NameRule, Number
from reshard.names.pattern import Fit, Pattern, PatternIndex, SizedPattern
from reshard.names.sizes import ModelSizes


class InstanceKey(NamedTuple):
    """Names that one rule converts together.

    Attributes:
        rule: number of the rule.
        prefix: the prefix of all its names, for optimizer state.
        values: of the numbers of both sides, in the order of `SidedRule.free`.
        stars: the texts that stars match.
    """

    rule: int
    prefix: str
    values: tuple[int, ...]
    stars: tuple[str, ...]


class NameMatch(NamedTuple):
    """A name that matches a rule.

    Attributes:
        key: the names converted together with it.
        column: the index of the matching name in the rule.
        value: of the stacked number; 0 without one.
    """

    key: InstanceKey
    column: int
    value: int


@dataclass(frozen=True)
class SidedRule:
    """A rule in one direction.

    Attributes:
        rule: the rule.
        sources: the names of operands.
        targets: the names of results.
        free: the numbers of both, in the order of the first name.
        stacked: the number that only sources have.
        unstacked: the number that only targets have.
    """

    rule: NameRule
    sources: tuple[SizedPattern, ...]
    targets: tuple[SizedPattern, ...]
    free: tuple[str, ...]
    stacked: Optional[str]
    unstacked: Optional[str]


@dataclass
class Side:
    """The side of a table that a checkpoint is on.

    Args:
        rules: the applicable rules.
        numbers: the numbers in names.
        sizes: of the model.
        reverse: whether this is the right side.
    """

    rules: Sequence[NameRule]
    numbers: Sequence[Number]
    sizes: ModelSizes
    reverse: bool
    sided: list[SidedRule] = field(init=False)
    counts: dict[str, Optional[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = {number.name: self.sizes.value_if_known(number.count) for number in self.numbers}
        self.sided = [self._sided(rule) for rule in self.rules]
        self._places = [
            (number, column) for number, each in enumerate(self.sided) for column in range(len(each.sources))
        ]
        self._index = PatternIndex(pattern for each in self.sided for pattern in each.sources)
        # Cache: the choice of the side and its use match the same names.
        self._matches: dict[str, list[NameMatch]] = {}

    def matches(self, name: str, prefix: str = "") -> list[NameMatch]:
        """The matches of a name: none, one, or several."""
        matches = self._matches.get(name)
        if matches is None:
            fits = self._index.fits(name)
            matches = [self._match(number, fit) for number, fit in fits if self._out_of_range(fit) is None]
            self._matches[name] = matches
        if not prefix:
            return matches
        return [match._replace(key=match.key._replace(prefix=prefix)) for match in matches]

    def beyond(self, name: str) -> Optional[str]:
        """The number in a name that is too large for the model; None if the name does not match at all."""
        for _, fit in self._index.fits(name):
            number = self._out_of_range(fit)
            if number is not None:
                return number
        return None

    def patterns(self) -> list[str]:
        """The names of all rules."""
        return list(dict.fromkeys(each.pattern.text for sided in self.sided for each in sided.sources))

    def _out_of_range(self, fit: Fit) -> Optional[str]:
        for number, value in fit.values.items():
            count = self.counts.get(number)
            if count is not None and value >= count:
                return number
        return None

    def _match(self, number: int, fit: Fit) -> NameMatch:
        rule, column = self._places[number]
        sided = self.sided[rule]
        values = tuple(fit.values[name] for name in sided.free)
        value = fit.values[sided.stacked] if sided.stacked is not None else 0
        return NameMatch(InstanceKey(rule, "", values, fit.stars), column, value)

    def _sided(self, rule: NameRule) -> SidedRule:
        sources, targets = rule.side(self.reverse), rule.side(not self.reverse)
        mine = sources[0].numbers if sources else frozenset()
        theirs = targets[0].numbers if targets else frozenset()
        places = sources[0].places if sources else ()
        free = tuple(place.number for place in places if place.number in theirs or not targets)
        stacked = next(iter(mine - theirs), None) if targets else None
        unstacked = next(iter(theirs - mine), None) if sources else None
        return SidedRule(rule, self._sized(sources), self._sized(targets), free, stacked, unstacked)

    def _sized(self, patterns: Iterable[Pattern]) -> tuple[SizedPattern, ...]:
        return tuple(SizedPattern(pattern, self.sizes.value) for pattern in patterns)
