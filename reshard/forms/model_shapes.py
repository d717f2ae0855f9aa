"""The full shapes of a model's tensors, from checkpoints, their indexes, or JSON strategies."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator

from reshard.asked import Source
from reshard.checkpoints import CheckpointIndex, FileHandles, Tensor, read_index
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.checkpoints.formats.dtypes import ITEM_SIZES, NO_ARRAYS
from reshard.errors import CheckpointError, LayoutError, StrategyError
from reshard.forms.ranks.naming import RANK
from reshard.forms.ranks.tree import find_checkpoints
from reshard.forms.recorded import RecordedCheckpoint
from reshard.forms.registry import form_of
from reshard.forms.request import Means, Request
from reshard.storage import is_directory
from reshard.strategies import Stage, Strategy, read_strategy
from reshard.strategies.rules import FullTensor, ModelTensors, model_tensors
from reshard.text.messages import quoted, rank_ranges
from reshard.text.names import ACCUMULATED_GRADIENTS

_HINT = (
    "pass an unsharded checkpoint, a Hugging Face directory or its index, a JSON strategy with shapes, "
    "or rank directories with the strategy they were saved with"
)


def read_shapes(path: str, strategy: Strategy | None, means: Means) -> Checkpoint:
    """The tensors of a model, whole; the files of rank directories, of an index or of a strategy are not in it.

    Args:
        path: an unsharded checkpoint; a checkpoint of another form than rank directories, or the index of one; a JSON
            strategy; or rank directories.
        strategy: the strategy that rank directories were saved with.
        means: open files and the report.
    """
    form = form_of(path)
    if not form.options.needs_strategy:
        checkpoint = form.read(Request.of_source(Source(path), form)._replace(partial=True), means)
    else:
        if path.endswith(".json"):
            tensors: Iterable[FullTensor] = _of_strategy(read_strategy(path))
        elif RANK in path or is_directory(path):
            tensors = _of_ranks(path, strategy, means.handles)
        else:
            tensors = _of_index(read_index(means.handles, path))
        checkpoint = RecordedCheckpoint(form.name, path, {}, {}, {each.name: _whole(each) for each in tensors})
    if not checkpoint.tensors:
        raise CheckpointError(f"{path}: holds no tensors", file=path, hint=_HINT)
    return checkpoint


def _whole(tensor: FullTensor) -> GlobalTensor:
    # A strategy records no type.
    dtype = tensor.dtype or ""
    return GlobalTensor(tensor.name, dtype, ITEM_SIZES.get(dtype, 0), tensor.shape, ())


def _of_index(index: CheckpointIndex) -> Iterator[FullTensor]:
    for tensor in index.tensors.values():
        if not _is_value(tensor):
            yield FullTensor(tensor.name, tensor.shape, tensor.dtype)


def _is_value(tensor: Tensor) -> bool:
    """Whether a tensor is a counter, learning rate or text, which strategies do not list."""
    return tensor.is_value or tensor.dtype in NO_ARRAYS


def strategy_shapes(strategy: Strategy) -> ModelTensors | None:
    """The tensors of a strategy that records all shapes, as JSON does; else None."""
    if any(layout.recorded_shape is None for stage in strategy.stages for layout in stage.layouts.values()):
        return None
    return model_tensors(strategy.path, _of_strategy(strategy), ITEM_SIZES)


def _of_strategy(strategy: Strategy) -> Iterator[FullTensor]:
    shape_of: dict[str, tuple[int, ...]] = {}
    for stage in strategy.stages:
        for name, layout in stage.layouts.items():
            shapes = {
                (sum(grouping.uneven), *shape[1:]) if grouping.uneven and shape else shape
                for grouping in layout.regroupings()
                for shape in [grouping.recorded_shape]
            }
            shape = shapes.pop() if len(shapes) == 1 else None
            if shape is None:
                raise StrategyError(
                    f"{strategy.path}: the shape of {quoted(name)} is not recorded, or can be read in several ways",
                    file=strategy.path,
                    parameter=name,
                    hint="pass --shapes with a checkpoint",
                )
            if shape_of.setdefault(name, shape) != shape:
                raise StrategyError(
                    f"{strategy.path}: {quoted(name)} has several shapes", file=strategy.path, parameter=name
                )
    yield from (FullTensor(name, shape) for name, shape in shape_of.items())


def _of_ranks(path: str, strategy: Strategy | None, handles: FileHandles) -> Iterator[FullTensor]:
    """The full tensors of ranks' slices; reads each stage's files until all its parameters are found."""
    if strategy is None:
        raise CheckpointError(
            f"{path}: no file of full tensors, and ranks hold slices",
            file=path,
            hint="pass the strategy that it was saved with, --src-strategy S, or the file itself",
        )
    step = find_checkpoints(path).newest()
    if list(step.files) == [0] and RANK not in path:
        file = step.files[0]
        if strategy.is_none:
            yield from _of_index(read_index(handles, file))
            return
        if strategy.device_count > 1:
            directory = os.path.basename(os.path.dirname(file))
            pattern = os.path.join(path, re.sub("0$", RANK, directory), "*")
            raise CheckpointError(
                f"{path}: only rank 0 exists, of {strategy.device_count} in {strategy.path}: its file may hold "
                "slices, or full tensors as an unsharded checkpoint does",
                file=file,
                rank=0,
                hint=f"for full tensors, type --shapes {shlex.quote(file)}; "
                f"for slices, --shapes {shlex.quote(pattern)}",
            )
    if strategy.is_none:
        raise CheckpointError(
            f"{path}: none has no ranks' slices", file=path, hint="pass the strategy that it was saved with"
        )
    descriptions: dict[str, tuple[tuple[int, ...], str]] = {}
    for stage in strategy.stages:
        ranks = [rank for rank in sorted(step.files) if rank in stage.ranks]
        if not ranks:
            raise CheckpointError(f"{path}: no file of {rank_ranges(stage.ranks)}", file=path)
        missing = {name for name in stage.layouts if not name.startswith(ACCUMULATED_GRADIENTS)}
        for rank in ranks:
            index = read_index(handles, step.files[rank])
            for name in [name for name in stage.layouts if name in missing and name in index.tensors]:
                missing.discard(name)
                tensor = index.tensors[name]
                description = _full(path, stage, name, tensor), tensor.dtype
                if descriptions.setdefault(name, description) != description:
                    raise CheckpointError(f"{path}: {quoted(name)} has several shapes", file=path, parameter=name)
            if not missing:
                break
    yield from (FullTensor(name, shape, dtype) for name, (shape, dtype) in descriptions.items())


def _full(path: str, stage: Stage, name: str, tensor: Tensor) -> tuple[int, ...]:
    try:
        for layout in stage.layouts[name].regroupings():
            if len(layout.cuts) == len(tensor.shape):
                shape = layout.full_shape(tensor.shape)
                if layout.recorded_shape in (None, shape):
                    return shape
        shape = stage.layouts[name].full_shape(tensor.shape)
        recorded = list(stage.layouts[name].recorded_shape or ())
        raise LayoutError(f"slices of shape {list(tensor.shape)} make {list(shape)}, the strategy records {recorded}")
    except LayoutError as error:
        raise CheckpointError(
            f"{path}: {quoted(name)}: {error.message}",
            file=path,
            parameter=name,
            hint="pass the strategy that the files were saved with; where they hold full tensors, name one file",
        ) from error
