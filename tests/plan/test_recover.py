"""recover: lost and damaged ranks are restored from replicas, or the missing parameters are listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts import examples, strategies, tensors
from tests.reference import Strategy, rank_count, uncovered
from tests.running import Argument, Result, done, fails, reshard
from tests.small import COPIED, World, world_of
from tests.small import tensors as small_tensors
from tests.trees import (
    FORMATS,
    Value,
    cut_ranks,
    layout,
    read_checkpoint,
    read_named,
    same_checkpoints,
    same_ranks,
    shapes_of,
    single,
    subset,
    text,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

FULL = small_tensors()
NAMED = "rank_{rank}/net-1_10.ckpt"
PARTIAL = ("--allow-missing", "[mv]*")


def recover(world: World, *options: Argument) -> Result:
    return done("recover", world.src, world.dst, "--strategy", world.old, *options)


def cut(world: World) -> dict[int, dict[str, Value]]:
    """What an undamaged source holds."""
    listing = {name for stage in world.source for name in stage["layouts"]}
    return cut_ranks(world.source, subset(FULL, sorted(listing)), COPIED)


@examples(15)
@given(st.data())
def test_recover_restores_any_losses_or_reports_them(data: st.DataObject) -> None:
    full = data.draw(tensors())
    strategy = data.draw(strategies(full), label="strategy")
    ending = data.draw(st.sampled_from(FORMATS))
    ranks = range(rank_count(strategy))
    lost = data.draw(st.sets(st.sampled_from(ranks), max_size=len(ranks) - 1), label="lost")
    saved = cut_ranks(strategy, full, COPIED)
    with world_of(strategy, strategy) as world:
        write_tree(world.src, {r: saved[r] for r in ranks if r not in lost}, f"rank_{{rank}}/net-3_7.{ending}")
        words: list[Argument] = ["recover", world.src, world.dst, "--strategy", world.old]
        missing = uncovered(strategy, strategy, shapes_of(full), None, set(ranks) - lost)
        if missing:
            output = fails(3, *words).err
            assert any(name in output for name in missing), output
            assert not world.dst.exists()
        else:
            result = done(*words, "--json")
            same_ranks(read_named(world.dst, f"rank_{{rank}}/net-3_7.{ending}"), saved)
            assert json.loads(result.out)["recovered"] == sorted(lost)


def test_a_deduplicated_save_is_recovered_whole(world: World) -> None:
    """As at the end of life, or de-duplicated: no single rank has it all."""
    saved = cut(world)
    preserved = {rank: dict(contents) for rank, contents in saved.items()}
    visited: set[tuple[str, bytes]] = set()
    for contents in preserved.values():
        for name in sorted(contents):
            key = (name, contents[name].array.tobytes())
            if key in visited and name != "global_step":
                del contents[name]
            visited.add(key)
    write_tree(world.src, preserved, "rank_{rank}/net-1_10.ckpt")
    recover(world)
    same_ranks(read_named(world.dst, NAMED), saved)


def test_a_file_with_a_wrong_crc_is_rewritten_from_its_replica(world: World) -> None:
    saved = {rank: {n: contents[n] for n in contents if n != "m.w"} for rank, contents in cut(world).items()}
    world.save({name: FULL[name] for name in ("w", "v")}, crc=True)
    path = world.src / "rank_2" / "net-1_10.ckpt"
    data = bytearray(path.read_bytes())
    place = bytes(data).index(saved[2]["w"].array.tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    result = recover(world, "--json", *PARTIAL)
    assert "rank_2" in result.err.replace("\n", "")
    assert json.loads(result.out)["recovered"] == [2]
    same_checkpoints(read_checkpoint(world.dst / "rank_2" / "net-1_10.ckpt"), saved[2])
    for rank in (0, 1, 3):
        source = world.src / f"rank_{rank}" / "net-1_10.ckpt"
        assert (world.dst / f"rank_{rank}" / "net-1_10.ckpt").read_bytes() == source.read_bytes()


def test_intact_files_are_copied_byte_for_byte(world: World) -> None:
    own = {"note": text("kept"), "cur_rank": COPIED["global_step"]}
    world.save(FULL, copied=own, crc=True)
    contents = {name: value for name, value in cut(world)[1].items() if name != "global_step"}
    write_checkpoint(world.src / "rank_1" / "net-1_10.ckpt", {**contents, **own, "extra": contents["w"]}, crc=True)
    recover(world)
    for rank in range(4):
        source = world.src / f"rank_{rank}" / "net-1_10.ckpt"
        assert (world.dst / f"rank_{rank}" / "net-1_10.ckpt").read_bytes() == source.read_bytes()


def test_a_file_without_a_parameter_of_all_others_is_not_intact(world: World) -> None:
    world.save(FULL)
    contents = {name: value for name, value in cut(world)[1].items() if name != "global_step"}
    write_checkpoint(world.src / "rank_1" / "net-1_10.ckpt", contents)
    assert json.loads(recover(world, "--json").out)["recovered"] == [1]
    same_ranks(read_named(world.dst, NAMED), cut(world))


def test_a_file_without_its_slice_of_an_uneven_table_is_not_intact(tmp_path: Path) -> None:
    strategy: Strategy = [
        {"devices": 4, "layouts": {"table": layout([2, 2], [0, -1], uneven=[0, 8]), "v": layout([2, 2], [-1])}}
    ]
    saved = cut_ranks(strategy, {"table": value("table", (8, 3)), "v": value("v", (4,))})
    contents = {rank: {n: v for n, v in saved[rank].items() if v.array.size} for rank in saved}
    write_tree(tmp_path / "src", {**contents, 1: {"v": saved[1]["v"]}})
    old = write_strategy(tmp_path / "strategy", strategy)
    result = done("recover", tmp_path / "src", tmp_path / "dst", "--strategy", old, "--json")
    assert result.json["recovered"] == [1]
    same_ranks(read_named(tmp_path / "dst", NAMED), contents)


def test_values_of_a_lost_rank_give_a_warning(world: World) -> None:
    world.save({"w": FULL["w"]}, ranks=[0, 1, 2], copied={"cur_rank": COPIED["global_step"]})
    output = " ".join(recover(world, *PARTIAL).err.split())
    assert "warning" in output and "cur_rank" in output and "rank 3" in output


def pipeline(data: int) -> Strategy:
    """Two stages; ``emb`` is tied to the last one, whose strategy does not list it."""
    devices = 2 * data
    return [
        {"devices": devices, "layouts": {"emb": layout([data, 2], [-1, -1]), "a": layout([data, 2], [0, -1])}},
        {"devices": devices, "layouts": {"b": layout([data, 2], [0, -1])}},
    ]


@pytest.mark.parametrize("kind", ["whole", "cut like the rest"])
def test_an_unlisted_tied_parameter_is_recovered(kind: str, tmp_path: Path) -> None:
    strategy = pipeline(2)
    full = {name: value(name, (4, 6)) for name in ("emb", "a", "b")}
    saved = {rank: dict(contents) for rank, contents in cut_ranks(strategy, full, COPIED).items()}
    for rank in range(4, 8):
        half = full["emb"].array[rank % 2 * 2 : rank % 2 * 2 + 2]
        saved[rank]["emb"] = full["emb"] if kind == "whole" else Value("Float32", half)
    write_tree(tmp_path / "src", {rank: contents for rank, contents in saved.items() if rank != 7})
    words: list[Argument] = ["recover", tmp_path / "src", tmp_path / "dst"]
    words += ["--strategy", write_strategy(tmp_path / "strategy", strategy)]
    done(*words)
    same_ranks(read_named(tmp_path / "dst", NAMED), saved)


def test_an_unlisted_tied_slice_without_a_known_replica_is_reported(tmp_path: Path) -> None:
    strategy = pipeline(1)
    full = {name: value(name, (4, 6)) for name in ("emb", "a", "b")}
    # By the strategy ranks 2 and 3 are replicas; the tied parameter, which it does not list, is cut.
    strategy[1]["layouts"]["b"] = layout([1, 2], [-1, -1])
    saved = {rank: dict(contents) for rank, contents in cut_ranks(strategy, full, COPIED).items()}
    for rank in (2, 3):
        saved[rank]["emb"] = Value("Float32", full["emb"].array[rank % 2 * 2 : rank % 2 * 2 + 2])
    write_tree(tmp_path / "src", {rank: contents for rank, contents in saved.items() if rank != 3})
    words: list[Argument] = ["recover", tmp_path / "src", tmp_path / "dst"]
    words += ["--strategy", write_strategy(tmp_path / "strategy", strategy)]
    fails(3, *words, texts=["emb", "rank 3"])
    assert not (tmp_path / "dst").exists()
    done(*words, "--ranks", "0-2")


def tied(tmp_path: Path, preserved: dict[int, int]) -> list[Argument]:
    """A stage of one listed and one of four ranks, which hold halves of the tied ``emb`` unlisted: recover's words.

    Args:
        kept: which half each rank of the last stage that is left holds.
    """
    strategy: Strategy = [
        {"devices": 1, "layouts": {"emb": layout([1], [-1, -1])}},
        {"devices": 4, "layouts": {"b": layout([4], [-1, -1])}},
    ]
    full = {name: value(name, (4, 6)) for name in ("emb", "b")}
    saved = {rank: dict(contents) for rank, contents in cut_ranks(strategy, full, COPIED).items()}
    for local, half in preserved.items():
        saved[1 + local]["emb"] = Value("Float32", full["emb"].array[half * 2 : half * 2 + 2])
    write_tree(
        tmp_path / "src", {rank: contents for rank, contents in saved.items() if rank == 0 or rank - 1 in preserved}
    )
    return [
        "recover", tmp_path / "src", tmp_path / "dst", "--strategy", write_strategy(tmp_path / "strategy", strategy)
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", ["", "2", "4", "2,4"])
def test_equal_remaining_slices_do_not_prove_replicas(ranks: str, tmp_path: Path) -> None:
    """Ranks 0 and 2 of the stage agree: with optimizer shards, the other ranks hold slices without replicas."""
    words = tied(tmp_path, {0: 0, 2: 0})
    fails(3, *words, *(["--ranks", ranks] if ranks else []), texts=["emb", "certain"])
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("left, half", [({0: 0, 1: 1, 2: 0}, 1), ({0: 0, 1: 0, 2: 1}, 1), ({1: 1, 2: 0, 3: 1}, 0)])
@pytest.mark.parametrize("options", [(), ("--ranks",), ("--lost-only",)])
def test_a_slice_is_recovered_where_all_candidate_layouts_agree(
    left: dict[int, int], half: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    (lost,) = {1, 2, 3, 4} - {local + 1 for local in left}
    done(*tied(tmp_path, left), *options, *([lost] if "--ranks" in options else []))
    right = value("emb", (4, 6)).array[half * 2 : half * 2 + 2]
    (path,) = (tmp_path / "dst" / f"rank_{lost}").iterdir()
    assert read_checkpoint(path)["emb"].array.tobytes() == right.tobytes()


@pytest.mark.parametrize(
    "preserved",
    [
        {0: ["emb"], 1: [], 2: ["b", "emb"], 3: ["c"]},
        {0: ["emb"], 1: [], 2: ["b", "c", "emb"], 3: []},
        {0: [], 1: ["emb"], 2: [], 3: ["emb", "b", "c"]},
    ],
)
def test_a_complete_deduplicated_save_is_recovered_unchanged(preserved: dict[int, list[str]], tmp_path: Path) -> None:
    """The tied parameter that its stage does not list is whole on one of its ranks."""
    strategy: Strategy = [
        {"devices": 2, "layouts": {"emb": layout([2], [-1, -1])}},
        {"devices": 2, "layouts": {name: layout([2], [-1, -1]) for name in ("b", "c")}},
    ]
    full = {name: value(name, (4, 6)) for name in ("emb", "b", "c")}
    for rank, names in preserved.items():
        write_checkpoint(
            tmp_path / "src" / f"rank_{rank}" / "net-1_1.safetensors",
            {name: full[name] for name in names},
            metadata={"remove_redundancy": "True"},
        )
    done("recover", tmp_path / "src", tmp_path / "dst", "--strategy", write_strategy(tmp_path / "strategy", strategy))
    stages = [["emb"], ["emb"], ["emb", "b", "c"], ["emb", "b", "c"]]
    same_ranks(
        {rank: read_checkpoint(next((tmp_path / "dst" / f"rank_{rank}").iterdir())) for rank in range(4)},
        {rank: {name: full[name] for name in names} for rank, names in enumerate(stages)},
    )


def test_a_dry_run_plans_and_writes_nothing(world: World) -> None:
    world.save({"w": FULL["w"]}, ranks=[0, 1, 2])
    assert "replicas replace source rank 3" in recover(world, "--dry-run", *PARTIAL).out
    planned = recover(world, "--lost-only", "--dry-run", "--json", *PARTIAL).json
    assert [target["rank"] for target in planned["targets"]] == planned["recovered"] == [3]
    assert not world.dst.exists()


def test_an_older_step_is_recovered_where_the_newest_is_incomplete(world: World) -> None:
    world.save(FULL)
    world.save(small_tensors("newer "), "rank_{rank}/net-2_10.ckpt", ranks=[0, 1])
    result = recover(world)
    assert "2_10" in result.err
    same_ranks(read_named(world.dst, NAMED), cut(world))


def test_a_recovery_resumes_and_is_not_a_conversion(world: World) -> None:
    world.save({"w": FULL["w"]}, ranks=[0, 1, 2])
    recover(world, "--ranks", "3", *PARTIAL)
    assert json.loads(recover(world, "--json", *PARTIAL).out)["done_before"] == [3]
    fails(
        3, "transform-dir", world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", world.old,
        *PARTIAL, texts=[str(world.dst)],
    )  # fmt: skip


@pytest.mark.parametrize("words", [(), ("--strategy", "missing")])
def test_recover_requires_a_strategy(world: World, words: tuple[str, ...]) -> None:
    world.save(FULL)
    assert reshard("recover", world.src, world.dst, *words).status in (2, 3)


# Copies of a large tensor, so that samples miss one element.
WIDE = (64, 256)


def one_wrong(tensor: Value) -> Value:
    array = tensor.array.copy()
    array[7, 77] += 1
    return tensor._replace(array=array)


@pytest.fixture
def wide(tmp_path: Path) -> World:
    """Ranks 0, 2 and 4 hold one half of `w`, ranks 1, 3 and 5 the other; one element of rank 2's half is wrong."""
    strategy = single({"w": layout([3, 2], [0, -1]), "v": layout([3, 2], [-1])})
    world = World(tmp_path, strategy, strategy)
    ranks = cut_ranks(strategy, {"w": value("w", WIDE), "v": value("v", (4,))})
    ranks[2]["w"] = one_wrong(ranks[2]["w"])
    write_tree(world.src, ranks, NAMED)
    return world


