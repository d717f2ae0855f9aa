"""What is shown on a terminal while bytes move, and nowhere else."""

from __future__ import annotations

import re

import pytest

from reshard.cli.progress import progress_bar
from tests.running import done, say_on_terminal
from tests.small import World, tensors

SCRIPT = """
import sys, time
from reshard.cli.output import listener
from reshard.cli.progress import progress_bar
bar = progress_bar(quiet=len(sys.argv) > 1)
bar.begin(4 << 30, "checking CRCs")
for number in range(4):
    time.sleep(0.2)
    bar.wrote(1 << 30)
    if number == 3:
        listener(quiet=False)("warning", "look here")
bar.end()
"""


def on_terminal(columns: int, *words: str) -> str:
    """What the script says on a terminal of so many columns."""
    return say_on_terminal(columns, SCRIPT, *words)


@pytest.mark.parametrize(("columns", "shown"), [(80, "/4.00G"), (40, "% ")])
def test_a_terminal_shows_what_is_done_how_fast_and_how_long_it_will_take(columns: int, shown: str) -> None:
    said = on_terminal(columns)
    frames = [frame for frame in re.split(r"[\r\n]", said) if frame.startswith("checking CRCs")]
    assert frames
    for frame in frames:
        assert shown in frame and "iB/s" in frame and re.search(r"\d\d:\d\d", frame)
        assert len(frame) <= columns
    # A message stands on a line of its own, and the bar is gone in the end.
    assert re.search(r"(\r|\n)(\x1b\[33m)?warning: look here", said)
    assert said.split("\n")[-1].rpartition("\r")[2].strip() == ""


def test_a_quiet_command_shows_no_progress_on_a_terminal() -> None:
    assert "checking" not in on_terminal(80, "--quiet")


def test_no_terminal_gets_progress(capfd: pytest.CaptureFixture[str]) -> None:
    bar = progress_bar(quiet=False)
    bar.begin(10, "writing")
    bar.wrote(10)
    bar.end()
    assert capfd.readouterr() == ("", "")


def test_the_summary_tells_where_the_time_went(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.cli.conversion._LEAST_SHOWN", 0.0)
    monkeypatch.setattr("reshard.cli.conversion._LEAST_TOTAL", 0.0)
    world.save(tensors())
    said = world.convert("--verify").err
    assert re.search(r"planning \d+\.\d s, checking \d+\.\d s, writing \d+\.\d s, verifying \d+\.\d s", said)
    said = done("recover", world.src, world.root / "whole", "--strategy", world.old).err
    assert re.search(r"planning \d+\.\d s, checking \d+\.\d s, writing \d+\.\d s", said)
