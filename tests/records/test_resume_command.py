"""`reshard resume` continues from the records, without paths or options."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard import transform_checkpoints
from reshard.execute import Progress
from tests.corpus import FIXTURES
from tests.running import Argument, done, fails, reshard
from tests.small import COPIED, SOURCE, TARGET, World, tensors
from tests.trees import layout, same_ranks, scalar, single, tree_bytes, value

FULL = tensors()


def lose(world: World, *ranks: int) -> None:
    """Take targets away, as if they had not been written yet."""
    for rank in ranks:
        shutil.rmtree(world.dst / f"rank_{rank}")
    (world.dst / "reshard-manifest.json").unlink(missing_ok=True)


def plan_of(world: World) -> Path:
    return world.dst / ".reshard" / "plan.json"


def of_ranks(root: Path, count: int) -> World:
    """A world of so many target ranks."""
    world = World(root, single({"w": layout([2], [0, -1])}), single({"w": layout([count], [0, -1])}))
    world.save({"w": value("w", (2 * count, 4))})
    return world


def resume(world: World, *options: Argument) -> Any:
    return done("resume", world.dst, "--json", *options).json


def test_resume_continues_a_conversion_without_options(world: World) -> None:
    world.save(FULL)
    world.convert()
    whole = tree_bytes(world.dst)
    lose(world, 1)
    result = done("resume", world.dst)
    assert "wrote 1 rank (1)" in result.err and "already complete" in result.err
    assert tree_bytes(world.dst) == whole


def test_resume_resolves_relative_paths_from_any_directory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    monkeypatch.chdir(world.root)
    old, new = (path.relative_to(world.root) for path in (world.old, world.new))
    strategies = ("--src-strategy", old, "--dst-strategy", new)
    done("by-rank", 0, "src/rank_{rank}/net-*.ckpt", "dst", *strategies)
    (world.root / "elsewhere").mkdir()
    monkeypatch.chdir(world.root / "elsewhere")
    done("resume", "../dst")
    same_ranks(world.found(), world.expected(FULL))


def test_names_that_are_not_utf_8_are_recorded(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff")
    world = World(tmp_path / name, SOURCE, TARGET)
    world.save(FULL)
    options = ("--prefix", name, "--exclude", f"{name}*", "--checksum", "crc32")
    for rank in range(2):
        world.by_rank(rank, *options)
    whole = tree_bytes(world.dst)
    assert done("status", world.dst, "--json").json["complete"]
    done("verify", world.dst)
    lose(world, 1)
    done("resume", world.dst)
    assert tree_bytes(world.dst) == whole
    done("verify", world.dst, "--src", world.src)


def test_a_path_through_a_link_and_back_is_recorded_resolved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    far = world.root / "far"
    (far / "inner").mkdir(parents=True)
    (world.root / "link").symlink_to("far/inner")
    world.src.rename(far / "src")
    # Where the path would lead if it were only a text.
    world.save(tensors("another"))
    monkeypatch.chdir(world.root)
    done("by-rank", 0, "link/../src", world.dst, "--src-strategy", world.old, "--dst-strategy", world.new)
    resume(world)
    same_ranks(world.found(), world.expected(FULL))


@pytest.mark.parametrize(
    "options",
    [
        ["--include", "*w", "--exclude", "m.*", "--exclude", "-x"],
        ["--format", "safetensors", "--prefix", "net_"],
        ["--checksum", "crc32"],
        ["--step", "1_10", "--file-suffix", "_10"],
        ["--crc", "never", "--allow-missing", "m.*", "--allow-missing", "x"],
    ],
    ids=" ".join,
)
def test_resume_applies_every_recorded_option(world: World, options: list[str]) -> None:
    world.save(FULL, "rank_{rank}/net-1_10.ckpt")
    world.save(tensors("newer"), "rank_{rank}/net-2_10.ckpt")
    world.convert(*options)
    whole = tree_bytes(world.dst)
    lose(world, 0)
    done("resume", world.dst)
    assert tree_bytes(world.dst) == whole


def test_resume_keeps_the_selected_step(world: World) -> None:
    world.save(FULL, "rank_{rank}/net-1_10.ckpt")
    world.by_rank(0)
    world.save(tensors("newer"), "rank_{rank}/net-2_10.ckpt")
    assert resume(world)["step"] == "1_10"
    same_ranks(world.found(), world.expected(FULL))


def test_shares_continue_a_verified_conversion_to_another_form(plain: World) -> None:
    plain.save({name: FULL[name] for name in ("w", "v")})
    to = ("--src-strategy", plain.old, "--to", "huggingface", "--max-shard-size", "1B")
    done("convert", plain.src, plain.dst, *to, "--verify")
    for name in ("model-00001-of-00003.safetensors", "model.safetensors.index.json", "reshard-manifest.json"):
        (plain.dst / name).unlink()
    for share in ("0/2", "1/2"):
        assert "not verified" in done("resume", plain.dst, "--shard", share).err
    assert done("status", plain.dst, "--json").json["complete"]
    assert "verified: no differences" in done("resume", plain.dst).err


def test_resume_reads_an_iteration_under_another_name(tmp_path: Path) -> None:
    iteration = FIXTURES / "checkpoint2" / "a02_dp2mp2_dedup" / "checkpoint" / "iteration_00000010"
    shutil.copytree(iteration, tmp_path / "backup")
    whole, dst = tmp_path / "whole", tmp_path / "dst"
    words = ("--to", "dcp", "--shards", "2")
    done("convert", tmp_path / "backup", whole, *words)
    done("convert", tmp_path / "backup", dst, *words, "--shard", "0/2")
    done("resume", dst)
    for path in whole.glob("*.distcp"):
        assert (dst / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("gone", [False, True])
def test_parts_made_apart_are_completed_by_the_command_that_status_prints(gone: bool, world: World) -> None:
    world.save(FULL)
    parts = []
    for rank in (0, 1):
        needed = world.root / f"needed{rank}"
        for source in world.rank_list(rank):
            shutil.copytree(world.src / f"rank_{source}", needed / f"rank_{source}")
        parts.append(needed)
        out = world.root / f"out{rank}"
        done("by-rank", rank, needed, out, "--src-strategy", world.old, "--dst-strategy", world.new)
        shutil.copytree(out, world.dst, dirs_exist_ok=True)
    for part in parts:
        # The recorded source is one of them.
        shutil.rmtree(part / "rank_1")
    if gone:
        for part in parts:
            part.rename(part.with_name(f"{part.name}.old"))
    shown = done("status", world.dst).out
    command = next(line.partition(": ")[2] for line in shown.splitlines() if "made apart" in line)
    fails(3, "resume", world.dst, texts=[command])
    words = [str(world.src) if word == "SRC" else "0" if word == "RANK" else word for word in shlex.split(command)]
    done(*words[1:])
    assert done("status", world.dst, "--json").json["complete"]


@pytest.mark.parametrize("begin", ["by-rank", "shard"])
def test_resume_covers_all_ranks_of_divided_runs(world: World, begin: str) -> None:
    world.save(FULL)
    if begin == "shard":
        world.convert("--shard", "1/2")
    else:
        world.by_rank(1)
    assert resume(world)["ranks"] == [0]
    assert done("status", world.dst, "--json").json["complete"]


def test_resume_covers_the_ranks_of_the_run_that_began(tmp_path: Path) -> None:
    world = of_ranks(tmp_path, 6)
    world.convert("--ranks", "0-1")
    lose(world, 0)
    assert resume(world)["ranks"] == [0]
    assert "nothing to do: 2 ranks (0-1) are written" in done("resume", world.dst).err


def test_resume_covers_all_ranks_where_a_later_run_wrote_others(tmp_path: Path) -> None:
    world = of_ranks(tmp_path, 6)
    world.convert("--ranks", "0-1")
    world.convert("--ranks", "3")
    lose(world, 0, 3)
    assert resume(world)["ranks"] == [0, 2, 3, 4, 5]
    assert "is complete" in done("resume", world.dst).err


def test_resume_continues_a_recovery(plain: World) -> None:
    plain.save(FULL, ranks=[0, 1, 3])
    done("recover", plain.src, plain.dst, "--strategy", plain.old)
    whole = tree_bytes(plain.dst)
    lose(plain, 2, 3)
    result = resume(plain)
    assert (result["ranks"], result["recovered"]) == ([2, 3], [2])
    assert tree_bytes(plain.dst) == whole


def test_resume_keeps_a_recovery_of_lost_ranks(plain: World) -> None:
    plain.save(FULL, ranks=[0, 1])
    done("recover", plain.src, plain.dst, "--strategy", plain.old, "--lost-only")
    lose(plain, 3)
    assert resume(plain)["ranks"] == [3]
    assert sorted(path.parent.name for path in plain.dst.glob("rank_*/*")) == ["rank_2", "rank_3"]


def test_a_complete_directory_resumes_without_its_source(world: World) -> None:
    world.save(FULL)
    world.convert()
    shutil.rmtree(world.src)
    world.old.unlink()
    before = tree_bytes(world.dst)
    assert "nothing to do" in done("resume", world.dst).err
    result = resume(world)
    assert (result["ranks"], result["done_before"]) == ([], [0, 1]) and result["manifest"]
    shutil.rmtree(world.dst / ".reshard")
    assert "nothing to do" in done("resume", world.dst).err
    assert {path: content for path, content in before.items() if ".reshard" not in path} == tree_bytes(world.dst)


def test_resume_applies_a_recorded_verify(world: World) -> None:
    world.save(FULL)
    world.convert("--verify")
    lose(world, 1)
    assert resume(world)["differences"] == []
    # It is unknown whether it was made before.
    assert resume(world)["differences"] == []
    target = world.dst / "rank_1" / "checkpoint_1.ckpt"
    status = target.stat()
    content = bytearray(target.read_bytes())
    content[-30] ^= 1
    target.write_bytes(content)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert reshard("resume", world.dst).status == 4


def test_resume_verifies_on_request_even_a_complete_directory(world: World) -> None:
    world.save(FULL)
    world.convert()
    assert resume(world)["differences"] is None
    assert resume(world, "--verify")["differences"] == []
    lose(world, 1)
    assert resume(world, "--verify")["differences"] == []


def test_resume_refuses_to_verify_a_recovery(plain: World) -> None:
    plain.save(FULL, ranks=[0, 1, 3])
    done("recover", plain.src, plain.dst, "--strategy", plain.old)
    fails(2, "resume", plain.dst, "--verify", texts=["--verify", "reshard verify", "--replicas --strategy"])


def test_resume_names_a_changed_strategy(world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    shutil.copy(world.old, world.new)
    fails(3, "resume", world.dst, texts=["differs in the target strategy", world.new])


def test_resume_refuses_a_changed_source(world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    world.save(FULL, copied={**COPIED, "more": scalar(1)})
    fails(3, "resume", world.dst, texts=["differ from those of the conversion", "--overwrite"])
    assert not (world.dst / "rank_1").exists()


def test_resume_reads_the_source_of_the_run_that_began(world: World) -> None:
    """As if every machine had copied the files of its rank."""
    world.save(FULL)
    other = shutil.copytree(world.src, world.root / "other")
    world.by_rank(0)
    done("by-rank", 1, other, world.dst, "--src-strategy", world.old, "--dst-strategy", world.new)
    shutil.rmtree(other)
    lose(world, 1)
    assert resume(world)["ranks"] == [1]


def stopped(*_: Any) -> None:
    raise KeyboardInterrupt


def stop_after_one(words: list[Argument], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command that is interrupted when it has finished one target."""
    with monkeypatch.context() as patch:
        committed: Callable[..., None] = Progress.committed

        def interrupted(counted: Any, rank: int, size: int) -> None:
            committed(counted, rank, size)
            raise KeyboardInterrupt

        patch.setattr(Progress, "committed", interrupted)
        assert reshard(*words).status == 130


