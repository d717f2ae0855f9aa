"""Rules as a TOML file. Everything in it is checked when it is read; a key or word that is unknown is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Optional, Union

from reshard.checkpoints.formats.dtypes import dtype_named
from reshard.errors import StrategyError, UsageError
from reshard.storage import UnfitError, read_small
from reshard.storage.toml_tables import TableReader, TomlError, parse_toml
from reshard.strategies.one_file import read_error
from reshard.strategies.rules.model import (
    DEFAULT_MATRIX,
    LAYER,
    NOT_SHOWN,
    WHOLE,
    Cut,
    Entry,
    Matrix,
    Pipeline,
    Rule,
    Rules,
    Shown,
    Variant,
)
from reshard.strategies.rules.sizes import Condition, condition, parse_sizes, product
from reshard.text.products import ExpressionError
from reshard.text.wording import quoted

LARGEST = 1 << 22
_TOP = ("pipeline", "parameter", "optimizer_states", "shown_for", "shown_with", "dtype", "matrix", "optimizer_shard")
_PIPELINE = ("first", "last", "layers")
_PARAMETER = ("match", "matrix", "map", "optimizer_shard", "nested", "dtype", "split_sizes", "trained", "set")

# Attributes of `Rule` that go by another name.
_FIELDS = {"matrix": "matrices", "map": "entries"}


def read_rules(path: str, partial: bool = False) -> Rules:
    """Read a file of rules.

    Args:
        path: the file.
        partial: rules need not say how parameters are cut; others come after them.

    Raises:
        StrategyError: it is missing or no TOML, or says something that rules cannot say.
        RetryableError: reading failed.
    """
    try:
        data = read_small(path, LARGEST)
    except UnfitError as error:
        raise StrategyError(f"{path} {error}; it is no file of rules", file=path) from error
    except OSError as error:
        raise read_error(path, error) from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise StrategyError(f"{path} is not UTF-8; it is no file of rules", file=path) from error
    return parse_rules(text, path, partial)


def parse_rules(text: str, path: str, partial: bool = False) -> Rules:
    """The rules that a text holds.

    Raises:
        StrategyError: it is no TOML, or says something that rules cannot say.
    """
    content = _loaded(text, path)
    file = _Reader(path)
    file.keys(content, _TOP, "rules")
    pipeline = content.get("pipeline", {})
    if not isinstance(pipeline, dict):
        raise file.wrong("[pipeline]", "is no table")
    file.keys(pipeline, _PIPELINE, "[pipeline]")
    first, last, layers = (file.texts(pipeline, key, "[pipeline]") for key in _PIPELINE)
    for pattern in layers:
        if pattern.count(LAYER) != 1:
            raise file.wrong("[pipeline]", f"layers: {quoted(pattern)} does not have {LAYER} once")
    tables = content.get("parameter", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise file.wrong("parameter", "is written [[parameter]]")
    matrices = file.matrices(content, "rules") or (DEFAULT_MATRIX,)
    shard = file.optimizer_shard(content, "rules", True)
    rules = tuple(_rule(file, table, number, matrices, shard, partial) for number, table in enumerate(tables, 1))
    states = file.texts(content, "optimizer_states", "rules") if "optimizer_states" in content else None
    conditions = tuple(Shown(file.condition(said, "shown_for")) for said in file.texts(content, "shown_for", "rules"))
    try:
        shown_with = tuple(map(parse_sizes, file.texts(content, "shown_with", "rules")))
    except UsageError as error:
        raise file.wrong("shown_with", error.message) from error
    dtype = file.dtype(content, "rules")
    return Rules(path, rules, Pipeline(first, last, layers), states, conditions, shown_with, dtype, text)


def _loaded(text: str, path: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except TomlError as error:
        hint = "reshard strategy rules --list names built-in rules; one of them, shown, is an example"
        raise StrategyError(f"{path} is no TOML: {error}", file=path, hint=hint) from error


def _rule(
    file: _Reader,
    table: Mapping[str, Any],
    number: int,
    matrices: tuple[Matrix, ...],
    shard: Union[bool, Condition, None],
    partial: bool,
) -> Rule:
    where = f"[[parameter]] {number}"
    file.keys(table, _PARAMETER, where)
    patterns = file.texts(table, "match", where)
    if not patterns:
        raise file.wrong(where, "has no match")
    where += f" ({', '.join(patterns[:2])}{', ...' if len(patterns) > 2 else ''})"
    entries: Optional[tuple[Entry, ...]] = None
    whole = False
    said = table.get("map")
    if said == "None":
        whole = True
    elif isinstance(said, list):
        entries = tuple(file.entry(one, where) for one in said)
    elif said is not None:
        raise file.wrong(where, 'map is a list with an entry per dimension, or "None" where every dimension is whole')
    elif not partial:
        raise file.wrong(where, "has no map")
    sizes = table.get("split_sizes", [])
    if not isinstance(sizes, list) or not all(type(size) is int and 0 < size < 2**62 for size in sizes):
        raise file.wrong(where, "split_sizes is no list of sizes")
    return Rule(
        patterns,
        where,
        file.matrices(table, where) or matrices,
        entries,
        whole,
        file.optimizer_shard(table, where, shard),
        file.flag(table, "nested", where, False),
        file.dtype(table, where),
        tuple(sizes),
        file.flag(table, "trained", where, True),
        said=frozenset(_FIELDS.get(key, key) for key in table if key not in ("match", "set")) if partial else None,
        # Only whole rules are made with --set.
        variants=() if partial else tuple(_variants(file, table, where, number, matrices, shard)),
    )


def _variants(
    file: _Reader,
    table: Mapping[str, Any],
    where: str,
    number: int,
    matrices: tuple[Matrix, ...],
    shard: Union[bool, Condition, None],
) -> Iterator[Variant]:
    """The rules of ``set``: each entry is the value of one switch, and what the rule says instead."""
    plain = {key: value for key, value in table.items() if key != "set"}
    entries = table.get("set", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise file.wrong(where, 'set is a list such as [{ vocab_emb_dp = true, map = ["None", "None"] }]')
    for entry in entries:
        switches = [key for key in entry if key not in _PARAMETER]
        value = entry[switches[0]] if len(switches) == 1 else None
        if not isinstance(value, (bool, int, str)):
            raise file.wrong(where, "each entry of set has one switch, with true, false, a number or a text")
        instead = {**plain, **{key: said for key, said in entry.items() if key != switches[0]}}
        yield Variant(switches[0], str(value).lower(), _rule(file, instead, number, matrices, shard, partial=False))


class _Reader(TableReader):
    """Takes values out of the tables of a file of rules."""

    def __init__(self, path: str) -> None:
        super().__init__(path, lambda message: StrategyError(message, file=path))

    def condition(self, text: str, where: str) -> Condition:
        try:
            return condition(text)
        except ExpressionError as error:
            raise self.wrong(where, str(error)) from error

    def dtype(self, table: Mapping[str, Any], where: str) -> Optional[str]:
        """MindSpore's name of a type, however it is spelled; what names no type is refused where it is needed."""
        text = self.text(table, "dtype", where)
        return text if text is None else dtype_named(text) or text

    def optimizer_shard(
        self, table: Mapping[str, Any], where: str, default: Union[bool, Condition, None]
    ) -> Union[bool, Condition, None]:
        value = table.get("optimizer_shard", default)
        if value == NOT_SHOWN:
            return None
        if isinstance(value, str):
            return self.condition(value, f"{where}: optimizer_shard")
        if value is None or isinstance(value, (bool, Condition)):
            return value
        raise self.wrong(where, 'optimizer_shard is true, false, or a comparison of sizes such as "mp<=2"')

    def matrices(self, table: Mapping[str, Any], where: str) -> tuple[Matrix, ...]:
        """One matrix, or several of which it is not known which; none where the key is absent."""
        if "matrix" not in table:
            return ()
        value = table["matrix"]
        found = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        for matrix in found:
            if not isinstance(matrix, list) or not matrix or not all(isinstance(axis, str) for axis in matrix):
                raise self.wrong(where, 'matrix is a list of axes such as ["dp", "cp", "mp"]')
        try:
            return tuple(tuple(map(product, matrix)) for matrix in found)
        except ExpressionError as error:
            raise self.wrong(where, f"matrix: {error}") from error

    def entry(self, said: Any, where: str) -> Entry:
        """The cut of one dimension."""
        try:
            if said == NOT_SHOWN:
                return None
            if isinstance(said, str):
                return tuple(cut_of(text.strip()) for text in said.split("|"))
            if isinstance(said, list) and said and all(isinstance(axis, str) for axis in said):
                return (Cut(tuple(map(product, said))),)
        except ExpressionError as error:
            raise self.wrong(where, f"map: {error}") from error
        raise self.wrong(where, f"map: {said!r} is no cut")


def cut_of(text: str) -> Cut:
    """The cut that a text in a map says.

    Raises:
        ExpressionError: it says none.
    """
    if text == "None":
        return WHOLE
    if text.lower() == "none":
        raise ExpressionError(f'{text!r} is written "None"')
    bare = text[:-1] if text.endswith("?") else text
    capped = re.fullmatch(r"min\(([^,()]*),\s*([1-9][0-9]{0,8})\s*\)", bare)
    if capped:
        return Cut((product(capped[1].strip()),), int(capped[2]), text.endswith("?"))
    return Cut((product(bare),), None, text.endswith("?"))
