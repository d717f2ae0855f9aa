"""The oracles themselves: other libraries find the known contents of checkpoints.

Everything here is about checkpoints that these libraries wrote, of which it is recorded what is in them.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance import oracles
from tests.conformance.checkpoint2 import Layouts, differences, grid, load_job, slices_of, stated
from tests.corpus import CORPUS2
from tests.corpus2 import expected, full, is_state, iteration, metadata, needs_corpus2
from tests.trees import Checkpoint, Value, read_checkpoint, same_checkpoints, same_ranks, write_checkpoint

pytestmark = [needs_corpus2, pytest.mark.filterwarnings("default")]

#: What 2.1.0 loads of what it and earlier versions saved; with the optimizer.
CASES = [
    "a01_dp2mp2",
    "a02_dp2mp2_dedup",
    "a03_dp2mp4_opt",
    "a05_pp2dp2mp2",
    "a06_pp2dp2mp2_tied_dedup",
    "a07_interleaved",
    "a08_dtypes",
    "a09_model_only",
    "a10_mf180_dp2mp2",
    "a13_mf200_pp2",
    "a18_pp2_opt",
    "p01_fsdp2tp2ep2pp2",
    "p03_mf200_fsdp2tp2",
]
#: The same directories saved again here. Case, version, redundancy removed.
SAVED = [
    ("a01_dp2mp2", "2.1.0", False),
    ("a02_dp2mp2_dedup", "2.1.0", True),
    ("a03_dp2mp4_opt", "2.1.0", False),
    ("a06_pp2dp2mp2_tied_dedup", "2.1.0", True),
    ("a18_pp2_opt", "2.1.0", False),
    ("a10_mf180_dp2mp2", "1.8.0", False),
    ("a11_mf180_dp2mp2_dedup", "1.8.0", True),
]
TREES = {"s_dp2mp2": "u01_dp2mp2", "s_pp2_opt": "u05_pp2_opt"}


def listed(case: str) -> Checkpoint:
    """The parameters of a case that metadata.json lists and some file has."""
    reference = full(case)
    names = metadata(case)["state_dict_metadata"].keys() - set(expected(case)["listed_without_data"])
    return {name: reference[name] for name in sorted(names)}


def layouts_of(case: str, kind: str) -> Layouts:
    checkpoint = listed(case)
    if kind == "other":
        return grid(checkpoint, 2, 3 if case.startswith("a07") else 4)
    layouts = stated(iteration(case))
    return {name: layouts[name] for name in checkpoint}


@cache
def loaded(version: str, cases: tuple[str, ...], states: bool) -> dict[tuple[str, str], Any]:
    """What one version makes of the cases, in the layouts they were saved in and in others."""
    requests = [(case, kind) for case in cases for kind in ("same", "other")]
    jobs = [
        load_job(
            CORPUS2 / case / "checkpoint",
            listed(case),
            {
                name: layout_record
                for name, layout_record in layouts_of(case, kind).items()
                if states or not is_state(name)
            },
            filter(is_state, listed(case)) if states else (),
        )
        for case, kind in requests
    ]
    return dict(zip(requests, oracles.mindformers(version, jobs)))


@pytest.mark.parametrize("kind", ["same", "other"])
@pytest.mark.parametrize("case", CASES)
def test_mindformers_loads_its_own_checkpoints(case: str, kind: str) -> None:
    (actual,) = oracles.done([loaded("2.1.0", tuple(CASES), True)[case, kind]])
    step = 10 if any(map(is_state, listed(case))) else -1
    assert not differences(actual, slices_of(listed(case), layouts_of(case, kind), step))


@pytest.mark.parametrize("version", oracles.MINDFORMERS[:-1])
@pytest.mark.parametrize("case", ["a01_dp2mp2", "a05_pp2dp2mp2", "a10_mf180_dp2mp2"])
def test_older_mindformers_loads_its_own_weights(case: str, version: str) -> None:
    cases = ("a01_dp2mp2", "a05_pp2dp2mp2", "a10_mf180_dp2mp2")
    for kind in ("same", "other"):
        layouts = {name: layout_record for name, layout_record in layouts_of(case, kind).items() if not is_state(name)}
        (actual,) = oracles.done([loaded(version, cases, False)[case, kind]])
        assert not differences(actual, slices_of(listed(case), layouts))


def test_mindformers_refuses_known_defects() -> None:
    """With the optimizer, 2.1.0's common.json is too new for 1.8.0; and 2.1.0 does not find copies without groups."""
    answer = loaded("1.8.0", ("a01_dp2mp2",), True)["a01_dp2mp2", "same"]
    assert "consumed_samples" in answer["error"]
    answer = loaded("2.1.0", ("a11_mf180_dp2mp2_dedup",), True)["a11_mf180_dp2mp2_dedup", "same"]
    assert "Cannot find storage file" in answer["error"]


