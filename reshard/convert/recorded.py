"""What a conversion records of its command, and what commands that compare take from these records."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from typing import Any, Optional

from reshard.convert.options import Options
from reshard.errors import ReshardError, TargetError, UsageError
from reshard.forms.ranks.naming import RANK, fixed_directory
from reshard.forms.registry import form_named, form_of
from reshard.plan.edits import Edits, edits_of
from reshard.plan.plan import Plan
from reshard.records import Identity, RecordedCommand, strategy_digest
from reshard.records.commands import EDITS
from reshard.records.identity import short_digest
from reshard.records.ledger import Ledger, ledger_in, packing_of
from reshard.storage import absolute, exists, is_directory, real
from reshard.strategies import AS_CUT, NONE, Strategy, names_files, read_strategy, target_words
from reshard.text.messages import Report, number_ranges


def command_of(plan: Plan, options: Options) -> Optional[RecordedCommand]:
    """The command line of a run with absolute paths; None for a run that no command line repeats.

    Args:
        plan: with the step and format that were chosen.
        options: how it is carried out.
    """
    request = plan.request
    words = request.edits.typed
    if not isinstance(request.src, str) or words is None:
        return None
    # To resume one of several runs is to resume all of them.
    several = options.adding or options.share is not None
    try:
        src, source, target = absolute(request.src), _absolute(request.source), _absolute(request.target)
        config = None if words.config is None else absolute(words.config)
    except FileNotFoundError:
        # The working directory is gone.
        return None
    # A table leaves other packing than the source's, or none.
    packing = packing_of(src) if request.edits.table is None else plan.checkpoint.packing
    return RecordedCommand(
        task="recover" if request.recover else "convert",
        src=src,
        source_strategy=source,
        target_strategy=target,
        format=plan.form.format,
        host=os.uname().nodename,
        step=plan.checkpoint.step,
        include=tuple(request.filters.include),
        exclude=tuple(request.filters.exclude),
        allow_missing=request.allow_missing,
        packing=packing,
        without_ranks=number_ranges(request.without_ranks) or None,
        ranks=None if request.files is None or several else number_ranges(request.files),
        **{name: getattr(request, name) for name in ("to", "max_shard_size", "file_suffix", "prefix")},
        **{name: getattr(options, name) for name in ("crc", "check_replicas", "checksum", "verify", "lost_only")},
        **{**words._asdict(), "config": config, "optimizer": "keep" if words.optimizer else None},
    )


def _absolute(strategy: Strategy) -> str:
    return NONE if strategy.is_none else absolute(strategy.path) if names_files(strategy.path) else strategy.path


def _ledger(out: str, plan: Identity) -> Optional[Ledger]:
    ledger = ledger_in(out)
    return ledger if ledger is not None and ledger.identity == plan else None


def _commands(out: str, plan: Identity) -> list[RecordedCommand]:
    """The recorded commands of a directory's conversion, the latest first."""
    ledger = _ledger(out, plan)
    return [] if ledger is None else ledger.commands()


def edits_of_target(
    out: str, src: str, typed: Mapping[str, Any], plan: Optional[Identity], report: Report
) -> tuple[Edits, bool]:
    """The names and types that a converted checkpoint was given.

    Args:
        out: its directory.
        src: the source.
        typed: the options' values.
        plan: the directory's recorded identity; None without records.
        report: gets a note about their origin.

    Returns:
        These, and whether they are recorded.

    Raises:
        UsageError: the directory has other names or types, and its records do not list them.
        ReshardError: a file of the options cannot be read.
    """
    edits = edits_of(src, typed, None if plan is None else plan.form)
    if not any(typed[name] for name in EDITS) and plan is not None and plan.edits:
        # Between some forms names change without an option.
        given = _given(edits, plan)
        if given is not None:
            return given, False
        return _recorded(out, src, plan, report), True
    return edits, False


