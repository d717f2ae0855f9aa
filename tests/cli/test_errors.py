"""Every promised error: its exit status, and the file, rank or parameter that it names."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.corpus import FIXTURES
from tests.running import Argument, fails, reshard
from tests.small import World, tensors
from tests.trees import same_ranks, tree_bytes, write_checkpoint

FULL = tensors()

# Wrong usage.


@pytest.mark.parametrize("missing", ["src", "dst"])
@pytest.mark.parametrize("command", ["transform-dir", "by-rank", "rank-list"])
def test_a_missing_strategy_option_is_wrong_usage_that_suggests_none(world: World, command: str, missing: str) -> None:
    world.save(FULL)
    arguments: list[Argument] = ["--dst-strategy", world.new] if missing == "src" else ["--src-strategy", world.old]
    places: dict[str, list[Argument]] = {
        "transform-dir": [world.src, world.dst],
        "by-rank": [0, world.src, world.dst],
        "rank-list": [0],
    }
    fails(2, command, *places[command], *arguments, texts=[f"--{missing}-strategy", "none"])


@pytest.mark.parametrize("rank", ["2", "99", "x", "0_1", "0-1", "٠"])
@pytest.mark.parametrize("command", ["by-rank", "rank-list"])
def test_a_rank_out_of_range_or_in_other_notation_is_wrong_usage(world: World, command: str, rank: str) -> None:
    world.save(FULL)
    places = [world.src, world.dst] if command == "by-rank" else []
    fails(
        2, command, rank, *places, "--src-strategy", world.old, "--dst-strategy", world.new, texts=[rank],
    )  # fmt: skip
    assert not world.dst.exists()


@pytest.mark.parametrize("ranks", ["2", "0-2", "x", "1-0", "0,,1", ""])
def test_target_ranks_out_of_range_are_wrong_usage(world: World, ranks: str) -> None:
    world.save(FULL)
    world.refuses(2, ranks.split("-")[-1], options=("--ranks", ranks))


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "onnx"), ("--jobs", "0"), ("--jobs", "many"), ("--max-memory", "much"), ("--io", "fast"),
        ("--step", "ten"), ("--crc", "maybe"), ("--no-such-option",),
    ],
)  # fmt: skip
def test_option_values_out_of_their_range_are_wrong_usage(world: World, options: tuple[str, ...]) -> None:
    world.save(FULL)
    world.refuses(2, options[0], options=options)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        (("--max-memory", "64"), "64G"),
        (("--format", "hf"), "--to hf"),
        (("--format", "dcp"), "--to dcp"),
        (("--to", "safetensors"), "--format safetensors"),
    ],
)
def test_a_value_of_another_kind_names_what_to_type_instead(
    world: World, options: tuple[str, ...], instead: str
) -> None:
    world.save(FULL)
    world.refuses(2, instead, options=options)


def test_a_configuration_that_is_missing_names_what_the_option_takes(world: World) -> None:
    world.save(FULL)
    world.refuses(3, "q3", "config.json", "--names", options=("--names", "qwen3", "--config", "q3"))


@pytest.mark.parametrize("option", ["--shard", "--scheduler", "--ranks"])
def test_by_rank_has_no_options_for_other_ranks(world: World, option: str) -> None:
    world.save(FULL)
    fails(2, *world.words(0, option, "0", command="by-rank"), texts=[option])


@pytest.mark.parametrize("place", [".", "out", "rank_0", "../src", "../src/deep/er"])
def test_a_target_inside_its_source_is_wrong_usage(world: World, place: str) -> None:
    world.save(FULL)
    before = sorted(path for path in world.src.rglob("*"))
    world.dst = world.src / place
    fails(2, *world.words(), texts=[str(world.src)])
    assert sorted(path for path in world.src.rglob("*")) == before


def test_a_source_inside_its_target_is_wrong_usage(world: World) -> None:
    world.src = world.dst / "src"
    world.save(FULL)
    fails(2, *world.words(), texts=[str(world.src)])


def test_links_do_not_hide_that_source_and_target_overlap(world: World) -> None:
    world.save(FULL)
    link = world.root / "link"
    link.symlink_to(world.src)
    world.dst = link / "out"
    fails(2, *world.words(), texts=["out"])


def test_a_single_source_file_may_not_be_replaced(world: World) -> None:
    path = write_checkpoint(world.dst / "rank_0" / "checkpoint_0.ckpt", FULL)
    before = path.read_bytes()
    result = reshard(
        "transform-dir", path, world.dst, "--src-strategy", "none", "--dst-strategy", "none", "--overwrite"
    )
    assert result.status == 2, result.err
    assert path.read_bytes() == before


# Sources that are missing or not checkpoints.


def test_a_source_that_does_not_exist_is_named(world: World) -> None:
    world.refuses(3, str(world.src))


def test_a_source_file_that_does_not_exist_is_named(world: World) -> None:
    path = world.root / "absent.ckpt"
    fails(
        3, "transform-dir", path, world.dst, "--src-strategy", "none", "--dst-strategy", world.new,
        texts=[str(path)],
    )  # fmt: skip


def test_a_source_without_checkpoints_is_named(world: World) -> None:
    world.src.mkdir()
    (world.src / "README").write_text("nothing here")
    world.refuses(3, str(world.src))


def test_without_cryptography_the_error_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    words: list[Argument] = ["decrypt", FIXTURES / "ckpt_files" / "encrypted_gcm.ckpt", tmp_path / "plain"]
    fails(3, *words, "--key-file", tmp_path / "key", texts=["encrypted_gcm", "pip install cryptography"])


# Checksums.


# Strategies that are wrong.


# Targets.


def test_existing_targets_without_records_are_refused_without_overwrite(world: World) -> None:
    world.save(FULL)
    world.convert()
    before = tree_bytes(world.dst)
    shutil.rmtree(world.dst / ".reshard")
    world.save(tensors("other "))
    fails(3, *world.words(), texts=[str(world.dst), "--overwrite"])
    assert tree_bytes(world.dst) == before
    world.convert("--overwrite")
    same_ranks(world.found(), world.expected(tensors("other ")))


def test_foreign_checkpoints_in_the_target_are_refused(world: World) -> None:
    world.save(FULL)
    foreign = write_checkpoint(world.dst / "rank_0" / "net-1_10.ckpt", FULL)
    fails(3, *world.words(), texts=[str(world.dst)])
    assert [str(path) for path in world.dst.rglob("*.ckpt")] == [str(foreign)]


def test_insufficient_disk_space_is_an_error_before_writing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    real = os.statvfs

    def full(path: str) -> os.statvfs_result:
        actual = list(real(path))
        actual[3] = actual[4] = 0
        return os.statvfs_result(actual)

    monkeypatch.setattr(os, "statvfs", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (10, 10, 0))
    world.refuses(1, "space")


def test_the_mode_of_targets_follows_the_umask(world: World) -> None:
    world.save(FULL)
    for path in world.src.rglob("*.ckpt"):
        path.chmod(0o400)
    before = os.umask(0o027)
    try:
        world.convert()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in world.dst.rglob("*.ckpt")} == {0o640}


def test_a_traceback_shows_only_with_debug(world: World) -> None:
    result = reshard(*world.words("--debug"))
    assert result.status == 3
    assert "Traceback" in result.err
    assert "Traceback" not in reshard(*world.words()).err
