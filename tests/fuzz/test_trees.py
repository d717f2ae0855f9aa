"""Damaged trees never cause a traceback, a hang, or wrong bytes from detectable damage.

What cannot be noticed: other contents in files whose CRC is not recorded, or not checked because
only a part of the file is read; one rank's file in another's place; a strategy with other
layouts. Only these excuse a wrong output.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.bounds import within
from tests.reference import Strategy
from tests.running import reshard
from tests.small import COPIED, PLAIN, PLAIN_TARGET, SOURCE, TARGET, World, tensors, without
from tests.trees import Value

SHARDED = without(SOURCE, "w", "v")
"""Every rank holds a part of its own, so every file is read whole, and its CRC checked."""


class Kind(NamedTuple):
    """A kind of source: strategies, whether files carry a CRC, format, and whether a CRC is relied on."""

    source: Strategy
    target: Strategy
    ending: str
    crc: bool
    copied: dict[str, Value]
    whole: bool = False


KINDS = [
    Kind(SOURCE, TARGET, "ckpt", False, COPIED),
    Kind(SOURCE, TARGET, "ckpt", True, COPIED),
    Kind(PLAIN, PLAIN_TARGET, "ckpt", False, COPIED),
    Kind(PLAIN, PLAIN_TARGET, "safetensors", False, COPIED),
    Kind(SHARDED, without(TARGET, "w", "v"), "ckpt", True, {}, whole=True),
]
STEPS = {"1_9": "old.", "1_10": ""}


def damage_content(file: Path, data: bytearray, random: Random) -> set[str]:
    """Change a file; whether in a way that may leave its structure whole.

    Bytes that are put in may complete a record and begin a field that nobody knows, which the
    format allows.
    """
    at = random.randrange(len(data)) if data else 0
    change = random.randrange(5)
    if not data or change == 0:
        data += b"\0"
    elif change == 1:
        del data[at:]
    elif change == 2:
        data[at] ^= 1 << random.randrange(8)
    elif change == 3:
        piece = bytes(random.randrange(256) for _ in range(random.randrange(20)))
        data[at : at + len(piece)] = piece[: len(data) - at]
    else:
        data[at:at] = data[at : at + random.randrange(200)]
    file.write_bytes(bytes(data))
    return {"content"} if change >= 2 else set()


def damaged(world: World, random: Random) -> set[str]:
    """Damage one thing; what kind of damage, for those that cannot always be noticed."""
    files = sorted(path for path in world.src.rglob("*") if path.is_file())
    strategies = sorted(path for path in world.old.parent.rglob("*") if path.is_file())
    if not files:
        return set()
    file, other = random.choice(files), random.choice(files)
    change = random.randrange(14)
    if change < 5:
        return damage_content(file, bytearray(file.read_bytes()), random)
    if change == 5:
        file.unlink()
    elif change == 6:
        shutil.rmtree(file.parent)
    elif change == 7:
        file.unlink()
        replace: list[Callable[[], object]] = [
            file.mkdir,
            lambda: os.mkfifo(file),
            lambda: file.symlink_to("nowhere"),
            lambda: file.symlink_to(file.name),
            lambda: shutil.copy(random.choice(strategies), file),
            file.touch,
        ]
        random.choice(replace)()
    elif change == 8:
        content, others = file.read_bytes(), other.read_bytes()
        file.write_bytes(others)
        other.write_bytes(content)
        return {"swapped"}
    elif change == 9:
        stem = random.choice(["net-1_11", "other-1_10", "net-1_10_breakpoint", ".net"])
        file.rename(file.with_name(stem + file.suffix))
        return {"swapped"}
    elif change == 10:
        name = random.choice(["rank_7", "rank_01", "0", "rank_1_tmp", "x"])
        if not (world.src / name).exists():
            file.parent.rename(world.src / name)
        return {"swapped"}
    elif change == 11:
        file.chmod(0)
    elif change == 12:
        chosen = random.choice(strategies)
        damage_content(chosen, bytearray(chosen.read_bytes()), random)
        return {"strategy"}
    else:
        shutil.copy(file, random.choice(strategies))
        return {"strategy"}
    return set()


def check_tree(root: Path, seed: int) -> int:
    """Convert one damaged tree; the exit status."""
    random = Random(seed)
    kind = random.choice(KINDS)
    world = World(root, kind.source, kind.target)
    names = sorted(kind.source[0]["layouts"])
    labels = dict(random.sample(sorted(STEPS.items()), random.choice([1, 2])))
    options: dict[str, Any] = {"crc": True} if kind.crc else {}
    for step, label in labels.items():
        world.save(
            tensors(label, names),
            f"rank_{{rank}}/net-{step}.{kind.ending}",
            copied=kind.copied,
            **options,
        )
    done: set[str] = set()
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        done |= damaged(world, random)
    with within():
        result = reshard(*world.words("--jobs", 1))
    assert "internal error" not in result.err
    assert result.status in (0, 1, 2, 3), result
    assert result.status == 0 or result.err.strip()
    if result.status == 0 and not done & {"swapped", "strategy"} and (kind.whole or "content" not in done):
        ranks = world.found()
        matching = [
            label
            for label in labels.values()
            if all(
                rank in ranks and name in ranks[rank] and same(ranks[rank][name], expected)
                for rank, contents in world.expected(tensors(label, names), kind.copied).items()
                for name, expected in contents.items()
            )
        ]
        assert matching, f"wrong output without an error:\n{result.err}"
    return result.status


def same(one: Value, other: Value) -> bool:
    return (one.dtype, one.array.shape, one.array.tobytes()) == (other.dtype, other.array.shape, other.array.tobytes())


def check_trees(root: Path, seeds: range) -> None:
    statuses: list[int] = []
    for seed in seeds:
        directory = root / str(seed)
        directory.mkdir()
        try:
            statuses.append(check_tree(directory, seed))
        except BaseException:
            print(f"seed: {seed}")
            raise
        shutil.rmtree(directory)
    # Both must occur often for the test to mean anything.
    assert min(statuses.count(0), statuses.count(3)) > len(statuses) // 10


def test_damaged_trees_are_errors_or_converted_correctly(tmp_path: Path) -> None:
    check_trees(tmp_path, range(80))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 11000, 2000))
def test_ten_thousand_damaged_trees_are_errors_or_converted_correctly(first: int, tmp_path: Path) -> None:
    check_trees(tmp_path, range(first, first + 2000))
