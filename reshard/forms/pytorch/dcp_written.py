"""Distributed checkpoints to be written: a file for each rank, objects, and metadata, which comes last."""

from __future__ import annotations

import contextlib
import functools
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.checkpoints.formats.archives import Archive, archive_of_pickle, lay_out_archives
from reshard.checkpoints.formats.dtypes import ARCHIVES, TORCH_NAMES
from reshard.checkpoints.formats.output import OutputLayout, OutputTensor, WrittenRecord, lay_out_safetensors
from reshard.checkpoints.formats.pickles import PickledInstance, Repeated, inert, inert_class, pickled
from reshard.errors import CheckpointError
from reshard.forms.form import Names
from reshard.forms.pytorch.dcp import HYPER, TORCH
from reshard.forms.pytorch.form import BACKEND, COMMON, DCP, HYPER_PARALLEL, METADATA, OBJECTS
from reshard.forms.recorded import tensor_fault
from reshard.forms.registry import form_named
from reshard.forms.request import Means, Request
from reshard.forms.target import FinishingFile
from reshard.forms.writing import ChunkFiles, Selected
from reshard.layout import Box, Layout, shape_of, volume_of, whole, whole_box
from reshard.storage import read_range, reading, status_at
from reshard.threads import cached_property

_BLOCK = 1 << 16
_MAX_OBJECT = 1 << 30
BACKEND_CONTENT = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
    b'"common_backend_version": 1}'
)
"""Megatron's file beside its objects, which other forms do not carry."""


def _instance(kind: str, **fields: Any) -> PickledInstance:
    """An instance of a class whose fields are set by name."""
    return inert(kind, state=fields)


class _Described(NamedTuple):
    """What metadata lists of tensors of one type, shape and cut: their entry, and the offsets of their chunks."""

    entry: Repeated
    starts: Sequence[Repeated]


