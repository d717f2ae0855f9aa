"""The bytes of a checkpoint file that is to be written, laid out before any content is at hand.

A layout is a list of *segments* in file order: literal bytes (headers), and places for ranges of a
tensor's bytes. Whoever writes the file walks the segments and fills the places, so a file is written
once, from front to back, and no tensor has to be in memory. Layouts of thousands of tensors, or of
tensors of many records, cost little: segments are made as they are asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

from reshard.checkpoints.dtypes import INT4, ITEM_SIZES, SAFETENSORS_NAMES, TEXT, can_hold
from reshard.checkpoints.safetensors_index import LENGTH_SIZE, LONGEST_HEADER, METADATA
from reshard.checkpoints.tensors import content_size, logical_shape
from reshard.errors import CheckpointError
from reshard.names import as_pattern
from reshard.wording import quoted

RECORD_LIMIT = 512 << 20
"""Most bytes of a tensor in one `.ckpt` record, as MindSpore writes them."""

_ALIGNMENT = 8


class OutputTensor(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: parameter name.
        dtype: MindSpore's name of the element type.
        dims: shape; for a `.ckpt`, as it shall be recorded ([0] with content is a scalar).
        nbytes: bytes of content.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    nbytes: int


class Literal(NamedTuple):
    """Bytes of the file that are known already: ``data`` at ``offset``."""

    offset: int
    data: bytes


class Data(NamedTuple):
    """Bytes ``start`` to ``stop`` of a tensor, in C order, at ``offset`` of the file.

    ``tensor`` is its index in the sequence that was laid out.
    """

    offset: int
    tensor: int
    start: int
    stop: int


class _Run(NamedTuple):
    """``repeats`` times: ``literal``, then the next ``piece`` bytes of ``tensor`` from ``start`` on."""

    literal: bytes
    tensor: int = 0
    start: int = 0
    piece: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class OutputLayout:
    """A file to be written.

    Attributes:
        size: bytes of the file.
        runs: the file in short form; use `segments`.
    """

    size: int
    runs: tuple[_Run, ...]

    def segments(self) -> Iterator[Union[Literal, Data]]:
        """The file from its first byte to its last, without gaps; empty segments are left out."""
        offset = 0
        for literal, tensor, start, piece, repeats in self.runs:
            for _ in range(repeats):
                if literal:
                    yield Literal(offset, literal)
                    offset += len(literal)
                if piece:
                    yield Data(offset, tensor, start, start + piece)
                    offset += piece
                    start += piece


def lay_out_ckpt(tensors: Sequence[OutputTensor], record_limit: int = RECORD_LIMIT) -> OutputLayout:
    """Lay out a `.ckpt` file, byte for byte as MindSpore writes one, without a CRC.

    Args:
        tensors: what to write, in this order; names must differ.
        record_limit: most bytes of content per record; text is never divided, because MindSpore
            cannot join it.

    Raises:
        CheckpointError: a tensor's type does not exist in `.ckpt` files.
    """
    _check(tensors, "ckpt")
    runs = []
    for index, tensor in enumerate(tensors):
        limit = tensor.nbytes if tensor.dtype == TEXT else _whole_elements(tensor, record_limit)
        full = tensor.nbytes // limit if limit else 0
        rest = tensor.nbytes - full * limit
        if full:
            runs.append(_Run(_record_header(tensor, limit), index, 0, limit, full))
        if rest or not full:
            runs.append(_Run(_record_header(tensor, rest), index, full * limit, rest))
    return _output(runs)


def lay_out_safetensors(tensors: Sequence[OutputTensor], metadata: Optional[Mapping[str, str]] = None) -> OutputLayout:
    """Lay out a safetensors file as MindSpore marks them: metadata ``format: ms`` and Int4 marks.

    The data begins at a multiple of 8 bytes. Tensors keep their order, unless one of them would then
    begin where its elements are not aligned, which some readers refuse: then the types of larger
    elements come first.

    Args:
        tensors: what to write; names must differ.
        metadata: further entries of the metadata.

    Raises:
        CheckpointError: safetensors has no such type, or a name that collides with the metadata.
    """
    _check(tensors, "safetensors")
    known = {"format": "ms", "remove_redundancy": "False", **(metadata or {})}
    for tensor in tensors:
        if tensor.name in known or tensor.name == METADATA:
            raise CheckpointError(
                f"{quoted(tensor.name)}: in safetensors a parameter of this name collides with the metadata",
                parameter=tensor.name,
                hint=f"write --format ckpt, or leave it out with --exclude {as_pattern(tensor.name)}",
            )
    marks = {tensor.name: INT4 for tensor in tensors if tensor.dtype == INT4}
    order = _aligned_order(tensors)
    header: dict[str, object] = {METADATA: {**known, **marks}}
    offset = 0
    for index in order:
        tensor = tensors[index]
        header[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(logical_shape(tensor.dtype, tensor.dims, tensor.nbytes)),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_SIZE + len(text)) % _ALIGNMENT)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes; safetensors allows {LONGEST_HEADER}",
            hint="write --format ckpt",
        )
    runs = [_Run(len(text).to_bytes(LENGTH_SIZE, "little") + text)]
    runs += [_Run(b"", index, 0, tensors[index].nbytes) for index in order if tensors[index].nbytes]
    return _output(runs)


def lay_out_copy(size: int) -> OutputLayout:
    """Lay out a file of ``size`` bytes that are taken over as they are, as one tensor of bytes."""
    return _output([_Run(b"", 0, 0, size)])


def _whole_elements(tensor: OutputTensor, limit: int) -> int:
    """The record limit in whole elements, so that a record never ends inside one."""
    item_size = tensor.nbytes // max(1, math.prod(logical_shape(tensor.dtype, tensor.dims, tensor.nbytes)))
    return max(item_size, limit - limit % item_size) if item_size else limit


def _check(tensors: Sequence[OutputTensor], format: str) -> None:
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
            raise ValueError(f"{tensor} is not what a file can hold, or comes twice")
        names.add(tensor.name)


def _aligned_order(tensors: Sequence[OutputTensor]) -> Sequence[int]:
    offset = 0
    for tensor in tensors:
        if tensor.nbytes and offset % ITEM_SIZES[tensor.dtype]:
            return sorted(range(len(tensors)), key=lambda index: -ITEM_SIZES[tensors[index].dtype])
        offset += tensor.nbytes
    return range(len(tensors))


def _output(runs: Sequence[_Run]) -> OutputLayout:
    return OutputLayout(sum(run.repeats * (len(run.literal) + run.piece) for run in runs), tuple(runs))


def _record_header(tensor: OutputTensor, content: int) -> bytes:
    """Everything of a record before its ``content`` bytes; see `ckpt_index` for the messages."""
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
