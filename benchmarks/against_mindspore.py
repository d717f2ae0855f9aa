"""The same work by MindSpore's own functions, where an environment with MindSpore is at hand."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Cell, Run, Section, memory_backed, mib, remove, reshard, run
from benchmarks.synthetic import Model, Scheme, wrong_slices
from benchmarks.throughput import Claim, prepare

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-conformance" / "bin" / "python"
MODEL = Model(layers=6, matrices=8, rows=2304, columns=2304)
CLAIM = Claim("8 ranks to 4", 0.1, Scheme(model=8), Scheme(model=4))
RANK = 3
OUR_RUNS = 3

TRANSFORM = """
import sys, mindspore
src, dst, old, new = sys.argv[1:]
mindspore.transform_checkpoints(src, dst, "checkpoint_", old, new)
"""
_BY_RANK = """
import glob, sys, mindspore
src, target, old, new, rank = sys.argv[1:]
needed = mindspore.rank_list_for_transform(int(rank), old, new)
files = {r: glob.glob(f"{src}/rank_{r}/*.ckpt")[0] for r in needed}
mindspore.transform_checkpoint_by_rank(int(rank), files, target, old, new)
"""
_CHANGE_FORMAT = """
import sys, mindspore
mindspore.ckpt_to_safetensors(sys.argv[1], sys.argv[2])
"""


def mindspore_python() -> str | None:
    """A Python that can import MindSpore: `RESHARD_MINDSPORE_PYTHON`, or the one of `make conformance`."""
    python = os.environ.get("RESHARD_MINDSPORE_PYTHON") or str(ENVIRONMENT)
    if not Path(python).exists():
        return None
    process = subprocess.run([python, "-c", "import mindspore"], capture_output=True)
    return python if process.returncode == 0 else None


def measure() -> Section:
    """Measure the three kinds that MindSpore supports, or report that they were skipped."""
    section = Section("How much faster than MindSpore?")
    python = mindspore_python()
    if python is None:
        section.say("Skipped: no Python with MindSpore was found; `make conformance` makes one.")
        return section
    process = [python, "-c", "import mindspore; print(mindspore.__version__)"]
    version = subprocess.run(process, capture_output=True, text=True).stdout.split()[-1]
    section.say(
        f"MindSpore {version}, {MODEL.nbytes / 1e9:.1f} GB, once, its start-up included; reshard the median "
        f"of {OUR_RUNS}. The aim is a factor of ten."
    )
    with memory_backed() as place:
        options = prepare(place, MODEL, CLAIM)
        old = place / "old" / "ckpt_strategy_rank_0.ckpt"
        new = place / "new" / "ckpt_strategy_rank_0.ckpt"
        src, target, theirs = place / "src", place / "made", place / "theirs"
        start_up = run([python, "-c", "import mindspore"]).seconds

        def row(kind: str, ours: list[object], script: str, *arguments: object) -> None:
            section.row({"kind": kind, **contest(ours, target, [python, "-c", script, *arguments], start_up)})
            remove(theirs)

        row(f"{CLAIM.name}", reshard("transform-dir", src, target, *options), TRANSFORM, src, theirs, old, new)
        assert wrong_slices(target, MODEL, CLAIM.new) == 0
        theirs.mkdir()
        arguments = [src, theirs / "rank.ckpt", old, new, RANK]
        row(f"{CLAIM.name}, one of them", reshard("by-rank", RANK, src, target, *options), _BY_RANK, *arguments)
        to_safetensors = ["--src-strategy", old, "--dst-strategy", old, "--format", "safetensors", "--quiet"]
        ours = reshard("transform-dir", src, target, *to_safetensors)
        row(".ckpt to .safetensors", ours, _CHANGE_FORMAT, src, theirs)
    return section


def contest(ours: list[object], target: Path, theirs: list[object], start_up: float) -> dict[str, Cell]:
    """Measure theirs once and ours several times, as a part of a row.

    Args:
        ours: our command, which writes `made`.
        made: is removed before every run.
        theirs: the other command.
        start_up: seconds that theirs takes before it does anything.
    """
    other = quietly(theirs)
    mine = []
    for _ in range(OUR_RUNS):
        remove(target)
        mine.append(run(ours))
    seconds = statistics.median(one.seconds for one in mine)
    return {
        "times faster": round(other.seconds / seconds),
        "reshard, s": round(seconds, 2),
        "other, s": round(other.seconds, 1),
        "its start-up, s": round(start_up, 1),
        "memory, MiB": mib(max(one.anonymous for one in mine)),
        "other's memory, MiB": mib(other.anonymous),
    }


def quietly(command: list[object]) -> Run:
    """Run a command with much output."""
    return run(["sh", "-c", 'exec "$@" >/dev/null 2>&1', "sh", *command])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["RESHARD_MINDSPORE_PYTHON"] = sys.argv[1]
    measure()
