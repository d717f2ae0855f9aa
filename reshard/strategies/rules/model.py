"""Rules: how parameters are cut, in named axes, whatever the sizes of these.

A rule says for all parameters whose names fit its patterns which grid of named axes the devices of a
stage are, slowest first, and which of these axes cut which dimension. Sizes make a device matrix and
tensor map of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Optional, Union

from reshard.errors import UsageError
from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.sizes import Condition, Product, Sizes, product
from reshard.text.globs import Glob

LAYER = "{layer}"
"""Stands for a layer's number in the patterns of ``[pipeline]``."""

NOT_SHOWN = "?"
"""What stands in rules for what nobody has said."""

Matrix = tuple[Product, ...]
DEFAULT_MATRIX: Matrix = (product("dp"), product("cp"), product("mp"))
"""Data parallel outermost, model parallel innermost: as MatMul's right operand and most others lie."""


@dataclass(frozen=True)
class Cut:
    """How one dimension is cut.

    Attributes:
        factors: products of neighbouring axes, most significant first; none where the dimension is whole.
            Several are written in the nested form.
        most: more slices than so many are not made, and the rest of the axis repeats them.
        where_divides: whole where the dimension does not divide.
    """

    factors: tuple[Product, ...] = ()
    most: Optional[int] = None
    where_divides: bool = False

    @property
    def text(self) -> str:
        """As it is written in rules, if it has one factor at most."""
        said = "*".join(factor.text for factor in self.factors) or "None"
        said = said if self.most is None else f"min({said},{self.most})"
        return said + "?" * self.where_divides


WHOLE = Cut()


class Reading(NamedTuple):
    """One way in which a tensor may be cut.

    Attributes:
        matrix: the axes of the device matrix, slowest first.
        cuts: one per dimension.
        nested: written as the Layout interface writes it: a map per dimension, axes of size 1 kept.
    """

    matrix: Matrix
    cuts: tuple[Cut, ...]
    nested: bool = False


Entry = Optional[tuple[Cut, ...]]
"""The cut of a dimension, or several of which it is not known which; None where it is not shown at all."""


@dataclass(frozen=True)
class Rule:
    """What is said of parameters.

    Attributes:
        patterns: the parameters, as patterns of a shell.
        where: the rule in words, for messages.
        matrices: the axes of the device matrix, slowest first; several where it is not known which.
        entries: a cut per dimension; None where the rule says nothing of cuts.
        every_dimension_whole: the same for any number of dimensions, all of them whole.
        optimizer_shard: whether the optimizer may shard it; None where that is not shown.
        nested: written as the Layout interface writes it: a map per dimension, axes of size 1 kept.
        dtype: MindSpore's name of the element type in training, where it is not that of the shapes' file.
        split_sizes: sizes of dimension 0's slices where the table is split by hand.
        trained: whether it has optimizer state, where the shapes' file has none at all.
        readings: all ways in which strategies allow it to be cut, in place of ``matrices`` and ``entries``.
        recorded: exactly this layout, of a strategy whose sizes are the target's.
        shard_shown_for: what must be true of sizes for ``optimizer_shard`` to be shown; nothing if None.
        said: what it says, if it is only a part and rules after it say the rest.
        variants: what takes its place where a switch has a value.
    """

    patterns: tuple[str, ...]
    where: str
    matrices: tuple[Matrix, ...] = (DEFAULT_MATRIX,)
    entries: Optional[tuple[Entry, ...]] = None
    every_dimension_whole: bool = False
    optimizer_shard: Union[bool, Condition, None] = True
    nested: bool = False
    dtype: Optional[str] = None
    split_sizes: tuple[int, ...] = ()
    trained: bool = True
    readings: tuple[Reading, ...] = ()
    recorded: Optional[RecordedLayout] = None
    shard_shown_for: Optional[Condition] = None
    said: Optional[frozenset[str]] = None
    variants: tuple[Variant, ...] = ()

    @cached_property
    def _globs(self) -> Sequence[Glob]:
        return [Glob(pattern) for pattern in self.patterns]

    def matches(self, name: str) -> bool:
        """Whether it speaks of a parameter."""
        return any(glob.matches(name) for glob in self._globs)

    @property
    def says_cuts(self) -> bool:
        """Whether it says how parameters are cut, and not only what else is true of them."""
        return bool(self.entries is not None or self.every_dimension_whole or self.recorded or self.readings)

    def may_shard(self, sizes: Sizes) -> Optional[bool]:
        """Whether the optimizer may shard its parameters; None where that is not shown."""
        if self.shard_shown_for is not None and not self.shard_shown_for.holds(sizes):
            return None
        if isinstance(self.optimizer_shard, Condition):
            return self.optimizer_shard.holds(sizes)
        return self.optimizer_shard


