"""Help, and hints after mistyped commands and options."""

from __future__ import annotations

import re

import click
import pytest

from docs.tools.commands import walk
from tests.running import done, fails
from tests.small import COPIED, World, tensors
from tests.trees import write_checkpoint

FULL = tensors()


COMMANDS = {tuple(name.split()[1:]): command for name, command, _ in walk()}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_80_columns_and_ends_with_examples_of_the_command(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = done(*path, "--help").out
    examples = shown.split("\nExamples:\n")[1]
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert f"\n  reshard {' '.join(path)} " in re.sub(r"\n +", "\n  ", f"\n{examples}")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_examples_in_help_use_existing_options(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    names = {name for param in command.params for name in param.opts}
    assert set(re.findall(r"(?<!\S)--[a-z-]+", command.epilog or "")) <= names


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_has_a_group_and_help_and_shows_its_default(path: tuple[str, ...]) -> None:
    shown = done(*path, "--help").out
    assert "\nOptions:\n" not in shown
    for param in COMMANDS[path].params:
        if isinstance(param, click.Option):
            assert param.help, param.opts
            assert param.is_flag or not isinstance(param.default, (str, int)) or param.show_default, param.opts


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["transfrom-dir", "a", "b"], "Did you mean transform-dir"),
        (["transform_al", "a", "b"], "transform-all"),
        (["strategy", "shwo", "a"], "Did you mean show?"),
        (["transform-dir", "a", "b", "--src_strateg", "x"], "--src-strategy"),
        (["transform-dir", "a", "b", "--world_size=8"], "--shard I/N"),
        (["transform-dir", "a", "b", "--rank_id", "0"], "--shard I/N"),
        (["transform-dir", "a", "b", "--transform_process_num", "2"], "--jobs N"),
        (["transform-dir", "a", "b", "--transform_rank", "2"], "RANK is the first argument"),
        (["transform-dir", "--src_checkpoint", "a", "b"], "reshard convert SRC DST"),
    ],
)  # fmt: skip
def test_unknown_commands_and_options_get_a_suggestion(words: list[str], texts: str) -> None:
    fails(2, *words, texts=[texts])


def test_two_hyphens_end_the_options(world: World) -> None:
    write_checkpoint(world.root / "full.ckpt", {**FULL, **COPIED})
    fails(3, "transform-dir", "--src-strategy", "none", "--dst-strategy", "none", "--", "--src_checkpoint", world.dst,
          texts=["--src_checkpoint: does not exist"])  # fmt: skip


def test_short_options_equal_long_options(world: World) -> None:
    world.save(FULL)
    planned = world.convert("-n", "-j", 1, "--json").json
    assert planned["dry_run"] and planned["threads"] == 1 and not world.dst.exists()
    assert world.convert("-q").err == ""
