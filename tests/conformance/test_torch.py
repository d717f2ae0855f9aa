"""PyTorch itself saves and loads distributed checkpoints, on gloo.

`make conformance-transformers` runs these tests.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import oracles
from tests.running import Argument, done
from tests.trees import read_checkpoint

pytestmark = pytest.mark.filterwarnings("default")

#: Ranks, and of them for tensor parallelism.
MESHES = [(1, 1), (2, 1), (3, 1), (4, 2)]


def save(directory: Path) -> dict[str, Any]:
    config = {"tie_word_embeddings": False, "num_hidden_layers": 2}
    job = {"do": "save", "directory": str(directory), "dtype": "float32", "max_shard_size": "20KB", "seed": 7}
    return {**job, "family": "qwen3", "config": config}


def job(task: str, model: Path, directory: Path, form: str, mesh: tuple[int, int]) -> dict[str, Any]:
    at = {"model": str(model), "directory": str(directory), "form": form}
    return {"do": task, **at, "ranks": mesh[0], "tensor": mesh[1]}


def hashes(directory: Path) -> dict[str, str]:
    """Of the bytes of every tensor in the files of a directory."""
    found = {}
    for path in directory.glob("*.safetensors"):
        for name, held in read_checkpoint(path).items():
            found[name] = hashlib.sha256(held.array.tobytes()).hexdigest()
    return found


@pytest.mark.parametrize("form", ["dcp", "hf-sharded"])
def test_what_torch_trained_becomes_a_model_of_transformers(form: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    oracles.done(oracles.transformers([save(model)]))
    jobs = [job("train", model, tmp_path / f"{number}", form, mesh) for number, mesh in enumerate(MESHES)]
    for number, trained in enumerate(oracles.done(oracles.torch_checkpoints(jobs))):
        out = tmp_path / f"out{number}"
        done("convert", tmp_path / f"{number}", out, "--to", "huggingface", "--verify")
        weights = {name: digest for name, digest in trained.items() if not name.startswith(("exp_avg", "step."))}
        assert hashes(out) == weights
        (out / "config.json").write_text((model / "config.json").read_text())
        (loaded,) = oracles.done(oracles.transformers([{"do": "load", "directory": str(out)}]))
        assert (loaded["missing"], loaded["unknown"]) == ([], [])
        if form == "dcp":
            unified = tmp_path / f"unified{number}"
            done("convert", tmp_path / f"{number}", unified, "--to", "unified", "--verify")
            named = {"adam_m.": "exp_avg.", "adam_v.": "exp_avg_sq."}
            for name, digest in hashes(unified).items():
                prefix = name[:7]
                assert trained[named[prefix] + name[7:] if prefix in named else name] == digest


@pytest.mark.parametrize("form", ["dcp", "hf-sharded"])
def test_torch_starts_from_what_is_written_on_any_mesh(form: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    oracles.done(oracles.transformers([save(model)]))
    done("convert", model, tmp_path / "whole", "--to", "huggingface")
    cuts: list[list[Argument]] = [["--shards", 1], ["--shards", 3], ["--dst-strategy", "none"]]
    jobs = []
    for number, cut in enumerate(cuts):
        done("convert", model, tmp_path / f"{number}", "--to", form, *cut, "--verify")
        jobs += [job("start", model, tmp_path / f"{number}", form, mesh) for mesh in (MESHES[2], MESHES[3])]
    for found in oracles.done(oracles.torch_checkpoints(jobs)):
        assert found == hashes(tmp_path / "whole")


def test_torch_loads_what_it_trained_after_other_forms(tmp_path: Path) -> None:
    model = tmp_path / "model"
    oracles.done(oracles.transformers([save(model)]))
    (trained,) = oracles.done(oracles.torch_checkpoints([job("train", model, tmp_path / "0", "dcp", (4, 2))]))
    jobs = []
    for first, second in (("dcp", "hf-sharded"), ("hf-sharded", "dcp"), ("hyper-parallel", "dcp")):
        there, back = tmp_path / f"{first}-{second}", tmp_path / f"{second}-{first}"
        done("convert", tmp_path / "0", there, "--to", first, "--shards", 3, "--verify")
        done("convert", there, back, "--to", second, "--shards", 2, "--include", "model.*", "--verify")
        # Weights alone are what the second loader asks for; names are those of the trainer's state.
        if second == "dcp":
            jobs.append(job("start", model, back, "dcp", (3, 1)))
    for found in oracles.done(oracles.torch_checkpoints(jobs)):
        assert found == {name: trained[name] for name in found}
