"""Whether tensors of a source that rules take for one are equal, so that nothing is lost with all but the first."""

from __future__ import annotations

from reshard.layout import whole_box
from reshard.verification.difference import Difference
from reshard.verification.edited import EditedTree
from reshard.verification.reading import Means, sum_boxes


def untied(tree: EditedTree, means: Means) -> list[Difference]:
    """The tensors of a source that are not equal to the one that is written for them.

    Raises:
        RetryableError: reading failed.
    """
    base = tree.base
    names = sorted({name for pair in tree.tied for name in pair})
    wholes = (
        (number, part)
        for number, name in enumerate(names)
        for _, part in base.parts(base.parameters[name], [whole_box(base.parameters[name].shape)])
    )
    sums = dict(zip(names, sum_boxes(wholes, len(names), means, told=False)))
    return [
        Difference("content", other, (), f"is taken from the source's {one!r}, which differs from its own {other!r}")
        for one, other in tree.tied
        if sums[one] != sums[other]
    ]
