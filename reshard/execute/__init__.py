"""Moving bytes: the reader of boxes, buffers, budget, concurrency and commit.

The executor is given target files, laid out and cut into pieces, and writes each of them once, in
order, under a temporary name. It knows boxes and byte ranges; it knows nothing of layouts.
"""

from reshard.execute.destination import Destination
from reshard.execute.options import ExecutionOptions, Progress
from reshard.execute.run import convert
from reshard.processes import OWN_THREAD

__all__ = ["OWN_THREAD", "Destination", "ExecutionOptions", "Progress", "convert"]
