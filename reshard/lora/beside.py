"""Whole weights that lie beside an adapter's matrices: they have to be those of the base."""

from __future__ import annotations

from reshard.errors import CheckpointError
from reshard.lora.pairs import whole_weights
from reshard.opened import OpenedCheckpoint
from reshard.opened.tensor import LazyTensor
from reshard.text.messages import listing


def check_beside(adapter: OpenedCheckpoint, place: str, base: OpenedCheckpoint) -> None:
    """Compare the weights that an adapter and its base both hold, element by element.

    Training saves the whole model beside the matrices; what else of it was trained would be lost without a word.

    Args:
        adapter: the adapter's tensors.
        place: where they lie, for messages.
        base: the base's tensors.

    Raises:
        CheckpointError: some differ.
        ReshardError: they cannot be read.
    """
    shared = [name for name in whole_weights(adapter.keys()) if name in base]
    differing = [name for name in shared if not _same(adapter[name], base[name])]
    if differing:
        raise CheckpointError(
            f"{place}: holds weights that differ from the base's: " + listing(differing),
            file=place,
            parameter=differing[0],
            hint="what was trained beside the matrices is not merged; if this is the whole model, give it as BASE, too",
        )


def _same(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors are of one type and shape and hold the same bytes."""
    if (one.dtype_name, one.shape) != (other.dtype_name, other.shape):
        return False
    return all(mine.tobytes() == theirs.tobytes() for mine, theirs in zip(one.blocks(), other.blocks()))
