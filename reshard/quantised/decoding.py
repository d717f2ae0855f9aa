"""A checkpoint whose quantised tensors are dequantised when they are read.

Code that cuts, renames, packs or casts tensors sees elements of a floating point type; only readers of bytes see codes.
A slice is decoded when it is read, with the few scales that it needs: codes and scales of whole tensors are never in
memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.checkpoints.checkpoint import (
    ByName,
    Checkpoint,
    EditedCheckpoint,
    GlobalTensor,
    ReadBytes,
    Recipe,
    Sharding,
    StoredSlice,
)
from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.tensors import file_ranges
from reshard.errors import CheckpointError
from reshard.layout import Box, Grid, boxes_of_range, inside, intersection, placed, shape_of, volume_of, whole_box
from reshard.quantised.schemes import Quantisation, Quantised, Recognised, TypedShape, recognise
from reshard.quantised.values import (
    E2M1,
    EXPONENTS,
    MAX_TABLES,
    MEMORY_PER_BYTE,
    Bytes,
    Floats,
    Tables,
    Words,
    decode_scales,
    dequantise,
    factors_of,
    multiply,
    numbers_of,
    scale_box,
    tables_of,
    tables_of_exponents,
)
from reshard.storage import fill, read_json, reading
from reshard.text.messages import quoted

_CONFIG = "config.json"
_MAX_CONFIG = 1 << 22
# Of msmodelslim; it lists every tensor.
_DESCRIPTION = "quant_model_description.json"
_MAX_DESCRIPTION = 1 << 28
# Scales, with the arrays that are made of them, take half as much memory as the working memory: it has these bytes for
# each.
_MEMORY_PER_SCALE = 64
_MEMORY_PER_EXPONENT = 8
# The scales and tables that a thread used last: the next rows mostly need the same ones.
_RECENT = threading.local()
# Bytes of a word that holds several codes.
_WORD_BYTES = 4
# Bytes of copies of scales that are compared at a time.
_COMPARED = 1 << 18


@dataclass(frozen=True)
class _Scales:
    """Scales, zero points or sizes of one tensor.

    Attributes:
        name: the stored tensor.
        dtype: its type.
        shape: scales per dimension; the stored tensor may lack dimensions of one scale.
        slices: its slices in the files, which together hold all scales.
        copies: whole copies in other files that no strategy lists: they must be equal.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]
    copies: tuple[StoredSlice, ...] = ()

    def read(self, read: ReadBytes, box: Box) -> Words:
        """The scales of a box, as words."""
        item_size = ITEM_SIZES[self.dtype]
        words = np.empty(shape_of(box), f"u{item_size}")
        for source in self.slices:
            common = intersection(source.box, box)
            if common is None:
                continue
            # Whole rows of the slice are read, and columns chosen in memory: there are few scales.
            row_shape = shape_of(source.box)[1:]
            (first, last), origin = common[0], source.box[0][0]
            row_bytes = math.prod(row_shape) * item_size
            rows = np.empty((last - first, *row_shape), words.dtype)
            read(source, (first - origin) * row_bytes, rows.data.cast("B"))
            around = ((first, last), *source.box[1:])
            words[inside(common, box)] = rows[inside(common, around)]
        return words

    def check_copies(self, read: ReadBytes) -> None:
        """Refuse copies that differ: each file has scales of its own."""
        nbytes = math.prod(self.shape) * ITEM_SIZES[self.dtype]
        expected, actual = (np.empty(min(nbytes, _COMPARED), "u1") for _ in range(2))
        for start in range(0, nbytes if self.copies else 0, _COMPARED):
            count = min(_COMPARED, nbytes - start)
            read(self.slices[0], start, expected[:count].data)
            for copy in self.copies:
                read(copy, start, actual[:count].data)
                if not np.array_equal(expected[:count], actual[:count]):
                    raise _different(self.name, self.slices[0], copy)


def _different(name: str, a: StoredSlice, b: StoredSlice) -> CheckpointError:
    return CheckpointError(
        f"{quoted(name)} differs in {a.path} and {b.path}, and the source strategy does not list it",
        file=b.path,
        rank=b.rank,
        parameter=name,
        hint="without --dequantize, codes are copied as they are",
    )


