"""Converting from and to PyTorch's forms against copying the result, and against torch's own tools where torch is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.against_mindspore import quietly
from benchmarks.measure import Run, Section, against_copy, memory_backed, mib, remove, reshard, run
from benchmarks.synthetic import Scheme, write_strategy
from benchmarks.synthetic_forms import INDEX, write_huggingface, wrong_in_full_weights
from benchmarks.throughput import MODEL

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-conformance-transformers" / "bin" / "python"
PAIRS = 4
RANKS = 8
FILES = 3
COLUMNS = Scheme(model=RANKS, cut=1)


class Claim(NamedTuple):
    """A kind of conversion and the ratio that it must not exceed; cuts are rows or columns, over `RANKS` ranks."""

    name: str
    most: float
    source: str
    target: str
    columns: bool = False


DCP_TO_HF = Claim("DCP to Hugging Face", 0.8, "dcp", "huggingface")
HF_TO_DCP = Claim("Hugging Face to DCP", 0.8, "huggingface", "dcp")
CLAIMS = (
    DCP_TO_HF,
    HF_TO_DCP,
    Claim("DCP to Hugging Face, columns", 1.0, "dcp", "huggingface", True),
    Claim("Hugging Face to DCP, columns", 1.0, "huggingface", "dcp", True),
    Claim("hf-sharded to Hugging Face", 0.8, "hf-sharded", "huggingface"),
    Claim("Hugging Face to hf-sharded", 0.8, "huggingface", "hf-sharded"),
    Claim("hyper-parallel to Hugging Face", 0.8, "hyper-parallel", "huggingface"),
)

# What projects do: everything into memory, then one file.
TO_HUGGING_FACE = """
import sys, torch, safetensors.torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
state = {}
reader, planner = FileSystemReader(sys.argv[1]), _EmptyStateDictLoadPlanner()
_load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
safetensors.torch.save_file(state, sys.argv[2])
"""
TO_TORCH_SAVE = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(*sys.argv[1:])
"""
_TO_DCP = """
import glob, sys, torch.distributed.checkpoint, safetensors.torch
state = {}
for path in glob.glob(sys.argv[1] + "/*.safetensors"):
    state.update(safetensors.torch.load_file(path))
torch.distributed.checkpoint.save({"model": state}, checkpoint_id=sys.argv[2], no_dist=True)
"""


def torch_python() -> str | None:
    """A Python that can import torch: `RESHARD_TORCH_PYTHON`, or the one of `make conformance-transformers`."""
    python = os.environ.get("RESHARD_TORCH_PYTHON") or str(ENVIRONMENT)
    if not Path(python).exists():
        return None
    imported = subprocess.run([python, "-c", "import torch, safetensors"], capture_output=True)
    return python if imported.returncode == 0 else None


def prepare(place: Path, claim: Claim) -> list[object]:
    """Write a source; the command line that converts it into `made`."""
    write_huggingface(place / "whole", MODEL, FILES)
    write_strategy(place / "columns", MODEL, COLUMNS)
    source = place / "whole"
    if claim.source != "huggingface":
        source = place / "src"
        # Archives of torch have CRCs, which a conversion checks.
        sums = ["--checksum", "crc32"] if claim.source == "dcp" else []
        run([*_command(place, place / "whole", source, claim.source, claim.columns), *sums])
        remove(place / "whole")
    return _command(place, source, place / "made", claim.target, claim.columns)


def _command(place: Path, source: Path, out: Path, form: str, columns: bool) -> list[object]:
    cut: list[object] = ["--max-shard-size", f"{MODEL.nbytes // FILES}B"]
    if form != "huggingface":
        cut = ["--dst-strategy", place / "columns"] if columns else ["--shards", RANKS]
    # A strategy has the names of the model, and hyper-parallel records no keys.
    names = ["--rename", "*=*"]
    return reshard("convert", source, out, "--to", form, *cut, *names, "--quiet")


def wrong(place: Path, claim: Claim) -> int:
    """The number of wrong parameters of `made`."""
    result = place / "made"
    if claim.target != "huggingface":
        result = place / "back"
        run(_command(place, place / "made", result, "huggingface", claim.columns))
    return wrong_in_full_weights(result, MODEL, INDEX)


def measure() -> Section:
    """Measure every kind, and torch's tools where they are."""
    section = Section("How fast are PyTorch's forms?")
    section.say(
        f"`convert` of {MODEL.nbytes / 1e9:.1f} GB, {RANKS} ranks, against `cp -r` of its own output, {PAIRS} pairs."
    )
    for claim in CLAIMS:
        with memory_backed() as place:
            words = prepare(place, claim)
            measured = against_copy(words, place / "made", PAIRS)
            remove(place / "copied", place / "pattern")
            assert wrong(place, claim) == 0
            section.row({"kind": claim.name, "aim": claim.most, **measured.row()})
    python = torch_python()
    if python is None:
        section.say("torch's tools: skipped, `make conformance-transformers` makes an environment with torch.")
        return section
    _against_torch(section, python)
    return section


def _against_torch(section: Section, python: str) -> None:
    version_command = [python, "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(version_command, capture_output=True, text=True).stdout.split()[-1]
    imported = run([python, "-c", "import torch.distributed.checkpoint, safetensors.torch"])
    section.say(f"Against torch {version}, the better of two runs; its start-up of {imported.seconds:.1f} s counts.")
    for claim, scripts in (
        (DCP_TO_HF, {"load all, `save_file`": TO_HUGGING_FACE, "`dcp_to_torch_save`": TO_TORCH_SAVE}),
        (HF_TO_DCP, {"load all, `dcp.save`": _TO_DCP}),
    ):
        with memory_backed() as place:
            words = prepare(place, claim)
            source = place / ("whole" if claim.source == "huggingface" else "src")
            theirs, result = place / "theirs", place / "made"
            for tool, script in scripts.items():
                ours: list[Run] = []
                theirs_runs: list[Run] = []
                for _ in range(2):
                    remove(result, theirs)
                    ours.append(run(words))
                    remove(result)
                    theirs_runs.append(quietly([python, "-c", script, source, theirs]))
                best, best_other = (min(runs, key=lambda each: each.seconds) for runs in (ours, theirs_runs))
                section.row(
                    {
                        "kind": f"{claim.name}; {tool}",
                        "reshard, s": round(best.seconds, 2),
                        "torch, s": round(best_other.seconds, 2),
                        "CPU, s": round(best.cpu, 2),
                        "torch's CPU, s": round(best_other.cpu, 2),
                        "memory, MiB": mib(best.anonymous),
                        "torch's memory, MiB": mib(best_other.anonymous),
                    }
                )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["RESHARD_TORCH_PYTHON"] = sys.argv[1]
    measure()
