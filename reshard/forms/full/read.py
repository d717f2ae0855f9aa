"""Reading directories of full weights, from headers alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Optional

from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.checkpoints.name_order import natural_order
from reshard.errors import CheckpointError
from reshard.forms.full.contents import Contents, FullWeights
from reshard.forms.full.directory import (
    HUGGINGFACE,
    HYPER_PARAMETERS,
    NUMBERED,
    PART,
    SINGLE,
    UNIFIED,
    UNIFIED_MAP,
    files_without_index,
    index_in,
    others_in,
    read_weight_map,
    say_unread,
)
from reshard.forms.hf_sharded.headers import INFO, entries_of
from reshard.storage import is_directory, names_in
from reshard.text.messages import listing
from reshard.text.report import Report


def read_unified(
    path: str, handles: FileHandles, report: Report, damaged: Mapping[str, str] = MappingProxyType({})
) -> FullWeights:
    """Read what a directory of MindSpore's unified weights holds, from headers alone.

    Args:
        path: the directory, or the map in it.
        handles: where to borrow files from.
        report: told of what is left out.
        damaged: why files cannot be used, where that is known, by path.

    Raises:
        CheckpointError: files are missing or damaged, or do not hold what the map says.
        RetryableError: reading failed in a way that may pass.
    """
    directory = path if is_directory(path) else os.path.dirname(path) or os.curdir
    names = names_in(directory)
    map_path = os.path.join(directory, UNIFIED_MAP)
    if UNIFIED_MAP not in names:
        raise CheckpointError(
            f"{directory}: has no {UNIFIED_MAP}, which says what is in which file",
            file=directory,
            hint=f"bring {UNIFIED_MAP} from where these files were written, or give one file alone as SRC",
        )
    weight_map = read_weight_map(map_path)
    files = natural_order(set(weight_map.values()))
    hyper_parameters = [HYPER_PARAMETERS] if HYPER_PARAMETERS in names and HYPER_PARAMETERS not in files else []
    contents = Contents.read(directory, [*files, *hyper_parameters], handles, damaged)
    scalars = {name: len(files) for _ in hyper_parameters for name in _scalars(contents.indexes[len(files)], report)}
    say_unread(directory, names, files, PART, map_path, report)
    contents.check(map_path, weight_map, len(files), scalars, report)
    tensors, values = contents.tensors(len(files))
    return FullWeights(UNIFIED, directory, contents.paths, contents.indexes, tensors, {**values, **scalars})


def read_huggingface(
    path: str, handles: FileHandles, report: Report, damaged: Mapping[str, str] = MappingProxyType({})
) -> FullWeights:
    """Read what a directory of Hugging Face's weights holds, from headers alone.

    Args:
        path: the directory, or the index in it where it has several.
        handles: where to borrow files from.
        report: told of what is not read.
        damaged: why files cannot be used, where that is known, by path.

    Raises:
        CheckpointError: files are missing or damaged, or do not hold what the index says; it is not clear
            which files are meant.
        RetryableError: reading failed in a way that may pass.
    """
    directory = path if is_directory(path) else os.path.dirname(path) or os.curdir
    names = names_in(directory)
    index_path = path if directory != path else index_in(directory, names)
    weight_map: Optional[dict[str, str]] = None
    if index_path is None:
        files = files_without_index(directory, names, report)
    else:
        weight_map = read_weight_map(index_path)
        files = natural_order(set(weight_map.values()))
        if directory == path and SINGLE in names and SINGLE not in files:
            raise CheckpointError(
                f"{directory}: holds {SINGLE} and an index that does not name it, so that it is two models",
                file=directory,
                hint=f"give {index_path} or {os.path.join(directory, SINGLE)} as SRC",
            )
    contents = Contents.read(directory, files, handles, damaged)
    _check_whole(contents)
    say_unread(directory, names, files, NUMBERED, index_path, report)
    contents.check(index_path or directory, weight_map, len(files), {}, report)
    tensors, values = contents.tensors(len(files))
    others = others_in(directory, names, files)
    return FullWeights(HUGGINGFACE, directory, contents.paths, contents.indexes, tensors, values, others)


def _check_whole(contents: Contents) -> None:
    """Refuse files of which some are parts of tensors, whatever they are called.

    Raises:
        CheckpointError: a header places its tensors in larger ones.
    """
    known: dict[str, bool] = {}
    for index in contents.indexes.values():
        text = index.metadata.get(INFO)
        if text is None:
            continue
        if text not in known:
            known[text] = all(entry.whole for entry, _ in entries_of(index))
        if not known[text]:
            raise CheckpointError(
                f"{index.path}: holds parts of tensors, by {INFO} in its header",
                file=index.path,
                hint="give its files the names that torch gave them, shard-00001-model-00001-of-00001.safetensors and "
                "so on, and the directory as SRC",
            )


def _scalars(index: CheckpointIndex, report: Report) -> list[str]:
    """What can be read of the file of hyper-parameters."""
    taken = [name for name, tensor in index.tensors.items() if _is_whole(tensor)]
    left = [name for name in index.tensors if name not in set(taken)]
    if left:
        report.warn(
            f"{index.path}: left out, because it may hold only what rank 0 had of "
            f"{'it' if len(left) == 1 else 'them'}: " + listing(left)
        )
    return taken


def _is_whole(tensor: Tensor) -> bool:
    """Whether an entry is certainly no slice: one of shape [1] may be one, such as an expert's bias."""
    return tensor.shape == () or (math.prod(tensor.shape) == 1 and tensor.is_value)
