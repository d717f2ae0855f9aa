"""The documentation as a site, built by Sphinx and opened in a browser. `make site` runs these tests."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import HERE, LOADED, Browser, browser

_ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="make site installs Sphinx")


def _build(target: Path, source: Path = _ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "docs.tools.site", str(target), str(source)]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    result = _build(target)
    assert result.returncode == 0, result.stderr
    return target


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not HERE:
        pytest.skip("no Chromium with its driver")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_every_page_is_in_the_site_and_in_its_contents(site: Path) -> None:
    front = (site / "README.html").read_text(encoding="utf-8")
    pages = [page for page in (_ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert pages
    for page in pages:
        assert (site / "docs" / f"{page.stem}.html").exists(), page
        assert f'href="docs/{page.stem}.html"' in front, page


def test_the_api_page_contains_every_public_function(site: Path) -> None:
    import reshard

    page = (site / "docs/site/api.html").read_text(encoding="utf-8")
    for name in [*reshard.__all__, "open"]:
        if not name.startswith("__"):
            assert re.search(rf'id="reshard(\.[a-z_]+)?\.{name}"', page), name


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(_ROOT / "docs", copy / "docs")
    for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(_ROOT / name, copy / name)
    page = copy / "docs/rules.md"
    page.write_text(
        page.read_text(encoding="utf-8") + "\n[no such heading](names.md#no-such-heading)\n", encoding="utf-8"
    )
    result = _build(tmp_path / "site", copy)
    assert result.returncode != 0
    assert "no-such-heading" in result.stderr


def test_pages_open_without_browser_errors(site: Path, window: Browser) -> None:
    window.errors()
    for page in [site / "index.html", site / "docs/site/api.html", *sorted(site.glob("docs/*.html"))]:
        window.open(page, ready=LOADED)
        assert window.text("h1").strip(), page
    assert window.errors() == []


def test_the_search_finds_a_page_by_a_word_in_it(site: Path, window: Browser) -> None:
    window.open(site / "search.html", ready=LOADED)
    window.run("location.search = '?q=rank_list_for_transform'")
    window.wait("return document.querySelectorAll('#search-results li a').length > 0")
    links = window.run("return [...document.querySelectorAll('#search-results li a')].map(link => link.href)")
    assert any("beside-mindspore.html" in link for link in links), links


def test_a_narrow_window_shows_no_sideways_bar(site: Path, window: Browser) -> None:
    window.open(site / "docs/recipes.html", width=390, ready=LOADED)
    assert window.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
