"""Rank files that verl and SkyRL write with ``torch.save``: the model's state dictionary of each rank of FSDP.

A file is one archive, whose pickle lists the rank's tensors. A DTensor in it has the shape of the full tensor, and the
place of the rank in a mesh with a placement for each of its dimensions: these give the box of the rank's part.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import TENSOR_NAMES, Archive, Elements, plain_tensor
from reshard.checkpoints.formats.dtypes import ARCHIVES
from reshard.checkpoints.formats.pickles import PickledInstance, among, named, sizes_of
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.checkpoints.placed import Placement, Stored
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError, one_error
from reshard.forms.full.form import OF_VERL, extra_files_in, file_names
from reshard.forms.pytorch.form import VERL_FILE
from reshard.forms.recorded import (
    Chunk,
    ChunkedCheckpoint,
    ChunkedTensor,
    ProblemError,
    chunked_checkpoint,
    tensor_fault,
)
from reshard.forms.request import Means, Request
from reshard.storage import for_each, is_directory, names_in, reading
from reshard.text.messages import Report, listing, number_ranges, plural
from reshard.text.names import layers_in_order

_REBUILD_TYPE, _WRAPPER = "torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"
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
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    mesh_size: int
    elements: Elements


def part_of(archive: Archive, value: Any) -> RankPart | None:
    """The part of a tensor that a value of a state dictionary is; None for a value that is no tensor.

    Raises:
        ProblemError: nothing records which part it is, or in a way that is not read.
        DamagedCheckpointError: the archive is damaged.
    """
    if not isinstance(value, PickledInstance):
        return None
    value = plain_tensor(value)
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
        raise ProblemError("has a mesh or placements that are not read")
    if coordinates is None:
        return RankPart(shape, None, elements.shape, math.prod(mesh_shape), elements)
    coordinates = sizes_of(coordinates)
    if (
        coordinates is None
        or len(coordinates) != len(mesh_shape)
        or not all(at < size for at, size in zip(coordinates, mesh_shape))
    ):
        raise ProblemError("does not record the place of its rank in the mesh")
    offsets, sizes = [0] * len(shape), list(shape)
    order = spec.get("shard_order")
    for dimension, mesh_dimensions in _cuts(placements, mesh_shape, len(shape), order).items():
        strided = any(_class(placements[number]) == _STRIDED for number in mesh_dimensions)
        count = math.prod(mesh_shape[number] for number in mesh_dimensions)
        if strided and len(mesh_dimensions) > 2 and shape[dimension] % count:
            # Cut one after the other, and joined as placements describe it, such parts are different ones.
            raise ProblemError(f"of shape {list(shape)} has uneven strided parts of several cuts, which are not read")
        for number in mesh_dimensions:
            # Parts of one size, as torch.chunk makes them: the last ones are smaller or empty.
            part = -(-sizes[dimension] // mesh_shape[number])
            start = min(part * coordinates[number], sizes[dimension])
            offsets[dimension] += start
            sizes[dimension] = min(part, sizes[dimension] - start)
    if elements.shape != tuple(sizes) and not (0 in elements.shape and 0 in sizes):
        raise ProblemError(
            f"of shape {list(shape)} has a part of shape {list(elements.shape)}, and one of {sizes} by its placement"
        )
    return RankPart(shape, tuple(offsets), tuple(sizes), math.prod(mesh_shape), elements)


def _wrapped(value: PickledInstance) -> tuple[tuple[int, ...] | None, dict[str, Any]]:
    args = value.args
    wrapper = args[2] if len(args) > 3 and isinstance(args[2], tuple) and len(args[2]) > 2 else (None,)
    if args and getattr(args[0], "name", None) == _WRAPPER and _class(wrapper[0]) == _TENSOR:
        return sizes_of(wrapper[2]), _fields(args[3])
    raise ProblemError("is a tensor of a class that is not read")


def _mesh_shape(mesh: Mapping[str, Any]) -> tuple[int, ...] | None:
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


def _axis_size(shape: Any) -> int | None:
    """The ranks along a dimension of a mesh, which may be several joined ones."""
    sizes = sizes_of((shape,) if isinstance(shape, int) else shape)
    return None if sizes is None else math.prod(sizes)


def _cuts(placements: Sequence[Any], mesh_shape: Sequence[int], dimensions: int, order: Any) -> dict[int, list[int]]:
    """Per dimension of a tensor the dimensions of the mesh that cut it, the first cut first.

    Raises:
        ProblemError: it is placed otherwise.
    """
    cuts: dict[int, list[int]] = {}
    # From the last one on, as a strided part is cut after others to its right, in as many parts as it records.
    for number in reversed(range(len(placements))):
        kind, fields = _class(placements[number]), _fields(placements[number])
        if kind == _REPLICATE:
            continue
        dimension = fields.get("dim")
        if kind not in (_SHARD, _STRIDED) or type(dimension) is not int or not 0 <= dimension < dimensions:
            raise ProblemError(f"has the placement {kind or 'of no name'}, which is not read")
        cut = cuts.setdefault(dimension, [])
        part_counts = [math.prod(mesh_shape[each] for each in cut[:count]) for count in range(len(cut) + 1)]
        parts = fields.get("split_factor") if kind == _STRIDED else 1
        if parts not in part_counts or (kind == _STRIDED and order):
            raise ProblemError("has a strided placement that is not read")
        cut.insert(part_counts.index(parts), number)
    if order:
        recorded = _recorded_order(order)
        if {dimension: sorted(cut) for dimension, cut in recorded.items()} != cuts:
            raise ProblemError("has an order of its cuts that contradicts its placements")
        return recorded
    return cuts


def _recorded_order(order: Any) -> dict[int, list[int]]:
    """The same as `_cuts`, as newer versions of torch record it; empty for anything else."""
    entries = order if isinstance(order, (tuple, list)) else ()
    pairs = [each.args for each in entries if isinstance(each, PickledInstance) and len(each.args) == 2]
    return {dimension: [*(sizes_of(cut) or ())] for dimension, cut in pairs if type(dimension) is int}


def _class(value: Any) -> str:
    """The name of a class, or of that of an instance, without its module."""
    return str(getattr(value, "name", "")).rpartition(".")[2]


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an instance, or in a state."""
    return value.fields if isinstance(value, PickledInstance) else named(value)


