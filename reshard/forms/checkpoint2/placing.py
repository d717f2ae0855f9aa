"""The tensor files of an iteration, the slice of a tensor in each, and the rank that wrote the file.

The layout and the storage rank determine the slice: by the rank's place in the list of ranks. The recorded number of
the slice and the shape in the file are checks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.checkpoints.checkpoint import FileSharding
from reshard.checkpoints.formats.dtypes import INT4, ITEM_SIZES, SAFETENSORS_NAMES
from reshard.checkpoints.formats.headers import read_headers
from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.errors import CheckpointError, DamagedCheckpointError, LayoutError
from reshard.forms.checkpoint2.form import METADATA, file_order, parse_file_name
from reshard.forms.checkpoint2.metadata import LayoutRecord, Metadata, SliceRecords, TensorRecord
from reshard.forms.recorded import tensor_fault
from reshard.forms.request import Means
from reshard.layout import Grid, Layout, shape_of, volume_of
from reshard.storage import leads_to, reading, store_of
from reshard.text.messages import Report, as_pattern, plural, quoted, some_names, some_numbers
from reshard.threads import cached_property

_ENDING = ".safetensors"


class IterationFiles:
    """The tensor files of an iteration, their headers read.

    Args:
        directory: of the iteration.
        metadata_files: names of the files in metadata.json; None without it.
        means: open files; the report gets notes on skipped files.
        damaged: per path of a file that counts as absent, the reason.

    Attributes:
        names: the listed or existing files, in the order of their holder numbers.
        numbers: holder number by name.
        paths: of the files that can be read, by holder number.
        indexes: their headers.
        absent: the reason why each other file cannot be read, by name; names the path.
    """

    def __init__(
        self,
        directory: str,
        metadata_files: Sequence[str] | None,
        means: Means,
        damaged: Mapping[str, str],
    ) -> None:
        existing = _tensor_files(directory)
        chosen = (
            _of_single_rank(directory, existing)
            if metadata_files is None
            else _of_same_save(directory, metadata_files, existing, means.report)
        )
        self.names = sorted(chosen, key=file_order)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.absent: dict[str, str] = {}
        paths: dict[int, str] = {}
        for number, name in enumerate(self.names):
            path = os.path.join(directory, name)
            if path in damaged:
                self.absent[name] = damaged[path]
            elif name in existing:
                paths[number] = path
            else:
                self.absent[name] = f"{path}: does not exist"
        self.indexes: dict[int, CheckpointIndex] = {}
        for number, header in read_headers(means.handles, paths, "file"):
            if isinstance(header, DamagedCheckpointError):
                self.absent[self.names[number]] = header.message
            else:
                self.indexes[number] = header
        self.paths = {number: paths[number] for number in self.indexes}
        if self.absent:
            missing = [why for _, why in sorted(self.absent.items())]
            means.report.warn(
                f"{plural(len(missing), 'file')} of {directory} cannot be read: " + some_names(missing, 3)
            )


def _tensor_files(directory: str) -> set[str]:
    """Names of the .safetensors files in a directory, including links."""
    with reading(directory):
        return {
            entry.name
            for entry in store_of(directory).entries(directory)
            if entry.name.endswith(_ENDING) and not entry.name.startswith(".") and leads_to(entry.is_file)
        }


def _of_single_rank(directory: str, existing: set[str]) -> set[str]:
    """The files of a single rank's save, which needs no metadata.json."""
    parsed_names = {name: parse_file_name(name) for name in existing}
    series = {name.series for name in parsed_names.values() if name is not None}
    if not series:
        raise CheckpointError(f"{directory}: holds neither {METADATA} nor files of Checkpoint 2.0", file=directory)
    if any(total != 1 for _, total in series):
        ranks = max(total for _, total in series)
        raise CheckpointError(
            f"{directory}: {METADATA} is missing, and by their names the files are of {ranks} ranks: it is unknown "
            "how tensors are cut",
            file=directory,
            hint="the save was not finished, or not copied whole: bring the file back, or take another iteration",
        )
    if len(series) > 1:
        prefixes = some_names(sorted(name for name, parsed in parsed_names.items() if parsed is not None))
        raise CheckpointError(
            f"{directory}: holds files of several saves ({prefixes}), and no {METADATA} that lists the right ones",
            file=directory,
            hint="move the other files to another directory",
        )
    return {name for name, parsed in parsed_names.items() if parsed is not None}


def _of_same_save(directory: str, metadata_files: Sequence[str], existing: set[str], report: Report) -> set[str]:
    """The listed files, and unlisted ones of the same save."""
    series = {(parsed.kind, parsed.series) for parsed in map(parse_file_name, metadata_files) if parsed is not None}
    kinds = {kind for kind, _ in series}
    any_kind = {of_kind for _, of_kind in series}
    chosen = set(metadata_files)
    unrelated = []
    for name in sorted(existing - chosen):
        file_name = parse_file_name(name)
        if file_name is not None and (
            (file_name.kind, file_name.series) in series
            or (file_name.kind not in kinds and file_name.series in any_kind)
        ):
            chosen.add(name)
        else:
            unrelated.append(name)
    if unrelated:
        report.warn(
            f"{directory}: {METADATA} names no file of the same kind as {some_names(unrelated)}, which "
            f"{'is' if len(unrelated) == 1 else 'are'} skipped"
        )
    return chosen


