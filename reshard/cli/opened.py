"""Shared parts of commands that read checkpoints: opening, and numbers in JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

from reshard.defaults import usable_cpus
from reshard.errors import one_error
from reshard.execute import Progress
from reshard.numbers.sweep import Location
from reshard.opened import OpenedCheckpoint, ReadingEffort, open_requested, reading_request
from reshard.plan.edits import NO_EDITS, Edits
from reshard.text.globs import Filters
from reshard.text.messages import Report


def opened(
    src: str,
    strategy: Optional[str],
    typed: Mapping[str, Any],
    report: Report,
    step: Optional[str] = None,
    share: int = 1,
    edits: Edits = NO_EDITS,
    option: str = "--strategy ",
    unrecorded: Optional[str] = None,
) -> OpenedCheckpoint:
    """Open a checkpoint by the options of `options.source`, `selection` and `effort`; full tensors.

    Args:
        src: the checkpoint.
        strategy: its strategy, as typed.
        typed: the options.
        report: gets warnings and notes.
        step: which step, if not that of the options.
        share: how many share the memory.
        edits: names and types.
        option: spelling of the option of the strategy, for messages.
        unrecorded: its strategy if none is typed or recorded.

    Raises:
        ReshardError: options contradict each other, or the checkpoint is missing.
    """
    filters = Filters(typed.get("include", ()), typed.get("exclude", ()))
    step = step or typed["step"]
    request = reading_request(
        *(src, strategy, None, None, step, typed["file_suffix"], filters, report, edits, option, unrecorded),
        without_ranks=typed.get("without_ranks") or (),
    )
    return open_requested(request, effort_of(typed, share), report)


def check_crcs(
    checkpoint: OpenedCheckpoint,
    names: Iterable[str],
    typed: Mapping[str, Any],
    progress: Progress,
    report: Report,
    copies: bool = False,
) -> None:
    """Compare files that are read with the CRCs that they record, unless ``crc`` is ``never``.

    With filters, only files and tensors in archives that are read whole: the rest of a file may be large.

    Args:
        checkpoint: the checkpoint.
        names: the tensors that are read.
        typed: the options.
        progress: counts bytes.
        report: gets notes on CRCs that cannot be checked.
        copies: whether all copies of tensors are read.

    Raises:
        DamagedCheckpointError: files are damaged.
    """
    if typed.get("crc") == "never":
        return
    # Loaded only here: `get` does not need it.
    from reshard.convert.source_crcs import damaged_files

    contents = checkpoint.contents
    targets = (contents.target(name, copy) for name in names for copy in range(contents.copies(name) if copies else 1))
    whole, partly = contents.plan.files_of(targets)
    files = whole if typed.get("include") or typed.get("exclude") else [*whole, *partly]
    damaged = damaged_files(files, checkpoint.reader.budget, checkpoint.handles, report, progress) if files else {}
    if damaged:
        problems = [damaged[path] for path in sorted(damaged)]
        error = one_error(problems, f"{len(problems)} files are damaged")
        if "crc" in typed:
            error.hint = "; ".join(filter(None, [error.hint, "to skip CRC checks: --crc never"]))
        raise error


def effort_of(typed: Mapping[str, Any], share: int = 1) -> ReadingEffort:
    """Limits of --jobs and --max-memory."""
    return ReadingEffort(typed["jobs"] or usable_cpus(), typed["max_memory"] // share)


def number_words(number: Optional[Union[int, float]]) -> str:
    """A number in a table; ``-`` without one."""
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.4g}"


def location_words(location: Location) -> str:
    """``[17,3], ckpt/rank_5/net.ckpt``."""
    index = shape_words(location.index)
    return index if location.file is None else f"{index}, {location.file}"


def shape_words(shape: tuple[int, ...]) -> str:
    """``[4096,1024]``."""
    return "[" + ",".join(map(str, shape)) + "]"
