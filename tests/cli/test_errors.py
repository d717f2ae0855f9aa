"""Every promised error: its exit status, and the file, rank or parameter that it names."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from pathlib import Path

import pytest

from tests.corpus import FIXTURES
from tests.reference import Strategy
from tests.running import Argument, done, fails, reshard, warns
from tests.small import COPIED, PLAIN, TARGET, World, tensors
from tests.strategy_writing import group_info
from tests.trees import (
    cut_ranks,
    layout,
    same_ranks,
    scalar,
    single,
    strategy_bytes,
    tree_bytes,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

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


@pytest.mark.parametrize("text", ["64B", "64K", "64KiB", "1.5gb", "2 T"])
def test_sizes_of_memory_have_units(text: str, world: World) -> None:
    world.save(FULL)
    world.convert("--max-memory", text)


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


@pytest.mark.parametrize("name", ["rubbish.ckpt", "rubbish.safetensors", "empty.safetensors"])
def test_a_file_that_is_not_a_checkpoint_is_named(world: World, name: str) -> None:
    path = world.root / name
    path.write_bytes(b"" if "empty" in name else b"\xff\xfe rubbish, longer than a header \x00\x01" * 9)
    fails(
        3, "transform-dir", path, world.dst, "--src-strategy", "none", "--dst-strategy", world.new,
        texts=[str(path)],
    )  # fmt: skip


def test_without_cryptography_the_error_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    words: list[Argument] = ["decrypt", FIXTURES / "ckpt_files" / "encrypted_gcm.ckpt", tmp_path / "plain"]
    fails(3, *words, "--key-file", tmp_path / "key", texts=["encrypted_gcm", "pip install 'reshard[crypto]'"])


def test_a_source_strategy_with_checkpoint_2_is_wrong_usage(world: World) -> None:
    world.src.mkdir()
    (world.src / "latest_checkpointed_iteration.txt").write_text("1")
    (world.src / "iteration_00000001").mkdir()
    (world.src / "iteration_00000001" / "metadata.json").write_text("{}")
    write_checkpoint(world.src / "iteration_00000001" / "net-model-0000000-0000001.safetensors", FULL)
    world.refuses(2, "checkpoint2", "leave out --src-strategy")


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ("param_name_map.json", "part0.safetensors"),
        ("model.safetensors.index.json", "model-00001-of-00001.safetensors"),
    ],
)
def test_a_source_strategy_with_full_weights_is_wrong_usage(world: World, index: str, part: str) -> None:
    world.src.mkdir()
    write_checkpoint(world.src / part, FULL)
    weight_map = {"metadata": {"total_size": 1}, "weight_map": {name: part for name in FULL}}
    (world.src / index).write_text(json.dumps(weight_map))
    world.refuses(2, str(world.src), "leave out --src-strategy")


# Checksums.


def spoil(path: Path, at: bytes) -> None:
    """Change one byte of the content that begins with `at`."""
    data = path.read_bytes()
    position = data.index(at)
    path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_a_checksum_that_does_not_match_is_an_error(tmp_path: Path, ending: str) -> None:
    world = World(tmp_path, TARGET, single({name: layout([1], [-1] * len(FULL[name].array.shape)) for name in FULL}))
    ranks = cut_ranks(TARGET, FULL)
    for rank, contents in ranks.items():
        path = world.src / f"rank_{rank}" / f"net-1_10.{ending}"
        if ending == "ckpt":
            write_checkpoint(path, contents, crc=True)
        else:
            write_checkpoint(path, contents, metadata={"crc_num": str(crc_num(contents))})
    world.convert()
    same_ranks(world.found(), world.expected(FULL, {}))
    shutil.rmtree(world.dst)
    spoiled = world.src / "rank_1" / f"net-1_10.{ending}"
    spoil(spoiled, ranks[1]["w"].array.tobytes())
    world.refuses(3, str(spoiled), "crc")
    world.convert("--crc", "never")
    assert sorted(world.found()) == [0]


def crc_num(contents: object) -> int:
    total = 0
    for name, tensor in sorted(contents.items()):  # type: ignore[attr-defined]
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensor.array.tobytes(), total)
    return total


def test_a_partial_read_reports_that_the_crc_was_not_checked(world: World) -> None:
    world.save(FULL, crc=True)
    result = done(*world.words(0, "-v", command="by-rank"))
    warns(result, "crc", "not")


def test_a_damaged_crc_trailer_is_an_error(world: World) -> None:
    world.save(FULL, crc=True)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    path.write_bytes(path.read_bytes()[:-3])
    world.refuses(3, str(path))


# Strategies that are wrong.


def strategy_error(world: World, path: Path, *texts: Argument) -> None:
    words: list[Argument] = ["--src-strategy", path, "--dst-strategy", world.new]
    fails(3, "rank-list", 0, *words, texts=texts)
    world.save(FULL)
    fails(3, "transform-dir", world.src, world.dst, *words, texts=texts)
    assert not world.dst.exists() or not list(world.dst.iterdir())


def test_a_strategy_that_does_not_exist_is_named(world: World) -> None:
    strategy_error(world, world.root / "absent.ckpt", world.root / "absent.ckpt")


@pytest.mark.parametrize("name", ["rubbish.ckpt", "rubbish.json", "list.json"])
def test_a_file_that_is_not_a_strategy_is_named(world: World, name: str) -> None:
    path = world.root / name
    path.write_bytes(b"[1, 2]" if name == "list.json" else b"\xff\xff rubbish \x00")
    strategy_error(world, path, path)


STAGES: Strategy = [
    {"devices": 2, "layouts": {"w": layout([2], [0, -1])}},
    {"devices": 2, "layouts": {"v": layout([2], [0])}},
    {"devices": 2, "layouts": {"m.w": layout([2], [0, -1])}},
]
ONE = single({name: layout([1], [-1] * len(FULL[name].array.shape)) for name in FULL})


def directory(root: Path, files: dict[str, bytes]) -> Path:
    path = root / "strategy"
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def test_ranks_of_a_last_stage_whose_file_is_missing_are_an_error(tmp_path: Path) -> None:
    world = World(tmp_path, STAGES, ONE)
    world.save(FULL)
    path = directory(
        tmp_path,
        {
            "ckpt_strategy_rank_0.ckpt": strategy_bytes(STAGES, [0]),
            "ckpt_strategy_rank_2.ckpt": strategy_bytes(STAGES, [1]),
        },
    )
    world.old = path
    world.refuses(3, "4", "5")


# Targets.


def test_targets_of_another_format_are_refused_beside_existing_ones(world: World) -> None:
    world.save(FULL)
    world.convert()
    for options in (("--format", "safetensors"), ("--prefix", "other")):
        fails(3, *world.words(*options), texts=[str(world.dst)])
        fails(3, *world.words("--overwrite", "--ranks", "0", *options), texts=[str(world.dst)])
    same_ranks(world.found(), world.expected(FULL))


def test_a_rank_modified_after_conversion_is_refused_without_overwrite(world: World) -> None:
    world.save(FULL)
    world.by_rank(1)
    path = world.dst / "rank_1" / "checkpoint_1.ckpt"
    path.write_bytes(path.read_bytes() + b"trained on")
    fails(3, *world.words(1, command="by-rank"), texts=["checkpoint_1.ckpt", "modified", "--overwrite"])
    assert path.read_bytes().endswith(b"trained on")
    world.by_rank(1, "--overwrite")
    world.by_rank(0)
    same_ranks(world.found(), world.expected(FULL))


def test_the_source_named_by_a_pattern_may_not_be_the_target(world: World) -> None:
    world.save(FULL)
    pattern = f"{world.src}/rank_{{rank}}/net-1_10.ckpt"
    fails(
        2, "transform-dir", pattern, world.src, "--src-strategy", world.old, "--dst-strategy", world.new,
        texts=[str(world.src)],
    )  # fmt: skip


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


def test_overwrite_is_refused_where_other_ranks_would_remain(world: World) -> None:
    world.save(FULL)
    world.convert()
    for path in (world.dst / "rank_5").parent.glob("rank_1/*"):
        shutil.copytree(path.parent, world.dst / "rank_5")
    fails(3, *world.words("--overwrite"), texts=["rank_5"])


def test_foreign_checkpoints_in_the_target_are_refused(world: World) -> None:
    world.save(FULL)
    foreign = write_checkpoint(world.dst / "rank_0" / "net-1_10.ckpt", FULL)
    fails(3, *world.words(), texts=[str(world.dst)])
    assert [str(path) for path in world.dst.rglob("*.ckpt")] == [str(foreign)]


def test_a_target_that_is_a_file_is_refused(world: World) -> None:
    world.save(FULL)
    world.dst.write_text("mine")
    result = reshard(*world.words("--overwrite"))
    assert result.status in (2, 3) and str(world.dst) in result.err.replace("\n", "")
    assert world.dst.read_text() == "mine"


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


def test_an_error_leaves_the_target_empty(world: World) -> None:
    world.save(FULL, ranks=[0, 2])
    world.refuses(3)
    assert not world.dst.exists() or not list(world.dst.iterdir())


def test_no_temporary_files_remain_after_success(world: World) -> None:
    world.save(FULL)
    world.convert()
    assert not [path for path in world.dst.rglob("*") if "tmp" in path.name]
    assert sorted(str(path.relative_to(world.dst)) for path in world.dst.glob("rank_*/*")) == [
        "rank_0/checkpoint_0.ckpt",
        "rank_1/checkpoint_1.ckpt",
    ]


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


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    names = [f"p{number}" for number in range(5)]
    world = World(tmp_path, single({name: layout([2], [0]) for name in names}), ONE)
    new = write_strategy(tmp_path / "strategies" / "all", single({name: layout([1], [-1]) for name in names}))
    world.new = new
    world.save({name: value(name, (4,)) for name in names}, ranks=[1])
    world.refuses(3, "'p{0-4}' (5)", "0")
    world.refuses(3, *(f"'{name}'" for name in names), "0", options=("-v",))


def test_a_traceback_shows_only_with_debug(world: World) -> None:
    result = reshard(*world.words("--debug"))
    assert result.status == 3
    assert "Traceback" in result.err
    assert "Traceback" not in reshard(*world.words()).err


def test_lost_ranks_are_named_with_their_parameters(tmp_path: Path) -> None:
    world = World(tmp_path, PLAIN, single({"w": layout([1], [-1, -1]), "v": layout([1], [-1])}))
    write_tree(
        world.src,
        {
            rank: contents
            for rank, contents in cut_ranks(PLAIN, {"w": FULL["w"], "v": FULL["v"]}, COPIED).items()
            if rank in (0, 2)
        },
    )
    output = world.refuses(3, "w").err
    assert "1" in output and "3" in output


def test_control_characters_in_names_are_escaped(world: World) -> None:
    world.save(FULL, copied={"clear\x1b[2J": COPIED["global_step"]})
    assert "clear\\x1b" in done(*world.words("-v", command="plan")).out
    assert "clear\\x1b" in done(*world.words("-v", "--overwrite")).err
    write_checkpoint(world.src / "rank_1" / "net-1_10.ckpt", {**FULL, "clear\x1b[2J": scalar(7, shape=(1,))})
    result = reshard(*world.words("-v"))
    assert "\x1b" not in result.err + result.out
    assert "\x1b" not in reshard("inspect", world.src / "rank_0" / "net-1_10.ckpt").out
    groups = world.root / "group_info.pb"
    groups.write_bytes(group_info([0, 4], [("clear\x1b[2J\n[1, 5]", [0, 4])]))
    assert done("group-info", "inspect", groups).out == "[0, 4]\n  clear\\x1b[2J\\n[1, 5]: [0, 4]\n"


# What to do about it.
