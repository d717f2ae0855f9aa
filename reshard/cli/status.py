"""status: finished and missing files of a conversion."""

from __future__ import annotations

import shlex

import click

from reshard.cli import options
from reshard.cli.command import argument, command
from reshard.cli.output import echo_json, is_json, say
from reshard.cli.resume import completing, overwriting, shown
from reshard.convert.target_directory import beside
from reshard.forms.registry import counted_as, form_named
from reshard.records.status import Status, status_of
from reshard.text.messages import byte_size, counted_ranks, number_ranges, plural, rank_ranges, some_names

# More changed files than this are written again by one command for all.
_MAX_SINGLE = 3


@command(
    "status",
    """
reshard status out/
reshard status out/ --exit-code || reshard resume out/
""",
)
@argument("dst")
@options.flag("Checks", "--exit-code", text="Exit status 1 while targets are missing.")
@options.json_output
@options.common
def status(dst: str, exit_code: bool) -> None:
    """Print which target ranks in DST are done and which are missing.

    Only the records in DST are read: the source and the strategies are not needed, and runs may be writing
    meanwhile. Checkpoint files of other conversions in DST are listed. The exit status is 0, or with
    --exit-code 1 while targets are missing.
    """
    progress = status_of(dst)
    foreign = beside(dst, progress.record)
    if is_json():
        echo_json(
            {
                "complete": progress.complete,
                "form": progress.record.form,
                "ranks": progress.record.file_count,
                "wanted": list(progress.record.wanted),
                "done": list(progress.done),
                "changed": list(progress.changed),
                "missing": list(progress.missing),
                "bytes_done": progress.bytes_done,
                "step": progress.record.step,
                "manifest": progress.manifest,
                "beside": foreign,
            }
        )
    else:
        lines = _lines(dst, progress)
        if foreign:
            them = "it" if len(foreign) == 1 else "them"
            lines.append(
                f"files of other origin: {some_names(foreign)}; remove {them}: loaders may read {them} as part of the "
                "checkpoint, and conversions into the directory are refused"
            )
        say("\n".join(lines))
    if exit_code and not progress.complete:
        click.get_current_context().exit(1)


def _lines(dst: str, progress: Status) -> list[str]:
    step = f"step {progress.record.step}" if progress.record.step else "a checkpoint without a step in its name"
    recovery = progress.record.task.recover
    noun = counted_as(progress.record.form)
    title = f"{'recovery' if recovery else 'conversion'} of {step} to {plural(progress.record.file_count, noun)}"
    by_rank = form_named(progress.record.form).options.by_rank
    if not by_rank:
        title += f" of the form {progress.record.form}"
    if progress.record.lost:
        title += f", only the lost {counted_ranks(progress.record.lost)}"
    lines = [f"{title} ({progress.record.format})"]
    for ranks, words in (
        (progress.done, f"done, {byte_size(progress.bytes_done)}"),
        (progress.changed, f"changed since {'it was' if len(progress.changed) == 1 else 'they were'} written"),
        (progress.missing, "missing"),
    ):
        if ranks:
            files = "" if by_rank else f" ({some_names(list(map(progress.record.file_of, ranks)), 3)})"
            lines.append(f"{plural(len(ranks), noun)} {words}: {number_ranges(ranks)}{files}")
    if progress.complete:
        lines.append(f"complete: {progress.manifest or 'all lost ranks are written'}")
    else:
        requested = progress.missing if progress.record.asked.files is None else progress.record.asked.files
        missing = set(progress.missing).intersection(requested)
        unrequested = set(progress.missing).difference(requested)
        if unrequested:
            lines.append(f"not complete: {rank_ranges(unrequested, noun)} not requested yet")
        lacking = f"for {rank_ranges(missing, noun)}, " if missing else ""
        if not progress.missing and not progress.changed:
            lacking = f"{some_names(progress.unfinished)} missing; "
        if progress.changed and not progress.missing:
            lines.append(f"not complete: {rank_ranges(progress.changed, noun)} changed")
        elif lacking and progress.record.is_repeatable:
            lines.append(f"not complete: {lacking}run: reshard resume {shlex.quote(dst)}")
            if not (recovery or progress.missing or progress.changed):
                lines.append(completing(progress.record, dst))
        elif not unrequested:
            lines.append(f"not complete: {lacking}run the original command for {dst} again to write the missing files")
        if progress.changed:
            lines += _cures(dst, progress, noun)
    return lines


def _cures(dst: str, progress: Status, noun: str) -> list[str]:
    """Commands for changed files: one that compares their contents, and those that write them again."""
    again = f"to write {rank_ranges(progress.changed, noun)} again:"
    if progress.record.task.recover:
        return [f"{again} remove the files, and run the command again"]
    if progress.record.task.merge:
        merge = f"reshard merge-lora BASE ADAPTER {shlex.quote(dst)} --overwrite"
        return [f"{again} {merge}, with all options of the first run"]
    if not progress.record.is_repeatable:
        return [f"{again} reshard by-rank RANK ... --overwrite, with the options of the original command"]
    single = len(progress.changed) <= _MAX_SINGLE and len(progress.changed) < progress.record.file_count
    source = progress.record.asked.source.path
    return [
        f"to compare the contents with the source: {shown(['verify', dst, '--src', source])}",
        again,
        *(overwriting(progress.record, dst, rank) for rank in (progress.changed if single else (None,))),
    ]
