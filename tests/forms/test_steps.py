"""The choice of the step in a rank tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.running import Argument, done, fails, warns
from tests.small import COPIED, PLAIN_TARGET, SOURCE, TARGET, World, tensors
from tests.trees import (
    Checkpoint,
    cut_ranks,
    layout,
    read_tree,
    same_ranks,
    single,
    tree_bytes,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

OLD, NEW = tensors("old "), tensors("new ")


def test_file_times_do_not_affect_the_step(world: World) -> None:
    world.save_step("1_10", NEW)
    world.save_step("1_9", OLD)
    for path in world.src.glob("rank_*/net-1_10.ckpt"):
        os.utime(path, (1, 1))
    world.convert()
    assert_same(world, NEW)


def test_step_selects_a_step(world: World) -> None:
    world.save_step("1_9", OLD)
    world.save_step("1_10", NEW)
    world.convert("--step", "1_9")
    assert_same(world, OLD)


def test_a_missing_step_is_an_error(world: World) -> None:
    world.save(NEW)
    world.refuses(3, "7_7", options=("--step", "7_7"))


def test_an_end_of_life_save_by_one_rank_of_each_group_is_selected(plain: World) -> None:
    plain.save(OLD)
    plain.save_step("1_12", NEW, ranks=[0, 3])
    warns(plain.convert(), "1_12")
    assert_same(plain, NEW)


def test_a_torn_step_is_skipped_with_a_warning(plain: World) -> None:
    plain.save(OLD)
    plain.save_step("1_12", NEW, ranks=[0, 2])
    warns(plain.convert(), "1_12", "1_10")
    assert_same(plain, OLD)


def test_a_requested_torn_step_is_an_error(plain: World) -> None:
    plain.save(OLD)
    plain.save_step("1_12", NEW, ranks=[0, 2])
    plain.refuses(3, "1_12", "w", "1", "3", options=("--step", "1_12"))


def test_without_a_complete_step_the_error_lists_missing_ranks(plain: World) -> None:
    plain.save(NEW, ranks=[1, 3])
    plain.refuses(3, "w", "0", "2")


def test_a_stage_without_any_rank_makes_a_step_incomplete(tmp_path: Path) -> None:
    stages = [
        {"devices": 2, "layouts": {"a": layout([2], [0])}},
        {"devices": 2, "layouts": {"b": layout([2], [0])}},
    ]
    world = World(tmp_path, stages, single({"a": layout([1], [-1]), "b": layout([1], [-1])}))
    old = {"a": value("old a", (4,)), "b": value("old b", (4,))}
    new = {"a": value("new a", (4,)), "b": value("new b", (4,))}
    world.save(old)
    world.save_step("1_12", new, ranks=[0, 1])
    warns(world.convert(), "1_12")
    assert_same(world, old)


def test_a_damaged_file_counts_as_absent_and_its_replica_is_used(plain: World) -> None:
    plain.save(NEW)
    damaged = plain.src / "rank_0" / "net-1_10.ckpt"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    warns(plain.convert(), str(damaged))
    assert_same(plain, NEW)


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("preserved", [0, 3, 40])
def test_a_step_with_a_truncated_file_falls_back_to_the_step_before(world: World, ending: str, preserved: int) -> None:
    world.save(OLD, f"rank_{{rank}}/net-1_9.{ending}")
    world.save(NEW, f"rank_{{rank}}/net-1_10.{ending}")
    damaged = world.src / "rank_1" / f"net-1_10.{ending}"
    damaged.write_bytes(damaged.read_bytes()[:preserved])
    result = world.convert()
    warns(result, "1_9", "1_10")
    if preserved or ending != "ckpt":  # A .ckpt of no bytes is a well-formed one of no tensors.
        warns(result, str(damaged))
    assert_same(world, OLD)


def test_a_requested_damaged_step_is_an_error(world: World) -> None:
    world.save_step("1_9", OLD)
    world.save_step("1_10", NEW)
    damaged = world.src / "rank_1" / "net-1_10.ckpt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    world.refuses(3, str(damaged), "1_10", options=("--step", "1_10"))


def test_a_file_truncated_between_records_is_not_complete(world: World) -> None:
    """Such a file is well formed, it only lacks parameters that the others have."""
    world.save_step("1_9", OLD)
    world.save_step("1_10", NEW)
    contents = cut_ranks(world.source, NEW)[2]
    write_checkpoint(world.src / "rank_2" / "net-1_10.ckpt", {"w": contents["w"], "v": contents["v"]})
    warns(world.convert(), "1_10")
    assert_same(world, OLD)


def test_files_of_different_steps_are_never_mixed(plain: World) -> None:
    plain.save_step("1_9", OLD, ranks=[0, 2])
    plain.save_step("1_10", NEW, ranks=[1, 3])
    plain.refuses(3)


def test_unsaved_parameters_do_not_affect_completeness(plain: World) -> None:
    """All files hold the same, one rank is absent: v was not saved."""
    plain.save({"w": NEW["w"]}, ranks=[0, 1, 2])
    plain.convert("--allow-missing", "v")
    assert_same(plain, {"w": NEW["w"]})


def test_an_absent_rank_of_a_deduplicated_save_makes_its_step_incomplete(plain: World) -> None:
    """Rank 3 may have been the only one to save v: the step may be incomplete."""
    plain.save(OLD)
    ranks = cut_ranks(plain.source, NEW)
    for rank, names in {0: ["w"], 1: ["w"], 2: []}.items():
        preserved = {**{name: ranks[rank][name] for name in names}, "global_step": COPIED["global_step"]}
        write_checkpoint(plain.src / f"rank_{rank}" / "net-1_12.ckpt", preserved)
    warns(plain.convert(), "1_12")
    assert_same(plain, OLD)


@pytest.mark.parametrize("command", ["by-rank", "--ranks"])
def test_some_ranks_use_the_step_of_a_full_conversion(command: str, tmp_path: Path) -> None:
    """Rank 1 has all it needs of the newest step: taking it would mix steps among the ranks."""
    world = World(tmp_path, TARGET, TARGET)
    world.save_step("1_9", OLD)
    world.save_step("1_10", NEW, ranks=[1])
    result = world.by_rank(1) if command == "by-rank" else world.convert("--ranks", "1")
    warns(result, "1_10 is not complete and is skipped", "give every rank --step 1_9")
    same_ranks(world.found(), {1: world.expected(OLD)[1]})


def test_without_a_complete_step_a_rank_uses_the_newest_sufficient_one(tmp_path: Path) -> None:
    """Only the files of a rank list were fetched."""
    world = World(tmp_path, TARGET, TARGET)
    world.save_step("1_9", OLD, ranks=[1])
    world.save_step("1_10", NEW, ranks=[1])
    warns(world.by_rank(1), "holds 2 steps, and step 1_10 is used; give every rank --step 1_10")
    same_ranks(world.found(), {1: world.expected(NEW)[1]})
    fails(3, *world.words(), texts=["no step", "1_10", "rank 0"])


@pytest.mark.parametrize("command", ["transform-dir", "plan", "by-rank", "recover"])
def test_no_fallback_refuses_an_older_step(command: str, plain: World) -> None:
    plain.save(OLD)
    plain.save_step("1_12", NEW, ranks=[0])
    words = plain.words(*([0] if command == "by-rank" else []), "--no-fallback", command=command)
    if command == "recover":
        words = [command, plain.src, plain.dst, "--strategy", plain.old, "--no-fallback"]
    fails(3, *words, texts=["1_12", "--no-fallback"])
    assert not plain.dst.exists()
    plain.save_step("1_12", NEW)
    done(*words)


def test_lost_optimizer_shards_do_not_matter_to_a_target_without_them(tmp_path: Path) -> None:
    world = World(tmp_path, SOURCE, PLAIN_TARGET)
    world.save(NEW, ranks=[0, 1])
    warns(world.convert(), "the target strategy does not need the rest", "m.w")
    assert_same(world, {name: NEW[name] for name in ("w", "v")})


def test_an_older_complete_step_is_preferred_to_one_without_optimizer_shards(tmp_path: Path) -> None:
    world = World(tmp_path, SOURCE, PLAIN_TARGET)
    world.save_step("1_9", OLD)
    world.save(NEW, ranks=[0, 1])
    warns(world.convert(), "1_10 is not complete and is skipped")
    assert_same(world, {name: OLD[name] for name in ("w", "v")})


@pytest.mark.parametrize("remaining", [[0], [0, 1]])
def test_the_mark_of_a_deduplicated_save_counts_in_a_single_remaining_file(remaining: list[int], plain: World) -> None:
    """Each file contains another parameter; only the mark shows that others were saved."""
    ranks = cut_ranks(plain.source, NEW)
    for rank in remaining:
        write_checkpoint(plain.src / f"rank_{rank}" / "net-1_12.safetensors", {"w": ranks[rank]["w"]},
                         metadata={"remove_redundancy": "True"})  # fmt: skip
    texts = ["v", "3"]
    plain.refuses(3, *texts)
    fails(3, *plain.words(0, command="by-rank"), texts=texts)
    fails(3, "recover", plain.src, plain.dst, "--strategy", plain.old, texts=texts)


def test_a_missing_slice_with_rows_of_an_uneven_table_shows_a_deduplicated_save(tmp_path: Path) -> None:
    laid_out = {"table": layout([2, 2], [0, -1], uneven=[0, 8]), "v": layout([2, 2], [-1])}
    strategy = single(laid_out)
    world = World(tmp_path, strategy, strategy)
    ranks = cut_ranks(strategy, {"table": value("table", (8, 3)), "v": value("v", (4,))}, COPIED)
    tensors_of_rank: dict[int, Checkpoint] = {0: COPIED, 1: {**COPIED, "table": ranks[1]["table"]}}
    write_tree(world.src, {**tensors_of_rank, 3: COPIED})
    world.refuses(3, "'v'", "rank 2")
    # Those without rows are left out by every synchronous save.
    write_tree(world.src, {3: tensors_of_rank[1]})
    world.convert("--allow-missing", "v")
    assert world.found()[2]["table"].array.shape == (0, 3)


def test_differing_files_of_one_stage_show_a_deduplicated_save(tmp_path: Path) -> None:
    """One file of the other stage remains; only the first stage's files show that it was one of two."""
    whole = layout([2], [-1, -1])
    names = [["a0", "b0"], ["a1", "b1"]]
    # No rank saves the last ones, which is irrelevant while all ranks exist.
    source = [{"devices": 2, "layouts": dict.fromkeys([*some, f"never{some[0]}"], whole)} for some in names]
    world = World(tmp_path, source, single({name: whole for some in names for name in some}))
    full = {name: value(name, (4, 2)) for some in names for name in some}
    ranks = cut_ranks(source, full)
    for rank, name in enumerate(["a0", "b0", "a1"]):
        write_checkpoint(world.src / f"rank_{rank}" / "net-1_10.ckpt", {name: ranks[rank][name]})
    world.refuses(3, "'b1'", "rank 3")
    fails(3, *world.words(0, command="by-rank"), texts=["'b1'", "rank 3"])
    fails(3, "recover", world.src, world.dst, "--strategy", world.old, texts=["'b1'", "rank 3"])
    write_checkpoint(world.src / "rank_3" / "net-1_10.ckpt", {"b1": ranks[3]["b1"]})
    assert "is not complete" not in world.convert("--verify").err
    same_ranks(world.found(), world.expected(full, {}))


