"""The common state of a checkpoint of Megatron: arguments, iteration, the optimizer's groups and step.

It is one dictionary: the file ``common.pt``, the object ``common_state`` in a list since core 0.19, or a part of every
``model_optim_rng.pt`` of a legacy tree. It is read as data: nothing of it is run.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reshard.checkpoints.checkpoint import StoredObject
from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.archives import Archive
from reshard.checkpoints.formats.dtypes import ITEM_SIZES, NUMPY_NAMES
from reshard.checkpoints.formats.pickles import NAMESPACE, PickledInstance
from reshard.checkpoints.placed import Stored
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.forms.megatron.keys import MODEL_FILE, RANK_DIRECTORY
from reshard.forms.pytorch.form import COMMON, ITERATIONS, METADATA
from reshard.forms.recorded import tensor_fault
from reshard.forms.tracker import TRACKER, Iteration
from reshard.storage import ReadableFile, names_in, read_range, reading, status_at
from reshard.text.names import TRAINING_STEP

if TYPE_CHECKING:
    from reshard.forms.pytorch.dcp import Record

OBJECT = "common_state"
"""The name of the object that holds it, before its number."""

ARGS = "args"
"""The key of the arguments in it."""

# Packages that a pickle of the state may name: all of them stand for data, and none is imported.
PACKAGES = frozenset(
    {
        *("argparse", "collections", "copyreg", "datetime", "enum", "pathlib", "signal", "types"),
        *("_codecs", "_io", "io"),
        *("apex", "megatron", "mindspeed", "mindspeed_llm", "nemo", "numpy", "torch", "torch_npu"),
        "transformer_engine",
    }
)
BUILTINS = frozenset(
    f"{module}.{name}"
    for module in ("builtins", "__builtin__")
    for name in ("bytearray", "complex", "dict", "frozenset", "getattr", "set", "slice", "bytes")
)
_STEPS = ("step", "common_step")


def is_named(name: str) -> bool:
    """Whether a pickle of the state may name this class or function, which stays inert."""
    return name.partition(".")[0] in PACKAGES or name in BUILTINS


class Common(NamedTuple):
    """The common state.

    Attributes:
        path: the file that holds it.
        state: all of it, as it was read.
        args: the arguments of the training by name; empty if there are none.
        optimizers: the state of each optimizer that is no tensor, with ``param_groups``.
        steps: the steps of all optimizers, which should be one.
    """

    path: str
    state: Mapping[str, Any]
    args: Mapping[str, Any]
    optimizers: Sequence[Mapping[str, Any]]
    steps: frozenset[int]

    @property
    def iteration(self) -> int | None:
        """The iteration after which it was saved, if it is recorded."""
        number = self.state.get("iteration")
        return number if type(number) is int and number >= 0 else None

    def check_directory(self, iteration: Iteration) -> None:
        """Refuse a directory that is named as another iteration; ones without a number may hold any.

        Raises:
            CheckpointError: the numbers differ.
        """
        if None in (iteration.number, self.iteration) or iteration.number == self.iteration:
            return
        raise CheckpointError(
            f"{self.path}: was saved after iteration {self.iteration}, and lies in {iteration.path}",
            file=self.path,
            hint=f"if its files are of one save, name it {ITERATIONS.of(self.iteration)}, with {self.iteration} in "
            f"{TRACKER} beside it; else copy the save again",
        )

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The parameter groups of all optimizers."""
        found = []
        for optimizer in self.optimizers:
            inner = optimizer.get("optimizer", optimizer)
            groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
            found += [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
        return found

    def with_steps(self, steps: frozenset[int]) -> Common:
        return self._replace(steps=self.steps | steps)

    def step_value(self) -> Stored | None:
        """The step as MindSpore saves it, with its bytes; None if no optimizer records it.

        Raises:
            CheckpointError: the optimizers are at different steps.
        """
        if not self.steps:
            return None
        if len(self.steps) > 1:
            found = " and ".join(map(str, sorted(self.steps)))
            raise tensor_fault(self.path, TRAINING_STEP, f"is not one number: optimizers are at the steps {found}")
        return Stored(TRAINING_STEP, "Int32", (1,), data=np.array([*self.steps], "<i4").tobytes())


def common_of(directory: str, handles: FileHandles, objects: Mapping[str, Record] | None = None) -> Common | None:
    """The common state of the directory of one checkpoint, of any kind; None if it has none.

    In a legacy tree it is that in the file of the first rank.

    Args:
        directory: of the checkpoint.
        handles: open files.
        objects: those of the metadata, if it was read.
    """
    names = names_in(directory)
    ranks = sorted(filter(RANK_DIRECTORY.fullmatch, names))
    stored = None
    if ranks:
        stored = stored_file(os.path.join(directory, ranks[0], MODEL_FILE))
    elif COMMON in names:
        stored = stored_file(os.path.join(directory, COMMON))
    elif METADATA in names:
        if objects is None:
            from reshard.forms.pytorch.dcp import read_metadata

            objects = read_metadata([os.path.join(directory, METADATA)]).objects
        stored = common_object(directory, objects)
        if stored is None and ARGS in objects:
            stored = stored_in(directory, objects[ARGS])
    return None if stored is None else read_common(stored, handles)


def common_object(directory: str, objects: Mapping[str, Record]) -> StoredObject | None:
    """The object among those of metadata that is the common state, where it has no file of its own."""
    for name, record in objects.items():
        if name.partition("/")[0] == OBJECT and record.length >= 0:
            return stored_in(directory, record)
    return None


def stored_in(directory: str, record: Record) -> StoredObject:
    return StoredObject(os.path.join(directory, record.file), record.offset, record.length, True)


def stored_file(path: str) -> StoredObject | None:
    """A file as one object; None if it does not exist."""
    status = status_at(path)
    return None if status is None else StoredObject(path, 0, status.size, True)


@contextlib.contextmanager
def opened(stored: StoredObject, handles: FileHandles) -> Iterator[tuple[Any, Archive, ReadableFile]]:
    """An object without its elements, the archive that it is in, and the file."""
    with reading(stored.path), contextlib.closing(handles.open_file(stored.path)) as file:
        archive = Archive(file, stored.offset, stored.length)
        yield archive.pickled(is_named), archive, file


def steps_of(stored: StoredObject, handles: FileHandles) -> frozenset[int]:
    """The steps in an object of an optimizer's state."""
    with opened(stored, handles) as (state, archive, file):
        return steps_in(state, archive, file)


def read_common(stored: StoredObject, handles: FileHandles) -> Common:
    """The common state that a file or a record holds.

    Raises:
        CheckpointError: it is damaged, or something else.
    """
    with opened(stored, handles) as (state, archive, file):
        # Objects are lists of one; a plain distributed checkpoint has the arguments as an object of their own.
        if isinstance(state, list) and len(state) == 1:
            state = state[0]
        if isinstance(state, PickledInstance):
            state = {ARGS: state}
        return common_in(state, archive, file)


def common_in(state: Any, archive: Archive, file: ReadableFile) -> Common:
    """The common state of a dictionary that an archive in a file holds, which may have more in it."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path}: holds no common state of Megatron", file=file.path)
    args = state.get(ARGS)
    optimizers = _each_optimizer(state.get("optimizer"))
    return Common(
        file.path,
        state,
        args.fields if isinstance(args, PickledInstance) and args.name == NAMESPACE else {},
        optimizers,
        steps_in(optimizers, archive, file),
    )


def _each_optimizer(value: Any) -> list[Mapping[str, Any]]:
    """The states of optimizers: of one, or of several as a list or numbered."""
    if isinstance(value, dict) and value and all(type(key) is int for key in value):
        value = [value[number] for number in sorted(value)]
    if not isinstance(value, (list, tuple)):
        value = [value]
    return [each for each in value if isinstance(each, dict)]


def steps_in(value: Any, archive: Archive, file: ReadableFile) -> frozenset[int]:
    """All steps in a nested state: numbers, or tensors of one element in the archive."""
    found = set()
    for each in _under(value):
        number = _number(each, archive, file)
        if number is None:
            continue
        if not 0 <= number < 1 << 31 or number != int(number):
            raise CheckpointError(f"{file.path}: the step {number} of an optimizer is no count", file=file.path)
        found.add(int(number))
    return frozenset(found)


def _under(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key in _STEPS:
                yield each
            else:
                yield from _under(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _under(each)


def _number(value: Any, archive: Archive, file: ReadableFile) -> float | None:
    """A number, or that in a tensor of one element; None for anything else."""
    if isinstance(value, (int, float)):
        return None if isinstance(value, bool) or math.isnan(value) else value
    if not isinstance(value, PickledInstance):
        return None
    elements = archive.tensor(value)
    numpy = NUMPY_NAMES.get(elements.dtype)
    if math.prod(elements.shape) != 1 or numpy is None:
        return None
    data = read_range(file, elements.offset, ITEM_SIZES[elements.dtype])
    number = float(np.frombuffer(data[: ITEM_SIZES[elements.dtype]], numpy)[0])
    if math.isnan(number):
        raise DamagedCheckpointError(f"{file.path}: the step of an optimizer is no number", file=file.path)
    return number
