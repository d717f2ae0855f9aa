"""Rules of layouts: cuts of parameters, in named axes, for any sizes of these; read from TOML, given or built-in.

A rule is for all parameters whose names match its patterns. It contains the grid of named axes of a stage's
devices, slowest first, and the axes that cut each dimension. With `AxisSizes` it gives a device matrix and a
tensor map.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard.checkpoints.formats.dtypes import dtype_named
from reshard.errors import StrategyError, UsageError
from reshard.storage.toml_tables import BuiltinFiles, Schema, TomlFile
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.candidates import DEFAULT_MATRIX, WHOLE, AxisCut, Candidate, Matrix
from reshard.text.globs import matcher
from reshard.text.messages import quoted
from reshard.text.products import ExpressionError, product
from reshard.threads import cached_property

LAYER = "{layer}"
"""The mark of a layer's number in the patterns of ``[pipeline]``."""

MayShard = tuple[bool | None, bool | None]
"""Whether the optimizer may shard a parameter, and whether it may where the cut is capped; None if unknown."""


@dataclass(frozen=True)
class LayoutRule:
    """The layout of parameters; some attributes may be unknown.

    Attributes:
        patterns: the parameters, as shell patterns.
        where: the place of the rule, for messages.
        matrices: device matrices; the candidates if unknown.
        entries: a cut per dimension, or its candidates; None if the rule leaves cuts open.
        every_dimension_whole: all dimensions are whole, for any number of them.
        optimizer_shard: whether the optimizer may shard the parameters.
        nested: written as the Layout interface writes it: a map per dimension, axes of size 1 kept.
        dtype: MindSpore's name of the element type in training, if it differs from the shapes' file.
        trained: whether the parameters have optimizer state, if the shapes' file has none at all.
        candidates: all candidates that strategies allow, instead of ``matrices`` and ``entries``.
        recorded: exactly this layout, from a strategy with the target's sizes.
        stated: the attributes of a partial rule; later rules have the others. None: the rule is complete.
        switches: options with switches of the model's configuration, one of which replaces this rule.
    """

    patterns: tuple[str, ...]
    where: str
    matrices: tuple[Matrix, ...] = (DEFAULT_MATRIX,)
    entries: tuple[tuple[AxisCut, ...], ...] | None = None
    every_dimension_whole: bool = False
    optimizer_shard: MayShard = (True, True)
    nested: bool = False
    dtype: str | None = None
    trained: bool = True
    candidates: tuple[Candidate, ...] = ()
    recorded: RecordedLayout | None = None
    stated: frozenset[str] | None = None
    switches: tuple[str, ...] = ()

    @cached_property
    def matches(self) -> Callable[[str], bool]:
        """Whether a name matches one of the patterns."""
        return matcher(self.patterns)

    @property
    def has_cuts(self) -> bool:
        return bool(self.entries is not None or self.every_dimension_whole or self.recorded or self.candidates)


_CUTS = ("entries", "every_dimension_whole", "candidates", "recorded", "nested", "matrices")


def _merged(rules: Sequence[LayoutRule]) -> LayoutRule:
    """The last of several rules, with the attributes of the partial rules before it."""
    merged = rules[-1]
    for rule in reversed(rules[:-1]):
        stated = rule.stated or frozenset()
        fields = {*stated - {*_CUTS}, *(_CUTS if rule.has_cuts else stated & {"matrices"})}
        if "matrices" in fields and not rule.has_cuts:
            possible = tuple(each for each in merged.candidates if each.matrix in rule.matrices)
            merged = replace(merged, candidates=possible or merged.candidates)
        changes = {field: getattr(rule, field) for field in fields}
        merged = replace(merged, patterns=rule.patterns, where=rule.where, **changes)
    return merged


