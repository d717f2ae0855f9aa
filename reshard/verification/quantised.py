"""Elements of quantised tensors, by a naive computation of their own.

`quantised.recognise` finds codes, scales and blocks, for conversions and here. The number of a code, the scale of an
element and the rounding of the product are computed here: from the definition of the types, with indices of single
elements, in Float64, which holds every product exactly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.quantised import Quantisation, recognise, stored_tensors
from reshard.verification.boxes import Box, Shape, shape_of, whole_box
from reshard.verification.rounding import decoded, words_as
from reshard.verification.stored import Content, SliceSet, Source, StoredTensor, Words

Numbers = npt.NDArray[np.float64]


def _number(code: int, exponent: int, mantissa: int, bias: int, largest: int) -> float:
    """The number of a code with a sign; codes without sign above ``largest`` are NaN."""
    size = code & (1 << (exponent + mantissa)) - 1
    if size > largest:
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
    """

    code: str
    block: Shape
    codes: Content
    scales: Content
    offsets: Optional[Content]
    swapped: bool

    # NaN stays NaN; its other bits may differ.
    cast = True

    @property
    def stored_name(self) -> str:
        """Its name in the files."""
        return self.name

    @property
    def sources(self) -> list[Content]:
        """The stored tensors of codes, scales and zero points."""
        return [each for each in (self.codes, self.scales, self.offsets) if each is not None]

    def paths(self) -> Collection[str]:
        """The files that may be read."""
        return {path for source in self.sources for path in source.paths()}

    def read(self, box: Box, handles: FileHandles, room: Any = None) -> Words:
        """The elements of a box."""
        if self.swapped:
            box = (*box[:-2], box[-1], box[-2])
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


def dequantised_tensors(base: Source, quantisation: Quantisation) -> tuple[dict[str, Content], set[str]]:
    """The dequantised tensors of a source, and the names of the values that remain.

    Raises:
        CheckpointError: a tensor is quantised in an unknown way, or scales do not fit.
    """
    recognised = recognise(
        stored_tensors(base.checkpoint), quantisation.config, quantisation.description, quantisation.place
    )
    dropped = {source for each in recognised.tensors.values() for source in each.sources}
    dropped.update(recognised.left_out)
    tensors: dict[str, Content] = {name: tensor for name, tensor in base.tensors.items() if name not in dropped}
    for name, each in recognised.tensors.items():
        shape = (*each.shape[:-2], each.shape[-1], each.shape[-2]) if each.swapped else each.shape
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
