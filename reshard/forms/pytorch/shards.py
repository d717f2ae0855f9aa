"""PyTorch's sharded safetensors: files of chunks, whose headers record where these begin.

``HuggingFaceStorageWriter`` of torch.distributed.checkpoint writes one file for each rank, or several, and no index.
``DCP_SHARDING_INFO`` in a header has the offsets of every tensor of the file. Newer versions also record the shape of
the full tensor; without it, a tensor whose last rows no file holds looks like a smaller one.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

from reshard.checkpoints.formats.output import OutputLayout, OutputTensor, lay_out_safetensors
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.errors import CheckpointError, InputError
from reshard.forms.full.contents import Contents
from reshard.forms.full.form import extra_files_in, report_unread
from reshard.forms.pytorch.chunk_headers import FULL_SHAPE, INFO, OFFSETS, VERSION_KEY, HeaderEntry, entries_of
from reshard.forms.pytorch.form import SHARD, shards_in
from reshard.forms.recorded import Chunk, ChunkedCheckpoint, ChunkedTensor, chunked_checkpoint, tensor_fault
from reshard.forms.request import Means, Request
from reshard.forms.target import FinishingFile
from reshard.forms.writing import ChunkFiles, Selected
from reshard.layout import Box
from reshard.storage import is_directory, names_in
from reshard.strategies import Strategy
from reshard.text.messages import Report, listing, number_ranges, plural
from reshard.text.names import layers_in_order, natural_order

_VERSION = "1.0"


class ShardFiles(ChunkFiles):
    """The files, with full shapes beside the offsets that older versions of torch go by."""

    name = "hf-sharded"
    format = "safetensors"
    boxed = True

    def __init__(self, strategy: Strategy, chosen: Selected, others: Sequence[FinishingFile]) -> None:
        super().__init__(strategy, chosen, lambda rank: f"shard-{rank + 1:05d}-model-00001-of-00001")
        self._others = others

    def lay_out(self, tensors: Sequence[OutputTensor], boxes: Sequence[Box]) -> OutputLayout:
        info = {
            tensor.name: {OFFSETS: [start for start, _ in box], FULL_SHAPE: self._full_shape(tensor)}
            for tensor, box in zip(tensors, boxes)
        }
        text = json.dumps(info, ensure_ascii=False, separators=(",", ":"))
        return lay_out_safetensors(tensors, {INFO: text, VERSION_KEY: _VERSION, "format": "pt"})

    def _full_shape(self, tensor: OutputTensor) -> Sequence[int]:
        source = self.tensors.get(tensor.name)
        return tensor.dims if source is None else source.shape

    def finishing(self) -> Sequence[FinishingFile]:
        """The files beside the weights: a directory is complete when all shards are there, without a mark."""
        return self._others


def read_shards(form: str, request: Request, means: Means) -> ChunkedCheckpoint:
    names = names_in(request.src) if is_directory(request.src) else []
    directory = shards_in(request.src, names)
    if directory is None:
        raise CheckpointError(
            f"{request.src}: is one file of a sharded checkpoint",
            file=request.src,
            hint=f"give the directory as SRC: {os.path.dirname(request.src) or os.curdir}",
        )
    present = names if directory == request.src else names_in(directory)
    files = natural_order(filter(SHARD.fullmatch, present))
    report_unread(directory, present, files, SHARD, None, means.report)
    contents = Contents.read(directory, files, means.handles, request.damaged)
    shards = _Shards(directory, files, [contents.indexes[number] for number in range(len(files))])
    tensors, faults = shards.tensors()
    shards.check_files(tensors, faults, means.report)
    checkpoint = chunked_checkpoint(form, directory, shards.indexes, tensors.values(), faults, shards.hint)
    checkpoint.extra_files = extra_files_in(directory, present, files)
    checkpoint.check(request.required)
    return checkpoint


class _Shards:
    """The files and their headers; the index of a file whose entries have names of their own has no entries."""

    def __init__(self, directory: str, files: Sequence[str], indexes: list[CheckpointIndex]) -> None:
        self.indexes = indexes
        self._directory = directory
        self._files = files
        # Shard and file numbers of every file.
        self._numbers = [tuple(map(int, match.groups())) for match in map(SHARD.fullmatch, files) if match]
        present = {shard for shard, _, _ in self._numbers}
        missing = sorted(set(range(1, max(present) + 1)) - present)
        self.hint = "copy the files of one save again"
        if missing:
            self.hint = f"bring the files of {'shards' if missing[1:] else 'shard'} {number_ranges(missing)}"
        self._recorded: set[str] = set()

    def tensors(self) -> tuple[dict[str, ChunkedTensor], dict[str, InputError]]:
        """Every tensor by name, and why some cannot be read."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        kinds: dict[str, set[str]] = defaultdict(set)
        shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        entries_of_header: dict[tuple[int, int], list[HeaderEntry]] = {}
        referenced: list[object] = []
        for number, index in enumerate(self.indexes):
            # Files that are built alike share both.
            key = (id(index.tensors), id(index.metadata))
            if key not in entries_of_header:
                entries_of_header[key] = list(entries_of(index))
                referenced.append((index.tensors, index.metadata))
            entries = entries_of_header[key]
            has_own_names = any(entry.name != entry.stored.name for entry in entries)
            if has_own_names:
                self.indexes[number] = CheckpointIndex(index.path, index.format, index.size, {}, index.crc)
            for entry in entries:
                stored = entry.stored
                chunks[entry.name].append(Chunk(entry.offsets, stored.shape, number, stored if has_own_names else None))
                kinds[entry.name].add(stored.dtype)
                if entry.shape is not None:
                    shapes[entry.name].add(entry.shape)
        tensors: dict[str, ChunkedTensor] = {}
        faults: dict[str, InputError] = {}
        for name in layers_in_order(chunks):
            dimensions = {len(chunk.sizes) for chunk in chunks[name]}
            for property_name, values in (("types", kinds[name]), ("shapes", shapes[name]), ("dimensions", dimensions)):
                if len(values) > 1:
                    alternatives = " and ".join(
                        str(list(each) if isinstance(each, tuple) else each) for each in sorted(values)
                    )
                    problem = f"has different {property_name} in its files: {alternatives}"
                    faults[name] = tensor_fault(self._directory, name, problem, "take the files of one save")
            if name in faults:
                continue
            shape = next(iter(shapes[name]), None)
            if shape is None:
                ends = [tuple(a + b for a, b in zip(chunk.offsets, chunk.sizes)) for chunk in chunks[name]]
                shape = tuple(map(max, zip(*ends)))
            else:
                self._recorded.add(name)
            tensors[name] = ChunkedTensor(name, next(iter(kinds[name])), shape, chunks[name])
        return tensors, faults

    def check_files(self, tensors: Mapping[str, ChunkedTensor], faults: dict[str, InputError], report: Report) -> None:
        """Look for tensors that may have lost their last rows with a file, where headers record no full shape.

        A shard leaves out a file that would be empty, as replicas are written once, so that a missing file may be
        none. But where other tensors have a chunk in every shard, one that ends with the last shard that has its file
        was cut likewise, and has lost the rest.

        Args:
            tensors: as they seem to be.
            faults: gets those that have lost something.
            report: gets a warning of those that may have.
        """
        shards = max(shard for shard, _, _ in self._numbers)
        present = {(shard, file) for shard, file, _ in self._numbers}
        files = {number for _, number, _ in self._numbers} | set(
            range(1, max(count for _, _, count in self._numbers) + 1)
        )
        if len(present) == shards * len(files):
            if any(tensor.shape and name not in self._recorded for name, tensor in tensors.items()):
                report.note(
                    f"{self._directory}: headers record no full shapes, and without its last shard a tensor looks "
                    f"smaller: make sure that {plural(shards, 'rank')} saved it"
                )
            return
        spread = [self._shards_of(tensor) for tensor in tensors.values()]
        everywhere = shards > 1 and any(numbers == [*range(1, shards + 1)] for numbers in spread)
        doubtful: list[str] = []
        for (name, tensor), numbers in zip(tensors.items(), spread):
            if name in self._recorded or not tensor.shape:
                continue
            file_numbers = {self._numbers[chunk.file][1] for chunk in tensor.chunks}
            lacking = [
                shard for shard in range(1, shards + 1) if not any((shard, file) in present for file in file_numbers)
            ]
            if not lacking:
                continue
            first_cut = len(numbers) > 1 and numbers == [*range(1, len(numbers) + 1)]
            if everywhere and first_cut and lacking == [*range(len(numbers) + 1, shards + 1)]:
                problem = (
                    f"has chunks in shards 1 to {numbers[-1]}, other tensors in {shards}, and of shard "
                    f"{number_ranges(lacking)} file {number_ranges(sorted(file_numbers))} is missing"
                )
                faults[name] = tensor_fault(self._directory, name, problem, "bring the missing files")
            else:
                doubtful.append(name)
        if doubtful:
            report.warn(
                f"{self._directory}: not every shard has every file, and the headers record no full shapes: if a file "
                f"was lost, {plural(len(doubtful), 'tensor')} would look smaller: " + listing(doubtful)
            )

    def _shards_of(self, tensor: ChunkedTensor) -> list[int]:
        """The numbers of the shards that have different chunks, in the order of the chunks."""
        places = {chunk.offsets: self._numbers[chunk.file][0] for chunk in tensor.chunks}
        return [places[offsets] for offsets in sorted(places)]
