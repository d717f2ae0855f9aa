"""Rules of layouts: cuts of parameters, in named axes, for any sizes of these.

A rule is for all parameters whose names match its patterns. It contains the grid of named axes of a stage's
devices, slowest first, and the axes that cut each dimension. With `AxisSizes` it gives a device matrix and a
tensor map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

from reshard.strategies.model import RecordedLayout
from reshard.strategies.rules.candidates import DEFAULT_MATRIX, AxisCut, Candidate, Matrix
from reshard.text.globs import Glob
from reshard.threads import cached_property

LAYER = "{layer}"
"""The mark of a layer's number in the patterns of ``[pipeline]``."""

MayShard = tuple[Optional[bool], Optional[bool]]
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
        split_sizes: sizes of dimension 0's slices where the table is split by hand.
        trained: whether the parameters have optimizer state, if the shapes' file has none at all.
        candidates: all candidates that strategies allow, instead of ``matrices`` and ``entries``.
        recorded: exactly this layout, from a strategy with the target's sizes.
        stated: the attributes of a partial rule; later rules have the others. None: the rule is complete.
        switches: options with switches of the model's configuration, one of which replaces this rule.
    """

    patterns: tuple[str, ...]
    where: str
    matrices: tuple[Matrix, ...] = (DEFAULT_MATRIX,)
    entries: Optional[tuple[tuple[AxisCut, ...], ...]] = None
    every_dimension_whole: bool = False
    optimizer_shard: MayShard = (True, True)
    nested: bool = False
    dtype: Optional[str] = None
    split_sizes: tuple[int, ...] = ()
    trained: bool = True
    candidates: tuple[Candidate, ...] = ()
    recorded: Optional[RecordedLayout] = None
    stated: Optional[frozenset[str]] = None
    switches: tuple[str, ...] = ()

    @cached_property
    def _globs(self) -> Sequence[Glob]:
        return [Glob(pattern) for pattern in self.patterns]

    def matches(self, name: str) -> bool:
        """Whether the rule matches a parameter."""
        return any(glob.matches(name) for glob in self._globs)

    @property
    def has_cuts(self) -> bool:
        """Whether the rule gives cuts, not only other attributes."""
        return bool(self.entries is not None or self.every_dimension_whole or self.recorded or self.candidates)


_CUTS = ("entries", "every_dimension_whole", "candidates", "recorded", "nested", "split_sizes", "matrices")


def _merged(rules: Sequence[LayoutRule]) -> LayoutRule:
    """The last of several rules, with the attributes of the partial rules before it."""
    merged = rules[-1]
    for rule in reversed(rules[:-1]):
        stated = rule.stated or frozenset()
        fields = [field for field in stated if field not in _CUTS]
        if rule.has_cuts:
            fields += _CUTS
        elif "matrices" in stated:
            fields.append("matrices")
            possible = tuple(each for each in merged.candidates if each.matrix in rule.matrices)
            merged = replace(merged, candidates=possible or merged.candidates)
        changes = {field: getattr(rule, field) for field in fields}
        merged = replace(merged, patterns=rule.patterns, where=rule.where, **changes)
    return merged


@dataclass(frozen=True)
class Pipeline:
    """The stages of parameters.

    Attributes:
        first: patterns of the parameters on the first stage.
        last: patterns of the parameters on the last stage.
        layers: patterns of the layers' parameters, with `LAYER` for the number; if empty, the only number in names.
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
        dtype: default element type, for parameters without one in their rule and in the shapes' file.
        text: the file's content.
    """

    path: str
    rules: tuple[LayoutRule, ...]
    pipeline: Pipeline = field(default_factory=Pipeline)
    optimizer_states: Optional[tuple[str, ...]] = None
    shown: Mapping[str, int] = field(default_factory=dict)
    dtype: Optional[str] = None
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
