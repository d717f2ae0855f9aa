"""Checkpoints whose files and metadata record all of them, whole or in chunks.

Metadata lists chunks: offsets, sizes, and the place of the bytes. Chunks are slices of a grid, or any boxes. A file may
hold several chunks of one tensor. Its contents are then divided over several holder numbers, each with one chunk of a
name: files have the first numbers, further parts of files the numbers after them.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from reshard.checkpoints.checkpoint import FileSharding, GlobalTensor, StoredObject, TiedTensors, order_in_files
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError, LayoutError, one_error
from reshard.forms.form import Description
from reshard.layout import Box, Grid, Layout
from reshard.layout.boxes import Covering, covering
from reshard.storage import status_of_each
from reshard.strategies import SAME, Stage, Strategy, rows_over
from reshard.text.messages import as_pattern, listing, one_line, plural, quoted, some_names, step_words
from reshard.text.names import is_value


class ProblemError(ValueError):
    """A problem; the text is the end of a sentence about the file, tensor or checkpoint that the caller names."""


def tensor_fault(path: str, name: str, problem: str, cure: str = "") -> CheckpointError:
    """The error of one tensor, which can be left out."""
    leave_out = f"leave it out with --exclude {as_pattern(name)}"
    return CheckpointError(
        f"{path}: {quoted(name)} {problem}",
        file=path,
        parameter=name,
        hint=f"{cure}, or {leave_out}" if cure else leave_out,
    )


def sizes_of_files(
    directory: str, names: Sequence[str], damaged: Mapping[str, str], hint: str
) -> tuple[dict[str, int], list[InputError]]:
    """Bytes of files by path, and the problems of those that are missing or count as damaged."""
    paths = [os.path.join(directory, name) for name in names]
    statuses = dict(zip(paths, status_of_each(paths)))
    sizes = {path: status.size for path, status in statuses.items() if status is not None and status.regular}
    missing = [name for name, path in zip(names, paths) if path not in sizes]
    problems: list[InputError] = []
    if missing:
        text = f"{plural(len(missing), 'file')} of {len(paths)} missing: {some_names([*map(one_line, missing)])}"
        problems.append(CheckpointError(f"{directory}: {text}", file=os.path.join(directory, missing[0]), hint=hint))
    for path in sorted(sizes.keys() & damaged.keys()):
        problems.append(DamagedCheckpointError(damaged[path], file=path, hint=hint))
        del sizes[path]
    return sizes, problems


@dataclass
class RecordedCheckpoint:
    """A checkpoint whose files and metadata record all of it; see `Checkpoint` for the other attributes.

    Attributes:
        plain: names without a layout, such as ``global_step``.
        without_layouts: names of weights without a layout, each whole in every file that holds it.
        faults: by name of an unreadable tensor, the error.
        tied: tied tensors, whose copies are not among the tensors.
    """

    form: str
    place: str
    files: Mapping[int, str]
    indexes: Mapping[int, CheckpointIndex]
    tensors: Mapping[str, GlobalTensor]
    plain: Collection[str] = ()
    extra_files: Sequence[str] = ()
    step: str | None = None
    label: str = step_words(None)
    without_layouts: Collection[str] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, InputError] = field(default_factory=dict)
    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    nested: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tied: Sequence[TiedTensors] = ()

    @property
    def laid_out(self) -> Collection[str]:
        return self.tensors.keys()

    @property
    def unseen(self) -> Collection[str]:
        """None: a missing file is an error."""
        return ()

    def order(self) -> list[str]:
        return order_in_files(self)

    def tied_tensors(self) -> Sequence[TiedTensors]:
        return self.tied

    def names(self) -> set[str]:
        return {*self.tensors, *self.plain}

    def values(self) -> Sequence[str]:
        return sorted(self.plain)

    def without_layout(self) -> Sequence[str]:
        return sorted(self.without_layouts)

    def holders(self, name: str) -> list[int]:
        is_in: dict[int, bool] = {}
        files = []
        for file, index in self.indexes.items():
            contents = id(index.tensors)
            if contents not in is_in:
                is_in[contents] = name in index.tensors
            if is_in[contents]:
                files.append(file)
        return sorted(files)

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        return tuple(sharding.present for sharding in tensor.shardings if isinstance(sharding, FileSharding))

    def check(self, required: Callable[[str], bool] | None = None) -> None:
        """Raise an InputError that names all required tensors that cannot be read."""
        faults = [error for name, error in self.faults.items() if required is None or required(name)]
        if faults:
            raise one_error(faults, f"{self.label} in {self.place} contradicts itself")


class Chunk(NamedTuple):
    """A box of a tensor, and where it is stored.

    Attributes:
        offsets: first element per dimension.
        sizes: elements per dimension.
        file: number of the file.
        stored: the entry of the file, of these sizes; None where the file's index has it under the tensor's name.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    stored: Tensor | None = None


