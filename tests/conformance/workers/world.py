"""Ranks of a distributed job as threads of one process, for libraries that think they run on a cluster.

MindSpore answers who a process is from its communication library, which a CPU without a cluster has not.
Here each thread is a rank, and the few collectives that saving a checkpoint needs meet in this process.
`install` must run before the library that uses them is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_rank = threading.local()


class World:
    """So many ranks, and where they meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._shared: list[Any] = [None] * size

    def run(self, work: Callable[[int], None]) -> None:
        """Do `work` as every rank at once; the first error of any of them is raised."""
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            _rank.value = rank
            try:
                work(rank)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def wait(self) -> None:
        if self.size > 1:
            self._barrier.wait(timeout=120)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in their order."""
        self._shared[rank()] = value
        self.wait()
        values = list(self._shared)
        self.wait()
        return values


_world = World(1)


def become(world: World) -> None:
    """Make the library's functions return values of this world."""
    global _world
    _world = world


def as_rank(number: int) -> None:
    """This thread is that rank."""
    _rank.value = number


def rank(group: str | None = None) -> int:
    return getattr(_rank, "value", 0)


def size(group: str | None = None) -> int:
    return _world.size


def barrier(group: str | None = None) -> None:
    _world.wait()


def all_gather_object(gathered: list[Any], value: Any, group: str | None = None) -> None:
    gathered[:] = _world.exchange(value)


def gather_object(value: Any, gathered: list[Any] | None, dst: int = 0, group: str | None = None) -> None:
    values = _world.exchange(value)
    if rank() == dst and gathered is not None:
        gathered[:] = values


def scatter_object_list(received: list[Any], values: list[Any] | None, src: int = 0, group: str | None = None) -> None:
    received[0] = _world.exchange(values)[src][rank()]


def install() -> None:
    """Put these in the place of MindSpore's own."""
    import mindspore.communication
    import mindspore.communication.comm_func
    import mindspore.communication.management
    import mindspore.mint.distributed
    import mindspore.runtime

    for module in (mindspore.communication, mindspore.communication.management):
        module.get_rank = rank
        module.get_group_size = size
    mindspore.communication.comm_func.barrier = barrier
    for function in (barrier, all_gather_object, gather_object, scatter_object_list):
        setattr(mindspore.mint.distributed, function.__name__, function)
    mindspore.runtime.synchronize = lambda: None
