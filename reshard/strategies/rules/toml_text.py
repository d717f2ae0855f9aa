"""Writing rules: TOML that is made for people."""

from __future__ import annotations

import json
from collections.abc import Sequence


def toml_string(text: str) -> str:
    """A text in quotes, with escapes that JSON and TOML have in common."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def quoted_list(texts: Sequence[str]) -> str:
    """``["a", "b"]``."""
    return f"[{', '.join(map(toml_string, texts))}]"


def one_or_list(texts: Sequence[str]) -> str:
    """A text alone, or a list of them."""
    return toml_string(texts[0]) if len(texts) == 1 else quoted_list(texts)
