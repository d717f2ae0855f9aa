"""Options of a table: what the user states, what config.json says, or what is usual."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Optional

from reshard.errors import NamesError, UsageError
from reshard.names.model import Condition, Option, Rule, Rules
from reshard.names.pattern import SizedPattern
from reshard.names.sizes import Sizes, config_value
from reshard.text.near_names import near_names
from reshard.text.wording import quoted

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Settled:
    """A table whose options are settled.

    Attributes:
        rules: those that hold.
        sizes: the model's.
        values: per option what it is.
        assumed: choices that nothing tells, so that they are what is usual.
    """

    rules: tuple[Rule, ...]
    sizes: Sizes
    values: Mapping[str, str]
    assumed: tuple[str, ...]


def with_options(rules: Rules, stated: Mapping[str, str]) -> Rules:
    """A table with options stated.

    Raises:
        UsageError: it has no such option, or the option no such value.
    """
    options = {option.name: option for option in rules.options}
    for name, value in stated.items():
        option = options.get(name)
        if option is None:
            near = near_names(name, options)
            known = f"; known: {', '.join(options)}" if options else "; it has none"
            meant = f". Did you mean {near[0]}?" if near else known
            raise UsageError(f"{rules.path}: the rules have no option {quoted(name)}{meant}")
        if option.values and value not in option.values:
            raise UsageError(f"{rules.path}: {name} is one of {', '.join(option.values)}, not {quoted(value)}")
        if not option.values and not _NUMBER.fullmatch(value):
            raise UsageError(f"{rules.path}: {name} is a number, not {quoted(value)}")
    return replace(rules, chosen=tuple({**dict(rules.chosen), **stated}.items()))


def settle(rules: Rules, config: Optional[Mapping[str, object]], names: Container[str]) -> Settled:
    """The rules that hold for a model.

    Args:
        rules: the table.
        config: what config.json says, if there is one.
        names: those of the checkpoint.

    Raises:
        NamesError: an option is neither stated nor told, or the configuration says something else.
    """
    stated = dict(rules.chosen)
    sizes = Sizes(rules.sizes, config)
    told = {
        option.name: _told(option, stated, config, rules) or _seen(option, sizes, names) for option in rules.options
    }
    values = {option.name: told[option.name] or _usual(option, rules) for option in rules.options}
    numbers = {option.name: int(values[option.name]) for option in rules.options if not option.values}
    held = tuple(rule for rule in rules.rules if all(_holds(condition, values) for condition in rule.when))
    # A number that nothing tells shows in shapes where it is another.
    assumed = tuple(option.name for option in rules.options if option.values and told[option.name] is None)
    return Settled(held, Sizes(rules.sizes, config, numbers), values, assumed)


def possible_options(rules: Rules, config: Optional[Mapping[str, object]]) -> Iterator[dict[str, str]]:
    """All values that the options may have, where those that a checkpoint's names tell are not known.

    Args:
        rules: the table.
        config: what config.json says, if there is one.

    Raises:
        NamesError: an option is neither stated nor told, or the configuration says something else.
    """
    stated = dict(rules.chosen)
    ways = []
    for option in rules.options:
        told = _told(option, stated, config, rules)
        if told is None and option.seen:
            ways.append(sorted({value for _, value in option.seen} | {_usual(option, rules)}))
        else:
            ways.append([told or _usual(option, rules)])
    for values in itertools.product(*ways):
        yield {option.name: value for option, value in zip(rules.options, values)}


def _holds(condition: Condition, values: Mapping[str, str]) -> bool:
    return values[condition.option] in condition.values


def _told(
    option: Option, stated: Mapping[str, str], config: Optional[Mapping[str, object]], rules: Rules
) -> Optional[str]:
    """What is stated of an option, or told by the configuration, if anything is."""
    if option.name in stated:
        return stated[option.name]
    told = None if option.key is None else config_value(config, option.key)
    if told is None:
        return None
    spelled = str(told).lower() if isinstance(told, bool) else str(told)
    meant = dict(option.told).get(spelled, spelled)
    if meant in option.values or (not option.values and _NUMBER.fullmatch(meant)):
        return meant
    path = getattr(config, "path", "config.json")
    raise NamesError(f"{path}: {option.key} is {quoted(spelled)}, which says no {option.name} of {rules.path}")


def _seen(option: Option, sizes: Sizes, names: Container[str]) -> Optional[str]:
    """What the checkpoint's names tell; where none of them is there, that tells it as well."""
    for pattern, value in option.seen:
        if SizedPattern(pattern, sizes.value).name({}, ()) in names:
            return value
    return option.default if option.seen else None


def _usual(option: Option, rules: Rules) -> str:
    if option.default is not None:
        return option.default
    known = ", ".join(option.values) or "a number"
    raise NamesError(
        f"{rules.path}: the option {option.name} has to be stated: {known}",
        hint=f"--names {rules.path},{option.name}={option.values[0] if option.values else 1}",
    )
