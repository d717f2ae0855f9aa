"""Defects that would lose or damage a checkpoint unnoticed."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.checkpoints import FileHandles
from reshard.errors import ReshardError
from reshard.execute import Budget, Progress, parts, run, write_files
from reshard.forms.request import Means
from reshard.plan.planner import make_plan
from reshard.text.messages import Report
from tests.asking import request_between
from tests.corpus import ROOT
from tests.reference import Strategy
from tests.running import Argument, done, fails
from tests.small import COPIED, PLAIN_TARGET, World, tensors
from tests.trees import cut_ranks, layout, same_ranks, single, value, write_strategy, write_tree

FULL = tensors()
PLAIN_FULL = tensors(names=["w", "v"])

STAGES: Strategy = [
    {"devices": 2, "layouts": {"a": layout([2], [0, -1])}},
    {"devices": 2, "layouts": {"b": layout([2], [0, -1])}},
]
BOTH = {"a": value("a", (8, 6)), "b": value("b", (8, 6))}
ONE_RANK = single({"a": layout([1], [-1, -1]), "b": layout([1], [-1, -1])})


@pytest.fixture()
def pipeline(tmp_path: Path) -> World:
    return World(tmp_path, STAGES, ONE_RANK)


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_step_with_an_empty_stage_is_skipped(pipeline: World, by_rank: bool) -> None:
    pipeline.save(BOTH, "rank_{rank}/net-1_9.ckpt")
    pipeline.save(BOTH, "rank_{rank}/net-1_10.ckpt")
    for rank in (2, 3):
        (pipeline.src / f"rank_{rank}" / "net-1_10.ckpt").write_bytes(b"")
    result = pipeline.by_rank(0) if by_rank else pipeline.convert()
    assert "1_10" in result.err and "stage 1" in result.err
    same_ranks(pipeline.found(), pipeline.expected(BOTH))


def test_an_empty_newest_file_of_an_unsharded_checkpoint_is_skipped(tmp_path: Path) -> None:
    for step, content in (("1_9", BOTH), ("1_10", {})):
        write_tree(tmp_path / "src", {0: content}, f"rank_{{rank}}/net-{step}.ckpt")
    done("transform-dir", tmp_path / "src", tmp_path / "dst", "--src-strategy", "none", "--dst-strategy", "none")
    assert (tmp_path / "dst/rank_0/checkpoint_0.ckpt").stat().st_size > 0


def test_other_files_of_a_new_target_are_named_and_stay(tmp_path: Path) -> None:
    write_tree(tmp_path / "src", {0: BOTH}, "rank_{rank}/net-1_1.ckpt")
    other = tmp_path / "dst" / "results.csv"
    other.parent.mkdir()
    other.write_text("1")
    words: list[Argument] = [tmp_path / "src", tmp_path / "dst", "--src-strategy", "none", "--dst-strategy", "none"]
    assert [other.name in done("convert", *words).err for _ in range(2)] == [True, False]
    assert other.read_text() == "1"


def test_a_checkpoint_of_another_model_is_refused(pipeline: World) -> None:
    write_tree(pipeline.src, {rank: {"other": value("o", (4, 6))} for rank in range(4)}, "rank_{rank}/net-1_1.ckpt")
    pipeline.refuses(3, "none of the 2 parameters")


def test_a_strategy_that_fits_few_tensors_is_asked_for_its_network_first(saved: World) -> None:
    other = {"w": layout([4], [0]), "v": layout([4], [0, -1]), "m.w": layout([4], [-1])}
    saved.old = write_strategy(saved.root / "other", single(other))
    first = saved.refuses(3, "3 of 3 parameters").err.splitlines()[0]
    assert "another network" in first and str(saved.old) in first


def test_a_target_strategy_that_fits_few_tensors_is_asked_for_its_network_first(saved: World) -> None:
    saved.new = write_strategy(saved.root / "other", single({name: layout([7], [0]) for name in FULL}))
    first = saved.refuses(3, "3 parameters").err.splitlines()[0]
    assert "another network" in first and str(saved.new) in first


@pytest.mark.parametrize("target", ["none", "same"])
def test_slices_that_the_source_strategy_does_not_list_are_no_values(saved: World, target: str) -> None:
    """Else every target rank would get rank 0's slice as if it were the tensor."""
    saved.old = write_strategy(saved.root / "other", single({"v": layout([4], [-1])}))
    words: list[Argument] = ["convert", saved.src, saved.dst, "--src-strategy", saved.old, "--dst-strategy", target]
    fails(3, *words, texts=["another network", "'w'", "'m.w'"])
    assert not saved.dst.exists()
    done(*words, "--exclude", "*w")


