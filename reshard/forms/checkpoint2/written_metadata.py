"""metadata.json of Checkpoint 2.0, as the loaders of MindFormers 1.8.0 to 2.1.0 all take it.

The layout has exactly five members in a fixed order, because loaders take them by their places, and is never
null; slices are numbered in C order; every stored slice names all ranks that are said to hold it.
"""

from __future__ import annotations

import itertools
import json
import math
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, NamedTuple

import numpy as np

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError, LayoutError
from reshard.layout import Layout, shape_of
from reshard.text.names import as_pattern
from reshard.text.wording import quoted


class Described(NamedTuple):
    """A tensor of a checkpoint that is complete.

    Attributes:
        tensor: the tensor.
        layout: how it is cut over the ranks of its stage.
        ranks: these ranks, ascending.
        files: the file of every rank that stores a slice, by its place among them.
    """

    tensor: GlobalTensor
    layout: Layout
    ranks: tuple[int, ...]
    files: Mapping[int, str]


def metadata_json(tensors: Callable[[], Iterable[Described]]) -> Iterator[bytes]:
    """The content of metadata.json, in parts of one tensor at the most.

    Args:
        tensors: goes through the tensors; called twice.

    Raises:
        CheckpointError: it cannot say how a tensor is laid out.
    """
    yield b'{"state_dict_metadata":{'
    yield from _members((tensor.tensor.name, _described(tensor)) for tensor in tensors())
    yield b'},"storage_data":{'
    yield from _members(member for tensor in tensors() for member in _stored(tensor))
    yield b"}}"


def _members(members: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    """The members of an object in JSON."""
    comma = ""
    for name, value in members:
        yield f"{comma}{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}".encode()
        comma = ","


def tracker_text(iteration: int) -> bytes:
    """The content of latest_checkpointed_iteration.txt."""
    return str(iteration).encode()


def check_described(name: str, layout: Layout) -> None:
    """Insist that metadata.json can say what a tensor is called and how it is laid out.

    Raises:
        CheckpointError: it cannot.
    """
    if "," in name:
        raise CheckpointError(
            f"{quoted(name)}: loaders of Checkpoint 2.0 cannot read a name with a comma",
            parameter=name,
            hint=f"leave it out with --exclude {as_pattern(name)}",
        )
    try:
        plain_layout(layout)
    except LayoutError as error:
        raise CheckpointError(
            f"{quoted(name)}: Checkpoint 2.0 cannot say its layout: {error.message}",
            parameter=name,
            hint="choose a target strategy without it, or write rank files, which keep the strategy beside them",
        ) from error


def _described(tensor: Described) -> dict[str, Any]:
    (name, dtype, _, shape, *_), layout = tensor.tensor, tensor.layout
    check_described(name, layout)
    plain = plain_layout(layout)
    grid = layout.grid(shape)
    place = {
        rank: at for number in range(layout.slice_count) for at, rank in enumerate(layout.holders(number).tolist())
    }
    return {
        "properties": {
            "dtype": dtype.lower(),
            "replica_id": [place[rank] for rank in range(len(tensor.ranks))],
            "allow_shape_mismatch": False,
            "allow_to_save": True,
        },
        "global_shape": list(shape),
        "axis_fragmentations": list(layout.cuts),
        "layout": {
            "device_matrix": list(plain.device_matrix),
            "tensor_map": [_entry(axes) for axes in plain.tensor_map],
            "interleaved_parallel": False,
            "alias_name": list(itertools.islice(_aliases(), len(plain.device_matrix))),
            "rank_list": list(tensor.ranks),
        },
        "chunk": [
            {"global_offset": [number], "local_shape": list(shape_of(grid.slice_box(number)))}
            for number in range(grid.slice_count)
        ],
    }


def _stored(tensor: Described) -> Iterator[tuple[str, Any]]:
    slices = tensor.layout.slice_of_rank
    for device, file in sorted(tensor.files.items()):
        number = int(slices[device])
        group = [tensor.ranks[rank] for rank in tensor.layout.holders(number).tolist()]
        # Loaders look for what Python writes of this tuple.
        key = str((tensor.tensor.name, (number,)))
        yield key, [{"file_name": file, "storage_rank": tensor.ranks[device], "rank_group": group}]


def _entry(axes: tuple[int, ...]) -> Any:
    return -1 if not axes else axes[0] if len(axes) == 1 else list(axes)


def _aliases() -> Iterator[str]:
    """a, b ... z, aa, ab ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


_MEMBERS = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")


def common_json(said: Mapping[str, Any]) -> bytes:
    """The content of common.json; what is not known is null, so that training does not go on from a guess."""
    return json.dumps({name: said.get(name) for name in _MEMBERS}, indent=4).encode()


class PlainLayout(NamedTuple):
    """A layout of a device matrix and a tensor map alone.

    Attributes:
        device_matrix: sizes of the axes, slowest first; at least one.
        tensor_map: per dimension the axes that it is split over, counted from the right, most significant first.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]


def plain_layout(layout: Layout) -> PlainLayout:
    """Say optimizer shards as axes.

    Shards go round among the ranks that hold the same slice, in ascending order: so they lie along the
    fastest of the axes that the tensor is not split over, of which the last one taken may have to be divided.

    Raises:
        LayoutError: no device matrix says the same.
    """
    if layout.uneven is not None:
        raise LayoutError("a table split by hand cannot be said by a device matrix and a tensor map")
    # From the right: sizes of axes, and which of them each dimension is split over.
    sizes = list(reversed(layout.device_matrix)) or [1]
    dimensions = [list(axes) for axes in layout.tensor_map]
    if layout.shards > 1:
        mapped = {axis for axes in dimensions for axis in axes}
        left = layout.shards
        taken: list[int] = []
        axis = 0
        while left > 1 and axis < len(sizes):
            if axis in mapped or sizes[axis] == 1:
                axis += 1
                continue
            common = math.gcd(sizes[axis], left)
            if common < min(sizes[axis], left):
                break
            if sizes[axis] > common:
                # Its faster part is taken; all axes to the left count one more.
                sizes[axis : axis + 1] = [common, sizes[axis] // common]
                dimensions = [[a + (a > axis) for a in axes] for axes in dimensions]
                mapped = {a + (a > axis) for a in mapped}
            taken.append(axis)
            left //= common
            axis += 1
        dimensions[0] += reversed(taken)
    plain = PlainLayout(tuple(reversed(sizes)), tuple(map(tuple, dimensions)))
    same = Layout(plain.device_matrix, plain.tensor_map)
    if same.cuts != layout.cuts or not np.array_equal(same.slice_of_rank, layout.slice_of_rank):
        raise LayoutError(
            f"{layout.shards} optimizer shards over device matrix {list(layout.device_matrix)} and tensor map "
            f"{layout.map_text} cannot be said by a device matrix and a tensor map alone"
        )
    return plain
