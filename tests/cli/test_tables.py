"""Tables on terminals: they fit the width, fold names and align numbers on the right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.running import LAUNCHER, done, terminal_output
from tests.trees import Value, write_checkpoint

NAME = "model.decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    full = {
        NAME.format(layer, expert): Value("Float32", (-rng.random((256, 96)).astype("f4") * 1e-6).view("<u4"))
        for layer in (0, 11)
        for expert in (3, 25)
    }
    return write_checkpoint(tmp_path / "net.ckpt", full)


def plain(message: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines()]


@pytest.mark.deep
@pytest.mark.parametrize("command", ["stats", "inspect", "diff"])
@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_fits_the_terminal(columns: int, command: str, checkpoint: Path) -> None:
    other = write_checkpoint(
        checkpoint.parent / "other.ckpt",
        {
            NAME.format(layer, expert): Value("Float32", np.ones((256, 96), "<u4"))
            for layer in (0, 11)
            for expert in (3, 25)
        },
    )
    words = {
        "stats": [str(checkpoint), "--strategy", "none"],
        "inspect": [str(checkpoint)],
        "diff": [str(checkpoint), str(other), "--strategy", "none"],
    }
    lines = plain(terminal_output(columns, LAUNCHER, command, *words[command]))
    rows = [at for at, line in enumerate(lines) if line.startswith("model.") and "[256," in line]
    assert len(rows) == 4
    assert all(len(line) <= columns for line in lines[rows[0] - 1 :])
    # Every row is in the same columns: numbers end where their heads do.
    ends = [match.end() for match in re.finditer(r"\S+( \S+)*", lines[rows[0] - 1])]
    assert command == "diff" or all(len(lines[row]) == ends[-1] for row in rows)
    # Folded names are whole.
    shown = {lines[row].split()[0] + "".join(continuation(lines[row + 1 :])) for row in rows}
    assert shown == {NAME.format(layer, expert) for layer in (0, 11) for expert in (3, 25)}


def continuation(lines: list[str]) -> Iterator[str]:
    """The rest of a folded name."""
    for line in lines:
        if len(line.split()) != 1 or "[256," in line:
            return
        yield line


def test_tables_in_a_pipe_or_with_v_contain_whole_names(checkpoint: Path) -> None:
    names = [NAME.format(layer, expert) for layer in (0, 11) for expert in (3, 25)]
    output = done("stats", checkpoint, "--strategy", "none").out
    verbose = terminal_output(80, LAUNCHER, "stats", str(checkpoint), "--strategy", "none", "-v")
    for name in names:
        assert name in output and name in verbose


def test_columns_that_do_not_fit_are_listed(checkpoint: Path) -> None:
    output = terminal_output(80, LAUNCHER, "stats", str(checkpoint), "--strategy", "none")
    assert "not shown on this terminal: norm" in output and "-v shows all" in output
    assert "not shown" not in terminal_output(120, LAUNCHER, "stats", str(checkpoint), "--strategy", "none")
