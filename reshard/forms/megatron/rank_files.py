"""Files of a rank in a legacy tree of Megatron, from their pickles alone."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import Archive, Elements, is_tensor, plain_tensor
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError
from reshard.forms.megatron.common import Common, common_in, is_named
from reshard.forms.megatron.legacy_state import JoinedBuffer, Plain, flat_buffers, groups_of
from reshard.forms.megatron.placing import Rank
from reshard.forms.recorded import ProblemError
from reshard.storage import ReadableFile, reading, status_at

HINT = "copy the checkpoint again, or take another step"
OPTIMIZER_FILE = "distrib_optim.pt"
_T = TypeVar("_T")
_KEPT = ("checkpoint_version", "iteration", "args")


class OptimizerFile(NamedTuple):
    """The state of an optimizer in the files of a rank.

    Attributes:
        path: the file that holds it.
        size: bytes of that.
        groups: of each plain optimizer.
        flats: the buffers of each distributed optimizer, None for those of other ranks; empty for plain ones.
        saved: some state was saved, in this file or another.
        problem: the file is missing or damaged.
        refusal: why the state is not read.
    """

    path: str = ""
    size: int = 0
    groups: Sequence[Sequence[Plain]] = ()
    flats: Sequence[Sequence[JoinedBuffer] | None] = ()
    saved: bool = False
    problem: InputError | None = None
    refusal: str | None = None


class RankFile(NamedTuple):
    """What the file of a rank holds.

    Attributes:
        path: its path.
        size: its bytes.
        models: per chunk of the model its tensors by live name, in their order.
        others: live names of entries that are no tensors, each with what it is.
        common: its common state.
        optimizer: the state of its optimizer.
        rank: the rank, by the name of its directory among all of them.
    """

    path: str
    size: int
    models: Sequence[Mapping[str, Elements]]
    others: Mapping[str, str]
    common: Common
    optimizer: OptimizerFile
    rank: Rank = Rank(0)


def read_file(path: str, damaged: Mapping[str, str], handles: FileHandles) -> RankFile | InputError:
    """The contents of a file; an error if it is missing or damaged."""

    def content(archive: Archive, file: ReadableFile) -> RankFile:
        state = archive.pickled(is_named)
        if not isinstance(state, dict):
            raise DamagedCheckpointError(f"{path}: holds no dictionary", file=path)
        models, others = _models(archive, state)
        if not models:
            raise DamagedCheckpointError(f"{path}: holds no model", file=path)
        common, size = common_in(state, archive, file), file.size()
        optimizer = _plain_optimizer(path, size, archive, common.optimizers)
        # There are as many files as ranks: the rest of their states is not kept.
        common = common._replace(state={key: common.state.get(key) for key in _KEPT}, optimizers=())
        return RankFile(path, size, models, others, common, optimizer)

    read = _read(path, damaged, handles, content)
    if isinstance(read, InputError):
        return read
    optimizer = read.optimizer
    if optimizer.saved and not optimizer.groups and optimizer.refusal is None:
        optimizer = _distributed_optimizer(os.path.join(os.path.dirname(path), OPTIMIZER_FILE), damaged, handles)
    return read._replace(optimizer=optimizer)


def _read(
    path: str, damaged: Mapping[str, str], handles: FileHandles, content: Callable[[Archive, ReadableFile], _T]
) -> _T | InputError:
    """The content of a file; an error if it is missing or damaged."""
    if path in damaged:
        return DamagedCheckpointError(damaged[path], file=path, hint=HINT)
    if status_at(path) is None:
        return CheckpointError(f"{path}: does not exist", file=path, hint=HINT)
    with reading(path), contextlib.closing(handles.open_file(path)) as file:
        try:
            return content(Archive(file, 0, file.size()), file)
        except DamagedCheckpointError as error:
            return DamagedCheckpointError(error.message, file=path, hint=HINT)


def _plain_optimizer(path: str, size: int, archive: Archive, optimizers: Sequence[Mapping[str, Any]]) -> OptimizerFile:
    """The state of optimizers that are not distributed."""
    try:
        groups = [groups_of(archive, each) for each in optimizers]
    except ProblemError as error:
        return OptimizerFile(path, size, saved=True, refusal=str(error))
    return OptimizerFile(path, size, groups if any(groups) else (), saved=bool(optimizers))


def _distributed_optimizer(path: str, damaged: Mapping[str, str], handles: FileHandles) -> OptimizerFile:
    """The state of distributed optimizers, from a file of its own."""

    def content(archive: Archive, file: ReadableFile) -> OptimizerFile:
        try:
            flats = flat_buffers(archive, archive.pickled(is_named))
        except ProblemError as error:
            return OptimizerFile(path, file.size(), saved=True, refusal=str(error))
        return OptimizerFile(path, file.size(), flats=flats, saved=True)

    read = _read(path, damaged, handles, content)
    return OptimizerFile(path, saved=True, problem=read) if isinstance(read, InputError) else read


def _models(archive: Archive, state: Mapping[Any, Any]) -> tuple[list[dict[str, Elements]], dict[str, str]]:
    """The tensors of every chunk of the model, and entries that are none."""
    keys = (
        ["model"] if "model" in state else [*itertools.takewhile(state.__contains__, map("model{}".format, range(999)))]
    )
    models: list[dict[str, Elements]] = []
    others: dict[str, str] = {}
    for key in keys:
        model: dict[str, Elements] = {}
        entries = state[key] if isinstance(state[key], dict) else {}
        for name, value in entries.items():
            if not isinstance(name, str) or name.endswith("_extra_state"):
                continue
            value = plain_tensor(value)
            if is_tensor(value):
                model[name] = archive.tensor(value)
            else:
                others[name] = f"is a {getattr(value, 'name', '') or type(value).__name__}, which is not read"
        models.append(model)
    return models, others
