"""strategy derive: no slice on a wrong rank."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.errors import ReshardError
from reshard.strategies import RecordedLayout, read_strategy
from reshard.strategies.read import read_recorded
from reshard.strategies.rules import (
    FullTensor,
    LayoutRules,
    MadeStage,
    ShardSetting,
    TargetRun,
    make_strategy,
    model_tensors,
    parse_rules,
    parse_sizes,
)
from reshard.strategies.rules.derive import SourceRun, learn, model_of
from reshard.strategies.written import write_strategy as write_rules_strategy
from tests import made_cases
from tests.conftest import LONG
from tests.made_cases import MadeCase
from tests.running import Argument, done, fails
from tests.strategy_writing import layout, write_strategy
from tests.trees import Value, write_checkpoint

Words = tuple[Argument, ...]
SAME, SAME_SLICES, REFUSED, LOUD, SILENT = "same record", "same slices", "refused", "wrong shapes", "wrong ranks"


@cache
def networks() -> list[list[MadeCase]]:
    """Cases of the same network, if there are several."""
    actual: dict[Any, list[MadeCase]] = {}
    for name in made_cases.case_names():
        case = made_cases.load(name)
        actual.setdefault(case.same_network, []).append(case)
    return [cases for cases in actual.values() if len(cases) > 1]


def pairs() -> list[tuple[MadeCase, MadeCase]]:
    """All ordered pairs of each network."""
    return [pair for cases in networks() for pair in itertools.permutations(cases, 2)]


@cache
def _read(path: Path) -> Any:
    return read_recorded(str(path))


def source(case: MadeCase, sizes: str | None = None) -> SourceRun:
    strategy, recorded = _read(case.strategy)
    return SourceRun(strategy, recorded, parse_sizes(sizes or case.sizes_text))


def derive(
    sources: Sequence[MadeCase],
    target: MadeCase,
    stated: Callable[[LayoutRules], LayoutRules] = lambda rules: rules,
) -> str:
    """What comes of deriving a case from others."""
    try:
        actual = [source(case) for case in sources]
        model = model_of(actual[0], sources[0].model)
        rules = learn(actual, model, target.target.sizes)
        return judged(make_strategy(stated(rules), model, target.target, "rules"), target)
    except ReshardError:
        return REFUSED


def judged(strategy: Sequence[MadeStage], target: MadeCase) -> str:
    """How a made strategy compares with the compiled one."""
    actual, compiled = {stage.number: stage.layouts for stage in strategy}, target.compiled()
    if actual == compiled:
        return SAME
    if {stage: set(of) for stage, of in actual.items()} != {stage: set(of) for stage, of in compiled.items()}:
        return LOUD
    differing = [
        (actual[stage][name], record)
        for stage, of in compiled.items()
        for name, record in of.items()
        if actual[stage][name] != record
    ]
    if all(same_slices(*two) for two in differing):
        return SAME_SLICES
    return LOUD if any(one.layout().cuts != other.layout().cuts for one, other in differing) else SILENT


def same_slices(one: RecordedLayout, other: RecordedLayout) -> bool:
    first, second = one.layout(), other.layout()
    return first.cuts == second.cuts and first.slice_of_rank == second.slice_of_rank


def with_stages_and_opt_outs(target: MadeCase) -> Callable[[LayoutRules], LayoutRules]:
    """States where parameters outside layers are, and which have opted out of optimizer shards."""
    by_hand = parse_rules(target.rules, "rules")

    def stated(rules: LayoutRules) -> LayoutRules:
        created = []
        for rule in rules.rules:
            sizes_text = next(one for one in by_hand.rules if one.matches(rule.patterns[0]))
            created.append(replace(rule, optimizer_shard=sizes_text.optimizer_shard))
        return replace(rules, rules=tuple(created), pipeline=by_hand.pipeline)

    return stated


def sampled(of: Sequence[Any], count: int) -> Sequence[Any]:
    """All in the long suite, some otherwise, the same ones always."""
    return of if LONG or len(of) <= count else random.Random(7).sample(list(of), count)


@pytest.mark.deep
def test_a_strategy_derived_from_one_equals_the_compiled_one() -> None:
    counts = Counter(derive([one], other) for one, other in sampled(pairs(), 80))
    assert set(counts) <= {SAME, SAME_SLICES, REFUSED}, counts
    # Most other pairs differ in settings that one strategy does not show.
    assert counts[SAME] + counts[SAME_SLICES] >= 0.2 * sum(counts.values()), counts


def test_a_strategy_derived_from_two_equals_the_compiled_one() -> None:
    triples = [(one, two, other) for cases in networks() for one, two, other in itertools.permutations(cases, 3)]
    chosen = random.Random(3).sample(triples, min(len(triples), 2000 if LONG else 120))
    counts = Counter(derive([one, two], other) for one, two, other in chosen)
    assert set(counts) <= {SAME, SAME_SLICES, REFUSED}, counts
    assert counts[SAME] + counts[SAME_SLICES] >= 0.35 * sum(counts.values()), counts


@pytest.mark.deep
def test_stated_stages_and_exceptions_settle_most_layouts() -> None:
    chosen = sampled(pairs(), 80)
    counts = Counter(derive([one], other, with_stages_and_opt_outs(other)) for one, other in chosen)
    assert set(counts) <= {SAME, SAME_SLICES, REFUSED}, counts
    assert counts[SAME] + counts[SAME_SLICES] >= 0.4 * sum(counts.values()), counts


_ORDERS = [
    (["dp", "cp", "mp"], ["mp", "None"]),
    (["mp", "dp", "cp"], ["mp", "None"]),
    (["dp", "mp", "cp"], ["None", "mp"]),
    (["dp*cp/ep", "ep", "mp"], ["ep", "mp"]),
    (["dp*cp/ep", "ep", "mp"], ["ep", "None"]),
    (["ep", "dp*cp/ep", "mp"], ["ep", "mp"]),
    (["ep", "dp*cp/ep", "mp"], ["ep", "None"]),
    (["ep", "mp", "dp*cp/ep"], ["ep", "mp"]),
    (["dp*cp/ep", "mp", "ep"], ["ep", "mp"]),
    (["dp/ep", "ep", "cp", "mp"], ["ep", "mp"]),
    (["dp*cp*mp/ep", "ep"], [["ep"], "None"]),
    (["ep", "dp*cp*mp/ep"], [["ep"], "None"]),
    (["dp*mp/ep", "ep", "cp"], [["ep"], "None"]),
]
_SIZES = [
    {"dp": dp, "cp": cp, "mp": mp, "ep": ep}
    for dp, cp, mp, ep in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4, 8))
    if dp * cp * mp >= ep
]


@pytest.mark.deep
@pytest.mark.parametrize(("matrix", "entries"), _ORDERS, ids=lambda sizes_text: "-".join(map(str, sizes_text)))
def test_no_device_order_gives_a_slice_to_a_wrong_rank(matrix: list[str], entries: list[Any], tmp_path: Path) -> None:
    """A weight with this device order, and one that mp cuts, for all sizes: the correct slices, or refused."""
    usual, nested = made_cases.rule("usual", ["dp", "cp", "mp"], ["mp", "None"]), "nested = true"
    text = usual + made_cases.rule("w", matrix, entries, nested if isinstance(entries[0], list) else "")
    model = model_tensors("shapes", [FullTensor(name, (64, 64), "Float32") for name in ("usual", "w")], ITEM_SIZES)
    runs = []
    for number, sizes in enumerate(_SIZES):
        sizes_text = ",".join(f"{name}={size}" for name, size in sizes.items())
        target = TargetRun(parse_sizes(sizes_text), ShardSetting(0), weights_only=True)
        try:
            strategy = make_strategy(parse_rules(text, "rules"), model, target, "rules")
        except ReshardError:
            continue
        (path,), _ = write_rules_strategy(str(tmp_path / f"{number}.ckpt"), strategy, {}, overwrite=False)
        runs.append((SourceRun(*read_recorded(path), target.sizes), target, strategy[0].layouts))
    derived = 0
    for one, of_one, _ in sampled(runs, 3):
        for _, target, compiled in runs:
            try:
                rules = learn([one], model, target.sizes)
                (stages,) = make_strategy(rules, model, target, "rules")
            except ReshardError:
                continue
            for name, record in stages.layouts.items():
                assert same_slices(record, compiled[name]), (of_one.sizes.text, target.sizes.text, name)
            derived += of_one.sizes != target.sizes
    assert derived


@pytest.mark.deep
def test_wrong_sizes_are_refused_or_harmless() -> None:
    """Wrong sizes of the same product: refused, or the derived layouts are correct except for a few shapes."""
    harmful = []
    count = refused = 0
    for one, other in sampled(pairs(), 40):
        true = {name: one.sizes.get(name, 1) for name in ("dp", "mp", "cp", "ep")}
        if set(one.sizes) - {*true, "pp"} or derive([one], other) != SAME:
            continue
        devices = true["dp"] * true["mp"] * true["cp"]
        for dp, mp, cp, ep in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
            sizes_text = {"dp": dp, "mp": mp, "cp": cp, "ep": ep}
            if dp * mp * cp != devices or sizes_text == true:
                continue
            text = ",".join(f"{name}={size}" for name, size in (*sizes_text.items(), ("pp", one.sizes.get("pp", 1))))
            count += 1
            try:
                wrong = source(one, text)
                model = model_of(wrong, one.model)
                rules = learn([wrong], model, other.target.sizes)
                report = judged(make_strategy(rules, model, other.target, "rules"), other)
            except ReshardError:
                refused += 1
                continue
            if report not in (SAME, SAME_SLICES):
                harmful.append((one.name, text, other.name, report))
    assert count > 100 and refused > 0.9 * count
    # Cuts by experts or context parallelism may look like cuts by mp: loading reveals it.
    assert all(created == LOUD for *_, created in harmful), harmful
    assert len(harmful) <= 0.001 * count + 1, harmful


# As typed.


def shapes_of(case: MadeCase, path: Path) -> Path:
    full = {tensor.name: Value(tensor.dtype or "", np.zeros(tensor.shape, "<u4")) for tensor in case.tensors}
    return write_checkpoint(path, full)


def test_the_command_derives_the_compiled_strategy(tmp_path: Path) -> None:
    """Training to inference with a strategy of more devices beside it; the record contains the origin."""
    one, other = made_cases.load("10_dp2mp4pp1"), made_cases.load("10_dp1mp4pp1")
    shapes = shapes_of(one, tmp_path / "full.safetensors")
    out = tmp_path / "out.ckpt"
    words = (one.strategy, out, "--shapes", shapes, "--src-sizes", "dp=2,mp=4", "--dst-sizes", "mp=4")
    done("strategy", "derive", *words)
    done("strategy", "diff", other.strategy, out, "--exit-code")
    record = json.loads((tmp_path / "out.ckpt.made").read_text())
    assert record["sources"] == [
        {"strategy": str(one.strategy), "sizes": {"dp": 2, "mp": 4, "pp": 1, "cp": 1, "ep": 1}}
    ]


@pytest.mark.parametrize("out", ["src.ckpt", "link.ckpt", "strategy/ckpt_strategy_rank_0.ckpt"])
def test_derive_never_replaces_its_inputs(out: str, tmp_path: Path) -> None:
    """A compiled strategy cannot be had again without its cluster."""
    one = made_cases.load("10_dp2mp4pp1")
    source = tmp_path / out
    shutil.copytree(one.strategy, tmp_path / "strategy")
    shutil.copyfile(one.strategy / "ckpt_strategy_rank_0.ckpt", tmp_path / "src.ckpt")
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "src.ckpt")
    before = source.read_bytes()
    src = source.parent if source.parent.name == "strategy" else tmp_path / "src.ckpt"
    words: Words = (src, source, "--shapes", shapes_of(one, tmp_path / "full.ckpt"), "--src-sizes", "dp=2,mp=4")
    texts = ["is a source of this strategy; it is not replaced"]
    fails(3, "strategy", "derive", *words, "--dst-sizes", "mp=4", "--overwrite", texts=texts)
    assert source.read_bytes() == before


def test_a_second_strategy_settles_undecided_layouts(tmp_path: Path) -> None:
    one, other = made_cases.load("10_dp1mp4pp1"), made_cases.load("10_dp4mp4pp1")
    shapes = shapes_of(one, tmp_path / "full.ckpt")
    words: Words = (one.strategy, tmp_path / "out.ckpt", "--shapes", shapes, "--src-sizes", "mp=4")
    words = (*words, "--dst-sizes", "dp=4,mp=4")
    failed = fails(3, "strategy", "derive", *words, texts=["can mean 2 layouts", 'matrix = ["mp", "dp", "cp"]'])
    also = ("--also", made_cases.load("10_dp2mp2pp2").strategy, "--also-sizes", "dp=2,mp=2,pp=2")
    done("strategy", "derive", *words, *also)
    done("strategy", "diff", other.strategy, tmp_path / "out.ckpt", "--exit-code")
    # What is printed settles it: the first of the two ways, for every group.
    lines = [line.strip() for line in failed.err.splitlines()]
    starts = [number for number, line in enumerate(lines) if line == "# either"]
    stated = tmp_path / "stated.toml"
    pasted = "\n".join(line for start in starts for line in lines[start : start + 5])
    # So does the order of devices alone, for all.
    for settled in (pasted, '[[parameter]]\nmatch = "*"\nmatrix = ["dp", "cp", "mp"]\n'):
        stated.write_text(settled)
        done("strategy", "derive", *words, "--rules", stated, "--overwrite")
        done("strategy", "diff", other.strategy, tmp_path / "out.ckpt", "--exit-code")


def test_cuts_beyond_the_strategies_are_stated_in_rules(tmp_path: Path) -> None:
    one, other = made_cases.load("10_dp2mp2pp2"), made_cases.load("10_dp2mp4pp1")
    words: Words = (one.strategy, tmp_path / "out.ckpt", "--shapes", shapes_of(one, tmp_path / "full.ckpt"))
    words = (*words, "--src-sizes", "dp=2,mp=2,pp=2", "--dst-sizes", "dp=2,mp=4", *other.options())
    failed = fails(3, "strategy", "derive", *words, texts=["no strategy has mp above 2", "--also"])
    pasted = [line.strip() for line in failed.err.splitlines() if line.startswith("    ")]
    stated = tmp_path / "stated.toml"
    # The order of devices alone is not enough.
    stated.write_text('[[parameter]]\nmatch = "*"\nmatrix = ["dp", "cp", "mp"]\n')
    fails(3, "strategy", "derive", *words, "--rules", stated, texts=["no strategy has mp above 2"])
    stated.write_text("\n".join(pasted))
    done("strategy", "derive", *words, "--rules", stated)
    done("strategy", "diff", other.strategy, tmp_path / "out.ckpt", "--exit-code")


def test_a_rule_file_states_stages_and_exceptions(tmp_path: Path) -> None:
    one, other = made_cases.load("10_dp4mp4pp1"), made_cases.load("10o_dp2mp2pp2_optm1")
    shapes = shapes_of(one, tmp_path / "full.ckpt")
    words: Words = (one.strategy, tmp_path / "out.ckpt", "--shapes", shapes, "--src-sizes", "dp=4,mp=4")
    words = (*words, *other.options())
    words = (*words, "--dst-sizes", other.sizes_text)
    stated = tmp_path / "stated.toml"
    fails(
        3, "strategy", "derive", *words, texts=["outside the layers is missing", "[pipeline]", "first = [", "last = ["]
    )
    pipeline = '[pipeline]\nfirst = "*.embedding.*"\nlast = ["backbone.layernorm.*", "head.*"]\n'
    stated.write_text(pipeline)
    texts = ["whether the optimizer may shard them is unknown", "optimizer_shard = false"]
    fails(3, "strategy", "derive", *words, "--rules", stated, texts=texts)
    stated.write_text(pipeline + '[[parameter]]\nmatch = "*"\noptimizer_shard = true\n')
    done("strategy", "derive", *words, "--rules", stated)
    done("strategy", "diff", other.strategy, tmp_path / "out.ckpt", "--exit-code")


@pytest.mark.parametrize(
    ("more", "texts"),
    [
        (("--src-sizes", "dp=4,mp=2"), "no size explains"),
        (("--src-sizes", "dp=2,mp=2"), "has 8 devices in a stage, and dp=2,mp=2 are 4"),
        (("--src-sizes", "dp=2,mp=4,pp=2"), "has 1 stage, and dp=2,mp=4,pp=2 has 2"),
        (("--src-sizes", "dp=1,cp=2,mp=4"), "cp=2 cuts no parameter with certainty"),
        (("--src-sizes", "dp=2,mp=4", "--dst-sizes", "mp=8"), "no strategy has mp above 4"),
    ],
)
def test_impossible_sizes_are_refused(more: tuple[str, ...], texts: str, tmp_path: Path) -> None:
    one = made_cases.load("10_dp2mp4pp1")
    shapes = shapes_of(one, tmp_path / "full.ckpt")
    words: Words = (one.strategy, tmp_path / "out.ckpt", "--shapes", shapes, "--dst-sizes", "mp=2", *more)
    fails(3, "strategy", "derive", *words, texts=[texts])
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize(("shape", "expected"), [([8, 16, 4], ((2, 1), (0,), ())), ([4, 32, 4], ((2,), (1, 0), ()))])
def test_shapes_select_the_reading_of_json(shape: list[int], expected: Any, tmp_path: Path) -> None:
    """Slices of one row, and columns that are cut as well."""
    maps = {"w": layout([4, 2, 2], [2, 1, 0, -1], shape=[4, 2, 16, 4])}
    source = write_strategy(tmp_path / "src.json", 0, maps)
    shapes = write_strategy(tmp_path / "shapes.json", 0, {"w": layout([1], [-1, -1, -1], shape=shape)})
    sizes = ("--src-sizes", "x=4,y=2,z=2", "--dst-sizes", "x=4,y=2,z=2", "--weights-only")
    done("strategy", "derive", source, tmp_path / "out.ckpt", "--shapes", shapes, *sizes)
    (stage,) = read_strategy(str(tmp_path / "out.ckpt")).stages
    assert stage.layouts["w"].tensor_map == expected
