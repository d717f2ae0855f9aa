"""Reading the checkpoint that was converted: its step and its headers, as a conversion reads them.

Which step is complete, which files are damaged and what is lost is decided by the rooms that conversions use: their
mistakes show as refusals, or as differences of what is compared here byte by byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.errors import InputError
from reshard.forms.ranks import SourceTree, StepFiles, find_checkpoints
from reshard.forms.ranks.checkpoint import RankCheckpoint, SourceStep
from reshard.forms.ranks.coverage import check_ranks
from reshard.forms.ranks.parameters import listed_by_source, read_parameters
from reshard.forms.ranks.selection import StepSelector
from reshard.forms.registry import RANKS, read_checkpoint
from reshard.strategies import Strategy
from reshard.text.name_filters import Filters
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.text.report import Report
from reshard.verification.stored import Source

if TYPE_CHECKING:
    from reshard.plan.edits import Edits


class Place(NamedTuple):
    """Where a checkpoint is.

    Attributes:
        path: tree, file or `{rank}` path, or the directory of another form.
        form: its form.
        strategy: of rank directories; `none` where the form tells the layouts.
        step: which step; ``latest`` for the newest complete one.
        file_suffix: only files whose stem ends so.
    """

    path: str
    form: str
    strategy: Strategy
    step: str = "latest"
    file_suffix: Optional[str] = None


class Reader:
    """Reads a checkpoint.

    Args:
        place: where it is.
        handles: open files.
        report: told what was decided.
        target: strategy of what it was converted to; None where all of it is needed.
        ranks: the target ranks asked for; all where None.
        filters: which parameters are wanted.
        files: of another form than rank directories, numbers of the files to look into; all where None.
        incomplete: nothing has to be there whole; for other forms than rank directories.
        edits: the names and types that decide which tensors of rank directories are wanted.
    """

    def __init__(
        self,
        place: Place,
        handles: FileHandles,
        report: Report,
        target: Optional[Strategy] = None,
        ranks: Optional[Sequence[int]] = None,
        filters: Optional[Filters] = None,
        files: Optional[Collection[int]] = None,
        incomplete: bool = False,
        edits: Optional[Edits] = None,
    ) -> None:
        self._place, self._handles, self._report = place, handles, report
        self._target = Strategy.none() if target is None else target
        self._listed = frozenset(self._target.parameters)
        self._ranks, self._files, self._incomplete = ranks, files, incomplete or files is not None
        self._filters = Filters() if filters is None else filters
        self._edits = edits
        self._tree: Optional[SourceTree] = None
        if place.form == RANKS:
            self._tree = find_checkpoints(place.path, place.file_suffix)
            check_ranks(self._tree, place.strategy, handles)

    def read(self, damaged: Mapping[str, str]) -> Source:
        """The step, given files that are damaged, and why, by path.

        Raises:
            InputError: it is not complete, or contradicts itself.
            RetryableError: reading failed.
        """
        place = self._place
        if self._tree is None:
            checkpoint = read_checkpoint(
                place.form, place.path, place.step, self._handles, self._report, damaged, self._is_wanted
            )
            return Source(checkpoint, place.strategy, self._files)
        written = None if self._edits is None else self._edits.written(self._target)
        selector = StepSelector(
            place.strategy, self._target, self._ranks, self._filters, self._handles, self._report, written
        )
        steps = self._tree.steps if place.step == "latest" else ()
        candidates = with_damage(self._tree.candidates(place.step), damaged)
        selected = selector.select(candidates, steps)
        for rank, why in selected.source.found.damaged.items():
            self._report.warn(f"{why}; rank {rank} counts as absent at {selected.label}")
        return Source(selected, place.strategy)

    def _is_wanted(self, name: str) -> bool:
        """Whether a tensor has to be there whole."""
        if self._incomplete:
            return False
        return self._filters.admit(name) and (self._target.is_none or name in self._listed)


def with_damage(candidates: Iterator[StepFiles], damaged: Mapping[str, str]) -> Iterator[StepFiles]:
    """Candidates that know which of their files are damaged, given why, by path."""
    for candidate in candidates:
        known = {rank: damaged[path] for rank, path in candidate.files.items() if path in damaged}
        yield replace(candidate, damaged=known)


def read_files_of_ranks(
    files: Mapping[int, str],
    strategy: Strategy,
    handles: FileHandles,
    report: Report,
    damaged: Mapping[str, str],
    admit: Callable[[str], bool],
) -> tuple[Source, dict[str, InputError]]:
    """Read some ranks' files of one step, complete or not.

    Returns:
        What they hold, and the problems of parameters that contradict the strategy, by name.

    Raises:
        InputError: a file cannot be read.
        RetryableError: reading failed.
    """
    (candidate,) = with_damage(iter([StepFiles(None, dict(files))]), damaged)
    step = SourceStep(candidate, handles, report)
    for rank, why in candidate.damaged.items():
        report.warn(f"{why}; rank {rank} counts as absent")
    step.load(step.files)
    listed = {name for name in listed_by_source(strategy, step) if admit(name)}
    owners = {name[len(ACCUMULATED_GRADIENTS) :] for name in listed if name.startswith(ACCUMULATED_GRADIENTS)}
    everything = listed_by_source(strategy, step)
    tensors = read_parameters(strategy, step, listed | (owners & everything), set())
    there = step.names()
    problems: dict[str, InputError] = {}
    for name in sorted(listed & there - tensors.keys()):
        owner = name[len(ACCUMULATED_GRADIENTS) :] if name.startswith(ACCUMULATED_GRADIENTS) else name
        try:
            read_parameters(strategy, step, {name, owner} & everything, {name})
        except InputError as error:
            problems[name] = error
    checkpoint = RankCheckpoint(step, tensors, frozenset(everything))
    return Source(checkpoint, strategy), problems
