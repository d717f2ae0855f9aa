"""Tensors computed from several stored ones, naively: dequantised weights, and weights plus an adapter.

`quantised.recognise` finds codes, scales and blocks, for conversions and here. The number of a code, the scale of an
element and the rounding of the product are computed here: from the definition of the types, with indices of single
elements, in Float64, which holds every product exactly.

The product of an adapter's two thin matrices is computed in tiles, in Float64. The conversion multiplies and adds in
Float32, in an order that depends on the processor, and rounds once to the weight's type. So elements are not compared
bit by bit: each may differ from the exact result by a bound on these rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import AS_RECORDED, ShardReading
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.errors import CheckpointError
from reshard.text.messages import listing, quoted
from reshard.verification.boxes import Box, Shape, shape_of, whole_box
from reshard.verification.operations import decoded, half_unit, largest, words_as
from reshard.verification.stored import Content, SliceSet, Source, StoredTensor, Words

if TYPE_CHECKING:
    from reshard.lora import Scale
    from reshard.quantised import Quantisation

Numbers = npt.NDArray[np.float64]


def _number(code: int, exponent: int, mantissa: int, bias: int, greatest: int) -> float:
    """The number of a code with a sign; codes without sign above ``greatest`` are NaN."""
    size = code & (1 << (exponent + mantissa)) - 1
    if size > greatest:
        return math.nan
    power, digits = size >> mantissa, size & (1 << mantissa) - 1
    value = math.ldexp(digits, 1 - bias - mantissa)
    if power:
        value = math.ldexp((1 << mantissa) + digits, power - bias - mantissa)
    return -value if code >> (exponent + mantissa) else value


def _e5m2(code: int) -> float:
    return math.copysign(math.inf, -1 if code > 0x7F else 1) if code & 0x7F == 0x7C else _number(code, 5, 2, 15, 0x7B)


# Per type the number, or the two numbers, of each byte.
_TABLES: Mapping[str, Numbers] = {
    "Float8E4M3FN": np.array([_number(code, 4, 3, 7, 0x7E) for code in range(256)]),
    "Float8E5M2": np.array([_e5m2(code) for code in range(256)]),
    "Int8": np.array([code - 256.0 if code > 127 else float(code) for code in range(256)]),
    "E2M1": np.array([[_number(code & 15, 2, 1, 1, 7), _number(code >> 4, 2, 1, 1, 7)] for code in range(256)]),
}
# Per code in words its bits; half of its values are negative.
_BITS_IN_WORDS = {"Int4+8": 4, "Int8+128": 8}
_EXPONENTS = np.array([math.ldexp(1, code - 127) for code in range(255)] + [math.nan])


@dataclass(frozen=True)
class Dequantised(Content):
    """A dequantised tensor.

    Attributes:
        code: type of the bytes of the codes.
        block: elements per scale, per dimension of the codes.
        codes: the stored codes.
        scales: the stored scales.
        offsets: the stored zero points; None without them.
        swapped: whether the last two dimensions of the codes are swapped.
        sizes: the stored rows and columns of codes in words; None of other codes.
    """

    code: str
    block: Shape
    codes: Content
    scales: Content
    offsets: Content | None
    swapped: bool
    sizes: Content | None

    # NaN stays NaN; its other bits may differ.
    cast = True

    @property
    def stored_name(self) -> str:
        return self.name

    @property
    def sources(self) -> list[Content]:
        """The stored tensors of codes, scales, zero points and sizes."""
        return [each for each in (self.codes, self.scales, self.offsets, self.sizes) if each is not None]

    def paths(self) -> Collection[str]:
        return {path for source in self.sources for path in source.paths()}

    def read(self, box: Box, handles: FileHandles, room: Any = None) -> Words:
        if self.swapped:
            box = (*box[:-2], box[-1], box[-2])
        if self.sizes is not None and _integers(self.sizes, handles) != self.shape:
            shape = " x ".join(map(str, self.shape))
            raise CheckpointError(
                f"{quoted(self.sizes.name)} is not {shape}, the shape of {quoted(self.name)}", parameter=self.name
            )
        numbers = self._codes(box, handles)
        if self.offsets is not None:
            # Rounded to Float32, as the schemes define it; only fractional offsets differ.
            numbers = (numbers - self._spread(self.offsets, box, handles)).astype("<f4").astype("<f8")
        with np.errstate(over="ignore", invalid="ignore"):
            product = (numbers * self._spread(self.scales, box, handles)).astype("<f4")
        words = words_as(product.view("<u4"), "Float32", self.dtype)
        return np.ascontiguousarray(np.swapaxes(words, -1, -2)) if self.swapped else words

    def _codes(self, box: Box, handles: FileHandles) -> Numbers:
        """The numbers of the codes of a box."""
        if self.code in _BITS_IN_WORDS:
            bits = _BITS_IN_WORDS[self.code]
            places = np.arange(0, 32, bits, dtype="<u4")
            low, high = (edge // len(places) for edge in (box[-1][0], box[-1][1] + len(places) - 1))
            words = self.codes.read((*box[:-1], (low, high)), handles)
            codes = (words[..., None] >> places) % (1 << bits)
            first = box[-1][0] - low * len(places)
            codes = codes.reshape(*words.shape[:-1], -1)[..., first : first + box[-1][1] - box[-1][0]]
            return codes.astype("<f8") - (1 << bits - 1)
        table = _TABLES[self.code]
        if table.ndim == 1:
            return table[self.codes.read(box, handles).reshape(shape_of(box))]
        # Bytes with elements of the box, which may begin or end within a byte.
        low, high = box[-1]
        along = (low // 2, (high + 1) // 2)
        if len(self.codes.shape) == len(self.shape):
            stored = self.codes.read((*box[:-1], along), handles)
        else:
            width = self.codes.shape[-1]
            groups = (along[0] // width, -(-along[1] // width))
            stored = self.codes.read((*box[:-1], groups, (0, width)), handles)
            stored = stored.reshape(*shape_of(box)[:-1], -1)[..., along[0] - groups[0] * width :]
        pairs = table[stored]
        numbers = pairs.reshape(*pairs.shape[:-2], -1)
        return numbers[..., low % 2 : low % 2 + high - low]

    def _spread(self, scales: Content, box: Box, handles: FileHandles) -> Numbers:
        """The scale, or zero point, of each element of a box."""
        around = tuple((low // size, (high - 1) // size + 1) for (low, high), size in zip(box, self.block))
        # Scales may lack dimensions of which there is one.
        stored = tuple(around[: len(scales.shape)])
        words = scales.read(stored, handles)
        if scales.dtype in ("Float8E8M0", "UInt8"):
            values = _EXPONENTS[words]
        else:
            values = _TABLES["Int8"][words] if scales.dtype == "Int8" else decoded(words, scales.dtype)
        values = np.asarray(values).reshape(shape_of(around))
        places = [np.arange(low, high) // size - low // size for (low, high), size in zip(box, self.block)]
        return values[np.ix_(*places)]


def dequantised_tensors(
    base: Source, quantisation: Quantisation, handles: FileHandles
) -> tuple[dict[str, Content], set[str]]:
    """The dequantised tensors of a source, and the names of the values that remain.

    Raises:
        CheckpointError: a tensor is quantised in an unknown way, or scales do not fit.
    """
    # Imported only here: most sources have nothing quantised.
    from reshard.quantised import recognise, stored_tensors

    recognised = recognise(stored_tensors(base.checkpoint), quantisation)
    dropped = {source for each in recognised.tensors.values() for source in each.sources}
    dropped.update(recognised.left_out)
    tensors: dict[str, Content] = {name: tensor for name, tensor in base.tensors.items() if name not in dropped}
    for name, each in recognised.tensors.items():
        shape = (*each.shape[:-2], each.shape[-1], each.shape[-2]) if each.swapped else each.shape
        sizes = None if each.sizes is None else _entry(base, each.sizes)
        if sizes is not None and each.block[-1] >= shape[-1]:
            # Rows with one scale may end within a word.
            columns = _integers(sizes, handles)[-1]
            shape = (*shape[:-1], columns if 0 < columns <= shape[-1] else shape[-1])
        tensors[name] = Dequantised(
            name,
            quantisation.dtype,
            ITEM_SIZES[quantisation.dtype],
            shape,
            each.code,
            each.block,
            base.tensors[each.codes],
            _entry(base, each.scales),
            None if each.offsets is None else _entry(base, each.offsets),
            each.swapped,
            sizes,
        )
    return tensors, set(base.values) - dropped


def _entry(base: Source, name: str) -> Content:
    """A tensor, or a value as one."""
    if name in base.tensors:
        return base.tensors[name]
    files = base.values[name]
    entry = base.value(name, files[0])
    slices = SliceSet(0, {whole_box(entry.shape): tuple(files)})
    return StoredTensor(name, entry.dtype, ITEM_SIZES[entry.dtype], entry.shape, name, (slices,), base.indexes)


def _integers(sizes: Content, handles: FileHandles) -> tuple[int, ...]:
    words = sizes.read(whole_box(sizes.shape), handles)
    return tuple(words.view(f"<i{sizes.item_size}").tolist())


TILE = (128, 2048)
"""Rows and columns of a tile: ten arrays of some MB."""

# Half a unit in the last place of a Float32, by size.
_FLOAT32 = 2.0**-24
# Rounding errors besides the sum's: of either matrix, the scale, its product, the addition to the weight.
_OTHER_ROUNDINGS = 8


@dataclass(frozen=True)
class Sum(Content):
    """A weight plus ``scale * up @ down``, or the transposed product.

    `read` returns the weight alone; `fits` compares copies.

    Attributes:
        weight: the weight.
        up: the matrix with a column for each of the ranks.
        down: the matrix with a row for each of the ranks.
        scale: factor of the product.
        transposed: whether the weight has a row for each input.
    """

    weight: Content
    up: Content
    down: Content
    scale: float
    transposed: bool

    shards: ShardReading = AS_RECORDED

    def paths(self) -> Collection[str]:
        return {*self.weight.paths(), *self.up.paths(), *self.down.paths()}

    def read(self, box: Box, handles: FileHandles) -> Words:
        return self.weight.read(box, handles)

    def tiles(self, box: Box) -> Iterator[Box]:
        """A box in tiles."""
        (first, last), (left_edge, right_edge) = box
        for row in range(first, last, TILE[0]):
            for column in range(left_edge, right_edge, TILE[1]):
                yield (row, min(row + TILE[0], last)), (column, min(column + TILE[1], right_edge))

    def fits(self, weight: Words, written: Words, box: Box, handles: FileHandles) -> bool:
        """Whether elements equal the weight's plus the product's, within the bound on rounding."""
        number, before = decoded(written, self.dtype), decoded(weight, self.dtype)
        rows, columns = box[::-1] if self.transposed else box
        ranks = (0, self.up.shape[1])
        up = decoded(self.up.read((rows, ranks), handles), self.up.dtype)
        down = decoded(self.down.read((ranks, columns), handles), self.down.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            added, sizes = up @ down * self.scale, np.abs(up) @ np.abs(down) * abs(self.scale)
            if self.transposed:
                added, sizes = added.T, sizes.T
            exact = before + added
            off = (self.down.shape[0] + _OTHER_ROUNDINGS) * _FLOAT32 * (np.abs(before) + sizes)
            off += half_unit(np.abs(exact) + off, self.dtype)
            fits = np.isfinite(exact) & (np.abs(number - exact) <= off)
            # Numbers too large for the type are infinite.
            fits |= (np.abs(exact) + off >= largest(self.dtype)) & (number == np.copysign(np.inf, exact))
        fits |= np.isnan(exact) & np.isnan(number)
        return bool(fits.all())


def sums_of(
    base: Source,
    adapter: Source,
    place: str,
    scale: Scale,
) -> dict[str, Content]:
    """The weights plus an adapter, without matrices of adapters; ``place`` is the path of the matrices.

    Raises:
        CheckpointError: the two do not fit each other.
    """
    # Only names and scales come from that room.
    from reshard.lora.pairs import is_matrix, pairs_of, weight_of

    pairs = pairs_of(adapter.names, place)
    loose = [name for pair in pairs for name in (pair.up, pair.down) if name not in adapter.tensors]
    if loose:
        raise CheckpointError(
            f"{place}: the layout of these matrices is unknown: " + listing(loose), file=place, parameter=loose[0]
        )
    sums = {name: tensor for name, tensor in base.tensors.items() if not is_matrix(name)}
    written_names = {base.model_names[name]: name for name in sums}
    names = {pair.stem: written_names[weight_of(pair, written_names)] for pair in pairs}
    products = {pair.stem: adapter.tensors[pair.up].shape[:1] + adapter.tensors[pair.down].shape[1:] for pair in pairs}
    alphas = scale.alphas_of({pair.stem: adapter.tensors[pair.down].shape[0] for pair in pairs})
    transposed = scale.transposed({stem: (product, sums[names[stem]].shape) for stem, product in products.items()})
    for pair in pairs:
        name = names[pair.stem]
        up, down, weight = adapter.tensors[pair.up], adapter.tensors[pair.down], sums[name]
        sums[name] = Sum(
            weight.name,
            weight.dtype,
            weight.item_size,
            weight.shape,
            weight,
            up,
            down,
            scale.of(alphas[pair.stem], down.shape[0]),
            transposed[pair.stem],
            weight.shards,
        )
    return sums
