"""Conversions on the workers of a running Dask cluster.

1. The conversion is planned and checked here, like any other (`transform.prepare`).
2. Its target ranks are divided into items, several per worker thread, about equal in bytes; ranks that
   read the same rows stay together.
3. A worker runs an ordinary conversion of an item's ranks. Several runs may fill one target directory,
   so a lost item can resume on another worker.
4. Items report progress in events. They end when the file that represents the client is removed.

Dask distributes the items, moves those of lost workers, and retries temporary failures.

`client` prepares and distributes, `running` follows the items, `tasks` runs on workers.
"""

from reshard.cluster.client import Cluster, scheduler_address

__all__ = ["Cluster", "scheduler_address"]
