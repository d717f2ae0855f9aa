"""Progress by bytes, on a terminal only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn, Optional

from reshard.execute import Progress

if TYPE_CHECKING:
    from tqdm import tqdm


def progress_bar(quiet: bool) -> Progress:
    """Progress by bytes on a terminal, silence elsewhere."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return _Bar() if on_terminal and not quiet else Progress()


class _Bar(Progress):
    def __init__(self) -> None:
        self._bar: Optional[tqdm[NoReturn]] = None

    def begin(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=False)

    def wrote(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
