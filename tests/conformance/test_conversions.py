"""Conversions equal those of MindSpore, or are correct where MindSpore is wrong or refuses.

`transform_checks.json` lists both kinds. Sources are written by `save_checkpoint`: float32 tensors that count up from a
start of their own, cut by the strategy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from tests import cases
from tests.cases import Case
from tests.conformance.mindspore_files import assert_same_ranks, load_tree, mindspore, save_tree
from tests.corpus import CORPUS, FIXTURES
from tests.reference import Strategy, slices
from tests.running import done

pytestmark = pytest.mark.filterwarnings("default")

#: Between the starts of two parameters: more than any has elements, and float32 stays exact for all of them.
STEP = 30011
GLOBAL_STEP = np.array([10], np.int32)


def recorded() -> dict[str, Any]:
    """Every check whose cases are at hand."""
    root = CORPUS if CORPUS.is_dir() else FIXTURES
    results: dict[str, Any] = json.loads((root / "transform_checks.json").read_text())["results"]
    return results


CHECKS = recorded()
AGREES = [check for check, result in CHECKS.items() if result == "agrees"]
DIFFERS = [check for check, result in CHECKS.items() if result != "agrees"]


class Conversion:
    """One recorded check: source tree, strategy files, and the expected result."""

    def __init__(self, check: str, root: Path, form: str = "ckpt") -> None:
        source, target = check.split(" -> ")
        self.json = source.endswith(" (JSON strategy file)")
        self.source = cases.load(source.split(" (")[0])
        self.target = None if target == "full" else cases.load(target)
        self.src_file = self.strategy_file(self.source)
        self.dst_file = None if self.target is None else self.strategy_file(self.target)
        # Accumulated gradients have an untrue record in pipelines, which MindSpore's conversion believes.
        names = [name for name in self.source.shapes if not name.startswith("accu_grads.")]
        self.starts = {name: index * STEP for index, name in enumerate(names)}
        self.full = {name: self.counting(name) for name in names}
        self.src = save_tree(root / "src", self.ranks(self.source.strategy), format=form)

    def counting(self, name: str) -> Any:
        shape = self.source.shapes[name]
        count = int(np.prod(shape))
        assert count <= STEP
        array = np.arange(self.starts[name], self.starts[name] + count, dtype=np.float32)
        assert int(array[-1]) == self.starts[name] + count - 1 < 1 << 24
        return array.reshape(shape)

    def strategy_file(self, case: Case) -> str:
        if self.json and case is self.source:
            (path,) = (case.path / "strategy_json").iterdir()
        elif len(case.strategy) == 1:
            path = sorted(case.directory.iterdir())[0]
        else:
            path = case.path / "merged" / "merged_strategy.ckpt"
        return str(path)

    def ranks(self, strategy: Strategy) -> dict[int, dict[str, Any]]:
        """What every rank of this strategy holds: its slices, and `global_step`."""
        parts = slices(strategy, self.full)
        return {rank: {**tensors, "global_step": GLOBAL_STEP} for rank, tensors in parts.items()}

    def expected(self) -> dict[int, dict[str, Any]]:
        if self.target is not None:
            return self.ranks(self.target.strategy)
        listing = {name for stage in self.source.strategy for name in stage["layouts"]}
        full = {name: array for name, array in self.full.items() if name in listing}
        return {0: {**full, "global_step": GLOBAL_STEP}}

    def ours(self, out: Path, *options: str) -> dict[int, dict[str, Any]]:
        done(
            "transform-dir", self.src, out, "--src-strategy", self.src_file,
            "--dst-strategy", self.dst_file or "none", *options,
        )  # fmt: skip
        return load_tree(out)

    def theirs(self, out: Path, form: str = "ckpt") -> dict[int, dict[str, Any]]:
        mindspore.transform_checkpoints(
            str(self.src), str(out), "checkpoint_", self.src_file, self.dst_file, output_format=form
        )
        return load_tree(out)

    def assert_as_mindspore_slices(self, actual: dict[int, dict[str, Any]]) -> None:
        """Every tensor, counted from 0 again, has the hash of the slice that MindSpore's slicer cuts.

        For a target in full it is one slice, which `slices.json` has for no case: cut it as the source is.
        """
        case = self.target or self.source
        contents = actual
        if self.target is None:
            contents = slices(self.source.strategy, {name: actual[0][name] for name in self.full})
        for rank in case.slices["ranks"]:
            for name in contents[rank].keys() & self.full.keys():
                expected = case.expected(name, rank)
                array = contents[rank][name]
                counted = (array - np.float32(self.starts[name])).astype("<f4")
                if expected is not None:
                    assert (list(array.shape), cases.sha256_16(counted)) == expected, (rank, name)


@pytest.mark.parametrize("check", AGREES)
def test_conversion_equals_mindspores_where_that_is_correct(check: str, tmp_path: Path) -> None:
    conversion = Conversion(check, tmp_path)
    ours = conversion.ours(tmp_path / "ours")
    assert_same_ranks(ours, conversion.expected())
    conversion.assert_as_mindspore_slices(ours)
    assert_same_ranks(ours, conversion.theirs(tmp_path / "theirs"))


@pytest.mark.parametrize("check", DIFFERS)
def test_conversion_is_correct_where_mindspores_is_not(check: str, tmp_path: Path) -> None:
    conversion = Conversion(check, tmp_path)
    ours = conversion.ours(tmp_path / "ours")
    assert_same_ranks(ours, conversion.expected())
    conversion.assert_as_mindspore_slices(ours)

    if isinstance(CHECKS[check], str):
        with pytest.raises(Exception, match=CHECKS[check].split(": ", 1)[1][:30]):
            conversion.theirs(tmp_path / "theirs")
        return
    theirs = conversion.theirs(tmp_path / "theirs")[0]
    wrong = {name for name, array in conversion.full.items() if array.tobytes() != theirs[name].tobytes()}
    # The record looked at the weights only.
    assert set(CHECKS[check]["wrong"]) <= wrong


@pytest.mark.parametrize("check", ["10_dp2mp4pp1 -> 10_dp2mp2pp2", "02_dp2mp4_opt -> full"])
@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
@pytest.mark.parametrize("target", ["ckpt", "safetensors"])
def test_ckpt_and_safetensors_can_be_mixed(check: str, form: str, target: str, tmp_path: Path) -> None:
    conversion = Conversion(check, tmp_path, form)
    assert_same_ranks(conversion.ours(tmp_path / "ours", "--format", target), conversion.expected())


def test_the_same_python_call_gives_the_same_files(tmp_path: Path) -> None:
    """A script that changes one import, in a process that has MindSpore in it."""
    conversion = Conversion("10_dp2mp4pp1 -> 10_dp1mp4pp1", tmp_path)
    for library, out in ((reshard, "ours"), (mindspore, "theirs")):
        library.transform_checkpoints(
            str(conversion.src), str(tmp_path / out), "net", conversion.src_file, conversion.dst_file
        )
        files = {0: str(conversion.src / "rank_0" / "net-1_10.ckpt")}
        (tmp_path / f"{out}_rank").mkdir()
        library.transform_checkpoint_by_rank(
            0, files, str(tmp_path / f"{out}_rank" / "net0.ckpt"), conversion.src_file, conversion.dst_file
        )
    ours, theirs = load_tree(tmp_path / "ours", "net"), load_tree(tmp_path / "theirs", "net")
    assert_same_ranks(ours, theirs)
    assert_same_ranks(ours, conversion.expected())
    by_rank = [mindspore.load_checkpoint(str(tmp_path / f"{out}_rank" / "net0.ckpt")) for out in ("ours", "theirs")]
    assert sorted(by_rank[0]) == sorted(by_rank[1])
    for name, value in by_rank[0].items():
        assert value.asnumpy().tobytes() == by_rank[1][name].asnumpy().tobytes()
