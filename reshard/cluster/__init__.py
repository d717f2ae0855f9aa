"""A conversion's work on the workers of a Dask cluster that is there already.

1. The conversion is planned and checked here, like any other (`transform.prepare`).
2. Its target ranks are divided into items, several per worker thread, about equal in bytes; ranks that
   read the same rows stay together.
3. A worker that takes an item runs an ordinary conversion of these ranks. Whatever makes many runs fill
   one target directory together makes items safe too: an item that is lost with its worker and done
   again on another goes on where it was.
4. Items tell how far they are in events, and end when the file that stands for the client is gone.

Dask distributes the items, gives those of lost workers to others, and repeats those that failed for a
reason that may pass.

`client` prepares and hands out, `running` follows the items, `tasks` runs on workers.
"""

from reshard.cluster.address import scheduler_address
from reshard.cluster.client import Cluster

__all__ = ["Cluster", "scheduler_address"]
