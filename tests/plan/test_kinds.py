"""Weights and optimizer state counted by plan and summary: as `inspect` counts them in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.corpus import FIXTURES
from tests.running import Argument, done, warns
from tests.small import World
from tests.trees import cut_ranks, layout, scalar, single, text, value, write_tree

DEMO = FIXTURES / "demo"
NAMES = ["w", "adam_m.w", "adam_v.w", "accu_grads.w", "b"]
VALUES = {"global_step": scalar(7), "note": text("text")}


@pytest.fixture
def trained(tmp_path: Path) -> World:
    rows, whole = layout([2, 2], [0, -1]), layout([2], [-1, 0])
    world = World(tmp_path, single(dict.fromkeys(NAMES, rows)), single(dict.fromkeys(NAMES, whole)))
    write_tree(world.src, cut_ranks(world.source, {name: value(name, (8, 4)) for name in NAMES}, VALUES))
    return world


def held(tree: Path) -> Any:
    """Tensors and bytes by kind in the newest files of a tree."""
    return done("inspect", tree, "--json").json["steps"][0]["contents"]["kinds"]


def test_the_summary_counts_parameters_by_kind(trained: World) -> None:
    planned = trained.convert("-n", "--json").json["kinds"]
    summary = trained.convert("--json")
    assert planned == summary.json["kinds"] == held(trained.dst)
    assert planned["optimizer state"] == {"tensors": 2, "bytes": 2 * 8 * 4 * 4}
    warns(
        summary, "weights 2 (256 B), optimizer state 2 (256 B), accumulated gradients 1 (128 B), other values 2 (40 B)"
    )
    # What was written before is in the files, too.
    assert trained.convert("--json").json["kinds"] == planned


@pytest.mark.parametrize("options", [["--exclude", "adam_*"], ["--include", "w"], ["--format", "safetensors"]])
def test_excluded_parameters_are_in_no_kind(trained: World, options: list[str]) -> None:
    kinds = trained.convert(*options, "--json").json["kinds"]
    assert kinds == held(trained.dst)
    assert ("optimizer state" in kinds) == (options == ["--format", "safetensors"])


def test_the_summary_of_some_ranks_counts_their_parameters(trained: World) -> None:
    whole = trained.convert("-n", "--json").json["kinds"]
    parts = [trained.by_rank(rank, "--json").json["kinds"] for rank in (0, 1)]
    assert whole.keys() == parts[0].keys() == parts[1].keys()
    for kind, total in whole.items():
        assert total["bytes"] == sum(part[kind]["bytes"] for part in parts)
        assert {part[kind]["tensors"] for part in parts} == {total["tensors"]}


@pytest.mark.deep
@pytest.mark.parametrize("target", ["10_dp2mp2pp2", "10_dp1mp2pp4", "10_dp3mp8pp1", "10_dp1mp1pp1"])
def test_kinds_of_a_model_in_stages_equal_those_of_its_files(tmp_path: Path, target: str) -> None:
    words: list[Argument] = [DEMO / "src_checkpoints", tmp_path, "--src-strategy", DEMO / "src_strategy.ckpt"]
    kinds = done("transform-dir", *words, "--dst-strategy", FIXTURES / target / "strategy", "--json").json["kinds"]
    assert kinds == held(tmp_path)


def test_the_summary_of_recover_counts_parameters_by_kind(tmp_path: Path) -> None:
    replicated = layout([2, 2], [0, -1])
    world = World(tmp_path, single({"w": replicated, "adam_m.w": replicated}), single({"w": layout([1], [-1, -1])}))
    world.save({name: value(name, (8, 4)) for name in ("w", "adam_m.w")}, ranks=[0, 1, 3])
    recovered = done("recover", world.src, world.dst, "--strategy", world.old, "--json", "-v")
    assert recovered.json["kinds"] == held(world.dst)
    warns(recovered, "weights 1 (256 B), optimizer state 1 (256 B), other values 1 (16 B)")
