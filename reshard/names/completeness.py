"""Whether everything is there that rules make of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from reshard.names.matching import Instances, Side, SidedRule
from reshard.names.problems import Problems

Stars = tuple[str, ...]
"""The texts that stars stand for."""


def check_complete(side: Side, instances: Instances, problems: Problems, keeps_others: bool) -> None:
    """Note the weights that are missing altogether; of what is there in part, others note the rest.

    Args:
        side: the table.
        instances: what is there.
        problems: where to note it.
        keeps_others: whether the table speaks of some names only, so that numbers it does not count may have gaps.
    """
    seen: dict[str, set[int]] = {}
    there: dict[int, dict[Stars, set[tuple[int, ...]]]] = {}
    for key in instances:
        if key.prefix:
            continue
        there.setdefault(key.rule, {}).setdefault(key.stars, set()).add(key.values)
        for number, value in zip(side.sided[key.rule].free, key.values):
            seen.setdefault(number, set()).add(value)
    expected = _Expected(side, seen)
    choices: dict[tuple[str, frozenset[str]], dict[str, list[int]]] = {}
    for place, sided in enumerate(side.sided):
        rule = sided.rule
        if rule.drops or (keeps_others and not side.counts.keys() >= {*sided.free}):
            continue
        if rule.choice is not None and rule.case is not None:
            cases = choices.setdefault((rule.choice, frozenset(sided.free)), {})
            cases.setdefault(rule.case, []).append(place)
        elif place not in there and any(source.pattern.stars for source in sided.sources):
            # No name tells what the stars should stand for.
            if not rule.optional and next(iter(expected.values(sided)), None) is not None:
                problems.note_unused(sided)
        elif place in there or not rule.optional:
            for stars, values in there.get(place, {(): set()}).items():
                _note(side, place, expected.values(sided), values, stars, problems)
    for (choice, _), cases in choices.items():
        _check_choice(side, choice, cases, expected, there, problems)


class _Expected:
    """Which values the numbers of names have."""

    def __init__(self, side: Side, seen: dict[str, set[int]]) -> None:
        self._seen = seen
        self._counts = side.counts
        self._exact = {number.name for number in side.numbers if not number.may_miss}

    def values(self, sided: SidedRule) -> Iterator[tuple[int, ...]]:
        """All that a rule should be there for."""
        return _product([self._of(number) for number in sided.free])

    def _of(self, number: str) -> Iterable[int]:
        count = self._counts.get(number)
        if count is not None and number in self._exact:
            return range(count)
        seen = self._seen.get(number, set())
        # What the table counts begins at 0 and has no gaps; of other numbers nothing is known.
        return range(max(seen) + 1) if seen and number in self._counts else sorted(seen)


def _product(values: Sequence[Iterable[int]]) -> Iterator[tuple[int, ...]]:
    """All combinations, one after the other: a configuration may say that there are more than memory holds."""
    if not values:
        yield ()
        return
    for first in values[0]:
        for rest in _product(values[1:]):
            yield (first, *rest)


def _note(
    side: Side,
    number: int,
    expected: Iterable[tuple[int, ...]],
    there: set[tuple[int, ...]],
    stars: Stars,
    problems: Problems,
) -> None:
    sided = side.sided[number]
    for values in expected:
        if values in there:
            continue
        if problems.missing_enough:
            return
        named = dict(zip(sided.free, values))
        if sided.stacked is not None:
            named[sided.stacked] = 0
        problems.missing += [source.name(named, stars) for source in sided.sources]


def _check_choice(
    side: Side,
    choice: str,
    cases: dict[str, list[int]],
    expected: _Expected,
    there: dict[int, dict[Stars, set[tuple[int, ...]]]],
    problems: Problems,
) -> None:
    """For each value of the numbers, the rules of one case are there."""
    any_rule = side.sided[next(iter(cases.values()))[0]]
    free = any_rule.free
    # Rules of a choice have no stars.
    held = {rule: there.get(rule, {}).get((), set()) for rules in cases.values() for rule in rules}
    wrong: dict[str, list[tuple[int, ...]]] = {}
    for values in expected.values(any_rule):
        ways = {
            rule: tuple(dict(zip(free, values))[each] for each in side.sided[rule].free)
            for rules in cases.values()
            for rule in rules
        }
        touched = [case for case, rules in cases.items() if any(ways[rule] in held[rule] for rule in rules)]
        if len(touched) == 1:
            for rule in cases[touched[0]]:
                if not side.sided[rule].rule.optional:
                    _note(side, rule, [ways[rule]], held[rule], (), problems)
            continue
        said = f"both {' and '.join(touched)} are there" if touched else f"none of {', '.join(cases)} is there"
        wrong.setdefault(f"{choice}: {said}", []).append(values)
        if len(wrong[f"{choice}: {said}"]) > 100000:
            break
    for said, found in wrong.items():
        shown = ", ".join(_shown(free, values) for values in found[:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        problems.cases.append(f"{said}{' for ' if free else ''}{shown if free else ''}{more}")


def _shown(free: tuple[str, ...], values: tuple[int, ...]) -> str:
    return ", ".join(f"{number} {value}" for number, value in zip(free, values))
