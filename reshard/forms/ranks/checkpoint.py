"""One step of a rank tree, and the full shape and the real layout of every parameter.

The usual strategy files contain no shapes, and some of their contents are wrong, so they are compared with the
files. A *reading* of a parameter's layouts (dimensions regrouped, with or without the recorded optimizer shard)
is right if every slice in the files has its shape. Exactly one reading must be right; anything else is an error
that names the parameter.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from reshard.checkpoints import CheckpointIndex, FileHandles, Tensor, files_alike, tensors_named
from reshard.checkpoints.checkpoint import (
    AS_RECORDED,
    Checkpoint,
    GlobalTensor,
    ShardReading,
    StoredObject,
    TiedTensors,
    order_in_files,
    stored_checkpoint,
)
from reshard.checkpoints.formats.dtypes import NO_ARRAYS, TEXT
from reshard.checkpoints.formats.headers import read_headers
from reshard.checkpoints.formats.output import DEDUPLICATED
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError, one_error
from reshard.forms.ranks.tree import StepFiles
from reshard.layout import Layout, shape_of, whole
from reshard.storage import absolute, common_directory
from reshard.strategies import Holding, Stage, Strategy
from reshard.text.messages import Report, as_pattern, listing, number_ranges, plural, quoted, rank_ranges, step_words
from reshard.text.names import ACCUMULATED_GRADIENTS, trained


def stage_shardings(tensor: GlobalTensor) -> tuple[Holding, ...]:
    """The stages that hold a tensor of rank files, with its real layout in each."""
    return cast("tuple[Holding, ...]", tensor.shardings)


class RankCheckpoint:
    """One step of a rank tree, the headers of all its files read; see `checkpoint.Checkpoint`. Holders are ranks.

    Attributes:
        step_files: the files by name alone.
        damaged: by rank, the reason why its file counts as absent.
        tensors: the strategy's parameters in the files, by name, once they were read with a strategy.
        laid_out: names that the strategy lists.
        unseen: listed names in no file, if files of some ranks are missing.

    Raises:
        CheckpointError: a file is no checkpoint.
        RetryableError: reading failed in a way that may pass.
    """

    form = "ranks"
    # Rank files have no metadata of training, no files beside them and no objects.
    training: Mapping[str, Any] = {}
    extra_files: Sequence[str] = ()
    objects: Mapping[str, StoredObject] = {}
    nested: Mapping[str, tuple[Any, ...]] = {}
    tensors: Mapping[str, GlobalTensor] = {}
    laid_out: frozenset[str] = frozenset()
    unseen: frozenset[str] = frozenset()

    def __init__(self, step_files: StepFiles, handles: FileHandles) -> None:
        self.step_files = step_files
        self.files: Mapping[int, str] = step_files.files
        self.indexes: dict[int, CheckpointIndex] = {}
        self.damaged: dict[int, str] = dict(step_files.damaged)
        # Equal sets of ranks are one object: the plan groups thousands of tensors by them.
        self._presence: dict[tuple[int, tuple[frozenset[str], ...]], frozenset[int]] = {}
        sound = {rank: path for rank, path in sorted(self.files.items()) if rank not in self.damaged}
        for rank, index in read_headers(handles, sound):
            if isinstance(index, DamagedCheckpointError):
                self.damaged[rank] = index.message
                continue
            self.indexes[rank] = index
        # The names in files, each set with the ranks of its files.
        self._ranks_of: dict[frozenset[str], list[int]] = {}
        for ranks in files_alike(self.indexes):
            self._ranks_of.setdefault(frozenset(self.indexes[ranks[0]].tensors), []).extend(ranks)
        self._marked = any(index.metadata.get(DEDUPLICATED) == "True" for index in self.indexes.values())

    @property
    def step(self) -> str | None:
        """``3_10``; None for files without a step in their names."""
        return None if self.step_files.step is None else str(self.step_files.step)

    @property
    def label(self) -> str:
        return step_words(self.step_files.step)

    @property
    def place(self) -> str:
        directories = {absolute(os.path.dirname(path)) for path in self.files.values()}
        return common_directory(directories) if directories else "the source"

    def warn_of_damage(self, report: Report) -> None:
        """Warn of the files that reading found damaged; an error that lists them takes the place of the warnings."""
        for rank in sorted(self.damaged.keys() - self.step_files.damaged.keys()):
            report.warn(f"{self.damaged[rank]}; rank {rank} counts as absent at {self.label}")

    @property
    def readable(self) -> frozenset[int]:
        """Ranks with an existing file that is not marked as damaged."""
        return frozenset(self.files) - frozenset(self.damaged)

    def loaded(self, stage: Stage) -> list[int]:
        return [rank for rank in sorted(self.indexes) if rank in stage.ranks]

    def absent(self, stage: Stage) -> list[int]:
        readable = self.readable
        return [rank for rank in stage.ranks if rank not in readable]

    def ranks_with(self, name: str, stage: Stage) -> frozenset[int]:
        """Ranks of a stage whose file holds a tensor of this name."""
        sets = tuple(names for names in self._ranks_of if name in names)
        key = (stage.number, sets)
        if key not in self._presence:
            self._presence[key] = frozenset(rank for names in sets for rank in self._ranks_of[names]).intersection(
                stage.ranks
            )
        return self._presence[key]

    def sets_of(self, stage: Stage) -> list[frozenset[str]]:
        """The distinct sets of names in the files of a stage."""
        return [names for names, ranks in self._ranks_of.items() if any(rank in stage.ranks for rank in ranks)]

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        return tuple(self.ranks_with(tensor.name, sharding.stage) for sharding in stage_shardings(tensor))

    def deduplicated(self, stage: Stage) -> bool:
        """Whether only some of the replicas of a stage saved a slice.

        A single file with the mark is enough. Files of .ckpt have no mark: there, different sets of parameters
        in the files of a stage show it.
        """
        if self._marked:
            return True
        sets = self.sets_of(stage)
        return any(
            len({name in names for names in sets}) > 1 and self._lacks_elements(name, stage) for name in stage.layouts
        )

    def _lacks_elements(self, name: str, stage: Stage) -> bool:
        """Whether a file of a stage lacks a slice with elements; .ckpt files mostly skip empty slices."""
        holders = self.ranks_with(name, stage)
        if not any(self.indexes[rank].tensors[name].nbytes for rank in holders):
            return False
        lacking = (rank - stage.first_rank for rank in self.loaded(stage) if rank not in holders)
        return not all(map(stage.layouts[name].is_empty_by_hand, lacking))

    def order(self) -> list[str]:
        return order_in_files(self)

    def tied_tensors(self) -> Sequence[TiedTensors]:
        return ()

    def names(self) -> set[str]:
        return set().union(*self._ranks_of)

    def values(self) -> list[str]:
        """Names that files hold and that the strategy does not list."""
        return sorted(self.names() - self.laid_out)

    def without_layout(self) -> list[str]:
        """None: unlisted tensors may be slices."""
        return []

    def holders(self, name: str) -> list[int]:
        return sorted(rank for names, ranks in self._ranks_of.items() if name in names for rank in ranks)

    def warn_of_unlisted(self, source: Strategy, report: Report) -> None:
        """Warn of parameters that a stage's ranks hold although only another stage's strategy lists them."""
        listed = frozenset(source.parameters)
        unlisted: dict[int, frozenset[str]] = {}
        for stage in source.stages if len(source.stages) > 1 else ():
            elsewhere = listed.intersection(set().union(*self.sets_of(stage))) - stage.layouts.keys()
            if elsewhere:
                unlisted[stage.number] = elsewhere
        if unlisted:
            every = sorted(set().union(*unlisted.values()))
            stages = f"stage{'s' if len(unlisted) > 1 else ''} {number_ranges(unlisted)}"
            text = f"ranks of pipeline {stages} hold " + listing(every)
            text += (
                ", which the source strategy lists only for other stages: tensors are read from there, and the "
                "target's last stage may expect them too"
            )
            nowhere = [name for name in every if name not in self.tensors]
            if nowhere:
                text += "; no file there holds " + listing(nowhere) + ", which counts as missing"
            report.warn(text)


def rank_checkpoint_of(checkpoint: Checkpoint) -> RankCheckpoint | None:
    """The rank checkpoint below any edits; None for other forms."""
    stored = stored_checkpoint(checkpoint)
    return stored if isinstance(stored, RankCheckpoint) else None


def listed_by_source(source: Strategy, step: RankCheckpoint) -> set[str]:
    """Names in the source strategy; `none` lists every tensor of several elements, or with optimizer state."""
    if not source.is_none:
        return set().union(*(stage.layouts.keys() for stage in source.stages))
    return {
        name
        for index in step.indexes.values()
        for weights in [trained(index.tensors.keys())]
        for name, tensor in index.tensors.items()
        if tensor.dtype not in NO_ARRAYS and (math.prod(tensor.shape) != 1 or name in weights)
    }


def read_parameters(
    source: Strategy, step: RankCheckpoint, laid_out: set[str], required: set[str]
) -> dict[str, GlobalTensor]:
    """Determine the shape and real layout of every listed parameter in the read files.

    Args:
        source: strategy of the files.
        step: the files.
        laid_out: parameters that the strategy lists.
        required: parameters whose contradictions are errors, all in one; others are skipped.
    """
    tensors: dict[str, GlobalTensor] = {}
    # Thousands of parameters share tens of layouts and shapes.
    shardings: dict[object, tuple[Holding, ...]] = {}
    problems: list[InputError] = []
    # Accumulated gradients come last: their parameters' shapes decide between readings.
    for name in sorted(laid_out, key=lambda name: (name.startswith(ACCUMULATED_GRADIENTS), name)):
        try:
            parameter = _read_parameter(name, source, step, tensors, shardings)
        except InputError as error:
            if name in required:
                problems.append(error)
            continue
        if parameter is not None:
            tensors[name] = parameter
    if problems:
        count = f"{len(problems)} of {plural(len(laid_out), 'parameter')}"
        # One odd file contradicts all parameters, too: then its shapes differ from those of other ranks.
        network = "is it of another network? " if 2 * len(problems) > len(laid_out) else ""
        raise one_error(problems, f"{step.place} does not fit the source strategy ({source.path}): {network}{count}")
    return tensors


class _Stored(NamedTuple):
    """How the ranks of one stage store a parameter."""

    stage: Stage
    ranks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    layout: Layout


def _read_parameter(
    name: str,
    source: Strategy,
    step: RankCheckpoint,
    owners: Mapping[str, GlobalTensor],
    shardings: dict[object, tuple[Holding, ...]],
) -> GlobalTensor | None:
    stored = []
    for stage in source.stages:
        if not source.is_none and name not in stage.layouts:
            continue
        ranks = sorted(step.ranks_with(name, stage))
        if not ranks:
            continue
        tensors = tuple(tensors_named(name, (step.indexes[rank] for rank in ranks)))
        layout = whole(len(tensors[0].shape)) if source.is_none else stage.layouts[name]
        stored.append(_Stored(stage, tuple(ranks), tensors, layout))
    if not stored:
        return None
    first = _check_dtypes(name, stored, step)
    accumulated = name.startswith(ACCUMULATED_GRADIENTS)
    # By the recorded layout, not this run's files: all runs of one conversion decide alike.
    sharded = [stage for stage in source.stages if name in stage.layouts and stage.layouts[name].shards > 1]
    as_recorded = readings = _fitting_readings(stored)
    if accumulated and sharded:
        plain = _fitting_readings([s._replace(layout=s.layout.without_shards()) for s in stored])
        # Both give one shape only for a tensor without rows, where they are the same.
        readings = {**plain, **as_recorded}
    if not readings:
        raise _contradiction(name, stored, step)
    shape = next(iter(readings)) if len(readings) == 1 else _decide(name, [*readings], owners, step, stored)
    layouts = readings[shape]
    shards = AS_RECORDED
    if accumulated:
        undecided: tuple[int, ...] = ()
        if not any(on_stage.stage is stage for on_stage in stored for stage in sharded):
            undecided = tuple(rank for stage in sharded for rank in stage.ranks)
        shards = ShardReading(shape not in as_recorded, not sharded, undecided)
    key = (shape, *((on_stage.stage.number, layout) for on_stage, layout in zip(stored, layouts)))
    if key not in shardings:
        shardings[key] = tuple(Holding(s.stage, layout, layout.grid(shape)) for s, layout in zip(stored, layouts))
    holdings = shardings[key]
    # One shape object for all parameters with it.
    return GlobalTensor(name, first.dtype, first.item_size, holdings[0].grid.shape, holdings, shards)


def _fitting_readings(stored: Sequence[_Stored]) -> dict[tuple[int, ...], list[Layout]]:
    """The readings that fit the slices of all stages: by the full shape, a layout per stage."""
    by_shape: dict[tuple[int, ...], list[Layout]] = {}
    for number, on_stage in enumerate(stored):
        for layout in on_stage.layout.regroupings():
            shape = _full_shape(layout, on_stage)
            if shape is None:
                continue
            layouts = by_shape.setdefault(shape, [])
            if len(layouts) == number:
                layouts.append(layout)
    return {shape: layouts for shape, layouts in by_shape.items() if len(layouts) == len(stored)}


def _full_shape(layout: Layout, on_stage: _Stored) -> tuple[int, ...] | None:
    """The full shape, or None if a rank's slice does not fit the layout."""
    if len(on_stage.tensors[0].shape) != len(layout.cuts):
        return None
    shape = layout.full_shape(on_stage.tensors[0].shape)
    if layout.recorded_shape not in (None, shape):
        return None
    if layout.uneven is None:
        first_shape = on_stage.tensors[0].shape
        return shape if all(tensor.shape == first_shape for tensor in on_stage.tensors) else None
    for rank, tensor in zip(on_stage.ranks, on_stage.tensors):
        number = layout.slice_of_rank[rank - on_stage.stage.first_rank]
        if shape_of(layout.slice_box(shape, number)) != tensor.shape:
            return None
    return shape


