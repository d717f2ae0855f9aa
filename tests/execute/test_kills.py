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
from tests.running import Argument
from tests.sampling import some_of

MODEL = Model(layers=4, matrices=4, rows=384, columns=256)
SCHEMES = {
    "rows": (Scheme(data=2, model=4, sharded=True), Scheme(model=6)),
    "columns written together": (Scheme(model=2), Scheme(model=8, cut=1)),
    "stages": (Scheme(stages=2, model=2), Scheme(stages=4, model=2)),
}
FORMS = {
    "checkpoint2": ["--dst-strategy", "same"],
    "huggingface": ["--max-shard-size", "1MB"],
    "hf-sharded": ["--shards", "4"],
    "dcp": ["--shards", "4"],
    "hyper-parallel": ["--shards", "4"],
}


def killed(root: Path, kills: int, processes: int, *options: Argument) -> None:
    words = [sys.executable, "-m", "tests.kills", root, kills, kills, processes, *options]
    result = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["kills"] >= kills and document["ends"] >= 1


@pytest.mark.parametrize("processes", some_of([3, 1], 2))
@pytest.mark.parametrize("kind", SCHEMES)
def test_killed_runs_leave_whole_files_and_resume(kind: str, processes: int, tmp_path: Path) -> None:
    old, new = SCHEMES[kind]
    write_checkpoint(tmp_path / "src", MODEL, old)
    write_strategy(tmp_path / "old", MODEL, old)
    write_strategy(tmp_path / "new", MODEL, new)
    killed(tmp_path, 60 if LONG else 6, processes, "--dst-strategy", tmp_path / "new")


@pytest.mark.long
@pytest.mark.parametrize("processes", [3, 1])
@pytest.mark.parametrize("form", FORMS)
def test_killed_runs_of_other_forms_leave_whole_files_and_resume(form: str, processes: int, tmp_path: Path) -> None:
    old = Scheme(stages=2, model=2)
    write_checkpoint(tmp_path / "src", MODEL, old)
    write_strategy(tmp_path / "old", MODEL, old)
    killed(tmp_path, 30, processes, "--to", form, *FORMS[form])
