"""Checkpoints of chunks to be written: which chunk goes into which file.

Every chunk is written once, by the replica with the fewest bytes so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.checkpoints.formats.output import OutputLayout
from reshard.forms.ranks import FileNames
from reshard.forms.ranks.rank_files import stage_sections
from reshard.forms.writing import Selected, SharedFiles
from reshard.layout import Box
from reshard.strategies import Strategy


class WrittenChunk(NamedTuple):
    """A chunk of a target file.

    Attributes:
        file: number of the file.
        box: which elements of the tensor it is; without any where a rank has no rows.
    """

    file: int
    box: Box


class ChunkFiles(SharedFiles):
    """A file for every rank that writes a chunk; see `TargetForm`.

    Args:
        strategy: how tensors are laid out.
        chosen: the selected part of the checkpoint.
        name_of: the name of the file of a rank, without its ending.
    """

    boxed = True
    holds_empty = True
    """Ranks without rows of a tensor have an empty chunk of it; only metadata outside of the files can do without."""
    metadata: Optional[Mapping[str, str]] = None

    def __init__(self, strategy: Strategy, chosen: Selected, name_of: Callable[[int], str]) -> None:
        super().__init__(strategy, chosen.tensors)
        self._values = frozenset(chosen.values)
        self._layout_of: Optional[Callable[[int], OutputLayout]] = None
        for stage, section in zip(strategy.stages, stage_sections(strategy, chosen.tensors)):
            # Values are in the first file.
            first = bool(chosen.values) and not self._files
            self._add_files(stage, section, chosen.tensors, self.holds_empty, first)
        ranks = [file.stage.first_rank + file.device for file in self._files]
        self.names = FileNames("file{rank}", dict(enumerate(map(name_of, ranks))))

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