class ChunkedTensor(NamedTuple):
    """A tensor as metadata describes it: its full shape and its stored boxes; equal ones are replicas."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]


@dataclass
class ChunkedCheckpoint(RecordedCheckpoint):
    """A checkpoint of chunks.

    Attributes:
        file_count: files; several holder numbers may be of one file.
        chunks: tensors as metadata describes them, by name.
        chunk_holders: per tensor the holder number of each chunk; None for one without elements, which is never read.
    """

    file_count: int = 0
    chunks: Mapping[str, ChunkedTensor] = field(default_factory=dict)
    chunk_holders: Mapping[str, Sequence[int | None]] = field(default_factory=dict)

    def holders(self, name: str) -> list[int]:
        """The files that hold an entry of this name, ascending; empty entries of values do not count.

        A cut by rows leaves a value to one rank, and files of other ranks have an empty entry of it.
        """
        if name in self.plain:
            return sorted({holder for holder in self.chunk_holders[name] if holder is not None})
        return super().holders(name)

    def strategy(self) -> Strategy:
        """The strategy that cuts every tensor as the checkpoint does: rank ``r`` gets chunk ``r`` of each.

        Tensors that no strategy cuts so are cut by rows; a note of the strategy names them.
        """
        grids = {name: tensor.shardings[0] for name, tensor in self.tensors.items()}
        # Boxes that lie in no grid refine one another into more slices than there are ranks.
        regular = {name: each.grid for name, each in grids.items() if getattr(each, "parts_of", None) is None}
        count = max((grid.slice_count for grid in regular.values()), default=max(1, self.file_count))
        layouts: dict[str, Layout] = {}
        by_rows: list[str] = []
        for name, tensor in self.tensors.items():
            layout = _layout_of(regular[name], count) if name in regular else None
            if layout is None:
                by_rows.append(name)
                layout = rows_over(count, tensor.shape)
            layouts[name] = layout
        notes: tuple[str, ...] = ()
        if by_rows:
            notes = (
                f"{plural(len(by_rows), 'tensor')} cut by rows, because no strategy over {plural(count, 'rank')} has "
                "their uneven cuts: " + listing(by_rows),
            )
        return Strategy((Stage(0, 0, count, layouts, (self.place,)),), SAME, notes)

    def saved_layout(self, name: str) -> None:
        return None

    def boxes_of(self, name: str) -> Iterator[tuple[Box, int]]:
        """The chunks, but those without elements of others."""
        for chunk, holder in zip(self.chunks[name].chunks, self.chunk_holders[name]):
            if holder is not None:
                yield tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes)), holder

    def describe(self) -> Description:
        incomplete = None
        if self.faults:
            incomplete = one_error([*self.faults.values()], f"{self.place} is not complete")
        return Description(incomplete=incomplete)


def chunked_checkpoint(
    form: str,
    place: str,
    files: Sequence[CheckpointIndex],
    tensors: Iterable[ChunkedTensor],
    faults: Mapping[str, InputError],
    hint: str,
) -> ChunkedCheckpoint:
    """The checkpoint that chunks make. Coverage is exact: a tensor whose chunks are not all of it is a fault.

    Args:
        form: its name.
        place: the directory.
        files: indexes of the files, by number; without tensors if all entries come with the chunks.
        tensors: tensors as metadata describes them, each name once.
        faults: unreadable tensors, and why, by name.
        hint: the cure for missing elements.
    """
    builder = _Builder(place, files, hint)
    laid_out: dict[str, GlobalTensor] = {}
    accepted: dict[str, ChunkedTensor] = {}
    refused = dict(faults)
    for tensor in tensors:
        if tensor.name in refused:
            continue
        try:
            laid_out[tensor.name] = builder.tensor(tensor)
            accepted[tensor.name] = tensor
        except InputError as error:
            refused[tensor.name] = error
    plain = {name for name, tensor in laid_out.items() if math.prod(tensor.shape) == 1 and is_value(name, 1)}
    return ChunkedCheckpoint(
        form,
        place,
        {number: index.path for number, index in builder.indexes.items()},
        builder.indexes,
        {name: tensor for name, tensor in laid_out.items() if name not in plain},
        plain,
        faults=refused,
        file_count=len(files),
        chunks=accepted,
        chunk_holders=builder.holders,
    )


def _layout_of(grid: Grid, count: int) -> Layout | None:
    """A layout over ``count`` ranks whose slices are those of a grid; None if no layout is."""
    cuts, rows = grid.cuts, grid.edges[:1]
    if all(cut == 1 for cut in cuts[1:]) and cuts and cuts[0] > 1:
        sizes = [b - a for a, b in zip(rows[0], rows[0][1:])]
        sizes += [0] * (count - len(sizes))
        return Layout((count,), ((0,), *((),) * (len(cuts) - 1)), uneven=tuple(sizes))
    even = all(len({b - a for a, b in itertools.pairwise(edges)}) == 1 for edges in grid.edges)
    if not even or count % grid.slice_count:
        return None
    # The last axes of the matrix cut, in the order of the dimensions; the first counts replicas.
    matrix = (count // grid.slice_count, *cuts)
    return Layout(matrix, tuple(() if cut == 1 else (len(cuts) - 1 - at,) for at, cut in enumerate(cuts)))


class _Builder:
    """Lays chunks out, once for tensors that are cut and stored alike."""

    def __init__(self, place: str, files: Sequence[CheckpointIndex], hint: str) -> None:
        self.indexes: dict[int, CheckpointIndex] = dict(enumerate(files))
        self.holders: dict[str, list[int | None]] = {}
        self._place = place
        self._files = files
        self._hint = hint
        # Holder numbers of a file, and the entries of each that are given with chunks.
        self._numbers: list[list[int]] = [[] for _ in files]
        self._chunk_counts: dict[tuple[int, str], int] = {}
        self._entries: dict[int, dict[str, Tensor]] = {}
        self._coverings: dict[object, Covering] = {}
        self._shardings: dict[object, tuple[FileSharding]] = {}

    def tensor(self, tensor: ChunkedTensor) -> GlobalTensor:
        name, dtype, shape, chunks = tensor
        if name.encode(errors="ignore").decode() != name:
            raise self._fault(name, "has half of a surrogate pair in its name, which is no text")
        boxes = [(len(chunk.offsets), len(chunk.sizes)) for chunk in chunks]
        if any(lengths != (len(shape), len(shape)) for lengths in boxes):
            raise self._fault(name, f"has {len(shape)} dimensions, and chunks of other numbers of dimensions")
        if not chunks:
            raise self._fault(name, "has no chunk")
        for chunk in chunks:
            stored = chunk.stored
            if stored is not None and (stored.shape != chunk.sizes or stored.dtype != dtype):
                raise self._fault(
                    name,
                    f"has a chunk of shape {list(chunk.sizes)} and type {dtype} by its metadata, and of shape "
                    f"{list(stored.shape)} and type {stored.dtype} in {self._files[chunk.file].path}",
                )
        item_size = ITEM_SIZES.get(dtype)
        if item_size is None:
            raise self._fault(name, f"is {dtype}, an unsupported type")
        try:
            starts = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(len(chunks), len(shape))
            sizes = np.array([chunk.sizes for chunk in chunks], np.int64).reshape(len(chunks), len(shape))
        except OverflowError:
            raise self._fault(name, "has a chunk that begins or ends beyond 64 bits") from None
        key = (shape, len(chunks), starts.tobytes(), sizes.tobytes())
        try:
            covered = self._coverings.get(key)
            if covered is None:
                covered = self._coverings[key] = covering(shape, starts, sizes)
        except LayoutError as error:
            raise self._fault(name, f"of shape {list(shape)}: {error.message}") from error
        used = {number for members in covered.members for number in members}
        # Entries without elements are never read.
        holders = {number: self._holder(name, chunk) for number, chunk in enumerate(chunks) if number in used}
        self.holders[name] = [holders.get(number) for number in range(len(chunks))]
        return GlobalTensor(name, dtype, item_size, shape, self._sharding(key, covered, holders))

    def _sharding(self, key: object, covered: Covering, holders: Mapping[int, int]) -> tuple[FileSharding]:
        holders_of_box = tuple(tuple(sorted(holders[number] for number in members)) for members in covered.members)
        shardings = self._shardings.get((key, holders_of_box))
        if shardings is None:
            if covered.box_of_slice is None:
                sharding = FileSharding(covered.grid, holders_of_box)
            else:
                of = covered.box_of_slice.tolist()
                boxes = tuple(covered.boxes[number] for number in of)
                sharding = FileSharding(covered.grid, tuple(holders_of_box[number] for number in of), boxes)
            shardings = self._shardings[key, holders_of_box] = (sharding,)
        return shardings

    def _holder(self, name: str, chunk: Chunk) -> int:
        stored = chunk.stored
        if stored is None:
            return chunk.file
        numbers = self._numbers[chunk.file]
        place = self._chunk_counts.get((chunk.file, name), 0)
        self._chunk_counts[chunk.file, name] = place + 1
        number = numbers[place] if place < len(numbers) else self._new(chunk.file)
        self._entries[number][name] = stored if stored.name == name else stored._replace(name=name)
        return number

    def _new(self, file: int) -> int:
        index = self._files[file]
        entries: dict[str, Tensor] = {}
        first = not index.tensors and not self._numbers[file]
        number = file if first else len(self.indexes)
        self._numbers[file].append(number)
        self._entries[number] = entries
        # The checksum of a file is that of all of its numbers together, so the first one alone has it.
        crc = index.crc if first else None
        self.indexes[number] = index._replace(tensors=entries, crc=crc)
        return number

    def _fault(self, name: str, problem: str) -> CheckpointError:
        return tensor_fault(self._place, name, problem, self._hint)