# Names of types in both kinds of runs and in loaders, in lower case.
_DTYPES = {name.lower(): name for name in ITEM_SIZES} | {
    stored.lower(): name for name, stored in SAFETENSORS_NAMES.items() if name != INT4
}


@dataclass(frozen=True)
class TensorPlacement:
    """The places of slices, for tensors with equal metadata and storage.

    Attributes:
        grid: the grid of these tensors.
        layout: over ranks; None where every holder has the whole tensor.
        ranks: the ranks of `layout`, in its order; without a layout, all recorded holders.
        recorded: per slice the recorded files, ascending.
        readable: per slice the readable files of these.
        misnumbered: whether the numbers of slices follow MindFormers' faulty rule for scattered ranks.
        outside: storage ranks outside the layout.
        contents: the files in ``readable``, one for each set of tensors.
        rank_of: the files in ``readable``, each with its rank; empty without a layout.
    """

    grid: Grid
    layout: Layout | None
    ranks: tuple[int, ...]
    recorded: tuple[tuple[int, ...], ...]
    readable: tuple[tuple[int, ...], ...]
    misnumbered: bool
    outside: tuple[int, ...]
    contents: tuple[int, ...]
    rank_of: tuple[tuple[int, int], ...] = ()

    @classmethod
    def whole(cls, shape: tuple[int, ...], files: Sequence[int], ranks: Iterable[int]) -> TensorPlacement:
        """The placement of a tensor that is whole in every file, each of one rank."""
        holders = (tuple(sorted(files)),)
        return cls(Grid.whole(shape), None, tuple(sorted(ranks)), holders, holders, False, (), holders[0])

    @cached_property
    def sharding(self) -> FileSharding:
        return FileSharding(self.grid, self.readable)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        return _slice_shape(self.grid)

    @cached_property
    def lost(self) -> list[int]:
        """Slices with elements and without a readable recorded file."""
        return [
            number for number, files in enumerate(self.readable) if not files and volume_of(self.grid.slice_box(number))
        ]


class _LaidOut(NamedTuple):
    """A layout over ranks, and the place of each rank in their list."""

    layout: Layout
    positions: Mapping[int, int]
    scattered: bool

    def faulty_number(self, rank: int) -> int | None:
        """The number that MindFormers gives to a rank's slice if the ranks have gaps.

        It uses the rank's number instead of its place in the list.
        """
        return int(self.layout.slice_of_rank[rank % self.layout.device_count]) if self.scattered else None


class Placer:
    """Places the tensors of one iteration."""

    def __init__(self, metadata: Metadata, files: IterationFiles) -> None:
        self._metadata = metadata
        self._names = files.names
        self._numbers = [files.numbers[name] for name in metadata.files]
        self._indexes = files.indexes
        self._placements: dict[object, TensorPlacement] = {}
        self._layouts: dict[LayoutRecord, _LaidOut] = {}

    def place(self, name: str) -> TensorPlacement:
        """The places of a tensor's slices; a LayoutError if layout, shape and recorded slices contradict each other."""
        record = self._metadata.tensors[name]
        stored = self._metadata.stored.get(name, SliceRecords())
        key = (record._replace(dtype=""), stored.key)
        placement = self._placements.get(key)
        if placement is None:
            with self._naming(name):
                placement = self._placements[key] = self._place(record, self._entries(stored))
        return placement

    def place_by_rank(self, name: str, record: TensorRecord, rank_of: Mapping[int, int]) -> TensorPlacement:
        """The places of a tensor's slices, by the ranks of its files instead of metadata.

        ``rank_of`` has the rank of each file that holds a slice.
        """
        with self._naming(name):
            return self._place(record, ((None, file, rank) for file, rank in rank_of.items()))

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

    def _place(self, record: TensorRecord, entries: Iterable[tuple[int | None, int, int]]) -> TensorPlacement:
        """Compare a layout with storage: entries of slice number (None if not recorded), file and rank."""
        laid_out = None if record.layout is None else self._laid_out(record.layout)
        grid = Grid.whole(record.shape) if laid_out is None else laid_out.layout.grid(record.shape)
        _check_chunks(record, grid)
        recorded_files: list[set[int]] = [set() for _ in range(grid.slice_count)]
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
            recorded_files[at].add(file)
        readable = tuple(tuple(sorted(file for file in files if file in self._indexes)) for files in recorded_files)
        return TensorPlacement(
            grid,
            None if laid_out is None else laid_out.layout,
            tuple(sorted(ranks)) if record.layout is None else record.layout.rank_list,
            tuple(tuple(sorted(files)) for files in recorded_files),
            readable,
            misnumbered,
            tuple(sorted(outside)),
            self._distinct(file for files in readable for file in files),
            tuple((file, rank) for file, rank in sorted(rank_of.items()) if file in self._indexes),
        )

    def _laid_out(self, recorded: LayoutRecord) -> _LaidOut:
        laid_out = self._layouts.get(recorded)
        if laid_out is None:
            if recorded.interleaved:
                raise LayoutError("its layout is marked as interleaved_parallel, which no known writer uses")
            layout = Layout(recorded.device_matrix, recorded.tensor_map)
            positions = {rank: position for position, rank in enumerate(recorded.rank_list)}
            if len(positions) < len(recorded.rank_list) or len(positions) != layout.device_count:
                raise LayoutError(
                    f"device matrix {some_numbers(recorded.device_matrix)} does not lay out "
                    f"rank list {some_numbers(recorded.rank_list)}"
                )
            laid_out = self._layouts[recorded] = _LaidOut(layout, positions, _is_scattered(recorded.rank_list))
        return laid_out

    def _distinct(self, files: Iterable[int]) -> tuple[int, ...]:
        """The first file of each set of tensors."""
        first_files: dict[int, int] = {}
        for file in files:
            first_files.setdefault(id(self._indexes[file].tensors), file)
        return tuple(first_files.values())

    def tensor(self, name: str, files: Iterable[int], grid: Grid) -> Tensor | None:
        """The tensor of this name, of the recorded type and shape in all these files; None if no file holds it."""
        record = self._metadata.tensors.get(name)
        dtype = None if record is None else _DTYPES.get(record.dtype)
        shape = _slice_shape(grid)
        first: Tensor | None = None
        for file in files:
            index = self._indexes[file]
            tensor = index.tensors.get(name)
            if tensor is None:
                continue
            first = first or tensor
            problem = None
            if tensor.shape != shape:
                problem = (
                    f"has shape {list(tensor.shape)}, but a slice of it has {list(shape)} by {self._metadata.path}"
                )
            elif dtype not in (None, tensor.dtype) and tensor.dtype != INT4:
                problem = f"is {tensor.dtype}, but {dtype} by {self._metadata.path}"
            elif not tensor.same_type(first):
                problem = f"is {tensor.dtype}, but {first.dtype} in other files"
            if problem is not None:
                raise tensor_fault(index.path, name, problem, "take the files of one save")
        return first


