"""convert, which is transform-dir too, by-rank, and recover."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reshard.asked import Conversion, Edits, Effort, Source, Target, Task
from reshard.cli import options
from reshard.cli.command import argument, command, option
from reshard.cli.output import echo_json, is_json, is_quiet, is_verbose, listener, say, set_next_command, totals_words
from reshard.cli.progress import progress_of
from reshard.convert import Summary, WriteElsewhere, run
from reshard.convert.ends import request_of
from reshard.convert.recorded import with_absolute_paths
from reshard.errors import ReshardError, TargetError, UsageError
from reshard.forms.registry import form_named, form_of
from reshard.forms.request import Request
from reshard.records.ledger import ledger_in
from reshard.storage import absolute, is_directory
from reshard.strategies import typed_strategy
from reshard.text.messages import Report, are, byte_size, counted_ranks, listing, plural, rank_ranges, step_words
from reshard.text.names import KINDS, kind_of

if TYPE_CHECKING:
    from reshard.verification.end_to_end import MergedAdapter

# Shorter phases, in seconds, are not shown.
MIN_SHOWN = 0.1


def summary_json(summary: Summary) -> dict[str, Any]:
    """A summary as `--json` prints it."""
    return {name: value for name, value in vars(summary).items() if name not in ("target_files", "kept", "all_names")}


def contents_words(summary: Summary) -> str:
    """Totals of the targets by kind, and missing parameters by kind."""
    words = [totals_words(summary.kinds) or "no tensors"]
    for names, where in (
        (summary.left_out, "not in the target strategy, left out"),
        (summary.missing, "in the target strategy only"),
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
    seconds = {**summary.phases, "verifying": verifying}
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


def _swapped(request: Request) -> str | None:
    """What to say where the source was converted from the target."""
    ledger = None
    with contextlib.suppress(ReshardError):
        ledger = ledger_in(request.src) if is_directory(request.src) else None
    if ledger is None or ledger.record.asked.source.path != absolute(request.dst):
        return None
    return f"{request.src} was converted from {request.dst}: are SRC and DST swapped?"


def carry_out(
    request: Request,
    report: Report,
    lines: Callable[[Summary, float], list[str]],
    elsewhere: WriteElsewhere | None = None,
    adapter: MergedAdapter | None = None,
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
    try:
        result = run(request, report, progress, elsewhere)
    except BaseException as error:
        again = f"to run it again: {shlex.join(['reshard', *sys.argv[1:]])}"
        set_next_command(again if report.next_command is None else f"to continue: {report.next_command}")
        if isinstance(error, TargetError):
            error.add_hint(_swapped(request), first=True)
        raise
    summary = result.summary
    if request.task.dry_run:
        from reshard.cli.plan import print_plan

        if is_json() or not is_quiet():
            print_plan(result)
        return
    verifying = 0.0
    if request.task.verify:
        from reshard.convert.verifying import verify_written

        before = time.monotonic()
        # Files that the conversion found damaged are missing for the verification, too.
        request = request._replace(damaged=result.plan.request.damaged)
        differences = verify_written(request, summary, progress, adapter)
        verifying = time.monotonic() - before
    if is_json():
        echo_json({**summary_json(summary), **({} if request.task.recover else {"differences": differences})})
    if not is_quiet():
        say("\n".join(lines(summary, verifying)), to_standard_error=True)
    if differences is not None:
        from reshard.cli.verify import print_differences

        print_differences(differences)


@command(
    "convert",
    """
reshard convert ckpt/ out/ \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt

Into one file without optimizer state, proven afterwards:
reshard convert ckpt/ full/ --exclude 'adam_*' --format safetensors \\
    --verify --src-strategy strategy/ --dst-strategy none

As a task of a Slurm array; the last one writes the manifest:
reshard convert ckpt/ out/ --shard auto \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt

