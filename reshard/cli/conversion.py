"""Shared by commands that convert: the run, the Dask cluster of --scheduler, the summary in words and as JSON."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, Optional

from reshard.cli.errors import set_next_command
from reshard.cli.output import echo_json, say, totals_json, totals_words
from reshard.cli.progress import progress_of
from reshard.convert import Options, Prepared, Summary, Workers, prepare
from reshard.errors import ReshardError, UsageError
from reshard.forms.registry import counted_as
from reshard.plan.request import Request
from reshard.text.messages import listing
from reshard.text.names import KINDS, kind_of
from reshard.text.report import Report
from reshard.text.wording import byte_size, plural, rank_ranges

if TYPE_CHECKING:
    from reshard.verification.end_to_end import Adapter

# Shorter phases, in seconds, are not shown.
MIN_SHOWN = 0.1


def summary_json(summary: Summary) -> dict[str, Any]:
    """A summary as `--json` prints it."""
    fields = {name: value for name, value in vars(summary).items() if name not in ("target_files", "all_names")}
    replicas = None if summary.replicas is None else summary.replicas._asdict()
    return {**fields, "kinds": totals_json(summary.kinds), "replicas": replicas, "phases": summary.phases._asdict()}


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
    lines.append(f"headers read: source {rank_ranges(summary.source_ranks, counted_as(request.form))}")
    lines.append(f"{plural(summary.parameters, 'parameter')} resharded")
    if summary.bytes_copied:
        copied, all_bytes = byte_size(summary.bytes_copied), byte_size(summary.bytes_written)
        lines.append(f"{copied} of {all_bytes} copied by the file system, the rest through memory")
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
    typed: Mapping[str, Any],
    how: Options,
    lines: Callable[[Summary, float], list[str]],
    scheduler: Optional[str] = None,
    adapter: Optional[Adapter] = None,
) -> None:
    """Convert, or dry-run, and print the result.

    Args:
        request: the conversion.
        report: gets warnings and notes.
        typed: the options of `options.output`, and ``jobs``.
        how: how it is carried out.
        lines: the summary in words, with the seconds that verification took.
        scheduler: the Dask cluster whose workers write; None for this process.
        adapter: the added adapter, for verification.

    Raises:
        ReshardError: it is impossible, or failed.
    """
    progress = progress_of(typed["quiet"], typed["progress"])
    differences = None
    with (
        cluster_of(scheduler, how, typed["jobs"], report) as workers,
        prepare(request, how, report, progress) as prepared,
    ):
        try:
            summary = prepared.carry_out(workers)
        except BaseException:
            set_next_command(_next_command(prepared, how))
            raise
        if how.dry_run:
            from reshard.cli.plan import print_plan

            if typed["as_json"] or not typed["quiet"]:
                print_plan(prepared, summary, as_json=typed["as_json"], verbose=typed["verbose"])
            return
        # With the damaged files of the conversion, so that verification treats them as missing, too.
        request = prepared.plan.request
    before = time.monotonic()
    if how.verify:
        from reshard.convert.verifying import verify_written

        differences = verify_written(request, how, summary, progress, adapter)
    verifying = time.monotonic() - before
    if typed["as_json"]:
        rows = None if differences is None else [difference._asdict() for difference in differences]
        echo_json({**summary_json(summary), **({} if request.recover else {"differences": rows})})
    if not typed["quiet"]:
        say("\n".join(lines(summary, verifying)), to_standard_error=True)
    if differences is not None:
        from reshard.cli.verify import print_differences

        print_differences(differences, typed["quiet"])


def _next_command(prepared: Prepared, how: Options) -> str:
    """The command that continues a conversion which has failed; records remain once a file is written."""
    directory = prepared.state.directory
    with contextlib.suppress(ReshardError, OSError):
        # For one of several runs, resume would do the work of all.
        if directory is not None and not how.adding and how.share is None and directory.is_resumable:
            return f"to continue: reshard resume {shlex.quote(prepared.plan.request.dst)}"
    return f"to run it again: {shlex.join(['reshard', *sys.argv[1:]])}"


def cluster_of(
    scheduler: Optional[str], how: Options, jobs: Optional[int], report: Report
) -> contextlib.AbstractContextManager[Optional[Workers]]:
    """The Dask cluster of a scheduler, by address or scheduler file as typed; None where none was typed.

    Args:
        scheduler: as typed.
        how: how the conversion is carried out.
        jobs: CPUs of a work item, if typed.
        report: gets warnings and notes.

    Raises:
        UsageError: it is neither, Dask is not installed, this is already one of several runs, or the workers could not
            have the key of encrypted files.
    """
    if scheduler is None:
        return contextlib.nullcontext()
    if how.share is not None:
        raise UsageError(
            "--shard and --scheduler exclude each other: a Dask cluster divides the target ranks by itself",
            hint="pass one of them",
        )
    if how.decryption is not None:
        # Refused before anything is done.
        _ = how.decryption.shared_file
    try:
        from reshard.cluster import Cluster, scheduler_address
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--scheduler needs Dask, which is not installed ({error})",
            hint="in the clone of reshard: pip install '.[dask]'",
        ) from error
    import logging

    # Dask logs the same errors with tracebacks.
    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return Cluster(scheduler_address(scheduler), how, jobs, report)
