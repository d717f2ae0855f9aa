"""The program from its first line to its last: signals, standard streams, the command line, exit status.

It ends the process. Other programs call `reshard.cli.main`.
"""

from __future__ import annotations

import errno
import io
import os
import sys

from reshard import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, TextIO


class _Output(io.FileIO):
    """Standard output or standard error, whose writes never stop the work.

    Attributes:
        failure: why a write failed; None for a closed pipe, as in `reshard inspect FILE | head`.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, or drop them."""
        try:
            return os.write(self.fileno(), data)
        except BlockingIOError:
            # Another process has made the descriptor non-blocking.
            import select

            select.select([], [self], [])
            return 0
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.failure = error
            return len(data)


def main() -> NoReturn:
    """Run the command line of this process and end the process."""
    signals.install()
    # OpenBLAS starts a thread per CPU when NumPy is imported: 0.05 s of processor time with 2 CPUs. It needs only one,
    # because as many threads and processes as --jobs multiply matrices, block by block. A library must not set this.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # No file gets the number of a closed stream, and the output of libraries.
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    output = _Output(1, "w", closefd=False)
    sys.stdout, sys.stderr = _text(output, sys.stdout), _text(_Output(2, "w", closefd=False), sys.stderr)
    # Slow imports come after the handlers of signals.
    from reshard.cli.main import main as run

    status = 0
    try:
        run()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    sys.stdout.flush()
    if output.failure is not None and not status:
        reason = output.failure.strerror or output.failure
        sys.stderr.write(f"reshard: error: standard output: cannot be written: {reason}\n")
        status = 1
    signals.leave(status)


def _text(output: _Output, stream: TextIO | None) -> TextIO:
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(io.BufferedWriter(output), encoding, "backslashreplace", line_buffering=True)
