"""Standard output and standard error: closed, full or slow streams of any encoding do not change the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import cases
from tests.reference import Strategy
from tests.running import LAUNCHER, Argument, Result
from tests.sampling import some_of
from tests.small import SOURCE, TARGET, World, tensors
from tests.trees import same_ranks

FULL = tensors()


def run(
    *words: Argument, out: int | None = None, err: int | None = None, encoding: str = "utf-8", **environment: str
) -> Result:
    """Run a command with descriptors as its standard output and standard error; its other output."""
    process = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *map(str, words)],
        stdout=subprocess.PIPE if out is None else out,
        stderr=subprocess.PIPE if err is None else err,
        env={**os.environ, **environment},
        timeout=60,
    )
    said = ((said or b"").decode(encoding) for said in (process.stdout, process.stderr))
    return Result(process.returncode, *said)


@pytest.fixture
def nobody() -> int:
    """A pipe without a reader."""
    reads, writes = os.pipe()
    os.close(reads)
    return writes


@pytest.fixture
def full() -> int:
    """A device that is always full."""
    return os.open("/dev/full", os.O_WRONLY)


def test_a_conversion_completes_with_closed_output(world: World, nobody: int) -> None:
    world.save(FULL)
    assert run(*world.words("-v", "--json"), out=nobody, err=nobody).status == 0
    same_ranks(world.found(), world.expected(FULL))


@pytest.mark.deep
@pytest.mark.parametrize("listens", ["nobody", "full"])
def test_closed_output_keeps_the_exit_status_of_the_conversion(
    world: World, listens: str, request: pytest.FixtureRequest
) -> None:
    lost: int = request.getfixturevalue(listens)
    world.save(FULL)
    world.convert("--checksum", "crc32")
    target = world.dst / "rank_0" / "checkpoint_0.ckpt"
    target.write_bytes(target.read_bytes()[::-1])
    words: dict[int, list[Argument]] = {
        4: ["verify", world.dst],
        3: ["merge-pipeline", cases.case_directory("08_pp2dp2mp2") / "strategy", "/dev/null/merged.ckpt"],
        2: ["inspect", "--no-such-option"],
    }
    for status, line in words.items():
        assert run(*line, out=lost, err=lost).status == status, line
    assert run("verify", world.dst, "--json", out=lost).status == 4


@pytest.mark.deep
@pytest.mark.parametrize("words", [["--help"], ["inspect", "OLD"], ["rank-list", "0"], ["rank-list", "0", "--json"]])
def test_a_result_that_cannot_be_printed_is_a_failure(world: World, words: list[str], nobody: int, full: int) -> None:
    world.save(FULL)
    strategies: list[Argument] = ["--src-strategy", world.old, "--dst-strategy", world.new]
    line: list[Argument] = [world.src / "rank_0" / "net-1_10.ckpt" if word == "OLD" else word for word in words]
    line += strategies if words[0] == "rank-list" else []
    assert run(*line, out=nobody).status == 0
    result = run(*line, out=full)
    assert result.status == 1
    assert result.err == "reshard: error: standard output: cannot be written: No space left on device\n"


def test_a_summary_that_cannot_be_printed_is_not_a_failure(world: World, full: int) -> None:
    world.save(FULL)
    assert run(*world.words(), err=full).status == 0


def test_a_json_summary_that_cannot_be_printed_is_a_failure(world: World, full: int) -> None:
    world.save(FULL)
    assert run(*world.words("--json"), out=full).status == 1
    same_ranks(world.found(), world.expected(FULL))
    # The output of the next run.
    assert json.loads(run(*world.words("--json")).out)["ranks"] == []


@pytest.mark.deep
def test_a_slow_reader_receives_the_whole_output(world: World) -> None:
    """A program on the other side of a terminal or of ssh may have made the pipe one that does not block."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            before += os.write(writes, bytes(1000))
    said = b""

    def read() -> None:
        nonlocal said
        time.sleep(1)
        while part := os.read(reads, 1000):
            said += part

    reader = threading.Thread(target=read)
    reader.start()
    result = run("transform-dir", "--help", out=writes)
    os.close(writes)
    reader.join()
    os.close(reads)
    assert result == Result(0, "", "")
    assert said[before:].decode() == run("transform-dir", "--help").out


# In no encoding.
ODD = os.fsdecode(b"caf\xe9")
NAMES = {"w": "权重.w", "v": "naïve.v", "m.w": "m.权重.w"}


def renamed(strategy: Strategy) -> Strategy:
    return [
        {**stage, "layouts": {NAMES[n]: layout_record for n, layout_record in stage["layouts"].items()}}
        for stage in strategy
    ]


@pytest.fixture
def foreign(tmp_path: Path) -> World:
    """A conversion with names of parameters that few encodings hold, in a directory whose name is not UTF-8."""
    (tmp_path / ODD).mkdir()
    world = World(tmp_path / ODD, renamed(SOURCE), renamed(TARGET))
    world.save({NAMES[name]: tensor for name, tensor in FULL.items()})
    return world


@pytest.mark.deep
@pytest.mark.parametrize("encoding", some_of(["latin-1", "cp437"], 2))
def test_any_name_is_printed_in_any_encoding(foreign: World, encoding: str) -> None:
    file = foreign.src / "rank_0" / "net-1_10.ckpt"
    chosen, escaped = NAMES["w"], r"\u6743\u91cd.w"
    v = NAMES["v"].encode(encoding, "backslashreplace").decode(encoding)

    def say(status: int, *words: Argument) -> str:
        result = run(*words, encoding=encoding, PYTHONIOENCODING=f"{encoding}:strict")
        assert result.status == status and "Traceback" not in result.err, result.err
        return result.out + result.err

    listing = say(0, "fingerprint", foreign.src, "--strategy", foreign.old)
    assert f"  {escaped}\n" in listing and f"  {v}\n" in listing
    rows = [line for line in say(0, "inspect", file).splitlines() if "Float32" in line and ".w" in line]
    assert escaped in rows[0]
    # Columns are as wide as the printed text.
    assert len({line.index("Float32") for line in rows}) == 1
    assert escaped in say(0, "strategy", "show", foreign.old, chosen)
    assert r"caf\udce9" in say(0, *foreign.words("-v", "--verify"))
    assert escaped in say(2, "strategy", "show", foreign.old, f"{chosen}x")
    assert r"\u6743" in say(2, "inspect", "--权", ODD)
    assert r"\udce9" in say(2, ODD)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8:surrogateescape"])
def test_json_is_ascii_in_any_locale(foreign: World, encoding: str) -> None:
    file = foreign.src / "rank_0" / "net-1_10.ckpt"
    said = json.loads(run("inspect", file, "--json", PYTHONIOENCODING=encoding).out)
    # Python restores the escaped bytes.
    assert os.fsencode(said["file"]) == os.fsencode(file)
    assert {tensor["name"] for tensor in said["tensors"]} >= set(NAMES.values())
    shown = run("strategy", "show", foreign.old, "--json", PYTHONIOENCODING=encoding).out
    assert {layout["parameter"] for layout in json.loads(shown)} == set(NAMES.values())
    assert shown.isascii()
