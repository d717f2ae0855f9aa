"""Running `reshard` in this process, like its command line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.corpus import ROOT

LAUNCHER = "from reshard.entry import main; main()"
Argument = str | Path | int


class Result(NamedTuple):
    """Exit status, standard output and standard error of one command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def reshard(*arguments: Argument, subprocess_: bool = False) -> Result:
    """Run one command, whatever its status; a traceback fails the test."""
    words = [str(argument) for argument in arguments]
    result = in_subprocess(words) if subprocess_ else in_process(words)
    if "--debug" not in words:
        assert "Traceback" not in result.err + result.out, result.err
    return result


def done(*arguments: Argument, subprocess_: bool = False) -> Result:
    """Run one command, which must succeed."""
    result = reshard(*arguments, subprocess_=subprocess_)
    assert result.status == 0, f"{arguments} gave {result.status}:\n{result.err}"
    return result


def fails(status: int, *arguments: Argument, texts: Sequence[Argument] = ()) -> Result:
    """Run one command, which must end with `status` and an error that contains every text of `texts`."""
    result = reshard(*arguments)
    assert result.status == status, f"{arguments} gave {result.status}, not {status}:\n{result.err}{result.out}"
    assert result.err.strip(), "an error without a message"
    warns(result, *texts)
    return result


def warns(result: Result, *texts: Argument) -> None:
    """The command's standard error contains every text of `texts`."""
    for part in texts:
        assert flat(str(part)) in flat(result.err), f"{part!r} is missing:\n{result.err}"


def flat(text: str) -> str:
    """Text in lower case, with single spaces for line breaks."""
    return " ".join(text.split()).lower()


def in_process(words: list[str]) -> Result:
    from reshard.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    status = 0
    previous = sys.argv
    sys.argv = ["reshard", *words]
    objects = sys.modules.get("reshard.storage.s3.store")
    if objects is not None:
        # As in a process of its own, nothing is listed yet.
        objects._store.cache_clear()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    finally:
        sys.argv = previous
    return Result(status, out.getvalue(), err.getvalue())


def in_subprocess(words: list[str]) -> Result:
    process = subprocess.run([sys.executable, "-c", LAUNCHER, *words], capture_output=True, text=True, timeout=300)
    return Result(process.returncode, process.stdout, process.stderr)


def install(directory: Path) -> dict[str, str]:
    """Write a `reshard` command into `directory`; returns an environment with it in PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    command = directory / "reshard"
    command.write_text(f"#!{sys.executable}\n{LAUNCHER}\n")
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def terminal_output(size: int | tuple[int, int], script: str, *words: str, **environment: str) -> str:
    """The output of a Python script on a terminal, given its columns, or columns and rows; it must succeed."""
    columns, rows = size if isinstance(size, tuple) else (size, 50)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    with subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=ROOT,
        env={**inherited, "TERM": "xterm", **environment},
    ) as process:
        os.close(slave)
        output = b""
        # Linux reports the end of a terminal as an error.
        with contextlib.suppress(OSError):
            while part := os.read(master, 65536):
                output += part
        os.close(master)
    assert process.returncode == 0, output
    return output.decode().replace("\r\n", "\n")
