"""Completion of commands in real shells."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
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
    "bash": 'eval "$(reshard completion bash)"; bind "set bell-style none"\n',
    "zsh": 'autoload -Uz compinit; compinit -u -D; eval "$(reshard completion zsh)"\n',
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


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_commands_options_and_values(shell: str, place: Path, world: World, command: Path) -> None:
    source, strategy = world.src.name, world.old.relative_to(place)
    becomes = {
        "reshard transform-d": "reshard transform-dir",
        f"reshard inspect {source[:-1]}": f"reshard inspect {source}",
        f"reshard transform-dir {source} out --step 3": f"reshard transform-dir {source} out --step 3_10",
        "reshard by-rank 0 --src_ckpt x --src-strategy no": "reshard by-rank 0 --src_ckpt x --src-strategy none",
        f"reshard rank-list 0 --dst-strategy {str(strategy)[:-1]}": f"reshard rank-list 0 --dst-strategy {strategy}",
        f"reshard strategy show {strategy} m": f"reshard strategy show {strategy} m.w",
        f"reshard get {source} m": f"reshard get {source} m.w",
        f"reshard get --strategy {strategy} {source} m": f"reshard get --strategy {strategy} {source} m.w",
        "reshard get nothing m": "reshard get nothing m",
        "reshard convert a b --cast b": "reshard convert a b --cast BFloat16",
        "reshard help fing": "reshard help fingerprint",
        "reshard completion ba": "reshard completion bash",
        "reshard -v help strategy sh": "reshard -v help strategy show",
    }
    assert [line.rstrip("/") for line in completed(shell, list(becomes), place, command)] == list(becomes.values())


def test_bash_offers_words_and_files_together(place: Path) -> None:
    (place / "a file").touch()
    script = """
        eval "$(reshard completion bash)"
        for option in --dst-strategy --src-strategy --names; do
            COMPREPLY=() COMP_WORDS=(reshard convert a b $option "") COMP_CWORD=5
            _reshard_completion reshard 2> /dev/null
            (IFS=,; echo "${COMPREPLY[*]}")
        done
    """
    result = run_script(place, "bash", "--norc", "-c", script)
    target, source, names = (set(line.split(",")) for line in result.stdout.splitlines())
    assert target >= {"none", "same", "a file"} and "none" in source and "same" not in source
    assert names >= {"qwen3", "a file"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_offers_matching_words(place: Path, world: World) -> None:
    lines = [f"reshard transform-dir {world.src.name} out --step ", "reshard by-rank 0 a b --src-strategy no"]
    script = "reshard completion fish | source; " + "; ".join(f"complete -C '{line}'" for line in lines)
    result = run_script(place, "fish", "--no-config", "-c", script)
    assert set(result.stdout.split()) == {"latest", "4_10", "3_10", "none"}, result.stderr


def test_completion_of_a_command_imports_no_heavy_module() -> None:
    script = (
        # click 8.0 ends the process at once.
        "import os, sys; os._exit = sys.exit; from reshard.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        # Not google: a .pth file of protobuf 3.20 makes it at the start.
        "print(sorted({'numpy', 'rich', 'tqdm', 'google.protobuf'} & sys.modules.keys()))"
    )
    requests = {"_RESHARD_COMPLETE": "bash_complete", "COMP_WORDS": "reshard ", "COMP_CWORD": "1"}
    out = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **requests}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "plain,convert" in out and out[-1] == "[]"
