"""Operations of rules on tensors: shapes of the operands give each its sizes, and these its results as views.

An operation converts a list of tensors to another list. The tensors of a rule are in *columns*, one per name of the
rule; a column is one tensor, or one tensor per value of a stacked number, in order.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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


class Operation(ABC):
    """An operation of a rule, from left to right or, if ``inverted``, from right to left."""

    inverted: bool

    def inverse(self) -> Operation:
        return replace(self, inverted=not self.inverted)  # type: ignore[type-var]

    @abstractmethod
    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation | None:
        """The operation with its sizes, for operands of these shapes; None if it changes nothing.

        Raises:
            SizeError: it does not fit the shapes.
            NamesError: a size is unknown.
        """


@dataclass(frozen=True)
class Join(Operation):
    """Several tensors become one: concatenated, or in groups that alternate; inverted, one becomes several.

    Attributes:
        dimension: the dimension.
        count: number of tensors.
        parts: elements of each along the dimension, None for the rest; equal parts by default.
        groups: number of groups; one by default.
        block: instead of ``groups``, the elements of each tensor in a group.
    """

    dimension: int
    count: int
    parts: tuple[Product | None, ...] | None = None
    groups: Product | None = None
    block: Product | None = None
    inverted: bool = False

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation | None:
        return self._split(shapes, sizes) if self.inverted else self._join(shapes, sizes)

    def _join(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation:
        per_column = len(shapes) // self.count
        operands = [shapes[number::per_column] for number in range(per_column)]
        for joined in operands:
            _check_dimension(self.dimension, joined[0])
            if len({_resized(shape, self.dimension) for shape in joined}) != 1:
                raise SizeError(f"shapes {_shapes(joined)} differ in a dimension other than {self.dimension}")
        lengths, *others = {tuple(shape[self.dimension] for shape in joined) for joined in operands}
        if others:
            raise SizeError(f"shapes {_shapes(shapes)} differ")
        if self.parts is None and len(set(lengths)) != 1:
            raise SizeError(
                f"shapes {_shapes(shapes)} differ along dimension {self.dimension}, and no parts are stated"
            )
        expected = self._lengths(sum(lengths), sizes)
        if lengths != expected:
            raise SizeError(f"shapes {_shapes(shapes)} contradict {sizes.source}: {self._parts_text(expected)}")
        return self._grouped(JOIN, lengths, sizes)

    def _split(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation:
        dimension = self.dimension
        total = _length(dimension, shapes)
        lengths = self._lengths(total, sizes)
        if sum(lengths) != total:
            parts = self._parts_text(lengths)
            raise SizeError(f"shape {list(shapes[0])} contradicts {sizes.source}: dimension {dimension} has {parts}")
        return self._grouped(CUT, lengths, sizes)

    def _lengths(self, total: int, sizes: ModelSizes) -> tuple[int, ...]:
        if self.parts is None:
            return (self._divided(total, self.count, "parts"),) * self.count
        lengths = [None if part is None else sizes.value(part) for part in self.parts]
        remaining = total - sum(length or 0 for length in lengths)
        if remaining < 0:
            raise SizeError(
                f"{total} elements along dimension {self.dimension} contradict {sizes.source}: "
                + self._parts_text(lengths)
            )
        return tuple(remaining if length is None else length for length in lengths)

    def _parts_text(self, lengths: Sequence[int | None]) -> str:
        return ", ".join(
            f"{part.text} = {length}" for part, length in zip(self.parts or (), lengths) if part is not None
        )

    def _grouped(self, kind: str, lengths: Sequence[int], sizes: ModelSizes) -> SizedOperation:
        groups = 1
        if self.groups is not None:
            groups = sizes.value(self.groups)
        elif self.block is not None:
            block = sizes.value(self.block)
            self._divided(lengths[0], block, "elements in blocks")
            groups = lengths[0] // block
        # A tensor without elements fits any number of groups.
        if not any(lengths):
            groups = groups or 1
        of_group = tuple(self._divided(length, groups, "groups") for length in lengths)
        return SizedOperation(kind, self.dimension, groups, of_group)

    def _divided(self, elements: int, count: int, what: str) -> int:
        if not count or elements % count:
            raise SizeError(f"{elements} elements along dimension {self.dimension} do not divide into {count} {what}")
        return elements // count


@dataclass(frozen=True)
class Stack(Operation):
    """Tensors of all values of a number become one, along a new dimension; inverted, one for each value.

    Attributes:
        number: the name of the number.
        dimension: the new dimension.
        columns: number of names per value of all numbers.
        count: number of values, where the rule stacks an outer number, too; None if a whole column is stacked.
    """

    number: str
    dimension: int
    columns: int
    count: Product | None = None
    inverted: bool = False

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation | None:
        dimension = self.dimension
        if self.inverted:
            count = _length(dimension, shapes)
            if self.count is not None and count != (expected := sizes.value(self.count)):
                raise SizeError(
                    f"shape {list(shapes[0])} contradicts {sizes.source}: dimension {dimension} has "
                    f"{self.count.text} = {expected} elements"
                )
            return SizedOperation(UNSTACK, dimension, count=count)
        count = len(shapes) // self.columns if self.count is None else sizes.value(self.count)
        for start in range(0, len(shapes), count):
            _check_dimension(dimension, (*_one_shape(shapes[start : start + count]), 0))
        return SizedOperation(STACK, dimension, count=count)


@dataclass(frozen=True)
class Transpose(Operation):
    """Dimensions in another order.

    Attributes:
        order: the source dimension of each; None reverses all.
    """

    order: tuple[int, ...] | None = None

    def inverse(self) -> Transpose:
        return self if self.order is None else Transpose(tuple(map(self.order.index, range(len(self.order)))))

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation | None:
        order = tuple(reversed(range(len(shapes[0])))) if self.order is None else self.order
        if any(len(shape) != len(order) for shape in shapes):
            raise SizeError(f"shapes {_shapes(shapes)} do not have {len(order)} dimensions")
        return SizedOperation(TRANSPOSE, order=order)


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
        return Reshape(self.after, self.before)

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation | None:
        shape = _one_shape(shapes)
        known_sizes = _known_sizes((*self.before, *self.after), sizes)
        all_sizes = {**known_sizes, **solved(self.before, shape, known_sizes)}
        new_shape = tuple(expression.whole(all_sizes) for expression in self.after)
        if math.prod(new_shape) != math.prod(shape):
            raise SizeError(f"shape {list(shape)} cannot become {list(new_shape)}: the numbers of elements differ")
        return SizedOperation(RESHAPE, shape=new_shape)


@dataclass(frozen=True)
class Check(Operation):
    """A check of the shape, which changes nothing."""

    shape: tuple[Product, ...]

    def inverse(self) -> Check:
        return self

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation | None:
        known_sizes = _known_sizes(self.shape, sizes)
        for shape in dict.fromkeys(shapes):
            solved(self.shape, shape, known_sizes)
        return None


@dataclass(frozen=True)
class Pad(Operation):
    """Zeros at the end of a dimension, up to a multiple; inverted, they are removed.

    Attributes:
        dimension: the dimension.
        size: the size without padding.
        multiple: the padded size is the smallest fitting multiple of this.
    """

    dimension: int
    size: Product
    multiple: Product
    inverted: bool = False

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation | None:
        dimension = self.dimension
        multiple = sizes.value(self.multiple)
        if not multiple:
            raise SizeError(f"{self.multiple.text} is 0, and must be at least 1")
        if multiple == 1 and sizes.value_if_known(self.size) is None:
            return None
        size = sizes.value(self.size)
        padded = -(-size // multiple) * multiple
        before, after = (padded, size) if self.inverted else (size, padded)
        for shape in shapes:
            _check_dimension(dimension, shape)
            if shape[dimension] != before:
                padding = "" if size == padded else f", padded to {padded}"
                raise SizeError(
                    f"shape {list(shape)} contradicts {sizes.source}: dimension {dimension} has "
                    f"{self.size.text} = {size} elements{padding}"
                )
        if before == after:
            return None
        return SizedOperation(UNPAD if self.inverted else PAD, dimension, sizes=(before, after))


@dataclass(frozen=True)
class Copy(Operation):
    """One tensor becomes several equal ones; inverted, the first of several, which should be equal."""

    count: int
    inverted: bool = False

    def sized(self, shapes: Sequence[Shape], sizes: ModelSizes) -> SizedOperation | None:
        if not self.inverted:
            return SizedOperation(COPY, count=self.count)
        each = len(shapes) // self.count
        if any(shape != shapes[number % each] for number, shape in enumerate(shapes)):
            raise SizeError(f"shapes {_shapes(shapes)} differ, so the tensors are not equal")
        return SizedOperation(TAKE, count=self.count)


@functools.lru_cache(maxsize=256)
def results(
    operations: tuple[SizedOperation, ...], operands: tuple[tuple[Shape | View, tuple[int, ...]], ...]
) -> list[tuple[tuple[int, ...], View]]:
    """The results of operations, alike for layers and experts: the tensors that each needs, and its view of them.

    Args:
        operations: one after the other.
        operands: of the shapes that these were made for: whole tensors or views, and the numbers of their tensors.
    """
    views: Sequence[View] = [
        (View.whole(0, each) if isinstance(each, tuple) else each).with_sources(numbers) for each, numbers in operands
    ]
    for operation in operations:
        views = _viewed(operation, views)
    return [view.with_needed_sources() for view in views]


def _viewed(operation: SizedOperation, views: Sequence[View]) -> Sequence[View]:
    kind, at, count = operation.kind, operation.dimension, operation.count
    if kind == JOIN:
        per_column = len(views) // len(operation.sizes)
        return [_joined(views[number::per_column], operation) for number in range(per_column)]
    if kind == CUT:
        return _cut(views, operation)
    if kind == STACK:
        rows = [view.reshape((*view.shape[:at], 1, *view.shape[at:])) for view in views]
        return [View.concat(rows[start : start + count], at) for start in range(0, len(rows), count)]
    if kind == UNSTACK:
        return [
            view.part(at, number, number + 1).reshape(_resized(view.shape, at))
            for view in views
            for number in range(count)
        ]
    if kind == TRANSPOSE:
        return [view.transpose(operation.order) for view in views]
    if kind == RESHAPE:
        return [view.reshape(operation.shape) for view in views]
    if kind == PAD:
        before, after = operation.sizes
        zeros = [View.zeros(_resized(view.shape, at, after - before)) for view in views]
        return [View.concat(both, at) for both in zip(views, zeros)]
    if kind == UNPAD:
        return [view.part(at, 0, operation.sizes[1]) for view in views]
    if kind == COPY:
        return [*views] * count
    assert kind == TAKE, kind
    return views[: len(views) // count]


def _joined(views: Sequence[View], operation: SizedOperation) -> View:
    dimension, groups, shape = operation.dimension, operation.groups, views[0].shape
    if groups == 1:
        return View.concat(views, dimension)
    grouped = [view.reshape(_resized(shape, dimension, groups, size)) for view, size in zip(views, operation.sizes)]
    return View.concat(grouped, dimension + 1).reshape(_resized(shape, dimension, groups * sum(operation.sizes)))


def _cut(views: Sequence[View], operation: SizedOperation) -> list[View]:
    dimension, groups, results = operation.dimension, operation.groups, []
    total = sum(operation.sizes)
    grouped = [view.reshape(_resized(view.shape, dimension, groups, total)) for view in views]
    start = 0
    for size in operation.sizes:
        for view, whole in zip(grouped, views):
            part = view.part(dimension + 1, start, start + size)
            results.append(part.reshape(_resized(whole.shape, dimension, groups * size)))
        start += size
    return results


def sized_all(
    operations: Iterable[Operation], shapes: Sequence[Shape], sizes: ModelSizes
) -> tuple[tuple[SizedOperation, ...], int]:
    """Those of operations, one after the other, that change something, with their sizes; and the number of results."""
    views: Sequence[View] = [View.whole(number, shape) for number, shape in enumerate(shapes)]
    steps = []
    for operation in operations:
        sized = operation.sized([view.shape for view in views], sizes)
        if sized is not None:
            views = _viewed(sized, views)
            steps.append(sized)
    return tuple(steps), len(views)


def _known_sizes(expressions: Iterable[Product], sizes: ModelSizes) -> dict[str, int]:
    return {name: sizes[name] for expression in expressions for name in expression.names if name in sizes}


def _check_dimension(dimension: int, shape: Shape) -> None:
    if dimension >= len(shape):
        raise SizeError(f"shape {list(shape)} has no dimension {dimension}")


def _length(dimension: int, shapes: Sequence[Shape]) -> int:
    """The elements along a dimension, equal in all tensors."""
    for shape in shapes:
        _check_dimension(dimension, shape)
    length, *others = {shape[dimension] for shape in shapes}
    if others:
        raise SizeError(f"shapes {_shapes(shapes)} differ along dimension {dimension}")
    return length


def _one_shape(shapes: Sequence[Shape]) -> Shape:
    shape, *others = dict.fromkeys(shapes)
    if others:
        raise SizeError(f"shapes {_shapes(shapes)} differ")
    return shape


def _resized(shape: Shape, dimension: int, *lengths: int) -> Shape:
    return (*shape[:dimension], *lengths, *shape[dimension + 1 :])


def _shapes(shapes: Iterable[Shape], most: int = 4) -> str:
    different = [*dict.fromkeys(shapes)]
    return ", ".join(str(list(shape)) for shape in different[:most]) + (", ..." if len(different) > most else "")
