"""What metadata.json says, as records; what recurs in it is one object."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

Entries = tuple[tuple[int, int], ...]
RankGroup = tuple[int, ...]


class RecordedLayout(NamedTuple):
    """A layout as it is recorded.

    Attributes:
        device_matrix: sizes of the axes of devices, slowest first.
        tensor_map: per dimension the axes that it is cut over, counted from the right, most significant first.
        rank_list: the ranks, in the order of the device matrix.
        interleaved: whether the flag of interleaved parallelism is set.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    rank_list: tuple[int, ...]
    interleaved: bool


class Description(NamedTuple):
    """What is said of a tensor.

    Attributes:
        dtype: its type in the words of the writer, in small letters; empty where nothing is said.
        shape: of the full tensor.
        cuts: slices per dimension, or None where they are not recorded.
        layout: None where every holder has the whole tensor.
        chunks: number and shape of every slice.
    """

    dtype: str
    shape: tuple[int, ...]
    cuts: Optional[tuple[int, ...]]
    layout: Optional[RecordedLayout]
    chunks: Chunks


class Chunks(NamedTuple):
    """The slices of a tensor; those of parameters that are cut alike are one object.

    Attributes:
        numbers: their numbers.
        shapes: their shapes, each once.
    """

    numbers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


class StoredSlice(NamedTuple):
    """Where one slice lies; of slices that lie in the same files of the same ranks there is one.

    Attributes:
        entries: file (its place in `Metadata.files`) and storage rank.
        ranks: every rank that is said to hold the slice, ascending.
    """

    entries: Entries
    ranks: RankGroup


class StoredSlices:
    """Where the slices of one tensor lie."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._places = array("q")

    def add(self, number: int, place: int) -> None:
        """A slice, and the place of its `StoredSlice` in `Metadata.places`."""
        self._numbers.append(number)
        self._places.append(place)

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the slices, in the order of the file."""
        return self._numbers

    @property
    def key(self) -> bytes:
        """Equal for tensors whose slices lie in the same files."""
        return self._numbers.tobytes() + self._places.tobytes()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Number and place of every slice."""
        return zip(self._numbers, self._places)

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass
class Metadata:
    """The content of a metadata.json.

    Attributes:
        path: the file.
        tensors: what is said of every tensor, by name, in the order of the file.
        stored: where the slices of every tensor lie, by name.
        files: names of all files that are named, each once.
        places: what `stored` refers to.
    """

    path: str
    tensors: dict[str, Description] = field(default_factory=dict)
    stored: dict[str, StoredSlices] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    places: list[StoredSlice] = field(default_factory=list)
