"""What `plan`, `status`, `inspect`, `recover` and summaries say of checkpoints whose files are no ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import Argument, done, fails
from tests.small import World, tensors
from tests.test_forms import FORMS, to

FULL = tensors()


def make(form: str, world: World, *options: Argument) -> Path:
    """The small checkpoint as a form, in several files."""
    world.save(FULL)
    made = world.root / form
    if form in ("unified", "huggingface"):
        options = (*options, "--max-shard-size", "300")
    done("convert", world.src, made, "--src-strategy", world.old, *to(form, world), *options)
    return made


@pytest.mark.parametrize("form", FORMS[1:])
def test_numbers_of_files_are_called_files(form: str, world: World) -> None:
    world.save(FULL)
    out = world.root / "out"
    many: list[Argument] = ["--max-shard-size", "300"] if form != "checkpoint2" else []
    words: list[Argument] = [world.src, out, "--src-strategy", world.old, *to(form, world), *many]
    planned = done("plan", *words).out
    assert "target file" in planned and "of source ranks" in planned
    said = done("convert", *words).err
    assert "files (0-" in said and "headers of ranks 0-3 read" in said and "all files are there" in said
    assert "files done" in done("status", out).out
    assert done("status", out, "--json").json["form"] == form
    picture = world.root / "picture.svg"
    back = world.root / "back"
    planned = done("plan", out, back, "--dst-strategy", world.new, "--format", "ckpt", "--svg", picture).out
    assert "of source files" in planned and "target rank " in planned and "replicas stand in" not in planned
    assert "source file" in picture.read_text() and "target rank" in picture.read_text()
    assert "headers of files 0-" in done("convert", out, back, "--dst-strategy", world.new, "--format", "ckpt").err
    assert "files" in fails(2, "verify", out, says=["contents of files 0-"]).err


@pytest.mark.parametrize("form", FORMS[1:])
def test_what_is_no_rank_tree_is_not_recovered(form: str, world: World) -> None:
    made = make(form, world)
    fails(2, "recover", made, world.dst, "--strategy", world.new, says=[form, "no ranks"])
    assert not world.dst.exists()
