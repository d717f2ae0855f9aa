"""What a rule does with tensors: operations as they are written, and with the sizes that they have for real tensors.

An operation takes a list of tensors and gives another. Tensors of a rule stand in *columns*, one per name of the
rule; a column is one tensor, or those of all values of a number that is stacked, in their order.
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
    """An operation on a list of tensors, in numbers alone.

    With ``n`` tensors in the list, numbered from 0, ``k = len(sizes)`` and ``c = count``:

    * ``join``: the list is ``k`` columns of ``n // k`` tensors. Result ``i`` is made of tensors ``i``, ``i + n // k``,
      ...: along ``dimension`` it has ``groups`` groups, and each of them ``sizes[0]`` elements of the first of these
      tensors, then ``sizes[1]`` of the second, and so on, each tensor's elements in their order.
    * ``cut``: the inverse. The result has ``k`` columns of ``n`` tensors each.
    * ``stack``: the list is columns of ``c`` tensors each, which are stacked along a new dimension ``dimension``.
    * ``unstack``: the inverse; each tensor becomes ``c`` tensors that stand where it stood.
    * ``transpose``: dimension ``order[i]`` of each tensor becomes its dimension ``i``.
    * ``reshape``: each tensor gets shape ``shape``, in C order.
    * ``pad``: each tensor grows with zeros at the end of ``dimension`` from ``sizes[0]`` to ``sizes[1]`` elements.
    * ``unpad``: each tensor loses what lies at the end of ``dimension``: of ``sizes[0]`` elements, ``sizes[1]`` stay.
    * ``copy``: the list, ``c`` times one after the other.
    * ``take``: the list is ``c`` columns that should be equal, of ``n // c`` tensors each; the first column stays.

    Attributes:
        kind: one of these words.
        dimension: which dimension, from 0.
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
        operation: in numbers; None where it has nothing to do.
        shapes: of the tensors that it gives.
        note: what is to be told of it, if anything.
    """

    operation: Optional[SizedOperation]
    shapes: list[Shape]
    note: Optional[str] = None


class Operation(ABC):
    """An operation as rules write it."""

    @abstractmethod
    def inverse(self) -> Operation:
        """What undoes it."""

    @abstractmethod
    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """The operation for tensors of these shapes.

        Args:
            shapes: of the tensors that it takes.
            sizes: the model's.

        Raises:
            SizeError: it cannot be done with them.
            NamesError: a size that it needs is not told.
        """


@dataclass(frozen=True)
class Join(Operation):
    """Several tensors become one: concatenated, or in groups that alternate.

    Attributes:
        dimension: along which dimension.
        count: how many tensors.
        parts: how many elements each has along it, None for one that has the rest; without parts all have equally many.
        groups: how many groups; one where nothing is said.
        block: instead of ``groups``, how many elements of each tensor a group has.
    """

    dimension: int
    count: int
    parts: Optional[tuple[Optional[Product], ...]] = None
    groups: Optional[Product] = None
    block: Optional[Product] = None

    def inverse(self) -> Split:
        """What cuts the tensors out again."""
        return Split(self)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        per_column = len(shapes) // self.count
        made = []
        lengths = None
        for number in range(per_column):
            joined = shapes[number::per_column]
            _dimension(self.dimension, joined[0])
            if len({_without(shape, self.dimension) for shape in joined}) != 1:
                raise SizeError(f"shapes {_some(joined)} differ in another dimension than {self.dimension}")
            here = tuple(shape[self.dimension] for shape in joined)
            if lengths not in (None, here):
                raise SizeError(f"shapes {_some(shapes)} are not alike")
            lengths = here
            made.append(_with(joined[0], self.dimension, sum(here)))
        assert lengths is not None
        self._check(lengths, shapes, sizes)
        return SizedStep(self._operation(JOIN, lengths, sizes), made)

    def lengths(self, total: int, sizes: ModelSizes) -> tuple[int, ...]:
        """How many elements each tensor has, of how many they have together."""
        if self.parts is not None:
            told = [None if part is None else sizes.value(part) for part in self.parts]
            rest = total - sum(length or 0 for length in told)
            if rest < 0:
                raise SizeError(
                    f"{total} elements along dimension {self.dimension} contradict {sizes.source}, by which there are "
                    f"{self.said(told)}"
                )
            return tuple(rest if length is None else length for length in told)
        if total % self.count:
            raise SizeError(f"{total} elements along dimension {self.dimension} are not {self.count} equal parts")
        return (total // self.count,) * self.count

    def said(self, told: Sequence[Optional[int]]) -> str:
        """The parts in words."""
        return ", ".join(f"{part.text} = {length}" for part, length in zip(self.parts or (), told) if part is not None)

    def _check(self, lengths: Sequence[int], shapes: Sequence[Shape], sizes: ModelSizes) -> None:
        wanted = self.lengths(sum(lengths), sizes) if self.parts is not None or len(set(lengths)) == 1 else None
        if wanted is None:
            raise SizeError(f"shapes {_some(shapes)} differ along dimension {self.dimension}, and no parts are stated")
        if tuple(lengths) != wanted:
            assert self.parts is not None
            said = self.said(wanted)
            raise SizeError(f"shapes {_some(shapes)} contradict {sizes.source}, by which they have {said}")

    def _operation(self, kind: str, lengths: Sequence[int], sizes: ModelSizes) -> SizedOperation:
        groups = 1
        if self.groups is not None:
            groups = sizes.value(self.groups)
        elif self.block is not None:
            block = sizes.value(self.block)
            if not block or lengths[0] % block:
                raise SizeError(f"{lengths[0]} elements along dimension {self.dimension} are no blocks of {block}")
            groups = lengths[0] // block
        # Where nothing is to be cut, any number of groups does.
        if not groups and any(lengths):
            raise SizeError(f"{lengths[0]} elements along dimension {self.dimension} are not 0 groups")
        groups = groups or 1
        if any(length % groups for length in lengths):
            raise SizeError(f"{list(lengths)} elements along dimension {self.dimension} are not {groups} equal groups")
        return SizedOperation(kind, self.dimension, groups, tuple(length // groups for length in lengths))


@dataclass(frozen=True)
class Split(Operation):
    """The inverse of a `Join`.

    Attributes:
        join: it.
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
            raise SizeError(f"shapes {_some(shapes)} are not alike")
        lengths = self.join.lengths(total, sizes)
        if sum(lengths) != total:
            said = self.join.said(lengths)
            raise SizeError(
                f"shape {list(shapes[0])} contradicts {sizes.source}, by which dimension {dimension} has {said}"
            )
        made = [_with(shape, dimension, length) for length in lengths for shape in shapes]
        return SizedStep(self.join._operation(CUT, lengths, sizes), made)


