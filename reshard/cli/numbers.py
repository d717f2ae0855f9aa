"""stats: statistics of the numbers in every tensor; diff: differences between two checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from reshard.asked import CHANGES, Edits, Effort, Source
from reshard.cli import options
from reshard.cli.command import argument, command, option
from reshard.cli.opened import (
    check_crcs,
    compared,
    no_common_names,
    nonfinite_element,
    nonfinite_pair,
    number_words,
    opened,
    opened_side,
    rename_by_prefix,
    shape_words,
)
from reshard.cli.output import alarming, echo_json, exit_different, is_json, listener, say, shown_text
from reshard.cli.progress import progress_of
from reshard.cli.tables import alarming_lines, table
from reshard.errors import UsageError
from reshard.forms.registry import counted_as
from reshard.numbers.difference import Differences, TensorPair
from reshard.numbers.statistics import TensorStatistics, statistics_of
from reshard.opened import OpenedCheckpoint
from reshard.text.messages import Report, listing, plural, rank_ranges

_KINDS = {"nan": "NaN", "inf": "Inf"}


def _kinds(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    kinds = tuple(part.strip().lower() for part in (value or "").split(",") if part.strip())
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise UsageError(f"--fail-on {value}: {unknown[0]!r} is neither nan nor inf")
    return kinds


@command(
    "stats",
    """
reshard stats ckpt/ --strategy src.ckpt
reshard stats iterations/ --exclude 'adam_*' --fail-on nan,inf""",
)
@argument("src")
@options.group(Source, *options.STORED, "without_ranks", path="src", strategy=options.SAVED)
@options.group(Edits, *options.SELECTION, *CHANGES)
@option(
    "Checks",
    "--fail-on",
    metavar="nan,inf",
    callback=_kinds,
    help="Read every copy of each tensor; exit with status 4 if any holds one of these.",
)
@options.group(
    Effort, "crc", *options.LIMITS, crc={"help": "Check the CRCs that files record; a damaged file is an error."}
)
@options.output
def stats(fail_on: tuple[str, ...], source: Source, edits: Edits, effort: Effort) -> None:
    """Print statistics of every tensor of the checkpoint in SRC.

    For each tensor: the numbers of elements that are NaN, infinite and zero, and minimum, maximum, mean and
    Euclidean norm of the finite elements. Every element counts once, however many ranks hold it, so the
    numbers are the same in every layout and form. One copy of each slice is read, and a note names the ranks whose
    copies are not. With --fail-on every copy is read, and the numbers of a tensor are those of the copy with the
    most NaN and infinite elements. Text is skipped.
    """
    report = Report(listener())
    with opened(source, edits, effort, report) as checkpoint:
        progress = progress_of()
        if effort.crc == "auto":
            check_crcs(checkpoint, checkpoint, edits, progress, report, copies=bool(fail_on))
        statistics = statistics_of(checkpoint, effort.max_memory // 2, progress, copies=bool(fail_on))
        unread = set() if fail_on else checkpoint.contents.unread(tensor.name for tensor in statistics)
        if unread:
            files = rank_ranges(unread, counted_as(checkpoint.form))
            report.note(f"copies on {files} were not read; to read every copy: --fail-on nan,inf")
        step, form = checkpoint.step, checkpoint.form
    if is_json():
        rows = [{key: value for key, value in vars(tensor).items() if key != "magnitudes"} for tensor in statistics]
        echo_json({"form": form, "step": step, "tensors": rows})
    else:
        ordered = sorted(statistics, key=lambda tensor: tensor.first_nonfinite is None)
        bad = [tensor for tensor in ordered if tensor.first_nonfinite is not None]
        alarming_lines(list(map(nonfinite_element, bad)))
        table(source.path, _STATS_COLUMNS, [_stats_cells(tensor) for tensor in ordered], _STATS_SPARE, range(len(bad)))
        click.echo(_summary(statistics))
    failures = [line for kind in fail_on for line in _failure_lines(kind, statistics)]
    for line in failures:
        click.echo(alarming(line), err=True)
    if failures:
        exit_different()


_STATS_SPARE = ("norm", "zeros", "mean")
_STATS_COLUMNS = ["parameter", "type", "shape", "NaN", "Inf", "zeros", "min", "max", "mean", "norm"]


def _stats_cells(tensor: TensorStatistics) -> list[str]:
    numbers = (tensor.nan, tensor.inf, tensor.zeros, tensor.min, tensor.max, tensor.mean, tensor.norm)
    return [tensor.name, tensor.dtype, shape_words(tensor.shape), *map(number_words, numbers)]


def _summary(statistics: Sequence[TensorStatistics]) -> str:
    count = sum(tensor.count for tensor in statistics)
    nan, inf, zeros = (sum(getattr(tensor, kind) for tensor in statistics) for kind in ("nan", "inf", "zeros"))
    return f"{plural(len(statistics), 'tensor')}, {plural(count, 'element')}: {nan} NaN, {inf} infinite, {zeros} zero"


def _failure_lines(kind: str, statistics: Sequence[TensorStatistics]) -> list[str]:
    """A line with the tensors that have elements of a kind; none without such tensors."""
    names = [tensor.name for tensor in statistics if getattr(tensor, kind)]
    if not names:
        return []
    text = listing(names)
    return [f"reshard: {_KINDS[kind]} in {plural(len(names), 'tensor')}: {shown_text(text)}"]


@command(
    "diff",
    """
