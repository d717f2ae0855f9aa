"""status: what is done, changed and missing, from the records alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.running import done, fails
from tests.small import World, tensors

FULL = tensors()


def status(world: World) -> dict[str, Any]:
    found = json.loads(done("status", world.dst, "--json").out)
    assert isinstance(found, dict)
    return found


def test_ranks_come_one_by_one_until_it_is_complete(world: World) -> None:
    world.save(FULL)
    world.by_rank(1)
    found = status(world)
    assert (found["done"], found["missing"], found["complete"], found["manifest"]) == ([1], [0], False, None)
    assert found["bytes_done"] == (world.dst / "rank_1" / "checkpoint_1.ckpt").stat().st_size
    assert "1 rank missing: 0" in done("status", world.dst).out
    world.by_rank(0)
    found = status(world)
    assert (found["done"], found["missing"], found["complete"]) == ([0, 1], [], True)
    assert found["step"] == "1_10" and not found["writing"]
    assert "complete" in done("status", world.dst).out


def test_a_file_that_was_removed_is_missing_and_a_changed_one_is_told_apart(world: World) -> None:
    world.save(FULL)
    world.convert()
    (world.dst / "rank_0" / "checkpoint_0.ckpt").unlink()
    with open(world.dst / "rank_1" / "checkpoint_1.ckpt", "ab") as file:
        file.write(b"more")
    found = status(world)
    assert (found["done"], found["changed"], found["missing"]) == ([], [1], [0])
    assert not found["complete"]
    said = done("status", world.dst).out
    assert "1 rank changed" in said and "by-rank RANK" in said
    fails(3, *world.words(), says=["changed since"])
    world.by_rank(1, "--overwrite")
    world.convert()
    assert status(world)["complete"]


def test_a_copy_without_records_is_known_by_its_manifest(world: World) -> None:
    world.save(FULL)
    world.convert()
    shutil.rmtree(world.dst / ".reshard")
    assert status(world)["complete"]
    (world.dst / "rank_0" / "checkpoint_0.ckpt").unlink()
    assert status(world)["missing"] == [0]


def test_a_directory_without_a_conversion_is_an_error(tmp_path: Path) -> None:
    fails(3, "status", tmp_path, says=[str(tmp_path)])
    fails(3, "status", tmp_path / "nowhere", says=["nowhere"])
