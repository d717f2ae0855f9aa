"""Strategies of other runs: swapped with the target's, with finer cuts, with other stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpus import FIXTURES
from tests.reference import Strategy
from tests.running import Argument, done, fails, reshard, warns
from tests.small import COPIED, World, tensors
from tests.trees import Value, cut_ranks, layout, read_tree, same_ranks, single, value, write_strategy, write_tree

FULL = tensors()
DEMO = FIXTURES / "demo"
SWAPPED = "are the two swapped?"


def exchanged(world: World) -> World:
    """The same, saved with the target's strategy; the command is still typed as for the source's."""
    write_tree(world.src, cut_ranks(world.target, FULL, COPIED))
    return world


def test_a_swap_is_detected_with_fewer_devices_than_ranks(world: World) -> None:
    world.save(FULL)
    world.old, world.new = world.new, world.old
    world.refuses(3, "ranks 2-3", f"the files fit --dst-strategy ({world.new}), by shapes: {SWAPPED}")
    world.old, world.new = world.new, world.old
    world.convert()
    same_ranks(world.found(), world.expected(FULL))


@pytest.mark.parametrize("words", [[], ["--ranks", "1"], ["-n"]])
def test_a_swap_is_detected_with_more_devices_than_ranks(world: World, words: list[str]) -> None:
    exchanged(world).refuses(3, "ranks 2-3", SWAPPED, options=tuple(words))


def test_by_rank_and_verify_report_swapped_strategies(world: World) -> None:
    world.save(FULL)
    world.convert()
    strategies: list[Argument] = ["--src-strategy", world.new, "--dst-strategy", world.old]
    fails(3, "by-rank", 1, world.src, world.root / "other", *strategies, texts=[SWAPPED])
    fails(3, "verify", world.dst, "--src", world.src, *strategies, texts=[SWAPPED])


COLUMNS: Strategy = single({"w": layout([2, 2], [-1, 0]), "v": layout([2, 2], [-1]), "m.w": layout([2, 2], [-1, 0])})
SHARDED: Strategy = single({name: layout([4], [0, -1] if name != "v" else [-1]) for name in ("w", "v", "m.w")})


@pytest.mark.parametrize(("saved", "other"), [(COLUMNS, SHARDED), (SHARDED, COLUMNS)])
def test_swapped_strategies_whose_shapes_fit_are_refused(tmp_path: Path, saved: Strategy, other: Strategy) -> None:
    """Differing replicas, or equal slices that should differ, decide."""
    world = World(tmp_path, other, saved)
    full = {name: value(name, (8, 8)) for name in ("w", "m.w")}
    write_tree(world.src, cut_ranks(saved, {**full, "v": value("v", (4,))}, COPIED))
    world.new = write_strategy(tmp_path / "whole", single({name: layout([1], [-1, -1]) for name in full}))
    words = "should hold different slices" if saved is COLUMNS else "or replicas have diverged"
    world.refuses(3, "does not fit this checkpoint", words)
    world.convert("--check-replicas", "never")


def test_a_swap_is_detected_by_shapes(tmp_path: Path) -> None:
    by_hand = {**layout([2], [0, -1]), "uneven": [5, 3]}
    saved, other = single({"w": by_hand}), single({"w": layout([2], [0, -1])})
    world = World(tmp_path, other, saved)
    write_tree(world.src, cut_ranks(saved, {"w": value("w", (8, 6))}))
    world.refuses(3, f"the files fit --dst-strategy ({world.new}), by shapes: {SWAPPED}")


def test_half_a_cluster_lost_is_not_a_swap(tmp_path: Path) -> None:
    """What is left are as many ranks as the target has, and replicas make up for the others."""
    rows, columns = layout([4, 2], [0, -1]), layout([2, 2], [-1, 0])
    world = World(tmp_path, single({"w": rows}), single({"w": columns}))
    world.save({"w": value("w", (8, 8))}, ranks=[0, 1, 2, 3])
    assert "swapped" not in world.convert().err
    same_ranks(read_tree(world.dst), cut_ranks(world.target, {"w": value("w", (8, 8))}, COPIED))


TARGETS = [
    "--to ranks --dst-strategy none",
    "--to checkpoint2 --dst-strategy none",
    "--to unified",
    "--to dcp --shards 2",
]


@pytest.mark.parametrize("target", TARGETS)
def test_a_finer_strategy_is_refused_whatever_is_written(target: str, tmp_path: Path) -> None:
    """Two data-parallel ranks hold each of four slices; by the strategy of eight slices no rank has a replica."""
    names = ["layers.0.w", "layers.1.w"]
    old = write_strategy(tmp_path / "old", single(dict.fromkeys(names, layout([8], [0, -1]))))
    saved = single(dict.fromkeys(names, layout([2, 4], [0, -1])))
    write_tree(tmp_path / "src", cut_ranks(saved, {name: value(name, (32, 6)) for name in names}))
    words: list[Argument] = [tmp_path / "src", tmp_path / "dst", "--src-strategy", old, *target.split()]
    for more in ((), ("--rename", "layers.0.w=first")):
        fails(3, "convert", *words, *more, texts=["where they should hold different slices"])
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("varied", "abc")
def test_another_parameter_of_the_layout_stands_in_for_a_constant_one(varied: str, tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    world = World(tmp_path, single(dict.fromkeys(names, layout([4], [0, -1]))), single({"c": layout([1], [-1, -1])}))
    full = {name: value(name, (8, 6)) for name in names}
    full.update({name: Value("Float32", np.zeros((8, 6), "<u4")) for name in names if name != varied})
    write_tree(world.src, cut_ranks(single(dict.fromkeys(names, layout([2, 2], [0, -1]))), full, COPIED))
    result = reshard("convert", world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", "none")
    assert result.status == 3
    warns(result, "should hold different slices")


@pytest.mark.parametrize(
    ("true", "wrong"),
    [
        # Everything is on every rank, or in four parts each twice; by the wrong strategy parts of it, each twice.
        (layout([8], [-1, -1]), layout([2, 4], [0, -1])),
        (layout([4, 2], [0, -1]), layout([2, 4], [0, -1])),
        (layout([8], [-1, -1]), layout([8], [-1, -1], 4, 1)),
    ],
)
def test_equal_replicas_do_not_support_a_finer_strategy(
    true: dict[str, Any], wrong: dict[str, Any], tmp_path: Path
) -> None:
    names = [f"l.{number}.w" for number in range(4)]
    strategies = [single(dict.fromkeys(names, created)) for created in (wrong, layout([1], [-1, -1]))]
    world = World(tmp_path, *strategies)
    full = {name: value(name, (32, 8)) for name in names}
    write_tree(world.src, cut_ranks(single(dict.fromkeys(names, true)), full, COPIED))
    for words in (world.words(), world.words(0, command="by-rank"), world.words(command="plan")):
        fails(3, *words, texts=["hold equal bytes where they should hold different slices, of 1 of 1"])
    result = reshard("strategy", "check", world.old, world.src)
    assert result.status == 4 and "no difference between replicas of 4 parameters" in result.out
    assert "hold equal bytes, but different slices" in result.out


def test_full_parameters_contradict_optimizer_shards(tmp_path: Path) -> None:
    """Weights that tensor parallelism cuts, as many parts as by the wrong strategy; norms that nothing cuts."""
    weights, norms = [f"l.{number}.w" for number in range(6)], [f"l.{number}.norm" for number in range(2)]
    true = {**dict.fromkeys(weights, layout([8], [0, -1])), **dict.fromkeys(norms, layout([8], [-1]))}
    wrong = {
        **dict.fromkeys(weights, layout([2, 4], [0, -1], 2, 4)),
        **dict.fromkeys(norms, layout([2, 4], [-1], -1, 1)),
    }
    whole = {**dict.fromkeys(weights, layout([1], [-1, -1])), **dict.fromkeys(norms, layout([1], [-1]))}
    world = World(tmp_path, single(wrong), single(whole))
    full = {**{name: value(name, (32, 8)) for name in weights}, **{name: value(name, (32,)) for name in norms}}
    write_tree(world.src, cut_ranks(single(true), full, COPIED))
    world.refuses(3, "hold equal bytes where they should hold different slices, of 1 of 2", "'l.0.norm'")


def test_a_strategy_is_not_a_swap_with_itself(tmp_path: Path) -> None:
    names = ["a", "b"]
    fine = single({name: layout([4], [0, -1]) for name in names})
    world = World(tmp_path, fine, fine)
    ranks = cut_ranks(single({name: layout([2, 2], [0, -1]) for name in names}), {n: value(n, (8, 6)) for n in names})
    write_tree(world.src, {rank: ranks[rank] for rank in range(4)})
    assert "swapped" not in world.refuses(3, "where they should hold different slices").err
    words: list[Argument] = ["recover", world.src, world.dst, "--strategy", world.old]
    assert "swapped" not in fails(3, *words, texts=["where they should hold different slices"]).err


def test_constants_and_few_copies_contradict_no_strategy(tmp_path: Path) -> None:
    names = ["zeros", "ones", "a", "b", "copies"]
    layouts = {name: layout([4], [0] if name in ("a", "b") else [0, -1]) for name in names}
    world = World(tmp_path, single(layouts), single(dict.fromkeys(names, layout([1], [-1, -1]))))
    world.new = write_strategy(tmp_path / "new", single({"a": layout([1], [-1]), "b": layout([1], [-1])}))
    full = {name: value(name, (8,)) for name in ("a", "b")}
    for name, number in (("zeros", 0), ("ones", 1)):
        full[name] = Value("Float32", np.full((8, 6), number, "<u4"))
    full["copies"] = Value("Float32", np.tile(np.arange(12, dtype="<u4").reshape(2, 6), (4, 1)))
    write_tree(world.src, cut_ranks(world.source, full))
    world.convert()


@pytest.mark.parametrize("names", ["ab", "a"])
def test_rank_0_of_data_parallel_ranks_is_not_a_swap(names: str, tmp_path: Path) -> None:
    """`none` fits every single file; only a mark shows that other ranks saved more."""
    parallel = single({name: layout([4], [-1, -1]) for name in "ab"})
    world = World(tmp_path, parallel, parallel)
    full = {name: value(name, (8, 6)) for name in names}
    write_tree(world.src, {0: full}, "rank_{rank}/net-1_10.safetensors", metadata={"remove_redundancy": "True"})
    result = reshard("transform-dir", world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", "none")
    assert result.status == (0 if names == "ab" else 3), result.err
    assert "swapped" not in result.err


def test_a_pipeline_source_whose_ranks_contain_all_stages_is_refused(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    stages = [{"devices": 2, "layouts": {name: layout([2], [0, -1]) for name in pair}} for pair in ("ab", "cd")]
    saved = single({name: layout([4], [0, -1]) for name in names})
    full = {name: value(name, (8, 6)) for name in names}
    write_tree(tmp_path / "src", cut_ranks(saved, full))
    old, new = (
        write_strategy(tmp_path / "old", stages),
        write_strategy(tmp_path / "new", single({"a": layout([1], [-1, -1])})),
    )
    words: list[Argument] = [tmp_path / "src", tmp_path / "dst", "--src-strategy", old, "--dst-strategy", new]
    text = "ranks of pipeline stages 0-1 hold 'a', 'b', 'c', 'd', which the source strategy lists only for other stages"
    for command in ("plan", "transform-dir"):
        fails(
            3,
            command,
            *words,
            texts=[
                "does not fit this checkpoint: ranks hold 4 parameters that it lists for other pipeline stages only"
            ],
        )
    assert not (tmp_path / "dst").exists()
    checked = reshard("strategy", "check", old, tmp_path / "src")
    assert (
        checked.status == 4
        and "4 parameters: held by ranks of a stage for which the strategy does not list them" in checked.out
    )
    assert reshard("strategy", "check", old, tmp_path / "src", "--json").json["misplaced"] == names
    result = done("plan", *words, "--check-replicas", "never")
    (warning,) = [line for line in result.err.splitlines() if "pipeline" in line]
    assert text in warning


def test_a_pipeline_source_supported_by_replicas_gives_a_warning(tmp_path: Path) -> None:
    names = ["a", "b"]
    stages = [{"devices": 2, "layouts": {name: layout([2], [-1, -1])}} for name in names]
    world = World(tmp_path, stages, single({name: layout([1], [-1, -1]) for name in names}))
    full = {name: value(name, (8, 6)) for name in names}
    write_tree(world.src, dict.fromkeys(range(4), full))
    warns(world.convert(), "ranks of pipeline stages 0-1 hold 'a', 'b'")
    same_ranks(world.found(), {0: full})


def test_parameters_outside_their_stages_give_one_warning(tmp_path: Path) -> None:
    stages = [{"devices": 1, "layouts": {f"l{number}": layout([1], [-1, -1])}} for number in range(4)]
    full = {f"l{number}": value(f"l{number}", (4, 6)) for number in range(4)}
    ranks = cut_ranks(stages, full)
    for rank in (1, 2, 3):
        ranks[rank]["l0"] = ranks[0]["l0"]
    ranks[3]["l1"] = ranks[1]["l1"]
    write_tree(tmp_path / "src", ranks)
    old = write_strategy(tmp_path / "old", stages)
    words: list[Argument] = [tmp_path / "src", tmp_path / "dst", "--src-strategy", old, "--dst-strategy", "none"]
    (warning,) = [line for line in done("plan", *words).err.splitlines() if line.startswith("warning")]
    assert (
        "ranks of pipeline stages 1-3 hold 'l0', 'l1', which the source strategy lists only for other stages" in warning
    )
