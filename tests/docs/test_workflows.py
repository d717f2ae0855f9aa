"""The workflows of the README, typed as shell lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import cases
from tests.cases import Case
from tests.trees import (
    Value,
    cut_ranks,
    read_tree,
    same_ranks,
    scalar,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

COPIED = {"global_step": scalar(41, shape=(1,))}
OPTIMIZER = ("moment1.", "moment2.", "adam_m.", "adam_v.", "accu_grads.")


class Shell:
    """A shell in a directory of its own, with `reshard` on its path."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.environment = environment

    def __call__(self, script: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", script], cwd=self.directory, env=self.environment,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert result.returncode == 0, f"{script}\n{result.stdout}{result.stderr}"
        return result


@pytest.fixture
def shell(tmp_path: Path, environment: dict[str, str]) -> Shell:
    return Shell(tmp_path, environment)


def save(shell: Shell, case: Case) -> dict[str, Value]:
    """What training with this case's strategy left: `strategy/` and `checkpoints/`. Gives the tensors."""
    (shell.directory / "strategy").symlink_to(case.directory)
    full = {name: tensor for name, tensor in case.full().items() if not name.startswith("accu_grads.")}
    write_tree(shell.directory / "checkpoints", cut_ranks(case.strategy, full, COPIED))
    return full


def test_a_from_8_ranks_to_4_for_fine_tuning(shell: Shell) -> None:
    source, target = cases.load("10o_dp2mp4pp1_optm1"), cases.load("10_dp1mp4pp1")
    full = save(shell, source)
    (shell.directory / "finetune").symlink_to(target.directory)
    shell("reshard transform-dir checkpoints converted --src-strategy strategy --dst-strategy finetune")
    same_ranks(read_tree(shell.directory / "converted"), cut_ranks(target.strategy, full, COPIED))


@pytest.mark.deep
def test_b_the_same_rank_by_rank_with_only_the_files_it_needs(shell: Shell) -> None:
    source, target = cases.load("10o_dp2mp4pp1_optm1"), cases.load("10_dp1mp4pp1")
    full = save(shell, source)
    (shell.directory / "finetune").symlink_to(target.directory)
    shell(
        """
        S="--src-strategy strategy --dst-strategy finetune"
        for rank in $(seq 0 3); do
            rm -rf fetched && mkdir fetched
            for needed in $(reshard rank-list $rank $S); do cp -r checkpoints/rank_$needed fetched/; done
            reshard by-rank $rank fetched converted $S
        done
        """
    )
    same_ranks(read_tree(shell.directory / "converted"), cut_ranks(target.strategy, full, COPIED))


@pytest.mark.parametrize("merged", [True, False])
def test_c_from_2_stages_to_none(shell: Shell, merged: bool) -> None:
    source, target = cases.load("10_dp2mp2pp2"), cases.load("10_dp1mp4pp1")
    full = save(shell, source)
    (shell.directory / "target.ckpt").symlink_to(next(target.directory.glob("*.ckpt")))
    if merged:
        shell(
            """
            reshard merge-pipeline strategy merged/src_strategy.ckpt
            reshard transform-dir checkpoints converted \
                --src-strategy merged/src_strategy.ckpt --dst-strategy target.ckpt
            """
        )
    else:
        shell("reshard transform-dir checkpoints converted --src-strategy strategy --dst-strategy target.ckpt")
    same_ranks(read_tree(shell.directory / "converted"), cut_ranks(target.strategy, full, COPIED))


def test_d_for_inference_without_optimizer_state(shell: Shell) -> None:
    source, target = cases.load("10_dp2mp4pp1"), cases.load("10_dp1mp4pp1")
    full = save(shell, source)
    weights = {name: tensor for name, tensor in full.items() if not name.startswith(OPTIMIZER)}
    (stage,) = target.strategy
    inference = [{**stage, "layouts": {name: stage["layouts"][name] for name in weights}}]
    write_strategy(shell.directory / "inference", inference)
    shell(
        """
        reshard transform-dir checkpoints sharded --src-strategy strategy --dst-strategy inference.ckpt
        reshard transform-dir checkpoints whole --src-strategy strategy --dst-strategy none \
            --exclude 'moment*' --format safetensors
        """
    )
    same_ranks(read_tree(shell.directory / "sharded"), cut_ranks(inference, weights, COPIED))
    preserved = {name: tensor for name, tensor in full.items() if not name.startswith("moment")}
    same_ranks(read_tree(shell.directory / "whole"), {0: {**preserved, **COPIED}})


def test_e_group_info_lists_ranks_0_and_4_as_replicas(shell: Shell) -> None:
    group_info = cases.case_directory("01_dp2mp4_adam") / "group_info" / "group_info_rank_0.pb"
    (shell.directory / "group_info.pb").symlink_to(group_info)
    lines = shell("reshard group-info inspect group_info.pb").stdout.splitlines()
    assert "[0, 4]" in [line.strip() for line in lines]


@pytest.mark.deep
def test_f_an_end_of_life_checkpoint_is_converted_as_it_is(shell: Shell) -> None:
    source, target = cases.load("10_dp2mp4pp1"), cases.load("10_dp1mp4pp1")
    old = {name: value("old " + name, tensor.array.shape) for name, tensor in source.full().items()}
    (shell.directory / "strategy").symlink_to(source.directory)
    write_tree(shell.directory / "checkpoints", cut_ranks(source.strategy, old, COPIED))
    full = source.full()
    for rank, tensors in cut_ranks(source.strategy, full, COPIED).items():
        if rank in (0, 2, 3, 5):
            directory = shell.directory / "checkpoints" / f"rank_{rank}"
            write_checkpoint(directory / "net-1_12.ckpt", {**tensors, "cur_rank": scalar(rank)})
    write_strategy(shell.directory / "target", target.strategy)
    output = shell(
        "reshard transform-dir checkpoints converted --src-strategy strategy --dst-strategy target.ckpt"
    ).stderr
    assert "1_12" in output
    ranks = read_tree(shell.directory / "converted")
    for tensors in ranks.values():
        tensors.pop("cur_rank", None)
    same_ranks(ranks, cut_ranks(target.strategy, full, COPIED))
