"""stats: statistics of the numbers in every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import click

from reshard.asked import CHANGES, Edits, Effort, Source
from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.opened import (
    check_crcs,
    location_words,
    number_words,
    opened,
    shape_words,
)
from reshard.cli.output import alarming, echo_json, exit_different, is_json, is_verbose, listener
from reshard.cli.progress import progress_of
from reshard.cli.tables import alarming_lines, table
from reshard.errors import UsageError
from reshard.forms.registry import counted_as
from reshard.numbers.statistics import TensorStatistics, statistics_of
from reshard.text.messages import Report, full_text, listing, one_line, plural, rank_ranges

_KINDS = {"nan": "NaN", "inf": "Inf"}


def _kinds(_: click.Context, __: click.Parameter, value: Optional[str]) -> tuple[str, ...]:
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
@argument("src", shell_complete=completion.paths)
@options.group(Source, "strategy", "step", "file_suffix", "without_ranks", path="src", strategy=options.SAVED)
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
        alarming_lines(list(map(_nonfinite_line, bad)))
        table(source.path, _COLUMNS, [_cells(tensor) for tensor in ordered], _SPARE, range(len(bad)))
        click.echo(_summary(statistics))
    failures = [line for kind in fail_on for line in _failure_lines(kind, statistics)]
    for line in failures:
        click.echo(alarming(line), err=True)
    if failures:
        exit_different()


_SPARE = ("norm", "zeros", "mean")
_COLUMNS = ["parameter", "type", "shape", "NaN", "Inf", "zeros", "min", "max", "mean", "norm"]


def _nonfinite_line(tensor: TensorStatistics) -> str:
    """Where NaN and infinite elements begin."""
    assert tensor.first_nonfinite is not None
    counts = f"{tensor.nan} NaN, {tensor.inf} infinite"
    return f"{one_line(tensor.name)}: {counts}; the first at {location_words(tensor.first_nonfinite)}"


def _cells(tensor: TensorStatistics) -> list[str]:
    numbers = (tensor.nan, tensor.inf, tensor.zeros, tensor.min, tensor.max, tensor.mean, tensor.norm)
    return [tensor.name, tensor.dtype, shape_words(tensor.shape), *map(number_words, numbers)]


def _summary(statistics: Sequence[TensorStatistics]) -> str:
    count = sum(tensor.count for tensor in statistics)
    nan, inf, zeros = (
        (sum(numbers) for numbers in zip(*((t.nan, t.inf, t.zeros) for t in statistics))) if statistics else (0,) * 3
    )
    return f"{plural(len(statistics), 'tensor')}, {plural(count, 'element')}: {nan} NaN, {inf} infinite, {zeros} zero"


def _failure_lines(kind: str, statistics: Sequence[TensorStatistics]) -> list[str]:
    """A line with the tensors that have elements of a kind; none without such tensors."""
    names = [tensor.name for tensor in statistics if getattr(tensor, kind)]
    if not names:
        return []
    text = listing(names)
    return [f"reshard: {_KINDS[kind]} in {plural(len(names), 'tensor')}: {full_text(text) if is_verbose() else text}"]
