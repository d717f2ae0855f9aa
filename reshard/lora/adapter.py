"""An adapter as the plan knows it: what it adds to which weight."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.checkpoint import Addition, GlobalTensor
from reshard.checkpoints.formats.dtypes import CAST_TO, CASTABLE
from reshard.errors import CheckpointError
from reshard.execute.casts import Overflowed, cast_words
from reshard.lora.low_rank import LARGEST_SIDE, LowRank, Matrix, Products, Span
from reshard.lora.pairs import Pair, is_matrix, module_of, pairs_of, weight_of, whole_weights
from reshard.lora.scale import Scale
from reshard.opened import LazyTensor, OpenedCheckpoint
from reshard.text.messages import listing
from reshard.text.wording import quoted

# Bytes of matrices that are held for other tiles of their weights, and of a block that is read of one.
_HELD_BYTES = 32 << 20
_BLOCK_BYTES = 4 << 20
MAX_RANK = 4096
"""The largest rank of an adapter: what a tile needs of its two matrices then takes 17 MiB."""
# Of their products, tiles of which other blocks need the rest.
_TILE_BYTES = 16 << 20


class Adapter:
    """What an adapter adds; see `edits.Additions`.

    Args:
        tensors: the adapter's, opened.
        place: where they lie, for messages.
        pairs: its matrices.
        scale: what their products are multiplied with.
        overflowed: told of elements that become infinite.
    """

    def __init__(
        self,
        tensors: OpenedCheckpoint,
        place: str,
        pairs: list[Pair],
        scale: Scale,
        overflowed: Overflowed,
    ) -> None:
        self._tensors = tensors
        self._place = place
        self._pairs = pairs
        self._scale = scale
        self._overflowed = overflowed
        self._held: OrderedDict[tuple[str, int], Matrix] = OrderedDict()
        self._held_bytes = 0
        self._products = Products(_TILE_BYTES)
        self._lock = threading.Lock()
        ranks = {pair.stem: self._rank(pair) for pair in pairs}
        scale.check(ranks)
        hashed = hashlib.sha256(repr(scale.transposed).encode())
        for pair in pairs:
            hashed.update(f"{pair} {scale.of(pair.stem, ranks[pair.stem])!r}\n".encode(errors="surrogateescape"))
            for name in (pair.down, pair.up):
                tensor = tensors[name]
                hashed.update(f"{tensor.shape} {tensor.dtype_name}\n".encode())
                for block in tensor.blocks():
                    hashed.update(block.view(np.uint8).data)
        self.identity = hashed.hexdigest()
        self.handles = tensors.handles
        self.paths = frozenset().union(*map(self._paths, pairs))

    def fit(self, tensors: Mapping[str, GlobalTensor]) -> dict[str, Addition]:
        """What is added to each weight.

        Args:
            tensors: the base's.

        Raises:
            CheckpointError: a pair fits no weight, or several fit one.
        """
        found: dict[str, Addition] = {}
        weights = [name for name in tensors if not is_matrix(name)]
        for pair in self._pairs:
            name = weight_of(pair, tensors.keys())
            if name in found:
                raise CheckpointError(
                    f"{self._place}: several pairs of matrices belong to {quoted(name)}, one is {quoted(pair.down)}",
                    file=self._place,
                    parameter=pair.down,
                )
            found[name] = self._addition(pair, tensors[name])
        # The same weights may lie beside the matrices, as where a base is its own adapter.
        others = [name for name in whole_weights(self._tensors.keys()) if name not in weights]
        if others:
            raise CheckpointError(
                f"{self._place}: holds weights that the base does not have, and that are no matrices: "
                + listing(others),
                file=self._place,
                parameter=others[0],
                hint="is it the adapter of another model?",
            )
        return found

    def other_alphas(self) -> dict[float, list[str]]:
        """The modules whose alpha is another than that of the adapter, by theirs."""
        found: dict[float, list[str]] = {}
        for pair in self._pairs:
            alpha = self._scale.alpha_of(pair.stem)
            if alpha != self._scale.alpha:
                found.setdefault(alpha, []).append(module_of(pair.stem))
        return found

    def is_part(self, name: str) -> bool:
        """Whether a tensor of the base is a matrix of an adapter."""
        return is_matrix(name)

    def _rank(self, pair: Pair) -> int:
        """The rank of a pair.

        Raises:
            CheckpointError: the shapes of its matrices are not those of a pair, or too large.
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
        """The files that hold a pair."""
        tensors = (self._tensors[name].target for name in (pair.down, pair.up))
        return frozenset(piece.source.path for tensor in tensors for piece in tensor.pieces)

    def _addition(self, pair: Pair, weight: GlobalTensor) -> Addition:
        down, up = self._tensors[pair.down], self._tensors[pair.up]
        shape = weight.shape[::-1] if self._scale.transposed else weight.shape
        if (*up.shape[:1], *down.shape[1:]) != shape:
            raise CheckpointError(
                f"{quoted(pair.up)} of shape {list(up.shape)} times {quoted(pair.down)} of shape {list(down.shape)} is "
                f"not of the shape {list(weight.shape)} of {quoted(weight.name)}",
                file=self._place,
                parameter=pair.down,
                hint="is it the adapter of another model, or a strategy wrong?",
            )
        for name, dtype in ((weight.name, weight.dtype), (pair.down, down.dtype_name), (pair.up, up.dtype_name)):
            if dtype not in (CAST_TO if name == weight.name else CASTABLE):
                raise CheckpointError(f"{quoted(name)} is {dtype}, to which nothing can be added", parameter=name)
        return LowRank(
            weight.name,
            (weight.shape[0], weight.shape[1]),
            weight.dtype,
            lambda rows, columns: self._matrices(pair, rows, columns),
            self._scale.of(pair.stem, down.shape[0]),
            self._overflowed,
            self._products,
            self._paths(pair),
        )

    def _matrices(self, pair: Pair, rows: Span, columns: Span) -> tuple[Matrix, Matrix]:
        """Of the two matrices whose product has a weight's shape, some rows of the first, columns of the second."""
        if self._scale.transposed:
            return self._part(pair.down, 1, rows).T, self._part(pair.up, 0, columns).T
        return self._part(pair.up, 0, rows), self._part(pair.down, 1, columns)

    def _part(self, name: str, dimension: int, span: Span) -> Matrix:
        """Some rows or columns of a matrix, in Float32, out of the block that they lie in."""
        tensor = self._tensors[name]
        length, rank = tensor.shape[dimension], tensor.shape[1 - dimension]
        # No tile lies in two blocks.
        block = max(1, _BLOCK_BYTES // (4 * rank * LARGEST_SIDE)) * LARGEST_SIDE
        number = span[0] // block
        with self._lock:
            found = self._held.get((name, number))
            if found is not None:
                self._held.move_to_end((name, number))
        if found is None:
            index = slice(number * block, min((number + 1) * block, length))
            found = self._read(tensor, index if dimension == 0 else (slice(None), index))
            with self._lock:
                if (name, number) not in self._held:
                    self._held[name, number] = found
                    self._held_bytes += found.nbytes
                while self._held_bytes > _HELD_BYTES:
                    self._held_bytes -= self._held.popitem(last=False)[1].nbytes
        here = slice(span[0] - number * block, span[1] - number * block)
        return found[here] if dimension == 0 else found[:, here]

    @staticmethod
    def _read(tensor: LazyTensor, index: Any) -> Matrix:
        """Some elements in Float32."""
        array: npt.NDArray[np.generic] = np.ascontiguousarray(tensor[index])
        words = array.view(f"u{array.dtype.itemsize}")
        if tensor.dtype_name == "Float32":
            return words.view("f4")
        return cast_words(words, tensor.dtype_name, "Float32").view("f4")


def read_adapter(tensors: OpenedCheckpoint, place: str, scale: Scale, overflowed: Overflowed) -> Adapter:
    """An adapter of what lies somewhere.

    Args:
        tensors: its tensors, opened.
        place: where they lie, for messages.
        scale: what the products are multiplied with.
        overflowed: told of elements that become infinite.

    Raises:
        CheckpointError: there is none, or it is of a kind that cannot be merged.
        ReshardError: it cannot be read.
    """
    return Adapter(tensors, place, pairs_of(tensors.keys(), place), scale, overflowed)
