"""Whether source files that differ from what was made of them are damaged themselves, as far as they record a CRC."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

from reshard.checkpoints import CheckpointIndex, check_crc
from reshard.errors import DamagedCheckpointError
from reshard.verification.reading import Means
from reshard.verification.tree import Tree

_LEAST_BLOCK, _MOST_BLOCK = 1 << 16, 8 << 20


def damaged_by_crc(tree: Tree, names: Collection[str], means: Means) -> dict[str, str]:
    """The files that some names were compared with and whose contents are not what their CRC was made of.

    Args:
        tree: the source.
        names: parameters and values.
        means: what may be used for reading.

    Returns:
        Why each such file counts as absent, by path.

    Raises:
        ReshardError: a file cannot be read.
    """
    indexes = [tree.indexes[rank] for rank in sorted(set(_ranks_read(tree, names)))]
    indexes = [index for index in indexes if index.crc is not None]
    damaged: dict[str, str] = {}
    stop = threading.Event()
    telling = threading.Lock()
    block = max(_LEAST_BLOCK, min(_MOST_BLOCK, means.max_memory // means.jobs))

    def go_on(count: int) -> None:
        if stop.is_set():
            raise CancelledError
        with telling:
            means.progress.wrote(count)

    def check(index: CheckpointIndex) -> None:
        try:
            check_crc(means.handles, index, block, go_on)
        except DamagedCheckpointError as error:
            damaged[index.path] = error.message

    means.progress.begin(sum(index.size for index in indexes), "checking CRCs")
    try:
        with ThreadPoolExecutor(means.jobs) as pool:
            try:
                for _ in pool.map(check, indexes):
                    pass
            except BaseException:
                # Also Ctrl-C: nobody waits for terabytes to be read.
                stop.set()
                raise
    finally:
        means.progress.end()
    return damaged


def _ranks_read(tree: Tree, names: Collection[str]) -> Iterator[int]:
    """Of every slice and value the rank that stands for all that have it."""
    for name in names:
        if name in tree.parameters:
            yield from (part.holders[0] for part in tree.parameters[name].slices if part.holders)
        else:
            yield from tree.outside.get(name, ())
