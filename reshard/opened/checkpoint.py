"""An opened checkpoint: a mapping of tensors, from a plan with one file, that are read when they are indexed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.asked import cpus_of
from reshard.checkpoints import FileHandles, Tensor
from reshard.checkpoints.checkpoint import tied_among
from reshard.checkpoints.formats.pickles import NotPlain
from reshard.errors import CheckpointError
from reshard.execute.budget import Budget, source_costs
from reshard.execute.casts import Overflowed
from reshard.execute.equal import check_equal
from reshard.execute.reader import BoxReader, in_order
from reshard.forms.objects import shown_object
from reshard.forms.request import Means, Request
from reshard.layout import Box, shape_of, whole_box
from reshard.opened.tensor import LazyTensor
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor, TargetTensors, TensorKind
from reshard.plan.plan import Plan
from reshard.plan.planner import make_plan
from reshard.plan.values import CopiedValue
from reshard.storage.store import Costs
from reshard.text.messages import Report, quoted
from reshard.text.names import did_you_mean
from reshard.threads import ThreadLock

Array = npt.NDArray[Any]

# Maximum number and bytes of small tensors that one thread reads as a batch.
_MAX_TOGETHER = 64
_BYTES_TOGETHER = 1 << 20


class TensorEntry(NamedTuple):
    """A tensor: its shape is the full one, or that of a rank's slice if a strategy was named."""

    name: str
    dtype: str
    item_size: int
    shape: tuple[int, ...]


class OpenedContents:
    """The tensors of one file of a plan, by name; for any number of threads.

    Attributes:
        entries: every tensor, sorted by name.
    """

    def __init__(self, plan: Plan, file: int) -> None:
        self.plan = plan
        self._file = file
        self._lock = ThreadLock()
        self._places: Mapping[str, int] = {}
        self._tensors: TargetTensors
        self._values = {tensor.name: (holder, tensor) for holder, tensor in plan.values_of(file)}
        self._kinds: dict[str, TensorKind] = {}
        self._copies: dict[int, list[list[tuple[int, Box]]]] = {}
        entries = [_entry_of(tensor) for _, tensor in self._values.values()]
        section = plan.form.section_of(file)
        position = section.position(file)
        for kind in plan.kinds_of(section):
            shape = shape_of(kind.box_of(position))
            self._kinds.update((tensor.name, kind) for tensor in kind.tensors)
            entries += (TensorEntry(tensor.name, tensor.dtype, kind.item_size, shape) for tensor in kind.tensors)
        self.entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in sorted(entries)}

    def copies(self, name: str) -> int:
        """The largest number of files that hold a part of a tensor."""
        if name in self._values:
            return len(self._holders(self._values[name]))
        return max(map(len, self._copies_of(name)), default=1)

    def unread(self, names: Iterable[str]) -> set[int]:
        """The files with copies of these tensors' slices that `target` does not read."""
        examples = {id(self._kinds[name]): name for name in names if name in self._kinds}
        return {
            holder
            for name in examples.values()
            for piece, copies in zip(self.target(name).pieces, self._copies_of(name))
            for holder, _ in copies
            if holder != piece.source.rank
        }

    def _copies_of(self, name: str) -> list[list[tuple[int, Box]]]:
        kind = self._kinds[name]
        if id(kind) not in self._copies:
            self._copies[id(kind)] = self.plan.copies(kind, self._file)
        return self._copies[id(kind)]

    def _holders(self, value: CopiedValue) -> list[int]:
        """The files that hold a value of the same type and shape, the one that is read first."""
        first, tensor = value
        indexes, entry = self.plan.checkpoint.indexes, _entry_of(tensor)
        holders = self.plan.checkpoint.holders(tensor.name)
        alike = [one for one in holders if _entry_of(indexes[one].tensors[tensor.name]) == entry]
        return sorted(alike, key=lambda holder: holder != first)

    def target(self, name: str, copy: int = 0) -> TargetTensor:
        """The stored pieces of a tensor.

        Args:
            name: its name.
            copy: each number below `copies` gives other files; where fewer hold a piece, some again.
        """
        if copy and name in self._kinds:
            pieces = []
            for piece, copies in zip(self.target(name).pieces, self._copies_of(name)):
                first = next(place for place, (holder, _) in enumerate(copies) if holder == piece.source.rank)
                holder, box = copies[(first + copy) % len(copies)]
                stored_slice = self.plan.stored(name, piece.source_number, holder, box)
                pieces.append(piece._replace(source=stored_slice))
            return self.target(name)._replace(pieces=tuple(pieces))
        value = self._values.get(name)
        if value is not None:
            entry = self.entries[name]
            box = whole_box(entry.shape)
            holder = self._holders(value)[copy] if copy else value[0]
            stored = self.plan.checkpoint.indexes[holder].tensors[name]
            piece = Piece(StoredSlice(self.plan.checkpoint.files[holder], holder, stored.extents, box), box)
            return TargetTensor(name, entry.item_size, box, (piece,) if stored.nbytes else ())
        with self._lock:
            if not self._places:
                tensors = self.plan.target_file(self._file).tensors
                assert isinstance(tensors, TargetTensors)
                self._tensors = tensors
                self._places = {tensor_name: place for place, tensor_name in enumerate(tensors.names)}
            return self._tensors[self._places[name]]


