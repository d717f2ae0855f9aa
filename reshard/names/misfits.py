"""Problems between a table and a checkpoint, reported all at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from reshard.errors import NamesError
from reshard.names.matching import Instances, Side, SidedRule
from reshard.text.messages import Message, block, joined, listing
from reshard.text.near_names import near_names
from reshard.text.wording import quoted

MOST_MISSING = 10000
"""Maximum number of missing names to count: a number in a name may be huge."""
_MOST_PATTERNS = 6


Stars = tuple[str, ...]
"""The texts that stars match."""


@dataclass
class Misfits:
    """All problems between a table and a checkpoint.

    Args:
        path: the table.
        side: the name of the checkpoint's side.
        reverse: whether it is the right side.
        patterns: the names of rules on this side.
        options: the values of the table's options.
        names: of the checkpoint.
    """

    path: str
    side: str
    reverse: bool
    patterns: Sequence[str]
    options: Mapping[str, str]
    names: Collection[str]
    unmatched: list[str] = field(default_factory=list)
    beyond: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    ambiguous: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    twice: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    unfit: dict[str, list[str]] = field(default_factory=dict)
    other_shapes: list[str] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=dict)

    @property
    def missing_enough(self) -> bool:
        """Whether the count of missing names reached its limit."""
        return len(self.missing) >= MOST_MISSING

    def note_unused(self, sided: SidedRule) -> None:
        """Note a rule that no name matches."""
        for source in sided.sources:
            self.unused[source.pattern.text] = near_names(source.pattern.text, self.names)

    def check(self) -> None:
        """Refuse the checkpoint if there is a problem.

        Raises:
            NamesError: lists all problems.
        """
        lines = [*self._unmatched(), *self._beyond(), *self._missing(), *map(Message, self.cases)]
        lines += self._by_patterns(self.ambiguous, "matches more than one rule", "match more than one rule")
        lines += self._by_patterns(self.twice, "would be made more than once", "would be made more than once")
        lines += [
            joined("", [problem, ": ", listing(names)] if len(names) > 1 else [problem, f": {quoted(names[0])}"])
            for problem, names in self.unfit.items()
        ]
        for pattern, near in self.unused.items():
            suggestion = f"; did you mean {quoted(near[0])}?" if near else ""
            number = re.search(r"\{.*?\}", pattern)
            digits = f"; {number.group()} matches digits only, * matches any text" if number else ""
            lines.append(Message(f"no name matches {quoted(pattern)}{suggestion}{digits}"))
        if self.other_shapes:
            lines.append("state of another shape than its weight cannot follow it: " + listing(self.other_shapes))
        if lines:
            headline = f"the rules {self.path} do not fit the checkpoint ({self.side}):"
            raise NamesError(block(headline, [joined("", ["  ", line]) for line in lines]), hint=self._hint())

    def _hint(self) -> Optional[str]:
        hints = []
        if self.options and (self.unmatched or self.missing):
            values = ", ".join(f"{name}={value}" for name, value in self.options.items())
            name, value = next(iter(self.options.items()))
            hints.append(
                f"the rules were applied with {values}; to state an option: --names {self.path},{name}={value}"
            )
        if self.unmatched:
            hints.append(self._dropping(self.unmatched[0]))
        return "\n".join(hints) or None

    def _dropping(self, name: str) -> str:
        """Advice on a rule that skips a tensor, and tensors whose names differ only in numbers.

        --include and --exclude match the new names, so they cannot skip it.
        """
        table = "the table" if "." in self.path else f"a copy of the table (reshard names show {self.path} > mine.toml)"
        side = "to" if self.reverse else "from"
        rule = f'[[rule]]\n    {side} = "{_numbers_replaced(name, "*")}"\n    do = "drop"'
        return f"to skip tensors that the model does not need, add a rule to {table}:\n    {rule}"

    def _unmatched(self) -> list[Message]:
        lines = []
        for names in _grouped(self.unmatched):
            candidates = near_names(_numbers_replaced(names[0], "{number}"), self.patterns)
            near = [name for name in candidates if name not in names]
            suggestion = f"; did you mean {quoted(near[0])}?" if near else ""
            lines.append("no rule matches " + listing(names) + suggestion)
        return lines

    def _beyond(self) -> list[Message]:
        groups: dict[tuple[str, int, str], list[str]] = {}
        for name, limit in self.beyond.items():
            groups.setdefault(limit, []).append(name)
        return [
            listing(names) + f": {number} must be less than {count}, by {source}"
            for (number, count, source), names in groups.items()
        ]

    def _missing(self) -> list[Message]:
        if not self.missing:
            return []
        more = " and perhaps more" if self.missing_enough else ""
        lines = []
        for names in _grouped(self.missing):
            near = near_names(names[0], self.unmatched)
            suggestion = f"; is it {quoted(near[0])}?" if near else ""
            lines.append("missing: " + listing(names) + more + suggestion)
        return lines

    @staticmethod
    def _by_patterns(reasons_by_name: dict[str, tuple[str, ...]], singular: str, plural: str) -> list[Message]:
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, patterns in reasons_by_name.items():
            groups.setdefault(patterns, []).append(name)
        return [
            listing(names) + f" {singular if len(names) == 1 else plural}: {', '.join(map(quoted, patterns))}"
            for patterns, names in groups.items()
        ]


def _grouped(names: Collection[str]) -> list[list[str]]:
    """Names in groups that differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(re.sub("[0-9]+", "0", name), []).append(name)
    return list(groups.values())


