"""A conversion with one changed operator is correct, refused, or found wrong by verification."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.corpus import ROOT


def outcomes(*options: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.mutants.run", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    actual: dict[str, Any] = json.loads(process.stdout)
    return actual


def certified(actual: dict[str, Any]) -> list[str]:
    return [
        f"{one['module']}:{one['line']}: {one['change']}" for one in actual["each"] if one["outcome"] == "certified"
    ]


def test_reversed_layouts_are_found() -> None:
    """Slices, devices and shards counted from the other end, which a conversion and its own algebra agree about."""
    where = ["--module", "reshard.layout.layout", "--change", "loop mirrored|counted down"]
    results = outcomes(*where, "--conversion", "demo", "--conversion", "sharded")
    assert not certified(results)
    assert results["outcomes"]["found"] >= 3


def test_a_sample_of_mutants_is_refused_or_found() -> None:
    results = outcomes("--every", "400", "--first", "17")
    assert not certified(results)
    assert results["run"] >= 6


@pytest.mark.long
@pytest.mark.parametrize("first", range(4))
def test_mutants_are_refused_or_found(first: int) -> None:
    results = outcomes("--every", "22", "--first", str(5 * first))
    assert not certified(results)
    assert results["run"] >= 100 and results["outcomes"]["found"] >= 5
    # Nothing is known of conversions that never end.
    assert results["conversions"].get("endless", 0) < results["run"]
