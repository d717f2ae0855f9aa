"""metadata.json as typed records. Reading checks types and ranges only; `placing` compares it with the files.

The file of a large job has hundreds of megabytes: every holder of a slice is listed with all holders of the slice.
So equal lists of ranks are kept once while it is parsed, then layouts and groups of files.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reshard.defaults import MAX_DEVICES
from reshard.forms.checkpoint2.form import METADATA, parse_key
from reshard.storage import read_small, reading
from reshard.storage.json_text import Fields, JsonError, integers, parse_json
from reshard.text.messages import quoted

_AGAIN = "copy the directory again from the original, or use another iteration"
_DESCRIPTIONS, _STORED = "state_dict_metadata", "storage_data"
_GROUP = "rank_group"
_MOST_DIMENSIONS = 64
_INT64 = 1 << 63
_LONGEST_NAME = 255
_ENDING = ".safetensors"

MOST_BYTES = 1 << 33
"""Largest metadata.json."""


def read_metadata(directory: str) -> Metadata | None:
    """Read the metadata.json of an iteration; None without one."""
    path = os.path.join(directory, METADATA)
    with reading(path, hint=_AGAIN), contextlib.suppress(FileNotFoundError):
        lists: dict[tuple[int, ...], list[int]] = {}

        def compact(members: dict[str, Any]) -> None:
            # Every holder of a slice lists all its holders.
            group = members.get(_GROUP)
            if isinstance(group, list) and all(type(rank) is int for rank in group):
                members[_GROUP] = lists.setdefault(tuple(group), group)

        return _Reader(path).read(Fields(parse_json(read_small(path, MOST_BYTES), compact=compact), METADATA))
    return None


class _Reader:
    def __init__(self, path: str) -> None:
        self._metadata = Metadata(path)
        self._files: dict[str, int] = {}
        self._places: dict[SliceRecord, int] = {}
        # Equal objects are kept once.
        self._unique: dict[Any, Any] = {}
        # By the identity of their list.
        self._groups: dict[int, RankGroup] = {}

    def read(self, content: Fields) -> Metadata:
        for name, record in content.members(_DESCRIPTIONS):
            self._metadata.tensors[name] = self._description(record, quoted(name))
        self._read_stored(content.fields(_STORED))
        self._check_numbers()
        return self._metadata

    def _description(self, record: Fields, where: str) -> TensorRecord:
        shape = _sizes(record, "global_shape")
        dtype = record.fields("properties").optional_text("dtype") or ""
        cuts = None if record.is_null("axis_fragmentations") else _sizes(record, "axis_fragmentations")
        layout = None if record.is_null("layout") else self._layout(record.fields("layout"), where)
        numbers, shapes = [], []
        for chunk in record.entries("chunk"):
            fields = Fields(chunk, f"{where}: chunk")
            offset = fields.integers("global_offset", 0, _INT64)
            if len(offset) != 1:
                raise JsonError(f"{where}: global_offset is not the number of a slice")
            numbers.append(offset[0])
            shapes.append(_sizes(fields, "local_shape"))
        chunks = Chunks(tuple(numbers), tuple(dict.fromkeys(shapes)))
        return TensorRecord(self._once(dtype.lower()), self._once(shape), self._once(cuts), layout, self._once(chunks))

    def _layout(self, record: Fields, where: str) -> LayoutRecord:
        axes = []
        for entry in record.entries("tensor_map"):
            several = entry if isinstance(entry, list) else [entry]
            numbers = integers(several, f"{where}: tensor_map", -1, _MOST_DIMENSIONS)
            axes.append(tuple(axis for axis in numbers if axis >= 0))
        ranks = record.integers("rank_list", 0, MAX_DEVICES)
        matrix = record.integers("device_matrix", 1, MAX_DEVICES + 1)
        interleaved = "interleaved_parallel" in record and record.flag("interleaved_parallel")
        layout: LayoutRecord = self._once(
            LayoutRecord(self._once(matrix), self._once(tuple(axes)), self._once(ranks), interleaved)
        )
        return layout

    def _once(self, value: Any) -> Any:
        # Records are equal to plain tuples of the same values.
        return self._unique.setdefault((type(value), value), value)

    def _read_stored(self, content: Fields) -> None:
        stored = self._metadata.stored
        for key in content:
            parsed = parse_key(key)
            if parsed is None:
                raise JsonError(f"{_STORED} holds {quoted(key)}, which is no name and number of a slice")
            name, number = parsed
            slices = stored.get(name)
            if slices is None:
                slices = stored[name] = SliceRecords()
            slices.add(number, self._stored_slice(key, content.entries(key)))

    def _stored_slice(self, key: str, holders: list[Any]) -> int:
        """Read a stored slice; returns its place."""
        entries: list[tuple[int, int]] = []
        groups: dict[RankGroup, None] = {}
        for holder in holders:
            fields = Fields(holder, quoted(key))
            entries.append((self._file(fields.text("file_name"), key), fields.integer("storage_rank", 0, MAX_DEVICES)))
            groups[self._group(fields)] = None
        if not entries:
            raise JsonError(f"{quoted(key)}: no file is listed")
        if len(groups) == 1:
            (ranks,) = groups
        else:
            ranks = self._ranks({rank for group in groups for rank in group})
        record = SliceRecord(tuple(sorted(entries)), ranks)
        place = self._places.get(record)
        if place is None:
            if len(set(record.entries)) < len(entries):
                raise JsonError(f"{quoted(key)}: a file is listed twice")
            place = self._places[record] = len(self._metadata.places)
            self._metadata.places.append(record)
        return place

    def _group(self, fields: Fields) -> RankGroup:
        if _GROUP not in fields or fields.is_null(_GROUP):
            return ()
        place = id(fields.entries(_GROUP))
        group = self._groups.get(place)
        if group is None:
            group = self._groups[place] = self._ranks(fields.integers(_GROUP, 0, MAX_DEVICES))
        return group

    def _ranks(self, ranks: Iterable[int]) -> RankGroup:
        group: RankGroup = self._once(tuple(sorted(set(ranks))))
        return group

    def _file(self, name: str, key: str) -> int:
        number = self._files.get(name)
        if number is None:
            # Only names in the directory: no path may lead out of it.
            fits = name.endswith(_ENDING) and name != _ENDING and "/" not in name and "\0" not in name
            if not fits or len(name.encode()) > _LONGEST_NAME:
                raise JsonError(f"{quoted(key)}: {quoted(name)} is no name of a {_ENDING} file in this directory")
            number = self._files[name] = len(self._metadata.files)
            self._metadata.files.append(name)
        return number

    def _check_numbers(self) -> None:
        """Check that the sections list the same tensors and no slice twice."""
        for name, slices in self._metadata.stored.items():
            if name not in self._metadata.tensors:
                raise JsonError(f"{_STORED} lists {quoted(name)}, which {_DESCRIPTIONS} does not")
            if len(set(slices.numbers)) < len(slices):
                raise JsonError(f"{_STORED} lists a slice of {quoted(name)} twice")


def _sizes(record: Fields, key: str) -> tuple[int, ...]:
    return record.integers(key, 0, _INT64)


Entries = tuple[tuple[int, int], ...]
RankGroup = tuple[int, ...]


class LayoutRecord(NamedTuple):
    """A recorded layout.

    Attributes:
        device_matrix: sizes of the axes of devices, slowest first.
        tensor_map: per dimension the axes that cut it, counted from the right, most significant first.
        rank_list: the ranks, in the order of the device matrix.
        interleaved: whether the flag of interleaved parallelism is set.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    rank_list: tuple[int, ...]
    interleaved: bool


