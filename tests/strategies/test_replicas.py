"""replicas: groups of ranks with identical checkpoints, from strategies and from group_info files."""

from __future__ import annotations

import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from reshard.layout import Layout
from reshard.strategies import GroupInfo, Stage, Strategy, read_group_info, read_strategy
from reshard.strategies.replicas import replicas_of_group_infos, replicas_of_strategy
from tests import reference
from tests.cases import all_cases, load
from tests.layouts import strategies, tensors
from tests.running import Result, done, fails, warns
from tests.strategy_writing import group_info
from tests.trees import layout, single, write_strategy

Groups = list[tuple[int | None, list[int]]]


def naive_groups(strategy: reference.Strategy, shapes: dict[str, tuple[int, ...]]) -> Groups:
    """Ranks compared one by one: same stage, same slice of everything."""
    groups: Groups = []
    contents = [
        (reference.stage_of(strategy, rank)[0], reference.rank_boxes(strategy, shapes, rank))
        for rank in range(reference.rank_count(strategy))
    ]
    visited: list[int] = []
    for rank, mine in enumerate(contents):
        if rank not in visited:
            group = [other for other, theirs in enumerate(contents) if theirs == mine]
            visited += group
            groups.append((mine[0], group))
    return groups


def found_groups(strategy: Strategy) -> Groups:
    return [(group.stage, list(group.ranks)) for group in replicas_of_strategy(strategy).groups]


@pytest.mark.parametrize("name", all_cases())
def test_replicas_of_compiled_strategies_follow_their_layouts(name: str) -> None:
    case = load(name)
    actual = found_groups(read_strategy(str(case.directory)))
    assert actual == naive_groups(case.strategy, case.shapes)
    # What MindSpore itself lists is a part of these groups.
    for file in (case.path / "group_info").glob("*.pb"):
        listing = set(read_group_info(str(file)).restore_ranks)
        assert not listing or any(listing <= set(ranks) for _, ranks in actual)