@dataclass(frozen=True, eq=False)
class _Scaled:
    """The scales of a box.

    Attributes:
        owner: decodes the tensor.
        box: which scales they are.
        scales: as numbers; exponents, for which tables exist, as they are stored.
        offsets: the zero points; None without them.
        factors: for vector arithmetic; None where tables are needed.
    """

    owner: object
    box: Box
    scales: Words
    offsets: Floats | None
    factors: Floats | None


class ScaledCodes:
    """Decodes one tensor; see `checkpoint.Decoding`."""

    def __init__(
        self, tensor: Quantised, dtype: str, scales: _Scales, offsets: _Scales | None, sizes: _Scales | None
    ) -> None:
        self.name = tensor.name
        self.stored = tensor.codes
        self.beside = tensor.sources[1:]
        self.dtype = dtype
        self._tensor = tensor
        self._scales = scales
        self._offsets = offsets
        self._sizes = sizes
        self._per_byte: int = numbers_of(tensor.code).shape[1]
        self._sharing = math.prod(map(min, tensor.block, tensor.shape))
        self._compared = False
        # One set of tables has the results of all scales; vector arithmetic is faster, but not for these types.
        tables = tensor.code == E2M1 or dtype == "Float16"
        self._exponents = tables and scales.dtype in EXPONENTS and offsets is None

    def stored_bytes(self, elements: int) -> int:
        return -(-elements // self._per_byte)

    def to(self, dtype: str) -> ScaledCodes:
        return ScaledCodes(self._tensor, dtype, self._scales, self._offsets, self._sizes)

    def read_into(self, read: ReadBytes, source: StoredSlice, start: int, out: memoryview, memory: memoryview) -> int:
        """Fill ``out`` with elements of a slice; see `checkpoint.Decoding`."""
        if not self._compared:
            for each in (self._scales, self._offsets, self._sizes):
                if each is not None:
                    each.check_copies(read)
            if self._sizes is not None:
                columns = self._tensor.columns or self._tensor.shape[-1]
                _columns_of(self._tensor, self._sizes, read, range(columns, columns + 1))
            self._compared = True
        item_size = ITEM_SIZES[self.dtype]
        words, room = np.frombuffer(out, f"u{item_size}"), np.frombuffer(memory, np.uint8)
        per_byte = self._per_byte
        first = start // item_size
        last = first + len(words)
        shape = shape_of(source.box)
        row = len(memory) // MEMORY_PER_BYTE * per_byte
        most_scales = max(1, len(memory) // (_MEMORY_PER_EXPONENT if self._exponents else _MEMORY_PER_SCALE))
        most = most_scales * self._sharing
        if shape[-1] > row:
            most = min(most, row)
        overflowed = 0
        # A byte of two codes is decoded whole, also where only one of them is needed.
        edges = [first // per_byte, -(-first // per_byte), last // per_byte, -(-last // per_byte)]
        for begin, end in itertools.pairwise(edges):
            low = begin * per_byte
            for part in boxes_of_range(shape, low, end * per_byte, most):
                box = placed(part, source.box)
                high = low + volume_of(part)
                scaled = self._scaled(read, scale_box(box, self._tensor.block), source.box, most_scales)
                needed = slice(max(low, first), min(high, last))
                whole = needed == slice(low, high)
                elements = words[low - first : high - first] if whole else np.empty(high - low, words.dtype)
                # Codes are narrower than elements. From the end of their memory, none is replaced before it is decoded.
                codes = elements.view("u1")[-((high - low) // per_byte) :]
                read(source, low // per_byte, codes.data)
                overflowed += self._decode(codes, scaled, box, elements, room)
                if not whole:
                    words[needed.start - first : needed.stop - first] = elements[needed.start - low : needed.stop - low]
                low = high
        return overflowed

    def _decode(self, codes: Bytes, scaled: _Scaled, box: Box, out: Words, memory: Bytes) -> int:
        """Decode a box of elements; returns how many became infinite."""
        code, block = self._tensor.code, self._tensor.block
        scales = scale_box(box, block)
        if scaled.factors is not None:
            factors = scaled.factors[inside(scales, scaled.box)]
            multiply(codes, code, factors, self.dtype, block, box, out, memory)
            return 0
        if self._exponents:
            tables, numbers = tables_of_exponents(code, self.dtype), scaled.scales[inside(scales, scaled.box)]
            return dequantise(codes, tables, numbers, block, box, out, memory)
        if volume_of(scales) <= MAX_TABLES:
            recent: tuple[object, Box, Tables] | None = getattr(_RECENT, "tables", None)
            if recent is None or recent[:2] != (scaled, scales):
                index = inside(scales, scaled.box)
                offsets = None if scaled.offsets is None else scaled.offsets[index]
                recent = _RECENT.tables = (
                    scaled,
                    scales,
                    tables_of(code, scaled.scales[index], self.dtype, offsets),
                )
            numbers = np.arange(volume_of(scales), dtype="u2").reshape(shape_of(scales))
            return dequantise(codes, recent[2], numbers, block, box, out, memory)
        overflowed = low = 0
        per_byte = self._per_byte
        for part in boxes_of_range(shape_of(box), 0, len(out), len(codes) // 2 * per_byte):
            high = low + volume_of(part)
            codes_of_part = codes[low // per_byte : high // per_byte]
            overflowed += self._decode(codes_of_part, scaled, placed(part, box), out[low:high], memory)
            low = high
        return overflowed

    def _scaled(self, read: ReadBytes, box: Box, around: Box, most: int) -> _Scaled:
        """At least the scales of a box; ahead of it in the slice ``around``, at most ``most`` of them."""
        recent: _Scaled | None = getattr(_RECENT, "scaled", None)
        if recent is not None and recent.owner is self:
            if intersection(recent.box, box) == box:
                return recent
            # Slices are mostly read in order: the next scales are read, too.
            of_slice = scale_box(around, self._tensor.block)
            corner = [low - first for (low, _), (first, _) in zip(box, of_slice)]
            start = int(np.ravel_multi_index(corner, shape_of(of_slice)))
            ahead = placed(next(boxes_of_range(shape_of(of_slice), start, volume_of(of_slice), most)), of_slice)
            # An invalid scale is an error for elements that are needed only.
            with contextlib.suppress(CheckpointError):
                if intersection(ahead, box) == box:
                    recent = _RECENT.scaled = self._read_scaled(read, ahead)
                    return recent
        recent = _RECENT.scaled = self._read_scaled(read, box)
        return recent

    def _read_scaled(self, read: ReadBytes, box: Box) -> _Scaled:
        words = self._scales.read(read, box)
        scales: Words = words
        offsets = factors = None
        # Of exponents, only the largest word is no number.
        if not self._exponents or words.max() == 0xFF:
            scales = self._checked(decode_scales(words, self._scales.dtype), box)
        if self._offsets is not None:
            offsets = decode_scales(self._offsets.read(read, box), self._offsets.dtype)
            # msmodelslim writes zeros for symmetric weights. Int8 has no negative zero, whose sign they would change.
            if self._tensor.code == "Int8" and not offsets.any():
                offsets = None
        if offsets is None and not self._exponents:
            factors = factors_of(self._tensor.code, scales, self.dtype)
        return _Scaled(self, box, scales, offsets, factors)

    def _checked(self, scales: Floats, box: Box) -> Floats:
        """The scales; refuses those that are not positive numbers."""
        if not (scales.min() > 0 and scales.max() < np.inf):
            valid = (scales > 0) & (scales < np.inf)
            first = tuple(np.argwhere(~valid)[0].tolist())
            place, value = [at + low for at, (low, _) in zip(first, box)], scales[first]
            point = tuple((at, at + 1) for at in place)
            file = next(each for each in self._scales.slices if intersection(each.box, point) is not None)
            raise CheckpointError(
                f"{file.path}: the scale {quoted(self._scales.name)} at {place} is {value}, so this part of "
                f"{quoted(self._tensor.name)} cannot be dequantised",
                file=file.path,
                rank=file.rank,
                parameter=self._tensor.name,
                hint="the checkpoint is damaged or was quantised wrongly; without --dequantize, it is copied unchanged",
            )
        return scales


def _columns_of(tensor: Quantised, sizes: _Scales, read: ReadBytes, expected: range) -> int:
    """The elements of a row of the model's tensor by its stored sizes; refuses others than its words have."""
    words = sizes.read(read, whole_box(sizes.shape))
    rows, columns = map(int, words.view(f"i{words.itemsize}"))
    if rows != tensor.shape[0] or columns not in expected:
        fitting = expected[0] if len(expected) == 1 else f"{expected[0]} to {expected[-1]}"
        raise CheckpointError(
            f"{sizes.slices[0].path}: {quoted(sizes.name)} is {rows} x {columns}, but {quoted(tensor.codes)} and its "
            f"scales have {tensor.shape[0]} x {fitting} codes",
            file=sizes.slices[0].path,
            rank=sizes.slices[0].rank,
            parameter=tensor.name,
            hint="the checkpoint is damaged; without --dequantize, it is copied unchanged",
        )
    return columns


def _without_padding(base: Checkpoint, recognised: Recognised, handles: FileHandles) -> Recognised:
    """The quantised tensors with the columns of their models: where a scale is a row's, only stored sizes show them."""

    def read(source: StoredSlice, start: int, out: memoryview) -> None:
        with reading(source.path), handles.borrow(source.path) as file:
            for offset, length in file_ranges(source.extents, start, len(out)):
                fill(file, offset, out[:length], source.rank)
                out = out[length:]

    tensors = dict(recognised.tensors)
    for name, each in tensors.items():
        most = each.shape[-1]
        if each.sizes is not None and each.block[-1] >= most:
            fewest = most - _WORD_BYTES * numbers_of(each.code).shape[1] + 1
            sizes = _scales(base, each.sizes, each, (2,))
            columns = _columns_of(each, sizes, read, range(fewest, most + 1))
            tensors[name] = each._replace(columns=None if columns == most else columns)
    return recognised._replace(tensors=tensors)


class DequantisedCheckpoint(EditedCheckpoint):
    """A checkpoint whose quantised tensors have the type, one of `dtypes.CAST_TO`, and shape of numbers."""

    def __init__(self, base: Checkpoint, recognised: Recognised, dtype: str) -> None:
        dropped = {source for each in recognised.tensors.values() for source in each.sources}
        dropped.update(recognised.left_out)
        new_names = {each.codes: name for name, each in recognised.tensors.items()}
        stored = [name for name in base.tensors if name in new_names or name not in dropped]
        recipes = {new_names.get(name, name): Recipe((name,)) for name in stored}
        values = {*base.values(), *base.without_layout()} - dropped
        super().__init__(base, recipes, values, "", (), {name: name for name in base.unseen})
        self.tensors = _Tensors(base, recognised, dtype, recipes.keys())
        self._quantised = recognised.tensors

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """The files that hold a tensor, or its codes, per sharding."""
        quantised = self._quantised.get(tensor.name)
        return self.base.present(tensor if quantised is None else self.base.tensors[quantised.codes])


class _Tensors(ByName[GlobalTensor]):
    """Tensors by name; quantised ones are created on first access."""

    def __init__(self, base: Checkpoint, recognised: Recognised, dtype: str, names: Collection[str]) -> None:
        super().__init__(names)
        self._base = base
        self._quantised = recognised.tensors
        self._dtype = dtype
        self._created: dict[str, GlobalTensor] = {}

    def __getitem__(self, name: str) -> GlobalTensor:
        if name not in self._names:
            raise KeyError(name)
        tensor = self._quantised.get(name)
        if tensor is None:
            return self._base.tensors[name]
        created = self._created.get(name)
        if created is None:
            codes = self._base.tensors[tensor.codes]
            shape = tensor.scale_shape or (1,)
            scales = _scales(self._base, tensor.scales, tensor, shape)
            offsets = None if tensor.offsets is None else _scales(self._base, tensor.offsets, tensor, shape)
            sizes = None if tensor.sizes is None else _scales(self._base, tensor.sizes, tensor, (2,))
            created = self._created[name] = GlobalTensor(
                name,
                self._dtype,
                ITEM_SIZES[self._dtype],
                tensor.shape,
                tuple(_unpacked(sharding, tensor, codes) for sharding in codes.shardings),
                codes.shards,
                decoding=ScaledCodes(tensor, self._dtype, scales, offsets, sizes),
            )
        return created


@dataclass(frozen=True)
class _Unpacked:
    """A sharding of codes, in elements."""

    grid: Grid
    base: Sharding

    def holders(self, slice_number: int) -> Sequence[int]:
        return self.base.holders(slice_number)

    def stored_box(self, slice_number: int) -> Box:
        return self.grid.slice_box(slice_number)


def _unpacked(sharding: Sharding, tensor: Quantised, codes: GlobalTensor) -> Sharding:
    """A sharding of codes, in elements; it must not cut groups of codes that have a dimension of their own."""
    if tensor.shape == codes.shape:
        return sharding
    edges = sharding.grid.edges
    if any(sharding.stored_box(at) != sharding.grid.slice_box(at) for at in range(sharding.grid.slice_count)):
        raise CheckpointError(f"{quoted(tensor.codes)} is stored in boxes that are no grid", parameter=tensor.codes)
    if len(codes.shape) > len(tensor.shape):
        if len(edges[-1]) > 2:
            raise CheckpointError(f"{quoted(tensor.codes)} is cut within groups of codes", parameter=tensor.codes)
        edges = (*edges[:-2], tuple(edge * codes.shape[-1] for edge in edges[-2]))
    packed = codes.item_size * numbers_of(tensor.code).shape[1]
    return _Unpacked(Grid((*edges[:-1], tuple(edge * packed for edge in edges[-1]))), sharding)


def _scales(base: Checkpoint, name: str, tensor: Quantised, shape: tuple[int, ...]) -> _Scales:
    stored = base.tensors.get(name)
    if stored is None:
        entries = {holder: base.indexes[holder].tensors[name] for holder in base.holders(name)}
        copies = [
            StoredSlice(base.files[holder], holder, entry.extents, whole_box(shape))
            for holder, entry in entries.items()
        ]
        types = [(entry.dtype, entry.shape) for entry in entries.values()]
        for copy, of_copy in zip(copies, types):
            if of_copy != types[0]:
                raise _different(name, copies[0], copy)
        return _Scales(name, types[0][0], shape, (copies[0],), tuple(copies[1:]))
    for sharding, present in zip(stored.shardings, base.present(stored)):
        slices: list[StoredSlice] = []
        for number in range(sharding.grid.slice_count):
            holders = [holder for holder in sharding.holders(number) if holder in present]
            box = sharding.stored_box(number)
            if not holders and volume_of(box):
                break
            if holders:
                extents = base.indexes[holders[0]].tensors[name].extents
                stored_slice = StoredSlice(base.files[holders[0]], holders[0], extents, _lengthened(box, shape))
                # Where boxes are no grid, one box may hold several slices.
                if stored_slice not in slices:
                    slices.append(stored_slice)
        else:
            return _Scales(name, stored.dtype, shape, tuple(slices))
    raise CheckpointError(
        f"a slice of the scales {quoted(name)} is in no readable file, and {quoted(tensor.name)} needs them",
        parameter=tensor.name,
    )


def _lengthened(box: Box, shape: Sequence[int]) -> Box:
    """A box of scales with the dimensions of one scale that the stored tensor lacks."""
    return (*box, *((0, size) for size in shape[len(box) :])) if len(box) <= len(shape) else box[: len(shape)]


def quantisation_of(directory: str, dtype: str, config: Mapping[str, Any] | None = None) -> Quantisation:
    """The settings of quantised tensors, from the files of a directory; ``config`` replaces its config.json.

    Raises:
        ReshardError: a file is not a JSON object, or cannot be read.
    """
    place = getattr(config, "path", os.path.join(directory, _CONFIG))
    if config is None:
        config = read_json(place, _MAX_CONFIG)
    return Quantisation(dtype, config, read_json(os.path.join(directory, _DESCRIPTION), _MAX_DESCRIPTION), place)


def dequantised(
    checkpoint: Checkpoint, quantisation: Quantisation, handles: FileHandles | None
) -> tuple[Checkpoint, Recognised]:
    """The dequantised checkpoint, or the checkpoint itself if nothing is quantised.

    Args:
        checkpoint: with codes.
        quantisation: the settings.
        handles: read the sizes of weights in words; None where only names count, and rows end with their words.

    Raises:
        CheckpointError: a tensor is quantised in an unknown way, or scales do not fit.
    """
    tensors = stored_tensors(checkpoint)
    try:
        recognised = recognise(tensors, quantisation)
    except CheckpointError as error:
        if error.parameter in tensors and error.file is None:
            error.rank = checkpoint.holders(error.parameter)[0]
            error.file = checkpoint.files[error.rank]
            error.message = f"{error.file}: {error.message}"
        raise
    if not recognised.tensors:
        return checkpoint, recognised
    if handles is not None:
        recognised = _without_padding(checkpoint, recognised, handles)
    return DequantisedCheckpoint(checkpoint, recognised, quantisation.dtype), recognised


def stored_tensors(checkpoint: Checkpoint) -> dict[str, TypedShape]:
    """Types and shapes of all tensors and values of a checkpoint."""
    stored = {name: TypedShape(tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items()}
    for name in (*checkpoint.values(), *checkpoint.without_layout()):
        entry = checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]
        stored[name] = TypedShape(entry.dtype, entry.shape)
    return stored
