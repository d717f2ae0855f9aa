"""What else an adapter and its base hold: weights beside the matrices, and matrices beside the weights."""

from __future__ import annotations

from reshard.errors import CheckpointError
from reshard.lora.pairs import is_matrix, whole_weights
from reshard.opened import OpenedCheckpoint
from reshard.opened.tensor import LazyTensor
from reshard.text.messages import listing
from reshard.text.names import is_weight


def check_beside(adapter: OpenedCheckpoint, place: str, base: OpenedCheckpoint) -> None:
    """Compare what an adapter and its base both hold, element by element.

    Training saves the whole model beside the matrices; what else of it was trained would be lost without a word, and
    so would matrices in the base that are of another adapter.

    Args:
        adapter: the adapter's tensors.
        place: where they lie, for messages.
        base: the base's tensors.

    Raises:
        CheckpointError: some differ, or the base has matrices that the adapter has not.
        ReshardError: they cannot be read.
    """
    matrices = [name for name in base if is_weight(name, base) and is_matrix(name)]
    others = [name for name in matrices if name not in adapter or not _same(adapter[name], base[name])]
    if others:
        raise CheckpointError(
            f"the base holds matrices of another adapter than that in {place}: " + listing(others),
            parameter=others[0],
            hint="they would be lost: merge them first, with this base as BASE and ADAPTER, or leave them out with "
            "`reshard convert --exclude '*lora_*'`",
        )
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
