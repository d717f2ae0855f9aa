"""Progress on terminals, and its absence elsewhere."""

from __future__ import annotations

import re
import time

import pytest

from reshard.cli.progress import progress_of
from tests.running import Argument, done, terminal_output
from tests.small import World, tensors

SCRIPT = """
import sys, time
from reshard.cli import options
from reshard.cli.command import command
from reshard.cli.output import listener
from reshard.cli.progress import progress_of
@command("move", "")
@options.output
def move():
    bar = progress_of()
    bar.begin(4 << 30, "checking CRCs")
    for number in range(4):
        time.sleep(0.2)
        bar.wrote(1 << 30)
        if number == 3:
            listener()("warning", "look here")
    bar.end()
move()
"""


def on_terminal(columns: int, *words: str) -> str:
    """The script's output on a terminal of this many columns."""
    return terminal_output(columns, SCRIPT, *words)


@pytest.mark.deep
@pytest.mark.parametrize(("columns", "shown"), [(80, " of 4.00GiB, "), (40, "% ")])
def test_a_terminal_shows_progress_speed_and_remaining_time(columns: int, shown: str) -> None:
    output = on_terminal(columns)
    frames = [frame for frame in re.split(r"[\r\n]", output) if frame.startswith("checking CRCs")]
    assert frames
    for frame in frames:
        assert shown in frame and "B/s" in frame
        assert len(frame) <= columns
    # A message has its own line, and the bar is removed at the end.
    assert re.search(r"(\r|\n)(\x1b\[33m)?warning: look here", output)
    assert output.split("\n")[-1].rpartition("\r")[2].strip() == ""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("words", "shown"),
    [([], True), (["--quiet"], False), (["--no-progress"], False), (["--quiet", "--progress"], True)],
)
def test_a_terminal_shows_progress_unless_switched_off(words: list[str], shown: bool) -> None:
    assert ("checking" in on_terminal(80, *words)) == shown


@pytest.mark.deep
@pytest.mark.parametrize("size", [(0, 0), (80, 0)])
def test_a_terminal_without_a_size_shows_a_bar_of_80_columns(size: tuple[int, int]) -> None:
    output = terminal_output(size, SCRIPT)
    frames = [frame for frame in re.split(r"[\r\n]", output) if frame.startswith("checking CRCs")]
    assert frames and all(" of 4.00GiB, " in frame and len(frame) <= 80 for frame in frames)
    assert "checking" not in terminal_output(size, SCRIPT, "--quiet")


@pytest.mark.parametrize(
    ("words", "shown"),
    [([], True), (["--quiet"], False), (["--no-progress"], False), (["--quiet", "--progress"], True)],
)
def test_without_a_terminal_lines_are_printed_unless_switched_off(
    world: World, words: list[str], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.cli.progress.BETWEEN_LINES", 0.0)
    world.save(tensors())
    assert ("writing:" in world.convert(*words).err) == shown


LINE = r"(\d+%, )?\d+(\.\d)? [KMGT]?i?B of \d+(\.\d)? [KMGT]?i?B, \d+(\.\d)? [KMGT]?i?B/s(, \d\d:\d\d left)?"


def test_without_a_terminal_progress_prints_lines_at_intervals(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every command that shows any; JSON stays alone on standard output."""
    monkeypatch.setattr("reshard.cli.progress.BETWEEN_LINES", 0.0)
    world.save(tensors())
    strategies = ("--src-strategy", world.old, "--dst-strategy", world.new)
    whole = world.root / "whole"
    commands: list[tuple[str, list[Argument]]] = [
        ("writing", ["transform-dir", world.src, world.dst, *strategies]),
        ("writing", ["by-rank", 0, world.src, world.dst, "--overwrite", *strategies]),
        ("verifying", ["verify", world.dst, "--src", world.src, *strategies]),
        ("reading", ["fingerprint", world.src, "--strategy", world.old]),
        ("writing", ["recover", world.src, whole, "--strategy", world.old]),
    ]
    for doing, words in commands:
        result = done(*words, "--quiet", "--progress", "--json")
        assert result.json is not None
        lines = result.err.splitlines()
        any_work = f"(checking sums|checking CRCs|comparing replicas|{doing}): {LINE}"
        assert lines and all(re.fullmatch(any_work, line) for line in lines), result.err
        assert any(line.startswith(doing) for line in lines)


def test_progress_lines_are_printed_while_no_bytes_move(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.cli.progress.BETWEEN_LINES", 0.05)
    bar = progress_of()
    bar.begin(4 << 30, "writing")
    bar.wrote(1 << 30)
    text = ""
    while text.count("\n") < 3:
        time.sleep(0.05)
        text += capfd.readouterr().err
    bar.end()
    first, second, *_ = text.splitlines()
    assert re.fullmatch(r"writing: 25%, 1\.0 GiB of 4\.0 GiB, .* GiB/s, 00:00 left", first)
    assert second == "writing: 25%, 1.0 GiB of 4.0 GiB, 0 B/s"
    capfd.readouterr()
    time.sleep(0.1)
    assert capfd.readouterr().err == ""


def test_the_summary_lists_the_time_of_each_phase(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.cli.convert.MIN_SHOWN", 0.0)
    world.save(tensors())
    output = world.convert("--verify", "-v").err
    assert re.search(r"planning \d+\.\d s, checking \d+\.\d s, writing \d+\.\d s, verifying \d+\.\d s", output)
    output = done("recover", world.src, world.root / "whole", "--strategy", world.old, "-v").err
    assert re.search(r"planning \d+\.\d s, checking \d+\.\d s, writing \d+\.\d s", output)
