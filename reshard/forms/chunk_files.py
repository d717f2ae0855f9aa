"""Checkpoints of chunks to be written: which chunk goes into which file.

Every chunk is written once, by the replica with the fewest bytes so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.checkpoints.formats.output import OutputLayout
from reshard.forms.ranks import FileNames
from reshard.forms.ranks.rank_files import stage_sections
from reshard.forms.target import Section, TargetForm
from reshard.forms.writing import Selected, share_out
from reshard.layout import Box, Layout
from reshard.strategies import Stage, Strategy


class WrittenChunk(NamedTuple):
    """A chunk of a target file.

    Attributes:
        file: number of the file.
        box: which elements of the tensor it is; without any where a rank has no rows.
    """

    file: int
    box: Box


class _File(NamedTuple):
    """A file: of which rank, which device of its stage that is, and the tensors of which it holds a chunk."""

    rank: int
    device: int
    names: frozenset[str]


class ChunkFiles(TargetForm):
    """A file for every rank that writes a chunk; see `TargetForm`.

    Args:
        strategy: how tensors are laid out.
        chosen: the selected part of the checkpoint.
        name_of: the name of the file of a rank, without its ending.
    """

    by_rank = False
    boxed = True
    holds_empty = True
    """Ranks without rows of a tensor have an empty chunk of it; only metadata outside of the files can do without."""
    metadata: Optional[Mapping[str, str]] = None

    def __init__(self, strategy: Strategy, chosen: Selected, name_of: Callable[[int], str]) -> None:
        self.takes_everything = strategy.is_none
        self.tensors = chosen.tensors
        self._values = frozenset(chosen.values)
        # By name: number of the section, and how the tensor is cut.
        self._layouts: dict[str, tuple[int, Layout]] = {}
        self._files: list[_File] = []
        self.sections: list[Section] = []
        self._layout_of: Optional[Callable[[int], OutputLayout]] = None
        for stage, section in zip(strategy.stages, stage_sections(strategy, chosen.tensors)):
            tensors = [
                tensor
                for name, tensor in chosen.tensors.items()
                if name in section.layouts and name not in self._layouts
            ]
            self._add_files(stage, section, tensors, bool(chosen.values) and not self._files)
        self.names = FileNames("file{rank}", {number: name_of(file.rank) for number, file in enumerate(self._files)})
        self._section_numbers = [section.number for section in self.sections for _ in section.files]

    def _add_files(self, stage: Stage, section: Section, tensors: Sequence[GlobalTensor], with_values: bool) -> None:
        """Share out the chunks of some tensors of a stage among its ranks."""
        shared = share_out(tensors, section, stage.device_count, self.holds_empty, with_values)
        number, first = len(self.sections), len(self._files)
        self._layouts.update((name, (number, layout)) for name, layout in shared.layouts.items())
        self._files += (_File(stage.first_rank + device, device, names) for device, names in shared.names.items())
        if shared.names:
            self.sections.append(shared.section(number, first, section))

    @property
    def count(self) -> int:
        """Files of tensors."""
        return len(self._files)

    def section_of(self, file: int) -> Section:
        """The files of a stage."""
        return self.sections[self._section_numbers[file]]

    def names_in(self, file: int) -> Optional[frozenset[str]]:
        """The tensors of which a file holds a chunk."""
        return self._files[file].names

    def takes_value(self, name: str, file: int) -> bool:
        """The first file has all values."""
        return file == 0 and name in self._values

    def planned(self, layout_of: Callable[[int], OutputLayout]) -> None:
        """Keep the layouts of files for the metadata."""
        self._layout_of = layout_of

    def layout_of(self, file: int) -> OutputLayout:
        """How a file is laid out."""
        assert self._layout_of is not None
        return self._layout_of(file)

    def file_name(self, file: int) -> str:
        """The name of a file in the directory."""
        return f"{self.names.of(file)}.{self.format}"

    def chunks(self) -> Iterator[tuple[GlobalTensor, list[WrittenChunk]]]:
        """Every tensor and its chunks, the values apart."""
        for name, (number, layout) in self._layouts.items():
            tensor, section = self.tensors[name], self.sections[number]
            files = [file for file in section.files if name in self._files[file].names]
            slices = [int(layout.slice_of_rank[section.position(file)]) for file in files]
            yield tensor, [WrittenChunk(file, layout.slice_box(tensor.shape, at)) for file, at in zip(files, slices)]
