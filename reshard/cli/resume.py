"""resume: continue the conversion that the records in DST describe."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from reshard.asked import Conversion, Effort, fields_of
from reshard.cli import options
from reshard.cli.command import argument, command
from reshard.cli.convert import summary_json
from reshard.cli.output import echo_json, is_json, is_quiet, listener, say
from reshard.convert import Summary
from reshard.convert.recorded import source_exists
from reshard.errors import InputError, ReplaceableError, TargetError, UsageError
from reshard.execute.destination import Destination
from reshard.forms.registry import counted_as
from reshard.records import Ledger, RecordedCommand, strategy_digest
from reshard.records.commands import requested_ranks
from reshard.records.status import Status, status_of
from reshard.storage import real
from reshard.strategies import names_files, read_strategy
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
@click.pass_context
def resume(ctx: click.Context, /, dst: str, verify: bool, **_: Any) -> None:
    """Resume the conversion or recovery in DST.

    The records in DST contain source, strategies, step and options. The requested target ranks that are missing
    are written; after by-rank and --shard, all missing target ranks. A run with --verify is verified again.
    """
    status = status_of(dst)
    ledger = Ledger(dst, status.plan)
    commands = ledger.commands()
    command = combined(commands, dst) if commands else None
    if verify and status.plan.task == "recover":
        raise UsageError(
            f"--verify: {dst} is a recovery, whose ranks are compared with their replicas",
            hint=f"without --verify; afterwards: reshard verify {shlex.quote(dst)} --replicas --strategy S",
        )
    # The records do not show whether verification ran.
    verify = verify or (command is not None and command.verify)
    if not verify and _is_done(status, command):
        if not ctx.params["dry_run"]:
            # Of runs that were killed while another one wrote what was left.
            Destination(dst).tidy({os.path.dirname(status.plan.file_of(rank)) for rank in status.wanted})
            ledger.remove_dead_temporaries()
        if is_json():
            differences = {"differences": None} if status.plan.task == "convert" else {}
            summary = Summary(status.plan.step)
            summary.done_before, summary.manifest = list(status.done), status.manifest
            echo_json({**summary_json(summary), **differences})
        if not is_quiet():
            say(_done_words(status, dst), to_standard_error=True)
        return
    if command is None:
        raise TargetError(
            f"{dst}: its records contain no command line",
            file=dst,
            hint="run the original command again: it writes the missing files",
        )
    words = command.words(dst)
    _check_paths(command, status, dst, words)
    listener()("note", f"resumes {shown(words)}")
    try:
        _run(ctx, words)
    except ReplaceableError as error:
        error.add_hint(f"the command that has --overwrite:\n{overwriting(command, dst)}")
        raise


def combined(commands: Sequence[RecordedCommand], dst: str) -> RecordedCommand:
    """The combined command of all runs: the last one whose paths exist, with all requested ranks."""
    usable = [command for command in commands if all(map(source_exists, command.paths))]
    sources = {real(command.asked.source.path): command.asked.source.path for command in usable}
    if len(sources) > 1:
        lines = "\n".join(f"  {src}" for src in sorted(sources.values()))
        raise TargetError(
            f"{dst}: the runs had different sources:\n{lines}",
            file=dst,
            hint=f"run the whole command for the missing files (`reshard status {shlex.quote(dst)}`) with the right "
            "source",
        )
    last, every = (usable or commands)[0], [command.asked for command in commands]
    missing = tuple(dict.fromkeys(glob for asked in every for glob in asked.edits.allow_missing))
    checksum = "crc32" if any(asked.target.checksum == "crc32" for asked in every) else "none"
    asked = replace(
        last.asked,
        target=replace(last.asked.target, checksum=checksum),
        edits=replace(last.asked.edits, allow_missing=missing),
        files=requested_ranks(commands),
    )
    return last._replace(asked=asked, lost_only=all(command.lost_only for command in commands))


def _is_done(status: Status, command: RecordedCommand | None) -> bool:
    """Whether no work is left."""
    if status.complete or command is None or command.lost_only:
        return status.complete
    ranks = command.asked.files
    # With all ranks written, only the manifest is missing.
    return ranks is not None and set(status.done).issuperset(ranks) and len(status.done) < status.plan.ranks


def _done_words(status: Status, dst: str) -> str:
    if status.complete:
        return f"nothing to do: {dst} is complete: {status.manifest or 'all lost ranks are written'}"
    unrequested = set(range(status.plan.ranks)).difference(status.done)
    noun = counted_as(status.plan.form)
    return (
        f"nothing to do: {counted_ranks(status.done, noun)} are written; "
        f"{rank_ranges(unrequested, noun)} were not requested\n"
        "to add them, run the whole command with --ranks, or without"
    )


def _check_paths(command: RecordedCommand, status: Status, dst: str, words: Sequence[str]) -> None:
    """Check that source and strategies exist, and that the strategies are unchanged."""
    for path in command.paths:
        if not source_exists(path):
            where = "any more" if command.host == os.uname().nodename else f"here, as it did on {command.host}"
            raise InputError(
                f"{path}: does not exist {where}; the conversion in {dst} was begun with it",
                file=path,
                hint=f"if it was moved, run the whole command with its new path:\n{shown(words)}",
            )
    strategies = {
        command.asked.source.strategy: status.plan.source_strategy,
        command.asked.target.strategy: status.plan.target_strategy,
    }
    for strategy, digest in strategies.items():
        if strategy is not None and names_files(strategy) and strategy_digest(read_strategy(strategy)) != digest:
            raise InputError(
                f"{strategy}: differs from the strategy with which the conversion in {dst} was begun",
                file=strategy,
                hint=f"if the original was moved, run the whole command with its path:\n{shown(words)}",
            )


def overwriting(command: RecordedCommand, dst: str, rank: int | None = None) -> str:
    """The command that replaces all targets of a run, or that of one rank."""
    # Some forms are verified together only, so by-rank refuses --verify.
    verify = command.verify and rank is None
    task, *words = command._replace(asked=replace(command.asked, files=None), verify=verify).words(dst)
    return shown([*([task] if rank is None else ["by-rank", str(rank)]), *words, "--overwrite"])


def shown(words: Sequence[str]) -> str:
    """A command to paste."""
    return shlex.join(["reshard", *words])


def _run(ctx: click.Context, words: Sequence[str]) -> None:
    """Run a command with the options that were typed for this one, too."""
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    name, *arguments = words
    command = root.command.get_command(root, name)
    assert command is not None
    with command.make_context(name, [*arguments, *_typed(ctx)], parent=root) as inner:
        command.invoke(inner)


def _typed(ctx: click.Context) -> list[str]:
    """The options that were typed, as words."""
    kinds = {option.parameter: option.kind for of in (Conversion, Effort) for option, _ in fields_of(of).values()}
    words = []
    for param in ctx.command.params:
        name = str(param.name)
        typed = ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
        # Flags that are not exposed are those of the root context, and hold for the other command, too.
        if isinstance(param, click.Option) and param.expose_value and typed:
            value = ctx.params.get(name)
            if param.is_flag:
                words += (param.opts if value else param.secondary_opts)[:1]
            else:
                words.append(f"{param.opts[0]}={kinds[name].words(value) if name in kinds else value}")
    return words