def test_weights_that_only_an_absent_rank_can_have_saved_give_a_warning(plain: World) -> None:
    plain.save({"w": NEW["w"]}, ranks=[0, 1, 2])
    plain.refuses(3, "count as not saved: 'v'", "'v'", "if only absent ranks saved them")
    words = ("convert", plain.src, plain.dst, "--src-strategy", plain.old, "--dst-strategy", "none", "--quiet")
    warns(done(*words), "warning", "count as not saved: 'v'")


@pytest.mark.parametrize("kind", ["whole", "slice"])
def test_tensors_without_elements_never_make_a_step_incomplete(kind: str, tmp_path: Path) -> None:
    """Their ranks are lost, or their files leave them out."""
    layout_record = layout([2, 2], [-1, 0]) if kind == "whole" else layout([4], [0, -1], uneven=[2, 0, 4, 0])
    full = {"w": NEW["w"], "none": value("none", (0, 4) if kind == "whole" else (6, 2))}
    world = World(
        tmp_path, single({"w": layout([2, 2] if kind == "whole" else [4], [-1, -1]), "none": layout_record}), TARGET
    )
    world.new = write_strategy(tmp_path / "new", single({n: layout([2], [-1, -1]) for n in full}))
    saved = cut_ranks(world.source, full, COPIED)
    contents = {rank: {name: v for name, v in saved[rank].items() if v.array.size or kind == "whole"} for rank in saved}
    write_tree(world.src, {rank: contents[rank] for rank in ([0, 2] if kind == "whole" else range(4))})
    world.convert()
    ranks = world.found()
    assert all(ranks[rank]["none"].same(full["none"]) for rank in (0, 1))


