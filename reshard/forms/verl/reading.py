"""Reading verl's rank files."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import Archive
from reshard.checkpoints.formats.dtypes import ARCHIVES
from reshard.checkpoints.formats.tensors import CheckpointIndex, check_shape
from reshard.checkpoints.placed import Placement, Stored
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError, one_error
from reshard.forms.chunks import Chunk, ChunkedCheckpoint, ChunkedTensor, chunked_checkpoint
from reshard.forms.form import ReadRequest
from reshard.forms.full.directory import extra_files_in, file_names
from reshard.forms.verl.dtensors import PlacementError, RankPart, is_read, part_of
from reshard.forms.verl.form import MODEL
from reshard.storage import for_each, is_directory, names_in, reading
from reshard.text.messages import Report, as_pattern, listing, number_ranges, plural, quoted
from reshard.text.names import layers_in_order

_MODEL_NAME = "model_world_size_{}_rank_{}.pt"
_OTHER_STATE = re.compile(r"(optim|extra_state)_world_size_[0-9]+_rank_[0-9]+\.pt")
_BESIDE = "huggingface"
_HINT = "copy the files of one save again"
_FSDP1 = "torch.distributed._shard.sharded_tensor."


def read_ranks(form: str, request: ReadRequest) -> ChunkedCheckpoint:
    """Read a directory of rank files; see `VerlForm.read`."""
    directory = request.path
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
        request.report.note(f"{directory}: optimizer and other state is not read: {file_names(unread)}")
    results = for_each(lambda path: _read_rank(path, request.handles), paths)
    files = [result for result in results if isinstance(result, _RankFile)]
    problems += [result for result in results if not isinstance(result, _RankFile)]
    lacking = one_error(problems, f"{directory} is not complete") if problems else None
    if not files and lacking is not None:
        raise lacking
    for file in files:
        request.handles.place(file.header.path, file.placement)
    tensors, faults = _tensors(files, world, request.report)
    checkpoint = chunked_checkpoint(form, directory, [file.header for file in files], tensors, faults, _HINT)
    beside = os.path.join(directory, _BESIDE)
    if _BESIDE in names and is_directory(beside):
        extra_files = extra_files_in(beside, names_in(beside), ())
        checkpoint.extra_files = tuple(os.path.join(_BESIDE, name) for name in extra_files)
    if request.complete:
        if lacking is not None and any(map(request.required, checkpoint.faults)):
            raise lacking
        checkpoint.check(request.required)
    if lacking is not None:
        request.report.warn(f"{lacking.message}; replicas in other files are read")
    return checkpoint


def _files_of_ranks(
    directory: str, names: Sequence[str], damaged: Mapping[str, str]
) -> tuple[int, list[str], list[InputError]]:
    """The number of ranks that saved, their files, and why others are not read.

    Raises:
        CheckpointError: the files are of several saves.
    """
    matches = [match for match in map(MODEL.fullmatch, names) if match]
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
    parts: Mapping[str, Union[RankPart, PlacementError, None]]


def _read_rank(path: str, handles: FileHandles) -> Union[_RankFile, DamagedCheckpointError]:
    """The tensors of a rank, or why its file is damaged.

    Raises:
        ReshardError: it cannot be read.
    """
    parts: dict[str, Union[RankPart, PlacementError, None]] = {}
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
                    parts[name] = part = part_of(archive, value)
                    if part is not None:
                        check_shape(path, name, part.shape)
                except PlacementError as error:
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
    """Whether a pickle may name a class or function.

    Raises:
        CheckpointError: it is FSDP1's.
    """
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
        by_offsets: dict[Optional[tuple[int, ...]], RankPart] = {}
        for file in files:
            part = file.parts.get(name)
            problem = _problem(part, parts[0] if parts else None, by_offsets, world, len(files) < world)
            if problem is not None or not isinstance(part, RankPart):
                faults[name] = CheckpointError(
                    f"{file.header.path}: {quoted(name)} {problem}",
                    file=file.header.path,
                    parameter=name,
                    hint=f"take the files of one save, or leave it out with --exclude {as_pattern(name)}",
                )
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
    part: Union[RankPart, PlacementError, None],
    first: Optional[RankPart],
    by_offsets: Mapping[Optional[tuple[int, ...]], RankPart],
    world: int,
    missing: bool,
) -> Optional[str]:
    """Why a part is not read; None if it is.

    Args:
        part: the part.
        first: of the same tensor in the file of another rank, if any.
        by_offsets: such parts by their offsets.
        world: the number of ranks that saved.
        missing: whether the file of one is not read.
    """
    if isinstance(part, PlacementError):
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
