"""group_info files: the restore list, the groups, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.errors import StrategyError
from reshard.strategies import read_group_info
from tests.cases import EVERYWHERE, case_directory
from tests.strategy_writing import group_info, layout, write_strategy
from tests.wire import field

WITH_GROUPS = [name for name in EVERYWHERE if (case_directory(name) / "group_info").is_dir()]


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_group_info_of_mindspore_is_read(name: str) -> None:
    path = case_directory(name)
    expected = json.loads((path / "case.json").read_text())["group_info"]
    for file in (path / "group_info").glob("*.pb"):
        rank = file.stem.rsplit("_", 1)[1]
        info = read_group_info(str(file))
        assert list(info.restore_ranks) == expected[rank]["ckpt_restore_rank_list"]
        assert [(group, list(ranks)) for group, ranks in info.groups] == list(expected[rank]["groups"].items())


def test_names_of_groups_may_repeat_and_keep_their_order(tmp_path: Path) -> None:
    groups = [("b", [4, 0]), ("a", [1]), ("b", [2, 3])]
    (tmp_path / "group_info.pb").write_bytes(group_info([4, 0], groups))
    info = read_group_info(str(tmp_path / "group_info.pb"))
    assert info.file == str(tmp_path / "group_info.pb")
    assert info.restore_ranks == (4, 0)
    assert info.groups == (("b", (4, 0)), ("a", (1,)), ("b", (2, 3)))


def test_an_empty_restore_list_means_unknown(tmp_path: Path) -> None:
    (tmp_path / "group_info.pb").write_bytes(group_info([]))
    assert read_group_info(str(tmp_path / "group_info.pb")).restore_ranks == ()


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"", "it is empty"),
        (b"not protobuf", "not a group_info file"),
        (group_info([0, 4], [("g", [0, 4])])[:-1], "not a group_info file"),
        (field(1, field(1, "group") + field(2, b"")), "not a group_info file"),  # no restore list
        (field(1, field(1, "w") + field(2, field(2, "Float32"))), "it is a checkpoint"),
        (field(1, field(1, b"\xff") + field(2, b"")) + field(2, b""), "not UTF-8"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, data: bytes, texts: str) -> None:
    path = tmp_path / "group_info.pb"
    path.write_bytes(data)
    with pytest.raises(StrategyError, match=texts) as caught:
        read_group_info(str(path))
    assert str(path) in str(caught.value)
    assert caught.value.file == str(path)


def test_a_strategy_file_is_refused_by_name(tmp_path: Path) -> None:
    path = write_strategy(tmp_path / "s.ckpt", 0, {"w": layout([2], [0])})
    with pytest.raises(StrategyError, match="it is a strategy file"):
        read_group_info(str(path))


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="no file or directory has this name"):
        read_group_info(str(tmp_path / "nothing.pb"))
    with pytest.raises(StrategyError, match="a directory"):
        read_group_info(str(tmp_path))
