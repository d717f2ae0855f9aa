"""Operations of rules on tensors: each checks the shapes of its operands, and creates views of them.

An operation converts a list of tensors to another list. The tensors of a rule are in *columns*, one per name of the
rule; a column is one tensor, or one tensor per value of a stacked number, in order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

from reshard.layout.views import View
from reshard.names.sizes import ModelSizes, solved
from reshard.text.products import Product, SizeError

Shape = tuple[int, ...]

JOIN, CUT, STACK, UNSTACK = "join", "cut", "stack", "unstack"
TRANSPOSE, RESHAPE, PAD, UNPAD, COPY, TAKE = "transpose", "reshape", "pad", "unpad", "copy", "take"


@dataclass(frozen=True)
class SizedOperation:
    """An operation on a list of tensors, with its sizes: all that a proof without views needs.

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


class AppliedOperation(NamedTuple):
    """The results of an operation.

    Attributes:
        views: the results, as views of the sources.
        operation: with its sizes; None if it changes nothing.
        note: a note for the user, if any.
    """

    views: Sequence[View]
    operation: Optional[SizedOperation] = None
    note: Optional[str] = None


class Operation(ABC):
    """An operation of a rule, from left to right or, if ``inverted``, from right to left."""

    @abstractmethod
    def inverse(self) -> Operation:
        """The inverse operation."""

    @abstractmethod
    def apply(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        """The results for these operands.

        Args:
            views: the operands.
            sizes: of the model.

        Raises:
            SizeError: it does not fit their shapes.
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
        inverted: one tensor is split into several.
    """

    dimension: int
    count: int
    parts: Optional[tuple[Optional[Product], ...]] = None
    groups: Optional[Product] = None
    block: Optional[Product] = None
    inverted: bool = False

    def inverse(self) -> Join:
        """See `Operation`."""
        return replace(self, inverted=not self.inverted)

    def apply(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        """See `Operation`."""
        return self._split(views, sizes) if self.inverted else self._join(views, sizes)

    def _join(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        per_column = len(views) // self.count
        operands = [views[number::per_column] for number in range(per_column)]
        for joined in operands:
            _check_dimension(self.dimension, joined[0].shape)
            if len({_resized(view.shape, self.dimension) for view in joined}) != 1:
                raise SizeError(f"shapes {_shapes(joined)} differ in a dimension other than {self.dimension}")
        lengths, *others = {tuple(view.shape[self.dimension] for view in joined) for joined in operands}
        if others:
            raise SizeError(f"shapes {_shapes(views)} differ")
        if self.parts is None and len(set(lengths)) != 1:
            raise SizeError(f"shapes {_shapes(views)} differ along dimension {self.dimension}, and no parts are stated")
        expected = self._lengths(sum(lengths), sizes)
        if lengths != expected:
            raise SizeError(f"shapes {_shapes(views)} contradict {sizes.source}: {self._parts_text(expected)}")
        operation = self._sized(JOIN, lengths, sizes)
        return AppliedOperation([self._joined(joined, operation) for joined in operands], operation)

    @staticmethod
    def _joined(views: Sequence[View], operation: SizedOperation) -> View:
        dimension, groups, shape = operation.dimension, operation.groups, views[0].shape
        if groups == 1:
            return View.concat(views, dimension)
        grouped = [view.reshape(_resized(shape, dimension, groups, size)) for view, size in zip(views, operation.sizes)]
        return View.concat(grouped, dimension + 1).reshape(_resized(shape, dimension, groups * sum(operation.sizes)))

    def _split(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        dimension, first = self.dimension, views[0].shape
        _check_dimension(dimension, first)
        total = first[dimension]
        if any(view.shape[dimension : dimension + 1] != (total,) for view in views):
            raise SizeError(f"shapes {_shapes(views)} differ")
        lengths = self._lengths(total, sizes)
        if sum(lengths) != total:
            parts = self._parts_text(lengths)
            raise SizeError(f"shape {list(first)} contradicts {sizes.source}: dimension {dimension} has {parts}")
        operation = self._sized(CUT, lengths, sizes)
        groups, results = operation.groups, []
        grouped = [view.reshape(_resized(view.shape, dimension, groups, total // groups)) for view in views]
        start = 0
        for size in operation.sizes:
            for view, whole in zip(grouped, views):
                part = view.part(dimension + 1, start, start + size)
                results.append(part.reshape(_resized(whole.shape, dimension, groups * size)))
            start += size
        return AppliedOperation(results, operation)

    def _lengths(self, total: int, sizes: ModelSizes) -> tuple[int, ...]:
        """The elements of each tensor, given their sum."""
        if self.parts is not None:
            lengths = [None if part is None else sizes.value(part) for part in self.parts]
            remaining = total - sum(length or 0 for length in lengths)
            if remaining < 0:
                raise SizeError(
                    f"{total} elements along dimension {self.dimension} contradict {sizes.source}: "
                    + self._parts_text(lengths)
                )
            return tuple(remaining if length is None else length for length in lengths)
        if total % self.count:
            raise SizeError(
                f"{total} elements along dimension {self.dimension} do not divide into {self.count} equal parts"
            )
        return (total // self.count,) * self.count

    def _parts_text(self, lengths: Sequence[Optional[int]]) -> str:
        """The parts with their lengths, for messages."""
        return ", ".join(
            f"{part.text} = {length}" for part, length in zip(self.parts or (), lengths) if part is not None
        )

    def _sized(self, kind: str, lengths: Sequence[int], sizes: ModelSizes) -> SizedOperation:
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
class Stack(Operation):
    """Tensors of all values of a number become one, along a new dimension.

    Attributes:
        number: the name of the number.
        dimension: the new dimension.
        columns: number of results.
        inverted: tensors become one for each value of the number.
    """

    number: str
    dimension: int
    columns: int
    inverted: bool = False

    def inverse(self) -> Stack:
        """See `Operation`."""
        return replace(self, inverted=not self.inverted)

    def apply(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        """See `Operation`."""
        return self._unstack(views) if self.inverted else self._stack(views)

    def _stack(self, views: Sequence[View]) -> AppliedOperation:
        dimension, count = self.dimension, len(views) // self.columns
        results = []
        for start in range(0, len(views), count):
            stacked = views[start : start + count]
            shape = stacked[0].shape
            if any(view.shape != shape for view in stacked):
                raise SizeError(f"shapes {_distinct_shapes(stacked)} differ, so they cannot be stacked")
            _check_dimension(dimension, (*shape, 0))
            rows = [view.reshape((*shape[:dimension], 1, *shape[dimension:])) for view in stacked]
            results.append(View.concat(rows, dimension))
        return AppliedOperation(results, SizedOperation(STACK, dimension, count=count))

    def _unstack(self, views: Sequence[View]) -> AppliedOperation:
        dimension = self.dimension
        for view in views:
            _check_dimension(dimension, view.shape)
        count, *others = {view.shape[dimension] for view in views}
        if others:
            raise SizeError(f"shapes {_shapes(views)} differ along dimension {dimension}")
        results = [
            view.part(dimension, number, number + 1).reshape(_resized(view.shape, dimension))
            for view in views
            for number in range(count)
        ]
        return AppliedOperation(results, SizedOperation(UNSTACK, dimension, count=count))


@dataclass(frozen=True)
class Transpose(Operation):
    """Dimensions in another order.

    Attributes:
        order: the source dimension of each; None reverses all.
    """

    order: Optional[tuple[int, ...]] = None

    def inverse(self) -> Transpose:
        """See `Operation`."""
        if self.order is None:
            return self
        return Transpose(tuple(sorted(range(len(self.order)), key=self.order.__getitem__)))

    def apply(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        """See `Operation`."""
        order = tuple(reversed(range(len(views[0].shape)))) if self.order is None else self.order
        if any(len(view.shape) != len(order) for view in views):
            raise SizeError(f"shapes {_distinct_shapes(views)} do not have {len(order)} dimensions")
        return AppliedOperation([view.transpose(order) for view in views], SizedOperation(TRANSPOSE, order=order))


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
        """See `Operation`."""
        return Reshape(self.after, self.before)

    def apply(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        """See `Operation`."""
        shape = views[0].shape
        if any(view.shape != shape for view in views):
            raise SizeError(f"shapes {_distinct_shapes(views)} differ")
        known_sizes = _known_sizes((*self.before, *self.after), sizes)
        all_sizes = {**known_sizes, **solved(self.before, shape, known_sizes)}
        for name in (name for expression in self.after for name in expression.names):
            if name not in all_sizes:
                expected = ", ".join(expression.text for expression in self.before)
                raise SizeError(f"{name} does not follow from [{expected}]")
        new_shape = tuple(expression.whole(all_sizes) for expression in self.after)
        if math.prod(new_shape) != math.prod(shape):
            raise SizeError(f"shape {list(shape)} cannot become {list(new_shape)}: the numbers of elements differ")
        return AppliedOperation([view.reshape(new_shape) for view in views], SizedOperation(RESHAPE, shape=new_shape))


@dataclass(frozen=True)
class Check(Operation):
    """A check of the shape, which changes nothing.

    Attributes:
        shape: the expected shape.
    """

    shape: tuple[Product, ...]

    def inverse(self) -> Check:
        """See `Operation`."""
        return self

    def apply(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        """See `Operation`."""
        known_sizes = _known_sizes(self.shape, sizes)
        for view in views:
            solved(self.shape, view.shape, known_sizes)
        return AppliedOperation(views)


@dataclass(frozen=True)
class Pad(Operation):
    """Zeros at the end of a dimension, up to a multiple.

    Attributes:
        dimension: the dimension.
        size: the size without padding.
        multiple: the padded size is the smallest fitting multiple of this.
        inverted: the zeros are removed.
    """

    dimension: int
    size: Product
    multiple: Product
    inverted: bool = False

    def inverse(self) -> Pad:
        """See `Operation`."""
        return replace(self, inverted=not self.inverted)

    def apply(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        """See `Operation`."""
        dimension = self.dimension
        _check_dimension(dimension, views[0].shape)
        multiple = sizes.value(self.multiple)
        if not multiple:
            raise SizeError(f"{self.multiple.text} is 0, and must be at least 1")
        if multiple == 1 and sizes.value_if_known(self.size) is None:
            return AppliedOperation(views)
        size = sizes.value(self.size)
        padded = -(-size // multiple) * multiple
        before, after = (padded, size) if self.inverted else (size, padded)
        for view in views:
            _check_dimension(dimension, view.shape)
            if view.shape[dimension] != before:
                padding = "" if size == padded else f", padded to {padded}"
                raise SizeError(
                    f"shape {list(view.shape)} contradicts {sizes.source}: dimension {dimension} has "
                    f"{self.size.text} = {size} elements{padding}"
                )
        if before == after:
            return AppliedOperation(views)
        operation = SizedOperation(UNPAD if self.inverted else PAD, dimension, sizes=(before, after))
        if self.inverted:
            note = f"padding of dimension {dimension} removed: {before} to {after}"
            return AppliedOperation([view.part(dimension, 0, after) for view in views], operation, note)
        note = f"padded with zeros along dimension {dimension} from {before} to {after}"
        zeros = [View.zeros(_resized(view.shape, dimension, after - before)) for view in views]
        return AppliedOperation([View.concat(both, dimension) for both in zip(views, zeros)], operation, note)


@dataclass(frozen=True)
class Copy(Operation):
    """One tensor becomes several equal ones.

    Attributes:
        count: the number of tensors.
        inverted: the first of several tensors, which should be equal.
    """

    count: int
    inverted: bool = False

    def inverse(self) -> Copy:
        """See `Operation`."""
        return replace(self, inverted=not self.inverted)

    def apply(self, views: Sequence[View], sizes: ModelSizes) -> AppliedOperation:
        """See `Operation`."""
        if not self.inverted:
            return AppliedOperation([*views] * self.count, SizedOperation(COPY, count=self.count))
        each = len(views) // self.count
        if any(view.shape != views[number % each].shape for number, view in enumerate(views)):
            raise SizeError(f"shapes {_shapes(views)} differ, so the tensors are not equal")
        return AppliedOperation(views[:each], SizedOperation(TAKE, count=self.count))


class Chain(NamedTuple):
    """The results of several operations.

    Attributes:
        views: the results, as views of the sources.
        operations: those that change something, with their sizes.
        notes: notes for the user.
    """

    views: Sequence[View]
    operations: tuple[SizedOperation, ...]
    notes: tuple[str, ...]


def apply_all(operations: Iterable[Operation], shapes: Sequence[Shape], sizes: ModelSizes) -> Chain:
    """The results of operations, one after the other.

    Args:
        operations: the operations.
        shapes: of the sources, numbered in this order.
        sizes: of the model.

    Raises:
        SizeError: an operation does not fit these shapes.
        NamesError: a size is unknown.
    """
    views: Sequence[View] = [View.whole(number, shape) for number, shape in enumerate(shapes)]
    steps = []
    for operation in operations:
        steps.append(operation.apply(views, sizes))
        views = steps[-1].views
    return Chain(
        views,
        tuple(step.operation for step in steps if step.operation is not None),
        tuple(step.note for step in steps if step.note is not None),
    )


def _known_sizes(expressions: Iterable[Product], sizes: ModelSizes) -> dict[str, int]:
    """The sizes of the table in expressions."""
    return {name: sizes[name] for expression in expressions for name in expression.names if name in sizes}


def _check_dimension(dimension: int, shape: Shape) -> None:
    if dimension >= len(shape):
        raise SizeError(f"shape {list(shape)} has no dimension {dimension}")


def _resized(shape: Shape, dimension: int, *lengths: int) -> Shape:
    """The shape with these dimensions instead of one."""
    return (*shape[:dimension], *lengths, *shape[dimension + 1 :])


def _shapes(views: Iterable[View]) -> str:
    return _listed([view.shape for view in views])


def _distinct_shapes(views: Iterable[View]) -> str:
    return _listed(dict.fromkeys(view.shape for view in views))


def _listed(shapes: Collection[Shape], most: int = 4) -> str:
    return ", ".join(str(list(shape)) for shape in [*shapes][:most]) + (", ..." if len(shapes) > most else "")
