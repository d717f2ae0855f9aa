"""Files of full weights, divided as Hugging Face and MindSpore divide them, and the maps that finish their directories.

Hugging Face fills one file after the other, in the order of the names, up to a size. MindSpore's
``unified_safetensors`` gives every tensor, the largest first, to the file with the fewest bytes so far. Equal
names and sizes give equal files.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.forms.full.form import (
    HUGGINGFACE,
    HUGGINGFACE_INDEX,
    HYPER_PARAMETERS,
    UNIFIED,
    UNIFIED_MAP,
    WEIGHTS_ENDING,
)
from reshard.forms.ranks.naming import FileNames
from reshard.forms.target import FinishingFile, Section, TargetForm, WholeLayouts

HUGGINGFACE_FORMAT, UNIFIED_FORMAT = "pt", "ms"
"""The ``format`` in the files' metadata; Hugging Face's loaders refuse unknown ones."""

MAX_SHARD_SIZE = 5 * 10**9
"""Bytes of tensors in one of Hugging Face's files, unless it holds one tensor only."""

UNIFIED_SIZE = 3 << 30
"""Bytes of tensors in one of the files of `unified_safetensors`, about."""

Sizes = Sequence[tuple[str, int]]
"""Names of tensors and their bytes, in the order of writing."""


class FullFile(NamedTuple):
    """A file of full weights."""

    name: str
    tensors: list[str]


def split_for_huggingface(sizes: Sizes, max_shard_size: int = MAX_SHARD_SIZE) -> list[list[str]]:
    """The names of every file's tensors, divided as ``save_pretrained`` divides them.

    A new file begins where the next tensor would pass the limit. A tensor larger than the limit gets a file of its
    own, before the file being filled.
    """
    files: list[list[str]] = []
    filling: list[str] = []
    filled = 0
    for name, nbytes in sizes:
        if nbytes > max_shard_size:
            files.append([name])
            continue
        if filled + nbytes > max_shard_size:
            files.append(filling)
            filling, filled = [], 0
        filling.append(name)
        filled += nbytes
    return [*files, filling] if filling else files


