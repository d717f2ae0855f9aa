"""Rules applied to the tensors of a checkpoint: the tensors of the other naming, as views of the source."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.errors import NamesError, UsageError
from reshard.layout.views import View
from reshard.names.misfits import Misfits, UnusedRules, combinations
from reshard.names.operations import PAD, TAKE, UNPAD, Copy, Shape, SizedOperation, results, sized_all
from reshard.names.pattern import Pattern, SizedPattern
from reshard.names.rules import (
    HUB_SIDE,
    InstanceKey,
    NameMatch,
    NameRules,
    Settled,
    SidedRule,
    TableSide,
    settle,
    side_of,
    undetermined_error,
    with_options,
)
from reshard.text.messages import listing, plural, quoted
from reshard.text.names import OTHER, WEIGHTS, is_value, kind_of, state_prefix
from reshard.text.products import SizeError


class AppliedStep(NamedTuple):
    """One application of a rule.

    Attributes:
        rule: the rule, for messages.
        operations: the operations on the list of sources, in order; none where only the name changes.
        sources: names of the operands, in order.
        targets: names of the results, in order.
    """

    rule: str
    operations: tuple[SizedOperation, ...]
    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Applied:
    """The result of rules on a checkpoint.

    Attributes:
        rules: the table.
        reversed: whether the rules were applied from right to left.
        steps: the steps, in the order of the rules and of the numbers in names.
        shapes: of all tensors of the source.
        dropped: names that a rule skips.
        left_out: names that no rule lists, and that were to be left out.
        skipped_state: optimizer state that was not requested, or whose weight matches no rule.
        tied: pairs of source tensors that should be equal; the first of each is used.
        notes: notes for the user.
        options: all options of the table with their values.
        sizes: the sizes of the model that the rules used.
    """

    rules: NameRules
    reversed: bool
    steps: tuple[AppliedStep, ...]
    shapes: Mapping[str, Shape]
    dropped: tuple[str, ...]
    left_out: tuple[str, ...]
    skipped_state: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    options: Mapping[str, str]
    sizes: Mapping[str, int]

    def views(self) -> Iterator[tuple[str, tuple[str, ...], View]]:
        """Each result: its name, the tensors that it is made of, and its view of these."""
        for step in self.steps:
            operands = tuple((self.shapes[name], (number,)) for number, name in enumerate(step.sources))
            for name, (needed, view) in zip(step.targets, results(step.operations, operands)):
                yield name, tuple(step.sources[number] for number in needed), view


def apply_rules(
    rules: NameRules,
    shapes: Mapping[str, Shape],
    config: Mapping[str, object] | None = None,
    reverse: bool | None = None,
    optimizer: bool = False,
    values: AbstractSet[str] = frozenset(),
    recorded: Mapping[str, str] = {},
    contents: bool = True,
    to_huggingface: bool = False,
    left_out: Callable[[str], bool] | None = None,
) -> Applied:
    """Apply rules to the names and shapes of a checkpoint.

    Args:
        rules: the table.
        shapes: of all tensors of the source: weights, optimizer state, values.
        config: the content of config.json, if any.
        reverse: whether the source is on the right side; None: decide by its names.
        optimizer: whether optimizer state and gradients follow their weights. They always do in a table that keeps
            names without a rule.
        values: names without a layout. Counters among them match no name with a star.
        recorded: values of options in the source's records.
        contents: whether the elements of the results are used, not only their names and shapes.
        to_huggingface: whether the results are for loaders that expect Hugging Face's names.
        left_out: whether a weight that no rule lists is skipped; without it, it is an error.

    Raises:
        UsageError: the names are Hugging Face's already, and only these are expected; or several values of an option
            fit, and their results differ.
        NamesError: rules and source do not fit, a size is missing or contradicts a shape.
    """

    def applied_as(settled: Settled, reverse: bool | None) -> Applied:
        side = side_of(rules, settled, shapes, reverse)
        run = _Application(rules, side, shapes, optimizer, settled, values, left_out)
        run.sort()
        UnusedRules(side, run.instances, run.problems).check(rules.keeps_others, run.ambiguous)
        run.apply()
        run.problems.check()
        return run.applied()

    settled = settle(rules, config, shapes, recorded)
    result = applied_as(settled, reverse)
    old, new = rules.sides[:: -1 if result.reversed else 1]
    if to_huggingface and old == HUB_SIDE:
        raise UsageError(
            f"--names {rules.path}: names are Hugging Face's already; the rules would make them {new} names, which "
            "loaders of the target do not expect",
            hint=f"leave out --names to keep the names; {new} names are for --to ranks, checkpoint2, unified or "
            "hyper-parallel",
        )
    undetermined = []
    for name, possible in settled.undetermined.items():
        for value in possible[1:]:
            other = settle(with_options(rules, {name: value}), config, shapes, recorded)
            # A value that does not fit is none to choose from.
            with contextlib.suppress(NamesError):
                if _made(applied_as(other, result.reversed), contents) != _made(result, contents):
                    undetermined.append((name, possible))
                    break
    if undetermined:
        raise undetermined_error(rules, undetermined)
    return result


def _made(applied: Applied, contents: bool) -> Mapping[str, object]:
    return {
        name: (sources, frozenset(view.regions)) if contents else view.shape for name, sources, view in applied.views()
    }


InstanceNames = dict[tuple[int, tuple[int, ...]], str]
"""The names that one rule converts together, per column and values of the stacked numbers."""


@dataclass
class _Application:
    rules: NameRules
    side: TableSide
    shapes: Mapping[str, Shape]
    optimizer: bool
    settled: Settled
    values: AbstractSet[str]
    left_out: Callable[[str], bool] | None
    problems: Misfits = field(init=False)
    instances: dict[InstanceKey, InstanceNames] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    not_listed: list[str] = field(default_factory=list)
    skipped_state: list[str] = field(default_factory=list)
    steps: list[AppliedStep] = field(default_factory=list)
    tied: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    ambiguous: set[int] = field(default_factory=set)
    by_case: list[tuple[str, str, Sequence[NameMatch]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.problems = Misfits(self.rules, self.side, self.settled.values, self.shapes)
        self._sized: dict[tuple[int, tuple[Shape, ...]], tuple[tuple[SizedOperation, ...], int] | str] = {}

    def sort(self) -> None:
        """Assign every name to a rule, or to unchanged, skipped or refused names."""
        for name, shape in self.shapes.items():
            prefix = state_prefix(name, self.shapes)
            base = name[len(prefix) :]
            if prefix and (self.side.matches(base) or (base in self.shapes and not self.side.matches(name))):
                self._sort_state(name, prefix, base)
                continue
            if self._matched(name, name, ""):
                continue
            if self.rules.keeps_others or (kind := kind_of(name, math.prod(shape), self.shapes)) == OTHER:
                self.unchanged.append(name)
            elif kind != WEIGHTS:
                self.skipped_state.append(name)
            else:
                number = self.side.beyond(name)
                if number is None and self.left_out is not None and self.left_out(name):
                    self.not_listed.append(name)
                elif number is None:
                    self.problems.unmatched.append(name)
                else:
                    count = self.side.counts[number] or 0
                    self.problems.note(f"{number} must be less than {count}, by {self.side.sizes.source}", name)
        self._sort_by_case()

    def _sort_state(self, name: str, prefix: str, base: str) -> None:
        if not (self.optimizer or self.rules.keeps_others):
            self.skipped_state.append(name)
        elif not self._matched(name, base, prefix):
            (self.unchanged if self.rules.keeps_others else self.skipped_state).append(name)

    def _matched(self, name: str, fitting: str, prefix: str) -> bool:
        """Assign a name to the rule that it matches; False if it matches none.

        Several rules are a misfit, unless they are cases of a choice, of which other names show one.
        """
        matches = self.side.matches(fitting, prefix)
        if matches and name in self.values and is_value(name, math.prod(self.shapes[name])):
            matches = [match for match in matches if not self._source_of(match).stars]
            if not matches:
                self.fixed.append(name)
        if len(matches) > 1:
            rules = [self.side.sided[match.key.rule].rule for match in matches]
            if rules[0].choice is not None and len({(rule.choice, rule.case) for rule in rules}) == len(rules):
                self.by_case.append((name, fitting, matches))
            else:
                self._note_ambiguous(name, matches)
        elif matches:
            self._assign(name, fitting, matches[0])
        return bool(matches)

    def _sort_by_case(self) -> None:
        """Assign names that match several cases of a choice: to the case of other names with the same numbers."""
        numbers = {
            frozenset(self.side.sided[match.key.rule].free) for _, _, matches in self.by_case for match in matches
        }
        cases = {self._case(key, each) for key in self.instances for each in numbers}
        for name, fitting, matches in self.by_case:
            of_case = [match for match in matches if self._case(match.key) in cases]
            if len(of_case) == 1:
                self._assign(name, fitting, of_case[0])
            else:
                self._note_ambiguous(name, matches)

    def _case(
        self, key: InstanceKey, numbers: AbstractSet[str] = frozenset()
    ) -> tuple[str | None, str | None, frozenset[tuple[str, int]]]:
        """A case of a choice, and the values for which it is chosen: those of some numbers, where a rule has more."""
        sided = self.side.sided[key.rule]
        values = zip(sided.free, key.values)
        if numbers and numbers <= {*sided.free}:
            return sided.rule.choice, sided.rule.case, frozenset(each for each in values if each[0] in numbers)
        return sided.rule.choice, sided.rule.case, frozenset(values)

    def _note_ambiguous(self, name: str, matches: Sequence[NameMatch]) -> None:
        texts = ", ".join(dict.fromkeys(quoted(self._source_of(match).text) for match in matches))
        self.problems.note(f"more than one rule matches ({texts})", name)
        self.ambiguous.update(match.key.rule for match in matches)

    def _assign(self, name: str, fitting: str, match: NameMatch) -> None:
        prefix, rule = match.key.prefix, self.side.sided[match.key.rule].rule
        if rule.drops:
            self.dropped.append(name)
            return
        if prefix and rule.operations and self.shapes.get(fitting) != self.shapes[name]:
            self.problems.note("state of another shape than its weight cannot follow it", name)
        self.instances.setdefault(match.key, {})[match.column, match.values] = name

    def _source_of(self, match: NameMatch) -> Pattern:
        return self.side.sided[match.key.rule].sources[match.column].pattern

    def apply(self) -> None:
        """Apply the rules whose sources are complete."""
        for key in self._in_order():
            sided = self.side.sided[key.rule]
            names = self._sources(key, sided)
            if names is None:
                continue
            sized = self._sized_for(key.rule, tuple(self.shapes[name] for name in names))
            if isinstance(sized, str):
                self.problems.note(f"{sided.rule.where}: {sized}", names[0])
                continue
            operations, results = sized
            targets = self._targets(key, sided, results, names)
            if targets is not None:
                self._add(AppliedStep(sided.rule.where, operations, names, targets))
        self.steps += [AppliedStep("", (), (name,), (name,)) for name in self.unchanged]
        made_of: dict[str, list[str]] = {}
        for step in self.steps:
            for target in step.targets:
                made_of.setdefault(target, []).append(step.sources[0])
        for target, sources in made_of.items():
            if len(sources) > 1:
                texts = ", ".join(map(quoted, dict.fromkeys(sources)))
                self.problems.note(f"would be made more than once ({texts})", target)
        if self.rules.keeps_others:
            # Only names change: the order stays, too.
            place = {name: number for number, name in enumerate(self.shapes)}
            self.steps.sort(key=lambda step: place[step.sources[0]])

    def _sources(self, key: InstanceKey, sided: SidedRule) -> tuple[str, ...] | None:
        """The names that a rule needs; None, after noting them, if some are missing."""
        names = self.instances[key]
        counts = [
            self.side.counts.get(number) or max(values[place] for _, values in names) + 1
            for place, number in enumerate(sided.stacked)
        ]
        # Trainers save the state of tied weights once, under the name of one of them.
        tied = bool(key.prefix) and any(
            isinstance(each, Copy) and each.inverted for each in sided.rule.in_direction(self.side.reverse)
        )
        sources = []
        for column, pattern in enumerate(sided.sources):
            for values in combinations([range(count) for count in counts]):
                name = names.get((column, values))
                if name is None and tied:
                    name = next((other for (_, present), other in names.items() if present == values), None)
                if name is not None:
                    sources.append(name)
                elif self.problems.missing_enough:
                    return None
                else:
                    self.problems.missing.append(_named(key, sided, pattern, sided.stacked, values))
        return tuple(sources) if len(sources) == math.prod(counts) * len(sided.sources) else None

    def _targets(
        self, key: InstanceKey, sided: SidedRule, view_count: int, names: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        each, remainder = divmod(view_count, len(sided.targets))
        counts = [self.side.counts.get(number) for number in sided.unstacked]
        if counts and counts[0] is None:
            # The count of an outer number may be unknown; those of inner ones are not.
            counts[0] = each // math.prod(count or 0 for count in counts[1:])
        expected = math.prod(count or 0 for count in counts)
        if remainder or each != expected:
            numbers = " and ".join(f"{{{number}}}" for number in sided.unstacked)
            problem = f"{sided.rule.where}: makes {each} of {numbers}, and by {self.side.sizes.source} "
            self.problems.note(f"{problem}there are {expected}", names[0])
            return None
        return tuple(
            _named(key, sided, pattern, sided.unstacked, values)
            for pattern in sided.targets
            for values in combinations([range(count or 0) for count in counts])
        )

    def _sized_for(self, number: int, shapes: tuple[Shape, ...]) -> tuple[tuple[SizedOperation, ...], int] | str:
        """The operations of a rule and their number of results, for shapes of many layers; or why they do not fit."""
        if (number, shapes) not in self._sized:
            operations = self.side.sided[number].rule.in_direction(self.side.reverse)
            try:
                self._sized[number, shapes] = sized_all(operations, shapes, self.side.sizes)
            except SizeError as error:
                self._sized[number, shapes] = str(error)
        return self._sized[number, shapes]

    def _add(self, step: AppliedStep) -> None:
        self.steps.append(step)
        for operation in step.operations:
            if operation.kind in (PAD, UNPAD):
                self.notes.setdefault(_padding_note(operation), []).extend(step.targets)
            if operation.kind == TAKE:
                each = len(step.sources) // operation.count
                pairs = ((step.sources[number % each], name) for number, name in enumerate(step.sources))
                self.tied += [(one, other) for one, other in pairs if one != other]

    def _in_order(self) -> Iterator[InstanceKey]:
        """All instances in the order of the rules, a layer's instances together."""
        block: list[int] = []
        blocks, last = [block], None
        for number, sided in enumerate(self.side.sided):
            first = sided.free[:1]
            if block and first != last:
                block = []
                blocks.append(block)
            block.append(number)
            last = first
        place = {rule: number for number, rules in enumerate(blocks) for rule in rules}
        yield from sorted(
            self.instances,
            key=lambda key: (key.prefix, place[key.rule], key.values[:1], key.rule, key.values, key.stars),
        )

    def applied(self) -> Applied:
        notes: list[str] = [listing(names) + f": {note}" for note, names in self.notes.items()]
        if self.fixed:
            notes.append(
                f"{plural(len(self.fixed), 'value')} not renamed, because * matches tensors only: "
                + listing(sorted(self.fixed))
            )
        notes += [
            f"the number of {number}s comes from the names: no configuration contains it"
            for number, count in self.side.counts.items()
            if count is None and any(number in sided.free for sided in self.side.sided)
        ]
        return Applied(
            self.rules,
            self.side.reverse,
            tuple(self.steps),
            self.shapes,
            tuple(self.dropped),
            tuple(self.not_listed),
            tuple(self.skipped_state),
            tuple(self.tied),
            tuple(notes),
            self.settled.values,
            self.settled.sizes.used,
        )


def _named(
    key: InstanceKey, sided: SidedRule, pattern: SizedPattern, numbers: Sequence[str], values: Sequence[int]
) -> str:
    return key.prefix + pattern.name({**dict(zip(sided.free, key.values)), **dict(zip(numbers, values))}, key.stars)


def _padding_note(operation: SizedOperation) -> str:
    before, after = operation.sizes
    if operation.kind == UNPAD:
        return f"padding of dimension {operation.dimension} removed: {before} to {after}"
    return f"padded with zeros along dimension {operation.dimension} from {before} to {after}"
