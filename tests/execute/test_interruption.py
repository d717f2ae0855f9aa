"""Failed, interrupted and killed runs leave no half-written file under a final name."""

from __future__ import annotations

import json
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reshard import storage
from reshard.execute import destination
from tests.running import LAUNCHER, done
from tests.small import World, tensors
from tests.trees import same_ranks

FULL = tensors()
MIB = 1 << 20


def large_source(path: Path, size: int) -> None:
    """A safetensors file of one large tensor of zeros, which takes no space on disk."""
    header = {"big": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + size)


def start(root: Path, *options: str) -> subprocess.Popen[str]:
    words = [
        "transform-dir", str(root / "big.safetensors"), str(root / "dst"), "--src-strategy", "none",
        "--dst-strategy", "none", *options,
    ]  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, *words], stderr=subprocess.PIPE, text=True)


def files(root: Path) -> list[Path]:
    """Everything in the rank directories, temporary files too."""
    return [path for path in (root / "dst").glob("rank_*/*") if path.is_file()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_interrupted_run_leaves_no_target_and_the_next_run_cleans_up(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    large_source(tmp_path / "big.safetensors", 1500 * MIB)
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while not files(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(sent)
    _, output = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert "Traceback" not in output
    assert not (tmp_path / "dst" / "rank_0" / "checkpoint_0.safetensors").exists()
    if sent != signal.SIGKILL:
        assert files(tmp_path) == []
    large_source(tmp_path / "big.safetensors", MIB)
    again = start(tmp_path)
    _, output = again.communicate(timeout=60)
    assert again.returncode == 0, output
    assert files(tmp_path) == [tmp_path / "dst" / "rank_0" / "checkpoint_0.safetensors"]


def test_a_failed_write_is_a_retryable_error(tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk."""
    large_source(tmp_path / "big.safetensors", 4 * MIB)
    words = [
        "transform-dir", str(tmp_path / "big.safetensors"), str(tmp_path / "dst"), "--src-strategy", "none",
        "--dst-strategy", "none",
    ]  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *words],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB)),
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert str(tmp_path / "dst") in result.stderr.replace("\n", "")
    assert files(tmp_path) == []
    done(*words)
    assert [path.name for path in files(tmp_path)] == ["checkpoint_0.safetensors"]


def test_a_low_limit_of_open_files_suffices_for_many_ranks(world: World) -> None:
    world.save(FULL)
    words = [str(word) for word in world.words("--jobs", "2")]
    result = subprocess.run(
        [sys.executable, "-c", LAUNCHER, *words],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)),
    )
    assert result.returncode == 0, result.stderr
    same_ranks(world.found(), world.expected(FULL))


def test_ranks_may_be_converted_at_the_same_time(world: World) -> None:
    """Shell loops on several machines: no run removes a file that another one is writing."""
    world.save(FULL)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *map(str, world.words(rank, command="by-rank"))],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for run in runs:
        _, output = run.communicate(timeout=60)
        assert run.returncode == 0, output
    same_ranks(world.found(), world.expected(FULL))


def test_a_directory_that_another_run_makes_meanwhile_is_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "dst"

    def exists(path: str) -> bool:
        existed = storage.exists(path)
        place.mkdir(exist_ok=True)
        return existed

    monkeypatch.setattr(destination, "exists", exists)
    assert destination.checkpoints_in(str(place), []) == []
