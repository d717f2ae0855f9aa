"""Problems between a table and a checkpoint, reported all at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from reshard.errors import NamesError
from reshard.names.rules import InstanceKey, NameRules, SidedRule, TableSide
from reshard.text.messages import block, joined, listing, quoted
from reshard.text.names import near_names

# Missing names are counted up to this number: a number in a name may be huge.
_MOST_MISSING = 10000
_MOST_SKIPPED = 4

Values = tuple[int, ...]
"""The values of a rule's numbers."""


class Misfits:
    """All problems between a table and a checkpoint."""

    def __init__(
        self,
        rules: NameRules,
        side: TableSide,
        options: Mapping[str, str],
        names: Collection[str],
    ) -> None:
        self._rules = rules
        self._side = rules.sides[side.reverse]
        self._patterns = side.patterns()
        self._options = options
        self._names = names
        self.unmatched: list[str] = []
        self.missing: list[str] = []
        self._problems: dict[str, list[str]] = {}

    @property
    def missing_enough(self) -> bool:
        return len(self.missing) >= _MOST_MISSING

    def note(self, problem: str, *names: str) -> None:
        """Note names with a problem; a problem without names is a whole sentence."""
        self._problems.setdefault(problem, []).extend(names)

    def note_unused(self, sided: SidedRule) -> None:
        for source in sided.sources:
            text = source.pattern.text
            self.note(f"no name matches {quoted(text)}" + _suggested("did you mean", near_names(text, self._names)))

    def check(self) -> None:
        """Refuse the checkpoint if there is a problem."""
        lines: list[str] = []
        for names in _grouped(self.unmatched):
            near = near_names(_numbers_replaced(names[0], "{number}"), self._patterns)
            lines.append("no rule matches " + listing(names) + _suggested("did you mean", near, names))
        more = " and perhaps more" if self.missing_enough else ""
        # A name that matches several rules belongs to none, but it is there.
        for names in _grouped([name for name in self.missing if name not in self._names]):
            near = near_names(names[0], self.unmatched)
            lines.append("missing: " + listing(names) + more + _suggested("is it", near))
        for problem, names in self._problems.items():
            lines.append(f"{problem}: " + listing(names) if names else problem)
        if lines:
            headline = f"the rules {self._rules.path} do not fit the checkpoint ({self._side}):"
            raise NamesError(block(headline, [joined("", ["  ", line]) for line in lines]), hint=self._hint())

    def _hint(self) -> str | None:
        hints = []
        if self._rules.families and (self.unmatched or self.missing):
            hints.append("is it a model of this family? `reshard suggest` names those that fit")
        if self._options and (self.unmatched or self.missing):
            values = ", ".join(f"{name}={value}" for name, value in self._options.items())
            open_options = {name: self._options[name] for name in self._options if name not in dict(self._rules.chosen)}
            name, value = next(iter((open_options or self._options).items()))
            stated = self._rules.stated(**{name: value})
            hints.append(f"the rules were applied with {values}; to state an option: --names {stated}")
        if self.unmatched:
            skipped = " ".join(f"--exclude '{each}'" for each in self._skipped()[:_MOST_SKIPPED])
            hints.append(f"to leave out tensors that the model does not need: {skipped}")
        return "\n".join(hints) or None

    def _skipped(self) -> list[str]:
        """Patterns for names that no rule matches; one for a module that the table lacks, such as a vision tower."""
        modules = {each.partition(".")[0] for each in self._patterns}
        patterns: dict[str, None] = {}
        for name in self.unmatched:
            module, _, rest = name.partition(".")
            patterns[f"{module}.*" if rest and module not in modules else _numbers_replaced(name, "*")] = None
        return list(patterns)


def _suggested(question: str, near: Iterable[str], excluded: Collection[str] = ()) -> str:
    first = next((name for name in near if name not in excluded), None)
    return "" if first is None else f"; {question} {quoted(first)}?"