_MODEL_NAME = "model_world_size_{}_rank_{}.pt"
_OTHER_STATE = re.compile(r"(optim|extra_state)_world_size_[0-9]+_rank_[0-9]+\.pt")
_HINT = "copy the files of one save again"
_FSDP1 = "torch.distributed._shard.sharded_tensor."


def read_ranks(form: str, request: Request, means: Means) -> ChunkedCheckpoint:
    directory = request.src
    if not is_directory(directory):
        raise CheckpointError(
            f"{directory}: is one rank's file of several",
            file=directory,
            hint=f"give the directory as SRC: {os.path.dirname(directory) or os.curdir}",
        )
    names = names_in(directory)
    world, paths, problems = _files_of_ranks(directory, names, request.damaged)
    unread = [name for name in names if _OTHER_STATE.fullmatch(name)]
    if unread:
        means.report.note(f"{directory}: optimizer and other state is not read: {file_names(unread)}")
    results = for_each(lambda path: _read_rank(path, means.handles), paths)
    files = [result for result in results if isinstance(result, _RankFile)]
    problems += [result for result in results if not isinstance(result, _RankFile)]
    lacking = one_error(problems, f"{directory} is not complete") if problems else None
    if not files and lacking is not None:
        raise lacking
    for file in files:
        means.handles.place(file.header.path, file.placement)
    tensors, faults = _tensors(files, world, means.report)
    checkpoint = chunked_checkpoint(form, directory, [file.header for file in files], tensors, faults, _HINT)
    beside = os.path.join(directory, OF_VERL)
    if OF_VERL in names and is_directory(beside):
        extra_files = extra_files_in(beside, names_in(beside), ())
        checkpoint.extra_files = tuple(os.path.join(OF_VERL, name) for name in extra_files)
    if lacking is not None and any(map(request.required, checkpoint.faults)):
        raise lacking
    checkpoint.check(request.required)
    if lacking is not None:
        means.report.warn(f"{lacking.message}; replicas in other files are read")
    return checkpoint


def _files_of_ranks(
    directory: str, names: Sequence[str], damaged: Mapping[str, str]
) -> tuple[int, list[str], list[InputError]]:
    """The number of ranks that saved, their files, and why others are not read."""
    matches = [match for match in map(VERL_FILE.fullmatch, names) if match]
    worlds = sorted({int(match[1]) for match in matches})
    paths = {int(match[2]): os.path.join(directory, match[0]) for match in matches}
    world, last = worlds[0], max(paths)
    if worlds[1:] or last >= world:
        saves = f"saves of {' and '.join(map(str, worlds))} ranks"
        raise CheckpointError(
            f"{directory}: holds " + (saves if worlds[1:] else f"a file of rank {last} in a save of {world} ranks"),
            file=directory,
            hint="move the files of other saves to another directory",
        )
    problems: list[InputError] = []
    missing = [rank for rank in range(world) if rank not in paths]
    if missing:
        text = f"{plural(len(missing), 'file')} of {world} missing: {_MODEL_NAME.format(world, missing[0])}"
        more = f" and those of ranks {number_ranges(missing[1:])}" if missing[1:] else ""
        problems.append(CheckpointError(f"{directory}: {text}{more}", file=directory, hint=_HINT))
    problems += [DamagedCheckpointError(text, file=path, hint=_HINT) for path, text in damaged.items()]
    return world, [paths[rank] for rank in sorted(paths) if paths[rank] not in damaged], problems


class _RankFile(NamedTuple):
    """The file of a rank.

    Attributes:
        header: its tensors.
        placement: their places.
        parts: the part of each tensor, or why it is not read; None for a value that is no tensor.
    """

    header: CheckpointIndex
    placement: Placement
    parts: Mapping[str, RankPart | ProblemError | None]


