"""What makes two runs the same conversion, so that one may go on where the other stopped.

One part is the content of the strategies, step, filters, format and prefix. The other is the source
files: a run may read only some of them, so each file is recorded by itself, and runs agree if the files that both have
read are the same. Ranks, jobs and I/O options do not count.

Times are unreliable: copies have others, and another checkpoint can be given the same times. So a source file is
identified by its size, its headers, and samples of its contents: all of a few small values, such as ``global_step``,
and some bytes of a few tensors, different ones in each rank's file. Two steps of a training, or two models, differ in
these; a copy does not. Runs on several machines may have no file in common. Then only the small values that all ranks
share can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, get_type_hints

from reshard.checkpoints import CheckpointIndex, FileHandles, Literal, OutputLayout, Tensor
from reshard.checkpoints.formats.headers import ALL_FORMATS
from reshard.defaults import MAX_DEVICES
from reshard.forms import FORM_CLASSES
from reshard.forms.ranks.naming import FileNames
from reshard.layout import Layout
from reshard.storage import read_each, reading, storage_of
from reshard.storage.json_text import Fields, JsonError
from reshard.strategies import Strategy
from reshard.text.messages import quoted
from reshard.text.names import belongs_to_rank, is_value
from reshard.threads import thread_pool

_DIGEST_LENGTH = 16
# Readers of an identity's members, by the attribute's type.
_READERS: dict[object, Callable[[Fields, str], Any]] = {
    str: Fields.text,
    str | None: Fields.optional_text,
    tuple[str, ...]: Fields.texts,
    FileNames: lambda fields, key: FileNames.from_fields(fields.fields(key)),
    tuple[int, ...]: lambda fields, key: fields.integers(key, 0, MAX_DEVICES),
    int: lambda fields, key: fields.integer(key, 1, MAX_DEVICES + 1),
}


class Identity(NamedTuple):
    """The part of a conversion's identity that does not depend on source files.

    Attributes:
        source_strategy: digest of the source strategy's content.
        target_strategy: likewise of the target's; ``same`` if it is the source's under other names.
        ranks: number of target ranks of the whole conversion.
        step: the converted step; None if file names contain none.
        include: patterns of written parameters.
        exclude: patterns of skipped parameters.
        format: of the target files.
        names: of the target files.
        task: ``convert`` or ``recover``.
        form: the target form.
        division: digest of the division of tensors into files, if the strategy does not determine it.
        edits: digest of requested names and types; empty if unchanged.
        without_ranks: source ranks that counted as lost, ascending: they decide which replicas are read.
    """

    source_strategy: str
    target_strategy: str
    ranks: int
    step: str | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    format: str
    names: FileNames
    task: str = "convert"
    form: str = "ranks"
    division: str = ""
    edits: str = ""
    without_ranks: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """A short digest of all attributes."""
        return short_digest(self.to_json().encode())

    def file_of(self, rank: int) -> str:
        """The file of a target rank, relative to the target directory."""
        return f"{self.names.of(rank)}.{self.format}"

    def to_fields(self) -> dict[str, object]:
        """The JSON record, which `from_fields` reads."""
        return {**self._asdict(), "names": self.names.to_fields()}

    def to_json(self) -> str:
        """As text, the same for equal identities."""
        return json.dumps(self.to_fields(), sort_keys=True)

    @classmethod
    def from_fields(cls, fields: Fields) -> Identity:
        """An identity from members with its attributes' names.

        Raises:
            JsonError: a member is missing, unknown or invalid.
        """
        unknown = [key for key in fields if key not in cls._fields]
        if unknown:
            raise JsonError(f"{quoted(unknown[0])} is unknown")
        values = {
            name: _READERS[kind](fields, name)
            for name, kind in get_type_hints(cls).items()
            if name in fields or name not in cls._field_defaults
        }
        identity = cls(**values)
        if identity.format not in ALL_FORMATS:
            raise JsonError(f"{quoted(identity.format)} is not a format")
        if identity.form not in FORM_CLASSES:
            raise JsonError(f"{quoted(identity.form)} is not a form")
        return identity


def strategy_digest(strategy: Strategy) -> str:
    """A digest of a strategy's content as read, independent of its files."""
    strategy = strategy.original or strategy
    texts: dict[Layout, bytes] = {}
    hashed = hashlib.sha256()
    for stage in strategy.stages:
        hashed.update(f"{stage.number} {stage.first_rank} {stage.device_count}\n".encode())
        for name in sorted(stage.layouts):
            layout = stage.layouts[name]
            text = texts.get(layout)
            if text is None:
                text = texts[layout] = repr(dataclasses.astuple(layout)).encode()
            hashed.update(name.encode(errors="surrogateescape") + b"\0" + text + b"\n")
    return hashed.hexdigest()[:_DIGEST_LENGTH]


