"""The start of the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from reshard.cli.main import cli
from tests.running import Argument
from tests.small import World

# Runs the program to its end, and prints the number of BLAS threads, and all threads of the process.
_THREADS = """
import os, sys
from reshard import entry, signals
def leave(status):
    assert "numpy" in sys.modules and status == 0
    print(os.environ["OPENBLAS_NUM_THREADS"], len(os.listdir("/proc/self/task")), file=sys.stderr)
    os._exit(0)
signals.leave = leave
sys.argv = ["reshard", "stats", "--help"]
entry.main()
"""


@pytest.mark.parametrize("typed", [None, "3"])
def test_the_program_starts_no_threads_for_matrices_unless_the_environment_requests_them(
    typed: str | None,
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    if typed is not None:
        environment["OPENBLAS_NUM_THREADS"] = typed
    ended = subprocess.run([sys.executable, "-c", _THREADS], env=environment, capture_output=True, text=True)
    threads, running = map(int, ended.stderr.split())
    assert threads == int(typed or 1)
    if typed is None:
        assert running == 1


# Runs the program to its end, and prints the modules that it has loaded.
_MODULES = """
import json, os, sys
from reshard import entry, signals
def leave(status):
    assert status == 0
    print(json.dumps(sorted(sys.modules)))
    sys.stdout.flush()
    os._exit(0)
signals.leave = leave
entry.main()
"""
# Libraries and rooms that only some conversions and commands use.
_SOMETIMES = ("boto3", "botocore", "dask", "distributed", "rich")
_ROOMS = ("cluster", "inspection", "lora", "storage.s3", "verification", "view")


def loaded(*words: object) -> set[str]:
    """The modules that a command loads."""
    command = [sys.executable, "-c", _MODULES, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    modules: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return set(modules)


def module_of(command: click.Command | None) -> str:
    assert command is not None and command.callback is not None
    return command.callback.__module__


@pytest.mark.parametrize("command", ["--help", "rank-list", "by-rank"])
def test_a_command_loads_only_its_own_module_and_libraries_that_it_uses(command: str, saved: World) -> None:
    strategies: list[Argument] = ["--src-strategy", saved.old, "--dst-strategy", saved.new]
    words: dict[str, list[Argument]] = {
        "rank-list": [0, *strategies],
        "by-rank": [0, saved.src, saved.dst, *strategies],
    }
    modules = loaded(command, *words.get(command, ()))
    assert not modules.intersection(_SOMETIMES)
    assert not modules.intersection(f"reshard.{room}" for room in _ROOMS)
    context = click.Context(cli)
    modules_of = {name: module_of(cli.get_command(context, name)) for name in cli.list_commands(context)}
    own = {modules_of[command]} if command in modules_of else set()
    assert modules.intersection(modules_of.values()) == own
