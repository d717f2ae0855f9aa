"""Target files of Checkpoint 2.0: the slices of each file, and metadata.json.

Every slice is written once, as in a de-duplicated save. All slices of a tensor go to the same place among their
replicas, so that files with columns of the same rows can be written together: to the ranks with the fewest bytes so
far.

The loaders of MindFormers 1.8.0 to 2.1.0 all accept this metadata.json. A layout has exactly five members in a
fixed order, because loaders read them by position, and is never null; slices are numbered in C order; every stored
slice lists all ranks that hold it.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, stored_checkpoint
from reshard.checkpoints.formats.output import MINDSPORE_METADATA
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import CheckpointError, LayoutError
from reshard.forms.checkpoint2.form import COMMON, ITERATIONS, METADATA, MODEL, OPTIMIZER
from reshard.forms.ranks.form import stage_sections
from reshard.forms.ranks.naming import FileNames
from reshard.forms.request import Means, Request
from reshard.forms.target import FinishingFile
from reshard.forms.tracker import TRACKER
from reshard.forms.writing import SharedFiles, integer_value, selected
from reshard.layout import Layout, shape_of
from reshard.strategies import Strategy
from reshard.text.messages import as_pattern, listing, quoted
from reshard.text.names import is_weight, state_prefix


class Checkpoint2Files(SharedFiles):
    """The files of one iteration; see `TargetForm`."""

    name = "checkpoint2"
    format = "safetensors"
    limits_layouts = True

    def __init__(
        self,
        strategy: Strategy,
        tensors: Mapping[str, GlobalTensor],
        parameters: Container[str],
        values: Sequence[str],
        iteration: int,
        prefix: str,
        common: FinishingFile,
    ) -> None:
        super().__init__(strategy, tensors)
        self.metadata: Mapping[str, str] | None = MINDSPORE_METADATA
        self._iteration = iteration
        self._common = common
        states = {name for name in tensors if state_prefix(name, parameters)}
        names: list[str] = []
        for kind, of_kind in ((MODEL, [name for name in tensors if name not in states]), (OPTIMIZER, states)):
            before = len(self._files)
            for stage, section in zip(strategy.stages, stage_sections(strategy, tensors)):
                self._add_files(stage, section, of_kind)
            count = len(self._files) - before
            names += (f"{ITERATIONS.of(iteration)}/{prefix}{kind}-{at:07d}-{count:07d}" for at in range(count))
        self.names = FileNames("file{rank}", dict(enumerate(names)))
        self._values = frozenset(values)
        # The first file of optimizer state, if any.
        self._value_file = before if before < len(self._files) else 0

    def check_layout(self, name: str, layout: Layout) -> None:
        check_recordable(name, layout)

    def takes_value(self, name: str, file: int) -> bool:
        """Values are in one file, of optimizer state if any; loaders read no other copy."""
        return name in self._values and file == self._value_file

    def finishing(self) -> Sequence[FinishingFile]:
        """metadata.json and common.json, then the tracker, which marks the iteration as complete."""
        directory = ITERATIONS.of(self._iteration)
        return [
            FinishingFile(f"{directory}/{METADATA}", self._metadata),
            FinishingFile(f"{directory}/{self._common.name}", self._common.make),
            FinishingFile(TRACKER, lambda: [str(self._iteration).encode()]),
        ]

    def _metadata(self) -> Iterator[bytes]:
        return metadata_json(self._described)

    def _described(self) -> Iterator[Described]:
        """Every tensor with its files, one at a time, which bounds memory."""
        for name, (section, layout) in self._layouts.items():
            numbers = self.sections[section].files
            files = {
                self._files[number].device: f"{self.names.of(number)}.{self.format}".rpartition("/")[2]
                for number in numbers
                if name in self._files[number].names
            }
            yield Described(self.tensors[name], layout, tuple(self._files[numbers[0]].stage.ranks), files)


class Described(NamedTuple):
    """A tensor for metadata.json.

    Attributes:
        tensor: the tensor.
        layout: over the ranks of its stage.
        ranks: these ranks, ascending.
        files: per device of the layout that stores a slice, its file.
    """

    tensor: GlobalTensor
    layout: Layout
    ranks: tuple[int, ...]
    files: Mapping[int, str]


def metadata_json(tensors: Callable[[], Iterable[Described]]) -> Iterator[bytes]:
    """The content of metadata.json, in parts of at most one tensor; ``tensors`` is called twice."""
    yield b'{"state_dict_metadata":{'
    yield from _members((tensor.tensor.name, _described(tensor)) for tensor in tensors())
    yield b'},"storage_data":{'
    yield from _members(member for tensor in tensors() for member in _stored(tensor))
    yield b"}}"


def _members(members: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    comma = ""
    for name, value in members:
        yield f"{comma}{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}".encode()
        comma = ","


def check_recordable(name: str, layout: Layout) -> None:
    """Check that metadata.json can record a tensor's name and layout."""
    if "," in name:
        raise CheckpointError(
            f"{quoted(name)}: loaders of Checkpoint 2.0 cannot read a name with a comma",
            parameter=name,
            hint=f"leave it out with --exclude {as_pattern(name)}",
        )
    try:
        plain_layout(layout)
    except LayoutError as error:
        raise CheckpointError(
            f"{quoted(name)}: Checkpoint 2.0 cannot record its layout: {error.message}",
            parameter=name,
            hint="choose a target strategy without it, or write rank files, which keep the strategy beside them",
        ) from error


