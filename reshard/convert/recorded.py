"""Strategies, names and types of commands that compare: as typed, or else as a conversion recorded them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from typing import Any, Optional

from reshard.errors import ReshardError, TargetError, UsageError
from reshard.forms.registry import form_named, form_of
from reshard.plan.edits import Edits, edits_of
from reshard.records import Identity, strategy_digest
from reshard.records.given import Given
from reshard.records.identity import short_digest
from reshard.records.ledger import ledgers_in
from reshard.storage import exists
from reshard.strategies import names_files, read_strategy
from reshard.text.report import Report

EDITS = ("names", "rename", "config", "reverse", "optimizer", "cast", "dequantize")
"""The options of names and types, as click calls their values."""

_OPTIONS = "--names, --reverse, --config, --optimizer, --rename, --cast, --dequantize"


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
        if not edits.is_empty and plan.edits == short_digest(edits.identity().encode()):
            return edits, False
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
    try:
        given = next((given for ledger in ledgers_in(out) if ledger.identity == plan for given in ledger.given()), None)
    except TargetError as error:
        report.warn(error.message)
        given = None
    if given is None:
        return dict(typed)
    recorded = {
        "src_strategy": (given.source_strategy, plan.source_strategy),
        "dst_strategy": (given.target_strategy, plan.target_strategy),
    }
    found = dict(typed)
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
        found[name] = path
    said = " ".join(f"--{name.replace('_', '-')} {found[name]}" for name in missing)
    report.note(f"compared with the recorded strategies: {said}")
    return found


def _recorded(out: str, src: str, plan: Identity, report: Report) -> Edits:
    try:
        ledgers = [ledger for ledger in ledgers_in(out) if ledger.identity == plan]
        commands = [given for ledger in ledgers for given in ledger.given()]
    except TargetError as error:
        report.warn(error.message)
        commands = []
    if was_merged(out, plan):
        raise UsageError(
            f"{out}: was written by merge-lora, and verify --src has no adapter to add", hint=merge_hint(out)
        )
    problem = "no record lists them"
    for given in commands:
        said = " ".join(_words(given))
        try:
            edits = edits_of(src, _typed(given), plan.form)
            digests = {short_digest(identity.encode()) for identity in edits.possible_identities()}
        except ReshardError as error:
            problem = f"its options were {said}: {error.message}"
            continue
        if not edits.is_empty and plan.edits in digests:
            if said:
                report.note(f"compared with the recorded names and types: {said}")
            return edits
        problem = f"its options were {said}, and these rules have changed since"
    raise UsageError(
        f"{out}: was written with other names or types than its source has; {problem}",
        hint=f"add the options of names and types that convert had ({_OPTIONS}); if merge-lora wrote it: "
        + merge_hint(out),
    )


def was_merged(out: str, plan: Identity) -> bool:
    """Whether merge-lora wrote a directory, by its records: other commands record their options of names and types."""
    if not plan.edits:
        return False
    with contextlib.suppress(TargetError):
        ledgers = [ledger for ledger in ledgers_in(out) if ledger.identity == plan]
        commands = [given for ledger in ledgers for given in ledger.given()]
        return bool(ledgers) and not any(_words(given) or _names_by_form(given, plan) for given in commands)
    return False


def _names_by_form(given: Given, plan: Identity) -> bool:
    """Whether names changed without an option, as between a trainer's state and a model."""
    with contextlib.suppress(ReshardError):
        edits = edits_of(given.src, _typed(given), plan.form)
        return not edits.is_empty and plan.edits == short_digest(edits.identity().encode())
    return False


def merge_hint(out: str) -> str:
    """How the output of merge-lora is verified."""
    return (
        f"reshard merge-lora BASE ADAPTER {shlex.quote(out)} --verify, with all options of the first run; "
        "complete files are not written again"
    )


def _typed(given: Given) -> dict[str, Any]:
    """Recorded options as click's values."""
    return {
        "names": given.names,
        "rename": given.rename,
        "config": given.config,
        "reverse": given.reverse,
        "optimizer": "keep" if given.optimizer else None,
        "cast": given.cast,
        "dequantize": given.dequantize,
    }


def _words(given: Given) -> list[str]:
    """The options as words."""
    words = [] if given.names is None else [f"--names {given.names}"]
    words += [] if given.config is None else [f"--config {given.config}"]
    words += ["--reverse"] if given.reverse else []
    words += ["--optimizer keep"] if given.optimizer else []
    words += [] if given.dequantize is None else [f"--dequantize {given.dequantize}"]
    return [*words, *(f"--rename {one}" for one in given.rename), *(f"--cast {one}" for one in given.cast)]
