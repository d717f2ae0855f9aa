"""--dst-strategy same of Checkpoint 2.0 reads the source's metadata once."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint2_writing import saving
from tests.running import Argument, done, fails


def test_metadata_and_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = saving().write_root(tmp_path / "src")
    opened: Counter[str] = Counter()
    plain = os.open

    def count(path: Any, *rest: Any, **options: Any) -> int:
        if os.fspath(path).startswith(str(root)):
            opened[os.path.basename(path)] += 1
        return plain(path, *rest, **options)

    monkeypatch.setattr(os, "open", count)
    done("plan", root, tmp_path / "dst", "--dst-strategy", "same")
    files = {path.name for path in root.rglob("*.safetensors")}
    assert len(files) > 8
    assert {name: opened[name] for name in files} == dict.fromkeys(files, 1)
    assert opened["metadata.json"] == 1


def test_ranks_outside_the_source_are_wrong_usage(tmp_path: Path) -> None:
    root = saving().write_root(tmp_path / "src")
    words: list[Argument] = ["convert", root, tmp_path / "dst", "--dst-strategy", "same"]
    fails(2, *words, "--ranks", "7-8", texts=["rank 8 (RANK, --ranks) is out of range: 8 ranks would be written"])
    done(*words, "--ranks", "7")
    assert [path.name for path in (tmp_path / "dst").glob("rank_*")] == ["rank_7"]


def test_an_interrupted_run_resumes_and_is_verified(tmp_path: Path) -> None:
    root = saving().write_root(tmp_path / "src")
    words: list[Argument] = ["convert", root, tmp_path / "dst", "--dst-strategy", "same"]
    done(*words, "--ranks", "0-3")
    done("resume", tmp_path / "dst")
    done(*words)
    assert done("status", tmp_path / "dst", "--json").json["complete"]
    done("verify", tmp_path / "dst", "--src", root, "--dst-strategy", "same")
