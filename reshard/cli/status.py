"""status: finished and missing files of a conversion."""

from __future__ import annotations

import shlex

import click

from reshard.cli import completion, options
from reshard.cli.command import command
from reshard.cli.output import echo_json, say
from reshard.convert.target_directory import beside
from reshard.forms.registry import counted_as, form_named
from reshard.records.status import Status, status_of
from reshard.text.wording import byte_size, counted_ranks, number_ranges, plural, rank_ranges, some_names


@command("status", "reshard status out/")
@click.argument("dst", shell_complete=completion.directories)
@options.json_output
@options.common
def status(dst: str, as_json: bool) -> None:
    """Print which target ranks in DST are done and which are missing.

    Only the records in DST are read: the source and the strategies are not needed, and runs may be writing
    meanwhile. Checkpoint files of other conversions in DST are listed.
    """
    found = status_of(dst)
    others = beside(dst, found.plan)
    if as_json:
        echo_json(
            {
                "complete": found.complete,
                "form": found.plan.form,
                "ranks": found.plan.ranks,
                "wanted": list(found.wanted),
                "done": list(found.done),
                "changed": list(found.changed),
                "missing": list(found.missing),
                "bytes_done": found.bytes_done,
                "writing": found.writing,
                "step": found.plan.step,
                "manifest": found.manifest,
                "beside": others,
            }
        )
        return
    lines = _lines(dst, found)
    if others:
        them = "it" if len(others) == 1 else "them"
        lines.append(
            f"files of other origin: {some_names(others)}; remove {them}: loaders may read {them} as part of the "
            "checkpoint, and conversions into the directory are refused"
        )
    say("\n".join(lines))


def _lines(dst: str, found: Status) -> list[str]:
    step = f"step {found.plan.step}" if found.plan.step else "a checkpoint without a step in its name"
    recovery = found.plan.task == "recover"
    noun = counted_as(found.plan.form)
    what = f"{'recovery' if recovery else 'conversion'} of {step} to {plural(found.plan.ranks, noun)}"
    if not form_named(found.plan.form).options.by_rank:
        what += f" of the form {found.plan.form}"
    if found.lost_only:
        what += f", only the lost {counted_ranks(found.wanted)}"
    lines = [f"{what} ({found.plan.format})"]
    for ranks, words in (
        (found.done, f"done, {byte_size(found.bytes_done)}"),
        (found.changed, "changed since they were written"),
        (found.missing, "missing"),
    ):
        if ranks:
            lines.append(f"{plural(len(ranks), noun)} {words}: {number_ranges(ranks)}")
    if found.complete:
        lines.append(f"complete: {found.manifest or 'all lost ranks are written'}")
    elif found.writing:
        lines.append("a run is writing at this moment")
    else:
        left = set(found.missing) if found.requested is None else set(found.missing).intersection(found.requested)
        unasked = set(found.missing).difference(left)
        if unasked:
            lines.append(f"not complete: {rank_ranges(unasked, noun)} not requested yet")
        if left and found.resumable:
            lines.append(f"not complete: for {rank_ranges(left, noun)}, run: reshard resume {shlex.quote(dst)}")
        elif not unasked:
            lines.append(f"not complete: run the original command for {dst} again to write the missing files")
        if found.changed:
            changed = rank_ranges(found.changed, noun)
            cure = "remove the files, and run the command again" if recovery else "reshard by-rank RANK ... --overwrite"
            lines.append(f"to write {changed} again: {cure}")
    return lines
