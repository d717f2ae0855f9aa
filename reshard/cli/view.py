"""view: one HTML page that shows a checkpoint, from headers and strategies."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.asked import Conversion, Edits, Effort, Source, Target
from reshard.cli import options
from reshard.cli.command import argument, command, option, paths
from reshard.cli.output import listener, plain, write_file
from reshard.errors import InputError, UsageError
from reshard.text.messages import Report, listing, plural

if TYPE_CHECKING:
    from reshard.inspection.checkpoint import Inspected, Problem


@command(
    "view",
    """
reshard view ckpt/ --src-strategy src.ckpt
reshard view ckpt/ --src-strategy src.ckpt --dst-strategy dst.ckpt -o new.html
reshard view iterations/ --dst-strategy same --stats
""",
)
@argument("src")
@options.group(Source, *options.STORED, path="src", strategy={"names": ("--src-strategy", "--strategy")})
@options.group(Target, "strategy", "shards")
@option(
    "Output",
    "-o",
    "--output",
    metavar="FILE.html",
    callback=options.path_to_write("-o", ".html", ".htm"),
    shell_complete=paths,
    show_default="name of SRC, in this directory",
    help="Page to write. A page of reshard view is replaced only if it is named here.",
)
@option(
    "Parameters", "--stats", is_flag=True, help="Read every copy of all tensors, too, and show magnitudes, NaN and Inf."
)
@options.group(Edits, "dequantize")
@options.group(Effort, *options.LIMITS)
@options.common
def view(source: Source, target: Target, edits: Edits, effort: Effort, output: str | None, stats: bool) -> None:
    """Write an HTML page that shows what is in a checkpoint of any form.

    The page lists problems first, then parameters with shapes, types, sizes and layouts, the slices of each
    parameter with the ranks and files that hold them, steps, files and replicas. With --dst-strategy, it shows
    the bytes and requests from each source rank to each target rank of a conversion. Only headers and strategies
    are read; --stats reads all tensors. The page is one file that loads nothing and opens in any browser.
    """
    from reshard.inspection.checkpoint import inspect, problems_of
    from reshard.view.page import page, page_data

    cut, src = target.strategy is not None or target.shards is not None, source.path
    if edits.dequantize is not None and not stats and not cut:
        raise UsageError("--dequantize changes statistics and conversions", hint="add --stats or --dst-strategy")
    report = Report(listener())
    path = output or f"{os.path.basename(src.rstrip('/')) or 'checkpoint'}.html".replace("{rank}", "rank")
    _check_replaceable(path, named=output is not None)
    strategy = None
    if source.strategy is not None:
        from reshard.strategies import typed_strategy

        strategy = typed_strategy(source.strategy, report)
    inspected = inspect(source, strategy)
    problems = problems_of(inspected)
    asked = Conversion(source, target, edits, effort)
    moves = _moves(asked, inspected, problems) if cut else None
    statistics = _statistics(asked, inspected, problems) if stats else None
    data = {**page_data(inspected, problems, strategy), "moves": moves, "statistics": statistics}
    write_file(path, page(data), "wrote")


def _check_replaceable(path: str, named: bool) -> None:
    """Refuse to replace a file that is no page of this command, or one that the user did not name."""
    from reshard.storage import exists, is_directory, opened_regular, read_range
    from reshard.view.page import MARK

    if is_directory(path):
        raise UsageError(f"{path}: is a directory", hint="name a file to write: -o FILE.html")
    if exists(path):
        with opened_regular(path) as file:
            begin = read_range(file, 0, 0, 200)
        if MARK.encode() not in begin:
            raise UsageError(f"{path}: exists and is no page of reshard view", hint="name another: -o FILE.html")
        if not named:
            raise UsageError(
                f"{path}: exists, and may be the page of another checkpoint",
                hint=f"to replace it: -o {shlex.quote(path)}",
            )


def _moves(asked: Conversion, inspected: Inspected, problems: list[Problem]) -> dict[str, Any] | None:
    """The bytes that a conversion moves; None if it is refused, which the page lists as a problem."""
    from reshard.convert.ends import with_ends
    from reshard.inspection.checkpoint import Problem
    from reshard.plan.edits import edit_rules
    from reshard.view.moves import moves_data

    report = Report()
    conversion = f"conversion with {' '.join(asked.target.words()).replace('=', ' ')}"
    if asked.target.shards is not None:
        # Rank files are not cut by rows alone; the forms that are move the same bytes.
        form = inspected.form.name if inspected.form.options.shards else "dcp"
        asked = replace(asked, target=replace(asked.target, form=form))
    request = with_ends(asked, report)
    try:
        edits = edit_rules(request.src, asked.edits, request.to, asked.source.step, asked.target)
        moves = moves_data(request.with_edits(edits), report)
    except InputError as error:
        problems.append(Problem(0, f"a {conversion} is refused: {error.message}", error.hint and str(error.hint)))
        return None
    problems += [Problem(1, f"{conversion}: {text}") for text in report.warnings]
    return moves


# Columns of `stats --json`; the page has types and shapes already.
_STATISTICS = ("name", "count", "nan", "inf", "zeros", "min", "max", "mean", "norm", "first_nonfinite")


def _statistics(asked: Conversion, inspected: Inspected, problems: list[Problem]) -> list[list[Any]] | None:
    """Statistics of every tensor; None if tensors cannot be read, which the page lists as a problem."""
    from reshard.cli.opened import check_crcs, opened
    from reshard.cli.progress import progress_of
    from reshard.inspection.checkpoint import Problem
    from reshard.numbers.statistics import statistics_of
    from reshard.strategies import NONE
    from reshard.view.page import levels

    report = Report()
    # A single file is shown without a strategy, so its statistics need none.
    default = NONE if inspected.shown.checkpoint is not None and inspected.form.options.needs_strategy else None
    effort, source = asked.effort, asked.source
    try:
        read = replace(source, strategy=source.strategy or default)
        with opened(read, asked.edits, effort, report) as checkpoint:
            progress = progress_of()
            check_crcs(checkpoint, checkpoint, asked.edits, progress, report, copies=True, hint=None)
            statistics = statistics_of(checkpoint, effort.max_memory // 2, progress, magnitudes=True, copies=True)
    except InputError as error:
        problems.append(Problem(1, f"statistics were not computed: {error.message}", error.hint and str(error.hint)))
        return None
    bad = [tensor.name for tensor in statistics if tensor.first_nonfinite is not None]
    if bad:
        problems.append(Problem(0, f"{plural(len(bad), 'tensor')} with NaN or Inf: {listing(bad, 6)}"))
    return [[*(plain(getattr(tensor, key)) for key in _STATISTICS), levels(tensor.magnitudes)] for tensor in statistics]
