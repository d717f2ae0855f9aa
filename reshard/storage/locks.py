"""Locks on files of file systems, which the kernel releases when a process dies.

Some file systems have no locks, on others they do not reach other machines: then nothing is held.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from reshard.errors import RetryableError
from reshard.storage import directories, temporary
from reshard.storage.store import Notify

MESSAGE_AFTER = 2.0
"""Seconds of waiting for a lock before a message."""
GIVEN_UP_AFTER = 120.0
"""Seconds of waiting for a lock before an error: no run holds one for so long."""

_MAX_PAUSE = 0.1


@contextlib.contextmanager
def lock(path: str, notify: Notify) -> Iterator[None]:
    """See `Store.lock`."""
    began, pause, told = time.monotonic(), 0.005, False
    while True:
        directories.make(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                # Its last holder may have removed it, with its directory.
                if temporary.try_lock(fd) and os.path.samestat(os.stat(path), os.fstat(fd)):
                    yield
                    return
            finally:
                os.close(fd)
        waited = time.monotonic() - began
        if waited > GIVEN_UP_AFTER:
            raise RetryableError(
                f"{path}: another process has held this lock for {GIVEN_UP_AFTER:.0f} s",
                file=path,
                hint=f"`fuser {path}` on each machine that writes there lists the process; end it if it hangs",
            )
        if waited > MESSAGE_AFTER and not told:
            told = True
            notify(f"waiting for {path}, which another process has locked")
        # Random pauses: waiting processes do not try at the same times.
        time.sleep(pause * (0.5 + os.urandom(1)[0] / 512))
        pause = min(2 * pause, _MAX_PAUSE)
