"""Progress by bytes: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from reshard.cli.output import is_quiet, progress_requested, say
from reshard.execute import Progress
from reshard.processes import OWN_THREAD
from reshard.text.messages import byte_size

if TYPE_CHECKING:
    from tqdm import tqdm

# Interval of progress lines without a terminal, in seconds.
BETWEEN_LINES = 30.0
# Shorter transfers show no bar.
_BEFORE_BAR = 0.5
_NARROW = 60
# Of a terminal without a size.
_USUAL_COLUMNS, _USUAL_ROWS = 80, 24
# A frame is drawn every 0.1 s: rate and time left follow the last 20 s or so, as bytes move in bursts.
_SMOOTHING = 0.005
_WIDE_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}iB of {total_fmt}iB, {rate_fmt}, {remaining} left"
_NARROW_BAR = "{desc} {percentage:3.0f}% {rate_fmt} {remaining}"


def progress_of() -> Progress:
    """The progress display; --progress and --no-progress override --quiet."""
    requested = progress_requested()
    if is_quiet() if requested is None else not requested:
        return Progress()
    return _Bar() if sys.stderr is not None and sys.stderr.isatty() else _Lines()


def _columns() -> int:
    """The columns of the terminal; 0 if it has no size, as pseudo-terminals of other programs often have none."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return 0
    return size.columns if all(size) else 0


class _Bar(Progress):
    """A bar that goes away at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: tqdm[NoReturn] | None = None
        self._total = self._done = 0
        self._doing = ""
        self._begun = 0.0

    def begin(self, total: int, doing: str) -> None:
        self._bar = None
        self._total, self._done, self._doing, self._begun = total, 0, doing, time.time()

    def wrote(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.time() - self._begun >= _BEFORE_BAR:
            self._bar = self._drawn()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _drawn(self) -> tqdm[NoReturn]:
        # Loaded only here: short transfers show no bar.
        from tqdm import tqdm

        # No thread that redraws idle bars: a process with threads starts no workers.
        tqdm.monitor_interval = 0
        columns = _columns()
        bar: tqdm[NoReturn] = tqdm(
            desc=self._doing,
            total=self._total,
            bar_format=_NARROW_BAR if 0 < columns < _NARROW else _WIDE_BAR,
            unit="iB",
            unit_scale=True,
            unit_divisor=1024,
            ncols=None if columns else _USUAL_COLUMNS,
            nrows=None if columns else _USUAL_ROWS,
            dynamic_ncols=columns > 0,
            # The first frame below shows the rate so far.
            delay=1e-9,
            file=sys.stderr,
            smoothing=_SMOOTHING,
            leave=False,
        )
        bar.start_t = bar.last_print_t = self._begun
        bar.update(self._done)
        return bar


class _Lines(Progress):
    """A line now and then, whether or not anything moves: a log has to show that nothing does."""

    def __init__(self) -> None:
        super().__init__()
        self._done = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, total: int, doing: str) -> None:
        self._done = 0
        self._ended = threading.Event()
        # A daemon thread: a command may fail without calling `end`.
        name, arguments = f"{OWN_THREAD}-lines", (total, doing, self._ended)
        self._thread = threading.Thread(target=self._print_lines, name=name, args=arguments, daemon=True)
        self._thread.start()

    def wrote(self, count: int) -> None:
        self._done += count

    def end(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _print_lines(self, total: int, doing: str, ended: threading.Event) -> None:
        before, at = 0, time.monotonic()
        while not ended.wait(BETWEEN_LINES):
            nbytes, now = self._done, time.monotonic()
            rate = (nbytes - before) / (now - at)
            say(_line(doing, nbytes, total, rate), to_standard_error=True)
            before, at = nbytes, now


def _line(doing: str, nbytes: int, total: int, rate: float) -> str:
    share = f"{doing}: {nbytes / total:.0%}, " if total else f"{doing}: "
    remaining = f", {_clock((total - nbytes) / rate)} left" if rate and nbytes < total else ""
    return f"{share}{byte_size(nbytes)} of {byte_size(total)}, {byte_size(int(rate))}/s{remaining}"


def _clock(duration: float) -> str:
    minutes, seconds = divmod(int(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
