"""An adapter for the plan: its additions to weights, tile by tile, and a comparison of other tensors with the base.

The blocks of a weight depend on threads and memory. Tiles do not: they begin at multiples of their size and are
computed completely, so every run gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.checkpoint import Addition, GlobalTensor
from reshard.checkpoints.formats.dtypes import CAST_TO, CASTABLE
from reshard.checkpoints.formats.elements import widen
from reshard.errors import CheckpointError
from reshard.execute.casts import Cast, Overflowed
from reshard.layout import Box, inside, intersection
from reshard.lora.pairs import Pair, is_matrix, module_of, pairs_of, weight_of
from reshard.lora.scale import Scale
from reshard.opened import LazyTensor, OpenedCheckpoint
from reshard.text.messages import listing, quoted
from reshard.text.names import is_weight
from reshard.threads import ThreadLock

Matrix = npt.NDArray[np.float32]
Span = tuple[int, int]
"""First row or column, and one past the last."""

# Size of the cache of matrices, and of one block of a matrix, in bytes.
_CACHE_BYTES = 32 << 20
_BLOCK_BYTES = 4 << 20
MAX_RANK = 4096
"""Largest rank of an adapter: the parts of the two matrices for one tile then take 17 MiB."""
# Size of the cache of partly used product tiles, in bytes.
_TILE_BYTES = 16 << 20
_ROWS, _COLUMNS = 64, 1024
# Rows or columns of the largest tile; tiles begin at multiples of a number that divides it.
_LARGEST_SIDE = 1024


class MatrixCache:
    """The most recently used matrices, up to a size in bytes; for any number of threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._matrices: OrderedDict[Hashable, Matrix] = OrderedDict()
        self._nbytes = 0
        self._lock = ThreadLock()

    def find(self, key: Hashable) -> Matrix | None:
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


