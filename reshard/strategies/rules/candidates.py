"""Sizes of a run, and candidate layouts of a weight: a grid of named axes, and the axes that cut each dimension.

Candidates are read both ways. With sizes, `Candidate.layout` gives the device matrix and tensor map of a compile. From
slices that strategies record, `candidates_showing` finds the candidates that give them at the sizes of those runs.

An operator's matrix has the axes of its inputs in order, so the place of model or expert parallelism in it
depends on which input the weight is and which dimension comes first. A wrong order gives slices of the right shape on
the wrong ranks, and no loader detects it. Therefore all orders in `_ORDERS` are tried, and none is preferred.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.defaults import MAX_DEVICES, MAX_STAGES
from reshard.errors import UsageError
from reshard.layout import Layout
from reshard.text.products import ExpressionError, Product, product
from reshard.threads import cached_property

STAGES = "pp"
EXPERTS = "ep"
NAMES = ("dp", "mp", "pp", "cp", "ep")
"""Data, model (tensor), pipeline, context and expert parallel: 1 by default."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Megatron's names, which would be taken for a model's own axes.
_ELSEWHERE = {"tp": "mp", "sp": "cp"}


class NoCandidateError(ExpressionError):
    """Cuts that are impossible for a matrix at any sizes."""


@dataclass(frozen=True)
class AxisSizes:
    """Devices per kind of parallelism.

    Attributes:
        stated: the stated sizes, by name; axes of a model's own may have any other name.
    """

    stated: tuple[tuple[str, int], ...]

    @cached_property
    def named(self) -> Mapping[str, int]:
        return {**dict.fromkeys(NAMES, 1), **dict(self.stated)}

    def __getitem__(self, name: str) -> int:
        """The size of an axis."""
        if name not in self.named:
            hint = f"write {_ELSEWHERE[name]}" if name in _ELSEWHERE else f"add --sizes {name}=N"
            raise ExpressionError(f"{name} has no size; {hint}")
        return self.named[name]

    @cached_property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage; expert parallelism uses the devices of other kinds."""
        return math.prod(size for name, size in self.named.items() if name not in (STAGES, EXPERTS))

    @property
    def stages(self) -> int:
        return self[STAGES]

    @property
    def text(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.stated)


def parse_sizes(text: str) -> AxisSizes:
    """Sizes as typed: ``dp=2,mp=4``."""
    sizes_by_name: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if not _NAME.fullmatch(name) or not re.fullmatch(r"[0-9]{1,9}", number):
            raise UsageError(f"{text!r} is not a list of sizes such as dp=2,mp=4")
        if name in _ELSEWHERE:
            raise UsageError(f"{text!r}: write {_ELSEWHERE[name]} for {name}")
        if name in sizes_by_name:
            raise UsageError(f"{text!r}: {name} is given twice")
        sizes_by_name[name] = int(number)
        if not 1 <= sizes_by_name[name] <= (MAX_STAGES if name == STAGES else MAX_DEVICES):
            raise UsageError(f"{text!r}: {name}={number} is not a number of devices")
    sizes = AxisSizes(tuple(sizes_by_name.items()))
    if sizes.stage_devices * sizes.stages > MAX_DEVICES:
        raise UsageError(f"{text!r} is more than {MAX_DEVICES} devices")
    return sizes


Matrix = tuple[Product, ...]
"""The axes of a device matrix, slowest first."""

SlicesByDevice = tuple[tuple[tuple[int, int], ...], ...]
"""Per dimension its cuts as (stride, size), most significant first: a rank has part ``rank // stride % size``."""

SIZED = ("mp", "cp", "ep")
"""The sizes that cut weights."""


def _matrices(*texts: str) -> tuple[Matrix, ...]:
    return tuple(tuple(product(axis.strip()) for axis in text.split(",")) for text in texts)


(DEFAULT_MATRIX,) = _matrices("dp, cp, mp")
"""Data parallel outermost, model parallel innermost: MatMul's right operand and most others."""

