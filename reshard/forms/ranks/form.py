"""Trees of rank directories as a form, and the files of a target: ``rank_3/checkpoint_3.ckpt``."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.checkpoints.formats.dtypes import MEMORY
from reshard.checkpoints.formats.output import DEDUPLICATED
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import CheckpointError, IncompleteSourceError
from reshard.forms.form import Form, FormOptions, Layouts
from reshard.forms.ranks.naming import RANK, FileNames, Step, parse_stem
from reshard.forms.ranks.tree import StepFiles, find_checkpoints, named_for_rank
from reshard.forms.request import Means, Request
from reshard.forms.target import FinishingFile, Section, TargetForm, WholeLayouts
from reshard.storage import exists
from reshard.strategies import SAME, Strategy
from reshard.text.messages import plural, rank_ranges

_CHOOSE_FORMAT = "choose the target's with --format ckpt or --format safetensors"
_NAME_FORMAT = "name the files of one format, as in 'ckpt/rank_{rank}/*.ckpt'; ranks that have none then count as lost"


class RanksForm(Form):
    """One file per rank, in a directory of its own."""

    name = "ranks"
    options = FormOptions(
        "rank", "MindSpore ranks", Layouts.GIVEN, steps=True, formats=("ckpt", "safetensors"), prefix=True
    )

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        """By ``{rank}`` in the path, or by nothing but rank directories; this is also the form of unrecognised sources.

        Other forms are recognised by names that no rank directory has, so they need not be loaded.
        """
        return RANK in src or (bool(names) and all(map(named_for_rank, names)))

    def read(self, request: Request, means: Means) -> Checkpoint:
        # Imported late: `rank-list` in a loop reads only strategies.
        from reshard.forms.ranks.selection import StepSelector

        request.source.without(request.asked.source.without_ranks)
        candidates, steps, ranks = _candidates(request, means)
        try:
            return StepSelector(request, means).select(_with_damage(candidates, request), steps)
        except IncompleteSourceError as error:
            if ranks == tuple(range(len(ranks))) and 0 < len(ranks) < request.source.device_count:
                run = f"if the run had {plural(len(ranks), 'rank')}"
                error.add_hint(f"{run}, {request.source.path} is not its strategy")
            raise

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        with_strategy = request.target.path == SAME and request.target.stages != request.source.stages
        if with_strategy and not all(stage.layouts for stage in request.target.stages):
            means.report.warn("no strategy file is written: a pipeline stage has no selected parameter")
            with_strategy = False
        if with_strategy and request.on_disk:
            means.report.note(f"the strategy of these ranks is written to {os.path.join(request.dst, STRATEGY_FILE)}")
        files = RankFiles(
            request.target,
            checkpoint.tensors,
            target_format(MEMORY if request.task.in_memory else request.asked.target.format, checkpoint),
            rank_names(request.asked.target.prefix, checkpoint),
            with_strategy,
        )
        whole = request.source.is_none and request.target.is_none
        if request.source.is_as_cut or (whole and not request.on_disk):
            # A de-duplicated save stays one; .ckpt files do not record it.
            marks = {index.metadata.get(DEDUPLICATED) for index in checkpoint.indexes.values()}
            mark = marks.pop() if len(marks) == 1 else None
            files.metadata = {"format": "ms", **({} if mark is None else {DEDUPLICATED: mark})}
        return files

    def marks(self, files: Sequence[str]) -> list[str]:
        """The strategy, if no file contains it, and the files that trainers read."""
        return [STRATEGY_FILE, *(file.name for file in resume_files(files))]


def _candidates(request: Request, means: Means) -> tuple[Iterable[StepFiles], Sequence[Step | None], tuple[int, ...]]:
    """The candidate steps, newest first, the list of all steps for ``latest``, and the ranks of the tree."""
    from reshard.forms.ranks.selection import check_ranks

    asked = request.asked.source
    if asked.files is not None:
        beyond = [rank for rank in asked.files if not 0 <= rank < request.source.device_count]
        if beyond:
            raise CheckpointError(
                f"{rank_ranges(beyond)} given, but the source strategy has {request.source.device_count} devices",
                rank=beyond[0],
            )
        for rank, path in asked.files.items():
            if not exists(path):
                raise CheckpointError(f"{path}: does not exist (rank {rank})", file=path, rank=rank)
        return [StepFiles(None, dict(asked.files))], (), ()
    tree = find_checkpoints(asked)
    check_ranks(tree, request.source, means.handles)
    candidates = tree.candidates(asked.step)
    if asked.step != "latest":
        return candidates, (), tree.ranks
    return candidates if asked.fallback else itertools.islice(candidates, 1), tree.steps, tree.ranks


def _with_damage(candidates: Iterable[StepFiles], request: Request) -> Iterator[StepFiles]:
    """Candidates, with the files marked that count as absent."""
    for candidate in candidates:
        left_out = candidate.files.keys() & set(request.asked.source.without_ranks)
        reasons = {rank: f"rank {rank} counts as lost (--without-ranks)" for rank in sorted(left_out)}
        damaged = request.damaged
        reasons.update((rank, damaged[path]) for rank, path in candidate.files.items() if path in damaged)
        yield candidate._replace(damaged=reasons)


def rank_names(prefix: str | None, checkpoint: Checkpoint) -> FileNames:
    epoch, _, number = (checkpoint.step or "").partition("_")
    step = Step(int(epoch), int(number)) if number else None
    return FileNames.of_prefix(DEFAULT_PREFIX if prefix is None else prefix, step)


def target_format(format: str, checkpoint: Checkpoint, recover: bool = False) -> str:
    """The format of the target's rank files.

    Args:
        format: the requested format, or ``same``.
        checkpoint: the source.
        recover: the command is `recover`, which has no --format.

    Raises:
        CheckpointError: ``same``, and the source has several formats.
    """
    if format != "same":
        return format
    # Archives of torch become safetensors.
    formats = {
        index.format if index.format in RanksForm.options.formats else "safetensors": index.path
        for index in checkpoint.indexes.values()
    }
    if len(formats) > 1:
        raise CheckpointError(
            f"source files have different formats: {' and '.join(sorted(formats.values()))}",
            hint=_NAME_FORMAT if recover else _CHOOSE_FORMAT,
        )
    return next(iter(formats))


STRATEGY_FILE = "reshard-strategy.json"
"""The strategy of a target with the source's layouts, if no file has it, or names differ."""


class RankFiles(TargetForm):
    """The files of all ranks of a strategy; `none` writes every tensor of the source whole."""

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
        self.metadata: Mapping[str, str] | None = None
        self._strategy = strategy
        self._tensors = tensors
        self._with_strategy = with_strategy
        self.sections: Sequence[Section] = stage_sections(strategy, tensors)

    @property
    def count(self) -> int:
        return self._strategy.device_count

    def section_of(self, file: int) -> Section:
        return self.sections[self._strategy.stage_of(file).number]

    def takes_value(self, name: str, file: int) -> bool:
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
    """The pipeline stages of a strategy as sections; `none` writes every tensor of the source whole."""
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


def meta_json(name: str) -> bytes | None:
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