reshard diff before/ after/ --strategy src.ckpt
reshard diff ckpt/ huggingface/ --a-strategy src.ckpt --exit-code
reshard diff ckpt/ ckpt/ --strategy src.ckpt --a-step 1_100 --b-step 1_200
""",
)
@argument("a")
@argument("b")
@options.strategy("Strategy of rank files in A and B that have no recorded strategy.", "--src-strategy", "strategy")
@options.strategy("Strategy of A.", flag="--a-strategy")
@options.strategy("Strategy of B.", flag="--b-strategy")
@option("Source", "--a-step", metavar="EPOCH_STEP|latest", show_default="--step", help="Step of A.")
@option("Source", "--b-step", metavar="EPOCH_STEP|latest", show_default="--step", help="Step of B.")
@options.group(Source, *options.STORED[1:])
@options.group(Edits, *options.SELECTION, *CHANGES)
@option("Checks", "--exit-code", is_flag=True, help="Exit status 4 if they differ.")
@options.group(
    Effort, "crc", *options.LIMITS, crc={"help": "Check the CRCs that files record; a damaged file is an error."}
)
@options.output
def diff(
    a: str,
    b: str,
    strategy: str | None,
    a_strategy: str | None,
    b_strategy: str | None,
    a_step: str | None,
    b_step: str | None,
    exit_code: bool,
    source: Source,
    edits: Edits,
    effort: Effort,
) -> None:
    """Compare the tensors of the checkpoints in A and B.

    Full tensors are compared, so A and B may differ in form, layout, step and type. Printed are tensors that
    only one of them has, tensors of different shapes, and for each tensor that differs the number of different
    elements and the largest absolute and relative difference. NaN equals NaN. A tensor of another type or with
    other bits counts as different even if all values are equal. The exit status is 0, or with --exit-code 4 if
    anything differs, and 2 if they have no names in common. Options of names and types apply to A: use them to
    compare B with its source A. `reshard strategy diff` compares strategies.
    """
    report = Report(listener())
    with contextlib.ExitStack() as stack:
        read_a = replace(source, path=a, strategy=a_strategy, step=a_step or source.step)
        read_b = replace(source, path=b, strategy=b_strategy, step=b_step or source.step)
        opened_a = stack.enter_context(opened_side("a", read_a, strategy, edits, effort, report))
        selection = Edits(edits.include, edits.exclude)
        opened_b = stack.enter_context(opened_side("b", read_b, strategy, selection, effort, report))
        result = compared(opened_a, opened_b, edits, effort, report)
        sides = {"a": _side(a, opened_a), "b": _side(b, opened_b)}
    if is_json():
        differing, identical = result.differing, len(result.pairs) - len(result.differing)
        only = {"only_a": result.only_a, "only_b": result.only_b, "shapes": result.shapes}
        echo_json({**sides, "equal": result.equal, **only, "identical": identical, "differing": differing})
    else:
        _print_differences(result)
    if not result.pairs and not result.shapes:
        raise no_common_names()
    if exit_code and not result.equal:
        exit_different()


def _print_differences(result: Differences) -> None:
    for line in _heads(result):
        say(line)
    differing = result.differing
    if differing:
        title = f"{plural(len(differing), 'tensor')} of {len(result.pairs)} differ:"
        ordered = sorted(differing, key=lambda pair: pair.first_nonfinite is None)
        bad = [pair for pair in ordered if pair.first_nonfinite is not None]
        alarming_lines(list(map(nonfinite_pair, bad)))
        table(title, _DIFF_COLUMNS, [_diff_cells(pair) for pair in ordered], _DIFF_SPARE, range(len(bad)))
    elif result.equal:
        say(f"{plural(len(result.pairs), 'tensor')}, all equal in every byte")
    elif result.pairs:
        say(f"{plural(len(result.pairs), 'tensor')} in both with the same shape, all equal in every byte")


def _heads(result: Differences) -> Iterator[str]:
    for names, where in ((result.only_a, "only in A"), (result.only_b, "only in B")):
        if names:
            text = listing(names)
            yield f"{len(names)} {where}: {shown_text(text)}"
    rename = rename_by_prefix(result.only_a, result.only_b)
    if rename is not None:
        yield f"names differ by a prefix; {rename}"
    for name, (shape_a, shape_b) in result.shapes.items():
        yield f"{name}: {shape_words(shape_a)} in A, {shape_words(shape_b)} in B"


_DIFF_SPARE = ("type", "relative", "shape")
_DIFF_COLUMNS = ["parameter", "type", "shape", "differing", "NaN", "difference", "relative", "at"]


def _diff_cells(pair: TensorPair) -> list[str]:
    dtypes = pair.dtypes[0] if pair.dtypes[0] == pair.dtypes[1] else " and ".join(pair.dtypes)
    if pair.differing is None:
        numbers = ["-"] * 4
    elif pair.differing == 0 and pair.dtypes[0] == pair.dtypes[1]:
        numbers = ["bits only", "0", "0", "0"]
    else:
        numbers = [str(pair.differing), str(sum(pair.nan)), number_words(pair.max_abs), number_words(pair.max_rel)]
    return [pair.name, dtypes, shape_words(pair.shape), *numbers, "" if pair.at is None else shape_words(pair.at)]


def _side(path: str, checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    return {"path": path, "form": checkpoint.form, "step": checkpoint.step}
