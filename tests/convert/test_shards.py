"""--shard: every target rank is in exactly one shard."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy, wrong_slices
from reshard.cli.shard import Share, launched_as
from reshard.plan.pieces import share_of
from tests.running import Argument, done, fails
from tests.small import World, tensors

FULL = tensors()
MODEL = Model(layers=4, matrices=2, rows=48, columns=32)


@given(st.dictionaries(st.integers(0, 99), st.integers(0, 1000), max_size=40), st.integers(1, 12))
def test_each_rank_is_in_exactly_one_shard_and_shards_are_balanced(sizes: dict[int, int], count: int) -> None:
    shares = [share_of(sizes, index, count) for index in range(count)]
    assert sorted(rank for share in shares for rank in share) == sorted(sizes)
    fair = sum(sizes.values()) / count
    for share in shares:
        assert sum(sizes[rank] for rank in share) <= fair + max(sizes.values(), default=0)


@pytest.mark.deep
@pytest.mark.parametrize("count", [1, 3, 12, 20])
def test_shards_in_any_order_and_repeated_give_one_manifest(count: int, tmp_path: Path) -> None:
    old, new = Scheme(data=2, model=4, sharded=True), Scheme(stages=2, data=2, model=3)
    write_checkpoint(tmp_path / "src", MODEL, old)
    write_strategy(tmp_path / "old", MODEL, old)
    write_strategy(tmp_path / "new", MODEL, new)
    options: list[Argument] = ["--src-strategy", tmp_path / "old", "--dst-strategy", tmp_path / "new"]
    done("transform-dir", tmp_path / "src", tmp_path / "whole", *options)
    order = [*range(count), *range(count)]
    random.Random(count).shuffle(order)
    for index in order:
        done("transform-dir", tmp_path / "src", tmp_path / "dst", *options, "--shard", f"{index}/{count}")
    assert wrong_slices(tmp_path / "dst", MODEL, new) == 0
    name = "reshard-manifest.json"
    assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads(done("status", tmp_path / "dst", "--json").out)["complete"]


@pytest.mark.parametrize("typed", ["1", "a/b", "2/2", "-1/2", "0/0", "1/4/5", "auto"])
def test_an_invalid_shard_is_wrong_usage(world: World, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(__import__("os").environ):
        if name.startswith(("SLURM", "OMPI", "PMI", "MV2", "JOB_", "RANK", "WORLD_SIZE", "MS_")):
            monkeypatch.delenv(name)
    world.save(FULL)
    fails(2, *world.words("--shard", typed))


ARRAY = {"SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_MAX": "10", "SLURM_ARRAY_TASK_COUNT": "4"}


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "8"}, Share(2, 4)),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "3", "SLURM_NTASKS": "9"}, Share(0, 4)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "9"}, Share(3, 9)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Share(1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Share(0, 2)),
        ({"JOB_COMPLETION_INDEX": "5", "JOB_COMPLETIONS": "6"}, Share(5, 6)),
        ({"RANK": "5", "WORLD_SIZE": "6"}, Share(5, 6)),
        ({"RANK_ID": "5", "RANK_SIZE": "6"}, Share(5, 6)),
        ({"MS_NODE_ID": "5", "MS_WORKER_NUM": "6"}, Share(5, 6)),
        ({"MS_NODE_ID": "5", "MS_WORKER_NUM": "6", "MS_ROLE": "MS_WORKER", "RANK_ID": "0"}, Share(5, 6)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "RANK_ID": "1", "RANK_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2"},
            Share(1, 2),
        ),
        # An incomplete pair has no meaning, and neither have ids that are not numbers.
        ({"RANK": "7", "PMI_RANK": "0", "PMI_SIZE": "2"}, Share(0, 2)),
        ({"WORLD_SIZE": "7", "RANK_ID": "1", "RANK_SIZE": "2"}, Share(1, 2)),
        ({"MS_NODE_ID": "node_a", "MS_WORKER_NUM": "2", "RANK": "1", "WORLD_SIZE": "2"}, Share(1, 2)),
        ({"MS_NODE_ID": "0", "MS_WORKER_NUM": "9", "MS_ROLE": "MS_SCHED", "RANK": "1", "WORLD_SIZE": "2"}, Share(1, 2)),
    ],
)
def test_shard_auto_reads_variables_of_launchers(environment: dict[str, str], share: Share) -> None:
    assert launched_as(environment) == share


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"JOB_COMPLETION_INDEX": "5"},
        {"PMI_RANK": "2", "PMI_SIZE": "2"},
        {**ARRAY, "SLURM_ARRAY_TASK_ID": "5"},
        {**ARRAY, "SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MAX": "9"},
        {"SLURM_PROCID": "x", "SLURM_NTASKS": "2"},
        {"RANK": "0"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"MS_WORKER_NUM": "2", "MS_ROLE": "MS_SCHED"},
        {"MS_NODE_ID": "node_a", "MS_WORKER_NUM": "2"},
    ],
)
def test_invalid_variables_of_launchers_are_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"auto|no shard|evenly"):
        launched_as(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "RANK_ID": "1", "RANK_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"MS_NODE_ID": "0", "MS_WORKER_NUM": "2", **ARRAY, "SLURM_ARRAY_TASK_ID": "8"},
    ],
)
def test_contradictory_variables_are_named(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"auto finds .* but .*; pass --shard I/N") as raised:
        launched_as(environment)
    for name in ("RANK", "WORLD_SIZE", "RANK_ID", "SLURM_PROCID", "MS_NODE_ID", "SLURM_ARRAY_TASK_ID"):
        assert (name in environment) <= (name in str(raised.value))


def test_processes_of_torchrun_share_the_work(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert len(world.convert("--shard", "auto", "--json").json["ranks"]) == 1
    assert done("status", world.dst, "--json").json["complete"]