def test_a_missing_directory_above_dst_is_named(saved: World) -> None:
    saved.dst = Path("/proc/absent/deeper/out")
    saved.refuses(3, "/proc/absent ")


def test_a_slice_is_never_copied_as_a_full_tensor(tmp_path: Path) -> None:
    layout_record = layout([2], [0, -1])
    full = {"w": value("w", (8, 6)), "x": value("x", (4, 4))}
    ranks = cut_ranks(single({"w": layout_record, "x": layout_record}), full)
    write_tree(tmp_path / "src", ranks, "rank_{rank}/net-1_1.ckpt")
    old = write_strategy(tmp_path / "old", single({"w": layout_record}))
    new = write_strategy(tmp_path / "new", single({"w": layout_record, "x": layout([2], [-1, -1])}))
    words = ("transform-dir", tmp_path / "src", tmp_path / "dst", "--src-strategy", old, "--dst-strategy", new)
    fails(3, *words, texts=["x", "--exclude"])
    done(*words, "--exclude", "x")


def test_by_rank_recognises_a_deduplicated_save(tmp_path: Path) -> None:
    """Rank 0 is lost, and p with it; the other ranks' different sets of parameters show that p was saved."""
    whole = layout([4], [-1])
    full = {name: value(name, (4,)) for name in "pqrs"}
    old = write_strategy(tmp_path / "old", single({name: whole for name in full}))
    new = write_strategy(tmp_path / "new", single({name: layout([2], [0]) for name in full}))
    contents = {rank: {name: full[name]} for rank, name in enumerate("pqrs") if rank}
    write_tree(tmp_path / "src", contents, "rank_{rank}/net-1_1.ckpt")
    words: list[Argument] = [tmp_path / "src", tmp_path / "dst", "--src-strategy", old, "--dst-strategy", new]
    fails(3, "transform-dir", *words, texts=["p"])
    fails(3, "by-rank", "1", *words, texts=["p"])


def test_a_linked_rank_directory_cannot_overwrite_the_source(world: World) -> None:
    world.save(FULL, "rank_{rank}/checkpoint_{rank}.ckpt")
    before = (world.src / "rank_0" / "checkpoint_0.ckpt").read_bytes()
    world.dst.mkdir()
    (world.dst / "rank_0").symlink_to(world.src / "rank_0")
    fails(2, *world.words("--overwrite"), texts=["rank_0", "is another name of a place of source file"])
    assert (world.src / "rank_0" / "checkpoint_0.ckpt").read_bytes() == before


def test_a_target_within_the_directories_of_a_pattern_is_refused(world: World) -> None:
    world.save(FULL)
    words = world.words()
    words[1:3] = [world.src / "rank_{rank}" / "*.ckpt", world.src / "rank_0" / "out"]
    fails(2, *words, texts=["DST"])


def test_files_of_two_runs_on_different_ranks_give_a_warning(world: World) -> None:
    ranks = cut_ranks(world.source, FULL, COPIED)
    for rank, content in ranks.items():
        name = "net" if rank < 2 else "net_1"
        write_tree(world.src, {rank: content}, f"rank_{{rank}}/{name}-1_10.ckpt")
    assert "warning" in world.convert("--quiet").err


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_dead_thread_is_an_error(world: World, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)

    class NoMemory:
        def __init__(self, *_: object) -> None:
            raise MemoryError

    monkeypatch.setattr(parts, "PartBuffer", NoMemory)
    with FileHandles() as handles, pytest.raises(MemoryError):
        plan = make_plan(request_between(world), Means(handles, Report()))
        targets = plan.groups(plan.requested)
        write_files(targets, handles, Budget.of(jobs), Progress())
    assert not list(world.dst.glob("rank_*/*"))