class _DistributedFiles(ChunkFiles):
    """The files of both forms.

    Attributes:
        objects_file: the file of objects.
        room: the package of the classes in the metadata.
        versions: fields of the metadata after those of tensors and objects.
    """

    holds_empty = False
    objects_file: str
    room: str
    versions: Mapping[str, Any]

    def __init__(self, checkpoint: Checkpoint, chosen: Selected, request: Request, means: Means, name_of: Any) -> None:
        super().__init__(request.target, chosen, name_of)
        self._nested = checkpoint.nested
        # Names of a trainer's state without recorded keys get none: the metadata must not record that the state has no
        # key "model".
        self._named = bool(self._nested) or form_named(checkpoint.form).options.names is Names.MODEL
        self._objects = {name: stored for name, stored in checkpoint.objects.items() if request.filters.admit(name)}
        self._handles = means.handles

    @cached_property
    def _contents(self) -> Mapping[str, bytes]:
        """The objects as this form holds them."""
        return {name: self._content(name, stored) for name, stored in self._objects.items()}

    def _content(self, name: str, stored: StoredObject) -> bytes:
        raise NotImplementedError

    def _read(self, stored: StoredObject) -> bytes:
        if stored.length > _MAX_OBJECT:
            raise CheckpointError(f"{stored.path}: holds an object of {stored.length:,} bytes", file=stored.path)
        with reading(stored.path), contextlib.closing(self._handles.open_file(stored.path)) as file:
            if stored.archived:
                Archive(file, stored.offset, stored.length).check(memoryview(bytearray(_BLOCK)))
            return read_range(file, stored.offset, stored.length)

    def _object_places(self) -> Iterator[tuple[str, int, int]]:
        """Per object where it begins in their file, and its bytes."""
        offset = 0
        for name, data in self._contents.items():
            yield name, offset, len(data)
            offset += len(data)

    def finishing(self) -> Sequence[FinishingFile]:
        files = [FinishingFile(self.objects_file, lambda: list(self._contents.values()))] if self._objects else []
        return [*files, self._metadata_file(METADATA)]

    def _metadata_file(self, name: str) -> FinishingFile:
        # Its bytes are counted before they are written: they are made once for both.
        return FinishingFile(name, functools.cache(lambda: [pickled(self._metadata(), 4)]))

    def _metadata(self) -> PickledInstance:
        kinds = f"{self.room}metadata."
        # Per name the file, offset and bytes of each record in turn, ascending: three numbers in place of objects.
        records: dict[str, array[int]] = defaultdict(lambda: array("q"))
        values: list[OutputTensor] = []
        for file in range(self.count):
            for output, offset, length in self.layout_of(file).records:
                records[output.name].extend((file, offset, length))
                if output.name not in self.tensors:
                    values.append(output)
        described = functools.cache(self._described)
        tensors = {
            **{tensor.name: described(tensor.dtype, tensor.shape, *cut) for tensor, *cut in self.chunks()},
            **{value.name: described(value.dtype, value.dims, whole(len(value.dims)), (0,)) for value in values},
        }
        entries = {
            **{name: each.entry for name, each in tensors.items()},
            **{name: _instance(f"{kinds}BytesStorageMetadata") for name in self._contents},
        }
        return _instance(
            f"{kinds}Metadata",
            state_dict_metadata=entries,
            planner_data=self._keys([*entries]),
            storage_data=self._stored(tensors, records),
            **self.versions,
        )

    def _described(self, dtype: str, shape: tuple[int, ...], layout: Layout, slices: Sequence[int]) -> _Described:
        kinds = f"{self.room}metadata."
        boxes = [layout.slice_box(shape, number) for number in slices]
        if not volume_of(boxes[0]):
            # Without elements, metadata lists the full shape as one chunk.
            boxes = [whole_box(shape)]
        starts = [Repeated(self._size(tuple(start for start, _ in box))) for box in boxes]
        chunks = [
            _instance(f"{kinds}ChunkStorageMetadata", offsets=start, sizes=self._size(shape_of(box)))
            for start, box in zip(starts, boxes)
        ]
        properties, size = self._properties(dtype), self._size(shape)
        entry = _instance(f"{kinds}TensorStorageMetadata", properties=properties, size=size, chunks=chunks)
        return _Described(Repeated(entry), starts)

    def _stored(
        self, tensors: Mapping[str, _Described], records: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[PickledInstance, PickledInstance]]:
        files = [os.path.basename(self.file_name(file)) for file in range(self.count)]
        for name, (_, starts) in tensors.items():
            for number, start in enumerate(starts):
                file, offset, length = records[name][3 * number : 3 * number + 3]
                yield self._index(name, start, number), self._stored_at(files[file], offset, length, name)
        for name, offset, length in self._object_places():
            yield self._index(name, self._size(None), None), self._stored_at(self.objects_file, offset, length, "")

    def _index(self, name: str, start: Any, number: int | None) -> PickledInstance:
        return _instance(f"{self.room}metadata.MetadataIndex", fqn=name, offset=start, index=number)

    def _size(self, sizes: Sequence[int] | None) -> Any:
        """Sizes or offsets; None for those of an object."""
        raise NotImplementedError

    def _properties(self, dtype: str) -> PickledInstance:
        raise NotImplementedError

    def _stored_at(self, file: str, offset: int, length: int, key: str) -> PickledInstance:
        """A record; ``key`` is its name in the header of a file that has one, ``""`` for an object."""
        raise NotImplementedError

    def _keys(self, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]] | None:
        raise NotImplementedError


