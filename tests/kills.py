"""Run conversions and kill them at random moments; a separate program, because it forks.

Usage: python -m tests.kills ROOT KILLS SEED PROCESSES

ROOT holds ``src``, ``old`` and ``new`` (strategies) and gets ``whole``, an undisturbed conversion, and
``dst``. Every round starts so many processes on ``dst`` and kills them at random moments. What stands
under a final name must at any moment be a whole target, and once recorded never be written again;
whenever a run comes to its end, ``dst`` must be what ``whole`` is. Prints a JSON summary.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import random
import shutil
import signal
import sys
import time
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import reshard.cli
from reshard.cli.main import main as reshard_main
from reshard.strategies import read_strategy


def load_commands() -> None:
    """Import the modules of commands, so that forked processes spend their time on the work."""
    for module in pkgutil.iter_modules(reshard.cli.__path__, "reshard.cli."):
        importlib.import_module(module.name)
    # Loaded where the first strategy is read.
    importlib.import_module("google.protobuf.message_factory")


def run_here(words: list[str], log: Path) -> int:
    """Run a command in a forked process; returns its process number."""
    process = os.fork()
    if process:
        return process
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.argv = ["reshard", *words]
        reshard_main()
    except SystemExit as stop:
        os._exit(stop.code if isinstance(stop.code, int) else 1)
    except BaseException:
        os._exit(99)
    os._exit(0)


def wait(process: int, until: float) -> None:
    """Wait until a moment, or until a process ends before it."""
    while time.monotonic() < until and os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.001)


class Rounds:
    """The rounds of one test."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.dst = root, root / "dst"
        self.random = random.Random(seed)
        self.strategies = ["--src-strategy", str(root / "old"), "--dst-strategy", str(root / "new")]
        self.ranks = range(read_strategy(str(root / "new")).device_count)
        started = time.monotonic()
        self.finish(run_here(self.words(root / "whole"), root / "log"))
        self.seconds = time.monotonic() - started
        whole = root / "whole"
        self.whole = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("rank_*/*")}
        self.manifest = (root / "whole" / "reshard-manifest.json").read_bytes()
        self.inodes: dict[Path, int] = {}
        self.kills = self.ends = self.kept = 0

    def words(self, dst: Path) -> list[str]:
        jobs = str(self.random.choice([1, 2, 3]))
        options = ["--checksum", "crc32", "--jobs", jobs, *self.strategies]
        return ["transform-dir", str(self.root / "src"), str(dst), *options]

    def by_rank(self) -> list[str]:
        rank = str(self.random.choice(self.ranks))
        return ["by-rank", rank, str(self.root / "src"), str(self.dst), "--checksum", "crc32", *self.strategies]

    def finish(self, process: int) -> None:
        """Wait for a process that is not killed: it must succeed."""
        _, status = os.waitpid(process, 0)
        assert status == 0, (self.root / "log").read_text()

    def kill_some(self, processes: int) -> None:
        """Start processes and kill each at a random moment."""
        running = {}
        now = time.monotonic()
        for number in range(processes):
            words = self.words(self.dst) if number == 0 or self.random.random() < 0.3 else self.by_rank()
            until = now + self.random.uniform(0, 1.3 * self.seconds * (1 + 0.5 * (processes - 1)))
            running[run_here(words, self.root / f"log{number}")] = until
        for process, until in sorted(running.items(), key=lambda item: item[1]):
            wait(process, until)
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            killed = os.WIFSIGNALED(status)
            self.kills += killed
            assert killed or os.WEXITSTATUS(status) in (0, 1), [path.read_text() for path in self.root.glob("log*")]
        self.check(alone=processes == 1)

    def check(self, alone: bool) -> None:
        """Every file under a final name is complete, and unchanged once it was recorded."""
        for path in self.dst.glob("rank_*/checkpoint_*"):
            name = path.relative_to(self.dst)
            assert path.read_bytes() == self.whole[name], f"{name} is torn"
            inode = path.stat().st_ino
            if alone:
                assert self.inodes.setdefault(name, inode) == inode, f"{name} was written again"
                self.kept += 1
            self.inodes[name] = inode
        manifest = self.dst / "reshard-manifest.json"
        assert not manifest.exists() or manifest.read_bytes() == self.manifest

    def end(self) -> None:
        """Let one run finish, the same command or `resume`, compare, and start over."""
        recorded = any(self.dst.glob(".reshard/*/command.*.json"))
        resumed = recorded and self.random.random() < 0.5
        words = ["resume", str(self.dst)] if resumed else self.words(self.dst)
        self.finish(run_here(words, self.root / "log"))
        self.check(alone=True)
        paths = {path.relative_to(self.dst) for path in self.dst.rglob("rank_*/*")}
        assert paths == set(self.whole), f"left over: {sorted(map(str, paths ^ set(self.whole)))}"
        assert (self.dst / "reshard-manifest.json").read_bytes() == self.manifest
        assert not [path for path in self.dst.rglob(".reshard-tmp-*")]
        shutil.rmtree(self.dst)
        self.inodes.clear()
        self.ends += 1


def main(root: Path, kills: int, seed: int, processes: int) -> None:
    """Kill `kills` processes and print a summary."""
    load_commands()
    rounds = Rounds(root, seed)
    while rounds.kills < kills:
        rounds.kill_some(processes)
        if rounds.random.random() < 0.15:
            rounds.end()
    rounds.end()
    print(json.dumps({"kills": rounds.kills, "ends": rounds.ends, "kept": rounds.kept}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