def _entry_of(tensor: Tensor) -> TensorEntry:
    # A text is one element.
    return TensorEntry(tensor.name, tensor.dtype, tensor.item_size, tensor.shape)


class ReadingOrder(NamedTuple):
    """Tensors in the order of their first bytes in the files, and these files."""

    names: list[str]
    paths: set[str]


def in_file_order(contents: OpenedContents, names: Iterable[str]) -> ReadingOrder:
    """Sort tensors by their place in the files, so that files are read sequentially."""
    paths: set[str] = set()

    def key(name: str) -> tuple[str, int, str]:
        # Pieces are not kept: there may be very many.
        pieces = contents.target(name).pieces
        paths.update(piece.source.path for piece in pieces)
        for piece in pieces:
            for offset, _ in piece.source.extents:
                return piece.source.path, offset, name
        return "", 0, name

    return ReadingOrder(sorted(names, key=key), paths)


class NoSuchTensorError(CheckpointError, KeyError):
    """No tensor has this name; also a `KeyError`, as mappings raise."""

    def __str__(self) -> str:
        """The message without quotes, which `KeyError` would add."""
        return CheckpointError.__str__(self)


def _warning(report: Report) -> Overflowed:
    """Warns about elements that a cast made infinite, once per tensor, since it may be read more than once."""

    def overflowed(name: str, count: int) -> None:
        report.warn(f"{quoted(name)}: elements too large for the new type become infinite")

    return overflowed


