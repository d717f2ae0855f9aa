"""Source files as a run found them, so that another run knows whether it has the same before it.

Times tell little: files get copied, and another checkpoint can be given the times of this one. So a
source file is known by its size, by what its headers say, and by samples of its contents: all of a
few small values, such as ``global_step``, and some bytes of a few tensors, others in the file of each
rank. Two steps of a training, or two models, differ in these; a copy does not.

Runs on several machines may have no file in common. What tells then are the small values, which all
ranks have alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Optional

from reshard.checkpoints import CheckpointIndex, FileHandles, Tensor, reading_error
from reshard.errors import DamagedCheckpointError
from reshard.records.identity import digest_of, short_digest
from reshard.storage import ReadableFile, read_each, read_range, storage_of
from reshard.text.names import belongs_to_rank, is_value

# Tensors of a file of which some bytes are looked at, and how many of each.
_TENSORS = 8
_BYTES = 256
# Values outside the parameters that are looked at whole, and how large they may be.
_VALUES = 8
_VALUE_BYTES = 256
# Steps of this part of a list never come twice to the same place soon, and are spread evenly.
_GOLDEN = 0.6180339887498949
_DIGESTS = r"\.".join(4 * [r"([0-9a-f]{16})"])
_RECORD = re.compile(rf"(\d{{1,9}})\.(\d{{1,20}})\.{_DIGESTS}\.(-?\d{{1,20}})\.(\d{{1,20}})\.(-?\d{{1,20}})")


class SourceFile(NamedTuple):
    """A source file as a run found it.

    Attributes:
        rank: source rank.
        size: bytes.
        headers: digest of what its headers say, its recorded CRC included.
        contents: digest of samples of its contents.
        value_names: digest of the names of the small values that were looked at and are no rank's own.
        values: digest of what these hold.
        modified: time of last modification, in nanoseconds; only a hint, because files get copied.
        inode: its number on its file system; likewise.
        changed: what becomes another with every change, see `FileStatus`; likewise, but no writer can set it.
    """

    rank: int
    size: int
    headers: str
    contents: str
    value_names: str
    values: str
    modified: int
    inode: int
    changed: int

    @property
    def content(self) -> tuple[int, str, str]:
        """What has to be equal in the same file: size, headers and samples."""
        return self.size, self.headers, self.contents

    @property
    def place(self) -> tuple[int, int]:
        """What is another after the file was replaced, or written to and given its old time."""
        return self.inode, self.changed

    @property
    def record(self) -> str:
        """As text, the name of an empty file."""
        return ".".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Optional[SourceFile]:
        """What `record` made; None for other text."""
        match = _RECORD.fullmatch(text)
        if match is None:
            return None
        rank, size, headers, contents, value_names, values, *times = match.groups()
        modified, inode, changed = map(int, times)
        return cls(int(rank), int(size), headers, contents, value_names, values, modified, inode, changed)


@dataclass(frozen=True)
class _HeaderStructure:
    """What is to be looked at in files that are built alike.

    Attributes:
        digest: of their tensors' names, types, shapes and places.
        common: small values that all ranks should have alike, looked at whole.
        own: likewise those of the rank itself.
        names: all others that have contents, sorted.
        tensors: all tensors by name.
    """

    digest: str
    common: tuple[Tensor, ...]
    own: tuple[Tensor, ...]
    names: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _HeaderStructure:
        names = sorted(name for name, tensor in tensors.items() if tensor.nbytes)
        small = (tensors[name] for name in names if tensors[name].nbytes <= _VALUE_BYTES)
        common: list[Tensor] = []
        own: list[Tensor] = []
        for tensor in filter(_is_value, small):
            values = own if belongs_to_rank(tensor.name) else common
            if len(values) < _VALUES:
                values.append(tensor)
        chosen = {tensor.name for tensor in (*common, *own)}
        return cls(
            digest_of(repr(tuple(tensor)).encode() for tensor in tensors.values()),
            tuple(common),
            tuple(own),
            tuple(name for name in names if name not in chosen),
            tensors,
        )

    @property
    def value_names(self) -> str:
        """A digest of the names of the values that all ranks should have alike."""
        return short_digest(*(repr(tensor.name).encode() for tensor in self.common))

    def values(self) -> list[tuple[int, int]]:
        """The (offset, bytes) runs of these values."""
        return [extent for tensor in self.common for extent in tensor.extents]

    def samples(self, rank: int) -> list[tuple[int, int]]:
        """The (offset, bytes) runs that are looked at in a rank's file beside these values."""
        found = [extent for tensor in self.own for extent in tensor.extents]
        for number in range(min(_TENSORS, len(self.names))):
            place = (rank * _TENSORS + number + 1) * _GOLDEN % 1
            tensor = self.tensors[self.names[int(place * len(self.names))]]
            offset, size = tensor.extents[len(tensor.extents) // 2]
            count = min(_BYTES, size)
            found.append((offset + (size - count) // 2, count))
        return found


def _is_value(tensor: Tensor) -> bool:
    return is_value(tensor.name, tensor.nbytes // tensor.item_size)


class SourceSampler:
    """Looks at source files; what files that are built alike have in common is worked out once.

    Args:
        handles: open source files.
    """

    def __init__(self, handles: FileHandles) -> None:
        self._handles = handles
        self._structures: dict[int, _HeaderStructure] = {}

    def look_at(self, indexes: Mapping[int, CheckpointIndex]) -> list[SourceFile]:
        """The source files of these ranks, ascending.

        Raises:
            ReshardError: a file cannot be looked at or read any more.
        """
        ranks = sorted(indexes)
        for index in indexes.values():
            if id(index.tensors) not in self._structures:
                self._structures[id(index.tensors)] = _HeaderStructure.of(index.tensors)
        storage = storage_of(indexes[ranks[0]].path) if ranks else None
        if storage is None or not storage.remote:
            return [self._file(rank, indexes[rank]) for rank in ranks]
        with ThreadPoolExecutor(4 * storage.in_flight) as pool:
            return list(pool.map(lambda rank: self._file(rank, indexes[rank]), ranks))

    def _file(self, rank: int, index: CheckpointIndex) -> SourceFile:
        structure = self._structures[id(index.tensors)]
        said = repr((index.format, structure.digest, index.crc, sorted(index.metadata.items())))
        try:
            with self._handles.borrow(index.path) as file:
                runs = structure.values()
                found = _samples(file, [*runs, *structure.samples(rank)])
                values, samples = found[: len(runs)], found[len(runs) :]
                status = file.status()
        except OSError as error:
            raise reading_error(index.path, error) from error
        return SourceFile(
            rank,
            index.size,
            short_digest(said.encode()),
            short_digest(*values, *samples),
            structure.value_names,
            short_digest(*values),
            status.modified,
            status.inode,
            status.changed,
        )


def _samples(file: ReadableFile, runs: Sequence[tuple[int, int]]) -> list[bytes]:
    """Some bytes of a file, by offset and number."""
    if file.cipher is not None:
        return [_sample(file, *run) for run in runs]
    return list(read_each(file, runs))


def _sample(file: ReadableFile, offset: int, size: int) -> bytes:
    """Some bytes of a file; always the same where an encrypted file's tag tells that they are not what was saved.

    Whoever needs these bytes will find out, and another run is to know the file again.
    """
    try:
        return read_range(file, offset, size)
    except DamagedCheckpointError:
        return b"damaged"