On the workers of a Dask cluster that see ckpt/ and out/:
reshard convert ckpt/ out/ --scheduler tcp://host:8786 \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt
""",
)
@argument("src")
@argument("dst")
@options.group(Conversion)
@options.scheduler
@options.conversion
@options.dry_run
@options.proof("Compare every tensor with the source after writing.")
def convert(
    files: tuple[int, ...] | None,
    shard: tuple[int, int] | None,
    scheduler: str | None,
    dry_run: bool,
    verify: bool,
    source: Source,
    target: Target,
    edits: Edits,
    effort: Effort,
) -> None:
    """Convert the checkpoint in SRC to another layout or another form, and write it to DST.

    SRC is a directory with rank_0/, rank_1/ ... (or rank0/, 0/), one file with a whole checkpoint, or a path
    with {rank} and wildcards in it; these need --src-strategy. Or it is a directory of Checkpoint 2.0, unified,
    Hugging Face or PyTorch weights. DST gets rank_{r}/{prefix}{r}.{ckpt|safetensors}, or the form that --to
    names. Without strategies, --format changes only the format of rank files, and each rank keeps its cut.
    Run the same command again to continue after an interruption.
    """
    asked = Conversion(source, target, edits, effort, files, shard)
    run_conversion(asked, Task(dry_run=dry_run, verify=verify), scheduler)


@command(
    "by-rank",
    """
One job per rank:
for r in 0 1 2 3; do
    reshard by-rank $r ckpt/ out/ \\
        --src-strategy src.ckpt --dst-strategy dst.ckpt
done
""",
)
@argument("rank", type=options.RANK)
@argument("src")
@argument("dst")
@options.conversion
@options.dry_run
@options.proof("Compare every tensor with the source after writing.")
def by_rank(
    rank: int,
    dry_run: bool,
    verify: bool,
    source: Source,
    target: Target,
    edits: Edits,
    effort: Effort,
) -> None:
    """Convert the checkpoint in SRC for one RANK of the target strategy.

    Only the source ranks that `reshard rank-list RANK` prints are needed; with --names, also one rank of each
    pipeline stage. With a form other than ranks in --to, RANK is the number of a target file, as `reshard plan`
    lists them, and the source must be complete. The run that writes the last missing rank completes DST.
    """
    asked = Conversion(source, target, edits, effort, (rank,))
    run_conversion(asked, Task(by_rank=True, dry_run=dry_run, verify=verify))


def run_conversion(asked: Conversion, task: Task, scheduler: str | None = None) -> None:
    """Carry out a conversion, on a Dask cluster if it has a scheduler."""
    report = Report(listener())
    request = request_of(asked, report, task)
    elsewhere = None if scheduler is None else _on_cluster(scheduler, asked, report)
    carry_out(request, report, summary_lines(request), elsewhere)


def _on_cluster(scheduler: str, asked: Conversion, report: Report) -> WriteElsewhere:
    """The function that writes on a Dask cluster.

    Raises:
        UsageError: Dask is not installed, or this is already one of several runs.
    """
    if asked.shard is not None:
        raise UsageError(
            "--shard and --scheduler exclude each other: a Dask cluster divides the target ranks by itself",
            hint="pass one of them",
        )
    try:
        from reshard.cluster import writer
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--scheduler needs Dask, which is not installed ({error})",
            hint="pip install distributed",
        ) from error
    return writer(scheduler, with_absolute_paths(asked), report)


def summary_lines(request: Request) -> Callable[[Summary, float], list[str]]:
    """For `carry_out`: written files and their contents in a line each; the rest with -v."""

    def lines(summary: Summary, verifying: float) -> list[str]:
        files, shard = request.to.options.unit, request.asked.shard
        part = request.asked.files is not None or shard is not None
        complete = counted_ranks(summary.done_before, files)
        if summary.ranks:
            # The number of an only file says nothing.
            alone = files == "file" and len(summary.target_files) == 1 and not part
            count = plural(1, files) if alone else counted_ranks(summary.ranks, files)
            rate = summary.bytes_written / summary.seconds if summary.seconds else 0.0
            first = (
                f"wrote {count} to {request.dst}: "
                f"{byte_size(summary.bytes_written)} in {summary.seconds:.1f} s ({byte_size(int(rate))}/s)"
            )
            first += f"; {complete} already complete" if summary.done_before else ""
        elif summary.done_before:
            first = f"nothing to write: {complete} already complete in {request.dst}"
        else:
            number, runs = shard or (0, 1)
            first = f"nothing to write: share {number}/{runs} is empty: fewer {files}s than shares"
        contents = [f"{step_words(summary.step)}: {contents_words(summary)}"] if summary.target_files else []
        if contents and request.source.is_as_cut:
            contents.append(f"{plural(len(summary.target_files), 'rank file')} copied, still cut as before")
        if is_verbose():
            contents += detail_lines(summary, request, verifying)
        elif summary.manifest and part:
            # Other runs wrote the rest.
            contents.append(f"complete, all {files}s written: {summary.manifest}")
        return [first, *contents]

    return lines


_SAVED = {"names": ("--strategy",), "help": "Strategy the checkpoint was saved with."}


@command(
    "recover",
    """
