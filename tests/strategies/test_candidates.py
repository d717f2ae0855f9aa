"""Generating candidates from rules and comparing strategies with them are inverses."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from reshard.errors import ReshardError, StrategyError
from reshard.strategies.read import read_recorded
from reshard.strategies.rules import (
    AxisSizes,
    FullTensor,
    MadeStage,
    ModelTensors,
    ShardSetting,
    TargetRun,
    make_strategy,
    parse_rules,
    parse_sizes,
)
from reshard.strategies.rules.candidates import Candidate, slices_by_device
from reshard.strategies.rules.derive import SourceRun, learn, model_of
from reshard.strategies.written import write_strategy
from tests.layouts import examples
from tests.made_cases import rule

# Device matrices of operators and cuts over their axes, written from the networks' code.
ORDERS = [
    *((["dp", "cp", "mp"], [cut, "None"]) for cut in ("None", "mp", "mp?", "mp*cp", "mp*cp?")),
    (["dp", "cp", "mp"], ["None", "mp"]),
    (["mp", "dp", "cp"], ["mp", "None"]),
    (["dp", "mp", "cp"], ["None", "mp"]),
    (["dp*cp*mp"], ["None", "None"]),
    (["dp*cp/ep", "ep", "mp"], ["ep", "mp"]),
    (["dp*cp/ep", "ep", "mp"], ["ep", "None"]),
    (["ep", "dp*cp/ep", "mp"], ["ep", "mp"]),
    (["ep", "mp", "dp*cp/ep"], ["ep", "mp"]),
    (["dp*cp/ep", "mp", "ep"], ["ep", "mp"]),
    (["dp/ep", "ep", "cp", "mp"], ["ep", "mp"]),
]
SIZES = [
    {"dp": dp, "cp": cp, "mp": mp, "ep": ep}
    for dp, cp, mp, ep in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4))
    if dp * cp >= ep
]
# Weights that each size cuts: sizes that cut nothing are refused.
USUAL = "".join(
    rule(f"usual.{number}", matrix, entries)
    for number, (matrix, entries) in enumerate(
        [(["dp", "cp", "mp"], ["mp", "None"]), (["dp", "cp", "mp"], ["mp*cp", "None"]), ORDERS[9]]
    )
)
orders = st.lists(st.sampled_from(ORDERS), min_size=1, max_size=3)
some_sizes = st.lists(st.sampled_from(SIZES), max_size=6)
shapes = st.tuples(st.sampled_from([16, 20, 64]), st.sampled_from([12, 16, 64]))


def sizes_of(sizes: dict[str, int]) -> AxisSizes:
    return parse_sizes(",".join(f"{name}={size}" for name, size in sizes.items()))


def slices_of(stage: MadeStage) -> dict[str, object]:
    return {name: slices_by_device(record.layout()) for name, record in stage.layouts.items()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


@examples(60)
@given(orders, shapes, st.sampled_from(SIZES), st.sampled_from(["ckpt", "json"]), some_sizes)
def test_rules_learned_from_a_made_strategy_make_it_again(
    directory: Path,
    chosen: list[tuple[list[str], list[str]]],
    shape: tuple[int, int],
    said: dict[str, int],
    ending: str,
    others: list[dict[str, int]],
) -> None:
    text = USUAL + "".join(rule(f"w.{number}", *each) for number, each in enumerate(chosen))
    names = [*(f"usual.{number}" for number in range(3)), *(f"w.{number}" for number in range(len(chosen)))]
    tensors = {name: FullTensor(name, shape if name[0] == "w" else (64, 64)) for name in names}
    model = ModelTensors("shapes", tensors)
    rules, target = parse_rules(text, "rules"), TargetRun(sizes_of(said), ShardSetting(0), weights_only=True)
    try:
        strategy = make_strategy(rules, model, target, "rules")
    except ReshardError:
        reject()
    files, _ = write_strategy(str(directory / f"made.{ending}"), strategy, {}, overwrite=True)
    source = SourceRun(*read_recorded(files[0]), target.sizes)
    try:
        learned = learn([source], model_of(source, model))
    except StrategyError as error:
        # Sizes of one number, of which one could explain the cuts of the other.
        assert "cuts no parameter with certainty" in error.message
        reject()

    [stage] = make_strategy(learned, model, target, "rules")
    assert slices_of(stage) == slices_of(strategy[0])

    # At sizes of which the strategy shows something, the rule's slices are among those of the candidates.
    for other in map(sizes_of, others):
        if any(other[name] > 1 and said[name] == 1 for name in ("mp", "cp", "ep")):
            continue
        for name in names:
            [true] = [
                Candidate(each.matrices[0], cuts)
                for each in rules.rules
                if each.matches(name)
                for cuts in itertools.product(*(entry or () for entry in each.entries or ()))
            ]
            actual = learned.rule_for(name).candidates
            assert true.slices(tensors[name].shape, other) in [
                candidate.slices(tensors[name].shape, other) for candidate in actual
            ], (name, other.text)
