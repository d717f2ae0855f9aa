"""Weights plus the product of an adapter's two thin matrices, computed again in tiles, in Float64.

The conversion multiplies and adds in Float32, in an order that depends on the processor, and rounds once to the
weight's type. So elements are not compared bit by bit: each may differ from the exact result by a bound on these
rounding errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import AS_RECORDED, ShardReading
from reshard.errors import CheckpointError
from reshard.text.messages import listing
from reshard.verification.boxes import Box
from reshard.verification.rounding import decoded, half_unit, largest
from reshard.verification.stored import Content, Source, Words

if TYPE_CHECKING:
    from reshard.lora import Scale

Numbers = npt.NDArray[np.float64]

TILE = (128, 2048)
"""Rows and columns of a tile: ten arrays of some MB."""

# Half a unit in the last place of a Float32, by size.
_FLOAT32 = 2.0**-24
# Rounding errors besides the sum's: of either matrix, the scale, its product, the addition to the weight.
_OTHER_ROUNDINGS = 8


@dataclass(frozen=True)
class Sum(Content):
    """A weight plus ``scale * up @ down``, or the transposed product.

    `read` returns the weight alone; `fits` compares copies.

    Attributes:
        weight: the weight.
        up: the matrix with a column for each of the ranks.
        down: the matrix with a row for each of the ranks.
        scale: factor of the product.
        transposed: whether the weight has a row for each input.
    """

    weight: Content
    up: Content
    down: Content
    scale: float
    transposed: bool

    shards: ShardReading = AS_RECORDED

    def paths(self) -> Collection[str]:
        """The files that may be read."""
        return {*self.weight.paths(), *self.up.paths(), *self.down.paths()}

    def read(self, box: Box, handles: FileHandles) -> Words:
        """The weight's elements."""
        return self.weight.read(box, handles)

    def tiles(self, box: Box) -> Iterator[Box]:
        """A box in tiles."""
        (first, last), (left_edge, right_edge) = box
        for row in range(first, last, TILE[0]):
            for column in range(left_edge, right_edge, TILE[1]):
                yield (row, min(row + TILE[0], last)), (column, min(column + TILE[1], right_edge))

    def fits(self, weight: Words, written: Words, box: Box, handles: FileHandles) -> bool:
        """Whether elements equal the weight's plus the product's, within the bound on rounding."""
        number, before = decoded(written, self.dtype), decoded(weight, self.dtype)
        rows, columns = box[::-1] if self.transposed else box
        ranks = (0, self.up.shape[1])
        up = decoded(self.up.read((rows, ranks), handles), self.up.dtype)
        down = decoded(self.down.read((ranks, columns), handles), self.down.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            added, sizes = up @ down * self.scale, np.abs(up) @ np.abs(down) * abs(self.scale)
            if self.transposed:
                added, sizes = added.T, sizes.T
            exact = before + added
            off = (self.down.shape[0] + _OTHER_ROUNDINGS) * _FLOAT32 * (np.abs(before) + sizes)
            off += half_unit(np.abs(exact) + off, self.dtype)
            fits = np.isfinite(exact) & (np.abs(number - exact) <= off)
            # Numbers too large for the type are infinite.
            fits |= (np.abs(exact) + off >= largest(self.dtype)) & (number == np.copysign(np.inf, exact))
        fits |= np.isnan(exact) & np.isnan(number)
        return bool(fits.all())


def sums_of(
    base: Source,
    adapter: Source,
    place: str,
    scale: Scale,
) -> dict[str, Content]:
    """The weights plus an adapter, without matrices of adapters.

    Args:
        base: the weights, with their names in the model.
        adapter: the matrices, complete.
        place: path of the matrices, for messages.
        scale: factors of the products, by module.

    Raises:
        CheckpointError: the two do not fit each other.
    """
    # Only names and scales come from that room.
    from reshard.lora.pairs import is_matrix, pairs_of, weight_of

    pairs = pairs_of(adapter.names, place)
    loose = [name for pair in pairs for name in (pair.up, pair.down) if name not in adapter.tensors]
    if loose:
        raise CheckpointError(
            f"{place}: the layout of these matrices is unknown: " + listing(loose), file=place, parameter=loose[0]
        )
    sums = {name: tensor for name, tensor in base.tensors.items() if not is_matrix(name)}
    written_names = {base.model_names[name]: name for name in sums}
    names = {pair.stem: written_names[weight_of(pair, written_names)] for pair in pairs}
    products = {pair.stem: adapter.tensors[pair.up].shape[:1] + adapter.tensors[pair.down].shape[1:] for pair in pairs}
    transposed = scale.transposed({stem: (product, sums[names[stem]].shape) for stem, product in products.items()})
    for pair in pairs:
        name = names[pair.stem]
        up, down, weight = adapter.tensors[pair.up], adapter.tensors[pair.down], sums[name]
        sums[name] = Sum(
            weight.name,
            weight.dtype,
            weight.item_size,
            weight.shape,
            weight,
            up,
            down,
            scale.of(pair.stem, down.shape[0]),
            transposed[pair.stem],
            weight.shards,
        )
    return sums
