"""Source files as runs of a conversion read them, so that one goes on only where the other read the same.

A run may read only some of them, so each file is recorded by itself, and runs agree if the files that both have
read are the same.

Times are unreliable: copies have others, and another checkpoint can be given the same times. So a source file is
identified by its size, its headers, and samples of its contents: all of a few small values, such as ``global_step``,
and some bytes of a few tensors, different ones in each rank's file. Two steps of a training, or two models, differ in
these; a copy does not. Runs on several machines may have no file in common. Then only the small values that all ranks
share can be compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from reshard.checkpoints import CheckpointIndex, FileHandles, Tensor, files_alike
from reshard.storage import costs_of, read_each, reading
from reshard.text.names import belongs_to_rank, is_value
from reshard.threads import thread_pool

_DIGEST_LENGTH = 16


def short_digest(*parts: bytes) -> str:
    """A short digest of bytes in parts; their division does not matter."""
    return digest_of(parts)


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """Likewise, of parts from an iterator."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()[:_DIGEST_LENGTH]


# Number of sampled tensors of a file, and bytes of each sample.
_TENSORS = 8
_BYTES = 256
# Number of values outside the parameters that are read whole, and their maximum size.
_VALUES = 8
_VALUE_BYTES = 256
# Steps of this fraction of a list spread evenly and repeat late.
_GOLDEN = 0.6180339887498949
_DIGESTS = r"\.".join(4 * [r"([0-9a-f]{16})"])
_RECORD = rf"(\d{{1,9}})\.(\d{{1,20}})\.{_DIGESTS}"


class SourceFile(NamedTuple):
    """A source file as a run read it.

    Attributes:
        rank: source rank.
        size: bytes.
        headers: digest of its headers and its recorded CRC.
        contents: digest of samples of its contents.
        value_names: digest of the names of the sampled small values that are shared by all ranks.
        values: digest of their contents.
    """

    rank: int
    size: int
    headers: str
    contents: str
    value_names: str
    values: str

    @property
    def content(self) -> tuple[int, str, str]:
        """Equal for the same content: size, headers and samples."""
        return self.size, self.headers, self.contents

    @property
    def record(self) -> str:
        """As text: the name of an empty file."""
        return ".".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> SourceFile | None:
        """The file in a text from `record`; None for other text."""
        match = re.fullmatch(_RECORD, text)
        if match is None:
            return None
        rank, size, *digests = match.groups()
        return cls(int(rank), int(size), *digests)


class _HeaderStructure(NamedTuple):
    """The samples of files with equal structure.

    Attributes:
        digest: of their tensors' names, types, shapes and places.
        common: small values that all ranks should share, read whole.
        of_rank: likewise the rank's own.
        names: all other tensors with contents, sorted.
        tensors: all tensors by name.
    """

    digest: str
    common: tuple[Tensor, ...]
    of_rank: tuple[Tensor, ...]
    names: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _HeaderStructure:
        names = sorted(name for name, tensor in tensors.items() if tensor.nbytes)
        small = (tensors[name] for name in names if tensors[name].nbytes <= _VALUE_BYTES)
        common: list[Tensor] = []
        of_rank: list[Tensor] = []
        for tensor in filter(_is_value, small):
            values = of_rank if belongs_to_rank(tensor.name) else common
            if len(values) < _VALUES:
                values.append(tensor)
        chosen = {tensor.name for tensor in (*common, *of_rank)}
        return cls(
            digest_of(repr(tuple(tensor)).encode() for tensor in tensors.values()),
            tuple(common),
            tuple(of_rank),
            tuple(name for name in names if name not in chosen),
            tensors,
        )

    @property
    def value_names(self) -> str:
        """A digest of the names of the values that all ranks should share."""
        return short_digest(*(repr(tensor.name).encode() for tensor in self.common))

    def values(self) -> list[tuple[int, int]]:
        """The (offset, bytes) ranges of these values."""
        return [extent for tensor in self.common for extent in tensor.extents]

    def samples(self, rank: int) -> list[tuple[int, int]]:
        """The (offset, bytes) ranges of a rank's other samples."""
        ranges = [extent for tensor in self.of_rank for extent in tensor.extents]
        for number in range(min(_TENSORS, len(self.names))):
            place = (rank * _TENSORS + number + 1) * _GOLDEN % 1
            tensor = self.tensors[self.names[int(place * len(self.names))]]
            offset, size = tensor.extents[len(tensor.extents) // 2]
            count = min(_BYTES, size)
            ranges.append((offset + (size - count) // 2, count))
        return ranges


def _is_value(tensor: Tensor) -> bool:
    return is_value(tensor.name, tensor.nbytes // tensor.item_size)


def source_files(indexes: Mapping[int, CheckpointIndex], handles: FileHandles) -> list[SourceFile]:
    """The source files of some ranks as they are now, ascending.

    Raises:
        ReshardError: a file can no longer be opened or read.
    """
    ranks = sorted(indexes)
    structures: dict[int, _HeaderStructure] = {}
    for alike in files_alike(indexes):
        structures.update(dict.fromkeys(alike, _HeaderStructure.of(indexes[alike[0]].tensors)))

    def sampled(rank: int) -> SourceFile:
        return _sampled(rank, indexes[rank], structures[rank], handles)

    costs = costs_of(indexes[ranks[0]].path) if ranks else None
    if costs is None or not costs.remote:
        return list(map(sampled, ranks))
    with thread_pool(4 * costs.in_flight) as pool:
        return list(pool.map(sampled, ranks))


def _sampled(rank: int, index: CheckpointIndex, structure: _HeaderStructure, handles: FileHandles) -> SourceFile:
    headers = repr((index.format, structure.digest, index.crc, sorted(index.metadata.items())))
    runs = structure.values()
    with reading(index.path), handles.borrow(index.path) as file:
        contents = list(read_each(file, [*runs, *structure.samples(rank)]))
    values, samples = contents[: len(runs)], contents[len(runs) :]
    return SourceFile(
        rank,
        index.size,
        short_digest(headers.encode()),
        short_digest(*values, *samples),
        structure.value_names,
        short_digest(*values),
    )
