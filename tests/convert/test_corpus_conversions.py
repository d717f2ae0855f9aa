"""Real strategies, end to end: every slice equals the one that MindSpore cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import cases
from tests.cases import Case
from tests.conftest import LONG
from tests.corpus import CORPUS, FIXTURES, needs_corpus
from tests.reference import uncovered
from tests.running import done
from tests.trees import Value, cut_ranks, read_tree, same_ranks, write_checkpoint, write_tree

#: Everything that is copied, not cut.
COPIED = {"global_step": Value("Int32", np.array([41], "<u4"))}


def ranks_of(case: Case, full: dict[str, Value]) -> dict[int, dict[str, Value]]:
    """What the ranks of a real run of this case save."""
    unsharded = case.unsharded if len(case.strategy) > 1 else []
    return cut_ranks(case.strategy, full, COPIED, unsharded)


def listed(case: Case) -> set[str]:
    return {name for stage in case.strategy for name in stage["layouts"]}


@pytest.mark.parametrize("name", cases.all_cases())
def test_full_tensors_become_mindspores_slices(name: str, tmp_path: Path) -> None:
    case = cases.load(name)
    write_checkpoint(tmp_path / "full.ckpt", case.full(offset=False))
    done(
        "transform-dir", tmp_path / "full.ckpt", tmp_path / "out", "--src-strategy", "none",
        "--dst-strategy", case.directory,
    )  # fmt: skip
    ranks = read_tree(tmp_path / "out")
    assert sorted(ranks) == list(range(sum(stage["devices"] for stage in case.strategy)))
    for rank in case.slices["ranks"]:
        first = 0
        for stage in case.strategy:
            if first <= rank < first + stage["devices"]:
                assert set(ranks[rank]) == set(stage["layouts"])
            first += stage["devices"]
        for parameter, tensor in ranks[rank].items():
            expected = case.expected(parameter, rank)
            if expected is not None:
                assert list(tensor.array.shape) == expected[0], (rank, parameter)
                assert cases.sha256_16(tensor.array) == expected[1], (rank, parameter)


@pytest.mark.parametrize("name", cases.all_cases())
def test_full_tensors_become_every_ranks_own_slices(name: str, tmp_path: Path) -> None:
    case = cases.load(name)
    full = case.full()
    write_checkpoint(tmp_path / "full.safetensors", {**full, **COPIED})
    done(
        "transform-dir", tmp_path / "full.safetensors", tmp_path / "out", "--src-strategy", "none",
        "--dst-strategy", case.directory,
    )  # fmt: skip
    same_ranks(read_tree(tmp_path / "out"), ranks_of(case, full))


@pytest.mark.deep
@pytest.mark.parametrize("name", cases.all_cases())
def test_all_ranks_become_the_full_tensors(name: str, tmp_path: Path) -> None:
    case = cases.load(name)
    full = case.full()
    write_tree(tmp_path / "src", ranks_of(case, full))
    done(
        "transform-dir", tmp_path / "src", tmp_path / "out", "--src-strategy", case.directory,
        "--dst-strategy", "none",
    )  # fmt: skip
    contents = {parameter: full[parameter] for parameter in full if parameter in listed(case)}
    same_ranks(read_tree(tmp_path / "out"), {0: {**contents, **COPIED}})


# All pairs of the cases that are one network.

NETWORK = [name for name in cases.EVERYWHERE if name.startswith(("10_", "10o_"))]
SHORT_PAIRS = [
    ("10_dp4mp4pp1", "10_dp3mp8pp1"),
    ("10_dp2mp2pp2", "10_dp1mp2pp4"),
    ("10o_dp2mp2pp2_optm1", "10_dp1mp2pp4"),
    ("10_dp1mp2pp4", "10o_dp2mp2pp2_optm1"),
    ("10o_dp2mp4pp1_optm1", "10_dp8mp1pp1"),
    ("10_dp3mp8pp1", "10o_dp2mp4pp1_optm1"),
    ("10_dp1mp4pp1", "10o_dp2mp2pp2_optm1"),
    ("10o_dp2mp2pp2_optm1", "10_dp1mp1pp1"),
]
PAIRS: list[Any] = [
    pytest.param(
        source, target, id=f"{source}-{target}",
        marks=() if (source, target) in SHORT_PAIRS else pytest.mark.long,
    )
    for source in NETWORK
    for target in NETWORK
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_one_layout_of_a_network_becomes_the_other(source: str, target: str, tmp_path: Path) -> None:
    old, new = cases.load(source), cases.load(target)
    full = {name: tensor for name, tensor in new.full().items() if name in listed(old)}
    only_in_source = {name: tensor for name, tensor in old.full().items() if name not in full}
    write_tree(tmp_path / "src", ranks_of(old, {**full, **only_in_source}))
    done(
        "transform-dir", tmp_path / "src", tmp_path / "out", "--src-strategy", old.directory,
        "--dst-strategy", new.directory,
    )  # fmt: skip
    same_ranks(read_tree(tmp_path / "out"), ranks_of(new, full))


# Strategy files in all their written forms.

FORMS = [name for name in cases.EVERYWHERE if (cases.case_directory(name) / "strategy_json").is_dir()]
MERGED = [name for name in cases.EVERYWHERE if (cases.case_directory(name) / "merged").is_dir()]


def forms_of(case: Case, scratch: Path) -> list[Path]:
    """Every way to name the case's strategy on the command line."""
    forms = [*sorted((case.path / "strategy_json").glob("*.json"))] if len(case.strategy) == 1 else []
    forms += sorted((case.path / "merged").glob("merged_strategy.*"))
    if (case.path / "strategy_json").is_dir():
        forms.append(case.path / "strategy_json")
    if len(case.strategy) == 1:
        forms += sorted(case.directory.glob("*.ckpt"))[:1]
    mixed = scratch / "mixed"
    shutil.copytree(case.directory, mixed)
    for merged in (case.path / "merged").glob("merged_strategy.*"):
        shutil.copy(merged, mixed / f"merged_ckpt_strategy{merged.suffix}")
    (mixed / "README").write_text("no strategy")
    return [*forms, mixed]