def test_resume_continues_an_interrupted_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    stop_after_one(world.words("--jobs", 1), monkeypatch)
    assert "run: reshard resume" in done("status", world.dst).out
    done("resume", world.dst, "--jobs", 1, "--max-memory", "8M", "--io", "pread")
    same_ranks(world.found(), world.expected(FULL))


def test_resume_dry_run_prints_the_plan(world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    before = tree_bytes(world.dst)
    shown = done("resume", world.dst, "-n")
    assert "resumes reshard convert" in shown.err and "1 file" in shown.out
    assert tree_bytes(world.dst) == before
    assert "goes on" not in done("resume", world.dst, "-n", "-q").err


def test_resume_divides_the_remaining_ranks_among_machines(tmp_path: Path) -> None:
    world = of_ranks(tmp_path, 8)
    world.by_rank(7)
    ranks = [resume(world, "--shard", f"{index}/2")["ranks"] for index in range(2)]
    assert sorted(ranks[0] + ranks[1]) == list(range(7)) and all(ranks)


def test_resume_continues_a_conversion_from_python(world: World) -> None:
    world.save(FULL)
    transform_checkpoints(str(world.src), str(world.dst), "checkpoint_", str(world.old), str(world.new))
    lose(world, 1)
    assert resume(world)["ranks"] == [1]


def test_resume_of_another_directory_is_an_error(world: World) -> None:
    world.save(FULL)
    fails(3, "resume", world.src, texts=["holds no records of a conversion"])
    world.convert()
    for command in ("resume", "status"):
        fails(3, command, world.dst / "rank_1", texts=[f"name the DST of its conversion: {world.dst}"])
    fails(3, "resume", world.root / "nothing", texts=["holds no records of a conversion", "run its command again"])


def test_resume_with_an_unknown_option_is_wrong_usage(plain: World) -> None:
    plain.save(FULL, ranks=[0, 1])
    done("recover", plain.src, plain.dst, "--strategy", plain.old)
    lose(plain, 3)
    fails(2, "resume", plain.dst, "--shard", "0/2", texts=["--shard"])


def changed(plan: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A plan with other values; those of groups are in what was asked."""
    record = plan["conversion"]
    for name, other in values.items():
        if name in record["asked"]:
            record["asked"][name].update(other)
        else:
            {"version": plan, "files": record["asked"]}.get(name, record)[name] = other
    return plan


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"\xff": 1}', b'{"version": 3, "version": 3}', b'{"version": 1000000}']
)
def test_a_damaged_record_is_named(world: World, content: bytes) -> None:
    world.save(FULL)
    world.by_rank(0)
    path = plan_of(world)
    path.write_bytes(content)
    fails(3, "resume", world.dst, texts=[path])
    path.unlink()
    os.mkfifo(path)
    fails(3, "resume", world.dst, texts=[f"{path}: is not a regular file"])


def test_a_hostile_recorded_prefix_cannot_leave_the_directory(world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    path = plan_of(world)
    path.write_text(json.dumps(changed(json.loads(path.read_text()), {"target": {"prefix": "../../escaped_"}})))
    assert reshard("resume", world.dst).status in (2, 3)
    assert not list(world.root.glob("escaped*"))