def test_the_oracles_detect_wrong_bytes(tmp_path: Path) -> None:
    """An oracle that finds everything right is none."""
    shutil.copytree(CORPUS2 / "a02_dp2mp2_dedup" / "checkpoint", tmp_path / "ckpt")
    (file,) = tmp_path.glob("ckpt/iteration_00000010/llm-model-0000001-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    checkpoint, layouts = listed("a02_dp2mp2_dedup"), layouts_of("a02_dp2mp2_dedup", "same")
    states = list(filter(is_state, checkpoint))
    (actual,) = oracles.done(oracles.mindformers("2.1.0", [load_job(tmp_path / "ckpt", checkpoint, layouts, states)]))
    wrong = differences(actual, slices_of(checkpoint, layouts, 10))
    assert wrong
    # The last tensor of the file is one slice, which one or two ranks hold.
    assert len({line.split(": ")[1] for line in wrong}) == 1


@cache
def saved(version: str, root: Path) -> None:
    """Save again, with one version, every case that it once saved."""
    cases = [(case, removed) for case, by, removed in SAVED if by == version]
    jobs = []
    for case, removed in cases:
        root.joinpath(case).mkdir(exist_ok=True)
        layouts = stated(iteration(case))
        jobs.append(
            {
                "do": "save",
                "root": str(root / case / "checkpoint"),
                "full": str(write_checkpoint(root / case / "full.safetensors", full(case))),
                "world": 1 + max(rank for layout_record in layouts.values() for rank in layout_record["rank_list"]),
                "layouts": layouts,
                "optimizer": list(filter(is_state, full(case))),
                "iteration": 10,
                "prefix": "llm",
                "remove_redundancy": removed,
            }
        )
    oracles.done(oracles.mindformers(version, jobs))


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize(("case", "version", "removed"), SAVED)
def test_mindformers_saves_its_own_checkpoint_unchanged(case: str, version: str, removed: bool, again: Path) -> None:
    """Equal byte for byte to the recorded directory, which real compilations and several processes wrote."""
    saved(version, again)
    created, recorded = again / case / "checkpoint", CORPUS2 / case / "checkpoint"
    names = sorted(str(path.relative_to(recorded)) for path in recorded.rglob("*") if path.is_file())
    assert sorted(str(path.relative_to(created)) for path in created.rglob("*") if path.is_file()) == names
    for name in names:
        if name.endswith("metadata.json"):
            # The order of parameters is the compiler's.
            assert json.loads((created / name).read_text()) == json.loads((recorded / name).read_text())
        else:
            assert (created / name).read_bytes() == (recorded / name).read_bytes(), name


def read_parts(directory: Path) -> dict[str, Value]:
    """All parts of a unified directory, which must locate each parameter."""
    parts = {path.name: read_checkpoint(path) for path in directory.glob("part*.safetensors")}
    where = json.loads((directory / "param_name_map.json").read_text())["weight_map"]
    assert where == {name: file for file, tensors in parts.items() for name in tensors}
    return {name: value for tensors in parts.values() for name, value in tensors.items()}


@pytest.mark.parametrize("version", oracles.MINDSPORE)
@pytest.mark.parametrize("tree", TREES)
def test_mindspore_unifies_and_distributes_known_checkpoints(tree: str, version: str, tmp_path: Path) -> None:
    """`unified_safetensors` gives the recorded files, of which `load_distributed_checkpoint` makes the tree again."""
    case = f"{TREES[tree]}_ms{version.replace('.', '')[:3]}"
    strategy = tmp_path / "strategy.ckpt"
    merge = {"do": "merge", "directory": str(CORPUS2 / tree / "strategy"), "file": str(strategy)}
    unify = {
        "do": "unify",
        "src": str(CORPUS2 / tree / "checkpoint"),
        "strategy": str(strategy),
        "dst": str(tmp_path / "unified"),
    }
    ranks = range(expected(tree)["ranks"])
    distribute = {
        "do": "distribute",
        "unified": str(CORPUS2 / case / "unified"),
        "strategy": str(strategy),
        "dst": str(tmp_path / "ranks"),
        "ranks": list(ranks),
    }
    oracles.done(oracles.mindspore(version, [merge, unify, distribute]))
    same_checkpoints(read_parts(tmp_path / "unified"), full(case))
    same_checkpoints(
        read_checkpoint(tmp_path / "unified" / "hyper_param.safetensors"),
        read_checkpoint(CORPUS2 / case / "unified" / "hyper_param.safetensors"),
    )
    # Accumulated gradients are not unified: rank 0's go to every rank.
    same_ranks(
        {rank: weights(tmp_path / "ranks" / f"rank_{rank}") for rank in ranks},
        {rank: weights(CORPUS2 / tree / "checkpoint" / f"rank_{rank}") for rank in ranks},
    )


def weights(directory: Path) -> dict[str, Value]:
    """The one file of a rank, less its accumulated gradients."""
    (path,) = directory.iterdir()
    return {name: value for name, value in read_checkpoint(path).items() if not name.startswith("accu_grads.")}


def test_the_oracles_preserve_values_outside_the_corpus(tmp_path: Path) -> None:
    """Subnormal numbers, infinities and every sign and exponent of bfloat16 come out as they went in."""
    bits = (np.arange(512, dtype=np.uint32) * 128).astype("<u2").reshape(16, 32)
    checkpoint = {"w": Value("BFloat16", bits), "v": Value("Float32", np.arange(64, dtype="<u4") << 26)}
    layouts = grid(checkpoint, 2, 2)
    job = {
        "do": "save",
        "root": str(tmp_path / "ckpt"),
        "full": str(write_checkpoint(tmp_path / "full.safetensors", checkpoint)),
        "world": 4,
        "layouts": layouts,
        "optimizer": [],
        "iteration": 1,
        "prefix": None,
        "remove_redundancy": True,
    }
    answers = oracles.mindformers("2.1.0", [job, load_job(tmp_path / "ckpt", checkpoint, layouts)])
    assert not differences(oracles.done(answers)[1], slices_of(checkpoint, layouts))
