"""Adding the product of two thin matrices to a weight, tile by tile.

A block of a weight that is being written may begin and end anywhere, and which blocks there are depends on threads
and memory. Tiles do not: they lie at multiples of their size, each is computed whole, and so every element
comes out the same whoever writes it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Callable, Optional

import numpy as np
import numpy.typing as npt

from reshard.execute.casts import Cast, cast_words
from reshard.layout import Box, inside, intersection

Matrix = npt.NDArray[np.float32]
Span = tuple[int, int]
"""The first of some rows or columns, and the one behind the last."""

_ROWS, _COLUMNS = 64, 1024
LARGEST_SIDE = 1024
"""Rows or columns of the largest tile; tiles begin at multiples of a number that divides it."""


class Products:
    """Tiles of products that were used in part: where blocks are small, the next ones need the same again.

    Args:
        most: bytes that are held.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[tuple[str, Box], Matrix] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def find(self, name: str, tile: Box) -> Optional[Matrix]:
        """A tile of a weight's product, if it is held."""
        with self._lock:
            found = self._held.get((name, tile))
            if found is not None:
                self._held.move_to_end((name, tile))
            return found

    def hold(self, name: str, tile: Box, product: Matrix) -> None:
        """Hold one, and let go of those that were not used for longest."""
        with self._lock:
            if (name, tile) not in self._held:
                self._held[name, tile] = product
                self._nbytes += product.nbytes
            while self._nbytes > self._most:
                self._nbytes -= self._held.popitem(last=False)[1].nbytes


class LowRank:
    """``scale * up @ down``, added in Float32 to a weight of any floating type.

    Args:
        name: of the weight.
        shape: rows and columns of the weight.
        dtype: its type.
        matrices: reads some rows of ``up``, which has one for each of the weight's, and some columns of ``down``.
        scale: what the product is multiplied with.
        overflowed: told of elements that become infinite.
        products: where tiles are held that are not used whole.
        paths: the files that the matrices are read from.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: str,
        matrices: Callable[[Span, Span], tuple[Matrix, Matrix]],
        scale: float,
        overflowed: Callable[[str, int], None],
        products: Products,
        paths: frozenset[str] = frozenset(),
    ) -> None:
        self.paths = paths
        self._name = name
        self._products = products
        self._shape = shape
        self._dtype = dtype
        self._matrices = matrices
        self._scale = np.float32(scale)
        self._cast = Cast("Float32", dtype, name, overflowed)

    def add(self, box: Box, words: npt.NDArray[Any]) -> None:
        """Add to the elements of a box in place; see `checkpoint.Addition`."""
        (first_row, last_row), (first_column, last_column) = box
        for row in range(first_row - first_row % _ROWS, last_row, _ROWS):
            for column in range(first_column - first_column % _COLUMNS, last_column, _COLUMNS):
                tile = (
                    (row, min(row + _ROWS, self._shape[0])),
                    (column, min(column + _COLUMNS, self._shape[1])),
                )
                common = intersection(tile, box)
                if common is None:
                    continue
                product = self._product(tile, common == tile)
                here = words[inside(common, box)]
                if self._dtype == "Float32":
                    values = here.view("f4")[..., 0]
                    values += product[inside(common, tile)]
                    continue
                wide = cast_words(here, self._dtype, "Float32").view("f4")
                wide[..., 0] += product[inside(common, tile)]
                self._cast.put(wide.view("u4"), here)

    def _product(self, tile: Box, alone: bool) -> Matrix:
        """A tile of what is added, which no other block needs if it is used alone."""
        found = self._products.find(self._name, tile)
        if found is None:
            rows, columns = tile
            up, down = self._matrices(rows, columns)
            found = up @ down
            found *= self._scale
            if not alone:
                self._products.hold(self._name, tile, found)
        return found
