"""Reading boxes of what ranks are said to hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.execute.reading import ExplicitReader
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.layout import Box
from reshard.plan.pieces import StoredSlice
from reshard.source_replicas.choice import Holder, offset_in
from reshard.storage.costs import Storage

Each = Callable[..., Iterator[Any]]
"""Calls a function with each of some arguments, as `map` does."""

_IN_FLIGHT = 16


class ReplicaFiles:
    """The files of a step; any number of threads may read them.

    Args:
        step: the step.
        handles: open files.
        storage: what they lie on.
    """

    def __init__(self, step: SourceStep, handles: FileHandles, storage: Storage) -> None:
        self._step = step
        # No windows: what lies around a sample is of no use.
        self._reader = ExplicitReader(handles, storage._replace(small=0))

    def read(self, parameter: GlobalTensor, holder: Holder, box: Box, out: memoryview) -> None:
        """Fill ``out`` with a box that is contiguous in a holder's slice.

        Raises:
            RetryableError: the file cannot be read.
        """
        index = self._step.indexes[holder.rank]
        source = StoredSlice(index.path, holder.rank, index.tensors[parameter.name].extents, holder.box)
        self._reader.read_into(source, offset_in(box, holder.box, parameter.item_size), out)


@contextlib.contextmanager
def at_a_time(remote: bool) -> Iterator[tuple[Each, Each]]:
    """Two ways to do something for each of some: one after the other, or some at a time if requests take a round trip.

    What is done in the first way may wait for what is done in the second, which has threads of its own.
    """
    if not remote:
        yield map, map
        return
    with ThreadPoolExecutor(_IN_FLIGHT) as outer, ThreadPoolExecutor(_IN_FLIGHT) as inner:
        yield outer.map, inner.map