def split_for_unified(sizes: Sizes, max_shard_size: int | None = None) -> list[list[str]]:
    """The names of every file's tensors, divided as ``unified_safetensors`` divides them.

    The largest first, each into the file with the fewest bytes so far. The number of files is the total by
    3 GiB, so a file may be a little larger. A file passes an explicit limit only if it holds one tensor.
    """
    total = sum(nbytes for _, nbytes in sizes)
    count = min(-(-total // (max_shard_size or UNIFIED_SIZE)), len(sizes))
    files: list[list[str]] = [[] for _ in range(max(count, 1))]
    # Bytes so far and number of every file; of equals, the first file comes first.
    heap = [(0, number) for number in range(len(files))]
    for name, nbytes in sorted(sizes, key=lambda entry: -entry[1]):
        filled, number = heap[0]
        if max_shard_size is not None and filled and filled + nbytes > max_shard_size:
            # The emptiest file is too full, so all are.
            heapq.heappush(heap, (nbytes, len(files)))
            files.append([name])
            continue
        files[number].append(name)
        heapq.heapreplace(heap, (filled + nbytes, number))
    return [names for names in files if names]


def huggingface_files(sizes: Sizes, max_shard_size: int = MAX_SHARD_SIZE) -> list[FullFile]:
    """The files of a Hugging Face directory: ``model.safetensors``, or ``model-00001-of-00003.safetensors`` ..."""
    split = split_for_huggingface(sizes, max_shard_size)
    if len(split) == 1:
        return [FullFile("model.safetensors", split[0])]
    return [
        FullFile(f"model-{number:05d}-of-{len(split):05d}.safetensors", names)
        for number, names in enumerate(split, start=1)
    ]


def unified_files(sizes: Sizes, max_shard_size: int | None = None) -> list[FullFile]:
    """The files of a directory of unified weights: ``part0.safetensors`` ..."""
    split = split_for_unified(sizes, max_shard_size)
    return [FullFile(f"part{number}.safetensors", names) for number, names in enumerate(split)]


def huggingface_index(files: Sequence[FullFile], sizes: Sizes) -> bytes | None:
    """The content of ``model.safetensors.index.json``; None for a single file, which has no index."""
    if len(files) == 1:
        return None
    return (json.dumps(_map(files, sizes), indent=2, sort_keys=True) + "\n").encode()


def unified_map(files: Sequence[FullFile], sizes: Sizes) -> bytes:
    return json.dumps(_map(files, sizes), indent=4).encode()


def _map(files: Iterable[FullFile], sizes: Sizes) -> Mapping[str, Mapping[str, object]]:
    return {
        "metadata": {"total_size": sum(nbytes for _, nbytes in sizes)},
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }


class FullDirectory(TargetForm):
    """The files of a directory of full weights; see `TargetForm`.

    Args:
        name: ``unified`` or ``huggingface``.
        tensors: in file order.
        values: bytes of every value beside them, by name.
        max_shard_size: bytes of tensors in a file; by default that of the form's own writer.
        extra_files: configuration and tokenizer of a Hugging Face model.
        source_order: the tensors' names in the order of the source, which decides between unified files of equal
            size; by default the order of ``tensors``.
        weights: the values that are weights of one element, and go to the files of tensors in unified directories.
    """

    by_rank = False
    takes_everything = True
    format = "safetensors"

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, GlobalTensor],
        values: Mapping[str, int],
        max_shard_size: int | None = None,
        extra_files: Sequence[FinishingFile] = (),
        source_order: Sequence[str] | None = None,
        weights: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._extra_files = extra_files
        self._sizes: Sizes = [(tensor.name, tensor.nbytes) for tensor in tensors.values()]
        if name == HUGGINGFACE:
            self.metadata: Mapping[str, str] | None = {"format": HUGGINGFACE_FORMAT}
            self._sizes = [*self._sizes, *values.items()]
            self._files = huggingface_files(self._sizes, max_shard_size or MAX_SHARD_SIZE)
        else:
            self.metadata = {"format": UNIFIED_FORMAT}
            self._sizes = [*self._sizes, *((name, values[name]) for name in weights)]
            sizes = dict(self._sizes)
            order = [*tensors] if source_order is None else source_order
            shared_out = [(name, sizes[name]) for name in (*order, *weights)]
            self._files = unified_files(shared_out, max_shard_size) if sizes else []
            placed = set(weights)
            hyper_parameters = [name for name in values if name not in placed]
            # Readers refuse a map without tensors.
            if hyper_parameters and self._files:
                self._files = [*self._files, FullFile(HYPER_PARAMETERS, hyper_parameters)]
        self._file_of_value = {
            value: number for number, file in enumerate(self._files) for value in file.tensors if value in values
        }
        names = [file.name[: -len(WEIGHTS_ENDING)] for file in self._files]
        self.names = FileNames("file{rank}", dict(enumerate(names)))
        self.sections: Sequence[Section] = [
            Section(
                number,
                range(number, number + 1),
                WholeLayouts(tensors, frozenset(name for name in file.tensors if name not in values)),
                label=file.name,
            )
            for number, file in enumerate(self._files)
        ]

    @property
    def count(self) -> int:
        return len(self._files)

    def section_of(self, file: int) -> Section:
        return self.sections[file]

    def takes_value(self, name: str, file: int) -> bool:
        return self._file_of_value.get(name) == file

    def finishing(self) -> Sequence[FinishingFile]:
        if self.name == UNIFIED:
            files = [file for file in self._files if file.name != HYPER_PARAMETERS]
            return [FinishingFile(UNIFIED_MAP, lambda: [unified_map(files, self._sizes)])]
        index = huggingface_index(self._files, self._sizes)
        last = [] if index is None else [FinishingFile(HUGGINGFACE_INDEX, lambda: [index])]
        return [*self._extra_files, *last]
