"""Faults of Dask workers, loaded with ``--preload``; FAULTS in the environment lists them as JSON.

======== ===========================================================
slow     seconds that every write takes longer, and an eighth of what every target does
version  the version of reshard that the worker has
======== ===========================================================
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import reshard._version
from reshard.execute.writing import TargetWriter


def dask_setup(worker: Any) -> None:
    """Called by Dask when the worker starts."""
    faults = json.loads(os.environ["FAULTS"])
    if "slow" in faults:
        write, finish = TargetWriter.write, TargetWriter.commit

        def write_slowly(self: TargetWriter, offset: int, data: memoryview) -> None:
            time.sleep(faults["slow"])
            write(self, offset, data)

        def finish_slowly(self: TargetWriter) -> None:
            # Small files are written in one go, so that this is when they can be seen half done.
            time.sleep(8 * faults["slow"])
            finish(self)

        TargetWriter.write = write_slowly  # type: ignore[method-assign]
        TargetWriter.commit = finish_slowly  # type: ignore[method-assign]
    if "version" in faults:
        reshard._version.__version__ = faults["version"]
