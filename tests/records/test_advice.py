"""Errors about the target directory: every command that they suggest works."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.live import live_run
from tests.running import Argument, Result, done, fails, reshard, warns
from tests.sampling import some_of
from tests.small import World, tensors, without
from tests.trees import same_ranks, tree_bytes, write_strategy

FULL = tensors()
SAFE = ("--format", "safetensors")
GIVE = re.compile(r"(?:give|convert every rank with) (--.*?)(?=, since| and leave out|;)")
LEAVE_OUT = re.compile(r"leave out (--.*?);")
# How a conversion differs from one without options, or from one of an older step.
OTHERWISE = [
    SAFE,
    ("--prefix", "net {{0}}"),
    ("--exclude", "m.*"),
    ("--include", "w", "--include", "v"),
    ("--exclude", "v", *SAFE, "--prefix", "{rank}"),
    ("--step", "1_9"),
]
PARTS: dict[str, tuple[str, tuple[Argument, ...]]] = {
    "by-rank": ("by-rank", (1,)),
    "--ranks": ("transform-dir", ("--ranks", "1")),
    "--shard": ("transform-dir", ("--shard", "1/2")),
    "whole": ("transform-dir", ()),
}


def as_advised(words: list[Argument], result: Result) -> list[Argument]:
    """A command with the options that the error adds, and without those that it removes."""
    advice = " ".join(result.err.split("error:")[1].split())
    remaining = [str(word) for word in words]
    arguments, selected = GIVE.search(advice), LEAVE_OUT.search(advice)
    assert arguments or selected, advice
    typed = shlex.split(selected[1]) if selected else []
    for option, value in zip(typed[::2], typed[1::2]):
        at = next(n for n, word in enumerate(remaining) if (word, remaining[n + 1]) == (option, value))
        del remaining[at : at + 2]
    return [*remaining, *(shlex.split(arguments[1]) if arguments else ())]


def save(world: World) -> None:
    """Two steps, so that each can be selected."""
    world.save(tensors("older "), "rank_{rank}/net-1_9.ckpt")
    world.save(FULL)


def replaced_with_a_run_for_all(world: World, *options: Argument) -> None:
    world.convert(*options, "--overwrite")
    assert done("status", world.dst, "--json").json["complete"]
    assert len(tree_bytes(world.dst)) == 2


@pytest.mark.parametrize(("swapped", "options", "part"), some_of(itertools.product([False, True], OTHERWISE, PARTS), 3))
def test_refusal_of_another_conversion_suggests_commands(
    options: tuple[str, ...], swapped: bool, part: str, world: World
) -> None:
    save(world)
    first, second = ((), options) if swapped else (options, ())
    world.by_rank(0, *first)
    command, position = PARTS[part]
    words = world.words(*position, *second, command=command)
    result = fails(3, *words, texts=[world.dst, "differs in"])
    done(*as_advised(words, result))
    assert done("status", world.dst, "--json").json["complete"]
    assert len(tree_bytes(world.dst)) == 2
    by_rank = "convert " if part == "by-rank" else ""
    every = "" if part in ("by-rank", "whole") else " for all ranks"
    warns(result, f"replace all of it with {by_rank}--overwrite{every}")
    replaced_with_a_run_for_all(world, *second)


@pytest.mark.parametrize("part", ["by-rank", "--ranks", "--shard"])
def test_ranks_of_two_steps_are_never_advised(part: str, world: World) -> None:
    save(world)
    world.by_rank(0, "--step", "1_9")
    command, position = PARTS[part]
    result = fails(3, *world.words(*position, command=command), texts=["convert every rank with --step 1_9"])
    assert "another DST" not in result.err


def test_differences_without_an_option_suggest_the_recorded_command(world: World) -> None:
    save(world)
    other = write_strategy(world.root / "other", without(world.target, "m.w"))
    done(*world.words("--ranks", "0", "--dst-strategy", other))
    result = fails(3, *world.words(), texts=["the target strategy", "repeat the earlier command"])
    done(*world.words("--dst-strategy", other))
    warns(result, "choose another DST")
    done(*world.words("--dst-strategy", other, "--step", "1_9", "--overwrite"))
    replaced_with_a_run_for_all(world)


def test_files_without_a_step_suggest_no_step(world: World) -> None:
    save(world)
    plain = world.root / "plain"
    shutil.copytree(world.src, plain)
    for rank in range(4):
        (plain / f"rank_{rank}" / "net-1_9.ckpt").unlink()
        (plain / f"rank_{rank}" / "net-1_10.ckpt").rename(plain / f"rank_{rank}" / "net.ckpt")
    before = world.words()
    before[1] = plain
    done(*before, "--ranks", "0")
    fails(3, *world.words(), texts=["the step (none there, 1_10 here)", "repeat the earlier command"])
    done(*before)


def test_refusal_of_another_recovery_suggests_commands(plain: World) -> None:
    full = {name: FULL[name] for name in ("w", "v")}
    for step in ("1_9", "1_10"):
        plain.save(full, f"rank_{{rank}}/net-{step}.ckpt", ranks=[0, 1, 2])
    recover: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old]
    for first, second in ((("--step", "1_9"), ()), (("--prefix", "x"), ()), ((), ("--prefix", "x"))):
        shutil.rmtree(plain.dst, ignore_errors=True)
        done(*recover, "--ranks", "3", *first)
        words = [*recover, "--ranks", "2", *second]
        result = fails(3, *words, texts=["replace all of it with --overwrite for all ranks"])
        done(*(as_advised(words, result) if "leave out --prefix" not in result.err else words[:-2]))
        done(*recover, *second, "--overwrite")
        assert done("status", plain.dst, "--json").json["complete"]
    result = fails(3, *plain.words(), texts=["the task (recover there, convert here)"])
    done(*plain.words("--overwrite"))
    assert len(tree_bytes(plain.dst)) == 2


def test_replacing_some_ranks_suggests_all_or_one_by_one(world: World) -> None:
    world.save(FULL)
    world.convert()
    for options in (("--ranks", "0"), ("--shard", "0/2")):
        fails(3, *world.words("--overwrite", *options), texts=["--overwrite for all ranks", "by-rank --overwrite"])
    world.by_rank(0, "--overwrite")
    world.convert("--overwrite")


def test_replacing_a_recovered_rank_suggests_removing_it(plain: World) -> None:
    plain.save({name: FULL[name] for name in ("w", "v")}, ranks=[0, 1, 2])
    recover: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old]
    done(*recover)
    result = fails(
        3, *recover, "--ranks", "3", "--overwrite", texts=["remove single files", "--overwrite for all ranks"]
    )
    assert "by-rank" not in result.err
    path = plain.dst / "rank_3" / "net-1_10.ckpt"
    path.unlink()
    done(*recover, "--ranks", "3")
    path.write_bytes(b"changed")
    fails(3, *recover, texts=["already holds", "remove it", "replace all ranks with --overwrite"])
    assert "to write rank 3 again: remove the files, and run the command again" in done("status", plain.dst).out
    path.unlink()
    done(*recover)
    path.write_bytes(b"changed")
    done(*recover, "--overwrite")
    assert done("status", plain.dst, "--json").json["complete"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("cure", ["remove", "replace"])
def test_a_modified_target_suggests_removal_or_overwrite(cure: str, part: str, world: World) -> None:
    world.save(FULL)
    world.convert()
    (world.dst / "rank_1" / "checkpoint_1.ckpt").write_bytes(b"trained on")
    command, position = PARTS[part]
    words = world.words(*position, command=command)
    if part == "--shard":
        words[-1] = next(shard for shard in ("0/2", "1/2") if reshard(*words[:-1], shard).status)
    result = fails(
        3, *words, texts=["already holds rank_1/checkpoint_1.ckpt", "modified", "remove it and run the same"]
    )
    if cure == "remove":
        (world.dst / "rank_1" / "checkpoint_1.ckpt").unlink()
        done(*words)
    elif part == "by-rank":
        warns(result, "or replace it with --overwrite")
        done(*words, "--overwrite")
    else:
        warns(result, "replace all ranks with --overwrite" + ("" if part == "whole" else " for all ranks"))
        world.convert("--overwrite")
    same_ranks(world.found(), world.expected(FULL))


@pytest.mark.parametrize("part", PARTS)
def test_a_target_without_a_record_suggests_overwrite(part: str, world: World) -> None:
    world.save(FULL)
    world.convert()
    shutil.rmtree(world.dst / ".reshard")
    if part != "whole":
        shutil.rmtree(world.dst / "rank_0")
    command, position = PARTS[part]
    words = world.words(*position, command=command)
    if part == "--shard":
        words[-1] = next(shard for shard in ("0/2", "1/2") if "already" in reshard(*words[:-1], shard, "-n").err)
    fails(3, *words, texts=["already holds", "with --overwrite"])
    done(*words, "--overwrite")
    world.convert()
    same_ranks(world.found(), world.expected(FULL))


def test_unrecorded_checkpoints_suggest_removal(world: World) -> None:
    world.save(FULL)
    other = world.dst / "rank_5" / "net-1_1.ckpt"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"mine")
    for words in (world.words(), world.words("--overwrite"), world.words(1, command="by-rank")):
        fails(3, *words, texts=["rank_5/net-1_1.ckpt", "remove them"])
    other.unlink()
    world.convert()


def test_checkpoints_of_another_conversion_suggest_a_run_for_all_ranks(world: World) -> None:
    world.save(FULL)
    world.convert("--exclude", "m.*")
    for words in (world.words("--overwrite", "--ranks", "0"), world.words(0, "--overwrite", command="by-rank")):
        result = fails(3, *words, texts=["rank_1/checkpoint_1.ckpt", "replace all of it with"])
        assert "remove" not in result.err
    replaced_with_a_run_for_all(world)


def test_a_special_file_suggests_removal(world: World, tmp_path: Path) -> None:
    world.save(FULL)
    world.dst.write_text("a file")
    fails(3, *world.words(), texts=["is not a directory", "choose another DST"])
    world.dst.unlink()
    (world.dst / "rank_0" / "checkpoint_0.ckpt").mkdir(parents=True)
    for options in ((), ("--overwrite",)):
        fails(3, *world.words(*options), texts=["is not a regular file", "remove it"])
    (world.dst / "rank_0" / "checkpoint_0.ckpt").rmdir()
    (world.dst / "rank_0").rmdir()
    (world.dst / "rank_0").symlink_to(tmp_path)
    fails(3, *world.words(), texts=["a link that leads elsewhere", "remove the link"])
    (world.dst / "rank_0").unlink()
    (world.dst / ".reshard").write_text("mine")
    fails(3, *world.words(), texts=["is a link or another kind of file", "remove it"])
    (world.dst / ".reshard").unlink()
    world.convert()


def test_overlapping_paths_suggest_another_target(world: World) -> None:
    world.save(FULL)
    inside = world.words()
    inside[2] = world.src / "out"
    fails(2, *inside, texts=["choose a DST outside the source's directories"])
    one_file = world.words("--src-strategy", "none", "--dst-strategy", "none")
    one_file[1], one_file[2] = world.src / "rank_0" / "net-1_10.ckpt", world.src
    fails(2, *one_file, texts=["choose another DST"])
    pattern = world.words()
    pattern[1], pattern[2] = world.src / "rank_{rank}" / "*.ckpt", world.src / "rank_0" / "out"
    fails(2, *pattern, texts=["choose another DST"])
    for words in (inside, one_file, pattern):
        words[2] = world.dst
        done(*words)
        shutil.rmtree(world.dst)


@pytest.mark.parametrize("part", PARTS)
def test_a_changed_source_suggests_overwrite(part: str, world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    world.save({**FULL, "w": FULL["w"]}, copied={})
    command, position = PARTS[part]
    words = world.words(*position, command=command)
    if part == "--shard":
        words[-1] = next(shard for shard in ("0/2", "1/2") if "changed" in reshard(*words[:-1], shard).err)
    texts = "convert --overwrite" if part == "by-rank" else "--overwrite"
    fails(3, *words, texts=["differ from those of", "choose another DST", f"convert everything again with {texts}"])
    elsewhere = list(words)
    elsewhere[3 if part == "by-rank" else 2] = world.root / "elsewhere"
    done(*elsewhere)
    before = world.root / "before"
    shutil.copytree(world.dst, before)
    done(*words, "--accept-changed-source")
    shutil.rmtree(world.dst)
    before.rename(world.dst)
    world.convert("--overwrite")


def test_a_source_of_another_time_suggests_overwrite(world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    for path in world.src.rglob("*.ckpt"):
        os.utime(path, (1, 1))
    warns(world.by_rank(1), "another time", "convert everything again with convert --overwrite")
    assert "another time" not in world.convert("--overwrite").err


def test_a_live_run_of_an_older_source_suggests_waiting(world: World) -> None:
    world.save(FULL)
    with live_run(world.words()):
        for path in world.src.rglob("*.ckpt"):
            os.utime(path, (1, 1))
        result = fails(3, *world.words(), texts=["another run is writing", "wait until it ends", "--overwrite"])
    assert "convert --" not in result.err
    world.convert("--overwrite")


def test_a_live_run_of_another_conversion_suggests_waiting(world: World) -> None:
    world.save(FULL)
    with live_run(world.words("--prefix", "x")):
        result = fails(3, *world.words(), texts=["another conversion is writing", "wait until it ends, or"])
        assert "remove" not in result.err
        done(*world.words(*SAFE, "--overwrite")[:2], world.root / "elsewhere", *world.words(*SAFE)[3:])
    world.convert()


def test_without_locks_a_dead_run_suggests_removing_its_record(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    world.by_rank(0, "--prefix", "x")

    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    result = fails(3, *world.words("--overwrite"), texts=["another conversion is writing", "if it is dead, remove"])
    path = re.search(r"if it is dead, remove (\S+)", result.err.replace("\n", ""))
    assert path
    Path(path[1]).unlink()
    replaced_with_a_run_for_all(world)


def test_records_of_two_conversions_suggest_overwrite(world: World) -> None:
    """As after copying records into a directory, or on file systems whose locks do not reach others."""
    world.save(FULL)
    world.convert()
    records = world.root / "records"
    shutil.copytree(world.dst / ".reshard", records)
    world.convert(*SAFE, "--overwrite")
    shutil.copytree(records, world.dst / ".reshard", dirs_exist_ok=True)
    fails(3, "status", world.dst, texts=["records of 2 conversions", "with --overwrite"])
    fails(3, *world.words(), texts=["another conversion", "--overwrite"])
    replaced_with_a_run_for_all(world)
    assert {path.suffix for path in world.dst.glob("rank_*/*")} == {".ckpt"}


def test_a_full_disk_suggests_sufficient_space(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=0, f_frsize=1))
        fails(1, *world.words(), texts=["free some space or choose another DST"])
    world.convert()


def test_recovered_lost_ranks_suggest_verifying_the_whole_tree(plain: World) -> None:
    plain.save({name: FULL[name] for name in ("w", "v")}, ranks=[0, 1, 2])
    done("recover", plain.src, plain.dst, "--strategy", plain.old, "--lost-only")
    fails(3, "verify", plain.dst, texts=["copy the lost ranks back", "--replicas --strategy S"])
    subprocess.run(["cp", "-r", f"{plain.dst}/.", f"{plain.src}/"], check=True)
    done("verify", plain.src, "--replicas", "--strategy", plain.old)


def test_a_damaged_record_suggests_removal(world: World) -> None:
    world.save(FULL)
    world.convert()
    (plan,) = (world.dst / ".reshard").glob("*/plan.json")
    plan.write_text(plan.read_text().replace("1_10", "1_11"))
    fails(3, *world.words(), texts=["it is not a record of reshard", f"remove {plan.parent}"])
    shutil.rmtree(plan.parent)
    fails(3, *world.words(), texts=["already holds", "replace them with --overwrite"])
    replaced_with_a_run_for_all(world)
