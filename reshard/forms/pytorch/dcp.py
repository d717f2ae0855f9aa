"""Reading distributed checkpoints from their metadata alone, for any number of ranks.

Torch DCP, as FSDP2 and Megatron write it, and hyper-parallel's form. Metadata is a pickle, ``.metadata``, or one for
each rank. It lists every tensor with its chunks, and for each chunk the file and the record that holds it. It is read
as data: no class of it is imported and nothing of it is run.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import StoredObject
from reshard.checkpoints.formats.dtypes import ARCHIVES, FROM_TORCH, dtype_named
from reshard.checkpoints.formats.pickles import (
    MAX_PICKLE,
    Global,
    PickledInstance,
    PickleError,
    among,
    read_pickle,
    sizes_of,
)
from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.checkpoints.placed import Placement, Run, Stored
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError, one_error
from reshard.forms.pytorch.form import (
    COMMON,
    ENDING,
    HYPER_PARALLEL,
    ITERATIONS,
    METADATA,
    OF_HYPER_RANK,
    OF_RANK,
    kind_of_directory,
)
from reshard.forms.recorded import (
    Chunk,
    ChunkedCheckpoint,
    ChunkedTensor,
    chunked_checkpoint,
    sizes_of_files,
    tensor_fault,
)
from reshard.forms.request import Means, Request
from reshard.forms.tracker import Iteration, target_above
from reshard.storage import names_in, read_small, reading, status_at
from reshard.text.messages import Report, quoted, some_names
from reshard.text.names import natural_order

TORCH = "torch.distributed.checkpoint."
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch."
_HYPER_NOW, _HYPER_BEFORE = "hyper_parallel.core.distributed_checkpoint.", "hyper_parallel.core.checkpoint."
HYPER = _HYPER_NOW

_DESCRIBING = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "TensorProperties",
)
# Types of torch without an equivalent here: their tensors are refused, and can be left out.
_OTHER_TYPES = frozenset(
    f"torch.{name}"
    for name in (
        *("complex32", "float4_e2m1fn_x2", "qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    )
)
# Classes whose instances are read as data. Those of plans are ignored.
NAMES = frozenset(
    {
        *(f"{TORCH}metadata.{name}" for name in (*_DESCRIBING, "StorageMeta", "_MEM_FORMAT_ENCODING")),
        f"{TORCH}filesystem._StorageInfo",
        *(
            f"{TORCH}planner.{name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        f"{_SHARDED}TensorProperties",
        f"{_SHARDED}MEM_FORMAT_ENCODING",
        f"{_MEGATRON}MCoreMetadata",
        f"{_MEGATRON}MCoreSavePlan",
        *(f"{room}metadata.{name}" for room in (_HYPER_NOW, _HYPER_BEFORE) for name in _DESCRIBING),
        *(f"{room}storage.StorageInfo" for room in (_HYPER_NOW, _HYPER_BEFORE)),
        *FROM_TORCH,
        *_OTHER_TYPES,
        "torch.serialization._get_layout",
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ),
    }
)
# The shape of a tensor whose blocks are flattened.
_TRUE_SHAPE = "nd_reformulated_orig_global_shape"
_ABSOLUTE = re.compile(r"/|\\|[A-Za-z][A-Za-z0-9+.-]*:")
_HINT = "copy the checkpoint again, or take another step"


class Record(NamedTuple):
    """Where a chunk or an object is stored.

    Attributes:
        file: relative to the directory.
        offset: first byte; 0 where the file has a header of its own.
        length: bytes; -1 where the file has a header of its own.
        key: the name in that header.
    """

    file: str
    offset: int
    length: int
    key: str


class DescribedChunk(NamedTuple):
    """A box of a tensor and its record; or the runs of records that it is joined from, and their strides.

    Of joined ones, ``record`` names the file only that counts as theirs; see `joined_chunk`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    record: Record
    runs: tuple[Run, ...] = ()
    strides: tuple[int, ...] | None = None


def joined_chunk(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    runs: Sequence[Run],
    directory: str,
    strides: tuple[int, ...] | None = None,
) -> DescribedChunk:
    """The chunk that is joined from runs of records in files of a directory; see `Stored`."""
    file = os.path.relpath(runs[0].path, directory)
    return DescribedChunk(offsets, sizes, Record(file, 0, -1, ""), tuple(runs), strides)


