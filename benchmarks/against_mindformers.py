"""Conversions between forms by the libraries that they belong to, in the environment that `make conformance` makes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.against_mindspore import MODEL, OUR_RUNS, contest
from benchmarks.measure import Section, memory_backed, remove, reshard, run
from benchmarks.synthetic import Scheme, write_checkpoint, write_strategy, wrong_slices
from benchmarks.synthetic_forms import write_checkpoint2, wrong_in_full_weights

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-conformance-mindformers"
MINDFORMERS = "2.1.0"
OLD, NEW = Scheme(model=8), Scheme(model=4)

#: Give a program its job, and nobody what it says.
WITH_JOB = ["sh", "-c", 'job=$1; shift; exec "$@" <"$job" >/dev/null 2>&1', "sh"]


def measure() -> Section:
    """Measure the libraries' own conversions, or report that they were skipped."""
    section = Section("How much faster than MindFormers?")
    python, wheel = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "mindformers" / MINDFORMERS
    if not wheel.is_dir():
        section.say("Skipped: there is no environment with MindFormers; `make conformance` makes one.")
        return section
    section.say(
        f"MindSpore 2.10.0 and MindFormers {MINDFORMERS}, {MODEL.nbytes / 1e9:.1f} GB, once, start-up "
        f"included; reshard the median of {OUR_RUNS}."
    )
    with memory_backed() as place:
        start_up = run([python, "-c", "import mindspore"]).seconds
        target, job = place / "made", place / "job.json"

        def row(kind: str, ours: list[object], worker: list[object], jobs: list[dict[str, object]]) -> None:
            job.write_text(json.dumps(jobs))
            module = ["-m", f"tests.conformance.workers.{worker[0]}", *worker[1:]]
            logs = ["env", f"LOG_MF_PATH={place}", f"LOCAL_DEFAULT_PATH={place}"]
            command = [*WITH_JOB, job, *logs, python, *module]
            section.row({"kind": kind, **contest(ours, target, command, start_up)})

        write_checkpoint(place / "src", MODEL, OLD, "safetensors")
        write_strategy(place / "old", MODEL, OLD)
        write_strategy(place / "new", MODEL, NEW)
        old, new = (place / name / "ckpt_strategy_rank_0.ckpt" for name in ("old", "new"))
        unified, theirs = place / "unified", place / "theirs"

        ours = reshard("convert", place / "src", target, "--to", "unified", "--src-strategy", old, "--quiet")
        unify: dict[str, object] = {"do": "unify", "src": str(place / "src"), "strategy": str(old), "dst": str(unified)}
        row("ranks to unified weights", ours, ["mindspore"], [unify])
        assert wrong_in_full_weights(target, MODEL, "param_name_map.json") == 0
        assert wrong_in_full_weights(unified, MODEL, "param_name_map.json") == 0
        remove(place / "src")

        ours = reshard("convert", unified, target, "--to", "ranks", "--dst-strategy", new, "--quiet")
        where = {"unified": str(unified), "strategy": str(new), "dst": str(theirs)}
        row("unified weights to 4 ranks", ours, ["mindspore"], [{"do": "distribute", **where, "ranks": [0, 1, 2, 3]}])
        assert wrong_slices(target, MODEL, NEW, "safetensors") == 0
        assert len(list(theirs.glob("rank_*/net.safetensors"))) == NEW.ranks
        remove(unified, theirs)

        write_checkpoint2(place / "ckpt", MODEL, OLD)
        ours = reshard("convert", place / "ckpt", target, "--to", "huggingface", "--quiet")
        shape = [MODEL.rows, MODEL.columns]
        tensors = {name: {"dtype": "F32", "shape": shape} for name in MODEL.names(OLD, 0)}
        theirs.mkdir()
        gather: dict[str, object] = {"do": "gather", "checkpoint": str(place / "ckpt"), "tensors": tensors}
        gather["file"] = str(theirs / "all")
        row("Checkpoint 2.0 to one file", ours, ["mindformers", wheel], [gather])
        assert wrong_in_full_weights(target, MODEL) == 0
        assert (theirs / "all.safetensors").stat().st_size >= MODEL.nbytes
    return section
