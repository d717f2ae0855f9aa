"""The layout of a checkpoint file to write, before any content is read.

A layout is a list of *segments* in file order: literal bytes (headers), and places for ranges of a tensor's bytes. A
writer iterates over the segments and fills the places, so a file is written once, from front to back, and no tensor
has to be in memory. Segments are created lazily, so layouts of thousands of tensors, or of tensors of many records,
cost little.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.checkpoints.formats.dtypes import INT4, ITEM_SIZES, SAFETENSORS_NAMES, TEXT, can_hold
from reshard.checkpoints.formats.tensors import LENGTH_SIZE, LONGEST_HEADER, METADATA, content_size, logical_shape
from reshard.errors import CheckpointError
from reshard.text.messages import as_pattern, quoted

RECORD_LIMIT = 512 << 20
"""Maximum bytes of a tensor in one `.ckpt` record, as in MindSpore."""

DEDUPLICATED = "remove_redundancy"
"""The metadata's key for a save of which each slice is on one rank only."""

MINDSPORE_METADATA = {"format": "ms", DEDUPLICATED: "False"}
"""Metadata of complete safetensors files of MindSpore."""

_ALIGNMENT = 8


class OutputTensor(NamedTuple):
    """A tensor to write.

    Attributes:
        name: parameter name.
        dtype: MindSpore's name of the element type.
        dims: shape; for a `.ckpt`, the dimensions to record ([0] with content is a scalar).
        nbytes: bytes of content.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    nbytes: int


class Literal(NamedTuple):
    """Literal bytes of the file: ``data`` at ``offset``."""

    offset: int
    data: memoryview


class Data(NamedTuple):
    """Bytes ``start`` to ``stop`` of a tensor, in C order, at ``offset`` of the file.

    ``tensor`` is its index in the layout's sequence of tensors.
    """

    offset: int
    tensor: int
    start: int
    stop: int


class CheckedEntry(NamedTuple):
    """Bytes of a file whose CRC-32 the file holds, filled in when they are written.

    Attributes:
        start: offset of the first byte.
        stop: one past the last.
        places: offsets of the CRC, 4 bytes in little-endian order each, ascending.
    """

    start: int
    stop: int
    places: tuple[int, ...]


class WrittenRecord(NamedTuple):
    """Where a tensor lies in a file, for metadata outside of it.

    Attributes:
        tensor: the tensor.
        offset: where its record begins; 0 where the file has a header.
        length: the record's bytes; -1 where the file has a header.
    """

    tensor: OutputTensor
    offset: int
    length: int


class OutputLayout:
    """A file to write, in columns: files may hold hundreds of thousands of tensors.

    It is a sequence of *runs*: literal bytes, then a piece of a tensor, repeated with the next pieces.

    Args:
        begin: the first bytes of the file; used without a copy, because they may be many MB.

    Attributes:
        size: bytes of the file.
        entries: bytes with a CRC in the file, in file order; their CRCs are zero in the literals.
        records: the records of forms whose metadata lists them, in file order.
    """

    entries: Sequence[CheckedEntry] = ()
    records: Sequence[WrittenRecord] = ()

    def __init__(self, begin: bytearray | None = None) -> None:
        self.size = 0
        self._literals = bytearray() if begin is None else begin
        # Per run: the end of its literal, the tensor, its first byte, the bytes of a piece, and the repeats.
        self._ends = array("Q")
        self._tensors = array("I")
        self._starts = array("Q")
        self._pieces = array("Q")
        self._repeats = array("I")
        if begin is not None:
            self.add(b"")

    def add(self, literal: bytes, tensor: int = 0, start: int = 0, piece: int = 0, repeats: int = 1) -> None:
        """Add a run: ``repeats`` times ``literal``, then the next ``piece`` bytes of ``tensor`` from ``start`` on."""
        literal_start = self._ends[-1] if self._ends else 0
        self._literals += literal
        self._ends.append(len(self._literals))
        self._tensors.append(tensor)
        self._starts.append(start)
        self._pieces.append(piece)
        self._repeats.append(repeats)
        self.size += repeats * (len(self._literals) - literal_start + piece)

    def segments(self) -> Iterator[Literal | Data]:
        """The file from its first byte to its last, without gaps and empty segments."""
        # Without a copy: a header may have many MB, and files of a group share it.
        literals = memoryview(self._literals).toreadonly()
        offset = begin = 0
        for end, tensor, start, piece, repeats in zip(
            self._ends, self._tensors, self._starts, self._pieces, self._repeats
        ):
            literal, begin = literals[begin:end], end
            for _ in range(repeats):
                if literal:
                    yield Literal(offset, literal)
                    offset += len(literal)
                if piece:
                    yield Data(offset, tensor, start, start + piece)
                    offset += piece
                    start += piece

    @property
    def ends_in_literal(self) -> bool:
        return bool(self._pieces) and not self._pieces[-1]

    def order(self) -> Iterator[int]:
        """The tensors with data, in the order of the file, each once."""
        last = -1
        for tensor, piece in zip(self._tensors, self._pieces):
            if piece and tensor != last:
                yield tensor
                last = tensor


def lay_out_ckpt(tensors: Iterable[OutputTensor], record_limit: int = RECORD_LIMIT) -> OutputLayout:
    """Lay out a `.ckpt` file, byte for byte as MindSpore writes one, without a CRC.

    Args:
        tensors: the tensors in file order; names must differ.
        record_limit: maximum bytes of content per record; text is never divided, because MindSpore cannot join it.
    """
    layout = OutputLayout()
    for index, tensor in enumerate(_checked(tensors, "ckpt")):
        limit = tensor.nbytes if tensor.dtype == TEXT else _whole_elements(tensor, record_limit)
        full = tensor.nbytes // limit if limit else 0
        remainder = tensor.nbytes - full * limit
        if full:
            layout.add(_record_header(tensor, limit), index, 0, limit, full)
        if remainder or not full:
            layout.add(_record_header(tensor, remainder), index, full * limit, remainder)
    return layout


def lay_out_safetensors(tensors: Sequence[OutputTensor], metadata: Mapping[str, str] | None = None) -> OutputLayout:
    """Lay out a safetensors file, by default with MindSpore's metadata: ``format: ms``, and Int4 marks.

    The data begins at a multiple of 8 bytes. Tensors keep their order if all elements are then aligned, because some
    readers refuse others; else the types of larger elements come first.
    """
    entries = MINDSPORE_METADATA if metadata is None else metadata
    for tensor in _checked(tensors, "safetensors"):
        if tensor.name in entries or tensor.name == METADATA:
            raise CheckpointError(
                f"{quoted(tensor.name)}: in safetensors a parameter of this name collides with the metadata",
                parameter=tensor.name,
                hint=f"leave it out with --exclude {as_pattern(tensor.name)}, or write rank files with --format ckpt",
            )
    marks = {tensor.name: INT4 for tensor in tensors if tensor.dtype == INT4}
    order = _aligned_order(tensors)
    # As bytes, piece by piece: as objects the header takes ten times its size.
    header = bytearray(bytes(LENGTH_SIZE) + b"{" + _json(METADATA) + b":" + _json({**entries, **marks}))
    offset = 0
    for index in order:
        tensor = tensors[index]
        shape = logical_shape(tensor.dtype, tensor.dims, tensor.nbytes)
        header += b',%s:{"dtype":"%s","shape":[%s],"data_offsets":[%d,%d]}' % (
            _json(tensor.name),
            SAFETENSORS_NAMES[tensor.dtype].encode(),
            b",".join(b"%d" % size for size in shape),
            offset,
            offset + tensor.nbytes,
        )
        offset += tensor.nbytes
    header += b"}"
    header += b" " * (-len(header) % _ALIGNMENT)
    length = len(header) - LENGTH_SIZE
    if length > LONGEST_HEADER:
        raise CheckpointError(
            f"{len(tensors)} tensors need a header of {length} bytes; safetensors allows {LONGEST_HEADER}",
            hint="write --format ckpt",
        )
    header[:LENGTH_SIZE] = length.to_bytes(LENGTH_SIZE, "little")
    layout = OutputLayout(header)
    for index in order:
        if tensors[index].nbytes:
            layout.add(b"", index, 0, tensors[index].nbytes)
    return layout


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def lay_out_copy(size: int) -> OutputLayout:
    """Lay out a copy of a file of ``size`` bytes, as one tensor of bytes."""
    layout = OutputLayout()
    layout.add(b"", 0, 0, size)
    return layout


def _whole_elements(tensor: OutputTensor, limit: int) -> int:
    """The record limit in whole elements, so that a record never ends inside one."""
    item_size = tensor.nbytes // max(1, math.prod(logical_shape(tensor.dtype, tensor.dims, tensor.nbytes)))
    return max(item_size, limit - limit % item_size) if item_size else limit


def _checked(tensors: Iterable[OutputTensor], format: str) -> Iterator[OutputTensor]:
    names = set()
    for tensor in tensors:
        if not can_hold(format, tensor.dtype):
            ending = "safetensors" if format == "safetensors" else ".ckpt"
            raise CheckpointError(
                f"{quoted(tensor.name)} is {tensor.dtype}, which {ending} files cannot hold",
                parameter=tensor.name,
                hint=f"choose another --format, or leave it out with --exclude {as_pattern(tensor.name)}",
            )
        expected = content_size(tensor.dtype, tensor.dims, tensor.nbytes)
        if tensor.name in names or expected not in (None, tensor.nbytes):
            raise ValueError(f"{tensor} has an impossible size, or comes twice")
        names.add(tensor.name)
        yield tensor


def _aligned_order(tensors: Sequence[OutputTensor]) -> Sequence[int]:
    offset = 0
    for tensor in tensors:
        if tensor.nbytes and offset % ITEM_SIZES[tensor.dtype]:
            return sorted(range(len(tensors)), key=lambda index: -ITEM_SIZES[tensors[index].dtype])
        offset += tensor.nbytes
    return range(len(tensors))


def _record_header(tensor: OutputTensor, content: int) -> bytes:
    """The bytes of a record before its ``content`` bytes; see `ckpt_index` for the messages."""
    dims = b"".join(b"\x08" + _varint(dim) for dim in tensor.dims)
    dtype = tensor.dtype.encode()
    inner = dims + b"\x12" + _varint(len(dtype)) + dtype + b"\x1a" + _varint(content)
    name = tensor.name.encode()
    outer = b"\x0a" + _varint(len(name)) + name + b"\x12" + _varint(len(inner) + content) + inner
    return b"\x0a" + _varint(len(outer) + content) + outer


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
