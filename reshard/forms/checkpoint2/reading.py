"""Reading an iteration: metadata, headers of files, and their comparison."""

from __future__ import annotations

import os
from typing import Optional

from reshard.errors import CheckpointError, InputError
from reshard.forms.checkpoint2.checkpoint import Checkpoint2
from reshard.forms.checkpoint2.contents import laid_out_contents, whole_contents
from reshard.forms.checkpoint2.files import IterationFiles
from reshard.forms.checkpoint2.iterations import ADAPTER, Iteration, choose, read_common
from reshard.forms.checkpoint2.metadata import read_metadata
from reshard.forms.form import ReadRequest
from reshard.storage import exists
from reshard.strategies import SAME, Stage, Strategy
from reshard.text.messages import listing, plural, rank_ranges


def read_checkpoint2(request: ReadRequest) -> Checkpoint2:
    """Read the requested iteration, by default the last finished one.

    Raises:
        UsageError: the step is not an iteration's number.
        IncompleteSourceError: a needed tensor has a slice in no readable file.
        InputError: the iteration is missing, or its metadata is damaged or contradicts the files.
        RetryableError: reading failed in a way that may pass.
    """
    choice = choose(request.path, request.step, request.report)
    if not request.complete:
        return _read_iteration(choice.iterations[0], request)
    refused: Optional[InputError] = None
    for iteration in choice.iterations:
        try:
            checkpoint = _read_iteration(iteration, request)
            checkpoint.check(request.required)
        except InputError as error:
            if choice.settled:
                raise
            refused = refused or error
            request.report.warn(f"{iteration.label} is not complete and is skipped: {error.message}")
            continue
        return checkpoint
    assert refused is not None
    raise refused


def _read_iteration(iteration: Iteration, request: ReadRequest) -> Checkpoint2:
    """Read an iteration, complete or not; the errors as in `read_checkpoint2`."""
    handles, report = request.handles, request.report
    metadata = read_metadata(iteration.path)
    metadata_files = None if metadata is None else metadata.files
    files = IterationFiles(iteration.path, metadata_files, handles, report, request.damaged)
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
        form="checkpoint2",
        step=None if step is None else str(step),
        label=iteration.label,
        place=iteration.path,
        files=files.paths,
        indexes=files.indexes,
        absent=files.absent,
        training=common,
        metadata_names=None if metadata is None else frozenset(metadata.tensors),
        **vars(contents),
    )


_HINT = "pass the target's strategy instead of same"


def strategy_of(checkpoint: Checkpoint2) -> Strategy:
    """The strategy of an iteration.

    Raises:
        CheckpointError: metadata lacks layouts of some tensors, or the ranks of a stage are not consecutive.
    """
    stages: list[Stage] = []
    first = 0
    for ranks, layouts in checkpoint.layouts().items():
        if ranks != tuple(range(first, first + len(ranks))):
            raise CheckpointError(
                f"{checkpoint.place}: lays tensors out over {rank_ranges(ranks)}; a stage would begin at rank {first} "
                "and have no gaps",
                file=checkpoint.place,
                hint=_HINT,
            )
        stages.append(Stage(len(stages), first, len(ranks), layouts, (checkpoint.place,)))
        first += len(ranks)
    if not stages:
        raise CheckpointError(
            f"{checkpoint.place}: does not record the layouts of tensors",
            file=checkpoint.place,
            hint=f"{_HINT}, or none",
        )
    laid_out = set().union(*(stage.layouts.keys() for stage in stages))
    scattered = sorted(checkpoint.tensors.keys() - laid_out)
    if scattered:
        raise CheckpointError(
            f"{checkpoint.place}: lays {plural(len(scattered), 'parameter')} out over a part of a stage's ranks, which "
            "no strategy can: " + listing(scattered),
            file=checkpoint.place,
            parameter=scattered[0],
            hint=_HINT,
        )
    return Strategy(tuple(stages), SAME)