@dataclass(frozen=True)
class Stack(Operation):
    """Tensors of all values of a number become one, along a new dimension.

    Attributes:
        number: what the number counts.
        dimension: the new dimension.
        columns: how many tensors there are afterwards.
    """

    number: str
    dimension: int
    columns: int

    def inverse(self) -> Unstack:
        """What takes them apart again."""
        return Unstack(self)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        count = len(shapes) // self.columns
        made = []
        for column in range(self.columns):
            shape = shapes[column * count]
            if any(other != shape for other in shapes[column * count : (column + 1) * count]):
                raise SizeError(f"shapes {_some(dict.fromkeys(shapes))} are not alike, so they cannot be stacked")
            _dimension(self.dimension, (*shape, 0))
            made.append((*shape[: self.dimension], count, *shape[self.dimension :]))
        return SizedStep(SizedOperation(STACK, self.dimension, count=count), made)


@dataclass(frozen=True)
class Unstack(Operation):
    """The inverse of a `Stack`.

    Attributes:
        stack: it.
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
            raise SizeError(f"shapes {_some(shapes)} are not alike along dimension {self.stack.dimension}")
        count = counts.pop()
        made = [_without(shape, self.stack.dimension) for shape in shapes for _ in range(count)]
        return SizedStep(SizedOperation(UNSTACK, self.stack.dimension, count=count), made)


@dataclass(frozen=True)
class Transpose(Operation):
    """Dimensions in another order.

    Attributes:
        order: which dimension each becomes; none turns all of them round.
    """

    order: Optional[tuple[int, ...]] = None

    def inverse(self) -> Transpose:
        """What turns them back."""
        if self.order is None:
            return self
        return Transpose(tuple(sorted(range(len(self.order)), key=self.order.__getitem__)))

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        order = tuple(reversed(range(len(shapes[0])))) if self.order is None else self.order
        if any(len(shape) != len(order) for shape in shapes):
            raise SizeError(f"shapes {_some(dict.fromkeys(shapes))} have not {len(order)} dimensions")
        made = [tuple(shape[dimension] for dimension in order) for shape in shapes]
        return SizedStep(SizedOperation(TRANSPOSE, order=order), made)


@dataclass(frozen=True)
class Reshape(Operation):
    """The same elements in another shape.

    Attributes:
        before: what its shape is; names that are no sizes follow from it.
        after: what it becomes.
    """

    before: tuple[Product, ...]
    after: tuple[Product, ...]

    def inverse(self) -> Reshape:
        """What gives it its shape back."""
        return Reshape(self.after, self.before)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        if any(shape != shapes[0] for shape in shapes):
            raise SizeError(f"shapes {_some(dict.fromkeys(shapes))} are not alike")
        told = {name: sizes[name] for one in (*self.before, *self.after) for name in one.names if name in sizes}
        found = solved(self.before, shapes[0], told)
        for one in self.after:
            for name in one.names:
                if name not in found and name not in told:
                    said = ", ".join(each.text for each in self.before)
                    raise SizeError(f"[{said}] does not tell {name}")
        all_sizes = {**told, **found}
        made = tuple(one.whole(all_sizes) for one in self.after)
        if math.prod(made) != math.prod(shapes[0]):
            raise SizeError(f"shape {list(shapes[0])} cannot become {list(made)}, which has other elements")
        return SizedStep(SizedOperation(RESHAPE, shape=made), [made] * len(shapes))


@dataclass(frozen=True)
class Check(Operation):
    """Nothing but a look at the shape.

    Attributes:
        shape: what it must be.
    """

    shape: tuple[Product, ...]

    def inverse(self) -> Check:
        """The same."""
        return self

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        told = {name: sizes[name] for one in self.shape for name in one.names if name in sizes}
        for shape in shapes:
            solved(self.shape, shape, told)
        return SizedStep(None, [*shapes])


@dataclass(frozen=True)
class Pad(Operation):
    """Zeros at the end of a dimension, up to a multiple.

    Attributes:
        dimension: which.
        size: the true size.
        multiple: of what the padded size is the least multiple.
    """

    dimension: int
    size: Product
    multiple: Product

    def inverse(self) -> Unpad:
        """What leaves the zeros out."""
        return Unpad(self)

    def both(self, shape: Shape, sizes: ModelSizes) -> Optional[tuple[int, int]]:
        """The true and the padded size; None where they are one, whatever it is."""
        _dimension(self.dimension, shape)
        multiple = sizes.value(self.multiple)
        if not multiple:
            raise SizeError(f"{self.multiple.text} is 0, which nothing is a multiple of")
        true = sizes.value_if_known(self.size)
        if true is None and multiple == 1:
            return None
        true = sizes.value(self.size)
        return true, -(-true // multiple) * multiple

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        return self._sized(PAD, shapes, sizes)

    def _sized(self, kind: str, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        found = self.both(shapes[0], sizes)
        if found is None:
            return SizedStep(None, [*shapes])
        before, after = found if kind == PAD else found[::-1]
        for shape in shapes:
            _dimension(self.dimension, shape)
            if shape[self.dimension] != before:
                padded = "" if found[0] == found[1] else f", padded to {found[1]}"
                raise SizeError(
                    f"shape {list(shape)} contradicts {sizes.source}, by which dimension {self.dimension} has "
                    f"{self.size.text} = {found[0]} elements{padded}"
                )
        if before == after:
            return SizedStep(None, [*shapes])
        made = [_with(shape, self.dimension, after) for shape in shapes]
        if kind == PAD:
            note = f"padded with zeros along dimension {self.dimension} from {before} to {after}"
        else:
            note = f"what pads dimension {self.dimension} from {after} to {before} is left out"
        return SizedStep(SizedOperation(kind, self.dimension, sizes=(before, after)), made, note)


@dataclass(frozen=True)
class Unpad(Operation):
    """The inverse of a `Pad`.

    Attributes:
        pad: it.
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
        count: how many.
    """

    count: int

    def inverse(self) -> TakeFirst:
        """What takes one of them."""
        return TakeFirst(self.count)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        return SizedStep(SizedOperation(COPY, count=self.count), [*shapes] * self.count)


@dataclass(frozen=True)
class TakeFirst(Operation):
    """One of several tensors that should be equal.

    Attributes:
        count: how many.
    """

    count: int

    def inverse(self) -> Repeat:
        """What makes several of it again."""
        return Repeat(self.count)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedStep:
        """See `Operation`."""
        each = len(shapes) // self.count
        if any(shape != shapes[number % each] for number, shape in enumerate(shapes)):
            raise SizeError(f"shapes {_some(shapes)} are not alike, so the tensors are not equal")
        return SizedStep(SizedOperation(TAKE, count=self.count), [*shapes[:each]])


def _dimension(dimension: int, shape: Shape) -> None:
    if dimension >= len(shape):
        raise SizeError(f"shape {list(shape)} has no dimension {dimension}")


def _with(shape: Shape, dimension: int, length: int) -> Shape:
    return (*shape[:dimension], length, *shape[dimension + 1 :])


def _without(shape: Shape, dimension: int) -> Shape:
    return (*shape[:dimension], *shape[dimension + 1 :])


def _some(shapes: Iterable[Shape], most: int = 4) -> str:
    found = [*shapes]
    return ", ".join(str(list(shape)) for shape in found[:most]) + (", ..." if len(found) > most else "")
