"""Comparing alleged replicas: samples of them, or everything.

Values that are all the same, such as zeros of an optimizer that has not begun or a norm's ones, say nothing: another
place is tried then, and what is constant there too does not count as compared. Accumulated gradients may differ
between data-parallel ranks until they are reduced: only where everything is compared they are, and told apart.
"""

from __future__ import annotations

from collections.abc import Iterable

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.execute import ExecutionOptions, Progress
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.forms.ranks.holding import stage_shardings
from reshard.layout import volume_of
from reshard.source_replicas.choice import Group, Holder, Replicated, alike, number_of
from reshard.source_replicas.files import ReplicaFiles
from reshard.source_replicas.outcome import Comparison
from reshard.source_replicas.samples import EFFORTS, MOST_PLACES, Samples, sample_box
from reshard.source_replicas.tally import Tally, is_gradient

# Ranks that are put together by what they hold.
_MOST_GROUPED = 64


def compare_replicas(
    parameters: Iterable[GlobalTensor],
    step: SourceStep,
    handles: FileHandles,
    execution: ExecutionOptions,
    progress: Progress,
    effort: str,
) -> Comparison:
    """Compare what ranks hold that should be the same.

    Args:
        parameters: what is compared, as read from the files.
        step: the files.
        handles: open files.
        execution: what they lie on, threads and memory.
        progress: told of bytes where everything is compared.
        effort: ``auto``, some KiB of some parameters; ``more``, some of every parameter; ``all``, everything.

    Raises:
        RetryableError: with ``all``, a file cannot be read; a sample of such a file is passed over. Ranks differ, and
            somebody is writing to their files.
    """
    everything = effort == "all"
    chosen = [parameter for parameter in parameters if everything or not is_gradient(parameter)]
    files = ReplicaFiles(step, handles, execution.storage)
    kinds = alike(chosen, step)
    tally = Tally(step)
    if everything:
        from reshard.source_replicas.everything import Everything

        Everything(kinds, files, execution, progress, tally).run()
    else:
        Samples(kinds, files, execution.storage.remote, EFFORTS[effort], tally).run()
    result = tally.result(kinds, "everything" if everything else "samples")
    if result.differing:
        # Neither the strategy nor the replicas are to blame for files of which only some are written anew.
        handles.check_unchanged(index.path for index in step.indexes.values())
    return result


def holders_alike(
    parameter: GlobalTensor, step: SourceStep, handles: FileHandles, execution: ExecutionOptions
) -> list[list[int]]:
    """Which ranks of the first stage that holds a parameter really hold the same, by a sample of each one's slice.

    Returns:
        The ranks, those together that hold the same; of a large stage the first ones.

    Raises:
        RetryableError: a file cannot be read.
    """
    sharding = stage_shardings(parameter)[0]
    files = ReplicaFiles(step, handles, execution.storage)
    ranks = sorted(step.ranks_with(parameter.name, sharding.stage))[:_MOST_GROUPED]
    for place in range(MOST_PLACES):
        found: dict[bytes, list[int]] = {}
        for rank in ranks:
            holder = Holder(rank, sharding.grid.slice_box(sharding.slice_of(rank)))
            own = Replicated(holder.box, (Group((rank,), (rank,), holder.box),))
            box = sample_box(own, parameter, number_of(parameter.name, place))
            data = bytearray(volume_of(box) * parameter.item_size)
            files.read(parameter, holder, box, memoryview(data))
            found.setdefault(bytes(data), []).append(rank)
        if len(found) > 1:
            break
    return list(found.values())