def _described(tensor: Described) -> dict[str, Any]:
    (name, dtype, _, shape, *_), layout = tensor.tensor, tensor.layout
    check_recordable(name, layout)
    plain = plain_layout(layout)
    grid = layout.grid(shape)
    place = {rank: at for number in range(layout.slice_count) for at, rank in enumerate(layout.holders(number))}
    return {
        "properties": {
            "dtype": dtype.lower(),
            "replica_id": [place[rank] for rank in range(len(tensor.ranks))],
            "allow_shape_mismatch": False,
            "allow_to_save": True,
        },
        "global_shape": list(shape),
        "axis_fragmentations": list(layout.cuts),
        "layout": {
            "device_matrix": list(plain.device_matrix),
            "tensor_map": [_entry(axes) for axes in plain.tensor_map],
            "interleaved_parallel": False,
            "alias_name": list(string.ascii_lowercase[: len(plain.device_matrix)]),
            "rank_list": list(tensor.ranks),
        },
        "chunk": [
            {"global_offset": [number], "local_shape": list(shape_of(grid.slice_box(number)))}
            for number in range(grid.slice_count)
        ],
    }


def _stored(tensor: Described) -> Iterator[tuple[str, Any]]:
    slices = tensor.layout.slice_of_rank
    for device, file in sorted(tensor.files.items()):
        number = int(slices[device])
        group = [tensor.ranks[rank] for rank in tensor.layout.holders(number)]
        # Loaders expect Python's repr of this tuple.
        key = str((tensor.tensor.name, (number,)))
        yield key, [{"file_name": file, "storage_rank": tensor.ranks[device], "rank_group": group}]


def _entry(axes: tuple[int, ...]) -> Any:
    return -1 if not axes else axes[0] if len(axes) == 1 else list(axes)


_MEMBERS = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")


def common_json(training: Mapping[str, Any]) -> bytes:
    """The content of common.json; unknown values are null: training must not resume from a guess."""
    return json.dumps({name: training.get(name) for name in _MEMBERS}, indent=4).encode()


