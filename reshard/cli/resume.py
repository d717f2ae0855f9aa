"""resume: continue the conversion that the records in DST describe."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from typing import Any, Optional

import click
from click.core import ParameterSource

from reshard.cli import completion, options
from reshard.cli.command import command
from reshard.cli.conversion import summary_json
from reshard.cli.output import echo_json, listener, say
from reshard.cli.shard import Share
from reshard.convert import Phases, Summary
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import InputError, TargetError
from reshard.forms.ranks.steps import RANK, fixed_directory
from reshard.forms.registry import FORMS, counted_as, form_named, form_of
from reshard.records import Given, Ledger, strategy_digest
from reshard.records.given import asked_ranks
from reshard.records.status import Status, status_of
from reshard.storage import exists, is_directory, real
from reshard.strategies import names_files, read_strategy
from reshard.text.wording import counted_ranks, number_ranges, rank_ranges


@command(
    "resume",
    """
reshard resume out/

On many machines that see out/ and the source under the same paths:
reshard resume out/ --shard auto
""",
)
@click.argument("dst", shell_complete=completion.directories)
@options.divided
@options.decryption
@options.accept_changed_source
@options.dry_run
@options.effort
@options.reading
@options.output
@click.pass_context
def resume(ctx: click.Context, /, dst: str, as_json: bool, quiet: bool, **_: Any) -> None:
    """Resume the conversion or recovery in DST.

    The records in DST contain source, strategies, step and options. The missing ones of all target ranks that
    were requested so far are written; after by-rank and --shard, the missing ones of the whole target.
    """
    found = status_of(dst)
    ledger = Ledger(dst, found.plan)
    commands = ledger.given()
    given = _together(commands, dst) if commands else None
    if _is_done(found, given):
        if as_json:
            echo_json(_nothing_done(found))
        if not quiet:
            say(_done_words(found, dst), to_standard_error=True)
        return
    if given is None:
        raise TargetError(
            f"{dst}: its records contain no command line",
            file=dst,
            hint="run the original command again: it writes the missing files",
        )
    words = _words(given, dst)
    if ledger.is_replacing():
        words.append("--overwrite")
        once_more = "run its by-rank or --shard command again with --overwrite, or replace all ranks"
        if not ledger.is_replacing(given.rank_numbers or range(found.plan.ranks)):
            raise TargetError(
                f"{dst}: one of several runs that replace targets was stopped, and the records do not contain which",
                file=dst,
                hint=f"{once_more}:\n{_shown(words)}",
            )
    _check_paths(given, found, dst, words)
    listener()("note", f"resumes {_shown(words)}")
    _run(ctx, words)


def _together(commands: Sequence[Given], dst: str) -> Given:
    """The combined command of all runs: the last one whose paths exist, with all requested ranks.

    Raises:
        TargetError: runs had different sources.
    """
    here = [given for given in commands if all(map(_exists, given.paths))]
    sources = {real(given.src): given.src for given in here}
    if len(sources) > 1:
        listed = "\n".join(f"  {src}" for src in sorted(sources.values()))
        raise TargetError(
            f"{dst}: the runs had different sources:\n{listed}",
            file=dst,
            hint=f"run the whole command for the missing files (`reshard status {shlex.quote(dst)}`) with the right "
            "source",
        )
    asked = asked_ranks(commands)
    return dataclasses.replace(
        (here or commands)[0],
        ranks=None if asked is None else number_ranges(asked),
        lost_only=all(given.lost_only for given in commands),
        checksum="crc32" if any(given.checksum == "crc32" for given in commands) else "none",
    )


def _exists(path: str) -> bool:
    return exists(path) or (RANK in path and is_directory(fixed_directory(path)))


def _is_done(found: Status, given: Optional[Given]) -> bool:
    """Whether no work is left."""
    if given is not None and given.verify:
        # The records do not show whether verification ran.
        return False
    if found.complete or given is None or given.lost_only:
        return found.complete
    asked = given.rank_numbers
    # With all ranks written, only the manifest is missing.
    return asked is not None and set(found.done).issuperset(asked) and len(found.done) < found.plan.ranks


def _done_words(found: Status, dst: str) -> str:
    if found.complete:
        return f"nothing to do: {dst} is complete: {found.manifest or 'all lost ranks are written'}"
    left = set(range(found.plan.ranks)).difference(found.done)
    noun = counted_as(found.plan.form)
    done = counted_ranks(found.done, noun)
    return (
        f"nothing to do: {done} are written; {rank_ranges(left, noun)} were not requested\n"
        "to add them, run the whole command with --ranks, or without"
    )


def _nothing_done(found: Status) -> dict[str, Any]:
    """The summary of a run that did nothing."""
    summary = Summary(
        step=found.plan.step,
        ranks=[],
        files=[],
        target_files={},
        done_before=list(found.done),
        manifest=found.manifest,
        bytes_written=0,
        source_ranks=[],
        recovered=[],
        parameters=0,
        kinds={},
        copied=[],
        excluded=[],
        known=(),
        left_out=[],
        missing=[],
        unholdable=[],
        replicas=None,
        warnings=[],
        notes=[],
        phases=Phases(0.0, 0.0, 0.0),
        seconds=0.0,
        dry_run=False,
    )
    return {**summary_json(summary), **({"differences": None} if found.plan.task == "convert" else {})}


def _check_paths(given: Given, found: Status, dst: str, words: Sequence[str]) -> None:
    """Check that source and strategies exist, and that the strategies are unchanged.

    Raises:
        InputError: one is missing or changed.
    """
    for path in given.paths:
        if not _exists(path):
            where = "any more" if given.host == os.uname().nodename else f"here, as it did on {given.host}"
            raise InputError(
                f"{path}: does not exist {where}; the conversion in {dst} was begun with it",
                file=path,
                hint=f"if it was moved, run the whole command with its new path:\n{_shown(words)}",
            )
    strategies = (
        (given.source_strategy, found.plan.source_strategy),
        (given.target_strategy, found.plan.target_strategy),
    )
    for path, digest in dict(strategies).items():
        if names_files(path) and strategy_digest(read_strategy(path)) != digest:
            raise InputError(
                f"{path}: differs from the strategy with which the conversion in {dst} was begun",
                file=path,
                hint=f"if the original was moved, run the whole command with its path:\n{_shown(words)}",
            )


def _words(given: Given, dst: str) -> list[str]:
    """The command that a run was given, with paths as they are recorded."""
    target = os.path.join(os.curdir, dst) if dst.startswith("-") else dst
    if given.task == "recover":
        words = ["recover", given.src, target, f"--strategy={given.source_strategy}"]
    else:
        words = ["convert", given.src, target]
        if form_named(form_of(given.src)).options.needs_strategy:
            words.append(f"--src-strategy={given.source_strategy}")
        words += [f"--to={given.to}"] if given.to != FORMS[0].name else []
        if form_named(given.to).options.cut:
            words.append(f"--dst-strategy={given.target_strategy}")
        words += [f"--max-shard-size={given.max_shard_size}"] if given.max_shard_size is not None else []
        words += [f"--format={given.format}"] if len(form_named(given.to).options.formats) > 1 else []
    for name, value in (("step", given.step), ("file-suffix", given.file_suffix), ("ranks", given.ranks)):
        words += [f"--{name}={value}"] if value is not None else []
    for name, value in (("names", given.names), ("config", given.config), ("dequantize", given.dequantize)):
        words += [f"--{name}={value}"] if value is not None else []
    words += [f"--rename={pattern}" for pattern in given.rename]
    words += [f"--cast={pattern}" for pattern in given.cast]
    words += ["--reverse"] if given.reverse else []
    words += ["--optimizer=keep"] if given.optimizer else []
    words += [f"--include={pattern}" for pattern in given.include]
    words += [f"--exclude={pattern}" for pattern in given.exclude]
    if given.prefix is not None and (given.prefix != DEFAULT_PREFIX or given.task == "recover"):
        words.append(f"--prefix={given.prefix}")
    words += [f"--crc={given.crc}"] if given.crc != "auto" else []
    words += [f"--check-replicas={given.check_replicas}"] if given.check_replicas != "auto" else []
    words += [f"--checksum={given.checksum}"] if given.checksum != "none" else []
    return words + [
        option
        for option, typed in (("--strict", given.strict), ("--verify", given.verify), ("--lost-only", given.lost_only))
        if typed
    ]


def _shown(words: Sequence[str]) -> str:
    return " ".join(["reshard", *map(shlex.quote, words)])


def _run(ctx: click.Context, words: Sequence[str]) -> None:
    """Run a command with the options that were typed for this one, too."""
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    name, *arguments = words
    found = root.command.get_command(root, name)
    assert found is not None
    with found.make_context(name, [*arguments, *_typed(ctx)], parent=root) as inner:
        found.invoke(inner)


def _typed(ctx: click.Context) -> list[str]:
    """The options that were typed, as words."""
    words = []
    for param in ctx.command.params:
        name = str(param.name)
        if isinstance(param, click.Option) and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            value = ctx.params.get(name)
            if param.is_flag:
                words += (param.opts if value else param.secondary_opts)[:1]
            else:
                text = f"{value.number}/{value.runs}" if isinstance(value, Share) else value
                words.append(f"{param.opts[0]}={text}")
    return words
