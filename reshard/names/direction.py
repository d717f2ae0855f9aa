"""Which side of a table a checkpoint is on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Optional

from reshard.errors import NamesError
from reshard.names.matching import Side
from reshard.names.model import FORWARD, Rules
from reshard.names.operations import Shape
from reshard.names.options import Settled
from reshard.text.names import WEIGHTS, kind_of


def side_of(rules: Rules, settled: Settled, shapes: Mapping[str, Shape], reverse: Optional[bool]) -> Side:
    """The side that the source is on.

    Args:
        rules: the table.
        settled: what holds of it.
        shapes: of all tensors of the source.
        reverse: whether it is the right side; None: the one that the names of its weights fit.

    Raises:
        NamesError: both fit, or neither does more than the other.
    """
    if reverse is None and rules.direction == FORWARD:
        reverse = False
    if reverse is not None:
        return Side(settled.rules, rules.numbers, settled.sizes, reverse)
    sides = [Side(settled.rules, rules.numbers, settled.sizes, way) for way in (False, True)]
    weights = [name for name, shape in shapes.items() if kind_of(name, math.prod(shape), shapes) == WEIGHTS]
    fitting = [sum(bool(side.matches(name)) for name in weights) for side in sides]
    if fitting[0] != fitting[1]:
        return sides[fitting[1] > fitting[0]]
    left, right = rules.sides
    if not fitting[0]:
        raise NamesError(
            f"the rules {rules.path} speak of none of the checkpoint's {len(weights)} weights, neither as {left} "
            f"nor as {right}",
            hint=_examples(sides, weights),
        )
    raise NamesError(
        f"the rules {rules.path} fit the checkpoint as {left} as well as {right} ({fitting[0]} of {len(weights)} "
        "weights), so that nothing tells which way they are meant",
        hint=f'--reverse takes it for {right}; direction = "forward" in the rules takes it for {left}',
    )


def _examples(sides: list[Side], weights: list[str]) -> Optional[str]:
    known = [side.patterns()[:1] for side in sides]
    if not weights or not all(known):
        return None
    return f"the rules know names such as {known[0][0]} and {known[1][0]}; the checkpoint has {weights[0]}"
