"""Everything that can be wrong with a planned conversion, found before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.checkpoints import can_hold
from reshard.errors import CheckpointError, InputError, one_error
from reshard.filter_advice import warn_of_unmatched
from reshard.messages import listing
from reshard.names import as_pattern, is_weight
from reshard.report import Report
from reshard.strategies import Stage
from reshard.wording import number_ranges, plural, quoted

if TYPE_CHECKING:
    from reshard.plan.conversion import Conversion

# Pairs of pipeline stages that are told of one by one.
_MOST_STAGES = 2


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
    by_stages: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    everywhere = conversion.step.names().intersection(name for stage in stages for name in stage.layouts)
    whole = 0
    for stage in stages:
        held: set[str] = set()
        for names in {frozenset(conversion.step.indexes[rank].tensors) for rank in conversion.step.loaded(stage)}:
            held |= names
        whole += everywhere <= held
        for name in sorted((held & everywhere) - stage.layouts.keys()):
            listed_by = tuple(other.number for other in stages if name in other.layouts)
            by_stages.setdefault((stage.number, listed_by), []).append(name)
    told: list[tuple[str, str]] = []
    if whole == len({number for number, _ in by_stages}) == len(stages):
        text = (
            f"ranks of every pipeline stage hold all {len(everywhere)} parameters, which the source strategy shares "
            f"out among {len(stages)} stages: is it the strategy of another run?"
        )
        told.append((text, next(iter(by_stages.values()))[0]))
    elif len(by_stages) > _MOST_STAGES:
        # Said for each pair of stages it would fill a screen.
        unlisted = sorted({name for names in by_stages.values() for name in names})
        numbers = f"stages {number_ranges(number for number, _ in by_stages)}"
        told.append((_said_of_unlisted(conversion, numbers, "other stages", unlisted), unlisted[0]))
    else:
        for (number, listed_by), unlisted in by_stages.items():
            elsewhere = f"stage {', '.join(map(str, listed_by))}"
            told.append((_said_of_unlisted(conversion, f"stage {number}", elsewhere, unlisted), unlisted[0]))
    if conversion.request.strict:
        return [CheckpointError(text, parameter=name, hint="without --strict this is a warning") for text, name in told]
    for text, _ in told:
        report.warn(text)
    return []


def _said_of_unlisted(conversion: Conversion, stage: str, elsewhere: str, unlisted: Sequence[str]) -> str:
    text = f"ranks of pipeline {stage} hold " + listing(unlisted)
    taken, them = ("it is taken", "it") if len(unlisted) == 1 else ("they are taken", "them")
    text += (
        f", which the source strategy lists only for {elsewhere}; {taken} from there, and the target's last stage may "
        f"be expecting {them} too"
    )
    nowhere = [name for name in unlisted if name not in conversion.parameters]
    if nowhere:
        text += f"; in no file of {elsewhere} is " + listing(nowhere) + ", so that is not converted"
    return text


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
