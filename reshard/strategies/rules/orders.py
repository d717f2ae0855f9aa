"""In which orders the devices of a stage may lie: device matrices that operators can give a weight.

An operator's matrix has the axes of its inputs in their order, so where model or expert parallelism lies depends on
which input the weight is and which dimension comes first. Slices of the right shape lie on wrong ranks where that is
mistaken, and nothing fails; so all orders are tried that a strategy allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Optional

from reshard.strategies.rules.model import DEFAULT_MATRIX, Cut, Matrix
from reshard.strategies.rules.placement import run_of
from reshard.strategies.rules.sizes import NoReadingError, Product, product

EVERYWHERE: Matrix = (product("dp*cp*mp"),)


def _matrix(*axes: str) -> Matrix:
    return tuple(map(product, axes))


# MatMul's left operand, and BatchMatMul whose batch is cut before its rows.
_OF_MODEL = (_matrix("mp", "dp", "cp"),)
# The operator's data has heads before the sequence.
_OF_MODEL_AND_CONTEXT = (_matrix("dp", "mp", "cp"),)
_OF_EXPERTS = (
    # Groups of samples, each with all experts: MindFormers' legacy models, and its newer ones.
    _matrix("dp*cp/ep", "ep", "mp"),
    _matrix("dp*cp*mp/ep", "ep"),
    # Experts are the batch of a BatchMatMul, whose other operand they are, or the left one.
    _matrix("ep", "dp*cp/ep", "mp"),
    _matrix("ep", "mp", "dp*cp/ep"),
    _matrix("ep", "dp*cp*mp/ep"),
    # MatMul, whose inner dimension mp cuts.
    _matrix("dp*cp/ep", "mp", "ep"),
)
_OF_EXPERTS_AND_CONTEXT = (_matrix("dp*mp/ep", "ep", "cp"), _matrix("dp/ep", "ep", "cp", "mp"))


def matrices_for(used: Collection[str], largest: Mapping[str, int]) -> Iterator[Matrix]:
    """The device matrices of weights that these sizes cut, the likeliest first.

    Args:
        used: names of the sizes.
        largest: per size the largest of all strategies that are looked at. Of context parallelism that none has
            nothing can be told, so orders that differ in it alone are left out.
    """
    context = largest["cp"] > 1
    if "ep" in used:
        yield from _OF_EXPERTS
        yield from _OF_EXPERTS_AND_CONTEXT if context else ()
        return
    yield DEFAULT_MATRIX
    if not used:
        yield EVERYWHERE
    if "mp" in used:
        yield from _OF_MODEL
        yield from _OF_MODEL_AND_CONTEXT if context else ()


def is_dp_outermost(matrix: Matrix) -> bool:
    """Whether ranks of different samples are farthest apart."""
    return "dp" in matrix[0].names


def experts_across_model(matrix: Matrix) -> bool:
    """Whether ranks that share model parallel operators have different experts."""
    return matrix[-1].names == ("ep",) or any({"ep", "mp"}.issubset(axis.names) for axis in matrix)


def strides(matrix: Matrix, cuts: Collection[Cut]) -> tuple[Optional[Product], ...]:
    """How far ranks with neighbouring slices are apart, per axis that cuts, whatever the sizes are.

    None for what is no axis of the matrix: as long as it does not cut, it need not be.
    """
    found: list[Optional[Product]] = []
    for cut in cuts:
        for factor in cut.factors:
            try:
                _, stop = run_of(matrix, factor)
            except NoReadingError:
                found.append(None)
                continue
            stride = product("1")
            for axis in matrix[stop:]:
                stride *= axis
            found.append(stride)
    return tuple(found)
