"""Target files, one per rank, as MindSpore saves and loads them: ``rank_3/checkpoint_3.ckpt``."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.forms.ranks import FileNames
from reshard.forms.ranks.steps import parse_stem
from reshard.forms.target import FinishingFile, Section, TargetForm, WholeLayouts
from reshard.strategies import Strategy

STRATEGY_FILE = "reshard-strategy.json"
"""The strategy of a target with the source's layouts, if no file has it, or names differ."""


class RankFiles(TargetForm):
    """The files of all ranks of a strategy; see `TargetForm`.

    Args:
        strategy: of the target; `none` writes every tensor of the source whole.
        tensors: of the source.
        format: of the files.
        names: of the files.
        with_strategy: the strategy is written beside the ranks, because no file has it.
    """

    name = "ranks"
    by_rank = True

    def __init__(
        self,
        strategy: Strategy,
        tensors: Mapping[str, GlobalTensor],
        format: str,
        names: FileNames,
        with_strategy: bool = False,
    ) -> None:
        self.format = format
        self.names = names
        self.takes_everything = strategy.is_none
        self.metadata: Optional[Mapping[str, str]] = None
        self._strategy = strategy
        self._tensors = tensors
        self._with_strategy = with_strategy
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
        """The strategy, if no file has it, and meta.json files, if the names fit ``resume_training``."""
        files = resume_files([f"{self.names.of(rank)}.{self.format}" for rank in range(self.count)])
        return [FinishingFile(STRATEGY_FILE, lambda: [self._strategy_file()]), *files] if self._with_strategy else files

    def _strategy_file(self) -> bytes:
        shapes = {name: self._tensors[name].shape for name in self._strategy.parameters if name in self._tensors}
        # Loaded only here: rank directories seldom get a strategy file.
        from reshard.strategies.written import merged_json

        return merged_json(self._strategy, shapes, "converted", STRATEGY_FILE)


def stage_sections(strategy: Strategy, tensors: Mapping[str, GlobalTensor]) -> list[Section]:
    """The pipeline stages of a strategy as sections.

    Args:
        strategy: of the target; `none` writes every tensor of the source whole.
        tensors: of the source.
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


META_NAME = "meta.json"
_DIRECTORY = re.compile(r"rank_([0-9]+)")
_RANK = re.compile(r"_rank_([0-9]+)")


def resume_files(names: Sequence[str]) -> list[FinishingFile]:
    """A meta.json for every rank; none if ``resume_training`` does not read files of these names.

    Args:
        names: the file of every rank, relative to the tree.
    """
    files = []
    for name in names:
        content = meta_json(name)
        if content is None:
            return []
        files.append(FinishingFile(f"{os.path.dirname(name)}/{META_NAME}", functools.partial(list, [content])))
    return files


def meta_json(name: str) -> Optional[bytes]:
    """The content of the meta.json beside a checkpoint file; None if ``resume_training`` does not read such names.

    Args:
        name: the file, relative to the tree: ``rank_3/llama_rank_3-1_200.ckpt``.
    """
    directory, file = os.path.split(name)
    stem, ending = os.path.splitext(file)
    prefix, step = parse_stem(stem)
    in_directory, in_prefix = _DIRECTORY.fullmatch(directory), _RANK.search(prefix)
    # The step must be last in the name: saves at a fault carry a mark after it.
    if (
        step is None
        or in_directory is None
        or in_prefix is None
        or in_directory[1] != in_prefix[1]
        or file != f"{prefix}-{step}{ending}"
    ):
        return None
    content = {"last_epoch": step.epoch, "last_step": step.step, "last_ckpt_file": file}
    return (json.dumps(content) + "\n").encode()
