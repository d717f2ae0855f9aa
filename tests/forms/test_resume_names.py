"""Names with which trainers find converted files again: the fields of --prefix, and meta.json."""

from __future__ import annotations

import json

import pytest

import reshard
from reshard.errors import CheckpointError, UsageError
from reshard.forms.ranks.form import meta_json
from reshard.forms.ranks.naming import FileNames, Step
from tests.running import done, fails
from tests.small import World, tensors
from tests.trees import read_named, same_ranks

FULL = tensors()


@pytest.mark.parametrize(
    "prefix, name",
    [
        ("checkpoint_", "checkpoint_7"),
        ("", "7"),
        ("{{x}}", "{x}7"),
        ("llama_rank_{rank}-{epoch}_{step}", "llama_rank_7-3_10"),
        ("net-{epoch}_{step}", "net-3_10"),
        ("net_{rank:03}", "net_007"),
        ("llama_rank_{rank}-1_200", "llama_rank_7-1_200"),
        ("{{rank}}{rank}", "{rank}7"),
    ],
)
def test_a_prefix_with_fields_is_the_whole_name(prefix: str, name: str) -> None:
    assert FileNames.of_prefix(prefix, Step(3, 10)).of(7) == f"rank_7/{name}"


def test_an_unknown_step_in_the_prefix_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="type the numbers"):
        FileNames.of_prefix("llama_rank_{rank}-{epoch}_{step}")
    assert FileNames.of_prefix("llama_rank_{rank}-1_2").of(0) == "rank_0/llama_rank_0-1_2"


@pytest.mark.parametrize("prefix", ["{", "a}", "{ranks}", "{epoch", "{rank:3}", "{{rank}", "{}", "{0}", "{rank!r}"])
def test_unknown_fields_in_the_prefix_are_wrong_usage(prefix: str) -> None:
    with pytest.raises(UsageError, match="an unknown field"):
        FileNames.of_prefix(prefix, Step(3, 10))


@pytest.mark.parametrize("prefix", ["net-1_", "net-1_{rank}", "net-{rank}_{step}", "{rank}-{epoch}_{rank}"])
def test_a_prefix_with_a_rank_as_step_is_wrong_usage(prefix: str) -> None:
    with pytest.raises(UsageError, match="the rank's number in the place of a step"):
        FileNames.of_prefix(prefix, Step(3, 10))


@pytest.mark.parametrize("prefix", ["a/{rank}", ".{rank}", "\0{rank}", "{rank:0250}", "x" * 240 + "{rank}", "x" * 250])
def test_a_prefix_that_gives_no_file_name_is_wrong_usage(prefix: str) -> None:
    with pytest.raises(UsageError, match="is not the beginning of a file name"):
        FileNames.of_prefix(prefix)


@pytest.mark.parametrize(
    "name, numbers",
    [
        ("rank_3/llama_rank_3-1_200.ckpt", (1, 200)),
        ("rank_12/llama_1_rank_12-30_7.safetensors", (30, 7)),
        ("rank_3/llama_rank_3_1-1_200.ckpt", (1, 200)),
        ("rank_3/checkpoint_3.ckpt", None),
        ("rank_3/llama_rank_2-1_200.ckpt", None),
        ("rank_3/net-1_200.ckpt", None),
        ("rank_3/llama_rank_3.ckpt", None),
        ("rank_3/llama_rank_3-1_200_breakpoint.ckpt", None),
        ("node/rank_3/llama_rank_3-1_200.ckpt", None),
        ("rank3/llama_rank_3-1_200.ckpt", None),
        ("rank_3/llama_rank_3-1_0200.ckpt", None),
    ],
)
def test_meta_json_is_written_for_training_names_only(name: str, numbers: tuple[int, int] | None) -> None:
    actual = meta_json(name)
    if numbers is None:
        assert actual is None
        return
    expected = {"last_epoch": numbers[0], "last_step": numbers[1], "last_ckpt_file": name.split("/")[1]}
    assert actual is not None and json.loads(actual) == expected


def test_converted_files_have_training_names(world: World) -> None:
    world.save(FULL, "rank_{rank}/llama_rank_{rank}-3_10.ckpt")
    world.convert("--prefix", "llama_rank_{rank}-{epoch}_{step}")
    same_ranks(read_named(world.dst, "rank_{rank}/llama_rank_{rank}-3_10.ckpt"), world.expected(FULL))
    (step,) = done("inspect", world.dst, "--strategy", world.new, "--json").json["steps"]
    assert step["complete"] and step["step"] == "3_10"
    done("verify", world.dst, "--src", world.src, "--src-strategy", world.old, "--dst-strategy", world.new)
    before = {path: path.stat().st_mtime_ns for path in world.dst.rglob("*.ckpt")}
    assert done("resume", world.dst).out is not None
    assert {path: path.stat().st_mtime_ns for path in world.dst.rglob("*.ckpt")} == before


