"""The page in a browser: it loads without errors, and shows correct values by pointer and keyboard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reshard.view.page import page
from tests.browser import HERE, Browser, browser
from tests.running import done, fails
from tests.small import tensors
from tests.trees import read_checkpoint, write_checkpoint
from tests.view.pages import data_of, names_of, places
from tests.view.test_data import CUT, DEMO, FIXTURES, HOSTILE, wide_page

pytestmark = pytest.mark.skipif(not HERE, reason="there is no Chromium here")

WEIGHT = "backbone.blocks.0.attention.dense1.weight"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the demo with its conversion and statistics."""
    page = tmp_path_factory.mktemp("demo") / "page.html"
    words = ("--dst-strategy", DEMO / "dst_strategy.ckpt", "--stats", "-o", page)
    done("view", DEMO / "src_checkpoints", *CUT, *words)
    return page


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's weights for Hugging Face, without a layer, with other numbers and another type."""
    directory = tmp_path_factory.mktemp("other") / "hf"
    words = (*CUT, "--to", "huggingface", "--exclude", "backbone.blocks.1.*", "--format", "safetensors")
    done("convert", DEMO / "src_checkpoints", directory, *words)
    (path,) = directory.glob("*.safetensors")
    contents = read_checkpoint(path)
    array = contents[WEIGHT].array.copy()
    array.view("<f4").reshape(-1)[::3] *= -1
    contents[WEIGHT] = contents[WEIGHT]._replace(array=array)
    half = contents["head.weight"]
    contents["head.weight"] = half._replace(dtype="Float16", array=half.array.view("<f4").astype("<f2"))
    shutil.rmtree(directory)
    write_checkpoint(directory / "model.safetensors", contents)
    return directory


def chosen(window: Browser, name: str) -> None:
    """Search a tensor by its whole name and select it by keys."""
    window.run("document.querySelector('#search').value = ''")
    window.type("#search", name)
    window.press("Down", "End")
    window.wait(f"return document.querySelector('#chosen')?.title === {json.dumps(name)}")


def overflows(window: Browser) -> bool:
    return bool(window.run("return document.documentElement.scrollWidth > innerWidth"))


@pytest.mark.parametrize("width", [1440, 1280, 768, 390])
def test_the_page_loads_without_errors_and_fits_the_window(
    window: Browser, demo: Path, other: Path, tmp_path: Path, width: int
) -> None:
    done("view", DEMO / "src_checkpoints", other, "--a-strategy", CUT[1], "--stats", "-o", tmp_path / "two.html")
    for each in (demo, tmp_path / "two.html"):
        window.open(each, width)
        assert window.errors() == [] and not overflows(window)
    window.open(demo, width)
    assert window.text("h1") == "src_checkpoints" and "step 2_10" in window.text("#summary")
    assert window.texts("nav a") == ["Overview", "Conversion", "Tensors", "Ranks and files"]
    # Nothing was loaded.
    assert window.run("return performance.getEntriesByType('resource').length") == 0


def test_facts_are_those_of_inspect(window: Browser, demo: Path) -> None:
    window.open(demo)
    (step,) = done("inspect", DEMO / "src_checkpoints", *CUT, "--json").json["steps"]
    titles = window.run("return [...document.querySelectorAll('#facts .fact')].map(each => each.title)")
    assert f"{step['bytes']:,} bytes" in titles
    figures = dict(zip(window.texts("#facts .label"), window.texts("#facts .figure")))
    assert figures["Tensors"] == str(len(step["contents"]["tensors"]))
    assert figures["Layers"] == "4" and figures["Ranks"] == "8"
    assert "dp 2 × mp 4" in window.texts("#facts .soft")
    assert len(window.run("return [...document.querySelectorAll('#cut [data-at]')]")) == 8