class OpenedCheckpoint(Mapping[str, LazyTensor]):
    """The tensors of a checkpoint by name, sorted; for any number of threads.

    Step and headers are read at the first use. Use it in a ``with`` block, which closes the files at its end.

    Args:
        request: the conversion whose target is read instead of written.
        means: open source files, closed with the checkpoint; the report.
        errors: the context in which headers are read, which may reword errors.
    """

    def __init__(
        self,
        request: Request,
        means: Means,
        errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._errors = errors
        self._request = request
        self._means = means
        self._lock = ThreadLock()
        self._contents: OpenedContents | None = None
        self._reader: BoxReader | None = None
        self._closed = False
        self._comparing = ThreadLock()
        self._compared: set[str] = set()
        # Closes the files if the caller does not.
        self._finalizer = weakref.finalize(self, means.handles.close)

    @property
    def request(self) -> Request:
        """The conversion whose target is read instead of written."""
        return self._request

    @property
    def contents(self) -> OpenedContents:
        """All tensors, from headers.

        Raises:
            ValueError: the checkpoint is closed.
            ReshardError: no complete step can be read.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the checkpoint is closed")
            if self._contents is None:
                with self._errors():
                    plan = make_plan(self._request, self._means)
                self._contents = OpenedContents(plan, plan.requested[0])
            return self._contents

    @property
    def reader(self) -> BoxReader:
        """Reads the tensors."""
        plan = self.contents.plan
        with self._lock:
            if self._reader is None:
                effort = self._request.asked.effort
                # The other half is for tensors that are read ahead.
                budget = Budget.of(
                    cpus_of(effort),
                    effort.max_memory // 2,
                    _for_single_elements(source_costs(plan)),
                    io=effort.io,
                    decoded=self._request.edits.quantisation is not None,
                )
                self._reader = BoxReader(self._means.handles, budget, _warning(self._means.report))
            return self._reader

    def share(self, processes: int) -> None:
        """Divide jobs and memory among copies of this checkpoint in several processes."""
        with self._lock:
            asked = self._request.asked
            effort = replace(asked.effort, jobs=1, max_memory=asked.effort.max_memory // processes)
            self._request = self._request._replace(asked=replace(asked, effort=effort))
            self._reader = None

    def target(self, name: str, copy: int = 0) -> TargetTensor:
        """The stored pieces of a tensor, as in `OpenedContents.target`; tied tensors are compared at the first use.

        Raises:
            CheckpointError: tied tensors differ.
            ReshardError: a file cannot be read.
        """
        checkpoint = self.contents.plan.checkpoint
        with self._comparing:
            if name not in self._compared:
                check_equal(checkpoint, tied_among(checkpoint, [name]), self.reader)
                self._compared.add(name)
        return self.contents.target(name, copy)

    @property
    def handles(self) -> FileHandles:
        """Its open files, with their status at the first opening."""
        return self._means.handles

    @property
    def form(self) -> str:
        """The name of its form, such as ``ranks`` or ``dcp``."""
        return self.contents.plan.checkpoint.form

    @property
    def step(self) -> str | None:
        """The step that is read, in words of its form; None if unknown."""
        return self.contents.plan.checkpoint.step

    def __getitem__(self, name: str) -> LazyTensor:
        entry = self.contents.entries.get(name)
        if entry is None:
            hint = did_you_mean(str(name), self.contents.entries)
            raise NoSuchTensorError(f"no tensor {quoted(str(name))}", parameter=str(name), hint=hint)
        return LazyTensor(self, entry)

    def __contains__(self, name: object) -> bool:
        return name in self.contents.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.contents.entries)

    def __len__(self) -> int:
        return len(self.contents.entries)

    @property
    def objects(self) -> Sequence[str]:
        """Names of objects other than tensors, such as an iteration or a learning rate, sorted; see `get_object`."""
        return sorted(self.contents.plan.checkpoint.objects)

    def get_object(self, name: str) -> Any:
        """An object other than a tensor, as numbers, texts, lists and dictionaries; tuples are lists.

        Raises:
            CheckpointError: it does not exist, or is more than that.
            ReshardError: its file cannot be read.
        """
        stored = self.contents.plan.checkpoint.objects.get(name)
        if stored is None:
            raise NoSuchTensorError(f"no object {quoted(name)}", parameter=name)
        try:
            return shown_object(self._means.handles, stored)
        except NotPlain as error:
            raise CheckpointError(
                f"{stored.path}: the object {quoted(name)} cannot be shown: {error}",
                file=stored.path,
                parameter=name,
                hint="dcp and hyper-parallel carry objects unchanged: convert --to dcp",
            ) from error

    def get_slice(self, name: str) -> LazyTensor:
        """The tensor of a name, for slicing."""
        return self[name]

    def get_tensor(self, name: str) -> Array:
        """The whole array of a tensor."""
        array: Array = self[name][...]
        return array

    def read_all(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Array]]:
        """Read whole tensors in file order.

        Threads read ahead within half of ``max_memory``, or one tensor.

        Args:
            names: which tensors; all of them by default.

        Yields:
            Name and array; the array is the caller's own.

        Raises:
            ReshardError: a file cannot be read, or was modified.
        """
        chosen = [self[name] for name in (self if names is None else dict.fromkeys(names))]
        order = in_file_order(self.contents, [tensor.name for tensor in chosen])
        yield from _read_ahead(
            map(self.__getitem__, order.names), self.reader, self._request.asked.effort.max_memory // 2
        )
        self.check_unchanged(order.paths)

    def check_unchanged(self, paths: Iterable[str] | None = None) -> None:
        """Check that files are unchanged since they were first opened.

        Args:
            paths: files to check; by default all opened files of the step.

        Raises:
            RetryableError: a file was modified or removed: tensors may be of two versions.
        """
        chosen = self.contents.plan.checkpoint.files.values() if paths is None else paths
        self._means.handles.check_unchanged(sorted(set(chosen)))

    def close(self) -> None:
        """Close the files; tensors cannot be read any more."""
        with self._lock:
            self._closed = True
            reader, self._reader = self._reader, None
            self._contents = None
        if reader is not None:
            reader.close()
        self._finalizer()

    def __enter__(self) -> OpenedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<OpenedCheckpoint {self._request.src}>"


class _Batch:
    """Tensors that are read together: a large one in parts by all threads, or small ones by one thread."""

    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.arrays: list[tuple[str, Array]] = []
        self._tensors = tensors

    def begin(self, reader: BoxReader) -> list[Callable[[], None]]:
        """Make the arrays; the tasks that fill them."""
        self.arrays = [(tensor.name, tensor.empty(tensor.shape)) for tensor in self._tensors]
        rooms = [array.reshape(-1).view(np.uint8).data for _, array in self.arrays]
        targets = [tensor.target for tensor in self._tensors]
        if len(targets) == 1 and rooms[0].nbytes:
            return list(reader.parts(targets[0], whole_box(targets[0].shape), rooms[0]))
        return [partial(_read_each, reader, targets, rooms)]


def _read_each(reader: BoxReader, targets: Sequence[TargetTensor], rooms: Sequence[memoryview]) -> None:
    with reader.reader() as alone:
        for target, room in zip(targets, rooms):
            if len(room):
                alone.fill(target, whole_box(target.shape), room)


def _read_ahead(tensors: Iterable[LazyTensor], reader: BoxReader, budget: int) -> Iterator[tuple[str, Array]]:
    """Read tensors whole, in order; at most ``budget`` bytes are read and not yet taken, or one tensor."""
    batches = _batches(tensors, min(_BYTES_TOGETHER, budget))
    begin = partial(_Batch.begin, reader=reader)
    for batch, _ in in_order(reader.pool, batches, begin, budget, lambda batch: batch.nbytes):
        arrays, batch.arrays = batch.arrays[::-1], []
        while arrays:
            yield arrays.pop()


def _batches(tensors: Iterable[LazyTensor], most: int) -> Iterator[_Batch]:
    """Tensors one by one, small ones several at a time."""
    few: list[LazyTensor] = []
    nbytes = 0
    for tensor in tensors:
        if few and (len(few) == _MAX_TOGETHER or nbytes + tensor.nbytes > most):
            yield _Batch(few)
            few, nbytes = [], 0
        few.append(tensor)
        nbytes += tensor.nbytes
    if few:
        yield _Batch(few)


def _for_single_elements(costs: Costs) -> Costs:
    """The costs for reads of single elements: requests read few additional bytes."""
    window = min(costs.window, costs.worth_skipping)
    return costs._replace(window=window, small=min(costs.small, window // 4))