# Device matrices by the size that cuts the weight, the likeliest first; the second list only with context parallelism,
# without which its orders equal others.
_ORDERS: dict[str, tuple[tuple[Matrix, ...], tuple[Matrix, ...]]] = {
    "ep": (
        _matrices(
            # Groups of samples, each with all experts: MindFormers' legacy models, and its newer ones.
            "dp*cp/ep, ep, mp",
            "dp*cp*mp/ep, ep",
            # Experts are the batch of a BatchMatMul: the other operand, or the left one.
            "ep, dp*cp/ep, mp",
            "ep, mp, dp*cp/ep",
            "ep, dp*cp*mp/ep",
            # MatMul whose inner dimension is cut by mp.
            "dp*cp/ep, mp, ep",
        ),
        _matrices("dp*mp/ep, ep, cp", "dp/ep, ep, cp, mp"),
    ),
    "any other": ((DEFAULT_MATRIX,), ()),
    "none": (_matrices("dp*cp*mp"), ()),
    # MatMul's left operand, and BatchMatMul whose batch is cut before its rows; with cp, heads before the sequence.
    "mp": (_matrices("mp, dp, cp"), _matrices("dp, mp, cp")),
}

# Products that cut a dimension, and the size that must exceed 1 to distinguish each from the others.
_PRODUCTS = ((product("mp"), "mp"), (product("ep"), "ep"), (product("mp*cp"), "cp"))

# Repeats over these are written as one axis: operators do not distinguish samples from parts of a sequence.
_SAMPLES = frozenset(("dp", "cp"))


@dataclass(frozen=True)
class AxisCut:
    """How one dimension is cut.

    Attributes:
        factors: products of neighbouring axes, most significant first; none where the dimension is whole.
            Several need the nested form.
        most: maximum number of slices; the rest of the axis repeats them.
        where_divides: whole where the dimension does not divide.
        needs: whole where this is 1; None if nothing else is needed.
    """

    factors: tuple[Product, ...] = ()
    most: int | None = None
    where_divides: bool = False
    needs: Product | None = None

    @property
    def text(self) -> str:
        text = "*".join(factor.text for factor in self.factors) or "None"
        text = text if self.most is None else f"min({text},{self.most})"
        return text + "?" * self.where_divides + (f" if {self.needs.text}" if self.needs is not None else "")

    def slices(self, sizes: AxisSizes) -> int:
        """The number of slices."""
        if self.needs is not None and self.needs.whole(sizes) == 1:
            return 1
        count = math.prod(factor.whole(sizes) for factor in self.factors)
        if self.most is None or count <= self.most:
            return count
        if count % self.most:
            raise ExpressionError(f"{self.text}: {count} does not divide by {self.most}")
        return self.most

    def is_capped(self, sizes: AxisSizes) -> bool:
        return self.most is not None and math.prod(factor.whole(sizes) for factor in self.factors) > self.most


WHOLE = AxisCut()


