"""The files of a checkpoint of any form but rank directories as a tree, from what its own reader tells.

A file of such a checkpoint is no rank: of tensors that are cut in different ways it may hold different slices.
So it counts as several ranks here, one for each class of tensors that are cut and held alike: such a class is
laid out over as many ranks as files hold slices of it, in the order of the slices, copies after all first ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Optional

from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, Sharding
from reshard.errors import CheckpointError
from reshard.layout import Grid, Layout
from reshard.strategies import Stage, Strategy
from reshard.text.wording import quoted
from reshard.verification.parameter import Holding, Parameter, shared
from reshard.verification.tree import Tree

_Holders = tuple[tuple[int, ...], ...]


@dataclass
class FormTree:
    """A checkpoint as a tree, and as the strategy that would have saved the tree.

    Attributes:
        checkpoint: the checkpoint.
        tree: its files; values are held by the numbers of their files.
        strategy: how the tensors are laid out over the tree's ranks.
        files: the number of the file that a rank of the tree stands for.
    """

    checkpoint: Checkpoint
    tree: Tree
    strategy: Strategy
    files: dict[int, int] = field(default_factory=dict)

    def paths(self, ranks: Iterable[int]) -> list[str]:
        """The files that some ranks of the tree stand for, in their order."""
        return [self.checkpoint.files[number] for number in sorted({self.files[rank] for rank in ranks})]


@dataclass
class _Class:
    """Tensors that are cut alike, in as many slices per dimension, and held by the same files."""

    stage: Stage
    layout: Layout
    holders: tuple[int, ...]
    layouts: dict[str, Layout]


def tree_of(checkpoint: Checkpoint, chosen: Optional[Collection[int]] = None) -> FormTree:
    """Make a tree of a checkpoint.

    Args:
        checkpoint: of any form but rank directories.
        chosen: numbers of the files to look into; all of them where None.

    Raises:
        CheckpointError: a tensor is not cut into equal slices.
    """
    indexes = {number: index for number, index in checkpoint.indexes.items() if chosen is None or number in chosen}
    # Tensors without a file that holds them are lost; whoever wants them is told by the reader.
    outside = {name: tuple(n for n in checkpoint.holders(name) if n in indexes) for name in checkpoint.values()}
    tree = Tree(dict(indexes), {}, outside={name: numbers for name, numbers in outside.items() if numbers})
    made = FormTree(checkpoint, tree, Strategy((), checkpoint.place), {number: number for number in indexes})
    classes = _Classes(made)
    for name, tensor in checkpoint.tensors.items():
        holdings = tuple(
            Holding(found.stage, found.layout, found.holders)
            for number, sharding in enumerate(tensor.shardings)
            for found in [classes.of(tensor, number, sharding)]
            if found.holders
        )
        if holdings:
            tree.parameters[name] = Parameter(name, tensor.dtype, tensor.shape, holdings)
    made.strategy = Strategy(classes.stages, checkpoint.place)
    return made


class _Classes:
    """The classes of tensors of a checkpoint; each takes the next free ranks of the tree."""

    def __init__(self, made: FormTree) -> None:
        self._made = made
        self._next = max(made.checkpoint.files, default=-1) + 1
        # Most tensors share the object that says how they are held; it is kept, so that its id stays its own.
        self._known: dict[tuple[int, int], tuple[Sharding, _Holders]] = {}
        self._classes: dict[tuple[int, tuple[int, ...], _Holders], _Class] = {}

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(found.stage for found in self._classes.values())

    def of(self, tensor: GlobalTensor, number: int, sharding: Sharding) -> _Class:
        """The class of a tensor, as one of its shardings tells."""
        key = (id(sharding), number)
        if key not in self._known:
            held = tuple(tuple(sharding.holders(slice)) for slice in range(sharding.grid.slice_count))
            self._known[key] = sharding, held
        held = self._known[key][1]
        grid = sharding.grid
        found = self._classes.get((number, grid.cuts, held))
        if found is None:
            found = self._classes[number, grid.cuts, held] = self._new(number, grid, held)
        if found.layout.grid(tensor.shape) != grid:
            raise CheckpointError(
                f"{quoted(tensor.name)}: is cut into slices of different sizes, which cannot be verified",
                file=self._made.checkpoint.place,
                parameter=tensor.name,
            )
        found.layouts[tensor.name] = found.layout
        return found

    def _new(self, number: int, grid: Grid, held: _Holders) -> _Class:
        indexes = self._made.tree.indexes
        first, slices = self._next, grid.slice_count
        files = [[file for file in files if file in self._made.checkpoint.indexes] for files in held]
        copies = max(map(len, files), default=0) or 1
        self._next += copies * slices
        dimensions = len(grid.cuts)
        layout = shared(Layout((copies, *grid.cuts), tuple((dimensions - 1 - at,) for at in range(dimensions))))
        holders = []
        for copy, slice in itertools.product(range(copies), range(slices)):
            if copy < len(files[slice]) and files[slice][copy] in indexes:
                rank = first + copy * slices + slice
                self._made.files[rank] = files[slice][copy]
                holders.append(rank)
        for rank in holders:
            indexes[rank] = indexes[self._made.files[rank]]
        layouts: dict[str, Layout] = {}
        stage = Stage(number, first, copies * slices, layouts, (self._made.checkpoint.place,))
        return _Class(stage, layout, tuple(holders), layouts)
