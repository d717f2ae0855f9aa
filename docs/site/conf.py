"""Sphinx builds the pages of this repository as a site: `make site`."""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from reshard._version import __version__

_ROOT = Path(__file__).resolve().parents[2]

project = "reshard"
author = "reshard's authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/site/*.md", "docs/zh/*.md"]
exclude_patterns = [".*", "build", "dist", "out*", "reshard", "tests", "fixtures", "benchmarks", "*.egg-info"]

# The slugs of headings are those of GitHub, where the same pages are read.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

default_role = "code"
autodoc_typehints = "none"
napoleon_use_ivar = True
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "reshard"
html_show_sphinx = False
html_copy_source = False
# The front page has an address of its own, too: servers of files open index.html.
html_additional_pages = {"index": "front.html"}
templates_path = ["."]

_GROUP = re.compile(r"^## (.*)$", re.MULTILINE)
_PAGE = re.compile(r"\]\(([^()]*)\.md\)")


def _add_contents(app: Any, page: str, source: list[str]) -> None:
    """Append the contents to the front page: the groups of docs/README.md, and the pages they link to."""
    if page == root_doc:
        source[0] += "\n\n```{toctree}\n:hidden:\n\ndocs/README\n```\n"
        _, *parts = _GROUP.split((_ROOT / "docs/README.md").read_text(encoding="utf-8"))
        for group, text in zip(parts[::2], parts[1::2]):
            pages = [posixpath.normpath(f"docs/{name}") for name in _PAGE.findall(text)]
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {group}", "", *pages, "```", ""])


def _copy_pictures(app: Any, error: Exception | None) -> None:
    """Copy the pictures to their place in the clone: Sphinx does not see those in the HTML of the README."""
    if error is None:
        shutil.copytree(_ROOT / "docs/pictures", Path(app.outdir) / "docs/pictures", dirs_exist_ok=True)


def setup(app: Any) -> None:
    """Connect to Sphinx' events."""
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _copy_pictures)
