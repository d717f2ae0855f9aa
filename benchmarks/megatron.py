"""Megatron's torch_dist to Hugging Face against copying the result, and against torch's own loading in the same run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from benchmarks.against_mindspore import quietly
from benchmarks.measure import Run, Section, against_copy, memory_backed, mib, remove, reshard, run
from benchmarks.names import elements, qwen3, read_safetensors, write_safetensors
from benchmarks.pytorch import torch_python

PAIRS = 4
FILES = 8
LAYERS = 3
_CONFIG = {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "num_hidden_layers": LAYERS,
    "vocab_size": 8192,
    "intermediate_size": 8192,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
}

# What a converter of one's own begins with: everything into memory, under Megatron's names and packing.
_LOAD = """
import sys
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
_load_state_dict({}, storage_reader=FileSystemReader(sys.argv[1]), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
"""


def prepare(place: Path) -> list[object]:
    """Write a source; the command line that converts it into `made`."""
    whole = place / "whole"
    whole.mkdir()
    shapes = qwen3(LAYERS)
    arrays = (elements(name, 0, shape, "BF16") for name, shape in shapes.items())
    write_safetensors(whole / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()}, arrays)
    (whole / "config.json").write_text(json.dumps(_CONFIG))
    names = ["--names", "qwen3", "--quiet"]
    # Archives of torch have CRCs, which a conversion checks.
    cut = ["--shards", FILES, "--checksum", "crc32"]
    run(reshard("convert", whole, place / "src", "--to", "megatron", *cut, *names))
    return reshard("convert", place / "src", place / "made", "--to", "huggingface", *names)


def wrong(place: Path) -> int:
    """The number of wrong parameters of `made`."""
    (made,) = (place / "made").glob("*.safetensors")
    arrays = read_safetensors(made)
    expected = {name: elements(name, 0, shape, "BF16") for name, shape in qwen3(LAYERS).items()}
    return sum(name not in arrays or not np.array_equal(arrays[name], array) for name, array in expected.items()) + abs(
        len(arrays) - len(expected)
    )


def measure() -> Section:
    """Measure both."""
    section = Section("How fast is Megatron's form?")
    nbytes = sum(2 * int(np.prod(shape)) for shape in qwen3(LAYERS).values())
    section.say(
        f"`convert --names qwen3` of `torch_dist`, {nbytes / 1e9:.1f} GB in {FILES} files, with CRCs "
        f"checked and packed tensors taken apart, against `cp -r` of its own output, {PAIRS} pairs."
    )
    with memory_backed() as place:
        words = prepare(place)
        section.row({"kind": "torch_dist to Hugging Face", **against_copy(words, place / "made", PAIRS).row()})
        assert wrong(place) == 0
        remove(place / "copied", place / "pattern", place / "whole")
        python = torch_python()
        if python is None:
            section.say("torch's loading: skipped, `make conformance-transformers` makes an environment with torch.")
            return section
        ours: list[Run] = []
        theirs: list[Run] = []
        (iteration,) = (path.parent for path in (place / "src").glob("*/metadata.json"))
        for _ in range(3):
            remove(place / "made")
            ours.append(run(words))
            theirs.append(quietly([python, "-c", _LOAD, iteration]))
    best, best_other = (min(runs, key=lambda each: each.seconds) for runs in (ours, theirs))
    section.say("Against loading with torch, which writes nothing; the better of three runs.")
    for tool, each in (("reshard, converted", best), ("torch, loaded", best_other)):
        seconds, cpu = round(each.seconds, 2), round(each.cpu, 2)
        section.row({"tool": tool, "whole, s": seconds, "CPU, s": cpu, "memory, MiB": mib(each.anonymous)})
    return section


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["RESHARD_TORCH_PYTHON"] = sys.argv[1]
    measure()