def header_digest(layout: OutputLayout) -> str | None:
    """A digest of all bytes of a file except tensor contents, in file order; None without any."""
    literals = (segment.data for segment in layout.segments() if isinstance(segment, Literal))
    first = next(literals, None)
    return None if first is None else digest_of(itertools.chain([first], literals))


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
_RECORD = rf"(\d{{1,9}})\.(\d{{1,20}})\.{_DIGESTS}\.(-?\d{{1,20}})\.(\d{{1,20}})\.(-?\d{{1,20}})"


class SourceFile(NamedTuple):
    """A source file as a run read it.

    Attributes:
        rank: source rank.
        size: bytes.
        headers: digest of its headers and its recorded CRC.
        contents: digest of samples of its contents.
        value_names: digest of the names of the sampled small values that are shared by all ranks.
        values: digest of their contents.
        modified: time of last modification, in nanoseconds; only a hint, because files get copied.
        inode: its inode; only a hint, too.
        changed: differs after every change, see `FileStatus`; a hint that writers cannot set.
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
        """Equal for the same content: size, headers and samples."""
        return self.size, self.headers, self.contents

    @property
    def place(self) -> tuple[int, int]:
        """Differs after the file was replaced, or modified and given its old time."""
        return self.inode, self.changed

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
        rank, size, headers, contents, value_names, values, *times = match.groups()
        modified, inode, changed = map(int, times)
        return cls(int(rank), int(size), headers, contents, value_names, values, modified, inode, changed)


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


class SourceSampler:
    """Samples source files; the structure of equal files is computed once.

    Args:
        handles: open source files.
    """

    def __init__(self, handles: FileHandles) -> None:
        self._handles = handles
        self._structures: dict[int, _HeaderStructure] = {}

    def look_at(self, indexes: Mapping[int, CheckpointIndex]) -> list[SourceFile]:
        """The source files of these ranks, ascending.

        Raises:
            ReshardError: a file can no longer be opened or read.
        """
        ranks = sorted(indexes)
        for index in indexes.values():
            if id(index.tensors) not in self._structures:
                self._structures[id(index.tensors)] = _HeaderStructure.of(index.tensors)
        storage = storage_of(indexes[ranks[0]].path) if ranks else None
        if storage is None or not storage.remote:
            return [self._file(rank, indexes[rank]) for rank in ranks]
        with thread_pool(4 * storage.in_flight) as pool:
            return list(pool.map(lambda rank: self._file(rank, indexes[rank]), ranks))

    def _file(self, rank: int, index: CheckpointIndex) -> SourceFile:
        structure = self._structures[id(index.tensors)]
        headers = repr((index.format, structure.digest, index.crc, sorted(index.metadata.items())))
        with reading(index.path), self._handles.borrow(index.path) as file:
            runs = structure.values()
            sampled = list(read_each(file, [*runs, *structure.samples(rank)]))
            values, samples = sampled[: len(runs)], sampled[len(runs) :]
            status = file.status()
        return SourceFile(
            rank,
            index.size,
            short_digest(headers.encode()),
            short_digest(*values, *samples),
            structure.value_names,
            short_digest(*values),
            status.modified,
            status.inode,
            status.changed,
        )
