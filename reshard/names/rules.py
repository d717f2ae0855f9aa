"""Rules of names: names on one side, names on the other, operations between them; the rules that fit a checkpoint.

A table has options. The value of one is stated, or from config.json, from names, from records, or its default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.errors import NamesError, UsageError
from reshard.names.operations import Operation, Shape, Stack
from reshard.names.pattern import Fit, Pattern, PatternIndex, SizedPattern
from reshard.names.sizes import ModelSize, ModelSizes, config_value
from reshard.storage.toml_tables import did_you_mean
from reshard.text.messages import quoted
from reshard.text.names import WEIGHTS, kind_of
from reshard.text.products import Product

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")

HUB_SIDE = "huggingface"
"""The side of tables whose tensors no option packs."""

FAMILY = "family"
"""The option of a table of several model families that names the one: the name of that family's own table."""

EITHER, FORWARD = "either", "forward"
"""The direction of a table without --reverse: by the names of the source, or always left to right."""


@dataclass(frozen=True)
class TableOption:
    """A choice that the user or the configuration makes.

    Attributes:
        name: its name.
        values: the allowed values; any number if empty.
        default: the value if nothing else determines it; None if the user must choose where values differ.
        key: the key of config.json that determines it, if any.
        config_values: the option's value per value of that key, as JSON spells it; `values` need no entry.
        name_values: the option's possible values per names that a checkpoint may have together, on either side; the
            first match wins.
        about: a description, one sentence.
    """

    name: str
    values: tuple[str, ...]
    default: str | None
    key: str | None
    config_values: tuple[tuple[str, str], ...]
    name_values: tuple[tuple[tuple[Pattern, ...], tuple[str, ...]], ...]
    about: str


@dataclass(frozen=True)
class NameRule:
    """Names that are converted together.

    Attributes:
        where: the rule's place, for messages.
        left: the patterns of its names on the left; none if names on the right are skipped.
        right: the patterns on the right; none if names on the left are skipped.
        operations: the operations from left to right; none where only the name changes.
        when: options and the values for which the rule applies; all must hold.
        optional: whether a model may lack its names.
        choice: of the rules with the same choice, those of exactly one ``case`` apply, per value of their numbers.
        case: see ``choice``.
    """

    where: str
    left: tuple[Pattern, ...]
    right: tuple[Pattern, ...]
    operations: tuple[Operation, ...] = ()
    when: tuple[tuple[str, tuple[str, ...]], ...] = ()
    optional: bool = False
    choice: str | None = None
    case: str | None = None

    @property
    def drops(self) -> bool:
        return not self.left or not self.right

    def side(self, right: bool) -> tuple[Pattern, ...]:
        return self.right if right else self.left

    @property
    def stacked(self) -> frozenset[str]:
        """Numbers that only one side has."""
        return frozenset(stack.number for stack in stacks(self.operations))

    def in_direction(self, reverse: bool) -> tuple[Operation, ...]:
        """The operations from one side to the other, in execution order."""
        return tuple(each.inverse() for each in reversed(self.operations)) if reverse else self.operations


def stacks(operations: Sequence[Operation]) -> list[Stack]:
    """The operations that stack or unstack a number; of several, those of outer dimensions of lists first."""
    found = [operation for operation in operations if isinstance(operation, Stack)]
    # A list has the tensors of inner numbers side by side: they are stacked first, and unstacked last.
    return found if found and found[0].inverted else found[::-1]


