"""Comparing replicas: samples of them, or everything.

Constant values, such as zeros of an optimizer before its first step or a norm's ones, test nothing: a sample then moves
to another place, and constant boxes do not count. Accumulated gradients may differ between data-parallel ranks until
they are reduced: only a full comparison includes them, and reports them separately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import CheckpointError
from reshard.execute import ExecutionOptions, Progress
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.layout import Box, volume_of
from reshard.source_replicas.choice import Holder, group_parameters, number_of
from reshard.source_replicas.comparison import ReplicaComparison, is_gradient
from reshard.source_replicas.samples import (
    EFFORTS,
    MOST_PLACES,
    ReplicaFiles,
    SamplingEffort,
    compare_samples,
    is_constant,
    own_sample,
)
from reshard.text.messages import quoted


def check_copies(
    checkpoint: Checkpoint,
    names: Iterable[str],
    handles: FileHandles,
    execution: ExecutionOptions,
    effort: SamplingEffort,
) -> None:
    """Compare samples of slices that several files hold by the checkpoint's own metadata.

    Damaged metadata can place a slice where others are; then nothing is missing, and one of them is read.

    Args:
        checkpoint: the stored checkpoint.
        names: the tensors to compare.
        handles: open files.
        execution: storage, threads and memory.
        effort: limits of time and requests.

    Raises:
        CheckpointError: copies differ.
    """
    with contextlib.closing(ReplicaFiles(checkpoint, handles, execution, effort.seconds)) as files:
        for tensor, holders in _stored_slices(checkpoint, names):
            if files.requests > effort.most_reads or files.is_late:
                return
            for place in range(MOST_PLACES if len(holders) > 1 else 0):
                (found,) = files.contents([own_sample(tensor, holders, place)])
                if len(found) > 1:
                    first, other, *_ = (ranks[0] for ranks in found.values())
                    raise _copies_differ(checkpoint, tensor, holders[0].box, first, other)
                if not all(is_constant(data, tensor.item_size) for data in found):
                    break


def _stored_slices(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[tuple[GlobalTensor, list[Holder]]]:
    """Every slice of some tensors, with its holders; none if it is empty, or if one file holds it."""
    # Another order than in the files: every tensor may come first.
    for tensor in sorted((checkpoint.tensors[name] for name in names), key=lambda tensor: number_of(tensor.name)):
        for sharding, present in zip(tensor.shardings, checkpoint.present(tensor)):
            for number in range(sharding.grid.slice_count):
                files = [file for file in sharding.holders(number) if file in present]
                holders: list[Holder] = []
                # Most checkpoints have no copies, and millions of slices, whose boxes take longer than their files.
                if len(files) > 1:
                    box = sharding.stored_box(number)
                    holders = [Holder(file, box) for file in files] if volume_of(box) else []
                yield tensor, holders


def _copies_differ(checkpoint: Checkpoint, tensor: GlobalTensor, box: Box, first: int, other: int) -> CheckpointError:
    paths = [checkpoint.indexes[number].path for number in (first, other)]
    return CheckpointError(
        f"{paths[1]}: {quoted(tensor.name)} differs from that in {paths[0]}, and both are the box "
        f"{[list(interval) for interval in box]} by the metadata of {checkpoint.place}",
        file=paths[1],
        parameter=tensor.name,
        hint="the metadata or a file is damaged: take them from a copy, or another step; if the ranks that wrote them "
        "have diverged: --check-replicas never",
    )


def compare_replicas(
    parameters: Iterable[GlobalTensor],
    step: SourceStep,
    handles: FileHandles,
    execution: ExecutionOptions,
    progress: Progress,
    effort: str,
    ranks: Optional[frozenset[int]] = None,
) -> ReplicaComparison:
    """Compare slices that several ranks hold by the strategy.

    Args:
        parameters: the parameters, as read from the files.
        step: the files.
        handles: open files.
        execution: storage, threads and memory.
        progress: counts bytes of full comparisons.
        effort: ``auto``, some KiB of some parameters; ``more``, samples of every parameter; ``all``, everything.
        ranks: with ``all``, compare only slices that one of these ranks should hold; None for all.

    Raises:
        RetryableError: with ``all``, a file cannot be read; samples skip unreadable files. Or ranks differ, and their
            files are being written.
    """
    everything = effort == "all"
    chosen = [parameter for parameter in parameters if everything or not is_gradient(parameter)]
    kinds = group_parameters(chosen, step)
    comparison = ReplicaComparison(kinds, step, "everything" if everything else "samples")
    limits = EFFORTS["more" if everything else effort]
    with contextlib.closing(ReplicaFiles(step, handles, execution, limits.seconds)) as files:
        if everything:
            from reshard.source_replicas.everything import compare_everything

            compare_everything(kinds, ranks, files, execution, progress, comparison)
        else:
            compare_samples(kinds, files, limits, comparison)
    if comparison.differing:
        # With the right strategy, too, files differ while another process overwrites them.
        handles.check_unchanged(index.path for index in step.indexes.values())
    return comparison