class Variant(NamedTuple):
    """A rule that holds where a switch of the model's configuration has a value.

    Attributes:
        switch: its name, as the configuration has it.
        value: in lower case.
        rule: what holds then.
    """

    switch: str
    value: str
    rule: Rule


_CUTS = ("entries", "every_dimension_whole", "readings", "recorded", "nested", "split_sizes", "matrices")


def merged(rules: Sequence[Rule]) -> Rule:
    """What several rules say of the same parameter: each the rest of what those before it have left out."""
    if not rules:
        return Rule((), "no rule")
    found = rules[-1]
    for rule in reversed(rules[:-1]):
        said = rule.said or frozenset()
        fields = [field for field in said if field not in _CUTS]
        if "optimizer_shard" in said:
            fields.append("shard_shown_for")
        if rule.says_cuts:
            fields += _CUTS
        elif "matrices" in said:
            fields.append("matrices")
            kept = tuple(reading for reading in found.readings if reading.matrix in rule.matrices)
            found = replace(found, readings=kept or found.readings)
        found = replace(
            found, patterns=rule.patterns, where=rule.where, **{field: getattr(rule, field) for field in fields}
        )
    return found


@dataclass(frozen=True)
class Pipeline:
    """Which stages parameters are on.

    Attributes:
        first: patterns of those on the first stage.
        last: patterns of those on the last stage.
        layers: patterns of the layers' parameters, with `LAYER` for the number; empty where names tell.
    """

    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


class Shown(NamedTuple):
    """A comparison of sizes that must hold, since nothing is shown of others.

    Attributes:
        condition: the comparison.
        hint: what to do where it does not; the usual, if None.
    """

    condition: Condition
    hint: Optional[str] = None


@dataclass(frozen=True)
class Rules:
    """All that is said of a model.

    Attributes:
        path: the file, or the name of built-in rules.
        rules: in order; the first that fits holds.
        pipeline: stages.
        optimizer_states: what stands before a weight's name in those of its optimizer state; None where the
            shapes' file tells.
        shown_for: what must be true of the target's sizes.
        shown_with: sizes of the strategies that rules were read from. Of several cuts that a rule leaves open, those
            that differ from the first at these sizes are out.
        dtype: element type of parameters of which neither the rule nor the shapes' file says it.
        text: the file's content.
    """

    path: str
    rules: tuple[Rule, ...]
    pipeline: Pipeline = field(default_factory=Pipeline)
    optimizer_states: Optional[tuple[str, ...]] = None
    shown_for: tuple[Shown, ...] = ()
    shown_with: tuple[Sizes, ...] = ()
    dtype: Optional[str] = None
    text: str = ""

    def with_switches(self, stated: Mapping[str, str]) -> Rules:
        """The rules that hold where switches have these values.

        Raises:
            UsageError: no rule has such a switch, or it has no such value.
        """
        known: dict[str, dict[str, None]] = {}
        for rule in self.rules:
            for variant in rule.variants:
                known.setdefault(variant.switch, {})[variant.value] = None
        for name, value in stated.items():
            if name not in known:
                raise UsageError(f"--set {name}: {self.path} has no such switch; known: {', '.join(known) or 'none'}")
            if value.lower() not in known[name]:
                raise UsageError(f"--set {name}={value}: {name} is one of {', '.join(known[name])}")
        return replace(self, rules=tuple(_held(rule, stated) for rule in self.rules))


def _held(rule: Rule, stated: Mapping[str, str]) -> Rule:
    for switch, value, instead in rule.variants:
        if stated.get(switch, "").lower() == value:
            return instead
    return rule
