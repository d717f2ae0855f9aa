"""Distributed checkpoints of PyTorch to be written: a file for each rank, objects, and metadata, which comes last."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.checkpoints.formats.archive_output import ArchiveLayout, archive_of_pickle, lay_out_archives
from reshard.checkpoints.formats.archives import Archive
from reshard.checkpoints.formats.dtypes import ARCHIVES, TORCH_NAMES
from reshard.checkpoints.formats.output import OutputLayout, OutputTensor, lay_out_safetensors
from reshard.checkpoints.formats.pickles import Global, Pairs, PickledInstance, pickled
from reshard.errors import CheckpointError
from reshard.forms.chunk_files import ChunkFiles
from reshard.forms.dcp.form import DCP, HYPER_PARALLEL, METADATA
from reshard.forms.dcp.metadata import HYPER, TORCH, DescribedChunk, DescribedTensor, Record
from reshard.forms.dcp.read import BACKEND, COMMON
from reshard.forms.form import WriteRequest
from reshard.forms.target import FinishingFile
from reshard.forms.writing import Selected
from reshard.layout import Box, shape_of, volume_of
from reshard.storage import read_range, reading, reading_error, status_at
from reshard.text.wording import as_pattern, quoted
from reshard.threads import cached_property

_PART = 1 << 16
_MAX_OBJECT = 1 << 30
# Megatron's file beside its objects, which forms of others do not carry.
_BACKEND = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
    b'"common_backend_version": 1}'
)


class _DistributedFiles(ChunkFiles):
    """The files of both forms.

    Args:
        checkpoint: the checkpoint to write.
        chosen: the selected part of it.
        request: the request.
        name_of: the name of the file of a rank, without its ending.
    """

    holds_empty = False

    def __init__(self, checkpoint: Checkpoint, chosen: Selected, request: WriteRequest, name_of: Any) -> None:
        super().__init__(request.target, chosen, name_of)
        self._nested: Mapping[str, tuple[Any, ...]] = getattr(checkpoint, "nested", {}) or _keys_of_model(checkpoint)
        self._objects = {name: stored for name, stored in checkpoint.objects.items() if request.admit(name)}
        self._handles = request.handles

    def described(self) -> Iterator[tuple[str, DescribedTensor]]:
        """Every tensor with its chunks."""
        places: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        values: list[OutputTensor] = []
        for file in range(self.count):
            for output, offset, length in self._places(self.layout_of(file)):
                places[output.name][file] = offset, length
                if output.name not in self.tensors:
                    values.append(output)
        for tensor, chunks in self.chunks():
            described = [
                DescribedChunk(tuple(start for start, _ in box), shape_of(box), self._record(file, tensor.name, places))
                for file, box in chunks
            ]
            if not volume_of(chunks[0].box):
                # Without elements, metadata lists the full shape as one chunk.
                described = [described[0]._replace(offsets=(0,) * len(tensor.shape), sizes=tensor.shape)]
            yield tensor.name, DescribedTensor(tensor.dtype, tensor.shape, described)
        for value in values:
            record = self._record(next(iter(places[value.name])), value.name, places)
            chunk = DescribedChunk((0,) * len(value.dims), value.dims, record)
            yield value.name, DescribedTensor(value.dtype, value.dims, [chunk])

    def _record(self, file: int, name: str, places: Mapping[str, Mapping[int, tuple[int, int]]]) -> Record:
        return Record(self.file_name(file), *places[name][file], name)

    def _places(self, layout: OutputLayout) -> Iterable[tuple[OutputTensor, int, int]]:
        """Per tensor of a file where its record begins, and its bytes."""
        raise NotImplementedError

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
            return read_range(file, stored.offset, stored.length)

    def _object_places(self) -> Iterator[tuple[str, int, int]]:
        """Per object where it begins in their file, and its bytes."""
        offset = 0
        for name, data in self._contents.items():
            yield name, offset, len(data)
            offset += len(data)

    def _finishing(self, objects: str, metadata: Any) -> list[FinishingFile]:
        files = [FinishingFile(objects, lambda: list(self._contents.values()))] if self._objects else []
        return [*files, FinishingFile(METADATA, lambda: _joined(pickled(metadata())))]


class DcpFiles(_DistributedFiles):
    """Files of torch DCP, as `torch.distributed.checkpoint.load` reads them; see `ChunkFiles`."""

    name = DCP
    format = ARCHIVES

    def __init__(self, checkpoint: Checkpoint, chosen: Selected, request: WriteRequest) -> None:
        super().__init__(checkpoint, chosen, request, lambda rank: f"__{rank}_0")
        # Megatron looks for these by their names.
        self._common = self._objects.pop(COMMON, None)
        self._beside: Optional[StoredObject] = None
        if self._common is not None:
            path = os.path.join(os.path.dirname(self._common.path), BACKEND)
            status = status_at(path)
            self._beside = None if status is None else StoredObject(path, 0, status.size, False)

    def lay_out(self, tensors: Sequence[OutputTensor], boxes: Sequence[Box]) -> OutputLayout:
        """An archive for every tensor."""
        return lay_out_archives(tensors, [tuple(start for start, _ in box) for box in boxes])

    def _places(self, layout: OutputLayout) -> Iterable[tuple[OutputTensor, int, int]]:
        assert isinstance(layout, ArchiveLayout)
        return ((record.tensor, record.offset, record.length) for record in layout.records)

    def _content(self, name: str, stored: StoredObject) -> bytes:
        data = self._read(stored)
        return data if stored.archived else archive_of_pickle(data)

    def finishing(self) -> Sequence[FinishingFile]:
        """Objects, and the metadata, which makes the directory complete."""
        objects = "__0_1.distcp"

        def metadata() -> PickledInstance:
            tensors = dict(self.described())
            names = [*tensors, *self._contents]
            return _instance(
                "metadata.Metadata",
                state_dict_metadata=Pairs(
                    iter(
                        [
                            *((name, _torch_tensor(tensor)) for name, tensor in tensors.items()),
                            *((name, _instance("metadata.BytesStorageMetadata")) for name in self._contents),
                        ]
                    )
                ),
                planner_data={name: self._nested.get(name, (name,)) for name in names},
                storage_data=Pairs(
                    iter(
                        [
                            *_torch_records(tensors),
                            *(
                                (_torch_index(name, None, None), _torch_place(objects, offset, length))
                                for name, offset, length in self._object_places()
                            ),
                        ]
                    )
                ),
                storage_meta=_instance(
                    "metadata.StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[]
                ),
                version="1.0.0",
            )

        common, beside = self._common, self._beside
        files = []
        if common is not None:
            files.append(FinishingFile(COMMON, lambda: [self._content(COMMON, common)]))
            files.append(FinishingFile(BACKEND, lambda: [_BACKEND if beside is None else self._read(beside)]))
        return [*files, *self._finishing(objects, metadata)]


def _instance(kind: str, room: str = TORCH, **fields: Any) -> PickledInstance:
    """An instance of a class whose fields are set by name."""
    return PickledInstance(room + kind, (), fields)


def _size(sizes: Sequence[int]) -> PickledInstance:
    return PickledInstance("torch.Size", (tuple(sizes),), None, True)


def _torch_tensor(tensor: DescribedTensor) -> PickledInstance:
    layout = PickledInstance("torch.serialization._get_layout", ("torch.strided",), None, True)
    contiguous = PickledInstance(f"{TORCH}metadata._MEM_FORMAT_ENCODING", (0,), None, True)
    properties = PickledInstance(
        f"{TORCH}metadata.TensorProperties", (), (Global(TORCH_NAMES[tensor.dtype]), layout, False, contiguous, False)
    )
    chunks = [
        _instance("metadata.ChunkStorageMetadata", offsets=_size(chunk.offsets), sizes=_size(chunk.sizes))
        for chunk in tensor.chunks
    ]
    return _instance("metadata.TensorStorageMetadata", properties=properties, size=_size(tensor.shape), chunks=chunks)


def _torch_index(name: str, starts: Optional[Sequence[int]], number: Optional[int]) -> PickledInstance:
    return _instance("metadata.MetadataIndex", fqn=name, offset=None if starts is None else _size(starts), index=number)


def _torch_place(file: str, offset: int, length: int) -> PickledInstance:
    return _instance("filesystem._StorageInfo", relative_path=file, offset=offset, length=length)


def _torch_records(tensors: Mapping[str, DescribedTensor]) -> Iterator[tuple[PickledInstance, PickledInstance]]:
    for name, tensor in tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            where = chunk.record
            yield _torch_index(name, chunk.offsets, number), _torch_place(where.file, where.offset, where.length)


class HyperParallelFiles(_DistributedFiles):
    """Files of hyper-parallel; see `ChunkFiles`."""

    name = HYPER_PARALLEL
    format = "safetensors"

    def __init__(self, checkpoint: Checkpoint, chosen: Selected, request: WriteRequest) -> None:
        super().__init__(checkpoint, chosen, request, lambda rank: f"_rank{rank}_")

    def lay_out(self, tensors: Sequence[OutputTensor], boxes: Sequence[Box]) -> OutputLayout:
        """A safetensors file that keeps its tensors."""
        return _LayoutWithTensors(lay_out_safetensors(tensors, {"format": "pt"}), tensors)

    def _places(self, layout: OutputLayout) -> Iterable[tuple[OutputTensor, int, int]]:
        assert isinstance(layout, _LayoutWithTensors)
        return ((tensor, 0, -1) for tensor in layout.tensors)

    def _content(self, name: str, stored: StoredObject) -> bytes:
        if not stored.archived:
            return self._read(stored)
        try:
            with contextlib.closing(self._handles.open_file(stored.path)) as file:
                archive = Archive(file, stored.offset, stored.length)
                if "data/0" in archive:
                    raise CheckpointError(
                        f"{stored.path}: the object {quoted(name)} holds tensors, which {HYPER_PARALLEL} cannot hold",
                        file=stored.path,
                        parameter=name,
                        hint=f"leave it out with --exclude {as_pattern(name)}",
                    )
                entry = archive.entry("data.pkl")
                return read_range(file, entry.offset, entry.size)
        except OSError as error:
            raise reading_error(stored.path, error) from error

    def finishing(self) -> Sequence[FinishingFile]:
        """Objects, and the metadata, which makes the directory complete."""
        objects = "_rank0_.bytes"

        def index(name: str, starts: tuple[int, ...], number: Optional[int]) -> PickledInstance:
            return _instance("metadata.MetadataIndex", HYPER, fqn=name, offset=starts, index=number)

        def place(file: str, offset: int, length: int, key: Optional[str]) -> PickledInstance:
            return _instance(
                "storage.StorageInfo", HYPER, relative_path=file, offset=offset, length=length, tensor_key=key
            )

        def metadata() -> PickledInstance:
            tensors = dict(self.described())
            described = [
                *((name, _hyper_tensor(tensor)) for name, tensor in tensors.items()),
                *((name, _instance("metadata.BytesStorageMetadata", HYPER)) for name in self._contents),
            ]
            stored = [
                *(
                    (index(name, chunk.offsets, number), place(chunk.record.file, 0, -1, name))
                    for name, tensor in tensors.items()
                    for number, chunk in enumerate(tensor.chunks)
                ),
                *(
                    (index(name, (), None), place(objects, offset, length, None))
                    for name, offset, length in self._object_places()
                ),
            ]
            keys = {name: self._nested[name] for name, _ in described if name in self._nested}
            return _instance(
                "metadata.Metadata",
                HYPER,
                state_dict_metadata=Pairs(iter(described)),
                planner_data=keys or None,
                storage_data=Pairs(iter(stored)),
                version="1.0",
            )

        return self._finishing(objects, metadata)


def _keys_of_model(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """The keys of the model's tensors in a trainer's state that records none, as sharded safetensors do.

    Without them, the metadata would record that the state has no key "model", and readers would keep it in the names.
    """
    # Imported only here: most checkpoints record their keys, or get them with their names.
    from reshard.names import plain_names, trainer_keys

    names = [*checkpoint.tensors]
    if not plain_names(names, checkpoint.objects, {}, True).prefix:
        return {}
    return {name: keys for name, keys in ((name, trainer_keys(name)) for name in names) if keys[0] == "model"}


class _LayoutWithTensors(OutputLayout):
    """The layout of a file and its tensors."""

    def __init__(self, layout: OutputLayout, tensors: Sequence[OutputTensor]) -> None:
        self.__dict__.update(layout.__dict__)
        self.tensors = tensors


def _hyper_tensor(tensor: DescribedTensor) -> PickledInstance:
    chunks = [
        _instance("metadata.ChunkStorageMetadata", HYPER, offsets=chunk.offsets, sizes=chunk.sizes)
        for chunk in tensor.chunks
    ]
    properties = _instance(
        "metadata.TensorProperties",
        HYPER,
        dtype=TORCH_NAMES.get(tensor.dtype, tensor.dtype),
        requires_grad=False,
        memory_format=None,
    )
    return _instance("metadata.TensorStorageMetadata", HYPER, properties=properties, size=tensor.shape, chunks=chunks)


def _joined(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in larger parts."""
    buffer = bytearray()
    for part in parts:
        buffer += part
        if len(buffer) >= _PART:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)
