"""Operations on elements, with NumPy alone: rules of names and packing, and casts of floating point elements.

`names.SizedOperation` describes a rule. It works on blocks: it reads boxes of its operands, and reshapes, concatenates,
transposes and slices them. Nothing here composes operations or uses the views of a conversion.

A conversion casts by shifting bits. Here every element becomes a Float64, which represents the numbers of all other
types exactly. Adding a number so large that all bits beyond the type's are lost makes the processor round to the
nearest, ties to even, once. Subtracting that number again is exact.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import AS_RECORDED, ShardReading
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.errors import CheckpointError
from reshard.names import SizedOperation
from reshard.text.messages import quoted
from reshard.threads import cached_property
from reshard.verification.boxes import Box, Shape, shape_of, volume_of
from reshard.verification.stored import Content, Words, words_of

_BLOCK = 1 << 14
_EXPONENT = 0x7FF0000000000000


class _Type(NamedTuple):
    """A floating point type.

    Attributes:
        digits: bits of the significand, with the implicit first bit.
        least: the exponent of the smallest normal number, ``2**least``.
    """

    digits: int
    least: int


_TYPES = {
    "Float64": _Type(53, -1022),
    "Float32": _Type(24, -126),
    "Float16": _Type(11, -14),
    "BFloat16": _Type(8, -126),
}
# Larger than the numbers of every target type, which Float64 is not, and far below Float64's largest exponent.
_TOO_LARGE = 2.0**130


def words_as(words: Words, stored: str, dtype: str) -> Words:
    """Unsigned words of a type in `dtypes.CASTABLE`, cast to one in `dtypes.CAST_TO`.

    Returns:
        Unsigned words of the new type's size, in the same shape. NaN stays NaN, with its sign and the leading bits
        of its payload.
    """
    if stored == dtype:
        return words
    result = np.empty(words.size, f"<u{ITEM_SIZES[dtype]}")
    flat = np.ascontiguousarray(words).reshape(-1)
    for first in range(0, flat.size, _BLOCK):
        block = flat[first : first + _BLOCK]
        result[first : first + _BLOCK] = _encoded(_rounded(decoded(block, stored), dtype), block, stored, dtype)
    return result.reshape(words.shape)


def decoded(words: Words, stored: str) -> Words:
    """Unsigned words of a type in `dtypes.CASTABLE`, as Float64; exact."""
    with np.errstate(invalid="ignore"):
        if stored == "BFloat16":
            # A BFloat16 is the upper 16 bits of a Float32.
            return np.left_shift(words, 16, dtype="<u4", casting="unsafe").view("<f4").astype("<f8")
        return words.view(f"<f{ITEM_SIZES[stored]}").astype("<f8")


def half_unit(sizes: Words, dtype: str) -> Words:
    """The largest distance between a number and the nearest one of a type, for sizes as Float64."""
    digits, least = _TYPES[dtype]
    return np.maximum(sizes, 2.0**least) * 2.0**-digits


def largest(dtype: str) -> float:
    """The largest number of a type."""
    words = np.array([_infinite(dtype) - 1], f"<u{ITEM_SIZES[dtype]}")
    return float(decoded(words, dtype)[0])


def same_nans(words: Words, dtype: str) -> None:
    """Set the bits of all NaN to the same value, in place, in unsigned words of a floating point type."""
    bits = ITEM_SIZES[dtype] * 8
    infinite = _infinite(dtype)
    without_sign = words & ((1 << (bits - 1)) - 1)
    if without_sign.size and without_sign.max() > infinite:
        words[without_sign > infinite] = infinite | (infinite >> 1)


def _infinite(dtype: str) -> int:
    """The bits of infinity."""
    fraction_bits = _TYPES[dtype].digits - 1
    return ((1 << (ITEM_SIZES[dtype] * 8 - 1)) - 1) >> fraction_bits << fraction_bits


def _rounded(numbers: Words, dtype: str) -> Words:
    """Numbers rounded to the digits of a type."""
    digits, least = _TYPES[dtype]
    with np.errstate(invalid="ignore"):
        sizes = np.minimum(np.abs(numbers), _TOO_LARGE)
        # The exponent of the first digit; after scaling, the last digit of the type has the value 1.
        powers = (sizes.view("<u8") & np.uint64(_EXPONENT)).view("<f8")
        np.maximum(powers, 2.0**least, out=powers)
        powers *= 2.0 ** (53 - digits)
        sizes += powers
        sizes -= powers
        return np.copysign(sizes, numbers, out=sizes)


def _encoded(numbers: Words, words: Words, stored: str, dtype: str) -> Words:
    """Rounded numbers as words of a type; infinite if too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "BFloat16":
            encoded = (numbers.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
        else:
            size = ITEM_SIZES[dtype]
            encoded = numbers.astype(f"<f{size}").view(f"<u{size}")
    nans = np.isnan(numbers)
    if nans.any():
        encoded[nans] = _nans(words[nans], stored, dtype)
    return encoded


def _nans(words: Words, stored: str, dtype: str) -> Words:
    """NaN of one type as NaN of another."""
    bits, other_bits = ITEM_SIZES[stored] * 8, ITEM_SIZES[dtype] * 8
    fraction_bits, other_fraction_bits = _TYPES[stored].digits - 1, _TYPES[dtype].digits - 1
    wide = words.astype("<u8")
    sign = wide >> np.uint64(bits - 1) << np.uint64(other_bits - 1)
    payload = wide & np.uint64((1 << fraction_bits) - 1)
    if fraction_bits > other_fraction_bits:
        payload >>= np.uint64(fraction_bits - other_fraction_bits)
    else:
        payload <<= np.uint64(other_fraction_bits - fraction_bits)
    quiet = 1 << (other_fraction_bits - 1)
    nans: Words = (sign | payload | np.uint64(_infinite(dtype) | quiet)).astype(f"<u{other_bits // 8}")
    return nans


@dataclass(frozen=True)
class DerivedTensor(Content):
    """A tensor computed from others.

    Attributes:
        sources: the operands of the first operation, in order.
        operations: in order of execution.
        number: index of the tensor in the last operation's results.
    """

    sources: tuple[Content, ...]
    operations: tuple[SizedOperation, ...]
    number: int
    cast: bool
    shards: ShardReading = AS_RECORDED

    @cached_property
    def transposes(self) -> bool:
        """Whether dimensions of elements are in another order than in the sources."""
        return any(operation.kind == "transpose" for operation in self.operations) or any(
            isinstance(source, DerivedTensor) and source.transposes for source in self.sources
        )

    def paths(self) -> Collection[str]:
        return set().union(*(source.paths() for source in self.sources))

    @cached_property
    def lists(self) -> Sequence[Sequence[Shape]]:
        """The shapes of the sources, and of the results of each operation."""
        return lists_of(self.operations, tuple(source.shape for source in self.sources))

    def read(self, box: Box, handles: FileHandles) -> Words:
        # A box of a tensor of all layers and experts has elements of few sources: only these get an operand.
        operands: dict[tuple[int, int], _Operand] = {}

        def operand(level: int, number: int) -> _Operand:
            """A source, or a result of an operation."""
            if (level, number) not in operands:
                if not level:
                    operands[level, number] = _Leaf(self, self.sources[number], handles)
                else:
                    before = functools.partial(operand, level - 1)
                    operands[level, number] = _Step(self, level, number, before)
            return operands[level, number]

        return np.ascontiguousarray(operand(len(self.operations), self.number).read(box))


def shapes_after(operation: SizedOperation, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes of an operation's results for operands of these shapes."""
    kind, at, count = operation.kind, operation.dimension, operation.count
    if kind == "join":
        size = operation.groups * sum(operation.sizes)
        return [(*shape[:at], size, *shape[at + 1 :]) for shape in shapes[: len(shapes) // len(operation.sizes)]]
    if kind == "cut":
        sizes = [operation.groups * size for size in operation.sizes]
        return [(*shape[:at], size, *shape[at + 1 :]) for size in sizes for shape in shapes]
    if kind == "stack":
        return [(*shape[:at], count, *shape[at:]) for shape in shapes[::count]]
    if kind == "unstack":
        return [(*shape[:at], *shape[at + 1 :]) for shape in shapes for _ in range(count)]
    if kind == "transpose":
        return [tuple(shape[each] for each in operation.order) for shape in shapes]
    if kind == "reshape":
        return [operation.shape] * len(shapes)
    if kind in ("pad", "unpad"):
        return [(*shape[:at], operation.sizes[1], *shape[at + 1 :]) for shape in shapes]
    if kind == "copy":
        return [*shapes] * count
    assert kind == "take", kind
    return [*shapes[: len(shapes) // count]]


# One tensor may become those of all layers and experts, each of which asks for the same lists.
@functools.lru_cache(64)
def lists_of(operations: tuple[SizedOperation, ...], shapes: tuple[Shape, ...]) -> list[list[Shape]]:
    """The shapes of the sources, and of the results of each operation."""
    lists = [[*shapes]]
    for operation in operations:
        lists.append(shapes_after(operation, lists[-1]))
    return lists


def needed_sources(operations: tuple[SizedOperation, ...], shapes: tuple[Shape, ...], number: int) -> set[int]:
    """The indexes of the sources that a result may have elements of."""
    lists = lists_of(operations, shapes)
    numbers = {number}
    for operation, before in zip(reversed(operations), lists[-2::-1]):
        numbers = {each for one in numbers for each in _inputs(operation, len(before), one)}
    return numbers


def _inputs(operation: SizedOperation, count: int, number: int) -> Sequence[int]:
    """The numbers of the operands, among ``count`` tensors, of tensor ``number`` of the result."""
    kind = operation.kind
    if kind == "join":
        return range(number, count, count // len(operation.sizes))
    if kind == "stack":
        return range(number * operation.count, (number + 1) * operation.count)
    if kind == "unstack":
        return [number // operation.count]
    # The other operations have one result per operand, or several, column by column.
    return [number % count]


class _Leaf:
    """A tensor in files, in the requested type."""

    def __init__(self, result: DerivedTensor, source: Content, handles: FileHandles) -> None:
        self.shape, self.words = source.shape, words_of(result.item_size)
        self._result, self._source, self._handles = result, source, handles

    def read(self, box: Box) -> Words:
        if not volume_of(box):
            return np.empty(shape_of(box), self.words)
        stored_words = self._source.read(box, self._handles)
        stored, dtype = self._source.dtype, self._result.dtype
        if stored == dtype:
            return stored_words
        if not self._result.cast:
            raise CheckpointError(
                f"{quoted(self._result.name)} would have elements of types {dtype} and {stored} "
                f"({quoted(self._source.name)})",
                parameter=self._result.name,
            )
        return words_as(stored_words, stored, dtype)


class _Step:
    """A tensor after an operation."""

    def __init__(self, result: DerivedTensor, level: int, number: int, before: Callable[[int], _Operand]) -> None:
        self.shape, self.words = result.lists[level][number], words_of(result.item_size)
        self._operation, self._number, self._count = result.operations[level - 1], number, len(result.lists[level - 1])
        self._inputs, self._before = _inputs(self._operation, self._count, number), before

    def _input(self, place: int = 0) -> _Operand:
        return self._before(self._inputs[place])

    def read(self, box: Box) -> Words:
        if not volume_of(box):
            return np.empty(shape_of(box), self.words)
        result: Words = getattr(self, "_" + self._operation.kind)(box)
        assert result.shape == shape_of(box), (self._operation, result.shape, box)
        return result

    def _copy(self, box: Box) -> Words:
        return self._input().read(box)

    _take = _unpad = _copy

    def _join(self, box: Box) -> Words:
        operation, at = self._operation, self._operation.dimension
        sizes, total = operation.sizes, sum(operation.sizes)
        if operation.groups == 1:
            return self._concatenated(box)
        first, last = _groups(box[at], total)
        parts = []
        for place, size in enumerate(sizes):
            part = self._input(place).read(_replaced(box, at, (first * size, last * size)))
            parts.append(_split(part, at, last - first, size))
        joined = np.concatenate(parts, at + 1)
        return _along(_merged(joined, at), at, box[at], first * total)

    def _concatenated(self, box: Box) -> Words:
        at, start = self._operation.dimension, 0
        parts = []
        for place, size in enumerate(self._operation.sizes):
            low, high = max(box[at][0] - start, 0), min(box[at][1] - start, size)
            if low < high:
                parts.append(self._input(place).read(_replaced(box, at, (low, high))))
            start += size
        return np.concatenate(parts, at)

    def _cut(self, box: Box) -> Words:
        operation, at = self._operation, self._operation.dimension
        column = self._number // self._count
        size, total, skipped = operation.sizes[column], sum(operation.sizes), sum(operation.sizes[:column])
        if operation.groups == 1:
            return self._input().read(_replaced(box, at, (box[at][0] + skipped, box[at][1] + skipped)))
        first, last = _groups(box[at], size)
        groups_of_all = self._input().read(_replaced(box, at, (first * total, last * total)))
        groups = _split(groups_of_all, at, last - first, total)
        groups = groups[(slice(None),) * (at + 1) + (slice(skipped, skipped + size),)]
        return _along(_merged(groups, at), at, box[at], first * size)

    def _stack(self, box: Box) -> Words:
        at = self._operation.dimension
        return np.stack([self._input(place).read(_without(box, at)) for place in range(*box[at])], at)

    def _unstack(self, box: Box) -> Words:
        at, value = self._operation.dimension, self._number % self._operation.count
        return self._input().read((*box[:at], (value, value + 1), *box[at:])).squeeze(at)

    def _transpose(self, box: Box) -> Words:
        order = self._operation.order
        turned = tuple(box[order.index(dimension)] for dimension in range(len(order)))
        return self._input().read(turned).transpose(order)

    def _pad(self, box: Box) -> Words:
        at, size = self._operation.dimension, self._operation.sizes[0]
        start, stop = box[at]
        stored = (min(start, size), min(stop, size))
        unpadded = self._input().read(_replaced(box, at, stored))
        shape = list(unpadded.shape)
        shape[at] = stop - start - shape[at]
        return np.concatenate([unpadded, np.zeros(shape, unpadded.dtype)], at)

    def _reshape(self, box: Box) -> Words:
        """Reads a covering box per group of dimensions with the same elements, then selects elements."""
        before, after = self._input().shape, self.shape
        groups = _same_elements(before, after)
        needed: list[tuple[int, int]] = []
        flat: list[range] = []
        for old, new in groups:
            inner = [(start, stop) for start, stop in box[new.start : new.stop]]
            first = _flat([start for start, _ in inner], after[new.start : new.stop])
            last = _flat([stop - 1 for _, stop in inner], after[new.start : new.stop])
            covering = _covering(first, last, before[old.start : old.stop])
            needed += covering
            start = _flat([low for low, _ in covering], before[old.start : old.stop])
            flat.append(range(start, start + volume_of(tuple(covering))))
        elements = self._input().read(tuple(needed)).reshape([len(each) for each in flat])
        for place, ((_, new), span) in enumerate(zip(groups, flat)):
            positions = np.zeros((), np.int64)
            for (start, stop), size in zip(box[new.start : new.stop], after[new.start : new.stop]):
                positions = positions[..., None] * size + np.arange(start, stop)
            selected = positions.reshape(-1) - span.start
            if len(selected) != len(span):
                if len(selected) and selected[-1] - selected[0] + 1 == len(selected):
                    elements = elements[(slice(None),) * place + (slice(selected[0], selected[-1] + 1),)]
                else:
                    elements = np.take(elements, selected, place)
        return elements.reshape(shape_of(box))


_Operand = _Leaf | _Step


def _replaced(box: Box, at: int, interval: tuple[int, int]) -> Box:
    return (*box[:at], interval, *box[at + 1 :])


def _without(box: Box, at: int) -> Box:
    return (*box[:at], *box[at + 1 :])


def _groups(interval: tuple[int, int], size: int) -> tuple[int, int]:
    """The first group of ``size`` elements that an interval meets, and one past the last."""
    start, stop = interval
    return (start // size, -(-stop // size)) if size else (0, 0)


def _split(array: Words, at: int, groups: int, size: int) -> Words:
    """An array with one dimension split in two: groups, and elements of each."""
    return array.reshape(*array.shape[:at], groups, size, *array.shape[at + 1 :])


def _merged(array: Words, at: int) -> Words:
    """The inverse of `_split`."""
    return array.reshape(*array.shape[:at], array.shape[at] * array.shape[at + 1], *array.shape[at + 2 :])


def _along(array: Words, at: int, interval: tuple[int, int], begins: int) -> Words:
    """An interval of one dimension of an array; ``begins`` is the number of its first element."""
    return array[(slice(None),) * at + (slice(interval[0] - begins, interval[1] - begins),)]


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    """The number of an element in C order."""
    number = 0
    for place, size in zip(index, shape):
        number = number * size + place
    return number


def _covering(first: int, last: int, shape: Sequence[int]) -> list[tuple[int, int]]:
    """The smallest box, contiguous in C order, that contains two elements, by number, and all between them."""
    box: list[tuple[int, int]] = []
    for dimension, size in enumerate(shape):
        inner = math.prod(shape[dimension + 1 :])
        low, high = first // inner, last // inner
        box.append((low, high + 1))
        if low != high:
            return [*box, *((0, each) for each in shape[dimension + 1 :])]
        first, last = first % inner, last % inner
        assert high < size
    return box


def _same_elements(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """The smallest groups of dimensions of two shapes that have the same elements."""
    ends: dict[int, int] = {}
    for end, product in enumerate(itertools.accumulate(before, lambda size, factor: size * factor), 1):
        ends.setdefault(product, end)
    groups = []
    old = new = 0
    for end, product in enumerate(itertools.accumulate(after, lambda size, factor: size * factor), 1):
        if ends.get(product, 0) > old:
            groups.append((range(old, ends[product]), range(new, end)))
            old, new = ends[product], end
    if old < len(before) or new < len(after):
        # Trailing dimensions of one element.
        groups.append((range(old, len(before)), range(new, len(after))))
    return groups