Ranks 3 and 7 of 8 are lost:
reshard recover ckpt/ whole/ --strategy strategy/

The lost ones alone, put back into the tree:
reshard recover ckpt/ lost/ --lost-only --strategy strategy/
cp -rf lost/rank_* ckpt/
""",
)
@argument("src")
@argument("dst")
@options.ranks("Write only these ranks.")
@option("Target", "--lost-only", is_flag=True, help="Write only lost and damaged ranks.")
@options.group(Source, path="src", strategy=_SAVED)
@options.group(Target, "prefix", "overwrite", "checksum", path="dst", prefix={"initial": None, "shown": "as in SRC"})
@options.group(Edits, "allow_missing")
@options.group(Effort)
@options.dry_run
@options.output
def recover(
    ranks: tuple[int, ...] | None,
    lost_only: bool,
    source: Source,
    target: Target,
    edits: Edits,
    effort: Effort,
    dry_run: bool,
) -> None:
    """Rebuild the checkpoint of every lost rank from replicas.

    The newest step is used of which some rank still holds every slice. A rank that is lost, damaged or was
    never saved is made from ranks with the same slices, parameter by parameter if no single rank has them
    all. Intact files are copied unchanged, so DST is the whole tree. If no rank holds a slice any more,
    nothing is written, and the error lists these slices by parameter and rank. All copies of what is written are
    compared first: where they differ, nothing is written, and --without-ranks leaves out a wrong rank.

    Files are named as in SRC (rank_3/llama_rank_3-1_200.ckpt): the files of --lost-only can be
    copied back into SRC; with --prefix they are named as in a conversion.
    """
    src, dst, form = source.path, target.path, form_of(source.path)
    if not form.options.by_rank:
        to = form if form.options.written else form_named("huggingface")
        raise UsageError(
            f"{src}: is of the form {form.name}; recover works on rank directories",
            hint=f"use: reshard convert {shlex.quote(src)} {shlex.quote(dst)} --to {to.name}"
            + (" --dst-strategy same" if to.options.cut else ""),
        )
    if source.strategy is None:
        raise UsageError("--strategy is missing", hint="name the strategy file or directory of the checkpoint")
    run_recovery(Conversion(source, target, edits, effort, ranks), Task(True, lost_only, dry_run=dry_run))


def run_recovery(asked: Conversion, task: Task) -> None:
    """Carry out a recovery of rank files, whose source has a strategy."""
    src, dst, form = asked.source.path, asked.target.path, form_of(asked.source.path)
    report = Report(listener())
    saved = typed_strategy(str(asked.source.strategy), report)
    request = Request(asked, form, saved, form, saved, task=task)

    def lines(summary: Summary, _: float) -> list[str]:
        complete = counted_ranks(summary.done_before)
        rebuilt = [rank for rank in summary.recovered if rank in summary.ranks]
        if summary.ranks:
            wrote = f"wrote {counted_ranks(summary.ranks)} of {step_words(summary.step)} to {dst}"
            rows = [
                f"{wrote}: {byte_size(summary.bytes_written)}"
                + (f"; {complete} already complete" if summary.done_before else ""),
                f"{rank_ranges(rebuilt)} made from replicas" if rebuilt else "no rank was missing or damaged",
            ]
        else:
            reason = "no rank is lost"
            if summary.done_before:
                reason = f"{complete} already complete in {dst}"
            elif asked.files is not None:
                reason = f"{rank_ranges(asked.files)} {are(asked.files)} not lost"
            rows = [f"nothing to write: {reason}"]
        if is_verbose():
            rows += [f"{step_words(summary.step)}: {contents_words(summary)}", *detail_lines(summary, request)]
        if task.lost_only and summary.ranks and not summary.manifest and asked.target.prefix is None:
            rows.append(f"file names are those of {src}: copy them back into it")
        return rows

    carry_out(request, report, lines)
