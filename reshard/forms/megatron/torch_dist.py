"""Reading ``torch_dist`` directories of Megatron-Core: weights under their keys, optimizer state in their shapes.

However the optimizer was saved, its state gets the names ``optimizer.state.exp_avg.KEY``, ``exp_avg_sq`` and
``fp32_param`` (or ``param``) of the weight KEY, and the shape of that weight. What metadata describes is changed before
files are placed, so all else reads chunks of ordinary tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.checkpoints import FileHandles
from reshard.errors import CheckpointError
from reshard.forms.megatron.blocks import unblock
from reshard.forms.megatron.bucket_state import name_state
from reshard.forms.megatron.common import Common, common_object, common_of, steps_of, stored_in
from reshard.forms.megatron.keys import EMBEDDING, OUTPUT, STATE, TORCH_DIST, weight_of
from reshard.forms.megatron.proofs import CURE, MASTERS, proofs, refuse_unproved
from reshard.forms.pytorch.dcp import ReadMetadata, StoredValue, checkpoint_of, incomplete, read_metadata
from reshard.forms.pytorch.form import BACKEND, COMMON, METADATA
from reshard.forms.recorded import ChunkedCheckpoint
from reshard.forms.request import Means, Request
from reshard.forms.tracker import Iteration
from reshard.storage import names_in, read_small, reading
from reshard.text.messages import quoted
from reshard.text.names import TRAINING_STEP

_MTP = "mtp."
_CHAINED = re.compile(r"chained_[0-9]+\.")
_OF_OPTIMIZER = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_[0-9]+\.optimizer/")
_MOST_BACKEND = 1 << 20
# With these, weights are no casts of masters: quantised ones are saved as numbers again, and Transformer Engine
# rounds halves up where it stores the lower 16 bits of masters only.
_OTHER_MASTERS = ("fp8_param_gather", "fp4_param_gather", "use_precision_aware_optimizer")


def read_torch_dist(form: str, iteration: Iteration, request: Request, means: Means) -> ChunkedCheckpoint:
    """Read a directory, from metadata and its common state alone."""
    directory = iteration.path
    names = names_in(directory)
    if not is_complete(directory, names):
        return read_plain(form, iteration, request, means)
    metadata = read_metadata([os.path.join(directory, METADATA)])
    common = _common_of(directory, metadata, means.handles)
    if common is not None:
        common.check_directory(iteration)
    _name_plainly(directory, metadata)
    args: Mapping[str, Any] = {} if common is None else common.args
    # The values of masters prove the places of blocks, too; those of transposed ones have to be there.
    blocks = {name for name in metadata.flattened if name.startswith(MASTERS)}
    to_prove = blocks | unblock(directory, metadata) | name_state(directory, metadata, args, means.handles)
    _check_shapes(directory, metadata)
    checkpoint = checkpoint_of(form, iteration, metadata, request, means, _step(metadata, common))
    if OUTPUT not in metadata.tensors or any(name.startswith(_MTP) for name in metadata.tensors):
        # Stages share the embedding, whose state Megatron 0.16.1 writes wrong at some sizes.
        to_prove |= {f"{before}{EMBEDDING}" for before in MASTERS} & metadata.tensors.keys()
    checkpoint.tied = proofs(checkpoint, to_prove, not any(map(args.get, _OTHER_MASTERS)))
    refuse_unproved(checkpoint, to_prove)
    checkpoint.check(request.required)
    return checkpoint


def read_plain(form: str, iteration: Iteration, request: Request, means: Means) -> ChunkedCheckpoint:
    """Read a directory of torch alone, in a root of Megatron: ``fsdp_dtensor`` and ``torch_dcp``."""
    directory = iteration.path
    if METADATA not in names_in(directory):
        raise _incomplete(directory, METADATA)
    metadata = read_metadata([os.path.join(directory, METADATA)])
    if metadata.flattened or common_object(directory, metadata.objects) is not None:
        raise _incomplete(directory, BACKEND)
    checkpoint = checkpoint_of(form, iteration, metadata, request, means)
    checkpoint.check(request.required)
    return checkpoint


def _incomplete(directory: str, missing: str) -> CheckpointError:
    return incomplete(directory, missing, f"{missing}, which is written last, is missing")


def is_complete(directory: str, names: Sequence[str]) -> bool:
    """Whether a directory is complete; False where ``metadata.json`` is no file of Megatron.

    Raises:
        CheckpointError: ``metadata.json``, which is written last, is missing, damaged, or names another backend.
    """
    path = os.path.join(directory, BACKEND)
    if BACKEND not in names:
        raise _incomplete(directory, BACKEND)
    with reading(path):
        data = read_small(path, _MOST_BACKEND)
    try:
        backend = json.loads(data)["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        if COMMON not in names:
            # Any program may write a file of this name beside a distributed checkpoint.
            return False
        raise CheckpointError(f"{path}: does not name a sharded_backend", file=path) from None
    if backend != TORCH_DIST:
        raise CheckpointError(
            f"{path}: the checkpoint is of the backend {quoted(str(backend))}, and only {TORCH_DIST} is read",
            file=path,
            hint="load it with the Megatron that saved it, and save it with --ckpt-format torch_dist",
        )
    if METADATA not in names:
        raise _incomplete(directory, METADATA)
    return True


def _common_of(directory: str, metadata: ReadMetadata, handles: FileHandles) -> Common | None:
    """The common state, with the steps that objects of a distributed optimizer record."""
    common = common_of(directory, handles, metadata.objects)
    if common is None:
        return None
    found: set[int] = set()
    for name, record in metadata.objects.items():
        if _OF_OPTIMIZER.match(name) and record.length >= 0:
            found |= steps_of(stored_in(directory, record), handles)
    return common.with_steps(frozenset(found))


def _name_plainly(directory: str, metadata: ReadMetadata) -> None:
    """Remove the numbers of optimizers before names of states: the weights of two optimizers differ."""
    for name in [*metadata.tensors]:
        match = _CHAINED.match(name)
        if match is None or not name.startswith(STATE, match.end()):
            continue
        plain = name[match.end() :]
        if plain in metadata.tensors:
            metadata.fault(directory, plain, "is state of two optimizers")
            continue
        metadata.tensors[plain] = metadata.tensors.pop(name)
        if name in metadata.faults:
            metadata.faults[plain] = metadata.faults.pop(name)
        if name in metadata.flattened:
            metadata.flattened[plain] = metadata.flattened.pop(name)


def _check_shapes(directory: str, metadata: ReadMetadata) -> None:
    """Make state whose shape is not that of its weight unreadable."""
    for name, tensor in metadata.tensors.items():
        weight = metadata.tensors.get(weight_of(name))
        if weight is not None and weight.shape != tensor.shape and math.prod(tensor.shape) != 1:
            problem = f"has the shape {list(tensor.shape)}, and its weight {list(weight.shape)}"
            metadata.fault(directory, name, problem, CURE)


def _step(metadata: ReadMetadata, common: Common | None) -> list[StoredValue]:
    """The step as a value, beside state of an optimizer."""
    if common is None or TRAINING_STEP in metadata.tensors or not any(map(weight_of, metadata.tensors)):
        return []
    try:
        value = common.step_value()
    except CheckpointError as error:
        metadata.faults[TRAINING_STEP] = error
        return []
    return [] if value is None else [StoredValue(common.path, value)]