def test_search_filters_and_orders_change_the_list(window: Browser, demo: Path) -> None:
    window.open(demo)
    names = [name for name in names_of(data_of(demo)) if "dense1" in name and "weight" in name]
    window.type("#search", "DENSE1 weight")
    assert window.text("#matches").startswith(f"{len(names)} tensors of ")
    window.run("[...document.querySelectorAll('.modes button')].find(each => each.textContent === 'Names').click()")
    rows = "return [...document.querySelectorAll('#list .row .name')].map(each => each.title)"
    assert sorted(window.run(rows)) == sorted(names)
    window.run("[...document.querySelectorAll('.modes button')].find(each => each.textContent === 'Patterns').click()")
    assert window.run(rows) == ["backbone.blocks.{0-3}.attention.dense1.weight"]
    # A choice of layers, by keys, narrows it further.
    window.type(".strip", "Right")
    assert window.text("#matches").startswith("1 tensor of ") and len(window.texts(".chip")) == 1
    window.run("document.querySelector('.chip').click()")
    assert window.text("#matches").startswith(f"{len(names)} tensors of ")
    window.type("#search", " nothing like it")
    assert window.run("return document.querySelector('.nothing').hidden") is False
    window.run("document.querySelector('.nothing button').click()")
    assert window.text("#matches").startswith(f"{len(names_of(data_of(demo)))} tensors ")
    # A second click on a layer clears the choice.
    for _ in range(2):
        window.hover(".strip", 0.1, 0.5, click=True)
    assert window.texts(".chip") == []
    # On paper, lists begin with their first row.
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert len(window.texts("#list .row")) <= 60 and window.run("return document.querySelector('#row0') !== null")
    window.run("dispatchEvent(new Event('afterprint'))")
    # Parts of bars are filters, too.
    window.run("document.querySelector('.legend [data-filter=Type][data-value=Int64]').click()")
    assert window.text("#matches").startswith("2 tensors of ")
    assert window.errors() == []


def test_columns_sort(window: Browser, demo: Path) -> None:
    window.open(demo)
    window.run("[...document.querySelectorAll('.modes button')].find(each => each.textContent === 'Names').click()")
    window.run("document.querySelector('#list .head button').click()")
    rows = "return [...document.querySelectorAll('#list .row .name')].map(each => each.title)"
    names = names_of(data_of(demo))
    shown = window.run(rows)
    assert shown == names[: len(shown)]
    assert window.run("return document.querySelector('#list [role=columnheader]').ariaSort") == "ascending"
    window.run("document.querySelector('#list .head button').click()")
    assert window.run(rows)[0] == names[-1]


def test_pointer_and_keys_show_box_rank_and_file(window: Browser, demo: Path) -> None:
    window.open(demo)
    chosen(window, WEIGHT)
    (stage,) = done("strategy", "show", DEMO / "src_strategy.ckpt", WEIGHT, "--json").json["stages"]
    actual = places(data_of(demo))
    for number, each in enumerate(stage["slices"]):
        window.hover(f"#slices [data-at='{number}']", 0.5, 0.5)
        (rank,) = each["ranks"]
        start, stop = (6 * edge for edge in each["box"][0])
        assert window.text(".box") == f"slice {number} [{start}:{stop}, 0:48] on rank {rank}"
        cells = window.texts(".output td")
        assert cells[:2] == [str(rank), f"rank_{rank}/mlp-2_10.ckpt"]
        assert [int(cell.replace(",", "")) for cell in cells[2:]] == list(actual[rank, WEIGHT])
        # The command reads this slice.
        words = window.text(".output .command code").split()
        assert f"--slice {start}:{stop},0:48 --strategy {CUT[1]}" in " ".join(words)
        assert window.run("return [...document.querySelectorAll('#cut .held')].map(each => each.dataset.at)") == [
            str(rank)
        ]
    window.type("svg.slices", "Home", "Down", "Down")
    assert window.text(".box").startswith("slice 2 ")
    window.press("End")
    assert window.text(".box").startswith(f"slice {len(stage['slices']) - 1} ")