@dataclass(frozen=True)
class NameRules:
    """A table of rules.

    Attributes:
        path: the file, or the name of a built-in table.
        title: its purpose, one line.
        sides: the names of its left and right side.
        rules: the rules.
        sizes: the sizes of the model that it uses.
        numbers: the numbers in its names, such as ``layer``, whose values are 0 to a count.
        options: its options.
        chosen: values of options that the user stated.
        direction: ``EITHER`` or ``FORWARD``.
        keeps_others: whether names without a rule stay unchanged, instead of being an error.
        text: the content of the file.
    """

    path: str
    title: str
    sides: tuple[str, str]
    rules: tuple[NameRule, ...]
    sizes: tuple[ModelSize, ...] = ()
    numbers: tuple[tuple[str, Product], ...] = ()
    options: tuple[TableOption, ...] = ()
    chosen: tuple[tuple[str, str], ...] = ()
    direction: str = EITHER
    keeps_others: bool = False
    text: str = ""

    def stated(self, **options: str) -> str:
        """What --names states: the table, or its family; its chosen options, and more."""
        chosen = {**dict(self.chosen), **options}
        return ",".join([chosen.pop(FAMILY, self.path), *(f"{name}={value}" for name, value in chosen.items())])

    @property
    def families(self) -> Sequence[str]:
        """The model families of a table of several."""
        return next((option.values for option in self.options if option.name == FAMILY), ())

    @property
    def packing_options(self) -> frozenset[str]:
        """The options that decide between rules for the same names: no name contradicts a wrong value."""
        alike: dict[tuple[tuple[Pattern, ...], tuple[Pattern, ...]], list[NameRule]] = {}
        for rule in self.rules:
            alike.setdefault((rule.left, rule.right), []).append(rule)
        differing = (rules for rules in alike.values() if len({rule.operations for rule in rules}) > 1)
        options = {name for rules in differing for rule in rules for name, _ in rule.when}
        for option in self.options:
            if option.name_values:
                options.discard(option.name)
            if any(len(values) > 1 for _, values in option.name_values):
                options.add(option.name)
        return frozenset(options)

    @property
    def config_keys(self) -> set[str]:
        """The keys of config.json that the table reads."""
        keys = {option.key for option in self.options if option.key is not None}
        return keys.union(*(size.keys for size in self.sizes))

    def size_values(self, config: Mapping[str, object] | None) -> dict[str, object]:
        keys = {key for size in self.sizes for key in size.keys}
        values = {key: config_value(config, key) for key in sorted(keys)}
        return {key: value for key, value in values.items() if value is not None}


class Settled(NamedTuple):
    """A table with values of its options.

    Attributes:
        rules: the rules whose conditions hold.
        sizes: of the model.
        values: per option its value; the first of `undetermined` ones.
        undetermined: the possible values of options that nothing determines.
    """

    rules: tuple[NameRule, ...]
    sizes: ModelSizes
    values: Mapping[str, str]
    undetermined: Mapping[str, tuple[str, ...]]


def undetermined_error(rules: NameRules, options: Sequence[tuple[str, Sequence[str]]]) -> UsageError:
    """The error for options of which several values fit a checkpoint, and each gives other tensors."""
    about = {option.name: option.about for option in rules.options}
    names = ", ".join(name for name, _ in options)
    lines = [" or ".join(f"{name}={value}" for value in values) + f": {about[name]}" for name, values in options]
    stated = rules.stated(**{name: name.upper() for name, _ in options})
    return UsageError(
        f"--names {rules.stated()}: {names} must be stated: names of tensors, config.json and records of the source do "
        "not determine it, and a wrong value gives wrong weights",
        hint="\n  ".join([f"--names {stated}, as the model was trained:", *lines]),
    )


def with_options(rules: NameRules, stated: Mapping[str, str]) -> NameRules:
    """A table with stated options."""
    options = {option.name: option for option in rules.options}
    for name, value in stated.items():
        option = options.get(name)
        if option is None:
            raise UsageError(f"{rules.path}: the rules have no option {quoted(name)}{did_you_mean(name, options)}")
        if option.values and value not in option.values:
            raise UsageError(f"{rules.path}: {name} must be one of {', '.join(option.values)}, not {quoted(value)}")
        if not option.values and not _NUMBER.fullmatch(value):
            raise UsageError(f"{rules.path}: {name} must be a number, not {quoted(value)}")
    return replace(rules, chosen=tuple({**dict(rules.chosen), **stated}.items()))


