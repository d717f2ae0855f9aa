"""--include and --exclude without a match: a warning with similar names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import Argument, fails, reshard
from tests.small import COPIED, World, without
from tests.trees import cut_ranks, layout, single, value, write_tree

WEIGHTS = [
    *(f"model.layers.{number}.attention.{kind}.weight" for number in range(3) for kind in ("wq", "wo")),
    *(f"model.layers.{number}.Norm.gamma" for number in range(3)),
    "lm_head.weight",
]
STATE = [prefix + name for prefix in ("adam_m.", "adam_v.") for name in WEIGHTS]
LISTED = [*WEIGHTS, *STATE]


@pytest.fixture
def adam(tmp_path: Path) -> World:
    rows, whole = layout([2], [0]), layout([1], [-1])
    world = World(tmp_path, single(dict.fromkeys(LISTED, rows)), single(dict.fromkeys(LISTED, whole)))
    write_tree(world.src, cut_ranks(world.source, {name: value(name, (4,)) for name in LISTED}, COPIED))
    return world


def warnings(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("global-step", "global_step"),
        ("LM_HEAD.weights", "lm_head.weight"),
        ("model.layers.0.attention.wq", "model.layers.0.attention.wq.weight"),
    ],
)
def test_a_pattern_without_a_match_suggests_similar_names(adam: World, typed: str, suggested: str) -> None:
    (warning,) = warnings(adam.convert("-n", "-q", "--exclude", typed).err)
    head, _, advice = warning.partition("; did you mean ")
    assert head == f"warning: no parameter or value of the checkpoint matches --exclude '{typed}'"
    assert f"'{suggested}'" in advice


@pytest.mark.parametrize("typed", ["backbone.*", "lr", "["])
def test_without_similar_names_all_names_are_listed_in_short(adam: World, typed: str) -> None:
    (warning,) = warnings(adam.convert("-n", "-q", f"--exclude={typed}").err)
    assert "'{,adam_m.,adam_v.}model.layers.{0-2}.attention.wq.weight' (9)" in warning
    assert len(warning) < 800


def test_each_pattern_is_checked_separately(adam: World) -> None:
    filters = ("--include", "model.*", "--include", "lm-head.*", "--exclude", "adam", "--exclude", "eve")
    result = adam.convert("-n", "-q", *filters)
    assert [line.split("; ")[0] for line in warnings(result.err)] == [
        "warning: no parameter or value of the checkpoint matches --include 'lm-head.*'",
        "warning: no parameter or value of the checkpoint matches --exclude 'adam', 'eve'",
    ]
    assert not warnings(adam.convert("-n", "-q", "--exclude", "adam_*", "--exclude", "global_step").err)


def test_an_empty_selection_is_an_error_with_similar_names(adam: World) -> None:
    texts = ("select no parameter", "did you mean 'lm_head.weight'")
    adam.refuses(3, *texts, options=("--include", "lm-head.weight"))


def test_a_pattern_that_matches_only_a_strategy_gives_no_warning(adam: World) -> None:
    """Weights alone were saved; scripts leave optimizer state out all the same."""
    weights = without(adam.source, *STATE)
    write_tree(adam.src, cut_ranks(weights, {name: value(name, (4,)) for name in WEIGHTS}, COPIED))
    assert not warnings(adam.convert("-n", "-q", "--exclude", "adam_m.*").err)


def test_every_command_with_filters_warns_of_unmatched_patterns(adam: World) -> None:
    strategies: list[Argument] = ["--src-strategy", adam.old, "--dst-strategy", adam.new]
    other = adam.root / "other"
    commands: list[list[Argument]] = [
        ["plan", adam.src, other, *strategies],
        ["by-rank", 0, adam.src, other, "-n", *strategies],
        ["fingerprint", adam.src, "--strategy", adam.old],
        ["verify", adam.dst, "--src", adam.src, *strategies],
        ["verify", adam.src, "--replicas", "--strategy", adam.old],
        ["strategy", "check", adam.old, adam.src],
    ]
    adam.convert("--include", "*weight")
    for words in commands:
        result = reshard(*words, "--include", "*weight", "--exclude", "adam")
        # Nothing has replicas here.
        assert result.status == (2 if "--replicas" in words else 0)
        assert sum("matches --exclude 'adam';" in line for line in warnings(result.err)) == 1


def test_unmatched_exclusions_of_optimizer_state_give_no_warning(tmp_path: Path) -> None:
    """As in scripts for any checkpoint; but the source contains state of another optimizer."""
    weights = single(dict.fromkeys(WEIGHTS, layout([2], [0])))
    world = World(tmp_path, weights, single(dict.fromkeys(WEIGHTS, layout([1], [-1]))))
    write_tree(world.src, cut_ranks(weights, {name: value(name, (4,)) for name in WEIGHTS}, COPIED))
    result = world.convert("-n", "--exclude", "adam_*", "--exclude", "accu_grads.*")
    assert not result.err


def test_filters_without_a_comparison_are_wrong_usage(adam: World) -> None:
    adam.convert("--checksum", "crc32")
    fails(2, "verify", adam.dst, "--exclude", "adam_*", texts=["--include and --exclude need --src or --replicas"])
