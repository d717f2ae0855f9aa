"""Adding the product of two thin matrices to a weight, tile by tile.

The blocks of a weight depend on threads and memory. Tiles do not: they begin at multiples of their size and are
computed completely, so every run gives the same bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Callable, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.elements import widen
from reshard.execute.casts import Cast
from reshard.layout import Box, inside, intersection
from reshard.threads import ThreadLock

Matrix = npt.NDArray[np.float32]
Span = tuple[int, int]
"""First row or column, and one past the last."""

_ROWS, _COLUMNS = 64, 1024
LARGEST_SIDE = 1024
"""Rows or columns of the largest tile; tiles begin at multiples of a number that divides it."""


class MatrixCache:
    """The most recently used matrices, up to a size; for any number of threads.

    Args:
        most: size in bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._matrices: OrderedDict[Hashable, Matrix] = OrderedDict()
        self._nbytes = 0
        self._lock = ThreadLock()

    def find(self, key: Hashable) -> Optional[Matrix]:
        """A cached matrix."""
        with self._lock:
            matrix = self._matrices.get(key)
            if matrix is not None:
                self._matrices.move_to_end(key)
            return matrix

    def add(self, key: Hashable, matrix: Matrix) -> None:
        """Cache a matrix and drop the least recently used ones."""
        with self._lock:
            if key not in self._matrices:
                self._matrices[key] = matrix
                self._nbytes += matrix.nbytes
            while self._nbytes > self._most:
                self._nbytes -= self._matrices.popitem(last=False)[1].nbytes


class LowRank:
    """``scale * up @ down``, added in Float32 to a weight of any floating type.

    Args:
        name: of the weight.
        shape: rows and columns of the weight.
        dtype: its type.
        matrices: reads rows of ``up`` and columns of ``down``.
        scale: factor of the product.
        overflowed: called with the number of elements that become infinite.
        products: cache of partly used tiles: small neighbouring blocks need the same tile.
        paths: files of the matrices.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: str,
        matrices: Callable[[Span, Span], tuple[Matrix, Matrix]],
        scale: float,
        overflowed: Callable[[str, int], None],
        products: MatrixCache,
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
                target = words[inside(common, box)]
                if self._dtype == "Float32":
                    values = target.view("f4")[..., 0]
                    values += product[inside(common, tile)]
                    continue
                wide = widen(target, self._dtype).astype("f4")
                wide[..., 0] += product[inside(common, tile)]
                self._cast.put(wide.view("u4"), target)

    def _product(self, tile: Box, complete: bool) -> Matrix:
        """A tile of the addition; cached unless one block uses all of it."""
        product = self._products.find((self._name, tile))
        if product is None:
            rows, columns = tile
            up, down = self._matrices(rows, columns)
            product = up @ down
            product *= self._scale
            if not complete:
                self._products.add((self._name, tile), product)
        return product
