"""Hostile records: manifests and plans.

Whatever stands in their place, a command that reads them ends, soon, with a few lines and no bug.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.bounds import within
from tests.conftest import LONG
from tests.running import Argument, reshard
from tests.small import World, tensors


class Record(NamedTuple):
    """A kind of record.

    Attributes:
        find: the file, in a world where a conversion is complete.
        uses: commands that read it.
    """

    find: Callable[[World], Path]
    uses: Callable[[World], list[list[Argument]]]


def plan_of(world: World) -> Path:
    return world.dst / ".reshard" / "plan.json"


RECORDS = {
    "manifest": Record(
        lambda world: world.dst / "reshard-manifest.json",
        lambda world: [["verify", world.dst], ["verify", world.dst, "--ranks", 0]],
    ),
    "manifest alone": Record(lambda world: world.dst / "reshard-manifest.json", lambda world: [["status", world.dst]]),
    "plan": Record(
        plan_of,
        lambda world: [
            ["status", world.dst],
            ["resume", world.dst],
            world.words(),
            world.words(0, command="by-rank"),
        ],
    ),
}


@pytest.fixture(params=RECORDS)
def record(request: pytest.FixtureRequest, world: World) -> tuple[Record, Path]:
    world.save(tensors())
    world.convert("--checksum", "crc32")
    actual = RECORDS[request.param]
    path = actual.find(world)
    if request.param == "manifest alone":
        plan_of(world).unlink()
    return actual, path


def read(world: World, record: Record) -> None:
    for words in record.uses(world):
        with within(5):
            result = reshard(*words)
        assert "internal error" not in result.err, (words, result.err)
        assert len(result.err.splitlines()) < 10
        assert len(result.err) < 5000


WRONG: list[Any] = [
    None, True, -1, 0, 10**9, 2**63, 2**64, 1.5, "", "x", "a\0b", "../../etc/passwd", "/dev/zero", "x" * 5000, "\ud800",
    [], [[]], [None], {}, {"": 0}, ["a\0b"],
]  # fmt: skip


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of everything that a JSON document holds; of a list only the first entry's."""
    if path:
        yield path
    if isinstance(content, dict):
        for key, value in content.items():
            yield from leaves(value, (*path, key))
    elif isinstance(content, list) and content:
        yield from leaves(content[0], (*path, 0))


def with_value(content: Any, path: tuple[Any, ...], value: Any | None, remove: bool = False) -> Any:
    created = copy.deepcopy(content)
    place = created
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return created


@pytest.mark.deep
def test_every_value_of_a_record_is_checked(world: World, record: tuple[Record, Path]) -> None:
    use, path = record
    content = json.loads(path.read_text())
    for number, place in enumerate(leaves(content)):
        # Each kind of wrong value comes to each kind of place in a long run; here each value, and each place, has some.
        for wrong in WRONG if LONG else WRONG[number % 4 :: 4]:
            path.write_text(json.dumps(with_value(content, place, wrong)))
            read(world, use)
        path.write_text(json.dumps(with_value(content, place, None, remove=True)))
        read(world, use)
