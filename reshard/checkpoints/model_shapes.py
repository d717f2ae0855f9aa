"""The full shapes of a model's tensors, from whatever tells them: checkpoints, indexes of them, JSON strategies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Optional

from reshard.checkpoints import CheckpointIndex, FileHandles, Tensor, find_checkpoints, read_index
from reshard.checkpoints.formats.dtypes import ITEM_SIZES, NO_ARRAYS
from reshard.checkpoints.full.weight_map import INDEX_ENDING, UNIFIED_MAP
from reshard.errors import CheckpointError, LayoutError, StrategyError
from reshard.storage import UnfitError, is_directory, names_in, read_small
from reshard.storage.json_text import Fields, JsonError, parse_json
from reshard.strategies import Stage, Strategy, read_strategy
from reshard.strategies.one_file import read_error
from reshard.strategies.rules import FullTensor, ModelTensors, model_tensors
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.text.wording import quoted, rank_ranges

_LARGEST_INDEX = 1 << 26
_WANTED = (
    "pass an unsharded checkpoint, its index or param_name_map.json, a JSON strategy with shapes, "
    "or rank directories with the strategy they were saved with"
)


def read_shapes(path: str, strategy: Optional[Strategy], handles: FileHandles) -> ModelTensors:
    """The tensors of a model.

    Args:
        path: an unsharded checkpoint; an index or map of several files, or their directory; a JSON strategy; or rank
            directories.
        strategy: the strategy that rank directories were saved with.
        handles: where files are borrowed from.

    Raises:
        ReshardError: nothing there, or nothing that tells full shapes.
    """
    if is_directory(path):
        tensors = _of_directory(path, strategy, handles)
    elif path.endswith(".json"):
        tensors = _of_json(path, handles)
    elif "{rank}" in path and strategy is not None:
        tensors = _of_ranks(path, strategy, handles)
    else:
        tensors = _of_index(read_index(handles, path))
    found = list(tensors)
    if not found:
        raise CheckpointError(f"{path}: holds no tensors", file=path, hint=_WANTED)
    return model_tensors(path, found, ITEM_SIZES)


def _of_directory(path: str, strategy: Optional[Strategy], handles: FileHandles) -> Iterable[FullTensor]:
    names = names_in(path)
    maps = [name for name in names if name == UNIFIED_MAP or name.endswith(INDEX_ENDING)]
    if len(maps) > 1:
        raise CheckpointError(
            f"{path}: holds {' and '.join(sorted(maps))}", file=path, hint="pass the one that is meant"
        )
    if maps:
        return _of_json(os.path.join(path, maps[0]), handles)
    whole = sorted(name for name in names if name.endswith(".safetensors"))
    if whole:
        return [tensor for name in whole for tensor in _of_index(read_index(handles, os.path.join(path, name)))]
    if strategy is None:
        raise CheckpointError(
            f"{path}: no file of full tensors, and ranks hold slices",
            file=path,
            hint="pass the strategy that it was saved with: --src-strategy S",
        )
    return _of_ranks(path, strategy, handles)


def _of_index(index: CheckpointIndex) -> Iterator[FullTensor]:
    for tensor in index.tensors.values():
        if not _is_value(tensor):
            yield FullTensor(tensor.name, tensor.shape, tensor.dtype)


def _is_value(tensor: Tensor) -> bool:
    """Whether a tensor is none that strategies list: counters, learning rates, text."""
    return tensor.is_value or tensor.dtype in NO_ARRAYS


def _of_json(path: str, handles: FileHandles) -> Iterable[FullTensor]:
    try:
        content = parse_json(read_small(path, _LARGEST_INDEX))
    except (JsonError, UnfitError) as error:
        raise CheckpointError(f"{path}: {error}", file=path, hint=_WANTED) from error
    except OSError as error:
        raise read_error(path, error) from error
    if isinstance(content, dict) and "weight_map" in content:
        try:
            files = Fields(content["weight_map"], "weight_map")
            wanted = {name: files.text(name) for name in files}
        except JsonError as error:
            raise CheckpointError(f"{path}: {error}", file=path) from error
        return _of_files(path, wanted, handles)
    if isinstance(content, dict) and "parallel_layout_item" in content:
        return _of_strategy(read_strategy(path))
    raise CheckpointError(f"{path}: is no index of a checkpoint, nor a strategy", file=path, hint=_WANTED)


def _of_files(path: str, wanted: dict[str, str], handles: FileHandles) -> Iterator[FullTensor]:
    """The tensors that an index names, from the headers of the files that it names."""
    directory = os.path.dirname(path)
    for file in dict.fromkeys(wanted.values()):
        if os.path.basename(file) != file:
            raise CheckpointError(f"{path}: names {quoted(file)}, which is no file beside it", file=path)
        index = read_index(handles, os.path.join(directory, file))
        for tensor in _of_index(index):
            if wanted.get(tensor.name) == file:
                yield tensor
        missing = next((name for name, of in wanted.items() if of == file and name not in index.tensors), None)
        if missing is not None:
            raise CheckpointError(f"{path}: {quoted(missing)} is not in {file}", file=path, parameter=missing)


def strategy_shapes(strategy: Strategy) -> Optional[ModelTensors]:
    """The tensors of a strategy that records their shapes, as JSON does; None where one lacks its shape."""
    if any(layout.recorded_shape is None for stage in strategy.stages for layout in stage.layouts.values()):
        return None
    return model_tensors(strategy.path, _of_strategy(strategy), ITEM_SIZES)


def _of_strategy(strategy: Strategy) -> Iterator[FullTensor]:
    seen: dict[str, tuple[int, ...]] = {}
    for stage in strategy.stages:
        for name, layout in stage.layouts.items():
            shapes = {
                (sum(one.uneven), *shape[1:]) if one.uneven and shape else shape
                for one in layout.regroupings()
                for shape in [one.recorded_shape]
            }
            shape = shapes.pop() if len(shapes) == 1 else None
            if shape is None:
                raise StrategyError(
                    f"{strategy.path}: the shape of {quoted(name)} is not recorded, or can be read in several ways",
                    file=strategy.path,
                    parameter=name,
                    hint="pass --shapes with a checkpoint",
                )
            if seen.setdefault(name, shape) != shape:
                raise StrategyError(
                    f"{strategy.path}: {quoted(name)} has several shapes", file=strategy.path, parameter=name
                )
    yield from (FullTensor(name, shape) for name, shape in seen.items())


def _of_ranks(path: str, strategy: Strategy, handles: FileHandles) -> Iterator[FullTensor]:
    """The full tensors of which ranks hold slices; every stage's files are read until all its parameters are found."""
    if strategy.is_none:
        raise CheckpointError(
            f"{path}: none has no ranks' slices", file=path, hint="pass the strategy that it was saved with"
        )
    tree = find_checkpoints(path, None)
    step = next(iter(tree.candidates("latest")), None)
    if step is None:
        raise CheckpointError(f"{path}: holds no checkpoints", file=path)
    seen: dict[str, tuple[tuple[int, ...], str]] = {}
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
                found = _full(path, stage, name, tensor), tensor.dtype
                if seen.setdefault(name, found) != found:
                    raise CheckpointError(f"{path}: {quoted(name)} has several shapes", file=path, parameter=name)
            if not missing:
                break
    yield from (FullTensor(name, shape, dtype) for name, (shape, dtype) in seen.items())


def _full(path: str, stage: Stage, name: str, tensor: Tensor) -> tuple[int, ...]:
    try:
        for layout in stage.layouts[name].regroupings():
            if len(layout.cuts) == len(tensor.shape):
                return layout.full_shape(tensor.shape)
        return stage.layouts[name].full_shape(tensor.shape)
    except LayoutError as error:
        raise CheckpointError(
            f"{path}: {quoted(name)}: {error.message}", file=path, parameter=name, hint="pass the right --src-strategy"
        ) from error
