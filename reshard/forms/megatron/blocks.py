"""Optimizer state that Megatron flattened in blocks: ``fully_sharded_model_space`` of core 0.14 and before.

Such a tensor counts the blocks of a grid in all of its dimensions but the last, which is one block, flattened and cut
where a data-parallel rank ends. Every block is a box of the weight, joined from these cuts.

Blocks of experts in one grouped matrix are those of the transposed weight: [E, H, 2F] where the weight is [E, 2F, H].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from reshard.checkpoints.formats.archives import c_strides
from reshard.forms.megatron.keys import weight_of
from reshard.forms.megatron.proofs import CURE
from reshard.forms.pytorch.dcp import DescribedChunk, DescribedTensor, ReadMetadata, joined_chunk, run_of
from reshard.forms.recorded import ProblemError

_EXPERTS = ".experts."


def unblock(directory: str, metadata: ReadMetadata) -> set[str]:
    """Replace flattened tensors by tensors in the shape of their weights; those that are none get a fault.

    Returns:
        The transposed ones.
    """
    described: dict[str, DescribedTensor] = {}
    transposed: set[str] = set()
    for name, shape in metadata.flattened.items():
        tensor, weight = metadata.tensors[name], metadata.tensors.get(weight_of(name))
        if name in metadata.faults:
            continue
        try:
            if weight is None:
                raise ProblemError("is flattened in blocks, and its weight is missing")
            swapped = _is_transposed(name, shape, weight.shape, metadata)
            described[name] = DescribedTensor(tensor.dtype, weight.shape, [*_blocks(tensor, shape, directory, swapped)])
            if swapped:
                transposed.add(name)
        except ProblemError as error:
            metadata.fault(directory, name, str(error), CURE)
    metadata.tensors.update(described)
    return transposed


def _is_transposed(name: str, shape: tuple[int, ...], weight: tuple[int, ...], metadata: ReadMetadata) -> bool:
    """Whether the last two dimensions of a state are those of its weight in the other order."""
    swapped = _turned(shape)
    if _EXPERTS not in name or len(shape) < 2 or weight not in (shape, swapped):
        if shape != weight:
            raise ProblemError(f"has the shape {list(shape)}, and its weight {list(weight)}")
        return False
    if shape != swapped:
        return weight == swapped
    # A square has the same shape in both orders; the cut of tensor ranks is along one dimension of the weight.
    found = {
        answer
        for other, true_shape in metadata.flattened.items()
        if _EXPERTS in other and other in metadata.tensors and weight_of(other) in metadata.tensors
        if (answer := _by_shape_or_cut(other, true_shape, metadata)) is not None
    }
    if len(found) != 1:
        raise ProblemError("belongs to square matrices of experts, and whether it is transposed is not known")
    return found.pop()


def _by_shape_or_cut(name: str, shape: tuple[int, ...], metadata: ReadMetadata) -> bool | None:
    """Whether the state of experts is transposed, by its shape, or by the dimension that is cut; None if undecided."""
    weight = metadata.tensors[weight_of(name)]
    if shape[-1] != shape[-2]:
        return shape != weight.shape
    grid = metadata.tensors[name].shape[-3:-1]
    weights = [len({chunk.offsets[at] for chunk in weight.chunks}) for at in (-2, -1)]
    cut = [count > 1 for count in grid]
    if len(grid) != 2 or cut[0] == cut[1] or [count > 1 for count in weights] not in (cut, cut[::-1]):
        return None
    return [count > 1 for count in weights] != cut


def _blocks(
    tensor: DescribedTensor, shape: tuple[int, ...], directory: str, transposed: bool
) -> Iterator[DescribedChunk]:
    """The blocks of a tensor as boxes of its true shape, or of that with the last two dimensions in the other order."""
    grid, flat = tensor.shape[:-1], tensor.shape[-1] if tensor.shape else 0
    if len(grid) != len(shape) or any(not count or size % count for size, count in zip(shape, grid)):
        raise ProblemError(f"has the shape {list(shape)} in a grid of {list(grid)} blocks, which does not divide it")
    block = tuple(size // count for size, count in zip(shape, grid))
    if math.prod(block) != flat:
        raise ProblemError(f"has blocks of {flat} elements, and of the shape {list(block)}")
    cuts: dict[tuple[int, ...], list[DescribedChunk]] = {}
    for chunk in tensor.chunks:
        if any(size != 1 for size in chunk.sizes[:-1]):
            raise ProblemError("has a chunk of several blocks")
        if chunk.sizes[-1]:
            cuts.setdefault(chunk.offsets[:-1], []).append(chunk)
    strides = c_strides(block)
    for place, parts in cuts.items():
        parts.sort(key=lambda chunk: chunk.offsets[-1])
        _check_whole(parts, flat, place)
        starts = tuple(number * size for number, size in zip(place, block))
        runs = [run_of(part, directory) for part in parts]
        if transposed:
            yield joined_chunk(_turned(starts), _turned(block), runs, directory, _turned(strides))
        else:
            yield joined_chunk(starts, block, runs, directory)


def _turned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*sizes[:-2], *reversed(sizes[-2:]))


def _check_whole(parts: Sequence[DescribedChunk], flat: int, place: tuple[int, ...]) -> None:
    """Check that the cuts of a block are all of it: ranges of Megatron may overlap, and leave holes."""
    reached = 0
    for part in parts:
        if part.offsets[-1] != reached:
            raise ProblemError(
                f"has ranges of the block {list(place)} that overlap or leave a hole at element {reached}"
            )
        reached += part.sizes[-1]
    if reached != flat:
        raise ProblemError(f"has {reached} of the {flat} elements of the block {list(place)}")
