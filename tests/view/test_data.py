"""The data of a page: equal to `inspect`, `plan`, `stats` and the layouts, in few bytes."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints import CheckpointIndex
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.checkpoints.formats.tensors import Tensor
from reshard.convert.transfers import Transfers
from reshard.forms.registry import form_named
from reshard.inspection.checkpoint import Inspected, InspectedFile, InspectedStep
from reshard.layout import Layout
from reshard.strategies import Holding, Stage
from reshard.view.moves import pairs_data
from reshard.view.page import by_parts, names_data, page, page_data, repeats
from tests.running import done, fails
from tests.small import World, tensors
from tests.trees import read_checkpoint, write_checkpoint
from tests.view.pages import columns, data_of, names_of, pairs, places, repeated

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DEMO = FIXTURES / "demo"
CUT = ("--src-strategy", DEMO / "src_strategy.ckpt")


def made(tmp_path: Path, *words: object) -> dict[str, Any]:
    """The data of the page that a command writes."""
    done("view", *map(str, words), "-o", tmp_path / "page.html", "-q")
    return data_of(tmp_path / "page.html")


@given(st.lists(st.integers(-2, 2)))
def test_repeated_values_decode_to_the_originals(values: list[int]) -> None:
    assert repeated(repeats(values)) == values


@given(st.sets(st.text("ab1.", max_size=8)))
def test_names_decode_to_the_originals_and_common_beginnings_are_together(names: set[str]) -> None:
    ordered = by_parts(names)
    assert sorted(ordered) == sorted(names) and names_of({"names": names_data(ordered)}) == ordered
    heads = [name.split(".")[0] for name in ordered if "." in name]
    assert len([head for head, before in zip(heads, [None, *heads]) if head != before]) == len(set(heads))


def test_a_page_of_ranks_has_the_numbers_of_inspect(tmp_path: Path) -> None:
    data = made(tmp_path, DEMO / "src_checkpoints", *CUT)
    inspected = done("inspect", DEMO / "src_checkpoints", *CUT, "--json").json
    (step,) = inspected["steps"]
    files = data["files"]
    assert files["number"] == step["ranks"] and [files["base"] + path for path in files["path"]] == step["files"]
    assert sum(repeated(files["bytes"])) == step["bytes"] and set(repeated(files["state"])) == {"ok"}
    assert data["step"] == step["step"] and data["complete"] is True
    shown = dict(zip(names_of(data), (data["types"][number] for number in data["parameters"]["type"])))
    assert sum(type_[2] for type_ in shown.values() if type_[2] is not None) == step["full_bytes"]
    stored = {item["name"]: item for item in step["contents"]["tensors"]}
    assert shown.keys() == stored.keys()
    for name, (dtype, _, _, nbytes, count, kind) in shown.items():
        item = stored[name]
        assert ([dtype], nbytes, count, kind) == (item["dtypes"], item["nbytes"], item["files"], item["kind"])


def test_slices_of_the_page_equal_those_of_the_files(tmp_path: Path) -> None:
    data = made(tmp_path, DEMO / "src_checkpoints", *CUT)
    actual = places(data)
    whole = tmp_path / "whole"
    done("convert", DEMO / "src_checkpoints", whole, *CUT, "--dst-strategy", "none", "--format", "safetensors")
    full = read_checkpoint(whole / "rank_0" / "checkpoint_0.safetensors")
    checked = 0
    for name, type_, number in columns(data):
        if number < 0:
            continue
        (sharding,) = data["layouts"][number]["shardings"]
        (shape,) = data["types"][type_][1]
        for place, ranks in zip(np.ndindex(*sharding["cuts"]), sharding["slices"]):
            part = tuple(
                slice(size // cuts * at, size // cuts * (at + 1))
                for size, cuts, at in zip(shape, sharding["cuts"], place)
            )
            expected = full[name].array[part].tobytes()
            for rank in ranks:
                path = data["files"]["base"] + data["files"]["path"][data["files"]["number"].index(rank)]
                offset, nbytes = actual[rank, name]
                assert Path(path).read_bytes()[offset : offset + nbytes] == expected
                checked += 1
    assert checked == 8 * sum(number >= 0 for number in data["parameters"]["layout"])


def test_replicas_of_the_page_equal_those_of_the_strategy(tmp_path: Path, world: World) -> None:
    world.save(tensors())
    data = made(tmp_path, world.src, "--src-strategy", world.old)
    groups: dict[int, list[int]] = {}
    for rank, first in zip(data["files"]["number"], repeated(data["files"]["same"])):
        groups.setdefault(first, []).append(rank)
    report = done("replicas", "--strategy", world.old, "--json").json
    assert sorted(groups.values()) == sorted(group["ranks"] for group in report)


def test_a_conversion_has_the_numbers_of_plan(tmp_path: Path) -> None:
    target = ("--dst-strategy", DEMO / "dst_strategy.ckpt")
    moves = made(tmp_path, DEMO / "src_checkpoints", *CUT, *target)["moves"]
    planned = done("plan", DEMO / "src_checkpoints", tmp_path / "out", *CUT, *target, "--json").json
    counts: Counter[tuple[int, int]] = Counter()
    for source, to, nbytes, _ in pairs(moves):
        counts[source, to] += nbytes
    assert counts == {(each["rank"], to["rank"]): each["bytes"] for to in planned["targets"] for each in to["sources"]}
    assert repeated(moves["bytes"]) == [to["bytes"] for to in planned["targets"]]
    assert moves["sources"] == 8 and moves["targets"] == 4 and moves["taken"] == sum(counts.values())
    fans = [len(to["sources"]) for to in planned["targets"]]
    assert moves["fans"] == [min(fans), max(fans)]
    read = [sum(nbytes for (source, _), nbytes in counts.items() if source == rank) for rank in range(8)]
    assert moves["busiest"] == [read.index(max(read)), max(read)]


def test_commands_of_a_page_repeat_what_was_asked(tmp_path: Path) -> None:
    src, target = DEMO / "src_checkpoints", DEMO / "dst_strategy.ckpt"
    data = made(tmp_path, src, *CUT, "--dst-strategy", target, "--step", "2_10")
    assert data["options"] == ["--strategy", str(CUT[1]), "--step", "2_10"]
    asked = f"--strategy {CUT[1]} --step 2_10 --dst-strategy {target} -o {tmp_path / 'page.html'}"
    assert data["command"] == f"reshard view {src} {asked}"
    words = ("--a-strategy", CUT[1], "--b-strategy", CUT[1], "--b-step", "2_10", "--rename", "head.weight=head.weight")
    assert made(tmp_path, src, src, *words)["options"] == list(map(str, words))


def test_a_conversion_to_shards_has_the_numbers_of_plan(tmp_path: Path) -> None:
    """The rows of rank files are cut as for dcp, those of a form of PyTorch as for the same form."""
    bricks = FIXTURES / "dcp" / "w4_bricks" / "checkpoint"
    for source, words in ((DEMO / "src_checkpoints", CUT), (bricks, ())):
        moves = made(tmp_path, source, *words, "--shards", 3)["moves"]
        to = ("--to", "dcp", "--shards", 3)
        planned = done("plan", source, tmp_path / "out", *words, *to, "--json").json
        assert repeated(moves["bytes"]) == [each["bytes"] for each in planned["targets"]]
        assert moves["targets"] == 3


def test_checkpoint2_has_the_numbers_of_inspect(tmp_path: Path) -> None:
    source = FIXTURES / "checkpoint2" / "a02_dp2mp2_dedup" / "checkpoint"
    data = made(tmp_path, source, "--dst-strategy", "same")
    inspected = done("inspect", source, "--json").json
    laid_out = {item["name"]: item for item in inspected["tensors"]}
    for name, type_, number in columns(data):
        if number >= 0:
            item = laid_out.pop(name)
            assert data["layouts"][number]["shardings"][0]["cuts"] == item["cuts"]
            assert data["types"][type_][1] == [item["shape"]] and data["types"][type_][0] == item["dtype"]
    assert not laid_out
    assert repeated(data["files"]["bytes"]) == [file["bytes"] for file in inspected["files"]]


def test_holder_numbers_belong_to_their_file(tmp_path: Path) -> None:
    source = FIXTURES / "dcp" / "w4_bricks" / "checkpoint"
    data = made(tmp_path, source)
    inspected = done("inspect", source, "--json").json
    files = [file["number"] for file in inspected["files"]]
    contents = {
        holder
        for layout in data["layouts"]
        for sharding in layout["shardings"]
        for each in sharding["slices"]
        for holder in each
    }
    aliases = dict(data["files"]["aliases"])
    assert data["files"]["number"] == files and contents - set(files) and contents - set(files) <= aliases.keys()
    assert set(aliases.values()) <= set(files)


def test_statistics_equal_stats_and_nan_is_a_problem(tmp_path: Path, world: World) -> None:
    full = tensors()
    name = "w"
    full[name].array.view("<f4")[0, 3] = np.nan
    world.save(full)
    data = made(tmp_path, world.src, "--src-strategy", world.old, "--stats")
    report = done("stats", world.src, "--strategy", world.old, "--json").json["tensors"]
    keys = ("name", "count", "nan", "inf", "zeros", "min", "max", "mean", "norm", "first_nonfinite")
    assert [row[:-1] for row in data["statistics"]] == [[tensor[key] for key in keys] for tensor in report]
    assert name in data["problems"][0]["text"] and data["problems"][0]["level"] == 0


def test_nan_in_any_copy_is_a_problem(tmp_path: Path, plain: World) -> None:
    plain.save(tensors(names=["w", "v"]))
    path = plain.src / "rank_2" / "net-1_10.ckpt"
    contents = read_checkpoint(path)
    array = contents["w"].array.copy()
    array.view("<f4")[0, 0] = np.nan
    write_checkpoint(path, {**contents, "w": contents["w"]._replace(array=array)})
    data = made(tmp_path, plain.src, "--src-strategy", plain.old, "--stats")
    line = fails(4, "stats", plain.src, "--strategy", plain.old, "--fail-on", "nan").out.splitlines()[0]
    assert line.startswith("w: 1 NaN") and str(path) in line
    assert line in data["problems"][0]["text"].splitlines() and data["problems"][0]["level"] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_in_one_only_are_those_of_diff(tmp_path: Path, value: float) -> None:
    full = tensors(names=["w", "v"])
    array = full["w"].array.copy()
    array.view("<f4")[0, 3] = value
    array.view("<f4")[1, 2] += 5.5
    a, b = (tmp_path / side / "model.safetensors" for side in "ab")
    write_checkpoint(a, full)
    write_checkpoint(b, {**full, "w": full["w"]._replace(array=array)})
    data = made(tmp_path, a.parent, b.parent, "--stats")
    (pair,) = done("diff", a.parent, b.parent, "--json").json["differing"]
    ((place, _, differing, *largest, at, words, bad),) = data["compared"]["differing"]
    assert names_of(data)[place] == "w" and differing == pair["differing"] == 2
    nan = bool(np.isnan(value))
    assert bad == [[0, 3], float(full["w"].array.view("<f4")[0, 3]), str(a), "NaN" if nan else "inf", str(b)]
    assert pair["first_nonfinite"][1]["index"] == bad[0] and pair["nan"] == [0, int(nan)]
    assert words == ("1 NaN in B only" if nan else "an infinite difference")
    # The largest difference has a place of its own, unless it is this one.
    assert at is None if not nan else at[0] == [1, 2]
    assert largest == ([pair["max_rel"], pair["max_abs"]] if nan else ["inf", "inf"])
    (problem,) = data["problems"]
    assert problem["level"] == 0
    assert problem["text"].splitlines()[1] in done("diff", a.parent, b.parent).out.splitlines()


def test_names_that_differ_by_a_prefix_have_the_hint_of_diff(tmp_path: Path) -> None:
    full = tensors(names=["w", "v"])
    a, b = tmp_path / "a", tmp_path / "b"
    write_checkpoint(a / "model.safetensors", {**full, "same": full["w"]})
    write_checkpoint(b / "model.safetensors", {"model.w": full["w"], "model.v": full["v"], "same": full["w"]})
    (problem,) = made(tmp_path, a, b)["problems"]
    assert problem["hint"] == "to compare the tensors, add --rename '*=model.*'"
    assert f"{problem['text']}; {problem['hint']}" in done("diff", a, b).out
    assert made(tmp_path, a, b, "--rename", "w=model.w", "--rename", "v=model.v")["problems"] == []
    write_checkpoint(a / "model.safetensors", full)
    fails(2, "view", a, b, "-o", tmp_path / "none.html", texts=["no names in common", problem["hint"]])


def test_axes_are_those_that_are_known(tmp_path: Path) -> None:
    """Slices of all ranks may be those of mp or of optimizer shards, which Checkpoint 2.0 does not record."""
    words = ("--to", "checkpoint2", "--dst-strategy", "same")
    done("convert", DEMO / "src_checkpoints", tmp_path / "two", *CUT, *words)
    assert made(tmp_path, DEMO / "src_checkpoints", *CUT)["cluster"]["words"] == "dp 2 × mp 4"
    assert made(tmp_path, tmp_path / "two")["cluster"]["axes"] == []
    known = FIXTURES / "checkpoint2" / "a02_dp2mp2_dedup" / "checkpoint"
    assert made(tmp_path, known)["cluster"]["words"] == "dp 2 × mp 2"


def test_a_file_with_a_wrong_crc_is_a_problem_of_statistics(tmp_path: Path, plain: World) -> None:
    plain.save(tensors(names=["w", "v"]))
    path = plain.src / "rank_2" / "net-1_10.ckpt"
    content = read_checkpoint(path)["w"].array.tobytes()
    plain.save(tensors(names=["w", "v"]), crc=True)
    path.write_bytes(path.read_bytes().replace(content, bytes([content[0] ^ 1]) + content[1:]))
    data = made(tmp_path, plain.src, "--src-strategy", plain.old, "--stats")
    assert data["statistics"] is None
    assert any(str(path) in problem["text"] and "CRC" in problem["text"] for problem in data["problems"])


def test_quantised_weights_are_shown_as_numbers_on_request(tmp_path: Path) -> None:
    words = ["--dequantize", "BFloat16"]
    data = made(tmp_path, FIXTURES / "fp8", "--stats", "--shards", 2, *words)
    report = done("stats", FIXTURES / "fp8", *words, "--json").json["tensors"]
    assert [(row[0], row[8]) for row in data["statistics"]] == [(each["name"], each["norm"]) for each in report]
    to = ("--to", "dcp", "--shards", 2)
    planned = done("plan", FIXTURES / "fp8", tmp_path / "out", *to, *words, "--json").json
    assert repeated(data["moves"]["bytes"]) == [each["bytes"] for each in planned["targets"]]
    fails(2, "view", FIXTURES / "fp8", *words, texts=["add --stats or --dst-strategy"])


def test_the_strategy_of_the_source_has_the_option_of_stats(tmp_path: Path) -> None:
    source = ("--strategy", DEMO / "src_strategy.ckpt")
    assert made(tmp_path, DEMO / "src_checkpoints", *source) == made(tmp_path, DEMO / "src_checkpoints", *CUT)


def test_lost_ranks_are_the_first_problem_and_their_slices_are_marked(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "src_checkpoints", tmp_path / "src")
    shutil.rmtree(tmp_path / "src" / "rank_3")
    target = ("--dst-strategy", DEMO / "dst_strategy.ckpt")
    data = made(tmp_path, tmp_path / "src", *CUT, *target)
    assert data["complete"] is False and data["moves"] is None
    assert [problem["level"] for problem in data["problems"]] == sorted(each["level"] for each in data["problems"])
    severe = [problem["text"] for problem in data["problems"] if problem["level"] == 0]
    assert any("rank 3" in text for text in severe) and any("is refused" in text for text in severe)
    lost = [
        number
        for number, layout in enumerate(data["layouts"])
        if any(set(each) <= set(sharding["absent"]) for sharding in layout["shardings"] for each in sharding["slices"])
    ]
    assert lost
    assert dict(zip(data["files"]["number"], repeated(data["files"]["state"])))[3] == "missing"


def test_without_a_strategy_the_page_lists_files_and_omitted_checks(tmp_path: Path) -> None:
    data = made(tmp_path, DEMO / "src_checkpoints")
    assert set(data["parameters"]["layout"]) == {-1} and data["complete"] is None
    (problem,) = data["problems"]
    assert problem["level"] == 1 and "--src-strategy" in problem["hint"]


def test_a_single_file_is_shown(tmp_path: Path) -> None:
    (path,) = (DEMO / "src_checkpoints" / "rank_0").iterdir()
    data = made(tmp_path, path, "--stats")
    assert all(
        layout["shardings"][0]["cuts"] == [1] * len(layout["shardings"][0]["cuts"]) for layout in data["layouts"]
    )
    assert len(data["statistics"]) == len(names_of(data))


HOSTILE = ["</script><script>document.title='owned'</script>.\u202ew", "q\"'&lt;.x", "<img src=x onerror=alert(1)>"]


def test_hostile_names_cannot_end_the_script(tmp_path: Path) -> None:
    full = dict(zip(HOSTILE, tensors().values()))
    write_checkpoint(tmp_path / "<b>" / "model.safetensors", full)
    data = made(tmp_path, tmp_path / "<b>")
    assert sorted(names_of(data)) == sorted(HOSTILE)
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count("<script") == 2 and "<img" not in text and "<b>" not in text


def test_a_page_permits_only_its_own_script_and_style(tmp_path: Path) -> None:
    made(tmp_path, DEMO / "src_checkpoints")
    # The name of SVG's elements is an address that nothing loads.
    text = (tmp_path / "page.html").read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "default-src 'none'; script-src 'sha256-" in text and "unsafe" not in text
    assert "http:" not in text and "https:" not in text and " src=" not in text and "@import" not in text


MOST_BYTES = 81_450
"""Script and style together in the written page; the design's limit is 60,000. Lower it with every reduction."""


