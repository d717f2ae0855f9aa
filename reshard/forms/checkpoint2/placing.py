"""Which slice of a tensor each file holds, and which rank wrote the file.

The layout and the storage rank determine it: the slice is the one that the layout gives to this rank, by
its place in the list of ranks. The recorded number of the slice and the shape in the file are checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import FileSharding
from reshard.checkpoints.formats.dtypes import INT4, ITEM_SIZES, SAFETENSORS_NAMES
from reshard.checkpoints.formats.tensors import Tensor
from reshard.errors import CheckpointError, LayoutError
from reshard.forms.checkpoint2.files import IterationFiles
from reshard.forms.checkpoint2.iterations import parse_file_name
from reshard.forms.checkpoint2.metadata import LayoutRecord, Metadata, SliceRecords, TensorRecord
from reshard.layout import Grid, Layout, shape_of, volume_of
from reshard.text.names import as_pattern
from reshard.text.wording import quoted, some_numbers

# Names of types in both kinds of runs and in loaders, in lower case.
_DTYPES = {name.lower(): name for name in ITEM_SIZES} | {
    stored.lower(): name for name, stored in SAFETENSORS_NAMES.items() if name != INT4
}


@dataclass(frozen=True)
class TensorPlacement:
    """The places of slices, for tensors with equal metadata and storage.

    Attributes:
        grid: the grid of these tensors.
        layout: the same over ranks; None where every holder has the whole tensor.
        ranks: the ranks of `layout`, in its order; without a layout, all recorded holders.
        said: per slice the recorded files, ascending.
        held: per slice the readable ones of these.
        misnumbered: whether the numbers of slices follow MindFormers' faulty rule for scattered ranks.
        outside: storage ranks that the layout does not lay anything out for.
        contents: of the files in ``held`` one of each that hold the same tensors.
        rank_of: the files in ``held``, each with the rank that it is of; none without a layout.
    """

    grid: Grid
    layout: Optional[Layout]
    ranks: tuple[int, ...]
    said: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    misnumbered: bool
    outside: tuple[int, ...]
    contents: tuple[int, ...]
    rank_of: tuple[tuple[int, int], ...] = ()

    @classmethod
    def whole(cls, shape: tuple[int, ...], files: Sequence[int], ranks: Iterable[int]) -> TensorPlacement:
        """The placement of a tensor that is whole in files, each of a rank."""
        held = (tuple(sorted(files)),)
        return cls(Grid.whole(shape), None, tuple(sorted(ranks)), held, held, False, (), held[0])

    @cached_property
    def sharding(self) -> FileSharding:
        """The grid, and the files that hold its boxes."""
        return FileSharding(self.grid, self.held)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of every slice."""
        return _slice_shape(self.grid)

    @cached_property
    def lost(self) -> list[int]:
        """Slices with elements and without a readable recorded file."""
        return [
            number for number, files in enumerate(self.held) if not files and volume_of(self.grid.slice_box(number))
        ]


class _LaidOut(NamedTuple):
    """A layout over ranks, and the place of each in the list of them."""

    layout: Layout
    positions: Mapping[int, int]
    scattered: bool

    def faulty_number(self, rank: int) -> Optional[int]:
        """The number that MindFormers gives to a rank's slice where the ranks have gaps.

        It takes the rank's own number for its place in the list.
        """
        return int(self.layout.slice_of_rank[rank % self.layout.device_count]) if self.scattered else None


