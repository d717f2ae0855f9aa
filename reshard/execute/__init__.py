"""The executor: the reader of boxes, buffers, threads and processes, and commit.

Its input is target files with their pieces. It writes each file once, in order, under a temporary name. It handles
boxes and byte ranges, not layouts.
"""

from reshard.execute.budget import Budget, Progress
from reshard.execute.run import write_files