def test_a_target_rank_without_parameters_gets_a_file(tmp_path: Path) -> None:
    """A stage of new parameters only."""
    full = {"w": NEW["w"]}
    target = [
        {"devices": 1, "layouts": {"w": layout([1], [-1, -1])}},
        {"devices": 1, "layouts": {"head": layout([1], [-1])}},
    ]
    world = World(tmp_path, single({"w": layout([2], [0, -1])}), target)
    world.save(full)
    world.convert("--allow-missing", "head")
    whole = {path.relative_to(world.dst): path.read_bytes() for path in world.dst.glob("rank_*/*")}
    assert len(whole) == 2
    world.dst = tmp_path / "one"
    for rank in (1, 0):
        world.by_rank(rank, "--allow-missing", "head")
    assert {path.relative_to(world.dst): path.read_bytes() for path in world.dst.glob("rank_*/*")} == whole
    assert (world.dst / "reshard-manifest.json").exists()


def test_a_stage_of_tied_parameters_only_may_be_absent_for_a_full_target(tmp_path: Path) -> None:
    """Any listed parameters may be unsaved."""
    layouts = {"w": layout([2], [0, -1]), "m.w": layout([2], [0, -1])}
    source = [{"devices": 2, "layouts": layouts}, {"devices": 2, "layouts": layouts}]
    old = write_strategy(tmp_path / "old", source)
    ranks = cut_ranks(source, {"w": NEW["w"]}, COPIED)
    write_tree(tmp_path / "src", {rank: ranks[rank] for rank in (0, 1)})
    strategies: list[Argument] = ["--src-strategy", old, "--dst-strategy", "none"]
    assert done("rank-list", 0, *strategies).out.split() == ["0", "1"]
    done("by-rank", 0, tmp_path / "src", tmp_path / "dst", *strategies)
    assert read_tree(tmp_path / "dst")[0]["w"].same(NEW["w"])


