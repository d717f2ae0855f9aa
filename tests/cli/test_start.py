"""The start of the program."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Optional

import pytest

# Runs the program to its end, and prints the number of BLAS threads, and all threads of the process.
_THREADS = """
import os, sys
from reshard import entry, signals
def leave(status):
    assert "numpy" in sys.modules and status == 0
    print(os.environ["OPENBLAS_NUM_THREADS"], len(os.listdir("/proc/self/task")), file=sys.stderr)
    os._exit(0)
signals.leave = leave
sys.argv = ["reshard", "by-rank", "--help"]
entry.main()
"""


@pytest.mark.parametrize("typed", [None, "3"])
def test_the_program_starts_no_threads_for_matrices_unless_the_environment_requests_them(
    typed: Optional[str],
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    if typed is not None:
        environment["OPENBLAS_NUM_THREADS"] = typed
    ended = subprocess.run([sys.executable, "-c", _THREADS], env=environment, capture_output=True, text=True)
    threads, running = map(int, ended.stderr.split())
    assert threads == int(typed or 1)
    if typed is None:
        assert running == 1
