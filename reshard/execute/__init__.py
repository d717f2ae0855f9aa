"""The executor: the reader of boxes, buffers, threads and processes, and commit.

Its input is target files with their pieces. It writes each file once, in order, under a temporary name. It handles
boxes and byte ranges, not layouts.
"""

from reshard.execute.destination import Destination
from reshard.execute.options import ExecutionOptions, Progress
from reshard.execute.run import convert
from reshard.processes import OWN_THREAD

__all__ = ["OWN_THREAD", "Destination", "ExecutionOptions", "Progress", "convert"]
