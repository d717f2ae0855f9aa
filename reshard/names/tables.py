"""Tables of rules: built-in or TOML files, with options, or single renames; and the model's configuration.

A file is checked as a whole; an unknown key is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.errors import NamesError, UsageError
from reshard.names.operations import Check, Copy, Join, Operation, Pad, Reshape, Stack, Transpose
from reshard.names.pattern import PatternError, pattern
from reshard.names.rules import (
    EITHER,
    FAMILY,
    FORWARD,
    HUB_SIDE,
    NameRule,
    NameRules,
    TableOption,
    TableSide,
    settle,
    stacks,
    with_options,
)
from reshard.names.sizes import Configuration, ModelSize
from reshard.storage import exists, is_directory, is_regular_file, read_json
from reshard.storage.toml_tables import BuiltinFiles, Schema, TomlFile, did_you_mean
from reshard.text.messages import quoted
from reshard.text.products import Product, product

RENAME = "rename"
"""The path of a table of renames."""

FUSED_EXPERTS = "fused_experts"
"""The table of experts that transformers 5 fuses."""

FUSED = "fused"
"""Its value for models that are published so."""

_MEGATRON, _MINDFORMERS = "megatron", "mindformers"
# Model types whose names are those of another one. Kimi-K2.5 has a vision tower beside them.
_MODEL_TYPES = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}

_MEANT = {
    "mcore": "mcore is for reshard strategy make; --names takes the model family: qwen3, qwen3_moe or deepseek_v3",
    **dict.fromkeys(
        ("hf", "huggingface"),
        "--names takes the model family, as in --names qwen3; to Hugging Face's form: --to huggingface",
    ),
}
_BUILTIN = BuiltinFiles(__file__, "table", NamesError, "reshard names list", _MEANT)
_OPTIONS = re.compile(r"(?:\s*,\s*[a-z][a-z0-9_]*=[A-Za-z0-9_]+)+\s*\Z")
_LARGEST_CONFIG = 1 << 22

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
_BLOCK: Schema = {"from": ("text", None), "to": ("text", None), "do": ("any", ()), "when": ("texts", ())}
_RULE: Schema = {
    "from": ("texts", ()),
    "to": ("texts", ()),
    "do": ("any", ()),
    "when": ("texts", ()),
    "optional": ("flag", False),
    "choice": ("text", None),
    "case": ("text", None),
}
_SIDES = ("from", "to")
# Between names that show an option together.
_TOGETHER = " & "
# A part with the remaining elements.
_REST = "rest"


def builtin_names() -> list[str]:
    return _BUILTIN.names()


def rules_named(text_of_user: str) -> NameRules:
    """The table of a file, or a built-in one; options may follow: ``qwen3,gate_up=halves``."""
    name, stated = _typed(text_of_user)
    return with_options(_table(name), stated)


def families_of(side: str) -> Sequence[str]:
    """The model families of the built-in table to a side that has one for all; none for other sides and tables."""
    return _table(side).families if side in builtin_names() else ()


def name_one_of(families: Sequence[str]) -> str:
    """What to do where a table depends on the model family."""
    *others, last = families
    return f"name the family of the model: --names {', '.join(others)} or {last}"


def tables_named(text_of_user: str, source: str, target: str) -> tuple[NameRules, ...]:
    """The table as `rules_named` reads it, and behind it that of a side which has one for all model families.

    An option belongs to every table that has it, with this value. A number, such as that of padding, belongs to the
    table of the target.

    Args:
        text_of_user: the table or model family, and options.
        source: the side of the source's form.
        target: the side of the target's form.

    Raises:
        UsageError: the table of a side is named in place of the model family; or an option is unknown.
        NamesError: the table cannot be read.
    """
    name, stated = _typed(text_of_user)
    side = next((each for each in (source, target) if name in families_of(each)), None)
    rules = _table(name) if side is None or name in builtin_names() else _without_own_table(name, (source, target))
    if rules.families:
        problem = f"--names {text_of_user}: the table {name} follows from the form of the checkpoint"
        raise UsageError(problem, hint=name_one_of(rules.families))
    if side is None:
        return (with_options(rules, stated),)
    of_side = _table(side)

    def having(table: NameRules, numbers: bool) -> dict[str, str]:
        values = {option.name: option.values for option in table.options if option.name != FAMILY}
        return {
            key: value
            for key, value in stated.items()
            if key in values and (value in values[key] or (numbers and not values[key]))
        }

    to_family = target == rules.sides[1]
    of_family, others = having(rules, to_family), having(of_side, not to_family)
    unknown = {key: value for key, value in stated.items() if key not in others}
    for key in sorted(unknown.keys() - {option.name for table in (rules, of_side) for option in table.options}):
        raise UsageError(
            f"--names {text_of_user}: the tables {name} and {side} have no option {quoted(key)}",
            hint=f"leave it out: how {side} packs q, k, v and gate, up follows from its form",
        )
    return with_options(rules, {**unknown, **of_family}), with_options(of_side, {FAMILY: name, **others})


class Edge(NamedTuple):
    """A table, and the direction that it is read in; None for the one that fits the names."""

    rules: NameRules
    reverse: bool | None


Path = tuple[Edge, ...]
"""Tables that follow each other: each takes the tensors that the one before makes."""


def path(tables: Iterable[NameRules], source: str, target: str) -> Path:
    """The tables from the names of one side to those of another, each between Hugging Face's names and a side's."""
    table_of = {rules.sides[1]: rules for rules in tables}
    back = () if source == HUB_SIDE else (Edge(table_of[source], True),)
    return back if target == HUB_SIDE else (*back, Edge(table_of[target], False))


def _table(name: str) -> NameRules:
    if name not in builtin_names() and name in families_of(_MEGATRON):
        return _without_own_table(name, (_MINDFORMERS,))
    return replace(read_rules(_BUILTIN.path(name) or name), path=name)


def _without_own_table(family: str, sides: Collection[str]) -> NameRules:
    """A family that only the table of a side has: MindFormers cannot train it, so there are no names beside."""
    rules = NameRules(family, "", (HUB_SIDE, _MINDFORMERS), ())
    if _MINDFORMERS in sides:
        raise UsageError(
            f"--names {family}: MindFormers has no names of this model for training",
            hint="its table is for Megatron's and Hugging Face's names: --to megatron or --to huggingface",
        )
    return rules


def _typed(text_of_user: str) -> tuple[str, dict[str, str]]:
    """The name of a table, and the options that follow it."""
    options = None if is_regular_file(text_of_user) else _OPTIONS.search(text_of_user)
    table = text_of_user if options is None else text_of_user[: options.start()]
    stated: dict[str, str] = {}
    for text in options[0].split(",")[1:] if options is not None else ():
        name, _, value = text.strip().partition("=")
        if name in stated:
            raise UsageError(f"{text_of_user}: {name} is stated twice")
        stated[name] = value
    return table, stated


def published_experts(config: Mapping[str, object] | None) -> str | None:
    """How the model of a config.json is published, if transformers 5 fuses its experts: the option of `FUSED_EXPERTS`.

    `FUSED` if it is published fused; None if the table lacks the model.
    """
    (option,) = rules_named(FUSED_EXPERTS).options
    model = None if config is None else str(config.get("model_type"))
    return model if model in option.values else dict(option.config_values).get(str(model))


def table_of_model(model_type: object) -> str | None:
    """The built-in table for the ``model_type`` of a config.json; None if there is none."""
    table = _MODEL_TYPES.get(str(model_type), str(model_type))
    return table if table in builtin_names() else None


def family_advice(table: NameRules | None, config: Mapping[str, object] | None) -> str | None:
    """What to type where a table is the built-in one of another model family than that of config.json."""
    if table is None or config is None:
        return None
    model_type = str(config.get("model_type"))
    family, families = _MODEL_TYPES.get(model_type, model_type), families_of(_MEGATRON)
    if family == table.path or not {family, table.path} <= {*families}:
        return None
    return f"config.json has model_type {model_type}: --names {family}"


@contextlib.contextmanager
def family_named(table: NameRules | None, config: Mapping[str, object] | None) -> Iterator[None]:
    """Errors name the family of config.json, if it is another one: advice to leave out names would lose weights."""
    try:
        yield
    except NamesError as error:
        error.hint = family_advice(table, config) or error.hint
        raise


def is_foreign(config: Mapping[str, object], names: Collection[str]) -> bool:
    """Whether no name is one of the family of a config.json, if it has a table; False if that is not known."""
    table = table_of_model(config.get("model_type"))
    if table is None:
        return False
    rules = rules_named(table)
    with contextlib.suppress(NamesError):
        side = TableSide(settle(rules, config, names), rules.numbers, rules.sides[1] == HUB_SIDE)
        # The names of a model without a head lack the first word.
        return bool(names) and not any(side.matches(name) or side.matches(f"model.{name}") for name in names)
    return False


def parse_renames(renames: Sequence[str]) -> NameRules:
    """Rules that rename: ``OLD=NEW``. A ``*`` in NEW stands for the text that the ``*`` in OLD matches.

    Other names are unchanged; optimizer state follows its weight.
    """
    rules = []
    for text in renames:
        old, equals, new = text.partition("=")
        if not equals or not old or not new:
            beginning = re.fullmatch(r"[^*{]+\*", old)
            hint = f"to remove {old[:-1]} from names: --rename '{old}=*'" if equals and beginning else None
            raise UsageError(f"{text!r} is not a rename such as 'model.*=backbone.*'", hint=hint)
        try:
            left, right = pattern(old), pattern(new)
        except PatternError as error:
            raise UsageError(str(error)) from error
        if left.stars != right.stars or {*left.numbers} != {*right.numbers}:
            raise UsageError(f"{text!r}: both names need the same stars and numbers")
        if left.sizes or right.sizes:
            raise UsageError(f"{text!r}: a rename cannot use sizes")
        rules.append(NameRule(f"--rename {text}", (left,), (right,)))
    return NameRules(RENAME, "", ("old names", "new names"), tuple(rules), direction=FORWARD, keeps_others=True)


def read_config(path: str) -> Configuration:
    """Read a config.json.

    Raises:
        NamesError: it is missing, or not a JSON object.
        RetryableError: reading failed.
    """
    if is_directory(path):
        path = os.path.join(path, "config.json")
    content = read_json(path, _LARGEST_CONFIG, NamesError)
    if content is None:
        raise NamesError(
            f"{path}: the configuration is missing",
            file=path,
            hint="--config takes the model's config.json or its directory; a table of names goes to --names",
        )
    return Configuration(content, path)


def config_beside(directory: str) -> Configuration | None:
    """The config.json of a directory, if it has one."""
    path = os.path.join(directory, "config.json")
    return read_config(path) if exists(path) else None


def read_rules(path: str) -> NameRules:
    """Read a file of rules."""
    return parse_rules(TomlFile(path, NamesError).read(), path)


def parse_rules(text: str, path: str) -> NameRules:
    """The rules in a text."""
    return _Reader(path).table(text)


class _Reader(TomlFile):
    """Reads a file of rules."""

    def __init__(self, path: str) -> None:
        super().__init__(path, NamesError)
        self.sizes: set[str] = set()
        self.numbers: dict[str, Product] = {}
        self._options: list[TableOption] = []
        self._blocks: dict[str, list[dict[str, Any]]] = {}

    def table(self, text: str) -> NameRules:
        top = self.values(self.parse(text), _TOP, "rules")
        sizes = tuple(
            ModelSize(self._word(name, "sizes"), self._products(content, f"sizes.{name}"))
            for name, content in top["sizes"].items()
        )
        self.sizes = {size.name for size in sizes}
        self.numbers = dict(self._number(name, content) for name, content in top["numbers"].items())
        self._options = [self._option(name, content) for name, content in top["options"].items()]
        # An option without a list of values is a number, which products may use as a size.
        self.sizes |= {option.name for option in self._options if not option.values}
        self._blocks = {name: self._block(name, content) for name, content in top["blocks"].items()}
        rules = [rule for number, table in enumerate(top["rule"], 1) for rule in self._rules(table, number)]
        sides = top["sides"]
        if len(sides) != 2 or sides[0] == sides[1]:
            raise self.wrong("sides", "must be two different names")
        for key, words in (("direction", (EITHER, FORWARD)), ("others", ("error", _KEEP))):
            if top[key] not in words:
                raise self.wrong(key, f"must be {' or '.join(words)}")
        return NameRules(
            self.path,
            top["title"],
            (sides[0], sides[1]),
            tuple(rules),
            sizes,
            tuple(self.numbers.items()),
            tuple(self._options),
            direction=top["direction"],
            keeps_others=top["others"] == _KEEP,
            text=text,
        )

    def product(self, value: Any, where: str) -> Product:
        """A product of sizes, or a number."""
        if type(value) is int and value >= 0:
            value = str(value)
        if not isinstance(value, str):
            raise self.wrong(where, f"{value!r} is not a product of sizes such as heads*head_dim")
        return self.parsed(product, [value], where)[0]

    def _products(self, value: Any, where: str) -> tuple[Product, ...]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise self.wrong(where, "is empty")
        return tuple(self.product(each, where) for each in values)

    def _word(self, name: str, where: str) -> str:
        """A name that products and patterns may use."""
        if not name.replace("_", "a").isalnum() or not name.isascii() or name != name.lower() or name[0].isdigit():
            raise self.wrong(where, f"{quoted(name)} must be a name of small letters, digits and _")
        return name

    def _number(self, name: str, content: Any) -> tuple[str, Product]:
        where = f"numbers.{self._word(name, 'numbers')}"
        count = self.product(content, where)
        for size in count.names:
            if size not in self.sizes:
                raise self.wrong(where, f"{size} is not a size{did_you_mean(size, self.sizes)}")
        return name, count

    def _option(self, name: str, content: Any) -> TableOption:
        where = f"options.{self._word(name, 'options')}"
        if not isinstance(content, dict):
            raise self.wrong(where, "must be a table")
        if name in self.sizes:
            raise self.wrong(where, "is the name of a size, too")
        table = self.values(content, _OPTION, where)
        values = table["values"]
        default = str(table["default"]) if type(table["default"]) is int else table["default"]
        allowed = " or ".join(values) if values else "a number"
        if default is not None and default not in values and (values or not str(default).isdecimal()):
            raise self.wrong(where, f"default must be {allowed}")
        shown = {
            key: (value,) if isinstance(value, str) else tuple(value) for key, value in table["name_values"].items()
        }
        for value in (*table["config_values"].values(), *itertools.chain.from_iterable(shown.values())):
            if value not in values:
                raise self.wrong(where, f"{value!r} must be {allowed}")
        patterns = tuple((self.parsed(pattern, names.split(_TOGETHER), where), each) for names, each in shown.items())
        for each in itertools.chain.from_iterable(names for names, _ in patterns):
            if each.stars or not each.sizes <= self.sizes:
                raise self.wrong(where, f"name_values: {quoted(each.text)} must not have stars or unknown sizes")
        return TableOption(
            name, values, default, table["config"], tuple(table["config_values"].items()), patterns, table["about"]
        )

    def _block(self, name: str, content: Any) -> list[dict[str, Any]]:
        """The substitutions of a block: texts on the left and on the right, with their conditions."""
        where = f"blocks.{self._word(name, 'blocks')}"
        if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise self.wrong(where, "must be a list of tables with from and to")
        tables = [self.values(block, _BLOCK, where) for block in content]
        if any(table[side] is None for table in tables for side in _SIDES):
            raise self.wrong(where, "lacks from or to")
        return tables

    def _rules(self, content: Mapping[str, Any], number: int) -> list[NameRule]:
        """The rule of a table; several where its names are in a block."""
        where = f"[[rule]] {number}"
        table = self.values(content, _RULE, where)
        left, right = table["from"], table["to"]
        if not left and not right:
            raise self.wrong(where, "has neither from nor to")
        where += f" ({(left or right)[0]})"
        used = [name for name in self._blocks if any(f"{{{name}}}" in text for text in (*left, *right))]
        if len(used) > 1:
            raise self.wrong(where, "is in several blocks")
        if not used:
            return [self._rule(table, where)]
        rules = []
        for block in self._blocks[used[0]]:
            sides = {side: [text.replace(f"{{{used[0]}}}", block[side]) for text in table[side]] for side in _SIDES}
            # The operations of a block come after those of its rules.
            steps = _entries(table["do"])
            steps += [] if steps == [_DROP] else _entries(block["do"])
            substituted = {**table, **sides, "do": steps, "when": (*table["when"], *block["when"])}
            rules.append(self._rule(substituted, f"{where} in {block['from']}" if block["from"] else where))
        return rules

    def _rule(self, table: Mapping[str, Any], where: str) -> NameRule:
        left, right = (self.parsed(pattern, table[side], where) for side in _SIDES)
        steps = _entries(table["do"])
        drops = steps == [_DROP]
        if drops and left and right:
            raise self.wrong(where, 'do = "drop" needs from or to alone')
        if not drops and not (left and right):
            raise self.wrong(where, 'has from or to alone; to skip such names, add do = "drop"')
        operations = () if drops else _OperationReader(self, where, len(left), len(right)).operations(steps)
        conditions = tuple(self._condition(text, where) for text in table["when"])
        rule = NameRule(where, left, right, operations, conditions, table["optional"], table["choice"], table["case"])
        if (rule.choice is None) != (rule.case is None):
            raise self.wrong(where, "choice and case go together")
        if rule.choice is not None and (left or right)[0].stars:
            raise self.wrong(where, "a rule with a choice must not have stars in its names")
        self._check_names(rule, where)
        return rule

    def _check_names(self, rule: NameRule, where: str) -> None:
        """Check that all names of a side have the same numbers and stars, and both sides the same unstacked numbers."""
        for side in (rule.left, rule.right):
            for each in side:
                unknown = each.sizes - self.sizes
                if unknown:
                    raise self.wrong(where, f"{quoted(each.text)}: {min(unknown)} is not a size")
                if {*each.numbers} != {*side[0].numbers} or each.stars != side[0].stars:
                    texts = f"{quoted(side[0].text)} and {quoted(each.text)}"
                    raise self.wrong(where, f"{texts} differ in numbers or stars")
                if side.count(each) > 1:
                    raise self.wrong(where, "has a name twice")
        if rule.drops:
            return
        left, right = rule.left[0], rule.right[0]
        if left.stars != right.stars:
            raise self.wrong(where, f"{quoted(left.text)} and {quoted(right.text)} have different numbers of stars")
        alone = {*left.numbers} ^ {*right.numbers}
        if alone != rule.stacked:
            names = ", ".join(f"{{{name}}}" for name in sorted(alone ^ rule.stacked))
            raise self.wrong(where, f"{names} must be on both sides, or on one side and be stacked or unstacked there")
        stacked = stacks(rule.operations)
        if len(stacked) != len(rule.stacked) or len({operation.inverted for operation in stacked}) > 1:
            raise self.wrong(where, "stacks a number twice, or stacks one and unstacks another")
        for operation in stacked:
            if operation.number not in (right if operation.inverted else left).numbers:
                verb, names = ("unstacks", "to") if operation.inverted else ("stacks", "from")
                raise self.wrong(where, f"{verb} {operation.number}, which its names in {names} do not have")

    def _condition(self, text: str, where: str) -> tuple[str, tuple[str, ...]]:
        name, equals, stated = (word.strip() for word in text.partition("!=" if "!=" in text else "="))
        for option in self._options:
            if option.name == name and equals:
                values = tuple(value.strip() for value in stated.split("|"))
                if (option.values or equals == "!=") and not set(values) <= set(option.values):
                    raise self.wrong(where, f"when: {name} is one of {', '.join(option.values)}")
                if equals == "!=":
                    values = tuple(value for value in option.values if value not in values)
                return name, values
        raise self.wrong(where, f"when: {quoted(text)} is not an option and a value such as gate_up=halves")


def _entries(do: Any) -> list[Any]:
    """The operations of a rule or block as a list."""
    entries = list(do) if isinstance(do, (list, tuple)) else [do]
    return [] if entries == [_RENAME] else entries


class _OperationReader:
    """Reads the operations of a rule with a number of names on the left and on the right."""

    def __init__(self, file: _Reader, where: str, left: int, right: int) -> None:
        self._file = file
        self._where = where
        self._left = self._columns = left
        self._right = right
        self._sizes = file.sizes

    def operations(self, entries: Sequence[Any]) -> tuple[Operation, ...]:
        """The operations, each checked against the number of its operands."""
        operations = tuple(map(self._operation, entries))
        if self._columns != self._right:
            results = f"{self._columns} tensor{'s' if self._columns > 1 else ''}"
            raise self._wrong(f"makes {results}, and to has {self._right} names: add or remove an operation")
        inner = stacks(operations)[1:]
        return tuple(self._counted(each) if isinstance(each, Stack) and each in inner else each for each in operations)

    def _counted(self, stack: Stack) -> Stack:
        """A stack of a number beside an outer one: only its count shows how many tensors of a list belong together."""
        count = self._file.numbers.get(stack.number)
        if count is None:
            raise self._wrong(f"do: {stack.number} is stacked with another number, and [numbers] has no count of it")
        return replace(stack, count=count)

    def _operation(self, entry: Any) -> Operation:
        table = {entry: None} if isinstance(entry, str) else entry
        if not isinstance(table, dict) or not table:
            raise self._wrong(f'do: {entry!r} is not an operation such as "transpose" or {{ concat = 1 }}')
        kinds = [kind for kind in _OPERATIONS if kind in table]
        if not kinds:
            name = str(next(iter(table)))
            raise self._wrong(f"do: there is no operation {quoted(name)}{did_you_mean(name, _OPERATIONS)}")
        kind = kinds[0]
        read, keys = _OPERATIONS[kind]
        self._file.values(table, dict.fromkeys((kind, *keys), ("any", None)), f"{self._where}: do")
        operation = read(self, kind, table[kind], table)
        return operation.inverse() if kind in _INVERSES else operation

    def _wrong(self, problem: str) -> Exception:
        return self._file.wrong(self._where, problem)

    def _dimension(self, value: Any) -> int:
        if value is None:
            return 0
        if type(value) is not int or value < 0:
            raise self._wrong(f"do: {value!r} is not a dimension: they are numbered from 0")
        return value

    def _product(self, value: Any) -> Product:
        expression = self._file.product(value, self._where)
        for name in expression.names:
            if name not in self._sizes:
                raise self._wrong(f"do: {name} is not a size{did_you_mean(name, self._sizes)}")
        return expression

    def _parts(self, value: Any, count: int) -> tuple[Product | None, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or value.count(_REST) > 1:
            raise self._wrong(f'do: parts must be a list of {count} sizes, one of which may be "{_REST}"')
        return tuple(None if part == _REST else self._product(part) for part in value)

    def _join(self, kind: str, dimension: Any, table: dict[str, Any]) -> Join:
        """A join of the current tensors, or the join whose inverse splits the current tensor."""
        inverse = kind in _INVERSES
        count = self._into(kind, table) if inverse else self._columns
        if inverse and self._columns != 1:
            raise self._wrong(f"do: {kind} takes one tensor, not {self._columns}")
        if count < 2:
            raise self._wrong(f"do: {kind} needs several tensors")
        self._columns = count if inverse else 1
        along = self._dimension(dimension)
        if kind in ("interleave", "deinterleave"):
            return Join(along, count, block=self._product(table.get("block", 1)))
        if kind in ("concat", "split"):
            return Join(along, count, self._parts(table.get("parts"), count))
        if count != 3:
            raise self._wrong(f"do: {kind} needs three tensors: q, k and v")
        rows = tuple(self._product(f"{heads}*head_dim") for heads in ("heads", "groups", "groups"))
        return Join(along, count, rows, self._product("groups"))

    def _into(self, kind: str, table: dict[str, Any]) -> int:
        """The number of results of a split: that of its parts, or of the names."""
        parts = table.get("parts")
        count = len(parts) if isinstance(parts, list) else table.get("into", self._right)
        if kind == "ungroup_qkv":
            return 3
        if type(count) is not int or count < 1:
            raise self._wrong(f"do: {kind}: {count!r} is not a number of tensors")
        return count

    def _stack(self, kind: str, number: Any, table: dict[str, Any]) -> Stack:
        if not isinstance(number, str) or not number:
            raise self._wrong(f'do: {kind} needs a number such as "expert"')
        return Stack(number, self._dimension(table.get("dimension")), self._columns)

    def _transpose(self, kind: str, order: Any, table: dict[str, Any]) -> Transpose:
        if order is None:
            return Transpose()
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, range(len(order)))):
            raise self._wrong(f"do: transpose = {order!r} is not an order of dimensions such as [1, 0]")
        return Transpose(tuple(order))

    def _reshape(self, kind: str, before: Any, table: dict[str, Any]) -> Reshape:
        if not isinstance(before, list) or not isinstance(table.get("to"), list):
            raise self._wrong(
                'do: reshape must be written { reshape = ["experts", "h", "w"], to = ["experts*h", "w"] }'
            )
        first, second = (
            tuple(self._file.product(each, self._where) for each in shape) for shape in (before, table["to"])
        )
        # In both directions, one shape must give the names in the other.
        names = [{name for one in side for name in one.names if name not in self._sizes} for side in (first, second)]
        if names[0] != names[1]:
            alone = ", ".join(sorted(names[0] ^ names[1]))
            raise self._wrong(f"do: reshape: {alone} is not a size and is in only one shape")
        return Reshape(first, second)

    def _check(self, kind: str, shape: Any, table: dict[str, Any]) -> Check:
        if not isinstance(shape, list):
            raise self._wrong('do: check must be written { check = ["heads*head_dim", "w"] }')
        return Check(tuple(self._file.product(each, self._where) for each in shape))

    def _pad(self, kind: str, dimension: Any, table: dict[str, Any]) -> Pad:
        for key in ("size", "multiple"):
            if key not in table:
                raise self._wrong(f"do: {kind} needs {key}")
        return Pad(self._dimension(dimension), self._product(table["size"]), self._product(table["multiple"]))

    def _copy(self, kind: str, value: Any, table: dict[str, Any]) -> Copy:
        if self._columns != 1 or self._right < 2:
            raise self._wrong("do: copy needs one tensor and several names in to")
        self._columns = self._right
        return Copy(self._right)

    def _take(self, kind: str, value: Any, table: dict[str, Any]) -> Copy:
        if self._columns < 2 or self._columns != self._left:
            raise self._wrong("do: take needs several tensors, all of them names in from")
        count, self._columns = self._columns, 1
        return Copy(count)


# Read as the operations that they undo.
_INVERSES = ("split", "deinterleave", "ungroup_qkv", "unstack", "unpad", "take")
# Per operation the method that reads it, and its further keys.
_OPERATIONS: dict[str, tuple[Callable[[_OperationReader, str, Any, dict[str, Any]], Operation], tuple[str, ...]]] = {
    "concat": (_OperationReader._join, ("parts",)),
    "split": (_OperationReader._join, ("parts", "into")),
    "interleave": (_OperationReader._join, ("block",)),
    "deinterleave": (_OperationReader._join, ("block", "into")),
    "group_qkv": (_OperationReader._join, ()),
    "ungroup_qkv": (_OperationReader._join, ()),
    "stack": (_OperationReader._stack, ("dimension",)),
    "unstack": (_OperationReader._stack, ("dimension",)),
    "transpose": (_OperationReader._transpose, ()),
    "reshape": (_OperationReader._reshape, ("to",)),
    "check": (_OperationReader._check, ()),
    "pad": (_OperationReader._pad, ("size", "multiple")),
    "unpad": (_OperationReader._pad, ("size", "multiple")),
    "take": (_OperationReader._take, ()),
    "copy": (_OperationReader._copy, ()),
}
