"""Operations of rules on tensors: as in rules, and with the sizes of real tensors.

An operation converts a list of tensors to another list. The tensors of a rule are in *columns*, one per name of the
rule; a column is one tensor, or one tensor per value of a stacked number, in order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from reshard.names.sizes import ModelSizes, solved
from reshard.text.products import Product, SizeError

Shape = tuple[int, ...]

JOIN, CUT, STACK, UNSTACK = "join", "cut", "stack", "unstack"
TRANSPOSE, RESHAPE, PAD, UNPAD, COPY, TAKE = "transpose", "reshape", "pad", "unpad", "copy", "take"


@dataclass(frozen=True)
class SizedOperation:
    """An operation on a list of tensors, with its sizes.

    With ``n`` tensors in the list, numbered from 0, ``k = len(sizes)`` and ``c = count``:

    * ``join``: the list is ``k`` columns of ``n // k`` tensors. Result ``i`` joins tensors ``i``, ``i + n // k``, ...:
      along ``dimension`` it has ``groups`` groups, each with ``sizes[0]`` elements of the first of these tensors, then
      ``sizes[1]`` of the second, and so on, each tensor's elements in their order.
    * ``cut``: the inverse. The result has ``k`` columns of ``n`` tensors each.
    * ``stack``: the list is columns of ``c`` tensors each, which are stacked along a new dimension ``dimension``.
    * ``unstack``: the inverse; each tensor is replaced by ``c`` tensors in its place.
    * ``transpose``: dimension ``order[i]`` of each tensor becomes its dimension ``i``.
    * ``reshape``: each tensor gets shape ``shape``, in C order.
    * ``pad``: each tensor grows with zeros at the end of ``dimension`` from ``sizes[0]`` to ``sizes[1]`` elements.
    * ``unpad``: each tensor is cut at the end of ``dimension``, from ``sizes[0]`` to ``sizes[1]`` elements.
    * ``copy``: the list, ``c`` times one after the other.
    * ``take``: the list is ``c`` columns that should be equal, of ``n // c`` tensors each; the first column stays.

    Attributes:
        kind: one of these names.
        dimension: the dimension, from 0.
        groups: see ``join``.
        sizes: elements.
        order: see ``transpose``.
        shape: see ``reshape``.
        count: tensors.
    """

    kind: str
    dimension: int = 0
    groups: int = 1
    sizes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    shape: Shape = ()
    count: int = 1


class SizedStep(NamedTuple):
    """An operation on real tensors.

    Attributes:
        operation: with its sizes; None if it changes nothing.
        shapes: of the results.
        note: a note for the user, if any.
    """

    operation: Optional[SizedOperation]
    shapes: list[Shape]
    note: Optional[str] = None


class Operation(ABC):
    """An operation of a rule."""

    @abstractmethod
    def inverse(self) -> Operation:
        """The inverse operation."""

    @abstractmethod
    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """The operation for tensors of these shapes.

        Args:
            shapes: of its operands.
            sizes: of the model.

        Raises:
            SizeError: it does not fit these shapes.
            NamesError: a size is unknown.
        """


@dataclass(frozen=True)
class Join(Operation):
    """Several tensors become one: concatenated, or in groups that alternate.

    Attributes:
        dimension: the dimension.
        count: number of tensors.
        parts: elements of each along the dimension, None for the rest; equal parts by default.
        groups: number of groups; one by default.
        block: instead of ``groups``, the elements of each tensor in a group.
    """

    dimension: int
    count: int
    parts: Optional[tuple[Optional[Product], ...]] = None
    groups: Optional[Product] = None
    block: Optional[Product] = None

    def inverse(self) -> Split:
        """The split into the same tensors."""
        return Split(self)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        per_column = len(shapes) // self.count
        results = []
        lengths = None
        for number in range(per_column):
            joined = shapes[number::per_column]
            _dimension(self.dimension, joined[0])
            if len({_without(shape, self.dimension) for shape in joined}) != 1:
                raise SizeError(f"shapes {_some(joined)} differ in a dimension other than {self.dimension}")
            own_lengths = tuple(shape[self.dimension] for shape in joined)
            if lengths not in (None, own_lengths):
                raise SizeError(f"shapes {_some(shapes)} differ")
            lengths = own_lengths
            results.append(_with(joined[0], self.dimension, sum(own_lengths)))
        assert lengths is not None
        self._check(lengths, shapes, sizes)
        return SizedStep(self._operation(JOIN, lengths, sizes), results)

    def lengths(self, total: int, sizes: ModelSizes) -> tuple[int, ...]:
        """The elements of each tensor, given their sum."""
        if self.parts is not None:
            lengths = [None if part is None else sizes.value(part) for part in self.parts]
            remaining = total - sum(length or 0 for length in lengths)
            if remaining < 0:
                raise SizeError(
                    f"{total} elements along dimension {self.dimension} contradict {sizes.source}: "
                    + self.parts_text(lengths)
                )
            return tuple(remaining if length is None else length for length in lengths)
        if total % self.count:
            raise SizeError(
                f"{total} elements along dimension {self.dimension} do not divide into {self.count} equal parts"
            )
        return (total // self.count,) * self.count

    def parts_text(self, lengths: Sequence[Optional[int]]) -> str:
        """The parts with their lengths, for messages."""
        return ", ".join(
            f"{part.text} = {length}" for part, length in zip(self.parts or (), lengths) if part is not None
        )

    def _check(self, lengths: Sequence[int], shapes: Sequence[Shape], sizes: ModelSizes) -> None:
        expected = self.lengths(sum(lengths), sizes) if self.parts is not None or len(set(lengths)) == 1 else None
        if expected is None:
            raise SizeError(f"shapes {_some(shapes)} differ along dimension {self.dimension}, and no parts are stated")
        if tuple(lengths) != expected:
            assert self.parts is not None
            parts = self.parts_text(expected)
            raise SizeError(f"shapes {_some(shapes)} contradict {sizes.source}: {parts}")

    def _operation(self, kind: str, lengths: Sequence[int], sizes: ModelSizes) -> SizedOperation:
        groups = 1
        if self.groups is not None:
            groups = sizes.value(self.groups)
        elif self.block is not None:
            block = sizes.value(self.block)
            if not block or lengths[0] % block:
                raise SizeError(
                    f"{lengths[0]} elements along dimension {self.dimension} do not divide into blocks of {block}"
                )
            groups = lengths[0] // block
        # A tensor without elements fits any number of groups.
        if not groups and any(lengths):
            raise SizeError(f"{lengths[0]} elements along dimension {self.dimension} do not divide into 0 groups")
        groups = groups or 1
        if any(length % groups for length in lengths):
            raise SizeError(
                f"{list(lengths)} elements along dimension {self.dimension} do not divide into {groups} equal groups"
            )
        return SizedOperation(kind, self.dimension, groups, tuple(length // groups for length in lengths))


@dataclass(frozen=True)
class Split(Operation):
    """The inverse of a `Join`.

    Attributes:
        join: the `Join`.
    """

    join: Join

    def inverse(self) -> Join:
        """The `Join`."""
        return self.join

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        dimension = self.join.dimension
        _dimension(dimension, shapes[0])
        total = shapes[0][dimension]
        if any(shape[dimension : dimension + 1] != (total,) for shape in shapes):
            raise SizeError(f"shapes {_some(shapes)} differ")
        lengths = self.join.lengths(total, sizes)
        if sum(lengths) != total:
            parts = self.join.parts_text(lengths)
            raise SizeError(f"shape {list(shapes[0])} contradicts {sizes.source}: dimension {dimension} has {parts}")
        results = [_with(shape, dimension, length) for length in lengths for shape in shapes]
        return SizedStep(self.join._operation(CUT, lengths, sizes), results)


@dataclass(frozen=True)
class Stack(Operation):
    """Tensors of all values of a number become one, along a new dimension.

    Attributes:
        number: the name of the number.
        dimension: the new dimension.
        columns: number of results.
    """

    number: str
    dimension: int
    columns: int

    def inverse(self) -> Unstack:
        """The inverse operation."""
        return Unstack(self)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        count = len(shapes) // self.columns
        results = []
        for column in range(self.columns):
            shape = shapes[column * count]
            if any(another != shape for another in shapes[column * count : (column + 1) * count]):
                raise SizeError(f"shapes {_some(dict.fromkeys(shapes))} differ, so they cannot be stacked")
            _dimension(self.dimension, (*shape, 0))
            results.append((*shape[: self.dimension], count, *shape[self.dimension :]))
        return SizedStep(SizedOperation(STACK, self.dimension, count=count), results)


@dataclass(frozen=True)
class Unstack(Operation):
    """The inverse of a `Stack`.

    Attributes:
        stack: the `Stack`.
    """

    stack: Stack

    def inverse(self) -> Stack:
        """The `Stack`."""
        return self.stack

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        for shape in shapes:
            _dimension(self.stack.dimension, shape)
        counts = {shape[self.stack.dimension] for shape in shapes}
        if len(counts) != 1:
            raise SizeError(f"shapes {_some(shapes)} differ along dimension {self.stack.dimension}")
        count = counts.pop()
        results = [_without(shape, self.stack.dimension) for shape in shapes for _ in range(count)]
        return SizedStep(SizedOperation(UNSTACK, self.stack.dimension, count=count), results)


@dataclass(frozen=True)
class Transpose(Operation):
    """Dimensions in another order.

    Attributes:
        order: the source dimension of each; None reverses all.
    """

    order: Optional[tuple[int, ...]] = None

    def inverse(self) -> Transpose:
        """The inverse order."""
        if self.order is None:
            return self
        return Transpose(tuple(sorted(range(len(self.order)), key=self.order.__getitem__)))

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        order = tuple(reversed(range(len(shapes[0])))) if self.order is None else self.order
        if any(len(shape) != len(order) for shape in shapes):
            raise SizeError(f"shapes {_some(dict.fromkeys(shapes))} do not have {len(order)} dimensions")
        results = [tuple(shape[dimension] for dimension in order) for shape in shapes]
        return SizedStep(SizedOperation(TRANSPOSE, order=order), results)


@dataclass(frozen=True)
class Reshape(Operation):
    """The same elements in another shape.

    Attributes:
        before: the shape; names that are not sizes are computed from it.
        after: the new shape.
    """

    before: tuple[Product, ...]
    after: tuple[Product, ...]

    def inverse(self) -> Reshape:
        """The inverse operation."""
        return Reshape(self.after, self.before)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        if any(shape != shapes[0] for shape in shapes):
            raise SizeError(f"shapes {_some(dict.fromkeys(shapes))} differ")
        known_sizes = {
            name: sizes[name]
            for expression in (*self.before, *self.after)
            for name in expression.names
            if name in sizes
        }
        solution = solved(self.before, shapes[0], known_sizes)
        for expression in self.after:
            for name in expression.names:
                if name not in solution and name not in known_sizes:
                    expected = ", ".join(expression.text for expression in self.before)
                    raise SizeError(f"{name} does not follow from [{expected}]")
        all_sizes = {**known_sizes, **solution}
        new_shape = tuple(expression.whole(all_sizes) for expression in self.after)
        if math.prod(new_shape) != math.prod(shapes[0]):
            raise SizeError(f"shape {list(shapes[0])} cannot become {list(new_shape)}: the numbers of elements differ")
        return SizedStep(SizedOperation(RESHAPE, shape=new_shape), [new_shape] * len(shapes))


@dataclass(frozen=True)
class Check(Operation):
    """A check of the shape, which changes nothing.

    Attributes:
        shape: the expected shape.
    """

    shape: tuple[Product, ...]

    def inverse(self) -> Check:
        """The check itself."""
        return self

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        known_sizes = {name: sizes[name] for expression in self.shape for name in expression.names if name in sizes}
        for shape in shapes:
            solved(self.shape, shape, known_sizes)
        return SizedStep(None, [*shapes])


@dataclass(frozen=True)
class Pad(Operation):
    """Zeros at the end of a dimension, up to a multiple.

    Attributes:
        dimension: the dimension.
        size: the size without padding.
        multiple: the padded size is the smallest fitting multiple of this.
    """

    dimension: int
    size: Product
    multiple: Product

    def inverse(self) -> Unpad:
        """The inverse operation."""
        return Unpad(self)

    def both(self, shape: Shape, sizes: ModelSizes) -> Optional[tuple[int, int]]:
        """The size without and with padding; None if they are equal and unknown."""
        _dimension(self.dimension, shape)
        multiple = sizes.value(self.multiple)
        if not multiple:
            raise SizeError(f"{self.multiple.text} is 0, and must be at least 1")
        true = sizes.value_if_known(self.size)
        if true is None and multiple == 1:
            return None
        true = sizes.value(self.size)
        return true, -(-true // multiple) * multiple

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        return self._sized(PAD, shapes, sizes)

    def _sized(self, kind: str, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        lengths = self.both(shapes[0], sizes)
        if lengths is None:
            return SizedStep(None, [*shapes])
        before, after = lengths if kind == PAD else lengths[::-1]
        for shape in shapes:
            _dimension(self.dimension, shape)
            if shape[self.dimension] != before:
                padded = "" if lengths[0] == lengths[1] else f", padded to {lengths[1]}"
                raise SizeError(
                    f"shape {list(shape)} contradicts {sizes.source}: dimension {self.dimension} has "
                    f"{self.size.text} = {lengths[0]} elements{padded}"
                )
        if before == after:
            return SizedStep(None, [*shapes])
        results = [_with(shape, self.dimension, after) for shape in shapes]
        if kind == PAD:
            note = f"padded with zeros along dimension {self.dimension} from {before} to {after}"
        else:
            note = f"padding of dimension {self.dimension} removed: {before} to {after}"
        return SizedStep(SizedOperation(kind, self.dimension, sizes=(before, after)), results, note)


@dataclass(frozen=True)
class Unpad(Operation):
    """The inverse of a `Pad`.

    Attributes:
        pad: the `Pad`.
    """

    pad: Pad

    def inverse(self) -> Pad:
        """The `Pad`."""
        return self.pad

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        return self.pad._sized(UNPAD, shapes, sizes)


@dataclass(frozen=True)
class Repeat(Operation):
    """One tensor becomes several equal ones.

    Attributes:
        count: the number of tensors.
    """

    count: int

    def inverse(self) -> TakeFirst:
        """The inverse operation."""
        return TakeFirst(self.count)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        return SizedStep(SizedOperation(COPY, count=self.count), [*shapes] * self.count)


@dataclass(frozen=True)
class TakeFirst(Operation):
    """One of several tensors that should be equal.

    Attributes:
        count: the number of tensors.
    """

    count: int

    def inverse(self) -> Repeat:
        """The inverse operation."""
        return Repeat(self.count)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        each = len(shapes) // self.count
        if any(shape != shapes[number % each] for number, shape in enumerate(shapes)):
            raise SizeError(f"shapes {_some(shapes)} differ, so the tensors are not equal")
        return SizedStep(SizedOperation(TAKE, count=self.count), [*shapes[:each]])


def _dimension(dimension: int, shape: Shape) -> None:
    if dimension >= len(shape):
        raise SizeError(f"shape {list(shape)} has no dimension {dimension}")


def _with(shape: Shape, dimension: int, length: int) -> Shape:
    return (*shape[:dimension], length, *shape[dimension + 1 :])


def _without(shape: Shape, dimension: int) -> Shape:
    return (*shape[:dimension], *shape[dimension + 1 :])


def _some(shapes: Iterable[Shape], most: int = 4) -> str:
    first = [*shapes]
    return ", ".join(str(list(shape)) for shape in first[:most]) + (", ..." if len(first) > most else "")
