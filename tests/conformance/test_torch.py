"""PyTorch itself saves and loads distributed checkpoints, on gloo.

`make conformance-transformers` runs these tests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance import oracles
from tests.corpus_mcore import mcore_case
from tests.running import Argument, done, fails
from tests.trees import read_checkpoint, scalar, write_checkpoint

pytestmark = pytest.mark.filterwarnings("default")

Mesh = tuple[int, int, int]
"""Replicas, ranks that FSDP2 shards over, ranks of tensor parallelism."""

#: One rank; FSDP2 over odd numbers of ranks; with tensor parallelism; with replicas; with both.
MESHES: list[Mesh] = [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)]
OTHER_MESHES: list[Mesh] = [(1, 3, 1), (1, 2, 2)]
#: Prefixes of an optimizer's state elsewhere, and keys of it in torch.
STATES = {"adam_m.": "exp_avg.", "adam_v.": "exp_avg_sq."}


def saved_model(directory: Path, tied: bool = False) -> Path:
    config = {"tie_word_embeddings": tied, "num_hidden_layers": 2}
    job = {"do": "save", "directory": str(directory), "dtype": "float32", "max_shard_size": "20KB", "seed": 7}
    oracles.done(oracles.transformers([{**job, "family": "qwen3", "config": config}]))
    return directory


def job(task: str, model: Path, directory: Path, form: str, mesh: Mesh, optimizer: bool = False) -> dict[str, Any]:
    places = {"model": str(model), "directory": str(directory), "form": form}
    return {"do": task, **places, "mesh": mesh, "optimizer": optimizer}


def hashes(directory: Path) -> dict[str, str]:
    """Of the bytes of every tensor in the files of a directory."""
    return {
        name: hashlib.sha256(value.array.tobytes()).hexdigest()
        for path in directory.glob("*.safetensors")
        for name, value in read_checkpoint(path).items()
    }


def weights_of(trained: Mapping[str, str]) -> dict[str, str]:
    states = ("exp_avg.", "exp_avg_sq.", "step.")
    return {name: digest for name, digest in trained.items() if not name.startswith(states) and name != "logits"}


@pytest.mark.parametrize(
    ("form", "tied", "meshes"),
    [
        ("dcp", False, MESHES),
        ("dcp", True, MESHES[2:4]),
        ("hf-sharded", False, MESHES[2:5]),
        ("hf-sharded", True, MESHES[5:]),
        ("verl", False, MESHES),
        ("verl", True, MESHES[2:4]),
    ],
    ids=["dcp", "dcp-tied", "hf-sharded", "hf-sharded-tied", "verl", "verl-tied"],
)
def test_a_checkpoint_of_torch_becomes_a_model_of_transformers(
    form: str, tied: bool, meshes: Sequence[Mesh], tmp_path: Path
) -> None:
    model = saved_model(tmp_path / "model", tied)
    jobs = [job("train", model, tmp_path / f"{number}", form, mesh) for number, mesh in enumerate(meshes)]
    loads = []
    answers = oracles.done(oracles.torch_checkpoints(jobs))
    for number, trained in enumerate(answers):
        out = tmp_path / f"out{number}"
        words: list[Argument] = ["convert", tmp_path / f"{number}", out, "--to", "huggingface", "--verify"]
        if form == "hf-sharded" and tied:
            # Every name begins with "model.", and nothing shows that a trainer has not put it there.
            fails(3, *words, texts=["--rename '*=*'"])
            words += ["--rename", "*=*"]
        done(*words)
        assert hashes(out) == weights_of(trained)
        (out / "config.json").write_text((model / "config.json").read_text())
        loads.append({"do": "load", "directory": str(out)})
        if form == "dcp":
            unified = tmp_path / f"unified{number}"
            done("convert", tmp_path / f"{number}", unified, "--to", "unified", "--verify")
            digests = hashes(unified)
            moments = [name for name in digests if name.startswith(tuple(STATES))]
            assert {name[:7] for name in moments} == set(STATES)
            for name in moments:
                assert digests.pop(name) == trained[STATES[name[:7]] + name[7:]]
            assert digests == weights_of(trained)
    for loaded, trained in zip(oracles.done(oracles.transformers(loads)), answers):
        assert (loaded["missing"], loaded["unknown"]) == ([], [])
        assert loaded["logits"]["sha256"] == trained["logits"]


@pytest.mark.parametrize("form", ["dcp", "hf-sharded"])
def test_torch_loads_written_files_on_any_mesh(form: str, tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model")
    done("convert", model, tmp_path / "whole", "--to", "huggingface")
    cuts: list[list[Argument]] = [["--shards", 1], ["--shards", 3], ["--dst-strategy", "none"]]
    jobs = []
    for number, cut in enumerate(cuts):
        done("convert", model, tmp_path / f"{number}", "--to", form, *cut, "--verify")
        jobs += [job("start", model, tmp_path / f"{number}", form, mesh) for mesh in OTHER_MESHES]
    (loaded,) = oracles.done(oracles.transformers([{"do": "load", "directory": str(model)}]))
    for started in oracles.done(oracles.torch_checkpoints(jobs)):
        assert weights_of(started) == hashes(tmp_path / "whole")
        assert started["logits"] == loaded["logits"]["sha256"]


def test_torch_resumes_from_a_converted_checkpoint(tmp_path: Path) -> None:
    """Weights, optimizer state and the objects of the optimizer go through every form that holds them."""
    model = saved_model(tmp_path / "model")
    (trained,) = oracles.done(oracles.torch_checkpoints([job("train", model, tmp_path / "0", "dcp", (2, 2, 2))]))
    jobs = []
    for form in ("dcp", "hf-sharded", "hyper-parallel"):
        between, back = tmp_path / form, tmp_path / f"from-{form}"
        done("convert", tmp_path / "0", between, "--to", form, "--shards", 3, "--verify")
        done("convert", between, back, "--to", "dcp", "--shards", 2, "--verify")
        jobs += [job("start", model, back, "dcp", mesh, form != "hf-sharded") for mesh in OTHER_MESHES]
    weights = weights_of(trained)
    for request, started in zip(jobs, oracles.done(oracles.torch_checkpoints(jobs))):
        # safetensors cannot contain objects such as a learning rate, which torch requires to load an optimizer.
        assert started == (trained if request["optimizer"] else {**weights, "logits": trained["logits"]})


@pytest.mark.parametrize("source", ["megatron", "mindformers"])
def test_adamw_of_torch_goes_on_from_other_trainers(source: str, tmp_path: Path) -> None:
    """FSDP2 on two ranks has to find all of the state, and its next step is that of plain AdamW, bit for bit."""
    case = mcore_case("td_dense_plain")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(case.expected["config"]))
    state: list[Argument] = ["--names", "llama", "--optimizer", "keep", "--verify"]
    saved, step, full = case.root, case.expected["optimizer"]["step"], tmp_path / "full"
    done("convert", case.root, full, "--to", "huggingface", *state)
    if source == "mindformers":
        saved, step, strategy = tmp_path / "ranks", 1000, tmp_path / "strategy.json"
        cut: list[Argument] = ["--sizes", "dp=2,mp=2,pp=2", "--set", "vocab_emb_dp=false"]
        done("strategy", "make", "llama", strategy, "--shapes", case.root, "--names", "llama", *cut)
        done("convert", case.root, saved, "--dst-strategy", strategy, *state)
        for path in [full / "model.safetensors", *saved.glob("rank_*/*.safetensors")]:
            files = read_checkpoint(path)
            write_checkpoint(path, {**files, "global_step": scalar(step, shape=(1,))}, metadata={"format": "ms"})
        state += ["--config", tmp_path / "model", "--src-strategy", strategy]
    done("convert", saved, tmp_path / "dcp", "--to", "dcp", "--shards", 3, "--cast", "Float32", *state)
    resume = job("resume", tmp_path / "model", tmp_path / "dcp", "dcp", (1, 2, 1))
    alone = {"do": "alone", "tensors": str(full / "model.safetensors"), "mesh": (1, 1, 1)}
    resumed, expected = oracles.done(oracles.torch_checkpoints([resume, alone]))
    weights = weights_of(expected)
    assert resumed == expected and len(expected) == 4 * len(weights) == 84
    steps = {digest for name, digest in expected.items() if name.startswith("step.")}
    assert steps == {hashlib.sha256(np.float32(step + 1).tobytes()).hexdigest()}


DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "bool")
#: Shapes, and the dimension that each axis of a mesh of two by two ranks shards.
CUTS: list[tuple[Sequence[int], Sequence[int]]] = [
    ((8, 6), (0, 1)),
    ((7, 5), (0, 0)),
    ((5, 3), (1, -1)),
    ((3, 4, 5), (2, 1)),
    ((1, 4), (0, -1)),
    ((6,), (-1, -1)),
    ((4, 2), ()),
    ((), ()),
]


def tensors_of(dtypes: Sequence[str]) -> dict[str, Any]:
    """A tensor for every type and cut, three-dimensional experts and ranks without rows among them."""
    return {
        f"{dtype}.{number}": (dtype, shape, (-1, *axes) if axes else ())
        for dtype in dtypes
        for number, (shape, axes) in enumerate(CUTS)
    }


def rows_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors, cut over the ranks of another mesh by their rows."""
    return {name: (dtype, shape, (-1, 0, -1) if shape else ()) for name, (dtype, shape, _) in tensors.items()}


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 2)], ids=["4", "8"])
@pytest.mark.parametrize("form", ["dcp", "hf-sharded"])
def test_tensors_of_every_dtype_and_cut_load_on_another_mesh(form: str, mesh: Mesh, tmp_path: Path) -> None:
    # torch's reader of sharded safetensors reads unknown dtypes, such as complex ones, as float32.
    dtypes = (*DTYPES, *INTEGERS) if form == "dcp" else DTYPES[:4]
    tensors = tensors_of(dtypes)
    places = {"form": form, "tensors": tensors, "mesh": mesh}
    (saved,) = oracles.done(oracles.torch_checkpoints([{"do": "save", "directory": str(tmp_path / "0"), **places}]))
    jobs: list[dict[str, Any]] = []
    for cut in (["--shards", "3"], ["--dst-strategy", "same"]):
        out = tmp_path / f"out{len(jobs)}"
        done("convert", tmp_path / "0", out, "--to", form, *cut, "--verify")
        for changes in ({"mesh": mesh}, {"mesh": (1, 3, 1), "tensors": rows_of(tensors)}):
            jobs.append({"do": "load", "directory": str(out), **places, **changes})
    for loaded in oracles.done(oracles.torch_checkpoints(jobs)):
        assert loaded == saved
    if form == "dcp":
        done("convert", tmp_path / "0", tmp_path / "hf", "--to", "hf-sharded", "--shards", 2, "--exclude", "complex*")
        done("convert", tmp_path / "hf", tmp_path / "back", "--to", "unified", "--verify")
        assert hashes(tmp_path / "back") == {name: saved[name] for name in saved if not name.startswith("complex")}


