"""Completion of commands in real shells."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.forked import forked_command
from tests.running import install
from tests.small import World, tensors

# Behind the completed line, the shell is made to print it: to the beginning of the line, `echo`, enter.
PRINT = "\x01echo DONE: \x05 :END\n"
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
SET_UP = {
    "bash": 'eval "$(_RESHARD_COMPLETE=bash_source reshard)"; bind "set bell-style none"\n',
    "zsh": 'autoload -Uz compinit; compinit -u -D; eval "$(_RESHARD_COMPLETE=zsh_source reshard)"\n',
}


@pytest.fixture(scope="module")
def command() -> Iterator[Path]:
    """A directory with a command that starts at once: a shell starts it for every line."""
    with tempfile.TemporaryDirectory() as place, forked_command(Path(place)) as directory:
        yield directory


def completed(shell: str, lines: Sequence[str], directory: Path, command: Path) -> list[str]:
    """What lines have become after the tab key was pressed behind each."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    path = f"{command}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(directory), "TERM": "dumb", "PS1": "> "}
    master, slave = pty.openpty()
    process = subprocess.Popen(
        SHELLS[shell], stdin=slave, stdout=slave, stderr=slave, cwd=directory, env=environment, start_new_session=True
    )
    os.close(slave)
    try:
        say(master, SET_UP[shell] + "echo READ''Y\n", r"\nREADY\r.*> ")
        return [say(master, line + "\t" + PRINT, r"\r\nDONE: (.*) :END\r.*> ") for line in lines]
    finally:
        process.kill()
        process.wait()
        os.close(master)


def say(terminal: int, text: str, until: str) -> str:
    """Type a text and read until a pattern is found; its group, or all that was said."""
    os.write(terminal, text.encode())
    message = ""
    while True:
        match = re.search(until, message, re.DOTALL)
        if match:
            return match[1] if match.groups() else message
        ready, _, _ = select.select([terminal], [], [], 10)
        assert ready, f"the shell printed only {message!r}"
        message += os.read(terminal, 65536).decode(errors="replace")


def run_script(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a shell with `reshard` in its path and no settings of the user."""
    environment = {**install(place / "bin"), "HOME": str(place)}
    return subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def place(world: World) -> Path:
    world.save(tensors(), "rank_{rank}/net-3_10.ckpt")
    world.save(tensors(), "rank_{rank}/net-4_10.ckpt")
    return world.root


@pytest.mark.deep
@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_commands_options_and_values(shell: str, place: Path, world: World, command: Path) -> None:
    source, strategy = world.src.name, world.old.relative_to(place)
    becomes = {
        "reshard by-": "reshard by-rank",
        f"reshard inspect {source[:-1]}": f"reshard inspect {source}",
        "reshard convert a b --form": "reshard convert a b --format",
        "reshard convert a b --format saf": "reshard convert a b --format safetensors",
        f"reshard rank-list 0 --dst-strategy {str(strategy)[:-1]}": f"reshard rank-list 0 --dst-strategy {strategy}",
        "reshard convert a b --names qwen3_": "reshard convert a b --names qwen3_moe",
        f"reshard convert a b --names {str(strategy)[:-1]}": f"reshard convert a b --names {strategy}",
        "reshard convert a b --cast b": "reshard convert a b --cast BFloat16",
        "reshard strategy sh": "reshard strategy show",
    }
    assert [line.rstrip("/") for line in completed(shell, list(becomes), place, command)] == list(becomes.values())


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_offers_matching_words(place: Path) -> None:
    lines = ["reshard convert a b --format saf", "reshard convert a b --cast bf"]
    script = "_RESHARD_COMPLETE=fish_source reshard | source; " + "; ".join(f"complete -C '{line}'" for line in lines)
    result = run_script(place, "fish", "--no-config", "-c", script)
    assert set(result.stdout.split()) == {"safetensors", "BFloat16"}, result.stderr
