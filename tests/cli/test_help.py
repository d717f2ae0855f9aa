"""Help, and hints after mistyped commands and options."""

from __future__ import annotations

import re

import click
import pytest

from docs.tools.commands import walk
from tests.running import done, fails
from tests.small import COPIED, World, tensors
from tests.trees import same_ranks, scalar, write_checkpoint

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


@pytest.mark.parametrize("group", [[], ["group-info"], ["strategy"], ["names"]], ids=" ".join)
def test_command_lists_contain_whole_sentences(group: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listing = done(*group, "--help").out.split("\nCommands:\n")[1]
    assert "..." not in listing


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
        (["transform-dir", "a", "b", "--src_strateg", "x"], "--src_strateg. Did you mean --src-strategy"),
        (["transform-dir", "a", "b", "--format", "safetensor"], "Did you mean safetensors?"),
        (["transform-dir", "a", "b", "--fail-on", "nan"], "It is an option of stats"),
        (["rank-list", "1", "--available", "1"], "--without-ranks"),
        (["--max-memory", "1G", "transform-dir"], "It is an option of convert"),
        (["transform-dir", "a", "b", "--world_size=8"], "No such option: --world_size. Not needed"),
        (["verify", "a", "--strict"], "No such option: --strict. Every difference gives status 4."),
        (["strategy", "check", "a", "b", "--strict"], "No such option: --strict. Every contradiction gives status 4."),
        (["transform-dir", "a", "b", "--rank_id", "0"], "--shard I/N"),
        (["transform-dir", "a", "b", "--transform_process_num", "2"], "--jobs N"),
        (["transform-dir", "a", "b", "--transform_rank", "2"], "Did you mean --ranks?"),
        (["stats", "a", "--svg", "a.svg"], "view SRC --stats"),
        (["strategy", "derive", "a", "b", "--assume", "growth"], "State it in a file for --rules"),
        (["strategy", "rules", "a", "--sizes", "dp=2,mp=4"], "derive SRC OUT --src-sizes"),
        (["merge-lora", "a", "b", "c", "--cast=BFloat16"], "Merge first, then cast: convert OUT OTHER --cast"),
        (["merge-lora", "a", "b", "c", "--names", "qwen3"], "Merge first"),
    ],
)  # fmt: skip
def test_unknown_commands_and_options_get_a_suggestion(words: list[str], texts: str) -> None:
    fails(2, *words, texts=[texts])


@pytest.mark.parametrize("source", ["--src_checkpoint", "--src-checkpoint", "--src_checkpoints_dir"])
@pytest.mark.parametrize("target", ["--dst_checkpoint", "--dst-checkpoints-dir", "--dst_checkpoint_dir"])
def test_arguments_may_be_typed_as_options_of_mindspores_scripts(world: World, source: str, target: str) -> None:
    world.save(FULL)
    done("transform-dir", f"{target}={world.dst}", source, world.src, "--src_strategy_file", world.old,
         "--dst_strategy_dir", world.new)  # fmt: skip
    same_ranks(world.found(), world.expected(FULL))


def test_one_argument_may_be_typed_as_an_option(world: World) -> None:
    world.save(FULL)
    strategies = ("--src-strategy", world.old, "--dst-strategy", world.new)
    done("by-rank", "--transform_rank", 1, world.src, world.dst, *strategies)
    done("by-rank", 0, world.dst, "--src_checkpoint", world.src, *strategies)
    same_ranks(world.found(), world.expected(FULL))


def test_an_argument_given_twice_is_wrong_usage(world: World) -> None:
    world.save(FULL)
    words = ("transform-dir", world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", world.new)
    fails(2, *words, "--src_checkpoint", world.src, texts=["SRC is given by option"])
    assert not world.dst.exists()


def test_two_hyphens_end_the_options(world: World) -> None:
    write_checkpoint(world.root / "full.ckpt", {**FULL, **COPIED})
    fails(3, "transform-dir", "--src-strategy", "none", "--dst-strategy", "none", "--", "--src_checkpoint", world.dst,
          texts=["--src_checkpoint: does not exist"])  # fmt: skip


MEANT = [("transform", "convert"), ("show", "strategy show"), ("compare", "diff"), ("plna", "plan")]


@pytest.mark.parametrize(("typed", "expected"), MEANT)
def test_a_command_name_of_another_tool_suggests_ours(typed: str, expected: str) -> None:
    fails(2, typed, texts=[f"Did you mean {expected}"])


@pytest.mark.parametrize("path", [(), *COMMANDS, ("strategy",)], ids=" ".join)
def test_the_help_command_equals_the_help_option(path: tuple[str, ...]) -> None:
    assert done("help", *path).out == done(*path, "--help").out


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["verfiy"], "Did you mean verify?"),
        (["strategy", "shwo"], "Did you mean show?"),
        (["verify", "out"], "reshard verify has no commands of its own: out"),
    ],
)  # fmt: skip
def test_help_of_an_unknown_command_is_wrong_usage(words: list[str], texts: str) -> None:
    fails(2, "help", *words, texts=[texts])


def test_the_version_has_a_short_option() -> None:
    assert done("-V").out == done("--version").out


def test_short_options_equal_long_options(world: World) -> None:
    world.save(FULL)
    planned = world.convert("-n", "-j", 1, "--json").json
    assert planned["dry_run"] and planned["threads"] == 1 and not world.dst.exists()
    assert world.convert("-q").err == ""


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_may_stand_before_the_command(world: World, flag: str) -> None:
    world.save(FULL, copied={f"value_{letter}": scalar(1) for letter in "abcdefghi"})
    assert "value_a" not in world.convert("-n").out
    assert "9 copied unchanged: 'value_a', 'value_b'" in done(flag, *world.words("-n")).out
    # Shells without the flag behave as before.
    listing = ("rank-list", 0, "--src-strategy", world.old, "--dst-strategy", world.new)
    assert done(flag, *listing) == done(*listing)


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_may_stand_before_the_command(world: World, flag: str) -> None:
    world.save(FULL)
    assert done(flag, *world.words()).err == ""
    same_ranks(world.found(), world.expected(FULL))


def test_debug_may_stand_before_the_command(world: World) -> None:
    assert "Traceback" in fails(3, "--debug", "inspect", world.root / "nothing").err
