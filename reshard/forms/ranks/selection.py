"""Which checkpoint of a source tree is converted.

`latest`, the default, is the newest complete step. Steps are tried from the newest on; one that is
not complete is skipped with a warning and the reason. Completeness is judged in ever
narrower *scopes*, the next one only where no step is complete in the one before:

1. everything that was saved;
2. the target strategy's parameters: lost optimizer shards do not matter to a target without them;
3. the needs of the requested target ranks: only the files of their rank list have to exist.

So a run for some of the target ranks chooses the same step as a run for all of them, if one exists,
and reads it alike: it reads the headers of every existing file of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import IncompleteSourceError, InputError
from reshard.forms.cuts import Cuts
from reshard.forms.form import Written
from reshard.forms.ranks import Step, StepFiles
from reshard.forms.ranks.checkpoint import RankCheckpoint, SourceStep
from reshard.forms.ranks.coverage import LostParameter, cure, explain, lost_slices, unread_parameters
from reshard.forms.ranks.parameters import listed_by_source, read_parameters
from reshard.forms.ranks.rank_files import stage_sections
from reshard.forms.target import Section
from reshard.strategies import Stage, Strategy
from reshard.text.messages import block, joined, listing
from reshard.text.name_filters import Filters
from reshard.text.names import is_weight
from reshard.text.report import Report
from reshard.text.wording import plural, rank_ranges

# Of names, in a line of an error.
_MOST_PATTERNS = 6


class Scope(Enum):
    """The part of a step that has to be complete; see the head of this module."""

    EVERYTHING = "everything"
    TARGET = "the parameters of the target strategy"
    ASKED = "the needs of the requested target ranks"


class Incomplete(NamedTuple):
    """The missing parts of a step.

    Attributes:
        label: the step.
        place: the directory that all of its files lie below.
        causes: missing files and stages.
        lost: parameters with a missing slice.
    """

    label: str
    place: str
    causes: list[str]
    lost: Sequence[LostParameter]

    def lines(self, most: int) -> list[str]:
        """Causes first, then lost parameters, with a limit of name patterns each."""
        return [*self.causes, *explain(self.lost, most)]


class _Unwritable(Exception):
    """Edits do not fit a part of a checkpoint."""


class _Taken(NamedTuple):
    """A candidate that is complete in some scope, the number of newer ones, and its gaps in the widest scope."""

    number: int
    candidate: StepFiles
    checkpoint: RankCheckpoint
    scope: Scope
    lacks: Optional[Incomplete]


class StepSelector:
    """Finds the step to convert.

    Args:
        source: strategy the checkpoint was saved with.
        target: strategy it is converted to.
        ranks: the requested target ranks; None for all, and for forms without rank files: which tensors such a
            file gets depends on all tensors of the step.
        filters: the selection of names.
        handles: open source files.
        report: gets notes on skipped steps and damaged files.
        written: edits a checkpoint; None without edits.
    """

    def __init__(
        self,
        source: Strategy,
        target: Strategy,
        ranks: Optional[Sequence[int]],
        filters: Filters,
        handles: FileHandles,
        report: Report,
        written: Optional[Callable[[Checkpoint], Written]] = None,
    ) -> None:
        self._made = written
        # The error of edits on an incomplete step.
        self._unfit: Optional[InputError] = None
        self._source = source
        self._target = target
        self._ranks = ranks
        self._filters = filters
        self._handles = handles
        self._report = report
        self._scopes = [Scope.EVERYTHING]
        if not target.is_none:
            self._scopes.append(Scope.TARGET)
        if ranks is not None:
            self._scopes.append(Scope.ASKED)

    def select(self, candidates: Iterable[StepFiles], steps: Sequence[Optional[Step]] = ()) -> RankCheckpoint:
        """Take the newest complete candidate.

        Args:
            candidates: newest first; only one where the user named a step.
            steps: all steps, for ``latest``.

        Raises:
            IncompleteSourceError: no candidate is complete.
            InputError: files contradict the strategy, or each other.
        """
        taken: dict[Scope, _Taken] = {}
        passed: list[dict[Scope, Incomplete]] = []
        refused: Optional[InputError] = None
        coming = iter(candidates)
        while Scope.EVERYTHING not in taken:
            try:
                candidate = next(coming, None)
                if candidate is None:
                    break
                checkpoint = self._read(SourceStep(candidate, self._handles, self._report))
            except InputError as error:
                # Older steps than the chosen one do not matter.
                refused = error
                break
            lacking = self._lacking(checkpoint)
            passed.append(lacking)
            for scope in self._scopes:
                if scope not in lacking:
                    lacks = lacking.get(Scope.EVERYTHING)
                    taken.setdefault(scope, _Taken(len(passed) - 1, candidate, checkpoint, scope, lacks))
        for scope in self._scopes:
            if scope in taken:
                found = taken[scope]
                newer = passed[: found.number]
                self._tell(found, [lacking[scope] for lacking in newer], steps)
                return found.checkpoint
        if refused is not None:
            raise refused
        raise self._nothing_complete([lacking[self._scopes[-1]] for lacking in passed], steps)

    def _nothing_complete(self, passed: Sequence[Incomplete], steps: Sequence[Optional[Step]]) -> IncompleteSourceError:
        if not passed:
            return IncompleteSourceError("no file of the checkpoint is readable")
        newest = passed[0]
        if len(passed) == 1:
            headline = f"{newest.label} in {newest.place} is not complete:"
        else:
            headline = f"no step in {newest.place} is complete; the newest is {newest.label}:"
        lines = ["  " + line for line in newest.lines(_MOST_PATTERNS)]
        for older in passed[1:]:
            lines += [f"{older.label}: " + line for line in older.lines(3)]
        hints = [cure(newest.lost)]
        if hints[0] is not None and self._ranks is not None:
            hints.append("`reshard rank-list` prints the ranks that a target rank needs")
        if self._unfit is not None and self._ranks is not None:
            reason = self._unfit.message.splitlines()[0].rstrip(":")
            hints.append(f"the new names need one file of every pipeline stage; with these files alone: {reason}")
        if len(steps) > len(passed):
            hints.append("without --no-fallback an older step may be taken")
        return IncompleteSourceError(block(headline, lines), hint="; ".join(filter(None, hints)) or None)

    def judge(self, step: SourceStep) -> tuple[RankCheckpoint, Optional[Incomplete]]:
        """Read a step; returns the missing parts of the whole save, None if complete.

        Raises:
            InputError: its files cannot be read, or contradict the strategy.
            RetryableError: reading failed.
        """
        checkpoint = self._read(step)
        return checkpoint, self._lacks(checkpoint, Scope.EVERYTHING)

    def _lacking(self, checkpoint: RankCheckpoint) -> dict[Scope, Incomplete]:
        """The missing parts of a step, per incomplete scope."""
        found: dict[Scope, Incomplete] = {}
        for scope in self._scopes:
            try:
                lacks = self._lacks(checkpoint, scope)
            except _Unwritable:
                lacks = found[Scope.EVERYTHING]
            if lacks is None:
                # The narrower ones are then as well.
                break
            found[scope] = lacks
        return found

    def _written(self, checkpoint: RankCheckpoint) -> Written:
        """The result that would be written from an incomplete step.

        Raises:
            _Unwritable: edits do not fit a part of a checkpoint.
        """
        if self._made is None:
            unseen = checkpoint.laid_out - checkpoint.tensors.keys()
            return Written(checkpoint.tensors, self._target, {name: name for name in unseen})
        try:
            return self._made(checkpoint)
        except InputError as error:
            self._unfit = error
            raise _Unwritable from error

    def _lacks(self, checkpoint: RankCheckpoint, scope: Scope) -> Optional[Incomplete]:
        step, parameters = checkpoint.source, checkpoint.tensors
        written = None if scope is Scope.EVERYTHING else self._written(checkpoint)
        wanted = None if written is None else self._wanted(scope, written)
        if written is not None and scope is Scope.ASKED:
            lost = list(self._lost_to_asked(checkpoint, written))
        else:
            lost = lost_slices((item for item in parameters.values() if wanted is None or item.name in wanted), step)
        unread = unread_parameters(self._source, step, self._source.stages, set(parameters))
        lost += [item for item in unread if wanted is None or item.parameter in wanted]
        stages = self._empty_stages(checkpoint, wanted)
        if not stages and not lost:
            return None
        causes = list(step.damaged.values())
        causes += [f"{index.path}: holds nothing" for index in step.indexes.values() if not index.tensors]
        absent = sorted(set(range(self._source.device_count)) - set(step.files))
        if absent:
            causes.append(f"no file of {rank_ranges(absent)} ({self._source.device_count} in the strategy)")
        return Incomplete(step.label, step.place, [*causes, *stages], lost)

    def _wanted(self, scope: Scope, written: Written) -> Optional[set[str]]:
        """The source parameters of a scope; None for all."""
        if self._source.is_none:
            return None
        if written.target.is_none:
            return set(self._source.parameters)
        stages = written.target.stages if scope is Scope.TARGET else self._stages_of(written.target)
        names = set().union(*(stage.layouts for stage in stages))
        made = {source.name for name in names & written.tensors.keys() for source in written.tensors[name].sources}
        return made.union(name for name, new in written.unseen.items() if new is None or new in names)

    def _empty_stages(self, checkpoint: RankCheckpoint, wanted: Optional[set[str]]) -> list[str]:
        """Why a step lacks a whole needed stage, or everything."""
        step, parameters, listed = checkpoint.source, checkpoint.tensors, checkpoint.laid_out
        stages = [stage for stage in self._source.stages if stage.layouts or self._source.is_none]
        empty = {stage.number: line for stage in stages for line in self._nothing_of(stage, step)}
        lines = []
        for stage in stages:
            if stage.number not in empty:
                continue
            names = stage.layouts.keys() - parameters.keys()
            if stage.layouts and not names and not step.loaded(stage):
                # All that it would hold is tied, and another stage's ranks hold it.
                continue
            if wanted is None or any(name in wanted and self._only_in(name, empty) for name in names):
                lines.append(empty[stage.number])
        if not lines and listed and not parameters:
            told = plural(len(listed), "parameter")
            lines.append(f"none of the {told} of {self._source.path} is in the files: they are of different models")
        return lines or ([] if step.indexes else ["no file is readable"])

    def _nothing_of(self, stage: Stage, step: SourceStep) -> Iterator[str]:
        """Why a stage's parameters are unknown, if so."""
        where = f"pipeline stage {stage.number} ({rank_ranges(stage.ranks)})"
        loaded = step.loaded(stage)
        held = {name for rank in loaded for name in step.indexes[rank].tensors}
        if not loaded:
            names = "; the strategy gives it " + listing(stage.layouts, _MOST_PATTERNS) if stage.layouts else ""
            yield f"no rank of {where} has a readable file" + names
        elif not held:
            yield f"the files of {where} hold nothing"
        elif step.absent(stage) and stage.layouts and held.isdisjoint(stage.layouts):
            yield f"the files of {where} hold none of its parameters, and ranks are absent"

    def _only_in(self, name: str, stages: Collection[int]) -> bool:
        """Whether only stages with these numbers list a parameter."""
        return all(stage.number in stages for stage in self._source.stages if name in stage.layouts)

    def _read(self, step: SourceStep) -> RankCheckpoint:
        step.load(step.files)
        listed = listed_by_source(self._source, step)
        written = listed
        if self._made is None:
            stages = self._stages_of(self._target)
            everything = self._target.is_none
            written = {
                name
                for name in listed
                if self._filters.admit(name) and (everything or any(name in stage.layouts for stage in stages))
            }
        tensors = read_parameters(self._source, step, listed, written)
        # An empty file may mean that nothing was saved.
        partial = any(map(step.absent, self._source.stages)) or not all(i.tensors for i in step.indexes.values())
        unseen = frozenset(listed.difference(tensors) if partial else ())
        return RankCheckpoint(step, tensors, frozenset(listed), unseen)

    def _stages_of(self, target: Strategy) -> list[Stage]:
        """The requested target stages."""
        if self._ranks is None:
            return list(target.stages)
        stages = {target.stage_of(rank).number: target.stage_of(rank) for rank in self._ranks}
        return list(stages.values())

    def _lost_to_asked(self, checkpoint: RankCheckpoint, written: Written) -> Iterator[LostParameter]:
        """Parameters with a missing slice that the requested targets need."""
        cuts = Cuts()
        sections = stage_sections(written.target, written.tensors)
        missing: dict[str, set[frozenset[int]]] = {}
        for tensor in written.tensors.values():
            try:
                for source, ranks in self._missing_ranks(tensor, checkpoint.source, cuts, sections, written.target):
                    missing.setdefault(source, set()).add(ranks)
            except IncompleteSourceError:
                # Missing files decide its layout.
                missing.setdefault(tensor.sources[0].name, set()).add(frozenset(tensor.shards.undecided))
            except InputError:
                # It does not fit the target; the error is raised for the chosen step.
                continue
        for name, groups in missing.items():
            yield LostParameter(name, frozenset(groups))

    def _missing_ranks(
        self, tensor: GlobalTensor, step: SourceStep, cuts: Cuts, sections: Sequence[Section], target: Strategy
    ) -> Iterator[tuple[str, frozenset[int]]]:
        """Per missing slice that the requested targets need: parameter, and the ranks that should hold it."""
        present = [step.present(source) for source in tensor.sources]
        for rank in self._ranks or ():
            section = sections[target.stage_of(rank).number]
            if tensor.name not in section.layouts:
                continue
            cut = cuts.of(tensor, section)
            for cell in cut.overlap.cells(cut.slice_of(section.position(rank))):
                if not cell.slices:
                    # Padding.
                    continue
                number = 0 if cell.region is None else cell.region.source
                source = tensor.sources[number]
                shardings = cut.shardings[cut.firsts[number] :]
                ranks = {r for sharding, n in zip(shardings, cell.slices) for r in sharding.holders(n)}
                if not any(ranks & held for held in present[number]):
                    yield source.name, frozenset(ranks)

    def _tell(self, taken: _Taken, passed: Sequence[Incomplete], steps: Sequence[Optional[Step]]) -> None:
        """Report the chosen step and the gaps of newer ones."""
        for other in passed:
            self._report.warn(f"{other.label} is not complete and is skipped: " + joined("; ", other.lines(3)))
        for note in taken.candidate.notes:
            self._report.warn(note)
        step = taken.checkpoint.source
        absent = sorted(set(range(self._source.device_count)) - step.readable)
        if taken.scope is Scope.TARGET and taken.lacks is not None:
            self._report.warn(
                f"{step.label} is not complete, but the target strategy does not need the rest: "
                + joined("; ", taken.lacks.lines(3))
            )
        elif taken.scope is Scope.ASKED:
            self._report.note(
                f"{step.label} has no file of {rank_ranges(absent)} here; the requested target ranks need none of it, "
                "and values outside the strategies come from the existing files"
            )
        elif absent:
            self._report.note(
                f"{step.label} has no file of {rank_ranges(absent)}; replicas on {rank_ranges(step.readable)} are used"
            )
        elif passed:
            self._report.note(f"{step.label} is used")
        # Only where other runs write the other ranks: one run takes one step.
        some_ranks = self._ranks is not None and len(set(self._ranks)) < self._target.device_count
        if some_ranks and len(steps) > 1 and step.step is not None:
            self._report.warn(
                f"{step.place} holds {plural(len(steps), 'step')}, and {step.label} is taken; give every rank "
                f"--step {step.step}, so that all of them use the same step, even if newer ones are saved"
            )
        if taken.scope is Scope.EVERYTHING:
            self._tell_not_saved(taken.checkpoint)

    def _tell_not_saved(self, checkpoint: RankCheckpoint) -> None:
        """Name parameters that no file holds although only an absent rank may have saved them."""
        step, parameters = checkpoint.source, checkpoint.tensors
        known = frozenset(self._source.parameters)
        for stage in self._source.stages:
            away = step.absent(stage)
            unseen = sorted(name for name in stage.layouts if name not in parameters)
            if away and unseen:
                # Weights are always saved; strategies often list other parameters that are not.
                tell = self._report.warn if any(is_weight(name, known) for name in unseen) else self._report.note
                tell(
                    f"{plural(len(unseen), 'parameter')} of stage {stage.number} in no file of {step.label} count as "
                    "not saved: " + listing(unseen, 3) + f"; if only {rank_ranges(away)} saved them (a de-duplicated "
                    "save), bring these ranks back"
                )