def _decide(
    name: str,
    possible: Sequence[tuple[int, ...]],
    owners: Mapping[str, GlobalTensor],
    step: RankCheckpoint,
    stored: Sequence[_Stored],
) -> tuple[int, ...]:
    """Choose between shapes of accumulated gradients by the shape of their parameter."""
    owner = owners.get(name[len(ACCUMULATED_GRADIENTS) :]) if name.startswith(ACCUMULATED_GRADIENTS) else None
    if owner is not None and owner.shape in possible:
        return owner.shape
    shapes = " or ".join(str(list(shape)) for shape in possible)
    path = step.files[stored[0].ranks[0]]
    where = f"{path}: {quoted(name)} on rank {stored[0].ranks[0]}"
    if owner is not None:
        raise CheckpointError(
            f"{where} can be a slice of a tensor of shape {shapes}, but {quoted(owner.name)} has shape "
            f"{list(owner.shape)}",
            file=path,
            rank=stored[0].ranks[0],
            parameter=name,
            hint="skip it with --exclude 'accu_grads.*' if gradients are not accumulated across this save",
        )
    expanded = any(on_stage.layout.expandable for on_stage in stored)
    cure = "pass the protobuf strategy, which is unambiguous, or" if expanded else "if it is not needed,"
    raise CheckpointError(
        f"{where} can be a slice of a tensor of shape {shapes}, and the files do not show which",
        file=path,
        rank=stored[0].ranks[0],
        parameter=name,
        hint=f"{cure} leave it out with --exclude {as_pattern(name)}",
    )