def _slice_shape(grid: Grid) -> tuple[int, ...]:
    """The shape of every slice; a layout's slices are equal."""
    return shape_of(grid.slice_box(0))


def _is_scattered(ranks: Sequence[int]) -> bool:
    """Whether ascending ranks have gaps."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    return bool(steps) and min(steps) > 0 and steps != {1}


def _check_chunks(record: TensorRecord, grid: Grid) -> None:
    """Check the recorded slices against the layout."""
    if record.cuts not in (None, grid.cuts):
        raise LayoutError(f"axis_fragmentations {list(record.cuts or ())} differ from its layout, {list(grid.cuts)}")
    numbers = record.chunks.numbers
    if len(set(numbers)) < len(numbers):
        raise LayoutError("a slice is listed twice")
    if numbers and max(numbers) >= grid.slice_count:
        raise LayoutError(f"slice {max(numbers)} is listed, but it is cut into {grid.slice_count}")
    shape = _slice_shape(grid)
    for chunk_shape in record.chunks.shapes:
        if chunk_shape != shape:
            raise LayoutError(f"a slice is listed with shape {list(chunk_shape)}, and has {list(shape)} by the layout")


RankList = tuple[int, ...]


def disjoint(lists: Iterable[RankList]) -> list[RankList]:
    """The largest lists that share no rank, chosen greedily; ordered by their lowest ranks."""
    covered: set[int] = set()
    chosen = []
    for ranks in sorted(set(lists), key=lambda ranks: (-len(ranks), ranks)):
        if covered.isdisjoint(ranks):
            chosen.append(ranks)
            covered.update(ranks)
    return sorted(chosen, key=min)


def ranks_of_files(metadata: Metadata, files: IterationFiles) -> dict[int, int]:
    """The rank that wrote a file, by holder number, where known.

    An unlisted file's rank comes from its name, if the names of all listed files fit their recorded ranks.
    """
    recorded_ranks: dict[int, set[int]] = {}
    world: set[int] = set()
    for place in metadata.places:
        world.update(place.ranks)
        for file, rank in place.entries:
            recorded_ranks.setdefault(files.numbers[metadata.files[file]], set()).add(rank)
            world.add(rank)
    for ranks in rank_lists(metadata):
        world.update(ranks)
    by_record = {file: min(ranks) for file, ranks in recorded_ranks.items() if len(ranks) == 1}
    by_name: dict[int, int] = {}
    for file, name in enumerate(files.names):
        parsed = parse_file_name(name)
        # De-duplicated files are numbered by rank only where every rank has one.
        if parsed is None or parsed.total != len(world) or recorded_ranks.get(file, {parsed.number}) != {parsed.number}:
            return by_record
        by_name[file] = parsed.number
    return by_name


def rank_lists(metadata: Metadata) -> set[RankList]:
    return {record.layout.rank_list for record in metadata.tensors.values() if record.layout is not None}
