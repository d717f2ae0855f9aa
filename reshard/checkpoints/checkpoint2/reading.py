"""Reading an iteration: its metadata, the headers of its files, and what comes of holding the two together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Callable, Optional

from reshard.checkpoints.checkpoint2.checkpoint2 import Checkpoint2
from reshard.checkpoints.checkpoint2.contents import laid_out_contents, whole_contents
from reshard.checkpoints.checkpoint2.files import IterationFiles
from reshard.checkpoints.checkpoint2.iterations import Iteration, choose, read_common
from reshard.checkpoints.checkpoint2.metadata import read_metadata
from reshard.checkpoints.checkpoint2.names import ADAPTER
from reshard.checkpoints.files import FileHandles
from reshard.errors import InputError
from reshard.storage import exists
from reshard.text.report import Report


def read_checkpoint2(
    path: str,
    step: Optional[str],
    handles: FileHandles,
    report: Report,
    damaged: Optional[Mapping[str, str]] = None,
    wanted: Optional[Callable[[str], bool]] = None,
) -> Checkpoint2:
    """Read the iteration that is meant.

    Args:
        path: a root, or the directory of an iteration.
        step: its number; ``latest`` or None is the last finished one.
        handles: where to borrow files from.
        report: told of iterations and files that are passed over, and of faults that do no harm.
        damaged: files that count as absent, and why, by path; the text names the file.
        wanted: says of a name whether the tensor has to be readable; by default all have to.

    Raises:
        UsageError: ``step`` names no iteration.
        IncompleteSourceError: of a tensor that is wanted some slice is in no readable file.
        InputError: there is no such iteration, or its metadata is damaged or contradicts the files.
        RetryableError: reading failed in a way that may pass.
    """
    choice = choose(path, step, report)
    refused: Optional[InputError] = None
    for iteration in choice.iterations:
        try:
            found = read_iteration(iteration, handles, report, damaged)
            found.check(wanted)
        except InputError as error:
            if choice.settled:
                raise
            refused = refused or error
            report.warn(f"{iteration.label} is not complete and is passed over: {error.message}")
            continue
        return found
    assert refused is not None
    raise refused


def read_iteration(
    iteration: Iteration, handles: FileHandles, report: Report, damaged: Optional[Mapping[str, str]] = None
) -> Checkpoint2:
    """Read an iteration, complete or not; the arguments and errors are as those of `read_checkpoint2`."""
    metadata = read_metadata(iteration.path)
    listed = None if metadata is None else metadata.files
    files = IterationFiles(iteration.path, listed, handles, report, damaged or {})
    contents = whole_contents(files) if metadata is None else laid_out_contents(metadata, files, handles, report)
    common = read_common(iteration.path)
    adapter = os.path.join(iteration.path, ADAPTER)
    if exists(adapter):
        report.note(
            f"{adapter} binds these LoRA parameters to the files of their base model by a fingerprint; it belongs to "
            "this form only and is not carried over"
        )
    step = iteration.number
    if step is None and isinstance(common.get("global_step"), int):
        step = common["global_step"]
    return Checkpoint2(
        step=None if step is None else str(step),
        label=iteration.label,
        place=iteration.path,
        files=files.paths,
        indexes=files.indexes,
        tensors=contents.tensors,
        plain=tuple(sorted(contents.plain)),
        unlaid=tuple(sorted(contents.unlaid)),
        absent=files.absent,
        lost=contents.lost,
        faults=contents.faults,
        unplaced=contents.unplaced,
        common=common,
        placements=contents.placements,
        listed=None if metadata is None else frozenset(metadata.tensors),
        unlisted=contents.unlisted,
    )
