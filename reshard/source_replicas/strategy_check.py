"""Whether a strategy is the one that a checkpoint was saved with, as far as its files can tell.

What files say by themselves is the shape of every rank's slices, and which ranks hold the same bytes. The first is
read as a conversion reads it, the second compared as a conversion compares it (see `source_replicas`); here all of
it is told, whatever it is, and nothing is an error but what cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from reshard.checkpoints import FileHandles, Tensor
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.errors import CheckpointError, InputError
from reshard.execute import ExecutionOptions, Progress
from reshard.forms.ranks import SourceTree, StepFiles, find_checkpoints
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.forms.ranks.holding import StageSharding
from reshard.forms.ranks.parameters import listed_by_source, read_parameters
from reshard.layout import Layout
from reshard.source_replicas import (
    ReplicaComparison,
    SameSlices,
    compare_replicas,
    compare_slices,
    holders_alike,
    misplaced,
)
from reshard.strategies import Stage, Strategy
from reshard.text.filter_advice import warn_of_unmatched
from reshard.text.name_filters import Filters
from reshard.text.names import ACCUMULATED_GRADIENTS, belongs_to_rank
from reshard.text.report import Report

# The stage of what no stage lists, which every rank may hold.
_NO_STAGE = -1


class Misfit(NamedTuple):
    """Parameters whose slices in the files are not what the strategy makes of any tensor.

    Attributes:
        parameters: those that are alike in this, in the order of their names.
        detail: what is wrong with the first.
    """

    parameters: list[str]
    detail: str


class HeldAlike(NamedTuple):
    """Which ranks really hold the same.

    Attributes:
        parameter: of which parameter.
        groups: the ranks, those together that hold the same; all of the stage, of a large one the first.
    """

    parameter: str
    groups: list[list[int]]


@dataclass(frozen=True)
class StrategyCheck:
    """What a checkpoint's files say of a strategy.

    Attributes:
        step: the step that was looked at; None where file names tell none.
        ranks: ranks with a readable file.
        absent_ranks: ranks of the strategy without one.
        beyond_ranks: ranks that have files and that the strategy does not know.
        parameters: listed parameters whose slices have the right shapes.
        misfits: those that have not.
        not_held: listed parameters that no file holds.
        not_listed: tensors that the strategy does not list, and that are the same on all ranks or single values.
        not_described: tensors that the strategy does not list although ranks hold different ones: parts of something.
        comparison: what came of comparing alleged replicas.
        same_slices: parameters of which ranks hold the same although the strategy says that they hold different
            slices; empty where too few do to speak against it.
        misplaced: parameters that ranks hold and the strategy lists for other pipeline stages only, where those are
            most, and replicas could not test it.
        alike: where ranks hold something else than the strategy says, which of them really hold the same.
    """

    step: Optional[str]
    ranks: list[int]
    absent_ranks: list[int]
    beyond_ranks: list[int]
    parameters: list[str]
    misfits: list[Misfit]
    not_held: list[str]
    not_listed: list[str]
    not_described: list[str]
    comparison: ReplicaComparison
    same_slices: list[SameSlices]
    misplaced: list[str]
    alike: Optional[HeldAlike]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against the strategy."""
        other_model = bool(self.not_held) and not self.parameters and not self.misfits
        differing = self.comparison.differing or self.same_slices or self.misplaced
        return not (other_model or self.beyond_ranks or self.misfits or self.not_described or differing)


