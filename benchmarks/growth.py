"""How time grows: with the bytes, and with the number of files that the same bytes lie in."""

from __future__ import annotations

from benchmarks.measure import Run, Section, memory_backed, mib, remove, reshard, run
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
    section = Section("How does time grow with bytes and files?")
    section.say(f"Optimizer shards joined, 8 ranks to 4, medians of {TURNS} runs.", detail=True)
    for layers in LAYERS:
        model = model_of(layers)
        run_of_four = median(model, FOUR)
        gigabytes = model.nbytes / 1e9
        section.row(
            {
                "GB": round(gigabytes, 2),
                "reshard, s": round(run_of_four.seconds, 2),
                "s per GB": round(run_of_four.seconds / gigabytes, 2),
                "memory, MiB": mib(run_of_four.anonymous),
            }
        )
    model = model_of(LAYERS[1])
    section.say(f"{model.nbytes / 1e9:.1f} GB of optimizer shards joined, medians of {TURNS} runs.")
    for ranks in RANKS:
        claim = Claim("", 1, Scheme(data=2, model=ranks // 2, sharded=True), Scheme(model=ranks // 2))
        run_of_four = median(model, claim)
        section.row(
            {
                "source ranks": ranks,
                "files read and written": ranks + ranks // 2,
                "reshard, s": round(run_of_four.seconds, 2),
                "memory, MiB": mib(run_of_four.anonymous),
            }
        )
    return section


def median(model: Model, claim: Claim) -> Run:
    with memory_backed() as place:
        words = reshard("transform-dir", place / "src", place / "made", *prepare(place, model, claim))
        runs = []
        for _ in range(TURNS):
            remove(place / "made")
            runs.append(run(words))
    return sorted(runs, key=lambda one: one.seconds)[TURNS // 2]