def _read_rank(path: str, handles: FileHandles) -> _RankFile | DamagedCheckpointError:
    """The tensors of a rank, or why its file is damaged."""
    parts: dict[str, RankPart | ProblemError | None] = {}
    with reading(path), contextlib.closing(handles.open_file(path)) as file:
        size = file.size()
        try:
            archive = Archive(file, 0, size)
            state = archive.pickled(lambda name: _is_allowed(path, name))
            if not isinstance(state, dict):
                return DamagedCheckpointError(f"{path}: holds no dictionary of tensors", file=path, hint=_HINT)
            if not all(isinstance(name, str) for name in state):
                return DamagedCheckpointError(f"{path}: has a tensor whose name is no text", file=path, hint=_HINT)
            for name, value in state.items():
                try:
                    parts[name] = part_of(archive, value)
                except ProblemError as error:
                    parts[name] = error
        except DamagedCheckpointError as error:
            return DamagedCheckpointError(error.message, file=path, hint=_HINT)
    stored = {name: part for name, part in parts.items() if isinstance(part, RankPart)}
    placement = Placement(
        path,
        [Stored(name, part.elements.dtype, part.sizes) for name, part in stored.items()],
        [part.elements for part in stored.values()],
    )
    tensors = {tensor.name: tensor for tensor in placement.tensors()}
    return _RankFile(CheckpointIndex(path, ARCHIVES, size, tensors, archived=True), placement, parts)


def _is_allowed(path: str, name: str) -> bool:
    if name.startswith(_FSDP1):
        raise CheckpointError(
            f"{path}: holds tensors of FSDP1 (ShardedTensor), which are not read",
            file=path,
            hint="load it in the same job and save it with torch.distributed.checkpoint; or train with a device mesh, "
            "FSDP(model, device_mesh=...), or with FSDP2",
        )
    return is_read(name)


def _tensors(
    files: Sequence[_RankFile], world: int, report: Report
) -> tuple[list[ChunkedTensor], dict[str, InputError]]:
    """Every tensor with the parts of it in the files of ranks, and why some cannot be read."""
    tensors: list[ChunkedTensor] = []
    faults: dict[str, InputError] = {}
    others: list[str] = []
    for name in layers_in_order(dict.fromkeys(name for file in files for name in file.parts)):
        if all(name in file.parts and file.parts[name] is None for file in files):
            others.append(name)
            continue
        parts: list[RankPart] = []
        by_offsets: dict[tuple[int, ...] | None, RankPart] = {}
        for file in files:
            part = file.parts.get(name)
            problem = _problem(part, parts[0] if parts else None, by_offsets, world, len(files) < world)
            if problem is not None or not isinstance(part, RankPart):
                faults[name] = tensor_fault(file.header.path, name, problem or "", "take the files of one save")
                break
            parts.append(part)
            by_offsets.setdefault(part.offsets, part)
        else:
            chunks = [
                Chunk(part.offsets, part.sizes, number) for number, part in enumerate(parts) if part.offsets is not None
            ]
            tensors.append(ChunkedTensor(name, parts[0].elements.dtype, parts[0].shape, chunks))
    if others:
        report.note(f"{plural(len(others), 'value')} other than tensors skipped: " + listing(others))
    return tensors, faults


def _problem(
    part: RankPart | ProblemError | None,
    first: RankPart | None,
    by_offsets: Mapping[tuple[int, ...] | None, RankPart],
    world: int,
    missing: bool,
) -> str | None:
    """Why a part is not read; None if it is.

    Args:
        part: the part.
        first: a part of the same tensor in the file of another rank, if any.
        by_offsets: all such parts.
        world: the number of ranks that saved.
        missing: the file of one of them is not read.
    """
    if isinstance(part, ProblemError):
        return str(part)
    if part is None:
        return "is missing or no tensor, and is a tensor in the file of another rank"
    description, first_description = (
        f"{each.elements.dtype} {list(each.shape)} over {plural(each.mesh_size, 'rank')}"
        for each in (part, first or part)
    )
    if description != first_description:
        return f"is {description} here, and {first_description} in the file of another rank"
    if part.mesh_size >= world or not math.prod(part.sizes):
        return None
    # Ranks outside of the mesh hold replicas, or other experts or stages under the same names.
    over = f"is laid out over {plural(part.mesh_size, 'rank')} of {world}, and "
    if missing:
        return over + "a file that may hold other values of it is missing"
    copy = by_offsets.get(part.offsets)
    if copy is None:
        return None
    (crc, *place), other = _evidence(part), _evidence(copy)
    if crc and [crc, *place] == other:
        return None
    if not crc:
        return over + "without checksums in the files nothing shows that the others hold the same values"
    return over + "the others hold different values of it, which nothing places"


def _evidence(part: RankPart) -> list[object]:
    """The recorded CRC of the bytes around the elements, and where they lie in these."""
    entry = part.elements.entry
    return [entry.crc, part.elements.offset - entry.offset, entry.size, part.elements.strides]
