"""A Dask cluster of real processes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.corpus import ROOT
from tests.running import LAUNCHER, Argument, Result

PRELOAD = ROOT / "tests" / "dask_preload.py"
# What the machine or its user has configured plays no part.
_ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("DASK_")},
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "DASK_CONFIG": os.devnull,
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
}


def until(happened: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until a value is true; returns it."""
    deadline = time.monotonic() + seconds
    while True:
        actual = happened()
        if actual:
            return actual
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class DaskCluster:
    """A scheduler and workers in processes of their own; a context manager.

    Args:
        directory: gets the scheduler file and logs.
        protocol: ``tcp`` or ``tls``.
        everywhere: variables for the scheduler, the workers and commands.
        settings: of Dask, for the scheduler.
    """

    def __init__(
        self, directory: Path, protocol: str = "tcp", everywhere: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.file = directory / "scheduler.json"
        self._directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = {**_ENVIRONMENT, **(everywhere or {})}
        environment = {f"DASK_{name}".upper(): str(value) for name, value in settings.items()}
        place = ["--host", f"{protocol}://127.0.0.1", "--port", "0"]
        self.scheduler = self._start("dask_scheduler", environment, *place)
        until(self.file.exists)

    def worker(self, **faults: Any) -> subprocess.Popen[bytes]:
        """Start a worker of one thread with faults as in `tests.dask_preload`."""
        scratch = str(self._directory / f"scratch{len(self._started)}")
        options = ["--nthreads", "1", "--no-nanny", "--local-directory", scratch, "--preload", str(PRELOAD)]
        return self._start("dask_worker", {"FAULTS": json.dumps(faults)}, *options)

    def workers(self, count: int, **faults: Any) -> list[subprocess.Popen[bytes]]:
        """Start workers and wait until all are connected."""
        started = [self.worker(**faults) for _ in range(count)]
        until(lambda: self.registered() >= len(self._started) - 1)
        return started

    def registered(self) -> int:
        """How many workers have found the scheduler since it was started."""
        return (self._directory / "log0").read_text().count("Register worker")

    def _start(self, program: str, environment: dict[str, str], *options: str) -> subprocess.Popen[bytes]:
        words = [
            sys.executable,
            "-m",
            f"distributed.cli.{program}",
            "--no-dashboard",
            "--scheduler-file",
            str(self.file),
        ]
        with open(self._directory / f"log{len(self._started)}", "wb") as log:
            process = subprocess.Popen(
                [*words, *options],
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def start(self, *arguments: Argument, **environment: str) -> subprocess.Popen[str]:
        """Begin a command of reshard on this cluster."""
        words = [str(argument) for argument in (*arguments, "--scheduler", self.file)]
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *words],
            env={**self._environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: Argument, **environment: str) -> Result:
        """Run a command of reshard on this cluster."""
        return ended(self.start(*arguments, **environment))

    def __enter__(self) -> DaskCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def ended(process: subprocess.Popen[str]) -> Result:
    """Wait for a command; a traceback, of Dask's log too, fails the test."""
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return Result(process.returncode, out, err)
