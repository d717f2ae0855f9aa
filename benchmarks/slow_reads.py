"""Runs `reshard` with a delay before every read, as on storage that takes a round trip per request.

usage: python -m benchmarks.slow_reads MILLISECONDS FILE_SYSTEM reshard's arguments...

FILE_SYSTEM is the type that the source's file system is taken for. Files that are opened for reading and
nothing else take a round trip, too. Delays of several threads pass at the same time, as requests of several
threads do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from reshard.cli.main import main
from reshard.storage import local


def delayed(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The same call after a wait."""

    def later(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return call(*arguments, **options)

    return later


def opening(seconds: float) -> Callable[..., int]:
    """`os.open`, with a wait before files that are read."""
    call = os.open

    def later(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & (os.O_ACCMODE | os.O_DIRECTORY | os.O_CREAT) == os.O_RDONLY:
            time.sleep(seconds)
        return call(path, flags, *arguments, **options)

    return later


if __name__ == "__main__":
    milliseconds, file_system, *words = sys.argv[1:]
    wait = float(milliseconds) / 1000
    if wait:
        for name in ("pread", "preadv"):
            setattr(os, name, delayed(getattr(os, name), wait))
        os.open = opening(wait)
    local.file_system_of = lambda path: file_system
    sys.argv = ["reshard", *words]
    main()
