"""What the files of one step hold, by a strategy: a reading of its own, which knows of no plan.

The strategy says how a parameter is cut; the shapes of the slices in the files say which of its
possible readings is true: JSON strategies may join entries of a tensor map to one dimension, and
accumulated gradients may be stored without the optimizer shard that is recorded for them.

Nothing is kept per parameter and rank: ranks whose files are built alike share their tensors, and
parameters that the same ranks hold share the list of them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Callable, NamedTuple, Optional, Union

from reshard.checkpoints import CheckpointIndex, FileHandles, KnownStructures, Tensor, read_index
from reshard.checkpoints.storage import storage_of
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError, one_error
from reshard.layout import Layout
from reshard.names import ACCUMULATED_GRADIENTS, as_pattern
from reshard.strategies import Stage, Strategy
from reshard.verification.reading import Part, whole_box
from reshard.verification.sums import Box
from reshard.wording import quoted, rank_ranges

_OPAQUE = ("str", "MapTensor")


def is_text(dtype: str) -> bool:
    """Whether a value is text or a map tensor, which not every format can hold."""
    return dtype in _OPAQUE


class Slice(NamedTuple):
    """A slice of a parameter in one stage, and the ranks of the stage whose files hold it.

    Attributes:
        stage: the stage's number.
        box: what of the full tensor it is.
        holders: ranks whose file has it, ascending; may be empty.
        ranks: all ranks that the layout gives it to, ascending.
    """

    stage: int
    box: Box
    holders: tuple[int, ...]
    ranks: tuple[int, ...]


class Holding(NamedTuple):
    """A stage that holds a parameter.

    Attributes:
        stage: the stage.
        layout: how it cuts the parameter, of the readings of its record the one that is true.
        holders: ranks of the stage whose file has the parameter, ascending; at least one.
    """

    stage: Stage
    layout: Layout
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter that a strategy lists, as the files hold it.

    Attributes:
        name: its name.
        dtype: MindSpore's name of its element type.
        shape: shape of the full tensor.
        holdings: the stages that hold it, in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    holdings: tuple[Holding, ...]

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Its slices, stage by stage; made when they are asked for."""
        return tuple(
            part for stage, layout, holders in self.holdings for part in slices_of(layout, stage, self.shape, holders)
        )

    @property
    def holders(self) -> Iterator[int]:
        """Every rank whose file has it, ascending."""
        return itertools.chain.from_iterable(holding.holders for holding in self.holdings)

    def whole_stages(self) -> list[tuple[Slice, ...]]:
        """The slices of every stage of which all are there."""
        stages = [slices_of(layout, stage, self.shape, holders) for stage, layout, holders in self.holdings]
        return [parts for parts in stages if all(part.holders for part in parts)]


@dataclass
class Tree:
    """The files of one step.

    Attributes:
        indexes: what each rank's file holds.
        damaged: why a rank's file counts as absent.
        parameters: what the strategy lists and the files hold, by name.
        problems: listed parameters that files and strategy contradict each other about.
        outside: names that the strategy does not list, with the ranks that have them, ascending.
    """

    indexes: dict[int, CheckpointIndex]
    damaged: dict[int, str]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    problems: dict[str, InputError] = field(default_factory=dict)
    outside: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def check_readings(self) -> None:
        """Refuse a tree that does not fit its strategy.

        Raises:
            InputError: names every parameter that does not fit.
        """
        if self.problems:
            problems = [*self.problems.values()]
            raise one_error(problems, f"{len(problems)} parameters do not fit the strategy")

    def alike(self) -> list[tuple[Mapping[str, Tensor], tuple[int, ...]]]:
        """What files hold, with the ranks, ascending, whose files are built so."""
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, index in self.indexes.items():
            ranks[id(index.tensors)].append(rank)
        return [(self.indexes[same[0]].tensors, tuple(same)) for same in ranks.values()]

    def tensor(self, name: str, rank: int) -> Tensor:
        """A rank's tensor of a name."""
        return self.indexes[rank].tensors[name]

    def part(self, name: str, rank: int, shape: tuple[int, ...], held: Box, box: Optional[Box] = None) -> Part:
        """What has to be read for a box, by default all, of the slice that a rank holds."""
        return Part(self.indexes[rank].path, self.tensor(name, rank), shape, held, held if box is None else box)

    def whole_part(self, name: str, rank: int) -> Part:
        """What has to be read for a tensor that is nothing but itself."""
        shape = self.tensor(name, rank).shape
        return self.part(name, rank, shape, whole_box(shape))


def read_headers(files: Mapping[int, str], handles: FileHandles) -> Tree:
    """Read what every rank's file holds; damaged files count as absent.

    Raises:
        CheckpointError: a file is missing, unreadable or encrypted.
        RetryableError: reading failed.
    """
    known = KnownStructures(handles)

    def index(rank: int) -> Union[CheckpointIndex, DamagedCheckpointError]:
        try:
            return read_index(handles, files[rank], known)
        except DamagedCheckpointError as error:
            return error

    ranks = sorted(files)
    tree = Tree({}, {})
    threads = storage_of(files[ranks[0]]).in_flight if ranks else 1
    with ThreadPoolExecutor(threads) as pool:
        # The first alone: files that are built like it are then only compared with it.
        found = [*map(index, ranks[:1]), *pool.map(index, ranks[1:])]
    for rank, result in zip(ranks, found):
        if isinstance(result, DamagedCheckpointError):
            tree.damaged[rank] = result.message
        else:
            tree.indexes[rank] = result
    return tree


