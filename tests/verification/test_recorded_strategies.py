"""`verify OUT --src SRC` reads strategies from the records in OUT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.forms import to
from tests.running import Argument, done, fails
from tests.small import World, tensors
from tests.trees import layout, single, write_strategy


@pytest.fixture
def converted(world: World) -> World:
    world.save(tensors())
    world.convert()
    return world


def verify(world: World, *options: Argument) -> list[Argument]:
    return ["verify", world.dst, "--src", world.src, *options]


def test_verify_reads_strategies_from_records(converted: World) -> None:
    output = done(*verify(converted)).err
    assert f"--src-strategy={converted.old} --dst-strategy={converted.new}" in output
    assert "verified: no differences" in output
    path = converted.dst / "rank_1" / "checkpoint_1.ckpt"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    fails(4, *verify(converted), texts=["must not be used"])


def test_typed_strategies_override_recorded_ones(converted: World) -> None:
    assert (
        "recorded" not in done(*verify(converted, "--src-strategy", converted.old, "--dst-strategy", converted.new)).err
    )
    moved = converted.root / "moved.ckpt"
    shutil.move(converted.old, moved)
    assert f"options: --dst-strategy={converted.new}\n" in done(*verify(converted, "--src-strategy", moved)).err
    other = write_strategy(converted.root / "other", single({"w": layout([2], [0, -1])}))
    fails(4, *verify(converted, "--src-strategy", moved, "--dst-strategy", other), texts=["must not be used"])


def test_a_missing_or_changed_recorded_strategy_is_an_error(converted: World) -> None:
    content = converted.new.read_bytes()
    converted.new.write_bytes(converted.old.read_bytes())
    fails(2, *verify(converted), texts=["--dst-strategy is missing", converted.new, "has changed"])
    converted.new.unlink()
    fails(2, *verify(converted), texts=["--dst-strategy is missing", converted.new, "does not exist"])
    converted.new.write_bytes(content)
    shutil.rmtree(converted.dst / ".reshard")
    (converted.dst / "reshard-manifest.json").unlink()
    fails(2, *verify(converted), texts=["--src-strategy and --dst-strategy are missing"])


def test_a_missing_directory_is_reported_before_a_missing_strategy(converted: World) -> None:
    shutil.rmtree(converted.dst)
    fails(3, *verify(converted), texts=[f"{converted.dst}: does not exist"])


def test_a_source_that_is_not_the_recorded_one_is_named_if_it_does_not_fit(converted: World) -> None:
    sentence = f"{converted.dst} was converted from {converted.src}, not from "
    command = f"reshard verify {converted.dst} --src {converted.src}"
    other = converted.root / "other"
    shutil.copytree(converted.src, other)
    words: list[Argument] = ["verify", converted.dst, "--src", other]
    # A copy at another place is as good.
    assert "was converted from" not in done(*words).err
    # More ranks than the recorded strategy has.
    shutil.copytree(other / "rank_0", other / "rank_9")
    fails(3, *words, texts=[sentence, command])
    shutil.rmtree(other)
    fails(3, *words, texts=[sentence, command])
    moved = shutil.move(converted.src, converted.root / "moved")
    converted.save(tensors("other "))
    shutil.move(converted.src, other)
    shutil.move(moved, converted.src)
    assert sentence in fails(4, *words, texts=["must not be used"]).err
    # Without the recorded source, the sentence has no command.
    shutil.rmtree(converted.src)
    assert command not in fails(4, *words, texts=[sentence]).err


def test_other_forms_require_no_typed_strategy(world: World, tmp_path: Path) -> None:
    world.save(tensors())
    for number, words in enumerate((["checkpoint2", "--dst-strategy", "same"], ["huggingface"])):
        out = tmp_path / f"out{number}"
        done("convert", world.src, out, "--src-strategy", world.old, "--to", *words)
        assert "verified: no differences" in done("verify", out, "--src", world.src).err
    ranks = tmp_path / "ranks"
    done("convert", tmp_path / "out0", ranks, "--dst-strategy", world.new, "--format", "ckpt")
    assert "verified: no differences" in done("verify", ranks, "--src", tmp_path / "out0").err


@pytest.mark.parametrize("form", ["checkpoint2", "hf-sharded", "dcp", "hyper-parallel", "unified", "huggingface"])
def test_verify_of_an_interrupted_copy_names_the_command_that_completes_it(world: World, form: str) -> None:
    world.save(tensors())
    whole, part = world.root / "whole", world.root / "part"
    size: list[Argument] = ["--max-shard-size", "100B"] if form in ("huggingface", "unified") else []
    words = ["--shards", 2] if form in ("hf-sharded", "dcp") else to(form, world)[2:]
    done("convert", world.src, whole, "--src-strategy", world.old, "--to", form, *words, *size)
    files = json.loads((whole / "reshard-manifest.json").read_text())["files"]
    shutil.copytree(whole, part)
    (part / "reshard-manifest.json").unlink()
    (part / files[-1]["file"]).unlink()

    sources: list[list[Argument]] = [["--src", world.src], []]
    for source in sources:
        fails(3, "verify", part, *source, texts=[f"reshard resume {part}"])
    resumed = done("resume", part).err
    assert "shards:" not in resumed
    verified = done("verify", part, "--src", world.src).err
    assert "no differences" in verified and "shards:" not in verified
