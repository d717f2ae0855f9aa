"""diff: differences between two checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Optional

from reshard.asked import CHANGES, Edits, Effort, Source
from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.opened import (
    check_crcs,
    location_words,
    number_words,
    opened,
    shape_words,
)
from reshard.cli.output import echo_json, exit_different, is_json, is_verbose, listener, say
from reshard.cli.progress import progress_of
from reshard.cli.tables import alarming_lines, table
from reshard.errors import UsageError
from reshard.forms.registry import form_of
from reshard.numbers.difference import Differences, TensorPair, differences
from reshard.opened import OpenedCheckpoint
from reshard.text.messages import Report, full_text, listing, one_line, plural


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
@options.strategy("Strategy of rank files in A and B that have no recorded strategy.", "--src-strategy", "strategy")
@options.strategy("Strategy of A.", flag="--a-strategy")
@options.strategy("Strategy of B.", flag="--b-strategy")
@option("Source", "--a-step", metavar="EPOCH_STEP|latest", show_default="--step", help="Step of A.")
@option("Source", "--b-step", metavar="EPOCH_STEP|latest", show_default="--step", help="Step of B.")
@options.group(Source, "step", "file_suffix")
@options.group(Edits, *options.SELECTION, *CHANGES)
@option("Checks", "--exit-code", is_flag=True, help="Exit status 4 if they differ.")
@options.group(
    Effort, "crc", *options.LIMITS, crc={"help": "Check the CRCs that files record; a damaged file is an error."}
)
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
    source: Source,
    edits: Edits,
    effort: Effort,
) -> None:
    """Compare the tensors of the checkpoints in A and B.

    Full tensors are compared, so A and B may differ in form, layout, step and type. Printed are tensors that
    only one of them has, tensors of different shapes, and for each tensor that differs the number of different
    elements and the largest absolute and relative difference. NaN equals NaN. A tensor of another type or with
    other bits counts as different even if all values are equal. The exit status is 0, or with --exit-code 4 if
    anything differs, and 2 if they have no names in common. Options of names and types apply to A: use them to
    compare B with its source A. `reshard strategy diff` compares strategies.
    """
    report = Report(listener())
    with contextlib.ExitStack() as stack:
        read_a = replace(source, path=a, strategy=a_strategy, step=a_step or source.step)
        read_b = replace(source, path=b, strategy=b_strategy, step=b_step or source.step)
        opened_a = stack.enter_context(_opened("a", read_a, strategy, edits, effort, report))
        selection = Edits(edits.include, edits.exclude)
        opened_b = stack.enter_context(_opened("b", read_b, strategy, selection, effort, report))
        progress = progress_of()
        for one, other in ((opened_a, opened_b), (opened_b, opened_a)) if effort.crc == "auto" else ():
            check_crcs(one, filter(other.__contains__, one), edits, progress, report)
        result = differences(opened_a, opened_b, effort.max_memory // 3, progress)
        sides = {"a": _side(a, opened_a), "b": _side(b, opened_b)}
    if is_json():
        differing, identical = result.differing, len(result.pairs) - len(result.differing)
        only = {"only_a": result.only_a, "only_b": result.only_b, "shapes": result.shapes}
        echo_json({**sides, "equal": result.equal, **only, "identical": identical, "differing": differing})
    else:
        _print(result)
    if not result.pairs and not result.shapes:
        raise UsageError(
            "no tensor was compared: A and B have no names in common",
            hint="--names and --rename give A's tensors the names of B's; leave them out if A has these already",
        )
    if exit_code and not result.equal:
        exit_different()


def _print(result: Differences) -> None:
    for line in _heads(result):
        say(line)
    differing = result.differing
    if differing:
        title = f"{plural(len(differing), 'tensor')} of {len(result.pairs)} differ:"
        ordered = sorted(differing, key=lambda pair: pair.first_nonfinite is None)
        bad = [pair for pair in ordered if pair.first_nonfinite is not None]
        alarming_lines(list(map(_nonfinite_line, bad)))
        table(title, _COLUMNS, [_cells(pair) for pair in ordered], _SPARE, range(len(bad)))
    elif result.equal:
        say(f"{plural(len(result.pairs), 'tensor')}, all equal in every byte")
    elif result.pairs:
        say(f"{plural(len(result.pairs), 'tensor')} in both with the same shape, all equal in every byte")


def _heads(result: Differences) -> Iterator[str]:
    for names, where in ((result.only_a, "only in A"), (result.only_b, "only in B")):
        if names:
            text = listing(names)
            yield f"{len(names)} {where}: {full_text(text) if is_verbose() else text}"
    rename = _rename_by_prefix(result.only_a, result.only_b)
    if rename is not None:
        yield f"names differ by a prefix; to compare the tensors, add --rename '{rename}'"
    for name, (shape_a, shape_b) in result.shapes.items():
        yield f"{name}: {shape_words(shape_a)} in A, {shape_words(shape_b)} in B"


def _rename_by_prefix(only_a: Sequence[str], only_b: Sequence[str]) -> Optional[str]:
    """The rule that gives most names of A those of B, if one prefix is all that differs."""
    for longer, shorter, rule in ((only_a, only_b, "{}*=*"), (only_b, only_a, "*={}*")):
        first = min(shorter, default="")
        prefix = next((name[: -len(first)] for name in longer if first and name.endswith("." + first)), "")
        if prefix and 2 * len({prefix + name for name in shorter}.intersection(longer)) > len(shorter):
            return rule.format(prefix)
    return None


_SPARE = ("type", "relative", "shape")
_COLUMNS = ["parameter", "type", "shape", "differing", "NaN", "difference", "relative", "at"]


def _nonfinite_line(pair: TensorPair) -> str:
    """Where elements begin that are NaN or infinite in one only."""
    assert pair.first_nonfinite is not None
    sides = [f"{count} NaN in {side} only" for side, count in zip("AB", pair.nan) if count]
    a, b = map(location_words, pair.first_nonfinite)
    problem = " and ".join(sides) or "an infinite difference"
    return f"{one_line(pair.name)}: {problem}; the first at {a} in A, {b} in B"


def _cells(pair: TensorPair) -> list[str]:
    dtypes = pair.dtypes[0] if pair.dtypes[0] == pair.dtypes[1] else " and ".join(pair.dtypes)
    if pair.differing is None:
        numbers = ["-"] * 4
    elif pair.differing == 0 and pair.dtypes[0] == pair.dtypes[1]:
        numbers = ["bits only", "0", "0", "0"]
    else:
        numbers = [str(pair.differing), str(sum(pair.nan)), number_words(pair.max_abs), number_words(pair.max_rel)]
    return [pair.name, dtypes, shape_words(pair.shape), *numbers, "" if pair.at is None else shape_words(pair.at)]


def _side(path: str, checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    return {"path": path, "form": checkpoint.form, "step": checkpoint.step}


def _opened(
    side: str, read: Source, shared_strategy: Optional[str], edits: Edits, effort: Effort, report: Report
) -> OpenedCheckpoint:
    """One of the two.

    Options of both are ignored by a form without them, and the strategy by a checkpoint that has its own: the source
    and the target of a conversion have different ones.
    """
    form = form_of(read.path)
    if not form.options.by_rank:
        read, shared_strategy = replace(read, file_suffix=None), None
    if not form.options.steps:
        read = replace(read, step="latest")
    return opened(read, edits, effort, report, 2, f"--{side}-strategy ", unrecorded=shared_strategy)
