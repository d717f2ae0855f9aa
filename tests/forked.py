"""A `reshard` command for shells that starts at once: each run is forked from a process that has loaded everything.

Usage as a program: python -m tests.forked SOCKET. It serves runs until its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.corpus import ROOT
from tests.preloaded import load, run

_CLIENT = """#!{python} -ISs
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    run = {{"words": sys.argv[1:], "directory": os.getcwd(), "environment": dict(os.environ)}}
    socket.send_fds(server, [json.dumps(run).encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or 99))
"""


@contextlib.contextmanager
def forked_command(place: Path, **environment: str) -> Iterator[Path]:
    """The directory with the command; runs end with the block.

    Args:
        place: an empty directory with a short path.
        environment: variables that take effect when Python starts.
    """
    address = str(place / "socket")
    command = place / "reshard"
    command.write_text(_CLIENT.format(python=sys.executable, address=address))
    command.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.forked", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield place


def _serve(address: str) -> None:
    load()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    threading.Thread(target=lambda: os._exit(0 if sys.stdin.read() == "" else 1), daemon=True).start()
    # Ended runs are not waited for here.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"ready\n")
    while True:
        client, _ = listening.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(client)
        client.close()


def _run(client: socket.socket) -> None:
    """Run a command in a process of its own and send its status."""
    data, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 3)
    document = json.loads(data)
    process = os.fork()
    if not process:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.chdir(document["directory"])
        os.environ.clear()
        run(document["words"], document["environment"])
    for descriptor in descriptors:
        os.close(descriptor)
    _, status = os.waitpid(process, 0)
    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
