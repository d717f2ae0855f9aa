"""SIGINT, SIGTERM and SIGHUP end the process with status 130, 143 or 129 and leave no temporary file.

Outside of `unwinding` the process ends immediately. Inside, the signal is raised as `Stopped`, so that threads, uploads
and remote tasks end. An exception may be lost, as in a destructor, and a disk may be slow: then a timeout ends the
process.

Only the command line installs this; programs that use the package handle signals themselves. It is imported first, so
it imports only modules that Python has loaded already.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

_WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hangup (closed terminal)",
}
# Seconds for cleaning up; containers and batch systems often kill after 30 seconds.
PATIENCE = 20.0

_unwinding = False
_received: int | None = None
_ending = False
at_end: list[Callable[[], None]] = []
"""Functions that are called before the process ends in any way; threads may still be running."""


class Stopped(KeyboardInterrupt):
    """The process received SIGINT, SIGTERM or SIGHUP.

    Attributes:
        status: exit status of the process.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{_WORDS[signal.Signals(number)]}; no partial file remains")
        self.status = 128 + number


class unwinding:
    """While this block runs, a signal is raised as `Stopped`, at the latest when it ends."""

    def __enter__(self) -> None:
        global _unwinding
        _unwinding = True

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        global _unwinding
        _unwinding = False
        if _received is not None and not isinstance(error, Stopped):
            raise Stopped(_received)


def install() -> None:
    """Handle the signals; ignored ones stay ignored, as under nohup or in background commands of a script."""
    for number in _WORDS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


def leave(status: int) -> NoReturn:
    """End the process without Python's finalisation, which ignores signals."""
    try:
        for function in at_end:
            function()
    finally:
        os._exit(status)


def _handle(number: int, _: FrameType | None) -> None:
    global _received
    if not _unwinding:
        _end(number)
    elif _received is None:
        _received = number
        signal.signal(signal.SIGALRM, lambda *_: _end(number))
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        raise Stopped(number)


def _end(number: int) -> None:
    global _ending
    if _ending:
        return
    _ending = True
    stopped = Stopped(number)
    try:
        for function in at_end:
            function()
        # Not through sys.stderr: the signal may have interrupted one of its writes.
        os.write(2, f"{os.linesep if os.isatty(2) else ''}reshard: error: {stopped}{os.linesep}".encode())
    finally:
        os._exit(stopped.status)
