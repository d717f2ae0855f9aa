"""The page of measurements and the chart have the numbers that the benchmarks wrote."""

from __future__ import annotations

import json
import re
import sys
import types
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.measure import Section
from docs.tools import chart, measured

OTHERS = {
    "date": "2030-01-02",
    "load": 0.1,
    "system": "Linux 1",
    "cores": 2,
    "memory_gib": 3,
    "python": "3.10",
    "numpy": "2",
    "title": "Others?",
    "tables": [
        {
            "about": "Rounds.",
            "rows": [
                {"kind": "8 ranks to 4", "tool": "reshard", "ratio": 0.51, "memory, MiB": 36},
                {"kind": "8 ranks to 4", "tool": "slow one", "ratio": 12.34, "memory, MiB": 2883},
                {"kind": "to another form", "tool": "reshard", "ratio": 0.7, "memory, MiB": 55},
            ],
        }
    ],
}


def test_the_page_is_made_from_the_results() -> None:
    assert measured.PAGE.read_text(encoding="utf-8") == measured.page(), "`make docs` writes the page anew"


def test_every_benchmark_is_on_the_page() -> None:
    directory = Path(benchmarks.__file__).parent
    scripts = {path.stem for path in directory.glob("*.py") if "\ndef measure(" in path.read_text(encoding="utf-8")}
    assert scripts == set(measured.SCRIPTS)
    assert {path.stem for path in measured.RESULTS.glob("*.json")} <= scripts


@pytest.mark.parametrize("file", sorted(measured.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_section_has_the_numbers_of_its_results(file: Path) -> None:
    results = json.loads(file.read_text(encoding="utf-8"))
    section = section_of(measured.PAGE.read_text(encoding="utf-8"), results["title"])
    assert f"`python -m benchmarks {file.stem}`, {results['date']}" in section
    expected = [row for table in results["tables"] if not table.get("detail") for row in table["rows"]]
    shown = rows_of(section)
    assert len(shown) == len(expected)
    for cells, row in zip(shown, expected):
        assert cells
        for column, cell in cells.items():
            value = row.get(column, "")
            assert cell == value if isinstance(value, str) else float(cell.replace(",", "")) == value, (column, row)


def test_the_chart_and_its_section_have_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "against_others.json").write_text(json.dumps(OTHERS))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    monkeypatch.setattr(chart, "RESULTS", tmp_path / "against_others.json")
    pictures = chart.drawn()
    page = measured.page()
    for name, picture in pictures.items():
        assert f"pictures/{name}" in page
        texts = [element.text for element in xml.etree.ElementTree.fromstring(picture).iter() if element.text]
        for words in ("8 ranks to 4", "0.51", "36 MiB", "slow one", "12.3", "2.8 GiB", "to another form", "0.70"):
            assert words in texts
        # A group is named once.
        assert texts.count("8 ranks to 4") == 1
    assert [row["ratio"] for row in rows_of(page)] == ["0.51", "12.34", "0.70"]
    assert [row["memory, MiB"] for row in rows_of(page)] == ["36", "2,883", "55"]


def test_the_chart_is_drawn_from_the_results() -> None:
    for name, picture in chart.drawn().items():
        assert (chart.PLACE / name).read_bytes() == picture, f"`make docs` draws {name} anew"


def test_a_benchmark_writes_its_results_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(measured, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(measured, "SCRIPTS", ("quick", "skipped"))
    script("quick", monkeypatch, {"kind": "all", "reshard, s": 0.5, "resident, MiB": 7})
    script("skipped", monkeypatch, None)
    benchmarks.main([])
    (file,) = (tmp_path / "results").iterdir()
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["tables"] == [
        {"about": "Of quick.", "rows": [{"kind": "all", "reshard, s": 0.5, "resident, MiB": 7}]}
    ]
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert rows_of(section_of(page, "Is quick quick?")) == [{"kind": "all", "reshard, s": "0.5"}]


def script(name: str, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any] | None) -> None:
    """A benchmark with one row, or with none."""
    section = Section(f"Is {name} quick?")
    section.say(f"Of {name}.")
    if row is not None:
        section.row(row)
    module = types.ModuleType(f"benchmarks.{name}")
    module.measure = lambda: section  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def section_of(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows_of(section: str) -> list[dict[str, str]]:
    """The rows of all tables, by column."""
    rows: list[dict[str, str]] = []
    for table in re.findall(r"^(.+)\n(?:--- \| )+---\n((?:.+\n)+)", section, flags=re.MULTILINE):
        columns = table[0].split(" | ")
        rows += (dict(zip(columns, line.split(" | "))) for line in table[1].splitlines())
    return rows