def test_sharding_of_gradients_does_not_depend_on_the_available_files(tmp_path: Path) -> None:
    """Tied, and only one of the two stages records optimizer shards: its files show whether they exist."""
    whole, shards = layout([2], [-1, -1]), layout([2], [-1, -1], 2, 1)
    names = ("emb", "accu_grads.emb")
    source = [
        {"devices": 2, "layouts": {**dict.fromkeys(names, whole), "b": whole}},
        {"devices": 2, "layouts": dict.fromkeys(names, shards)},
    ]
    target = [
        {"devices": 2, "layouts": dict.fromkeys(names, shards)},
        {"devices": 1, "layouts": {"b": layout([1], [-1, -1])}},
    ]
    world = World(tmp_path, source, target)
    full = {name: value(name, (4, 2)) for name in (*names, "b")}
    for plain in ((), ("accu_grads.emb",)):
        ranks = cut_ranks(source, full, unsharded=plain)
        world.src, world.dst = tmp_path / f"src{plain}", tmp_path / f"all{plain}"
        write_tree(world.src, ranks)
        world.convert()
        tensors_of_rank = world.found()
        same_ranks(tensors_of_rank, cut_ranks(target, full, unsharded=plain))
        report = done("rank-list", 0, "--src-strategy", world.old, "--dst-strategy", world.new, "--json").json["ranks"]
        world.src, world.dst = tmp_path / f"few{plain}", tmp_path / f"one{plain}"
        write_tree(world.src, {rank: ranks[rank] for rank in report})
        world.by_rank(0)
        same_ranks(world.found(), {0: tensors_of_rank[0]})
        world.src, world.dst = tmp_path / f"fewer{plain}", tmp_path / f"none{plain}"
        write_tree(world.src, {0: ranks[0]})
        fails(3, *world.words(0, command="by-rank"), texts=["accu_grads.emb", "ranks 2-3"])


