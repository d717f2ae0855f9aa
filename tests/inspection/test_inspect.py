"""`inspect`: its output for files and trees, and its agreement with conversions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from reshard.forms.ranks.tree import find_checkpoints
from tests.checkpoint_writing import write_sparse
from tests.running import Argument, done, fails, flat, warns
from tests.small import World, tensors
from tests.strategy_writing import numbers
from tests.trees import layout, scalar, single, text, value, write_checkpoint, write_strategy
from tests.wire import field

FULL = tensors()
NEWER = "rank_{rank}/net-1_12.ckpt"


def inspected(*words: Argument) -> Any:
    return done("inspect", *words, "--json").json


def judged(world: World, *words: Argument) -> Any:
    return inspected(world.src, "--strategy", world.old, *words)


def steps(actual: Any) -> dict[str | None, Any]:
    return {step["step"]: step for step in actual["steps"]}


def finding(actual: Any, kind: str) -> Any:
    (one,) = [item for item in actual["findings"] if item["kind"] == kind]
    return one


def kinds(actual: Any) -> list[str]:
    return [item["kind"] for item in actual["findings"]]


def damage(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-5])
    return path


# A tree, by names and headers alone.


def test_without_a_strategy_completeness_is_unknown(plain: World) -> None:
    plain.save(FULL)
    plain.save(FULL, NEWER, ranks=[0, 3])
    report = inspected(plain.src)
    assert [step["complete"] for step in report["steps"]] == [None, None]
    assert report["latest"] is None and report["strategy"] is None
    assert steps(report)["1_12"]["absent_ranks"] == [1, 2] and steps(report)["1_10"]["absent_ranks"] == []
    shown = done("inspect", plain.src).out
    for message in ("complete?", "torn or saved by one rank of each replica group", "on all ranks", "--strategy"):
        assert message in shown


def test_inspect_reads_headers_of_the_newest_step(plain: World) -> None:
    plain.save(FULL)
    plain.save(FULL, NEWER)
    damage(plain.src / "rank_0" / "net-1_10.ckpt")
    report = inspected(plain.src)
    assert steps(report)["1_10"]["contents"] is None and steps(report)["1_10"]["damaged"] == []
    assert steps(report)["1_12"]["contents"]["sets"] == [
        {"ranks": [0, 1, 2, 3], "names": ["global_step", "v", "w"]},
    ]


def test_step_selects_the_headers_to_read(plain: World) -> None:
    plain.save(FULL)
    plain.save(FULL, NEWER)
    path = damage(plain.src / "rank_0" / "net-1_10.ckpt")
    report = inspected(plain.src, "--step", "1_10")
    assert steps(report)["1_12"]["contents"] is None
    ((rank, reason),) = [item.values() for item in steps(report)["1_10"]["damaged"]]
    assert rank == 0 and str(path) in reason
    assert str(path) in finding(report, "damaged")["text"]
    fails(3, "inspect", plain.src, "--step", "7_7", texts=["7_7", "1_12"])
    fails(2, "inspect", plain.src, "--step", "soon", texts=["soon"])


def test_totals_count_every_read_file(world: World) -> None:
    world.save(FULL)
    contents = inspected(world.src)["steps"][0]["contents"]
    tensors_ = {item["name"]: item for item in contents["tensors"]}
    assert tensors_["w"]["shapes"] == [[4, 6]] and tensors_["w"]["files"] == 4 and tensors_["w"]["nbytes"] == 4 * 96
    assert contents["dtypes"]["Float32"] == {"tensors": 3, "bytes": 4 * (96 + 16 + 48)}
    assert contents["kinds"]["other values"] == {"tensors": 1, "bytes": 16}


def test_names_are_grouped_by_pipeline_stage(tmp_path: Path) -> None:
    stages = [{"devices": 2, "layouts": {name: layout([2], [0])}} for name in ("a", "b")]
    world = World(tmp_path, stages, single({"a": layout([1], [-1]), "b": layout([1], [-1])}))
    world.save({"a": value("a", (4,)), "b": value("b", (4,))})
    sets = inspected(world.src)["steps"][0]["contents"]["sets"]
    assert [item["ranks"] for item in sets] == [[0, 1], [2, 3]]
    assert [item["names"] for item in sets] == [["a", "global_step"], ["b", "global_step"]]


def test_empty_rank_directories_and_gaps_are_listed(plain: World) -> None:
    plain.save(FULL, ranks=[0, 3])
    (plain.src / "rank_1").mkdir()
    report = inspected(plain.src)
    assert report["ranks"] == [0, 1, 3]
    assert "rank 1:" in finding(report, "empty_rank")["text"]
    assert "rank 2:" in finding(report, "gap")["text"]


def test_unfinished_directories_and_saves_at_a_fault_are_skipped_and_listed(plain: World) -> None:
    plain.save(FULL)
    for name in ("tft_saved_checkpoints-step_9_tmp", "ttp_saved_checkpoints-step_8"):
        write_checkpoint(plain.src / name / "rank_0" / "ttp_rank_0-1_9.ckpt", {})
    report = inspected(plain.src)
    assert list(steps(report)) == ["1_10"]
    assert "tft_saved_checkpoints-step_9_tmp" in finding(report, "unfinished")["text"]
    assert "ttp_saved_checkpoints-step_8" in finding(report, "save_at_fault")["text"]
    fails(3, "inspect", plain.src / "tft_saved_checkpoints-step_9_tmp", texts=["never finished"])
    assert inspected(plain.src / "rank_{rank}" / "*.ckpt")["ranks"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("pattern", "saved_at"),
    [
        ("rank_{rank}/net-1_10_breakpoint.ckpt", "breakpoint"),
        ("rank_{rank}/ttp_rank_{rank}-1_10.ckpt", "ttp"),
        ("tft_saved_checkpoints-step_10/rank_{rank}/net-1_10.ckpt", "ttp"),
        ("rank_{rank}/net-1_10.ckpt", None),
    ],
)
def test_saves_at_a_fault_are_recognised_by_name(plain: World, pattern: str, saved_at: str | None) -> None:
    plain.save(FULL, pattern)
    place = plain.src / pattern.split("/")[0] if pattern.startswith("tft") else plain.src
    assert inspected(place)["steps"][0]["saved_at"] == saved_at


def test_an_end_of_life_save_is_recognised_by_its_stored_rank(plain: World) -> None:
    plain.save(FULL, ranks=[0, 3], copied={"cur_rank": scalar(0)})
    assert inspected(plain.src)["steps"][0]["saved_at"] == "end of life"
    assert "end of a process's life" in done("inspect", plain.src).out


def test_a_file_removed_during_inspect_is_reported(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plain.save(FULL)
    plain.save(FULL, NEWER)
    path = plain.src / "rank_1" / "net-1_10.ckpt"

    def find(*arguments: Any) -> Any:
        candidates = find_checkpoints(*arguments)
        path.unlink()
        return candidates

    monkeypatch.setattr("reshard.inspection.tree.find_checkpoints", find)
    report = inspected(plain.src)
    assert str(path) in finding(report, "vanished")["text"]
    assert steps(report)["1_10"]["absent_ranks"] == [1]


# What a conversion refuses is a finding, not an error.


AMBIGUOUS = {
    "names": "rank_{rank}/net-1_10_breakpoint.ckpt",
    "formats": "rank_{rank}/net-1_10.safetensors",
    "directories": "{rank}/net-1_10.ckpt",
}


@pytest.mark.parametrize("pattern", AMBIGUOUS.values(), ids=list(AMBIGUOUS))
@pytest.mark.parametrize("with_strategy", [False, True])
def test_two_files_of_a_rank_and_step_are_a_problem(plain: World, pattern: str, with_strategy: bool) -> None:
    plain.save(FULL)
    plain.save(FULL, pattern)
    report = judged(plain) if with_strategy else inspected(plain.src)
    problem = finding(report, "ambiguous")
    assert problem["refuses"] and problem["step"] == "1_10" and "--file-suffix" in problem["hint"]
    assert steps(report)["1_10"]["ambiguous"] and steps(report)["1_10"]["complete"] is None
    assert "a conversion of step 1_10 refuses: rank 0 has" in done("inspect", plain.src).out
    error = plain.refuses(3).err
    assert flat(problem["text"]) in flat(error)


def test_file_suffix_selects_one_series_of_files(plain: World) -> None:
    plain.save(FULL)
    plain.save(FULL, AMBIGUOUS["names"])
    report = judged(plain, "--file-suffix", "_breakpoint")
    assert report["latest"] == {"found": True, "step": "1_10"} and report["findings"] == []


def test_two_series_of_saves_are_a_problem(plain: World) -> None:
    plain.save(FULL)
    plain.save(FULL, "rank_{rank}/net_1-1_3.ckpt")
    report = judged(plain)
    assert finding(report, "series")["refuses"]
    assert report["latest"] == {"found": False, "step": None}
    assert steps(report)["1_10"]["contents"] is not None
    plain.refuses(3, "series")


def test_an_encrypted_file_is_a_problem_that_names_it(plain: World) -> None:
    plain.save(FULL)
    path = plain.src / "rank_2" / "net-1_10.ckpt"
    path.write_bytes(b"\xd8\x5e\x3a\x7f" + bytes(100))
    for actual in (inspected(plain.src), judged(plain)):
        (message,) = [item for item in actual["findings"] if item["refuses"]]
        assert str(path) in message["text"] and "encrypted" in message["text"]
    assert judged(plain)["latest"] == {"found": False, "step": None}
    fails(3, "inspect", path, texts=[path, "encrypted"])


def test_a_strategy_that_does_not_fit_is_a_problem(plain: World) -> None:
    plain.save(FULL)
    wrong = write_strategy(plain.root / "wrong", single({"w": layout([4], [0]), "v": layout([4], [-1])}))
    report = inspected(plain.src, "--strategy", wrong)
    problem = finding(report, "refused")
    assert "w" in problem["text"] and problem["step"] == "1_10" and report["latest"]["found"] is False
    assert steps(report)["1_10"]["contents"] is not None


@pytest.mark.parametrize("devices", [2, None])
def test_ranks_over_the_device_count_are_a_problem(plain: World, devices: int | None) -> None:
    plain.save(FULL)
    arguments: Argument = "none"
    if devices:
        arguments = write_strategy(plain.root / "small", single({"w": layout([devices], [0, -1])}))
    report = inspected(plain.src, "--strategy", arguments)
    assert "rank" in finding(report, "refused")["text"] and report["latest"]["found"] is False
    assert steps(report)["1_10"]["contents"] is not None


# With the strategy, the same answer as a conversion's.


def assert_agrees(world: World) -> str | None:
    """Inspecting and converting choose the same step, or both find none; that step."""
    report = judged(world)
    shutil.rmtree(world.dst, ignore_errors=True)
    result = world.run()
    latest = report["latest"]
    assert latest["found"] == (result.status == 0), result.err
    if latest["found"]:
        assert done("status", world.dst, "--json").json["step"] == latest["step"]
        assert steps(report)[latest["step"]]["complete"] is True
    else:
        for step in report["steps"]:
            for line in step["reasons"][:1]:
                assert flat(line) in flat(result.err)
    selected: str | None = latest["step"]
    return selected


@pytest.mark.parametrize("ranks", [[0, 3], [0, 2], [1, 3], [1, 2, 3], [0], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("older", [[0, 1, 2, 3], [0, 1], [1, 3]], ids=str)
def test_inspect_and_transform_dir_agree_on_the_step(plain: World, ranks: list[int], older: list[int]) -> None:
    plain.save(FULL, ranks=older)
    plain.save(FULL, NEWER, ranks=ranks)
    newer_is_complete = bool({0, 2} & set(ranks)) and bool({1, 3} & set(ranks))
    older_is_complete = older != [1, 3]
    selected = assert_agrees(plain)
    assert selected == ("1_12" if newer_is_complete else "1_10" if older_is_complete else None)


def test_inspect_and_transform_dir_agree_on_the_step_with_damaged_files(plain: World) -> None:
    plain.save(FULL)
    plain.save(FULL, NEWER)
    damage(plain.src / "rank_0" / "net-1_12.ckpt")
    assert assert_agrees(plain) == "1_12"
    damage(plain.src / "rank_2" / "net-1_12.ckpt")
    assert assert_agrees(plain) == "1_10"
    (lost,) = steps(judged(plain))["1_12"]["lost"]
    assert lost == {"parameters": ["w"], "ranks": [0, 2]}


def test_missing_slices_are_listed(plain: World) -> None:
    plain.save(FULL)
    plain.save(FULL, NEWER, ranks=[1, 3])
    report = judged(plain)
    torn = steps(report)["1_12"]
    assert torn["complete"] is False and torn["absent_ranks"] == [0, 2]
    assert torn["lost"] == [{"parameters": ["w"], "ranks": [0, 2]}]
    assert steps(report)["1_10"]["complete"] is True and report["latest"] == {"found": True, "step": "1_10"}
    shown = done("inspect", plain.src, "--strategy", plain.old).out
    for message in ("step 1_12 is not complete", "ranks 0,2 should hold: 'w'", "latest takes step 1_10"):
        assert message in shown


def test_steps_older_than_the_selected_one_are_not_checked(plain: World) -> None:
    plain.save(FULL, "rank_{rank}/net-1_9.ckpt")
    plain.save(FULL)
    report = judged(plain)
    assert steps(report)["1_9"]["complete"] is None and steps(report)["1_9"]["contents"] is None
    assert "not looked at" in done("inspect", plain.src, "--strategy", plain.old).out


def test_one_rank_of_each_replica_group_looks_like_an_end_of_life_save(plain: World) -> None:
    plain.save(FULL)
    plain.save(FULL, NEWER, ranks=[0, 3])
    actual = steps(judged(plain))
    assert actual["1_12"]["one_per_replica_group"] is True and actual["1_12"]["complete"] is True
    assert actual["1_10"]["one_per_replica_group"] is False
    assert "one rank of each replica group" in done("inspect", plain.src, "--strategy", plain.old).out


def test_unsaved_parameters_and_the_full_size_are_printed(world: World) -> None:
    world.save({name: FULL[name] for name in ("w", "v")})
    (step,) = judged(world)["steps"]
    assert step["not_saved"] == ["m.w"] and step["complete"] is True
    assert step["full_bytes"] == (48 + 4) * 4


# Files.


def test_inspect_of_a_file_prints_totals_and_marks(tmp_path: Path) -> None:
    contents = {
        "net.weight": value("a", (4, 2), "BFloat16"),
        "adam_m.net.weight": value("b", (4, 2)),
        "moments.net.weight": value("c", (4, 2)),
        "accu_grads.net.weight": value("d", (4, 2)),
        "packed": value("e", (4,), "Int4"),
        "global_step": scalar(3, shape=(1,)),
    }
    path = write_checkpoint(tmp_path / "x.safetensors", contents, metadata={"remove_redundancy": "True"})
    report = inspected(path)
    assert {kind: total["tensors"] for kind, total in report["kinds"].items()} == {
        "weights": 2, "optimizer state": 2, "accumulated gradients": 1, "other values": 1,
    }  # fmt: skip
    assert report["dtypes"]["BFloat16"] == {"tensors": 1, "bytes": 16}
    assert report["remove_redundancy"] is True and kinds(report) == ["int4", "remove_redundancy"]
    shown = done("inspect", path).out
    for message in ("optimizer state 2", "remove_redundancy", "no CRC", "two values a byte"):
        assert message in shown


def test_dtypes_that_a_format_lacks_are_reported(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.ckpt", {"note": text("hello"), "w": value("w", (2,))}, crc=True)
    assert "note" in finding(inspected(path), "text")["text"]
    assert "CRC " in done("inspect", path).out and isinstance(inspected(path)["crc"], int)
    eight_bit = write_checkpoint(tmp_path / "y.safetensors", {"w": value("w", (2,), "F8_E4M3")})
    assert ".ckpt cannot hold" in finding(inspected(eight_bit), "type")["text"]


def test_inspect_of_a_large_tree_fits_a_screen(tmp_path: Path) -> None:
    odd = {f"{'x' * number}.weight": value("w", (2, 2)) for number in range(1, 60)}
    for step in range(100):
        for rank in (0, 1, 3):
            write_checkpoint(tmp_path / "src" / f"rank_{rank}" / f"net-1_{step}.ckpt", odd if step == 99 else {})
    shown = done("inspect", tmp_path / "src").out
    assert len(shown.splitlines()) < 80
    assert "80 older steps" in shown and "39 tensors more" in shown
    assert "net-1_3." not in shown and "1_3 " in done("inspect", tmp_path / "src", "-v").out


# Other things than checkpoints.


def test_inspect_of_a_conversion_target_suggests_status(world: World) -> None:
    world.save(FULL)
    world.convert()
    assert "reshard status" in finding(inspected(world.dst), "conversion")["hint"]
    for path in world.dst.glob("rank_*"):
        shutil.rmtree(path)
    fails(3, "inspect", world.dst, texts=["reshard status"])


@pytest.mark.parametrize("name", ["given.ckpt", "given.json", "given.pb", "given"])
def test_inspect_recognises_strategy_and_group_info_files(world: World, name: str) -> None:
    path = world.root / name
    path.write_bytes(world.old.read_bytes())
    fails(3, "inspect", path, texts=["strategy file", f"reshard strategy show {path}"])
    path.write_bytes(field(1, field(1, "g") + field(2, numbers([0, 1]))) + field(2, numbers([0])))
    fails(3, "inspect", path, texts=["group_info file", f"reshard group-info inspect {path}"])


def test_other_forms_without_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    fails(3, "inspect", tmp_path, texts=["Checkpoint 2.0"])
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "param_name_map.json").write_text("{}")
    fails(3, "inspect", tmp_path / "u", texts=["param_name_map.json", "lists no tensors"])


def test_options_of_trees_are_refused_with_a_file(world: World) -> None:
    path = write_checkpoint(world.root / "x.ckpt", FULL)
    fails(2, "inspect", path, "--strategy", world.old, texts=["is one file"])
    fails(2, "inspect", path, "--step", "1_10", texts=["is one file"])


def test_a_tree_of_terabytes_is_inspected_by_headers_alone(tmp_path: Path) -> None:
    size = 64 << 30
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    head = len(header).to_bytes(8, "little") + header
    for rank in range(32):
        path = tmp_path / "src" / f"rank_{rank}" / "net-1_10.safetensors"
        path.parent.mkdir(parents=True)
        write_sparse(path, [head, size])
    report = inspected(tmp_path / "src")
    assert report["steps"][0]["contents"]["dtypes"] == {"Float32": {"tensors": 1, "bytes": 32 * size}}
    assert "2.0 TiB" in done("inspect", tmp_path / "src").out


def test_a_rank_directory_shows_its_rank(world: World) -> None:
    world.save(FULL, "rank_{rank}/net-1_10.ckpt")
    world.save(FULL, "rank_{rank}/net-2_10.ckpt")
    directory = world.src / "rank_3"
    shown = done("inspect", directory).out
    assert f"{directory}: rank 3, 2 steps" in shown and "m.w" in shown
    assert f"`reshard inspect {world.src}` shows all ranks" in shown
    assert "guess" not in shown and "note" not in shown
    report = done("inspect", f"{directory}/", "--json", "--step", "1_10").json
    assert report["ranks"] == [3] and report["findings"] == []
    assert [(step["step"], step["ranks"], step["absent_ranks"]) for step in report["steps"]] == [
        ("2_10", [3], []),
        ("1_10", [3], []),
    ]
    assert report["steps"][0]["contents"] is None and report["steps"][1]["contents"] is not None


def test_a_single_rank_directory_is_not_checked_against_a_strategy(world: World) -> None:
    world.save(FULL)
    directory = world.src / "rank_0"
    fails(2, "inspect", directory, "--strategy", world.old, texts=["the directory of one rank", world.src])
    strategies = ("--src-strategy", world.old, "--dst-strategy", world.new)
    fails(3, "transform-dir", directory, world.dst, *strategies, texts=[f"did you mean {world.src}?"])


def test_a_rank_directory_without_checkpoints_is_an_error(world: World) -> None:
    (world.src / "rank_0").mkdir(parents=True)
    fails(3, "inspect", world.src / "rank_0", texts=["rank_0", "empty"])
    world.save(FULL)
    fails(3, "inspect", world.src / "rank_0", "--file-suffix", "_x", texts=["holds files (net-1_10.ckpt)"])


NOT_OURS = {
    "a zip archive, as PyTorch saves": b"PK\x03\x04" + bytes(range(256)),
    "a Python pickle, as old versions of PyTorch save": b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + bytes(50),
    "a Git LFS pointer, for which `git lfs pull` fetches the file itself": b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("ending", ["ckpt", "pt"])
@pytest.mark.parametrize(("kind", "content"), NOT_OURS.items())
def test_files_of_other_programs_are_named(kind: str, content: bytes, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{ending}"
    path.write_bytes(content)
    fails(3, "inspect", path, texts=[f"{path}: is {kind}; not a MindSpore checkpoint"])
    fails(3, "plan", path, tmp_path / "dst", "--src-strategy", "none", "--dst-strategy", "none", texts=[f"is {kind}"])
    fails(3, "strategy", "show", path, texts=[f"is not a strategy file: it is {kind}"])


def test_a_file_of_pytorch_counts_as_absent_where_replicas_exist(plain: World) -> None:
    plain.save(FULL)
    (plain.src / "rank_2" / "net-1_10.ckpt").write_bytes(NOT_OURS["a zip archive, as PyTorch saves"])
    warns(plain.convert(), "is a zip archive, as PyTorch saves; not a MindSpore checkpoint; rank 2 counts as absent")


def test_inspect_reports_an_unfinished_conversion(world: World) -> None:
    world.save(tensors())
    world.by_rank(1)
    result = done("inspect", world.dst)
    text = f"{world.dst}: was written by reshard, and is not complete: 1 of 2 ranks written"
    assert text in result.err + result.out and f"reshard resume {world.dst}" in result.err + result.out
    world.by_rank(0)
    result = done("inspect", world.dst)
    assert "not complete" not in result.err + result.out
