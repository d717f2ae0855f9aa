"""Checkpoints that Megatron-Core wrote, and what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.corpus import FIXTURES, ROOT

CORPUS_MCORE = ROOT.parent / "shared" / "corpus_mcore"
"""The whole collection; it lies beside the repository where the project is developed."""


class McoreCase(NamedTuple):
    """A case: its name, its root and what is expected of it."""

    name: str
    root: Path
    expected: dict[str, Any]

    @property
    def directory(self) -> Path:
        """The directory of its iteration."""
        return self.root.parent / str(self.expected["folder"])

    @property
    def optimizer(self) -> str:
        """The kind of its optimizer's state; empty if it has none."""
        return str(self.expected["model"]["optimizer"] or "")


def mcore_cases(start: str = "") -> list[McoreCase]:
    """The cases whose names start so, by name: those of the fixtures where the whole collection is missing."""
    place = CORPUS_MCORE if CORPUS_MCORE.is_dir() else FIXTURES / "megatron"
    found = sorted(place.glob(f"{start}*/expected.json"))
    return [McoreCase(path.parent.name, path.parent / "checkpoint", json.loads(path.read_text())) for path in found]
