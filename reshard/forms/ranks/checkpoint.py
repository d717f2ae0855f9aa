"""One step of a rank tree, read by its strategy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, cast

from reshard.checkpoints import CheckpointIndex, FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, StoredObject, TiedTensors, order_in_files
from reshard.checkpoints.edited import stored_checkpoint
from reshard.checkpoints.formats.headers import KnownStructures, read_headers
from reshard.checkpoints.formats.output import DEDUPLICATED
from reshard.errors import DamagedCheckpointError
from reshard.forms.ranks import StepFiles
from reshard.layout import Box, Grid, Layout
from reshard.storage import absolute, common_directory
from reshard.strategies import Holding, Stage
from reshard.text.messages import Report, step_words


class StageSharding(NamedTuple):
    """One stage that holds a tensor of a known shape; see `checkpoint.Sharding`.

    Attributes:
        stage: the stage.
        layout: the real layout there.
        grid: the boxes of its slices.
    """

    stage: Stage
    layout: Layout
    grid: Grid

    @property
    def holding(self) -> Holding:
        """Stage and layout alone."""
        return Holding(self.stage, self.layout)

    def holders(self, slice_number: int) -> list[int]:
        """Global ranks that hold a slice, ascending."""
        return self.holding.ranks(slice_number)

    def stored_box(self, slice_number: int) -> Box:
        """The box of a slice in the full tensor."""
        return self.grid.slice_box(slice_number)

    def slice_of(self, rank: int) -> int:
        """The slice that a global rank of this stage holds."""
        return self.holding.slice_of(rank)


def stage_shardings(tensor: GlobalTensor) -> tuple[StageSharding, ...]:
    """The shardings of a tensor of a rank tree."""
    return cast("tuple[StageSharding, ...]", tensor.shardings)


class RankCheckpoint:
    """One step of a rank tree; see `checkpoint.Checkpoint`. Holders are ranks.

    Attributes:
        source: the files.
        tensors: the strategy's parameters in the files, by name.
        laid_out: names that the strategy lists.
        unseen: listed names in no file, if files of some ranks are missing.
    """

    form = "ranks"
    # Rank files have no metadata of training, no files beside them and no objects.
    training: Mapping[str, Any] = {}
    extra_files: Sequence[str] = ()
    objects: Mapping[str, StoredObject] = {}

    def __init__(
        self,
        source: SourceStep,
        tensors: Mapping[str, GlobalTensor],
        laid_out: frozenset[str],
        unseen: frozenset[str] = frozenset(),
    ) -> None:
        self.source = source
        self.tensors = tensors
        self.laid_out = laid_out
        self.unseen = unseen

    @property
    def step(self) -> Optional[str]:
        """``3_10``; None for files without a step in their names."""
        return None if self.source.step is None else str(self.source.step)

    @property
    def label(self) -> str:
        """The step's name in messages."""
        return self.source.label

    @property
    def place(self) -> str:
        """The common directory of the step's files."""
        return self.source.place

    @property
    def files(self) -> Mapping[int, str]:
        """Path per rank that has a file of this step."""
        return self.source.files

    @property
    def indexes(self) -> Mapping[int, CheckpointIndex]:
        """Headers of the readable files, by rank."""
        return self.source.indexes

    def order(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return order_in_files(self)

    def tied_tensors(self) -> Sequence[TiedTensors]:
        """None: no tied tensors."""
        return ()

    def names(self) -> set[str]:
        """Every tensor name in the files."""
        return self.source.names()

    def values(self) -> list[str]:
        """Names that files hold and that the strategy does not list."""
        return sorted(self.source.names() - self.laid_out)

    def without_layout(self) -> list[str]:
        """None: unlisted tensors may be slices."""
        return []

    def holders(self, name: str) -> list[int]:
        """All ranks whose file holds a tensor of this name, ascending."""
        return self.source.holders(name)

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """Per sharding of a tensor, the ranks whose file holds it."""
        return self.source.present(tensor)


def rank_checkpoint_of(checkpoint: Checkpoint) -> Optional[RankCheckpoint]:
    """The rank checkpoint below any edits; None for other forms."""
    stored = stored_checkpoint(checkpoint)
    return stored if isinstance(stored, RankCheckpoint) else None


class SourceStep:
    """One step of a source tree.

    Attributes:
        step_files: the files by name alone.
        files: path per rank that has a file of this step.
        indexes: headers of the files read so far, by rank.
        damaged: by rank, the reason why its file counts as absent.
    """

    def __init__(self, step_files: StepFiles, handles: FileHandles, report: Report) -> None:
        self.step_files = step_files
        self.step = step_files.step
        self.files: dict[int, str] = dict(step_files.files)
        self.indexes: dict[int, CheckpointIndex] = {}
        self.damaged: dict[int, str] = dict(step_files.damaged)
        self._handles = handles
        self._report = report
        self._sets: dict[frozenset[str], int] = {}
        self._set_of_rank: dict[int, int] = {}
        self._set_of_tensors: dict[int, int] = {}
        self._known = KnownStructures(handles)
        self._presence: dict[tuple[int, tuple[int, ...]], frozenset[int]] = {}
        self._marked = False

    @property
    def label(self) -> str:
        """The step's name in messages."""
        return step_words(self.step)

    @property
    def place(self) -> str:
        """The common directory of the step's files."""
        directories = {absolute(os.path.dirname(path)) for path in self.files.values()}
        return common_directory(directories) if directories else "the source"

    @property
    def readable(self) -> frozenset[int]:
        """Ranks with an existing file that is not marked as damaged."""
        return frozenset(self.files) - frozenset(self.damaged)

    def load(self, ranks: Iterable[int]) -> bool:
        """Read the headers of these ranks' existing files.

        Returns:
            Whether a file was read for the first time.
        """
        unread = [r for r in sorted(ranks) if r in self.files and r not in self.indexes and r not in self.damaged]
        for rank, index in read_headers(
            self._handles, {rank: self.files[rank] for rank in unread}, structures=self._known
        ):
            if isinstance(index, DamagedCheckpointError):
                self.damaged[rank] = index.message
                self._report.warn(f"{index.message}; rank {rank} counts as absent at {self.label}")
                continue
            self.indexes[rank] = index
            self._marked = self._marked or index.metadata.get(DEDUPLICATED) == "True"
            # Files of equal structure share their tensors: compare by identity first.
            number = self._set_of_tensors.get(id(index.tensors))
            if number is None:
                number = self._sets.setdefault(frozenset(index.tensors), len(self._sets))
                self._set_of_tensors[id(index.tensors)] = number
            self._set_of_rank[rank] = number
            self._presence.clear()
        return bool(unread)

    def loaded(self, stage: Stage) -> list[int]:
        """Ranks of a stage whose files were read, ascending."""
        return [rank for rank in sorted(self.indexes) if rank in stage.ranks]

    def absent(self, stage: Stage) -> list[int]:
        """Ranks of a stage that have no readable file of this step, ascending."""
        readable = self.readable
        return [rank for rank in stage.ranks if rank not in readable]

    def ranks_with(self, name: str, stage: Stage) -> frozenset[int]:
        """Ranks of a stage whose file holds a tensor of this name, among the files read."""
        sets = tuple(number for names, number in self._sets.items() if name in names)
        key = (stage.number, sets)
        ranks = self._presence.get(key)
        if ranks is None:
            ranks = frozenset(rank for rank in self.loaded(stage) if self._set_of_rank[rank] in sets)
            self._presence[key] = ranks
        return ranks

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """Per sharding of a tensor, the ranks whose file holds it."""
        return tuple(self.ranks_with(tensor.name, sharding.stage) for sharding in stage_shardings(tensor))

    def deduplicated(self, stage: Stage) -> bool:
        """Whether only some of the replicas of a stage saved a slice.

        A single file with the mark is enough. Files of .ckpt have no mark: there, different sets of parameters
        in the files of a stage show it.
        """
        if self._marked:
            return True
        loaded = self.loaded(stage)
        numbers = {self._set_of_rank[rank] for rank in loaded}
        sets = [names for names, number in self._sets.items() if number in numbers]
        return any(
            len({name in names for names in sets}) > 1 and self._lacks_elements(name, stage, loaded)
            for name in stage.layouts
        )

    def _lacks_elements(self, name: str, stage: Stage, loaded: Sequence[int]) -> bool:
        """Whether a file of a stage lacks a slice with elements; .ckpt files mostly skip empty slices."""
        holders = self.ranks_with(name, stage)
        if not any(self.indexes[rank].tensors[name].nbytes for rank in holders):
            return False
        lacking = (rank - stage.first_rank for rank in loaded if rank not in holders)
        return not all(map(stage.layouts[name].is_empty_by_hand, lacking))

    def names(self) -> set[str]:
        """Every tensor name in the files read so far."""
        return set().union(*self._sets) if self._sets else set()

    def holders(self, name: str) -> list[int]:
        """Ranks whose file holds a tensor of this name, among the files read, ascending."""
        sets = {number for names, number in self._sets.items() if name in names}
        return sorted(rank for rank, number in self._set_of_rank.items() if number in sets)
