"""Paths of the checkpoints and strategies that MindSpore wrote.

`FIXTURES` is a selection that is always there. `CORPUS` is the whole collection; it lies beside the
repository where the project is developed, and tests that need it skip elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
CORPUS = ROOT.parent / "shared" / "corpus"
CORPUS2 = ROOT.parent / "shared" / "corpus2"
"""The same of other forms; a selection of it is in `FIXTURES` as well."""

needs_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason="the whole corpus is not on this machine")
