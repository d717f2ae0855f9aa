"""What a conversion records of its command, and what commands that compare take from these records."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import replace

from reshard.asked import CHANGES, Conversion, Effort
from reshard.errors import ReshardError, TargetError, UsageError
from reshard.forms.form import Form
from reshard.forms.ranks.naming import RANK, fixed_directory
from reshard.forms.registry import form_named, form_of
from reshard.plan.edits import NO_TABLE, EditRules, Request, edit_rules
from reshard.plan.plan import Plan
from reshard.records import Identity, RecordedCommand, strategy_digest
from reshard.records.identity import short_digest
from reshard.records.ledger import Ledger, ledger_in, packing_of
from reshard.storage import absolute, exists, is_directory, real
from reshard.strategies import names_files, read_strategy
from reshard.text.messages import Report


def command_of(plan: Plan) -> RecordedCommand | None:
    """The command line of a run with absolute paths; None for a run that no command line repeats.

    Args:
        plan: with the step and format that were chosen.
    """
    request, task = plan.request, plan.request.task
    if request.edits.additions is not None or not request.asked.is_typed:
        return None
    try:
        asked = with_absolute_paths(request.asked)
    except FileNotFoundError:
        # The working directory is gone.
        return None
    # A table leaves other packing than the source's, or none.
    packing = packing_of(request.src) if request.edits.table is None else plan.checkpoint.packing
    # Files of ranks have the source's format, which may change; those of other forms the form's.
    format = asked.target.format if not request.to.options.by_rank else "same" if task.recover else plan.form.format
    # To resume one of several runs is to resume all of them.
    several = task.by_rank or asked.shard is not None
    recorded = Conversion(
        replace(asked.source, step=plan.checkpoint.step or "latest", fallback=True),
        replace(asked.target, path=os.curdir, format=format, overwrite=False),
        asked.edits,
        Effort(crc=asked.effort.crc, check_replicas=asked.effort.check_replicas),
        None if several else asked.files,
    )
    name = "recover" if task.recover else "convert"
    return RecordedCommand(recorded, os.uname().nodename, name, task.verify, task.lost_only, packing)


def with_absolute_paths(asked: Conversion) -> Conversion:
    """The same conversion for another working directory.

    Raises:
        FileNotFoundError: the working directory is gone.
    """
    return replace(
        asked,
        source=replace(asked.source, path=_absolute(asked.source.path), strategy=_strategy(asked.source.strategy)),
        target=replace(
            asked.target,
            path=absolute(asked.target.path),
            strategy=_strategy(asked.target.strategy),
            args=_optional(asked.target.args),
        ),
        edits=replace(asked.edits, names=_names(asked.edits.names), config=_optional(asked.edits.config)),
    )


def _absolute(path: str) -> str:
    """The absolute path; a pattern is not normalised."""
    return absolute(path) if RANK not in path else os.path.join(os.getcwd(), path)


def _strategy(path: str | None) -> str | None:
    return absolute(path) if path is not None and names_files(path) else path


def _optional(path: str | None) -> str | None:
    return None if path is None else absolute(path)


def _names(names: str | None) -> str | None:
    """A built-in table as it is; the absolute path of a file, with its options."""
    if names is None or names == NO_TABLE:
        return names
    from reshard.names import builtin_names

    return names if names.partition(",")[0] in builtin_names() else absolute(names)


def _ledger(out: str, plan: Identity) -> Ledger | None:
    ledger = ledger_in(out)
    return ledger if ledger is not None and ledger.identity == plan else None


def _commands(out: str, plan: Identity) -> list[RecordedCommand]:
    """The recorded commands of a directory's conversion, the latest first."""
    ledger = _ledger(out, plan)
    return [] if ledger is None else ledger.commands()


def edits_of_target(request: Request, plan: Identity | None, report: Report) -> EditRules:
    """The names and types that a converted checkpoint was given; without options those of its records.

    Args:
        request: the conversion.
        plan: the directory's recorded identity; None without records: then those of `convert` without options.
        report: gets a note about their origin.

    Raises:
        UsageError: the directory has other names or types, and its records do not list them.
        ReshardError: a file of the options cannot be read.
    """
    src, out, asked = request.src, request.dst, request.asked.edits
    edits = edit_rules(
        src, asked, None if is_copy(request, plan) else request.to, request.asked.source.step, request.asked.target
    )
    if plan is not None and plan.edits and not asked.changes:
        # Between some forms names change without an option.
        return _given(edits, plan) or _recorded(out, src, plan, report)
    return edits


def is_copy(request: Request, plan: Identity | None) -> bool:
    """Whether a directory has its source's names: without records and options, one of the same form."""
    return plan is None and not request.asked.edits.changes and request.form.name == request.to.name