def plain_layout(layout: Layout) -> Layout:
    """The same layout with optimizer shards as axes.

    Shards alternate among the ranks that hold the same slice, in ascending order: so they lie along the fastest
    axes that do not split the tensor. The last of these axes may have to be divided.

    Raises:
        LayoutError: no device matrix is equivalent.
    """
    if layout.uneven is not None:
        raise LayoutError("a table split by hand has no device matrix and tensor map")
    # From the right: sizes of axes, and the axes of each dimension.
    sizes = list(reversed(layout.device_matrix)) or [1]
    dimensions = [list(axes) for axes in layout.tensor_map]
    if layout.shards > 1:
        mapped = {axis for axes in dimensions for axis in axes}
        remaining = layout.shards
        shard_axes: list[int] = []
        axis = 0
        while remaining > 1 and axis < len(sizes):
            if axis in mapped or sizes[axis] == 1:
                axis += 1
                continue
            common = math.gcd(sizes[axis], remaining)
            if common < min(sizes[axis], remaining):
                break
            if sizes[axis] > common:
                # Split the axis and use its faster part; the numbers of all axes to the left grow by one.
                sizes[axis : axis + 1] = [common, sizes[axis] // common]
                dimensions = [[a + (a > axis) for a in axes] for axes in dimensions]
                mapped = {a + (a > axis) for a in mapped}
            shard_axes.append(axis)
            remaining //= common
            axis += 1
        dimensions[0] += reversed(shard_axes)
    plain = Layout(tuple(reversed(sizes)), tuple(map(tuple, dimensions)))
    if plain.cuts != layout.cuts or plain.slice_of_rank != layout.slice_of_rank:
        raise LayoutError(
            f"{layout.shards} optimizer shards over device matrix {list(layout.device_matrix)} and tensor map "
            f"{layout.map_text} has no equivalent device matrix and tensor map"
        )
    return plain


def target_files(checkpoint: Checkpoint, request: Request, means: Means) -> Checkpoint2Files:
    """The files of one iteration."""
    report = means.report
    tensors, values, _ = selected(checkpoint, request.filters.admit)
    training = _training_state(checkpoint, means.handles)
    if training.get("global_batch_size") is None:
        report.warn(
            f"{COMMON} has no global_batch_size, because the source does not record it: add it before training resumes"
        )
    parameters = checkpoint.names().union(request.target.parameters)
    unlisted = [name for name in values if is_weight(name, parameters)]
    if unlisted:
        report.warn(
            "not in metadata.json, so loaders do not find them, because their layouts are unknown: " + listing(unlisted)
        )
    prefix = request.asked.target.prefix
    prefix = "" if prefix in (None, DEFAULT_PREFIX) else str(prefix).rstrip("-") + "-"
    iteration = int((training.get("global_step") if checkpoint.form != Checkpoint2Files.name else checkpoint.step) or 0)
    if iteration < 0:
        report.warn(f"global_step is {iteration}, and Checkpoint 2.0 counts iterations from 0: iteration 0 is written")
        iteration = 0
        training = {key: None if isinstance(value, int) and value < 0 else value for key, value in training.items()}
    common = FinishingFile(COMMON, lambda: [common_json(training)])
    return Checkpoint2Files(request.target, tensors, parameters, list(values), iteration, prefix, common)


def _training_state(checkpoint: Checkpoint, handles: FileHandles) -> Mapping[str, Any]:
    """The members of common.json for a checkpoint."""
    # Values may be excluded from the target; the source still contains the step.
    checkpoint = stored_checkpoint(checkpoint)
    if checkpoint.training:
        return checkpoint.training
    state: dict[str, int | None] = {
        name: integer_value(checkpoint, name, handles) for name in ("global_step", "epoch_num", "step_num")
    }
    epoch, _, step = (checkpoint.step or "").partition("_")
    if epoch.isdigit() and step.isdigit():
        state["epoch_num"] = state["epoch_num"] if state["epoch_num"] is not None else int(epoch)
        state["step_num"] = state["step_num"] if state["step_num"] is not None else int(step)
    if state["global_step"] is None:
        state["global_step"] = state["step_num"]
    if state["step_num"] is None:
        state["step_num"] = state["global_step"]
    return {**state, "loss_scale": None}
