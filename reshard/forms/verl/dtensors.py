"""The part of a tensor that a rank holds, from the pickle of its state dictionary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from reshard.checkpoints.formats.archives import TENSOR_NAMES, Archive, Elements
from reshard.checkpoints.formats.pickles import MAX_SIZES, PickledInstance, among, named, sizes_of

_REBUILD_TYPE, _WRAPPER = "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"
_PARAMETER = "torch._utils._rebuild_parameter"
_TENSOR = "DTensor"
_REPLICATE, _SHARD, _STRIDED = "Replicate", "Shard", "_StridedShard"
_CLASSES = frozenset(
    {_TENSOR, "DTensorSpec", "TensorMeta", "ShardOrderEntry", "DeviceMesh", "_MeshLayout", "_FlatLayout", "Layout"}
    | {_REPLICATE, _SHARD, _STRIDED, "Partial", "_Partial"}
)
_plain_name = among({*TENSOR_NAMES, _REBUILD_TYPE, _WRAPPER, "torch.device", "torch.serialization._get_layout"})


def is_read(name: str) -> bool:
    """Whether a pickle may name this class or function; modules of the classes differ between versions of torch."""
    return _plain_name(name) or (name.startswith("torch.distributed.") and name.rpartition(".")[2] in _CLASSES)


class RankPart(NamedTuple):
    """A rank's part of a tensor.

    Attributes:
        shape: of the full tensor.
        offsets: where the part begins, per dimension; None for a rank outside of the tensor's mesh.
        sizes: elements of the part, per dimension.
        mesh_size: ranks that the tensor is laid out over; 1 for a plain tensor.
        elements: where the part is stored.
    """

    shape: tuple[int, ...]
    offsets: Optional[tuple[int, ...]]
    sizes: tuple[int, ...]
    mesh_size: int
    elements: Elements


class PlacementError(ValueError):
    """A tensor whose placement is not read; its text is the end of a sentence about the tensor."""


def part_of(archive: Archive, value: Any) -> Optional[RankPart]:
    """The part of a tensor that a value of a state dictionary is; None for a value that is no tensor.

    Raises:
        PlacementError: nothing records which part it is, or in a way that is not read.
        CheckpointError: the archive is damaged.
        OSError: reading failed.
    """
    if not isinstance(value, PickledInstance):
        return None
    if value.name == _PARAMETER and value.args and isinstance(value.args[0], PickledInstance):
        value = value.args[0]
    if value.name != _REBUILD_TYPE:
        elements = archive.tensor(value)
        return RankPart(elements.shape, (0,) * len(elements.shape), elements.shape, 1, elements)
    shape, state = _wrapped(value)
    spec = _fields(state.get("_spec"))
    mesh = _fields(spec.get("mesh"))
    elements = archive.tensor(state.get("_local_tensor"))
    mesh_shape, coordinates = _mesh_shape(mesh), mesh.get("_coordinate_on_dim", ())
    placements = spec.get("placements")
    if shape is None or mesh_shape is None or not isinstance(placements, tuple) or len(placements) != len(mesh_shape):
        raise PlacementError("has a mesh or placements that are not read")
    if coordinates is None:
        return RankPart(shape, None, elements.shape, math.prod(mesh_shape), elements)
    coordinates = sizes_of(coordinates)
    if (
        coordinates is None
        or len(coordinates) != len(mesh_shape)
        or not all(at < size for at, size in zip(coordinates, mesh_shape))
    ):
        raise PlacementError("does not record the place of its rank in the mesh")
    offsets, sizes = [0] * len(shape), list(shape)
    order = spec.get("shard_order")
    for dimension, mesh_dimensions in _cuts(placements, mesh_shape, len(shape), order).items():
        strided = any(_class(placements[number]) == _STRIDED for number in mesh_dimensions)
        count = math.prod(mesh_shape[number] for number in mesh_dimensions)
        if strided and len(mesh_dimensions) > 2 and shape[dimension] % count:
            # Cut one after the other, and joined as placements describe it, such parts are different ones.
            raise PlacementError(f"of shape {list(shape)} has uneven strided parts of several cuts, which are not read")
        for number in mesh_dimensions:
            # Parts of one size, as torch.chunk makes them: the last ones are smaller or empty.
            part = -(-sizes[dimension] // mesh_shape[number])
            start = min(part * coordinates[number], sizes[dimension])
            offsets[dimension] += start
            sizes[dimension] = min(part, sizes[dimension] - start)
    if elements.shape != tuple(sizes) and not (0 in elements.shape and 0 in sizes):
        raise PlacementError(
            f"of shape {list(shape)} has a part of shape {list(elements.shape)}, and one of {sizes} by its placement"
        )
    return RankPart(shape, tuple(offsets), tuple(sizes), math.prod(mesh_shape), elements)


def _wrapped(value: PickledInstance) -> tuple[Optional[tuple[int, ...]], dict[str, Any]]:
    """The shape and the attributes of a DTensor."""
    args = value.args
    wrapper = args[2] if len(args) > 3 and isinstance(args[2], tuple) and len(args[2]) > 2 else (None,)
    if args and getattr(args[0], "name", None) == _WRAPPER and _class(wrapper[0]) == _TENSOR:
        return sizes_of(wrapper[2]), _fields(args[3])
    raise PlacementError("is a tensor of a class that is not read")


def _mesh_shape(mesh: Mapping[str, Any]) -> Optional[tuple[int, ...]]:
    """The shape of a mesh: of its tensor of ranks, or by its layout since torch 2.9."""
    ranks, layout = mesh.get("mesh"), _fields(mesh.get("_layout"))
    if isinstance(ranks, PickledInstance) and len(ranks.args) > 2:
        return sizes_of(ranks.args[2])
    axes = layout.get("axes", layout.get("shape"))
    axes = (axes,) if isinstance(axes, int) else axes
    if not isinstance(axes, tuple):
        return None
    sizes = [_axis_size(_fields(axis).get("shape") if isinstance(axis, PickledInstance) else axis) for axis in axes]
    return sizes_of(sizes)


def _axis_size(shape: Any) -> Optional[int]:
    """The ranks along a dimension of a mesh, which may be several joined ones."""
    sizes = sizes_of((shape,) if isinstance(shape, int) else shape)
    return None if sizes is None else math.prod(sizes)


def _cuts(placements: Sequence[Any], mesh_shape: Sequence[int], dimensions: int, order: Any) -> dict[int, list[int]]:
    """Per dimension of a tensor the dimensions of the mesh that cut it, the first cut first.

    Raises:
        PlacementError: it is placed otherwise.
    """
    cuts: dict[int, list[int]] = {}
    # From the last one on, as a strided part is cut after others to its right, in so many parts as it records.
    for number in reversed(range(len(placements))):
        kind, fields = _class(placements[number]), _fields(placements[number])
        if kind == _REPLICATE:
            continue
        dimension = fields.get("dim")
        if kind not in (_SHARD, _STRIDED) or type(dimension) is not int or not 0 <= dimension < dimensions:
            raise PlacementError(f"has the placement {kind or 'of no name'}, which is not read")
        cut = cuts.setdefault(dimension, [])
        part_counts = [math.prod(mesh_shape[each] for each in cut[:count]) for count in range(len(cut) + 1)]
        parts = fields.get("split_factor") if kind == _STRIDED else 1
        if parts not in part_counts or (kind == _STRIDED and order):
            raise PlacementError("has a strided placement that is not read")
        cut.insert(part_counts.index(parts), number)
    if order:
        recorded = _recorded_order(order)
        if {dimension: sorted(cut) for dimension, cut in recorded.items()} != cuts:
            raise PlacementError("has an order of its cuts that contradicts its placements")
        return recorded
    return cuts


def _recorded_order(order: Any) -> dict[int, list[int]]:
    """The same as `_cuts`, as newer versions of torch record it; empty for anything else."""
    entries = order if isinstance(order, (tuple, list)) and len(order) <= MAX_SIZES else ()
    pairs = [each.args for each in entries if isinstance(each, PickledInstance) and len(each.args) == 2]
    return {dimension: [*(sizes_of(cut) or ())] for dimension, cut in pairs if type(dimension) is int}


def _class(value: Any) -> str:
    """The name of a class, or of that of an instance, without its module."""
    return str(getattr(value, "name", "")).rpartition(".")[2]


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an instance, or in a state."""
    return value.fields if isinstance(value, PickledInstance) else named(value)
