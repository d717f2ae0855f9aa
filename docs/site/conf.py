"""Sphinx builds the pages of this repository as a site: `make site`."""

from __future__ import annotations

import re
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

_PAGES = re.compile(r"^\| .* \| \[[\w-]+\.md\]\(([\w-]+)\.md\)", re.MULTILINE)


def _add_contents(app: Any, page: str, source: list[str]) -> None:
    """Append the order of pages to the front page: that of the table in docs/README.md."""
    if page == root_doc:
        names = _PAGES.findall((_ROOT / "docs/README.md").read_text(encoding="utf-8"))
        pages = ["docs/README", *(f"docs/{name}" for name in names), "docs/site/api", "CONTRIBUTING", "CHANGELOG"]
        pages += ["README.zh", "docs/zh/recipes"]
        source[0] += "\n".join(["\n", "```{toctree}", ":hidden:", "", *pages, "```", ""])


def setup(app: Any) -> None:
    """Connect to Sphinx' events."""
    app.connect("source-read", _add_contents)
