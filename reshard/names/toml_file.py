"""Rules of names as a TOML file. Everything in it is checked when it is read; what is unknown is an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import NamesError, RetryableError
from reshard.names.model import EITHER, FORWARD, Condition, Number, Option, Rule, Rules
from reshard.names.operations import Stack, Unstack
from reshard.names.operations_text import OperationReader
from reshard.names.pattern import pattern
from reshard.names.sizes import Size
from reshard.names.toml_values import RuleFile
from reshard.storage import UnfitError, read_small
from reshard.storage.toml_tables import TomlError, parse_toml
from reshard.text.wording import quoted

LARGEST = 1 << 20
_TOP = ("title", "sides", "direction", "others", "sizes", "numbers", "options", "blocks", "rule")
_RULE = ("from", "to", "do", "when", "optional", "choice", "case")
_NUMBER = ("count", "at_most")
_OPTION = ("values", "default", "config", "told", "seen", "about")
_BLOCK = ("from", "to", "when")
_KEEP = "keep"
_DROP = "drop"
# What a rule does that says nothing.
_RENAME = "rename"
_MOST_RULES = 10000


class _Block(NamedTuple):
    """What a name of a block stands for in one place: on the left, on the right, and on which conditions."""

    left: str
    right: str
    when: tuple[str, ...]


def read_rules(path: str) -> Rules:
    """Read a file of rules.

    Raises:
        NamesError: it is missing or no TOML, or says something that rules cannot say.
        RetryableError: reading failed.
    """
    try:
        data = read_small(path, LARGEST)
    except UnfitError as error:
        raise NamesError(f"{path} {error}; it is no file of rules", file=path) from error
    except FileNotFoundError as error:
        raise NamesError(f"{path}: there is no such file of rules", file=path) from error
    except OSError as error:
        raise RetryableError(f"{path} cannot be read: {error.strerror or error}", file=path) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NamesError(f"{path} is not UTF-8; it is no file of rules", file=path) from error
    return parse_rules(text, path)


def parse_rules(text: str, path: str) -> Rules:
    """The rules that a text holds.

    Raises:
        NamesError: it is no TOML, or says something that rules cannot say.
    """
    content = _loaded(text, path)
    file = RuleFile(path)
    file.keys(content, _TOP, "rules")
    sizes = tuple(
        Size(file.word(name, "sizes"), file.products(said, f"sizes.{name}"))
        for name, said in file.table(content, "sizes").items()
    )
    numbers = tuple(_number(file, name, said) for name, said in file.table(content, "numbers").items())
    named = {size.name for size in sizes}
    options = tuple(_option(file, name, said, named) for name, said in file.table(content, "options").items())
    for said in (*numbers, *options):
        if isinstance(said, Option) and said.name in {size.name for size in sizes}:
            raise file.wrong(f"options.{said.name}", "is the name of a size, too")
        if isinstance(said, Number) and said.count is not None:
            known = [size.name for size in sizes]
            for name in said.count.names:
                if name not in known:
                    raise file.wrong(f"numbers.{said.name}", f"{name} is no size; known: {', '.join(known)}")
    # An option that is a number is a size, too.
    known_sizes = {size.name for size in sizes} | {option.name for option in options if not option.values}
    tables = content.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise file.wrong("rule", "is written [[rule]]")
    blocks = _blocks(file, content)
    rules = [
        rule
        for number, table in enumerate(tables, 1)
        for rule in _rules(file, table, number, blocks, known_sizes, options)
    ]
    if len(rules) > _MOST_RULES:
        raise file.wrong("rules", f"are more than {_MOST_RULES}")
    sides = file.texts(content, "sides", "rules") or ("left", "right")
    if len(sides) != 2 or sides[0] == sides[1]:
        raise file.wrong("sides", "are not two names")
    return Rules(
        path,
        file.text(content, "title", "rules") or "",
        (sides[0], sides[1]),
        tuple(rules),
        sizes,
        numbers,
        options,
        direction=file.one_of(content, "direction", (EITHER, FORWARD), "rules"),
        keeps_others=file.one_of(content, "others", ("error", _KEEP), "rules") == _KEEP,
        text=text,
    )


def content_of(rules: Rules) -> dict[str, Any]:
    """What the file of a table says, as it stands there."""
    return _loaded(rules.text, rules.path)


def _loaded(text: str, path: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except TomlError as error:
        hint = "reshard names list names built-in rules; one of them, shown, is an example"
        raise NamesError(f"{path} is no TOML: {error}", file=path, hint=hint) from error


def _number(file: RuleFile, name: str, said: Any) -> Number:
    where = f"numbers.{name}"
    file.word(name, "numbers")
    if isinstance(said, dict):
        file.keys(said, _NUMBER, where)
        if len(said) != 1:
            raise file.wrong(where, 'says neither count = "SIZE" nor at_most = "SIZE"')
        key, count = next(iter(said.items()))
        return Number(name, file.product(count, where), key == "at_most")
    return Number(name, file.product(said, where))


def _option(file: RuleFile, name: str, said: Any, sizes: Collection[str]) -> Option:
    where = f"options.{name}"
    file.word(name, "options")
    if not isinstance(said, dict):
        raise file.wrong(where, "is no table")
    file.keys(said, _OPTION, where)
    values = file.texts(said, "values", where)
    told = file.table(said, "told")
    default = said.get("default")
    default = str(default) if type(default) is int else default
    if default is not None and (not isinstance(default, str) or (values and default not in values)):
        raise file.wrong(where, f"default is none of {', '.join(values)}")
    if not values and default is not None and not default.isdecimal():
        raise file.wrong(where, "has no values, so that its default is a number")
    seen = file.table(said, "seen")
    for value in (*told.values(), *seen.values()):
        if value not in values:
            raise file.wrong(where, f"{value!r} is none of {', '.join(values)}")
    patterns = tuple((file.parsed(pattern, text, where), value) for text, value in seen.items())
    for each, _ in patterns:
        if each.numbers or each.stars:
            raise file.wrong(where, f"seen: {quoted(each.text)} has a number or a star")
        if any(size not in sizes for offset in each.products for size in offset.names):
            raise file.wrong(where, f"seen: {quoted(each.text)} has what is no size")
    key, about = file.text(said, "config", where), file.text(said, "about", where)
    return Option(name, values, default, key, tuple(told.items()), patterns, about or "")


def _blocks(file: RuleFile, content: Mapping[str, Any]) -> dict[str, list[_Block]]:
    """Texts that stand for several, per name."""
    found: dict[str, list[_Block]] = {}
    for name, said in file.table(content, "blocks").items():
        where = f"blocks.{file.word(name, 'blocks')}"
        if not isinstance(said, list) or not all(isinstance(block, dict) for block in said):
            raise file.wrong(where, "is no list of tables with from and to")
        found[name] = []
        for block in said:
            file.keys(block, _BLOCK, where)
            left, right = file.text(block, "from", where), file.text(block, "to", where)
            if not left or not right:
                raise file.wrong(where, "lacks from or to")
            found[name].append(_Block(left, right, file.texts(block, "when", where)))
    return found


def _rules(
    file: RuleFile,
    table: Mapping[str, Any],
    number: int,
    blocks: Mapping[str, list[_Block]],
    sizes: set[str],
    options: Sequence[Option],
) -> list[Rule]:
    """The rule that a table says; several where its names are in a block."""
    where = f"[[rule]] {number}"
    file.keys(table, _RULE, where)
    left, right = file.texts(table, "from", where), file.texts(table, "to", where)
    if not left and not right:
        raise file.wrong(where, "has neither from nor to")
    where += f" ({(left or right)[0]})"
    used = [name for name in blocks if any(f"{{{name}}}" in text for text in (*left, *right))]
    if len(used) > 1:
        raise file.wrong(where, "is in several blocks")
    if not used:
        return [_rule(file, table, where, left, right, sizes, options)]
    mark = f"{{{used[0]}}}"
    return [
        _rule(
            file,
            {**table, "when": [*file.texts(table, "when", where), *block.when]},
            f"{where} in {block.left}",
            tuple(text.replace(mark, block.left) for text in left),
            tuple(text.replace(mark, block.right) for text in right),
            sizes,
            options,
        )
        for block in blocks[used[0]]
    ]


def _rule(
    file: RuleFile,
    table: Mapping[str, Any],
    where: str,
    left_texts: Sequence[str],
    right_texts: Sequence[str],
    sizes: set[str],
    options: Sequence[Option],
) -> Rule:
    left = tuple(file.parsed(pattern, text, where) for text in left_texts)
    right = tuple(file.parsed(pattern, text, where) for text in right_texts)
    said = table.get("do", [])
    steps = said if isinstance(said, list) else [said]
    if steps == [_RENAME]:
        steps = []
    drops = steps == [_DROP]
    if drops and left and right:
        raise file.wrong(where, 'do = "drop" needs from or to alone')
    if not drops and not (left and right):
        raise file.wrong(where, 'has from or to alone; do = "drop" leaves such names out')
    reader = OperationReader(file, where, len(left), len(right), sizes)
    operations = () if drops else reader.operations(steps)
    rule = Rule(
        where,
        left,
        right,
        operations,
        tuple(_condition(file, text, where, options) for text in file.texts(table, "when", where)),
        file.flag(table, "optional", where),
        file.text(table, "choice", where),
        file.text(table, "case", where),
    )
    if (rule.choice is None) != (rule.case is None):
        raise file.wrong(where, "choice and case go together")
    if rule.choice is not None and (left or right)[0].stars:
        raise file.wrong(where, "its names have stars, so that nothing tells for what a case is to be chosen")
    _check_names(file, rule, where, sizes)
    return rule


def _check_names(file: RuleFile, rule: Rule, where: str, sizes: set[str]) -> None:
    """Every name of a side has the same numbers and stars, and the other side those that are not stacked."""
    for each in (*rule.left, *rule.right):
        for offset in each.products:
            for name in offset.names:
                if name not in sizes:
                    raise file.wrong(where, f"{quoted(each.text)}: {name} is no size")
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
        raise file.wrong(where, f"{quoted(left.text)} and {quoted(right.text)} have not as many stars")
    if left.numbers ^ right.numbers != rule.stacked:
        alone = ", ".join(f"{{{name}}}" for name in sorted(left.numbers ^ right.numbers ^ rule.stacked))
        raise file.wrong(
            where, f"{alone} must stand on both sides, or on one and be stacked or unstacked by this side's names"
        )
    if len(rule.stacked) > 1:
        raise file.wrong(where, "stacks more than one number")
    for operation in rule.operations:
        if isinstance(operation, Stack) and operation.number not in left.numbers:
            raise file.wrong(where, f"stacks {operation.number}, which its names in from do not have")
        if isinstance(operation, Unstack) and operation.stack.number not in right.numbers:
            raise file.wrong(where, f"unstacks {operation.stack.number}, which its names in to do not have")


def _condition(file: RuleFile, text: str, where: str, options: Sequence[Option]) -> Condition:
    name, equals, said = (word.strip() for word in text.partition("="))
    for option in options:
        if option.name == name and equals:
            values = tuple(value.strip() for value in said.split("|"))
            if option.values and not set(values) <= set(option.values):
                raise file.wrong(where, f"when: {name} is one of {', '.join(option.values)}")
            return Condition(name, values)
    raise file.wrong(where, f"when: {quoted(text)} is no option and value such as {_example(options)}")


def _example(options: Sequence[Option]) -> str:
    for option in options:
        if option.values:
            return f"{option.name}={option.values[0]}"
    return "gate_up=halves, and there are no options"