class Placer:
    """Places the tensors of one iteration.

    Args:
        metadata: their metadata.
        files: the files, their headers read.
    """

    def __init__(self, metadata: Metadata, files: IterationFiles) -> None:
        self._metadata = metadata
        self._names = files.names
        self._numbers = [files.numbers[name] for name in metadata.files]
        self._indexes = files.indexes
        self._placements: dict[object, TensorPlacement] = {}
        self._layouts: dict[LayoutRecord, _LaidOut] = {}

    def place(self, name: str) -> TensorPlacement:
        """The places of a tensor's slices.

        Raises:
            LayoutError: its layout contradicts itself, its shape, or its recorded slices.
        """
        said = self._metadata.tensors[name]
        stored = self._metadata.stored.get(name, SliceRecords())
        key = (said._replace(dtype=""), stored.key)
        known = self._placements.get(key)
        if known is None:
            with self._naming(name):
                known = self._placements[key] = self._place(said, self._entries(stored))
        return known

    def place_held(self, name: str, said: TensorRecord, rank_of: Mapping[int, int]) -> TensorPlacement:
        """The places of a tensor's slices, if its files contradict metadata.

        Args:
            name: of the tensor.
            said: its recorded layout.
            rank_of: by holder number of the files that hold a slice of it the rank of each.

        Raises:
            LayoutError: the layout does not fit the ranks, or the shape.
        """
        with self._naming(name):
            return self._place(said, ((None, file, rank) for file, rank in rank_of.items()))

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except LayoutError as error:
            raise LayoutError(
                f"{self._metadata.path}: {quoted(name)}: {error.message}",
                file=self._metadata.path,
                parameter=name,
                hint=f"take another iteration, or leave it out with --exclude {as_pattern(name)}",
            ) from error

    def _entries(self, stored: SliceRecords) -> Iterator[tuple[int, int, int]]:
        for number, place in stored:
            for file, rank in self._metadata.places[place].entries:
                yield number, self._numbers[file], rank

    def _place(self, said: TensorRecord, entries: Iterable[tuple[Optional[int], int, int]]) -> TensorPlacement:
        """Compare a layout with storage: per file with a slice the recorded number, file, and rank."""
        laid_out = None if said.layout is None else self._laid_out(said.layout)
        grid = Grid.whole(said.shape) if laid_out is None else laid_out.layout.grid(said.shape)
        _check_chunks(said, grid)
        found: list[set[int]] = [set() for _ in range(grid.slice_count)]
        slice_of_file: dict[int, int] = {}
        ranks: set[int] = set()
        rank_of: dict[int, int] = {}
        outside: set[int] = set()
        misnumbered = False
        for number, file, rank in entries:
            if number is not None and number >= grid.slice_count:
                raise LayoutError(f"slice {number} is stored, but it is cut into {grid.slice_count}")
            ranks.add(rank)
            at = 0
            if laid_out is not None:
                position = laid_out.positions.get(rank)
                if position is None:
                    outside.add(rank)
                    continue
                at = int(laid_out.layout.slice_of_rank[position])
                rank_of.setdefault(file, rank)
                if number not in (None, at):
                    if number != laid_out.faulty_number(rank):
                        raise LayoutError(
                            f"{self._names[file]} of rank {rank} is recorded with slice {number}, but the layout gives "
                            f"the rank slice {at}"
                        )
                    misnumbered = True
            before = slice_of_file.setdefault(file, at)
            if before != at:
                raise LayoutError(f"{self._names[file]} is recorded with slices {before} and {at}")
            found[at].add(file)
        held = tuple(tuple(sorted(file for file in files if file in self._indexes)) for files in found)
        return TensorPlacement(
            grid,
            None if laid_out is None else laid_out.layout,
            tuple(sorted(ranks)) if said.layout is None else said.layout.rank_list,
            tuple(tuple(sorted(files)) for files in found),
            held,
            misnumbered,
            tuple(sorted(outside)),
            self._distinct(file for files in held for file in files),
            tuple((file, rank) for file, rank in sorted(rank_of.items()) if file in self._indexes),
        )

    def _laid_out(self, recorded: LayoutRecord) -> _LaidOut:
        known = self._layouts.get(recorded)
        if known is None:
            if recorded.interleaved:
                raise LayoutError("its layout is marked as interleaved_parallel, which no known writer uses")
            layout = Layout(recorded.device_matrix, recorded.tensor_map)
            positions = {rank: position for position, rank in enumerate(recorded.rank_list)}
            if len(positions) < len(recorded.rank_list) or len(positions) != layout.device_count:
                raise LayoutError(
                    f"device matrix {some_numbers(recorded.device_matrix)} does not lay out "
                    f"rank list {some_numbers(recorded.rank_list)}"
                )
            known = self._layouts[recorded] = _LaidOut(layout, positions, _is_scattered(recorded.rank_list))
        return known

    def _distinct(self, files: Iterable[int]) -> tuple[int, ...]:
        """Of files that hold the same tensors the first each."""
        found: dict[int, int] = {}
        for file in files:
            found.setdefault(id(self._indexes[file].tensors), file)
        return tuple(found.values())

    def tensor(self, name: str, files: Iterable[int], grid: Grid) -> Optional[Tensor]:
        """The tensor of this name, equal in all files; None if no file holds it.

        Args:
            name: of the tensor.
            files: to look into.
            grid: the recorded grid.

        Raises:
            CheckpointError: a file holds it with another type or shape than recorded.
        """
        said = self._metadata.tensors.get(name)
        dtype = None if said is None else _DTYPES.get(said.dtype)
        shape = _slice_shape(grid)
        first: Optional[Tensor] = None
        for file in files:
            index = self._indexes[file]
            tensor = index.tensors.get(name)
            if tensor is None:
                continue
            where = f"{index.path}: {quoted(name)}"
            hint = f"the files are not of one save, or were changed; leave it out with --exclude {as_pattern(name)}"
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{where} has shape {list(tensor.shape)}, but a slice of it has {list(shape)} by "
                    f"{self._metadata.path}",
                    file=index.path,
                    parameter=name,
                    hint=hint,
                )
            if first is None:
                first = tensor
            if dtype not in (None, tensor.dtype) and tensor.dtype != INT4:
                raise CheckpointError(
                    f"{where} is {tensor.dtype}, but {dtype} by {self._metadata.path}",
                    file=index.path,
                    parameter=name,
                    hint=hint,
                )
            if not tensor.same_type(first):
                raise CheckpointError(
                    f"{where} is {tensor.dtype}, but {first.dtype} in other files",
                    file=index.path,
                    parameter=name,
                    hint=hint,
                )
        return first


