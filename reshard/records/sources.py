"""Source files as runs of a conversion read them, so that one goes on only where the other read the same.

A run may read only some of them, so each file is recorded by itself, and runs agree if the files that both have
read are the same.

Times are unreliable: copies have others, and another checkpoint can be given the same times. So a source file is
identified by its size, its headers, and samples of its contents: all of a few small values, such as ``global_step``,
and some bytes of every tensor. Two steps of a training, or two models of which only some tensors differ, differ in
these; a copy does not. In an object store a request costs more, so there the samples are of a few tensors, different
ones in each rank's file, and the object's ETag is compared as well. Runs on several machines may have no file in
common. Then only the small values that all ranks share can be compared.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.checkpoints import CheckpointIndex, FileHandles, Tensor, files_alike
from reshard.storage import costs_of, read_each, reading
from reshard.storage.store import LOCAL
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


# Bytes of each sample; number of samples of a tensor from this size on, and of a file in an object store.
_BYTES = 256
_PLACES = 4
_LARGE = 4 << 20
_FEW = 8
# Number of samples that one thread reads, one after the other.
_TOGETHER = 64
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
        contents: digest of samples of its contents; in an object store also of its ETag.
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
        samples: (offset, bytes) ranges in all other tensors, ascending.
    """

    digest: str
    common: tuple[Tensor, ...]
    of_rank: tuple[Tensor, ...]
    samples: tuple[tuple[int, int], ...]

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
            tuple(sorted(place for name in names if name not in chosen for place in _places(tensors[name]))),
        )

    @property
    def value_names(self) -> str:
        """A digest of the names of the values that all ranks should share."""
        return short_digest(*(repr(tensor.name).encode() for tensor in self.common))

    def groups(self, rank: int, few: bool) -> list[Sequence[tuple[int, int]]]:
        """The (offset, bytes) ranges of a rank's samples in groups, the values that all ranks should share first."""
        samples = self.samples
        if few and len(samples) > _FEW:
            places = ((rank * _FEW + number + 1) * _GOLDEN % 1 for number in range(_FEW))
            samples = tuple(samples[int(place * len(samples))] for place in places)
        values = [extent for tensor in self.common for extent in tensor.extents]
        of_rank = [extent for tensor in self.of_rank for extent in tensor.extents]
        parts = [samples[first : first + _TOGETHER] for first in range(0, len(samples), _TOGETHER)]
        return [values, of_rank, *parts]


def _places(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The (offset, bytes) ranges of samples of a tensor: its middle, or several places spread evenly."""
    places = _PLACES if tensor.nbytes >= _LARGE else 1
    for number in range(places):
        extent, rest = divmod((2 * number + 1) * len(tensor.extents), 2 * places)
        offset, size = tensor.extents[extent]
        count = min(_BYTES, size)
        yield offset + (size - count) * rest // (2 * places), count


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

    costs = costs_of(indexes[ranks[0]].path) if ranks else LOCAL
    # Objects cannot be mapped, and have an ETag.
    few = not costs.mappable
    groups = [(rank, *group) for rank in ranks for group in enumerate(structures[rank].groups(rank, few))]

    def read(group: tuple[int, int, Sequence[tuple[int, int]]]) -> str:
        rank, number, ranges = group
        with reading(indexes[rank].path), handles.borrow(indexes[rank].path) as file:
            # Not in the first, which is equal on all ranks.
            version = [str(file.status().changed).encode()] if few and number == 1 else []
            return digest_of(itertools.chain(read_each(file, ranges), version))

    if costs.remote:
        with thread_pool(4 * costs.in_flight) as pool:
            digests = list(pool.map(read, groups))
    else:
        digests = list(map(read, groups))
    contents: dict[int, list[str]] = {}
    for (rank, *_), digest in zip(groups, digests):
        contents.setdefault(rank, []).append(digest)
    return [_source_file(rank, indexes[rank], structures[rank], contents[rank]) for rank in ranks]


def _source_file(rank: int, index: CheckpointIndex, structure: _HeaderStructure, contents: Sequence[str]) -> SourceFile:
    headers = repr((index.format, structure.digest, index.crc, sorted(index.metadata.items())))
    return SourceFile(
        rank,
        index.size,
        short_digest(headers.encode()),
        short_digest(*map(str.encode, contents)),
        structure.value_names,
        contents[0],
    )
