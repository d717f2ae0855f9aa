"""Reading a directory of sharded safetensors, from headers alone."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.errors import CheckpointError, InputError
from reshard.forms.chunks import Chunk, ChunkedCheckpoint, ChunkedTensor, chunked_checkpoint
from reshard.forms.form import ReadRequest
from reshard.forms.full.contents import Contents
from reshard.forms.full.directory import extra_files_in, report_unread
from reshard.forms.hf_sharded.form import SHARD, shards_in
from reshard.forms.hf_sharded.headers import HeaderEntry, entries_of
from reshard.storage import is_directory, names_in
from reshard.text.messages import Report, as_pattern, listing, number_ranges, plural, quoted
from reshard.text.names import layers_in_order, natural_order


def read_shards(form: str, reading: ReadRequest) -> ChunkedCheckpoint:
    """Read a directory of shards.

    Raises:
        InputError: files are missing or damaged, or headers contradict each other.
        RetryableError: reading failed in a way that may pass.
    """
    names = names_in(reading.path) if is_directory(reading.path) else []
    directory = shards_in(reading.path, names)
    if directory is None:
        raise CheckpointError(
            f"{reading.path}: is one file of a sharded checkpoint",
            file=reading.path,
            hint=f"give the directory as SRC: {os.path.dirname(reading.path) or os.curdir}",
        )
    present = names if directory == reading.path else names_in(directory)
    files = natural_order(filter(SHARD.fullmatch, present))
    report_unread(directory, present, files, SHARD, None, reading.report)
    contents = Contents.read(directory, files, reading.handles, reading.damaged)
    shards = _Shards(directory, files, [contents.indexes[number] for number in range(len(files))])
    tensors, faults = shards.tensors()
    shards.check_files(tensors, faults, reading.report)
    checkpoint = chunked_checkpoint(form, directory, shards.indexes, tensors.values(), faults, shards.hint)
    checkpoint.extra_files = extra_files_in(directory, present, files)
    if reading.complete:
        checkpoint.check(reading.required)
    return checkpoint


class _Shards:
    """The files and their headers.

    Attributes:
        indexes: per file its entries; none where these have names of their own.
        hint: the cure for missing chunks.
    """

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
        """Every tensor by name, and why some cannot be read.

        Raises:
            CheckpointError: a header does not record the places of its chunks.
        """
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        kinds: dict[str, set[str]] = defaultdict(set)
        shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        entries_of_header: dict[tuple[int, int], list[tuple[HeaderEntry, Tensor]]] = {}
        referenced: list[object] = []
        for number, index in enumerate(self.indexes):
            # Files that are built alike share both.
            key = (id(index.tensors), id(index.metadata))
            if key not in entries_of_header:
                entries_of_header[key] = list(entries_of(index))
                referenced.append((index.tensors, index.metadata))
            entries = entries_of_header[key]
            has_own_names = any(entry.name != stored.name for entry, stored in entries)
            if has_own_names:
                self.indexes[number] = CheckpointIndex(index.path, index.format, index.size, {}, index.crc)
            for entry, stored in entries:
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
                    faults[name] = CheckpointError(
                        f"{self._directory}: {quoted(name)} has different {property_name} in its files: {alternatives}",
                        file=self._directory,
                        parameter=name,
                        hint=f"take the files of one save, or leave it out with --exclude {as_pattern(name)}",
                    )
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
                faults[name] = CheckpointError(
                    f"{self._directory}: {quoted(name)} has chunks in shards 1 to {numbers[-1]}, other tensors in "
                    f"{shards}, and of shard {number_ranges(lacking)} file {number_ranges(sorted(file_numbers))} is "
                    "missing",
                    file=self._directory,
                    parameter=name,
                    hint=f"bring the missing files, or leave it out with --exclude {as_pattern(name)}",
                )
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
