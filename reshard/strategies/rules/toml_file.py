"""Rules of layouts in TOML files, given by users or built-in. The whole file is checked when it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Optional

from reshard.checkpoints.formats.dtypes import dtype_named
from reshard.errors import StrategyError, UsageError
from reshard.storage.toml_tables import BuiltinFiles, TomlFile, TomlKey
from reshard.strategies.rules.candidates import DEFAULT_MATRIX, WHOLE, AxisCut, Matrix
from reshard.strategies.rules.model import (
    LAYER,
    LayoutRule,
    LayoutRules,
    MayShard,
    Pipeline,
)
from reshard.strategies.rules.sizes import product
from reshard.text.globs import Globs
from reshard.text.messages import quoted
from reshard.text.products import ExpressionError

LARGEST = 1 << 22
_EXAMPLES = "for an example: reshard strategy rules llama"
_BUILTIN = BuiltinFiles(__file__, "rules", StrategyError, "reshard strategy rules --list")
_TEXTS = TomlKey("texts", ())
_TOP = {
    "pipeline": TomlKey("table", {}),
    "parameter": TomlKey("tables", (), description="written [[parameter]]"),
    "optimizer_states": TomlKey("texts"),
    "dtype": TomlKey("text"),
    "matrix": TomlKey("any"),
    "optimizer_shard": TomlKey("any", True),
}
_PIPELINE = {"first": _TEXTS, "last": _TEXTS, "layers": _TEXTS}
_PARAMETER = {
    "match": TomlKey("texts", required=True),
    "matrix": TomlKey("any"),
    "map": TomlKey("any"),
    "optimizer_shard": TomlKey("any"),
    "nested": TomlKey("flag", False),
    "dtype": TomlKey("text"),
    "split_sizes": TomlKey("sizes", ()),
    "trained": TomlKey("flag", True),
    "set": TomlKey("tables", (), description='a list such as [{ vocab_emb_dp = true, map = ["None", "None"] }]'),
}
# Attributes of `LayoutRule` whose names differ from their keys.
_FIELDS = {"matrix": "matrices", "map": "entries"}


def builtin_names() -> list[str]:
    """The names of all built-in rules."""
    return _BUILTIN.names()


def builtin_title(name: str) -> str:
    """The first line of built-in rules: the models that they are for."""
    return read_rules(_BUILTIN.path(name)).text.partition("\n")[0].lstrip("# ")


def is_builtin(text: str) -> bool:
    """Whether a text is the name of built-in rules, and not a path."""
    return _BUILTIN.has(text)


def rules_named(text: str, switches: Mapping[str, str] = MappingProxyType({})) -> LayoutRules:
    """The rules of a file, or built-in ones.

    Args:
        text: the path, or the name.
        switches: values of the switches of ``set``.

    Raises:
        StrategyError: neither exists, or the file is invalid.
        UsageError: no rule has this switch, or it does not have this value.
    """
    if is_builtin(text):
        return replace(read_rules(_BUILTIN.path(text), switches=switches), path=text)
    _BUILTIN.check_exists(text)
    return read_rules(text, switches=switches)


def read_rules(path: str, partial: bool = False, switches: Mapping[str, str] = MappingProxyType({})) -> LayoutRules:
    """Read a file of rules.

    Args:
        path: the file.
        partial: rules may leave cuts open, which later rules give.
        switches: values of the switches of ``set``.

    Raises:
        StrategyError: the file is missing, not TOML, or has invalid rules.
        RetryableError: reading failed.
    """
    return parse_rules(_RulesFile(path).read(LARGEST), path, partial, switches)


def parse_rules(
    text: str, path: str, partial: bool = False, switches: Mapping[str, str] = MappingProxyType({})
) -> LayoutRules:
    """The rules in a text.

    Raises:
        StrategyError: the text is not TOML, or has invalid rules.
    """
    file = _RulesFile(path, switches)
    top = file.values(file.parse(text), _TOP, "rules")
    pipeline = Pipeline(**file.values(top["pipeline"], _PIPELINE, "[pipeline]"))
    for pattern in pipeline.layers:
        if pattern.count(LAYER) != 1:
            raise file.wrong("[pipeline]", f"layers: {quoted(pattern)} must have {LAYER} once")
    _check_patterns(file, (*pipeline.layers, *pipeline.first, *pipeline.last), "[pipeline]")
    # Each rule inherits these two from the top of the file.
    inherited = {
        "matrices": file.matrices(top["matrix"], "rules") or (DEFAULT_MATRIX,),
        "optimizer_shard": file.optimizer_shard(top["optimizer_shard"], "rules"),
    }
    rules = tuple(_rule(file, table, number, inherited, partial) for number, table in enumerate(top["parameter"], 1))
    file.check_switches()
    return LayoutRules(path, rules, pipeline, top["optimizer_states"], dtype=_dtype(top["dtype"]), text=text)


def _check_patterns(file: _RulesFile, patterns: Sequence[str], where: str) -> None:
    try:
        Globs(patterns)
    except UsageError as error:
        raise file.wrong(where, str(error)) from error


def _rule(
    file: _RulesFile, content: Mapping[str, Any], number: int, inherited: Mapping[str, Any], partial: bool
) -> LayoutRule:
    where = f"[[parameter]] {number}"
    table = file.values(content, _PARAMETER, where)
    patterns = table["match"]
    if not patterns:
        raise file.wrong(where, "match is missing")
    _check_patterns(file, patterns, where)
    where += f" ({', '.join(patterns[:2])}{', ...' if len(patterns) > 2 else ''})"
    cuts = table["map"]
    if cuts is None and not partial:
        raise file.wrong(where, "map is missing")
    if cuts not in (None, "None") and not isinstance(cuts, list):
        raise file.wrong(where, 'map must be a list with an entry per dimension, or "None" if all are whole')
    shard = table["optimizer_shard"]
    # --set is an option of make, which reads whole rules only.
    options: list[str] = []
    chosen = None
    for entry in () if partial else table["set"]:
        name, value, more = file.switch(entry, where)
        plain = {key: value for key, value in content.items() if key != "set"}
        instead = _rule(file, {**plain, **more}, number, inherited, partial)
        options.append(f"--set {name}={value}")
        if file.is_set(name, value):
            chosen = instead
    return chosen or LayoutRule(
        patterns,
        where,
        file.matrices(table["matrix"], where) or inherited["matrices"],
        tuple(file.entry(cut, where) for cut in cuts) if isinstance(cuts, list) else None,
        cuts == "None",
        inherited["optimizer_shard"] if shard is None else file.optimizer_shard(shard, where),
        table["nested"],
        _dtype(table["dtype"]),
        table["split_sizes"],
        table["trained"],
        stated=frozenset(_FIELDS.get(key, key) for key in content if key not in ("match", "set")) if partial else None,
        switches=tuple(options),
    )


def _dtype(text: Optional[str]) -> Optional[str]:
    """MindSpore's name of a type, in any spelling; unknown types are refused when they are used."""
    return text if text is None else dtype_named(text) or text


