"""Trees of rank directories as a form."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Optional, cast

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import CheckpointError, InputError
from reshard.forms.form import Form, FormOptions, Layouts, Reading, Wanted
from reshard.forms.ranks import FileNames, Step, StepFiles, find_checkpoints
from reshard.forms.ranks.rank_files import STRATEGY_FILE, RankFiles, resume_files
from reshard.forms.ranks.steps import RANK
from reshard.forms.target import TargetForm
from reshard.storage import exists
from reshard.strategies import SAME, Strategy
from reshard.text.report import Report
from reshard.text.wording import rank_ranges

_CHOOSE_FORMAT = "choose the target's with --format ckpt or --format safetensors"
_NAME_FORMAT = "name the files of one format, as in 'ckpt/rank_{rank}/*.ckpt'; ranks that have none then count as lost"


class RanksForm(Form):
    """One file per rank, in a directory of its own."""

    name = "ranks"
    options = FormOptions("rank", "rank files", Layouts.GIVEN, steps=True, formats=("ckpt", "safetensors"))

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By ``{rank}`` in the path; this is also the form of unrecognised sources."""
        return names is None and ("\0" in src or RANK in src)

    def read(self, reading: Reading) -> Checkpoint:
        """The newest complete step, or the requested one."""
        # Loaded only here: strategies alone are read in loops.
        from reshard.forms.ranks.selection import StepSelector

        selector = StepSelector(
            reading.source,
            reading.target,
            reading.ranks,
            reading.filters,
            reading.handles,
            reading.report,
            reading.written,
        )
        candidates, steps = _candidates(reading)
        return selector.select(_with_damage(candidates, reading.damaged), steps)

    def problems(self, checkpoint: Checkpoint, source: Strategy, strict: bool, report: Report) -> list[InputError]:
        """Parameters that a stage's ranks hold although only another stage's strategy lists them."""
        from reshard.forms.ranks.checkpoint import RankCheckpoint
        from reshard.forms.ranks.coverage import problems_of_unlisted

        return problems_of_unlisted(cast(RankCheckpoint, checkpoint), source, strict, report)

    def target(self, checkpoint: Checkpoint, wanted: Wanted) -> TargetForm:
        """A file for every rank of the target's strategy."""
        alone = wanted.target.path == SAME and wanted.target.stages != wanted.source.stages
        if alone and not all(stage.layouts for stage in wanted.target.stages):
            wanted.report.warn("no strategy file is written: a pipeline stage has no selected parameter")
            alone = False
        if alone and wanted.on_disk:
            wanted.report.note(f"the strategy of these ranks is written to {os.path.join(wanted.dst, STRATEGY_FILE)}")
        return RankFiles(
            wanted.target,
            checkpoint.tensors,
            format_asked(wanted.format, checkpoint),
            rank_names(wanted.prefix, checkpoint),
            alone,
        )

    def marks(self, files: Sequence[str]) -> list[str]:
        """The strategy, if no file contains it, and the files that trainers read."""
        return [STRATEGY_FILE, *(file.name for file in resume_files(files))]


def _candidates(reading: Reading) -> tuple[Iterable[StepFiles], Sequence[Optional[Step]]]:
    """The candidate steps, newest first, and the list of all steps for ``latest``."""
    from reshard.forms.ranks.coverage import check_ranks

    if not isinstance(reading.src, str):
        beyond = [rank for rank in reading.src if not 0 <= rank < reading.source.device_count]
        if beyond:
            raise CheckpointError(
                f"{rank_ranges(beyond)} given, but the source strategy has {reading.source.device_count} devices",
                rank=beyond[0],
            )
        for rank, path in reading.src.items():
            if not exists(path):
                raise CheckpointError(f"{path}: does not exist (rank {rank})", file=path, rank=rank)
        return [StepFiles(None, dict(reading.src))], ()
    tree = find_checkpoints(reading.src, reading.file_suffix)
    check_ranks(tree, reading.source, reading.handles)
    candidates = tree.candidates(reading.step)
    if reading.step != "latest":
        return candidates, ()
    return candidates if reading.fallback else itertools.islice(candidates, 1), tree.steps


def _with_damage(candidates: Iterable[StepFiles], damaged: Mapping[str, str]) -> Iterator[StepFiles]:
    """Candidates with their damaged files marked; reasons by path."""
    for candidate in candidates:
        known = {rank: damaged[path] for rank, path in candidate.files.items() if path in damaged}
        yield replace(candidate, damaged=known)


def rank_names(prefix: Optional[str], checkpoint: Checkpoint) -> FileNames:
    """Of the files of ranks.

    Raises:
        ReshardError: the names of --prefix are impossible.
    """
    epoch, _, number = (checkpoint.step or "").partition("_")
    step = Step(int(epoch), int(number)) if number else None
    return FileNames.of_prefix(DEFAULT_PREFIX if prefix is None else prefix, step)


def format_asked(format: str, checkpoint: Checkpoint, recover: bool = False) -> str:
    """The format of rank files.

    Raises:
        CheckpointError: it is to be the source's, which has several.
    """
    if format != "same":
        return format
    # Archives of torch are no files of ranks.
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
