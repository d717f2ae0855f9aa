"""Runs of one conversion that ask for more, or in another order, than the one that began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.records import Ledger
from tests.running import done, fails, reshard
from tests.small import World, tensors
from tests.trees import same_ranks

FULL = tensors()


def test_patterns_in_another_order_are_the_same_conversion(world: World) -> None:
    world.save(FULL)
    world.by_rank(0, "--exclude", "w", "--exclude", "x*")
    world.by_rank(1, "--exclude", "x*", "--exclude", "w")
    assert done("status", world.dst, "--json").json["complete"]


def test_a_failed_run_for_more_than_the_first_names_its_own_command(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(FULL)
    world.convert("--ranks", "0")

    def full(self: object, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("reshard.records.ledger.Ledger.add_done", full)
    result = reshard(*world.words())
    assert result.status == 1 and "reshard resume" not in result.err


def test_an_overwrite_killed_among_its_last_removals_is_continued_by_the_same_command(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reshard.records import ledger

    world.save(FULL)
    for kept in range(1, 9):
        world.convert("--prefix", "a", *(["--overwrite"] if kept > 1 else []))
        removed = 0

        def stop(path: str, kept: int = kept) -> None:
            nonlocal removed
            if ".reshard/" in path:
                removed += 1
                if removed == kept:
                    raise KeyboardInterrupt
            Path(path).unlink(missing_ok=True)

        with monkeypatch.context() as patch:
            patch.setattr(ledger, "remove_file", stop)
            reshard(*world.words("--prefix", "b", "--overwrite"))
        world.convert("--prefix", "b", "--overwrite")
        assert done("status", world.dst, "--json").json["complete"]


def test_sizes_are_shown_as_they_are_typed(world: World) -> None:
    source = world.root / "model"
    world.save(FULL)
    done("convert", world.src, source, "--src-strategy", world.old, "--to", "unified", "--max-shard-size", "1KiB")
    fails(
        3, "convert", world.src, source, "--src-strategy", world.old, "--to", "unified", "--max-shard-size", "200B",
        texts=["--max-shard-size", "1024B"],
    )  # fmt: skip


def test_a_run_adds_nothing_to_targets_that_another_replaces_one_by_one_from_another_source(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(FULL)
    world.by_rank(0)
    words = world.words(1, command="by-rank")
    world.src = world.root / "other"
    world.save(tensors("other "))
    plain = Ledger.add_done

    # Also between its last look at the plan and its record.
    def late(self: Ledger, record: Any, flush: bool) -> None:
        monkeypatch.setattr(Ledger, "add_done", plain)
        done(*world.words(0, "--overwrite", command="by-rank"), subprocess_=True)
        plain(self, record, flush)

    monkeypatch.setattr(Ledger, "add_done", late)
    fails(3, *words, texts=["source files of ranks 0-3 differ"])
    monkeypatch.undo()
    world.by_rank(1)
    same_ranks(world.found(), world.expected(tensors("other ")))
