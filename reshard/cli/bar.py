"""The progress bar; loaded only on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from reshard.text.messages import byte_size

if TYPE_CHECKING:
    _Tqdm = tqdm[NoReturn]
else:
    _Tqdm = tqdm

_NARROW = 60
_WIDE_BAR = "{desc} {percentage:3.0f}%|{bar}| {done} of {whole}, {speed}, {remaining} left"
_NARROW_BAR = "{desc} {percentage:3.0f}% {speed} {remaining}"


# No thread that redraws idle bars: a process with threads starts no workers.
tqdm.monitor_interval = 0


class Bar(_Tqdm):
    """A bar that goes away at the end, in the units of every other message.

    Args:
        total: bytes to be done.
        doing: the word for it.
        nbytes: bytes that are done.
        begun: when that was begun, in seconds of `time.time`.
    """

    def __init__(self, total: int, doing: str, nbytes: int, begun: float) -> None:
        narrow = os.get_terminal_size(sys.stderr.fileno()).columns < _NARROW
        super().__init__(
            desc=doing,
            total=total,
            bar_format=_NARROW_BAR if narrow else _WIDE_BAR,
            dynamic_ncols=True,
            # The first frame below shows the rate so far.
            delay=1e-9,
            file=sys.stderr,
            smoothing=0.1,
            leave=False,
        )
        self.start_t = self.last_print_t = begun
        self.update(nbytes)

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        """The texts of a bar."""
        texts = super().format_dict
        rate = texts["rate"] or (texts["n"] / texts["elapsed"] if texts["elapsed"] else 0)
        speed = f"{byte_size(int(rate))}/s"
        return {**texts, "done": byte_size(texts["n"]), "whole": byte_size(texts["total"]), "speed": speed}