def _grouped(names: Collection[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(re.sub("[0-9]+", "0", name), []).append(name)
    return list(groups.values())


def _numbers_replaced(name: str, number: str) -> str:
    return re.sub("(?<![a-z0-9])[0-9]+(?![a-z0-9])", number, name)


class UnusedRules:
    """A check for needed rules without any name; `apply` notes rules with only some names."""

    def __init__(self, side: TableSide, instances: Collection[InstanceKey], problems: Misfits) -> None:
        self._side = side
        self._problems = problems
        self._present: dict[int, dict[tuple[str, ...], set[Values]]] = {}
        values_of: dict[str, set[int]] = {number: set() for sided in side.sided for number in sided.free}
        self._used = {key.rule for key in instances}
        for key in instances:
            if key.prefix:
                continue
            self._present.setdefault(key.rule, {}).setdefault(key.stars, set()).add(key.values)
            for number, value in zip(side.sided[key.rule].free, key.values):
                values_of[number].add(value)
        self._expected_of = {number: self._range(number, present) for number, present in values_of.items()}

    def _range(self, number: str, present: Collection[int]) -> Iterable[int]:
        count = self._side.counts.get(number)
        if count is not None:
            return range(count)
        # Numbers of the table start at 0 without gaps; other numbers may have any values.
        return range(max(present) + 1) if present and number in self._side.counts else sorted(present)

    def _expected(self, sided: SidedRule, fixed: Mapping[str, int] = {}) -> Iterator[Values]:
        return combinations([[fixed[each]] if each in fixed else self._expected_of[each] for each in sided.free])

    def check(self, keeps_others: bool, ambiguous: Collection[int]) -> None:
        """Note missing names.

        Args:
            keeps_others: names without a rule stay unchanged, so numbers without a count may have gaps; an unused rule
                is mistyped and would have no effect.
            ambiguous: rules that have names in common with others.
        """
        choices: dict[str, list[int]] = {}
        for place, sided in enumerate(self._side.sided):
            rule, present = sided.rule, self._present.get(place)
            if keeps_others and not (place in self._used or place in ambiguous or rule.optional or rule.drops):
                self._problems.note_unused(sided)
            if rule.drops or (keeps_others and not self._side.counts.keys() >= {*sided.free}):
                continue
            if rule.choice is not None:
                choices.setdefault(rule.choice, []).append(place)
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
        for choice, places in choices.items():
            for alike in self._alike(places):
                self._check_choice(choice, alike)

    def _note(
        self,
        sided: SidedRule,
        expected: Iterable[Values],
        present: Collection[Values] = (),
        stars: tuple[str, ...] = (),
    ) -> None:
        for values in expected:
            if values in present:
                continue
            if self._problems.missing_enough:
                return
            values_by_name = dict(zip(sided.free, values))
            values_by_name.update(dict.fromkeys(sided.stacked, 0))
            self._problems.missing += [source.name(values_by_name, stars) for source in sided.sources]

    def _alike(self, places: Sequence[int]) -> list[Sequence[int]]:
        """Rules of a choice by their numbers: those of a layer's experts belong to those of the layer."""
        numbers = [frozenset(self._side.sided[place].free) for place in places]
        alike: dict[frozenset[str], list[int]] = {}
        for place, own in zip(places, numbers):
            fewest = min((each for each in numbers if each and each <= own), key=len, default=own)
            alike.setdefault(fewest, []).append(place)
        return [*alike.values()]

    def _check_choice(self, choice: str, places: Sequence[int]) -> None:
        rules = {place: self._side.sided[place] for place in places}
        cases = dict.fromkeys(str(sided.rule.case) for sided in rules.values())
        # Rules of a choice have no stars.
        present = {place: self._present.get(place, {}).get((), set()) for place in rules}
        any_rule = min(rules.values(), key=lambda sided: len(sided.free))
        fitting: dict[Values, set[int]] = {}
        for place, sided in rules.items():
            where = [sided.free.index(number) for number in any_rule.free]
            for values in present[place]:
                fitting.setdefault(tuple(values[index] for index in where), set()).add(place)
        wrong: dict[str, list[str]] = {}
        for values in self._expected(any_rule):
            values_by_name = dict(zip(any_rule.free, values))
            found = {rules[place].rule.case for place in fitting.get(values, ())}
            used = [case for case in cases if case in found]
            if len(used) == 1:
                for place, sided in rules.items():
                    if sided.rule.case == used[0] and not sided.rule.optional:
                        self._note(sided, self._expected(sided, values_by_name), present[place])
                continue
            problem = f"both {' and '.join(used)} are present" if used else f"none of {', '.join(cases)} is present"
            numbers = ", ".join(f"{number} {value}" for number, value in values_by_name.items())
            wrong.setdefault(problem, []).append(numbers)
            if len(wrong[problem]) >= _MOST_MISSING:
                break
        for problem, examples in wrong.items():
            more = f" and {len(examples) - 4} more" if len(examples) > 4 else ""
            shown = f" for {', '.join(examples[:4])}{more}" if any_rule.free else ""
            self._problems.note(f"{choice}: {problem}{shown}")


def combinations(values: Sequence[Iterable[int]]) -> Iterator[Values]:
    """All combinations, lazily: with a wrong configuration they may not fit in memory."""
    if not values:
        yield ()
        return
    for first in values[0]:
        for later in combinations(values[1:]):
            yield (first, *later)