def test_a_torn_step_with_undecidable_gradients_is_skipped_by_by_rank(tmp_path: Path) -> None:
    whole, shards, cut = layout([2], [-1, -1]), layout([2], [-1, -1], 2, 1), layout([2], [0, -1])
    tied = ("emb", "accu_grads.emb")
    source = [
        {"devices": 2, "layouts": {**dict.fromkeys(tied, whole), "b": cut}},
        {"devices": 2, "layouts": dict.fromkeys(tied, shards)},
    ]
    world = World(tmp_path, source, [{"devices": 2, "layouts": {**dict.fromkeys(tied, shards), "b": whole}}])
    full = {name: value(name, (4, 2)) for name in (*tied, "b")}
    write_tree(world.src, cut_ranks(source, full), "rank_{rank}/net-1_1.ckpt")
    torn = cut_ranks(source, {name: value(f"new {name}", (4, 2)) for name in full})
    write_tree(world.src, {0: torn[0]}, "rank_{rank}/net-1_2.ckpt")
    world.convert()
    whole_tree = tree_bytes(world.dst)
    world.dst = tmp_path / "one"
    for rank in range(2):
        world.by_rank(rank)
    assert tree_bytes(world.dst) == whole_tree


def test_filters_do_not_affect_the_step(plain: World) -> None:
    """w is torn at the newest step, so the step is incomplete although v is whole."""
    plain.save(OLD)
    plain.save_step("1_12", NEW, ranks=[0])
    plain.convert("--include", "v")
    for contents in plain.found().values():
        assert contents["v"].same(OLD["v"])


# Names and namings.


@pytest.mark.parametrize(
    "pattern",
    [
        "rank_{rank}/net-1_10.ckpt",
        "rank{rank}/net-1_10.ckpt",
        "{rank}/train-1_10.ckpt",
        "rank_{rank}/llama_7b_rank_{rank}-1_10.safetensors",
        "rank_{rank}/llama_7b_rank_{rank}_2-1_10.safetensors",
        "rank_{rank}/ttp_rank_{rank}-1_10.ckpt",
        "rank_{rank}/checkpoint_{rank}.ckpt",
        "rank_{rank}/net-1_10_breakpoint.ckpt",
        "rank_{rank}/{rank}.ckpt",
    ],
)
def test_all_usual_names_of_steps_are_recognised(world: World, pattern: str) -> None:
    world.save(NEW, pattern)
    if pattern.startswith("rank_"):
        (world.src / "rank_0" / "meta.json").write_text("{}")
        (world.src / "rank_0" / "group_info.pb").write_bytes(b"")
        (world.src / "rank_0" / "net-9_9.ckpt.tmp").write_bytes(b"unfinished")
    world.convert()
    assert_same(world, NEW)


def test_unfinished_directories_are_never_read(world: World) -> None:
    world.save(NEW)
    world.save(OLD, "rank_{rank}_tmp/net-1_12.ckpt")
    world.save(OLD, "tft_saved_checkpoints-step_12_tmp/rank_{rank}/ttp_rank_{rank}-1_12.ckpt")
    world.convert()
    assert_same(world, NEW)


def test_one_file_is_an_unsharded_checkpoint(world: World) -> None:
    write_checkpoint(world.root / "full.ckpt", {**NEW, **COPIED})
    done(
        "transform-dir", world.root / "full.ckpt", world.dst, "--src-strategy", "none",
        "--dst-strategy", world.new,
    )  # fmt: skip
    assert_same(world, NEW)


def test_one_file_with_a_sharded_strategy_is_an_error(world: World) -> None:
    path = write_checkpoint(world.root / "full.ckpt", {**NEW, **COPIED})
    fails(
        3, "transform-dir", path, world.dst, "--src-strategy", world.old, "--dst-strategy", world.new,
        texts=[str(path), "none"],
    )  # fmt: skip


def test_a_single_rank_directory_needs_no_strategy(world: World) -> None:
    write_checkpoint(world.src / "rank_0" / "net-1_10.ckpt", {**NEW, **COPIED})
    done("transform-dir", world.src, world.dst, "--src-strategy", "none", "--dst-strategy", world.new)
    assert_same(world, NEW)


def test_several_rank_directories_without_a_strategy_are_an_error(world: World) -> None:
    world.save(NEW)
    fails(3, "transform-dir", world.src, world.dst, "--src-strategy", "none", "--dst-strategy", world.new)


def assert_same(world: World, full: Checkpoint) -> None:
    same_ranks(world.found(), world.expected(full))
