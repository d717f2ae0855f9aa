"""The pages in Chinese match the English ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from docs.tools.translations import ORIGINALS, comments, sections, with_examples

_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SAYS_ENGLISH = re.compile(r"\[English\]\([^)]*\)|\]\([^)]*\)(（|，)英文")
_FIGURE = re.compile(r"\d+(?:\.\d+)*")
_PAIRS = [pytest.param(page, original, id=page.name) for page, original in ORIGINALS.items()]


def _headings(page: Path) -> list[int]:
    return [len(section.split(" ", 1)[0]) for section in sections(page.read_text(encoding="utf-8"))]


def _pairs_of_sections(page: Path, original: Path) -> list[tuple[str, str]]:
    mine, theirs = (sections(path.read_text(encoding="utf-8")) for path in (page, original))
    return list(zip(mine, theirs, strict=True))


def _links(text: str, page: Path) -> list[Path]:
    """The targets of links to English pages; links between translations count as links to their originals.

    Headings of translated pages have anchors of their own, which are left out.
    """
    targets = []
    for link in _LINK.findall(text):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            file = Path(os.path.normpath(page.parent / name))
            original = ORIGINALS.get(file, file)
            targets.append(original if original in ORIGINALS.values() else Path(f"{file}#{anchor}"))
    return sorted(targets)


@pytest.mark.parametrize("page, original", _PAIRS)
def test_a_translation_has_the_headings_of_its_original(page: Path, original: Path) -> None:
    assert _headings(page) == _headings(original)


@pytest.mark.parametrize("page, original", _PAIRS)
def test_a_translation_has_the_examples_of_its_original(page: Path, original: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_examples(text, original.read_text(encoding="utf-8")) == text, "`make docs` copies them"


@pytest.mark.parametrize("page, original", _PAIRS)
def test_comments_on_commands_are_translated(page: Path, original: Path) -> None:
    mine, theirs = (comments(path.read_text(encoding="utf-8")) for path in (page, original))
    assert len(mine) == len(theirs)
    assert not [comment for comment in mine if comment.isascii()]


@pytest.mark.parametrize("page, original", _PAIRS)
def test_a_translation_has_the_code_figures_and_rows_of_its_original(page: Path, original: Path) -> None:
    for translated, english in _pairs_of_sections(page, original):
        assert sorted(_CODE.findall(translated)) == sorted(_CODE.findall(english))
        prose, english_prose = _CODE.sub("", translated), _CODE.sub("", english)
        assert sorted(_FIGURE.findall(prose)) == sorted(_FIGURE.findall(english_prose))
        assert translated.count("\n|") == english.count("\n|")
        assert translated.count("\n* ") == english.count("\n* ")


@pytest.mark.parametrize("page, original", _PAIRS)
def test_a_translation_has_the_links_of_its_original(page: Path, original: Path) -> None:
    for translated, english in _pairs_of_sections(page, original):
        mine, theirs = _links(translated, page), _links(english, original)
        # The two pages link to each other.
        for path in ORIGINALS:
            mine, theirs = ([link for link in links if link not in (path, original)] for links in (mine, theirs))
        assert mine == theirs


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in ORIGINALS])
def test_a_link_to_an_english_page_says_so(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    english = [
        link.split("#")[0]
        for link in _LINK.findall(_SAYS_ENGLISH.sub("", text))
        if ".md" in link and Path(os.path.normpath(page.parent / link.split("#")[0])) not in ORIGINALS
    ]
    assert english == []


@pytest.mark.parametrize("page, original", _PAIRS)
def test_a_link_leads_to_the_translation_if_there_is_one(page: Path, original: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    targets = {Path(os.path.normpath(page.parent / link.split("#")[0])) for link in links}
    assert targets & set(ORIGINALS.values()) == {original}
