"""Damaged input and files of other kinds: errors, never hangs or tracebacks.

What the readers say of damaged content is tested with each reader; here are the commands as a whole,
special files, impossible sizes, and names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.bounds import refused, within
from tests.checkpoint_writing import header_bytes, write_ckpt
from tests.running import Argument, done, reshard
from tests.small import World, tensors
from tests.special_files import SPECIAL
from tests.strategy_writing import layout, numbers, protobuf
from tests.trees import value, write_checkpoint
from tests.wire import field

# Special files


def uses_of_a_file(world: World, file: Path) -> dict[str, list[Argument]]:
    """Every command that takes a file, with this one."""
    out = world.root / "out"
    strategies: list[Argument] = ["--src-strategy", world.old, "--dst-strategy", world.new]
    return {
        "inspect": ["inspect", file],
        "source": ["transform-dir", file, out, "--src-strategy", "none", "--dst-strategy", world.new],
        "source of one rank": ["by-rank", 0, file, out, "--src-strategy", "none", "--dst-strategy", world.new],
        "tree": ["transform-dir", file.parent.parent, out, *strategies],
        "pattern": ["transform-dir", f"{file.parent.parent}/rank_{{rank}}/{file.name}", out, *strategies],
        "source strategy": ["transform-dir", world.src, out, "--src-strategy", file, "--dst-strategy", world.new],
        "target strategy": ["rank-list", 0, "--src-strategy", world.old, "--dst-strategy", file],
        "shown strategy": ["strategy", "show", file],
        "directory of strategies": ["strategy", "show", file.parent],
        "merged directory": ["merge-pipeline", file.parent, world.root / "merged.ckpt"],
        "group_info": ["group-info", "inspect", file],
    }


USES = [
    "inspect", "source", "source of one rank", "tree", "pattern", "source strategy", "target strategy",
    "shown strategy", "directory of strategies", "merged directory", "group_info",
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("ending", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_fifo_or_device_is_refused_without_waiting(world: World, kind: str, ending: str, use: str) -> None:
    world.save(tensors())
    file = world.root / "odd" / "rank_0" / f"net-1_10{ending}"
    file.parent.mkdir(parents=True)
    with SPECIAL[kind](file):
        refused(3, *uses_of_a_file(world, file)[use])


@pytest.mark.parametrize("kind", ["fifo", "socket", "endless device", "directory"])
def test_merge_pipeline_to_a_special_file_is_refused(world: World, kind: str) -> None:
    target = world.root / "merged.ckpt"
    with SPECIAL[kind](target):
        refused(3, "merge-pipeline", world.old.parent, target, texts=["is not replaced"])


@pytest.mark.parametrize("kind", ["fifo", "socket", "endless device", "loop of links", "missing"])
def test_special_files_beside_checkpoints_are_skipped(world: World, kind: str) -> None:
    world.save(tensors())
    with SPECIAL[kind](world.src / "rank_0" / "net-9_99.ckpt"), within(20):
        done(*world.words())
    assert world.found().keys() == {0, 1}


# Something else than it should be


KINDS = ["checkpoint", "safetensors", "strategy", "group_info", "empty", "text", "zeros"]
# An empty file is a checkpoint of nothing.
RIGHT = {
    "inspect": ["checkpoint", "empty"],
    "source": ["checkpoint", "empty"],
    "source strategy": ["strategy"],
    "target strategy": ["strategy"],
    "shown strategy": ["strategy"],
    "group_info": ["group_info"],
}


@pytest.mark.parametrize(
    ("arguments", "use"), [(kind, use) for kind in KINDS for use in RIGHT if kind not in RIGHT[use]]
)
def test_a_file_of_another_kind_is_refused_by_name(world: World, arguments: str, use: str) -> None:
    world.save(tensors())
    contents = {
        "checkpoint": (world.src / "rank_0" / "net-1_10.ckpt").read_bytes(),
        "safetensors": header_bytes({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}) + b"x",
        "strategy": world.old.read_bytes(),
        "group_info": field(1, field(1, "g") + field(2, numbers([0, 1]))) + field(2, numbers([0])),
        "empty": b"",
        "text": b"just some words\n" * 10,
        "zeros": bytes(4096),
    }
    file = world.root / "odd" / "rank_0" / "given.ckpt"
    file.parent.mkdir(parents=True)
    file.write_bytes(contents[arguments])
    refused(3, *uses_of_a_file(world, file)[use], texts=[file])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_are_refused(world: World) -> None:
    world.save(tensors())
    file = world.root / "odd" / "rank_0" / "given.ckpt"
    file.parent.mkdir(parents=True)
    file.write_bytes(world.old.read_bytes())
    file.chmod(0)
    for use in uses_of_a_file(world, file).values():
        refused(3, *use)


# Names


NAMES = ["a\0b", "../../etc/passwd", "/etc/passwd", "..", ".", " ", "a\nb", "\x1b[31mred", "\u202egnp", "-"]


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("name", NAMES)
def test_parameter_names_are_never_paths(tmp_path: Path, name: str, ending: str) -> None:
    write_ckpt(tmp_path / "one.ckpt", {name: np.arange(8, dtype="f4").reshape(2, 4)})
    strategy = tmp_path / "s.ckpt"
    strategy.write_bytes(protobuf({name: layout([2], [0, -1])}))
    before = sorted(path for path in tmp_path.rglob("*"))
    with within(20):
        done("strategy", "show", strategy)
        done(
            "transform-dir", tmp_path / "one.ckpt", tmp_path / "out",
            "--src-strategy", "none", "--dst-strategy", strategy, "--format", ending,
        )  # fmt: skip
        for rank in range(2):
            (report,) = done(
                "inspect", tmp_path / "out" / f"rank_{rank}" / f"checkpoint_{rank}.{ending}", "--json"
            ).json["tensors"]
            assert (report["name"], report["shape"]) == (name, [1, 4])
    assert all(tmp_path / "out" in [path, *path.parents] for path in {*tmp_path.rglob("*")} - {*before})


@pytest.mark.parametrize("prefix", ["../x", "a/b", "/x", ".hidden"])
def test_a_prefix_cannot_leave_the_rank_directory(world: World, prefix: str) -> None:
    world.save(tensors())
    before = sorted(world.root.rglob("*"))
    refused(2, *world.words("--prefix", prefix), texts=[prefix])
    assert sorted(world.root.rglob("*")) == before


@pytest.mark.parametrize("name", ["rank_4", "rank_0001"])
def test_rank_directories_beyond_the_strategy_are_refused(world: World, name: str) -> None:
    world.save(tensors())
    (world.src / "rank_1").rename(world.src / name)
    if int(name[5:]) == 1:
        done(*world.words())
    else:
        refused(3, *world.words(), texts=[world.src])


@pytest.mark.parametrize("name", ["net\n-1_10", "net\x1b[31m-1_10"])
def test_odd_file_names_are_read(world: World, name: str) -> None:
    world.save(tensors(), pattern="rank_{rank}/" + name + ".ckpt")
    done("inspect", world.src)
    done("inspect", world.src, "--json")
    world.convert()
    assert world.found().keys() == {0, 1}


# Sizes


@pytest.mark.parametrize("command", ["inspect", "stats", "fingerprint"])
def test_json_output_contains_no_control_character(command: str, tmp_path: Path) -> None:
    """Also those above ASCII, and marks that turn the direction of writing."""
    name = "w\x1b[31m\x9b31m\u202e\U000e0001é"
    file = write_checkpoint(tmp_path / "x.ckpt", {name: value("x", (2, 2)), "b": value("b", (2, 2))})
    words: list[Argument] = [command, file, "--json", *(["--strategy", "none"] if command != "inspect" else [])]
    printed = done(*words).out
    assert printed.rstrip("\n").isprintable() and name in json.dumps(json.loads(printed), ensure_ascii=False).replace(
        "\\u001b", "\x1b"
    )


def test_a_traceback_contains_no_control_character(tmp_path: Path) -> None:
    result = reshard("inspect", tmp_path / "no\x1b[31m.ckpt", "--debug")
    assert result.status == 3 and "Traceback" in result.err and result.err.replace("\n", "").isprintable()
