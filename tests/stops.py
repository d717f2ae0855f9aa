"""Stop a run at every system call that changes the disk; a separate program, because it forks.

Usage: python -m tests.stops ROOT FIRST EVERY COMMAND...

``ROOT/before`` is a target directory that another conversion has filled, ``ROOT/after`` what ``COMMAND``, a
`reshard` command into ``ROOT/dst``, makes of it. For its calls FIRST, FIRST + EVERY and so on, counted from 0,
``dst`` is made like ``before``, and the command ends there as if it were killed, once or twice; then it is given again.
What stands under a final name must at any moment be of one of the two, a mark of completeness must not stand beside
files of an unfinished one, and in the end ``dst`` must be what ``after`` is. Prints how often it was stopped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"

from reshard.cli.main import main as reshard_main
from reshard.errors import TargetError
from reshard.forms.target import UNFINISHED
from reshard.records.status import status_of
from tests.kills import load_commands, run_here

ENDINGS = (".ckpt", ".safetensors", ".distcp")
MARKS = ("reshard-manifest.json", ".metadata", "metadata.json", "latest_checkpointed_iteration.txt")
CALLS = ("rename", "unlink", "rmdir", "mkdir", "open", "pwrite", "fsync")


def checkpoints(root: Path) -> dict[str, bytes]:
    paths = [path for path in root.rglob("*") if path.suffix in ENDINGS and path.name != UNFINISHED]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def stop_at(number: int, words: list[str]) -> None:
    """Run a command until it makes its ``number``-th call, counted from 0; ends this process."""
    made = 0

    def counting(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal made
            if name != "open" or args[1] & os.O_CREAT:
                if made == number:
                    os._exit(9)
                made += 1
            return plain(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name), name))
    sys.argv = ["reshard", *words]
    reshard_main()


def stopped(number: int, words: list[str]) -> bool:
    """Run a command that ends at a call; whether it came so far."""
    process = os.fork()
    if not process:
        try:
            fd = os.open(os.devnull, os.O_WRONLY)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            stop_at(number, words)
        except SystemExit as stop:
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        except BaseException:
            os._exit(99)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, 9), f"call {number}: {status}"
    return status == 9


def check(root: Path, before: dict[str, bytes], after: dict[str, bytes], where: str) -> None:
    files = checkpoints(root / "dst")
    for name, data in files.items():
        assert data in (before.get(name), after.get(name)), f"{where}: {name} is torn"
    for mark in MARKS:
        assert files in (before, after) or not [*(root / "dst").rglob(mark)], f"{where}: {mark}"
    # After any failure, status works, but for a directory whose records were just removed.
    with contextlib.suppress(TargetError):
        status_of(str(root / "dst"))


def main(root: Path, first: int, every: int, words: list[str]) -> None:
    """Stop the command at all these calls, and print their number."""
    load_commands()
    before, after = checkpoints(root / "before"), checkpoints(root / "after")
    number, stops = first, 0
    going_on = True
    while going_on:
        for again in (None, number % 7, number):
            shutil.rmtree(root / "dst", ignore_errors=True)
            shutil.copytree(root / "before", root / "dst")
            going_on = stopped(number, words)
            check(root, before, after, f"stopped at {number}")
            if again is not None:
                stops += stopped(again, words)
                check(root, before, after, f"stopped at {number} and {again}")
            process = run_here(words, root / "log")
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            assert status == 0, f"after {number}, {again}:\n{(root / 'log').read_text()}"
            assert checkpoints(root / "dst") == after, f"after {number}, {again}: {sorted(checkpoints(root / 'dst'))}"
            assert status_of(str(root / "dst")).complete
            assert not [path for path in (root / "dst").rglob(".reshard-tmp-*")]
        stops += going_on
        number += every
    print(stops)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