def run_of(chunk: DescribedChunk, directory: str) -> Run:
    """All elements of a chunk as a run of its record."""
    file, offset, length, _ = chunk.record
    return Run(os.path.join(directory, file), offset, length, 0, math.prod(chunk.sizes))


class DescribedTensor(NamedTuple):
    """A tensor; ``dtype`` is MindSpore's name, ``shape`` that of the whole."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[DescribedChunk]


class StoredValue(NamedTuple):
    """A value that a file holds in a pickle, with its bytes."""

    path: str
    stored: Stored


class ReadMetadata(NamedTuple):
    """The contents of metadata.

    Attributes:
        tensors: per name a tensor.
        objects: per name the record of what is no tensor.
        nested: per name the keys of nested dictionaries, where they are recorded.
        faults: per name the error of a tensor that cannot be read.
        flattened: per name the true shape of a tensor whose last dimension is blocks of it, flattened, and whose
            others count these blocks, as Megatron saves optimizer state.
    """

    tensors: dict[str, DescribedTensor]
    objects: dict[str, Record]
    nested: dict[str, tuple[Any, ...]]
    faults: dict[str, InputError]
    flattened: dict[str, tuple[int, ...]]

    def fault(self, path: str, name: str, problem: str, cure: str = "") -> None:
        """Make a tensor unreadable; the first reason counts."""
        self.faults.setdefault(name, tensor_fault(path, name, problem, cure))


def read_metadata(paths: Sequence[str]) -> ReadMetadata:
    """Read metadata: one file of all ranks, or one for each rank."""
    metadata = ReadMetadata({}, {}, {}, {}, {})
    for path in paths:
        with reading(path):
            data = read_small(path, MAX_PICKLE)
        try:
            pickled = read_pickle(data, among(NAMES))
        except PickleError as error:
            raise CheckpointError(f"{path}: {error}", file=path, hint=_HINT) from error
        _Reader(path, metadata).add(pickled)
    _check_records(os.path.dirname(paths[0]), metadata)
    return metadata


def _check_records(directory: str, metadata: ReadMetadata) -> None:
    """See that no two chunks have the same bytes, as after a flipped bit in a reference of the pickle."""
    by_file: dict[str, list[tuple[Record, str]]] = {}
    for name, tensor in metadata.tensors.items():
        for chunk in tensor.chunks if name not in metadata.faults else ():
            by_file.setdefault(chunk.record.file, []).append((chunk.record, name))
    for file, records in by_file.items():
        records.sort(key=lambda each: (each[0].offset, each[0].length, each[0].key))
        for (before, first), (record, second) in itertools.pairwise(records):
            if record.offset < before.offset + before.length if record.length >= 0 else record.key == before.key:
                path = os.path.join(directory, file)
                raise CheckpointError(
                    f"{path}: chunks of {quoted(first)} and {quoted(second)} share bytes by the metadata",
                    file=path,
                    parameter=second,
                    hint=_HINT,
                )


class _Reader:
    """Adds the contents of one file of metadata."""

    def __init__(self, path: str, metadata: ReadMetadata) -> None:
        self._path = path
        self._metadata = metadata

    def add(self, pickled: Any) -> None:
        if not isinstance(pickled, PickledInstance) or pickled.name.rpartition(".")[2] not in (
            "Metadata",
            "MCoreMetadata",
        ):
            self._wrong("holds no metadata of a distributed checkpoint")
        fields = pickled.fields
        described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
        if not isinstance(described, dict) or not isinstance(stored, dict) or described is stored:
            self._wrong("lists no tensors")
        records = self._records(stored)
        # They take half of the memory of metadata.
        stored.clear()
        for name, value in described.items():
            if not isinstance(name, str) or not isinstance(value, PickledInstance):
                self._wrong("lists an entry that is neither a tensor nor an object")
            if value.name.endswith(".BytesStorageMetadata"):
                self._add_object(name, records)
            else:
                self._add_tensor(name, value, records)
        if records:
            name, offset = next(iter(records))
            where = "" if offset is None else f" at {list(offset)}"
            self._wrong(f"has a record of {quoted(name)}{where} that belongs to no tensor")
        nested = fields.get("planner_data")
        if isinstance(nested, dict):
            for name, keys in nested.items():
                if isinstance(name, str) and _are_keys(keys):
                    self._metadata.nested.setdefault(name, keys)
        reshaped = fields.get("mcore_data")
        for name, about in reshaped.items() if isinstance(reshaped, dict) else ():
            # Core 0.14 has an entry for every tensor, without contents for ordinary ones.
            if not about or name not in self._metadata.tensors:
                continue
            shape = sizes_of(about.get(_TRUE_SHAPE)) if isinstance(about, dict) and len(about) == 1 else None
            if shape is None:
                self._fault(name, "is stored in a way that is not read")
            else:
                self._metadata.flattened[name] = shape

    def _records(self, stored: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Record]:
        """Where everything is, by name and offsets; None for an object."""
        records: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, info in stored.items():
            if not isinstance(index, PickledInstance) or not isinstance(info, PickledInstance):
                self._wrong("its list of records is none")
            name, starts = index.fields.get("fqn"), index.fields.get("offset")
            offset = sizes_of(starts)
            if not isinstance(name, str) or (starts is not None and offset is None):
                self._wrong("has a record of no tensor")
            where = info.fields
            file, first, length = where.get("relative_path"), where.get("offset"), where.get("length")
            in_file = sizes_of((first, 0 if length == -1 else length))
            if not isinstance(file, str) or in_file is None:
                self._wrong(f"does not record where {quoted(name)} is stored")
            if not file or "\0" in file or _ABSOLUTE.match(file) or ".." in re.split(r"[/\\]", file):
                self._wrong(f"names the file {quoted(file)}, which does not lie in its directory")
            if where.get("transform_descriptors"):
                extensions = str(where["transform_descriptors"])[:80]
                self._fault(name, f"is stored through extensions of torch ({extensions}), which are not read")
            key = where.get("tensor_key")
            place = (name, offset)
            count = -1 if length == -1 else in_file[1]
            record = Record(file, in_file[0], count, key if isinstance(key, str) else name)
            if records.setdefault(place, record) != record:
                self._wrong(f"has two records of {quoted(name)} for the same elements")
        return records

    def _add_object(self, name: str, records: dict[tuple[str, tuple[int, ...] | None], Record]) -> None:
        record = records.pop((name, None), None) or records.pop((name, ()), None)
        if record is None:
            self._wrong(f"does not record where the object {quoted(name)} is stored")
        if name in self._metadata.tensors:
            self._fault(name, "is a tensor for one rank and an object for another")
        self._metadata.objects.setdefault(name, record)

    def _add_tensor(
        self, name: str, value: PickledInstance, records: dict[tuple[str, tuple[int, ...] | None], Record]
    ) -> None:
        fields = value.fields
        shape, chunks = sizes_of(fields.get("size")), fields.get("chunks")
        dtype = _dtype(fields.get("properties"))
        if shape is None or not isinstance(chunks, (list, tuple)):
            self._wrong(f"does not record shape and chunks of {quoted(name)}")
        described: list[DescribedChunk] = []
        met: set[tuple[int, ...]] = set()
        for chunk in chunks:
            box = chunk.fields if isinstance(chunk, PickledInstance) else {}
            offsets, sizes = sizes_of(box.get("offsets")), sizes_of(box.get("sizes"))
            if offsets is None or sizes is None:
                self._wrong(f"has a chunk of {quoted(name)} without offsets or sizes")
            # Sizes of some lack the dimensions before those of a layer.
            sizes = (*(1,) * (len(offsets) - len(sizes)), *sizes)
            if offsets in met:
                continue
            met.add(offsets)
            record = records.pop((name, offsets), None)
            if record is None:
                self._fault(name, f"has a chunk at {list(offsets)} without a record of where it is stored")
                continue
            described.append(DescribedChunk(offsets, sizes, record))
        if dtype is None:
            self._fault(name, "has elements of an unsupported type")
            return
        recorded = self._metadata.tensors.setdefault(name, DescribedTensor(dtype, shape, []))
        if recorded.dtype != dtype or recorded.shape != shape or name in self._metadata.objects:
            self._fault(name, "has another type or shape for one rank than for another")
            return
        recorded.chunks.extend(described)

    def _wrong(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {problem}", file=self._path, hint=_HINT)

    def _fault(self, name: str, problem: str) -> None:
        self._metadata.fault(self._path, name, problem)


def _are_keys(keys: Any) -> bool:
    return isinstance(keys, tuple) and all(type(key) in (str, int) for key in keys)


def _dtype(properties: Any) -> str | None:
    if not isinstance(properties, PickledInstance):
        return None
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.fields.get("dtype")
    if isinstance(dtype, Global):
        return FROM_TORCH.get(dtype.name)
    return (FROM_TORCH.get(dtype) or dtype_named(dtype)) if isinstance(dtype, str) else None


def choose(src: str, step: str, report: Report) -> Iteration:
    """The directory of the requested step: the source, or one of its iterations."""
    return ITERATIONS.find(src, lambda _, names: kind_of_directory(names) is not None, step, report)


def read_distributed(form: str, request: Request, means: Means) -> ChunkedCheckpoint:
    iteration = choose(request.src, request.asked.source.step, means.report)
    directory = iteration.path
    metadata = read_metadata(_metadata_of(form, directory, names_in(directory)))
    for name in metadata.flattened:
        metadata.fault(
            directory,
            name,
            "is optimizer state that Megatron flattened in blocks, which are no slices of it",
            "write it as Megatron's of today with --to megatron, leave all of it out with --exclude 'optimizer.*'",
        )
    checkpoint = checkpoint_of(form, iteration, metadata, request, means)
    checkpoint.check(request.required)
    return checkpoint


def checkpoint_of(
    form: str,
    iteration: Iteration,
    metadata: ReadMetadata,
    request: Request,
    means: Means,
    values: Sequence[StoredValue] = (),
) -> ChunkedCheckpoint:
    """The checkpoint that metadata describes, complete or not, with values that files hold in pickles."""
    directory = iteration.path
    files = _Files(directory, metadata, request.damaged, means.handles, values)
    checkpoint = chunked_checkpoint(
        form, directory, files.indexes, files.tensors(), {**metadata.faults, **files.faults}, _HINT
    )
    checkpoint.objects = {**files.objects(), **_common(directory, names_in(directory))}
    checkpoint.nested = metadata.nested
    checkpoint.step = iteration.step
    checkpoint.label = iteration.label
    return checkpoint


def _common(directory: str, names: Sequence[str]) -> dict[str, StoredObject]:
    """Megatron's file of objects, as one more object."""
    if COMMON not in names:
        return {}
    path = os.path.join(directory, COMMON)
    status = status_at(path)
    return {} if status is None else {COMMON: StoredObject(path, 0, status.size, True)}


