"""The program from its first line to its last: signals, standard streams, the command line, exit status.

It ends the process. Other programs call `reshard.cli.main`.
"""

from __future__ import annotations

import gc
import os

from reshard import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and end the process."""
    signals.install()
    # OpenBLAS starts a thread per CPU when NumPy is imported: 0.05 s of processor time with 2 CPUs. It needs only one,
    # because as many threads and processes as --jobs multiply matrices, block by block. A library must not set this.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Modules are no garbage: to look for it while they load takes a tenth of the start.
    gc.disable()
    # Slow imports come after the handlers of signals.
    from reshard.cli import streams

    streams.install()
    from reshard.cli.main import main as run

    status = 0
    try:
        run(_collect_garbage)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    signals.leave(streams.status_after(status))


def _collect_garbage() -> None:
    gc.freeze()
    gc.enable()
