"""Bounds of a command: seconds, memory, length of messages."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

from tests.running import Argument, Result, fails

SECONDS = 5


class TookTooLong(BaseException):
    """No Exception: no handler of the command catches it."""


@contextlib.contextmanager
def within(seconds: int = SECONDS) -> Iterator[None]:
    """Raise TookTooLong in the main thread after a timeout of processor time, or ten times as long without any.

    A machine that is busy or halted for a while makes no test fail.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds)}
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def refused(status: int, *words: Argument, texts: Sequence[Argument] = ()) -> Result:
    """The command fails with this status before the timeout, in a few short lines without an internal error."""
    with within():
        result = fails(status, *words, texts=texts)
    assert "internal error" not in result.err
    assert len(result.err.splitlines()) < 10
    assert len(result.err) < 5000
    return result