def _check_dtypes(name: str, stored: Sequence[_Stored], step: RankCheckpoint) -> Tensor:
    """A slice, if possible with elements, after checking that all slices have its type."""
    slices = [pair for on_stage in stored for pair in zip(on_stage.ranks, on_stage.tensors)]
    first_rank, first = next((pair for pair in slices if pair[1].nbytes), slices[0])
    for rank, tensor in slices:
        if tensor.dtype in NO_ARRAYS:
            kind = "text" if tensor.dtype == TEXT else "a map tensor"
            raise CheckpointError(
                f"{step.files[rank]}: {quoted(name)} is {kind}, but the strategy lays it out as a tensor",
                file=step.files[rank],
                rank=rank,
                parameter=name,
                hint=f"leave it out with --exclude {as_pattern(name)}",
            )
        # Ranks with files of equal structure share one description.
        if tensor is not first and not tensor.same_type(first):
            raise CheckpointError(
                f"{quoted(name)} is {first.dtype} on rank {first_rank} ({step.files[first_rank]}) but "
                f"{tensor.dtype} on rank {rank} ({step.files[rank]})",
                file=step.files[rank],
                rank=rank,
                parameter=name,
                hint="these files are not of one run: remove the wrong, or leave it out with --exclude "
                f"{as_pattern(name)}",
            )
    return first


