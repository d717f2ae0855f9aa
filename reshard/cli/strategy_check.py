"""strategy check: whether a strategy is the one that a checkpoint was saved with."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Sequence

from reshard.asked import Edits, Effort, Source, cpus_of
from reshard.checkpoints import FileHandles
from reshard.cli import options
from reshard.cli.command import argument, command
from reshard.cli.output import echo_json, exit_different, is_json, is_quiet, is_verbose, listener, say, shown_text
from reshard.cli.progress import progress_of
from reshard.cli.strategy_show import strategy_words
from reshard.errors import StrategyError
from reshard.execute import Budget
from reshard.source_replicas.contradictions import StrategyCheck, check_strategy
from reshard.storage import costs_of
from reshard.strategies import Strategy, typed_strategy
from reshard.text.globs import Filters
from reshard.text.messages import Report, number_ranges, one_line, plural, quoted, rank_ranges, step_words
from reshard.text.names import is_weight, pattern_lines

_MAX_PATTERNS = 6
_MAX_MISFITS = 4
_MAX_GROUPS = 8


@command(
    "check",
    """
reshard strategy check src_strategy.ckpt ckpt/
""",
)
@argument("strategy", metavar="S")
@argument("path", metavar="CKPT")
@options.group(Source, *options.STORED[1:], path="path")
@options.group(Edits, *options.SELECTION)
@options.group(Effort, *options.LIMITS)
@options.output
def strategy_check(strategy: str, source: Source, edits: Edits, effort: Effort) -> None:
    """Check whether the checkpoint in CKPT was saved with strategy S.

    The slices of every rank must have the shapes that the layouts give, and where S lists replicas, all their
    bytes must be equal. The exit status is 4 if anything does not fit. Parameters without replicas are checked by
    shape only; the output counts them. S and CKPT may come in either order.
    """
    report = Report(listener())
    try:
        opened = typed_strategy(strategy, report)
    except StrategyError as error:
        # In the other order: no checkpoint is a strategy.
        try:
            opened = typed_strategy(source.path, report)
        except StrategyError:
            raise error from None
        strategy, source = source.path, dataclasses.replace(source, path=strategy)
    path = source.path
    with FileHandles() as handles:
        budget = Budget.of(cpus_of(effort), effort.max_memory, costs_of(path))
        progress = progress_of()
        result = check_strategy(
            opened, source, Filters(edits.include, edits.exclude), handles, budget, progress, report
        )
    comparison = result.comparison
    if is_json():
        compared = {"replicas": comparison.check, "differing": comparison.differing, "gradients": comparison.gradients}
        rows = {key: value for key, value in vars(result).items() if key != "comparison"}
        echo_json({"strategy": strategy, "checkpoint": path, "fits": result.fits, **rows, **compared})
    elif not (is_quiet() and result.fits):
        say("\n".join(_lines(result, opened, path)))
    if not result.fits:
        exit_different()


def _lines(result: StrategyCheck, strategy: Strategy, path: str) -> Iterator[str]:
    all_names = {*strategy.parameters, *result.parameters, *result.not_listed, *result.not_described}

    def names(of: Sequence[str]) -> list[str]:
        lines = [one_line(name) for name in of] if is_verbose() else pattern_lines(of, all_names, _MAX_PATTERNS)
        return [f"    {line}" for line in lines]

    yield f"strategy: {strategy_words(strategy)}"
    absent = f", no file of {rank_ranges(result.absent_ranks)}" if result.absent_ranks else ""
    step = "" if result.step is None else f", {step_words(result.step)}"
    yield f"checkpoint: {path}{step}, files of {rank_ranges(result.ranks)}{absent}"
    yield ""
    if result.other_network:
        yield "no parameter of the strategy is in the files: is it the strategy of another network?"
    if result.beyond_ranks:
        devices = plural(strategy.device_count, "device")
        beyond = rank_ranges(result.beyond_ranks)
        missing = "" if result.other_network else ": is a stage's file missing?"
        yield f"{beyond} have files, but the strategy has {devices}{missing}"
    if result.parameters:
        yield f"{plural(len(result.parameters), 'parameter')}: slices have the shapes of the strategy"
    for misfit in result.misfits[: len(result.misfits) if is_verbose() else _MAX_MISFITS]:
        yield f"{plural(len(misfit.parameters), 'parameter')}: slices have other shapes than in the strategy"
        yield from names(misfit.parameters)
        yield f"  {misfit.detail}"
    hidden = sum(len(misfit.parameters) for misfit in result.misfits[_MAX_MISFITS:])
    if hidden and not is_verbose():
        yield f"{plural(hidden, 'more parameter')} with other shapes: -v lists all"
    comparison = result.comparison
    if comparison.differing:
        count = f"{len(comparison.differing)} of {plural(comparison.check.parameters, 'parameter')} compared"
        yield f"{count} differ between ranks that are replicas in the strategy"
        yield from (f"  {shown_text(line)}" for line in comparison.lines())
    else:
        yield str(comparison.check)
    if result.same_slices:
        count = plural(len(result.same_slices), "parameter")
        yield f"{count}: ranks hold equal bytes, but different slices in the strategy"
        yield from names([item.parameter for item in result.same_slices])
    if result.misplaced:
        count = plural(len(result.misplaced), "parameter")
        yield f"{count}: held by ranks of a stage for which the strategy does not list them"
        yield from names(result.misplaced)
    if comparison.gradients:
        yield comparison.gradient_warning()
    if result.alike is not None:
        groups = _groups(result.alike.groups)
        yield f"ranks with equal contents of {quoted(result.alike.parameter)}: {groups}"
    for names_of, reason in (
        (
            result.not_described,
            "not in the strategy, and different on ranks: their layout is unknown",
        ),
        (result.not_listed, "not in the strategy: copied unchanged"),
        (result.not_held, f"listed, but in no file{_weights(result.not_held, all_names)}"),
    ):
        if names_of:
            yield f"{plural(len(names_of), 'parameter')} {reason}"
            yield from names(names_of)
    yield ""
    yield _verdict(result)


def _weights(names: Sequence[str], all_names: Container[str]) -> str:
    """The number of weights among them, which are almost always saved."""
    weights = sum(is_weight(name, all_names) for name in names)
    return f" ({plural(weights, 'weight')} among them: is it the strategy of this model?)" if weights else ""


def _groups(groups: Sequence[Sequence[int]]) -> str:
    if all(len(group) == 1 for group in groups):
        return "none"
    shown = "; ".join(number_ranges(group) for group in groups[:_MAX_GROUPS])
    return shown + (f" and {len(groups) - _MAX_GROUPS} more groups" if len(groups) > _MAX_GROUPS else "")


def _verdict(result: StrategyCheck) -> str:
    if not result.fits:
        by_shapes = not result.misfits and not result.beyond_ranks and not result.not_described
        if by_shapes and result.comparison.differing:
            return "does not fit: another strategy was used, or replicas have diverged"
        return "does not fit: pass the strategy that this checkpoint was saved with"
    check = result.comparison.check
    if not check.tested:
        lacking = "cut parameters have no replicas to compare" if check.samples else "no replicas were compared"
        return f"fits by shapes; {lacking}"
    return "fits"
