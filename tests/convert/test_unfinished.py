"""Incomplete target directories: no loader accepts one."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from tests.running import Argument, done, fails, reshard
from tests.small import World, tensors

FULL = tensors()
#: The options that write a form, and what its loaders wait for, if they wait.
FORMS: dict[str, tuple[list[Argument], str]] = {
    "checkpoint2": (["--dst-strategy", "same"], "latest_checkpointed_iteration.txt"),
    "unified": (["--max-shard-size", "200B"], "param_name_map.json"),
    "huggingface": (["--max-shard-size", "200B"], "model.safetensors.index.json"),
    # Only the marker shows loaders that files are missing.
    "hf-sharded": (["--shards", "4"], "reshard-manifest.json"),
    "dcp": (["--shards", "4"], ".metadata"),
    "hyper-parallel": (["--shards", "4"], ".metadata"),
}
UNFINISHED = "reshard-unfinished.safetensors"


def words(form: str, world: World, dst: Path) -> list[Argument]:
    return [world.src, dst, "--src-strategy", world.old, "--to", form, *FORMS[form][0]]


def weights(root: Path) -> list[Path]:
    """What loaders find that look for nothing but weights, in the directory that has them."""
    return sorted(path for path in root.rglob("*") if path.suffix in (".safetensors", ".distcp"))


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a directory by its path, except records and the recorded strategy."""
    paths = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not name.startswith((".reshard", "reshard-man"))}


def everything(root: Path) -> dict[str, bytes]:
    """Every file of a directory, the records too, by its path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def all_can_be_read(paths: list[Path]) -> bool:
    """Whether a loader that opens every file comes through."""
    try:
        for path in paths:
            if path.suffix == ".distcp":
                continue
            with safe_open(str(path), "np"):
                pass
    except SafetensorError:
        return False
    return True


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_an_incomplete_directory_contains_a_file_that_no_loader_accepts(form: str, world: World) -> None:
    world.save(FULL)
    done("convert", *words(form, world, world.root / "whole"))
    files = len(json.loads((world.root / "whole" / "reshard-manifest.json").read_text())["files"])
    assert files > 2
    for number in range(files):
        done("by-rank", number, *words(form, world, world.dst))
        stored_tensors = weights(world.dst)
        last = number == files - 1
        # Never a file alone, which MindSpore would take for everything.
        assert len(stored_tensors) == number + (1 if last else 2)
        assert all_can_be_read(stored_tensors) == last
        assert (world.dst / FORMS[form][1]).exists() == last
        assert done("status", world.dst, "--json").json["complete"] == last
    assert contents(world.dst) == contents(world.root / "whole")


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_the_marker_returns_with_a_missing_file(form: str, world: World) -> None:
    world.save(FULL)
    done("convert", *words(form, world, world.dst))
    before = contents(world.dst)
    first, *_, last = weights(world.dst)
    first.unlink()
    last.unlink()
    done("by-rank", 0, *words(form, world, world.dst))
    assert not all_can_be_read(weights(world.dst)) and not (world.dst / FORMS[form][1]).exists()
    done("convert", *words(form, world, world.dst))
    assert all_can_be_read(weights(world.dst)) and contents(world.dst) == before


@pytest.mark.parametrize("form", FORMS)
def test_the_same_command_removes_a_remaining_marker(form: str, world: World) -> None:
    """Of a run that was killed just before it had removed it."""
    world.save(FULL)
    done("convert", *words(form, world, world.dst))
    before = contents(world.dst)
    (weights(world.dst)[0].parent / UNFINISHED).write_bytes(b"not complete")
    done("convert", *words(form, world, world.dst))
    assert contents(world.dst) == before


@pytest.mark.deep
@pytest.mark.parametrize("form", ["ranks", *FORMS])
def test_files_of_another_run_are_refused_before_writing(form: str, world: World) -> None:
    """As after `cp -r`: the copy is complete, and stays so."""
    world.save(FULL)
    typed: list[Argument] = ["convert", *words(form, world, world.dst)] if form in FORMS else world.words()
    done(*typed)
    files = [file["file"] for file in json.loads((world.dst / "reshard-manifest.json").read_text())["files"]]
    for name in files:
        os.utime(world.dst / name, (1, 1))
    before = everything(world.dst)
    for again in (typed, ["resume", world.dst]):
        for option in ([], ["--dry-run"]):
            fails(3, *again, *option, texts=["already holds", "modified after"])
            assert everything(world.dst) == before
    fails(3, "plan", *typed[1:], texts=["already holds"])
    assert everything(world.dst) == before
    done(*typed, "--overwrite")
    done("verify", world.dst, "--src", world.src, "--src-strategy", world.old)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__9_0.distcp"])
def test_parts_of_another_checkpoint_are_refused_before_writing(name: str, world: World) -> None:
    world.save(FULL)
    world.dst.mkdir()
    (world.dst / name).write_bytes(b"of somebody else")
    typed: list[Argument] = ["convert", *words("dcp", world, world.dst)]
    for again in (["plan", *typed[1:]], [*typed, "--dry-run"], typed):
        fails(3, *again, texts=["holds", name])
        assert everything(world.dst) == {name: b"of somebody else"}


@pytest.mark.parametrize("form", FORMS)
def test_an_abandoned_conversion_to_another_form_leaves_no_marker(form: str, world: World) -> None:
    world.save(FULL)
    done("by-rank", 0, *words(form, world, world.dst))
    other = "unified" if form == "huggingface" else "huggingface"
    done("convert", *words(other, world, world.dst), "--overwrite")
    done("convert", *words(other, world, world.root / "whole"))
    assert contents(world.dst) == contents(world.root / "whole")


def test_ranks_that_replace_a_form_leave_no_marker(world: World) -> None:
    world.save(FULL)
    done("by-rank", 0, *words("checkpoint2", world, world.dst))
    fails(3, *world.words(), texts=["--overwrite"])
    world.convert("--overwrite")
    assert not weights(world.dst) and len(world.found()) == 2


@pytest.mark.deep
@pytest.mark.parametrize("call", ["rename", "unlink"])
@pytest.mark.parametrize("form", FORMS)
def test_no_loader_accepts_a_conversion_stopped_at_any_moment(
    form: str, call: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(FULL)
    done("convert", *words(form, world, world.root / "whole"))
    whole = contents(world.root / "whole")
    parts = {str(path.relative_to(world.root / "whole")) for path in weights(world.root / "whole")}
    plain = getattr(os, call)
    for at in itertools.count(1):
        stop = Stop(plain, at)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, stop)
            reshard("convert", *words(form, world, world.dst))
        stored_tensors = weights(world.dst)
        target = {str(path.relative_to(world.dst)) for path in stored_tensors}
        if (world.dst / FORMS[form][1]).exists() or target == parts:
            assert parts <= target
        else:
            assert not stored_tensors or not all_can_be_read(stored_tensors), (at, target)
        done("convert", *words(form, world, world.dst))
        assert contents(world.dst) == whole
        shutil.rmtree(world.dst)
        if stop.calls < at:
            break
    assert at >= 3


class Stop:
    """A call to the system that fails from a certain time on, so that nothing else happens, as after a kill."""

    def __init__(self, plain: Callable[..., None], at: int) -> None:
        self.plain, self.at, self.calls = plain, at, 0

    def __call__(self, *args: object, **options: object) -> None:
        self.calls += 1
        if self.calls >= self.at:
            raise OSError(errno.EIO, "no")
        self.plain(*args, **options)
