"""The program from its first line to its last: signals, standard streams, the command line, exit status.

Not for use in another program, since it ends the process: `reshard.cli.main` is that.
"""

from __future__ import annotations

from reshard import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and end the process."""
    signals.install()
    # What takes time to load comes after.
    from reshard.cli import streams

    streams.install()
    from reshard.cli.main import main as run

    status = 0
    try:
        run()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    signals.leave(streams.status_after(status))
