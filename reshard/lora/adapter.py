"""An adapter as the plan knows it: what it adds to which weight."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Callable

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.checkpoint import Addition, GlobalTensor
from reshard.checkpoints.formats.dtypes import CAST_TO, CASTABLE
from reshard.errors import CheckpointError
from reshard.execute.casts import Overflowed, cast_words
from reshard.lora.low_rank import LowRank, Matrix, Products
from reshard.lora.pairs import Pair, is_matrix, pairs_of, weight_of, whole_weights
from reshard.lora.scale import Scale
from reshard.opened import OpenedCheckpoint
from reshard.text.messages import listing
from reshard.text.wording import quoted

# Bytes of pairs that are held for other blocks of their weights; the one that was used last is held in any case.
_HELD_BYTES = 32 << 20
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
        self._held: OrderedDict[Pair, tuple[Matrix, Matrix]] = OrderedDict()
        self._products = Products(_TILE_BYTES)
        self._lock = threading.Lock()
        hashed = hashlib.sha256(repr((pairs, scale.alpha, dict(scale.alphas), scale.by_root)).encode())
        for pair in pairs:
            for name in (pair.down, pair.up):
                tensor = tensors[name]
                hashed.update(f"{tensor.shape} {tensor.dtype_name}\n".encode())
                hashed.update(np.ascontiguousarray(tensor[...]).data)
        self.identity = hashed.hexdigest()

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

    def is_part(self, name: str) -> bool:
        """Whether a tensor of the base is a matrix of an adapter."""
        return is_matrix(name)

    def _addition(self, pair: Pair, weight: GlobalTensor) -> Addition:
        down, up = self._tensors[pair.down], self._tensors[pair.up]
        shape = weight.shape[::-1] if self._scale.transposed else weight.shape
        ranks = down.shape[0] if down.ndim else 0
        if len(shape) != 2 or (*up.shape, *down.shape) != (shape[0], ranks, ranks, shape[1]) or not ranks:
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
            self._reader(pair),
            self._scale.of(pair.stem, ranks),
            self._overflowed,
            self._products,
        )

    def _reader(self, pair: Pair) -> Callable[[], tuple[Matrix, Matrix]]:
        def read() -> tuple[Matrix, Matrix]:
            with self._lock:
                found = self._held.get(pair)
                if found is not None:
                    self._held.move_to_end(pair)
                    return found
            up, down = self._matrix(pair.up), self._matrix(pair.down)
            made = (np.ascontiguousarray(down.T), np.ascontiguousarray(up.T)) if self._scale.transposed else (up, down)
            with self._lock:
                self._held[pair] = made
                held = sum(up.nbytes + down.nbytes for up, down in self._held.values())
                while held > _HELD_BYTES and len(self._held) > 1:
                    _, (up, down) = self._held.popitem(last=False)
                    held -= up.nbytes + down.nbytes
            return made

        return read

    def _matrix(self, name: str) -> Matrix:
        """A matrix in Float32."""
        tensor = self._tensors[name]
        array: npt.NDArray[np.generic] = np.ascontiguousarray(tensor[...])
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