def with_records(out: str, asked: Conversion, to: Form, plan: Identity, report: Report) -> Conversion:
    """A conversion with what the records of its directory list where nothing is asked: strategies, filters, lost ranks.

    Args:
        out: the directory that was converted to.
        asked: what is asked.
        to: the form of `out`.
        plan: the directory's recorded identity.
        report: gets notes about recorded options.

    Raises:
        UsageError: a recorded strategy is missing or was changed.
    """
    source, target, edits = asked.source, asked.target, asked.edits
    source = replace(source, without_ranks=source.without_ranks or plan.without_ranks)
    if not (edits.include or edits.exclude):
        edits = replace(edits, include=plan.include, exclude=plan.exclude)
    asked = replace(asked, source=source, edits=edits)
    missing = {
        "--src-strategy": source.strategy is None and form_of(source.path).options.needs_strategy,
        "--dst-strategy": target.strategy is None and target.shards is None and to.options.cut,
        "--args": target.args is None and to.options.arguments,
    }
    commands = _commands_or_warn(out, plan, report) if any(missing.values()) else []
    if not commands:
        return asked
    recorded = commands[0].asked
    digests = {"--src-strategy": plan.source_strategy, "--dst-strategy": plan.target_strategy}
    saved = recorded.source.strategy
    paths = {"--src-strategy": saved, "--dst-strategy": saved if plan.task == "recover" else recorded.target.strategy}
    words: list[str] = []
    for option, path in paths.items():
        if not missing[option]:
            continue
        if path is not None and names_files(path):
            problem = "does not exist" if not exists(path) else "has changed"
            if not exists(path) or strategy_digest(read_strategy(path)) != digests[option]:
                raise UsageError(
                    f"{option} is missing: {path}, which the records in {out} name, {problem}",
                    hint=f"add {option} FILE or DIR with the strategy that {out} was converted with",
                )
        if path is not None:
            words += [option, path]
    if missing["--src-strategy"]:
        source = replace(source, strategy=saved)
    if missing["--args"]:
        target = replace(target, args=recorded.target.args)
    if missing["--dst-strategy"]:
        target = replace(target, strategy=paths["--dst-strategy"], shards=recorded.target.shards)
        if recorded.target.shards is not None:
            words += ["--shards", str(recorded.target.shards)]
    if words:
        report.note(f"compared with the recorded strategies: {' '.join(words)}")
    elif source.strategy is None and to.options.by_rank:
        # Only the format of rank files was changed.
        target = replace(target, format=plan.format)
    return replace(asked, source=source, target=target)


def source_exists(path: str) -> bool:
    """Whether a source exists; of a path with ``{rank}``, the directory before it."""
    return exists(path) or (RANK in path and is_directory(fixed_directory(path)))


def command_with_source(out: str, plan: Identity) -> RecordedCommand | None:
    """The last recorded command of a directory's conversion whose source exists; None without one."""
    with contextlib.suppress(ReshardError):
        return next((command for command in _commands(out, plan) if source_exists(command.asked.source.path)), None)
    return None


def recorded_source(out: str, plan: Identity) -> str:
    """The source of a directory's conversion, if its records list it and it exists here; otherwise ``SRC``."""
    command = command_with_source(out, plan)
    return "SRC" if command is None else command.asked.source.path


def other_source(out: str, src: str, plan: Identity) -> str | None:
    """A sentence with the recorded source of a directory's conversion, if it is another path than ``src``."""
    with contextlib.suppress(ReshardError):
        recorded = [command.asked.source.path for command in _commands(out, plan)]
        if recorded and real(src) not in map(real, recorded):
            text = f"{out} was converted from {recorded[0]}, not from {src}"
            place = recorded_source(out, plan)
            command = f"reshard verify {shlex.quote(out)} --src {shlex.quote(place)}"
            return text if place == "SRC" else f"{text}; to compare with it: {command}"
    return None


def _commands_or_warn(out: str, plan: Identity, report: Report) -> list[RecordedCommand]:
    try:
        return _commands(out, plan)
    except TargetError as error:
        report.warn(error.message)
        return []


def _recorded(out: str, src: str, plan: Identity, report: Report) -> EditRules:
    commands = _commands_or_warn(out, plan, report)
    if was_merged(out, plan):
        raise UsageError(
            f"{out}: was written by merge-lora, and verify --src has no adapter to add", hint=merge_hint(out)
        )
    problem = "no record lists them"
    for command in commands:
        words = _words(command)
        try:
            edits = edit_rules(
                src, command.asked.edits, form_named(plan.form), command.asked.source.step, command.asked.target
            )
            given = _given(edits, plan)
        except ReshardError as error:
            problem = f"its options were {words}: {error.message}"
            continue
        if given is not None:
            if words:
                report.note(f"compared with the recorded names and types: {words}")
            return given
        problem = f"its options were {words}, and these rules have changed since"
    options = ", ".join(f"--{name}" for name in CHANGES)
    raise UsageError(
        f"{out}: was written with other names or types than its source has; {problem}",
        hint=f"add the options of names and types that convert had ({options}); if merge-lora wrote it: "
        + merge_hint(out),
    )


def was_merged(out: str, plan: Identity) -> bool:
    """Whether merge-lora wrote a directory, by its records: other commands record their options of names and types."""
    if not plan.edits:
        return False
    with contextlib.suppress(TargetError):
        ledger = _ledger(out, plan)
        return ledger is not None and not any(_words(each) or _names_by_form(each, plan) for each in ledger.commands())
    return False


def _names_by_form(command: RecordedCommand, plan: Identity) -> bool:
    """Whether names changed without an option, as between a trainer's state and a model."""
    source = command.asked.source
    with contextlib.suppress(ReshardError):
        edits = edit_rules(source.path, command.asked.edits, form_named(plan.form), source.step, command.asked.target)
        return _given(edits, plan) is not None
    return False


def _given(edits: EditRules, plan: Identity) -> EditRules | None:
    """The edits that a directory has its names and types by, as far as the source's names decide; None if others.

    Raises:
        NamesError: an option of a table is missing.
    """
    for each in () if edits.is_empty else edits.possible_edits():
        if any(plan.edits == short_digest(identity.encode()) for identity in each.possible_identities()):
            return each
    return None


def merge_hint(out: str) -> str:
    """How the output of merge-lora is verified."""
    return (
        f"reshard merge-lora BASE ADAPTER {shlex.quote(out)} --verify, with all options of the first run; "
        "complete files are not written again"
    )


def _words(command: RecordedCommand) -> str:
    """The options of names and types."""
    return " ".join(word.replace("=", " ", 1) for word in command.asked.edits.words(CHANGES))
