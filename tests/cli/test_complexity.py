"""Costs of commands with large strategies and many patterns, counted; inputs over the limits are refused."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from reshard.layout import Cell, Layout, grid
from reshard.plan.replicas import choose
from reshard.text.globs import Glob
from tests.bounds import refused, within
from tests.running import done
from tests.small import COPIED, World, tensors
from tests.strategy_writing import layout, protobuf
from tests.trees import cut_ranks, same_ranks

FULL = tensors()


class Counted(tuple[int, ...]):
    """Ranks that count how often they are looked through."""

    looks = 0

    def __iter__(self) -> Iterator[int]:
        Counted.looks += 1
        return super().__iter__()

    def __contains__(self, rank: object) -> bool:
        Counted.looks += 1
        return super().__contains__(rank)


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("count", [100, 1000])
def test_choosing_ranks_visits_each_need_a_few_times(count: int, replicas: int) -> None:
    needs = [Counted(range(number * replicas, (number + 1) * replicas)) for number in range(count)]
    # Some needs that ranks have in common.
    needs += [Counted((number, number + 1)) for number in range(0, count * replicas - 1, 2)]
    Counted.looks = 0
    choose(needs, 3)
    assert Counted.looks <= 12 * len(needs)


def write(path: Path, *args: Any) -> Path:
    path.write_bytes(protobuf(*args))
    return path


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the cells of target slices that are made, and the edges of dimensions."""
    counts: Counter[str] = Counter()
    edges = Layout.boundaries

    def counted(*parts: Any) -> Cell:
        counts["cells"] += 1
        return Cell(*parts)

    def counted_edges(self: Layout, dimension: int, size: int) -> tuple[int, ...]:
        created = edges(self, dimension, size)
        counts["edges"] += len(created)
        return created

    monkeypatch.setattr(grid, "Cell", counted)
    monkeypatch.setattr(Layout, "boundaries", counted_edges)
    return counts


@pytest.mark.parametrize("slices", [1000])
def test_strategy_show_of_uneven_slices_costs_as_much_as_the_slices(
    tmp_path: Path, cells: Counter[str], slices: int
) -> None:
    sizes = [1 + number % 3 for number in range(slices)]
    offsets = [0, *itertools.accumulate(sizes[:-1])]
    path = write(tmp_path / "s.ckpt", {"t": layout([slices], [0, -1], sizes=sizes, offsets=offsets)})
    with within(60):
        done("strategy", "show", path)
        shown = done("strategy", "show", path, "t", "--json").json["stages"][0]
        assert len(shown["slices"]) == slices
        ranks = done("rank-list", 5, "--src-strategy", path, "--dst-strategy", path).out
        assert ranks == "5\n"
        done("rank-list", 0, "--src-strategy", path, "--dst-strategy", "none")
        done("strategy", "diff", path, path)
    assert cells["edges"] <= 100 * slices


def test_rank_lists_of_thousands_of_ranks_contain_all_needed_ranks(tmp_path: Path, cells: Counter[str]) -> None:
    path = write(tmp_path / "s.ckpt", {"w": layout([16384], [0, -1])})
    with within(60):
        report = done("rank-list", 0, "--src-strategy", path, "--dst-strategy", "none", "--json").json
    assert report["ranks"] == list(range(16384))
    assert cells["cells"] == 16384


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
