"""`unified_safetensors` and `load_distributed_checkpoint` equal MindSpore's functions for the same input."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from tests.conformance import oracles, worlds
from tests.conformance.checkpoint2 import grid, load_job
from tests.conformance.test_forms import loadable, only_tensors, read_full
from tests.reference import rank_count
from tests.running import done
from tests.trees import cut_ranks, read_checkpoint, same_checkpoints, scalar, value, write_strategy, write_tree

pytestmark = pytest.mark.filterwarnings("default")

SEEDS = range(6)
COPIED = {"global_step": scalar(10, shape=(1,)), "epoch_num": scalar(1, "Int64")}
PATTERN = "rank_{rank}/net-1_10.safetensors"
#: Bytes for which a file is made, so that there are several.
SIZE = 6000
#: What some checkpoints' parameters are called so that all names are others.
RENAMED = "net."


@pytest.mark.parametrize("version", oracles.MINDSPORE)
@pytest.mark.parametrize("function", ["unified_safetensors", "load_distributed_checkpoint"])
def test_parameter_names_of_functions_equal_mindspores(function: str, version: str) -> None:
    (theirs,) = oracles.done(oracles.mindspore(version, [{"do": "signature", "function": function}]))
    parameters = inspect.signature(getattr(reshard, function)).parameters.values()
    assert [[parameter.name, repr(parameter.default)] for parameter in parameters] == theirs


@pytest.mark.parametrize("version", oracles.MINDSPORE)
def test_tensors_are_in_the_same_files_as_mindspores(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.forms.full.written_files.UNIFIED_SIZE", SIZE)
    jobs, cases = [], []
    for seed in SEEDS:
        world = counted(worlds.world(seed), version)
        source = worlds.strategy(seed, world, (4,), sharded=bool(seed % 3))
        where = tmp_path / str(seed)
        src = write_tree(where / "src", cut_ranks(source, world.checkpoint, COPIED), PATTERN)
        strategy = write_strategy(where / "old", source, world.shapes)
        job: dict[str, Any] = {"do": "unify", "src": str(src), "strategy": str(strategy), "dst": str(where / "theirs")}
        chosen = {"dropped": worlds.STATE, "renamed": RENAMED if seed % 3 == 2 else ""}
        jobs.append({**job, "size": SIZE, **(chosen if seed % 2 else {})})
        cases.append((seed, world, where, src, strategy))
    oracles.done(oracles.mindspore(version, jobs))
    parts = 0
    for seed, world, where, src, strategy in cases:
        dropped = worlds.STATE if seed % 2 else "nothing"
        reshard.unified_safetensors(str(src), str(strategy), str(where / "ours"), choice_func=choice(seed))
        renamed = RENAMED if seed % 2 and seed % 3 == 2 else ""
        preserved = {
            renamed + name: tensor for name, tensor in world.checkpoint.items() if not name.startswith(dropped)
        }
        same_checkpoints(read_full(where / "ours"), preserved, f"seed {seed}")
        same_checkpoints(read_full(where / "theirs"), preserved, f"seed {seed}")
        assert placed(where / "ours") == placed(where / "theirs"), f"seed {seed}"
        parts = max(parts, len(set(placed(where / "ours").values())))
        # Entries outside the model; MindSpore's file also contains rank 0's slices of dropped parameters.
        ours, theirs = (read_checkpoint(where / side / "hyper_param.safetensors") for side in ("ours", "theirs"))
        same_checkpoints(ours, COPIED)
        same_checkpoints({name: theirs[name] for name in COPIED}, COPIED)
    assert parts > 2


def counted(world: worlds.World, version: str) -> worlds.World:
    """A checkpoint whose bytes this version counts correctly: 2.7.0 assumes four bytes per element."""
    if version != "2.7.0":
        return world
    return worlds.World({name: value(name, tensor.array.shape) for name, tensor in world.checkpoint.items()})


def choice(seed: int) -> Callable[[str], bool | str] | None:
    """What is chosen of a checkpoint: everything, weights, or weights under other names."""
    if seed % 2 == 0:
        return None
    renamed = RENAMED if seed % 3 == 2 else ""
    return lambda name: not name.startswith(worlds.STATE) and (renamed + name if renamed else True)


def placed(directory: Path) -> dict[str, str]:
    """The file of every tensor."""
    weight_map: dict[str, str] = json.loads((directory / "param_name_map.json").read_text())["weight_map"]
    return weight_map


@pytest.mark.parametrize("version", oracles.MINDSPORE)
def test_every_rank_equals_mindspores(version: str, tmp_path: Path) -> None:
    jobs, cases = [], []
    for seed in SEEDS:
        world = worlds.world(seed)
        source = worlds.strategy(seed, world, (4,), sharded=True)
        target = worlds.strategy(seed + 500, world, (4,) * (1 + seed % 2), sharded=bool(seed % 3))
        where = tmp_path / str(seed)
        src = write_tree(where / "src", cut_ranks(source, world.checkpoint, COPIED), PATTERN)
        unified = where / "unified"
        old = write_strategy(where / "old", source, world.shapes)
        done("convert", src, unified, "--to", "unified", "--src-strategy", old, "--max-shard-size", f"{SIZE}B")
        new = str(write_strategy(where / "new", target, world.shapes))
        ranks = list(range(rank_count(target)))
        job: dict[str, Any] = {"do": "distribute", "unified": str(unified), "strategy": new, "ranks": ranks}
        jobs.append({**job, "dst": str(where / "theirs")})
        cases.append((where, unified, new, ranks))
    oracles.done(oracles.mindspore(version, jobs))
    for where, unified, new, ranks in cases:
        reshard.load_distributed_checkpoint(
            None,
            predict_strategy=new,
            format="safetensors",
            unified_safetensors_dir=str(unified),
            dst_safetensors_dir=str(where / "ours"),
        )
        for rank in ranks:
            ours, theirs = (
                read_checkpoint(where / side / f"rank_{rank}/net.safetensors") for side in ("ours", "theirs")
            )
            same_checkpoints(ours, theirs, f"{where.name}, rank {rank}")


@pytest.mark.parametrize("version", oracles.MINDSPORE)
def test_name_maps_equal_mindspores(version: str, tmp_path: Path) -> None:
    """In one file; of several MindSpore's loader wants a map of the network's names, which no writer makes."""
    world = worlds.world(1)
    source, target = (worlds.strategy(seed, world, (4,), sharded=True) for seed in (1, 2))
    src = write_tree(tmp_path / "src", cut_ranks(source, world.checkpoint), PATTERN)
    old, new = (
        str(write_strategy(tmp_path / name, strategy, world.shapes))
        for name, strategy in (("old", source), ("new", target))
    )
    unified, names = str(tmp_path / "unified"), {name: RENAMED + name for name in world.checkpoint}
    reshard.unified_safetensors(str(src), old, unified, choice_func=lambda name: RENAMED + name)
    ranks = list(range(4))
    job = {"do": "distribute", "unified": unified, "strategy": new, "ranks": ranks, "names": names}
    oracles.done(oracles.mindspore(version, [{**job, "dst": str(tmp_path / "theirs")}]))
    reshard.load_distributed_checkpoint(
        None,
        predict_strategy=new,
        format="safetensors",
        unified_safetensors_dir=unified,
        dst_safetensors_dir=str(tmp_path / "ours"),
        name_map=names,
    )
    for rank, expected in cut_ranks(target, world.checkpoint).items():
        ours, theirs = (
            read_checkpoint(tmp_path / side / f"rank_{rank}/net.safetensors") for side in ("ours", "theirs")
        )
        same_checkpoints(ours, expected, f"rank {rank}")
        same_checkpoints(theirs, expected, f"rank {rank}")


@pytest.mark.parametrize("version", oracles.MINDSPORE)
def test_mindspore_refuses_an_unfinished_directory(version: str, tmp_path: Path) -> None:
    """However many of its files are there; without the file that it cannot read it takes the first one for all."""
    world = worlds.world(0)
    source = worlds.strategy(0, world, (4,))
    src = write_tree(tmp_path / "src", cut_ranks(source, world.checkpoint, COPIED), PATTERN)
    strategy = write_strategy(tmp_path / "old", source, world.shapes)
    words = ["--to", "unified", "--src-strategy", str(strategy), "--max-shard-size", f"{SIZE}B"]
    states = []
    for count in (1, 2, 3):
        where = tmp_path / f"{count}"
        done("convert", src, where, *words, "--ranks", f"0-{count - 1}", "--quiet")
        assert not (where / "param_name_map.json").exists()
        states.append(where)
    job = {"do": "distribute", "strategy": str(strategy), "ranks": [0]}
    jobs = [{**job, "unified": str(where), "dst": str(tmp_path / f"out{where.name}")} for where in states]
    assert all("error" in answer for answer in oracles.mindspore(version, jobs))
    (states[0] / "reshard-unfinished.safetensors").unlink()
    oracles.done(oracles.mindspore(version, jobs[:1]))
    lacking = read_checkpoint(tmp_path / "out1/rank_0/net.safetensors")
    assert only_tensors(lacking, world).keys() < world.checkpoint.keys()


@pytest.mark.parametrize("version", oracles.MINDFORMERS)
@pytest.mark.parametrize("form", ["unified", "huggingface"])
def test_mindformers_refuses_an_unfinished_directory(form: str, version: str, tmp_path: Path) -> None:
    world = worlds.world(0)
    source = worlds.strategy(0, world, (4,))
    src = write_tree(tmp_path / "src", cut_ranks(source, world.checkpoint, COPIED), PATTERN)
    strategy = write_strategy(tmp_path / "old", source, world.shapes)
    words = ["--to", form, "--src-strategy", str(strategy), "--max-shard-size", f"{SIZE}B", "--quiet"]
    done("convert", src, tmp_path / "dst", *words, "--ranks", "0-1")
    contents = loadable(version, world.checkpoint)
    weights = {name: tensor for name, tensor in contents.items() if name not in world.states}
    job = load_job(tmp_path / "dst", weights, grid(weights, 1, 1))
    (answer,) = oracles.mindformers(version, [job])
    assert "error" in answer
    done("convert", src, tmp_path / "dst", *words)
    oracles.done(oracles.mindformers(version, [job]))
