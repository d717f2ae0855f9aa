"""Comparing replicas: samples of them, or everything.

Constant values, such as zeros of an optimizer before its first step or a norm's ones, test nothing: a sample then moves
to another place, and constant boxes do not count. Accumulated gradients may differ between data-parallel ranks until
they are reduced: only a full comparison includes them, and reports them separately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.execute import ExecutionOptions, Progress
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.forms.ranks.holding import stage_shardings
from reshard.source_replicas.choice import Holder, group_parameters
from reshard.source_replicas.outcome import ReplicaComparison, Tally, is_gradient
from reshard.source_replicas.samples import EFFORTS, MOST_PLACES, ReplicaFiles, Samples, own_sample_box

# Maximum ranks to group by content.
_MOST_GROUPED = 64


def compare_replicas(
    parameters: Iterable[GlobalTensor],
    step: SourceStep,
    handles: FileHandles,
    execution: ExecutionOptions,
    progress: Progress,
    effort: str,
) -> ReplicaComparison:
    """Compare slices that several ranks hold by the strategy.

    Args:
        parameters: the parameters, as read from the files.
        step: the files.
        handles: open files.
        execution: storage, threads and memory.
        progress: counts bytes of full comparisons.
        effort: ``auto``, some KiB of some parameters; ``more``, samples of every parameter; ``all``, everything.

    Raises:
        RetryableError: with ``all``, a file cannot be read; samples skip unreadable files. Or ranks differ, and their
            files are being written.
    """
    everything = effort == "all"
    chosen = [parameter for parameter in parameters if everything or not is_gradient(parameter)]
    kinds = group_parameters(chosen, step)
    tally = Tally(step)
    with contextlib.closing(ReplicaFiles(step, handles, execution)) as files:
        if everything:
            from reshard.source_replicas.everything import Everything

            Everything(kinds, files, execution, progress, tally).run()
        else:
            Samples(kinds, files, EFFORTS[effort], tally).run()
    result = tally.result(kinds, "everything" if everything else "samples")
    if result.differing:
        # With the right strategy, too, files differ while another process overwrites them.
        handles.check_unchanged(index.path for index in step.indexes.values())
    return result


def ranks_by_content(
    parameter: GlobalTensor, step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> list[list[int]]:
    """Group the ranks of the first stage with a parameter by samples of their slices.

    Returns:
        Groups of ranks with equal samples; only the first ranks of a large stage.

    Raises:
        RetryableError: a file cannot be read.
    """
    sharding = stage_shardings(parameter)[0]
    ranks = sorted(step.ranks_with(parameter.name, sharding.stage))[:_MOST_GROUPED]
    with contextlib.closing(ReplicaFiles(step, handles, execution)) as files:
        for place in range(MOST_PLACES):
            groups: dict[bytes, list[int]] = {}
            for rank in ranks:
                holder = Holder(rank, sharding.grid.slice_box(sharding.slice_of(rank)))
                data = files.sample(parameter, holder, own_sample_box(parameter, holder, place))
                groups.setdefault(data, []).append(rank)
            if len(groups) > 1:
                break
    return list(groups.values())
