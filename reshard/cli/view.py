"""view: one HTML page that shows a checkpoint, a conversion, or two checkpoints."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.asked import CHANGES, Conversion, Edits, Effort, Source, Target, words_of
from reshard.cli import options
from reshard.cli.command import argument, command, option, paths
from reshard.cli.output import listener, plain
from reshard.errors import InputError, UsageError
from reshard.text.messages import Report, byte_size, plural

if TYPE_CHECKING:
    from reshard.inspection.checkpoint import Inspected, Problem
    from reshard.strategies import Strategy


@command(
    "view",
    """
reshard view ckpt/ --src-strategy src.ckpt --open
reshard view ckpt/ --src-strategy src.ckpt --dst-strategy dst.ckpt -o new.html
reshard view ckpt/ hf/ --a-strategy src.ckpt --stats
""",
)
@argument("src")
@argument("b", metavar="[B]", required=False)
@options.group(Source, *options.STORED, path="src", strategy={"names": ("--src-strategy", "--strategy")})
@options.strategy("Strategy of SRC, when it is compared with B.", flag="--a-strategy")
@options.strategy("Strategy of B.", flag="--b-strategy")
@option("Source", "--b-step", metavar="EPOCH_STEP|latest", show_default="--step", help="Step of B.")
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
@option("Output", "--open", "browse", is_flag=True, help="Open the page in the browser.")
@option(
    "Parameters", "--stats", is_flag=True, help="Read every copy of all tensors: magnitudes, NaN and Inf; differences."
)
@options.group(Edits, *CHANGES)
@options.group(Effort, *options.LIMITS)
@options.common
def view(
    b: str | None,
    a_strategy: str | None,
    b_strategy: str | None,
    b_step: str | None,
    source: Source,
    target: Target,
    edits: Edits,
    effort: Effort,
    output: str | None,
    browse: bool,
    stats: bool,
) -> None:
    """Write an HTML page that shows a checkpoint of any form, or compares it with B.

    The page says how large a checkpoint is, what it is made of and how it is cut, lists problems first, and has every
    tensor with its shape, type, slices, ranks and files. With --dst-strategy, it shows the bytes that each target rank
    of a conversion reads from each source rank. With B, it shows what differs, as `diff` does; options of names and
    types apply to SRC. Only headers and strategies are read; --stats reads all tensors. The page is one file that
    loads nothing and opens in any browser.
    """
    from reshard.inspection.contents import refuse_other_files
    from reshard.storage import write_parts, writing_error
    from reshard.view.page import page

    src = source.path
    report = Report(listener())
    path = output or f"{os.path.basename(src.rstrip('/')) or 'checkpoint'}.html".replace("{rank}", "rank")
    _check_replaceable(path, named=output is not None)
    cut = target.strategy is not None or target.shards is not None
    if b is not None and b.lower().endswith((".html", ".htm")):
        raise UsageError(f"{b}: is no checkpoint", hint=f"to name the page: -o {shlex.quote(b)}")
    for each in (src, *([] if b is None else [b])):
        refuse_other_files(each)
    if b is None:
        of_two = {"--a-strategy": a_strategy, "--b-strategy": b_strategy, "--b-step": b_step}
        typed = [name for name, value in of_two.items() if value is not None]
        if typed:
            raise UsageError(f"{typed[0]} is for two checkpoints", hint="name the other: reshard view SRC B")
        data = _one(source, target, edits, effort, report, stats)
        strategies = {"--strategy": source.strategy}
    elif cut:
        raise UsageError("--dst-strategy and --shards show a conversion of one checkpoint, not B", hint="leave out one")
    else:
        other = replace(source, path=b, strategy=b_strategy, step=b_step or source.step)
        read = replace(source, strategy=a_strategy)
        data = _two(read, other, source.strategy, edits, effort, report, stats)
        strategies = {"--strategy": source.strategy, "--a-strategy": a_strategy, "--b-strategy": b_strategy}
        strategies["--b-step"] = b_step
    given = [word for name, value in strategies.items() if value is not None for word in (name, value)]
    given += _typed([*words_of(source, ("step", "file_suffix")), *words_of(edits, CHANGES)])
    words = [src, *([] if b is None else [b]), *given, *_typed(words_of(target, ("strategy", "shards")))]
    made_by = shlex.join(["reshard", "view", *words, *(["--stats"] if stats else []), "-o", path])
    content = page({**data, "options": given, "command": made_by})
    try:
        write_parts(path, len(content), [content])
    except OSError as error:
        raise writing_error(path, error) from error
    listener()("note", f"wrote {path}, {byte_size(len(content))}")
    if browse:
        # Loaded only here.
        import webbrowser

        if not webbrowser.open(f"file://{os.path.abspath(path)}"):
            listener()("note", "no browser was found: open the file by hand")


def _typed(words: Sequence[str]) -> list[str]:
    """Options, with each value as a word of its own."""
    return [part for word in words for part in word.split("=", 1)]


def _one(source: Source, target: Target, edits: Edits, effort: Effort, report: Report, stats: bool) -> dict[str, Any]:
    """The page's data on a checkpoint, and perhaps on a conversion of it."""
    from reshard.inspection.checkpoint import inspect, problems_of
    from reshard.view.page import page_data

    cut = target.strategy is not None or target.shards is not None
    if edits != Edits(dequantize=edits.dequantize):
        raise UsageError("options of names and types are for two checkpoints", hint="name the other: view SRC B")
    if edits.dequantize is not None and not stats and not cut:
        raise UsageError("--dequantize changes statistics and conversions", hint="add --stats or --dst-strategy")
    strategy = _strategy(source, report)
    inspected = inspect(source, strategy)
    problems = problems_of(inspected)
    asked = Conversion(source, target, edits, effort)
    moves = _moves(asked, inspected, problems) if cut else None
    statistics = _statistics(asked, inspected, problems) if stats else None
    return {**page_data(inspected, problems, strategy), "moves": moves, "statistics": statistics}


