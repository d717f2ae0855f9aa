"""Strategy files in every file format, and their defects."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import ReshardError, StrategyError, UsageError
from reshard.layout import Layout
from reshard.strategies import (
    RecordedLayout,
    Stage,
    Strategy,
    StrategyFile,
    StrategyItem,
    files,
    read_strategy,
    read_strategy_file,
)
from reshard.strategies.written import merged_json
from tests.cases import EVERYWHERE, case_directory
from tests.layouts import examples, layouts
from tests.reference import boxes
from tests.running import LAUNCHER, done
from tests.strategy_writing import group_info, json_content, layout, protobuf, write_merged, write_strategy
from tests.trees import strategy_bytes
from tests.wire import field


def read_one(path: Path) -> dict[str, Layout]:
    (stage,) = read_strategy(str(path)).stages
    return dict(stage.layouts)


def only(tmp_path: Path, expected: dict[str, Any], name: str = "s.ckpt") -> Layout:
    """The layout of a file with this record of its only parameter."""
    return read_one(write_strategy(tmp_path / name, 0, {"w": expected}))["w"]


def refused(path: Path, *texts: str) -> StrategyError:
    with pytest.raises(StrategyError) as caught:
        read_strategy(str(path))
    for part in (str(path), *texts):
        assert part in str(caught.value)
    assert caught.value.status == 3
    return caught.value


# What MindSpore wrote.


def forms_of(name: str) -> list[Path]:
    """Every path under which the strategy of a case can be named."""
    paths = []
    for directory in ("strategy", "strategy_json", "merged"):
        files = sorted((case_directory(name) / directory).glob("*"))
        whole = directory == "merged" or len(files) == 1
        paths += [case_directory(name) / directory, *files] if files and whole else []
        paths += [case_directory(name) / directory] if files and not whole and directory == "strategy" else []
    return paths


@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_file_format_of_a_case_equals_the_compilers_layouts(name: str) -> None:
    described = json.loads((case_directory(name) / "case.json").read_text())
    for path in forms_of(name):
        strategy = read_strategy(str(path))
        assert strategy.device_count == described["device_num"]
        assert len(strategy.stages) == described["pipeline_stages"]
        for stage in strategy.stages:
            expected = {
                param: described["layout_classes"][label[0]]
                for param, label in described["params"].items()
                if str(stage.number) in described["layout_classes"][label[0]]["stages"]
            }
            assert stage.layouts.keys() == expected.keys()
            for param, layout_record in stage.layouts.items():
                message = expected[param]["stages"][str(stage.number)]
                check_layout(layout_record, message, tuple(expected[param]["full_shape"]), f"{path} {param}")


def check_layout(layout_record: Layout, message: dict[str, Any], shape: tuple[int, ...], where: str) -> None:
    axes = message["tensor_map"]
    axes = [entry if isinstance(entry, list) else [entry] for entry in axes]
    expected = tuple(tuple(axis for axis in entry if axis != -1) for entry in axes)
    fitting = [candidate for candidate in layout_record.regroupings() if candidate.tensor_map == expected]
    assert fitting, f"{where}: {layout_record.tensor_map} is not {expected}"
    assert list(layout_record.device_matrix) == message["dev_matrix"], where
    assert layout_record.uneven == (tuple(message["param_split_shape"]) if message["indices_offset"] else None), where
    assert fitting[0].recorded_shape in (None, shape), where
    step, size = message["opt_weight_shard_step"], message["opt_weight_shard_size"]
    assert (layout_record.shard_step, layout_record.shard_size) == ((step, size) if step and size else (0, 0)), where


@examples(300)
@given(data=st.data())
def test_every_written_layout_is_read_with_the_same_slices(data: st.DataObject) -> None:
    """As .ckpt and as .json, for a known number of dimensions."""
    # Slices of one row, beside another dimension that is cut: there JSON can be read in several ways.
    shape = tuple(data.draw(st.lists(st.sampled_from([4, 8, 2, 6, 1]), max_size=4)))
    layout_record = data.draw(layouts(data.draw(st.sampled_from([16, 8, 12, 1])), shape))
    expected = files.parse_protobuf(strategy_bytes([{"devices": 1, "layouts": {"w": layout_record}}], [0]), "run.ckpt")
    assert expected is not None
    stage = Stage(0, 0, math.prod(layout_record["dev_matrix"]), {"w": expected.layouts["w"].layout()}, ("run.ckpt",))
    as_ckpt = files.parse_protobuf(files.protobuf_bytes(expected), "copy.ckpt")
    as_json = files.parse_json_strategy(merged_json(Strategy((stage,), "run"), {"w": shape}, "made", ""), "copy.json")
    assert as_ckpt is not None and as_json is not None
    for record in (as_ckpt.layouts["w"], as_json.layouts["0-w"]):
        fitting = [each for each in record.layout().regroupings() if len(each.cuts) == len(shape)]
        assert len(fitting) == 1
        assert fitting[0].recorded_shape in (None, shape)
        actual = [fitting[0].slice_box(shape, int(number)) for number in fitting[0].slice_of_rank]
        assert actual == boxes(layout_record, shape)


# What the records mean.


def test_none_is_one_device_that_lists_nothing() -> None:
    for path in (None, "none", "None"):
        strategy = read_strategy(path)
        assert strategy.is_none
        assert (strategy.device_count, strategy.path, strategy.parameters) == (1, "none", ())


@pytest.mark.parametrize("expected", [[1, 0], [[1, 0], [-1]], [[2], [1], []]], ids=str)
@pytest.mark.parametrize("size", [0, -1, 4])
def test_an_empty_device_matrix_overrides_map_and_shards(tmp_path: Path, expected: Any, size: int) -> None:
    for name in ("s.ckpt", "s.json"):
        parsed = only(tmp_path, layout([], expected, step=size and 1, size=size), name)
        assert (parsed.device_count, parsed.cuts) == (1, (1, 1))


@pytest.mark.parametrize(("step", "size", "shards"), [(0, -1, 1), (2, 0, 1), (0, 0, 1), (4, -1, 2), (4, 2, 2)])
def test_an_optimizer_shard_needs_a_step_and_a_size(tmp_path: Path, step: int, size: int, shards: int) -> None:
    parsed = only(tmp_path, layout([2, 4], [0, -1], step=step, size=size))
    assert parsed.shards == shards
    assert (parsed.shard_size != 0) == (parsed.shard_step != 0) == (shards > 1)


def test_a_table_split_by_hand_has_uneven_slices_and_no_recorded_shape(tmp_path: Path) -> None:
    expected = layout([4], [0, -1], sizes=[10, 20, 30, 4], offsets=[0, 10, 30, 60], shape=[40, 8])
    for name in ("s.ckpt", "s.json"):
        parsed = only(tmp_path, expected, name)
        assert parsed.uneven == (10, 20, 30, 4)
        assert parsed.recorded_shape is None


def test_split_sizes_without_offsets_are_ignored(tmp_path: Path) -> None:
    # Stand-alone strategies put the full shape there, step 0 with size -1, and maps from the left.
    expected = layout([2, 4, 1], [1, 0], sizes=[64, 32], step=0, size=-1)
    for name in ("s.ckpt", "s.json"):
        assert only(tmp_path, expected, name) == Layout((2, 4, 1), ((1,), (0,)))


def test_an_expanded_json_map_is_grouped_to_the_nested_one(tmp_path: Path) -> None:
    expanded = only(tmp_path, layout([2, 2, 2], [-1, 1, 0], shape=[32, 2, 32]), "s.json")
    assert expanded.expandable
    nested = Layout((2, 2, 2), ((), (1, 0)), recorded_shape=(32, 64))
    assert nested in expanded.regroupings()


def test_a_json_map_that_cannot_be_expanded_is_exact(tmp_path: Path) -> None:
    parsed = only(tmp_path, layout([2, 2], [1, 0], shape=[64, 32]), "s.json")
    assert parsed == Layout((2, 2), ((1,), (0,)), recorded_shape=(64, 32))


@pytest.mark.parametrize("shape", [[32, 64], [32, 2, 32]])
def test_a_nested_json_map_accepts_either_kind_of_shape(tmp_path: Path, shape: list[int]) -> None:
    parsed = only(tmp_path, layout([2, 2, 2], [[-1], [1, 0]], shape=shape), "s.json")
    assert parsed == Layout((2, 2, 2), ((), (1, 0)), recorded_shape=(32, 64))


def test_json_is_recognised_by_content(tmp_path: Path) -> None:
    content = json.dumps(json_content({"w": layout([2], [0])}))
    for text in (content, "\n  " + content, "\ufeff" + content):
        (tmp_path / "strategy.ckpt").write_text(text, encoding="utf-8")
        assert read_one(tmp_path / "strategy.ckpt")["w"] == Layout((2,), ((0,),))


def test_other_json_sections_are_not_layouts(tmp_path: Path) -> None:
    content = json_content({"w": layout([2], [0])})
    content["parallel_out_strategy_item"] = {"node": {"parallel_strategy": "anything"}}
    content["parallel_layout_value_item"] = 7
    (tmp_path / "s.json").write_text(json.dumps(content))
    assert list(read_one(tmp_path / "s.json")) == ["w"]


def test_json_without_strategy_items_is_stage_0(tmp_path: Path) -> None:
    content = json_content({"w": layout([2], [0])})
    del content["parallel_strategy_item"]
    (tmp_path / "s.json").write_text(json.dumps(content))
    assert read_strategy(str(tmp_path / "s.json")).device_count == 2


def test_equal_layouts_are_one_object(tmp_path: Path) -> None:
    path = write_strategy(tmp_path / "s.ckpt", 0, {f"w{index}": layout([2, 2], [0]) for index in range(9)})
    assert len({id(actual) for actual in read_one(path).values()}) == 1


# Stages of one file.


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("name", ["merged.ckpt", "merged.json"])
def test_ranks_are_numbered_through_the_stages_of_a_merged_file(
    tmp_path: Path, order: tuple[int, ...], name: str
) -> None:
    counts = [2, 4, 1]
    stages = {
        number: {f"w{number}": layout([counts[number]], [0]), "tied-w": layout([counts[number]], [-1])}
        for number in order
    }
    strategy = read_strategy(str(write_merged(tmp_path / name, stages)))
    assert [(stage.number, stage.first_rank, stage.device_count) for stage in strategy.stages] == [
        (0, 0, 2),
        (1, 2, 4),
        (2, 6, 1),
    ]
    assert [strategy.stage_of(rank).number for rank in range(7)] == [0, 0, 1, 1, 1, 1, 2]
    assert [stage.number for stage in strategy.stages if "tied-w" in stage.layouts] == [0, 1, 2]
    assert sorted(strategy.parameters) == ["tied-w", "w0", "w1", "w2"]
    for rank in (-1, 7):
        with pytest.raises(UsageError, match="ranks 0 to 6"):
            strategy.stage_of(rank)


def test_a_merged_file_of_one_stage_is_read_without_its_prefix(tmp_path: Path) -> None:
    path = write_merged(tmp_path / "m.ckpt", {0: {"w": layout([2], [0]), "a-b": layout([2], [-1])}})
    assert list(read_one(path)) == ["w", "a-b"]


def test_a_dash_in_a_parameter_name_is_not_a_stage_prefix(tmp_path: Path) -> None:
    path = write_strategy(tmp_path / "s.ckpt", 0, {"0-w": layout([2], [0]), "block-1.w": layout([2], [0])})
    assert list(read_one(path)) == ["0-w", "block-1.w"]


def test_items_overwritten_in_merged_json_are_ignored(tmp_path: Path) -> None:
    layouts = {"0-w": layout([2], [0]), "1-w": layout([2], [0])}
    path = write_strategy(tmp_path / "m.json", 0, layouts, item_stages=[1])
    assert len(read_strategy(str(path)).stages) == 2


def test_prefixes_without_items_make_a_merged_file(tmp_path: Path) -> None:
    layouts = {"1-w": layout([2], [0]), "0-w": layout([2], [0])}
    path = write_strategy(tmp_path / "m.ckpt", 0, layouts, item_stages=[])
    assert read_strategy(str(path)).device_count == 4


@pytest.mark.parametrize(
    ("names", "item_stages", "ending"),
    [
        (["0-w", "1-w"], [0], "ckpt"),
        (["0-w"], [0, 1], "ckpt"),
        (["1-w"], [0], "ckpt"),
        (["0-w"], [1], "json"),
        (["0-w", "w"], [0, 1], "ckpt"),
        (["v", "w"], [0, 1], "json"),
        (["0-w", "2-w"], [], "ckpt"),
    ],
)
def test_names_and_items_that_contradict_each_other_are_refused(
    tmp_path: Path, names: list[str], item_stages: list[int], ending: str
) -> None:
    path = tmp_path / f"m.{ending}"
    write_strategy(path, 0, {name: layout([2], [0]) for name in names}, item_stages)
    refused(path, "stage", "merge-pipeline")


def test_a_file_of_a_later_stage_alone_is_refused(tmp_path: Path) -> None:
    path = write_strategy(tmp_path / "s.ckpt", 2, {"w": layout([2], [0])})
    refused(path, "stage 2 only", "stages 0 and 1 are missing", "the directory")


def test_a_gap_in_a_merged_file_is_refused(tmp_path: Path) -> None:
    path = write_merged(tmp_path / "m.ckpt", {0: {"w": layout([2], [0])}, 2: {"v": layout([2], [0])}})
    refused(path, "stage 1 is missing")
    last = 2**32 - 1
    path = write_merged(tmp_path / "m.ckpt", {0: {"w": layout([2], [0])}, last: {"v": layout([2], [0])}})
    refused(path, "stages 1, 2")


def test_layouts_for_different_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    expected = {"a": layout([2, 4], [0]), "b": layout([8], [0]), "odd": layout([2, 2], [0])}
    error = refused(write_strategy(tmp_path / "s.ckpt", 0, expected), "stage 0", "4: 'odd'", "8: 'a', 'b'")
    assert error.parameter == "odd"


# Layouts that contradict themselves.

BAD_LAYOUTS = {
    "axis out of range": layout([2, 4], [2, -1]),
    "negative axis": layout([2, 4], [-2, -1]),
    "axis used twice": layout([2, 4], [0, 0]),
    "axis used twice in a dimension": layout([2, 4], [[0, 0], [-1]]),
    "not split and split": layout([2, 4], [[-1, 0], [-1]]),
    "axis of size 0": layout([2, 0], [0]),
    "too many devices": layout([4096, 8192], [0]),
    "shard size below -1": layout([2, 4], [0], step=4, size=-2),
    "shard size that does not divide": layout([2, 4], [0], step=4, size=3),
    "shard step that contradicts": layout([2, 4], [0], step=3, size=2),
    "negative shard step": layout([2, 4], [0], step=-4, size=2),
    "sharded scalar": layout([2], [], step=1, size=2),
    "offsets that do not fit": layout([2], [0], sizes=[3, 4], offsets=[0, 4]),
    "offsets without sizes": layout([2], [0], offsets=[0, 4]),
    "too many slices": layout([2], [0], sizes=[3, 4, 5], offsets=[0, 3, 7]),
    "negative slice": layout([2], [0], sizes=[-3, 4], offsets=[0, -3]),
    "field": layout([2], [0], field=3),
}


@pytest.mark.parametrize("expected", BAD_LAYOUTS.values(), ids=BAD_LAYOUTS)
@pytest.mark.parametrize("ending", ["ckpt", "json"])
def test_a_bad_layout_names_file_stage_and_parameter(tmp_path: Path, expected: dict[str, Any], ending: str) -> None:
    path = write_merged(tmp_path / f"s.{ending}", {0: {"good": layout([2, 4], [0])}, 1: {"bad.w": expected}})
    error = refused(path, "stage 1", "bad.w")
    assert error.parameter == "bad.w"


@pytest.mark.parametrize("shape", [[8, 8], [-8], [2**70], [8, -1, 8]])
def test_a_bad_tensor_shape_is_refused(tmp_path: Path, shape: list[int]) -> None:
    path = write_strategy(tmp_path / "s.json", 0, {"w": layout([2], [0], shape=shape)})
    refused(path, "w")


# Damage.


def test_a_parameter_listed_twice_is_refused(tmp_path: Path) -> None:
    once = protobuf({"w": layout([2], [0])})
    (tmp_path / "s.ckpt").write_bytes(once + once)
    refused(tmp_path / "s.ckpt", "parameter 'w' twice")
    text = json.dumps(json_content({"w": layout([2], [0]), "x": layout([2], [0])})).replace('"x"', '"w"')
    (tmp_path / "s.json").write_text(text)
    refused(tmp_path / "s.json", "'w' twice")


def test_a_file_without_layouts_is_refused(tmp_path: Path) -> None:
    for name in ("s.ckpt", "s.json"):
        refused(write_strategy(tmp_path / name, 0, {}), "no parameter layouts")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    for name in ("s.ckpt", "s.json"):
        (tmp_path / name).touch()
        refused(tmp_path / name, "empty")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    for name in ("s.ckpt", "s.json", "s"):
        path = write_strategy(tmp_path / name, 0, {"w": layout([2], [0])})
        path.write_bytes(path.read_bytes()[:-1])
        refused(path, "damaged")


def with_value(*path: str, value: Any) -> bytes:
    content: Any = json_content({"w": layout([2], [0], shape=[4], sizes=[2, 2], offsets=[0, 2])})
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(content).encode()


LAYOUT = ("parallel_layout_item", "w")
ITEM = ("parallel_strategy_item", "MatMul-0")
# Each kind of wrong value, at some of the places; None removes it.
WRONG_VALUES: list[tuple[tuple[str, ...], list[Any]]] = [
    ((*LAYOUT, "dev_matrix"), ["2", 2, None, [[[0]]], ["0"], [True], {}]),
    ((*LAYOUT, "tensor_shape"), [2.0, 2]),
    ((*LAYOUT, "opt_weight_shard_size"), ["2", True, 2**80, [2], None, float("nan")]),
    (("parallel_layout_item", ""), [{}]),
    (("parallel_strategy_item",), [1, {"n": 1}]),
    ((*ITEM, "stage"), ["0", -1, 2**32, None]),
    ((*ITEM, "parallel_strategy"), [[["2"]], None]),
    (("current_stage",), ["1"]),
]
BAD_JSON = {
    "unfinished": b"{",
    "not UTF-8": b'{"parallel_layout_item": {"\xff": 1}}',
    "half a surrogate": b'{"parallel_layout_item": {"\\ud800": {}}}',
    **{f"{path[-1]} {value!r}": with_value(*path, value=value) for path, values in WRONG_VALUES for value in values},
}


@pytest.mark.parametrize("data", BAD_JSON.values(), ids=BAD_JSON)
def test_json_of_another_kind_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "strategy.json").write_bytes(data)
    refused(tmp_path / "strategy.json")


@given(data=st.data())
def test_any_damage_is_an_error_at_most(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    expected = {"w": layout([2, 4], [[1, 0], [-1]], step=1, size=-1), "a-b": layout([8], [0], sizes=[1] * 8)}
    whole = data.draw(st.sampled_from([protobuf(expected, [0, 1]), json.dumps(json_content(expected)).encode()]))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged_strategy.ckpt"
    path.write_bytes(bytes(damaged[: data.draw(st.integers(1, len(damaged)))]))
    try:
        read_strategy(str(path))
    except ReshardError as error:
        assert error.status == 3


# What is no strategy file.

OTHERS = {
    "checkpoint": (field(1, field(1, "w") + field(2, field(1, 4) + field(2, "Float32"))), "a checkpoint"),
    "long checkpoint": (field(1, field(1, "w" * 300) + field(2, b"")), "a checkpoint"),
    "encrypted": (b"\xd9\x5e\x3a\x7f" + bytes(60), "an encrypted checkpoint"),
    "safetensors": ((2).to_bytes(8, "little") + b"{}", "a safetensors file"),
    "group_info": (group_info([0, 4], [("2-1", [0, 4])]), "a group_info file"),
    "text": (b"This is not a strategy.\n", "not a strategy file"),
    "text after an empty line": (b"\n# Title\n", "not a strategy file"),
    "other JSON": (b'{"total_size": 1}', "JSON without parameter layouts"),
    "random": (bytes(range(200, 256)), "not a strategy file"),
}


@pytest.mark.parametrize(("data", "kind"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("name", ["x.ckpt", "x.json", "x"])
def test_files_of_other_kinds_are_recognised(tmp_path: Path, data: bytes, kind: str, name: str) -> None:
    (tmp_path / name).write_bytes(data)
    refused(tmp_path / name, "not a strategy file", kind)


def test_a_fifo_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s.ckpt")
    refused(tmp_path / "s.ckpt", "not a regular file")


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    write_strategy(tmp_path / "s.ckpt", 0, {"w": layout([2], [0])})
    for path in (tmp_path / "nothing", tmp_path / "loop", tmp_path / "s.ckpt" / "x"):
        refused(path)
    with pytest.raises(UsageError, match="too long"):
        read_strategy(str(tmp_path / ("x" * 300)))
    with pytest.raises(StrategyError):
        read_strategy("a\0b")
    with pytest.raises(StrategyError, match="pass none"):
        read_strategy("")


# Writing.

numbers = st.integers(0, 2**32 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
names = st.text(min_size=1, max_size=8)
dims = st.lists(numbers, max_size=4).map(tuple)
one_map = st.lists(int32, max_size=4).map(tuple)
nested = st.builds(
    RecordedLayout,
    device_matrix=dims,
    tensor_maps=st.lists(one_map, min_size=2, max_size=4).map(tuple),
    nested=st.just(True),
    tensor_shape=st.none(),
    field=int32,
    shard_step=int32,
    shard_size=int32,
    split_sizes=st.lists(int64, max_size=3).map(tuple),
    split_offsets=st.lists(int64, max_size=3).map(tuple),
)
flat = st.builds(lambda matrix, entries: RecordedLayout(matrix, (entries,)), dims, one_map)
items = st.builds(StrategyItem, names, numbers, st.lists(dims, max_size=3).map(tuple))


@given(
    st.lists(items, max_size=3, unique_by=lambda item: item.node),
    st.dictionaries(names, nested | flat, max_size=3),
    numbers,
)
def test_written_strategies_are_read_again(
    items: list[StrategyItem], layouts: dict[str, RecordedLayout], current: int
) -> None:
    for form, parse, write in (
        ("protobuf", files.parse_protobuf, files.protobuf_bytes),
        ("json", files.parse_json_strategy, files.json_bytes),
    ):
        file = StrategyFile("path", form, tuple(items), layouts, current)
        again = parse(write(file), "path")
        assert again == file
        assert again is not None
        assert list(again.layouts) == list(file.layouts)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_written_protobuf_equals_mindspores_byte_for_byte(name: str) -> None:
    for path in (case_directory(name) / "strategy").glob("*.ckpt"):
        assert files.protobuf_bytes(read_strategy_file(str(path))) == path.read_bytes()


THEIRS = """
from google.protobuf import descriptor_pb2, descriptor_pool
theirs = descriptor_pb2.FileDescriptorProto(name="node_strategy.proto", package="mindspore.straspb")
theirs.message_type.add(name="ParallelStrategyMap")
descriptor_pool.Default().AddSerializedFile(theirs.SerializeToString())
"""


def test_protobuf_messages_of_mindspore_do_not_conflict(tmp_path: Path) -> None:
    path = tmp_path / "s.ckpt"
    path.write_bytes(protobuf({"w": layout([2], [0])}))
    words = ["strategy", "show", str(path), "--json"]
    shown = subprocess.run(
        [sys.executable, "-c", THEIRS + LAUNCHER, *words], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert shown == done(*words).out
