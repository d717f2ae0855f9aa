"""The command line: spellings, help, JSON, output streams."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import cases
from tests.running import Argument, done, fails, in_subprocess, reshard
from tests.small import World, tensors
from tests.trees import read_tree, same_ranks

FULL = tensors()


def test_reshard_without_a_command_lists_commands() -> None:
    result = reshard()
    assert result.status in (0, 2)
    assert "convert" in result.out + result.err


def test_version_option_prints_the_version() -> None:
    from reshard._version import __version__

    assert __version__ in done("--version").out


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("--src_strategy", "--dst-strategy-file"),
        ("--src_strategy_file", "--dst_strategy"),
    ],
)
@pytest.mark.parametrize("command", ["transform-dir", "transform-all", "by-rank", "transform-by-rank", "rank-list"])
def test_strategy_options_accept_mindspore_spellings(world: World, command: str, source: str, target: str) -> None:
    world.save(FULL)
    places: dict[str, list[Argument]] = {
        "rank-list": ["0"],
        "by-rank": ["0", world.src, world.dst],
        "transform-by-rank": ["0", world.src, world.dst],
    }
    done(command, *places.get(command, [world.src, world.dst]), source, world.old, target, world.new)


def test_options_accept_an_equals_sign_and_underscores(world: World) -> None:
    world.save(FULL)
    done(
        "transform-dir",
        world.src, world.dst, f"--src_strategy={world.old}", f"--dst_strategy_file={world.new}",
        "--max_memory=64M", "--file_suffix", "1_10",
    )  # fmt: skip
    same_ranks(world.found(), world.expected(FULL))


@pytest.mark.parametrize(("ranks", "created"), [("0", [0]), ("1", [1]), ("0-1", [0, 1]), ("1,0", [0, 1])])
def test_ranks_option_accepts_dashes_and_commas(world: World, ranks: str, created: list[int]) -> None:
    world.save(FULL)
    world.convert("--ranks", ranks)
    assert sorted(world.found()) == created


def test_a_dry_run_reports_the_errors_of_a_real_run(world: World) -> None:
    world.save(FULL, ranks=[0, 2])
    world.refuses(3, "w", options=("--dry-run",))


# rank-list.


def test_a_rank_list_is_one_line_of_standard_output(world: World) -> None:
    result = done("rank-list", 0, "--src-strategy", world.old, "--dst-strategy", world.new)
    assert result.out in ("0 1 2\n", "0 2 3\n")


def test_a_rank_list_as_json_has_its_fixed_shape(world: World) -> None:
    result = done("rank-list", 1, "--src-strategy", world.old, "--dst-strategy", world.new, "--json")
    assert result.json in ({"rank": 1, "ranks": [0, 1, 3]}, {"rank": 1, "ranks": [1, 2, 3]})


def test_a_rank_list_lacks_the_ranks_that_are_left_out(plain: World) -> None:
    words: list[Argument] = ["rank-list", 0, "--src-strategy", plain.old, "--dst-strategy", plain.new]
    assert done(*words, "--without-ranks", "0,3").out == "1 2\n"
    assert done(*words, "--without-ranks", "0-1").out == "2 3\n"
    fails(3, *words, "--without-ranks", "1,3", texts=["w"])


def test_a_rank_list_without_ranks_out_of_range_is_wrong_usage(plain: World) -> None:
    fails(
        2, "rank-list", 0, "--src-strategy", plain.old, "--dst-strategy", plain.new, "--without-ranks", "0,9",
        texts=["9"],
    )  # fmt: skip


def test_a_rank_list_from_none_is_rank_0(world: World) -> None:
    assert done("rank-list", 1, "--src-strategy", "none", "--dst-strategy", world.new).out == "0\n"


# group-info.


def group_files() -> list[Path]:
    return sorted((cases.case_directory("01_dp2mp4_adam") / "group_info").glob("*.pb"))


def test_group_info_prints_the_restore_list_on_a_line_of_its_own() -> None:
    lines = done("group-info", "inspect", group_files()[0]).out.splitlines()
    assert "[0, 4]" in [line.strip() for line in lines]


def test_group_info_as_json_has_its_fixed_shape() -> None:
    files = group_files()
    entries = done("group-info", "inspect", *files, "--json").json
    assert [entry["file"] for entry in entries] == [str(path) for path in files]
    for entry in entries:
        assert set(entry) == {"file", "restore_ranks", "groups"}
        rank = int(Path(entry["file"]).stem.rsplit("_", 1)[1])
        assert entry["restore_ranks"] == [rank % 4, rank % 4 + 4]
        for group in entry["groups"]:
            assert set(group) == {"name", "ranks"}
            assert rank in group["ranks"]


# inspect and strategy show.


# merge-pipeline.


# As a program of its own.


def test_an_error_has_an_exit_status_and_no_traceback(world: World) -> None:
    result = in_subprocess([str(word) for word in world.words()])
    assert result.status == 3
    assert str(world.src) in result.err and "Traceback" not in result.err


def test_the_installed_command_converts(world: World) -> None:
    world.save(FULL)
    result = in_subprocess([str(word) for word in world.words("--jobs", "2")])
    assert result.status == 0, result.err
    assert "\x1b" not in result.err + result.out and "\r" not in result.err
    same_ranks(read_tree(world.dst), world.expected(FULL))


@pytest.mark.parametrize(
    "words",
    [
        ["transform-dir", "SRC", "DST", "--dst-strategy", "none", "--src-strategy"],
        ["plan", "SRC", "DST", "--dst-strategy", "none", "--src-strategy"],
        ["rank-list", "0", "--dst-strategy", "none", "--src-strategy"],
        ["inspect", "SRC", "--strategy"],
        ["verify", "SRC", "--replicas", "--strategy"],
        ["fingerprint", "SRC", "--strategy"],
        ["replicas", "--strategy"],
        ["recover", "SRC", "DST", "--strategy"],
        ["strategy", "show"],
        ["strategy", "diff", "none"],
    ],
    ids=" ".join,
)
def test_every_command_names_files_that_are_not_strategies(world: World, words: list[str]) -> None:
    world.save(FULL)
    directory = world.root / "directory"
    directory.mkdir()
    shutil.copy(world.old, directory)
    (directory / "README.md").write_text("not a strategy")
    places = {"SRC": world.src, "DST": world.dst}
    result = done(*(places.get(word, word) for word in words), directory)
    assert "note:" in result.err and "skipped README.md" in result.err