def strategies_of_target(
    out: str, src: str, to: str, typed: Mapping[str, Optional[str]], plan: Optional[Identity], report: Report
) -> dict[str, Optional[str]]:
    """The strategies of a conversion: as typed, and where they were not, as its records name them.

    Args:
        out: the directory that was converted to.
        src: the source.
        to: the form of `out`.
        typed: ``src_strategy`` and ``dst_strategy``.
        plan: the directory's recorded identity; None without records.
        report: gets notes about recorded options.

    Raises:
        UsageError: a recorded strategy is missing or was changed.
    """
    needed = {
        "src_strategy": form_named(form_of(src)).options.needs_strategy,
        "dst_strategy": form_named(to).options.cut,
    }
    missing = [name for name, path in typed.items() if path is None and needed[name]]
    if plan is None or not missing:
        return dict(typed)
    commands = _commands_or_warn(out, plan, report)
    if not commands:
        return dict(typed)
    recorded = {
        "src_strategy": (commands[0].source_strategy, plan.source_strategy),
        "dst_strategy": (commands[0].target_strategy, plan.target_strategy),
    }
    paths = dict(typed)
    for name in missing:
        path, digest = recorded[name]
        option = "--" + name.replace("_", "-")
        if names_files(path):
            problem = "does not exist" if not exists(path) else "has changed"
            if not exists(path) or strategy_digest(read_strategy(path)) != digest:
                raise UsageError(
                    f"{option} is missing: {path}, which the records in {out} name, {problem}",
                    hint=f"add {option} FILE or DIR with the strategy that {out} was converted with",
                )
        paths[name] = path
    if AS_CUT in paths.values():
        return paths
    words = [f"--src-strategy {paths['src_strategy']}"] if "src_strategy" in missing else []
    if "dst_strategy" in missing:
        words += target_words(recorded["dst_strategy"][0])
    report.note(f"compared with the recorded strategies: {' '.join(words)}")
    return paths


def source_exists(path: str) -> bool:
    """Whether a source exists; of a path with ``{rank}``, the directory before it."""
    return exists(path) or (RANK in path and is_directory(fixed_directory(path)))


def command_with_source(out: str, plan: Identity) -> Optional[RecordedCommand]:
    """The last recorded command of a directory's conversion whose source exists; None without one."""
    with contextlib.suppress(ReshardError):
        return next((command for command in _commands(out, plan) if source_exists(command.src)), None)
    return None


def recorded_source(out: str, plan: Identity) -> str:
    """The source of a directory's conversion, if its records list it and it exists here; otherwise ``SRC``."""
    command = command_with_source(out, plan)
    return "SRC" if command is None else command.src


def other_source(out: str, src: str, plan: Identity) -> Optional[str]:
    """A sentence with the recorded source of a directory's conversion, if it is another path than ``src``."""
    with contextlib.suppress(ReshardError):
        recorded = [command.src for command in _commands(out, plan)]
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


def _recorded(out: str, src: str, plan: Identity, report: Report) -> Edits:
    commands = _commands_or_warn(out, plan, report)
    if was_merged(out, plan):
        raise UsageError(
            f"{out}: was written by merge-lora, and verify --src has no adapter to add", hint=merge_hint(out)
        )
    problem = "no record lists them"
    for command in commands:
        words = _words(command)
        try:
            edits = edits_of(src, command._asdict(), plan.form)
            given = _given(edits, plan)
        except ReshardError as error:
            problem = f"its options were {words}: {error.message}"
            continue
        if given is not None:
            if words:
                report.note(f"compared with the recorded names and types: {words}")
            return given
        problem = f"its options were {words}, and these rules have changed since"
    options = ", ".join(f"--{name}" for name in EDITS)
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
        commands = _commands(out, plan)
        return _ledger(out, plan) is not None and not any(
            _words(each) or _names_by_form(each, plan) for each in commands
        )
    return False


def _names_by_form(command: RecordedCommand, plan: Identity) -> bool:
    """Whether names changed without an option, as between a trainer's state and a model."""
    with contextlib.suppress(ReshardError):
        return _given(edits_of(command.src, command._asdict(), plan.form), plan) is not None
    return False


def _given(edits: Edits, plan: Identity) -> Optional[Edits]:
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
    return " ".join(word.replace("=", " ", 1) for word in command.option_words(EDITS))