def read_tree(
    files: Mapping[int, str],
    strategy: Strategy,
    handles: FileHandles,
    admit: Optional[Callable[[str], bool]] = None,
) -> Tree:
    """Read what the files of one step hold.

    Args:
        files: path per rank; ranks may be missing.
        strategy: what the checkpoint was saved with. `none` lists every tensor but those of one element.
        handles: open files.
        admit: tells which names are looked at; all of them where None.

    Raises:
        CheckpointError: a file is missing, unreadable or encrypted.
        RetryableError: reading failed.
    """
    tree = read_headers(files, handles)
    holders = _Holders(tree)
    # Accumulated gradients are compared with the parameter they belong to, so they come last.
    for name in sorted(holders.names, key=lambda name: (name.startswith(ACCUMULATED_GRADIENTS), name)):
        if admit is not None and not admit(name):
            continue
        ranks = holders.of(name)
        if not _lists(strategy, name, tree.tensor(name, ranks[0])):
            tree.outside[name] = ranks
            continue
        try:
            parameter = _parameter(name, strategy, tree, holders)
        except InputError as error:
            tree.problems[name] = error
            continue
        if parameter is not None:
            tree.parameters[name] = parameter
    return tree


class _Holders:
    """Which ranks have which tensors; those of the same files share one tuple of ranks."""

    def __init__(self, tree: Tree) -> None:
        self._ranks: list[tuple[int, ...]] = []
        self._files: dict[str, list[int]] = defaultdict(list)
        for number, (tensors, ranks) in enumerate(tree.alike()):
            self._ranks.append(ranks)
            for name in tensors:
                self._files[name].append(number)
        self._found: dict[tuple[tuple[int, ...], int, int], tuple[int, ...]] = {}

    @property
    def names(self) -> Iterable[str]:
        return self._files.keys()

    def of(self, name: str, first: int = 0, count: int = 1 << 62) -> tuple[int, ...]:
        """The ranks of a stage (default: all) that have a tensor, ascending."""
        key = (tuple(self._files[name]), first, count)
        found = self._found.get(key)
        if found is None:
            ranks = sorted(itertools.chain.from_iterable(self._ranks[number] for number in key[0]))
            found = self._found[key] = tuple(rank for rank in ranks if first <= rank < first + count)
        return found


def _lists(strategy: Strategy, name: str, tensor: Tensor) -> bool:
    if strategy.is_none:
        return not is_text(tensor.dtype) and math.prod(tensor.shape) != 1
    return any(name in stage.layouts for stage in strategy.stages)


def layout_choices(name: str, recorded: Layout) -> Iterator[Layout]:
    """The layouts that a recorded one may mean."""
    yield from recorded.regroupings()
    if name.startswith(ACCUMULATED_GRADIENTS) and recorded.shards > 1:
        yield from recorded.without_shards().regroupings()


def slice_shape(layout: Layout, shape: tuple[int, ...], local_rank: int) -> tuple[int, ...]:
    """The shape of the slice that a rank of the stage holds."""
    box = layout.slice_box(shape, int(layout.slice_of_rank[local_rank]))
    return tuple(stop - start for start, stop in box)


