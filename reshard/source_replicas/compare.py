"""Comparing replicas: samples of them, or everything.

Constant values, such as zeros of an optimizer before its first step or a norm's ones, test nothing: a sample then moves
to another place, and constant boxes do not count. Accumulated gradients may differ between data-parallel ranks until
they are reduced: only a full comparison includes them, and reports them separately.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import CheckpointError
from reshard.execute import ExecutionOptions, Progress
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.layout import volume_of
from reshard.source_replicas.choice import Holder, group_parameters, number_of
from reshard.source_replicas.outcome import ReplicaComparison, Tally, is_gradient
from reshard.source_replicas.samples import (
    EFFORTS,
    MOST_PLACES,
    UNREADABLE,
    ReplicaFiles,
    Samples,
    SamplingEffort,
    is_constant,
)
from reshard.text.wording import quoted


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
    deadline, requests = time.monotonic() + effort.seconds, 0
    with contextlib.closing(ReplicaFiles(checkpoint, handles, execution)) as files:
        for tensor, holders in _stored_slices(checkpoint, names):
            if requests > effort.most_reads or time.monotonic() > deadline:
                return
            if len(holders) < 2:
                continue
            first, *others = holders
            with contextlib.suppress(*UNREADABLE):
                for place in range(MOST_PLACES):
                    requests += len(holders)
                    data = files.own_sample(tensor, first, place)
                    for holder in others:
                        if files.own_sample(tensor, holder, place) != data:
                            raise _copies_differ(checkpoint, tensor, first, holder)
                    if not is_constant(data, tensor.item_size):
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


def _copies_differ(checkpoint: Checkpoint, tensor: GlobalTensor, first: Holder, other: Holder) -> CheckpointError:
    paths = [checkpoint.indexes[holder.rank].path for holder in (first, other)]
    return CheckpointError(
        f"{paths[1]}: {quoted(tensor.name)} differs from that in {paths[0]}, and both are the box "
        f"{[list(interval) for interval in first.box]} by the metadata of {checkpoint.place}",
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
    tally = Tally(step)
    with contextlib.closing(ReplicaFiles(step, handles, execution)) as files:
        if everything:
            from reshard.source_replicas.everything import compare_everything

            compare_everything(kinds, ranks, files, execution, progress, tally)
        else:
            Samples(kinds, files, EFFORTS[effort], tally).run()
    result = tally.result(kinds, "everything" if everything else "samples")
    if result.differing:
        # With the right strategy, too, files differ while another process overwrites them.
        handles.check_unchanged(index.path for index in step.indexes.values())
    return result
