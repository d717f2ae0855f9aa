"""The program from its first line to its last: signals, standard streams, the command line, exit status.

It ends the process. Other programs call `reshard.cli.main`.
"""

from __future__ import annotations

from reshard import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and end the process."""
    signals.install()
    # Slow imports come after the handlers of signals.
    from reshard.cli import streams

    streams.install()
    from reshard.cli.main import main as run

    status = 0
    try:
        run()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    signals.leave(streams.status_after(status))
