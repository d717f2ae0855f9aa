"""The content of strategy files: layouts as recorded, files, stages, and the strategy that they form.

`RecordedLayout` and `StrategyFile` mirror a file, so that it can be written again without loss. The rest of the program
uses `Stage` and `Strategy`: names without a stage prefix, layouts in one normal form, ranks numbered through all
stages.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from reshard.defaults import MAX_DEVICES
from reshard.errors import LayoutError, UsageError
from reshard.layout import Box, Grid, Layout
from reshard.text.messages import are, plural, rank_ranges, some_numbers
from reshard.threads import cached_property

# Maximum joins: each may double the readings of an expanded map; MindSpore's files have one or two.
MAX_JOINS = 8

NONE = "none"
"""The name of the strategy of one device with all tensors whole."""

SAME = "same"
"""The name of the strategy that the source records."""

AS_CUT = "as cut"
"""The name of the cut of rank files of which only the format changes; in records, users do not type it."""

SHARDS = "shards:"
"""The prefix of rows cut over a number of ranks, as in ``shards:8``; users type ``--shards 8``."""


class RecordedLayout(NamedTuple):
    """The record of one parameter in a strategy file.

    Attributes:
        device_matrix: sizes of the device grid's axes, slowest first.
        tensor_maps: one map of all dimensions where flat, one map per dimension where nested.
        nested: whether the maps are nested.
        tensor_shape: full shape (JSON only), in the expanded form where the map is.
        field: number of fields of a table whose slices interleave them; 0 in all known files.
        shard_step: optimizer shard step as recorded.
        shard_size: optimizer shard size as recorded.
        split_sizes: ``param_split_shape``.
        split_offsets: ``indices_offset``.
    """

    device_matrix: tuple[int, ...]
    tensor_maps: tuple[tuple[int, ...], ...]
    nested: bool = False
    tensor_shape: tuple[int, ...] | None = None
    field: int = 0
    shard_step: int = 0
    shard_size: int = 0
    split_sizes: tuple[int, ...] = ()
    split_offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, layout: Layout, nested: bool | None = None) -> RecordedLayout:
        """The record of a layout, without a shape."""
        maps = tuple(axes or (-1,) for axes in layout.tensor_map)
        if nested is None:
            nested = any(len(axes) > 1 for axes in maps)
        uneven = layout.uneven or ()
        return cls(
            layout.device_matrix,
            maps if nested else (tuple(axes[0] for axes in maps),),
            nested,
            shard_step=layout.shard_step,
            shard_size=layout.shard_size,
            split_sizes=uneven,
            split_offsets=tuple(itertools.accumulate(uneven, initial=0))[:-1] if uneven else (),
        )

    def layout(self) -> Layout:
        """The layout in normal form.

        Raises:
            LayoutError: the record contradicts itself, or exceeds the limits.
        """
        self._check_bounds()
        dimensions = self.dimensions
        sharded = self.shard_size != 0 and self.shard_step != 0
        if not self.device_matrix:
            # One device holds everything whole, whichever axes the map names.
            dimensions, sharded = ((),) * len(dimensions), False
        uneven = self._uneven()
        shape = None if uneven is not None else self._shape()
        joins = self.joins
        if joins > MAX_JOINS:
            raise LayoutError(f"tensor map {list(self.tensor_maps[0])} can be grouped in too many ways")
        return Layout(
            self.device_matrix,
            dimensions,
            shard_size=self.shard_size if sharded else 0,
            shard_step=self.shard_step if sharded else 0,
            uneven=uneven,
            recorded_shape=shape,
            expandable=joins > 0,
        )

    @property
    def dimensions(self) -> tuple[tuple[int, ...], ...]:
        """Per entry of the tensor map, the device axes that split it; none if it is whole."""
        if self.nested:
            # A parameter of one dimension has an empty map, which only marks the nested form.
            return tuple(() if entry == (-1,) else entry for entry in self.tensor_maps if entry)
        return tuple(() if axis == -1 else (axis,) for entry in self.tensor_maps for axis in entry)

    @property
    def joins(self) -> int:
        """Number of entries that may belong to the same dimension as the next one.

        The JSON writer stores a dimension that is split over several axes as one entry per axis;
        all but the last have the size of their axis. 0 means that the map cannot have this
        expanded form.
        """
        if self.nested or self.tensor_shape is None or self.split_offsets:
            return 0
        entries = self.dimensions
        sizes = self.device_matrix[::-1]
        return sum(
            bool(axes and after and 0 <= axes[0] < len(sizes) and size == sizes[axes[0]])
            for axes, after, size in zip(entries, entries[1:], self.tensor_shape)
        )

    def _check_bounds(self) -> None:
        if math.prod(self.device_matrix) > MAX_DEVICES:
            matrix = list(self.device_matrix)
            raise LayoutError(f"device matrix {matrix} has more than {MAX_DEVICES} devices")
        if self.field:
            raise LayoutError(f"field is {self.field}: slices that interleave fields are not supported")
        if self.shard_step < 0:
            raise LayoutError(f"optimizer shard step {self.shard_step} is negative")
        if min((*(self.tensor_shape or ()), *(self.split_sizes if self.split_offsets else ())), default=0) < 0:
            raise LayoutError("a dimension or slice of a negative number of elements")

    def _uneven(self) -> tuple[int, ...] | None:
        # Stand-alone writers put the full shape into param_split_shape; only the offsets are reliable.
        if not self.split_offsets:
            return None
        starts = itertools.accumulate(self.split_sizes, initial=0)
        if self.split_offsets != tuple(itertools.islice(starts, len(self.split_sizes))):
            sizes, offsets = some_numbers(self.split_sizes), some_numbers(self.split_offsets)
            raise LayoutError(f"slices of sizes {sizes} do not begin at indices_offset {offsets}")
        return self.split_sizes

    def _shape(self) -> tuple[int, ...] | None:
        shape = self.tensor_shape
        entries = self.dimensions
        widths = [max(1, len(axes)) for axes in entries]
        if shape is None or len(shape) == len(entries) or len(shape) != sum(widths):
            return shape
        # An expanded shape with a nested map, which groups it.
        ends = [sum(widths[: index + 1]) for index in range(len(widths))]
        return tuple(math.prod(shape[end - width : end]) for end, width in zip(ends, widths))


def shards_of(path: str) -> int | None:
    """The number of ranks in ``shards:8``; None for other strategies.

    Raises:
        UsageError: the number of ranks is invalid.
    """
    if not path.startswith(SHARDS):
        return None
    text = path[len(SHARDS) :]
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= MAX_DEVICES and len(text) < 9):
        raise UsageError(f"{path!r}: the number of shards must be 1 to {MAX_DEVICES}, as in {SHARDS}8")
    return int(text)


def target_named(path: str | None, shards: int | None) -> str | None:
    """The path of a target's strategy, or the name of rows over a number of ranks."""
    if shards is None:
        return path
    if path is not None:
        raise UsageError("--shards and --dst-strategy both lay out the target", hint="leave out one of them")
    shards_of(f"{SHARDS}{shards}")
    return f"{SHARDS}{shards}"