class Adapter:
    """What an adapter adds to the tensors of a checkpoint.

    Args:
        tensors: of the adapter, opened.
        place: its path, for messages.
        scale: the factor of the products of its matrices.
        overflowed: called with the number of elements that become infinite.

    Attributes:
        identity: a text; adapters that add the same have equal texts.
        paths: its files.
        handles: its open files, and the source's: one cache detects every file that changes meanwhile.

    Raises:
        CheckpointError: no adapter, or an unsupported kind.
        ReshardError: a file cannot be read.
    """

    def __init__(self, tensors: OpenedCheckpoint, place: str, scale: Scale, overflowed: Overflowed) -> None:
        pairs = pairs_of(tensors.keys(), place)
        self._tensors = tensors
        self._place = place
        self._pairs = pairs
        self._scale = scale
        self._overflowed = overflowed
        self._blocks = MatrixCache(_CACHE_BYTES)
        self._products = MatrixCache(_TILE_BYTES)
        ranks = {pair.stem: self._rank(pair) for pair in pairs}
        self._alphas = scale.alphas_of(ranks)
        hashed = hashlib.sha256(repr(scale.fan_in_fan_out).encode())
        for pair in pairs:
            factor = scale.of(self._alphas[pair.stem], ranks[pair.stem])
            hashed.update(f"{pair} {factor!r}\n".encode(errors="surrogateescape"))
            for name in (pair.down, pair.up):
                tensor = tensors[name]
                hashed.update(f"{tensor.shape} {tensor.dtype_name}\n".encode())
                for block in tensor.blocks():
                    hashed.update(block.view(np.uint8).data)
        self.identity = hashed.hexdigest()
        self.handles = tensors.handles
        self.paths = frozenset().union(*map(self._paths, pairs))

    def fit(self, tensors: Mapping[str, GlobalTensor]) -> dict[str, Addition]:
        """The addition to each weight of the base.

        Raises:
            CheckpointError: a pair fits no weight, or several pairs fit one.
        """
        names: dict[str, Pair] = {}
        for pair in self._pairs:
            name = weight_of(pair, tensors.keys())
            if name in names:
                raise CheckpointError(
                    f"{self._place}: several pairs of matrices belong to {quoted(name)}; one is {quoted(pair.down)}",
                    file=self._place,
                    parameter=pair.down,
                )
            names[name] = pair
        shapes = {
            pair.stem: (self._tensors[pair.up].shape[:1] + self._tensors[pair.down].shape[1:], tensors[name].shape)
            for name, pair in names.items()
        }
        transposed = self._scale.transposed(shapes)
        return {name: self._addition(pair, tensors[name], transposed[pair.stem]) for name, pair in names.items()}

    def other_alphas(self) -> dict[float, list[str]]:
        """The modules with their own alpha, by alpha."""
        modules: dict[float, list[str]] = {}
        for stem, alpha in self._alphas.items():
            if alpha != self._scale.alpha:
                modules.setdefault(alpha, []).append(module_of(stem))
        return modules

    def is_part(self, name: str) -> bool:
        """Whether a tensor of the base is a matrix of an adapter."""
        return is_matrix(name)

    def _rank(self, pair: Pair) -> int:
        """The rank of a pair.

        Raises:
            CheckpointError: the shapes of its matrices do not match, or the rank is too large.
        """
        down, up = self._tensors[pair.down], self._tensors[pair.up]
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
            raise CheckpointError(
                f"{self._place}: {quoted(pair.up)} of shape {list(up.shape)} and {quoted(pair.down)} of shape "
                f"{list(down.shape)} cannot be multiplied",
                file=self._place,
                parameter=pair.down,
                hint="is the adapter damaged, or a strategy wrong?",
            )
        if down.shape[0] > MAX_RANK:
            raise CheckpointError(
                f"{self._place}: {quoted(pair.down)} has rank {down.shape[0]}; merge-lora supports ranks up to "
                f"{MAX_RANK}",
                file=self._place,
                parameter=pair.down,
            )
        return down.shape[0]

    def _paths(self, pair: Pair) -> frozenset[str]:
        tensors = (self._tensors[name].target for name in (pair.down, pair.up))
        return frozenset(piece.source.path for tensor in tensors for piece in tensor.pieces)

    def _addition(self, pair: Pair, weight: GlobalTensor, transposed: bool) -> Addition:
        down, up = self._tensors[pair.down], self._tensors[pair.up]
        for name, dtype in ((weight.name, weight.dtype), (pair.down, down.dtype_name), (pair.up, up.dtype_name)):
            if dtype not in (CAST_TO if name == weight.name else CASTABLE):
                raise CheckpointError(
                    f"{quoted(name)} is {dtype}; merge-lora supports {', '.join(sorted(CAST_TO))}", parameter=name
                )
        return LowRank(
            weight.name,
            (weight.shape[0], weight.shape[1]),
            weight.dtype,
            lambda rows, columns: self._matrices(pair, transposed, rows, columns),
            self._scale.of(self._alphas[pair.stem], down.shape[0]),
            self._overflowed,
            self._products,
            self._paths(pair),
        )

    def _matrices(self, pair: Pair, transposed: bool, rows: Span, columns: Span) -> tuple[Matrix, Matrix]:
        """Rows of the left and columns of the right factor of a product with the weight's shape."""
        if transposed:
            return self._part(pair.down, 1, rows).T, self._part(pair.up, 0, columns).T
        return self._part(pair.up, 0, rows), self._part(pair.down, 1, columns)

    def _part(self, name: str, dimension: int, span: Span) -> Matrix:
        """Rows or columns of a matrix in Float32, read with their whole block."""
        tensor = self._tensors[name]
        length, rank = tensor.shape[dimension], tensor.shape[1 - dimension]
        # A multiple of the tile size: no tile may cross a block.
        block = max(1, _BLOCK_BYTES // (4 * rank * _LARGEST_SIDE)) * _LARGEST_SIDE
        number = span[0] // block
        block_matrix = self._blocks.find((name, number))
        if block_matrix is None:
            index = slice(number * block, min((number + 1) * block, length))
            block_matrix = self._read(tensor, index if dimension == 0 else (slice(None), index))
            self._blocks.add((name, number), block_matrix)
        inner = slice(span[0] - number * block, span[1] - number * block)
        return block_matrix[inner] if dimension == 0 else block_matrix[:, inner]

    @staticmethod
    def _read(tensor: LazyTensor, index: Any) -> Matrix:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(tensor[index], np.float32)


def check_beside(adapter: OpenedCheckpoint, place: str, base: OpenedCheckpoint) -> None:
    """Compare the tensors that an adapter and its base share, element by element.

    Training may save the whole model beside the matrices, and PEFT saves embeddings and head after the vocabulary was
    resized. A merge ignores other trained weights, and matrices of another adapter in the base, so both are refused.

    Args:
        adapter: the adapter's tensors.
        place: its path, for messages.
        base: the base's tensors.

    Raises:
        CheckpointError: tensors differ, the base has matrices that the adapter lacks, or it lacks weights.
        ReshardError: a file cannot be read.
    """
    matrices = [name for name in base if is_weight(name, base) and is_matrix(name)]
    foreign = [name for name in matrices if name not in adapter or not _same(adapter[name], base[name])]
    if foreign:
        raise CheckpointError(
            f"the base contains matrices of another adapter than {place}: " + listing(foreign),
            parameter=foreign[0],
            hint="merge them first, with this base as BASE and as ADAPTER, or skip them with "
            "`reshard convert --exclude '*lora_*'`",
        )
    whole = sorted(name for name in adapter if is_weight(name, adapter) and not is_matrix(name))
    # Under PEFT's names, such as that of an embedding which was trained whole.
    names = {name: name if name in base else module_of(name).replace(".base_layer.", ".") for name in whole}
    shared = [name for name, own in names.items() if own in base]
    differing = [name for name in shared if not _same(adapter[name], base[names[name]])]
    if differing:
        raise CheckpointError(
            f"{place}: contains weights that differ from the base's: " + listing(differing),
            file=place,
            parameter=differing[0],
            hint="merge-lora only merges matrices: merge weights that were trained whole (modules_to_save, a resized "
            "vocabulary) with PEFT; if this checkpoint is the whole model, pass it as BASE, too",
        )
    # PEFT saves a tied head beside its embedding.
    lacking = [
        name for name in names if name not in shared and not any(_same(adapter[name], adapter[one]) for one in shared)
    ]
    if lacking:
        raise CheckpointError(
            f"{place}: contains weights that the base lacks: " + listing(lacking),
            file=place,
            parameter=lacking[0],
            hint="is it the adapter of another model?",
        )


def _same(first: LazyTensor, second: LazyTensor) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if (first.dtype_name, first.shape) != (second.dtype_name, second.shape):
        return False
    return all(
        first_block.tobytes() == second_block.tobytes()
        for first_block, second_block in zip(first.blocks(), second.blocks())
    )
