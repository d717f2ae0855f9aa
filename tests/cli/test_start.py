"""The start of the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.small import World, world_of
from tests.trees import layout, same_ranks, single, value

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
# Libraries that a conversion of rank directories to rank directories needs only sometimes.
_LIBRARIES = {*("concurrent.futures", "ctypes", "logging", "ml_dtypes", "numpy", "rich", "safetensors", "tqdm")}
_ROOMS = {
    *("cluster", "inspection", "lora", "names", "numbers", "opened", "pictures", "quantised", "verification", "view")
}
_PARTS = {
    *("checkpoints.placed", "checkpoints.formats.archives", "checkpoints.formats.pickles"),
    *("execute.casts", "execute.filling"),
    *("forms.recorded", "forms.pytorch.dcp", "forms.full.contents", "forms.pytorch.shards", "forms.pytorch.verl"),
    *("forms.checkpoint2.metadata", "forms.writing", "layout.boxes", "plan.recovery", "storage.s3"),
    "strategies.rules",
}


def loaded(*words: object) -> set[str]:
    """The modules that a command loads."""
    command = [sys.executable, "-c", _MODULES, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    modules: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return set(modules)


def unneeded(modules: set[str]) -> list[str]:
    """The modules of libraries, rooms and parts above."""
    parts = [*_LIBRARIES, *(f"reshard.{part}" for part in (*_ROOMS, *_PARTS))]
    return sorted(module for module in modules if any(f"{module}.".startswith(f"{part}.") for part in parts))


def test_a_rank_that_is_joined_from_whole_slices_loads_only_what_it_needs(saved: World) -> None:
    modules = loaded("by-rank", 0, saved.src, saved.dst, "--src-strategy", saved.old, "--dst-strategy", saved.old)
    assert unneeded(modules) == []
    assert "reshard.forms.ranks.selection" in modules and list(saved.dst.glob("rank_0/*"))


def test_a_rank_that_is_joined_from_long_columns_loads_only_what_it_needs() -> None:
    columns, whole = (single({"w": layout([ranks], [-1, 0])}) for ranks in (2, 1))
    with world_of(columns, whole) as world:
        world.save({"w": value("w", (4, 4096))})
        modules = loaded("by-rank", 0, world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", world.new)
        assert unneeded(modules) == []
        same_ranks(world.found(), world.expected({"w": value("w", (4, 4096))}))


def test_a_rank_list_loads_only_what_it_needs(saved: World) -> None:
    modules = loaded("rank-list", 0, "--src-strategy", saved.old, "--dst-strategy", saved.new)
    assert unneeded(modules) == []


def test_a_rank_whose_elements_are_gathered_loads_numpy(saved: World) -> None:
    modules = loaded("by-rank", 0, saved.src, saved.dst, "--src-strategy", saved.old, "--dst-strategy", saved.new)
    assert {"numpy", "reshard.execute.filling"} <= modules and "ml_dtypes" not in modules
