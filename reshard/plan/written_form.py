"""The target form that a request asks for, of what a source holds."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional

from reshard.checkpoints import FileHandles, FileNames, Step, format_of, reading_error
from reshard.checkpoints.checkpoint import Checkpoint, TensorsInOrder
from reshard.checkpoints.checkpoint2 import Checkpoint2
from reshard.checkpoints.checkpoint2.names import COMMON
from reshard.checkpoints.edited import EditedCheckpoint, stored_checkpoint
from reshard.checkpoints.formats.dtypes import MEMORY, NO_ARRAYS
from reshard.checkpoints.forms import CHECKPOINT2, RANKS
from reshard.checkpoints.full import HUGGINGFACE, FullWeights
from reshard.checkpoints.name_order import layers_in_order
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import CheckpointError
from reshard.plan.beside import files_beside
from reshard.plan.request import Request
from reshard.storage import read_range
from reshard.strategies import SAME
from reshard.target import FinishingFile, RankFiles, TargetForm
from reshard.target.checkpoint2_common import common_json
from reshard.target.checkpoint2_files import Checkpoint2Files
from reshard.target.full_directory import FullDirectory
from reshard.target.marks import STRATEGY_FILE
from reshard.text.messages import listing
from reshard.text.names import as_pattern, is_weight, state_prefix
from reshard.text.report import Report
from reshard.text.wording import plural

_CHOOSE_FORMAT = "choose the target's with --format ckpt or --format safetensors"
_NAME_FORMAT = "name the files of one format, as in 'ckpt/rank_{rank}/*.ckpt'; ranks that have none then count as lost"
_INTEGERS = {"Int32": "<i", "Int64": "<q", "UInt32": "<I", "UInt64": "<Q"}


def written_form(request: Request, checkpoint: Checkpoint, handles: FileHandles, report: Report) -> TargetForm:
    """What is to be written.

    Raises:
        ReshardError: it cannot be told, or not be read what it has to say.
    """
    if request.to == RANKS:
        alone = request.target.path == SAME and request.target.stages != request.source.stages
        if alone and not all(stage.layouts for stage in request.target.stages):
            report.warn("no strategy is written beside the ranks: of some pipeline stage no parameter is left")
            alone = False
        if alone and not (request.exact_file or request.format == MEMORY):
            report.note(
                f"the strategy of these ranks is written beside them: {os.path.join(request.dst, STRATEGY_FILE)}"
            )
        return RankFiles(
            request.target,
            checkpoint.tensors,
            format_asked(request, checkpoint),
            rank_names(request, checkpoint),
            alone,
        )
    admit = request.filters.admit
    found = [name for name in _in_order(checkpoint) if admit(name)]
    tensors = TensorsInOrder(checkpoint.tensors, layers_in_order(found))
    values = _sizes_of_values(checkpoint, [name for name in checkpoint.values() if admit(name)])
    if request.to == HUGGINGFACE:
        _warn_of_training([*tensors, *values], checkpoint.names(), report)
    if request.to != CHECKPOINT2:
        others = files_beside(request.to, checkpoint, tensors, request.edits, handles, report)
        return FullDirectory(request.to, tensors, values, request.max_shard_size, others, found)
    said = _said_of_training(checkpoint, handles)
    if said.get("global_batch_size") is None:
        report.warn(
            f"{COMMON} has no global_batch_size, because the source does not record it: set it there before training "
            "resumes"
        )
    known = checkpoint.names().union(request.target.parameters)
    unlisted = [name for name in values if is_weight(name, known)]
    if unlisted:
        report.warn(
            "not in metadata.json, because nothing says how they are laid out, so that loaders do not find them: "
            + listing(unlisted)
        )
    prefix = "" if request.prefix in (None, DEFAULT_PREFIX) else str(request.prefix).rstrip("-") + "-"
    iteration = int((said.get("global_step") if checkpoint.form != CHECKPOINT2 else checkpoint.step) or 0)
    if iteration < 0:
        report.warn(f"global_step is {iteration}, and Checkpoint 2.0 counts iterations from 0: iteration 0 is written")
        iteration = 0
        said = {key: None if isinstance(value, int) and value < 0 else value for key, value in said.items()}
    common = FinishingFile(COMMON, lambda: [common_json(said)])
    return Checkpoint2Files(request.target, tensors, known, list(values), iteration, prefix, common)


def _warn_of_training(names: Sequence[str], known: Collection[str], report: Report) -> None:
    """Say how to leave out what no model has: optimizer state, gradients, counters."""
    others = [name for name in names if not is_weight(name, known)]
    if not others:
        return
    weights = [name for name in names if is_weight(name, known)]
    patterns: dict[str, None] = {}
    for name in others:
        prefix = state_prefix(name, known)
        # A word of an optimizer may begin the name of a weight, too.
        alone = prefix and not any(weight.startswith(prefix) for weight in weights)
        patterns[f"'{prefix}*'" if alone else as_pattern(name)] = None
    report.warn(
        f"optimizer state and values of the training are written too ({plural(len(others), 'tensor')}), and loaders of "
        "Hugging Face models do not expect them; leave them out with "
        + " ".join(f"--exclude {pattern}" for pattern in patterns)
    )


def rank_names(request: Request, checkpoint: Checkpoint) -> FileNames:
    """Of the files of ranks.

    Raises:
        ReshardError: no file can be named as was asked for.
    """
    epoch, _, number = (checkpoint.step or "").partition("_")
    step = Step(int(epoch), int(number)) if number else None
    return FileNames.of_prefix(DEFAULT_PREFIX if request.prefix is None else request.prefix, step)


def format_asked(request: Request, checkpoint: Checkpoint) -> str:
    """The format of rank files.

    Raises:
        CheckpointError: it is to be the source's, which has several.
    """
    if request.format != "same":
        return request.format
    formats = {format_of(path): path for path in checkpoint.files.values()}
    if len(formats) > 1:
        raise CheckpointError(
            f"source files have different formats: {' and '.join(sorted(formats.values()))}",
            hint=_NAME_FORMAT if request.recover else _CHOOSE_FORMAT,
        )
    return next(iter(formats))


def _in_order(checkpoint: Checkpoint) -> list[str]:
    """Names of all tensors, in the order in which files hold them."""
    if isinstance(checkpoint, EditedCheckpoint):
        # As the first of what each is made of stands there.
        places = {name: place for place, name in enumerate(_in_order(checkpoint.base))}
        return sorted(checkpoint.made, key=lambda name: places[checkpoint.made[name].sources[0]])
    if isinstance(checkpoint, FullWeights):
        return checkpoint.order
    found: dict[str, None] = {}
    known: set[int] = set()
    for holder in sorted(checkpoint.indexes):
        tensors = checkpoint.indexes[holder].tensors
        if id(tensors) not in known:
            known.add(id(tensors))
            found.update(dict.fromkeys(tensors))
    return [name for name in found if name in checkpoint.tensors]


def _sizes_of_values(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, int]:
    """Bytes of every value that safetensors can hold."""
    found = {}
    for name in names:
        tensor = checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]
        if tensor.dtype not in NO_ARRAYS:
            found[name] = tensor.nbytes
    return found


def _said_of_training(checkpoint: Checkpoint, handles: FileHandles) -> Mapping[str, Any]:
    """What a checkpoint says of the training that saved it, as common.json does."""
    checkpoint = stored_checkpoint(checkpoint)
    if isinstance(checkpoint, Checkpoint2) and checkpoint.common:
        return checkpoint.common
    said: dict[str, Optional[int]] = {
        name: _integer(checkpoint, name, handles) for name in ("global_step", "epoch_num", "step_num")
    }
    epoch, _, step = (checkpoint.step or "").partition("_")
    if epoch.isdigit() and step.isdigit():
        said["epoch_num"] = said["epoch_num"] if said["epoch_num"] is not None else int(epoch)
        said["step_num"] = said["step_num"] if said["step_num"] is not None else int(step)
    if said["global_step"] is None:
        said["global_step"] = said["step_num"]
    if said["step_num"] is None:
        said["step_num"] = said["global_step"]
    return {**said, "loss_scale": None}


def _integer(checkpoint: Checkpoint, name: str, handles: FileHandles) -> Optional[int]:
    """A value of one integer; None where there is none of this name."""
    for holder in checkpoint.holders(name)[:1]:
        tensor = checkpoint.indexes[holder].tensors[name]
        form = _INTEGERS.get(tensor.dtype)
        if form is None or tensor.nbytes != struct.calcsize(form) or len(tensor.extents) != 1:
            return None
        path = checkpoint.files[holder]
        try:
            with handles.borrow(path) as file:
                return int(struct.unpack(form, read_range(file, *tensor.extents[0]))[0])
        except OSError as error:
            raise reading_error(path, error) from error
    return None
