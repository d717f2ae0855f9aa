"""The documentation: a test types every example, compares its output, and checks links and names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree
from importlib import metadata
from pathlib import Path

import pytest

from docs.tools import commands, manual, pages, pictures
from docs.tools.translations import ORIGINALS
from reshard.cli.main import cli
from reshard.forms import FORM_CLASSES, READ_ONLY_CLASSES
from tests.conftest import LONG
from tests.corpus import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md")), *ORIGINALS]


@pytest.mark.deep
@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_every_example_works_as_typed_and_prints_what_the_page_shows(page: Path, command: Path) -> None:
    with pages.home() as place:
        for actual in pages.type_page(page, place, None if LONG else command):
            line = f"{page.name}, line {actual.block.start + 1}: `make docs` writes what is printed now"
            assert actual.same, f"{line}\n{actual.output}"
        check_names_are_of_this_page(page, place)
        if page == README:
            check_what_the_readme_makes(place / "out")


def check_names_are_of_this_page(page: Path, place: Path) -> None:
    """The examples of all pages can be typed in one clone: none uses a name that another page's examples write."""
    names = [name for name in os.listdir(place) if name not in ("fixtures", "out")]
    if (place / "out").exists():
        names += [f"out/{name}" for name in os.listdir(place / "out")]
    assert ".reshard" not in map(os.path.basename, names), "out itself is a target, and contains those of other pages"
    for other in pages.pages():
        typed = "\n".join(pages.typed_texts(other)) if other != page else ""
        used = [name for name in names if re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", typed)]
        assert not used, f"{page.name} writes {', '.join(used)}, which {other.name} uses too: choose other names"


def check_what_the_readme_makes(out: Path) -> None:
    for rank in range(4):
        file = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert (out / "from-python" / file).read_bytes() == (out / "mp4" / file).read_bytes()


def test_every_command_is_in_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    for name in cli.list_commands(None):  # type: ignore[arg-type]
        assert f"`reshard {name}" in text


@pytest.mark.skipif(metadata.version("click") < "8.1", reason="older click words help in another way")
def test_the_command_reference_equals_help() -> None:
    assert commands.PAGE.read_text(encoding="utf-8") == commands.reference(), "`make docs` writes it anew"


@pytest.mark.parametrize("formatter", ["groff -man -Tutf8 -ww -z", "mandoc -Tlint -Wwarning"])
def test_groff_accepts_the_manual_page(formatter: str, tmp_path: Path) -> None:
    printed = formatted(tmp_path, *formatter.split())
    # A page without a date is the same whenever it is made.
    assert [line for line in printed.splitlines() if "missing date" not in line] == []


def test_the_manual_page_contains_every_command_and_example(tmp_path: Path) -> None:
    words = ["man", "--no-hyphenation", "--no-justification", "--encoding=utf-8", "--local-file"]
    shown = " ".join(formatted(tmp_path, *words).split())
    for name, command, context in commands.walk():
        for line in (" ".join([name, *command.collect_usage_pieces(context)]), *(command.epilog or "").split("\n")):
            assert " ".join(line.split()) in shown


def formatted(directory: Path, *words: str) -> str:
    """What a program prints of the manual page."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]} here")
    page = directory / manual.PAGE.name
    page.write_text(manual.manual(), encoding="utf-8")
    environment = {**os.environ, "MANWIDTH": "500"}
    done = subprocess.run([*words, page], capture_output=True, text=True, encoding="utf-8", env=environment)
    return done.stderr + done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_has_a_target(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in [*DOCS.rglob("*.md"), README.with_name("README.zh.md")]:
        if page != DOCS / "README.md":
            assert f"]({os.path.relpath(page, DOCS)})" in index, page


def test_the_glossary_has_every_form() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    for form in [*FORM_CLASSES, *READ_ONLY_CLASSES]:
        assert f"form `{form}` " in text, form


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.deep
def test_pictures_of_forms_match_written_files(tmp_path: Path) -> None:
    created = pictures.pictures(tmp_path)
    assert len(created) == 4
    for name, picture in created.items():
        assert (pictures.PLACE / name).read_bytes() == picture, f"`make docs` draws {name} anew"


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_every_picture_is_well_formed_and_used(picture: Path) -> None:
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert any(f"pictures/{picture.name}" in page.read_text(encoding="utf-8") for page in PAGES)
