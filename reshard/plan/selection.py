"""Which checkpoint of a source tree is converted.

`latest`, the default, is the newest complete step. Steps are tried from the newest on; one that is
not complete is passed over with a line saying why. Where only some target ranks are asked for, only
the files that they need are read and judged, so that only those need be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints import FileHandles, StepFiles
from reshard.errors import IncompleteSourceError
from reshard.messages import block, joined, listing
from reshard.name_filters import Filters
from reshard.plan.coverage import Lost, cure, explain, lost_slices, unread_parameters
from reshard.plan.cuts import Cuts
from reshard.plan.parameters import Parameter, listed_by_source, read_parameters
from reshard.plan.replicas import ReplicaChoice
from reshard.plan.source import SourceStep
from reshard.report import Report
from reshard.strategies import Stage, Strategy
from reshard.wording import plural, rank_ranges

# Of names, in a line of an error.
_MOST_PATTERNS = 6


class Selection(NamedTuple):
    """The step to convert, and its parameters by name."""

    step: SourceStep
    parameters: dict[str, Parameter]
    listed: set[str]


class Incomplete(NamedTuple):
    """What a step lacks.

    Attributes:
        label: the step.
        place: the directory that all of its files lie below.
        causes: files and stages that are not there.
        lost: parameters of which a slice is nowhere.
    """

    label: str
    place: str
    causes: list[str]
    lost: Sequence[Lost]

    def lines(self, most: int) -> list[str]:
        """Causes first, then what is lost, each with so many patterns of names at the most."""
        return [*self.causes, *explain(self.lost, most)]


class StepSelector:
    """Finds the step to convert.

    Args:
        source: strategy the checkpoint was saved with.
        target: strategy it is converted to.
        ranks: target ranks asked for; None for all of them.
        written: names that will be written, given a name (filters and target strategy).
        choice: replica choice between the two strategies.
        handles: open source files.
        report: told of steps passed over and files that count as absent.
    """

    def __init__(
        self,
        source: Strategy,
        target: Strategy,
        ranks: Optional[Sequence[int]],
        filters: Filters,
        choice: ReplicaChoice,
        handles: FileHandles,
        report: Report,
    ) -> None:
        self._source = source
        self._target = target
        self._ranks = ranks
        self._filters = filters
        self._choice = choice
        self._handles = handles
        self._report = report

    def select(self, candidates: Iterable[StepFiles]) -> Selection:
        """Take the newest complete candidate.

        Args:
            candidates: newest first; only one where the user named a step.

        Raises:
            IncompleteSourceError: no candidate is complete.
        """
        passed: list[Incomplete] = []
        for candidate in candidates:
            step = SourceStep(candidate, self._handles, self._report)
            selection, missing = self.judge(step)
            if missing is None:
                for other in passed:
                    self._pass_over(other)
                for note in candidate.notes:
                    self._report.warn(note)
                self._tell(selection, bool(passed))
                return selection
            passed.append(missing)
        raise self._nothing_complete(passed)

    def _nothing_complete(self, passed: Sequence[Incomplete]) -> IncompleteSourceError:
        newest = passed[0]
        if len(passed) == 1:
            headline = f"{newest.label} in {newest.place} is not complete:"
        else:
            headline = f"no step in {newest.place} is complete; the newest is {newest.label}:"
        lines = ["  " + line for line in newest.lines(_MOST_PATTERNS)]
        for older in passed[1:]:
            lines += [f"{older.label}: " + line for line in older.lines(3)]
        hint = cure(newest.lost)
        if hint is not None and self._ranks is not None:
            hint += "; `reshard rank-list` tells which ranks a target rank needs"
        return IncompleteSourceError(block(headline, lines), hint=hint)

    def judge(self, step: SourceStep) -> tuple[Selection, Optional[Incomplete]]:
        """Read a step and say what it lacks; None where it is complete.

        Raises:
            InputError: its files cannot be read, or contradict the strategy.
            RetryableError: reading failed.
        """
        self._cuts = Cuts(self._target)
        if self._ranks is None:
            step.load(step.files)
        else:
            while step.load(self._needed_files(step, self._ranks)):
                pass
        selection = self._read(step)
        lost = self._lost(selection)
        if self._ranks is not None and self._widen(selection, lost):
            selection = self._read(step)
            lost = self._lost(selection)
        stages = self._empty_stages(selection)
        if not stages and not lost:
            return selection, None
        causes = list(step.damaged.values())
        causes += [f"{index.path}: holds nothing" for index in step.indexes.values() if not index.tensors]
        absent = sorted(set(range(self._source.device_count)) - set(step.files))
        if absent:
            causes.append(f"no file of {rank_ranges(absent)} is there ({self._source.device_count} in the strategy)")
        return selection, Incomplete(step.label, step.place, [*causes, *stages], lost)

    def _empty_stages(self, selection: Selection) -> list[str]:
        """Why a step lacks a whole stage, or everything."""
        step, parameters, listed = selection
        lines: list[str] = []
        for stage in self._needed_stages():
            where = f"pipeline stage {stage.number} ({rank_ranges(stage.ranks)})"
            loaded = step.loaded(stage)
            held = {name for rank in loaded for name in step.indexes[rank].tensors}
            if not loaded and stage.layouts and stage.layouts.keys() <= parameters.keys():
                # All that it would hold is tied, and another stage's ranks hold it.
                continue
            if not loaded:
                given = "; the strategy gives it " + listing(stage.layouts, _MOST_PATTERNS) if stage.layouts else ""
                lines.append(f"no rank of {where} has a readable file" + given)
            elif not held:
                lines.append(f"the files of {where} hold nothing")
            elif step.absent(stage) and stage.layouts and held.isdisjoint(stage.layouts):
                lines.append(f"the files of {where} hold none of its parameters, and ranks are absent")
        if not lines and listed and not parameters:
            told = plural(len(listed), "parameter")
            lines.append(f"none of the {told} of {self._source.path} is in the files: they are of different models")
        return lines or ([] if step.indexes else ["no file is readable"])

    def _pass_over(self, missing: Incomplete) -> None:
        self._report.note(f"{missing.label} is not complete and is passed over: " + joined("; ", missing.lines(3)))

    def _read(self, step: SourceStep) -> Selection:
        listed = listed_by_source(self._source, step)
        written = {name for name in listed if self._filters.admit(name) and self._in_target(name)}
        return Selection(step, read_parameters(self._source, step, listed, written), listed)

    def _in_target(self, name: str) -> bool:
        return self._target.is_none or any(name in stage.layouts for stage in self._target_stages())

    def _target_stages(self) -> list[Stage]:
        if self._ranks is None:
            return list(self._target.stages)
        stages = {self._target.stage_of(rank).number: self._target.stage_of(rank) for rank in self._ranks}
        return list(stages.values())

    def _needed_files(self, step: SourceStep, ranks: Iterable[int]) -> set[int]:
        """Source ranks whose files some target ranks need, as far as strategies tell."""
        readable = step.readable
        needed: set[int] = set()
        for rank in ranks:
            try:
                needed.update(self._choice.ranks(rank, readable))
            except IncompleteSourceError:
                # What is lost may be parameters that were never saved: only the files can tell.
                needed.update(readable)
        if readable:
            # Values outside the strategies come from the lowest rank, a few from the target's own.
            needed.add(min(readable))
            needed.update(rank for rank in ranks if rank in readable)
        return needed

    def _needed_stages(self) -> list[Stage]:
        if self._ranks is None or self._source.is_none:
            return [stage for stage in self._source.stages if stage.layouts or self._source.is_none]
        wanted: set[str] = set()
        for stage in self._target_stages():
            wanted.update(stage.layouts)
        needed = []
        for stage in self._source.stages:
            others = [other for other in self._source.stages if other is not stage]
            for name in stage.layouts:
                asked = self._target.is_none or name in wanted
                if asked and not any(name in other.layouts for other in others):
                    needed.append(stage)
                    break
        return needed

    def _lost(self, selection: Selection) -> list[Lost]:
        step, parameters, _ = selection
        if self._ranks is None:
            lost = lost_slices(parameters.values(), step)
            return lost + unread_parameters(self._source, step, self._source.stages, set(parameters))
        lost = []
        for parameter in parameters.values():
            if self._in_target(parameter.name):
                missing = self._missing_ranks(parameter, step)
                if missing:
                    lost.append(Lost(parameter.name, missing))
        unread = unread_parameters(self._source, step, self._source.stages, set(parameters))
        return lost + [item for item in unread if self._in_target(item.parameter)]

    def _missing_ranks(self, parameter: Parameter, step: SourceStep) -> frozenset[frozenset[int]]:
        """The ranks that would have held each slice that the targets asked for need and no file has."""
        present = [step.ranks_with(parameter.name, holding.stage) for holding in parameter.holdings]
        missing: set[frozenset[int]] = set()
        for rank in self._ranks or ():
            stage = self._target.stage_of(rank)
            if not self._target.is_none and parameter.name not in stage.layouts:
                continue
            cut = self._cuts.of(parameter, stage)
            for cell in cut.overlap.cells(cut.slice_of(rank - stage.first_rank)):
                ranks = {r for holding, n in zip(cut.holdings, cell.slices) for r in holding.ranks(n)}
                if not any(ranks & held for held in present):
                    missing.add(frozenset(ranks))
        return frozenset(missing)

    def _widen(self, selection: Selection, lost: Sequence[Lost]) -> bool:
        """Read further replicas where the files read so far lack something; whether anything was read."""
        step, parameters, _ = selection
        more: set[int] = set()
        for item in lost:
            more |= item.ranks
        for stage in self._source.stages:
            for name in stage.layouts:
                if name not in parameters and self._in_target(name):
                    if step.absent(stage):
                        # It may have been on an absent rank: only the others' files can tell.
                        more.update(rank for rank in stage.ranks if rank in step.readable)
                    for rank in self._ranks or ():
                        for ranks in self._choice.needs_of(name, rank):
                            more |= ranks
        if any(step.saved_differently(stage) for stage in self._source.stages):
            # A de-duplicated save: anything, global_step included, may be on any rank.
            more |= step.readable
        return step.load(more)

    def _tell(self, selection: Selection, others: bool) -> None:
        step, parameters, _ = selection
        absent = sorted(set(range(self._source.device_count)) - step.readable)
        if self._ranks is None and absent:
            self._report.note(
                f"{step.label} has no file of {rank_ranges(absent)}; replicas on {rank_ranges(step.readable)} are used"
            )
        elif others:
            self._report.note(f"{step.label} is used")
        if self._ranks is not None:
            return
        for stage in self._source.stages:
            away = step.absent(stage)
            unseen = sorted(name for name in stage.layouts if name not in parameters)
            if away and unseen:
                self._report.note(
                    f"{plural(len(unseen), 'parameter')} of stage {stage.number} in no file of {step.label} count as "
                    "not saved: " + listing(unseen, 3) + f"; had only {rank_ranges(away)} saved them (a de-duplicated "
                    "save), they would be lost"
                )
