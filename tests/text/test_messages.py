"""Messages about many parameters, and about parameters with strange names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference import Strategy
from tests.running import Argument, done, fails, reshard, terminal_output, warns
from tests.small import COPIED, SOURCE, World, tensors
from tests.trees import Value, cut_ranks, layout, scalar, single, value, write_tree

FULL = tensors()
ROWS, COLUMNS, WHOLE = layout([4], [0, -1]), layout([4], [-1, 0]), layout([1], [-1, -1])
LAYERS = [f"model.layers.{number}.{kind}.weight" for number in range(32) for kind in ("wq", "wo")]
STATES = [prefix + name for name in LAYERS for prefix in ("", "adam_m.", "adam_v.")]
# Ends with status 0 after any status of the command.
ON_TERMINAL = "import contextlib\nfrom reshard.cli.main import main\nwith contextlib.suppress(SystemExit): main()"
RED, YELLOW = "\033[31m", "\033[33m"


def model(created: dict[str, object], names: list[str]) -> Strategy:
    return single({name: dict(created) for name in names})


def big_world(root: Path) -> World:
    """192 parameters that the four source ranks share out by rows."""
    return World(root, model(ROWS, STATES), model(WHOLE, STATES))


def states() -> dict[str, Value]:
    return {name: value(name, (8, 4)) for name in STATES}


def test_lost_parameters_are_folded_unless_verbose(tmp_path: Path) -> None:
    world = big_world(tmp_path)
    world.save(states(), ranks=[0, 1, 3])
    result = world.refuses(3, "192 parameters", "'{,adam_m.,adam_v.}model.layers.{0-31}.wq.weight' (96)", "rank 2")
    assert len(result.err.splitlines()) <= 5 and max(map(len, result.err.splitlines())) < 300
    warns(fails(3, *world.words("-v")), *(f"'{name}'" for name in STATES))


def test_problems_that_differ_only_in_the_parameter_are_grouped(tmp_path: Path) -> None:
    world = big_world(tmp_path)
    ranks = cut_ranks(world.source, states(), COPIED)
    for name in STATES:
        ranks[1][name] = value(name, (3, 4))
    write_tree(world.src, ranks)
    result = world.refuses(
        3, f"does not fit the source strategy ({world.old})", "192 of 192 parameters", "[3, 4] on rank 1",
        "likewise, 192 in all: '{,adam_m.,adam_v.}model.layers.{0-31}.wo.weight' (96)",
    )  # fmt: skip
    assert len(result.err.splitlines()) <= 5
    assert result.err.count("pass the strategy that this checkpoint was saved with") == 1
    assert fails(3, *world.words("-v")).err.count("[3, 4] on rank 1") == 192


def test_values_that_differ_on_the_same_ranks_are_one_warning(world: World) -> None:
    values = {f"count_{number}": scalar(number) for number in range(12)}
    ranks = cut_ranks(SOURCE, FULL, values)
    for name in values:
        ranks[3][name] = scalar(99)
    write_tree(world.src, ranks)
    result = world.convert("--json")
    (warning,) = [line for line in result.err.splitlines() if line.startswith("warning")]
    assert "'count_{0-11}' (12) on rank 3 differ from rank 0's" in warning
    # Scripts get every name.
    (full,) = result.json["warnings"]
    assert all(f"'{name}'" in full for name in values)


def test_skipped_parameters_are_counted_and_listed_with_verbose(tmp_path: Path) -> None:
    world = World(tmp_path, model(ROWS, STATES), model(WHOLE, LAYERS))
    world.save(states())
    warns(world.convert("-n", "--json"))
    assert "; not in the target strategy, left out: optimizer state 128\n" in done(*world.words("-n")).out
    verbose = done(*world.words("-n", "-v")).out
    assert "128 left out, not in the target strategy: " in verbose and "'adam_v.model.layers.31.wq.weight'" in verbose
    assert len(world.convert("--json").json["left_out"]) == 128


@pytest.mark.parametrize("name", ["a\nreshard: error: all is lost", "tab\there", "bell\x07", "esc\x1b[31m"])
def test_control_characters_in_names_do_not_break_lines(tmp_path: Path, name: str) -> None:
    source = single({name: layout([2], [0, -1]), "w": layout([2], [0, -1])})
    world = World(tmp_path, source, single({name: layout([3], [0, -1]), "w": layout([3], [-1, -1])}))
    world.save({name: value("v", (4, 4)), "w": value("w", (4, 4))}, copied={})
    shown = name.encode("unicode_escape").decode()
    result = world.refuses(3, f"'{shown}'")
    assert name not in result.err and not any(line.startswith("reshard: error: all") for line in result.err.split("\n"))
    commands: list[list[Argument]] = [
        ["inspect", world.src],
        ["strategy", "show", world.old],
        ["fingerprint", world.src, "--strategy", world.old],
    ]
    for words in commands:
        out = done(*words).out
        assert shown in out and name not in out


@pytest.mark.deep
def test_errors_are_red_and_warnings_yellow_on_a_colour_terminal(world: World) -> None:
    world.save(FULL)
    wrong = [str(word) for word in world.words("--ranks", "9")]
    assert f"{RED}reshard: error: target rank 9" in terminal_output(100, ON_TERMINAL, *wrong)
    assert f"{RED}reshard: error: no such option" in terminal_output(100, ON_TERMINAL, *wrong, "--rank")
    assert "\033[" not in terminal_output(100, ON_TERMINAL, *wrong, NO_COLOR="1")
    assert "\033[" not in reshard(*wrong, subprocess_=True).err
    ranks = cut_ranks(SOURCE, FULL, COPIED)
    ranks[1]["global_step"] = scalar(7, shape=(1,))
    write_tree(world.src, ranks)
    assert f"{YELLOW}warning: 'global_step'" in terminal_output(100, ON_TERMINAL, *map(str, world.words()))


def test_similar_differences_are_grouped_unless_verbose(tmp_path: Path) -> None:
    world = big_world(tmp_path)
    world.save(states())
    world.convert()
    wrong = {name: value("wrong", (8, 4)) for name in LAYERS}
    write_tree(world.dst, cut_ranks(world.target, {**states(), **wrong}, COPIED), "rank_{rank}/checkpoint_{rank}.ckpt")
    words: list[Argument] = ["verify", world.dst, "--src", world.src, *world.words()[3:], "--quiet"]
    result = fails(4, *words, texts=["65 differences: this checkpoint must not be used"])
    assert "'model.layers.{0-31}.wo.weight' (32), 'model.layers.{0-31}.wq.weight' (32) on rank 0: differs" in result.out
    # Beside the contents, the names are in another order than was written.
    assert len(result.out.splitlines()) == 2
    lines = fails(4, *words, "-v").out.splitlines()
    assert len(lines) == 65 and "'model.layers.7.wo.weight' on rank 0: differs from the source" in lines
    assert len(fails(4, *words, "--json").json["differences"]) == 65
