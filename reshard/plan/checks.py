"""Problems of a planned conversion, found before anything is written; among them what is missing in the source."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence

from reshard.checkpoints import can_hold, mindspore_reads
from reshard.checkpoints.checkpoint import stored_checkpoint
from reshard.checkpoints.formats.dtypes import MAP_TENSOR, TEXT
from reshard.errors import CheckpointError, InputError, one_error
from reshard.forms.form import Names
from reshard.forms.registry import form_named
from reshard.forms.target import Section, laid_out_names
from reshard.plan.plan import Plan
from reshard.plan.values import CopiedValues
from reshard.strategies import Strategy
from reshard.text.globs import matcher, warn_of_unmatched
from reshard.text.messages import Report, as_glob, as_pattern, listing, plural, quoted
from reshard.text.names import is_training_value, is_weight, state_prefix

# Minimum prefix length: shorter prefixes match too many names.
_MIN_PREFIX = 3
# Maximum number of suggested patterns.
_MAX_PATTERNS = 8


def check(plan: Plan, values: CopiedValues, report: Report, others: Sequence[InputError] = ()) -> None:
    """Find all problems before anything is written; `others` are those that are known already.

    Raises:
        InputError: all problems in one.
    """
    problems: list[InputError] = []
    request = plan.request
    if request.filters.include or request.filters.exclude:
        # Patterns match the names as they are written, so a source's names count only where no edit changes them, and
        # where no table lists them.
        source: Collection[str] = request.source.parameters if request.edits.is_empty else ()
        if request.edits.exclude:
            source = stored_checkpoint(plan.checkpoint).names()
        warn_of_unmatched(request.filters, (plan.checkpoint.names(), source, request.target.parameters), report)
    _check_not_empty(plan)
    for section in plan.sections:
        for name in plan.names_of(section):
            try:
                plan.cut_of(name, section)
            except InputError as error:
                problems.append(error)
    unfit = len(problems)
    format = plan.form.format
    for name in plan.sorted.resharded:
        dtype = plan.checkpoint.tensors[name].dtype
        if not can_hold(format, dtype):
            problems.append(_cannot_hold(name, dtype, plan))
    for name, tensor in values.examples():
        if tensor.dtype == MAP_TENSOR or (tensor.dtype != TEXT and not can_hold(format, tensor.dtype)):
            problems.append(_cannot_hold(name, tensor.dtype, plan))
    problems += values.problems()
    problems += _problems_of_form(plan)
    problems += others
    problems += _renamed(plan) or missing_problems(plan, report)
    if problems:
        headline = f"the conversion cannot be made, for {len(problems)} reasons"
        if 2 * unfit > len(plan.sorted.resharded):
            headline = (
                f"is the target strategy ({request.target.path}) of another network? It does not fit "
                f"{unfit} of {plural(len(plan.sorted.resharded), 'parameter')}"
            )
        raise one_error(problems, headline)
    _warn_of_weights(plan, report)
    if plan.sorted.unholdable:
        report.warn(f"{format} cannot hold text; left out: " + listing(plan.sorted.unholdable))
    _warn_of_types(plan, values, report)
    plain = {name for section in plan.sections for name in plan.names_of(section) if _lacks_shard(plan, name, section)}
    if plain:
        report.note(
            "accu_grads.* are stored without the optimizer shard that a strategy records for them, and are "
            f"written without it: {plural(len(plain), 'parameter')}"
        )


def _check_not_empty(plan: Plan) -> None:
    """Refuse a conversion that would write empty files, or only copied values."""
    tensors = plan.checkpoint.tensors
    everywhere = laid_out_names(plan.form.sections)
    admit = plan.request.filters.admit
    # Some forms list only the requested files.
    selected = any(map(admit, tensors)) or plan.form.by_rank
    if tensors and selected and not plan.form.takes_everything and everywhere.isdisjoint(tensors):
        raise CheckpointError(
            f"none of the {plural(len(tensors), 'parameter')} of the checkpoint is in the target "
            f"strategy ({plan.request.target.path})",
            hint="pass the target strategy of the same model; where only the names differ, as between Hugging Face's "
            "and MindFormers', --names gives the others (`reshard names list`)",
        )
    # All target files count: a single requested one may be empty.
    resharded = any(admit(name) and name in everywhere for name in tensors)
    if not resharded and not plan.sorted.copied:
        raise CheckpointError(
            "the options select no parameter of the checkpoint",
            hint="check --include and --exclude, and that strategies are of the checkpoint's model",
        )
    if not plan.form.count:
        raise CheckpointError(
            f"nothing would be written: the selection contains only values such as {quoted(min(plan.sorted.copied))}; "
            f"without a parameter, {plan.form.name} has no file for them",
            hint="write another form, or check --include and --exclude",
        )


def _renamed(plan: Plan) -> list[CheckpointError]:
    """The first tensor that the target strategy lists under its old name: it would be left out."""
    edits, tensors = plan.request.edits, plan.checkpoint.tensors
    if edits.renames is None and edits.quantisation is None:
        return []
    listed = set(plan.request.target.parameters).difference(tensors)
    for name in plan.sorted.left_out:
        source = tensors[name].sources[0] if name in tensors else None
        if source is None or source.name_in_files not in listed:
            continue
        option, hint = "--dequantize", "pass a strategy with the new names"
        if edits.renames is not None:
            option = "--rename"
            hint += "; or convert first without --rename, and its output with --rename and --dst-strategy same"
        text = f"the target strategy ({plan.request.target.path}) lists {quoted(source.name_in_files)}"
        return [CheckpointError(f"{text}, and {option} names it {quoted(name)}", parameter=name, hint=hint)]
    return []


def _warn_of_weights(plan: Plan, report: Report) -> None:
    """Warn of weights that are left out, a sign of different models; for optimizer state it is normal."""
    names_of_parameters = plan.known_names()
    weights = [name for name in plan.sorted.left_out if is_weight(name, names_of_parameters)]
    if weights:
        report.warn(
            f"{plural(len(weights), 'weight')} that the checkpoint holds and the target strategy does not list (left "
            "out): " + listing(weights) + "; are both of the same model?"
        )


def _lacks_shard(plan: Plan, name: str, section: Section) -> bool:
    """Whether a parameter is stored without the optimizer shard that a strategy records."""
    return plan.checkpoint.tensors[name].shards.plain or (
        section.layouts[name].shards != plan.cut_of(name, section).target.shards
    )


def _problems_of_form(plan: Plan) -> list[InputError]:
    if not plan.form.limits_layouts:
        return []
    problems: list[InputError] = []
    for section in plan.sections:
        for name in plan.names_of(section):
            try:
                plan.form.check_layout(name, plan.cut_of(name, section).target)
            except InputError as error:
                problems.append(error)
    return problems


def _warn_of_types(plan: Plan, values: CopiedValues, report: Report) -> None:
    """Warn of files that MindSpore and MindFormers refuse to load."""
    if plan.form.format != "safetensors" or not form_named(plan.form.name).options.mindspore:
        return
    tensors = plan.checkpoint.tensors
    types_of = {name: tensors[name].dtype for name in plan.sorted.resharded}
    types_of.update((name, tensor.dtype) for name, tensor in values.examples() if tensor.dtype != TEXT)
    unread = sorted(name for name, dtype in types_of.items() if not mindspore_reads(dtype))
    if unread:
        types = " or ".join(sorted({types_of[name] for name in unread}))
        report.warn(
            f"MindSpore and MindFormers load no .safetensors file that contains {types}: here the files with "
            + listing(unread)
        )


def _cannot_hold(name: str, dtype: str, plan: Plan) -> CheckpointError:
    hint = f"leave it out with --exclude {as_pattern(name)}"
    if dtype == MAP_TENSOR:
        return CheckpointError(
            f"{quoted(name)} is a map tensor, which has no layout and cannot be converted",
            parameter=name,
            hint=hint,
        )
    format = plan.form.format
    if len(form_named(plan.form.name).options.formats) > 1:
        hint = f"write --format {'safetensors' if format == 'ckpt' else 'ckpt'}, or {hint}"
    return CheckpointError(
        f"{quoted(name)} is {dtype}, which .{format} files cannot hold",
        parameter=name,
        hint=hint,
    )


def needed(missing: Iterable[str], held: Iterable[str], strategy: Strategy, names: Collection[str]) -> list[str]:
    """The missing parameters that are weights, or optimizer state of a kind that is there for other weights."""
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
    if request.to.options.names is not Names.MODEL:
        # Strategies list the names of MindSpore's optimizers, not those of a trainer's state.
        from reshard.names import naming_of

        held += map(naming_of(request.to.options.side.value).remove, [*held])
    names = plan.known_names()
    accepted = matcher(request.asked.edits.allow_missing)
    missing = [name for name in needed(missing, held, request.target, names) if not accepted(name)]
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
        if chosen and request.task.in_memory:
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
