"""Recovered files have the names of the lost ones, so that they can be copied back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from reshard.forms.ranks.naming import FileNames, names_of
from reshard.forms.ranks.tree import find_checkpoints
from reshard.storage.json_text import Fields
from tests.running import Argument, Result, done, fails, warns
from tests.sampling import some_of
from tests.small import COPIED, PLAIN_TARGET, World
from tests.small import tensors as small_tensors
from tests.trees import cut_ranks, layout, read_named, read_tree, same_ranks, single, write_checkpoint

FULL = small_tensors(names=["w", "v"])
# How files of one save are named, and how the source is named where it is not their directory.
NAMED = {
    "MindFormers": ("rank_{rank}/llama_rank_{rank}-1_200.ckpt", ""),
    "MindFormers, second run": ("rank_{rank}/llama2_rank_{rank}_1-300_8.safetensors", ""),
    "MindSpore": ("rank_{rank}/net-3_10.ckpt", ""),
    "MindSpore, without underscore": ("rank{rank}/net_1-3_10.safetensors", ""),
    "data parallel": ("{rank}/train-1_3.ckpt", ""),
    "converted": ("rank_{rank}/checkpoint_{rank}.ckpt", ""),
    "plain": ("rank_{rank}/model.ckpt", ""),
    "saved at a fault": ("rank_{rank}/net-1_10_breakpoint.ckpt", ""),
    "digits": ("rank_{rank:03}/net_{rank:02}_of_4-1_10.ckpt", ""),
    "braces": ("rank_{rank}/{{net}}-1_10.ckpt", ""),
    "flat": ("llama-part{rank}-3_400.safetensors", "llama-part{rank}-*.safetensors"),
    "flat, a part": ("llama_rank_{rank}_1.ckpt", "llama_rank_{rank}_[12].ckpt"),
    "flat, of so many": ("net_{rank}_of_4.ckpt", "net_{rank}_of_4.ckpt"),
    "deeper": ("node1/rank_{rank}/net/net_{rank}-1_1.ckpt", "node*/rank_{rank}/*/*.ckpt"),
    "directories": ("r{rank}/net-1_2.ckpt", "r{rank}"),
}
# Names whose rank number one file alone does not determine; see the test of other steps.
UNTOLD = ("digits", "deeper")
LOST = some_of([[3], [0, 1], [1, 2], [2, 3]], 2)


def recover(world: World, source: Argument, *options: Argument) -> Result:
    return done("recover", source, world.dst, "--strategy", world.old, *options)


def put_back(world: World) -> None:
    subprocess.run(["cp", "-r", f"{world.dst}/.", f"{world.src}/"], check=True)


def is_whole(world: World, source: Argument, pattern: str) -> None:
    """The tree equals the saved one, `inspect` reports it as complete, and it converts."""
    same_ranks(read_named(world.src, pattern), cut_ranks(world.source, FULL, COPIED))
    (step,) = done("inspect", source, "--strategy", world.old, "--json").json["steps"]
    assert step["complete"] and sorted(step["ranks"]) == list(cut_ranks(world.source, FULL))
    out = world.root / "converted"
    done("transform-dir", source, out, "--src-strategy", world.old, "--dst-strategy", world.new, "--verify")
    same_ranks(read_tree(out), cut_ranks(PLAIN_TARGET, FULL, COPIED))


def lose(world: World, pattern: str, ranks: Iterable[int]) -> None:
    for rank in ranks:
        (world.src / pattern.format(rank=rank)).unlink()


@pytest.mark.deep
@pytest.mark.parametrize("lost", LOST, ids=str)
@pytest.mark.parametrize("named", NAMED)
def test_lost_ranks_can_be_copied_back_into_the_tree(named: str, lost: list[int], plain: World) -> None:
    pattern, below = NAMED[named]
    source = plain.src / below
    plain.save(FULL, pattern)
    lose(plain, pattern, lost)
    recover(plain, source, "--lost-only")
    assert sorted(read_named(plain.dst, pattern)) == lost
    put_back(plain)
    is_whole(plain, source, pattern)


@pytest.mark.deep
@pytest.mark.parametrize("named", NAMED)
def test_the_recovered_tree_is_named_as_the_source(named: str, plain: World) -> None:
    pattern, below = NAMED[named]
    plain.save(FULL, pattern)
    content = (plain.src / pattern.format(rank=0)).read_bytes()
    lose(plain, pattern, [1])
    recover(plain, plain.src / below, "--checksum", "crc32")
    assert (plain.dst / pattern.format(rank=0)).read_bytes() == content
    assert done("status", plain.dst, "--json").json["complete"]
    done("verify", plain.dst)
    shutil.rmtree(plain.src)
    plain.dst.rename(plain.src)
    is_whole(plain, plain.src / below, pattern)


@pytest.mark.parametrize(("pattern", "source"), [("rank_{rank}/net-1_2.ckpt", "."), ("{rank}.ckpt", "{rank}.ckpt")])
def test_sources_may_be_relative(pattern: str, source: str, plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plain.save(FULL, pattern)
    lose(plain, pattern, [0, 3])
    monkeypatch.chdir(plain.src)
    done("recover", source, "../dst", "--strategy", plain.old, "--lost-only")
    put_back(plain)
    is_whole(plain, source, pattern)


@pytest.mark.deep
@pytest.mark.parametrize("survivor", [0, 1])
@pytest.mark.parametrize("named", [named for named in NAMED if named not in UNTOLD])
def test_a_single_remaining_rank_determines_the_names(named: str, survivor: int, tmp_path: Path) -> None:
    both = World(tmp_path, single({name: layout([2], [-1] * FULL[name].array.ndim) for name in FULL}), PLAIN_TARGET)
    pattern, below = NAMED[named]
    both.save(FULL, pattern)
    lose(both, pattern, [1 - survivor])
    recover(both, both.src / below, "--lost-only")
    put_back(both)
    is_whole(both, both.src / below, pattern)


def test_a_damaged_file_is_replaced_under_its_own_name(plain: World) -> None:
    pattern = "rank_{rank}/llama_rank_{rank}-1_200.ckpt"
    plain.save(FULL, pattern)
    path = plain.src / "rank_2" / "llama_rank_2-1_200.ckpt"
    path.write_bytes(path.read_bytes()[:-9])
    recover(plain, plain.src, "--lost-only")
    put_back(plain)
    is_whole(plain, plain.src, pattern)


def test_lost_ranks_are_named_like_most_files(plain: World) -> None:
    plain.save(FULL, "rank_{rank}/net-1_10.ckpt", crc=True)
    (plain.src / "rank_0" / "net-1_10.ckpt").rename(plain.src / "rank_0" / "other-1_10.ckpt")
    (plain.src / "rank_3" / "net-1_10.ckpt").unlink()
    warns(recover(plain, plain.src), "different names", "rank_3/net-1_10.ckpt")
    assert {str(path.relative_to(plain.dst)) for path in plain.dst.glob("rank_*/*")} == {
        "rank_0/other-1_10.ckpt", *(f"rank_{rank}/net-1_10.ckpt" for rank in (1, 2, 3)),
    }  # fmt: skip
    assert done("status", plain.dst, "--json").json["complete"]
    # Found to be damaged only when its contents are read: the name that it has is the one to replace.
    path = plain.src / "rank_0" / "other-1_10.ckpt"
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    shutil.rmtree(plain.dst)
    recover(plain, plain.src, "--lost-only")
    put_back(plain)
    assert sorted(path.name for path in plain.src.glob("rank_*/*")) == ["net-1_10.ckpt"] * 3 + ["other-1_10.ckpt"]
    done("transform-dir", plain.src, plain.root / "out", "--src-strategy", plain.old, "--dst-strategy", plain.new)


def test_other_steps_settle_an_ambiguous_name(tmp_path: Path) -> None:
    both = World(tmp_path, single({name: layout([2], [-1] * FULL[name].array.ndim) for name in FULL}), PLAIN_TARGET)
    both.save(FULL, "rank_{rank}/a{rank}b-1_9.ckpt")
    both.save(FULL, "rank_{rank}/a{rank}b-1_10.ckpt", ranks=[1])
    recover(both, both.src, "--lost-only")
    assert [path.name for path in both.dst.glob("rank_0/*")] == ["a0b-1_10.ckpt"]


def test_a_given_prefix_decides_the_names(plain: World) -> None:
    plain.save(FULL, "rank_{rank}/llama_rank_{rank}-1_200.ckpt", ranks=[0, 1, 2])
    recover(plain, plain.src, "--prefix", "checkpoint_")
    same_ranks(read_tree(plain.dst), cut_ranks(plain.source, FULL, COPIED))


def test_a_recovery_by_parts_agrees_on_names(plain: World) -> None:
    pattern = "rank_{rank}/llama_rank_{rank}-1_200.ckpt"
    plain.save(FULL, pattern, ranks=[0, 1])
    for rank in range(4):
        recover(plain, plain.src, "--ranks", rank)
    same_ranks(read_named(plain.dst, pattern), cut_ranks(plain.source, FULL, COPIED))
    assert done("status", plain.dst, "--json").json["complete"]


def test_files_of_two_formats_get_a_hint(plain: World) -> None:
    plain.save(FULL, "rank_{rank}/net-1_10.ckpt", ranks=[0, 1, 2])
    plain.save(FULL, "rank_{rank}/net-1_10.safetensors", ranks=[3])
    words: list[Argument] = ["recover", plain.src, plain.dst, "--strategy", plain.old]
    result = fails(3, *words, texts=["different formats", "'ckpt/rank_{rank}/*.ckpt'"])
    assert "--format" not in result.err
    words[1] = plain.src / "rank_{rank}" / "*.ckpt"
    done(*words)
    same_ranks(read_named(plain.dst, "rank_{rank}/net-1_10.ckpt"), cut_ranks(plain.source, FULL, COPIED))


def test_names_in_records_cannot_leave_the_directory() -> None:
    message = {"template": "rank_{rank}/net", "own": [{"rank": 1, "name": "rank_1/other"}]}
    names = FileNames.from_fields(Fields(message, "names"))
    assert (names.of(0), names.of(1), names.of(12)) == ("rank_0/net", "rank_1/other", "rank_12/net")
    for wrong in ("../x", "/x", "a/../x", "a//x", "./x", "", "a\0"):
        for broken in ({**message, "template": wrong}, {**message, "own": [{"rank": 1, "name": wrong}]}):
            with pytest.raises(ValueError, match="no name"):
                FileNames.from_fields(Fields(broken, "names"))
    twice = {**message, "own": [{"rank": 1, "name": "../x"}, {"rank": 1, "name": "a"}]}
    with pytest.raises(ValueError, match="twice"):
        FileNames.from_fields(Fields(twice, "names"))


@pytest.mark.parametrize("prefix", ["checkpoint_", "{rank}", "{{x}}", "a{rank:02}", "a{rank}b", "{{", "rank_1"])
def test_a_prefix_is_derived_from_names(prefix: str) -> None:
    assert FileNames.of_prefix(prefix).prefix == prefix
    assert FileNames.of_prefix("a{rank}").prefix == "a"
    assert FileNames("rank_{rank}/net-1_10").prefix is None


def test_names_follow_most_files_then_the_lowest_rank(tmp_path: Path) -> None:
    def named(*names: str) -> FileNames:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in names:
            write_checkpoint(root / name, {"v": FULL["v"]})
        actual = next(find_checkpoints(str(root)).candidates()).names
        assert actual is not None
        return actual

    names = named("rank_0/a.ckpt", "rank_1/b.ckpt", "rank_2/b.ckpt")
    assert names.template == "rank_{rank}/b" and [*names.own.values()] == ["rank_0/a"]
    assert named("rank_3/b.ckpt", "rank_1/a.ckpt").template == "rank_{rank}/a"
    assert names_of([(1, "x1", ("x", None)), (10, "x010", ("x", None))]).template == "x{rank:03}"
