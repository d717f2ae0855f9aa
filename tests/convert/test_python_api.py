"""reshard.Conversion: the bytes of the command line, and errors with names of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.errors import CheckpointError, ReshardError, TargetError, UsageError, VerificationError
from tests.asking import conversion_of, open_checkpoint
from tests.corpus import ROOT
from tests.running import done

DEMO = ROOT / "fixtures" / "demo"
SRC = DEMO / "src_checkpoints"
STRATEGIES: dict[str, Any] = {"src_strategy": DEMO / "src_strategy.ckpt", "dst_strategy": DEMO / "dst_strategy.ckpt"}
QWEN3 = ROOT / "fixtures" / "models" / "qwen3"


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory but records, by its name."""
    files = (path for path in directory.rglob("*") if path.is_file() and ".reshard" not in path.parts)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files if "reshard-" not in path.name}


@pytest.mark.deep
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
    conversion = conversion_of(SRC, tmp_path / "called", **arguments)
    planned = conversion.plan()
    assert not (tmp_path / "called").exists()
    summary = conversion.convert(verify=True)
    assert contents(tmp_path / "called") == contents(tmp_path / "typed")
    assert summary.manifest and planned.summary.bytes_written == summary.bytes_written
    conversion.verify()


def test_results_show_what_was_written(tmp_path: Path) -> None:
    conversion = conversion_of(SRC, tmp_path / "out", **STRATEGIES, max_memory="64M")
    planned, summary = conversion.plan(), conversion.convert()
    written = f"4 files, {summary.bytes_written} bytes, 0 warnings>"
    assert repr(summary) == f"<Summary of step 2_10: {written}"
    assert repr(planned) == f"<Planned: <Summary of step 2_10: dry run, {written}, {64 << 20} bytes of buffers>"


def test_a_file_holds_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    source, strategy = reshard.Source(str(SRC), str(STRATEGIES["src_strategy"])), str(STRATEGIES["dst_strategy"])
    target = reshard.Target(str(path), strategy, is_file=True)
    with pytest.raises(UsageError, match="4 ranks"):
        reshard.Conversion(source, target).convert()
    assert not path.exists()
    assert reshard.Conversion(source, target, files=(2,)).convert().files == [str(path)]
    conversion_of(SRC, tmp_path / "ranks", **STRATEGIES).convert()
    assert path.read_bytes() == (tmp_path / "ranks" / "rank_2" / "checkpoint_2.ckpt").read_bytes()


def test_a_conversion_with_names_packs_tensors(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"names": "qwen3,gate_up=interleaved,qkv=grouped"}
    conversion_of(QWEN3, tmp_path / "ranks", dst_strategy="none", **rules).convert(verify=True)
    back = conversion_of(
        tmp_path / "ranks",
        tmp_path / "back",
        src_strategy="none",
        to="hf",
        config=QWEN3 / "config.json",
        **rules,
    )
    back.convert(verify=True)
    with open_checkpoint(QWEN3) as first, open_checkpoint(tmp_path / "back") as second:
        assert set(first) == set(second)
        assert all(first[name][...].tobytes() == second[name][...].tobytes() for name in first)


def test_verify_uses_records_and_raises_differences(tmp_path: Path) -> None:
    conversion_of(SRC, tmp_path, **STRATEGIES, cast="BFloat16").convert()
    recorded = conversion_of(SRC, tmp_path)
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
        ({}, UsageError, "are missing.*Source.strategy .*Target.strategy "),
        ({**STRATEGIES, "to": "torch"}, UsageError, "form='torch' is none of 'ranks'"),
        ({**STRATEGIES, "reverse": True}, UsageError, "Edits.reverse .*Edits.names "),
        ({**STRATEGIES, "shard": (4, 4)}, UsageError, "shard"),
        ({**STRATEGIES, "shards": 3, "to": "dcp"}, UsageError, "Target.shards .*Target.strategy "),
        ({"src_strategy": "none", "shards": 3, "to": "unified"}, UsageError, "Target.shards "),
        ({"src_strategy": "none", "shards": 0, "to": "dcp"}, UsageError, "shards=0 is not between 1 and"),
        ({**STRATEGIES, "step": "9_9"}, CheckpointError, "no files of step 9_9"),
        (
            {"src_strategy": STRATEGIES["dst_strategy"], "dst_strategy": STRATEGIES["src_strategy"]},
            CheckpointError,
            "are the two swapped.*Target.strategy ",
        ),
    ],
)
def test_errors_name_the_fields_of_options(
    tmp_path: Path, arguments: dict[str, Any], error: type[ReshardError], words: str
) -> None:
    with pytest.raises(error) as caught:
        conversion_of(SRC, tmp_path / "out", **arguments).convert()
    assert caught.match(f"(?s){words}")
    assert not (tmp_path / "out").exists()


def test_another_conversion_in_the_target_is_refused(tmp_path: Path) -> None:
    conversion_of(SRC, tmp_path, **STRATEGIES).convert()
    with pytest.raises(TargetError, match=r"Target\.overwrite "):
        conversion_of(SRC, tmp_path, **STRATEGIES, include="head*").convert()
    with pytest.raises(UsageError, match=r"convert\(verify=True\) "):
        unified = conversion_of(SRC, tmp_path / "u", src_strategy=STRATEGIES["src_strategy"], to="unified", ranks=[0])
        unified.convert(verify=True)


@pytest.mark.parametrize("groups", [{"source": "ckpt"}, {"target": None}, {"edits": reshard.Effort(jobs=1)}])
def test_a_value_in_the_place_of_a_group_is_wrong_usage(groups: dict[str, Any]) -> None:
    (name,) = groups
    with pytest.raises(UsageError, match=f"{name}=.*reshard.{name.capitalize()}"):
        reshard.Conversion(**{"source": reshard.Source("ckpt"), "target": reshard.Target("out"), **groups})


def test_parts_in_the_wrong_place_are_refused_at_once() -> None:
    wrong: list[Any] = [("a", "b"), (reshard.Target("a"), reshard.Source("b"))]
    for parts in wrong:
        with pytest.raises(UsageError, match=r"reshard\.Source"):
            reshard.Conversion(*parts)


def test_renames_and_casts_may_be_dictionaries() -> None:
    edits = reshard.Edits(rename={"a.*": "b.*", "c": "d"}, cast={"*.bias": "bf16"})
    assert edits == reshard.Edits(rename=["a.*=b.*", "c=d"], cast="*.bias=bf16")
    wrong: list[dict[str, Any]] = [{"include": {"a": "b"}}, {"rename": {"a": None}}, {"rename": {"a=b": "c"}}]
    for values in wrong:
        with pytest.raises(UsageError, match=next(iter(values))):
            reshard.Edits(**values)


def test_words_for_forms_get_the_hints_of_the_command_line() -> None:
    for form, hint in (("HF", "huggingface"), ("hugging-face", "huggingface"), ("safetensors", "Target.format")):
        with pytest.raises(UsageError) as caught:
            reshard.Target("out", form=form)
        assert hint in str(caught.value.hint)


def test_the_base_of_errors_is_at_the_top() -> None:
    assert reshard.ReshardError is ReshardError and "ReshardError" in dir(reshard)
