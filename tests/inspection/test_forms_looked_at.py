"""What `plan`, `status`, `inspect`, `recover` and summaries say of checkpoints whose files are no ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.corpus import FIXTURES
from tests.forms import FINISHED, FORMS, to
from tests.running import Argument, done, fails
from tests.schemas import SCHEMAS, check
from tests.small import World, tensors
from tests.trees import read_checkpoint

FULL = tensors()


def make(form: str, world: World, *options: Argument) -> Path:
    """The small checkpoint as a form, in several files."""
    world.save(FULL)
    made = world.root / form
    if form in ("unified", "huggingface"):
        options = (*options, "--max-shard-size", "300")
    done("convert", world.src, made, "--src-strategy", world.old, *to(form, world), *options)
    return made


@pytest.mark.parametrize("form", FINISHED)
def test_numbered_files_are_printed_as_files(form: str, world: World) -> None:
    world.save(FULL)
    out = world.root / "out"
    many: list[Argument] = ["--max-shard-size", "300"] if form != "checkpoint2" else []
    words: list[Argument] = [world.src, out, "--src-strategy", world.old, *to(form, world), *many]
    planned = done("plan", *words).out
    assert "target file" in planned and "of source ranks" in planned
    said = done("convert", *words, "-v").err
    assert "files (0-" in said and "headers read: source ranks 0-3" in said
    assert "files done" in done("status", out).out
    assert done("status", out, "--json").json["form"] == form
    picture = world.root / "picture.svg"
    back = world.root / "back"
    planned = done("plan", out, back, "--dst-strategy", world.new, "--format", "ckpt", "--svg", picture).out
    assert "of source files" in planned and "target rank " in planned and "replicas replace" not in planned
    assert "source file" in picture.read_text() and "target rank" in picture.read_text()
    said = done("convert", out, back, "--dst-strategy", world.new, "--format", "ckpt", "-v").err
    assert "headers read: source files 0-" in said
    assert "files" in fails(2, "verify", out, says=["contents of files 0-"]).err


@pytest.mark.parametrize("form", FORMS[1:])
def test_recover_refuses_other_forms_than_rank_trees(form: str, world: World) -> None:
    made = make(form, world)
    fails(2, "recover", made, world.dst, "--strategy", world.new, says=[form, "recover works on rank directories"])
    assert not world.dst.exists()


@pytest.mark.parametrize("form", FORMS[1:])
def test_inspect_shows_files_tensors_and_layouts(form: str, world: World) -> None:
    made = make(form, world)
    found = done("inspect", made, "--json").json
    check(found, SCHEMAS / "inspect.v1.json")
    assert (found["form"], found["complete"], found["findings"]) == (form, True, [])
    manifest = json.loads((made / "reshard-manifest.json").read_text())
    listed = {(str(made / file["file"]), file["size"]) for file in manifest["files"]}
    assert {(file["file"], file["bytes"]) for file in found["files"]} == listed
    assert found["bytes"] == sum(size for _, size in listed)
    assert found["full_bytes"] == sum(FULL[name].array.nbytes for name in FULL)
    tensors_ = {item["name"]: item for item in found["tensors"]}
    assert {name: item["shape"] for name, item in tensors_.items()} == {
        name: list(value.array.shape) for name, value in FULL.items()
    }
    assert found["values"] == ["global_step"]
    laid_out = form == "checkpoint2"
    assert tensors_["w"]["cuts"] == ([1, 2] if laid_out or form in ("hf-sharded", "dcp", "hyper-parallel") else [1, 1])
    assert tensors_["w"]["ranks"] == (2 if laid_out else None)
    assert found["step"] == ("41" if laid_out else None)
    said = done("inspect", made).out
    assert form in said and "global_step" in said and ("1 x 2 on 2 ranks" in said) == laid_out
    fails(2, "inspect", made, "--strategy", world.new, says=["rank tree"])


def test_inspect_counts_files() -> None:
    """Two pieces of a tensor in one file."""
    found = done("inspect", FIXTURES / "dcp" / "w4_bricks" / "checkpoint", "--json").json
    assert {item["name"]: item["files"] for item in found["tensors"]} == {"old": 4, "pairs": 4, "wall": 4}


@pytest.mark.parametrize("form", FINISHED)
def test_inspect_lists_missing_files_and_tensors(form: str, world: World) -> None:
    made = make(form, world)
    path = next(path for path in sorted(made.rglob("*.safetensors")) if "w" in read_checkpoint(path))
    path.unlink()
    found = done("inspect", made, "--json").json
    check(found, SCHEMAS / "inspect.v1.json")
    assert not found["complete"]
    assert any(finding["refuses"] and path.name in finding["text"] for finding in found["findings"])
    assert str(path) not in [file["file"] for file in found["files"]] and found["files"]
    if form == "checkpoint2":
        assert {item["name"]: item["lost"] for item in found["tensors"]}["w"] == 1
    said = done("inspect", made).out
    assert "not complete" in said and "a conversion" in said and path.name in said


def test_inspect_marks_the_last_complete_iteration(world: World) -> None:
    made = make("checkpoint2", world)
    shutil.copytree(made / "iteration_00000041", made / "iteration_00000050")
    found = done("inspect", made, "--json").json
    assert [(item["iteration"], item["finished"], item["latest"]) for item in found["iterations"]] == [
        (41, True, True),
        (50, False, False),
    ]
    assert found["step"] == "41"
    assert done("inspect", made, "--step", 50, "--json").json["step"] == "50"
    assert "newer than the last finished iteration" in done("inspect", made).out
    fails(3, "inspect", made, "--step", 60, says=["60"])
