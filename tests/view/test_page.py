"""The page in a browser: it loads without errors, and shows correct values by pointer and keyboard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import HERE, Browser, browser
from tests.running import done
from tests.small import tensors
from tests.trees import write_checkpoint
from tests.view.pages import data_of, places
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


def chosen(window: Browser, name: str) -> None:
    """Search a parameter by its whole name and select it by keys."""
    window.run("document.querySelector('#search').value = ''")
    window.type("#search", name)
    window.press("Down", "End")
    window.wait(f"return document.querySelector('#chosen')?.textContent === {json.dumps(name)}")


def slices(window: Browser) -> dict[str, Any]:
    """The layout of the demo's weight by `strategy show`."""
    (stage,) = done("strategy", "show", DEMO / "src_strategy.ckpt", WEIGHT, "--json").json["stages"]
    actual: dict[str, Any] = stage
    return actual


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_loads_without_errors_and_fits_the_window(window: Browser, demo: Path, width: int) -> None:
    window.open(demo, width)
    assert window.errors() == []
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    assert "8 files" in window.text("#summary") and "step 2_10" in window.text("#summary")
    assert window.texts("nav a") == ["Problems", "Parameters", "Conversion", "Statistics", "Files and steps"]


def test_search_and_sorting_work(window: Browser, demo: Path) -> None:
    window.open(demo)
    names = [name for name in data_of(demo)["parameters"]["name"] if "dense1" in name and "weight" in name]
    window.type("#search", "DENSE1 weight")
    assert window.text("#matches").startswith(f"{len(names)} of ")
    assert len(window.texts("#parameters [role=row]")) > len(names)
    window.run("document.querySelectorAll('#parameters .head button')[3].click()")
    rows = window.run(
        "return [...document.querySelectorAll('#parameters .row')].map(row => row.firstChild.textContent)"
    )
    assert sorted(rows) == sorted(names)
    assert window.run("return document.querySelectorAll('#parameters [role=columnheader]')[3].ariaSort") == "descending"
    window.type("#search", "no such name")
    assert window.text("#matches").startswith("0 of ")
    assert window.errors() == []


def test_pointer_and_keys_show_box_rank_and_file(window: Browser, demo: Path) -> None:
    window.open(demo)
    chosen(window, WEIGHT)
    stage = slices(window)
    count = len(stage["slices"])
    actual = places(data_of(demo))
    for number, each in enumerate(stage["slices"]):
        window.hover("canvas.slices", 0.5, (number + 0.5) / count)
        text = window.text("output.box")
        (rank,) = each["ranks"]
        start, stop = (6 * edge for edge in each["box"][0])
        assert text == f"slice {number} of {count}: box [{start}:{stop}, 0:48] on rank {rank}"
        cells = window.texts(".holders td")
        assert cells[:2] == [str(rank), f"rank_{rank}/mlp-2_10.ckpt"]
        assert [int(cell.replace(",", "")) for cell in cells[2:]] == list(actual[rank, WEIGHT])
    window.type("canvas.slices", "Home", "Down", "Down")
    assert window.text("output.box").startswith("slice 2 of ")
    window.press("End")
    assert window.text("output.box").startswith(f"slice {count - 1} of ")


def test_keys_navigate_the_tree(window: Browser, demo: Path) -> None:
    window.open(demo)
    window.type("#parameters .grid", "Home")
    active = "document.querySelector('#parameters .grid').getAttribute('aria-activedescendant')"
    row = f"return document.getElementById({active})"
    assert window.run(f"{row}.ariaExpanded") == "false"
    window.press("Right")
    assert window.run(f"{row}.ariaExpanded") == "true"
    window.press("Down")
    assert window.run(f"{row}.ariaLevel") == "2"
    window.press("Up", "Left")
    assert window.run(f"{row}.ariaExpanded") == "false"
    # Everything that takes keys has a name for screen readers.
    unnamed = window.run(
        "return [...document.querySelectorAll('input, canvas, .grid')].filter(each => "
        "!each.ariaLabel && !(each.labels && each.labels.length)).length"
    )
    assert unnamed == 0


def test_the_matrix_has_the_numbers_of_plan(window: Browser, demo: Path, tmp_path: Path) -> None:
    window.open(demo)
    planned = done(
        "plan", DEMO / "src_checkpoints", tmp_path / "out", *CUT, "--dst-strategy", DEMO / "dst_strategy.ckpt", "--json"
    ).json
    for to in planned["targets"]:
        window.run("document.querySelector('#targetnumber').value = ''")
        window.type("#targetnumber", str(to["rank"]))
        cells = window.texts("#conversion .row .cell")
        shown = {int(rank): int(nbytes.replace(",", "")) for rank, nbytes in zip(cells[::4], cells[1::4])}
        assert shown == {each["rank"]: each["bytes"] for each in to["sources"]}
        for each in to["sources"]:
            window.hover("#matrix", (to["rank"] + 0.5) / 4, (each["rank"] + 0.5) / 8)
            text = window.text("#cell")
            assert text.startswith(
                f"source rank {each['rank']} to target rank {to['rank']}: {each['bytes']:,} bytes in "
            )
    window.hover("#matrix", 0.4, 0.5, click=True)
    assert window.text("#target").startswith("Target rank 1: ")
    assert window.errors() == []


def test_problems_are_first_and_lost_slices_are_marked(window: Browser, tmp_path: Path) -> None:
    shutil.copytree(DEMO / "src_checkpoints", tmp_path / "src")
    shutil.rmtree(tmp_path / "src" / "rank_3")
    done("view", tmp_path / "src", *CUT, "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    assert window.run("return document.querySelector('main').firstChild.id") == "problems"
    assert window.texts(".problems .l0") and "rank 3" in window.text(".problems li")
    window.wait("return document.querySelector('output.box').textContent.endsWith('LOST')")
    assert "rank 3" in window.text("output.box")


def test_hostile_names_are_shown_as_text(window: Browser, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "<b>" / "model.safetensors", dict(zip(HOSTILE, tensors().values())))
    done("view", tmp_path / "<b>", "--stats", "-o", tmp_path / "page.html")
    window.open(tmp_path / "page.html")
    for name in HOSTILE:
        window.run("document.querySelector('#search').value = ''")
        window.type("#search", name.replace("\u202e", ""))
        window.press("Down", "End")
        assert window.text("#chosen") == name.replace("\u202e", "\\u202e")
    assert "owned" not in window.run("return document.title") and "<b>" in window.text("h1")
    assert window.run("return document.querySelectorAll('img, b, main script').length") == 0
    assert window.errors() == []


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
    window.hover("canvas.slices", 0.5, 0.75)
    assert window.text("output.box").startswith("slice 1 of 2: box [12:24, 0:8] on file ")
    assert window.errors() == []


def test_thousands_of_parameters_and_ranks_render_quickly(window: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(wide_page(10_000, 4_096))
    window.open(tmp_path / "page.html")
    # Rows exist only where they are seen, so that time does not grow with their number.
    assert window.run("return document.querySelectorAll('*').length") < 2_000
    window.type("#search", "layers.700. linear_3")
    window.press("Down", "End")
    assert window.text("#chosen").startswith("model.decoder.layers.700.self_attention.linear_3")
    window.type("canvas.slices", "End")
    assert "of 4096" in window.text("output.box") or "of 64" in window.text("output.box")
    window.type("#matrix", "+", "+", "Right", "Enter")
    assert window.text("#target").startswith("Target rank ") and "from 16 source ranks" in window.text("#target")
    assert window.errors() == []
