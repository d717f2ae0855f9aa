"""Replicas according to the source strategy are compared before anything is written: samples, or all."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reshard as library
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError
from reshard.execute import Budget, Progress, reader
from reshard.forms.ranks.checkpoint import RankCheckpoint
from reshard.forms.ranks.tree import find_checkpoints
from reshard.layout import Box, Layout
from reshard.plan.pieces import StoredSlice
from reshard.source_replicas import compare
from reshard.source_replicas.choice import Holder, HolderGroup
from reshard.source_replicas.compare import ReplicaFiles, compare_replicas, entries_as_tensors
from reshard.storage import costs_of
from tests.counting import count_opened
from tests.reference import Strategy
from tests.running import Argument, Result, done, fails, warns
from tests.trees import (
    Value,
    cut_ranks,
    layout,
    read_checkpoint,
    same_ranks,
    scalar,
    single,
    text,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

# The layout that checkpoints here have, and one that passes every comparison of shapes.
TRUE, WRONG = ([2, 4], [0, -1]), ([4, 2], [1, -1])
PREFIXES = ("", "adam_m.", "adam_v.")
AGREE = "no difference between replicas in 54 samples of 54 parameters"
NO_REPLICAS = "no parameter has replicas to compare, so only shapes were checked"
NO_NORMS = ("--allow-missing", "*.norm")
WEIGHTS = [f"{prefix}blocks.{layer}.w{number}" for prefix in PREFIXES for layer in range(6) for number in (1, 2)]
NORMS = [f"{prefix}blocks.{layer}.norm" for prefix in PREFIXES for layer in range(6)]
FULL = {**{name: value(name, (32, 24)) for name in WEIGHTS}, **{name: value(name, (24,)) for name in NORMS}}
COPIED = {"global_step": scalar(7, shape=(1,))}


def model(matrix: list[int], cut: list[int], names: list[str] | None = None) -> Strategy:
    """A strategy that cuts the weights so, and gives every rank the norms whole."""
    layouts = {name: layout(matrix, cut if name in WEIGHTS else [-1]) for name in FULL}
    return single({name: created for name, created in layouts.items() if names is None or name in names})


class Tree:
    """A checkpoint of 8 ranks that was saved with the true layout, strategies, and a place to write."""

    def __init__(self, root: Path) -> None:
        self.root, self.src, self.dst = root, root / "src", root / "dst"
        self.true = write_strategy(root / "true", model(*TRUE))
        self.wrong = write_strategy(root / "wrong", model(*WRONG))
        self.new = write_strategy(root / "new", model([2], [0, -1]))

    def save(self, full: dict[str, Value] | None = None, strategy: Strategy | None = None) -> None:
        write_tree(self.src, cut_ranks(strategy or model(*TRUE), full or FULL, COPIED))

    def change(self, rank: int, *names: str) -> None:
        """Let a rank diverge: other values of some parameters."""
        path = self.src / f"rank_{rank}" / "net-1_10.ckpt"
        contents = read_checkpoint(path)
        changed = {name: Value(contents[name].dtype, contents[name].array + 1) for name in names}
        write_checkpoint(path, {**contents, **changed})

    def words(self, old: Path, *options: Argument, command: str = "transform-dir") -> list[Argument]:
        return [*command.split(), self.src, self.dst, "--src-strategy", old, "--dst-strategy", self.new, *options]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def replicas(result: Result) -> dict[str, Any]:
    replicas = result.json["replicas"]
    assert isinstance(replicas, dict)
    return replicas


CONVERSIONS: dict[str, tuple[str, list[Argument]]] = {
    "transform-dir": ("transform-dir", []),
    "by-rank": ("by-rank 1", []),
    "some ranks": ("transform-dir", ["--ranks", "1"]),
    "a share": ("transform-dir", ["--shard", "0/2"]),
    "plan": ("plan", []),
    "dry run": ("transform-dir", ["--dry-run"]),
    "all of it": ("transform-dir", ["--check-replicas", "all"]),
    "all of it, by rank": ("by-rank 0", ["--check-replicas", "all"]),
    "with --verify": ("transform-dir", ["--verify"]),
}


@pytest.mark.deep
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_strategy_that_swaps_axes_is_refused_and_nothing_is_written(kind: str, tree: Tree) -> None:
    tree.save()
    command, options = CONVERSIONS[kind]
    result = fails(
        3, *tree.words(tree.wrong, *options, command=command),
        texts=["wrong.ckpt", "does not fit this checkpoint, or replicas have diverged"],
    )  # fmt: skip
    warns(result, "36 of 54", "{,adam_m.,adam_v.}blocks.{0-5}.w{1-2}")
    warns(result, "reshard strategy check", "--replicas", "--check-replicas never", "rank_", "net-1_10.ckpt")
    assert len(result.err.splitlines()) <= 12
    assert not tree.dst.exists()
    done(*tree.words(tree.true, *options, command=command))


def test_one_rank_checks_the_strategy_as_all_ranks_do(tree: Tree) -> None:
    """Also if that rank itself gets no differing bytes."""
    tree.save()
    tree.change(4, *WEIGHTS)
    stages = [model([2], [0, -1], NORMS), model([2], [0, -1], WEIGHTS)]
    tree.new = write_strategy(tree.root / "stages", [stage for some in stages for stage in some])
    verdicts = [
        fails(3, *tree.words(tree.true, *options, command=command), texts=["of 54 sampled"]).err
        for command, options in (("transform-dir", []), ("by-rank 0", []), ("transform-dir", ["--ranks", "3"]))
    ]
    assert len(set(verdicts)) == 1
    done(*tree.words(tree.true, "--check-replicas", "all", command="by-rank 0"))


def test_recover_and_python_functions_refuse_a_wrong_strategy(tree: Tree) -> None:
    tree.save()
    shutil.rmtree(tree.src / "rank_5")
    fails(3, "recover", tree.src, tree.dst, "--strategy", tree.wrong, texts=["or replicas have diverged"])
    with pytest.raises(CheckpointError, match="or replicas have diverged") as caught:
        library.transform_checkpoints(str(tree.src), str(tree.dst), "checkpoint_", str(tree.wrong), str(tree.new))
    assert caught.value.parameter in WEIGHTS and caught.value.rank is not None
    assert not tree.dst.exists()
    warns(
        done("recover", tree.src, tree.dst, "--strategy", tree.true, "-v"),
        "no difference between replicas of 54 parameters",
    )


def test_replica_check_never_compares_nothing_and_reports_it(tree: Tree) -> None:
    tree.save()
    result = done(*tree.words(tree.wrong, "--check-replicas", "never", "--json", "-v"))
    assert replicas(result) == {"compared": "nothing", "samples": 0, "parameters": 0, "untested": 0, "tested": False}
    warns(result, "replicas were not compared (--check-replicas never)")


def test_the_summary_counts_compared_parameters(tree: Tree) -> None:
    tree.save()
    few = done(*tree.words(tree.true, "--json", "-v"))
    warns(few, AGREE)
    assert replicas(few) == {"compared": "samples", "samples": 54, "parameters": 54, "untested": 0, "tested": True}
    more = done(*tree.words(tree.true, "--json", "--verify", "--dry-run"))
    assert replicas(done(*tree.words(tree.true, "--json", "--verify", "--overwrite")))["samples"] > 54
    assert more.json["replicas"] is None, "everything is there already"
    everything = done(*tree.words(tree.true, "--json", "--check-replicas", "all", "--overwrite"))
    assert (replicas(everything)["compared"], replicas(everything)["parameters"]) == ("everything", 54)
    assert done(*tree.words(tree.true, "--json", "--overwrite")).json["replicas"] == few.json["replicas"]


def test_the_files_of_a_rank_list_leave_no_replicas_to_compare(tree: Tree) -> None:
    tree.save()
    strategies: list[Argument] = ["--src-strategy", tree.wrong, "--dst-strategy", tree.new]
    for rank in set(range(8)).difference(done("rank-list", 1, *strategies, "--json").json["ranks"]):
        shutil.rmtree(tree.src / f"rank_{rank}")
    result = done(*tree.words(tree.wrong, "-v", command="by-rank 1"))
    warns(result, "samples of 18 parameters", "others without replicas, checked by shape only")


class Reads:
    """What was read.

    Attributes:
        opened: times that each file was opened.
        sampled: (path, bytes) of every small request.
    """

    def __init__(self, opened: Counter[str]) -> None:
        self.opened = opened
        self.clear()

    def clear(self) -> None:
        self.opened.clear()
        self.sampled: list[tuple[str, int]] = []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    counted = Reads(count_opened(monkeypatch))

    read = ReplicaFiles.read

    def counting(self: ReplicaFiles, parameter: GlobalTensor, holder: Holder, box: Box, out: memoryview) -> None:
        counted.sampled.append((self._source.indexes[holder[0]].path, len(out)))
        read(self, parameter, holder, box, out)

    monkeypatch.setattr(ReplicaFiles, "read", counting)
    return counted


@pytest.mark.deep
@pytest.mark.parametrize(("options", "most"), [((), 1024), (("--verify",), 4 * 4096)])
def test_the_replica_check_reads_a_bounded_number_of_bytes(
    options: tuple[str, ...], most: int, tmp_path: Path, reads: Reads
) -> None:
    names = [f"blocks.{layer}.w{number}" for layer in range(100) for number in range(6)]
    full = {name: value(name, (64, 96)) for name in names}
    many = single({name: layout([4, 2], [0, -1]) for name in names})
    write_tree(tmp_path / "src", cut_ranks(many, full))
    strategy = write_strategy(tmp_path / "old", many)
    words: list[Argument] = ["--src-strategy", strategy, "--dst-strategy", "none", "--json", *options]
    report = replicas(done("transform-dir", tmp_path / "src", tmp_path / "dst", *words))
    assert report["tested"] and report["samples"] >= 100
    assert len(reads.sampled) <= most
    assert max(size for _, size in reads.sampled) <= 4096
    assert len({path for path, _ in reads.sampled}) == 8


def test_replica_check_all_reads_every_byte_of_every_replica(tree: Tree, reads: Reads) -> None:
    tree.save()
    done(*tree.words(tree.true, "--check-replicas", "all", "--dry-run"))
    everything = 8 * (len(WEIGHTS) * 8 * 24 + len(NORMS) * 24) * 4
    # Besides, the four slices of one weight are compared with each other.
    assert sum(size for _, size in reads.sampled) == everything + 4 * 8 * 24 * 4


def test_a_full_comparison_groups_ranks_by_content(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_MOST_FILES", 2)
    tree.save()
    for rank in (2, 5, 6):
        tree.change(rank, "blocks.3.norm")
    tree.change(6, "blocks.3.norm")
    with FileHandles() as handles:
        step = RankCheckpoint(next(iter(find_checkpoints(str(tree.src)).candidates("latest"))), handles)
        tensors, different = entries_as_tensors(["blocks.3.norm", "blocks.2.norm"], step)
        execution = Budget.of(2, 1 << 30, costs=costs_of(str(tree.src)))
        comparison = compare_replicas(tensors, step, handles, execution, Progress(), "all")
    (difference,) = comparison.differences
    assert not different and difference.parameter == "blocks.3.norm"
    assert difference.groups == [[0, 1, 3, 4, 7], [2, 5], [6]]


# Replicas that diverged.


def test_a_diverged_replica_is_named_and_never_continues(tree: Tree) -> None:
    tree.save()
    tree.change(5, "blocks.3.w1")
    result = fails(
        3, *tree.words(tree.true, "--check-replicas", "all"),
        texts=["'blocks.3.w1' differs between rank 1 and rank 5", "1 of 54"],
    )  # fmt: skip
    warns(result, str(tree.src / "rank_1" / "net-1_10.ckpt"), str(tree.src / "rank_5" / "net-1_10.ckpt"))
    assert not tree.dst.exists()
    done(*tree.words(tree.true, "--check-replicas", "never"))


def test_a_wholly_diverged_rank_is_named(tree: Tree) -> None:
    tree.save()
    tree.change(6, *WEIGHTS, *NORMS)
    fails(3, *tree.words(tree.true), texts=["diverged", "rank 6"])


def test_a_layout_wrong_for_some_parameters_is_refused(tree: Tree) -> None:
    full = {**FULL, **{f"blocks.{number}.head": value(f"head{number}", (32, 24)) for number in range(3)}}
    heads = sorted(full.keys() - FULL.keys())

    def layouts(of_heads: tuple[list[int], list[int]]) -> Strategy:
        contents = model(*TRUE)[0]["layouts"]
        return single({**contents, **{name: layout(*of_heads) for name in heads}})

    tree.new = write_strategy(
        tree.root / "all", single({name: layout([2], [-1, -1][: full[name].array.ndim]) for name in full})
    )

    tree.save(full, layouts(TRUE))
    wrong = write_strategy(tree.root / "half", layouts(WRONG))
    fails(3, *tree.words(wrong), texts=["3 of", "blocks.0.head"])


# Without replicas, or with replicas that cannot decide.


def test_without_replicas_the_plan_reports_a_check_of_shapes_only(tree: Tree) -> None:
    cut = single({name: layout([2, 4], [0, -1], -1, 4) for name in WEIGHTS})
    tree.save({name: FULL[name] for name in WEIGHTS}, cut)
    old = write_strategy(tree.root / "sharded", cut)
    for words in (tree.words(old), tree.words(old, command="plan"), tree.words(old, command="by-rank 1")):
        result = done(*words, "--json", "--overwrite", *NO_NORMS)
        replicas = result.json["replicas"]
        assert replicas == {"compared": "samples", "samples": 0, "parameters": 0, "untested": 36, "tested": False}
    assert NO_REPLICAS in done(*tree.words(old, "--overwrite", *NO_NORMS, command="plan")).out
    assert NO_REPLICAS not in done(*tree.words(old, "--overwrite", *NO_NORMS)).err, "there is nothing to do about it"
    warns(done(*tree.words(old, "--overwrite", "-v", *NO_NORMS)), NO_REPLICAS)


def test_a_deduplicated_save_has_nothing_to_compare(tree: Tree) -> None:
    tree.save()
    for rank in range(8):
        path = tree.src / f"rank_{rank}" / "net-1_10.ckpt"
        contents = read_checkpoint(path)
        # Of the two ranks that hold a weight, one saves it; of the eight that hold a norm, one.
        keep = {name for number, name in enumerate(WEIGHTS) if number % 2 == rank // 4}
        keep |= {name for number, name in enumerate(NORMS) if number % 8 == rank}
        write_checkpoint(path, {name: contents[name] for name in contents if name in keep or name in COPIED})
    warns(done(*tree.words(tree.true, "-v")), NO_REPLICAS)
    same_ranks(
        {rank: read_checkpoint(tree.dst / f"rank_{rank}" / f"checkpoint_{rank}.ckpt") for rank in range(2)},
        cut_ranks(model([2], [0, -1]), FULL, COPIED),
    )


def test_an_unsharded_source_has_no_strategy_to_test(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "full.ckpt", FULL)
    words: list[Argument] = ["--src-strategy", "none", "--dst-strategy", write_strategy(tmp_path / "new", model(*TRUE))]
    result = done("transform-dir", path, tmp_path / "dst", *words, "--json")
    assert result.json["replicas"] is None and "replicas" not in result.err


@pytest.mark.parametrize("effort", ["auto", "all"])
def test_constant_tensors_do_not_count_as_compared(effort: str, tree: Tree) -> None:
    zeros = {name: Value("Float32", full.array * 0) for name, full in FULL.items()}
    tree.save(zeros)
    warns(done(*tree.words(tree.wrong, "--check-replicas", effort, "-v")), NO_REPLICAS)


def test_rows_of_padding_do_not_hide_a_difference(tree: Tree) -> None:
    """Each slice is nearly all zeros, larger than a sample, and differs at its end only."""
    full = {name: Value("Float32", value(name, (4 * 200, 24)).array) for name in WEIGHTS}
    for name in full:
        full[name].array.reshape(4, 200, 24)[:, :150] = 0
    strategies = (single({name: layout(*cut) for name in WEIGHTS}) for cut in (TRUE, WRONG))
    true, wrong = strategies
    tree.save(full, true)
    words = tree.words(write_strategy(tree.root / "padded", wrong), *NO_NORMS)
    fails(3, *words, texts=["or replicas have diverged"])
    result = done(*tree.words(write_strategy(tree.root / "right", true), "--json", *NO_NORMS))
    # A sample of padding is replaced by another one: four samples, three of them padding on average.
    assert replicas(result)["parameters"] > len(WEIGHTS) // 2


def test_values_of_a_rank_are_not_replicas(tree: Tree) -> None:
    contents = model(*TRUE)
    names = ["net.dropout.generator._seed", "default_generator_0._offset"]
    strategy = single({**contents[0]["layouts"], **{name: layout([2, 4], [-1]) for name in names}})
    ranks = cut_ranks(contents, FULL, COPIED)
    for rank, tensors_ in ranks.items():
        tensors_.update({name: Value("Float32", value(name, (4,)).array + rank) for name in names})
    write_tree(tree.src, ranks)
    old = write_strategy(tree.root / "listed", strategy)
    for options in ((), ("--check-replicas", "all")):
        done(*tree.words(old, "--dry-run", *options))


@pytest.mark.parametrize("slices", [8, 64])
def test_two_exchanged_ranks_of_few_parameters_are_found(tmp_path: Path, slices: int) -> None:
    names = ["w0", "w1", "w2"]
    full = {name: value(name, (64 * slices, 3)) for name in names}
    strategy: Strategy = [{"devices": 2 * slices, "layouts": dict.fromkeys(names, layout([2, slices], [0, -1]))}]
    old = write_strategy(tmp_path / "old", strategy)
    for first, second in ((0, 1), (2, 5), (3, slices - 1), (slices, slices + 4)):
        src = tmp_path / f"src-{first}"
        write_tree(src, cut_ranks(strategy, full))
        (src / f"rank_{first}").rename(src / "aside")
        (src / f"rank_{second}").rename(src / f"rank_{first}")
        (src / "aside").rename(src / f"rank_{second}")
        words: list[Argument] = [
            "transform-dir",
            src,
            tmp_path / "dst",
            "--src-strategy",
            old,
            "--dst-strategy",
            "none",
        ]
        fails(3, *words, texts=("does not fit this checkpoint",))


def test_accumulated_gradients_are_compared_by_all_only_and_give_a_warning(tree: Tree) -> None:
    names = [f"accu_grads.{name}" for name in WEIGHTS[:4]]
    strategy = single({**model(*TRUE)[0]["layouts"], **{name: layout(*TRUE) for name in names}})
    tree.new = write_strategy(tree.root / "new-grads", single({name: layout([2], [0, -1]) for name in names}))
    tree.save({**FULL, **{name: value(name, (32, 24)) for name in names}}, strategy)
    tree.change(7, *names)
    old = write_strategy(tree.root / "listed", strategy)
    assert "differ" not in done(*tree.words(old, "--dry-run")).err
    result = done(*tree.words(old, "--check-replicas", "all"))
    warns(result, "warning: 4 parameters of accumulated gradients differ", "have not reduced them yet")


def test_a_parameter_shared_by_stages_is_compared_across_them(tmp_path: Path) -> None:
    """Cut by rows on one stage, by columns on the other; no rank has a replica in its own stage."""
    names = ["embedding", "w0", "w1"]
    full = {name: value(name, (24, 16)) for name in names}
    shared: Strategy = [
        {"devices": 4, "layouts": {"embedding": layout([4], [0, -1]), "w0": layout([4], [0, -1])}},
        {"devices": 2, "layouts": {"embedding": layout([2], [-1, 0]), "w1": layout([2], [0, -1])}},
    ]
    write_tree(tmp_path / "src", cut_ranks(shared, full))
    words: list[Argument] = ["--src-strategy", write_strategy(tmp_path / "old", shared), "--dst-strategy", "none"]
    words = ["transform-dir", tmp_path / "src", tmp_path / "dst", *words]
    report = replicas(done(*words, "--dry-run", "--json"))
    assert (report["samples"], report["untested"]) == (8, 2)
    assert replicas(done(*words, "--dry-run", "--json", "--check-replicas", "all"))["parameters"] == 1
    path = tmp_path / "src" / "rank_5" / "net-1_10.ckpt"
    contents = read_checkpoint(path)
    write_checkpoint(path, {**contents, "embedding": Value("Float32", contents["embedding"].array + 1)})
    fails(3, *words, "--check-replicas", "all", texts=["'embedding' differs between rank", "and rank 5"])


# Files of different structure, and unreadable ones.


def test_files_may_contain_tensors_in_any_order(tree: Tree) -> None:
    ranks = cut_ranks(model(*TRUE), FULL, COPIED)
    contents = {rank: dict(reversed(ranks[rank].items())) if rank > 3 else ranks[rank] for rank in ranks}
    write_tree(tree.src, {rank: {"note": text("x" * rank), **tensors_} for rank, tensors_ in contents.items()})
    assert replicas(done(*tree.words(tree.true, "--json", command="by-rank 1")))["tested"]
    tree.dst = tree.root / "other"
    fails(3, *tree.words(tree.wrong, command="by-rank 1"), texts=["or replicas have diverged"])


def test_the_replica_check_skips_damaged_files(tree: Tree) -> None:
    tree.save()
    for rank in range(4, 8):
        path = tree.src / f"rank_{rank}" / "net-1_10.ckpt"
        path.write_bytes(path.read_bytes()[:1000])
    result = done(*tree.words(tree.true, "--json"))
    assert replicas(result) == {"compared": "samples", "samples": 18, "parameters": 18, "untested": 36, "tested": False}


def test_an_unreadable_sample_does_not_end_a_conversion(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.save()
    read = ReplicaFiles.read

    def failing(self: ReplicaFiles, parameter: GlobalTensor, holder: Holder, box: Box, out: memoryview) -> None:
        if holder[0] == 5:
            source = StoredSlice(self._source.indexes[5].path, 5, (), box)
            raise reader.unreadable(source, OSError(5, "Input/output error"))
        read(self, parameter, holder, box, out)

    monkeypatch.setattr(ReplicaFiles, "read", failing)
    report = replicas(done(*tree.words(tree.true, "--json")))
    assert report["tested"] and 18 < report["samples"] < 54
    tree.dst = tree.root / "other"
    fails(1, *tree.words(tree.true, "--check-replicas", "all"), texts=["cannot be read", "rank_5"])


# Which ranks are compared.


def layouts_of(devices: int) -> Iterator[Layout]:
    """Every layout of a matrix over so many devices, optimizer shards included."""
    for matrix in factorizations(devices):
        for count in range(len(matrix) + 1):
            for axes in itertools.permutations(range(len(matrix)), count):
                for rows in range(count + 1):
                    plain = Layout(matrix, (axes[:rows], axes[rows:]))
                    yield plain
                    for shards in range(2, plain.replica_count + 1):
                        if plain.replica_count % shards == 0:
                            yield Layout(matrix, (axes[:rows], axes[rows:]), shards)


def factorizations(number: int) -> Iterator[tuple[int, ...]]:
    if number == 1:
        yield ()
    for factor in range(2, number + 1):
        if number % factor == 0:
            for rest in factorizations(number // factor):
                yield (factor, *rest)


@pytest.mark.parametrize("devices", [4, 6, 8, 12, 16])
def test_a_probe_finds_every_wrong_layout_that_its_group_contradicts(devices: int) -> None:
    """Whatever the true layout: if members of an alleged group hold different slices, two of those probed do."""
    alike: dict[tuple[int, ...], dict[tuple[int, ...], Layout]] = {}
    for layout_record in layouts_of(devices):
        alike.setdefault(layout_record.cuts, {})[tuple(layout_record.slice_of_rank)] = layout_record
    shown = 0
    for group_of in alike.values():
        for alleged in group_of.values():
            for number in {0, alleged.slice_count // 2, alleged.slice_count - 1}:
                group = tuple(alleged.holders(number))
                probed = HolderGroup(group, group, ()).probed()
                assert probed[0] == group[0]
                for true in group_of:
                    if len({true[rank] for rank in group}) > 1:
                        shown += 1
                        assert len({true[rank] for rank in probed}) > 1, (alleged, true)
    assert shown > 0


def test_a_probe_of_a_thousand_ranks_reads_a_dozen_files() -> None:
    group = tuple(range(0, 8192, 8))
    assert len(HolderGroup(group, group, ()).probed()) == 12
    remaining = (8 * 77, 8 * 500)
    assert HolderGroup(group, remaining, ()).probed() == [*remaining]
    some = group[300:700]
    actual = HolderGroup(group, some, ()).probed()
    assert len(actual) == 12 and set(actual) <= set(some) and max(actual) == some[-1]


@pytest.mark.deep
def test_every_pair_of_small_layouts_is_distinguished(tmp_path: Path) -> None:
    """Through the command line: eight ranks, every two layouts of four slices of rows."""
    cuts: list[tuple[list[int], list[Any]]] = [
        ([2, 4], [0, -1]),
        ([4, 2], [1, -1]),
        ([2, 2, 2], [[1, 0], [-1]]),
        ([2, 2, 2], [[2, 0], [-1]]),
    ]
    cuts += [([2, 2, 2], [[0, 1], [-1]]), ([2, 2, 2], [[2, 1], [-1]])]
    full = {"w": value("w", (16, 8))}
    new = write_strategy(tmp_path / "new", single({"w": layout([2], [0, -1])}))
    paths = [write_strategy(tmp_path / f"cut{n}", single({"w": layout(*cut)})) for n, cut in enumerate(cuts)]
    contents = [cut_ranks(single({"w": layout(*cut)}), full) for cut in cuts]
    for number, ranks in enumerate(contents):
        src = write_tree(tmp_path / f"src{number}", ranks)
        for other, alleged in enumerate(contents):
            same = all(
                ranks[one]["w"].same(ranks[two]["w"])
                for one, two in itertools.combinations(range(8), 2)
                if alleged[one]["w"].same(alleged[two]["w"])
            )
            words: list[Argument] = [
                "plan",
                src,
                tmp_path / "dst",
                "--src-strategy",
                paths[other],
                "--dst-strategy",
                new,
            ]
            if same:
                done(*words)
            else:
                fails(3, *words, texts=["'w' differs between rank"])


# Other conversions.


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_lost_ranks_leave_the_others_to_compare(ending: str, tmp_path: Path) -> None:
    ranks = cut_ranks(model(*TRUE), FULL, COPIED)
    contents = {rank: ranks[rank] for rank in (0, 1, 2, 3, 6)}
    write_tree(tmp_path / "src", contents, f"rank_{{rank}}/net-1_10.{ending}")
    words: list[Argument] = ["--src-strategy", write_strategy(tmp_path / "old", model(*TRUE)), "--dst-strategy", "none"]
    report = replicas(done("transform-dir", tmp_path / "src", tmp_path / "dst", *words, "--json"))
    assert report["tested"] and report["untested"] == 0


def test_a_tensor_in_several_records_is_compared_as_a_whole(tree: Tree) -> None:
    ranks = cut_ranks(model(*TRUE), FULL, COPIED)
    write_tree(tree.src, {rank: ranks[rank] for rank in range(4)})
    write_tree(tree.src, {rank: ranks[rank] for rank in range(4, 8)}, record_bytes=100)
    for options in ((), ("--check-replicas", "all")):
        done(*tree.words(tree.true, "--dry-run", *options))
        fails(3, *tree.words(tree.wrong, "--dry-run", *options), texts=["or replicas have diverged"])


def test_a_large_tensor_is_compared_in_blocks_and_to_its_end(tmp_path: Path) -> None:
    shape = (2048, 96)
    cut = single({"w": layout([2, 2], [-1, 0])})
    ranks = cut_ranks(cut, {"w": value("w", shape)})
    ranks[3]["w"].array[-1, -1] += 1
    write_tree(tmp_path / "src", ranks)
    words: list[Argument] = ["--src-strategy", write_strategy(tmp_path / "old", cut), "--dst-strategy", "none"]
    words = ["transform-dir", tmp_path / "src", tmp_path / "dst", *words, "--max-memory", "64K"]
    assert math.prod(shape) * 2 > 16 << 10
    fails(3, *words, "--check-replicas", "all", "--jobs", "3", texts=["'w' differs between rank 1 and rank 3"])


def test_resume_repeats_the_replica_check_of_the_first_command(tree: Tree) -> None:
    tree.save()
    done(*tree.words(tree.wrong, "--check-replicas", "never", command="by-rank 0"))
    warns(done("resume", tree.dst, "-v"), "--check-replicas=never", "replicas were not compared")


def test_the_replica_check_is_not_part_of_the_identity(tree: Tree) -> None:
    tree.save()
    done(*tree.words(tree.true, "--ranks", "0", "--check-replicas", "never"))
    done(*tree.words(tree.true, "--check-replicas", "all"))
    assert json.loads((tree.dst / "reshard-manifest.json").read_text())
