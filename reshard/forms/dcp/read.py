"""Reading distributed checkpoints of PyTorch from their metadata alone, for any number of ranks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

from reshard.checkpoints.checkpoint import StoredObject
from reshard.checkpoints.formats.dtypes import ARCHIVES
from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.checkpoints.placed import Placement, Stored
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError, one_error
from reshard.forms.dcp.form import (
    DCP,
    ENDING,
    ITERATIONS,
    METADATA,
    OF_HYPER_RANK,
    OF_RANK,
    iterations,
    kind_of_directory,
)
from reshard.forms.dcp.metadata import ReadMetadata, Record, read_metadata
from reshard.forms.form import ReadRequest
from reshard.forms.recorded import Chunk, ChunkedCheckpoint, ChunkedTensor, chunked_checkpoint, sizes_of_files
from reshard.forms.tracker import HOW_TO_CHOOSE, TRACKER, Iteration
from reshard.storage import names_in, status_of_each
from reshard.text.messages import Report, quoted, some_names
from reshard.text.names import natural_order

COMMON = "common.pt"
"""Megatron's file of objects."""

BACKEND = "metadata.json"
"""Megatron's file that names the library that it was saved with."""

_HINT = "copy the checkpoint again, or take another step"


def choose(src: str, step: str, report: Report) -> Iteration:
    """The directory of the requested step: the source, or one of its iterations."""
    names = names_in(src)
    if kind_of_directory(names) is not None:
        return ITERATIONS.of_directory(src, step, report)
    chosen = ITERATIONS.choose(src, iterations(src, names), step, report)
    if len(chosen) != 1:
        raise CheckpointError(
            f"{src}: {TRACKER} names no iteration, and there are {len(chosen)}", file=src, hint=HOW_TO_CHOOSE
        )
    return chosen[0]


def read_distributed(form: str, reading: ReadRequest) -> ChunkedCheckpoint:
    iteration = choose(reading.path, reading.step, reading.report)
    directory = iteration.path
    names = names_in(directory)
    metadata = read_metadata(_metadata_of(form, directory, names))
    files = _Files(directory, metadata, reading)
    checkpoint = chunked_checkpoint(
        form, directory, files.indexes, files.tensors(), {**metadata.faults, **files.faults}, _HINT
    )
    checkpoint.objects = {**files.objects(), **_common(directory, names)}
    checkpoint.nested = metadata.nested
    checkpoint.step = None if iteration.number is None else str(iteration.number)
    checkpoint.label = iteration.label
    if reading.complete:
        checkpoint.check(reading.required)
    return checkpoint


def _common(directory: str, names: Sequence[str]) -> dict[str, StoredObject]:
    """Megatron's file of objects, as one more object."""
    if COMMON not in names:
        return {}
    path = os.path.join(directory, COMMON)
    (status,) = status_of_each([path])
    return {} if status is None else {COMMON: StoredObject(path, 0, status.size, True)}


def _metadata_of(form: str, directory: str, names: Sequence[str]) -> list[str]:
    if METADATA in names:
        return [os.path.join(directory, METADATA)]
    pattern = OF_RANK if form == DCP else OF_HYPER_RANK
    numbered: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            numbered[int(next(filter(None, match.groups())))] = name
    missing = [str(rank) for rank in range(max(numbered, default=-1) + 1) if rank not in numbered][:8]
    if not numbered or missing:
        subject = (
            f"the metadata of ranks {some_names(missing)} is" if numbered else f"{METADATA}, which is written last, is"
        )
        raise CheckpointError(
            f"{directory}: is not complete: {subject} missing",
            file=os.path.join(directory, METADATA),
            hint="wait until the save is finished, or take another checkpoint; `reshard resume "
            f"{shlex.quote(directory)}` completes a conversion",
        )
    return [os.path.join(directory, numbered[rank]) for rank in sorted(numbered)]


