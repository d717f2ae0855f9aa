"""Rank trees: which rank has which file of which step, and what is too ambiguous to choose."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.asked import Source
from reshard.errors import CheckpointError
from reshard.forms.ranks.naming import Step, name_families, parse_stem
from reshard.forms.ranks.tree import SourceTree, find_checkpoints
from tests.running import Argument, done, warns
from tests.small import World, tensors
from tests.strategy_writing import group_info


def plant(root: Path, names: Iterable[str]) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return root


def steps_of(tree: SourceTree, step: str | None = None) -> dict[str, list[str]]:
    """Step to paths below the root, in the order of the candidates and of the ranks."""
    return {
        str(candidate.step): [os.path.relpath(path, tree.root) for path in candidate.files.values()]
        for candidate in list(tree.candidates(step))
    }


# Directories of ranks.


@pytest.mark.parametrize("naming", ["rank_{}", "rank{}", "{}"])
def test_rank_directories_have_three_namings(naming: str, tmp_path: Path) -> None:
    names = [f"{naming.format(rank)}/net-1_{step}.ckpt" for rank in range(12) for step in (9, 10)]
    tree = find_checkpoints(str(plant(tmp_path, names)))
    assert tree.ranks == tuple(range(12)) and not tree.single_file
    newest, older = list(tree.candidates())
    assert (newest.step, older.step) == (Step(1, 10), Step(1, 9))
    assert newest.files == {rank: str(tmp_path / naming.format(rank) / "net-1_10.ckpt") for rank in range(12)}
    assert newest.notes == ()


def test_other_files_and_directories_are_skipped(tmp_path: Path) -> None:
    names = ["rank_0/x-1_1.ckpt", "rank_0/meta.json", "rank_0/x-1_2.tmp", "rank_0/.x-1_3.ckpt", "rank_0/sub/y.ckpt"]
    names += ["rank_x/y.ckpt", "strategy/ckpt_strategy_rank_0.ckpt", "rank_1_tmp/x-1_4.ckpt", "rank_0.ckpt/no"]
    names += ["group_info.pb", "rank_0/group_info.pb", "rank_0/x-graph.meta", "RANK_3/y.ckpt", "rank_4_old/y.ckpt"]
    tree = find_checkpoints(str(plant(tmp_path, names)))
    (tmp_path / "rank_0" / "z-1_9.ckpt").mkdir()
    assert steps_of(tree) == {"1_1": ["rank_0/x-1_1.ckpt"]}
    assert tree.ranks == (0,)


def test_an_unfinished_directory_is_refused(tmp_path: Path) -> None:
    root = plant(tmp_path / "ttp_saved_checkpoints-step_3_tmp", ["rank_0/ttp_rank_0-1_3.ckpt"])
    for src in (str(root), f"{root}/", f"{root}/rank_{{rank}}"):
        with pytest.raises(CheckpointError, match="_tmp"):
            find_checkpoints(src)
    with pytest.raises(CheckpointError, match="no checkpoint file matches"):
        find_checkpoints(str(tmp_path / "ttp*" / "rank_{rank}"))


# Steps.


def test_steps_compare_as_numbers(tmp_path: Path) -> None:
    numbers = ["1_9", "1_10", "2_1", "10_1", "9_300", "0_5"]
    tree = find_checkpoints(str(plant(tmp_path, [f"rank_0/a-{number}.ckpt" for number in numbers])))
    assert list(steps_of(tree)) == ["10_1", "9_300", "2_1", "1_10", "1_9", "0_5"]


@pytest.mark.parametrize(
    ("stem", "prefix", "step"),
    [
        ("net-1_10", "net", Step(1, 10)),
        ("net_1-1_10", "net_1", Step(1, 10)),
        ("my-net-1_2-3_4", "my-net-1_2", Step(3, 4)),
        ("llama_rank_3-300_8_breakpoint", "llama_rank_3", Step(300, 8)),
        ("net-01_002", "net", Step(1, 2)),
        ("checkpoint_0", "checkpoint_0", None),
        ("net-1_10_x", "net-1_10_x", None),
        ("net-1", "net-1", None),
        ("net_1_10", "net_1_10", None),
        ("-1_2", "", Step(1, 2)),
    ],
)
def test_steps_are_parsed_from_names(stem: str, prefix: str, step: Step | None) -> None:
    assert parse_stem(stem) == (prefix, step)


@given(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_steps_are_ordered_and_read_back(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (Step(*one) < Step(*other)) == (one < other)
    assert Step.parse(str(Step(*one))) == Step(*one)


def test_files_without_a_step_are_fine_when_each_directory_holds_one(tmp_path: Path) -> None:
    tree = find_checkpoints(str(plant(tmp_path, [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(3)])))
    assert steps_of(tree) == {"None": [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(3)]}
    with pytest.raises(CheckpointError, match="none in the name"):
        list(tree.candidates("1_1"))


# What is ambiguous.


def ambiguous(tree: SourceTree, *texts: str, step: str | None = None) -> None:
    with pytest.raises(CheckpointError) as caught:
        list(tree.candidates(step))
    for text in (*texts, "--file-suffix", "--step"):
        assert text in str(caught.value)


def test_a_rank_path_selects_files(tmp_path: Path) -> None:
    names = [f"rank_{rank}/net-1_10.{ending}" for rank in range(2) for ending in ("ckpt", "safetensors")]
    tree = find_checkpoints(str(plant(tmp_path, names)))
    ambiguous(tree, "rank_{rank}/*.ckpt")
    tree = find_checkpoints(f"{tmp_path}/rank_{{rank}}/*.ckpt")
    newest = next(tree.candidates())
    assert list(newest.files.values()) == [f"{tmp_path}/rank_{r}/net-1_10.ckpt" for r in range(2)]


def test_files_with_and_without_a_step_cannot_be_compared(tmp_path: Path) -> None:
    names = ["rank_0/net-5_10.ckpt", "rank_0/net.ckpt"]
    ambiguous(find_checkpoints(str(plant(tmp_path, names))), *names)


def test_two_namings_of_different_steps_cannot_be_compared(tmp_path: Path) -> None:
    names = ["rank_0/net-5_10.ckpt", "0/net-5_20.ckpt"]
    ambiguous(find_checkpoints(str(plant(tmp_path, names))), *names)


def test_names_that_differ_between_ranks_are_listed(tmp_path: Path) -> None:
    tree = find_checkpoints(str(plant(tmp_path, ["rank_0/a-1_10.ckpt", "rank_1/b-1_10.ckpt"])))
    (candidates,) = list(tree.candidates())
    assert sorted(candidates.files) == [0, 1]
    (note,) = candidates.notes
    assert "step 1_10" in note and "different names" in note and "a-1_10.ckpt" in note and "b-1_10.ckpt" in note
    tree = find_checkpoints(str(plant(tmp_path / "f", ["rank_0/a-1_10.ckpt", "rank_1/a-1_10.safetensors"])))
    assert "different formats" in next(iter(tree.candidates())).notes[0]


PREFIXES = [
    ["net", "net_1", "net_2"],
    ["llama2_rank_{r}", "llama2_rank_{r}_1"],
    ["{r}_of_8_{r}", "1"],
    ["a{r}b{r}c", "a77b{r}c", "abc"],
    ["rank_{r}_2", "rank_{r}"],
]


@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("ranks", [range(12), range(1, 3), [5, 1], [0, 1, 2, 11, 12]])
def test_families_of_names_are_found_for_any_ranks(prefixes: list[str], ranks: Iterable[int]) -> None:
    items = {(rank, prefix.format(r=rank)) for rank in ranks for prefix in prefixes}
    families = name_families(items)
    for prefix in prefixes:
        assert len({families[rank, prefix.format(r=rank)] for rank in ranks}) == 1
    assert len(set(families.values())) == len(prefixes)


def test_a_suffix_matches_the_end_of_the_stem(tmp_path: Path) -> None:
    names = ["rank_0/net-1_10.ckpt", "rank_0/net-1_10_breakpoint.ckpt", "rank_1/net-1_10_breakpoint.ckpt"]
    names += ["rank_2/net-1_10.ckpt"]
    tree = find_checkpoints(Source(str(plant(tmp_path, names)), file_suffix="_breakpoint"))
    assert steps_of(tree) == {"1_10": names[1:3]}
    assert tree.ranks == (0, 1, 2)
    with pytest.raises(CheckpointError, match=r"'\.ckpt'(.|\n)*--file-suffix"):
        find_checkpoints(Source(str(tmp_path), file_suffix=".ckpt"))


# --file-suffix


# One file.


def test_the_file_of_one_of_several_ranks_is_read_with_a_warning(world: World) -> None:
    world.save(tensors())
    file = world.src / "rank_1" / "net-1_10.ckpt"
    words: list[Argument] = ["convert", file, world.dst, "--src-strategy", "none", "--dst-strategy", "none"]
    warns(done(*words), "warning: ", "is the file of one of several ranks", f"pass {world.src} with its strategy")
    for rank in (0, 2, 3):
        shutil.rmtree(world.src / f"rank_{rank}")
    assert "warning" not in done(*words, "--overwrite").err


# Paths with {rank}.


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("{rank}.ckpt", {0: "0.ckpt", 1: "1.ckpt", 12: "12.ckpt"}),
        ("net_{rank}_of_8.safetensors", {0: "net_0_of_8.safetensors", 12: "net_12_of_8.safetensors"}),
        ("*{rank}.ckpt", {0: "net0.ckpt", 1: "net1.ckpt", 12: "net12.ckpt"}),
        ("rank_{rank}/net-*.ckpt", {0: "rank_0/net-1_1.ckpt", 12: "rank_12/net-1_1.ckpt"}),
        ("rank_{rank}", {0: "rank_0/net-1_1.ckpt", 12: "rank_12/net-1_1.ckpt"}),
        ("rank_{rank}/", {0: "rank_0/net-1_1.ckpt", 12: "rank_12/net-1_1.ckpt"}),
        ("node?/*_{rank}/net_{rank}.ckpt", {0: "node1/r_0/net_0.ckpt", 12: "node2/r_12/net_12.ckpt"}),
        ("node[12]/{rank}/x.ckpt", {0: "node1/0/x.ckpt", 12: "node2/12/x.ckpt"}),
        ("node[!3]/{rank}/x.ckpt", {0: "node1/0/x.ckpt", 12: "node2/12/x.ckpt"}),
        ("a.b(c)/{rank}/x+.ckpt", {0: "a.b(c)/0/x+.ckpt", 12: "a.b(c)/12/x+.ckpt"}),
    ],
)
@pytest.mark.parametrize("relative", [True, False])
def test_a_path_with_rank_in_it_selects_files(
    pattern: str, files: dict[int, str], relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, files.values())
    plant(tmp_path, ["node3/7/x.ckpt", "aXb(c)/5/x+.ckpt", "node1/r_3/net_4.ckpt", ".net0.ckpt", "x/y/z.ckpt"])
    monkeypatch.chdir(tmp_path)
    tree = find_checkpoints(pattern if relative else f"{tmp_path}/{pattern}")
    (candidates,) = list(tree.candidates())
    expected = {rank: path if relative else str(tmp_path / path) for rank, path in files.items()}
    assert {rank: os.path.normpath(path) for rank, path in candidates.files.items()} == expected
    assert not tree.single_file


def test_a_pattern_that_matches_a_rank_twice_is_ambiguous(tmp_path: Path) -> None:
    plant(tmp_path, ["a/rank_0/net-1_1.ckpt", "b/rank_0/net-1_1.ckpt"])
    ambiguous(find_checkpoints(f"{tmp_path}/*/rank_{{rank}}"), "a/rank_0", "b/rank_0")
    plant(tmp_path, ["b/rank_0/net-1_2.ckpt"])
    ambiguous(find_checkpoints(f"{tmp_path}/*/rank_{{rank}}"), "cannot be compared")


def test_a_pattern_without_a_match_is_an_error(tmp_path: Path) -> None:
    plant(tmp_path, ["rank_x/net.ckpt", "rank_1/notes.txt"])
    for pattern in ("rank_{rank}/*.ckpt", "rank_{rank}", "none/{rank}/x.ckpt", "rank_{rank}/notes.txt"):
        with pytest.raises(CheckpointError, match="no checkpoint file matches"):
            find_checkpoints(str(tmp_path / pattern))


def test_missing_and_empty_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none: does not exist"):
        find_checkpoints(str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="is an empty directory"):
        find_checkpoints(str(tmp_path))
    (tmp_path / "rank_0").mkdir()
    with pytest.raises(CheckpointError, match=r"rank directories \(rank_0\) hold no"):
        find_checkpoints(str(tmp_path))


# Sources that hold nothing, or something else.


def test_a_flat_directory_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"net.ckpt(.|\n)*\{rank\}"):
        find_checkpoints(str(plant(tmp_path, ["net.ckpt"])))


def test_a_parent_directory_suggests_the_checkpoint_below(tmp_path: Path) -> None:
    plant(tmp_path, ["checkpoint/rank_0/net.ckpt", "strategy/x.ckpt"])
    with pytest.raises(CheckpointError, match=f"did you mean {tmp_path}/checkpoint"):
        find_checkpoints(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (["latest_checkpointed_iteration.txt"], "Checkpoint 2.0"),
        (["iteration_00000001/metadata.json"], "Checkpoint 2.0"),
        (["metadata.json", "common.json", "net-model-0000000-0000008.safetensors"], "Checkpoint 2.0"),
        (["part0.safetensors", "param_name_map.json"], "unified"),
        (["part0.safetensors"], "unified"),
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], "unified"),
    ],
)
def test_other_forms_are_refused_by_name(names: list[str], texts: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=texts):
        find_checkpoints(str(plant(tmp_path, names)))


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("part3.safetensors", "unified"),
        ("model-00001-of-00002.safetensors", "unified"),
        ("param_name_map.json", "unified"),
        ("net-opt-0000003-0000008.safetensors", "Checkpoint 2.0"),
    ],
)
def test_files_of_other_forms_are_refused_by_name(name: str, texts: str, tmp_path: Path) -> None:
    plant(tmp_path, [name])
    with pytest.raises(CheckpointError, match=texts):
        find_checkpoints(str(tmp_path / name))


def test_directories_of_fault_recovery_beside_ranks_are_ignored(plain: World) -> None:
    """Whether they hold group_info files or checkpoints."""
    plain.save(tensors())
    before = plain.convert("--json").json
    for rank in range(4):
        directory = plain.src / f"ckpt_dir{rank}"
        directory.mkdir()
        (directory / "group_info.pb").write_bytes(group_info([rank % 2, rank % 2 + 2]))
        shutil.copy(plain.src / f"rank_{rank}" / "net-1_10.ckpt", directory)
        (plain.dst / directory.name).mkdir()
        shutil.copy(directory / "group_info.pb", plain.dst / directory.name)
    after = plain.convert("--json").json
    assert after["done_before"] == before["ranks"] and after["warnings"] == []
    assert done("inspect", plain.src, "--json").json["ranks"] == [0, 1, 2, 3]
    assert done("inspect", plain.src / "ckpt_dir2", "--json").json["ranks"] == [2]
    done("verify", plain.src, "--replicas", "--strategy", plain.old)
    shutil.rmtree(plain.src / "rank_3")
    assert done("recover", plain.src, plain.root / "whole", "--strategy", plain.old, "--json").json["recovered"] == [3]


def test_directories_of_another_naming_require_a_rank_path(plain: World) -> None:
    plain.save(tensors(), "ckpt_dir{rank}/net-1_10.ckpt")
    plain.refuses(3, "holds no checkpoints", "ckpt_dir{rank}")
    done("inspect", f"{plain.src}/ckpt_dir{{rank}}")


def test_files_that_are_named_after_other_ranks_give_a_warning(tmp_path: Path) -> None:
    """As after a mistake in copying directories; one file may have been copied to all ranks, however."""
    names = [f"rank_{rank}/net_rank_{name}-1_1.ckpt" for rank, name in enumerate((1, 0, 2, 3))]
    (candidate,) = find_checkpoints(str(plant(tmp_path / "exchanged", names))).candidates()
    (note,) = candidate.notes
    assert "of ranks 0-1 have names of other ranks" in note and names[0] in note and names[1] in note
    for kind, name in (("right", "net_rank_{}-1_1.ckpt"), ("copied", "net_rank_0-1_1.ckpt"), ("plain", "net-1_1.ckpt")):
        files = plant(tmp_path / kind, [f"rank_{rank}/{name.format(rank)}" for rank in range(4)])
        (candidate,) = find_checkpoints(str(files)).candidates()
        assert not candidate.notes
