"""Problems between a table and a checkpoint, reported all at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

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


class Reason(NamedTuple):
    """Why names do not fit: a sentence with the names between two texts.

    Attributes:
        before: the text before the names.
        after: the text after them.
        after_one: the text after a single name, if it differs.
    """

    before: str
    after: str = ""
    after_one: str = ""


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
    missing: list[str] = field(default_factory=list)
    reasons: dict[Reason, list[str]] = field(default_factory=dict)

    @property
    def missing_enough(self) -> bool:
        """Whether the count of missing names reached its limit."""
        return len(self.missing) >= MOST_MISSING

    def note(self, reason: Reason, *names: str) -> None:
        """Note names that do not fit for a reason; a reason without names is a whole sentence."""
        self.reasons.setdefault(reason, []).extend(names)

    def note_unused(self, sided: SidedRule) -> None:
        """Note a rule that no name matches."""
        for source in sided.sources:
            text = source.pattern.text
            number = re.search(r"\{.*?\}", text)
            digits = f"; {number.group()} matches digits only, * matches any text" if number else ""
            near = _suggested("did you mean", near_names(text, self.names))
            self.note(Reason(f"no name matches {quoted(text)}{near}{digits}"))

    def check(self) -> None:
        """Refuse the checkpoint if there is a problem.

        Raises:
            NamesError: lists all problems.
        """
        lines = [*self._unmatched(), *self._missing()]
        for reason, names in self.reasons.items():
            after = reason.after_one if reason.after_one and len(names) == 1 else reason.after
            lines.append(joined("", [reason.before, listing(names), after]))
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

    def _unmatched(self) -> Iterator[Message]:
        for names in _grouped(self.unmatched):
            near = near_names(_numbers_replaced(names[0], "{number}"), self.patterns)
            yield "no rule matches " + listing(names) + _suggested("did you mean", near, names)

    def _missing(self) -> Iterator[Message]:
        more = " and perhaps more" if self.missing_enough else ""
        for names in _grouped(self.missing):
            yield "missing: " + listing(names) + more + _suggested("is it", near_names(names[0], self.unmatched))


def _suggested(question: str, near: Iterable[str], excluded: Collection[str] = ()) -> str:
    """A question about the nearest name, if any."""
    first = next((name for name in near if name not in excluded), None)
    return "" if first is None else f"; {question} {quoted(first)}?"


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
        problems.note(Reason(f"{problem}{' for ' if free else ''}{shown if free else ''}{more}"))


def _shown(free: tuple[str, ...], values: tuple[int, ...]) -> str:
    return ", ".join(f"{number} {value}" for number, value in zip(free, values))