class TensorRecord(NamedTuple):
    """The metadata of a tensor.

    Attributes:
        dtype: its recorded type, in lower case; empty if not recorded.
        shape: of the full tensor.
        cuts: slices per dimension, or None where they are not recorded.
        layout: None where every holder has the whole tensor.
        chunks: number and shape of every slice.
    """

    dtype: str
    shape: tuple[int, ...]
    cuts: tuple[int, ...] | None
    layout: LayoutRecord | None
    chunks: Chunks


class Chunks(NamedTuple):
    """Numbers and shapes, each shape once, of a tensor's slices; parameters with equal cuts share one object."""

    numbers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


class SliceRecord(NamedTuple):
    """The place of a slice; slices in the same files of the same ranks share one record.

    Attributes:
        entries: file (its place in `Metadata.files`) and storage rank.
        ranks: all ranks recorded for the slice, ascending.
    """

    entries: Entries
    ranks: RankGroup


class SliceRecords:
    """The places of one tensor's slices."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._places = array("q")

    def add(self, number: int, place: int) -> None:
        """Add a slice, and the place of its `SliceRecord` in `Metadata.places`."""
        self._numbers.append(number)
        self._places.append(place)

    @property
    def numbers(self) -> Sequence[int]:
        return self._numbers

    @property
    def key(self) -> bytes:
        """Equal for tensors with slices in the same files."""
        return self._numbers.tobytes() + self._places.tobytes()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._numbers, self._places)

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass
class Metadata:
    """The content of a metadata.json."""

    path: str
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    stored: dict[str, SliceRecords] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    places: list[SliceRecord] = field(default_factory=list)
