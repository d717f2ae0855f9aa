"""Runs of `reshard` in separate processes that start at once: forked from one that has loaded everything.

Usage as a program: standard input has a line of JSON per command, with its words and a file for its output. Standard
output gets the number of its process, and that number and the exit status when it has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.running import Argument, Result


class Run:
    """A command in a process of its own.

    Attributes:
        process: its number.
    """

    def __init__(self, process: int, log: Path) -> None:
        self.process = process
        self._log = log
        self._ended = threading.Event()
        self._status: int | None = None

    def ended(self, status: int) -> None:
        self._status = status
        self._ended.set()

    def send(self, kind: int) -> None:
        """Send a signal, unless the command has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, kind)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def result(self) -> Result:
        """Wait for the command; the status is negative if a signal ended it."""
        assert self._ended.wait(120), f"hangs: {self._log.read_text()}"
        assert self._status is not None
        return Result(self._status, "", self._log.read_text())


class Preloaded:
    """Starts runs.

    Args:
        directory: for their output.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._runs: dict[int, Run] = {}
        self._started: list[Run] = []
        self._news = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._read_results, daemon=True).start()

    def _read_results(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            document = json.loads(line)
            with self._news:
                if "status" in document:
                    self._runs[document["process"]].ended(document["status"])
                else:
                    run = Run(document["process"], Path(document["log"]))
                    self._runs[run.process] = run
                    self._started.append(run)
                self._news.notify_all()

    def start(self, *words: Argument, **environment: str) -> Run:
        """Start a command."""
        self._number += 1
        log = self._directory / f"log{self._number}"
        expected = {
            "words": [str(word) for word in words],
            "log": str(log),
            "environment": {**{name: value for name, value in os.environ.items() if "AWS" in name}, **environment},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(expected) + "\n")
        self._process.stdin.flush()
        with self._news:
            assert self._news.wait_for(lambda: len(self._started) == self._number, 60)
            return self._started[-1]

    def done(self, *words: Argument) -> Result:
        """Run a command, which must succeed."""
        result = self.start(*words).result()
        assert result.status == 0, f"{words} gave {result.status}:\n{result.err}"
        return result

    def close(self) -> None:
        self._process.communicate("")


def load() -> None:
    """Import the modules of commands."""
    import reshard.cli

    for module in pkgutil.iter_modules(reshard.cli.__path__, "reshard.cli."):
        importlib.import_module(module.name)
    for name in ("google.protobuf.message_factory", "boto3", "reshard.storage.s3.store"):
        importlib.import_module(name)


def run(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """In a forked process: become the command."""
    from reshard.entry import main

    status = 99
    try:
        os.environ.update(environment)
        sys.argv = ["reshard", *words]
        main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _send(**kind: Any) -> None:
    os.write(1, (json.dumps(kind) + "\n").encode())


def _serve() -> None:
    """Fork runs and report their ends; running ones end with this process."""
    load()
    living: set[int] = set()

    def reap(*_: object) -> None:
        for process in list(living):
            try:
                actual, status = os.waitpid(process, os.WNOHANG)
            except ChildProcessError:
                # Another signal interrupted this loop, and its handler has reported the end.
                continue
            if actual:
                living.discard(process)
                _send(process=process, status=os.waitstatus_to_exitcode(status))

    signal.signal(signal.SIGCHLD, reap)
    for line in _lines():
        document = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        process = os.fork()
        if not process:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            log = os.open(document["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
            run(document["words"], document["environment"])
        living.add(process)
        _send(process=process, log=document["log"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for process in living:
        os.kill(process, signal.SIGKILL)


def _lines() -> Iterator[str]:
    contents = b""
    while part := os.read(0, 1 << 16):
        *lines, contents = (contents + part).split(b"\n")
        yield from (line.decode() for line in lines)


if __name__ == "__main__":
    _serve()
