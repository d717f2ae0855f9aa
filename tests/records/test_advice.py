"""Errors about the target directory: every command that they suggest works."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from tests.running import Argument, done, fails, reshard, warns
from tests.sampling import some_of
from tests.small import World, tensors
from tests.trees import same_ranks, tree_bytes

FULL = tensors()
SAFE = ("--format", "safetensors")
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


def save(world: World) -> None:
    """Two steps, so that each can be selected."""
    world.save(tensors("older "), "rank_{rank}/net-1_9.ckpt")
    world.save(FULL)


def replaced_with_a_run_for_all(world: World, *options: Argument) -> None:
    world.convert(*options, "--overwrite")
    assert done("status", world.dst, "--json").json["complete"]
    assert len(tree_bytes(world.dst)) == 2


@pytest.mark.deep
@pytest.mark.parametrize(("swapped", "options", "part"), some_of(itertools.product([False, True], OTHERWISE, PARTS), 3))
def test_refusal_of_another_conversion_names_the_earlier_command(
    options: tuple[str, ...], swapped: bool, part: str, world: World
) -> None:
    save(world)
    first, second = ((), options) if swapped else (options, ())
    world.by_rank(0, *first)
    command, position = PARTS[part]
    result = fails(3, *world.words(*position, *second, command=command), texts=[world.dst, "differs in", "--overwrite"])
    earlier = shlex.split(result.err.partition("the earlier command: reshard ")[2].splitlines()[0])
    done(*earlier)
    assert done("status", world.dst, "--json").json["complete"]
    assert len(tree_bytes(world.dst)) == 2
    replaced_with_a_run_for_all(world, *second)


def test_refusal_of_another_recovery_names_the_task(plain: World) -> None:
    plain.save({name: FULL[name] for name in ("w", "v")}, "rank_{rank}/net-1_10.ckpt", ranks=[0, 1, 2])
    done("recover", plain.src, plain.dst, "--strategy", plain.old)
    fails(3, *plain.words(), texts=["the task (recover there, convert here)"])
    done(*plain.words("--overwrite"))
    assert len(tree_bytes(plain.dst)) == 2


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
    fails(3, *words, texts=["already holds rank_1/checkpoint_1.ckpt", "modified", "--overwrite"])
    if cure == "remove":
        (world.dst / "rank_1" / "checkpoint_1.ckpt").unlink()
        done(*words)
    else:
        done(*words, "--overwrite")
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


def test_a_special_file_suggests_removal(world: World) -> None:
    world.save(FULL)
    world.dst.write_text("a file")
    fails(3, *world.words(), texts=["is not a directory", "choose another DST"])
    world.dst.unlink()
    (world.dst / "rank_0" / "checkpoint_0.ckpt").mkdir(parents=True)
    for options in ((), ("--overwrite",)):
        fails(3, *world.words(*options), texts=["is not a regular file", "remove it"])
    (world.dst / "rank_0" / "checkpoint_0.ckpt").rmdir()
    (world.dst / ".reshard").write_text("mine")
    fails(3, *world.words(), texts=[".reshard"])
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
        words[-1] = next(shard for shard in ("0/2", "1/2") if reshard(*words[:-1], shard).status)
    fails(3, *words, texts=["differ from those of", "choose another DST", "--overwrite"])
    elsewhere = list(words)
    elsewhere[3 if part == "by-rank" else 2] = world.root / "elsewhere"
    done(*elsewhere)
    world.convert("--overwrite")


def test_a_source_of_another_time_suggests_overwrite(world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    for path in world.src.rglob("*.ckpt"):
        os.utime(path, (1, 1))
    warns(world.by_rank(1), "another time", "convert everything again with convert --overwrite")
    assert "another time" not in world.convert("--overwrite").err


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


def test_a_directory_of_another_version_is_refused_by_name(world: World) -> None:
    world.save(FULL)
    world.convert()
    plan, manifest = world.dst / ".reshard" / "plan.json", world.dst / "reshard-manifest.json"
    compare: list[Argument] = ["verify", world.dst, "--src", world.src]
    for path in (plan, manifest):
        path.write_text(path.read_text().replace('"version": 3', '"version": 2'))
    for words in (world.words(), world.words("--overwrite"), ["resume", world.dst], ["status", world.dst]):
        fails(3, *words, texts=["version 2", str(plan), f"reshard verify {world.dst} --src SRC"])
    fails(3, "verify", world.dst, texts=["version 2", str(manifest), f"reshard verify {world.dst} --src SRC"])
    fails(2, *compare, texts=["--src-strategy and --dst-strategy are missing"])
    done(*compare, "--src-strategy", world.old, "--dst-strategy", world.new)


def test_a_directory_without_records_suggests_overwrite(world: World) -> None:
    world.save(FULL)
    world.convert()
    plan = world.dst / ".reshard" / "plan.json"
    shutil.rmtree(plan.parent)
    fails(3, *world.words(), texts=["already holds", "replace them with --overwrite"])
    replaced_with_a_run_for_all(world)