#: Of rank files: replicas, uneven parts, a rank without rows, parts of parts, plain tensors, and a single value.
RANK_TENSORS: dict[str, Any] = {
    "w.rows": ("float32", (7, 3), (-1, 0, -1)),
    "w.both": ("bfloat16", (7, 5), (-1, 0, 1)),
    "w.nested": ("float16", (6, 2), (-1, 0, 0)),
    "w.columns": ("float64", (2, 5), (-1, -1, 1)),
    "w.whole": ("float32", (3,), (-1, -1, -1)),
    "w.few": ("float8_e4m3fn", (1, 4), (-1, 0, -1)),
    "w.none": ("float32", (0, 3), (-1, 0, -1)),
    "w.plain": ("int64", (3,), ()),
    "scale": ("float32", (), ()),
}


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 2), (1, 3, 2)], ids=str)
def test_rank_files_of_every_cut_are_put_together(mesh: Mesh, tmp_path: Path) -> None:
    """Parts of parallel layers lie on a part of the mesh, or are strided."""
    tensors = {**RANK_TENSORS, **tensors_of((*DTYPES, *INTEGERS))}
    job = {"do": "ranks", "form": "verl", "directory": str(tmp_path / "0"), "tensors": tensors, "mesh": mesh}
    (saved,) = oracles.done(oracles.torch_checkpoints([job]))
    unified = [name for name in saved if not name.startswith("complex")]
    done("convert", tmp_path / "0", tmp_path / "whole", "--to", "unified", "--exclude", "complex*", "--verify")
    assert hashes(tmp_path / "whole") == {name: saved[name] for name in unified}
    done("convert", tmp_path / "0", tmp_path / "dcp", "--to", "dcp", "--shards", 3, "--rename", "*=*", "--verify")
    places = {"form": "dcp", "directory": str(tmp_path / "dcp"), "mesh": (1, 3, 1), "tensors": rows_of(tensors)}
    (loaded,) = oracles.done(oracles.torch_checkpoints([{"do": "load", **places}]))
    assert loaded == {name: saved[name] for name in tensors}
