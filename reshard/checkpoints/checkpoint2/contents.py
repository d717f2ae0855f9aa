"""What an iteration holds: its metadata and the headers of its files held together.

A tensor is taken where both agree. What they contradict each other in is a fault of that tensor alone, so that
it matters only to whoever wants it; known defects of MindFormers' writers are healed where the data is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.checkpoints.checkpoint2.checkpoint2 import Lost
from reshard.checkpoints.checkpoint2.files import IterationFiles
from reshard.checkpoints.checkpoint2.metadata import Metadata
from reshard.checkpoints.checkpoint2.moved import MovedStates
from reshard.checkpoints.checkpoint2.placing import Placement, Placer
from reshard.checkpoints.tensors import Tensor
from reshard.errors import CheckpointError, InputError
from reshard.messages import listing
from reshard.names import ACCUMULATED_GRADIENTS, OTHER, as_pattern, kind_of
from reshard.report import Report
from reshard.wording import plural, quoted, some_names


@dataclass
class Contents:
    """What an iteration holds; the attributes are as those of `Checkpoint2`."""

    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    lost: dict[str, Lost] = field(default_factory=dict)
    faults: dict[str, InputError] = field(default_factory=dict)
    unplaced: dict[str, str] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, placement: Placement) -> None:
        """A tensor that files hold, be it with gaps."""
        grid = placement.grid
        if placement.layout is None and is_value(name, grid.shape):
            self.plain.add(name)
            return
        self.placements[name] = placement
        self.tensors[name] = GlobalTensor(name, tensor.dtype, tensor.item_size, grid.shape, (placement.sharding,))


def is_value(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor that nobody lays out is a value such as ``global_step`` and no parameter."""
    return math.prod(shape) == 1 and kind_of(name, 1) == OTHER


def whole_contents(files: IterationFiles) -> Contents:
    """What the files of a single rank hold: whole tensors.

    Args:
        files: all of one save that needs no metadata.
    """
    found = Contents()
    for number, index in files.indexes.items():
        for name, tensor in index.tensors.items():
            if name in found.placements:
                other = files.paths[found.placements[name].held[0][0]]
                found.faults[name] = CheckpointError(
                    f"{quoted(name)} is in two files, and nothing tells which counts: {other}, {index.path}",
                    file=index.path,
                    parameter=name,
                    hint=f"leave it out with --exclude {as_pattern(name)}",
                )
                continue
            found.add(name, tensor, Placement.whole(tensor.shape, number))
    for name in found.faults:
        del found.tensors[name], found.placements[name]
    return found


def laid_out_contents(metadata: Metadata, files: IterationFiles, report: Report) -> Contents:
    """What the files hold by their metadata.

    Args:
        metadata: what is said.
        files: the files, their headers read.
        report: told of what is healed and of what is left out.
    """
    return _Reading(metadata, files, report).read()


class _Reading:
    def __init__(self, metadata: Metadata, files: IterationFiles, report: Report) -> None:
        self._metadata = metadata
        self._files = files
        self._report = report
        self._placer = Placer(metadata, files)
        self._moves = MovedStates(metadata, files, self._placer)
        self._found = Contents()
        self._without_data: list[str] = []
        self._moved: list[str] = []

    def read(self) -> Contents:
        for name in self._metadata.tensors:
            try:
                self._read(name)
            except InputError as error:
                self._found.faults[name] = error
        self._read_unlisted()
        self._tell()
        return self._found

    def _read(self, name: str) -> None:
        placement = self._placer.place(name)
        tensor = self._placer.tensor(name, placement.contents, placement.grid)
        indexes = self._files.indexes
        lacking = [file for file in placement.contents if name not in indexes[file].tensors]
        if tensor is None and lacking and name.startswith(ACCUMULATED_GRADIENTS):
            self._without_data.append(name)
            return
        moved = self._moves.find(name) if tensor is None and lacking else None
        if moved is not None:
            placement = moved
            tensor = self._placer.tensor(name, placement.contents, placement.grid)
            self._moved.append(name)
        elif lacking:
            paths = [indexes[file].path for file in lacking]
            raise CheckpointError(
                f"{some_names(paths, 2)}: {self._metadata.path} says that {quoted(name)} is in there, and it is not",
                file=paths[0],
                parameter=name,
                hint="the files are not of one save, or were changed; take another iteration, or leave it out with "
                f"--exclude {as_pattern(name)}",
            )
        lost = placement.lost
        if lost:
            said = {file for number in lost for file in placement.said[number]}
            self._found.lost[name] = Lost(name, len(lost), tuple(self._files.names[file] for file in sorted(said)))
        if tensor is not None:
            self._found.add(name, tensor, placement)

    def _read_unlisted(self) -> None:
        """What files hold and metadata does not list: values, and in graph mode what is not trained."""
        shapes: dict[str, tuple[int, ...]] = {}
        contents = {id(index.tensors): index.tensors for index in self._files.indexes.values()}
        for tensors in contents.values():
            for name in tensors.keys() - self._metadata.tensors.keys():
                shapes[name] = tensors[name].shape
        for name in sorted(shapes):
            if math.prod(shapes[name]) == 1:
                self._found.plain.add(name)
            else:
                self._found.unplaced[name] = "how it is cut is not recorded"

    def _tell(self) -> None:
        if self._moved:
            self._report.warn(
                f"{self._metadata.path} looks for {plural(len(self._moved), 'optimizer state')} in the files of "
                "another pipeline stage, as MindFormers does with FusedAdamW; they are taken from the files of the "
                "stage of their parameters: " + listing(self._moved)
            )
        if self._without_data:
            self._report.note(
                f"{self._metadata.path} lists {plural(len(self._without_data), 'parameter')} that no file holds, as "
                "MindFormers up to 2.0 does in a pipeline; passed over: " + listing(self._without_data)
            )
        if self._found.unplaced:
            told = plural(len(self._found.unplaced), "parameter")
            self._report.warn(
                f"{told} of {self._metadata.path.rpartition('/')[0]} left out, as nothing records how they are cut: "
                + listing(self._found.unplaced)
            )
