"""Common states of Megatron, read a second time: arguments, optimizers' groups and steps, from pickles alone.

Written for proof alone: of `reshard.forms.megatron` it has constants only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import StoredObject
from reshard.checkpoints.formats.archives import Archive, is_tensor, plain_tensor
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.pickles import PickledInstance
from reshard.errors import CheckpointError
from reshard.forms.megatron.common import BUILTINS, PACKAGES
from reshard.forms.megatron.form import MODEL_FILE, RANK_DIRECTORY
from reshard.forms.pytorch.dcp import read_metadata
from reshard.forms.pytorch.form import COMMON, METADATA
from reshard.storage import ReadableFile, names_in, read_range, reading, status_at

_NUMBERS = {"Float32": "<f4", "Float64": "<f8", "Int32": "<i4", "Int64": "<i8"}


class Common(NamedTuple):
    """A common state.

    Attributes:
        path: the file that holds it.
        state: all of it.
        args: the arguments of the run by name; empty if there are none.
        optimizers: the state of each optimizer.
        steps: in all of them.
    """

    path: str
    state: Mapping[str, Any]
    args: Mapping[str, Any]
    optimizers: Sequence[Mapping[str, Any]]
    steps: frozenset[int]

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in groups_of(optimizer)]

    @property
    def content(self) -> Mapping[str, Any]:
        content = self.state.get("content_metadata")
        return content if isinstance(content, dict) else {}


def groups_of(optimizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameter groups of an optimizer."""
    inner = optimizer.get("optimizer", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def is_named(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES or name in BUILTINS


@contextlib.contextmanager
def opened(stored: StoredObject, handles: FileHandles) -> Iterator[tuple[Any, Archive, ReadableFile]]:
    """A pickle without its elements, its archive, and the file."""
    with reading(stored.path), contextlib.closing(handles.open_file(stored.path)) as file:
        archive = Archive(file, stored.offset, stored.length)
        yield archive.pickled(is_named), archive, file


def common_in(state: Any, archive: Archive, file: ReadableFile) -> Common:
    """The common state in a pickle, which may hold more."""
    if isinstance(state, list) and len(state) == 1:
        (state,) = state
    if isinstance(state, PickledInstance):
        state = {"args": state}
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path}: holds no common state of Megatron", file=file.path)
    args, several = state.get("args"), state.get("optimizer")
    if isinstance(several, dict) and 0 in several:
        several = [several[number] for number in sorted(several)]
    optimizers = [each for each in (several if isinstance(several, list) else [several]) if isinstance(each, dict)]
    steps = frozenset(_steps(optimizers, archive, file))
    return Common(file.path, state, args.fields if isinstance(args, PickledInstance) else {}, optimizers, steps)


def _steps(value: Any, archive: Archive, file: ReadableFile) -> Iterator[int]:
    """All numbers called step, or tensors of one."""
    if isinstance(value, list):
        for each in value:
            yield from _steps(each, archive, file)
    for key, each in value.items() if isinstance(value, dict) else ():
        if key not in ("step", "common_step"):
            yield from _steps(each, archive, file)
        elif is_tensor(plain_tensor(each)):
            elements = archive.tensor(each)
            data = read_range(file, elements.offset, ITEM_SIZES[elements.dtype])
            yield int(np.frombuffer(data, _NUMBERS[elements.dtype], 1)[0])
        elif type(each) in (int, float):
            yield int(each)


def read_common(stored: StoredObject, handles: FileHandles) -> Common:
    with opened(stored, handles) as (state, archive, file):
        return common_in(state, archive, file)


def common_of(directory: str, handles: FileHandles) -> Common | None:
    """The common state of one iteration of any kind; of a legacy tree that of the first rank. None without any."""
    names = names_in(directory)
    ranks = sorted(filter(RANK_DIRECTORY.fullmatch, names))
    files = [os.path.join(directory, ranks[0], MODEL_FILE)] if ranks else [os.path.join(directory, COMMON)]
    if ranks or COMMON in names:
        stored = stored_file(files[0])
        return None if stored is None else read_common(stored, handles)
    objects = objects_of(directory) if METADATA in names else {}
    held = [each for name, each in objects.items() if name.partition("/")[0] == "common_state"]
    held += [objects["args"]] if "args" in objects else []
    return read_common(held[0], handles) if held else None


def objects_of(directory: str) -> dict[str, StoredObject]:
    """The objects in metadata of a directory, by name."""
    records = read_metadata([os.path.join(directory, METADATA)]).objects.items()
    return {
        name: StoredObject(os.path.join(directory, record.file), record.offset, record.length, True)
        for name, record in records
        if record.length >= 0
    }


def stored_file(path: str) -> StoredObject | None:
    """A file as one object; None if it does not exist."""
    status = status_at(path)
    return None if status is None else StoredObject(path, 0, status.size, True)
