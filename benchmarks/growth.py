"""How time grows: with the bytes, and with the number of files that the same bytes lie in."""

from __future__ import annotations

from benchmarks.measure import Run, Section, memory_backed, remove, reshard, run
from benchmarks.synthetic import Model, Scheme
from benchmarks.throughput import Claim, prepare

TURNS = 5
LAYERS = (2, 4, 8, 16)
RANKS = (8, 16, 32, 64, 128, 256)
FOUR = Claim("", 1, Scheme(data=2, model=4, sharded=True), Scheme(model=4))


def model_of(layers: int) -> Model:
    return Model(layers=layers, matrices=12, rows=2304, columns=2304)


def measure() -> Section:
    """Measure both curves."""
    section = Section("Cost as work grows")
    section.say(f"Optimizer shards joined, dp2 x mpN to mpN; medians of {TURNS} runs. More bytes, 8 ranks to 4:")
    section.table("GB", "time", "time per GB", "anonymous")
    curve = []
    for layers in LAYERS:
        model = model_of(layers)
        run_of_four = median(model, FOUR)
        gigabytes = model.nbytes / 1e9
        section.row(
            f"{gigabytes:.2f}",
            f"{run_of_four.seconds:.2f} s",
            f"{run_of_four.seconds / gigabytes:.2f} s",
            mib(run_of_four),
        )
        curve.append((f"{gigabytes:.2f} GB", run_of_four.seconds))
    section.bars(curve, " s")
    model = model_of(LAYERS[1])
    section.say(f"More ranks, the same {model.nbytes / 1e9:.1f} GB:")
    section.table("source ranks", "files read and written", "time", "anonymous")
    curve = []
    for ranks in RANKS:
        claim = Claim("", 1, Scheme(data=2, model=ranks // 2, sharded=True), Scheme(model=ranks // 2))
        run_of_four = median(model, claim)
        files = ranks + ranks // 2
        section.row(str(ranks), str(files), f"{run_of_four.seconds:.2f} s", mib(run_of_four))
        curve.append((f"{files} files", run_of_four.seconds))
    section.bars(curve, " s")
    per_file = (curve[-1][1] - curve[0][1]) / ((RANKS[-1] - RANKS[0]) * 1.5)
    section.say(f"From the fewest to the most, a file more costs {per_file * 1000:.1f} ms.")
    return section


def median(model: Model, claim: Claim) -> Run:
    with memory_backed() as place:
        words = reshard("transform-dir", place / "src", place / "made", *prepare(place, model, claim))
        runs = []
        for _ in range(TURNS):
            remove(place / "made")
            runs.append(run(words))
    return sorted(runs, key=lambda one: one.seconds)[TURNS // 2]


def mib(run_of_four: Run) -> str:
    return f"{run_of_four.anonymous / 2**20:.0f} MiB"


if __name__ == "__main__":
    measure()
