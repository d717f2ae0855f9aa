"""Strategies made from rules equal those that MindSpore compiles, for new networks and cluster sizes."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from reshard.strategies import RecordedLayout, read_strategy_file
from reshard.strategies.rules.candidates import slices_by_device
from tests.conformance import oracles
from tests.conformance.compiled import DEEPSEEK, NETWORKS, REFUSED, Network, Run, compile_run
from tests.running import Argument, done, fails, reshard
from tests.trees import Value, write_checkpoint

pytestmark = pytest.mark.filterwarnings("default")

Compiled = Callable[[str, str, str], Path]
_DTYPES = {"float32": ("Float32", "<f4"), "bfloat16": ("BFloat16", "<u2"), "float16": ("Float16", "<f2")}

RUNS = [(oracles.MINDSPORE[0], network, name) for network, of in NETWORKS.items() for name in of.runs]
RUNS += [
    (oracles.MINDSPORE[1], *run)
    for run in (
        ("decoder", "forty"),
        ("decoder", "sizes of four"),
        ("decoder", "three uneven stages"),
        ("mixed", "four experts"),
        ("grid", "tall"),
    )
]
PAIRS = [(network, one, other) for network, of in NETWORKS.items() for one, other in itertools.permutations(of.runs, 2)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The directory with the strategies that a version's compiler wrote for a run."""
    reference: dict[tuple[str, str, str], Path] = {}

    def directory(version: str, network: str, name: str) -> Path:
        key = version, network, name
        if key not in reference:
            path = tmp_path_factory.mktemp("compiled") / "strategy"
            oracles.done([compile_run(version, network, NETWORKS[network].runs[name], path)])
            reference[key] = path
        return reference[key]

    return directory


def records(directory: Path) -> dict[int, dict[str, RecordedLayout]]:
    """What the files of a directory record, per stage."""
    files = [read_strategy_file(str(path)) for path in directory.glob("*.ckpt")]
    return {file.items[0].stage: dict(file.layouts) for file in files}


def flattened(stages: dict[int, dict[str, RecordedLayout]]) -> dict[int, dict[str, RecordedLayout]]:
    """Without the form of maps: 2.10.0 writes one per dimension only where a dimension has several axes."""
    return {
        stage: {name: record._replace(tensor_maps=record.dimensions, nested=True) for name, record in of.items()}
        for stage, of in stages.items()
    }


def shapes(network: str | Network, run: Run, path: Path) -> Path:
    """The weights of a network, uncut, and no state of an optimizer."""
    full = {}
    chosen = NETWORKS[network] if isinstance(network, str) else network
    for operator in chosen.operators(run):
        dtype, stored = _DTYPES[operator["dtype"]]
        full[operator["weight"]] = Value(dtype, np.zeros(operator["shape"], stored))
    return write_checkpoint(path, full)


@pytest.mark.parametrize(("version", "network", "name"), RUNS)
def test_made_strategies_equal_compiled_ones(
    version: str, network: str, name: str, compiled: Compiled, tmp_path: Path
) -> None:
    theirs = records(compiled(version, network, name))
    run = NETWORKS[network].runs[name]
    (tmp_path / "rules.toml").write_text(NETWORKS[network].rules)
    full = shapes(network, run, tmp_path / "full.safetensors")
    out = tmp_path / "made"
    done("strategy", "make", tmp_path / "rules.toml", f"{out}/", "--shapes", full, "--sizes", run.text, *run.options())
    created = records(out)
    if version != oracles.MINDSPORE[0]:
        created, theirs = flattened(created), flattened(theirs)
    assert created == theirs


def held(stages: dict[int, dict[str, RecordedLayout]]) -> object:
    """Slices and optimizer shards of every rank, however they are recorded."""
    layouts = {name: record.layout() for of in stages.values() for name, record in of.items()}
    return {
        name: (slices_by_device(layout.without_shards()), layout.shard_size, layout.shard_step)
        for name, layout in layouts.items()
    }


@pytest.mark.parametrize("version", oracles.MINDSPORE)
@pytest.mark.parametrize(("release", "sequence_parallel"), DEEPSEEK)
@pytest.mark.parametrize("name", DEEPSEEK["1.6", True].runs)
def test_built_in_rules_make_the_compiled_strategy_of_each_release(
    name: str, release: str, sequence_parallel: bool, version: str, tmp_path: Path
) -> None:
    network = DEEPSEEK[release, sequence_parallel]
    run = network.runs[name]
    oracles.done([compile_run(version, network, run, tmp_path / "theirs")])
    full = shapes(network, run, tmp_path / "full.safetensors")
    words: list[Argument] = ["--shapes", full, "--sizes", run.text, *run.options(), "--set", "vocab_emb_dp=false"]
    words += ["--set", f"sequence_parallel={str(sequence_parallel).lower()}", "--set", f"mindformers={release}"]
    text = "\n".join(['optimizer_states = ["adam_m", "adam_v"]', done("strategy", "rules", network.rules).out])
    # Releases cut embeddings by mp, or by mp and cp.
    (tmp_path / "rules.toml").write_text(text.replace("mp?|mp*cp?", "mp?"))
    done("strategy", "make", tmp_path / "rules.toml", f"{tmp_path / 'made'}/", *words)
    assert held(records(tmp_path / "made")) == held(records(tmp_path / "theirs"))


