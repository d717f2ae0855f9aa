"""Reading all tensors in the order of the files, some ahead of whoever takes them, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.layout import whole_box
from reshard.opened.contents import Contents
from reshard.opened.engine import Bytes, Engine, chunks_of, wait_for
from reshard.opened.tensor import LazyTensor
from reshard.plan.pieces import TargetTensor

Array = npt.NDArray[Any]

# Tensors that one thread reads one after the other: so many, or of so many bytes together.
_MOST_TOGETHER = 64
_BYTES_TOGETHER = 1 << 20


class _Coming(NamedTuple):
    """A tensor that is being read."""

    name: str
    array: Array
    futures: Sequence[Future[None]]


class FileOrder(NamedTuple):
    """Tensors in the order in which their first bytes lie in the files, and those files."""

    names: list[str]
    paths: set[str]


def in_file_order(contents: Contents, names: Iterable[str]) -> FileOrder:
    """The order in which tensors are read best."""
    paths: set[str] = set()

    def key(name: str) -> tuple[str, int, str]:
        # There may be very many pieces, so they are made anew where the tensor is read.
        pieces = contents.target(name).pieces
        paths.update(piece.source.path for piece in pieces)
        for piece in pieces:
            for offset, _ in piece.source.extents:
                return piece.source.path, offset, name
        return "", 0, name

    return FileOrder(sorted(names, key=key), paths)


def read_ahead(tensors: Iterable[LazyTensor], engine: Engine, budget: int) -> Iterator[tuple[str, Array]]:
    """Read tensors whole, in the order given.

    Args:
        tensors: which.
        engine: reads them.
        budget: bytes of arrays at the most that are read, or being read, and not yet taken; or one tensor.

    Raises:
        ReshardError: a file cannot be read.
    """
    coming: deque[_Coming] = deque()
    waiting = deque(tensors)
    held = 0
    try:
        while waiting or coming:
            while waiting and (not coming or held + waiting[0].nbytes <= budget):
                begun = _begin(_next_few(waiting, budget - held), engine)
                held += sum(one.array.nbytes for one in begun)
                coming += begun
            first = coming.popleft()
            wait_for(first.futures)
            held -= first.array.nbytes
            yield first.name, first.array
            del first
    finally:
        for one in coming:
            for future in one.futures:
                future.cancel()


def _next_few(waiting: deque[LazyTensor], room: int) -> list[LazyTensor]:
    """The next tensor, and with a small one those that follow it."""
    taken = [waiting.popleft()]
    nbytes = taken[0].nbytes
    while waiting and len(taken) < _MOST_TOGETHER and nbytes + waiting[0].nbytes <= min(room, _BYTES_TOGETHER):
        nbytes += waiting[0].nbytes
        taken.append(waiting.popleft())
    return taken


def _begin(tensors: Sequence[LazyTensor], engine: Engine) -> list[_Coming]:
    """Have threads read some tensors."""
    arrays = [tensor.empty(tensor.shape) for tensor in tensors]
    rooms = [array.reshape(-1).view(np.uint8) for array in arrays]
    most = engine.chunk_bytes(rooms[0].nbytes)
    if len(tensors) == 1 and rooms[0].nbytes > most:
        target, room = tensors[0].target, rooms[0]
        futures = [
            engine.submit(engine.fill_alone, target, box, room[first:last])
            for box, first, last in chunks_of(whole_box(target.shape), target.item_size, most)
        ]
    else:
        targets = [tensor.target for tensor in tensors]
        futures = [engine.submit(_read_together, targets, rooms, engine)]
    return [_Coming(tensor.name, array, futures) for tensor, array in zip(tensors, arrays)]


def _read_together(targets: Sequence[TargetTensor], rooms: Sequence[Bytes], engine: Engine) -> None:
    with engine.worker() as worker:
        for target, room in zip(targets, rooms):
            if len(room):
                worker.filler.fill(target, whole_box(target.shape), room.data)
