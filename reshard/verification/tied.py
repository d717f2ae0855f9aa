"""Whether what a source holds several times over is equal, where rules or casts take one of it for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from reshard.layout import whole_box
from reshard.text.wording import quoted
from reshard.verification.difference import Difference
from reshard.verification.edited import EditedTree
from reshard.verification.parts import Readable
from reshard.verification.reading import Means, sum_boxes


def not_alike(tree: EditedTree, means: Means) -> list[Difference]:
    """Tensors of a source that are not equal to the one that is written for them, and stages that disagree.

    Raises:
        RetryableError: reading failed.
    """
    return [*_untied(tree, means), *_stages(tree, means)]


def _untied(tree: EditedTree, means: Means) -> Iterator[Difference]:
    base = tree.base
    names = sorted({name for pair in tree.tied for name in pair})
    wholes = (
        (number, part)
        for number, name in enumerate(names)
        for _, part in base.parts(base.parameters[name], [whole_box(base.parameters[name].shape)])
    )
    sums = dict(zip(names, sum_boxes(wholes, len(names), means, told=False)))
    for one, other in tree.tied:
        if sums[one] != sums[other]:
            yield Difference(
                "content", other, (), f"is not written but made of {quoted(one)}, which differs from its own contents"
            )


def _stages(tree: EditedTree, means: Means) -> Iterator[Difference]:
    """Sources of what is made that several pipeline stages have, each all of it, but not with the same values."""
    used = {source.name: source for recipe in tree.recipes.values() for source in recipe.sources}
    shared = [source for source in used.values() if len(source.holdings) > 1]
    keys: list[tuple[str, int]] = []
    parts: list[tuple[int, Readable]] = []
    for source in shared:
        for number, slices in enumerate(source.whole_stages()):
            parts += [(len(keys), tree.base.slice_part(source, held)) for held in slices if held.holders]
            keys.append((source.name, number))
    totals: dict[str, set[int]] = defaultdict(set)
    for (name, _), total in zip(keys, sum_boxes(parts, len(keys), means, told=False)):
        totals[name].add(total)
    for name, different in totals.items():
        if len(different) > 1:
            yield Difference("stages", name, (), "the source's pipeline stages hold different values of it")