class Pipeline(NamedTuple):
    """Patterns of the parameters on the first stage, on the last stage, and of the layers.

    Those of layers have `LAYER` for the number; if there are none, it is the only number in names.
    """

    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutRules:
    """The rules of a model.

    Attributes:
        path: the file, or the name of built-in rules.
        rules: in order; the first that matches holds.
        pipeline: stages.
        optimizer_states: prefixes of optimizer state; None if the shapes' file lists the state.
        shown: sizes beyond which the strategies do not show cuts, by name.
        text: the file's content.
    """

    path: str
    rules: tuple[LayoutRule, ...]
    pipeline: Pipeline = field(default_factory=Pipeline)
    optimizer_states: tuple[str, ...] | None = None
    shown: Mapping[str, int] = field(default_factory=dict)
    text: str = ""

    @cached_property
    def _known(self) -> dict[tuple[int, ...], LayoutRule]:
        return {}

    def rule_for(self, name: str) -> LayoutRule:
        """The first rule that matches, with the attributes of partial rules before it; without cuts if none matches.

        Parameters with the same rules share one object.
        """
        matching: list[LayoutRule] = []
        for rule in self.rules:
            if rule.matches(name):
                matching.append(rule)
                if rule.has_cuts and rule.stated is None:
                    break
        key = tuple(map(id, matching))
        if key not in self._known:
            self._known[key] = _merged(matching) if matching else LayoutRule((), "no rule")
        return self._known[key]


_MEANT = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "deepseek_v3"), "the rules of this model are mcore"),
    "qwen2": "the rules of this model are llama",
    "megatron": "rules are for MindSpore's strategies; with MindFormers' mcore models: mcore",
}
_BUILTIN = BuiltinFiles(__file__, "rules", StrategyError, "reshard strategy rules --list", _MEANT)
_TOP: Schema = {"pipeline": ("table", {}), "parameter": ("tables", ()), "optimizer_states": ("texts", None)}
_PIPELINE: Schema = {"first": ("texts", ()), "last": ("texts", ()), "layers": ("texts", ())}
_PARAMETER: Schema = {
    "match": ("texts", ()),
    "matrix": ("any", None),
    "map": ("any", None),
    "optimizer_shard": ("any", True),
    "nested": ("flag", False),
    "dtype": ("text", None),
    "trained": ("flag", True),
    "set": ("tables", ()),
}
# Attributes of `LayoutRule` whose names differ from their keys.
_FIELDS = {"matrix": "matrices", "map": "entries"}
_NO_SWITCHES: Mapping[str, str] = MappingProxyType({})


def builtin_names() -> list[str]:
    return _BUILTIN.names()


def is_builtin(text: str) -> bool:
    return _BUILTIN.path(text) is not None


def rules_named(text: str, switches: Mapping[str, str] = _NO_SWITCHES) -> LayoutRules:
    """The rules of a file, or built-in ones.

    Raises:
        StrategyError: neither exists, or the file is invalid.
        UsageError: no rule has this switch, or it does not have this value.
    """
    return replace(read_rules(_BUILTIN.path(text) or text, switches=switches), path=text)


def read_rules(path: str, partial: bool = False, switches: Mapping[str, str] = _NO_SWITCHES) -> LayoutRules:
    """Read a file of rules; where it is partial, later rules give what a rule with cuts does not state.

    Raises:
        StrategyError: the file is missing, not TOML, or has invalid rules.
        RetryableError: reading failed.
    """
    return parse_rules(TomlFile(path, StrategyError).read(), path, partial, switches)


def parse_rules(text: str, path: str, partial: bool = False, switches: Mapping[str, str] = _NO_SWITCHES) -> LayoutRules:
    """The rules in a text."""
    file = _RulesFile(path, partial, switches)
    top = file.values(file.parse(text), _TOP, "rules")
    pipeline = Pipeline(**file.values(top["pipeline"], _PIPELINE, "[pipeline]"))
    for pattern in pipeline.layers:
        if pattern.count(LAYER) != 1:
            raise file.wrong("[pipeline]", f"layers: {quoted(pattern)} must have {LAYER} once")
    file.check_patterns((*pipeline.layers, *pipeline.first, *pipeline.last), "[pipeline]")
    rules = tuple(file.rule(table, f"[[parameter]] {number}") for number, table in enumerate(top["parameter"], 1))
    file.check_switches()
    return LayoutRules(path, rules, pipeline, top["optimizer_states"], text=text)