@pytest.mark.deep
@given(st.data())
def test_replicas_of_any_strategy_equal_the_naive_comparison(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    checkpoint = data.draw(tensors())
    strategy = data.draw(strategies(checkpoint, max_devices=12))
    path = write_strategy(tmp_path_factory.mktemp("any") / "s", strategy)
    shapes = {name: value.array.shape for name, value in checkpoint.items()}
    assert found_groups(read_strategy(str(path))) == naive_groups(strategy, shapes)


def test_none_gives_one_group_of_one_rank() -> None:
    assert found_groups(Strategy.none()) == [(0, [0])]


def test_ten_thousand_ranks_and_two_thousand_parameters_take_less_than_a_second() -> None:
    matrix = (320, 4, 8)
    layouts = {}
    for number in range(2000):
        axes = [((0,),), ((), (0,)), ((0,), (1,)), ((),), ((1, 0), ()), ((), ())][number % 6]
        layouts[f"p{number}"] = Layout(matrix, axes, shard_size=[0, 2, 320][number // 6 % 3])
    strategy = Strategy((Stage(0, 0, 10240, layouts, ("s",)),), "s")
    started = time.process_time()
    groups = replicas_of_strategy(strategy).groups
    assert time.process_time() - started < 1
    assert sorted(rank for group in groups for rank in group.ranks) == list(range(10240))


def test_one_line_per_group_and_documented_json(tmp_path: Path) -> None:
    path = write_strategy(
        tmp_path / "s", [*single({"w": layout([2, 2], [0])}), *single({"v": layout([2], [-1])})], form="directory"
    )
    assert done("replicas", "--strategy", path).out == "[0, 2]\n[1, 3]\n[4, 5]\n"
    assert done("replicas", "--strategy", path, "--json").json == [
        {"ranks": [0, 2], "stage": 0},
        {"ranks": [1, 3], "stage": 0},
        {"ranks": [4, 5], "stage": 1},
    ]


def test_an_optimizer_shard_of_accumulated_gradients_is_counted_and_noted(tmp_path: Path) -> None:
    layouts = {"w": layout([4], [-1]), "accu_grads.w": layout([4], [-1], 4, 1)}
    path = write_strategy(tmp_path / "s", single(layouts))
    result = done("replicas", "--strategy", path)
    assert result.out == "[0]\n[1]\n[2]\n[3]\n"
    warns(result, "accu_grads.w")
    # Where the moments are sharded as well, it makes no difference.
    path = write_strategy(tmp_path / "t", single({**layouts, "m.w": layout([4], [-1], 4, 1)}))
    assert "accu_grads" not in done("replicas", "--strategy", path).err


def write_infos(root: Path, lists: dict[str, list[int]]) -> list[Path]:
    paths = []
    for place, ranks in lists.items():
        path = root / place / "group_info.pb"
        path.parent.mkdir(parents=True)
        path.write_bytes(group_info(ranks, [("world", [0, 1])]))
        paths.append(path)
    return paths


def from_infos(paths: list[Path], *options: str) -> Result:
    return done("replicas", "--group-info", *paths, *options)


def test_lists_that_share_a_rank_are_joined(tmp_path: Path) -> None:
    paths = write_infos(tmp_path, {"a": [0, 4], "b": [1, 5], "c": [8, 4], "d": [5, 1], "e": [3]})
    result = from_infos(paths)
    assert result.out == "[0, 4, 8]\n[1, 5]\n[3]\n"
    assert from_infos(paths, "--json").json[0] == {"ranks": [0, 4, 8], "stage": None}


@given(st.lists(st.sets(st.integers(0, 12), min_size=1, max_size=4), max_size=8), st.randoms())
def test_the_order_of_files_does_not_matter(lists: list[set[int]], random: object) -> None:
    infos = [GroupInfo(f"file{number}", tuple(ranks), ()) for number, ranks in enumerate(lists)]
    groups = {group.ranks for group in replicas_of_group_infos(infos).groups}
    assert {group.ranks for group in replicas_of_group_infos(infos[::-1]).groups} == groups
    # Joined as long as anything overlaps, one pair at a time.
    expected = [set(ranks) for ranks in lists]
    while True:
        pair = next(((a, b) for a in expected for b in expected if a is not b and a & b), None)
        if pair is None:
            break
        expected = [contents for contents in expected if contents is not pair[0] and contents is not pair[1]] + [
            pair[0] | pair[1]
        ]
    assert groups == {tuple(sorted(ranks)) for ranks in expected}


def test_an_empty_list_means_unknown(tmp_path: Path) -> None:
    paths = write_infos(tmp_path, {"ckpt_dir0": [0, 2], "ckpt_dir1": []})
    result = from_infos(paths)
    assert result.out == "[0, 2]\n"
    warns(result, paths[1], "rank 1", "unknown")
    assert from_infos(paths[1:]).out == ""


@pytest.mark.parametrize("place", ["ckpt_dir3", "rank_3", "checkpoints/rank_3"])
def test_a_file_whose_list_lacks_its_own_rank_is_refused(tmp_path: Path, place: str) -> None:
    (path,) = write_infos(tmp_path, {place: [0, 4]})
    fails(3, "replicas", "--group-info", path, texts=[path, "rank 3"])


def test_two_files_of_one_rank_that_differ_are_refused(tmp_path: Path) -> None:
    paths = write_infos(tmp_path, {"one/rank_0": [0, 4], "two/rank_0": [0, 2]})
    fails(3, "replicas", "--group-info", *paths, texts=[*paths, "rank 0", "one run"])


def test_a_strategy_for_a_group_info_file_and_the_reverse_are_named(tmp_path: Path) -> None:
    (info,) = write_infos(tmp_path, {"a": [0, 4]})
    strategy = write_strategy(tmp_path / "s", single({"w": layout([2], [0])}))
    fails(3, "replicas", "--strategy", info, texts=[info, "group_info"])
    fails(3, "replicas", "--group-info", strategy, texts=[strategy, "strategy"])


@pytest.mark.parametrize("words", [[], ["--strategy", "none", "--group-info", "x"], ["x"], ["--strategy", "none", "x"]])
def test_strategy_and_group_info_exclude_each_other(words: list[str]) -> None:
    fails(2, "replicas", *words)