def incomplete(directory: str, name: str, problem: str) -> CheckpointError:
    """The error of a directory without a file that is written last."""
    return CheckpointError(
        f"{directory}: is not complete: {problem}",
        file=os.path.join(directory, name),
        hint="wait until the save is finished, or take another checkpoint; `reshard resume "
        f"{shlex.quote(target_above(directory))}` completes a conversion",
    )


def _metadata_of(form: str, directory: str, names: Sequence[str]) -> list[str]:
    if METADATA in names:
        return [os.path.join(directory, METADATA)]
    pattern = OF_HYPER_RANK if form == HYPER_PARALLEL else OF_RANK
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
        raise incomplete(directory, METADATA, f"{subject} missing")
    return [os.path.join(directory, numbered[rank]) for rank in sorted(numbered)]


def _is_record(stored: Stored) -> bool:
    """Whether a file holds a tensor as one record, or under a name in its header."""
    return stored.data is None and not stored.runs


class _Files:
    """The files that metadata names.

    Attributes:
        indexes: an index of each, by number, without tensors.
        faults: tensors that cannot be read, and why, by name.
    """

    def __init__(
        self,
        directory: str,
        described: ReadMetadata,
        damaged: Mapping[str, str],
        handles: FileHandles,
        values: Sequence[StoredValue],
    ) -> None:
        self.faults: dict[str, InputError] = {}
        self._described = described
        stored_of_file: dict[str, list[tuple[Stored, tuple[int, ...]]]] = {}
        for name, tensor in described.tensors.items():
            if name in described.faults:
                continue
            for offsets, sizes, record, runs, strides in tensor.chunks:
                file, first, length, key = record
                stored = Stored(name, tensor.dtype, sizes, first, length, key, runs=runs, strides=strides)
                stored_of_file.setdefault(file, []).append((stored, offsets))
        self._values = [(os.path.relpath(path, directory), stored) for path, stored in values]
        for file, stored in self._values:
            stored_of_file.setdefault(file, []).append((stored, (0,) * len(stored.shape)))
        self._names = natural_order(stored_of_file)
        parts = {run[:3] for each in stored_of_file.values() for stored, _ in each for run in stored.runs}
        alone = {record.file for record in described.objects.values()}
        alone = {*alone, *(os.path.relpath(path, directory) for path, _, _ in parts)}.difference(self._names)
        self._sizes, problems = sizes_of_files(directory, [*self._names, *sorted(alone)], damaged, _HINT)
        if problems:
            raise one_error(problems, f"{directory} is not complete")
        paths = [os.path.join(directory, name) for name in self._names]
        self._directory = directory
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self.indexes = [CheckpointIndex(path, ARCHIVES, self._sizes[path], {}, archived=True) for path in paths]
        self._tensors: dict[tuple[str, tuple[int, ...], str], Tensor] = {}
        for name, path in zip(self._names, paths):
            problem = self._place(path, stored_of_file[name], handles)
            if problem is not None:
                problems.append(problem)
        others = [*described.objects.values()]
        others += [Record(os.path.relpath(path, directory), offset, length, "") for path, offset, length in parts]
        short = {problem.file for problem in problems}
        for record in sorted(others, key=lambda each: -each.offset - max(0, each.length)):
            path = os.path.join(directory, record.file)
            end = record.offset + max(0, record.length)
            if end > self._sizes[path] and path not in short:
                problems.append(self._short(path, end))
                short.add(path)
        if problems:
            raise one_error(problems, f"{directory} is not complete")

    def _place(
        self, path: str, entries: list[tuple[Stored, tuple[int, ...]]], handles: FileHandles
    ) -> InputError | None:
        """Give the tensors of a file their places; an error where the file is too short."""
        # Numbers in pickles and joined tensors come last, as `Placement` requires.
        entries.sort(key=lambda each: (not _is_record(each[0]), each[0].offset, each[0].length, each[0].key))
        records = [stored for stored, _ in entries if _is_record(stored)]
        if len({record.length >= 0 for record in records}) > 1:
            return CheckpointError(f"{path}: holds records and a header by its metadata", file=path, hint=_HINT)
        end = max((record.offset + record.length for record in records), default=0)
        if records and records[0].length >= 0 and end > self._sizes[path]:
            return self._short(path, end)
        placement = Placement(path, [stored for stored, _ in entries])
        for (stored, offsets), tensor in zip(entries, placement.tensors()):
            self._tensors[stored.name, offsets, path] = tensor
        handles.place(path, placement)
        return None

    def _short(self, path: str, end: int) -> InputError:
        return DamagedCheckpointError(
            f"{path}: has {self._sizes[path]} bytes, and {end} by the metadata", file=path, hint=_HINT
        )

    def tensors(self) -> Iterator[ChunkedTensor]:
        for name, (dtype, shape, chunks) in self._described.tensors.items():
            if name in self._described.faults or name in self.faults:
                continue
            yield ChunkedTensor(
                name,
                dtype,
                shape,
                [self._chunk(name, offsets, sizes, record.file) for offsets, sizes, record, *_ in chunks],
            )
        for file, stored in self._values:
            chunk = self._chunk(stored.name, (0,) * len(stored.shape), stored.shape, file)
            yield ChunkedTensor(stored.name, stored.dtype, stored.shape, [chunk])

    def _chunk(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], file: str) -> Chunk:
        entry = self._tensors[name, offsets, os.path.join(self._directory, file)]
        return Chunk(offsets, sizes, self._numbers[file], entry)

    def objects(self) -> Mapping[str, StoredObject]:
        objects = {}
        for name, (file, offset, length, _) in self._described.objects.items():
            path = os.path.join(self._directory, file)
            size = self._sizes[path] - offset if length < 0 else length
            objects[name] = StoredObject(path, offset, size, file.endswith(ENDING))
        return objects
