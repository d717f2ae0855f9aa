"""One file per rank, as MindSpore saves and loads them: ``rank_3/checkpoint_3.ckpt``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional

from reshard.checkpoints import FileNames
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.strategies import Strategy
from reshard.strategies.written import merged_json
from reshard.target.form import FinishingFile, Section, TargetForm, WholeLayouts
from reshard.target.marks import STRATEGY_FILE
from reshard.target.resume_training import resume_files


class RankFiles(TargetForm):
    """The files of all ranks of a strategy; see `TargetForm`.

    Args:
        strategy: how tensors are laid out; `none` takes every tensor of the source whole.
        tensors: the source's.
        format: of the files.
        names: of the files.
        alone: whether no file says the strategy, so that one is written beside the ranks.
    """

    name = "ranks"
    by_rank = True

    def __init__(
        self,
        strategy: Strategy,
        tensors: Mapping[str, GlobalTensor],
        format: str,
        names: FileNames,
        alone: bool = False,
    ) -> None:
        self.format = format
        self.names = names
        self.takes_everything = strategy.is_none
        self.metadata: Optional[Mapping[str, str]] = None
        self._strategy = strategy
        self._tensors = tensors
        self._alone = alone
        self.sections: Sequence[Section] = stage_sections(strategy, tensors)

    @property
    def count(self) -> int:
        """Ranks."""
        return self._strategy.device_count

    def section_of(self, file: int) -> Section:
        """The pipeline stage of a rank."""
        return self.sections[self._strategy.stage_of(file).number]

    def takes_value(self, name: str, file: int) -> bool:
        """Every rank gets every value."""
        return True

    def finishing(self) -> Sequence[FinishingFile]:
        """The strategy, where none is at hand, and what trainers go by, where files are named as theirs."""
        files = resume_files([f"{self.names.of(rank)}.{self.format}" for rank in range(self.count)])
        return [FinishingFile(STRATEGY_FILE, lambda: [self._strategy_file()]), *files] if self._alone else files

    def _strategy_file(self) -> bytes:
        shapes = {name: self._tensors[name].shape for name in self._strategy.parameters if name in self._tensors}
        return merged_json(self._strategy, shapes, "converted", STRATEGY_FILE)


def stage_sections(strategy: Strategy, tensors: Mapping[str, GlobalTensor]) -> list[Section]:
    """The pipeline stages of a strategy as sections.

    Args:
        strategy: how tensors are laid out; `none` takes every tensor of the source whole.
        tensors: the source's.
    """
    return [
        Section(
            stage.number,
            stage.ranks,
            WholeLayouts(tensors) if strategy.is_none else stage.layouts,
            len(strategy.stages) > 1,
            f"target strategy {strategy.path}, stage {stage.number}",
        )
        for stage in strategy.stages
    ]
