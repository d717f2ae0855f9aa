"""reshard.Conversion: the bytes of the command line, and errors with names of parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import pytest

import reshard
from reshard.cli.main import cli
from reshard.convert import Options
from reshard.errors import CheckpointError, ReshardError, TargetError, UsageError, VerificationError
from reshard.text.in_python import in_python
from tests.corpus import ROOT
from tests.running import done

DEMO = ROOT / "fixtures" / "demo"
SRC = DEMO / "src_checkpoints"
STRATEGIES: dict[str, Any] = {"src_strategy": DEMO / "src_strategy.ckpt", "dst_strategy": DEMO / "dst_strategy.ckpt"}
QWEN3 = ROOT / "fixtures" / "models" / "qwen3"
# Options for output and for shares of the work; methods; the endpoint comes from the environment here.
ONLY_COMMAND = {"scheduler", "verify", "dry_run", "progress", "quiet", "verbose", "debug", "as_json", "endpoint_url"}


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory but records, by its name."""
    files = (path for path in directory.rglob("*") if path.is_file() and ".reshard" not in path.parts)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files if "reshard-" not in path.name}


@pytest.mark.parametrize(
    "arguments",
    [
        STRATEGIES,
        {**STRATEGIES, "include": ["head*", "*.bias"], "format": "safetensors"},
        {"src_strategy": STRATEGIES["src_strategy"], "to": "unified", "max_shard_size": "300KB"},
        {"src_strategy": STRATEGIES["src_strategy"], "dst_strategy": "same", "to": "checkpoint2"},
        {"src_strategy": STRATEGIES["src_strategy"], "to": "hf-sharded", "shards": 3},
        {**STRATEGIES, "dst_strategy": "same", "cast": "BFloat16", "rename": "head.*=tail.*"},
    ],
)
def test_a_conversion_writes_the_bytes_of_the_command_line(tmp_path: Path, arguments: dict[str, Any]) -> None:
    words = []
    for name, value in arguments.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name.replace('_', '-')}", one]
    done("convert", SRC, tmp_path / "typed", *words)
    conversion = reshard.Conversion(SRC, tmp_path / "called", **arguments)
    planned = conversion.plan()
    assert not (tmp_path / "called").exists()
    summary = conversion.convert(verify=True)
    assert contents(tmp_path / "called") == contents(tmp_path / "typed")
    assert summary.manifest and planned.summary.bytes_written == summary.bytes_written
    conversion.verify()


def test_a_conversion_with_names_packs_tensors(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"names": "qwen3,gate_up=interleaved,qkv=grouped"}
    reshard.Conversion(QWEN3, tmp_path / "ranks", dst_strategy="none", **rules).convert(verify=True)
    back = reshard.Conversion(
        tmp_path / "ranks",
        tmp_path / "back",
        src_strategy="none",
        to="hf",
        config=QWEN3 / "config.json",
        **rules,
    )
    back.convert(verify=True)
    with reshard.open(QWEN3) as first, reshard.open(tmp_path / "back") as second:
        assert set(first) == set(second)
        assert all(first[name][...].tobytes() == second[name][...].tobytes() for name in first)


def test_an_interrupted_conversion_continues(tmp_path: Path) -> None:
    first = reshard.Conversion(SRC, tmp_path, **STRATEGIES, ranks=[0, 2]).convert()
    rest = reshard.Conversion(SRC, tmp_path, **STRATEGIES).convert()
    assert (first.ranks, first.manifest, rest.ranks, rest.done_before) == ([0, 2], None, [1, 3], [0, 2])


