"""Progress by bytes, on a terminal only."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn, Optional

from reshard.execute import Progress

if TYPE_CHECKING:
    from tqdm import tqdm

_NARROW = 60
_WIDE_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left"
_NARROW_BAR = "{desc} {percentage:3.0f}% {rate_fmt} {remaining}"


def progress_bar(quiet: bool) -> Progress:
    """Progress by bytes on a terminal, silence elsewhere."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return _Bar() if on_terminal and not quiet else Progress()


class _Bar(Progress):
    def __init__(self) -> None:
        self._bar: Optional[tqdm[NoReturn]] = None

    def begin(self, total: int, doing: str) -> None:
        from tqdm import tqdm

        narrow = os.get_terminal_size(sys.stderr.fileno()).columns < _NARROW
        self._bar = tqdm(
            desc=doing,
            total=total,
            unit="iB",
            unit_scale=True,
            unit_divisor=1024,
            bar_format=_NARROW_BAR if narrow else _WIDE_BAR,
            dynamic_ncols=True,
            # What is done at once needs no bar.
            delay=0.5,
            file=sys.stderr,
            smoothing=0.1,
            leave=False,
        )

    def wrote(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
