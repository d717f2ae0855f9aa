"""Many ranks with many small parameters: 1,024 source ranks to 768 target ranks, 360 parameters each."""

from __future__ import annotations

import resource
import shutil

from benchmarks.measure import memory_backed, reshard, run
from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices

MODEL = Model(layers=45, matrices=8, rows=3072, columns=4)
OLD = Scheme(data=128, model=8, sharded=True)
NEW = Scheme(data=96, model=8, sharded=True)


def lines() -> list[str]:
    """Measure, and tell in a sentence each."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    with memory_backed() as place:
        write_checkpoint(place / "src", MODEL, OLD)
        write_strategy(place / "old", MODEL, OLD)
        write_strategy(place / "new", MODEL, NEW)
        strategies = ["--src-strategy", place / "old", "--dst-strategy", place / "new"]
        listing = min(run(reshard("rank-list", 5, *strategies))[0] for _ in range(3))
        seconds, anonymous = run(reshard("transform-dir", place / "src", place / "dst", "--quiet", *strategies))
        assert wrong_slices(place / "dst", MODEL, NEW) == 0
        shutil.rmtree(place / "dst")
    parameters = MODEL.layers * MODEL.matrices
    return [
        f"{OLD.ranks} to {NEW.ranks} ranks with {parameters} small parameters each, at most 1,024 open files: "
        f"{seconds:.1f} s, {anonymous / 2**20:.0f} MiB of anonymous memory.",
        f"`rank-list` for the same strategies: {listing:.2f} s.",
    ]


if __name__ == "__main__":
    print("\n".join(lines()))
