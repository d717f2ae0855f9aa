"""The README's commands, typed as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.cli.main import cli
from tests.corpus import FIXTURES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("clone")
    shutil.copytree(FIXTURES, place / "fixtures", ignore=shutil.ignore_patterns("__pycache__"))
    return place


def typed(text: str, place: Path, program: list[str]) -> str:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    done = subprocess.run(
        [*program, text], cwd=place, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


def test_every_command_of_the_readme_works_as_typed(clone: Path) -> None:
    printed = "".join(typed(block, clone, ["bash", "-euo", "pipefail", "-c"]) for block in blocks("sh"))
    assert "[0, 4]" in printed
    for name in ("mp4", "by-rank", "no-pipeline", "no-pipeline-2", "recovered", "inference"):
        for rank in range(4):
            made = (clone / "out" / name / f"rank_{rank}" / f"checkpoint_{rank}.ckpt").read_bytes()
            assert made == (clone / "out" / "mp4" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt").read_bytes(), name


def test_the_readmes_python_works_as_typed(clone: Path) -> None:
    for block in blocks("python"):
        typed(block, clone, [sys.executable, "-c"])


def test_every_command_is_in_the_readme() -> None:
    for name in cli.list_commands(None):  # type: ignore[arg-type]
        assert f"`reshard {name}" in README
