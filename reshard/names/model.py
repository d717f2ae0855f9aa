"""What rules of names say: which names on one side make which names on the other, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from reshard.names.operations import Operation, Stack, Unstack
from reshard.names.pattern import Pattern
from reshard.names.sizes import ModelSize, config_value
from reshard.text.products import Product

EITHER, FORWARD = "either", "forward"
"""Which way a table may be read without being asked: whichever fits, or from left to right alone."""


@dataclass(frozen=True)
class Number:
    """A number that names have.

    Attributes:
        name: what it counts.
        count: how many values it has, from 0; without it, those that are there.
        may_miss: whether it may have fewer values, or none.
    """

    name: str
    count: Optional[Product] = None
    may_miss: bool = False


@dataclass(frozen=True)
class TableOption:
    """A choice that the user or the configuration makes.

    Attributes:
        name: its name.
        values: what it can be; any number where there are none.
        default: what it is unless it is said.
        key: the key of config.json that says it, if one does.
        told: what values of that key mean, as JSON spells them; those of `values` mean themselves.
        seen: names that tell it where a checkpoint has them, on either side; the first holds.
        about: what it is, in a sentence.
    """

    name: str
    values: tuple[str, ...]
    default: Optional[str]
    key: Optional[str]
    told: tuple[tuple[str, str], ...]
    seen: tuple[tuple[Pattern, str], ...]
    about: str


@dataclass(frozen=True)
class OptionCondition:
    """An option that must have one of some values for a rule to hold.

    Attributes:
        option: its name.
        values: the values.
    """

    option: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class NameRule:
    """Names that are converted together.

    Attributes:
        where: which rule it is, for messages.
        left: the patterns of its names on the left; none if what is on the right is dropped.
        right: those on the right; none if what is on the left is dropped.
        operations: what makes the right of the left; none where it is but another name.
        when: conditions, all of which must hold.
        optional: whether a model may be without its names.
        choice: of the rules with the same choice, those of one ``case`` are there, for each value of their numbers.
        case: see ``choice``.
    """

    where: str
    left: tuple[Pattern, ...]
    right: tuple[Pattern, ...]
    operations: tuple[Operation, ...] = ()
    when: tuple[OptionCondition, ...] = ()
    optional: bool = False
    choice: Optional[str] = None
    case: Optional[str] = None

    @property
    def drops(self) -> bool:
        """Whether what it matches is left out."""
        return not self.left or not self.right

    def side(self, right: bool) -> tuple[Pattern, ...]:
        """The patterns of one side."""
        return self.right if right else self.left

    @property
    def stacked(self) -> frozenset[str]:
        """Numbers that one side alone has."""
        found = set()
        for operation in self.operations:
            if isinstance(operation, Stack):
                found.add(operation.number)
            elif isinstance(operation, Unstack):
                found.add(operation.stack.number)
        return frozenset(found)

    def way(self, reverse: bool) -> tuple[Operation, ...]:
        """The operations in the order in which they are done."""
        return tuple(each.inverse() for each in reversed(self.operations)) if reverse else self.operations


@dataclass(frozen=True)
class NameRules:
    """A table of rules.

    Attributes:
        path: the file, or the name of a built-in table.
        title: what it is for, in a line.
        sides: what its left and right are called.
        rules: the rules.
        sizes: what it calls sizes of the model.
        numbers: the numbers in its names.
        options: what is to be chosen.
        chosen: values of options that were stated.
        direction: ``EITHER`` or ``FORWARD``.
        keeps_others: whether names that no rule speaks of stay as they are, instead of being an error.
        text: the file.
    """

    path: str
    title: str
    sides: tuple[str, str]
    rules: tuple[NameRule, ...]
    sizes: tuple[ModelSize, ...] = ()
    numbers: tuple[Number, ...] = ()
    options: tuple[TableOption, ...] = ()
    chosen: tuple[tuple[str, str], ...] = ()
    direction: str = EITHER
    keeps_others: bool = False
    text: str = ""

    def size_values(self, config: Optional[Mapping[str, object]]) -> dict[str, object]:
        """The values in a configuration from which the table takes sizes.

        Args:
            config: what config.json says, if there is one.

        Returns:
            Values by key, as JSON has them; nothing of keys that are absent or null.
        """
        keys = {key for size in self.sizes for one in size.told_by for key in one.names}
        said = {key: config_value(config, key) for key in sorted(keys)}
        return {key: value for key, value in said.items() if value is not None}
