"""The contents of the metadata of a distributed checkpoint: tensors, chunks, objects, and the place of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, Optional

from reshard.checkpoints.formats.dtypes import FROM_TORCH, dtype_named
from reshard.checkpoints.formats.pickles import (
    MAX_PICKLE,
    MAX_SIZES,
    Global,
    PickledInstance,
    PickleError,
    among,
    read_pickle,
    sizes_of,
)
from reshard.errors import CheckpointError, InputError
from reshard.forms.recorded import tensor_fault
from reshard.storage import read_small, reading
from reshard.text.messages import quoted

_MAX_NAMED = 8

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
_ABSOLUTE = re.compile(r"/|\\|[A-Za-z][A-Za-z0-9+.-]*:")
_HINT = "copy or save the checkpoint again"


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
    """A box of a tensor and its record."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    record: Record


class DescribedTensor(NamedTuple):
    """A tensor; ``dtype`` is MindSpore's name, ``shape`` that of the whole."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[DescribedChunk]


class ReadMetadata(NamedTuple):
    """The contents of metadata."""

    tensors: dict[str, DescribedTensor]
    objects: dict[str, Record]
    nested: dict[str, tuple[Any, ...]]
    faults: dict[str, InputError]


def read_metadata(paths: Iterable[str]) -> ReadMetadata:
    """Read metadata: one file of all ranks, or one for each rank."""
    metadata = ReadMetadata({}, {}, {}, {})
    for path in paths:
        with reading(path):
            data = read_small(path, MAX_PICKLE)
        try:
            pickled = read_pickle(data, among(NAMES))
        except PickleError as error:
            raise CheckpointError(f"{path}: {error}", file=path, hint=_HINT) from error
        _Reader(path, metadata).add(pickled)
    return metadata


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
        for name in reshaped if isinstance(reshaped, dict) else ():
            if name in self._metadata.tensors:
                self._fault(str(name), "is flattened optimizer state of Megatron, which is not read")

    def _records(self, stored: Mapping[Any, Any]) -> dict[tuple[str, Optional[tuple[int, ...]]], Record]:
        """Where everything is, by name and offsets; None for an object."""
        records: dict[tuple[str, Optional[tuple[int, ...]]], Record] = {}
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
                self._fault(name, f"is stored through extensions of torch ({_named(where)}), which are not read")
            key = where.get("tensor_key")
            place = (name, offset)
            count = -1 if length == -1 else in_file[1]
            record = Record(file, in_file[0], count, key if isinstance(key, str) else name)
            if records.setdefault(place, record) != record:
                self._wrong(f"has two records of {quoted(name)} for the same elements")
        return records

    def _add_object(self, name: str, records: dict[tuple[str, Optional[tuple[int, ...]]], Record]) -> None:
        record = records.pop((name, None), None) or records.pop((name, ()), None)
        if record is None:
            self._wrong(f"does not record where the object {quoted(name)} is stored")
        if name in self._metadata.tensors:
            self._fault(name, "is a tensor for one rank and an object for another")
        self._metadata.objects.setdefault(name, record)

    def _add_tensor(
        self, name: str, value: PickledInstance, records: dict[tuple[str, Optional[tuple[int, ...]]], Record]
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
            # Megatron's sizes lack the dimensions before those of a layer.
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
        self._metadata.faults.setdefault(name, tensor_fault(self._path, name, problem))


def _named(where: Mapping[str, Any]) -> str:
    descriptors = where.get("transform_descriptors")
    return ", ".join(_words(descriptors)) or "unnamed"


def _words(descriptors: Any) -> Iterator[str]:
    for each in descriptors[:_MAX_NAMED] if isinstance(descriptors, (list, tuple)) else [descriptors]:
        if isinstance(each, str):
            yield quoted(each)


def _are_keys(keys: Any) -> bool:
    if not isinstance(keys, tuple) or len(keys) > MAX_SIZES:
        return False
    return all(type(key) in (str, int) for key in keys)


def _dtype(properties: Any) -> Optional[str]:
    if not isinstance(properties, PickledInstance):
        return None
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.fields.get("dtype")
    if isinstance(dtype, Global):
        return FROM_TORCH.get(dtype.name)
    return (FROM_TORCH.get(dtype) or dtype_named(dtype)) if isinstance(dtype, str) else None
