"""SIGKILL at random moments: whole files only, no work repeated, and the next run completes the target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy
from tests.conftest import LONG
from tests.corpus import ROOT
from tests.sampling import some_of

MODEL = Model(layers=4, matrices=4, rows=384, columns=256)
SCHEMES = {
    "rows": (Scheme(data=2, model=4, sharded=True), Scheme(model=6)),
    "columns written together": (Scheme(model=2), Scheme(model=8, cut=1)),
    "stages": (Scheme(stages=2, model=2), Scheme(stages=4, model=2)),
}


@pytest.mark.parametrize("processes", some_of([3, 1], 2))
@pytest.mark.parametrize("kind", SCHEMES)
def test_killed_runs_leave_whole_files_and_resume(kind: str, processes: int, tmp_path: Path) -> None:
    old, new = SCHEMES[kind]
    write_checkpoint(tmp_path / "src", MODEL, old)
    write_strategy(tmp_path / "old", MODEL, old)
    write_strategy(tmp_path / "new", MODEL, new)
    kills = 200 if LONG else 6
    words = [sys.executable, "-m", "tests.kills", str(tmp_path), str(kills), str(kills), str(processes)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["kills"] >= kills and document["ends"] >= 1
