"""--without-ranks: ranks whose files exist and count as lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reshard.errors import UsageError
from tests.asking import conversion_of, open_checkpoint
from tests.corpus import ROOT
from tests.running import Argument, done, fails, warns
from tests.small import World, tensors
from tests.trees import Value, cut_ranks, same_ranks, subset, write_tree

FULL = tensors(names=["w", "v"])
NEVER = ("--check-replicas", "never")


@pytest.fixture
def wrong(plain: World) -> World:
    """Rank 0 holds other values than its replica, rank 2."""
    plain.save(FULL)
    write_tree(plain.src, {0: cut_ranks(plain.source, tensors("wrong", ["w", "v"]))[0]}, "rank_{rank}/net-1_10.ckpt")
    return plain


def expected(world: World) -> dict[int, dict[str, Value]]:
    return cut_ranks(world.target, FULL)


def written(world: World) -> dict[int, dict[str, Value]]:
    return {rank: subset(contents, ["w", "v"]) for rank, contents in world.found().items()}


def test_replicas_of_ranks_that_are_left_out_are_read(wrong: World) -> None:
    result = wrong.convert("--without-ranks", "0", "--verify", "--json")
    same_ranks(written(wrong), expected(wrong))
    assert result.json["source_ranks"] == [1, 2, 3] and result.json["differences"] == []
    assert done("rank-list", 0, *wrong.words()[3:], "--without-ranks", "0").out == "1 2\n"


def test_a_slice_only_on_ranks_that_are_left_out_is_lost(wrong: World) -> None:
    wrong.refuses(3, "ranks 0,2", "--without-ranks", options=("--without-ranks", "0,2"))


def test_replicas_stand_in_for_ranks_that_are_left_out_and_a_note_names_them(plain: World) -> None:
    plain.save(tensors(names=["v"]))
    words = ["plan", *plain.words()[1:], "--allow-missing", "w", "--without-ranks", "0"]
    result = done(*words)
    warns(result, "rank 0", "replicas")
    (line,) = [line for line in result.out.splitlines() if "replicas replace" in line]
    assert "rank 0" in line and "left out" in line


def test_ranks_that_do_not_exist_cannot_be_left_out(wrong: World) -> None:
    wrong.refuses(2, "--without-ranks", "rank 4", options=("--without-ranks", "0,4"))
    source: list[Argument] = ["convert", ROOT / "fixtures/models/qwen3", wrong.dst, "--to", "huggingface"]
    fails(2, *source, "--without-ranks", "0", texts=["--without-ranks"])


@pytest.mark.parametrize(("first", "second"), [(["0"], []), ([], ["0"]), (["0"], ["2"])])
def test_runs_that_leave_out_different_ranks_do_not_share_a_directory(
    wrong: World, first: list[str], second: list[str]
) -> None:
    def options(ranks: list[str]) -> list[str]:
        return [*NEVER, *(["--without-ranks", *ranks] if ranks else [])]

    wrong.by_rank(0, *options(first))
    here, there = (ranks[0] if ranks else "none" for ranks in (second, first))
    texts = [f"--without-ranks ({there} there, {here} here)"]
    fails(3, *wrong.words(1, *options(second), command="by-rank"), texts=texts)
    wrong.by_rank(1, *options(first))
    manifest = json.loads((wrong.dst / "reshard-manifest.json").read_bytes())
    assert manifest["conversion"]["asked"]["source"].get("without_ranks", []) == [*map(int, first)]


def test_resume_and_verify_leave_out_the_recorded_ranks(wrong: World) -> None:
    wrong.by_rank(0, "--without-ranks", "0")
    done("resume", wrong.dst)
    same_ranks(written(wrong), expected(wrong))
    done("verify", wrong.dst, "--src", wrong.src)


def test_tensors_are_opened_without_ranks(wrong: World) -> None:
    options: dict[str, Any] = {"src_strategy": wrong.old, "without_ranks": [0]}
    with open_checkpoint(wrong.src, **options) as checkpoint:
        assert {name: checkpoint[name][...].tobytes() for name in checkpoint if name in FULL} == {
            name: tensor.array.tobytes() for name, tensor in FULL.items()
        }
    conversion_of(wrong.src, wrong.dst, dst_strategy=wrong.new, **options).convert(verify=True)
    same_ranks(written(wrong), expected(wrong))
    with pytest.raises(UsageError, match="rank 9"):
        dict(open_checkpoint(wrong.src, src_strategy=wrong.old, without_ranks=[9]))
    ranks: Any
    for ranks in ("two", 2, [0.5]):
        with pytest.raises(UsageError, match=r"without_ranks=|list of ranks"):
            open_checkpoint(wrong.src, src_strategy=wrong.old, without_ranks=ranks)


def test_statistics_leave_out_ranks(wrong: World) -> None:
    words: list[Argument] = ["stats", wrong.src, "--strategy", wrong.old, "--include", "w", "--json"]
    right = done("stats", wrong.src, "--strategy", wrong.old, "--include", "w", "--json", "--without-ranks", "0").json
    assert done(*words).json != right
    wrong.save(FULL)
    assert done(*words).json == right