def target_words(path: str) -> list[str]:
    """The option of a target's strategy, as users type it: ``--shards 8`` for ``shards:8``."""
    shards = shards_of(path)
    return ["--dst-strategy", path] if shards is None else ["--shards", str(shards)]


def rows_over(count: int, shape: tuple[int, ...]) -> Layout:
    """The layout of rows over ranks in parts of one size, the last smaller or empty; a scalar is on each rank."""
    if not shape:
        return Layout((count,), ())
    part = -(-shape[0] // count)
    sizes = tuple(max(0, min(part, shape[0] - part * rank)) for rank in range(count))
    return Layout((count,), ((0,), *((),) * (len(shape) - 1)), uneven=sizes)


def names_files(path: str) -> bool:
    """Whether a strategy's name is a path."""
    return path not in (NONE, SAME, AS_CUT) and not path.startswith(SHARDS)


class StrategyItem(NamedTuple):
    """The split of one operator: kept for merging; checkpoints only use its stage.

    Attributes:
        node: operator name.
        stage: pipeline stage of the operator.
        strategies: per operator input, how many times each dimension is split.
    """

    node: str
    stage: int
    strategies: tuple[tuple[int, ...], ...] = ()


class StrategyFile(NamedTuple):
    """The content of one strategy file.

    Attributes:
        path: path that was read, or will be written.
        form: ``protobuf`` or ``json``.
        items: operators in file order.
        layouts: parameters in file order, named as in the file (a merged file's carry the stage).
        current_stage: recorded, without meaning.
    """

    path: str
    form: str
    items: tuple[StrategyItem, ...]
    layouts: Mapping[str, RecordedLayout]
    current_stage: int = 1


class Stage(NamedTuple):
    """One pipeline stage.

    Attributes:
        number: 0 for the first.
        first_rank: global rank of its first device.
        device_count: its devices.
        layouts: layout per parameter of this stage.
        files: the files that record it; several where copies agree.
    """

    number: int
    first_rank: int
    device_count: int
    layouts: Mapping[str, Layout]
    files: tuple[str, ...] = ()

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.device_count)

    @property
    def label(self) -> str:
        return f"stage {self.number}: {rank_ranges(self.ranks)}"


