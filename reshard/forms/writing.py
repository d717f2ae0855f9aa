"""Tensors and values to write, and their shares of the target's files, for all target forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, TensorsInOrder
from reshard.checkpoints.formats.dtypes import INTEGERS, NO_ARRAYS, NUMPY_NAMES
from reshard.checkpoints.formats.output import OutputLayout
from reshard.errors import CheckpointError, InputError
from reshard.forms.ranks.form import stage_sections
from reshard.forms.ranks.naming import FileNames
from reshard.forms.target import Section, TargetForm, layout_in
from reshard.layout import Layout, volume_of
from reshard.storage import read_range, reading
from reshard.strategies import Stage, Strategy
from reshard.text.messages import Report
from reshard.text.names import TRAINING_STEP, layers_in_order


class Selected(NamedTuple):
    """The selected part of a checkpoint.

    Attributes:
        tensors: by name, layers in natural order.
        values: bytes of every value beside them that safetensors can hold, by name.
        names: of the tensors, in the order in which the source's files hold them.
    """

    tensors: Mapping[str, GlobalTensor]
    values: Mapping[str, int]
    names: Sequence[str]


def selected(checkpoint: Checkpoint, admit: Callable[[str], bool]) -> Selected:
    names = [name for name in checkpoint.order() if admit(name)]
    values = _sizes_of_values(checkpoint, [name for name in checkpoint.values() if admit(name)])
    return Selected(TensorsInOrder(checkpoint.tensors, layers_in_order(names)), values, names)


def step_of(checkpoint: Checkpoint, handles: FileHandles) -> int | None:
    """The training step that a source has as a value, or in metadata of its training; None without it."""
    if TRAINING_STEP not in checkpoint.values():
        recorded = checkpoint.training.get(TRAINING_STEP)
        return recorded if type(recorded) is int and recorded >= 0 else None
    step = integer_value(checkpoint, TRAINING_STEP, handles)
    if step is None or step < 0:
        path = checkpoint.indexes[checkpoint.holders(TRAINING_STEP)[0]].path
        problem = "is no number" if step is None else f"is {step}"
        raise CheckpointError(f"{path}: {TRAINING_STEP} {problem}", file=path, parameter=TRAINING_STEP)
    return step


def integer_value(checkpoint: Checkpoint, name: str, handles: FileHandles) -> int | None:
    """A value of one integer in the files of a checkpoint; None if there is none, or another value."""
    holders = checkpoint.holders(name)
    if not holders:
        return None
    index = checkpoint.indexes[holders[0]]
    tensor = index.tensors[name]
    if tensor.dtype not in INTEGERS or len(tensor.extents) != 1 or tensor.nbytes != tensor.item_size:
        return None
    with reading(index.path), handles.borrow(index.path) as file:
        data = read_range(file, tensor.extents[0][0], tensor.nbytes)
    return int.from_bytes(data, "little", signed="u" not in NUMPY_NAMES[tensor.dtype])


def without_step(place: str) -> CheckpointError:
    """The error of optimizer state whose step nothing records."""
    return CheckpointError(
        f"{place}: has optimizer state, and no step of it",
        file=place,
        parameter=TRAINING_STEP,
        hint="Adam corrects its moments by the step: bring the value global_step, or leave the optimizer out with "
        "--exclude 'optimizer.*'",
    )


def share_out(
    tensors: Sequence[GlobalTensor], section: Section, devices: int, empty: bool = True, first: bool = False
) -> tuple[dict[str, Layout], dict[int, frozenset[str]]]:
    """Share out tensors among the devices of a stage: each slice once, to the replica with the fewest bytes so far.

    Args:
        tensors: the tensors.
        section: the stage's layouts.
        devices: devices of the stage.
        empty: slices without elements are written, too.
        first: the first device has a file even without slices.

    Returns:
        Layouts by name; per device with a file, ascending, the names of its tensors, equal sets as one object.
    """
    loads = np.zeros(devices, dtype=np.int64)
    layouts: dict[str, Layout] = {}
    names: dict[int, list[str]] = {0: []} if first else {}
    holders: dict[Layout, npt.NDArray[np.int64]] = {}
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.name)):
        fits = True
        try:
            layout = layout_in(tensor, section.layouts[tensor.name], section.in_pipeline)
        except InputError:
            # The check of the plan reports it with all other problems.
            layout, fits = section.layouts[tensor.name], False
        layouts[tensor.name] = layout
        if layout not in holders:
            order = np.argsort(layout.slice_of_rank, kind="stable")
            holders[layout] = order.reshape(layout.slice_count, layout.copies)
        ranks = holders[layout]
        place = int(loads[ranks].max(axis=0).argmin())
        loads[ranks[:, place]] += tensor.nbytes // layout.slice_count
        writers: list[int] = ranks[:, place].tolist()
        if fits and not empty:
            boxes = [layout.slice_box(tensor.shape, int(layout.slice_of_rank[device])) for device in writers]
            # A tensor without elements still has a chunk.
            writers = [device for device, box in zip(writers, boxes) if volume_of(box)] or writers[:1]
        for device in writers:
            names.setdefault(device, []).append(tensor.name)
    # Files of the same names share them.
    shared: dict[frozenset[str], frozenset[str]] = {}
    sets = ((device, frozenset(names[device])) for device in sorted(names))
    return layouts, {device: shared.setdefault(file_names, file_names) for device, file_names in sets}


class SharedFile(NamedTuple):
    """A file: its device among those of a pipeline stage, and the tensors of which it holds a slice."""

    stage: Stage
    device: int
    names: frozenset[str]


class SharedFiles(TargetForm):
    """Files of the ranks that write a slice, each slice once; the common part of several forms, see `TargetForm`."""

    by_rank = False

    def __init__(self, strategy: Strategy, tensors: Mapping[str, GlobalTensor]) -> None:
        self.takes_everything = strategy.is_none
        self.tensors = tensors
        self.sections: list[Section] = []
        # By name: number of the section, and the layout over its stage's ranks.
        self._layouts: dict[str, tuple[int, Layout]] = {}
        self._files: list[SharedFile] = []
        self._section_numbers: list[int] = []

    def _add_files(
        self, stage: Stage, section: Section, names: Iterable[str], empty: bool = True, first: bool = False
    ) -> None:
        """Add the files of a stage for its tensors among these that no earlier file holds; see `share_out`."""
        chosen = [self.tensors[name] for name in names if name in section.layouts and name not in self._layouts]
        layouts, held = share_out(chosen, section, stage.device_count, empty, first)
        number = len(self.sections)
        self._layouts.update((name, (number, layout)) for name, layout in layouts.items())
        if held:
            recorded = {name: section.layouts[name] for name in sorted(layouts)}
            files = range(len(self._files), len(self._files) + len(held))
            self.sections.append(
                Section(number, files, recorded, section.in_pipeline, section.label, devices=tuple(held))
            )
        self._files += (SharedFile(stage, device, names_of_file) for device, names_of_file in held.items())
        self._section_numbers += [number] * len(held)

    @property
    def count(self) -> int:
        return len(self._files)

    def section_of(self, file: int) -> Section:
        return self.sections[self._section_numbers[file]]

    def names_in(self, file: int) -> frozenset[str] | None:
        return self._files[file].names


def note_uncopied_files(checkpoint: Checkpoint, report: Report) -> None:
    if checkpoint.extra_files:
        report.note("files other than weights are not copied: " + ", ".join(checkpoint.extra_files[:8]))


def _sizes_of_values(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, int]:
    sizes = {}
    for name in names:
        tensor = checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]
        if tensor.dtype not in NO_ARRAYS:
            sizes[name] = tensor.nbytes
    return sizes


class ChunkFiles(SharedFiles):
    """A file for every rank that writes a chunk; see `TargetForm`."""

    holds_empty = True
    """Ranks without rows of a tensor have an empty chunk of it; only metadata outside of the files can do without."""
    metadata: Mapping[str, str] | None = None

    def __init__(self, strategy: Strategy, chosen: Selected, name_of: Callable[[int], str]) -> None:
        super().__init__(strategy, chosen.tensors)
        self._values = frozenset(chosen.values)
        self._layout_of: Callable[[int], OutputLayout] | None = None
        for stage, section in zip(strategy.stages, stage_sections(strategy, chosen.tensors)):
            # Values are in the first file.
            first = bool(chosen.values) and not self._files
            self._add_files(stage, section, chosen.tensors, self.holds_empty, first)
        ranks = [file.stage.first_rank + file.device for file in self._files]
        self.names = FileNames("file{rank}", dict(enumerate(map(name_of, ranks))))

    def takes_value(self, name: str, file: int) -> bool:
        return file == 0 and name in self._values

    def planned(self, layout_of: Callable[[int], OutputLayout]) -> None:
        self._layout_of = layout_of

    def layout_of(self, file: int) -> OutputLayout:
        assert self._layout_of is not None
        return self._layout_of(file)

    def file_name(self, file: int) -> str:
        return f"{self.names.of(file)}.{self.format}"

    def chunks(self) -> Iterator[tuple[GlobalTensor, Layout, tuple[int, ...]]]:
        """Every tensor, the values apart, with its layout and the slices that files hold, by ascending file."""
        for name, (number, layout) in self._layouts.items():
            section = self.sections[number]
            devices = [section.position(file) for file in section.files if name in self._files[file].names]
            yield self.tensors[name], layout, tuple(int(layout.slice_of_rank[device]) for device in devices)