def _contradiction(name: str, stored: Sequence[_Stored], step: RankCheckpoint) -> CheckpointError:
    """The error of a parameter without a fitting reading; names the file of `_odd_one_out`."""
    descriptions = []
    for on_stage in stored:
        shapes: dict[tuple[int, ...], list[int]] = {}
        for rank, tensor in zip(on_stage.ranks, on_stage.tensors):
            shapes.setdefault(tensor.shape, []).append(rank)
        text = ", ".join(f"{list(shape)} on {rank_ranges(ranks)}" for shape, ranks in list(shapes.items())[:4])
        layout = on_stage.layout
        full = f", full shape {list(layout.recorded_shape)}" if layout.recorded_shape else ""
        uneven = f", dimension 0 split by hand into {list(layout.uneven)}" if layout.uneven else ""
        descriptions.append(
            f"stage {on_stage.stage.number} has device matrix {list(layout.device_matrix)}, tensor map "
            f"{layout.map_text}, {plural(layout.shards, 'optimizer shard')}{full}{uneven}; its files hold {text}"
        )
    rank = _odd_one_out(stored)
    return CheckpointError(
        f"{quoted(name)}: the source strategy does not fit the checkpoint (rank {rank}: {step.files[rank]}): "
        + "; ".join(descriptions),
        file=step.files[rank],
        rank=rank,
        parameter=name,
        hint="pass the strategy that this checkpoint was saved with",
    )


