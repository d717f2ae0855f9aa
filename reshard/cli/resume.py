"""resume: continue the conversion that the records in DST describe."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

from reshard.asked import Conversion, Effort
from reshard.cli import options
from reshard.cli.command import argument, command
from reshard.cli.convert import run_conversion, run_recovery, summary_json
from reshard.cli.output import echo_json, is_json, is_quiet, listener, say
from reshard.convert import Summary
from reshard.convert.recorded import source_exists
from reshard.errors import InputError, ReplaceableError, TargetError, UsageError
from reshard.execute.destination import tidy
from reshard.forms.registry import counted_as, form_named
from reshard.records import Ledger, Record
from reshard.records.status import Status, status_of
from reshard.text.messages import counted_ranks, rank_ranges


@command(
    "resume",
    """
reshard resume out/

On many machines that see out/ and the source under the same paths:
reshard resume out/ --shard auto
""",
)
@argument("dst")
@options.group(Conversion, "shard")
@options.scheduler
@options.dry_run
@options.proof("Compare every tensor with the source after writing, also if DST is complete.")
@options.group(Effort, *options.LIMITS, "io")
@options.output
def resume(
    dst: str,
    shard: tuple[int, int] | None,
    scheduler: str | None,
    dry_run: bool,
    verify: bool,
    effort: Effort,
) -> None:
    """Resume the conversion or recovery in DST.

    The records in DST contain source, strategies, step and options of the run that began. The target ranks that
    it requested and that are missing are written; after by-rank and --shard, and where later runs wrote others, all
    missing target ranks. A run with --verify is verified again.
    """
    status = status_of(dst)
    record, task = status.record, status.record.task
    if task.recover and verify:
        raise UsageError(
            f"--verify: {dst} is a recovery, whose ranks are compared with their replicas",
            hint=f"without --verify; afterwards: reshard verify {shlex.quote(dst)} --replicas --strategy S",
        )
    if task.recover and (shard is not None or scheduler is not None):
        raise UsageError(f"--shard and --scheduler: {dst} is a recovery, which one run makes", hint="leave them out")
    # The records do not show whether verification ran.
    if not verify and task.verify and record.is_repeatable:
        verify = shard is None or form_named(record.form).options.by_rank
        if not verify:
            together = f"reshard resume {shlex.quote(dst)}, without --shard"
            listener()("note", f"not verified, since the files are verified together; when all are written: {together}")
    if not verify and _is_done(status):
        if not dry_run:
            # Of runs that were killed while another one wrote what was left.
            tidy(dst, {os.path.dirname(record.file_of(rank)) for rank in record.wanted})
            Ledger(dst, record).remove_dead_temporaries()
        if is_json():
            summary = Summary(record.step, done_before=status.done, manifest=status.manifest)
            echo_json({**summary_json(summary), **({} if task.recover else {"differences": None})})
        if not is_quiet():
            say(_done_words(status, dst), to_standard_error=True)
        return
    if not record.is_repeatable:
        raise TargetError(
            f"{dst}: was written by {'merge-lora' if task.merge else 'a function'}, which resume does not repeat",
            file=dst,
            hint="run the original command again: it writes the missing files",
        )
    words = shown(record.words(dst))
    apart = None if task.recover or status.missing or status.changed else completing(record, dst)
    for path in record.paths:
        if not source_exists(path):
            error = InputError(
                f"{path}: does not exist here; the conversion in {dst} was begun with it",
                file=path,
                hint=f"if it was moved, run the whole command with its new path:\n{words}",
            )
            error.add_hint(apart, first=True)
            raise error
    listener()("note", f"resumes {words}")
    checks = record.asked.effort
    asked = replace(
        record.asked,
        files=_requested(status),
        target=replace(record.asked.target, path=dst),
        effort=replace(effort, crc=checks.crc, check_replicas=checks.check_replicas),
        shard=shard,
    )
    task = task._replace(dry_run=dry_run, verify=verify)
    try:
        if task.recover:
            run_recovery(asked, task)
        else:
            run_conversion(asked, task, scheduler)
    except ReplaceableError as error:
        error.add_hint(f"the command that has --overwrite:\n{overwriting(record, dst)}")
        raise
    except InputError as error:
        error.add_hint(apart, first=True)
        raise


def _is_done(status: Status) -> bool:
    """Whether no work is left."""
    ranks = _requested(status)
    if status.complete or not status.record.is_repeatable:
        return status.complete
    # With all ranks written, only the manifest is missing.
    return ranks is not None and set(status.done).issuperset(ranks) and len(status.done) < len(status.record.wanted)


def _requested(status: Status) -> tuple[int, ...] | None:
    """The target ranks that the first run requested; None for all, and where other runs wrote more."""
    ranks = status.record.asked.files
    return None if ranks is None or {*status.written}.difference(ranks) else ranks


def _done_words(status: Status, dst: str) -> str:
    if status.complete:
        return f"nothing to do: {dst} is complete: {status.manifest or 'all lost ranks are written'}"
    unrequested = set(status.record.wanted).difference(status.done)
    noun = counted_as(status.record.form)
    return (
        f"nothing to do: {counted_ranks(status.done, noun)} are written; "
        f"{rank_ranges(unrequested, noun)} {'was' if len(unrequested) == 1 else 'were'} not requested\n"
        "to add them, run the whole command with --ranks, or without"
    )


def overwriting(record: Record, dst: str, rank: int | None = None) -> str:
    """The command that replaces all targets of a conversion, or that of one rank."""
    # Some forms are verified together only, so by-rank refuses --verify.
    task = record.task._replace(verify=record.task.verify and rank is None)
    name, *words = record._replace(asked=replace(record.asked, files=None), task=task).words(dst)
    return shown([*([name] if rank is None else ["by-rank", str(rank)]), *words, "--overwrite"])


def completing(record: Record, dst: str) -> str:
    """How a conversion whose targets are all written is completed where no machine has its whole source."""
    plain = record._replace(asked=replace(record.asked, files=None), task=record.task._replace(verify=False))
    command = shown(["by-rank", "RANK", "SRC", *plain.words(dst)[2:]])
    return f"if its parts were made apart, for one RANK, with the files of SRC that it needs: {command}"


def shown(words: Sequence[str]) -> str:
    """A command to paste."""
    return shlex.join(["reshard", *words])
