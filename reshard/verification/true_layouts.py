"""How a parameter really is cut, which strategies do not always tell.

The strategy says how a parameter is cut; the shapes of the slices in the files say which of its
possible readings is true: JSON strategies may join entries of a tensor map to one dimension, and
accumulated gradients may be stored without the optimizer shard that is recorded for them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints import CheckpointIndex, Tensor, tensors_named
from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.errors import CheckpointError
from reshard.layout import Layout, whole
from reshard.strategies import Stage, Strategy
from reshard.text.names import ACCUMULATED_GRADIENTS, as_pattern
from reshard.text.wording import quoted, rank_ranges
from reshard.verification.parameter import Holding, Parameter, Shards, shared, slice_shape


def is_text(dtype: str) -> bool:
    """Whether a value is text or a map tensor, which not every format can hold."""
    return dtype in NO_ARRAYS


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

    def readings(self, plain: bool) -> dict[tuple[int, ...], Layout]:
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


class _Reading(NamedTuple):
    """How all stages may cut a parameter.

    Attributes:
        layouts: the layout of each.
        plain: whether it is without the optimizer shards that are recorded.
    """

    layouts: list[Layout]
    plain: bool


def true_parameter(
    name: str,
    strategy: Strategy,
    indexes: Mapping[int, CheckpointIndex],
    ranks_with: Callable[[str, int, int], tuple[int, ...]],
    known: Mapping[str, Parameter],
) -> Optional[Parameter]:
    """What the files of all ranks tell of a parameter; None where no stage that lists it holds it.

    Args:
        name: the parameter.
        strategy: what the checkpoint was saved with.
        indexes: what each rank's file holds.
        ranks_with: the ranks that have a tensor, of so many ranks from a first one on, ascending.
        known: parameters that accumulated gradients may belong to.

    Raises:
        CheckpointError: files and strategy contradict each other, or nothing tells how it is cut.
    """
    stored = []
    tensors: dict[int, Tensor] = {}
    for stage in strategy.stages:
        ranks = ranks_with(name, stage.first_rank, stage.device_count)
        if not ranks or not (strategy.is_none or name in stage.layouts):
            continue
        held = dict(zip(ranks, tensors_named(name, (indexes[rank] for rank in ranks))))
        tensors.update(held)
        recorded = whole(len(held[ranks[0]].shape)) if strategy.is_none else stage.layouts[name]
        stored.append(_Stored(stage, recorded, ranks, {rank: tensor.shape for rank, tensor in held.items()}))
    if not stored:
        return None
    dtype = _one_dtype(name, indexes, tensors)
    accumulated = name.startswith(ACCUMULATED_GRADIENTS)
    # By the strategy, not by those of its stages that have files here.
    recording = [stage for stage in strategy.stages if name in stage.layouts and stage.layouts[name].shards > 1]
    readings: dict[tuple[int, ...], _Reading] = {}
    for plain in (False, True) if accumulated and recording else (False,):
        found = [one.readings(plain) for one in stored]
        for shape in set(found[0]).intersection(*found):
            readings.setdefault(shape, _Reading([choices[shape] for choices in found], plain))
    shape = _decide(name, indexes, stored, list(readings), known)
    layouts, plain = readings[shape]
    holdings = tuple(Holding(one.stage, shared(layout), one.holders) for one, layout in zip(stored, layouts))
    if not accumulated:
        return Parameter(name, dtype, shape, holdings)
    if not recording:
        return Parameter(name, dtype, shape, holdings, Shards.NOT_RECORDED)
    if not any(one.recorded.shards > 1 for one in stored):
        deciding = tuple(itertools.chain.from_iterable(stage.ranks for stage in recording))
        return Parameter(name, dtype, shape, holdings, Shards.UNDECIDED, deciding)
    return Parameter(name, dtype, shape, holdings, Shards.NOT_MADE if plain else Shards.MADE)


def _one_dtype(name: str, indexes: Mapping[int, CheckpointIndex], tensors: Mapping[int, Tensor]) -> str:
    with_elements = ((rank, tensor) for rank, tensor in tensors.items() if tensor.nbytes)
    first_rank, first = next(with_elements, next(iter(tensors.items())))
    # Ranks whose files are built alike share one description.
    checked: set[int] = set()
    for rank, tensor in tensors.items():
        if id(tensor) in checked:
            continue
        checked.add(id(tensor))
        path = indexes[rank].path
        problem = None
        if is_text(tensor.dtype):
            problem = (
                f"{path}: {quoted(name)} is {tensor.dtype}, but the strategy lays it out as a tensor (rank {rank})"
            )
        elif not tensor.same_type(first):
            problem = f"{quoted(name)} is {first.dtype} on rank {first_rank} but {tensor.dtype} on rank {rank} ({path})"
        if problem is not None:
            raise CheckpointError(problem, file=path, rank=rank, parameter=name)
    return first.dtype


def _decide(
    name: str,
    indexes: Mapping[int, CheckpointIndex],
    stored: list[_Stored],
    shapes: list[tuple[int, ...]],
    known: Mapping[str, Parameter],
) -> tuple[int, ...]:
    """The full shape, of those that the slices allow."""
    if len(shapes) == 1:
        return shapes[0]
    owner = known.get(name[len(ACCUMULATED_GRADIENTS) :]) if name.startswith(ACCUMULATED_GRADIENTS) else None
    if owner is not None and owner.shape in shapes:
        return owner.shape
    rank, _ = next(iter(stored[0].shapes.items()))
    path = indexes[rank].path
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
