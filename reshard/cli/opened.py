"""Shared parts of commands that read checkpoints: opening, and numbers in JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.asked import Conversion, Edits, Effort, Source, Target
from reshard.checkpoints import FileHandles
from reshard.cli.progress import progress_of
from reshard.errors import UsageError, one_error
from reshard.execute import Progress
from reshard.forms.registry import form_of
from reshard.forms.request import EditRules, Means
from reshard.numbers.sweep import Location
from reshard.opened import OpenedCheckpoint, reading_request
from reshard.text.messages import Report, one_line

if TYPE_CHECKING:
    from reshard.numbers.difference import Differences, TensorPair
    from reshard.numbers.statistics import TensorStatistics


def opened(
    read: Source,
    edits: Edits,
    effort: Effort,
    report: Report,
    share: int = 1,
    option: str = "--strategy ",
    unrecorded: str | None = None,
    rules: EditRules | None = None,
) -> OpenedCheckpoint:
    """Open a checkpoint; full tensors.

    Args:
        read: the checkpoint.
        edits: the selection, names and types.
        effort: CPUs and memory.
        report: gets warnings and notes.
        share: how many share the memory.
        option: spelling of the option of the strategy, for messages.
        unrecorded: its strategy if none is typed or recorded.
        rules: other names and types than those of `edits`.

    Raises:
        ReshardError: options contradict each other, or the checkpoint is missing.
    """
    limited = replace(effort, max_memory=max(1, effort.max_memory // share))
    asked = Conversion(read, Target(os.curdir), edits, limited)
    request = reading_request(asked, report, edits=rules, option=option, unrecorded=unrecorded)
    return OpenedCheckpoint(request, Means(FileHandles(), report))


def opened_side(
    side: str, read: Source, shared_strategy: str | None, edits: Edits, effort: Effort, report: Report
) -> OpenedCheckpoint:
    """One of two checkpoints that are compared.

    Options of both are ignored by a form without them, and the strategy by a checkpoint that has its own: the source
    and the target of a conversion have different ones.
    """
    form = form_of(read.path)
    if not form.options.by_rank:
        read, shared_strategy = replace(read, file_suffix=None), None
    if not form.options.steps:
        read = replace(read, step="latest")
    return opened(read, edits, effort, report, 2, f"--{side}-strategy ", unrecorded=shared_strategy)


def compared(a: OpenedCheckpoint, b: OpenedCheckpoint, edits: Edits, effort: Effort, report: Report) -> Differences:
    """The differences of two checkpoints, after the CRCs of both are checked if the effort includes them.

    Raises:
        DamagedCheckpointError: files are damaged.
    """
    # Loaded only here: `get` does not need it.
    from reshard.numbers.difference import differences

    progress = progress_of()
    for one, other in ((a, b), (b, a)) if effort.crc == "auto" else ():
        check_crcs(one, filter(other.__contains__, one), edits, progress, report)
    return differences(a, b, effort.max_memory // 3, progress)


def no_common_names(rename: str | None = None) -> UsageError:
    """The error of two checkpoints without a name in common; with `rename_by_prefix` if that cures it."""
    return UsageError(
        "no tensor was compared: A and B have no names in common",
        hint=rename or "--names and --rename give A's tensors the names of B's; leave them out if A has these already",
    )


def rename_by_prefix(only_a: Sequence[str], only_b: Sequence[str]) -> str | None:
    """The option that gives most names of A those of B, if one prefix is all that differs."""
    for longer, shorter, rule in ((only_a, only_b, "{}*=*"), (only_b, only_a, "*={}*")):
        first = min(shorter, default="")
        prefix = next((name[: -len(first)] for name in longer if first and name.endswith("." + first)), "")
        if prefix and 2 * len({prefix + name for name in shorter}.intersection(longer)) > len(shorter):
            return f"to compare the tensors, add --rename '{rule.format(prefix)}'"
    return None


def check_crcs(
    checkpoint: OpenedCheckpoint,
    names: Iterable[str],
    edits: Edits,
    progress: Progress,
    report: Report,
    copies: bool = False,
    hint: str | None = "to skip CRC checks: --crc never",
) -> None:
    """Compare files that are read with the CRCs that they record.

    With filters, only files and tensors in archives that are read whole: the rest of a file may be large.

    Args:
        checkpoint: the checkpoint.
        names: the tensors that are read.
        edits: the selection.
        progress: counts bytes.
        report: gets notes on CRCs that cannot be checked.
        copies: whether all copies of tensors are read.
        hint: how the check is skipped, if it can be.

    Raises:
        DamagedCheckpointError: files are damaged.
    """
    # Loaded only here: `get` does not need it.
    from reshard.source_replicas import damaged_files

    contents = checkpoint.contents
    targets = (contents.target(name, copy) for name in names for copy in range(contents.copies(name) if copies else 1))
    whole, partly = contents.plan.files_of(targets)
    files = whole if edits.include or edits.exclude else [*whole, *partly]
    damaged = damaged_files(files, checkpoint.reader.budget, checkpoint.handles, report, progress) if files else {}
    if damaged:
        problems = [damaged[path] for path in sorted(damaged)]
        error = one_error(problems, f"{len(problems)} files are damaged")
        error.hint = "; ".join(filter(None, [error.hint, hint])) or None
        raise error


def number_words(number: int | float | None) -> str:
    """A number in a table; ``-`` without one."""
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.4g}"


def location_words(location: Location) -> str:
    """``[17,3], ckpt/rank_5/net.ckpt``."""
    index = shape_words(location.index)
    return index if location.file is None else f"{index}, {location.file}"


def nonfinite_element(tensor: TensorStatistics) -> str:
    """Where NaN and infinite elements begin."""
    assert tensor.first_nonfinite is not None
    counts = f"{tensor.nan} NaN, {tensor.inf} infinite"
    return f"{one_line(tensor.name)}: {counts}; the first at {location_words(tensor.first_nonfinite)}"


def nonfinite_pair(pair: TensorPair) -> str:
    """Where elements begin that are NaN or infinite in one only."""
    assert pair.first_nonfinite is not None
    a, b = map(location_words, pair.first_nonfinite)
    return f"{one_line(pair.name)}: {pair.nonfinite_words}; the first at {a} in A, {b} in B"


def shape_words(shape: tuple[int, ...]) -> str:
    """``[4096,1024]``."""
    return "[" + ",".join(map(str, shape)) + "]"
