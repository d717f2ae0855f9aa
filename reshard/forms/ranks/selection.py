"""The choice of the step that is converted.

A step is complete if every stage has ranks with it, and the files hold every slice of every parameter that they
hold at all. A parameter in no file was not saved and does not count, unless the save was de-duplicated and a rank
of its stage is absent: that rank may have held it. Slices without elements are never missing.

`latest`, the default, is the newest complete step. Steps are tried from the newest on; an incomplete step is skipped
with a warning and the reason. Three *scopes* define completeness; a narrower scope applies only if no step is
complete in the wider ones:

1. everything that was saved;
2. the target strategy's parameters: lost optimizer shards do not matter to a target without them;
3. the needs of the requested target ranks: only the files of their rank list have to exist.

So runs for different target ranks choose the same step, and read the headers of the same files: all existing
files of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from reshard.checkpoints import FileHandles, read_index
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError, IncompleteSourceError, InputError
from reshard.forms.form import EditedStep
from reshard.forms.ranks.checkpoint import RankCheckpoint, listed_by_source, read_parameters, stage_shardings
from reshard.forms.ranks.form import stage_sections
from reshard.forms.ranks.naming import Step
from reshard.forms.ranks.tree import SourceTree, StepFiles
from reshard.forms.request import Means, Request
from reshard.forms.target import Cuts, Section
from reshard.layout import Grid, Overlap
from reshard.strategies import Stage, Strategy
from reshard.text.messages import Message, block, joined, listing, plural, rank_ranges
from reshard.text.names import is_weight

_MOST_GROUPS = 8


class LostParameter(NamedTuple):
    """A parameter with a slice on no readable rank.

    Attributes:
        parameter: its name.
        groups: per lost slice the ranks that should hold it; one rank of each group is needed.
    """

    parameter: str
    groups: frozenset[frozenset[int]]

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for group in self.groups for rank in group)


def lost_slices(tensors: Iterable[GlobalTensor], step: RankCheckpoint) -> list[LostParameter]:
    result = []
    lost_by_kind: dict[object, frozenset[frozenset[int]]] = {}
    for tensor in tensors:
        present = step.present(tensor)
        key = (tensor.shape, stage_shardings(tensor)[0].layout, len(tensor.shardings), present)
        if len(tensor.shardings) > 1 or key not in lost_by_kind:
            lost_by_kind[key] = _holders_of_lost(tensor, present)
        if lost_by_kind[key]:
            result.append(LostParameter(tensor.name, lost_by_kind[key]))
    return result


def _holders_of_lost(tensor: GlobalTensor, present: Sequence[frozenset[int]]) -> frozenset[frozenset[int]]:
    shardings = stage_shardings(tensor)
    layouts = [sharding.layout for sharding in shardings]
    present_slices = []
    for sharding, ranks in zip(shardings, present):
        present_slices.append({sharding.slice_of(rank) for rank in ranks})
    if any(len(slices) == layout.slice_count for slices, layout in zip(present_slices, layouts)):
        return frozenset()
    lost: set[frozenset[int]] = set()
    for cell in Overlap([sharding.grid for sharding in shardings], Grid.whole(tensor.shape)).cells(0):
        if not any(number in slices for number, slices in zip(cell.slices, present_slices)):
            holder_lists = (sharding.holders(number) for sharding, number in zip(shardings, cell.slices))
            lost.add(frozenset(rank for ranks in holder_lists for rank in ranks))
    return frozenset(lost)


def unread_parameters(source: Strategy, step: RankCheckpoint) -> list[LostParameter]:
    """Parameters in no file that an absent rank may have held (de-duplicated saves)."""
    result: dict[str, set[int]] = {}
    # A stage with a single file shows a de-duplicated save only in the other stages' files.
    if source.is_none or not any(step.deduplicated(stage) for stage in source.stages):
        return []
    for stage in source.stages:
        absent = step.absent(stage)
        for name in stage.layouts if absent else ():
            if name not in step.tensors:
                result.setdefault(name, set()).update(absent)
    return [LostParameter(name, frozenset([frozenset(ranks)])) for name, ranks in result.items()]


def explain(lost: Sequence[LostParameter], most: int) -> list[Message]:
    """One line per group of ranks: the number and names of the parameters that they should hold."""
    by_groups: dict[frozenset[frozenset[int]], list[str]] = {}
    for parameter, groups in lost:
        by_groups.setdefault(groups, []).append(parameter)
    return [
        f"{plural(len(names), 'parameter')} with a missing slice, which {_in_words(groups)} should "
        "hold: " + listing(names, most)
        for groups, names in sorted(by_groups.items(), key=lambda item: sorted(map(sorted, item[0])))
    ]


def cure(lost: Iterable[LostParameter]) -> str | None:
    groups = frozenset(group for item in lost for group in item.groups)
    if not groups:
        return None
    return (
        f"restore {_in_words(groups)} from a copy: no other rank holds these slices, so reshard recover cannot "
        "rebuild them"
    )


def _in_words(groups: frozenset[frozenset[int]]) -> str:
    """``ranks 1,5`` if each is needed; ``one of ranks 0,4 and one of ranks 1,5`` for replicas."""
    alone = {rank for group in groups if len(group) == 1 for rank in group}
    # A rank that is needed alone satisfies every other group with it.
    several = sorted(sorted(group) for group in groups if group.isdisjoint(alone))
    words = [rank_ranges(alone)] if alone else []
    words += [f"one of {rank_ranges(group)}" for group in several[:_MOST_GROUPS]]
    if len(several) > _MOST_GROUPS:
        words.append(f"one each of {len(several) - _MOST_GROUPS} more groups of replicas")
    return " and ".join(words)


def check_ranks(tree: SourceTree, source: Strategy, handles: FileHandles) -> None:
    """Refuse a tree with ranks beyond the source strategy."""
    if tree.single_file and source.device_count > 1:
        # Report an invalid file first.
        read_index(handles, tree.root)
        raise CheckpointError(
            f"{tree.root} is one file, but {source.path} lays parameters out over {source.device_count} devices",
            file=tree.root,
            hint="pass the directory of all ranks' checkpoints, or --src-strategy none for an unsharded checkpoint",
        )
    beyond = [rank for rank in tree.ranks if rank >= source.device_count]
    if beyond:
        devices = "one device (strategy none)" if source.is_none else f"{source.device_count} devices ({source.path})"
        raise CheckpointError(
            f"{tree.root} has checkpoints of {rank_ranges(beyond)}, but the source strategy has {devices}",
            file=tree.root,
            rank=beyond[0],
            hint="pass the strategy that this checkpoint was saved with, and the files of all its pipeline stages",
        )


# Of names, in a line of an error.
_MOST_PATTERNS = 4


class Scope(Enum):
    """The part of a step that has to be complete."""

    EVERYTHING = "everything"
    TARGET = "the parameters of the target strategy"
    REQUESTED = "the needs of the requested target ranks"


class Incomplete(NamedTuple):
    """The missing parts of a step: files and stages, and parameters with a missing slice."""

    label: str
    place: str
    causes: list[str]
    lost: Sequence[LostParameter]

    def lines(self, most: int) -> list[str]:
        """Causes first, then lost parameters, with a limit of name patterns each."""
        return [*self.causes, *explain(self.lost, most)]


class StepSelector:
    """Finds the step that a request reads."""

    def __init__(self, request: Request, means: Means) -> None:
        if request.target.is_placeholder:
            # Rows of everything are cut over shards, whatever the source holds.
            request = request._replace(target=Strategy.none(), asked=replace(request.asked, files=None))
        self._request, self._means = request, means
        # The error of edits on an incomplete step.
        self._unfit: InputError | None = None
        self._scopes = [Scope.EVERYTHING]
        if not request.target.is_none:
            self._scopes.append(Scope.TARGET)
        if request.target_ranks is not None:
            self._scopes.append(Scope.REQUESTED)

    def select(self, candidates: Iterable[StepFiles], steps: Sequence[Step | None] = ()) -> RankCheckpoint:
        """Choose the newest complete one of candidates, newest first; ``steps`` are all steps, for ``latest``.

        Raises:
            IncompleteSourceError: no candidate is complete.
            InputError: files contradict the strategy, or each other.
        """
        # By scope the newest complete candidate, and the number of newer ones.
        choices: dict[Scope, tuple[RankCheckpoint, int]] = {}
        gaps: list[dict[Scope, Incomplete]] = []
        refused: InputError | None = None
        remaining = iter(candidates)
        while Scope.EVERYTHING not in choices:
            try:
                candidate = next(remaining, None)
                if candidate is None:
                    break
                checkpoint = self._read(RankCheckpoint(candidate, self._means.handles))
            except InputError as error:
                # Raised only if no newer step is complete in a narrower scope.
                refused = error
                break
            gaps.append(self._gaps(checkpoint))
            for scope in self._scopes:
                if scope not in gaps[-1]:
                    choices.setdefault(scope, (checkpoint, len(gaps) - 1))
        for scope in self._scopes:
            if scope in choices:
                checkpoint, newer = choices[scope]
                skipped = [candidate_gaps[scope] for candidate_gaps in gaps[:newer]]
                self._report_choice(checkpoint, scope, gaps[newer].get(Scope.EVERYTHING), skipped, steps)
                return checkpoint
        if refused is not None:
            raise refused
        raise self._nothing_complete([candidate_gaps[self._scopes[-1]] for candidate_gaps in gaps], steps)

    def _nothing_complete(self, skipped: Sequence[Incomplete], steps: Sequence[Step | None]) -> IncompleteSourceError:
        if not skipped:
            return IncompleteSourceError("no file of the checkpoint is readable")
        newest = skipped[0]
        if len(skipped) == 1:
            headline = f"{newest.label} in {newest.place} is not complete:"
        else:
            headline = f"no step in {newest.place} is complete; the newest is {newest.label}:"
        lines = ["  " + line for line in newest.lines(_MOST_PATTERNS)]
        for older in skipped[1:]:
            lines += [f"{older.label}: " + line for line in older.lines(3)]
        hints = [cure(newest.lost)]
        if hints[0] is not None and self._request.target_ranks is not None:
            hints.append("`reshard rank-list` prints the ranks that a target rank needs")
        if self._unfit is not None and self._request.target_ranks is not None:
            reason = self._unfit.message.splitlines()[0].rstrip(":")
            hints.append(f"the new names need one file of every pipeline stage; with these files alone: {reason}")
        if len(steps) > len(skipped):
            hints.append("without --no-fallback an older step may be used")
        return IncompleteSourceError(block(headline, lines), hint="; ".join(filter(None, hints)) or None)

    def judge(self, step: RankCheckpoint) -> Incomplete | None:
        """Read the parameters of a step; its missing parts, None if it is complete."""
        return self._gaps_in(self._read(step), Scope.EVERYTHING)

    def _gaps(self, checkpoint: RankCheckpoint) -> dict[Scope, Incomplete]:
        everything = self._gaps_in(checkpoint, Scope.EVERYTHING)
        if everything is None:
            # Then narrower scopes are complete as well.
            return {}
        gaps = {Scope.EVERYTHING: everything}
        try:
            edited = self._edited(checkpoint)
        except InputError as error:
            self._unfit = error
            return dict.fromkeys(self._scopes, everything)
        for scope in self._scopes[1:]:
            missing = self._gaps_in(checkpoint, scope, edited)
            if missing is None:
                break
            gaps[scope] = missing
        return gaps

    def _edited(self, checkpoint: RankCheckpoint) -> EditedStep:
        if self._request.edit is not None:
            return self._request.edit(checkpoint)
        unseen = checkpoint.laid_out - checkpoint.tensors.keys()
        return EditedStep(checkpoint.tensors, self._request.target, {name: name for name in unseen})

    def _gaps_in(self, step: RankCheckpoint, scope: Scope, edited: EditedStep | None = None) -> Incomplete | None:
        """The missing parts of a step in a scope, None if there are none; narrower scopes are of the edited step."""
        needed = None if edited is None else self._needed_names(scope, edited)
        if edited is not None and scope is Scope.REQUESTED:
            lost = list(self._lost_to_requested(step, edited))
        else:
            lost = lost_slices((item for item in step.tensors.values() if needed is None or item.name in needed), step)
        unread = unread_parameters(self._request.source, step)
        lost += [item for item in unread if needed is None or item.parameter in needed]
        stages = self._empty_stages(step, needed, scope)
        if not stages and not lost and not self._lacks_files(step, scope):
            return None
        causes = list(step.damaged.values())
        causes += [f"{index.path}: holds nothing" for index in step.indexes.values() if not index.tensors]
        source = self._request.source
        absent = sorted(set(range(source.device_count)) - set(step.files))
        if absent:
            total = f"{source.device_count} {'rank directories' if source.is_as_cut else 'in the strategy'}"
            causes.append(f"no file of {rank_ranges(absent)} ({total})")
        return Incomplete(step.label, step.place, [*causes, *stages], lost)

    def _lacks_files(self, step: RankCheckpoint, scope: Scope) -> bool:
        """Whether a rank whose file is only copied has none, or one without tensors."""
        source, indexes = self._request.source, step.indexes
        ranks = self._request.target_ranks if scope is Scope.REQUESTED else None
        copied = range(source.device_count) if ranks is None else ranks
        return source.is_as_cut and any(rank not in indexes or not indexes[rank].tensors for rank in copied)

    def _needed_names(self, scope: Scope, edited: EditedStep) -> set[str] | None:
        """The source parameters of a scope; None for all."""
        if self._request.source.is_none:
            return None
        if edited.target.is_none:
            return set(self._request.source.parameters)
        stages = edited.target.stages if scope is Scope.TARGET else self._stages_of(edited.target)
        names = set().union(*(stage.layouts for stage in stages))
        sources = {source.name for name in names & edited.tensors.keys() for source in edited.tensors[name].sources}
        return sources.union(name for name, new in edited.unseen.items() if new is None or new in names)

    def _empty_stages(self, step: RankCheckpoint, needed: set[str] | None, scope: Scope) -> list[str]:
        source = self._request.source
        stages = [stage for stage in source.stages if stage.layouts or source.is_none]
        empty = {stage.number: line for stage in stages for line in self._nothing_of(stage, step, scope)}
        lines = []
        for stage in stages:
            if stage.number not in empty:
                continue
            names = stage.layouts.keys() - step.tensors.keys()
            if stage.layouts and not names and not step.loaded(stage):
                # All its parameters are tied, and another stage's ranks hold them.
                continue
            if needed is None or any(name in needed and self._only_in(name, empty) for name in names):
                lines.append(empty[stage.number])
        if not lines and step.laid_out and not step.tensors:
            count = plural(len(step.laid_out), "parameter")
            lines.append(f"none of the {count} of {source.path} is in the files: they are of different models")
        return lines or ([] if step.indexes else ["no file is readable"])

    def _nothing_of(self, stage: Stage, step: RankCheckpoint, scope: Scope) -> Iterator[str]:
        """The reason why a stage's parameters are unknown, if they are."""
        where = f"pipeline stage {stage.number} ({rank_ranges(stage.ranks)})"
        loaded = step.loaded(stage)
        stored = set().union(*step.sets_of(stage))
        if not loaded:
            names = "; its parameters: " + listing(stage.layouts, _MOST_PATTERNS) if stage.layouts else ""
            yield f"no rank of {where} has a readable file" + names
        elif not stored:
            yield f"the files of {where} hold nothing"
        elif scope is Scope.REQUESTED:
            # The needed ranks may all be there; weights that their files lack are an error of the plan.
            return
        elif step.absent(stage) and stage.layouts and stored.isdisjoint(stage.layouts):
            yield f"the files of {where} hold none of its parameters, and ranks are absent"

    def _only_in(self, name: str, stages: Collection[int]) -> bool:
        return all(stage.number in stages for stage in self._request.source.stages if name in stage.layouts)

    def _read(self, step: RankCheckpoint) -> RankCheckpoint:
        request = self._request
        required = laid_out = listed_by_source(request.source, step)
        if request.edit is None:
            stages = self._stages_of(request.target)
            everything = request.target.is_none
            required = {
                name
                for name in laid_out
                if request.filters.admit(name) and (everything or any(name in stage.layouts for stage in stages))
            }
        step.tensors = read_parameters(request.source, step, laid_out, required)
        step.laid_out = frozenset(laid_out)
        # An empty file may mean that nothing was saved.
        partial = any(map(step.absent, request.source.stages)) or not all(i.tensors for i in step.indexes.values())
        step.unseen = frozenset(laid_out.difference(step.tensors) if partial else ())
        return step

    def _stages_of(self, target: Strategy) -> list[Stage]:
        if self._request.target_ranks is None:
            return list(target.stages)
        stages = {target.stage_of(rank).number: target.stage_of(rank) for rank in self._request.target_ranks}
        return list(stages.values())

    def _lost_to_requested(self, checkpoint: RankCheckpoint, edited: EditedStep) -> Iterator[LostParameter]:
        cuts = Cuts()
        sections = stage_sections(edited.target, edited.tensors)
        missing: dict[str, set[frozenset[int]]] = {}
        for tensor in edited.tensors.values():
            try:
                for source, ranks in self._missing_ranks(tensor, checkpoint, cuts, sections, edited.target):
                    missing.setdefault(source, set()).add(ranks)
            except IncompleteSourceError:
                # Missing files would decide its layout.
                missing.setdefault(tensor.sources[0].name, set()).add(frozenset(tensor.shards.undecided))
            except InputError:
                # The plan of the chosen step raises this error.
                continue
        for name, groups in missing.items():
            yield LostParameter(name, frozenset(groups))

    def _missing_ranks(
        self, tensor: GlobalTensor, step: RankCheckpoint, cuts: Cuts, sections: Sequence[Section], target: Strategy
    ) -> Iterator[tuple[str, frozenset[int]]]:
        """Per missing slice that the requested targets need: parameter, and the ranks that should hold it."""
        present = [step.present(source) for source in tensor.sources]
        for rank in self._request.target_ranks or ():
            section = sections[target.stage_of(rank).number]
            if tensor.name not in section.layouts:
                continue
            cut = cuts.of(tensor, section)
            for cell in cut.overlap.cells(cut.slice_of(section.position(rank))):
                if not cell.slices:
                    # Padding.
                    continue
                number = cell.source_number
                source = tensor.sources[number]
                shardings = cut.shardings[cut.firsts[number] :]
                ranks = {r for sharding, n in zip(shardings, cell.slices) for r in sharding.holders(n)}
                if not any(ranks & present_on for present_on in present[number]):
                    yield source.name, frozenset(ranks)

    def _report_choice(
        self,
        step: RankCheckpoint,
        scope: Scope,
        gaps: Incomplete | None,
        skipped: Sequence[Incomplete],
        steps: Sequence[Step | None],
    ) -> None:
        """Report a choice: the scope in which the step is complete, its gaps among everything, and skipped steps."""
        request, report = self._request, self._means.report
        if scope is not Scope.TARGET:
            step.warn_of_damage(report)
        for newer in skipped:
            report.warn(f"{newer.label} is not complete and is skipped: " + joined("; ", newer.lines(3)))
        for note in step.step_files.notes:
            report.warn(note)
        absent = sorted(set(range(request.source.device_count)) - step.readable)
        if scope is Scope.TARGET and gaps is not None:
            report.warn(
                f"{step.label} is not complete, but the target strategy does not need the rest: "
                + joined("; ", gaps.lines(3))
            )
        elif scope is Scope.REQUESTED:
            report.note(
                f"{step.label} has no file of {rank_ranges(absent)} here; the requested target ranks need none of it, "
                "and values outside the strategies come from the existing files"
            )
        elif absent:
            replicas = f"replicas on {rank_ranges(step.readable)} are used"
            report.note(f"{step.label} is read without {rank_ranges(absent)}; {replicas}")
        elif skipped:
            report.note(f"{step.label} is used")
        # Other runs write the other ranks, and could choose another step.
        ranks = request.target_ranks
        some_ranks = ranks is not None and len(set(ranks)) < request.target.device_count
        if some_ranks and len(steps) > 1 and step.step is not None:
            report.warn(
                f"{step.place} holds {plural(len(steps), 'step')}, and {step.label} is used; give every rank "
                f"--step {step.step}, so that all of them use the same step, even if newer ones are saved"
            )
        if scope is Scope.EVERYTHING:
            self._report_unsaved(step)

    def _report_unsaved(self, step: RankCheckpoint) -> None:
        """Name parameters in no file that an absent rank may have saved."""
        strategy_names = frozenset(self._request.source.parameters)
        for stage in self._request.source.stages:
            away = step.absent(stage)
            unseen = sorted(name for name in stage.layouts if name not in step.tensors)
            if away and unseen:
                # A warning only for weights: strategies often list other parameters that are never saved.
                is_alarming = any(is_weight(name, strategy_names) for name in unseen)
                log = self._means.report.warn if is_alarming else self._means.report.note
                log(
                    f"{plural(len(unseen), 'parameter')} of stage {stage.number} in no file of {step.label} count as "
                    "not saved: " + listing(unseen, 1) + f"; they are lost only if {rank_ranges(away)} alone saved "
                    "them (a de-duplicated save): then bring these ranks back"
                )
