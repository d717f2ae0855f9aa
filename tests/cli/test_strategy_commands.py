"""strategy show and strategy diff on the command line."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.text.names import name_patterns
from tests.corpus import CORPUS, FIXTURES, needs_corpus
from tests.layouts import examples, layouts, shapes, strategies, tensors
from tests.number_words import numbers_named
from tests.reference import boxes
from tests.running import LAUNCHER, done, fails, reshard, terminal_output
from tests.small import World
from tests.strategy_writing import protobuf
from tests.trees import layout, single, write_strategy

PANGU = CORPUS / "pangu_alpha_2.6B" / "strategy.ckpt"
WEIGHT = "backbone.blocks.0.output.mapping.weight"


def on_terminal(columns: int, *words: object, **environment: str) -> str:
    """A command's output on a terminal of this many columns."""
    return terminal_output(columns, LAUNCHER, *map(str, words), **environment)


# strategy show.


@pytest.mark.deep
@needs_corpus
@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", [WEIGHT, "backbone.blocks.2.attention.dense1.weight", "backbone.layernorm.gamma"])
def test_slices_on_512_ranks_fit_a_narrow_terminal(name: str, columns: int) -> None:
    lines = on_terminal(columns, "strategy", "show", PANGU, name, NO_COLOR="1").splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= columns
    if name != "backbone.layernorm.gamma":
        assert any("ranks 7-511 step 8" in line for line in lines)
        assert any("cut in 64" in line for line in lines)


@needs_corpus
def test_all_layouts_of_a_large_model_fit_two_screens() -> None:
    lines = on_terminal(80, "strategy", "show", PANGU, NO_COLOR="1").splitlines()
    assert len(lines) <= 50
    counts = [int(line.split()[0]) for line in lines if re.match(r" {4} *\d+  ", line)]
    assert sum(counts) == 1551


def test_verbose_and_json_list_every_parameter() -> None:
    path = FIXTURES / "02_dp2mp4_opt/strategy"
    rows = done("strategy", "show", path, "--json").json
    short, verbose = (done("strategy", "show", path, *words).out for words in ((), ("--verbose",)))
    assert len(rows) == 108
    assert {row["parameter"] for row in rows} <= {line.split(" ")[0] for line in verbose.splitlines()}
    assert len(short.splitlines()) < 40 and "adam_v.backbone.blocks.1.layernorm1.beta" not in short
    assert "12  {,adam_m.,adam_v.}backbone.blocks.{0-1}.layernorm{1-2}.beta" in short


def test_an_unknown_parameter_is_wrong_usage_and_similar_names_are_listed(world: World) -> None:
    fails(2, "strategy", "show", world.old, "m.v", texts=["lists no parameter 'm.v'", "did you mean", "m.w"])
    fails(2, "strategy", "show", world.old, "w.m", "--json", texts=["lists no parameter 'w.m'"])
    fails(2, "strategy", "show", world.old, "nothing like it", texts=["without PARAM"])


def test_a_pattern_shows_the_layouts_of_its_matches(world: World) -> None:
    shown = done("strategy", "show", world.old, "*w").out
    assert "2 parameters match '*w'" in shown
    assert [line.split()[0] for line in shown.splitlines() if "[2, 2]" in line] == ["w", "m.w"]
    rows = done("strategy", "show", world.old, "*w", "--json").json
    assert [row["parameter"] for row in rows] == ["w", "m.w"]
    fails(2, "strategy", "show", world.old, "*x*", texts=["lists no parameter '*x*'"])


def test_every_slice_is_listed_with_its_ranks(tmp_path: Path) -> None:
    cuts = {
        "w": layout([2, 2, 2], [1, 0]),
        "m": layout([2, 4], [0, -1], shard_step=4, shard_size=-1),
        "v": layout([8], [-1]),
    }
    path = write_strategy(tmp_path / "s", single(cuts))
    table = [line.split("  ") for line in done("strategy", "show", path, "w").out.splitlines() if "ranks " in line]
    assert [[cell.strip() for cell in row if cell] for row in table[1:]] == [
        ["0/2..1/2", "0/2..1/2", "ranks 0,4"],
        ["0/2..1/2", "1/2..2/2", "ranks 1,5"],
        ["1/2..2/2", "0/2..1/2", "ranks 2,6"],
        ["1/2..2/2", "1/2..2/2", "ranks 3,7"],
    ]
    assert "1/8..2/8, shard 2 of 2  rank 4" in done("strategy", "show", path, "m").out
    assert "whole on every rank: 8 identical copies" in done("strategy", "show", path, "v").out


def test_a_pattern_with_one_match_shows_its_slices(world: World) -> None:
    assert done("strategy", "show", world.old, "m.?").out == done("strategy", "show", world.old, "m.w").out


