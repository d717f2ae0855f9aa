"""Checkpoint 2.0 to be written: which slice goes into which file.

Every slice is written once, as a de-duplicated save does. Of the ranks that hold the same slice one is taken,
and for all slices of a tensor the one of the same place among them, so that files that take columns of the
same rows can be written together; the place is that of the ranks with fewest bytes so far.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.checkpoints.formats.output import MINDSPORE_METADATA
from reshard.errors import InputError, LayoutError
from reshard.forms.checkpoint2.names import METADATA, MODEL, OPTIMIZER, TRACKER, iteration_name
from reshard.forms.checkpoint2.written_metadata import Described, check_described, metadata_json, tracker_text
from reshard.forms.ranks import FileNames
from reshard.forms.ranks.naming import NamedFile
from reshard.forms.ranks.rank_files import stage_sections
from reshard.forms.target import FinishingFile, Section, TargetForm, layout_in
from reshard.layout import Layout
from reshard.strategies import Stage, Strategy
from reshard.text.names import state_prefix


class _File(NamedTuple):
    """A file: whose slices it holds, and of which tensors."""

    kind: str
    stage: Stage
    device: int
    names: frozenset[str]


class Checkpoint2Files(TargetForm):
    """The files of one iteration; see `TargetForm`.

    Args:
        strategy: how tensors are laid out.
        tensors: what is written, of the source's.
        known: names of all parameters of the source and of the strategy.
        values: names of the values beside them.
        iteration: number of the iteration.
        prefix: the files' names begin so.
        common: makes the content of common.json.
    """

    name = "checkpoint2"
    by_rank = False
    format = "safetensors"
    limits_layouts = True

    def __init__(
        self,
        strategy: Strategy,
        tensors: Mapping[str, GlobalTensor],
        known: Container[str],
        values: Sequence[str],
        iteration: int,
        prefix: str,
        common: FinishingFile,
    ) -> None:
        self.takes_everything = strategy.is_none
        self.metadata: Optional[Mapping[str, str]] = MINDSPORE_METADATA
        self._iteration = iteration
        self._common = common
        self._tensors = tensors
        # By name: number of the section, and how the tensor is cut over the ranks of its stage.
        self._layouts: dict[str, tuple[int, Stage, Layout]] = {}
        self._files: list[_File] = []
        self.sections: list[Section] = []
        for kind in (MODEL, OPTIMIZER):
            for stage, section in zip(strategy.stages, stage_sections(strategy, tensors)):
                chosen = [
                    tensor
                    for name, tensor in tensors.items()
                    if name in section.layouts
                    and name not in self._layouts
                    and (OPTIMIZER if state_prefix(name, known) else MODEL) == kind
                ]
                self._add_files(kind, stage, section, chosen)
        counts = {kind: sum(file.kind == kind for file in self._files) for kind in (MODEL, OPTIMIZER)}
        self._first = {MODEL: 0, OPTIMIZER: counts[MODEL]}
        names = [
            f"{iteration_name(iteration)}/{prefix}{file.kind}-{number - self._first[file.kind]:07d}-"
            f"{counts[file.kind]:07d}"
            for number, file in enumerate(self._files)
        ]
        self.names = FileNames("file{rank}", tuple(NamedFile(number, name) for number, name in enumerate(names)))
        self._section_numbers = [section.number for section in self.sections for _ in section.files]
        self._values = frozenset(values)
        self._value_file = self._first[OPTIMIZER] if counts[OPTIMIZER] else 0

    def check_layout(self, name: str, layout: Layout) -> None:
        """Refuse what metadata.json cannot say."""
        check_described(name, layout)

    def _add_files(self, kind: str, stage: Stage, section: Section, tensors: Sequence[GlobalTensor]) -> None:
        """Share out the slices of some tensors of a stage among its ranks."""
        loads = np.zeros(stage.device_count, dtype=np.int64)
        names: dict[int, list[str]] = {}
        holders: dict[Layout, npt.NDArray[np.int64]] = {}
        for tensor in sorted(tensors, key=lambda tensor: (-_size(tensor), tensor.name)):
            try:
                layout = layout_in(tensor, section.layouts[tensor.name], section.in_pipeline)
            except (InputError, LayoutError):
                # It is told with all other problems when the plan is checked.
                layout = section.layouts[tensor.name]
            self._layouts[tensor.name] = len(self.sections), stage, layout
            if layout not in holders:
                order = np.argsort(layout.slice_of_rank, kind="stable")
                holders[layout] = order.reshape(layout.slice_count, layout.copies)
            ranks = holders[layout]
            place = int(loads[ranks].max(axis=0).argmin())
            loads[ranks[:, place]] += _size(tensor) // layout.slice_count
            for device in ranks[:, place].tolist():
                names.setdefault(device, []).append(tensor.name)
        # Files of the same names share them.
        known: dict[frozenset[str], frozenset[str]] = {}
        first, devices = len(self._files), sorted(names)
        for device in devices:
            held = frozenset(names[device])
            self._files.append(_File(kind, stage, device, known.setdefault(held, held)))
        if devices:
            layouts = {name: section.layouts[name] for name in sorted(tensor.name for tensor in tensors)}
            files = range(first, len(self._files))
            self.sections.append(
                Section(len(self.sections), files, layouts, section.in_pipeline, section.label, tuple(devices))
            )

    @property
    def count(self) -> int:
        """Files of tensors."""
        return len(self._files)

    def section_of(self, file: int) -> Section:
        """The files of one kind of a stage."""
        return self.sections[self._section_numbers[file]]

    def names_in(self, file: int) -> Optional[frozenset[str]]:
        """The tensors of which a file holds a slice."""
        return self._files[file].names

    def takes_value(self, name: str, file: int) -> bool:
        """Values are in one file, of optimizer state where there is any; loaders look for no other copy."""
        return name in self._values and file == self._value_file

    def finishing(self) -> Sequence[FinishingFile]:
        """metadata.json and common.json, then the tracker, which says that the iteration is complete."""
        directory = iteration_name(self._iteration)
        return [
            FinishingFile(f"{directory}/{METADATA}", self._metadata),
            FinishingFile(f"{directory}/{self._common.name}", self._common.make),
            FinishingFile(TRACKER, lambda: [tracker_text(self._iteration)]),
        ]

    def _metadata(self) -> Iterator[bytes]:
        return metadata_json(self._described)

    def _described(self) -> Iterator[Described]:
        """Every tensor, one at a time: with its files, all together would take as much memory as what they make."""
        for name, (section, stage, layout) in self._layouts.items():
            files = {
                self._files[number].device: f"{self.names.of(number)}.{self.format}".rpartition("/")[2]
                for number in self.sections[section].files
                if name in self._files[number].names
            }
            yield Described(self._tensors[name], layout, tuple(stage.ranks), files)


def _size(tensor: GlobalTensor) -> int:
    return math.prod(tensor.shape) * tensor.item_size