@pytest.mark.parametrize(("network", "name"), [("mixed", "four experts"), ("grid", "tall")])
def test_made_json_strategies_equal_compiled_ones(network: str, name: str, tmp_path: Path) -> None:
    """To the word: full shapes too, and dimensions that are cut over several axes."""
    run = NETWORKS[network].runs[name]
    oracles.done([compile_run(oracles.MINDSPORE[0], network, run, tmp_path / "theirs", "json")])
    (tmp_path / "rules.toml").write_text(NETWORKS[network].rules)
    full = shapes(network, run, tmp_path / "full.safetensors")
    out = tmp_path / "ours" / "ckpt_strategy_rank_0.json"
    done("strategy", "make", tmp_path / "rules.toml", out, "--shapes", full, "--sizes", run.text, *run.options())
    ours, theirs = (
        json.loads((tmp_path / of / "ckpt_strategy_rank_0.json").read_text())["parallel_layout_item"]
        for of in ("ours", "theirs")
    )
    assert ours == theirs


@pytest.mark.parametrize("name", REFUSED)
def test_strategies_that_the_compiler_refuses_are_refused(name: str, tmp_path: Path) -> None:
    run, texts = REFUSED[name]
    assert "init failed" in compile_run(oracles.MINDSPORE[0], "decoder", run, tmp_path / "theirs")["error"]
    (tmp_path / "rules.toml").write_text(NETWORKS["decoder"].rules)
    full = shapes("decoder", run, tmp_path / "full.safetensors")
    words: list[Argument] = ["--shapes", full, "--sizes", run.text, *run.options()]
    fails(3, "strategy", "make", tmp_path / "rules.toml", tmp_path / "made.ckpt", *words, texts=[texts])


class Deriving:
    """Counts how often a strategy was derived, or refused; a wrong one ends the test."""

    def __init__(self, compiled: Compiled, tmp_path: Path) -> None:
        self._compiled = compiled
        self._path = tmp_path
        self.found: Counter[str] = Counter()

    def directory(self, network: str, name: str) -> Path:
        return self._compiled(oracles.MINDSPORE[0], network, name)

    def shapes(self, network: str, name: str) -> Path:
        path = self._path / f"{network} {name}.safetensors"
        return path if path.exists() else shapes(network, NETWORKS[network].runs[name], path)

    def derive(self, network: str, sources: Sequence[str], target: str, stated: str = "") -> None:
        """From one strategy, or from several."""
        runs, after = NETWORKS[network].runs, NETWORKS[network].runs[target]
        words: list[Argument] = ["--src-sizes", runs[sources[0]].text, "--dst-sizes", after.text, *after.options()]
        for also in sources[1:]:
            words += ["--also", self.directory(network, also), "--also-sizes", runs[also].text]
        words += ["--shapes", self.shapes(network, sources[0])]
        if stated:
            (self._path / "stated.toml").write_text(stated)
            words += ["--rules", self._path / "stated.toml"]
        self.compare(network, target, "derive", self.directory(network, sources[0]), *words)

    def compare(self, network: str, target: str, command: str, source: Path, *words: Argument) -> None:
        out = self._path / "made"
        shutil.rmtree(out, ignore_errors=True)
        result = reshard("strategy", command, source, f"{out}/", *words)
        if result.status == 0:
            assert records(out) == records(self.directory(network, target)), (network, command, words)
        else:
            assert result.status in (2, 3), result.err
        self.found["refused" if result.status else "same"] += 1


_STAGES = '[pipeline]\nfirst = "embedding.*"\nlast = ["norm", "head"]\n'
_OPT_OUTS = """
[[parameter]]
match = "*norm"
optimizer_shard = false
[[parameter]]
match = "*"
optimizer_shard = true
"""


def test_derived_strategies_equal_compiled_ones_or_are_refused(compiled: Compiled, tmp_path: Path) -> None:
    deriving = Deriving(compiled, tmp_path)
    for network, one, other in PAIRS:
        deriving.derive(network, [one], other)
    assert deriving.found["same"] >= 9, deriving.found


def test_strategies_derived_with_stated_rules_equal_compiled_ones_or_are_refused(
    compiled: Compiled, tmp_path: Path
) -> None:
    """With the stages and the opt-outs stated."""
    deriving = Deriving(compiled, tmp_path)
    for network, one, other in PAIRS:
        deriving.derive(network, [one], other, _OPT_OUTS if network != "decoder" else _STAGES + _OPT_OUTS)
    assert deriving.found["same"] >= 24, deriving.found


def test_strategies_derived_from_two_equal_compiled_ones_or_are_refused(compiled: Compiled, tmp_path: Path) -> None:
    deriving = Deriving(compiled, tmp_path)
    for network, of in NETWORKS.items():
        for one, two, other in random.Random(1).sample(list(itertools.permutations(of.runs, 3)), 6):
            deriving.derive(network, [one, two], other)
    assert deriving.found["same"] >= 1, deriving.found
