"""The `reshard` command of the pages' examples."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.tools import pages
from tests.conftest import LONG
from tests.forked import forked_command
from tests.running import install


@pytest.fixture(scope="session")
def command() -> Iterator[Path]:
    """A directory with a command that starts at once."""
    with tempfile.TemporaryDirectory() as place, forked_command(Path(place), **pages.ENVIRONMENT) as directory:
        yield directory


@pytest.fixture
def environment(tmp_path: Path, command: Path) -> dict[str, str]:
    """The environment of shells with a command in `tmp_path / "bin"`."""
    actual = install(tmp_path / "bin")
    if not LONG:
        shutil.copy(command / "reshard", tmp_path / "bin")
    return actual
