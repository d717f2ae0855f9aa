"""Parameters that a strategy lists and no source file holds: errors, unless --allow-missing accepts them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import reshard
from reshard.errors import CheckpointError
from tests.asking import conversion_of, open_checkpoint
from tests.running import done, fails
from tests.small import PLAIN, PLAIN_TARGET, TARGET, World, tensors
from tests.trees import layout, same_ranks, single, value

FULL = tensors()


def test_a_weight_that_no_file_holds_is_an_error_unless_it_may_be_missing(tmp_path: Path) -> None:
    world = World(tmp_path, PLAIN, TARGET)
    world.save(FULL)
    world.refuses(3, "1 weight", "'m.w'", world.new, "--allow-missing 'm.w'")
    world.refuses(3, "m.w", options=("--allow-missing", "w", "--allow-missing", "x.*"))
    result = world.run("--allow-missing", "m.*", "--json")
    assert (result.status, result.json["missing"], "warning" in result.err) == (0, ["m.w"], False)
    same_ranks(world.found(), world.expected({"w": FULL["w"], "v": FULL["v"]}))


def test_advice_on_missing_weights_never_accepts_every_name(tmp_path: Path) -> None:
    """A single `*` would turn the check off for all later runs of the command."""
    names = ["backbone.embedding.table", "head.w1", "head.w2", "w"]
    world = World(tmp_path, PLAIN, single({name: layout([2], [0]) for name in ["v", *names]}))
    world.save({"v": FULL["v"]})
    advised = ["--allow-missing 'backbone.embedding.table'", "--allow-missing 'head.w*'", "--allow-missing 'w'"]
    result = world.refuses(3, *advised)
    assert "'*'" not in result.err


def test_excluded_weights_are_not_missing(tmp_path: Path) -> None:
    world = World(tmp_path, PLAIN, TARGET)
    world.save(FULL)
    world.convert("--exclude", "m.*", "--dry-run")
    assert world.run("--include", "[wv]", "--json").json["missing"] == []


def adam(tmp_path: Path, saved: str, listed: str) -> World:
    """Parameters of two ranks in the files and in the target strategy, by their names."""
    cut = layout([2], [0])
    world = World(tmp_path, *(single({name: cut for name in names.split()}) for names in (saved, listed)))
    world.save({name: value(name, (4,)) for name in saved.split()})
    return world


def test_optimizer_state_may_be_missing_altogether_but_not_in_part(tmp_path: Path) -> None:
    world = adam(tmp_path, "a b adam_m.a", "a b adam_v.a adam_v.b accu_grads.a")
    assert world.run("--json").json["missing"] == ["accu_grads.a", "adam_v.a", "adam_v.b"]
    part = adam(tmp_path / "part", "a b adam_m.a adam_v.a", "a b adam_m.a adam_m.b adam_v.a adam_v.b")
    part.refuses(3, "2 parameters", "adam_m.b", "adam_v.b", "--allow-missing 'adam_*'")
    part.refuses(3, "'adam_v.b'", options=("--allow-missing", "adam_m.*"))
    assert part.run("--allow-missing", "adam_?.b", "--json").json["missing"] == ["adam_m.b", "adam_v.b"]
    # The state of no weight is written.
    part.convert("--exclude", "adam_*", "--overwrite")


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_a_part_of_the_optimizer_state_is_found_under_the_names_of_a_trainer(form: str, tmp_path: Path) -> None:
    world = adam(tmp_path, "a b adam_m.a", "a b adam_m.a adam_m.b adam_v.b")
    world.refuses(3, "'adam_m.b'", options=("--to", form))
    fails(3, *world.words(0, "--to", form, command="by-rank"), texts=["'adam_m.b'"])
    world.convert("--to", form, "--allow-missing", "adam_m.b")


def test_counters_and_parameters_of_one_element_may_be_missing(tmp_path: Path) -> None:
    whole = layout([2], [-1])
    world = World(
        tmp_path,
        single({"w": layout([2], [0])}),
        single({"w": layout([2], [0]), "global_step": whole, "state_step.w": whole, "scale.s": layout([2], [])}),
    )
    world.save({"w": value("w", (4,))}, copied={})
    assert world.run("--json").json["missing"] == ["global_step", "scale.s", "state_step.w"]


def two_stages(tmp_path: Path, *names: str) -> World:
    """Two stages of two ranks, which list `first` and `second`, to two stages of one; `names` are saved, as .ckpt."""
    stages = [{"devices": 2, "layouts": {name: layout([2], [0])}} for name in ("first", "second")]
    whole = [{"devices": 1, "layouts": {name: layout([1], [-1])}} for name in ("first", "second")]
    world = World(tmp_path, stages, whole)
    world.save({name: value(name, (4,)) for name in names})
    return world


def test_by_rank_and_ranks_need_only_the_weights_of_their_stage(tmp_path: Path) -> None:
    world = two_stages(tmp_path, "first")
    world.refuses(3, "'second'")
    fails(3, *world.words(1, command="by-rank"), texts=["'second'"])
    world.by_rank(0)
    done(*world.words("--ranks", 0))
    # An equal plan: what may be missing changes no byte.
    world.by_rank(1, "--allow-missing", "second")
    world.by_rank(0)
    shutil.rmtree(world.dst / "rank_1")
    fails(3, "resume", world.dst, texts=["--allow-missing 'second'"])
    world.by_rank(1, "--allow-missing", "second")
    assert {rank: sorted(names) for rank, names in world.found().items()} == {
        0: ["first", "global_step"],
        1: ["global_step"],
    }


def test_by_rank_needs_only_the_rank_list_where_a_stage_saved_none_of_its_parameters(tmp_path: Path) -> None:
    """Synchronous saves leave tensors without elements out of .ckpt files, and with them all of a stage's."""
    cut, state = layout([4], [0]), layout([4], [0])
    stages = [{"devices": 4, "layouts": {"first": cut}}, {"devices": 4, "layouts": {"adam_m.x": state}}]
    world = World(tmp_path, stages, single({"first": layout([2], [0]), "adam_m.x": layout([2], [0])}))
    world.save({"first": value("first", (8,))})
    ranks = world.rank_list(1)
    assert ranks == [2, 3, 6, 7]
    for rank in set(range(8)).difference(ranks):
        shutil.rmtree(world.src / f"rank_{rank}")
    world.by_rank(1)
    same_ranks(world.found(), {1: world.expected({"first": value("first", (8,))})[1]})


