"""plan: the plan of a conversion, from the same code."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from reshard.asked import Conversion, Edits, Effort, Source, Target, Task
from reshard.cli import options
from reshard.cli.command import argument, command
from reshard.cli.convert import contents_words, detail_lines, summary_json
from reshard.cli.output import echo_json, fill, is_json, is_verbose, listener, say, terminal_width
from reshard.cli.progress import progress_of
from reshard.cli.tables import table
from reshard.convert import Run, run
from reshard.convert.ends import request_of
from reshard.convert.transfers import Transfers, transfers_of
from reshard.execute import Budget
from reshard.execute.destination import Space
from reshard.processes import anonymous_bytes, private_bytes
from reshard.text.messages import (
    Report,
    byte_size,
    counted_ranks,
    left_alone,
    number_ranges,
    plural,
    rank_ranges,
    step_words,
)

_MAX_ROWS = 40
# Columns of the label before the text of a line.
_LABEL = 11


@command(
    "plan",
    """
reshard plan ckpt/ out/ --src-strategy src.ckpt --dst-strategy dst.ckpt
reshard plan ckpt/ out/ --src-strategy src.ckpt --dst-strategy none
""",
)
@argument("src")
@argument("dst")
@options.group(Conversion)
@options.scheduler
@options.conversion
@options.dry_run
@options.proof("Compare every tensor with the source after writing.")
def plan(
    files: tuple[int, ...] | None,
    shard: tuple[int, int] | None,
    source: Source,
    target: Target,
    edits: Edits,
    effort: Effort,
    verify: bool,
    **_: Any,
) -> None:
    """Print the plan of convert with the same arguments and options; DST is not changed.

    The plan lists the step, ranks, files and bytes that are read and written, memory, free space, replicas
    of lost ranks, and parameters that are left out or missing. It runs the checks of a conversion. Use
    --json in scripts.
    """
    report = Report(listener())
    asked = Conversion(source, target, edits, effort, files, shard)
    request = request_of(asked, report, Task(dry_run=True, verify=verify))
    print_plan(run(request, report, progress_of()))


def print_plan(run: Run) -> None:
    """Print a plan as text or JSON."""
    moved = transfers_of(run.plan, [*run.sizes], run.budget)
    if is_json():
        echo_json(_json(run, moved))
        return
    width = terminal_width()
    for line in _lines(run, moved):
        say("\n".join(fill(line, width, " " * (_LABEL if line.startswith(" ") else 2))))
    _print_targets(run, moved)


def _json(run: Run, moved: Transfers) -> dict[str, Any]:
    plan, execution = run.plan, run.budget
    uploads, part_bytes = execution.uploads, execution.part_bytes
    sources = _source_bytes(moved)
    return {
        **summary_json(run.summary),
        "targets": [
            {
                "rank": rank,
                "file": plan.path(rank),
                "bytes": run.sizes[rank],
                "sources": [{"rank": source, "bytes": count} for source, count in sorted(sources[rank].items())],
            }
            for rank in run.sizes
        ],
        "sources": [
            {"rank": rank, "file": plan.checkpoint.files[rank], "bytes_read": count}
            for rank, count in sorted(moved.read.items())
        ],
        "absent_ranks": _absent(run),
        "bytes_read": sum(moved.read.values()),
        "over_read": round(moved.over_read, 4),
        "memory": {
            "buffers": execution.buffer_bytes,
            "most_buffers": execution.max_memory,
            "expected": _expected_memory(execution),
        },
        "threads": execution.threads,
        "io": dict(zip(("way", "why"), execution.io)),
        "requests": _requests_json(execution),
        "uploads": {"at_a_time": uploads, "part_bytes": part_bytes} if part_bytes else None,
        "space": [
            {"directory": space.place, "bytes_needed": space.needed, "bytes_free": space.free} for space in run.space
        ],
    }


def _lines(run: Run, moved: Transfers) -> list[str]:
    plan, summary = run.plan, run.summary
    request = plan.request
    files, source_files = request.to.options.unit, request.form.options.unit
    counts = f"{plural(_sources(run), source_files)} to {plan.form.count}"
    if files != source_files:
        counts = f"{plural(_sources(run), source_files)} to {plural(plan.form.count, files)}"
    lines = [f"{step_words(summary.step)} of {request.src}, {counts}, to {request.dst} ({plan.form.format})"]
    if summary.ranks:
        spaces, execution = run.space, run.budget
        write_size, read_size = byte_size(summary.bytes_written), byte_size(sum(moved.read.values()))
        memory, buffers = byte_size(_expected_memory(execution)), byte_size(execution.buffer_bytes)
        parts = f"{execution.uploads} parts at a time, of up to {byte_size(execution.part_bytes)}"
        uploads = [f"  uploads  {parts}"] if execution.part_bytes else []
        who = plural(execution.threads, "thread" if execution.processes < 2 else "worker")
        lines += [
            f"  write    {plural(len(summary.ranks), 'file')}, {write_size}: {rank_ranges(summary.ranks, files)}",
            f"  read     {plural(len(moved.read), 'file')}, {read_size}: "
            f"source {rank_ranges(moved.read, source_files)}{_over_read(moved)}",
            f"  memory   about {memory}, {buffers} of it buffers of {who}",
            *_requests(execution),
            *uploads,
            *(["  io       {}, {}".format(*execution.io)] if is_verbose() or request.asked.effort.io != "auto" else []),
            *(_room(space, several=len(spaces) > 1) for space in spaces),
        ]
    else:
        lines.append("  write    nothing" + (": all requested targets are written" if summary.done_before else ""))
    if summary.done_before:
        complete, handling = counted_ranks(summary.done_before, files), left_alone(summary.done_before)
        lines.append(f"  done     {complete} by the same conversion before; {handling}")
    absent = _absent(run)
    if absent:
        lines.append(
            f"  replicas replace source {rank_ranges(absent, source_files)}: without intact files, or left out"
        )
    unread = sorted(plan.checkpoint.indexes.keys() - moved.read)
    if unread and summary.ranks and len(summary.ranks) == plan.form.count:
        lines.append(f"  unread   source {rank_ranges(unread, source_files)}: the others hold all that is written")
    lines.append(f"  holds    {contents_words(summary)}")
    if summary.replicas is not None and not is_verbose():
        lines.append(f"  checked  {summary.replicas}")
    return lines + ([f"  {line}" for line in detail_lines(summary, request)] if is_verbose() else [])


def _print_targets(run: Run, moved: Transfers) -> None:
    """A row per target file, limited to the first ones."""
    request, work = run.plan.request, [*run.sizes]
    target, source = request.to.options.unit, request.form.options.unit
    sources = _source_bytes(moved)
    ranks = work if is_verbose() else work[:_MAX_ROWS]
    rows = [
        [str(rank), byte_size(run.sizes[rank]), str(len(sources[rank])), number_ranges(sources[rank])] for rank in ranks
    ]
    if rows:
        table("", [f"target {target}", "size", "files read", f"of source {source}s"], rows)
    if len(ranks) < len(work):
        say(f"and {plural(len(work) - len(ranks), f'target {target}')} more; --json lists all")


def _source_bytes(moved: Transfers) -> dict[int, dict[int, int]]:
    """Bytes per source rank, by target rank."""
    sources: dict[int, dict[int, int]] = defaultdict(dict)
    for (source, target), count in moved.taken.items():
        sources[target][source] = count
    return sources


def _absent(run: Run) -> list[int]:
    """Source ranks, or files by number, that cannot be read."""
    return [number for number in range(_sources(run)) if number not in run.plan.checkpoint.indexes]


def _sources(run: Run) -> int:
    """Ranks of the source, or its files where its form has no ranks."""
    plan = run.plan
    if plan.request.form.options.by_rank:
        return plan.request.source.device_count
    return max(plan.checkpoint.files, default=-1) + 1


def _over_read(moved: Transfers) -> str:
    """How much more is read than is needed, where that is worth a word."""
    times = 1 + moved.over_read
    if times < 1.005:
        return ""
    return f"; {moved.over_read:.0%} more than needed" if times < 2 else f"; {times:.1f} times the needed bytes"


def _room(space: Space, several: bool) -> str:
    """A line of needed and free bytes on a file system; with its path if there are several."""
    free = "free space unknown" if space.free is None else f"{byte_size(space.free)} free"
    return f"  space    {byte_size(space.needed)} needed, {free}" + (f", below {space.place}" if several else "")


def _requests_json(budget: Budget) -> dict[str, Any] | None:
    costs = budget.costs
    if not costs.remote:
        return None
    return {
        "at_a_time": budget.threads,
        "most_bytes": budget.block_bytes,
        "round_trip": costs.round_trip,
    }


def _requests(budget: Budget) -> list[str]:
    """A line about requests to a store with round trips; none for local files."""
    costs = budget.costs
    if not costs.remote:
        return []
    line = f"  requests {budget.threads} at a time, of up to {byte_size(budget.block_bytes)}"
    if costs.round_trip is not None:
        line += f", of which one took {1000 * costs.round_trip:.1f} ms so far"
    return [line]


def _expected_memory(budget: Budget) -> int:
    """Anonymous memory of the conversion in bytes: this process as it is now, its workers, and the buffers."""
    workers = budget.processes * private_bytes() if budget.processes > 1 else 0
    return anonymous_bytes() + workers + budget.buffer_bytes
