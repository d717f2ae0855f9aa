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
from reshard.source_replicas.choice import group_parameters
from reshard.source_replicas.outcome import ReplicaComparison, Tally, is_gradient
from reshard.source_replicas.samples import EFFORTS, ReplicaFiles, Samples


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
            from reshard.source_replicas.everything import compare_everything

            compare_everything(kinds, files, execution, progress, tally)
        else:
            Samples(kinds, files, EFFORTS[effort], tally).run()
    result = tally.result(kinds, "everything" if everything else "samples")
    if result.differing:
        # With the right strategy, too, files differ while another process overwrites them.
        handles.check_unchanged(index.path for index in step.indexes.values())
    return result