class Holding(NamedTuple):
    """One stage that holds a parameter, and its layout there; in checkpoints a `checkpoint.Sharding`.

    Attributes:
        grid: the parameter's slices; without dimensions where its shape is unknown.
    """

    stage: Stage
    layout: Layout
    grid: Grid = Grid(())

    def holders(self, slice_number: int) -> list[int]:
        """Global ranks that hold a slice, ascending."""
        first = self.stage.first_rank
        return [first + rank for rank in self.layout.holders(slice_number)]

    def stored_box(self, slice_number: int) -> Box:
        return self.grid.slice_box(slice_number)

    def slice_of(self, rank: int) -> int:
        """The slice that a global rank of this stage holds."""
        return self.layout.slice_of_rank[rank - self.stage.first_rank]


@dataclass(frozen=True)
class Strategy:
    """The layouts of all parameters over all ranks.

    Attributes:
        stages: pipeline stages in order, at least one; none in a placeholder, until the source is read.
        path: the file or directory it was read from, or ``none``.
        notes: notes for the user, such as skipped files.
        original: the strategy as read, where its names were changed to those of the target.
    """

    stages: tuple[Stage, ...]
    path: str
    notes: tuple[str, ...] = field(default=(), compare=False)
    original: Strategy | None = field(default=None, compare=False, repr=False)

    @classmethod
    def none(cls) -> Strategy:
        return cls((Stage(0, 0, 1, {}),), NONE)

    @classmethod
    def same(cls) -> Strategy:
        return cls((), SAME)

    @classmethod
    def as_cut(cls, ranks: int) -> Strategy:
        """Unknown layouts that stay: no parameter is listed, and each rank keeps the entries of its own file."""
        return cls((Stage(0, 0, ranks, {}, (AS_CUT,)),), AS_CUT)

    @classmethod
    def shards(cls, count: int, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Strategy:
        """Rows cut over ranks in parts of one size, the last smaller or empty, as PyTorch's FSDP cuts them.

        Args:
            count: ranks.
            shapes: of all tensors; None until the source is read.
        """
        path = f"{SHARDS}{count}"
        if shapes is None:
            return cls((), path)
        layouts_by_shape: dict[tuple[int, ...], Layout] = {}
        layouts = {}
        for name, shape in shapes.items():
            if shape not in layouts_by_shape:
                layouts_by_shape[shape] = rows_over(count, shape)
            layouts[name] = layouts_by_shape[shape]
        return cls((Stage(0, 0, count, layouts, (path,)),), path)

    def with_layouts(self, layouts_of: Callable[[Mapping[str, Layout]], dict[str, Layout]]) -> Strategy:
        return replace(self, stages=tuple(stage._replace(layouts=layouts_of(stage.layouts)) for stage in self.stages))

    @property
    def is_placeholder(self) -> bool:
        """True for `same` and for shards, until the source is read."""
        return not self.stages

    @property
    def is_none(self) -> bool:
        """True for `none`: a single device, and no list of parameters."""
        return not self.is_placeholder and not any(stage.files for stage in self.stages)

    @property
    def is_as_cut(self) -> bool:
        return self.path == AS_CUT

    @cached_property
    def device_count(self) -> int:
        """Devices of all stages; ranks are ``0 .. device_count - 1``."""
        return self.stages[-1].ranks.stop

    def without(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The ranks that remain without these (``--without-ranks``), ascending.

        Raises:
            UsageError: one of them is no rank of the strategy.
        """
        beyond = [rank for rank in ranks if not 0 <= rank < self.device_count]
        if beyond:
            raise UsageError(
                f"--without-ranks: {rank_ranges(beyond)} {are(beyond)} out of range: the source strategy ({self.path}) "
                f"has {plural(self.device_count, 'rank')}",
                rank=beyond[0],
            )
        return tuple(rank for rank in range(self.device_count) if rank not in ranks)

    def stage_of(self, rank: int) -> Stage:
        """The stage of a global rank.

        Raises:
            UsageError: the rank is out of range.
        """
        if not 0 <= rank < self.device_count:
            raise UsageError(
                f"rank {rank} is out of range: strategy {self.path} has "
                + ("rank 0 only" if self.device_count == 1 else f"ranks 0 to {self.device_count - 1}"),
                rank=rank,
            )
        return self.stages[bisect_right(self._first_ranks, rank) - 1]

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.layouts))

    @cached_property
    def _first_ranks(self) -> list[int]:
        return [stage.first_rank for stage in self.stages]
