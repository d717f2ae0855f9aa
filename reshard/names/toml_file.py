"""A reader of rules of names in TOML. It checks the whole file; an unknown key is an error."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from reshard.errors import NamesError
from reshard.names.model import EITHER, FORWARD, NameRule, NameRules, Number, OptionCondition, TableOption
from reshard.names.operations import Stack
from reshard.names.operations_text import OperationReader, RuleFile
from reshard.names.pattern import pattern
from reshard.names.sizes import ModelSize
from reshard.storage.toml_tables import Schema
from reshard.text.messages import quoted

_KEEP = "keep"
_DROP = "drop"
# The operation of a rule without operations.
_RENAME = "rename"
_TABLE: tuple[str, dict[str, Any]] = ("table", {})
_TOP: Schema = {
    "title": ("text", ""),
    "sides": ("texts", ("left", "right")),
    "direction": ("text", EITHER),
    "others": ("text", "error"),
    "sizes": _TABLE,
    "numbers": _TABLE,
    "options": _TABLE,
    "blocks": _TABLE,
    "rule": ("tables", ()),
}
_OPTION: Schema = {
    "values": ("texts", ()),
    "default": ("any", None),
    "config": ("text", None),
    "config_values": _TABLE,
    "name_values": _TABLE,
    "about": ("text", ""),
}
_BLOCK: Schema = {"from": ("text", ""), "to": ("text", ""), "when": ("texts", ())}
_RULE: Schema = {
    "from": ("texts", ()),
    "to": ("texts", ()),
    "do": ("any", ()),
    "when": ("texts", ()),
    "optional": ("flag", False),
    "choice": ("text", None),
    "case": ("text", None),
}


def read_rules(path: str) -> NameRules:
    """Read a file of rules.

    Raises:
        NamesError: the file is missing, not TOML, or not a table of rules.
        RetryableError: reading failed.
    """
    return parse_rules(RuleFile(path, NamesError).read(), path)


def parse_rules(text: str, path: str) -> NameRules:
    """The rules in a text.

    Raises:
        NamesError: the text is not TOML, or not a table of rules.
    """
    file = RuleFile(path, NamesError)
    top = file.values(file.parse(text), _TOP, "rules")
    sizes = tuple(
        ModelSize(file.word(name, "sizes"), file.products(content, f"sizes.{name}"))
        for name, content in top["sizes"].items()
    )
    size_names = [size.name for size in sizes]
    numbers = tuple(_number(file, name, content, size_names) for name, content in top["numbers"].items())
    options = tuple(_option(file, name, content, size_names) for name, content in top["options"].items())
    # An option without a list of values is a number, which products may use as a size.
    usable_sizes = {*size_names, *(option.name for option in options if not option.values)}
    blocks = {name: _block(file, name, content) for name, content in top["blocks"].items()}
    rules = [
        rule
        for number, table in enumerate(top["rule"], 1)
        for rule in _rules(file, table, number, blocks, usable_sizes, options)
    ]
    sides = top["sides"]
    if len(sides) != 2 or sides[0] == sides[1]:
        raise file.wrong("sides", "must be two different names")
    for key, words in (("direction", (EITHER, FORWARD)), ("others", ("error", _KEEP))):
        if top[key] not in words:
            raise file.wrong(key, f"must be {' or '.join(words)}")
    return NameRules(
        path,
        top["title"],
        (sides[0], sides[1]),
        tuple(rules),
        sizes,
        numbers,
        options,
        direction=top["direction"],
        keeps_others=top["others"] == _KEEP,
        text=text,
    )


def _number(file: RuleFile, name: str, content: Any, sizes: Collection[str]) -> Number:
    where = f"numbers.{file.word(name, 'numbers')}"
    at_most = content.get("at_most") if isinstance(content, dict) and len(content) == 1 else None
    number = Number(name, file.product(content if at_most is None else at_most, where), at_most is not None)
    for size in number.count.names if number.count is not None else ():
        if size not in sizes:
            raise file.wrong(where, f"{size} is not a size; known: {', '.join(sizes)}")
    return number


def _option(file: RuleFile, name: str, content: Any, sizes: Collection[str]) -> TableOption:
    where = f"options.{file.word(name, 'options')}"
    if not isinstance(content, dict):
        raise file.wrong(where, "must be a table")
    if name in sizes:
        raise file.wrong(where, "is the name of a size, too")
    table = file.values(content, _OPTION, where)
    values = table["values"]
    default = str(table["default"]) if type(table["default"]) is int else table["default"]
    if default is not None and (not isinstance(default, str) or (values and default not in values)):
        raise file.wrong(where, f"default must be {' or '.join(values)}")
    if not values and default is not None and not default.isdecimal():
        raise file.wrong(where, "has no values, so its default must be a number")
    shown = {name: (value,) if isinstance(value, str) else tuple(value) for name, value in table["name_values"].items()}
    for value in (*table["config_values"].values(), *itertools.chain.from_iterable(shown.values())):
        if value not in values:
            raise file.wrong(where, f"{value!r} must be {' or '.join(values)}")
    patterns = tuple(zip(file.parsed(pattern, [*shown], where), shown.values()))
    for each, _ in patterns:
        if each.stars:
            raise file.wrong(where, f"name_values: {quoted(each.text)} must not have stars")
        if any(size not in sizes for offset in each.products for size in offset.names):
            raise file.wrong(where, f"name_values: {quoted(each.text)} uses an unknown size")
    return TableOption(
        name, values, default, table["config"], tuple(table["config_values"].items()), patterns, table["about"]
    )


def _block(file: RuleFile, name: str, content: Any) -> list[dict[str, Any]]:
    """The substitutions of a block: texts on the left and on the right, with their conditions."""
    where = f"blocks.{file.word(name, 'blocks')}"
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise file.wrong(where, "must be a list of tables with from and to")
    tables = [file.values(block, _BLOCK, where) for block in content]
    if not all(table["from"] and table["to"] for table in tables):
        raise file.wrong(where, "lacks from or to")
    return tables


def _rules(
    file: RuleFile,
    content: Mapping[str, Any],
    number: int,
    blocks: Mapping[str, list[dict[str, Any]]],
    sizes: set[str],
    options: Sequence[TableOption],
) -> list[NameRule]:
    """The rule of a table; several where its names are in a block."""
    where = f"[[rule]] {number}"
    table = file.values(content, _RULE, where)
    left, right = table["from"], table["to"]
    if not left and not right:
        raise file.wrong(where, "has neither from nor to")
    where += f" ({(left or right)[0]})"
    used = [name for name in blocks if any(f"{{{name}}}" in text for text in (*left, *right))]
    if len(used) > 1:
        raise file.wrong(where, "is in several blocks")
    if not used:
        return [_rule(file, table, where, sizes, options)]
    mark = f"{{{used[0]}}}"
    return [
        _rule(
            file,
            {
                **table,
                "from": [text.replace(mark, block["from"]) for text in left],
                "to": [text.replace(mark, block["to"]) for text in right],
                "when": (*table["when"], *block["when"]),
            },
            f"{where} in {block['from']}",
            sizes,
            options,
        )
        for block in blocks[used[0]]
    ]


def _rule(
    file: RuleFile, table: Mapping[str, Any], where: str, sizes: set[str], options: Sequence[TableOption]
) -> NameRule:
    left, right = (file.parsed(pattern, table[side], where) for side in ("from", "to"))
    steps = table["do"] if isinstance(table["do"], (list, tuple)) else [table["do"]]
    steps = [] if steps == [_RENAME] else steps
    drops = steps == [_DROP]
    if drops and left and right:
        raise file.wrong(where, 'do = "drop" needs from or to alone')
    if not drops and not (left and right):
        raise file.wrong(where, 'has from or to alone; to skip such names, add do = "drop"')
    reader = OperationReader(file, where, len(left), len(right), sizes)
    operations = () if drops else reader.operations(steps)
    conditions = tuple(_condition(file, text, where, options) for text in table["when"])
    rule = NameRule(where, left, right, operations, conditions, table["optional"], table["choice"], table["case"])
    if (rule.choice is None) != (rule.case is None):
        raise file.wrong(where, "choice and case go together")
    if rule.choice is not None and (left or right)[0].stars:
        raise file.wrong(where, "a rule with a choice must not have stars in its names")
    _check_names(file, rule, where, sizes)
    return rule


def _check_names(file: RuleFile, rule: NameRule, where: str, sizes: set[str]) -> None:
    """Check that all names of a side have the same numbers and stars, and both sides the same unstacked numbers."""
    for each in (*rule.left, *rule.right):
        for offset in each.products:
            for name in offset.names:
                if name not in sizes:
                    raise file.wrong(where, f"{quoted(each.text)}: {name} is not a size")
    for side in (rule.left, rule.right):
        first = side[0] if side else None
        for each in side:
            assert first is not None
            if each.numbers != first.numbers or each.stars != first.stars:
                raise file.wrong(where, f"{quoted(first.text)} and {quoted(each.text)} differ in numbers or stars")
        if len({each.text for each in side}) != len(side):
            raise file.wrong(where, "has a name twice")
    if rule.drops:
        return
    left, right = rule.left[0], rule.right[0]
    if left.stars != right.stars:
        raise file.wrong(where, f"{quoted(left.text)} and {quoted(right.text)} have different numbers of stars")
    if left.numbers ^ right.numbers != rule.stacked:
        alone = ", ".join(f"{{{name}}}" for name in sorted(left.numbers ^ right.numbers ^ rule.stacked))
        raise file.wrong(where, f"{alone} must be on both sides, or on one side and be stacked or unstacked there")
    if len(rule.stacked) > 1:
        raise file.wrong(where, "stacks more than one number")
    for operation in rule.operations:
        if isinstance(operation, Stack) and operation.number not in (right if operation.inverted else left).numbers:
            verb, names = ("unstacks", "to") if operation.inverted else ("stacks", "from")
            raise file.wrong(where, f"{verb} {operation.number}, which its names in {names} do not have")


def _condition(file: RuleFile, text: str, where: str, options: Sequence[TableOption]) -> OptionCondition:
    name, equals, stated = (word.strip() for word in text.partition("="))
    for option in options:
        if option.name == name and equals:
            values = tuple(value.strip() for value in stated.split("|"))
            if option.values and not set(values) <= set(option.values):
                raise file.wrong(where, f"when: {name} is one of {', '.join(option.values)}")
            return OptionCondition(name, values)
    raise file.wrong(where, f"when: {quoted(text)} is not an option and a value such as {_example(options)}")


def _example(options: Sequence[TableOption]) -> str:
    for option in options:
        if option.values:
            return f"{option.name}={option.values[0]}"
    return "gate_up=halves: the table has no options"
