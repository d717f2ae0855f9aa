"""Standard output and standard error that never stop the work: for any reader and encoding.

The exit status is that of the work. A reader that has enough, as in `reshard inspect FILE | head`, changes
nothing; output lost for another reason, such as a full disk, makes the exit status an error.
Characters that an encoding lacks are escaped.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any, Optional, TextIO

_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN)
# Click replaces ASCII by UTF-8, but not an encoding of this name.
_ASCII = "plain_ascii"


class Lasting(io.RawIOBase):
    """The bytes of a stream; writing never fails, even if the reader has ended.

    Args:
        fd: the descriptor.
        name: of the stream.

    Attributes:
        name: of the stream.
        error: why a write failed; None for a closed pipe.
    """

    def __init__(self, fd: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.error: Optional[OSError] = None
        self._fd = fd
        self._terminal = os.isatty(fd)
        self._lost = False

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._terminal

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any) -> int:
        """Write all bytes, or drop them if the stream is closed."""
        view = memoryview(data)
        while view and not self._lost:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                self._wait()
            except OSError as error:
                self._lost = True
                closed = error.errno in _CLOSED or (self._terminal and error.errno == errno.EIO)
                self.error = None if closed else error
        return len(data)

    def _wait(self) -> None:
        """Wait for the reader: another process may have made the descriptor non-blocking."""
        import select

        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        poll.poll()


def install() -> None:
    """Replace Python's streams.

    Closed streams, as by `>&-`, go to the null device: otherwise the first opened file would get the
    number of the stream, and the output of libraries.
    """
    codecs.register(_codec)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = _lasting(sys.stdout, "<stdout>"), _lasting(sys.stderr, "<stderr>")


def status_after(status: int) -> int:
    """The exit status of a process whose work ended with this one, now that its output is written, or is not."""
    error = getattr(sys.stdout.buffer, "error", None)
    if error is None or status:
        return status
    sys.stderr.write(f"reshard: error: standard output: cannot be written: {error.strerror or error}\n")
    return 1


def _lasting(stream: Optional[TextIO], name: str) -> io.TextIOWrapper:
    fd = os.open(os.devnull, os.O_WRONLY) if stream is None else stream.fileno()
    encoding = "utf-8" if stream is None else stream.encoding
    if codecs.lookup(encoding).name == "ascii":
        encoding = _ASCII
    return io.TextIOWrapper(Lasting(fd, name), encoding, "backslashreplace", write_through=True)


def _codec(name: str) -> Optional[codecs.CodecInfo]:
    if name != _ASCII:
        return None
    plain = codecs.lookup("ascii")
    return codecs.CodecInfo(
        plain.encode,
        plain.decode,
        incrementalencoder=plain.incrementalencoder,
        incrementaldecoder=plain.incrementaldecoder,
        name=_ASCII,
    )
