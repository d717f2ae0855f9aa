"""Names of a checkpoint matched with the names of rules: the rule, the side, and the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.names.model import NameRule, Number
from reshard.names.pattern import Fit, Pattern, PatternIndex, SizedPattern
from reshard.names.sizes import ModelSizes


class InstanceKey(NamedTuple):
    """The names that are converted together.

    Attributes:
        rule: number of the rule.
        prefix: the prefix of all its names, for optimizer state.
        values: of the numbers that both sides have, in the order of `SidedRule.free`.
        stars: the texts that stars match.
    """

    rule: int
    prefix: str
    values: tuple[int, ...]
    stars: tuple[str, ...]


class NameMatch(NamedTuple):
    """A name that matches a rule.

    Attributes:
        key: the names that it is converted with.
        column: the index of the rule's name that it matches.
        value: of the number that is stacked; 0 where none is.
    """

    key: InstanceKey
    column: int
    value: int


@dataclass(frozen=True)
class SidedRule:
    """A rule read from one of its sides.

    Attributes:
        rule: the rule.
        sources: the names that it reads.
        targets: the names that it makes.
        free: the numbers that both have, in the order of the first name.
        stacked: the number that sources alone have.
        unstacked: the number that targets alone have.
    """

    rule: NameRule
    sources: tuple[SizedPattern, ...]
    targets: tuple[SizedPattern, ...]
    free: tuple[str, ...]
    stacked: Optional[str]
    unstacked: Optional[str]


@dataclass
class Side:
    """One side of a table, as the side that a checkpoint has.

    Args:
        rules: the rules that apply.
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
        # Cache: names are matched when the side is chosen, and again when it is used.
        self._asked: dict[str, list[NameMatch]] = {}

    def matches(self, name: str, prefix: str = "") -> list[NameMatch]:
        """The ways in which a name matches: none, one, or several."""
        matches = self._asked.get(name)
        if matches is None:
            fits = self._index.fits(name)
            matches = [self._match(number, fit) for number, fit in fits if self._out_of_range(fit) is None]
            self._asked[name] = matches
        if not prefix:
            return matches
        return [match._replace(key=match.key._replace(prefix=prefix)) for match in matches]

    def beyond(self, name: str) -> Optional[str]:
        """The number in a name that is too large for the model, if the name matches otherwise."""
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


@dataclass
class Instance:
    """The names of a rule for some values of its numbers.

    Attributes:
        names: per column and value of the number that is stacked, the name.
    """

    names: dict[tuple[int, int], str] = field(default_factory=dict)

    def count(self) -> int:
        """The number of values of the stacked number, from its largest value."""
        return max(value for _, value in self.names) + 1


Instances = Mapping[InstanceKey, Instance]