def _odd_one_out(stored: Sequence[_Stored]) -> int:
    """The first rank whose slice has the rarest shape of its stage."""
    for on_stage in stored:
        shapes = [tensor.shape for tensor in on_stage.tensors]
        if on_stage.layout.uneven is None and len(set(shapes)) > 1:
            rarest = min(shapes, key=shapes.count)
            return on_stage.ranks[shapes.index(rarest)]
    return stored[0].ranks[0]


def read_some_ranks(
    step_files: StepFiles, source: Strategy, handles: FileHandles, report: Report, admit: Callable[[str], bool]
) -> tuple[RankCheckpoint, dict[str, InputError]]:
    """Read the existing files of one step, complete or not; warn of damaged files.

    Returns:
        The checkpoint, and by name the errors of admitted parameters that contradict the strategy.
    """
    for rank, reason in step_files.damaged.items():
        report.warn(f"{reason}; rank {rank} counts as absent")
    step = RankCheckpoint(step_files, handles)
    step.warn_of_damage(report)
    laid_out = listed_by_source(source, step)
    # With their owners: these decide whether accumulated gradients have their recorded optimizer shards.
    needed = {parameter for name in laid_out if admit(name) for parameter in (name, _owner(name))} & laid_out
    step.tensors, step.laid_out = read_parameters(source, step, needed, set()), frozenset(laid_out)
    unread = sorted(filter(admit, (laid_out & step.names()) - step.tensors.keys()))
    return step, contradictions(unread, source, step)


def contradictions(names: Iterable[str], source: Strategy, step: RankCheckpoint) -> dict[str, InputError]:
    errors: dict[str, InputError] = {}
    laid_out = listed_by_source(source, step)
    for name in names:
        try:
            read_parameters(source, step, {name, _owner(name)} & laid_out, {name})
        except InputError as error:
            errors[name] = error
    return errors


def _owner(name: str) -> str:
    """The parameter of accumulated gradients; any other name itself."""
    return name[len(ACCUMULATED_GRADIENTS) :] if name.startswith(ACCUMULATED_GRADIENTS) else name