def _slice_shape(grid: Grid) -> tuple[int, ...]:
    """The shape of every slice; layouts cut into equal ones."""
    return shape_of(grid.slice_box(0))


def _is_scattered(ranks: Sequence[int]) -> bool:
    """Whether ascending ranks have gaps."""
    steps = {after - before for before, after in zip(ranks, ranks[1:])}
    return bool(steps) and min(steps) > 0 and steps != {1}


def _check_chunks(said: TensorRecord, grid: Grid) -> None:
    """Check the recorded slices against the layout.

    Raises:
        LayoutError: they are not.
    """
    if said.cuts not in (None, grid.cuts):
        raise LayoutError(f"axis_fragmentations {list(said.cuts or ())} differ from its layout, {list(grid.cuts)}")
    numbers = said.chunks.numbers
    if len(set(numbers)) < len(numbers):
        raise LayoutError("a slice is listed twice")
    if numbers and max(numbers) >= grid.slice_count:
        raise LayoutError(f"slice {max(numbers)} is listed, but it is cut into {grid.slice_count}")
    shape = _slice_shape(grid)
    for listed in said.chunks.shapes:
        if listed != shape:
            raise LayoutError(f"a slice is listed with shape {list(listed)}, and has {list(shape)} by the layout")


RankList = tuple[int, ...]


def disjoint(lists: Iterable[RankList]) -> list[RankList]:
    """Of lists of ranks the largest that share no rank with another that is taken; by their lowest ranks."""
    taken: set[int] = set()
    found = []
    for ranks in sorted(set(lists), key=lambda ranks: (-len(ranks), ranks)):
        if taken.isdisjoint(ranks):
            found.append(ranks)
            taken.update(ranks)
    return sorted(found, key=min)


def ranks_of_files(metadata: Metadata, files: IterationFiles) -> dict[int, int]:
    """The rank that wrote a file, by holder number, where known.

    The rank of an unlisted file comes from its name, if the names of all others are right.
    """
    said: dict[int, set[int]] = {}
    world: set[int] = set()
    for place in metadata.places:
        world.update(place.ranks)
        for file, rank in place.entries:
            said.setdefault(files.numbers[metadata.files[file]], set()).add(rank)
            world.add(rank)
    for ranks in rank_lists(metadata):
        world.update(ranks)
    found = {file: min(ranks) for file, ranks in said.items() if len(ranks) == 1}
    numbers: dict[int, int] = {}
    for file, name in enumerate(files.names):
        parsed = parse_file_name(name)
        # De-duplicated files are numbered by rank only where every rank has one.
        if parsed is None or parsed.total != len(world) or said.get(file, {parsed.number}) != {parsed.number}:
            return found
        numbers[file] = parsed.number
    return numbers


def rank_lists(metadata: Metadata) -> set[RankList]:
    """The lists of ranks that tensors are laid out over."""
    return {said.layout.rank_list for said in metadata.tensors.values() if said.layout is not None}