class _RulesFile(TomlFile):
    """A file of rules of layouts, with its special values and its switches."""

    def __init__(self, path: str, switches: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(path, StrategyError, _EXAMPLES)
        self._stated = {name: value.lower() for name, value in switches.items()}
        self._known: dict[str, dict[str, None]] = {}

    def switch(self, entry: Mapping[str, Any], where: str) -> tuple[str, str, dict[str, Any]]:
        """The name and value of an entry of ``set``, and its keys, which replace the rule's."""
        names = [key for key in entry if key not in _PARAMETER]
        value = entry[names[0]] if len(names) == 1 else None
        if not isinstance(value, (bool, int, str)):
            raise self.wrong(where, "each entry of set must have one switch: true, false, a number or a text")
        text = str(value).lower()
        self._known.setdefault(names[0], {})[text] = None
        return names[0], text, {key: value for key, value in entry.items() if key != names[0]}

    def is_set(self, name: str, value: str) -> bool:
        """Whether a switch has this value."""
        return self._stated.get(name) == value

    def check_switches(self) -> None:
        """Refuse values for switches that no rule has.

        Raises:
            UsageError: names those that exist.
        """
        for name, value in self._stated.items():
            known = self._known.get(name)
            if known is None:
                switches = ", ".join(self._known) or "none"
                raise UsageError(f"--set {name}: {self.path} has no switch of this name; known: {switches}")
            if value not in known:
                raise UsageError(f"--set {name}={value}: {name} is one of {', '.join(known)}")

    def optimizer_shard(self, value: Any, where: str) -> MayShard:
        """Whether the optimizer may shard, and whether it may where cuts are capped."""
        if value == "uncapped":
            return True, False
        if isinstance(value, bool):
            return value, value
        raise self.wrong(where, 'optimizer_shard must be true, false, or "uncapped": not where min(...) caps the cut')

    def matrices(self, value: Any, where: str) -> tuple[Matrix, ...]:
        """One matrix, or the candidates if unknown; none if the key is absent."""
        if value is None:
            return ()
        matrices = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        for matrix in matrices:
            if not isinstance(matrix, list) or not matrix or not all(isinstance(axis, str) for axis in matrix):
                raise self.wrong(where, 'matrix must be a list of axes such as ["dp", "cp", "mp"]')
        return tuple(self.parsed(product, matrix, f"{where}: matrix") for matrix in matrices)

    def entry(self, content: Any, where: str) -> tuple[AxisCut, ...]:
        """The cut of one dimension, or its candidates."""
        if isinstance(content, str):
            return self.parsed(lambda text: cut_of(text.strip()), content.split("|"), f"{where}: map")
        if isinstance(content, list) and content and all(isinstance(axis, str) for axis in content):
            return (AxisCut(self.parsed(product, content, f"{where}: map")),)
        raise self.wrong(where, f"map: {content!r} is not a cut")


def cut_of(text: str) -> AxisCut:
    """The cut of a text in a map.

    Raises:
        ExpressionError: the text is not a cut.
    """
    if text == "None":
        return WHOLE
    if text.lower() == "none":
        raise ExpressionError(f'{text!r} is written "None"')
    bare = text[:-1] if text.endswith("?") else text
    capped = re.fullmatch(r"min\(([^,()]*),\s*([1-9][0-9]{0,8})\s*\)", bare)
    if capped:
        return AxisCut((product(capped[1].strip()),), int(capped[2]), text.endswith("?"))
    return AxisCut((product(bare),), None, text.endswith("?"))
