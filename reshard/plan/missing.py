"""Parameters that a strategy lists and no source file holds: which of them a conversion needs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence

from reshard.checkpoints.formats.dtypes import MEMORY
from reshard.errors import CheckpointError
from reshard.forms.form import Names
from reshard.forms.registry import form_named
from reshard.forms.target import laid_out_names
from reshard.plan.plan import Plan
from reshard.strategies import Strategy
from reshard.text.globs import Globs
from reshard.text.messages import Report, as_glob, listing, plural
from reshard.text.names import is_training_value, is_weight, state_prefix

# Minimum prefix length: shorter prefixes match too many names.
_MIN_PREFIX = 3
# Maximum number of suggested patterns.
_MAX_PATTERNS = 8


def needed(missing: Iterable[str], held: Iterable[str], strategy: Strategy, names: Collection[str]) -> list[str]:
    """The missing parameters that are weights, or optimizer state of a kind that is there for other weights.

    Args:
        missing: the missing parameters.
        held: the others that the strategy lists.
        strategy: it may record that a parameter has one element, like a counter.
        names: of all parameters.
    """
    kinds = {"", *(state_prefix(name, names) for name in held)}
    return [
        name
        for name in missing
        if state_prefix(name, names) in kinds
        and not is_training_value(name)
        and not any(stage.layouts[name].is_single for stage in strategy.stages if name in stage.layouts)
    ]


def missing_problems(plan: Plan, report: Report) -> Iterator[CheckpointError]:
    """The missing parameters that --allow-missing does not accept; a warning where nothing is written."""
    request, missing = plan.request, plan.sorted.missing
    if not missing:
        return
    sections = plan.sections if plan.form.by_rank else plan.form.sections
    held = [name for name in laid_out_names(sections) & plan.checkpoint.tensors.keys() if request.filters.admit(name)]
    if form_named(request.to).options.names is not Names.MODEL:
        # Strategies list the names of MindSpore's optimizers, not those of a trainer's state.
        from reshard.names import name_before

        held += [name_before(name) for name in held]
    names = plan.known_names()
    accepted = Globs(request.allow_missing)
    missing = [name for name in needed(missing, held, request.target, names) if not accepted.match(name)]
    weights = [name for name in missing if is_weight(name, names)]
    state = [name for name in missing if not is_weight(name, names)]
    patterns = [*_patterns(weights), *_patterns(state)]
    if len(patterns) > _MAX_PATTERNS:
        patterns[_MAX_PATTERNS:] = [f"and {len(patterns) - _MAX_PATTERNS} more"]
    absent = "if only absent ranks saved them, bring their files; " if plan.checkpoint.unseen else ""
    where = f"that the target strategy ({request.target.path}) lists"
    for chosen, text in (
        (weights, f"no source file holds {plural(len(weights), 'weight')} {where}: "),
        (state, f"no source file holds {plural(len(state), 'parameter')} {where}, but those of other weights: "),
    ):
        if chosen and request.format == MEMORY:
            report.warn(text + listing(chosen))
        elif chosen:
            yield CheckpointError(
                text + listing(chosen),
                parameter=chosen[0],
                hint=f"{absent}pass strategies of the same model; to convert without them: " + " ".join(patterns),
            )


def _patterns(names: Sequence[str]) -> list[str]:
    """--allow-missing for these names; each pattern has literal text, because others may match every name."""
    groups = {"": list(names)}
    if len(os.path.commonprefix(groups[""])) < _MIN_PREFIX:  # noqa: RUF071
        groups = {}
        for name in names:
            groups.setdefault(name.partition(".")[0], []).append(name)
    return [
        f"--allow-missing '{as_glob(os.path.commonprefix(group))}{'*' * (len(group) > 1)}'"  # noqa: RUF071
        for group in groups.values()
    ]