class DcpFiles(_DistributedFiles):
    """Files of torch DCP, as `torch.distributed.checkpoint.load` reads them; see `ChunkFiles`."""

    name = DCP
    format = ARCHIVES
    objects_file = OBJECTS
    room = TORCH
    versions = MappingProxyType(
        {
            "storage_meta": _instance(
                f"{TORCH}metadata.StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]
            ),
            "version": "1.0.0",
        }
    )

    directory = ""
    """The directory of all files, relative to the target's."""

    def __init__(self, checkpoint: Checkpoint, chosen: Selected, request: Request, means: Means) -> None:
        super().__init__(checkpoint, chosen, request, means, lambda rank: os.path.join(self.directory, f"__{rank}_0"))
        # Megatron looks for these by their names.
        self._common = self._objects.pop(COMMON, None)
        self._beside: StoredObject | None = None
        if self._common is not None:
            path = os.path.join(os.path.dirname(self._common.path), BACKEND)
            status = status_at(path)
            self._beside = None if status is None else StoredObject(path, 0, status.size, False)

    def lay_out(self, tensors: Sequence[OutputTensor], boxes: Sequence[Box]) -> OutputLayout:
        return lay_out_archives(tensors)

    def _content(self, name: str, stored: StoredObject) -> bytes:
        data = self._read(stored)
        return data if stored.archived else archive_of_pickle(data)

    def finishing(self) -> Sequence[FinishingFile]:
        common, beside = self._common, self._beside
        files = []
        if common is not None:
            files.append(FinishingFile(COMMON, lambda: [self._content(COMMON, common)]))
            files.append(FinishingFile(BACKEND, lambda: [BACKEND_CONTENT if beside is None else self._read(beside)]))
        return [*files, *super().finishing()]

    def _size(self, sizes: Sequence[int] | None) -> Any:
        return None if sizes is None else inert("torch.Size", tuple(sizes))

    def _properties(self, dtype: str) -> PickledInstance:
        layout = inert("torch.serialization._get_layout", "torch.strided")
        contiguous = inert(f"{TORCH}metadata._MEM_FORMAT_ENCODING", 0)
        state = (inert_class(TORCH_NAMES[dtype]), layout, False, contiguous, False)
        return inert(f"{TORCH}metadata.TensorProperties", state=state)

    def _stored_at(self, file: str, offset: int, length: int, key: str) -> PickledInstance:
        return _instance(f"{TORCH}filesystem._StorageInfo", relative_path=file, offset=offset, length=length)

    def _keys(self, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]] | None:
        return {name: keys for name in names if (keys := self._nested.get(name, (name,) if self._named else ()))}


class HyperParallelFiles(_DistributedFiles):
    """Files of hyper-parallel; see `ChunkFiles`."""

    name = HYPER_PARALLEL
    format = "safetensors"
    objects_file = "_rank0_.bytes"
    room = HYPER
    versions = MappingProxyType({"version": "1.0"})

    def __init__(self, checkpoint: Checkpoint, chosen: Selected, request: Request, means: Means) -> None:
        super().__init__(checkpoint, chosen, request, means, lambda rank: f"_rank{rank}_")

    def lay_out(self, tensors: Sequence[OutputTensor], boxes: Sequence[Box]) -> OutputLayout:
        layout = lay_out_safetensors(tensors, {"format": "pt"})
        layout.records = [WrittenRecord(tensor, 0, -1) for tensor in tensors]
        return layout

    def _content(self, name: str, stored: StoredObject) -> bytes:
        if not stored.archived:
            return self._read(stored)
        with reading(stored.path), contextlib.closing(self._handles.open_file(stored.path)) as file:
            archive = Archive(file, stored.offset, stored.length)
            if "data/0" in archive:
                raise tensor_fault(stored.path, name, f"is an object with tensors, which {HYPER_PARALLEL} cannot hold")
            return archive.pickle()

    def _size(self, sizes: Sequence[int] | None) -> Any:
        return () if sizes is None else sizes

    def _properties(self, dtype: str) -> PickledInstance:
        name = TORCH_NAMES.get(dtype, dtype)
        return _instance(f"{HYPER}metadata.TensorProperties", dtype=name, requires_grad=False, memory_format=None)

    def _stored_at(self, file: str, offset: int, length: int, key: str) -> PickledInstance:
        return _instance(
            f"{HYPER}storage.StorageInfo", relative_path=file, offset=offset, length=length, tensor_key=key or None
        )

    def _keys(self, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]] | None:
        return {name: self._nested[name] for name in names if self._nested.get(name)} or None
