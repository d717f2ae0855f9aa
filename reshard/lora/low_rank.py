"""Adding the product of two thin matrices to a weight, tile by tile.

A block of a weight that is being written may begin and end anywhere, and which blocks there are depends on threads
and memory. Tiles do not: they lie at multiples of their size, each is computed whole, and so every element
comes out the same whoever writes it.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from reshard.execute.casts import Cast, cast_words
from reshard.layout import Box, inside, intersection

Matrix = npt.NDArray[np.float32]

_ROWS, _COLUMNS = 256, 1024


class LowRank:
    """``scale * up @ down``, added in Float32 to a weight of any floating type.

    Args:
        name: of the weight.
        shape: rows and columns of the weight.
        dtype: its type.
        matrices: reads ``up``, a row for each of the weight's, and ``down``, a column for each.
        scale: what the product is multiplied with.
        overflowed: told of elements that become infinite.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: str,
        matrices: Callable[[], tuple[Matrix, Matrix]],
        scale: float,
        overflowed: Callable[[str, int], None],
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._matrices = matrices
        self._scale = np.float32(scale)
        self._cast = Cast("Float32", dtype, name, overflowed)

    def add(self, box: Box, words: npt.NDArray[Any]) -> None:
        """Add to the elements of a box in place; see `checkpoint.Addition`."""
        up, down = self._matrices()
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
                product = up[slice(*tile[0])] @ down[:, slice(*tile[1])]
                product *= self._scale
                here = words[inside(common, box)]
                if self._dtype == "Float32":
                    values = here.view("f4")[..., 0]
                    values += product[inside(common, tile)]
                    continue
                wide = cast_words(here, self._dtype, "Float32").view("f4")
                wide[..., 0] += product[inside(common, tile)]
                self._cast.put(wide.view("u4"), here)
