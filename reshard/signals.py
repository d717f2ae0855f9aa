"""SIGINT, SIGTERM and SIGHUP end the process with status 130, 143 or 129 at any moment.

Outside of `unwinding` nothing needs cleaning up, and the process ends immediately. Inside, the signal is raised as
`Stopped`, so that threads, remote tasks and records can be ended. An exception may be lost, as in a destructor, and
cleaning up may wait for a disk. So the process also ends immediately if the exception is lost, on a later signal, and
after a timeout.

Only the command line installs this; programs that use the package handle signals themselves. It is imported first, so
it imports only modules that Python has loaded already.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Callable, NoReturn, Optional

_WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hangup (closed terminal)",
}
# Timeout for cleaning up; containers and batch systems often kill after 30 seconds.
PATIENCE = 20.0
# A launcher and a terminal may send the same signal twice; a later one ends the wait.
_SAME = 1.0
# Timeout for the final message: stderr may be a full pipe.
_LAST = 5.0

_unwinding = False
_received: Optional[int] = None
_received_at = 0.0
_ending = False
_at_end: list[Callable[[], None]] = []


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

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        global _unwinding
        _unwinding = False
        if _received is not None and not isinstance(error, Stopped):
            raise Stopped(_received)


def install() -> None:
    """Handle the signals; ignored ones stay ignored, as under nohup or in background commands of a script."""
    for number in _WORDS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)
    plain = sys.unraisablehook

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if _received is not None and isinstance(lost.exc_value, Stopped):
            _end_on_the_spot(_received)
        plain(lost)

    sys.unraisablehook = unraisable


def at_end(function: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call a function before the process ends in any way; threads may still be running."""
    _at_end.append(function)
    return function


def leave(status: int) -> NoReturn:
    """End the process without Python's finalisation, which ignores signals."""
    try:
        _tidy()
    finally:
        os._exit(status if _received is None else 128 + _received)


def _handle(number: int, frame: Optional[FrameType]) -> None:
    global _received, _received_at
    if not _unwinding:
        _end_on_the_spot(number)
    elif _received is None:
        _received, _received_at = number, time.monotonic()
        _end_after(PATIENCE, number)
        raise Stopped(number)
    elif time.monotonic() - _received_at > _SAME:
        _end_on_the_spot(_received)


def _end_after(seconds: float, received: int) -> None:
    def end(number: int, frame: Optional[FrameType]) -> None:
        if _ending:
            os._exit(128 + received)
        _end_on_the_spot(received)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _end_on_the_spot(number: int) -> None:
    global _ending
    if _ending:
        return
    _ending = True
    stopped = Stopped(number)
    try:
        _end_after(_LAST, number)
        _tidy()
        # Not through sys.stderr: the signal may have interrupted one of its writes.
        os.write(2, f"{os.linesep if os.isatty(2) else ''}reshard: error: {stopped}{os.linesep}".encode())
    finally:
        os._exit(stopped.status)


def _tidy() -> None:
    for function in _at_end:
        function()