def test_layers_that_are_alike_are_one_row_and_keys_open_it(window: Browser, demo: Path) -> None:
    window.open(demo)
    window.type("#list", "Home")
    active = "document.getElementById(document.querySelector('#list').getAttribute('aria-activedescendant'))"
    assert window.run(f"return {active}.ariaExpanded") == "true"
    window.press("Left")
    assert window.run(f"return {active}.ariaExpanded") == "false"
    window.press("Right", "Down")
    assert window.run(f"return {active}.ariaLevel") == "2"
    assert "blocks.0–3" in window.run(f"return {active}.textContent")
    assert "4 alike" in window.run(f"return {active}.textContent")
    window.press("Left", "Left")
    assert window.run(f"return {active}.ariaLevel") == "1"
    # Everything that takes keys has a name for screen readers.
    unnamed = window.run(
        "return [...document.querySelectorAll('input, canvas, .grid, [tabindex=\"0\"]')].filter(each => "
        "!each.ariaLabel && !(each.labels && each.labels.length)).length"
    )
    assert unnamed == 0


def test_the_hash_of_the_address_selects_a_tensor(window: Browser, demo: Path) -> None:
    window.open(demo)
    window.run(f"location.hash = encodeURIComponent({json.dumps(WEIGHT)})")
    window.wait(f"return document.querySelector('#chosen').title === {json.dumps(WEIGHT)}")


def test_the_matrix_has_the_numbers_of_plan(window: Browser, demo: Path, tmp_path: Path) -> None:
    window.open(demo)
    planned = done(
        "plan", DEMO / "src_checkpoints", tmp_path / "out", *CUT, "--dst-strategy", DEMO / "dst_strategy.ckpt", "--json"
    ).json
    window.type("#matrix", *["Up"] * 8, *["Left"] * 4)
    for to in planned["targets"]:
        for each in to["sources"]:
            place = f"source rank {each['rank']} to target rank {to['rank']}: "
            assert window.text("#cell").startswith(f"{place}{each['bytes']:,} bytes in ")
            window.press("Down")
        window.press(*["Up"] * 8, "Right")
    for to in planned["targets"]:
        window.run("document.querySelector('#targetnumber').value = ''")
        window.type("#targetnumber", str(to["rank"]))
        assert window.text("#target").endswith(f"from {len(to['sources'])} ranks")
        largest = sorted((each["bytes"] for each in to["sources"]), reverse=True)[:5]
        titles = window.run("return [...document.querySelectorAll('#detail td span')].map(each => each.title)")
        assert [int(title.replace(",", "")) for title in titles] == largest
        assert f"reshard by-rank {to['rank']} " in window.text("#detail .command code")
    assert window.errors() == []


