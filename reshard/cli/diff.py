"""diff: differences between two checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import click

from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.opened import location_json, location_words, number_json, number_words, opened, shape_words
from reshard.cli.output import alarming, echo_json, listener, say
from reshard.cli.progress import progress_of
from reshard.cli.tables import table
from reshard.forms.registry import form_named, form_of
from reshard.numbers.difference import Differences, TensorPair, differences
from reshard.opened import OpenedCheckpoint
from reshard.plan.edits import NO_EDITS, Edits, edits_of
from reshard.text.messages import full_text, listing
from reshard.text.report import Report
from reshard.text.wording import one_line, plural, printable

DIFFERENT = 4
"""Exit status of --exit-code where the checkpoints differ."""


@command(
    "diff",
    """
reshard diff before/ after/ --strategy src.ckpt
reshard diff ckpt/ huggingface/ --a-strategy src.ckpt --exit-code
reshard diff ckpt/ ckpt/ --strategy src.ckpt --a-step 1_100 --b-step 1_200
""",
)
@argument("a", shell_complete=completion.paths)
@argument("b", shell_complete=completion.paths)
@options.strategy("Strategy of A and B, where they are rank files.", "--src-strategy", "strategy")
@option(
    "Strategies", "--a-strategy", metavar="FILE|DIR|none", shell_complete=completion.strategies, help="Strategy of A."
)
@option(
    "Strategies", "--b-strategy", metavar="FILE|DIR|none", shell_complete=completion.strategies, help="Strategy of B."
)
@option("Source", "--a-step", metavar="EPOCH_STEP|latest", help="Step of A, if not --step.")
@option("Source", "--b-step", metavar="EPOCH_STEP|latest", help="Step of B, if not --step.")
@options.source
@options.selection
@options.edits
@option("Checks", "--exit-code", is_flag=True, help="Exit status 4 if they differ.")
@options.effort
@options.output
def diff(
    a: str,
    b: str,
    strategy: Optional[str],
    a_strategy: Optional[str],
    b_strategy: Optional[str],
    a_step: Optional[str],
    b_step: Optional[str],
    exit_code: bool,
    **typed: Any,
) -> None:
    """Compare the tensors of the checkpoints in A and B.

    Full tensors are compared, so A and B may differ in form, layout, step and type. Printed are tensors that
    only one of them has, tensors of different shapes, and for each tensor that differs the number of different
    elements and the largest absolute and relative difference. NaN equals NaN. A tensor of another type or with
    other bits counts as different even if all values are equal. The exit status is 0, or with --exit-code 4 if
    anything differs. --names, --rename and --cast apply to A: use them to compare B with its source A.
    `reshard strategy diff` compares strategies.
    """
    quiet = typed["quiet"]
    report = Report(listener())
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(_opened(a, a_strategy, strategy, a_step, typed, report, edits_of(a, typed)))
        other = stack.enter_context(_opened(b, b_strategy, strategy, b_step, typed, report))
        found = differences(one, other, typed["max_memory"] // 3, progress_of(quiet, typed["progress"]))
        sides = {"a": _side(a, one), "b": _side(b, other)}
    if typed["as_json"]:
        echo_json(_json(found, sides))
    else:
        _print(found, typed["verbose"])
    if exit_code and not found.equal:
        click.get_current_context().exit(DIFFERENT)


def _print(found: Differences, verbose: bool) -> None:
    for line in _heads(found, verbose):
        say(line)
    differing = found.differing
    if differing:
        title = f"{plural(len(differing), 'tensor')} of {len(found.pairs)} differ:"
        ordered = sorted(differing, key=lambda pair: pair.first_nonfinite is None)
        bad = [pair for pair in ordered if pair.first_nonfinite is not None]
        _print_bad(bad, verbose)
        table(title, _COLUMNS, [_cells(pair) for pair in ordered], _SPARE, range(len(bad)))
    elif found.equal:
        say(f"{plural(len(found.pairs), 'tensor')}, all equal in every byte")
    else:
        say(f"{plural(len(found.pairs), 'tensor')} in both with the same shape, all equal in every byte")


def _heads(found: Differences, verbose: bool) -> Iterator[str]:
    for names, where in ((found.only_a, "only in A"), (found.only_b, "only in B")):
        if names:
            listed = listing(names)
            yield f"{len(names)} {where}: {full_text(listed) if verbose else listed}"
    rename = _rename_by_prefix(found.only_a, found.only_b)
    if rename is not None:
        yield f"names differ by a prefix; to compare the tensors, add --rename '{rename}'"
    for name, (one, other) in found.shapes.items():
        yield f"{name}: {shape_words(one)} in A, {shape_words(other)} in B"


def _rename_by_prefix(only_a: Sequence[str], only_b: Sequence[str]) -> Optional[str]:
    """The rule that gives most names of A those of B, if one prefix is all that differs."""
    for longer, shorter, rule in ((only_a, only_b, "{}*=*"), (only_b, only_a, "*={}*")):
        first = min(shorter, default="")
        prefix = next((name[: -len(first)] for name in longer if first and name.endswith("." + first)), "")
        if prefix and 2 * len({prefix + name for name in shorter}.intersection(longer)) > len(shorter):
            return rule.format(prefix)
    return None


# Tensors with a line of their own.
_MAX_BAD = 20
_SPARE = ("type", "relative", "shape")
_COLUMNS = ["parameter", "type", "shape", "differing", "NaN", "difference", "relative", "at"]


def _print_bad(bad: Sequence[TensorPair], verbose: bool) -> None:
    """Where elements begin that are NaN or infinite in one only, first of all that is printed of pairs."""
    shown = bad if verbose else bad[:_MAX_BAD]
    for pair in shown:
        assert pair.first_nonfinite is not None
        sides = [f"{count} NaN in {side} only" for side, count in zip("AB", pair.nan) if count]
        what = " and ".join(sides) or "an infinite difference"
        a, b = map(location_words, pair.first_nonfinite)
        click.echo(alarming(printable(f"{one_line(pair.name)}: {what}; the first at {a} in A, {b} in B")))
    if len(shown) < len(bad):
        say(f"... and {plural(len(bad) - len(shown), 'tensor')} more; -v shows all")


def _cells(pair: TensorPair) -> list[str]:
    dtypes = pair.dtypes[0] if pair.dtypes[0] == pair.dtypes[1] else " and ".join(pair.dtypes)
    if pair.differing is None:
        numbers = ["-"] * 4
    elif pair.differing == 0 and pair.dtypes[0] == pair.dtypes[1]:
        numbers = ["bits only", "0", "0", "0"]
    else:
        numbers = [str(pair.differing), str(sum(pair.nan)), number_words(pair.max_abs), number_words(pair.max_rel)]
    return [pair.name, dtypes, shape_words(pair.shape), *numbers, "" if pair.at is None else shape_words(pair.at)]


def _json(found: Differences, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        **sides,
        "equal": found.equal,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "shapes": [{"name": name, "a": list(one), "b": list(other)} for name, (one, other) in found.shapes.items()],
        "identical": len(found.pairs) - len(found.differing),
        "differing": [_row(pair) for pair in found.differing],
    }


def _side(path: str, checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    return {"path": path, "form": checkpoint.form, "step": checkpoint.step}


def _row(pair: TensorPair) -> dict[str, Any]:
    return {
        "name": pair.name,
        "dtypes": list(pair.dtypes),
        "shape": list(pair.shape),
        "differing": pair.differing,
        "nan": sum(pair.nan),
        "nan_a": pair.nan[0],
        "nan_b": pair.nan[1],
        "max_abs": number_json(pair.max_abs),
        "max_rel": number_json(pair.max_rel),
        "at": None if pair.at is None else list(pair.at),
        "first_nonfinite": None
        if pair.first_nonfinite is None
        else dict(zip("ab", map(location_json, pair.first_nonfinite))),
    }


def _opened(
    src: str,
    own: Optional[str],
    shared: Optional[str],
    step: Optional[str],
    typed: dict[str, Any],
    report: Report,
    edits: Edits = NO_EDITS,
) -> OpenedCheckpoint:
    """One of the two; an option of both is ignored by a form without it."""
    form = form_named(form_of(src))
    if not form.options.by_rank:
        typed = {**typed, "file_suffix": None}
        shared = None
    if not form.options.steps:
        typed = {**typed, "step": "latest"}
    return opened(src, own or shared, typed, report, step, share=2, edits=edits)
