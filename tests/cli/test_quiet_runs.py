"""Output of successful runs: two lines; with -q only results."""

from __future__ import annotations

import shutil
from pathlib import Path

from docs.tools.commands import walk
from tests.running import Argument, done
from tests.small import World, tensors

DEMO = Path(__file__).parents[2] / "fixtures" / "demo"
CHECKPOINT2 = DEMO.parent / "checkpoint2" / "a02_dp2mp2_dedup" / "checkpoint"
STRATEGIES: list[Argument] = [
    "--src-strategy", DEMO / "src_strategy.ckpt", "--dst-strategy", DEMO / "dst_strategy.ckpt",
]  # fmt: skip


def test_a_successful_conversion_prints_two_lines_and_verify_a_third(tmp_path: Path) -> None:
    result = done("convert", DEMO / "src_checkpoints", tmp_path / "out", *STRATEGIES, "--verify")
    wrote, holds, verified = result.err.splitlines()
    assert wrote.startswith(f"wrote 4 ranks (0-3) to {tmp_path / 'out'}: 363.5 KiB in ")
    assert holds == (
        "step 2_10: weights 68 (347.2 KiB), other values 3 (80 B); in the target strategy only: optimizer state 136"
    )
    assert verified == "verified: no differences" and not result.out
    again = done("convert", DEMO / "src_checkpoints", tmp_path / "out", *STRATEGIES).err.splitlines()
    assert again == [f"nothing to write: 4 ranks (0-3) already complete in {tmp_path / 'out'}", holds]


def test_the_run_that_writes_the_last_rank_reports_completion(plain: World) -> None:
    plain.save(tensors())
    assert "all ranks written" not in plain.by_rank(1).err
    assert f"complete, all ranks written: {plain.dst / 'reshard-manifest.json'}" in plain.by_rank(0).err


def test_an_empty_shard_is_reported(tmp_path: Path) -> None:
    words: list[Argument] = ["convert", DEMO / "src_checkpoints", tmp_path / "out", *STRATEGIES]
    output = done(*words, "--shard", "0/9").err
    assert output == "nothing to write: share 0/9 is empty: fewer ranks than shares\n"
    assert not (tmp_path / "out").exists()
    for number in range(1, 9):
        output = done(*words, "--shard", f"{number}/9").err
    assert "all ranks written" in output


def test_excluded_parameters_are_not_reported_as_missing_in_the_target_strategy(tmp_path: Path) -> None:
    words: list[Argument] = ["--to", "checkpoint2", "--dst-strategy", "same", "--exclude", "*experts*", "--json"]
    result = done("convert", CHECKPOINT2, tmp_path / "out", *words, "-v")
    assert "not in the target strategy" not in result.err
    assert "6 left out by --include and --exclude: 'adam_m.layers.0.experts.weight1'" in result.err
    assert (len(result.json["excluded"]), result.json["left_out"]) == (6, [])


def test_every_command_accepts_quiet() -> None:
    for name, command, _ in walk():
        assert any("-q" in param.opts for param in command.params), name


def test_quiet_prints_results(plain: World) -> None:
    """What a command exists to print, and nothing else."""
    plain.save(tensors())
    stages = plain.root / "stages"
    shutil.copytree(DEMO.parent / "10_dp2mp2pp2" / "strategy", stages)
    quiet: list[list[Argument]] = [
        plain.words("-n"),
        plain.words(),
        ["merge-pipeline", stages, plain.root / "merged.json"],
        ["strategy", "derive", plain.old, plain.root / "made.json", "--src-sizes", "dp=2,mp=2", "--dst-sizes", "mp=2",
         "--shapes", plain.src, "--weights-only"],
        ["verify", plain.dst, "--headers-only"],
        ["recover", plain.src, plain.root / "whole-tree", "--strategy", plain.old],
    ]  # fmt: skip
    for words in quiet:
        result = done(*words, "-q")
        assert (result.out, result.err) == ("", ""), words
    output: list[list[Argument]] = [
        plain.words(command="plan"),
        ["status", plain.dst],
        ["inspect", plain.src],
        ["strategy", "show", plain.old],
        ["get", plain.src, "v", "--strategy", plain.old],
        ["stats", plain.src, "--strategy", plain.old],
        ["replicas", "--strategy", plain.old],
    ]
    for words in output:
        result = done(*words, "-q")
        assert result.out and not result.err, words
