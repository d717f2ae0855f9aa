"""Weights to which the product of an adapter's two thin matrices was added: worked out anew, in tiles, in Float64.

A conversion adds and multiplies in Float32, in whatever order the processor likes, and rounds once to the weight's
type. So an element cannot be compared bit by bit, but it may be no farther from the exact one than such rounding leads,
for which there is a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.errors import CheckpointError
from reshard.layout import Box
from reshard.text.messages import listing
from reshard.text.wording import quoted
from reshard.verification.parameter import Parameter
from reshard.verification.parts import Readable
from reshard.verification.rounding import decoded, half_unit, largest
from reshard.verification.tree import Tree

if TYPE_CHECKING:
    from reshard.lora import Scale

Numbers = npt.NDArray[np.float64]

TILE = (128, 2048)
"""Rows and columns that are worked out at a time: ten arrays of some MB."""

# Half a unit in the last place of a Float32, by size.
_FLOAT32 = 2.0**-24
# Roundings beside those of the sum: of either matrix, the scale, its product, the weight added.
_OTHER_ROUNDINGS = 8


@dataclass(frozen=True)
class Product:
    """What was added to a weight: ``scale * up @ down``, or that transposed.

    Attributes:
        tree: the adapter's files.
        up: the matrix with a column for each of the ranks.
        down: the one with a row for each.
        scale: what their product is multiplied with.
        transposed: whether the weight has a row for each input.
    """

    tree: Tree
    up: Parameter
    down: Parameter
    scale: float
    transposed: bool

    def numbers(self, tile: Box, handles: FileHandles) -> tuple[Numbers, Numbers]:
        """A tile of what was added, and the sums of the sizes of its terms."""
        rows, columns = tile[::-1] if self.transposed else tile
        ranks = (0, self.up.shape[1])
        up = _read(self.tree, self.up, (rows, ranks), handles)
        down = _read(self.tree, self.down, (ranks, columns), handles)
        with np.errstate(invalid="ignore", over="ignore"):
            found = up @ down * self.scale
            sizes = np.abs(up) @ np.abs(down) * abs(self.scale)
        return (found.T, sizes.T) if self.transposed else (found, sizes)


def products_of(base: Tree, adapter: Tree, place: str, scale: Scale) -> dict[str, Product]:
    """What an adapter adds to which weight.

    Args:
        base: the weights.
        adapter: the matrices, complete.
        place: where these lie, for messages.
        scale: what the products are multiplied with; by module.

    Raises:
        CheckpointError: the two do not fit each other.
    """
    # Loaded only here: of all that belongs to adapters, names and scales alone are taken from there.
    from reshard.lora.pairs import is_matrix, pairs_of, weight_of

    pairs = pairs_of(adapter.names, place)
    loose = [name for pair in pairs for name in (pair.up, pair.down) if name not in adapter.parameters]
    if loose:
        raise CheckpointError(
            f"{place}: nothing says how these are laid out: " + listing(loose), file=place, parameter=loose[0]
        )
    weights = [name for name in base.parameters if not is_matrix(name)]
    found: dict[str, Product] = {}
    for pair in pairs:
        name = weight_of(pair, weights)
        up, down = adapter.parameters[pair.up], adapter.parameters[pair.down]
        shape = base.parameters[name].shape
        if (up.shape[:1] + down.shape[1:])[:: -1 if scale.transposed else 1] != shape or up.shape[1:] != down.shape[:1]:
            raise CheckpointError(
                f"{quoted(pair.up)} of shape {list(up.shape)} times {quoted(pair.down)} of shape {list(down.shape)} is "
                f"not of the shape {list(shape)} of {quoted(name)}",
                file=place,
                parameter=pair.up,
            )
        found[name] = Product(adapter, up, down, scale.of(pair.stem, down.shape[0]), scale.transposed)
    return found


def is_sum(
    part: Readable, dtype: str, base: Tree, parameter: Parameter, product: Product, handles: FileHandles
) -> bool:
    """Whether a tile is what its weight and the product beside it make, as far as rounding allows.

    Args:
        part: the tile, as it was written.
        dtype: its type, and the weight's.
        base: the weight's files.
        parameter: the weight.
        product: what was added.
        handles: open files.
    """
    found = decoded(_words([(part.box, part)], part.box, dtype, handles), dtype)
    before = _read(base, parameter, part.box, handles)
    added, sizes = product.numbers(part.box, handles)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = before + added
        off = (product.down.shape[0] + _OTHER_ROUNDINGS) * _FLOAT32 * (np.abs(before) + sizes)
        off += half_unit(np.abs(exact) + off, dtype)
        fits = np.isfinite(exact) & (np.abs(found - exact) <= off)
        # What is too large for the type is infinite.
        fits |= (np.abs(exact) + off >= largest(dtype)) & (found == np.copysign(np.inf, exact))
    fits |= np.isnan(exact) & np.isnan(found)
    return bool(fits.all())


def tiles(box: Box) -> Iterator[Box]:
    """A box of a weight in tiles."""
    (first, last), (left, right) = box
    for row in range(first, last, TILE[0]):
        for column in range(left, right, TILE[1]):
            yield (row, min(row + TILE[0], last)), (column, min(column + TILE[1], right))


def _read(tree: Tree, parameter: Parameter, box: Box, handles: FileHandles) -> Numbers:
    """Elements of a parameter as numbers."""
    parts = [(part.box, part) for _, part in tree.parts(parameter, [box])]
    return decoded(_words(parts, box, parameter.dtype, handles), parameter.dtype)


def _words(parts: list[tuple[Box, Readable]], box: Box, dtype: str, handles: FileHandles) -> npt.NDArray[Any]:
    """Elements of a box, all of which are in some part of it."""
    found = np.empty([stop - start for start, stop in box], f"<u{ITEM_SIZES[dtype]}")
    for inside, part in parts:
        read = np.empty([stop - start for start, stop in inside], found.dtype)
        part.opened(handles, 0).read(0, read.reshape(-1).view(np.uint8).data)
        found[tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(inside, box))] = read
    return found