def test_verify_uses_records_and_raises_differences(tmp_path: Path) -> None:
    reshard.Conversion(SRC, tmp_path, **STRATEGIES, cast="BFloat16").convert()
    recorded = reshard.Conversion(SRC, tmp_path)
    recorded.verify()
    with open(tmp_path / "rank_2" / "checkpoint_2.ckpt", "r+b") as file:
        file.seek(-100, 2)
        file.write(b"\xff" * 4)
    with pytest.raises(VerificationError, match="rank 2") as caught:
        recorded.verify()
    assert caught.value.status == 4 and len(caught.value.differences) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, UsageError, "src_strategy and dst_strategy are missing.*src_strategy=FILE"),
        ({**STRATEGIES, "to": "torch"}, UsageError, "to='torch' is none of 'ranks'"),
        ({**STRATEGIES, "reverse": True}, UsageError, "reverse=True needs names"),
        ({**STRATEGIES, "shard": (4, 4)}, UsageError, "shard"),
        ({**STRATEGIES, "shards": 3, "to": "dcp"}, UsageError, "shards and dst_strategy both lay out the target"),
        ({"src_strategy": "none", "shards": 3, "to": "unified"}, UsageError, "shards goes with"),
        ({"src_strategy": "none", "shards": 0, "to": "dcp"}, UsageError, "number of shards must be 1 to"),
        ({**STRATEGIES, "step": "9_9"}, CheckpointError, "no files of step 9_9"),
        (
            {"src_strategy": STRATEGIES["dst_strategy"], "dst_strategy": STRATEGIES["src_strategy"]},
            CheckpointError,
            r"the files fit dst_strategy \(.*are the two swapped",
        ),
    ],
)
def test_errors_name_python_parameters(
    tmp_path: Path, arguments: dict[str, Any], error: type[ReshardError], words: str
) -> None:
    with pytest.raises(error) as caught:
        reshard.Conversion(SRC, tmp_path / "out", **arguments).convert()
    text = str(caught.value)
    assert "--" not in text
    assert caught.match(f"(?s){words}")
    assert not (tmp_path / "out").exists()


def test_a_printed_plan_fits_a_screen(tmp_path: Path) -> None:
    planned = reshard.Conversion(SRC, tmp_path / "out", **STRATEGIES).plan()
    assert "bytes_written=" in repr(planned) and len(repr(planned)) < 1500


def test_another_conversion_in_the_target_is_refused(tmp_path: Path) -> None:
    reshard.Conversion(SRC, tmp_path, **STRATEGIES).convert()
    with pytest.raises(TargetError, match="overwrite=True"):
        reshard.Conversion(SRC, tmp_path, **STRATEGIES, include="head*").convert()
    with pytest.raises(UsageError, match="verify=True"):
        unified = reshard.Conversion(SRC, tmp_path / "u", STRATEGIES["src_strategy"], to="unified", ranks=[0])
        unified.convert(verify=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add --src-strategy FILE or DIR", "add src_strategy=FILE or DIR"),
        ("exchange --src-strategy and --dst-strategy", "exchange src_strategy and dst_strategy"),
        ("with --crc never; or --overwrite", "with crc='never'; or overwrite=True"),
        ("give --step 3_10, --max-memory 80M", "give step='3_10', max_memory=80 << 20"),
        ("--exclude 'a*' matches nothing", "exclude='a*' matches nothing"),
        ("with --no-fallback and --optimizer keep", "with fallback=False and optimizer=True"),
        ("type: reshard verify out --src SRC\nadd --verify", "type: reshard verify out --src SRC\nadd verify=True"),
        ("`reshard convert A B --to unified` or --to unified", "`reshard convert A B --to unified` or to='unified'"),
    ],
)
def test_messages_spell_options_as_python_parameters(text: str, expected: str) -> None:
    assert in_python(text) == expected


def test_a_conversion_has_the_parameters_of_the_command() -> None:
    command = cli.get_command(click.Context(cli), "convert")
    assert command is not None
    options = {str(option.name) for option in command.params} - ONLY_COMMAND
    names = {"fallback" if name == "no_fallback" else name for name in options}
    assert {field.name for field in dataclasses.fields(reshard.Conversion)} == names


# Attributes of a run that no option sets by its name.
NO_OPTION = {"adding", "share", "part"}


@pytest.mark.parametrize("name", ["convert", "by-rank", "plan", "merge-lora", "recover"])
def test_every_attribute_of_a_run_is_an_option_of_commands_that_write(name: str) -> None:
    """Options are copied by name, so another name would leave an attribute at its default."""
    attributes = {*Options._fields} - NO_OPTION
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    options = {str(parameter.name) for parameter in command.params}
    assert attributes - options == ({"verify"} if name == "recover" else {"lost_only"})


def test_every_attribute_of_a_run_is_a_parameter_of_conversions() -> None:
    attributes = {*Options._fields} - NO_OPTION
    parameters = {field.name for field in dataclasses.fields(reshard.Conversion)}
    assert attributes - parameters == {"dry_run", "verify", "lost_only"}
