"""SIGINT and SIGTERM end the process with status 130 or 143, at whatever moment they come.

Outside of `unwinding` there is nothing to give back, and the process ends on the spot. Inside, the signal
is raised as `Stopped`, so that whatever is under way can end its threads, tasks elsewhere and records. An
exception may get lost, as in a destructor, and what it unwinds may wait for a disk: so the process also
ends on the spot when the exception is lost, when a later signal insists, and when too long has passed.

Only the program installs this; who uses the package as a library handles signals as he likes. Imported
before anything else, so it imports only what is loaded anyway.
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

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# Seconds for what is under way to end; containers and batch systems often kill after 30.
PATIENCE = 20.0
# Launchers and terminals may both send the same signal; what comes later than this insists.
_SAME = 1.0
# Seconds for the last words, which nobody may be reading.
_LAST = 5.0

_unwinding = False
_received: Optional[int] = None
_received_at = 0.0
_ending = False
_at_end: list[Callable[[], None]] = []


class Stopped(KeyboardInterrupt):
    """A signal asks the process to end.

    Attributes:
        status: exit status of the process.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{_WORDS[signal.Signals(number)]}; nothing half-written was left behind")
        self.status = 128 + number


class unwinding:
    """While this block runs, a signal is raised as `Stopped`; it does not end as if there had been none."""

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
    """Handle the signals; those that are ignored, as in the background of a shell script, stay ignored."""
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
    """Decorator: a function that is called before the process ends, however it does; threads may still be at work."""
    _at_end.append(function)
    return function


def leave(status: int) -> NoReturn:
    """End the process, not in Python's way, which takes everything apart and does not answer to signals meanwhile."""
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
        # Not through a stream, which may be in the middle of something.
        os.write(2, f"{os.linesep if os.isatty(2) else ''}reshard: error: {stopped}{os.linesep}".encode())
    finally:
        os._exit(stopped.status)


def _tidy() -> None:
    for function in _at_end:
        function()
