"""Records that no plan belongs to any more, since somebody removed or damaged it."""

from __future__ import annotations

import shlex
import shutil

import pytest

from tests.running import fails
from tests.small import World, tensors
from tests.trees import same_ranks

FULL = tensors()
OTHER = tensors("other ")


@pytest.mark.parametrize("ranks", [(), ("--ranks", "0")])
def test_records_without_a_plan_count_for_no_other_conversion(ranks: tuple[str, ...], world: World) -> None:
    world.save(FULL)
    world.convert(*ranks)
    (world.dst / ".reshard" / "plan.json").unlink()
    world.save(OTHER)
    fails(3, *world.words(), texts=["already holds", "--overwrite"])
    world.convert("--overwrite")
    same_ranks(world.found(), world.expected(OTHER))


def test_what_is_said_of_a_damaged_plan_works(world: World) -> None:
    world.save(FULL)
    world.convert("--ranks", "0")
    (world.dst / ".reshard" / "plan.json").write_text('{"version": 3, "conv')
    world.save(OTHER)
    for options in ((), ("--overwrite",)):
        fails(3, *world.words(*options), texts=["is damaged", f"or remove {shlex.quote(str(world.dst))} if"])
    shutil.rmtree(world.dst)
    world.convert()
    same_ranks(world.found(), world.expected(OTHER))
