"""Problems between a table and a checkpoint, reported all at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.errors import NamesError
from reshard.names.matching import InstanceKey, Side, SidedRule
from reshard.text.messages import Message, block, joined, listing, quoted
from reshard.text.names import near_names

MOST_MISSING = 10000
"""Maximum number of missing names to count: a number in a name may be huge."""
_MOST_PATTERNS = 6


Stars = tuple[str, ...]
"""The texts that stars match."""

Values = tuple[int, ...]
"""The values of a rule's numbers."""


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
        # A name that matches several rules belongs to none, but it is there.
        for names in _grouped([name for name in self.missing if name not in self.names]):
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


class Completeness:
    """A check for needed rules without any name; `apply` notes rules with only some names.

    Args:
        side: the table.
        instances: the matched names, by rule.
        problems: receives the missing names.
    """

    def __init__(self, side: Side, instances: Iterable[InstanceKey], problems: Misfits) -> None:
        self._side = side
        self._problems = problems
        self._present: dict[int, dict[Stars, set[Values]]] = {}
        values_of: dict[str, set[int]] = {number: set() for sided in side.sided for number in sided.free}
        for key in instances:
            if key.prefix:
                continue
            self._present.setdefault(key.rule, {}).setdefault(key.stars, set()).add(key.values)
            for number, value in zip(side.sided[key.rule].free, key.values):
                values_of[number].add(value)
        self._expected_of = {number: self._range(number, present) for number, present in values_of.items()}

    def _range(self, number: str, present: Collection[int]) -> Iterable[int]:
        """The values of a number for which names are expected."""
        count = self._side.counts.get(number)
        if count is not None and not any(each.name == number and each.may_miss for each in self._side.numbers):
            return range(count)
        # Numbers of the table start at 0 without gaps; other numbers may have any values.
        return range(max(present) + 1) if present and number in self._side.counts else sorted(present)

    def _expected(self, sided: SidedRule) -> Iterator[Values]:
        """All values of a rule's numbers for which names are expected."""
        return _product([self._expected_of[number] for number in sided.free])

    def check(self, keeps_others: bool) -> None:
        """Note missing names.

        Args:
            keeps_others: names without a rule stay unchanged, so numbers without a count may have gaps.
        """
        choices: dict[tuple[str, frozenset[str]], dict[str, list[int]]] = {}
        for place, sided in enumerate(self._side.sided):
            rule, present = sided.rule, self._present.get(place)
            if rule.drops or (keeps_others and not self._side.counts.keys() >= {*sided.free}):
                continue
            if rule.choice is not None and rule.case is not None:
                cases = choices.setdefault((rule.choice, frozenset(sided.free)), {})
                cases.setdefault(rule.case, []).append(place)
            elif present is not None:
                for stars, values in present.items():
                    self._note(sided, self._expected(sided), values, stars)
            elif rule.optional:
                continue
            elif not any(source.pattern.stars for source in sided.sources):
                self._note(sided, self._expected(sided))
            # The texts of the stars are unknown.
            elif next(self._expected(sided), None) is not None:
                self._problems.note_unused(sided)
        for (choice, _), cases in choices.items():
            self._check_choice(choice, cases)

    def _note(
        self, sided: SidedRule, expected: Iterable[Values], present: Collection[Values] = (), stars: Stars = ()
    ) -> None:
        """Note the missing names of a rule."""
        for values in expected:
            if values in present:
                continue
            if self._problems.missing_enough:
                return
            values_by_name = dict(zip(sided.free, values))
            if sided.stacked is not None:
                values_by_name[sided.stacked] = 0
            self._problems.missing += [source.name(values_by_name, stars) for source in sided.sources]

    def _check_choice(self, choice: str, cases: Mapping[str, Sequence[int]]) -> None:
        """Check that names of exactly one case are present for each value of the numbers."""
        rules = {place: self._side.sided[place] for places in cases.values() for place in places}
        # Rules of a choice have no stars.
        present = {place: self._present.get(place, {}).get((), set()) for place in rules}
        any_rule = next(iter(rules.values()))
        wrong: dict[str, list[Values]] = {}
        for values in self._expected(any_rule):
            values_by_name = dict(zip(any_rule.free, values))
            values_of = {place: tuple(values_by_name[each] for each in sided.free) for place, sided in rules.items()}
            fits = {place for place, own_values in values_of.items() if own_values in present[place]}
            used = [case for case, places in cases.items() if not fits.isdisjoint(places)]
            if len(used) == 1:
                for place in cases[used[0]]:
                    if not rules[place].rule.optional:
                        self._note(rules[place], [values_of[place]], present[place])
                continue
            problem = f"both {' and '.join(used)} are present" if used else f"none of {', '.join(cases)} is present"
            wrong.setdefault(problem, []).append(values)
            if len(wrong[problem]) > 100000:
                break
        for problem, places_of_problem in wrong.items():
            shown = ", ".join(
                ", ".join(f"{number} {value}" for number, value in zip(any_rule.free, values))
                for values in places_of_problem[:4]
            )
            more = f" and {len(places_of_problem) - 4} more" if len(places_of_problem) > 4 else ""
            self._problems.note(Reason(f"{choice}: {problem}{' for ' if any_rule.free else ''}{shown}{more}"))


def _product(values: Sequence[Iterable[int]]) -> Iterator[Values]:
    """All combinations, lazily: with a wrong configuration they may not fit in memory."""
    if not values:
        yield ()
        return
    for first in values[0]:
        for later in _product(values[1:]):
            yield (first, *later)
