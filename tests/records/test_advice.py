"""Errors about the target directory."""

from __future__ import annotations

from tests.running import Argument, done, fails
from tests.small import World, tensors
from tests.trees import tree_bytes

FULL = tensors()


def test_refusal_of_another_recovery_names_the_task(plain: World) -> None:
    plain.save({name: FULL[name] for name in ("w", "v")}, "rank_{rank}/net-1_10.ckpt", ranks=[0, 1, 2])
    done("recover", plain.src, plain.dst, "--strategy", plain.old)
    fails(3, *plain.words(), texts=["the task (recover there, convert here)"])
    done(*plain.words("--overwrite"))
    assert len(tree_bytes(plain.dst)) == 2


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