def slice_shapes(layout: Layout, shape: tuple[int, ...], local_ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """The shapes of the slices that several ranks of the stage hold."""
    if layout.uneven is None:
        # All slices are alike.
        return [slice_shape(layout, shape, 0)] * len(list(local_ranks))
    return [slice_shape(layout, shape, rank) for rank in local_ranks]


def slices_of(layout: Layout, stage: Stage, shape: tuple[int, ...], holders: Iterable[int]) -> tuple[Slice, ...]:
    """Every slice of a parameter in a stage."""
    return _slices_of(_shared(layout), stage.number, stage.first_rank, shape, tuple(holders))


@lru_cache(maxsize=1024)
def _shared(layout: Layout) -> Layout:
    """One of all equal layouts, since each keeps tables of all ranks."""
    return layout


# Most parameters are cut like one shortly before them.
@lru_cache(maxsize=8)
def _slices_of(
    layout: Layout, stage: int, first: int, shape: tuple[int, ...], holders: tuple[int, ...]
) -> tuple[Slice, ...]:
    there = set(holders)
    edges = [layout.boundaries(dimension, size) for dimension, size in enumerate(shape)]
    # Slices count in C order.
    boxes = itertools.product(*(zip(cuts, cuts[1:]) for cuts in edges))
    slices = []
    for number, box in enumerate(boxes):
        ranks = tuple(first + rank for rank in layout.holders(number).tolist())
        held = tuple(rank for rank in ranks if rank in there)
        slices.append(Slice(stage, box, ranks if held == ranks else held, ranks))
    return tuple(slices)


class _Stored(NamedTuple):
    """A stage that lists a parameter, and what its ranks hold of it.

    Attributes:
        stage: the stage.
        recorded: the layout that it lists.
        holders: ranks that have the parameter, ascending.
        shapes: shape of what each of them has.
    """

    stage: Stage
    recorded: Layout
    holders: tuple[int, ...]
    shapes: dict[int, tuple[int, ...]]

    def readings(self, name: str, plain: bool) -> dict[tuple[int, ...], Layout]:
        """Per full shape that all slices agree with, the layout that gives it."""
        recorded = self.recorded.without_shards() if plain else self.recorded
        found: dict[tuple[int, ...], Layout] = {}
        for layout in recorded.regroupings():
            example = next(iter(self.shapes.values()))
            if len(layout.cuts) != len(example):
                continue
            shape = layout.full_shape(example)
            if layout.recorded_shape not in (None, shape):
                continue
            first = self.stage.first_rank
            if layout.uneven is None:
                fits = set(self.shapes.values()) == {example}
            else:
                fits = all(slice_shape(layout, shape, rank - first) == held for rank, held in self.shapes.items())
            if fits:
                found.setdefault(shape, layout)
        return found


def _parameter(name: str, strategy: Strategy, tree: Tree, holders: _Holders) -> Optional[Parameter]:
    stored = []
    tensors: dict[int, Tensor] = {}
    for stage in strategy.stages:
        ranks = holders.of(name, stage.first_rank, stage.device_count)
        if not ranks or not (strategy.is_none or name in stage.layouts):
            continue
        held = {rank: tree.indexes[rank].tensors[name] for rank in ranks}
        tensors.update(held)
        recorded = Layout((), ((),) * len(held[ranks[0]].shape)) if strategy.is_none else stage.layouts[name]
        stored.append(_Stored(stage, recorded, ranks, {rank: tensor.shape for rank, tensor in held.items()}))
    if not stored:
        return None
    dtype = _one_dtype(name, tree, tensors)
    readings: dict[tuple[int, ...], list[Layout]] = {}
    for plain in (False, True):
        if plain and not name.startswith(ACCUMULATED_GRADIENTS):
            continue
        found = [one.readings(name, plain) for one in stored]
        for shape in set(found[0]).intersection(*found):
            readings.setdefault(shape, [choices[shape] for choices in found])
    shape = _decide(name, tree, stored, list(readings))
    holdings = tuple(Holding(one.stage, _shared(layout), one.holders) for one, layout in zip(stored, readings[shape]))
    return Parameter(name, dtype, shape, holdings)


def _one_dtype(name: str, tree: Tree, tensors: Mapping[int, Tensor]) -> str:
    first_rank, first = next(iter(tensors.items()))
    # Ranks whose files are built alike share one description.
    checked: set[int] = set()
    for rank, tensor in tensors.items():
        if id(tensor) in checked:
            continue
        checked.add(id(tensor))
        path = tree.indexes[rank].path
        problem = None
        if is_text(tensor.dtype):
            problem = (
                f"{path}: {quoted(name)} is {tensor.dtype}, but the strategy lays it out as a tensor (rank {rank})"
            )
        elif (tensor.dtype, tensor.item_size) != (first.dtype, first.item_size):
            problem = f"{quoted(name)} is {first.dtype} on rank {first_rank} but {tensor.dtype} on rank {rank} ({path})"
        if problem is not None:
            raise CheckpointError(problem, file=path, rank=rank, parameter=name)
    return first.dtype


def _decide(name: str, tree: Tree, stored: list[_Stored], shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The full shape, of those that the slices allow."""
    if len(shapes) == 1:
        return shapes[0]
    owner = tree.parameters.get(name[len(ACCUMULATED_GRADIENTS) :]) if name.startswith(ACCUMULATED_GRADIENTS) else None
    if owner is not None and owner.shape in shapes:
        return owner.shape
    rank, _ = next(iter(stored[0].shapes.items()))
    path = tree.indexes[rank].path
    if shapes:
        told = " or ".join(str(list(shape)) for shape in sorted(shapes))
        raise CheckpointError(
            f"{path}: {quoted(name)} (rank {rank}) can be a slice of a tensor of shape {told}, and nothing tells which",
            file=path,
            rank=rank,
            parameter=name,
            hint=f"pass the protobuf strategy, which tells, or leave it out with --exclude {as_pattern(name)}",
        )
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for held in stored:
        for holder, shape in held.shapes.items():
            by_shape[shape].append(holder)
    told = ", ".join(f"{list(shape)} on {rank_ranges(ranks)}" for shape, ranks in list(by_shape.items())[:4])
    maps = ", ".join(f"{list(held.recorded.device_matrix)} and {held.recorded.map_text}" for held in stored)
    raise CheckpointError(
        f"{path}: {quoted(name)} has shape {told}, which does not fit the strategy's device matrix and tensor map "
        f"{maps}",
        file=path,
        rank=rank,
        parameter=name,
        hint="pass the strategy that this checkpoint was saved with",
    )