def test_a_name_that_looks_like_a_pattern_is_a_name_first(tmp_path: Path) -> None:
    path = write_strategy(tmp_path / "s", single({"w[0]": layout([2], [0]), "w0": layout([2], [-1])}))
    assert done("strategy", "show", path, "w[0]", "--json").json["parameter"] == "w[0]"


def test_a_picture_is_asked_of_view(world: World) -> None:
    fails(2, "strategy", "show", world.old, "w", "--svg", "w.svg", texts=["--svg", "reshard view"])
    fails(2, *world.words("--svg", "w.svg", command="plan"), texts=["--svg", "reshard view"])


def test_a_parameter_of_several_stages_is_shown_per_stage(tmp_path: Path) -> None:
    stages = [
        {"devices": 4, "layouts": {"t": layout([2, 2], [0, -1])}},
        {"devices": 2, "layouts": {"t": layout([2], [-1, 0])}},
    ]
    path = write_strategy(tmp_path / "s", stages)
    report = done("strategy", "show", path, "t", "--json").json
    assert [stage["stage"] for stage in report["stages"]] == [0, 1]
    assert [[part["ranks"] for part in stage["slices"]] for stage in report["stages"]] == [[[0, 2], [1, 3]], [[4], [5]]]
    shown = done("strategy", "show", path, "t").out
    assert "stage 0: ranks 0-3" in shown and "stage 1: ranks 4-5" in shown
    assert "ranks 0,2" in shown and "rank 5" in shown


def test_element_counts_are_shown_where_a_json_strategy_records_the_shape(tmp_path: Path) -> None:
    strategy = single({"w": layout([2, 2], [0, -1], -1, 2)})
    path = write_strategy(tmp_path / "s", strategy, {"w": [16, 3]}, form="json")
    (stage,) = done("strategy", "show", path, "w", "--json").json["stages"]
    assert stage["extents"] == [16, 3] and stage["in_elements"] == [True, True]
    assert [(part["box"], part["shard"], part["ranks"]) for part in stage["slices"]] == [
        ([[0, 4], [0, 3]], 0, [0]),
        ([[4, 8], [0, 3]], 1, [2]),
        ([[8, 12], [0, 3]], 0, [1]),
        ([[12, 16], [0, 3]], 1, [3]),
    ]
    assert "4..8, shard 2 of 2" in done("strategy", "show", path, "w").out


# Names.


def expanded(pattern: str) -> list[str]:
    """The names of a pattern, with braces expanded as in a shell."""
    choices = []
    for part in re.split(r"(\{[^}]*\})", pattern):
        if not part.startswith("{"):
            choices.append([part])
            continue
        inside = part[1:-1]
        numbers = re.fullmatch(r"[0-9].*", inside)
        choices.append(sorted(map(str, numbers_named(inside))) if numbers else inside.split(","))
    return ["".join(picked) for picked in product(*choices)]


@given(
    st.sets(
        st.builds(
            "{}{}.{}.{}{}".format,
            st.sampled_from(["", "adam_m.", "adam_v.", "m-"]),
            st.sampled_from(["blocks", "moe"]),
            st.sampled_from(["0", "1", "2", "4", "6", "8", "007", "10", "99999999999999"]),
            st.sampled_from(["dense", "norm2.", "块"]),
            st.integers(0, 3),
        )
    )
)
def test_each_name_belongs_to_one_pattern(names: set[str]) -> None:
    actual = name_patterns(names, names)
    assert sorted(name for pattern in actual for name in expanded(pattern.text)) == sorted(names)
    assert [len(expanded(pattern.text)) for pattern in actual] == [pattern.size for pattern in actual]


# strategy diff.


@st.composite
def conversions(draw: st.DrawFn) -> tuple[list[int], Any, Any]:
    shape = draw(shapes(1))
    before, after = (draw(layouts(draw(st.sampled_from([1, 4, 6, 8])), shape)) for _ in range(2))
    return shape, before, after


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversions())
def test_diff_effects_match_enumerated_devices(tmp_path: Path, conversion: tuple[list[int], Any, Any]) -> None:
    shape, before, after = conversion
    paths = [
        write_strategy(tmp_path / name, single({"w": created}), form="nested")
        for name, created in (("a", before), ("b", after))
    ]
    report = done("strategy", "diff", *paths, "--json").json
    ((change,), source, target) = report["changes"], boxes(before, shape), boxes(after, shape)
    same = set(source) == set(target)
    expected = "unchanged" if source[: len(target)] == target else "moved" if same else "cut_differently"
    assert change["effect"] == expected
    assert {effect: count for effect, count in report["summary"].items() if count} == {expected: 1}
    text = done("strategy", "diff", *paths).out
    assert ("nothing changes" in text) == (source == target)


