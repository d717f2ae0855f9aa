"""The layout that a tensor really gets where a strategy records one."""

from __future__ import annotations

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import IncompleteSourceError, LayoutError
from reshard.layout import Layout
from reshard.text.wording import quoted, rank_ranges


def layout_in(tensor: GlobalTensor, recorded: Layout, in_pipeline: bool) -> Layout:
    """The layout that a tensor gets where a strategy records ``recorded``.

    Accumulated gradients are written the way they were stored. Where the source cannot tell,
    because it records no shard, a target with a pipeline has none either: the compiler records
    but does not make it there.

    Args:
        tensor: the tensor.
        recorded: what the target's strategy says.
        in_pipeline: the target has several pipeline stages.

    Raises:
        LayoutError: the recorded layout does not fit the tensor.
        IncompleteSourceError: what decides it is in files that were not read.
    """
    plain, unsharded, undecided = tensor.shards
    if undecided and recorded.shards > 1:
        raise IncompleteSourceError(
            f"{quoted(tensor.name)}: whether its optimizer shards are made is told by the files of "
            f"{rank_ranges(undecided)} only",
            rank=undecided[0],
            parameter=tensor.name,
            hint=f"bring one of {rank_ranges(undecided)}",
        )
    if plain or (unsharded and in_pipeline):
        recorded = recorded.without_shards()
    fitting = [
        layout
        for layout in recorded.regroupings()
        if len(layout.cuts) == len(tensor.shape) and layout.recorded_shape in (None, tensor.shape)
    ]
    if not fitting:
        told = f" of a tensor of shape {list(recorded.recorded_shape)}" if recorded.recorded_shape else ""
        raise LayoutError(
            f"tensor map {recorded.map_text}{told} does not lay out the checkpoint's tensor of shape "
            f"{list(tensor.shape)}"
        )
    for dimension, size in enumerate(tensor.shape):
        fitting[0].check_size(dimension, size)
    return fitting[0]
