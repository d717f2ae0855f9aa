"""Forms of checkpoints are exchanged between `reshard` and their own libraries.

What `reshard` writes, MindFormers and MindSpore load, every value of every rank as it must be; what they write,
`reshard` reads. Checkpoints are those of the corpus and random ones, see `worlds`. Each test asks a library once for
all of its checkpoints, as starting it takes most of the time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance import oracles, worlds
from tests.conformance.checkpoint2 import Layouts, differences, grid, load_job, slices_of, stated, world_of
from tests.corpus import CORPUS2
from tests.corpus2 import full, is_state
from tests.reference import Strategy, rank_count
from tests.running import Argument, done
from tests.trees import (
    Checkpoint,
    Value,
    cut_ranks,
    layout,
    read_checkpoint,
    read_tree,
    same_checkpoints,
    same_ranks,
    scalar,
    single,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

pytestmark = pytest.mark.filterwarnings("default")

STEP = 10
SEEDS = range(6)

#: Cases of the corpus, and the tree whose strategy is their target's; `same` for the layouts that they have.
CONVERTED = [
    ("s_dp2mp2", "s_pp2_opt"),
    ("s_pp2_opt", "s_dp2mp2"),
    ("s_dtypes", "s_dtypes"),
    ("u02_dp2mp2_parts_ms210", "s_pp2_opt"),
    ("a02_dp2mp2_dedup", "s_pp2_opt"),
    ("a11_mf180_dp2mp2_dedup", "same"),
    ("a18_pp2_opt", "same"),
    ("a19_pp2_fused_mislisted", "same"),
    ("a03_dp2mp4_opt", "same"),
    ("a06_pp2dp2mp2_tied_dedup", "same"),
    ("a07_interleaved", "same"),
    ("a08_dtypes", "same"),
    ("a13_mf200_pp2", "same"),
    ("p01_fsdp2tp2ep2pp2", "same"),
    ("p03_mf200_fsdp2tp2", "same"),
    ("a14_single", "s_pp2_opt"),
]

#: Devices of the stages of random targets.
STAGES = [(6,), (8,), (4, 4), (2, 6), (6, 3), (1,)]


class Made(NamedTuple):
    """A directory that `reshard` wrote, and its expected contents; of Checkpoint 2.0 the root."""

    name: str
    root: Path
    checkpoint: Checkpoint
    states: Sequence[str]


def convert(src: Path, dst: Path, to: str, *options: Argument) -> Path:
    done("convert", src, dst, "--to", to, *options, "--quiet")
    return dst


# Checkpoint 2.0 that reshard writes.


def listed(root: Path) -> list[str]:
    """The parameters that the newest iteration of a root lists."""
    entries = json.loads((newest(root) / "metadata.json").read_text())["state_dict_metadata"]
    return sorted(entries)


def newest(root: Path) -> Path:
    (tracker,) = root.glob("latest_checkpointed_iteration.txt")
    return root / f"iteration_{int(tracker.read_text()):08d}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    """Checkpoint 2.0 directories, made of every form of source."""
    place = tmp_path_factory.mktemp("checkpoint2")
    return [*_of_the_corpus(place), *_of_random_trees(place)]


def _of_the_corpus(place: Path) -> list[Made]:
    built = []
    for case, target in CONVERTED if CORPUS2.is_dir() else ():
        src = CORPUS2 / case / ("unified" if case.startswith("u") else "checkpoint")
        old: tuple[Argument, ...] = ("--src-strategy", CORPUS2 / case / "strategy") if case.startswith("s_") else ()
        if case == "s_dtypes":
            # A vector that no strategy lists, and that differs between ranks.
            old = (*old, "--exclude", "extra_cell.q")
        new = target if target == "same" else CORPUS2 / target / "strategy"
        root = convert(src, place / f"{case}_to_{target}", "checkpoint2", *old, "--dst-strategy", new)
        checkpoint = {name: full(case)[name] for name in listed(root)}
        built.append(Made(f"{case} to {target}", root, checkpoint, list(filter(is_state, checkpoint))))
    return built


def _of_random_trees(place: Path) -> list[Made]:
    built = []
    for seed in SEEDS:
        world = worlds.world(seed)
        source = worlds.strategy(seed, world, (4,) * (1 + seed % 2), sharded=True)
        target = worlds.strategy(seed + 100, world, STAGES[seed], sharded=True)
        where = place / f"random{seed}"
        src = _tree(where, world, source)
        dst_strategy = write_strategy(where / "new", target, world.shapes)
        root = convert(
            src, where / "dst", "checkpoint2", "--src-strategy", where / "old.ckpt", "--dst-strategy", dst_strategy
        )
        built.append(Made(f"random {seed}", root, world.checkpoint, world.states))
    return built


def _tree(where: Path, world: worlds.World, strategy: Strategy) -> Path:
    """A rank tree of a random checkpoint, of step 10, and its strategy `old.ckpt`."""
    copied = {
        "global_step": scalar(STEP, shape=(1,)),
        "epoch_num": scalar(1, "Int64"),
        "step_num": scalar(STEP, "Int64"),
    }
    write_strategy(where / "old", strategy, world.shapes)
    return write_tree(where / "src", cut_ranks(strategy, world.checkpoint, copied))


def test_written_checkpoints_contain_every_parameter(written: list[Made]) -> None:
    for built in written:
        expected = set(built.checkpoint)
        assert set(listed(built.root)) == expected, built.name
        assert built.states, built.name


def loadable(version: str, checkpoint: Checkpoint) -> dict[str, Value]:
    """What this version can load without an Ascend: 1.8.0 needs one to put slices of bfloat16 together."""
    without = ("BFloat16",) if version == "1.8.0" else ()
    return {name: tensor for name, tensor in checkpoint.items() if tensor.dtype not in without}


def understood(version: str, layouts: Layouts) -> bool:
    """Whether this version can have these layouts: 1.8.0 takes ranks modulo the size of their stage."""
    groups = [layout["rank_list"] for layout in layouts.values()]
    return version != "1.8.0" or all(ranks[0] % len(ranks) == 0 for ranks in groups)


@pytest.mark.parametrize("version", oracles.MINDFORMERS)
def test_mindformers_loads_checkpoint2(version: str, written: list[Made]) -> None:
    """Weights and optimizer, into the layouts that were written, into others, and into one device."""
    requests = []
    for built in written:
        checkpoint = loadable(version, built.checkpoint)
        as_written = {name: layout for name, layout in stated(newest(built.root)).items() if name in checkpoint}
        for layouts in (as_written, grid(checkpoint, 2, 4), grid(checkpoint, 1, 1)):
            if understood(version, layouts):
                requests.append((built, checkpoint, layouts))
    jobs = [load_job(built.root, checkpoint, layouts, built.states) for built, checkpoint, layouts in requests]
    wrong = []
    for (built, checkpoint, layouts), answer in zip(requests, oracles.mindformers(version, jobs)):
        where = f"{built.name} into {world_of(layouts)} ranks"
        if "error" in answer:
            wrong.append(f"{where}: {answer['error'][:300]}")
        else:
            outcome = differences(answer["done"], slices_of(checkpoint, layouts, STEP))
            wrong += [f"{where}: {difference}" for difference in outcome]
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("version", oracles.MINDFORMERS)
def test_mindformers_loads_weights_without_their_optimizer(version: str, written: list[Made]) -> None:
    requests = []
    for built in written:
        checkpoint = loadable(version, built.checkpoint)
        only = {name: tensor for name, tensor in checkpoint.items() if name not in built.states}
        requests.append((built.name, only, load_job(built.root, only, grid(only, 2, 2))))
    answers = oracles.done(oracles.mindformers(version, [job for _, _, job in requests]))
    for (name, only, _), answer in zip(requests, answers):
        assert not differences(answer, slices_of(only, grid(only, 2, 2))), name


# Checkpoint 2.0 that MindFormers writes.


@pytest.mark.parametrize("version", oracles.MINDFORMERS)
def test_checkpoints_of_mindformers_are_read(version: str, tmp_path: Path) -> None:
    """Random layouts, with redundancy and without, to one device, to ranks of another layout and to full weights."""
    cases = []
    for seed in SEEDS:
        world = worlds.world(seed)
        strategy = worlds.strategy(seed, world, (4 if seed % 3 else 6,) * (1 + seed % 2))
        where = tmp_path / str(seed)
        job = {
            "do": "save",
            "root": str(where / "src"),
            "full": str(write_checkpoint(where / "full.safetensors", world.checkpoint)),
            "world": rank_count(strategy),
            "layouts": worlds.metadata_layouts(strategy),
            "optimizer": world.states,
            "iteration": STEP,
            "prefix": "net" if seed % 2 else None,
            "remove_redundancy": seed % 4 >= 2,
        }
        cases.append((seed, world, where, job))
    oracles.done(oracles.mindformers(version, [job for _, _, _, job in cases]))
    for seed, world, where, _ in cases:
        src = where / "src"
        done("convert", src, where / "one", "--to", "ranks", "--dst-strategy", "none")
        same_checkpoints(only_tensors(read_tree(where / "one")[0], world), world.checkpoint, f"seed {seed}")
        target = worlds.strategy(seed + 200, world, STAGES[seed], sharded=True)
        convert(src, where / "ranks", "ranks", "--dst-strategy", write_strategy(where / "new", target, world.shapes))
        expected = cut_ranks(target, world.checkpoint)
        actual = {rank: only_tensors(tensors, world) for rank, tensors in read_tree(where / "ranks").items()}
        same_ranks(actual, expected)
        convert(src, where / "unified", "unified", "--max-shard-size", "2KB")
        same_checkpoints(only_tensors(read_full(where / "unified"), world), world.checkpoint, f"seed {seed}")


def only_tensors(tensors: Checkpoint, world: worlds.World) -> dict[str, Value]:
    """A checkpoint without the values that have no layout."""
    return {name: contents for name, contents in tensors.items() if name in world.checkpoint}


def read_full(directory: Path, index: str = "param_name_map.json") -> dict[str, Value]:
    """All tensors of a directory of full weights, each from the file that the index names."""
    where = json.loads((directory / index).read_text())["weight_map"]
    contents = {file: read_checkpoint(directory / file) for file in set(where.values())}
    assert {name: file for file, part in contents.items() for name in part} == where
    return {name: contents[file][name] for name, file in where.items()}


# Full weights.


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Made]:
    """Directories of unified weights, made of every form of source: one part, and several."""
    place = tmp_path_factory.mktemp("unified")
    built = {}
    for seed in SEEDS:
        world = worlds.world(seed)
        source = worlds.strategy(seed, world, (4,) * (1 + seed % 2), sharded=True)
        src = _tree(place / str(seed), world, source)
        size = ("--max-shard-size", "4KB") if seed % 2 else ()
        root = convert(
            src, place / str(seed) / "dst", "unified", "--src-strategy", place / str(seed) / "old.ckpt", *size
        )
        built[f"random{seed}"] = Made(f"random {seed}", root, world.checkpoint, world.states)
    return built


@pytest.mark.parametrize("version", oracles.MINDSPORE)
def test_mindspore_distributes_unified_weights(version: str, unified: Mapping[str, Made], tmp_path: Path) -> None:
    jobs, targets = [], {}
    for seed, (name, built) in enumerate(unified.items()):
        world = worlds.World(dict(built.checkpoint))
        target = worlds.strategy(seed + 300, world, (4,) * (1 + seed % 2), sharded=bool(seed % 3))
        targets[name] = target
        strategy = write_strategy(tmp_path / f"{name}_strategy", target, world.shapes)
        jobs.append(
            {
                "do": "distribute",
                "unified": str(built.root),
                "strategy": str(strategy),
                "dst": str(tmp_path / name),
                "ranks": list(range(rank_count(target))),
            }
        )
    oracles.done(oracles.mindspore(version, jobs))
    for name, target in targets.items():
        world = worlds.World(dict(unified[name].checkpoint))
        actual = {
            rank: only_tensors(read_checkpoint(tmp_path / name / f"rank_{rank}" / "net.safetensors"), world)
            for rank in range(rank_count(target))
        }
        same_ranks(actual, cut_ranks(target, world.checkpoint))


@pytest.mark.parametrize("version", oracles.MINDFORMERS)
def test_mindformers_loads_full_weights(version: str, unified: Mapping[str, Made], tmp_path: Path) -> None:
    """A directory of unified or Hugging Face files, without metadata.json, is whole tensors to it."""
    requests = []
    for name, built in unified.items():
        hf = convert(built.root, tmp_path / name, "huggingface", "--max-shard-size", "4KB")
        contents = loadable(version, built.checkpoint)
        only = {parameter: tensor for parameter, tensor in contents.items() if parameter not in built.states}
        for place in (built.root, hf):
            requests.append((only, grid(only, 2, 2), load_job(place, only, grid(only, 2, 2))))
    answers = oracles.done(oracles.mindformers(version, [job for _, _, job in requests]))
    for (only, layouts, _), answer in zip(requests, answers):
        assert not differences(answer, slices_of(only, layouts))


@pytest.mark.parametrize("version", oracles.MINDSPORE)
def test_mindspore_refuses_files_with_the_dtypes_of_the_warning(version: str, tmp_path: Path) -> None:
    jobs, types = [], ("F8_E4M3", "F8_E5M2", "Complex64")
    for dtype in types:
        contents = {"w": value("w", (8, 6)), "other": value("other", (8, 6), dtype)}
        write_checkpoint(tmp_path / dtype / "src" / "model.safetensors", contents)
        result = done("convert", tmp_path / dtype / "src", tmp_path / dtype / "unified", "--to", "unified")
        assert "MindSpore and MindFormers load no .safetensors file" in result.err
        only = single({"w": layout([2], [0, -1])})
        where = {"unified": str(tmp_path / dtype / "unified"), "dst": str(tmp_path / dtype / "dst")}
        strategy = str(write_strategy(tmp_path / dtype / "new", only))
        jobs.append({"do": "distribute", **where, "strategy": strategy, "ranks": [0]})
    for dtype, answer in zip(types, oracles.mindspore(version, jobs)):
        assert "error" in answer and "KeyError" in answer["error"], dtype


@pytest.mark.parametrize("version", oracles.MINDSPORE)
def test_unified_weights_of_mindspore_are_read(version: str, tmp_path: Path) -> None:
    jobs, cases = [], []
    for seed in SEEDS:
        world = worlds.world(seed)
        source = worlds.strategy(seed, world, (4,) * (1 + seed % 2), sharded=bool(seed % 3))
        where = tmp_path / str(seed)
        copied = {"global_step": scalar(STEP, shape=(1,))}
        pattern = "rank_{rank}/net-1_10.safetensors"
        src = write_tree(where / "src", cut_ranks(source, world.checkpoint, copied), pattern)
        strategy = write_strategy(where / "old", source, world.shapes)
        jobs.append({"do": "unify", "src": str(src), "strategy": str(strategy), "dst": str(where / "unified")})
        cases.append((seed, world, where))
    oracles.done(oracles.mindspore(version, jobs))
    for seed, world, where in cases:
        target = worlds.strategy(seed + 400, world, STAGES[seed], sharded=True)
        strategy = write_strategy(where / "new", target, world.shapes)
        convert(where / "unified", where / "ranks", "ranks", "--dst-strategy", strategy)
        actual = {rank: only_tensors(tensors, world) for rank, tensors in read_tree(where / "ranks").items()}
        same_ranks(actual, cut_ranks(target, world.checkpoint))
        convert(where / "unified", where / "hf", "huggingface", "--max-shard-size", "4KB")
        tensors = read_full(where / "hf", "model.safetensors.index.json")
        same_checkpoints(only_tensors(tensors, world), world.checkpoint, f"seed {seed}")