@pytest.mark.parametrize("lost", [[], [4]])
def test_copies_that_differ_are_refused_until_a_rank_is_left_out(wide: World, lost: list[int]) -> None:
    for rank in lost:
        (wide.src / f"rank_{rank}" / "net-1_10.ckpt").unlink()
    words: list[Argument] = ["recover", wide.src, wide.dst, "--strategy", wide.old]
    texts = ["'w'", "rank 0", "rank 2", "--without-ranks 0", "--without-ranks 2"]
    fails(3, *words, texts=texts)
    assert not wide.dst.exists()
    assert done(*words, "--without-ranks", "2", "--json").json["recovered"] == [2, *lost]
    expected = cut_ranks(wide.source, {"w": value("w", WIDE), "v": value("v", (4,))})
    same_ranks(read_named(wide.dst, NAMED), expected)
    fails(3, *words, "--without-ranks", "0", texts=["--without-ranks"])


def test_only_copies_of_recovered_slices_are_compared(wide: World) -> None:
    (wide.src / "rank_3" / "net-1_10.ckpt").unlink()
    recover(wide, "--lost-only")
    (wide.src / "rank_4" / "net-1_10.ckpt").unlink()
    fails(3, "recover", wide.src, wide.root / "other", "--strategy", wide.old, "--lost-only", texts=["'w'", "rank 2"])