@settings(examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_diff_accounts_for_every_parameter_once(tmp_path: Path, data: st.DataObject) -> None:
    checkpoint = data.draw(tensors())
    before, after = data.draw(strategies(checkpoint)), data.draw(strategies(checkpoint))
    for strategy, name in ((before, "gone"), (after, "new")):
        strategy[0]["layouts"][name] = layout([strategy[0]["devices"]], [0])
    paths = [write_strategy(tmp_path / name, created, form="nested") for name, created in (("a", before), ("b", after))]
    report = done("strategy", "diff", *paths, "--json").json
    assert sorted(name for change in report["changes"] for name in change["parameters"]) == sorted(checkpoint)
    assert all(change["problem"] is None for change in report["changes"])
    assert report["left_out"] == ["gone"] and report["missing"] == ["new"]
    assert report["summary"]["left_out"] == report["summary"]["missing"] == 1
    assert sum(report["summary"].values()) == len(checkpoint) + 2
    for change in report["changes"]:
        for name in change["parameters"]:
            for contents, strategy in ((change["source"], before), (change["target"], after)):
                assert [row["stage"] for row in contents] == [n for n, s in enumerate(strategy) if name in s["layouts"]]


def test_diff_across_pipelines_prints_changes_common_to_all_stages_once() -> None:
    """Four stages become two: otherwise every change would be printed four times."""
    text = done("strategy", "diff", FIXTURES / "10_dp1mp2pp4/strategy", FIXTURES / "10_dp2mp2pp2/strategy").out
    assert "A: stages 0-3: ranks 0-7, device matrix [2], tensor map [-1, 0]" in text
    assert "B: stages 0-1: ranks 0-7, device matrix [2, 2], tensor map [-1, 0]" in text
    assert text.count("device matrix [2, 2]") == 4


@pytest.mark.parametrize(("first", "second"), [("old", None), (None, "old")])
def test_diff_accepts_none(world: World, first: str | None, second: str | None) -> None:
    paths = [world.old if name else "none" for name in (first, second)]
    report = done("strategy", "diff", *paths, "--json").json
    effects = {name: change["effect"] for change in report["changes"] for name in change["parameters"]}
    assert set(effects) == {"w", "v", "m.w"} and not report["left_out"] and not report["missing"]
    assert effects["m.w"] == "cut_differently"
    assert effects["v"] == ("unchanged" if first else "moved")
    assert "no parameter is in both" in done("strategy", "diff", "none", "none").out


def test_diff_with_exit_code_fails_on_a_difference(tmp_path: Path) -> None:
    layout_record = layout([2, 2], [0, -1])
    one, same, other, none = (
        write_strategy(tmp_path / name, single({"w": of}))
        for name, of in (
            ("one", layout_record),
            ("same", layout([2, 2], [0, -1])),
            ("other", layout([2, 2], [1, -1])),
            ("none", layout([1], [-1, -1])),
        )
    )
    more = write_strategy(tmp_path / "more", single({"w": layout_record, "v": layout_record}))
    assert done("strategy", "diff", one, same, "--exit-code").out == done("strategy", "diff", one, same).out
    for differing in (other, none, more):
        result = reshard("strategy", "diff", one, differing, "--exit-code", "--json")
        assert result.status == 4
        assert result.json == done("strategy", "diff", one, differing, "--json").json


@pytest.mark.parametrize("command", ["show", "rank-list"])
@pytest.mark.parametrize("content", ["empty", "items", "nothing"])
def test_an_empty_strategy_is_not_none(content: str, command: str, tmp_path: Path) -> None:
    """Neither an empty file nor one without layouts: as one device, full tensors would be read as slices."""
    for ending in ("ckpt", "json", "pb"):
        path = tmp_path / f"strategy.{ending}"
        if content == "empty":
            path.write_bytes(b"")
        elif ending == "json":
            items = {"MatMul": {"stage": 0, "parallel_strategy": [[2, 1]]}} if content == "items" else {}
            path.write_text(json.dumps({"parallel_layout_item": {}, "parallel_strategy_item": items}))
        else:
            path.write_bytes(protobuf({}, (0,) if content == "items" else ()))
        words = ("strategy", "show", path)
        if command == "rank-list":
            words = ("rank-list", 0, "--src-strategy", path, "--dst-strategy", "none")  # type: ignore[assignment]
        fails(3, *words, texts=["strategy"])


def test_a_strategy_without_items_is_not_none(tmp_path: Path) -> None:
    path = tmp_path / "strategy.ckpt"
    path.write_bytes(protobuf({"w": {"dev_matrix": [4], "tensor_map": [0, -1]}}, ()))
    assert done("rank-list", 0, "--src-strategy", path, "--dst-strategy", "none").out == "0 1 2 3\n"