def check_strategy(
    strategy: Strategy,
    path: str,
    step: str,
    file_suffix: Optional[str],
    filters: Filters,
    everything: bool,
    handles: FileHandles,
    execution: ExecutionOptions,
    progress: Progress,
    report: Report,
) -> StrategyCheck:
    """Hold a strategy against a checkpoint.

    Args:
        strategy: the strategy.
        path: tree, file or `{rank}` path of the checkpoint.
        step: ``latest``, for the newest that most ranks have, or ``<epoch>_<step>``.
        file_suffix: only files whose stem ends so.
        filters: which parameters are looked at.
        everything: compare all that replicas hold, not samples.
        handles: open files.
        execution: threads and memory.
        progress: told of bytes where everything is compared.
        report: told of files that count as absent.

    Raises:
        ReshardError: the files cannot be read.
    """
    found = SourceStep(_step(find_checkpoints(path, file_suffix), step), handles, report)
    found.load(found.files)
    if not found.indexes:
        raise CheckpointError(f"{path}: no file of {found.label} is readable", file=path)
    warn_of_unmatched(filters, (strategy.parameters, found.names()), report)
    listed = {name for name in listed_by_source(strategy, found) if filters.admit(name)}
    held = {name for name in found.names() if filters.admit(name)}
    if not listed and not held:
        raise CheckpointError(
            "nothing would be looked at: no parameter of the checkpoint is asked for",
            hint="check --include and --exclude",
        )
    parameters = read_parameters(strategy, found, listed, set())
    effort = "all" if everything else "more"
    comparison = compare_replicas(parameters.values(), found, handles, execution, progress, effort)
    not_described = _not_described(sorted(held - listed), found, handles, execution)
    same_slices = _same_slices(parameters.values(), found, handles, execution)
    wrong = [*(item.parameter for item in comparison.differing), *(item.parameter for item in same_slices)]
    return StrategyCheck(
        step=None if found.step is None else str(found.step),
        ranks=sorted(found.indexes),
        absent_ranks=sorted(set(range(strategy.device_count)) - found.readable),
        beyond_ranks=sorted(rank for rank in found.files if rank >= strategy.device_count),
        parameters=sorted(parameters),
        misfits=_misfits(sorted(listed & held - parameters.keys()), strategy, found),
        not_held=sorted(listed - held),
        not_listed=sorted(held - listed - set(not_described)),
        not_described=not_described,
        comparison=comparison,
        same_slices=same_slices,
        misplaced=[] if comparison.check.tested else misplaced(strategy, found),
        alike=_alike(parameters[wrong[0]], found, handles, execution) if wrong else None,
    )


def _step(tree: SourceTree, step: str) -> StepFiles:
    """The files of the newest step that all ranks have, or else of the newest."""
    newest: Optional[StepFiles] = None
    for candidate in tree.candidates(step):
        if len(candidate.files) == len(tree.ranks):
            return candidate
        newest = newest or candidate
    if newest is None:
        raise CheckpointError(f"{tree.root}: holds no checkpoints", file=tree.root)
    return newest


def _misfits(names: Sequence[str], strategy: Strategy, step: SourceStep) -> list[Misfit]:
    """Parameters of which nothing could be made, those together that have the same problem."""
    alike: dict[str, Misfit] = {}
    for name in names:
        owner = name[len(ACCUMULATED_GRADIENTS) :] if name.startswith(ACCUMULATED_GRADIENTS) else name
        try:
            read_parameters(strategy, step, {name, owner}, {name})
        except InputError as error:
            misfit = alike.setdefault(error.message.replace(name, ""), Misfit([], error.message))
            misfit.parameters.append(name)
    return list(alike.values())


def _not_described(
    names: Iterable[str], step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> list[str]:
    """Unlisted tensors of several elements that are not the same on all ranks that hold them."""
    everywhere = Stage(_NO_STAGE, 0, max(step.indexes) + 1, {})
    different = []
    same = []
    for name in names:
        tensors = [step.indexes[rank].tensors[name] for rank in step.holders(name)]
        if belongs_to_rank(name) or any(_is_value(tensor) for tensor in tensors):
            continue
        if len({(tensor.dtype, tensor.shape, tensor.nbytes) for tensor in tensors}) > 1:
            different.append(name)
            continue
        layout = Layout((everywhere.device_count,), ((),) * len(tensors[0].shape))
        shape = tensors[0].shape
        shardings = (StageSharding(everywhere, layout, layout.grid(shape)),)
        same.append(GlobalTensor(name, tensors[0].dtype, tensors[0].item_size, shape, shardings))
    comparison = compare_replicas(same, step, handles, execution, Progress(), "more")
    return sorted([*different, *(differing.parameter for differing in comparison.differing)])


def _is_value(tensor: Tensor) -> bool:
    return tensor.dtype in NO_ARRAYS or math.prod(tensor.shape) <= 1


def _same_slices(
    parameters: Iterable[GlobalTensor], step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> list[SameSlices]:
    """Parameters of which slices are equal that should differ, if they are most."""
    slices = compare_slices(parameters, step, handles, execution)
    return slices.same if slices.speaks_against else []


def _alike(parameter: GlobalTensor, step: SourceStep, handles: FileHandles, execution: ExecutionOptions) -> HeldAlike:
    return HeldAlike(parameter.name, holders_alike(parameter, step, handles, execution))