def test_copies_of_tied_parameters_on_other_stages_are_compared(tmp_path: Path) -> None:
    strategy: Strategy = [{"devices": 2, "layouts": {"tied": layout([2], [-1, -1])}} for _ in range(2)]
    world = World(tmp_path, strategy, strategy)
    ranks = cut_ranks(strategy, {"tied": value("tied", WIDE)})
    ranks[1]["tied"] = one_wrong(ranks[1]["tied"])
    write_tree(world.src, {rank: ranks[rank] for rank in (0, 1)}, NAMED)
    words: list[Argument] = ["recover", world.src, world.dst, "--strategy", world.old, "--lost-only"]
    fails(3, *words, texts=["'tied'", "rank 0", "rank 1"])


def test_gradients_that_differ_are_not_recovered_from_another_rank(tmp_path: Path) -> None:
    names = ["w", "accu_grads.w"]
    strategy = single({name: layout([3], [-1, -1]) for name in names})
    world = World(tmp_path, strategy, strategy)
    ranks = cut_ranks(strategy, {name: value(name, WIDE) for name in names})
    ranks[1]["accu_grads.w"] = one_wrong(ranks[1]["accu_grads.w"])
    write_tree(world.src, ranks, NAMED)
    recover(world, "--dry-run")
    (world.src / "rank_2" / "net-1_10.ckpt").unlink()
    fails(3, "recover", world.src, world.dst, "--strategy", world.old, texts=["rank 2", "'accu_grads.w'"])
    recover(world, "--check-replicas", "never")