def test_script_and_style_are_small(tmp_path: Path) -> None:
    made(tmp_path, DEMO / "src_checkpoints")
    text = (tmp_path / "page.html").read_text("utf-8")
    found = re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", text, re.S)
    assert len(found) == 2 and sum(len(part.encode()) for part in found) < MOST_BYTES


def test_view_replaces_only_its_own_pages(tmp_path: Path) -> None:
    page_ = tmp_path / "page.html"
    for _ in range(2):
        done("view", DEMO / "src_checkpoints", "-o", page_)
    page_.write_text("<html>mine</html>")
    fails(2, "view", DEMO / "src_checkpoints", "-o", page_, texts=["is no page of reshard view", "-o FILE.html"])
    assert page_.read_text() == "<html>mine</html>"
    fails(2, "view", DEMO / "src_checkpoints", "-o", tmp_path / "page.svg", texts=["has to end in .html"])


def test_a_page_that_is_not_named_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done("view", DEMO / "src_checkpoints")
    page_ = Path("src_checkpoints.html")
    before = page_.read_bytes()
    other = tmp_path / "src_checkpoints"
    shutil.copytree(DEMO / "src_checkpoints", other, ignore=shutil.ignore_patterns("rank_7"))
    fails(2, "view", other, texts=["src_checkpoints.html: exists", "to replace it: -o src_checkpoints.html"])
    assert page_.read_bytes() == before
    done("view", other, "-o", page_)
    assert page_.read_bytes() != before