def test_problems_are_first_and_lost_slices_are_marked(window: Browser, tmp_path: Path) -> None:
    shutil.copytree(DEMO / "src_checkpoints", tmp_path / "src")
    shutil.rmtree(tmp_path / "src" / "rank_3")
    done("view", tmp_path / "src", *CUT, "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert window.run("return document.querySelector('main').firstChild.id") == "problems"
    assert "rank 3" in window.text(".problems .l0") and "1 rank missing" in window.text("#summary")
    window.wait("return document.querySelector('.box').textContent.endsWith('is on no rank that is left')")
    assert window.texts("#cut text.lost") == ["3"]
    # A damaged or missing file comes first, in red.
    assert window.text("#files .row .bad") == "missing"


def test_a_comparison_has_the_numbers_of_diff(window: Browser, other: Path, tmp_path: Path) -> None:
    words = (DEMO / "src_checkpoints", other, "--a-strategy", CUT[1])
    report = done("diff", *words, "--json").json
    done("view", *words, "--stats", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert window.text("h1") == "src_checkpoints and hf"
    figures = [int(text) for text in window.texts("#facts .figure")]
    differing = {pair["name"]: pair for pair in report["differing"]}
    assert differing.keys() == {WEIGHT, "head.weight"}
    assert figures == [report["identical"], 1, 1, len(report["only_a"]), len(report["only_b"])]
    # The worst comes first, with the place of its largest difference in both.
    assert window.run("return document.querySelector('#chosen').title") == WEIGHT
    pair = differing[WEIGHT]
    cells = window.texts(".first td")
    assert cells[0] == f"[{', '.join(map(str, pair['at']))}]" and float(cells[2].replace(",", "")) == -float(
        cells[4].replace(",", "")
    )
    assert cells[3].endswith(".ckpt") and cells[5].endswith("model.safetensors")
    assert f"differs: {pair['differing']:,} of " in window.text("#inspector")
    assert window.errors() == []


def test_a_comparison_without_values_says_so(window: Browser, other: Path, tmp_path: Path) -> None:
    done("view", DEMO / "src_checkpoints", other, "--a-strategy", CUT[1], "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert window.texts("#facts .label")[0] == "Same type and shape" and "values were not" in window.text("footer")
    assert window.texts("#facts .figure")[1:3] == ["unknown", "1"]
    assert "add --stats" in window.texts("#facts .soft")[1]
    rows = window.texts("#list .row .text")
    assert "same shape" in rows and not {"same", "equal"} & set(rows)
    assert not window.run(CUT_OFF) and window.errors() == []


CUT_OFF = "return [...document.querySelectorAll('#list .cell')].some(each => each.scrollWidth > each.clientWidth)"


def test_a_tensor_that_is_nan_in_one_only_is_first_and_red(window: Browser, tmp_path: Path) -> None:
    """The layer with NaN is the fourth of six layers that are alike."""
    sample = tensors(names=["w"])["w"]
    names = [f"layers.{layer}.{part}.weight" for layer in range(6) for part in ("a", "b")]
    a, b = dict.fromkeys(names, sample), {}
    for name in names:
        array = sample.array.copy()
        array.view("<f4")[1, 1] += 9
        if name == "layers.3.b.weight":
            array.view("<f4")[0, 2] = np.nan
        b[name] = sample._replace(array=array)
    for side, contents in (("a", a), ("b", b)):
        write_checkpoint(tmp_path / side / "model.safetensors", contents)
    done("view", tmp_path / "a", tmp_path / "b", "--stats", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert "layers.3.b.weight: 1 NaN in B only; the first at [0,2]" in window.text(".problems .l0")
    assert window.run("return document.querySelector('#chosen').title") == "layers.3.b.weight"
    assert window.text("#inspector .bad") == "1 NaN in B only" and window.texts(".first td")[0] == "[0, 2]"
    assert window.texts(".first td")[4] == "NaN"
    for mode in ("Tree", "Patterns", "Names"):
        window.run(
            "[...document.querySelectorAll('.modes button')].find(each => each.textContent === arguments[0]).click()",
            mode,
        )
        kinds = window.run("return [...document.querySelectorAll('#list .row .text')].map(each => each.className)")
        red = [kind == "text bad" for kind in kinds]
        assert red[0] and red == sorted(red, reverse=True) and not all(red)
    assert window.texts("#list .row .text")[0] == "1 NaN in B only"
    # Of one checkpoint, too.
    done("view", tmp_path / "b", "--stats", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert window.run("return document.querySelector('#chosen').title") == "layers.3.b.weight"
    assert "layers.3.b.weight: 1 NaN, 0 infinite; the first at [0,2]" in window.text(".problems .l0")
    assert window.errors() == []


def test_another_type_says_both_and_whether_values_are_equal(window: Browser, tmp_path: Path) -> None:
    done("convert", DEMO / "src_checkpoints", tmp_path / "a", *CUT, "--to", "huggingface", "--exclude", "*_*")
    done("convert", tmp_path / "a", tmp_path / "b", "--to", "huggingface", "--cast", "*=BFloat16")
    pairs = done("diff", tmp_path / "a", tmp_path / "b", "--json").json["differing"]
    done("view", tmp_path / "a", tmp_path / "b", "--stats", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert set(window.texts("#list .row .cell:nth-child(3)")) == {"Float32 → BFloat16"}
    equal = [pair["name"] for pair in pairs if pair["differing"] == 0]
    assert window.texts("#facts .soft")[2] == f"values equal in {len(equal)}" and 0 < len(equal) < len(pairs)
    # What differs in values, too, comes first.
    assert window.run("return document.querySelector('#chosen').title") not in equal
    chosen(window, equal[0])
    assert "other type: all values are equal" in window.text("#inspector")
    chosen(window, "head.weight")
    assert "other type: 3,824 of 4,608 elements" in window.text("#inspector")
    # The layers have a colour of their own for it.
    assert "Other type or shape" in window.text("#layers")
    heights = "return [...document.querySelectorAll(arguments[0])].map(each => Number(each.getAttribute('height')))"
    assert window.run(heights, ".strip .r2") == [64] * 4 and window.run(heights, ".strip .amber3") == [0] * 4
    assert window.errors() == []


def test_numbers_of_any_size_fit_their_columns(window: Browser, tmp_path: Path) -> None:
    sample = tensors(names=["w"])["w"]
    numbers = {"a": -30212345.5, "b": 0.0000512345, "c": -1.2345e-30, "d": 999999.0, "e": 12345.678, "f": 2303.51}
    contents = {}
    for name, number in numbers.items():
        array = np.full_like(sample.array.view("<f4"), number)
        contents[name] = sample._replace(array=array)
    write_checkpoint(tmp_path / "src" / "model.safetensors", contents)
    done("view", tmp_path / "src", "--stats", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html", 1440)
    titles = window.texts("#list .head > div:not([hidden])")
    rows = window.run(
        "return [...document.querySelectorAll('#list .row')].map(r => [...r.children].map(c => c.textContent))"
    )
    shown = {row[0]: row[titles.index("min")] for row in rows}
    assert shown == dict(zip("abcdef", ["-3.021e+7", "5.123e-5", "-1.235e-30", "999,999", "1.235e+4", "2,304"]))
    assert not window.run(CUT_OFF) and window.errors() == []


def test_a_narrow_list_keeps_the_numbers_of_layers(window: Browser, demo: Path) -> None:
    window.open(demo, 390)
    window.run("[...document.querySelectorAll('.modes button')].find(each => each.textContent === 'Names').click()")
    ends = window.texts("#list .row .name > :last-child")
    assert ".0.output.mapping.weight" in ends and len(set(ends)) == len(ends)
    assert not overflows(window) and window.errors() == []


def test_files_that_are_left_are_counted_and_shapes_are_those_of_a_file(window: Browser, tmp_path: Path) -> None:
    shutil.copytree(DEMO / "src_checkpoints", tmp_path / "src")
    shutil.rmtree(tmp_path / "src" / "rank_3")
    done("view", tmp_path / "src", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert window.text("#cut h2") == "Stored in 7 files" and "in 7 rank files" in window.texts("#facts .soft")
    assert "shape in a file" in window.texts("#list .head > div") and "In a file" in window.texts("#inspector dt")
    assert " bytes in 7 files" in window.text("#inspector dl") and window.errors() == []


def test_bytes_of_a_target_are_with_headers_or_of_tensors(window: Browser, demo: Path) -> None:
    window.open(demo)
    assert window.texts("#conversion .fact .soft")[0] == "target files of at most 90.9 KiB"
    assert "at most 86.8 KiB of tensors written" in window.text("#conversion")


def test_what_cannot_be_compared_is_refused(other: Path, tmp_path: Path) -> None:
    words = ("view", DEMO / "src_checkpoints", other, "--a-strategy", CUT[1], "-o", tmp_path / "page.html")
    fails(2, *words, "--dst-strategy", "none")
    fails(2, "view", other, "--b-strategy", CUT[1], "-o", tmp_path / "page.html")
    write_checkpoint(tmp_path / "x" / "model.safetensors", {"other": tensors(names=["w"])["w"]})
    fails(2, "view", other, tmp_path / "x", "-o", tmp_path / "page.html", texts=["no names in common"])
    assert not (tmp_path / "page.html").exists()


def test_hostile_names_are_shown_as_text(window: Browser, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "<b>" / "model.safetensors", dict(zip(HOSTILE, tensors().values())))
    done("view", tmp_path / "<b>", "--stats", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    for name in HOSTILE:
        window.run("document.querySelector('#search').value = ''")
        window.type("#search", name.replace("\u202e", ""))
        window.press("Down", "End")
        assert window.run("return document.querySelector('#chosen').title") == name.replace("\u202e", "\\u202e")
    assert "owned" not in window.run("return document.title") and "<b>" in window.text("h1")
    assert window.run("return document.querySelectorAll('img, main script').length") == 0
    assert window.errors() == []


def test_names_of_any_shape_are_drawn_and_typed_safely(window: Browser, tmp_path: Path) -> None:
    array = next(iter(tensors().values()))
    names = [".".join("d" * 6000), "x" * 900 + ".w", "a\nb\x15'.w", "007.w", "008.w", "009.w", f"layers.{9**25}.w"]
    write_checkpoint(tmp_path / "src" / "model.safetensors", dict.fromkeys(names, array))
    done("view", tmp_path / "src", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html", 390)
    assert not overflows(window)
    for digits in ("007.w", "008.w", "009.w"):
        assert digits in window.texts("#list .row .name")
    window.run("location.hash = encodeURIComponent(arguments[0])", names[2])
    window.wait("return document.querySelector('#chosen').title.startsWith('a')")
    # What a terminal would obey is typed as an escape.
    assert "$'a\\x0ab\\x15\\'.w'" in window.text("#inspector .command code")
    assert window.errors() == []


def test_a_hundred_thousand_names_without_dots_are_drawn(window: Browser, demo: Path, tmp_path: Path) -> None:
    data, count = data_of(demo), 150_000
    data |= {"moves": None, "statistics": None, "structures": None}
    data["names"] = {"shared": [0, count], "rest": [f"t{number}" for number in range(count)]}
    data["parameters"] = {"type": [0] * count, "layout": [-1] * count}
    (tmp_path / "page.html").write_bytes(page(data))
    window.open(tmp_path / "page.html")
    assert window.texts("#list .row .name")[0] == "t0" and window.errors() == []


def test_numbers_that_are_unknown_are_left_out(window: Browser, tmp_path: Path) -> None:
    # Shapes of slices do not count parameters, and chunks are no ranks.
    done("view", DEMO / "src_checkpoints", "-o", tmp_path / "ranks.html")
    window.open(tmp_path / "ranks.html")
    assert "Parameters" not in window.texts("#facts .label")
    window.hover(".strip", 0.1, 0.5)
    assert "tensors" in window.text("#layers .soft") and "parameters" not in window.text("#layers .soft")
    done("view", FIXTURES / "dcp" / "w4_bricks" / "checkpoint", "-o", tmp_path / "dcp.html")
    window.open(tmp_path / "dcp.html")
    assert "Ranks" not in window.texts("#facts .label") and "over mp" not in window.text("#inspector")
    assert window.errors() == []


def test_the_order_of_differences_turns_and_keeps_the_focus(window: Browser, other: Path, tmp_path: Path) -> None:
    done("view", DEMO / "src_checkpoints", other, "--a-strategy", CUT[1], "--stats", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    window.run("[...document.querySelectorAll('.modes button')].find(each => each.textContent === 'Names').click()")
    results = "return [...document.querySelectorAll('#list .row .text')].map(each => each.textContent)"
    assert window.run(results)[0] == "differs"
    window.run("document.querySelector('#list .head button.on').focus()")
    window.press("Enter")
    assert window.run(results)[0] == "equal"
    window.press("Enter")
    assert window.run(results)[0] == "differs"


def test_a_page_runs_only_its_own_script(window: Browser, demo: Path, tmp_path: Path) -> None:
    changed = demo.read_text("utf-8").replace("</body>", "<script>document.title = 'owned'</script></body>")
    (tmp_path / "page.html").write_text(changed, "utf-8")
    window.open(tmp_path / "page.html")
    assert "owned" not in window.run("return document.title")
    assert any("Content Security Policy" in message for message in window.errors())


def test_checkpoint2_is_shown_by_file(window: Browser, tmp_path: Path) -> None:
    source = FIXTURES / "checkpoint2" / "a02_dp2mp2_dedup" / "checkpoint"
    done("view", source, "--dst-strategy", "same", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    chosen(window, "output_layer.weight")
    window.hover("#slices [data-at='1']", 0.5, 0.5)
    assert window.text(".box").startswith("slice 1 [12:24, 0:8] on file ")
    assert window.errors() == []


def test_a_page_of_every_form_is_whole(window: Browser, tmp_path: Path) -> None:
    forms = {
        "dcp/w4_bricks/checkpoint": "PyTorch DCP",
        "fp8": "Hugging Face",
        "megatron/td_dense_plain/checkpoint": "Megatron",
    }
    for number, (source, words) in enumerate(forms.items()):
        done("view", FIXTURES / source, "-o", tmp_path / f"{number}.html")
        window.open(tmp_path / f"{number}.html", 390)
        assert window.errors() == [] and not overflows(window)
        assert window.text("#summary").startswith(words) and window.texts("#list .row")


def test_thousands_of_parameters_and_ranks_render_few_elements(window: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(wide_page(10_000, 4_096))
    window.open(tmp_path / "page.html")
    # Rows exist only where they are seen, so that time does not grow with their number.
    assert window.run("return document.querySelectorAll('*').length") < 12_000
    window.type("#search", "layers.700. linear_3")
    window.press("Down", "End")
    assert window.run("return document.querySelector('#chosen').title").startswith(
        "model.decoder.layers.700.self_attention.linear_3"
    )
    window.type("svg.slices", "End")
    assert window.text(".box").startswith(("slice 4095 ", "slice 63 ", "slice 511 "))
    window.type("#matrix", "Enter")
    assert window.text("#target").startswith("Target rank ")
    # The cell is divided in its place; the link leads back.
    assert window.run("return document.querySelectorAll('#matrix text.in').length") > 0
    window.run("[...document.querySelectorAll('#detail .link')].pop().click()")
    assert window.run("return document.querySelectorAll('#matrix text.in').length") == 0
    assert window.errors() == []


def test_as_many_tensors_as_the_largest_models_have_take_few_bytes(window: Browser, tmp_path: Path) -> None:
    contents = {}
    array = np.zeros(1, np.uint8)
    sample = next(iter(tensors().values()))
    for layer in range(60):
        for expert in range(256):
            for part in ("gate_proj", "up_proj", "down_proj"):
                for ending in ("weight", "weight_scale_inv"):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.{ending}"
                    contents[name] = sample._replace(dtype="UInt8", array=array)
    write_checkpoint(tmp_path / "src" / "model.safetensors", contents)
    done("view", tmp_path / "src", "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 12_000_000
    window.open(tmp_path / "page.html")
    assert (
        window.texts("#list .row .name")[0] == "model.layers.0–59.mlp.experts.0–255"
        and len(window.texts("#list .row")) < 40
    )
    window.type("#search", "*.layers.7.*down_proj.weight")
    assert window.text("#matches").startswith("256 tensors of 92,160 ")
    assert window.errors() == []
