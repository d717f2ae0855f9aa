"""Detection of swapped source and target strategies.

It has two kinds of evidence:

* The source's strategy does not fit the files, and the target's does: every rank is present, every slice has a shape
  that fits the layouts, nothing is missing, and samples of replicas are equal.
* Ranks hold equal bytes where the source's strategy has different slices; or they hold the parameters of other
  pipeline stages, and no replicas confirm the strategy. This is an error even if the target's strategy does not fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Optional, Union

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError, IncompleteSourceError, InputError, ReshardError
from reshard.execute import ExecutionOptions, Progress
from reshard.forms.ranks import StepFiles, find_checkpoints
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.forms.ranks.coverage import lost_slices
from reshard.forms.ranks.parameters import listed_by_source, read_parameters
from reshard.layout import Layout
from reshard.named_tuple import NamedTuple
from reshard.source_replicas import (
    Distinctness,
    ReplicaComparison,
    compare_replicas,
    compare_slices,
    misplaced,
)
from reshard.storage import storage_of
from reshard.strategies import Strategy
from reshard.text.messages import joined, listing
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.text.report import Report
from reshard.text.wording import plural, quoted, rank_ranges, some_numbers

_MOST_EXAMPLES = 3
_WHOLE = "leaves it whole"


class _StrategyFit(NamedTuple):
    """Agreement of a strategy with files.

    Attributes:
        step: the files.
        parameters: its parameters in the files.
        tested: whether contents were compared, not only shapes.
    """

    step: SourceStep
    parameters: dict[str, GlobalTensor]
    tested: bool


class SwapTest:
    """Two strategies, and files of one of them.

    Args:
        source: the source strategy.
        target: the target strategy.
        handles: open files.
    """

    def __init__(self, source: Strategy, target: Strategy, handles: FileHandles) -> None:
        self._source = source
        self._target = target
        self._handles = handles

    @contextlib.contextmanager
    def explain_errors(
        self, src: Union[str, Mapping[int, str]], step: str, file_suffix: Optional[str]
    ) -> Iterator[None]:
        """Replace an error about the source's files by an error about swapped strategies, if they are swapped.

        Args:
            src: tree, file or `{rank}` path of the source; single files of ranks are not checked.
            step: ``latest`` or ``<epoch>_<step>``.
            file_suffix: only files whose stem ends so.

        Raises:
            CheckpointError: the files fit the target's strategy, and not the source's.
        """
        try:
            yield
        except (CheckpointError, IncompleteSourceError) as error:
            swapped = None
            if isinstance(src, str) and self._source is not self._target:
                # The original error already reports unreadable files.
                with contextlib.suppress(ReshardError, OSError):
                    files = next(iter(find_checkpoints(src, file_suffix).candidates(step)))
                    fit = self._fit(self._target, files)
                    lost = error if isinstance(error, IncompleteSourceError) else None
                    # Lost files contradict a strategy only if the other one cuts them differently.
                    shows_swap = fit is not None and (lost is None or self._distinguishes(fit))
                    if fit is not None and shows_swap and self._fit(self._source, files) is None:
                        swapped = self._error(fit, lost)
            if swapped is None:
                raise
            raise swapped from error

    def _distinguishes(self, fit: _StrategyFit) -> bool:
        """Whether the target's strategy fits, with other cuts than the source's."""
        return fit.tested or any(_cuts(self._source, name) != _cuts(self._target, name) for name in fit.parameters)

    def check(self, step: SourceStep, parameters: Collection[GlobalTensor], tested: bool, report: Report) -> None:
        """Check whether files contradict the source's strategy although replicas do not.

        Args:
            step: the files.
            parameters: the converted parameters, read with the source's strategy.
            tested: whether replicas confirmed it.
            report: gets a warning if only the number of ranks contradicts it.

        Raises:
            CheckpointError: ranks hold equal bytes where the source's strategy has different slices, or
                most parameters are on other pipeline stages.
        """
        if not tested:
            self._check_stages(step)
        slices = self._slices(parameters, step)
        if slices.contradicts:
            fit = self._fit(self._target, StepFiles(step.step, {rank: step.files[rank] for rank in step.readable}))
            if fit is None or self._slices(fit.parameters.values(), fit.step).contradicts:
                raise self._too_fine(slices, step)
            raise self._error(fit)
        count = self._target.device_count
        by_count = self._source.device_count != count and step.readable == frozenset(range(count))
        # Whole parameters on every rank are replicas; it is common to keep only rank 0 of them.
        if by_count and not tested and any(_cuts(self._source, item.name) != _WHOLE for item in parameters):
            report.warn(
                f"the source strategy ({self._source.path}) has {plural(self._source.device_count, 'device')}, the "
                f"checkpoint {rank_ranges(step.readable)}, as many as the target strategy ({self._target.path}): are "
                "the two swapped? No replicas could be compared to check that"
            )

    def _check_stages(self, step: SourceStep) -> None:
        names = misplaced(self._source, step)
        if names:
            count = plural(len(names), "parameter")
            raise CheckpointError(
                f"the source strategy ({self._source.path}) does not fit this checkpoint: ranks hold {count} that it "
                "lists for other pipeline stages only, and no replicas confirm it: " + listing(names),
                file=step.place,
                parameter=names[0],
                hint="pass the strategy that this checkpoint was saved with; if it is this one, and ranks hold "
                "parameters of other stages: --check-replicas never",
            )

    def _too_fine(self, slices: Distinctness, step: SourceStep) -> CheckpointError:
        """The error for files with coarser cuts than the source's strategy."""
        name, (first, second), _ = slices.same[0]
        return CheckpointError(
            f"the source strategy ({self._source.path}) does not fit this checkpoint: ranks hold equal bytes where "
            f"they should hold different slices, of {len(slices.same)} of {slices.compared} sampled parameters\n"
            f"  {quoted(name)} on rank {first} and rank {second} ({step.files[first]} and {step.files[second]})",
            file=step.files[second],
            rank=second,
            parameter=name,
            hint="pass the strategy that this checkpoint was saved with; if parts of its parameters are intentional "
            "copies of each other: --check-replicas never",
        )

    def _fit(self, strategy: Strategy, files: StepFiles) -> Optional[_StrategyFit]:
        """The agreement of a strategy with all files of a step; None if it does not fit."""
        step = SourceStep(files, self._handles, Report())
        step.load(step.files)
        if step.readable != frozenset(range(strategy.device_count)):
            return None
        laid_out = listed_by_source(strategy, step)
        # Without gradients: files alone may not determine their cuts.
        decisive = {name for name in laid_out if not name.startswith(ACCUMULATED_GRADIENTS)}
        try:
            parameters = read_parameters(strategy, step, laid_out, decisive)
        except InputError:
            return None
        if not parameters or lost_slices(parameters.values(), step):
            return None
        comparison = self._compared(parameters.values(), step)
        return None if comparison.differing else _StrategyFit(step, parameters, comparison.check.tested)

    def _compared(self, parameters: Iterable[GlobalTensor], step: SourceStep) -> ReplicaComparison:
        return compare_replicas(parameters, step, self._handles, self._execution(step), Progress(), "auto")

    def _slices(self, parameters: Iterable[GlobalTensor], step: SourceStep) -> Distinctness:
        return compare_slices(parameters, step, self._handles, self._execution(step))

    def _execution(self, step: SourceStep) -> ExecutionOptions:
        return ExecutionOptions(jobs=1, storage=storage_of(next(iter(step.files.values()))))

    def _error(self, fit: _StrategyFit, lost: Optional[IncompleteSourceError] = None) -> CheckpointError:
        """The error about swapped strategies, with the error about lost ranks."""
        source, target = self._source, self._target
        text = f"the source strategy ({source.path}) does not fit the checkpoint"
        if source.device_count != target.device_count:
            text += f": it has {plural(source.device_count, 'device')}, the checkpoint {rank_ranges(fit.step.readable)}"
        shapes = "" if fit.tested else ", by shapes alone"
        text += f"; the files do fit --dst-strategy ({target.path}){shapes}: are the two swapped?"
        lines: list[str] = [text, *(f"  {line}" for line in self._examples(fit))]
        hints = ["exchange --src-strategy and --dst-strategy"]
        if lost is not None:
            lines.append("if they are not: " + lost.message)
            hints += [f"if they are not: {lost.hint}"] if lost.hint else []
        return CheckpointError(joined("\n", lines), file=fit.step.place, hint="\n".join(hints))

    def _examples(self, fit: _StrategyFit) -> Iterator[str]:
        """Examples of parameters with different cuts, one for each pair of cuts."""
        shown: set[tuple[str, str]] = set()
        for name in fit.parameters:
            cuts = (_cuts(self._source, name), _cuts(self._target, name))
            if cuts[0] == cuts[1] or cuts in shown or len(shown) == _MOST_EXAMPLES:
                continue
            shown.add(cuts)
            rank = fit.step.holders(name)[0]
            shape = list(fit.step.indexes[rank].tensors[name].shape)
            yield f"{quoted(name)}: rank {rank} holds {shape}; --src-strategy {cuts[0]}, --dst-strategy {cuts[1]}"


def _cuts(strategy: Strategy, name: str) -> str:
    layout: Optional[Layout] = next((stage.layouts[name] for stage in strategy.stages if name in stage.layouts), None)
    if layout is None:
        return _WHOLE if strategy.is_none else "does not list it"
    if layout.slice_count == 1:
        return _WHOLE
    by_hand = f" by hand {some_numbers(layout.uneven)}" if layout.uneven is not None else ""
    shards = f" in {layout.shards} optimizer shards" if layout.shards > 1 else ""
    return f"cuts it {list(layout.tensor_cuts)}{by_hand}{shards}"
