"""Shared by commands that convert: the run, the summary in words and as JSON."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Callable, Optional

from reshard.cli.output import echo_json, is_json, is_quiet, say, set_next_command, totals_words
from reshard.cli.progress import progress_of
from reshard.convert import Prepared, Summary, WriteElsewhere, prepare
from reshard.errors import ReshardError
from reshard.plan.request import Request
from reshard.text.messages import Report, listing, plural, rank_ranges
from reshard.text.names import KINDS, kind_of

if TYPE_CHECKING:
    from reshard.verification.end_to_end import MergedAdapter

# Shorter phases, in seconds, are not shown.
MIN_SHOWN = 0.1


def summary_json(summary: Summary) -> dict[str, Any]:
    """A summary as `--json` prints it."""
    return {name: value for name, value in vars(summary).items() if name not in ("target_files", "all_names")}


def contents_words(summary: Summary) -> str:
    """Totals of the targets by kind, and missing parameters by kind."""
    words = [totals_words(summary.kinds) or "no tensors"]
    for names, where in (
        (summary.left_out, "not in the target strategy, left out"),
        (summary.missing, "not in the source"),
    ):
        if names:
            counts = Counter(kind_of(name, 2, summary.all_names) for name in names)
            words.append(f"{where}: " + ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if kind in counts))
    return "; ".join(words)


def detail_lines(summary: Summary, request: Request, verifying: float = 0.0) -> list[str]:
    """The part of a summary for -v: times, source files, and all names not converted.

    Args:
        summary: of a conversion.
        request: of the conversion.
        verifying: seconds of the verification.
    """
    seconds = {**summary.phases._asdict(), "verifying": verifying}
    shown = [f"{phase} {duration:.1f} s" for phase, duration in seconds.items() if duration >= MIN_SHOWN]
    lines = [", ".join(shown)] if len(shown) > 1 else []
    lines.append(f"headers read: source {rank_ranges(summary.source_ranks, request.form.options.unit)}")
    lines.append(f"{plural(summary.parameters, 'parameter')} resharded")
    for names, fate in (
        (summary.copied, "copied unchanged"),
        (summary.excluded, "left out by --include and --exclude"),
        (summary.left_out, "left out, not in the target strategy"),
        (summary.missing, "in the target strategy, but not in the source"),
        (summary.unholdable, "left out, the target format cannot hold text"),
    ):
        if names:
            lines.append(f"{len(names)} {fate}: {listing(names).full}")
    if summary.replicas is not None:
        lines.append(str(summary.replicas))
    if summary.manifest:
        lines.append(f"manifest: {summary.manifest}")
    return lines


def carry_out(
    request: Request,
    report: Report,
    lines: Callable[[Summary, float], list[str]],
    elsewhere: Optional[WriteElsewhere] = None,
    adapter: Optional[MergedAdapter] = None,
) -> None:
    """Convert, or dry-run, and print the result.

    Args:
        request: the conversion.
        report: gets warnings and notes.
        lines: the summary in words, with the seconds that verification took.
        elsewhere: writes the files; None to write them here.
        adapter: the added adapter, for verification.

    Raises:
        ReshardError: it is impossible, or failed.
    """
    progress = progress_of()
    differences = None
    with prepare(request, report, progress) as prepared:
        try:
            summary = prepared.carry_out(elsewhere)
        except BaseException:
            set_next_command(_next_command(prepared))
            raise
        if request.task.dry_run:
            from reshard.cli.plan import print_plan

            if is_json() or not is_quiet():
                print_plan(prepared, summary)
            return
    verifying = 0.0
    if request.task.verify:
        from reshard.convert.verifying import verify_written

        before = time.monotonic()
        # Files that the conversion found damaged are missing for the verification, too.
        request = request._replace(damaged=prepared.plan.request.damaged)
        differences = verify_written(request, summary, progress, adapter)
        verifying = time.monotonic() - before
    if is_json():
        echo_json({**summary_json(summary), **({} if request.task.recover else {"differences": differences})})
    if not is_quiet():
        say("\n".join(lines(summary, verifying)), to_standard_error=True)
    if differences is not None:
        from reshard.cli.verify import print_differences

        print_differences(differences)


def _next_command(prepared: Prepared) -> str:
    """The command that continues a conversion which has failed; records remain once a file is written."""
    directory, request = prepared.state.directory, prepared.plan.request
    alone = not request.task.by_rank and request.asked.shard is None
    with contextlib.suppress(ReshardError, OSError):
        # For one of several runs, resume would do the work of all.
        if directory is not None and alone and directory.is_resumable:
            return f"to continue: reshard resume {shlex.quote(request.dst)}"
    return f"to run it again: {shlex.join(['reshard', *sys.argv[1:]])}"
