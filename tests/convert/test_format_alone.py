"""Conversions that only change the format of rank files: each rank keeps its own cut, whatever it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reshard.errors import UsageError
from tests.asking import conversion_of
from tests.running import Argument, done, fails, warns
from tests.small import World, tensors
from tests.trees import (
    Value,
    read_checkpoint,
    read_tree,
    safetensors_metadata,
    same_checkpoints,
    same_ranks,
    scalar,
    text,
    value,
    write_checkpoint,
    write_tree,
)

SIZES = [2, 3, 5]
FILE = "rank_{rank}/net-1_10.ckpt"


def content(rank: int, label: str = "") -> dict[str, Value]:
    """Of one name, every rank holds another shape and other values; some names are on one rank only."""
    return {
        "w": value(f"{label}w{rank}", (4, SIZES[rank])),
        f"only.{rank}": value(f"{label}only", (SIZES[rank],), "BFloat16"),
        "global_step": scalar(41 + rank, shape=(1,)),
        "loss_scale": scalar(rank),
    }


def tree(label: str = "") -> dict[int, dict[str, Value]]:
    return {rank: content(rank, label) for rank in range(len(SIZES))}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "src", tree(), FILE)


def words(src: Path, *options: Argument, dst: str = "dst", format: str = "safetensors") -> list[Argument]:
    return ["convert", src, src.parent / dst, "--format", format, *options]


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_without_strategies_every_rank_is_copied_as_it_is_cut(src: Path, format: str) -> None:
    result = done(*words(src, "--verify", format=format))
    warns(result, "3 rank files copied, still cut as before", "verified: no differences")
    assert all(path.suffix == f".{format}" for path in (src.parent / "dst").glob("rank_*/*"))
    same_ranks(read_tree(src.parent / "dst"), tree())
    back = src.parent / "dst"
    done(*words(back, dst="back", format="ckpt"))
    same_ranks(read_tree(src.parent / "back"), tree())


def test_text_is_copied_to_ckpt_and_left_out_of_safetensors(tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {0: {"w": value("w", (2,)), "note": text("on one rank")}}, FILE)
    done(*words(src, dst="same", format="ckpt"))
    same_checkpoints(read_tree(tmp_path / "same")[0], read_checkpoint(src / FILE.format(rank=0)))
    warns(done(*words(src)), "text", "note")
    assert sorted(read_tree(tmp_path / "dst")[0]) == ["w"]


def test_types_that_mindspore_does_not_read_are_named(tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {0: {"w": value("w", (4,), "F8_E4M3")}}, "rank_{rank}/net-1_10.safetensors")
    warns(done(*words(src)), "MindSpore", "w", "Float8")
    fails(3, *words(src, dst="other", format="ckpt"), texts=["w", "Float8"])


def test_the_newest_step_that_every_rank_holds_is_copied(src: Path) -> None:
    write_tree(src, {rank: content(rank, "new") for rank in (0, 2)}, "rank_{rank}/net-1_11.ckpt")
    warns(done(*words(src)), "1_11", "rank 1")
    same_ranks(read_tree(src.parent / "dst"), tree())
    fails(3, *words(src, "--no-fallback", dst="other"), texts=["1_11", "rank 1"])
    fails(3, *words(src, "--step", "1_11", dst="other"), texts=["1_11", "rank 1"])


@pytest.mark.parametrize("damage", [b"", b"\x0a\xff\xff"])
def test_a_rank_without_a_readable_file_makes_the_step_incomplete(src: Path, damage: bytes) -> None:
    write_tree(src, tree("new"), "rank_{rank}/net-1_11.ckpt")
    (src / "rank_1/net-1_11.ckpt").write_bytes(damage)
    warns(done(*words(src)), "rank_1/net-1_11.ckpt")
    same_ranks(read_tree(src.parent / "dst"), tree())
    (src / "rank_1/net-1_10.ckpt").unlink()
    fails(3, *words(src, dst="other"), texts=["rank 1"])
    assert not (src.parent / "other").exists()


def test_missing_ranks_are_an_error(src: Path) -> None:
    (src / "rank_3").mkdir()
    fails(3, *words(src), texts=["rank 3"])
    (src / "rank_3").rmdir()
    shutil.rmtree(src / "rank_1")
    fails(3, *words(src), texts=[src, "rank 1"])
    assert not (src.parent / "dst").exists()


def test_by_rank_and_shares_write_the_same_conversion(src: Path) -> None:
    dst = src.parent / "dst"
    done("by-rank", 2, src, dst, "--format", "safetensors")
    same_ranks(read_tree(dst), {2: content(2)})
    for share in range(2):
        done(*words(src, "--shard", f"{share}/2"))
    same_ranks(read_tree(dst), tree())
    assert (dst / "reshard-manifest.json").exists()


def test_by_rank_needs_the_file_of_its_rank_only(src: Path) -> None:
    (src / "rank_1/net-1_10.ckpt").unlink()
    dst = src.parent / "dst"
    done("by-rank", 2, src, dst, "--format", "safetensors")
    same_ranks(read_tree(dst), {2: content(2)})
    fails(3, "by-rank", 1, src, dst, "--format", "safetensors", texts=["rank 1"])


def test_resume_writes_the_missing_ranks_and_verify_compares_with_the_source(src: Path) -> None:
    dst = src.parent / "dst"
    done(*words(src))
    kept = (dst / "rank_0/checkpoint_0.safetensors").stat()
    shutil.rmtree(dst / "rank_1")
    done("resume", dst)
    assert (dst / "rank_0/checkpoint_0.safetensors").stat() == kept
    same_ranks(read_tree(dst), tree())
    done("verify", dst, "--src", src)
    for rank, other in ((1, content(2)), (2, {**content(2), "w": content(1)["w"]})):
        path = dst / f"rank_{rank}/checkpoint_{rank}.safetensors"
        sound = path.read_bytes()
        write_checkpoint(path, other)
        assert "w" in fails(4, "verify", dst, "--src", src).out
        path.write_bytes(sound)


@pytest.mark.parametrize("mark", [None, "True", "False"])
def test_the_mark_of_a_deduplicated_save_is_kept(tmp_path: Path, mark: str | None) -> None:
    """Without a mark in the source, loaders must not take the copy for complete files."""
    options = {} if mark is None else {"metadata": {"remove_redundancy": mark}}
    src = write_tree(
        tmp_path / "src", tree(), f"rank_{{rank}}/net-1_10.{'ckpt' if mark is None else 'safetensors'}", **options
    )
    done(*words(src, "--verify"))
    metadata = safetensors_metadata(tmp_path / "dst/rank_1/checkpoint_1.safetensors")
    assert (metadata["format"], metadata.get("remove_redundancy")) == ("ms", mark)


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "safetensors", "--src-strategy", "none"),
        ("--format", "safetensors", "--dst-strategy", "same"),
        ("--format", "safetensors", "--cast", "BFloat16"),
        ("--format", "safetensors", "--rename", "w=v"),
        ("--format", "same"),
        (),
    ],
)
def test_any_other_change_needs_both_strategies(src: Path, options: tuple[str, ...]) -> None:
    fails(2, "convert", src, src.parent / "dst", *options, texts=["strategy"])
    assert not (src.parent / "dst").exists()


@pytest.mark.parametrize(
    "option",
    ["--src-strategy", "--dst-strategy", "--to", "--step", "--prefix", "--include", "--rename", "--ranks", "--shards"],
)
def test_an_empty_value_is_wrong_usage(world: World, option: str) -> None:
    """As of an unset variable of a shell, which must not turn a conversion into a copy."""
    world.save(tensors())
    for typed in ([option, ""], [f"{option}="], [f"{option.replace('-', '_').replace('__', '--')}="]):
        fails(2, "convert", world.src, world.dst, "--format", "safetensors", *typed, texts=[option, "empty"])
    assert not world.dst.exists()


@pytest.mark.parametrize("command", [("stats", "--fail-on"), ("view", "-o")])
def test_an_empty_value_is_wrong_usage_for_every_command(saved: World, command: tuple[str, ...]) -> None:
    fails(2, *command, "", saved.src, texts=[command[-1], "empty"])
    fails(2, "inspect", saved.src, "--strategy", "", texts=["--strategy", "empty"])
    fails(2, "convert", "", saved.dst, texts=["SRC", "empty"])


def test_python_changes_the_format_alone_too(src: Path) -> None:
    dst = src.parent / "dst"
    conversion_of(src, dst, format="safetensors").convert(verify=True)
    same_ranks(read_tree(dst), tree())
    for options in ({"dst_strategy": ""}, {"include": ["w", ""]}):
        with pytest.raises(UsageError, match=r"(strategy|include) is empty"):
            conversion_of(src, dst, format="safetensors", **options).convert()
