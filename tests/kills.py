"""Run conversions and kill them at random moments; a separate program, because it forks.

Usage: python -m tests.kills ROOT KILLS SEED PROCESSES OPTION...

``ROOT`` contains ``src`` and ``old``, its strategy, and gets ``whole``, an undisturbed conversion with the options, and
``dst``. Every round starts PROCESSES runs into ``dst`` and kills them at random moments. Files under final names must
be complete at any moment; a target that was recorded must not be written again; the file that loaders look for must
be written last. After a run that ends by itself, ``dst`` must equal ``whole``. Prints a JSON summary.
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
from reshard.forms.target import UNFINISHED

MANIFEST = "reshard-manifest.json"


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

    def __init__(self, root: Path, seed: int, options: list[str]) -> None:
        self.root, self.dst = root, root / "dst"
        self.random = random.Random(seed)
        self.options = ["--src-strategy", str(root / "old"), "--checksum", "crc32", *options]
        started = time.monotonic()
        self.finish(run_here(self.words(root / "whole"), root / "log"))
        self.seconds = time.monotonic() - started
        self.whole = contents(root / "whole")
        self.manifest = (root / "whole" / MANIFEST).read_bytes()
        self.targets = [file["file"] for file in json.loads(self.manifest)["files"]]
        self.inodes: dict[str, int] = {}
        self.kills = self.ends = self.kept = 0

    def words(self, dst: Path, command: str = "convert", *ids: str) -> list[str]:
        jobs = str(self.random.choice([1, 2, 3]))
        return [command, *ids, str(self.root / "src"), str(dst), "--jobs", jobs, *self.options]

    def by_rank(self) -> list[str]:
        return self.words(self.dst, "by-rank", str(self.random.randrange(len(self.targets))))

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
        """Files under final names are complete, and unchanged once they were recorded."""
        files = contents(self.dst)
        for name, content in files.items():
            assert content == self.whole.get(name), f"{name} is torn"
        missing = [name for name in self.targets if name not in files]
        finishing = [name for name in files if name not in self.targets]
        assert not (missing and finishing), f"{finishing} without {missing}"
        for name in self.targets:
            if name in files:
                inode = (self.dst / name).stat().st_ino
                if alone:
                    assert self.inodes.setdefault(name, inode) == inode, f"{name} was written again"
                    self.kept += 1
                self.inodes[name] = inode
        manifest = self.dst / MANIFEST
        assert not manifest.exists() or (manifest.read_bytes() == self.manifest and not missing)

    def end(self) -> None:
        """Let one run finish, the same command or `resume`, compare, and start over."""
        recorded = (self.dst / ".reshard" / "plan.json").exists()
        resumed = recorded and self.random.random() < 0.5
        words = ["resume", str(self.dst)] if resumed else self.words(self.dst)
        self.finish(run_here(words, self.root / "log"))
        self.check(alone=True)
        files = contents(self.dst)
        assert files == self.whole, f"different names: {sorted(files.keys() ^ self.whole.keys())}"
        assert (self.dst / MANIFEST).read_bytes() == self.manifest
        remaining = [str(path) for path in self.dst.rglob(".reshard-tmp-*")]
        assert not remaining, f"{words[0]} left {remaining}:\n{(self.root / 'log').read_text()}"
        shutil.rmtree(self.dst)
        self.inodes.clear()
        self.ends += 1


def contents(root: Path) -> dict[str, bytes]:
    """Every file under a final name, except records and the marker of an unfinished directory."""
    paths = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in paths.items()
        if not name.startswith(".reshard/") and not path.name.startswith((".reshard-tmp-", MANIFEST, UNFINISHED))
    }


def main(root: Path, kills: int, seed: int, processes: int, options: list[str]) -> None:
    """Kill `kills` processes and print a summary."""
    load_commands()
    rounds = Rounds(root, seed, options)
    while rounds.kills < kills:
        rounds.kill_some(processes)
        if rounds.random.random() < 0.15:
            rounds.end()
    rounds.end()
    print(json.dumps({"kills": rounds.kills, "ends": rounds.ends, "kept": rounds.kept, "seconds": rounds.seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