def test_a_skipped_part_of_a_file_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    monkeypatch.setattr(run.Execution, "_part_done", lambda self, group: False)
    with FileHandles() as handles, pytest.raises(ReshardError, match="not finished"):
        plan = make_plan(request_between(world), Means(handles, Report()))
        targets = plan.groups(plan.requested)
        write_files(targets, handles, Budget.of(1), Progress())
    assert not [path for path in world.dst.rglob("*") if path.is_file()]


@pytest.mark.deep
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_low_limit_of_open_files_suffices(io: str, tmp_path: Path) -> None:
    """Forty source files, of which every target needs all, with 48 descriptors."""
    devices = 40
    strategy = single({"w": layout([devices], [-1, 0])})
    full = {"w": value("w", (6, devices * 2))}
    write_tree(tmp_path / "src", cut_ranks(strategy, full), "rank_{rank}/net-1_1.ckpt")
    old = write_strategy(tmp_path / "old", strategy)
    command = [sys.executable, "-m", "reshard", "transform-dir", tmp_path / "src", tmp_path / "dst"]
    command += ["--src-strategy", old, "--dst-strategy", "none", "--io", io, "--jobs", "4"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))

    result = subprocess.run(list(map(str, command)), preexec_fn=limit, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_an_ambiguous_older_step_is_ignored(plain: World) -> None:
    plain.save(PLAIN_FULL, "rank_{rank}/net-1_9.ckpt")
    plain.save(PLAIN_FULL, "rank_{rank}/net-1_9.safetensors")
    plain.save(PLAIN_FULL, "rank_{rank}/net-1_10.ckpt")
    plain.convert()
    same_ranks(plain.found(), cut_ranks(PLAIN_TARGET, PLAIN_FULL, COPIED))


def test_an_empty_rank_directory_over_the_device_count_is_an_error(world: World) -> None:
    world.save(FULL)
    (world.src / "rank_4").mkdir()
    world.refuses(3, "rank 4", "4 devices")


@pytest.mark.parametrize("below", ["sub", "sub/deep"])
def test_a_file_above_dst_is_named_and_stays(below: str, world: World) -> None:
    world.save(FULL)
    file = world.root / "precious.ckpt"
    file.write_bytes(b"x")
    words: list[Argument] = [
        "convert",
        world.src,
        file / below,
        "--src-strategy",
        world.old,
        "--dst-strategy",
        world.new,
    ]
    result = fails(3, *words, texts=[f"{file} is", "choose another place"])
    assert "remove" not in result.err


def test_a_target_strategy_of_another_model_is_refused(world: World) -> None:
    world.save(FULL)
    other = write_strategy(world.root / "other", single({"x": layout([2], [0])}))
    words = [other if word == world.new else word for word in world.words()]
    fails(3, *words, texts=["3 parameters", other])
    fails(3, "rank-list", 0, "--src-strategy", world.old, "--dst-strategy", other, texts=["no parameter", other])


def run_in_shell(text: str) -> tuple[int, str]:
    result = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=ROOT)
    return result.returncode, result.stderr


@pytest.mark.deep
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_reuses_the_descriptor_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    number = tmp_path / "number"
    script = (
        "import os; from reshard.cli import main; from reshard import entry; main.main = lambda: "
        f"os.write(fd := os.open({str(number)!r}, os.O_WRONLY | os.O_CREAT), str(fd).encode()); entry.main()"
    )
    assert run_in_shell(f'{sys.executable} -c "{script}" {closed}')[0] == 0
    assert int(number.read_text()) > 2
