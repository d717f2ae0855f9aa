"""Pages in Chinese, which have the headings, examples, figures and links of the English pages."""

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
_COMMANDS = ("```sh\n", "```console\n")
_COMMENT = re.compile(r"(?<=\s)# .*")


def sections(text: str) -> list[str]:
    """The text of every section of a page without its fenced blocks, headings included."""
    return re.split(r"^(?=#+ )", _FENCED.sub("", text), flags=re.MULTILINE)[1:]


def with_examples(translation: str, original: str) -> str:
    """A translation whose fenced blocks are those of its original in the same order; its comments on commands stay."""
    examples = iter(_FENCED.findall(original))
    return _FENCED.sub(lambda mine: _commented(next(examples), mine[0]), translation)


def _commented(example: str, translated: str) -> str:
    remaining = iter(comments(translated))
    return _COMMENT.sub(lambda english: next(remaining, english[0]), example)


def comments(text: str) -> list[str]:
    """The comments in the fenced blocks of commands."""
    blocks = (block for block in _FENCED.findall(text) if block.startswith(_COMMANDS))
    return [comment for block in blocks for comment in _COMMENT.findall(block)]


def rewrite(translation: Path) -> None:
    """Copy the examples and outputs of the original into a translation."""
    original = ORIGINALS[translation].read_text(encoding="utf-8")
    translation.write_text(with_examples(translation.read_text(encoding="utf-8"), original), encoding="utf-8")
