"""A hint of swapped source and target strategies, where files do not fit the source's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Optional, Union

from reshard.checkpoints import FileHandles
from reshard.errors import CheckpointError, IncompleteSourceError, InputError, ReshardError
from reshard.forms.ranks.checkpoint import SourceStep, listed_by_source, read_parameters
from reshard.forms.ranks.selection import lost_slices
from reshard.forms.ranks.tree import StepFiles, find_checkpoints
from reshard.strategies import Strategy
from reshard.text.messages import Report
from reshard.text.names import ACCUMULATED_GRADIENTS


@contextlib.contextmanager
def hint_of_swap(
    source: Strategy,
    target: Strategy,
    src: Union[str, Mapping[int, str]],
    step: str,
    file_suffix: Optional[str],
    handles: FileHandles,
) -> Iterator[None]:
    """Add to an error about the source's files that by shapes they fit the target's strategy, and not the source's.

    Args:
        source: the source strategy.
        target: the target strategy.
        src: tree, file or `{rank}` path of the source; single files of ranks are not tried.
        step: ``latest`` or ``<epoch>_<step>``.
        file_suffix: only files whose stem ends so.
        handles: open files.
    """
    try:
        yield
    except (CheckpointError, IncompleteSourceError) as error:
        if isinstance(src, str) and source is not target:
            # The error itself reports unreadable files.
            with contextlib.suppress(ReshardError, OSError):
                files = next(iter(find_checkpoints(src, file_suffix).candidates(step)))
                # Lost files contradict a strategy only if the other one cuts them differently.
                differs = not isinstance(error, IncompleteSourceError) or _cuts(source) != _cuts(target)
                if differs and _fits(target, files, handles) and not _fits(source, files, handles):
                    swapped = f"the files fit --dst-strategy ({target.path}), by shapes: are the two swapped?"
                    error.hint = "\n".join(filter(None, [swapped, error.hint]))
        raise


def _fits(strategy: Strategy, files: StepFiles, handles: FileHandles) -> bool:
    """Whether every rank is present, every slice has a shape that fits the layouts, and nothing is missing."""
    step = SourceStep(files, handles, Report())
    step.load(step.files)
    if step.readable != frozenset(range(strategy.device_count)):
        return False
    laid_out = listed_by_source(strategy, step)
    # Without gradients: files alone may not determine their cuts.
    decisive = {name for name in laid_out if not name.startswith(ACCUMULATED_GRADIENTS)}
    try:
        parameters = read_parameters(strategy, step, laid_out, decisive)
    except InputError:
        return False
    return bool(parameters) and not lost_slices(parameters.values(), step)


def _cuts(strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """The cuts of every parameter that is not whole."""
    layouts = (item for stage in strategy.stages for item in stage.layouts.items())
    return {name: layout.cuts for name, layout in layouts if layout.slice_count > 1}
