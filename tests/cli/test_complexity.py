"""Costs of commands with large strategies and many patterns, counted; inputs over the limits are refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from reshard.text.globs import Glob
from tests.bounds import refused, within
from tests.running import done
from tests.small import COPIED, World, tensors
from tests.strategy_writing import layout, protobuf
from tests.trees import cut_ranks, same_ranks

FULL = tensors()


def write(path: Path, *args: Any) -> Path:
    path.write_bytes(protobuf(*args))
    return path


def test_rank_lists_of_thousands_of_ranks_contain_all_needed_ranks(tmp_path: Path) -> None:
    path = write(tmp_path / "s.ckpt", {"w": layout([16384], [0, -1])})
    with within(60):
        report = done("rank-list", 0, "--src-strategy", path, "--dst-strategy", "none", "--json").json
    assert report["ranks"] == list(range(16384))


# Patterns


def test_stars_leave_the_last_numbers_to_rank() -> None:
    def numbers(pattern: str, text: str) -> Any:
        spans = Glob(pattern, "{rank}").numbers(text)
        return None if spans is None else [text[start:stop] for start, stop in spans]

    assert numbers("rank_{rank}", "rank_12") == ["12"]
    assert numbers("*{rank}*", "a1b22c") == ["22"]
    assert numbers("*{rank}*{rank}.x", "1_2_3.x") == ["2", "3"]
    assert numbers("{rank}*", "12") == ["12"]
    assert numbers("*2{rank}", "x12") is None
    assert numbers("1{rank}", "12") is None
    # The first b is not the one before the number.
    assert numbers("a*b{rank}[!0]", "abxb1c") == ["1"]


@pytest.mark.parametrize("pattern", ["[^a]*", "a[^]b]", "x[^"])
def test_a_set_with_a_circumflex_is_wrong_usage(world: World, pattern: str) -> None:
    world.save(FULL)
    if pattern == "x[^":
        # No set.
        assert Glob(pattern).matches(pattern)
    else:
        refused(2, *world.words("--exclude", pattern), texts=[pattern, "[!"])
        refused(2, "inspect", f"{world.src}/rank_{{rank}}/{pattern}", texts=[pattern, "[!"])


def test_every_matching_pattern_is_reported(world: World) -> None:
    world.save(FULL)
    done(*world.words(*(word for name in ("w", "v*", "?", "[x-z]*") for word in ("--exclude", name))))
    preserved = [name for name in FULL if not any(fnmatchcase(name, pattern) for pattern in ("w", "v*", "?", "[x-z]*"))]
    expected = cut_ranks(world.target, FULL, COPIED)
    same_ranks(
        world.found(),
        {
            rank: {n: contents[n] for n in contents if n in preserved or n in COPIED}
            for rank, contents in expected.items()
        },
    )