@given(
    st.dictionaries(st.tuples(st.integers(0, 30), st.integers(0, 11)), st.tuples(st.integers(1, 9), st.integers(1, 3)))
)
def test_pairs_decode_from_their_patterns(found: dict[tuple[int, int], tuple[int, int]]) -> None:
    moved = Transfers()
    for pair, (nbytes, requests) in found.items():
        moved.taken[pair], moved.requests[pair] = nbytes, requests
    data = pairs_data(moved, 12)
    assert data["together"] == 1
    assert {(source, target): (nbytes, requests) for source, target, nbytes, requests in pairs(data)} == found
    few = pairs_data(moved, 12, most=12)
    together = few["together"]
    expected: Counter[tuple[int, int]] = Counter()
    for (source, target), (nbytes, _) in found.items():
        expected[source // together, target // together] += nbytes
    assert {(source, target): nbytes for source, target, nbytes, _ in pairs(few)} == expected


@dataclass
class Wide:
    """A checkpoint of many tensors on many ranks, in memory."""

    tensors: dict[str, GlobalTensor]
    indexes: dict[int, CheckpointIndex]
    ranks: frozenset[int]

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        return (self.ranks,) * len(tensor.shardings)


def wide(parameters: int, ranks: int) -> Inspected:
    stage = Stage(0, 0, ranks, {})
    cuts = [
        Layout((ranks // 64, 64), ((0,), ()), shard_size=shards) if across else Layout((ranks // 64, 64), ((), (0,)))
        for across in (True, False)
        for shards in (0, -1, 8)
    ]
    shapes = [(163840, 4096), (327680, 128), (163840, 1024)]
    shared = {
        (layout, shape): (Holding(stage, layout, layout.grid(shape)),) for layout in set(cuts) for shape in shapes
    }
    tensors, entries, end = {}, {}, 0
    for number in range(parameters):
        name = f"model.decoder.layers.{number // 12}.self_attention.linear_{number % 12}.weight"
        layout, shape = cuts[number % len(cuts)], shapes[number % len(shapes)]
        tensors[name] = GlobalTensor(name, "BFloat16", 2, shape, shared[layout, shape])
        nbytes = prod(shape) * 2 // layout.slice_count
        entries[name] = Tensor(name, "BFloat16", shape, shape, ((end, nbytes),), nbytes)
        end += nbytes
    indexes = {
        rank: CheckpointIndex(f"ckpt/rank_{rank}/net_rank_{rank}-3_10.ckpt", "ckpt", end, entries)
        for rank in range(ranks)
    }
    checkpoint: Any = Wide(tensors, indexes, frozenset(range(ranks)) - {17})
    files = [InspectedFile(rank, index.path, end) for rank, index in indexes.items()]
    return Inspected("ckpt", form_named("ranks"), shown=InspectedStep("3_10", files, None, checkpoint, True))


def wide_page(parameters: int, ranks: int, targets: int | None = None) -> bytes:
    """The page of a wide checkpoint, with a conversion in which every target reads 16 sources."""
    moved = Transfers()
    count = targets or ranks
    for target in range(count):
        for number in range(16):
            pair = ((target * ranks // count) // 16 * 16 + number, target)
            moved.taken[pair], moved.requests[pair] = (target % 7 + 1) << 20, 40
        moved.taken[0, target] += 16
        moved.copied[0, target], moved.value_requests[0, target] = 16, 4
        moved.requests[0, target] += 4
    about: dict[str, Any] = {"source_noun": "rank", "target_noun": "rank", "sources": ranks}
    about |= {"source_cluster": None, "target_cluster": None, "command": None, "facts": []}
    totals: dict[str, Any] = {"taken": sum(moved.taken.values()), "requests": sum(moved.requests.values())}
    totals |= {"busiest": [0, 1 << 20], "fans": [16, 17]}
    sizes = {"targets": count, "bytes": repeats([1 << 30] * count)}
    moves = {**about, **totals, **sizes, **pairs_data(moved, count)}
    rows: list[list[Any]] = []
    subject = wide(parameters, ranks)
    assert subject.shown.checkpoint is not None
    for name in sorted(subject.shown.checkpoint.tensors):
        rows.append(
            [name, 1 << 24, 0, 0, 12, -0.12345678, 0.23456789, 1.234567e-05, 123.45678, None, [-30, "1122334567887651"]]
        )
    return page(
        {**page_data(subject, []), "moves": moves, "statistics": rows, "options": [], "command": "reshard view"}
    )


def test_ten_thousand_parameters_on_four_thousand_ranks_take_less_than_ten_megabytes() -> None:
    assert len(wide_page(10_000, 4_096)) < 10_000_000


@pytest.mark.parametrize("dense", [False, True])
def test_a_conversion_between_thousands_of_ranks_stays_small(dense: bool) -> None:
    moved = Transfers()
    random = np.random.default_rng(1)
    for target in range(1_024):
        sources = random.choice(10_240, 700, replace=False).tolist() if dense else range(target, target + 20)
        for source, nbytes in zip(sources, random.integers(1, 1 << 30, 700).tolist()):
            moved.taken[source, target] = nbytes
    data = pairs_data(moved, 1_024)
    assert len(page({"source": "x", **data})) < 10_000_000
    assert (data["together"] > 1) == dense
    assert sum(nbytes for _, _, nbytes, _ in pairs(data)) == sum(moved.taken.values())