def settle(
    rules: NameRules,
    config: Mapping[str, object] | None,
    names: Collection[str],
    recorded: Mapping[str, str] = {},
) -> Settled:
    """The rules that apply to a model.

    Args:
        rules: the table.
        config: the content of config.json, if any.
        names: of the checkpoint.
        recorded: values of options in the source's records.

    Raises:
        NamesError: a number has no value, or an option has an unknown value in the configuration.
    """
    stated = dict(rules.chosen)
    sizes = ModelSizes(rules.sizes, config)
    possible = {}
    for option in rules.options:
        value = _stated_value(option, stated, config, rules)
        possible[option.name] = _possible(option, sizes, names, recorded, rules) if value is None else (value,)
    values = {name: each[0] for name, each in possible.items()}
    numbers = {option.name: int(values[option.name]) for option in rules.options if not option.values}
    applicable = tuple(rule for rule in rules.rules if all(values[name] in allowed for name, allowed in rule.when))
    undetermined = {name: each for name, each in possible.items() if len(each) > 1}
    return Settled(applicable, ModelSizes(rules.sizes, config, numbers), values, undetermined)


def _stated_value(
    option: TableOption, stated: Mapping[str, str], config: Mapping[str, object] | None, rules: NameRules
) -> str | None:
    if option.name in stated:
        return stated[option.name]
    value = None if option.key is None else config_value(config, option.key)
    if value is None:
        return None
    spelled = str(value).lower() if isinstance(value, bool) else str(value)
    value_name = dict(option.config_values).get(spelled, spelled)
    if value_name in option.values or (not option.values and _NUMBER.fullmatch(value_name)):
        return value_name
    path = getattr(config, "path", "config.json")
    raise NamesError(
        f"{path}: {option.key} is {quoted(spelled)}, which is not a value of {option.name} in {rules.path}"
    )


def _possible(
    option: TableOption, sizes: ModelSizes, names: Collection[str], recorded: Mapping[str, str], rules: NameRules
) -> tuple[str, ...]:
    for patterns, values in option.name_values:
        if all(_is_among(SizedPattern(pattern, sizes.value), names) for pattern in patterns):
            value = recorded.get(option.name)
            return values if value not in values else (value,)
    return _unshown(option, recorded, rules)


def _is_among(pattern: SizedPattern, names: Collection[str]) -> bool:
    if pattern.pattern.numbers:
        return any(map(PatternIndex([pattern]).fits, names))
    return pattern.name({}, ()) in names