class _RulesFile(TomlFile):
    """A file of rules of layouts.

    Args:
        path: the file, for messages.
        partial: as for `read_rules`.
        switches: values of switches.
    """

    def __init__(self, path: str, partial: bool, switches: Mapping[str, str]) -> None:
        super().__init__(path, StrategyError)
        self._partial = partial
        self._stated = {name: value.lower() for name, value in switches.items()}
        self._known: dict[str, dict[str, None]] = {}

    def rule(self, content: Mapping[str, Any], where: str) -> LayoutRule:
        """The rule of a table, or the one that a switch puts in its place."""
        table = self.values(content, _PARAMETER, where)
        patterns, cuts = table["match"], table["map"]
        if not patterns:
            raise self.wrong(where, "match is missing")
        self.check_patterns(patterns, where)
        place = f"{where} ({', '.join(patterns[:2])}{', ...' if len(patterns) > 2 else ''})"
        if cuts not in (None, "None") and not isinstance(cuts, list):
            raise self.wrong(place, 'map must be a list with an entry per dimension, or "None" if all are whole')
        chosen = None
        options: list[str] = []
        for entry in table["set"]:
            name, value, more = self._switch(entry, place)
            instead = self.rule({**{key: content[key] for key in content if key != "set"}, **more}, where)
            options.append(f"--set {name}={value}")
            if self._stated.get(name) == value:
                chosen = instead
        stated = frozenset(_FIELDS.get(key, key) for key in content if key not in ("match", "set"))
        return chosen or LayoutRule(
            patterns,
            place,
            self._matrices(table["matrix"], place),
            tuple(self._cuts(cut, place) for cut in cuts) if isinstance(cuts, list) else None,
            cuts == "None",
            self._optimizer_shard(table["optimizer_shard"], place),
            table["nested"],
            # Unknown types are refused when they are used.
            table["dtype"] and (dtype_named(table["dtype"]) or table["dtype"]),
            table["trained"],
            stated=stated if self._partial or cuts is None else None,
            switches=tuple(options),
        )

    def check_patterns(self, patterns: Sequence[str], where: str) -> None:
        try:
            matcher(patterns)
        except UsageError as error:
            raise self.wrong(where, str(error)) from error

    def check_switches(self) -> None:
        """Refuse values for switches that no rule has."""
        for name, value in self._stated.items():
            known = self._known.get(name)
            if known is None:
                switches = ", ".join(self._known) or "none"
                raise UsageError(f"--set {name}: {self.path} has no switch of this name; known: {switches}")
            if value not in known:
                raise UsageError(f"--set {name}={value}: {name} is one of {', '.join(known)}")

    def _switch(self, entry: Mapping[str, Any], where: str) -> tuple[str, str, dict[str, Any]]:
        """The name and value of an entry of ``set``, and its keys, which replace the rule's."""
        names = [key for key in entry if key not in _PARAMETER]
        value = entry[names[0]] if len(names) == 1 else None
        if not isinstance(value, (bool, int, str)):
            raise self.wrong(where, "each entry of set must have one switch: true, false, a number or a text")
        text = str(value).lower()
        self._known.setdefault(names[0], {})[text] = None
        return names[0], text, {key: value for key, value in entry.items() if key != names[0]}

    def _optimizer_shard(self, value: Any, where: str) -> MayShard:
        if value == "uncapped":
            return True, False
        if isinstance(value, bool):
            return value, value
        raise self.wrong(where, 'optimizer_shard must be true, false, or "uncapped": not where min(...) caps the cut')

    def _matrices(self, value: Any, where: str) -> tuple[Matrix, ...]:
        if value is None:
            return (DEFAULT_MATRIX,)
        matrices = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        for matrix in matrices:
            if not isinstance(matrix, list) or not matrix or not all(isinstance(axis, str) for axis in matrix):
                raise self.wrong(where, 'matrix must be a list of axes such as ["dp", "cp", "mp"]')
        return tuple(self.parsed(product, matrix, f"{where}: matrix") for matrix in matrices)

    def _cuts(self, content: Any, where: str) -> tuple[AxisCut, ...]:
        if isinstance(content, str):
            return self.parsed(lambda text: _cut(text.strip()), content.split("|"), f"{where}: map")
        if isinstance(content, list) and content and all(isinstance(axis, str) for axis in content):
            return (AxisCut(self.parsed(product, content, f"{where}: map")),)
        raise self.wrong(where, f"map: {content!r} is not a cut")


def _cut(text: str) -> AxisCut:
    if text == "None":
        return WHOLE
    if text.lower() == "none":
        raise ExpressionError(f'{text!r} is written "None"')
    text, _, needs = (part.strip() for part in text.partition(" if "))
    bare = text[:-1] if text.endswith("?") else text
    capped = re.fullmatch(r"min\(([^,()]*),\s*([1-9][0-9]{0,8})\s*\)", bare)
    most = int(capped[2]) if capped else None
    factors = (product(capped[1].strip() if capped else bare),)
    return AxisCut(factors, most, text.endswith("?"), product(needs) if needs else None)
