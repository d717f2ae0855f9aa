"""Pages in Chinese, which have the headings, examples, figures and links of the English pages.

A translation may end before its original does: with the sections that it has.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.tools.pages import ROOT

_TASKS = ("recipes.md", "where-is-my-strategy.md", "my-loss-jumped.md", "which-tool.md")
ORIGINALS = {
    ROOT / "README.zh.md": ROOT / "README.md",
    **{ROOT / "docs/zh" / name: ROOT / "docs" / name for name in _TASKS},
}

_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def sections(text: str) -> list[str]:
    """The text of every section of a page without its fenced blocks, headings included."""
    return re.split(r"^(?=#+ )", _FENCED.sub("", text), flags=re.MULTILINE)[1:]


def with_examples(translation: str, original: str) -> str:
    """A translation whose fenced blocks are those of its original, in the same order."""
    examples = iter(_FENCED.findall(original))
    return _FENCED.sub(lambda _: next(examples), translation)


def rewrite(translation: Path) -> None:
    """Copy the examples and outputs of the original into a translation."""
    original = ORIGINALS[translation].read_text(encoding="utf-8")
    translation.write_text(with_examples(translation.read_text(encoding="utf-8"), original), encoding="utf-8")