def _unshown(option: TableOption, recorded: Mapping[str, str], rules: NameRules) -> tuple[str, ...]:
    value = recorded.get(option.name, option.default)
    if value is not None:
        return (value,)
    if option.values:
        return option.values
    raise NamesError(
        f"{rules.path}: the option {option.name} must be stated: a number",
        hint=f"--names {rules.stated(**{option.name: '1'})}",
    )


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
        key: the rule, and the values of its free numbers.
        column: the column of the name.
        values: of the stacked numbers, in the order of `SidedRule.stacked`.
    """

    key: InstanceKey
    column: int
    values: tuple[int, ...]


class SidedRule(NamedTuple):
    """A rule in one direction.

    Attributes:
        rule: the rule.
        sources: the names of operands.
        targets: the names of results.
        free: the numbers of both, in the order of the first name.
        stacked: the numbers that only sources have, outer ones first.
        unstacked: the numbers that only targets have, outer ones first.
    """

    rule: NameRule
    sources: tuple[SizedPattern, ...]
    targets: tuple[SizedPattern, ...]
    free: tuple[str, ...]
    stacked: tuple[str, ...]
    unstacked: tuple[str, ...]


class TableSide:
    """The side of a table that a checkpoint is on: the left, or the right where the rules are reversed.

    Attributes:
        sizes: of the model.
        reverse: whether it is the right side.
        sided: the applicable rules in this direction.
        counts: the number of values of each number in names, None if unknown.
    """

    def __init__(self, settled: Settled, numbers: Sequence[tuple[str, Product]], reverse: bool) -> None:
        self.sizes = settled.sizes
        self.reverse = reverse
        self.counts = {number: self.sizes.value_if_known(count) for number, count in numbers}
        self.sided = [self._sided(rule) for rule in settled.rules]
        self._places = [
            (number, column) for number, each in enumerate(self.sided) for column in range(len(each.sources))
        ]
        self._index = PatternIndex(pattern for each in self.sided for pattern in each.sources)
        # Cache: the choice of the side and its use match the same names.
        self._matches: dict[str, list[NameMatch]] = {}

    def matches(self, name: str, prefix: str = "") -> list[NameMatch]:
        matches = self._matches.get(name)
        if matches is None:
            fits = self._index.fits(name)
            matches = [self._match(number, fit) for number, fit in fits if self._out_of_range(fit) is None]
            self._matches[name] = matches
        if not prefix:
            return matches
        return [match._replace(key=match.key._replace(prefix=prefix)) for match in matches]

    def beyond(self, name: str) -> str | None:
        """The number in a name that is too large for the model; None if the name does not match at all."""
        for _, fit in self._index.fits(name):
            number = self._out_of_range(fit)
            if number is not None:
                return number
        return None

    def patterns(self) -> list[str]:
        return list(dict.fromkeys(each.pattern.text for sided in self.sided for each in sided.sources))

    def _out_of_range(self, fit: Fit) -> str | None:
        for number, value in fit.values.items():
            count = self.counts.get(number)
            if count is not None and value >= count:
                return number
        return None

    def _match(self, number: int, fit: Fit) -> NameMatch:
        rule, column = self._places[number]
        sided = self.sided[rule]
        values = tuple(fit.values[name] for name in sided.free)
        stacked = tuple(fit.values[name] for name in sided.stacked)
        return NameMatch(InstanceKey(rule, "", values, fit.stars), column, stacked)

    def _sided(self, rule: NameRule) -> SidedRule:
        sources, targets = rule.side(self.reverse), rule.side(not self.reverse)
        mine = sources[0].numbers if sources else ()
        theirs = targets[0].numbers if targets else ()
        free = tuple(number for number in mine if number in theirs or not targets)
        alone = [stack.number for stack in stacks(rule.operations)]
        stacked = tuple(number for number in alone if number in mine)
        unstacked = tuple(number for number in alone if number in theirs)
        return SidedRule(rule, self._sized(sources), self._sized(targets), free, stacked, unstacked)

    def _sized(self, patterns: Iterable[Pattern]) -> tuple[SizedPattern, ...]:
        return tuple(SizedPattern(pattern, self.sizes.value) for pattern in patterns)


def side_of(rules: NameRules, settled: Settled, shapes: Mapping[str, Shape], reverse: bool | None) -> TableSide:
    """The side that the source is on.

    Raises:
        NamesError: both sides match the same number of weights.
    """
    if reverse is None and rules.direction == FORWARD:
        reverse = False
    if reverse is not None:
        return TableSide(settled, rules.numbers, reverse)
    sides = [TableSide(settled, rules.numbers, is_right) for is_right in (False, True)]
    weights = [name for name, shape in shapes.items() if kind_of(name, math.prod(shape), shapes) == WEIGHTS]
    fitting = [sum(bool(side.matches(name)) for name in weights) for side in sides]
    if fitting[0] != fitting[1]:
        return sides[fitting[1] > fitting[0]]
    left, right = rules.sides
    if not fitting[0]:
        raise NamesError(
            f"the rules {rules.path} match none of the checkpoint's {len(weights)} weights, neither as {left} "
            f"nor as {right}",
            hint=_examples(sides, weights),
        )
    raise NamesError(
        f"the rules {rules.path} match the checkpoint as {left} as well as {right} ({fitting[0]} of {len(weights)} "
        "weights)",
        hint=f'if it is {right}: --reverse; if it is {left}: direction = "forward" in the rules',
    )


def _examples(sides: list[TableSide], weights: list[str]) -> str | None:
    examples = [side.patterns()[:1] for side in sides]
    if not weights or not all(examples):
        return None
    return f"the rules have names such as {examples[0][0]} and {examples[1][0]}; the checkpoint has {weights[0]}"