def test_by_rank_and_recover_use_training_names(plain: World) -> None:
    plain.save(FULL, "rank_{rank}/net-3_10.ckpt", ranks=[0, 1])
    plain.by_rank(1, "--prefix", "net_{rank:02}-{epoch}_{step}")
    assert [path.name for path in plain.dst.rglob("*.ckpt")] == ["net_01-3_10.ckpt"]
    whole = plain.root / "whole"
    done("recover", plain.src, whole, "--strategy", plain.old, "--prefix", "llama_rank_{rank}-{epoch}_{step}")
    assert sorted(path.name for path in whole.rglob("*.ckpt")) == [f"llama_rank_{r}-3_10.ckpt" for r in range(4)]


def test_training_names_without_a_step_are_an_error(world: World) -> None:
    world.save(FULL, "rank_{rank}/net.ckpt")
    world.refuses(
        3, "no name in the source contains them", "type the numbers", options=("--prefix", "n-{epoch}_{step}")
    )
    world.refuses(2, "an unknown field", options=("--prefix", "{ranks}"))
    world.convert("--prefix", "net_{rank}-7_8")
    assert (world.dst / "rank_1" / "net_1-7_8.ckpt").is_file()


def test_an_unfinished_conversion_with_training_names_resumes_by_its_hint(world: World) -> None:
    world.save(FULL, "rank_{rank}/net-3_10.ckpt")
    world.convert("--prefix", "a_{rank}-{epoch}_{step}", "--ranks", "0")
    result = fails(3, *world.words("--prefix", "b_{rank}"), texts=["another conversion"])
    assert "a_{rank}-3_10" in result.err
    world.convert("--prefix", "a_{rank}-{epoch}_{step}")
    assert sorted(path.name for path in world.dst.rglob("*.ckpt")) == ["a_0-3_10.ckpt", "a_1-3_10.ckpt"]


def test_a_prefix_in_python_is_used_literally(world: World) -> None:
    world.save(FULL)
    reshard.transform_checkpoints(str(world.src), str(world.dst), "{rank}", str(world.old), str(world.new))
    assert sorted(path.name for path in world.dst.rglob("*.ckpt")) == ["{rank}0.ckpt", "{rank}1.ckpt"]


def test_trainers_find_converted_files_by_meta_json(world: World) -> None:
    world.save(FULL, "rank_{rank}/llama_rank_{rank}-3_10.ckpt")
    options = ("--prefix", "llama_rank_{rank}-{epoch}_{step}")
    world.by_rank(1, *options)
    assert not list(world.dst.rglob("meta.json"))
    world.convert(*options)
    for rank in range(2):
        numbers = json.loads((world.dst / f"rank_{rank}" / "meta.json").read_text())
        assert numbers == {"last_epoch": 3, "last_step": 10, "last_ckpt_file": f"llama_rank_{rank}-3_10.ckpt"}
    world.convert("--overwrite")
    assert not list(world.dst.rglob("meta.json"))


def test_meta_json_records_the_converted_step(world: World) -> None:
    options = ("--prefix", "llama_rank_{rank}-{epoch}_{step}")
    for step in ("3_10", "4_2"):
        world.save(FULL, f"rank_{{rank}}/llama_rank_{{rank}}-{step}.ckpt")
        world.convert(*options, "--overwrite")
        for path in sorted(world.dst.rglob("meta.json")):
            assert json.loads(path.read_text())["last_ckpt_file"] == f"llama_{path.parent.name}-{step}.ckpt"
    # While a rank is missing, no command suggests resuming from the others.
    (world.dst / "rank_0" / "llama_rank_0-4_2.ckpt").unlink()
    (world.dst / "rank_1" / "llama_rank_1-4_2.ckpt").unlink()
    world.by_rank(1, *options)
    assert not list(world.dst.rglob("meta.json"))
    world.convert(*options)
    assert len(list(world.dst.rglob("meta.json"))) == 2


def test_a_foreign_meta_json_is_not_replaced(world: World) -> None:
    world.save(FULL, "rank_{rank}/llama_rank_{rank}-3_10.ckpt")
    (world.dst / "rank_1").mkdir(parents=True)
    (world.dst / "rank_1" / "meta.json").write_text("{}")
    fails(3, *world.words("--prefix", "llama_rank_{rank}-{epoch}_{step}"), texts=["rank_1/meta.json"])
    world.convert()
    assert (world.dst / "rank_1" / "meta.json").read_text() == "{}"


def test_trainers_find_a_recovered_tree_by_meta_json(plain: World) -> None:
    plain.save(FULL, "rank_{rank}/llama_rank_{rank}-3_10.ckpt", ranks=[0, 1])
    done("recover", plain.src, plain.dst, "--strategy", plain.old)
    assert sorted(path.parent.name for path in plain.dst.rglob("meta.json")) == [f"rank_{rank}" for rank in range(4)]
