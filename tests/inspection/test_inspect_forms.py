"""`plan`, `status`, `inspect`, `recover` and summaries of forms other than rank trees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.corpus import FIXTURES
from tests.forms import FINISHED, FORMS, to
from tests.running import Argument, done, fails
from tests.small import World, tensors
from tests.trees import read_checkpoint

FULL = tensors()


def make(form: str, world: World, *options: Argument) -> Path:
    """The small checkpoint as a form, in several files."""
    world.save(FULL)
    path = world.root / form
    if form in ("unified", "huggingface"):
        options = (*options, "--max-shard-size", "300B")
    done("convert", world.src, path, "--src-strategy", world.old, *to(form, world), *options)
    return path


@pytest.mark.parametrize("form", FINISHED)
def test_numbered_files_are_printed_as_files(form: str, world: World) -> None:
    world.save(FULL)
    out = world.root / "out"
    many: list[Argument] = ["--max-shard-size", "300B"] if form != "checkpoint2" else []
    words: list[Argument] = [world.src, out, "--src-strategy", world.old, *to(form, world), *many]
    planned = done("plan", *words).out
    assert "target file" in planned and "of source ranks" in planned
    output = done("convert", *words, "-v").err
    assert "files (0-" in output and "headers read: source ranks 0-3" in output
    assert "files done" in done("status", out).out
    assert done("status", out, "--json").json["form"] == form
    back = world.root / "back"
    planned = done("plan", out, back, "--dst-strategy", world.new, "--format", "ckpt").out
    assert "of source files" in planned and "target rank " in planned and "replicas replace" not in planned
    output = done("convert", out, back, "--dst-strategy", world.new, "--format", "ckpt", "-v").err
    assert "headers read: source files 0-" in output
    assert "contents of files 0-" in done("verify", out, "--headers-only").err


@pytest.mark.parametrize("form", FORMS[1:])
def test_recover_refuses_other_forms_than_rank_trees(form: str, world: World) -> None:
    target = make(form, world)
    fails(2, "recover", target, world.dst, "--strategy", world.new, texts=[form, "recover works on rank directories"])
    assert not world.dst.exists()


@pytest.mark.parametrize("form", FORMS[1:])
def test_inspect_shows_files_tensors_and_layouts(form: str, world: World) -> None:
    target = make(form, world)
    report = done("inspect", target, "--json").json
    assert (report["form"], report["complete"], report["findings"]) == (form, True, [])
    manifest = json.loads((target / "reshard-manifest.json").read_text())
    listing = {(str(target / file["file"]), file["size"]) for file in manifest["files"]}
    assert {(file["file"], file["bytes"]) for file in report["files"]} == listing
    assert report["bytes"] == sum(size for _, size in listing)
    assert report["full_bytes"] == sum(FULL[name].array.nbytes for name in FULL)
    tensors_ = {item["name"]: item for item in report["tensors"]}
    assert {name: item["shape"] for name, item in tensors_.items()} == {
        name: list(value.array.shape) for name, value in FULL.items()
    }
    assert report["values"] == ["global_step"]
    laid_out = form == "checkpoint2"
    assert tensors_["w"]["cuts"] == ([1, 2] if laid_out or form in ("hf-sharded", "dcp", "hyper-parallel") else [1, 1])
    assert tensors_["w"]["ranks"] == (2 if laid_out else None)
    assert report["step"] == ("41" if laid_out else None)
    output = done("inspect", target).out
    assert form in output and "global_step" in output and ("1 x 2 on 2 ranks" in output) == laid_out
    fails(2, "inspect", target, "--strategy", world.new, texts=["needs no strategy"])


def test_inspect_counts_files() -> None:
    """Two pieces of a tensor in one file."""
    report = done("inspect", FIXTURES / "dcp" / "w4_bricks" / "checkpoint", "--json").json
    assert {item["name"]: item["files"] for item in report["tensors"]} == {"old": 4, "pairs": 4, "wall": 4}


@pytest.mark.parametrize("form", FINISHED)
def test_inspect_lists_missing_files_and_tensors(form: str, world: World) -> None:
    target = make(form, world)
    path = next(path for path in sorted(target.rglob("*.safetensors")) if "w" in read_checkpoint(path))
    path.unlink()
    report = done("inspect", target, "--json").json
    assert not report["complete"]
    assert any(finding["refuses"] and path.name in finding["text"] for finding in report["findings"])
    assert str(path) not in [file["file"] for file in report["files"]] and report["files"]
    if form == "checkpoint2":
        assert {item["name"]: item["lost"] for item in report["tensors"]}["w"] == 1
    output = done("inspect", target).out
    assert "not complete" in output and "a conversion" in output and path.name in output


def test_inspect_marks_the_last_complete_iteration(world: World) -> None:
    target = make("checkpoint2", world)
    shutil.copytree(target / "iteration_00000041", target / "iteration_00000050")
    report = done("inspect", target, "--json").json
    assert [(item["iteration"], item["finished"], item["latest"]) for item in report["iterations"]] == [
        (41, True, True),
        (50, False, False),
    ]
    assert report["step"] == "41"
    assert done("inspect", target, "--step", 50, "--json").json["step"] == "50"
    assert "newer than the last finished iteration" in done("inspect", target).out
    fails(3, "inspect", target, "--step", 60, texts=["60"])