def form_cases(names: list[str]) -> list[Any]:
    return [pytest.param(name, id=name, marks=() if name in cases.IN_FIXTURES else pytest.mark.long) for name in names]


FORM_CASES = sorted({*FORMS, *MERGED})


@pytest.mark.parametrize("name", form_cases(FORM_CASES))
def test_every_form_of_a_strategy_gives_the_same_files(name: str, tmp_path: Path) -> None:
    case = cases.load(name)
    full = case.full()
    write_tree(tmp_path / "src", ranks_of(case, full))
    write_checkpoint(tmp_path / "full.ckpt", {**full, **COPIED})

    def convert(form: Path, out: Path) -> None:
        done("transform-dir", tmp_path / "src", out / "full", "--src-strategy", form, "--dst-strategy", "none")
        done(
            "transform-dir", tmp_path / "full.ckpt", out / "ranks", "--src-strategy", "none",
            "--dst-strategy", form,
        )  # fmt: skip
        contents = {parameter: full[parameter] for parameter in full if parameter in listed(case)}
        same_ranks(read_tree(out / "full"), {0: {**contents, **COPIED}})
        same_ranks(read_tree(out / "ranks"), ranks_of(case, full))

    *forms, mixed = forms_of(case, tmp_path)
    if not LONG:
        # Another one for each case.
        forms = forms[FORM_CASES.index(name) % max(1, len(forms)) :][:1]
    for index, form in enumerate([*forms, mixed]):
        convert(form, tmp_path / f"out{index}")


# Where MindSpore's own conversion is wrong or refuses.


@pytest.mark.parametrize("name", ["05_2dtp_tb16_opt", "07_layout8_opt"])
def test_out_of_order_maps_with_optimizer_shards_become_full_tensors(name: str, tmp_path: Path) -> None:
    case = cases.load(name)
    full = case.full()
    write_tree(tmp_path / "src", ranks_of(case, full), "rank_{rank}/net-1_10.safetensors")
    done(
        "transform-dir", tmp_path / "src", tmp_path / "out", "--src-strategy", case.directory,
        "--dst-strategy", "none",
    )  # fmt: skip
    same_ranks(read_tree(tmp_path / "out"), {0: {**full, **COPIED}})


def test_uneven_tables_are_joined_and_cut_by_their_recorded_sizes(tmp_path: Path) -> None:
    case = cases.load("12_manual_split4")
    write_checkpoint(tmp_path / "full.ckpt", case.full())
    done(
        "transform-dir", tmp_path / "full.ckpt", tmp_path / "out", "--src-strategy", "none",
        "--dst-strategy", case.directory,
    )  # fmt: skip
    rows = [tensors["embedding.embedding_table"].array.shape[0] for tensors in read_tree(tmp_path / "out").values()]
    assert rows == [10, 20, 30, 4]


# Rank lists of real strategies.


def rank_list_pairs() -> list[Any]:
    """The pairs with results from MindSpore; those that only the corpus has are long."""
    actual = {}
    for root in (CORPUS, FIXTURES):
        path = root / "rank_lists.json"
        for pair, ranks in (json.loads(path.read_text())["pairs"] if path.is_file() else {}).items():
            marks = () if root == FIXTURES else pytest.mark.long
            actual[pair] = pytest.param(*pair.split(" -> "), ranks, id=pair, marks=marks)
    return list(actual.values())


def one_of_each(source: Case, target: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters, one for each layout."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in target.shapes.items():
        if name in listed(source) and name in listed(target):
            cuts = [
                (number, stage["layouts"].get(name)) for case in (source, target)
                for number, stage in enumerate(case.strategy)
            ]  # fmt: skip
            kinds.setdefault(repr((shape, cuts)), (name, shape))
    return dict(kinds.values())


@pytest.mark.deep
@pytest.mark.parametrize(("source", "target", "mindspores"), rank_list_pairs())
def test_rank_lists_are_sufficient_and_irredundant(source: str, target: str, mindspores: dict[str, list[int]]) -> None:
    old, new = (None if name == "None" else cases.load(name) for name in (source, target))
    for rank, superset in mindspores.items():
        ranks = done(
            "rank-list", rank, "--src-strategy", old.directory if old else "none",
            "--dst-strategy", new.directory if new else "none", "--json",
        ).json["ranks"]  # fmt: skip
        assert len(ranks) <= len(superset), f"MindSpore needs only {superset}"
        if old is None or new is None:
            continue
        shapes = one_of_each(old, new)

        assert lacking(old, new, shapes, int(rank), ranks) == set()
        for other in ranks:
            rest = [entry for entry in ranks if entry != other]
            assert lacking(old, new, shapes, int(rank), rest), f"{other} of {ranks} is not needed"


def lacking(
    source: Case, target: Case, shapes: dict[str, tuple[int, ...]], rank: int, available: list[int]
) -> set[str]:
    """What the target rank cannot be given, under either reading of accumulated gradients."""
    gradients = [name for name in shapes if name.startswith("accu_grads.")]
    return {
        name
        for unsharded in ([], gradients)
        for name in uncovered(source.strategy, target.strategy, shapes, rank, available, unsharded)
    }


@needs_corpus
def test_the_corpus_has_more_cases_than_the_fixtures() -> None:
    assert len(cases.case_names(CORPUS)) > 60 > len(cases.IN_FIXTURES)