class Candidate(NamedTuple):
    """One way in which a tensor may be cut.

    Attributes:
        matrix: the axes of the device matrix, slowest first.
        cuts: one per dimension.
        nested: written as the Layout interface writes it: a map per dimension, axes of size 1 kept.
    """

    matrix: Matrix
    cuts: tuple[AxisCut, ...]
    nested: bool = False

    @property
    def cut_by(self) -> list[str]:
        return [name for cut in self.cuts for factor in cut.factors for name in sorted(factor.names)]

    @property
    def has_experts_across_model(self) -> bool:
        """Whether only experts are cut, and differ between ranks that share model parallel operators."""
        across = self.matrix[-1].names == ("ep",) or any({"ep", "mp"}.issubset(axis.names) for axis in self.matrix)
        return across and "ep" in self.cut_by and "mp" not in self.cut_by

    def is_capped(self, sizes: AxisSizes) -> bool:
        return any(cut.is_capped(sizes) for cut in self.cuts)

    def strides(self) -> tuple[Product | None, ...]:
        """The distance of ranks with neighbouring slices, per factor of the cuts, for any sizes.

        None for a product that is not an axis of the matrix: it must not cut.
        """
        strides: list[Product | None] = []
        for factor in (factor for cut in self.cuts for factor in cut.factors):
            try:
                stop = _run_of(self.matrix, factor).stop
            except NoCandidateError:
                strides.append(None)
            else:
                strides.append(math.prod(self.matrix[stop:], start=product("1")))
        return tuple(strides)

    def slices(self, shape: Sequence[int], sizes: AxisSizes) -> object:
        """The comparable slices of every device; None if the tensor cannot be cut this way."""
        try:
            return slices_by_device(self.layout(shape, sizes))
        except ExpressionError:
            return None

    def layout(self, shape: Sequence[int], sizes: AxisSizes) -> Layout:
        """The layout that a compile records, before optimizer sharding.

        Args:
            shape: full shape of the tensor.
            sizes: sizes of the axes.

        Raises:
            ExpressionError: the matrix is not the stage's devices, a cut is over no axes of it, two are over the
                same, or a dimension does not divide.
        """
        counts = [axis.whole(sizes) for axis in self.matrix]
        if math.prod(counts) != sizes.stage_devices:
            names = " x ".join(f"{axis.text} ({count})" for axis, count in zip(self.matrix, counts))
            raise ExpressionError(f"matrix {names} is not the {sizes.stage_devices} devices of a stage")
        runs: dict[int, _Run] = {}
        for dimension, cut in enumerate(self.cuts):
            slices = self._slices_of(dimension, shape[dimension], sizes)
            for factor in cut.factors if slices else ():
                run = _run_of(self.matrix, factor)
                if any(run.start < earlier.stop and start < run.stop for start, earlier in runs.items()):
                    raise NoCandidateError(f"{factor.text} cuts two dimensions")
                runs[run.start] = _Run(run.stop, dimension, min(factor.whole(sizes), cut.most or slices))
        axes, places = self._merged_axes(counts, runs)
        if not axes:
            return Layout((1,), ((),) * len(shape))
        maps: list[list[int]] = [[] for _ in shape]
        for start, cutting in runs.items():
            maps[cutting.dimension] += [len(axes) - 1 - place for place in places[start]]
        return Layout(tuple(axes), tuple(map(tuple, maps)))

    def _slices_of(self, dimension: int, size: int, sizes: AxisSizes) -> int:
        """The number of slices of a dimension; 0 if the layout does not name its cut.

        Raises:
            ExpressionError: the size is not divisible, or the form cannot express the cut.
        """
        cut = self.cuts[dimension]
        slices = cut.slices(sizes)
        if slices == 1 and not self.nested:
            return 0
        if size % slices:
            if cut.where_divides:
                return 0
            raise ExpressionError(f"dimension {dimension} of size {size} does not divide by {cut.text} = {slices}")
        if len(cut.factors) > 1 and not self.nested:
            axes = " and ".join(factor.text for factor in cut.factors)
            raise ExpressionError(
                f"dimension {dimension} is cut by {axes}, which only the nested form records: nested = true"
            )
        return slices

    def _merged_axes(self, counts: Sequence[int], runs: Mapping[int, _Run]) -> tuple[list[int], dict[int, list[int]]]:
        """The sizes of the axes as a compile writes them, and per run the positions of the cutting ones."""
        axes: list[int] = []
        places: dict[int, list[int]] = {}
        joins = False
        position = 0
        while position < len(self.matrix):
            run = runs.get(position)
            if run is not None:
                places[position] = self._add_run(axes, counts[position : run.stop], run.slices)
                position, joins = run.stop, False
                continue
            names, count = self.matrix[position].names, counts[position]
            position += 1
            if count == 1 and not self.nested:
                continue
            samples = bool(names) and _SAMPLES.issuperset(names)
            if joins and samples and not self.nested:
                axes[-1] *= count
            else:
                axes.append(count)
            joins = samples
        return axes, places

    def _add_run(self, axes: list[int], counts: Sequence[int], slices: int) -> list[int]:
        count = math.prod(counts)
        if slices < count:
            # The repeats of a capped cut are innermost.
            axes += [slices, count // slices]
            return [len(axes) - 2]
        added = counts if self.nested else [count]
        axes += added
        return list(range(len(axes) - len(added), len(axes)))


class _Run(NamedTuple):
    """Neighbouring axes that cut: the end of the run, the dimension, and the slices."""

    stop: int
    dimension: int
    slices: int


def _run_of(matrix: Matrix, factor: Product) -> range:
    """The neighbouring axes whose product is a factor.

    Raises:
        NoCandidateError: the matrix has no such axes.
    """
    for start in range(len(matrix)):
        run = matrix[start]
        for stop in range(start + 1, len(matrix) + 1):
            if run == factor:
                return range(start, stop)
            if stop < len(matrix):
                run = run * matrix[stop]
    axes = ", ".join(axis.text for axis in matrix)
    raise NoCandidateError(f"{factor.text} is not an axis of the matrix [{axes}], or a product of neighbouring axes")


def slices_by_device(layout: Layout) -> SlicesByDevice:
    """The cuts of a layout, neighbouring axes as one: equal where devices hold the same slices."""
    sizes = layout.device_matrix[::-1]
    dimensions = []
    for axes in layout.tensor_map:
        cuts: list[tuple[int, int]] = []
        for axis in axes:
            stride, size = math.prod(sizes[:axis]), sizes[axis]
            if size == 1:
                continue
            if cuts and cuts[-1][0] == stride * size:
                cuts[-1] = (stride, cuts[-1][1] * size)
            else:
                cuts.append((stride, size))
        dimensions.append(tuple(cuts))
    return tuple(dimensions)


class Observation(NamedTuple):
    """How one weight is cut in one stage of a strategy.

    Attributes:
        sizes: sizes of the run.
        slices: slices of every device.
        device_matrix: the recorded one.
        nested: whether the map is nested; None if the file's form does not show it, like JSON.
    """

    sizes: AxisSizes
    slices: SlicesByDevice
    device_matrix: tuple[int, ...]
    nested: bool | None


def candidates_showing(shape: tuple[int, ...], observed: Sequence[Observation]) -> tuple[Candidate, ...]:
    """All candidates that agree with the observations, the likeliest first.

    Of candidates with the same cuts and strides, which give the same slices at all sizes, only one is returned.
    """
    largest = {name: max(one.sizes[name] for one in observed) for name in SIZED}
    nested = all(one.nested for one in observed)
    agreeing: dict[Candidate, bool] = {}
    for cuts in itertools.product(*(_cuts_showing(*each, observed, largest) for each in enumerate(shape))):
        cut_by = Candidate(DEFAULT_MATRIX, cuts).cut_by
        if {"ep", "mp"} <= {*cut_by} and cut_by.index("mp") < cut_by.index("ep"):
            # Experts are the first dimension. Where both sizes are equal, the other candidate gives the same slices.
            continue
        for matrix in _matrices_for(cut_by, largest["cp"] > 1):
            candidate = Candidate(matrix, cuts, nested)
            if all(candidate.slices(shape, one.sizes) == one.slices for one in observed):
                agreeing[candidate] = all(
                    candidate.layout(shape, one.sizes).device_matrix == one.device_matrix for one in observed
                )
    # Experts across model parallel ranks are cut through the Layout interface, which writes nested maps. MindSpore
    # 2.10 writes flat ones; then the rule has to be stated, because it would explain wrong sizes.
    if any(one.nested is False for one in observed):
        agreeing = {candidate: exact for candidate, exact in agreeing.items() if not candidate.has_experts_across_model}
    distinct: dict[object, Candidate] = {}
    for candidate in sorted(agreeing, key=lambda candidate: not agreeing[candidate]):
        distinct.setdefault((candidate.cuts, candidate.strides()), candidate)
    return tuple(distinct.values())


def _matrices_for(cut_by: Collection[str], context: bool) -> Iterator[Matrix]:
    """The device matrices of weights that these sizes cut, the likeliest first."""
    if "ep" in cut_by:
        kinds = ["ep"]
    else:
        kinds = ["any other", *([] if cut_by else ["none"]), *(["mp"] if "mp" in cut_by else [])]
    for kind in kinds:
        always, with_context = _ORDERS[kind]
        yield from always
        yield from with_context if context else ()


def _cuts_showing(
    dimension: int, size: int, observed: Sequence[Observation], largest: Mapping[str, int]
) -> list[AxisCut]:
    """The known cuts of a dimension with as many slices as observed.

    Sizes that are 1 in all runs are left out: the runs do not show their cuts.
    """
    slices = [math.prod(count for _, count in one.slices[dimension]) for one in observed]
    cuts = [WHOLE] if set(slices) == {1} else []
    for each in (each for each, needed in _PRODUCTS if largest[needed] > 1):
        expected = [each.whole(one.sizes) for one in observed]
        if slices == expected:
            cuts.append(AxisCut((each,)))
        elif slices == [1 if size % count else count for count in expected]:
            cuts.append(AxisCut((each,), where_divides=True))
    for most in sorted({count for count, one in zip(slices, observed) if 1 < count < one.sizes["mp"]}):
        if slices == [min(one.sizes["mp"], most) for one in observed]:
            cuts.append(AxisCut((product("mp"),), most))
    return cuts