def _numbers_replaced(name: str, number: str) -> str:
    """A name with a text in place of each number."""
    return re.sub("(?<![a-z0-9])[0-9]+(?![a-z0-9])", number, name)


def check_complete(side: Side, instances: Instances, problems: Misfits, keeps_others: bool) -> None:
    """Note needed rules without any name; `_Application` notes rules with only some names.

    Args:
        side: the table.
        instances: the matched names, by rule.
        problems: receives the missing names.
        keeps_others: names without a rule stay unchanged, so numbers without a count may have gaps.
    """
    values_of: dict[str, set[int]] = {}
    present: dict[int, dict[Stars, set[tuple[int, ...]]]] = {}
    for key in instances:
        if key.prefix:
            continue
        present.setdefault(key.rule, {}).setdefault(key.stars, set()).add(key.values)
        for number, value in zip(side.sided[key.rule].free, key.values):
            values_of.setdefault(number, set()).add(value)
    expected = _Expected(side, values_of)
    choices: dict[tuple[str, frozenset[str]], dict[str, list[int]]] = {}
    for place, sided in enumerate(side.sided):
        rule = sided.rule
        if rule.drops or (keeps_others and not side.counts.keys() >= {*sided.free}):
            continue
        if rule.choice is not None and rule.case is not None:
            cases = choices.setdefault((rule.choice, frozenset(sided.free)), {})
            cases.setdefault(rule.case, []).append(place)
        elif place not in present and any(source.pattern.stars for source in sided.sources):
            # The texts of the stars are unknown.
            if not rule.optional and next(iter(expected.values(sided)), None) is not None:
                problems.note_unused(sided)
        elif place in present or not rule.optional:
            for stars, values in present.get(place, {(): set()}).items():
                _note(side, place, expected.values(sided), values, stars, problems)
    for (choice, _), cases in choices.items():
        _check_choice(side, choice, cases, expected, present, problems)


class _Expected:
    """The expected values of the numbers in names."""

    def __init__(self, side: Side, present_values: dict[str, set[int]]) -> None:
        self._seen = present_values
        self._counts = side.counts
        self._exact = {number.name for number in side.numbers if not number.may_miss}

    def values(self, sided: SidedRule) -> Iterator[tuple[int, ...]]:
        """All values of a rule's numbers for which names are expected."""
        return _product([self._of(number) for number in sided.free])

    def _of(self, number: str) -> Iterable[int]:
        count = self._counts.get(number)
        if count is not None and number in self._exact:
            return range(count)
        present = self._seen.get(number, set())
        # Numbers of the table start at 0 without gaps; other numbers may have any values.
        return range(max(present) + 1) if present and number in self._counts else sorted(present)


def _product(values: Sequence[Iterable[int]]) -> Iterator[tuple[int, ...]]:
    """All combinations, lazily: with a wrong configuration they may not fit in memory."""
    if not values:
        yield ()
        return
    for first in values[0]:
        for later in _product(values[1:]):
            yield (first, *later)


def _note(
    side: Side,
    number: int,
    expected: Iterable[tuple[int, ...]],
    present: set[tuple[int, ...]],
    stars: Stars,
    problems: Misfits,
) -> None:
    sided = side.sided[number]
    for values in expected:
        if values in present:
            continue
        if problems.missing_enough:
            return
        values_by_name = dict(zip(sided.free, values))
        if sided.stacked is not None:
            values_by_name[sided.stacked] = 0
        problems.missing += [source.name(values_by_name, stars) for source in sided.sources]


def _check_choice(
    side: Side,
    choice: str,
    cases: dict[str, list[int]],
    expected: _Expected,
    present: dict[int, dict[Stars, set[tuple[int, ...]]]],
    problems: Misfits,
) -> None:
    """Check that names of exactly one case are present for each value of the numbers."""
    any_rule = side.sided[next(iter(cases.values()))[0]]
    free = any_rule.free
    # Rules of a choice have no stars.
    present_values = {rule: present.get(rule, {}).get((), set()) for rules in cases.values() for rule in rules}
    wrong: dict[str, list[tuple[int, ...]]] = {}
    for values in expected.values(any_rule):
        values_of = {
            rule: tuple(dict(zip(free, values))[each] for each in side.sided[rule].free)
            for rules in cases.values()
            for rule in rules
        }
        used_cases = [
            case for case, rules in cases.items() if any(values_of[rule] in present_values[rule] for rule in rules)
        ]
        if len(used_cases) == 1:
            for rule in cases[used_cases[0]]:
                if not side.sided[rule].rule.optional:
                    _note(side, rule, [values_of[rule]], present_values[rule], (), problems)
            continue
        problem = (
            f"both {' and '.join(used_cases)} are present" if used_cases else f"none of {', '.join(cases)} is present"
        )
        wrong.setdefault(f"{choice}: {problem}", []).append(values)
        if len(wrong[f"{choice}: {problem}"]) > 100000:
            break
    for problem, places in wrong.items():
        shown = ", ".join(_shown(free, values) for values in places[:4])
        more = f" and {len(places) - 4} more" if len(places) > 4 else ""
        problems.cases.append(f"{problem}{' for ' if free else ''}{shown if free else ''}{more}")


def _shown(free: tuple[str, ...], values: tuple[int, ...]) -> str:
    return ", ".join(f"{number} {value}" for number, value in zip(free, values))
