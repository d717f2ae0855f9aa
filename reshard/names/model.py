"""Rules of names: names on one side, names on the other, and the operations between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from reshard.names.operations import Operation, Stack
from reshard.names.pattern import Pattern
from reshard.names.sizes import ModelSize, config_value
from reshard.text.products import Product

HUB_SIDE = "huggingface"
"""The side of tables whose tensors no option packs."""

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
        name_values: the option's possible values per name that a checkpoint may have, on either side; the first match
            wins.
        about: a description, one sentence.
    """

    name: str
    values: tuple[str, ...]
    default: Optional[str]
    key: Optional[str]
    config_values: tuple[tuple[str, str], ...]
    name_values: tuple[tuple[Pattern, tuple[str, ...]], ...]
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
    choice: Optional[str] = None
    case: Optional[str] = None

    @property
    def drops(self) -> bool:
        return not self.left or not self.right

    def side(self, right: bool) -> tuple[Pattern, ...]:
        return self.right if right else self.left

    @property
    def stacked(self) -> frozenset[str]:
        """Numbers that only one side has."""
        return frozenset(operation.number for operation in self.operations if isinstance(operation, Stack))

    def in_direction(self, reverse: bool) -> tuple[Operation, ...]:
        """The operations from one side to the other, in execution order."""
        return tuple(each.inverse() for each in reversed(self.operations)) if reverse else self.operations


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

    def size_values(self, config: Optional[Mapping[str, object]]) -> dict[str, object]:
        keys = {key for size in self.sizes for one in size.products for key in one.names}
        values = {key: config_value(config, key) for key in sorted(keys)}
        return {key: value for key, value in values.items() if value is not None}
