"""Everything that can be wrong with a planned conversion, found before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.checkpoints import can_hold
from reshard.errors import CheckpointError, InputError, one_error
from reshard.filter_advice import warn_of_unmatched
from reshard.messages import listing
from reshard.names import as_pattern, is_weight
from reshard.report import Report
from reshard.strategies import Stage
from reshard.wording import plural, quoted

if TYPE_CHECKING:
    from reshard.plan.conversion import Conversion


def check(conversion: Conversion, report: Report) -> None:
    """Find every problem there is before anything is written."""
    problems: list[InputError] = []
    request = conversion.request
    names = (conversion.step.names(), request.source.parameters, request.target.parameters)
    warn_of_unmatched(request.filters, names, report)
    _check_anything(conversion)
    for stage in conversion.stages.values():
        for name in conversion.resharded_of(stage):
            try:
                conversion.cut_of(name, stage)
            except InputError as error:
                problems.append(error)
    for name in conversion.sorted.resharded:
        dtype = conversion.parameters[name].dtype
        if not can_hold(conversion.format, dtype):
            problems.append(_cannot_hold(name, dtype, conversion.format))
    for name, tensor in conversion.copies.examples():
        if tensor.dtype == "MapTensor" or (tensor.dtype != "str" and not can_hold(conversion.format, tensor.dtype)):
            problems.append(_cannot_hold(name, tensor.dtype, conversion.format))
    problems += conversion.copies.problems
    problems += conversion.problems_of_unlisted()
    if conversion.request.strict and conversion.sorted.missing:
        problems.append(
            CheckpointError(
                f"the target strategy has {plural(len(conversion.sorted.missing), 'parameter')} that no source file "
                "holds: " + listing(conversion.sorted.missing),
                parameter=conversion.sorted.missing[0],
                hint="without --strict they are left out and counted",
            )
        )
    if problems:
        raise one_error(problems, f"the conversion cannot be made, for {len(problems)} reasons")
    _warn_of_weights(conversion, report)
    if conversion.sorted.unholdable:
        report.warn(f"{conversion.format} cannot hold text; left out: " + listing(conversion.sorted.unholdable))
    stages = conversion.stages.values()
    plain = {name for stage in stages for name in conversion.resharded_of(stage) if _plain(conversion, name, stage)}
    if plain:
        report.note(
            "accu_grads.* are stored without the optimizer shard that a strategy records for them, and are "
            f"written without it: {plural(len(plain), 'parameter')}"
        )


def _check_anything(conversion: Conversion) -> None:
    """Refuse a conversion that would write empty files, or only what is copied."""
    target = conversion.request.target
    everywhere = set().union(*(stage.layouts.keys() for stage in target.stages))
    if conversion.parameters and not target.is_none and everywhere.isdisjoint(conversion.parameters):
        raise CheckpointError(
            f"none of the {plural(len(conversion.parameters), 'parameter')} of the checkpoint is in the target "
            f"strategy ({target.path})",
            hint="pass the target strategy of the same model",
        )
    # By all target ranks: where only some are asked for, one that gets nothing gets its empty file.
    admit = conversion.request.filters.admit
    resharded = any(admit(name) and (target.is_none or name in everywhere) for name in conversion.parameters)
    if not resharded and not conversion.copied:
        raise CheckpointError(
            "nothing would be written: no parameter of the checkpoint is asked for",
            hint="check --include and --exclude, and that both strategies are of the same model",
        )


def _warn_of_weights(conversion: Conversion, report: Report) -> None:
    """Say loudly that weights are not in both strategies: optimizer state often is not, weights seldom."""
    admit = conversion.request.filters.admit
    for names, what in (
        (conversion.sorted.left_out, "the checkpoint holds and the target strategy does not list (left out)"),
        (conversion.sorted.missing, "the target strategy lists and no source file holds (missing)"),
    ):
        weights = [name for name in names if admit(name) and is_weight(name)]
        if weights:
            report.warn(
                f"{plural(len(weights), 'weight')} that {what}: " + listing(weights) + "; are both of the same model?"
            )


def _plain(conversion: Conversion, name: str, stage: Stage) -> bool:
    """Whether an optimizer shard that a strategy records for a parameter is not made."""
    parameter = conversion.parameters[name]
    recorded = stage.layouts.get(name)
    made = conversion.cut_of(name, stage).target.shards
    return parameter.plain or (recorded is not None and recorded.shards != made)


def problems_of_unlisted(conversion: Conversion, report: Report) -> list[InputError]:
    """Parameters that a stage's ranks hold although only another stage's strategy lists them."""
    stages = conversion.request.source.stages
    if len(stages) < 2:
        return []
    problems: list[InputError] = []
    by_stages: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    everywhere = set().union(*(stage.layouts.keys() for stage in stages))
    for stage in stages:
        held: set[str] = set()
        for names in {frozenset(conversion.step.indexes[rank].tensors) for rank in conversion.step.loaded(stage)}:
            held |= names
        for name in sorted((held & everywhere) - stage.layouts.keys()):
            listed_by = tuple(other.number for other in stages if name in other.layouts)
            by_stages.setdefault((stage.number, listed_by), []).append(name)
    for (number, listed_by), unlisted in by_stages.items():
        elsewhere = f"stage {', '.join(map(str, listed_by))}"
        text = f"ranks of pipeline stage {number} hold " + listing(unlisted)
        text += (
            f", which the source strategy lists only for {elsewhere}; it is taken from there, and the target's last "
            "stage may be expecting it too"
        )
        nowhere = [name for name in unlisted if name not in conversion.parameters]
        if nowhere:
            text += f"; {elsewhere} holds no " + listing(nowhere) + ", so that is not converted"
        if conversion.request.strict:
            problems.append(CheckpointError(text, parameter=unlisted[0], hint="without --strict this is a warning"))
        else:
            report.warn(text)
    return problems


def _cannot_hold(name: str, dtype: str, format: str) -> CheckpointError:
    if dtype == "MapTensor":
        return CheckpointError(
            f"{quoted(name)} is a map tensor, which has no layout and cannot be converted",
            parameter=name,
            hint=f"leave it out with --exclude {as_pattern(name)}",
        )
    other = "safetensors" if format == "ckpt" else "ckpt"
    return CheckpointError(
        f"{quoted(name)} is {dtype}, which .{format} files cannot hold",
        parameter=name,
        hint=f"write --format {other}, or leave it out with --exclude {as_pattern(name)}",
    )