class _Files:
    """The files that metadata names.

    Attributes:
        indexes: an index of each, by number, without tensors.
        faults: tensors that cannot be read, and why, by name.
    """

    def __init__(self, directory: str, described: ReadMetadata, reading: ReadRequest) -> None:
        self.faults: dict[str, InputError] = {}
        self._described = described
        chunks_of_file: dict[str, list[tuple[Record, Stored, tuple[int, ...]]]] = {}
        for name, tensor in described.tensors.items():
            if name in described.faults:
                continue
            for offsets, sizes, record in tensor.chunks:
                stored = Stored(name, tensor.dtype, sizes, record.offset, record.length, record.key)
                chunks_of_file.setdefault(record.file, []).append((record, stored, offsets))
        self._names = natural_order(chunks_of_file)
        alone = {record.file for record in described.objects.values()}.difference(self._names)
        self._sizes, problems = sizes_of_files(directory, [*self._names, *sorted(alone)], reading.damaged, _HINT)
        if problems:
            raise one_error(problems, f"{directory} is not complete")
        paths = [os.path.join(directory, name) for name in self._names]
        self._directory = directory
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self.indexes = [CheckpointIndex(path, ARCHIVES, self._sizes[path], {}, archived=True) for path in paths]
        self._tensors: dict[tuple[str, tuple[int, ...], str], Tensor] = {}
        for name, path in zip(self._names, paths):
            problem = self._place(path, chunks_of_file[name], reading)
            if problem is not None:
                problems.append(problem)
        for record in described.objects.values():
            if record.offset + max(0, record.length) > self._sizes[os.path.join(directory, record.file)]:
                problems.append(self._short(os.path.join(directory, record.file), record))
        if problems:
            raise one_error(problems, f"{directory} is not complete")

    def _place(
        self, path: str, chunks: Sequence[tuple[Record, Stored, tuple[int, ...]]], reading: ReadRequest
    ) -> Optional[InputError]:
        """Give the tensors of a file their places; an error where the file is too short, or records overlap."""
        if not chunks:
            return None
        chunks = sorted(chunks, key=lambda each: (each[0].offset, each[0].length, each[0].key))
        records = {record.length >= 0 for record, _, _ in chunks}
        if len(records) > 1:
            return CheckpointError(f"{path}: holds records and a header by its metadata", file=path, hint=_HINT)
        last = max((record for record, _, _ in chunks), key=lambda record: record.offset + record.length)
        if last.length >= 0 and last.offset + last.length > self._sizes[path]:
            return self._short(path, last)
        for (before, first, _), (record, second, _) in zip(chunks, chunks[1:]):
            if record.offset < before.offset + before.length if record.length >= 0 else record.key == before.key:
                return CheckpointError(
                    f"{path}: chunks of {quoted(first.name)} and {quoted(second.name)} share bytes by the metadata",
                    file=path,
                    parameter=second.name,
                    hint=_HINT,
                )
        placement = Placement(path, [stored for _, stored, _ in chunks])
        for (record, stored, offsets), tensor in zip(chunks, placement.tensors()):
            self._tensors[stored.name, offsets, record.file] = tensor
        reading.handles.place(path, placement)
        return None

    def _short(self, path: str, record: Record) -> InputError:
        return DamagedCheckpointError(
            f"{path}: has {self._sizes[path]} bytes, and {record.offset + record.length} by the metadata",
            file=path,
            hint=_HINT,
        )

    def tensors(self) -> Iterator[ChunkedTensor]:
        for name, (dtype, shape, chunks) in self._described.tensors.items():
            if name in self._described.faults or name in self.faults:
                continue
            yield ChunkedTensor(
                name,
                dtype,
                shape,
                [
                    Chunk(offsets, sizes, self._numbers[record.file], self._tensors[name, offsets, record.file])
                    for offsets, sizes, record in chunks
                ],
            )

    def objects(self) -> Mapping[str, StoredObject]:
        objects = {}
        for name, (file, offset, length, _) in self._described.objects.items():
            path = os.path.join(self._directory, file)
            size = self._sizes[path] - offset if length < 0 else length
            objects[name] = StoredObject(path, offset, size, file.endswith(ENDING))
        return objects