def _strategy(source: Source, report: Report) -> Strategy | None:
    if source.strategy is None:
        return None
    from reshard.strategies import typed_strategy

    return typed_strategy(source.strategy, report)


def _two(
    a: Source, b: Source, shared: str | None, edits: Edits, effort: Effort, report: Report, stats: bool
) -> dict[str, Any]:
    """The page's data on two checkpoints."""
    from reshard.cli.opened import compared, no_common_names, nonfinite_pair, opened_side, rename_by_prefix
    from reshard.forms.registry import form_of
    from reshard.inspection.checkpoint import Problem, inspect
    from reshard.view.compare import compared_data

    inspected, strategies = [], []
    for each in (a, b):
        by_rank = form_of(each.path).options.by_rank
        read = each if not by_rank else replace(each, strategy=each.strategy or shared)
        strategies.append(_strategy(read, report))
        inspected.append(inspect(read, strategies[-1]))
    with (
        opened_side("a", a, shared, edits, effort, report) as one,
        opened_side("b", b, shared, Edits(edits.include, edits.exclude), effort, report) as other,
    ):
        only = [[name for name in mine if name not in theirs] for mine, theirs in ((one, other), (other, one))]
        rename = rename_by_prefix(*only)
        if not any(name in other for name in one):
            raise no_common_names(rename)
        problems = [] if rename is None else [Problem(1, "names differ by a prefix", rename)]
        found = compared(one, other, edits, effort, report) if stats else None
        bad = [] if found is None else [pair for pair in found.differing if pair.first_nonfinite is not None]
        if bad:
            title = f"{plural(len(bad), 'tensor')} with NaN or Inf in one only"
            problems.append(Problem(0, _first_lines(title, list(map(nonfinite_pair, bad)))))
        sides = (inspected[0], inspected[1])
        return compared_data((one, other), sides, (strategies[0], strategies[1]), found, problems)


def _first_lines(title: str, lines: Sequence[str], most: int = 6) -> str:
    """A title, and the first of the lines below it."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([f"{title}:", *lines[:most], *more])


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
    conversion = f"conversion with {' '.join(words_of(asked.target)).replace('=', ' ')}"
    if asked.target.shards is not None:
        # Rank files are not cut by rows alone; the forms that are move the same bytes.
        form = inspected.form.name if inspected.form.options.shards else "dcp"
        asked = replace(asked, target=replace(asked.target, form=form))
    request = with_ends(asked, report)
    try:
        edits = edit_rules(request.src, asked.edits, request.to, asked.source.step, asked.target)
        moves = {**moves_data(request.with_edits(edits), report), "command": _by_rank(asked, inspected)}
    except InputError as error:
        problems.append(Problem(0, f"a {conversion} is refused: {error.message}", error.hint and str(error.hint)))
        return None
    problems += [Problem(1, f"{conversion}: {text}") for text in report.warnings]
    return moves


def _by_rank(asked: Conversion, inspected: Inspected) -> list[str] | None:
    """The command that writes the file of one target rank; None where it is not one of a rank."""
    if asked.target.strategy is None or not inspected.form.options.by_rank:
        return None
    words = ["reshard", "by-rank", "{rank}", asked.source.path, "OUT"]
    ends = {"--src-strategy": asked.source.strategy, "--dst-strategy": asked.target.strategy}
    return [*words, *(word for name, value in ends.items() if value is not None for word in (name, value))]


# Columns of `stats --json`; the page has types and shapes already.
_STATISTICS = ("name", "count", "nan", "inf", "zeros", "min", "max", "mean", "norm", "first_nonfinite")


def _statistics(asked: Conversion, inspected: Inspected, problems: list[Problem]) -> list[list[Any]] | None:
    """Statistics of every tensor; None if tensors cannot be read, which the page lists as a problem."""
    from reshard.cli.opened import check_crcs, nonfinite_element, opened
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
    bad = [tensor for tensor in statistics if tensor.first_nonfinite is not None]
    if bad:
        title = f"{plural(len(bad), 'tensor')} with NaN or Inf"
        problems.append(Problem(0, _first_lines(title, list(map(nonfinite_element, bad)))))
    return [[*(plain(getattr(tensor, key)) for key in _STATISTICS), levels(tensor.magnitudes)] for tensor in statistics]
