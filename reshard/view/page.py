"""Writing the page: the data, the script and the style in one HTML file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from reshard.text.messages import one_line

MARK = "<!-- reshard view -->"
"""A mark near the beginning of every page; only files with it are replaced."""


def page(data: Mapping[str, Any]) -> bytes:
    """The page as HTML, UTF-8.

    Names come from untrusted files: in the data every ``<`` is escaped, and the script writes texts as text nodes only.
    The policy permits this script and this style by their hashes, and nothing else.

    Args:
        data: as `page.js` reads it.
    """
    script, style = _asset("page.js"), _asset("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    # Lone surrogates, from names that are not UTF-8, stay escapes.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(one_line(str(data["source"])))
    parts = [
        f'<!doctype html>\n{MARK}\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        '<meta name="color-scheme" content="light dark">\n',
        f"<title>{title} - reshard view</title>\n<style>{style}</style>\n</head>\n<body>\n",
        "<noscript>This page needs JavaScript.</noscript>\n",
        f'<script type="application/json" id="data">{text}</script>\n<script>{script}</script>\n</body>\n</html>\n',
    ]
    return "".join(parts).encode()


def _asset(name: str) -> str:
    return files("reshard.view").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy permits an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