def test_recover_refuses_a_weight_that_no_rank_holds(tmp_path: Path) -> None:
    world = World(tmp_path, single({"a": layout([4], [-1]), "b": layout([4], [-1])}), PLAIN_TARGET)
    world.save({"a": value("a", (4,))}, ranks=[0, 1])
    words = ("recover", world.src, world.dst, "--strategy", world.old)
    fails(3, *words, texts=["'b'", "absent ranks"])
    done(*words, "--allow-missing", "b")
    assert sorted(file.name for file in world.dst.glob("rank_*/*")) == ["net-1_10.ckpt"] * 4


def test_reading_does_without_missing_weights(tmp_path: Path) -> None:
    world = World(tmp_path, PLAIN, TARGET)
    world.save(FULL)
    with open_checkpoint(world.src, src_strategy=world.old, dst_strategy=world.new, rank=0) as opened:
        assert "m.w" not in opened and "w" in opened


def test_python_functions_refuse_missing_weights_and_a_conversion_accepts_them(tmp_path: Path) -> None:
    world = World(tmp_path, PLAIN, TARGET)
    world.save(FULL)
    src, dst, old, new = map(str, (world.src, world.dst, world.old, world.new))
    with pytest.raises(CheckpointError, match=r"'m\.w'"):
        reshard.transform_checkpoints(src, dst, "checkpoint_", old, new)
    refused = conversion_of(src, dst, src_strategy=old, dst_strategy=new)
    with pytest.raises(CheckpointError, match=r"'m\.w'") as error:
        refused.plan()
    assert "Edits(allow_missing='m.w')" in str(error.value.hint)
    accepted = conversion_of(src, dst, src_strategy=old, dst_strategy=new, allow_missing="m.*")
    assert accepted.convert(verify=True).missing == ["m.w"]


def test_a_recovery_without_a_weight_is_resumed_without_it(tmp_path: Path) -> None:
    world = World(tmp_path, single({"a": layout([4], [-1]), "b": layout([4], [-1])}), PLAIN_TARGET)
    world.save({"a": value("a", (4,))}, ranks=[0, 1])
    done("recover", world.src, world.dst, "--strategy", world.old, "--ranks", 1, "--allow-missing", "b")
    shutil.rmtree(world.dst / "rank_1")
    done("resume", world.dst)
    assert (world.dst / "rank_1" / "net-1_10.ckpt").exists()


def test_the_removed_option_strict_is_wrong_usage_that_names_allow_missing(world: World) -> None:
    world.refuses(2, "--strict", "--allow-missing", options=("--strict",))
