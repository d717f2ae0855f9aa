"""strategy check: whether a checkpoint was saved with a strategy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.corpus import FIXTURES
from tests.reference import Strategy
from tests.running import Argument, Result, done, fails, reshard, warns
from tests.source_replicas.test_source_replicas import FULL, NORMS, TRUE, WEIGHTS, Tree, model
from tests.trees import cut_ranks, layout, scalar, single, text, value, write_checkpoint, write_strategy, write_tree

DEMO = FIXTURES / "demo"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    created = Tree(tmp_path)
    created.save()
    return created


def check(strategy: Path, path: Path, *options: Argument, status: int = 0) -> Result:
    result = reshard("strategy", "check", strategy, path, *options)
    assert result.status == status, result.err + result.out
    return result


def found(strategy: Path, path: Path, *options: Argument, status: int = 0) -> Any:
    return check(strategy, path, *options, "--json", status=status).json


def test_the_right_strategy_fits(tree: Tree) -> None:
    output = check(tree.true, tree.src).out
    assert "54 parameters: slices have the shapes of the strategy" in output
    assert "no difference between replicas of 54 parameters" in output
    assert output.splitlines()[-1] == "fits"
    result = found(tree.true, tree.src)
    assert result["fits"] and result["step"] == "1_10" and result["ranks"] == list(range(8))
    assert result["parameters"] == sorted(FULL) and result["not_listed"] == ["global_step"]
    assert result["replicas"]["compared"] == "everything" and result["replicas"]["parameters"] == 54
    assert not check(tree.true, tree.src, "--quiet").out


def test_strategy_and_checkpoint_may_come_in_either_order(tree: Tree) -> None:
    assert found(tree.src, tree.true) == found(tree.true, tree.src)
    check(tree.src, tree.wrong, status=4)
    assert str(tree.src) in check(tree.src, tree.src, status=3).err


def test_a_strategy_that_swaps_axes_does_not_fit_and_equal_ranks_are_listed(tree: Tree) -> None:
    output = check(tree.wrong, tree.src, status=4).out
    assert "36 of 54 parameters compared differ between ranks that are replicas in the strategy" in output
    assert "{,adam_m.,adam_v.}blocks.{0-5}.w{1-2}" in output
    assert "ranks with equal contents of 'blocks.0.w1': 0,4; 1,5; 2,6; 3,7" in output
    assert output.splitlines()[-1].startswith("does not fit")
    assert len(output.splitlines()) <= 20
    result = found(tree.wrong, tree.src, status=4)
    assert len(result["differing"]) == 36 and not result["fits"]
    assert result["alike"] == {"parameter": "blocks.0.w1", "groups": [[0, 4], [1, 5], [2, 6], [3, 7]]}
    assert found(tree.wrong, tree.src, status=4) == result, "another run tells the same"


def test_a_diverged_replica_is_a_difference(tree: Tree) -> None:
    tree.change(5, "blocks.3.w1")
    result = found(tree.true, tree.src, status=4)
    (differing,) = result["differing"]
    assert differing["parameter"] == "blocks.3.w1" and [group[0] for group in differing["groups"]] == [1, 5]
    assert differing["files"] == [str(tree.src / f"rank_{rank}" / "net-1_10.ckpt") for rank in (1, 5)]
    output = check(tree.true, tree.src, status=4).out
    assert output.splitlines()[-1] == "does not fit: another strategy was used, or replicas have diverged"
    assert "0,4; 1; 2,6; 3,7; 5" in output


def test_filters_select_the_checked_parameters(tree: Tree) -> None:
    tree.change(5, *NORMS)
    check(tree.true, tree.src, status=4)
    result = found(tree.true, tree.src, "--exclude", "*norm")
    assert result["parameters"] == sorted(WEIGHTS)
    assert found(tree.true, tree.src, "--include", "blocks.0.w1")["parameters"] == ["blocks.0.w1"]


def test_filters_without_a_match_fail(tree: Tree) -> None:
    fails(3, "strategy", "check", tree.true, tree.src, "--include", "nothing.*", texts=["no parameter", "--include"])


def test_slices_of_other_shapes_are_grouped(tree: Tree) -> None:
    columns = write_strategy(
        tree.root / "columns",
        single({name: layout([2, 4], [-1, 0] if name in WEIGHTS else [0, -1]) for name in FULL}),
    )
    result = found(columns, tree.src, status=4)
    (misfit,) = result["misfits"]
    assert misfit["parameters"] == sorted(NORMS) and "tensor map [0, -1]" in misfit["detail"]
    # Columns of another tensor fit by their shapes; only contents could decide, and do not.
    assert result["parameters"] == sorted(WEIGHTS) and not result["differing"]
    output = check(columns, tree.src, status=4).out
    assert "18 parameters: slices have other shapes than in the strategy" in output
    assert "{,adam_m.,adam_v.}blocks.{0-5}.norm" in output


def test_ranks_over_the_device_count_and_ranks_without_a_file_are_listed(tree: Tree) -> None:
    four = write_strategy(tree.root / "four", model([1, 4], [0, -1]))
    result = found(four, tree.src, status=4)
    assert result["beyond_ranks"] == [4, 5, 6, 7]
    assert "ranks 4-7 have files, but the strategy has 4 devices" in check(four, tree.src, status=4).out
    sixteen = write_strategy(tree.root / "sixteen", model([4, 4], [0, -1]))
    result = found(sixteen, tree.src)
    assert result["absent_ranks"] == list(range(8, 16))
    assert "no file of ranks 8-15" in check(sixteen, tree.src).out


def test_parameters_missing_in_the_strategy_or_the_files_are_listed(tree: Tree) -> None:
    weights = write_strategy(tree.root / "weights", model(*TRUE, names=WEIGHTS))
    result = found(weights, tree.src)
    assert result["not_listed"] == sorted([*NORMS, "global_step"]) and not result["not_described"]
    more = write_strategy(
        tree.root / "more",
        single({**model(*TRUE)[0]["layouts"], "blocks.6.w1": layout(*TRUE), "adam_m.x": layout(*TRUE)}),
    )
    assert found(more, tree.src)["not_held"] == ["adam_m.x", "blocks.6.w1"]
    assert "1 weight among them" in check(more, tree.src).out
    other = write_strategy(tree.root / "other", single({"another": layout(*TRUE)}))
    assert found(other, tree.src, status=4)["parameters"] == []


def test_unlisted_sliced_parameters_are_a_difference(tree: Tree) -> None:
    norms = write_strategy(tree.root / "norms", model(*TRUE, names=[*NORMS, *WEIGHTS[1:]]))
    result = found(norms, tree.src, status=4)
    assert result["not_described"] == WEIGHTS[:1] and result["not_listed"] == ["global_step"]
    output = check(norms, tree.src, status=4).out
    assert "their layout is unknown" in output
    assert output.splitlines()[-1] == "does not fit: pass the strategy that this checkpoint was saved with"


def test_untested_parameters_are_listed(tree: Tree, tmp_path: Path) -> None:
    sharded = single(
        {name: layout([2, 4], [0, -1], -1, 4) if name in WEIGHTS else layout([2, 4], [-1]) for name in FULL}
    )
    write_tree(tmp_path / "other", cut_ranks(sharded, FULL))
    strategy = write_strategy(tmp_path / "sharded", sharded)
    output = check(strategy, tmp_path / "other").out
    assert "; 36 others without replicas, checked by shape only" in output
    assert output.splitlines()[-1] == "fits by shapes; cut parameters have no replicas to compare"
    result = found(strategy, tmp_path / "other")
    assert result["replicas"]["untested"] == 36 and not result["replicas"]["tested"] and result["fits"]


def test_a_strategy_that_cuts_finer_than_the_files_does_not_fit(tmp_path: Path) -> None:
    """No two ranks should be replicas, so there is nothing to compare; but some are equal."""
    saved = single({name: layout([2, 2], [0, -1]) for name in "ab"})
    write_tree(tmp_path / "src", cut_ranks(saved, {name: value(name, (16, 6)) for name in "ab"}))
    fine = write_strategy(tmp_path / "fine", single({name: layout([4], [0, -1]) for name in "ab"}))
    output = check(fine, tmp_path / "src", status=4).out
    assert "1 parameter: ranks hold equal bytes, but different slices in the strategy" in output
    assert "': 0,2; 1,3" in output
    assert output.splitlines()[-1].startswith("does not fit: pass the strategy")
    result = found(fine, tmp_path / "src", status=4)
    assert not result["fits"] and result["differing"] == []
    assert [item["ranks"] for item in result["same_slices"]] == [[0, 2]]


def test_strategy_check_uses_the_newest_common_step_or_the_given_one(tree: Tree) -> None:
    newer = cut_ranks(model(*TRUE), {name: value(f"new{name}", full.array.shape) for name, full in FULL.items()})
    write_tree(tree.src, {rank: newer[rank] for rank in range(3)}, "rank_{rank}/net-1_20.ckpt")
    assert found(tree.true, tree.src)["step"] == "1_10"
    result = found(tree.true, tree.src, "--step", "1_20")
    assert (result["step"], result["ranks"]) == ("1_20", [0, 1, 2])
    write_tree(tree.src, {rank: newer[rank] for rank in range(3)}, "rank_{rank}/net-1_10_breakpoint.ckpt")
    assert found(tree.true, tree.src, "--file-suffix", "_breakpoint")["ranks"] == [0, 1, 2]
    fails(3, "strategy", "check", tree.true, tree.src, "--step", "9_9", texts=["9_9"])


def test_damaged_files_are_skipped_and_unreadable_ones_are_an_error(tree: Tree) -> None:
    path = tree.src / "rank_5" / "net-1_10.ckpt"
    path.write_bytes(path.read_bytes()[:1000])
    result = check(tree.true, tree.src, "--json")
    warns(result, "rank 5 counts as absent")
    assert result.json["absent_ranks"] == [5]
    fails(3, "strategy", "check", tree.true, tree.root / "nowhere", texts=["nowhere"])
    fails(3, "strategy", "check", tree.src / "rank_0" / "net-1_10.ckpt", tree.src, texts=["net-1_10.ckpt"])
    for rank in range(8):
        (tree.src / f"rank_{rank}" / "net-1_10.ckpt").write_bytes(b"rubbish")
    fails(3, "strategy", "check", tree.true, tree.src, texts=["no file of step 1_10 is readable"])


def test_one_file_and_none_are_checked(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "full.ckpt", {**FULL, "step": scalar(3), "note": text("a note")})
    assert check(Path("none"), path).out.splitlines()[-1] == "fits by shapes; no replicas were compared"
    strategy = write_strategy(tmp_path / "true", model(*TRUE))
    assert found(strategy, path)["absent_ranks"] == list(range(1, 8))


def test_accumulated_gradients_do_not_contradict_a_strategy(tree: Tree) -> None:
    names = [f"accu_grads.{name}" for name in WEIGHTS[:4]]
    stages: Strategy = single({**model(*TRUE)[0]["layouts"], **{name: layout(*TRUE) for name in names}})
    shutil.rmtree(tree.src)
    tree.save({**FULL, **{name: value(name, (32, 24)) for name in names}}, stages)
    tree.change(6, *names)
    strategy = write_strategy(tree.root / "listed", stages)
    result = found(strategy, tree.src)
    assert [differing["parameter"] for differing in result["gradients"]] == names and not result["differing"]
    assert "have not reduced them yet" in check(strategy, tree.src).out


def test_a_checkpoint_of_mindspore_fits_its_own_strategy_alone() -> None:
    assert found(DEMO / "src_strategy.ckpt", DEMO / "src_checkpoints")["fits"]
    for other in ("10_dp2mp4pp1", "10_dp8mp1pp1", "10_dp4mp2pp1"):
        path = FIXTURES / other / "strategy"
        if path.is_dir():
            assert not found(path, DEMO / "src_checkpoints", status=4)["fits"], other


def test_the_same_strategy_in_every_file_format_fits(tree: Tree) -> None:
    shapes = {name: full.array.shape for name, full in FULL.items()}
    for form in ("json", "nested", "merged", "directory"):
        assert done("strategy", "check", write_strategy(tree.root / form, model(*TRUE), shapes, form), tree.src)
