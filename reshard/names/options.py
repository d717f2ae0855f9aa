"""The options of a table, and the side that a checkpoint is on: stated, from config.json or names, or default."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Optional

from reshard.errors import NamesError, UsageError
from reshard.names.matching import Side
from reshard.names.model import FORWARD, NameRule, NameRules, OptionCondition, TableOption
from reshard.names.operations import Shape
from reshard.names.pattern import SizedPattern
from reshard.names.sizes import ModelSizes, config_value
from reshard.storage.toml_tables import did_you_mean
from reshard.text.names import WEIGHTS, kind_of
from reshard.text.wording import quoted

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Settled:
    """A table with values of its options.

    Attributes:
        rules: the rules whose conditions hold.
        sizes: of the model.
        values: per option its value.
        assumed: options with listed values that have their default.
    """

    rules: tuple[NameRule, ...]
    sizes: ModelSizes
    values: Mapping[str, str]
    assumed: tuple[str, ...]


def with_options(rules: NameRules, stated: Mapping[str, str]) -> NameRules:
    """A table with stated options.

    Raises:
        UsageError: the option or the value is unknown.
    """
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


def settle(rules: NameRules, config: Optional[Mapping[str, object]], names: Container[str]) -> Settled:
    """The rules that apply to a model.

    Args:
        rules: the table.
        config: the content of config.json, if any.
        names: of the checkpoint.

    Raises:
        NamesError: an option has no value, or an unknown value in the configuration.
    """
    stated = dict(rules.chosen)
    sizes = ModelSizes(rules.sizes, config)
    stated_values = {
        option.name: _stated_value(option, stated, config, rules) or _value_from_names(option, sizes, names)
        for option in rules.options
    }
    values = {option.name: stated_values[option.name] or _default(option, rules) for option in rules.options}
    numbers = {option.name: int(values[option.name]) for option in rules.options if not option.values}
    applicable = tuple(rule for rule in rules.rules if all(_holds(condition, values) for condition in rule.when))
    # Without numeric options: a wrong number contradicts a shape.
    assumed = tuple(option.name for option in rules.options if option.values and stated_values[option.name] is None)
    return Settled(applicable, ModelSizes(rules.sizes, config, numbers), values, assumed)


def possible_options(rules: NameRules, config: Optional[Mapping[str, object]]) -> Iterator[dict[str, str]]:
    """All possible combinations of option values, for a checkpoint with unknown names.

    Args:
        rules: the table.
        config: the content of config.json, if any.

    Raises:
        NamesError: an option has no value, or an unknown value in the configuration.
    """
    stated = dict(rules.chosen)
    choices = []
    for option in rules.options:
        value = _stated_value(option, stated, config, rules)
        if value is None and option.name_values:
            choices.append(sorted({value for _, value in option.name_values} | {_default(option, rules)}))
        else:
            choices.append([value or _default(option, rules)])
    for values in itertools.product(*choices):
        yield {option.name: value for option, value in zip(rules.options, values)}


def _holds(condition: OptionCondition, values: Mapping[str, str]) -> bool:
    return values[condition.option] in condition.values


def _stated_value(
    option: TableOption, stated: Mapping[str, str], config: Optional[Mapping[str, object]], rules: NameRules
) -> Optional[str]:
    """The value of an option from the user or the configuration, if any."""
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


def _value_from_names(option: TableOption, sizes: ModelSizes, names: Container[str]) -> Optional[str]:
    """The value of an option from the checkpoint's names; the default if no name decides."""
    for pattern, value in option.name_values:
        if SizedPattern(pattern, sizes.value).name({}, ()) in names:
            return value
    return option.default if option.name_values else None


def _default(option: TableOption, rules: NameRules) -> str:
    if option.default is not None:
        return option.default
    choices = ", ".join(option.values) or "a number"
    raise NamesError(
        f"{rules.path}: the option {option.name} must be stated: {choices}",
        hint=f"--names {rules.path},{option.name}={option.values[0] if option.values else 1}",
    )


def side_of(rules: NameRules, settled: Settled, shapes: Mapping[str, Shape], reverse: Optional[bool]) -> Side:
    """The side that the source is on.

    Args:
        rules: the table.
        settled: the table with values of its options.
        shapes: of all tensors of the source.
        reverse: whether it is the right side; None: the side that matches more weights.

    Raises:
        NamesError: both sides match the same number of weights.
    """
    if reverse is None and rules.direction == FORWARD:
        reverse = False
    if reverse is not None:
        return Side(settled.rules, rules.numbers, settled.sizes, reverse)
    sides = [Side(settled.rules, rules.numbers, settled.sizes, is_right) for is_right in (False, True)]
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


def _examples(sides: list[Side], weights: list[str]) -> Optional[str]:
    examples = [side.patterns()[:1] for side in sides]
    if not weights or not all(examples):
        return None
    return f"the rules have names such as {examples[0][0]} and {examples[1][0]}; the checkpoint has {weights[0]}"
