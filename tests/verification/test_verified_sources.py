"""verify and fingerprint choose the step, missing slices and layouts without the planner."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.checkpoints import FileHandles
from reshard.strategies import read_strategy
from reshard.text.messages import Report
from reshard.verification.reading import Reading
from tests.checkpoint_writing import write_ckpt
from tests.corpus import ROOT
from tests.reference import Strategy
from tests.running import Argument, done, fails, warns
from tests.small import COPIED, World
from tests.trees import Checkpoint, Value, cut_ranks, layout, scalar, single, value, write_checkpoint, write_tree
from tests.verification.pairs import Quiet, compare_trees, files_of

Held = dict[int, dict[str, Value]]


def stages(*layouts: Mapping[str, Any]) -> Strategy:
    """Pipeline stages with these parameters each."""
    return [stage for some in layouts for stage in single(some)]


def differences(world: World, *options: Argument) -> list[tuple[str, str | None, list[int]]]:
    """Kind, parameter and ranks of everything that verify finds."""
    result = world.verify("--json", *options)
    assert result.status in (0, 4), result.err
    return [
        (difference["kind"], difference["parameter"], difference["ranks"]) for difference in result.json["differences"]
    ]


def converted(world: World, target: Strategy, full: Checkpoint, copied: Checkpoint = COPIED, **options: Any) -> None:
    """Write the output of a correct conversion, without manifest and records."""
    write_tree(world.dst, cut_ranks(target, full, copied, **options), "rank_{rank}/checkpoint_{rank}.ckpt")


def lose(world: World, ranks: Iterable[int], step: str = "1_10") -> None:
    for rank in ranks:
        for path in (world.src / f"rank_{rank}").glob(f"*-{step}.*"):
            path.unlink()


def flipped(tensor: Value) -> Value:
    content = bytearray(tensor.array.tobytes())
    content[-1] ^= 1
    return Value(tensor.dtype, np.frombuffer(bytes(content), tensor.array.dtype).reshape(tensor.array.shape))


def without(contents: Held, names: Mapping[int, Sequence[str]]) -> Held:
    """What ranks hold, less some names on some of them."""
    return {
        rank: {name: tensor for name, tensor in checkpoint.items() if name not in names.get(rank, ())}
        for rank, checkpoint in contents.items()
    }


def imports_of(module: str) -> set[str]:
    """The modules that a module of verification imports, wherever in it."""
    path = ROOT / "reshard" / "verification" / f"{module}.py"
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return names | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def test_verification_imports_no_layout_plan_or_execution() -> None:
    makes_targets = {"cuts", "target", "writing", "rank_files", "written_files"}
    for path in (ROOT / "reshard" / "verification").glob("*.py"):
        rooms = {name for name in imports_of(path.stem) if name.startswith("reshard.")}
        assert not [name for name in rooms if name.split(".")[1] in ("layout", "execute", "opened", "convert")]
        assert not [name for name in rooms if makes_targets.intersection(name.split("."))]
        # Only as a type: what is asked for is data.
        plan = {name.split(".")[2] for name in rooms if name.startswith("reshard.plan")}
        assert plan <= ({"edits"} if path.stem in ("edited", "end_to_end") else set())


# Per form the modules that write its files and that read them back, and the modules of `reshard.forms` that both load:
# what is wrong there alike is found by no comparison. The list may only shrink.
BOTH_WAYS: dict[str, tuple[str, str, str]] = {
    "dcp": (
        "pytorch.dcp_written",
        "pytorch.dcp",
        "form pytorch.chunk_headers pytorch.dcp pytorch.form recorded request tracker",
    ),
    "hf-sharded": (
        "pytorch.shards",
        "pytorch.shards",
        "form full.contents full.form pytorch.chunk_headers pytorch.form pytorch.shards ranks.form ranks.naming "
        "ranks.tree recorded request target tracker writing",
    ),
    "huggingface": (
        "full.written_files",
        "full.contents",
        "form full.form ranks.naming ranks.tree request target",
    ),
    "checkpoint2": (
        "checkpoint2.written_files",
        "checkpoint2.checkpoint",
        "checkpoint2.form form request tracker",
    ),
    "torch_dist": (
        "megatron.written",
        "megatron.torch_dist",
        "form megatron.common megatron.keys pytorch.chunk_headers pytorch.dcp pytorch.form recorded request tracker",
    ),
}


def loaded(module: str) -> set[str]:
    """The modules of forms that a module of forms loads at its start, itself included."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = ROOT / "reshard" / "forms" / (name.replace(".", "/") + ".py")
        if name in found or not path.exists():
            continue
        found.add(name)
        body = ast.parse(path.read_text()).body
        modules = [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module]
        waiting += [each[len("reshard.forms.") :] for each in modules if each.startswith("reshard.forms.")]
    return found


@pytest.mark.parametrize("form", BOTH_WAYS)
def test_no_further_module_both_writes_a_form_and_reads_it_back(form: str) -> None:
    writer, reader, shared = BOTH_WAYS[form]
    assert sorted(loaded(writer) & loaded(reader)) == shared.split()


def test_legacy_trees_are_read_back_without_the_code_that_writes_them() -> None:
    """Of forms/megatron, verification imports constants, and no module that imports verification in turn."""
    prefix = "reshard.forms.megatron."
    for path in (ROOT / "reshard" / "verification").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
                assert all(alias.name.isupper() for alias in node.names), f"{path.name} imports {ast.unparse(node)}"
            assert not (isinstance(node, ast.Import) and any(each.name.startswith(prefix) for each in node.names))
    for path in (ROOT / "reshard" / "forms" / "megatron").glob("*.py"):
        assert "reshard.verification" not in path.read_text()


def test_verification_loads_no_module_of_conversions() -> None:
    code = "import json, sys, reshard.verification.end_to_end; print(json.dumps(list(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in json.loads(process.stdout) if name.startswith("reshard.")}
    assert not rooms & {"execute", "convert", "opened", "cluster"}


# A parameter that several stages share, each of which has lost a part of it.

ROWS = 12


def shared(*rows: int) -> Strategy:
    """A table that every stage cuts into another number of slices, and a parameter of each stage's own."""
    return stages(
        *({"w": layout([count], [0, -1]), f"own{number}": layout([count], [-1])} for number, count in enumerate(rows))
    )


SHARED = {"w": value("w", (ROWS, 3)), **{f"own{number}": value(f"own{number}", (2,)) for number in range(3)}}


@pytest.mark.parametrize(
    ("cuts", "lost"),
    [((2, 2), [0, 3]), ((2, 3), [0, 4]), ((3, 4), [1, 3, 6]), ((4, 3, 2), [0, 1, 5, 8])],
)
def test_a_parameter_assembled_from_several_stages_is_compared_and_summed(
    tmp_path: Path, cuts: Sequence[int], lost: Sequence[int]
) -> None:
    world = World(tmp_path, shared(*cuts), shared(3, *[2] * (len(cuts) - 1)))
    full = {name: tensor for name, tensor in SHARED.items() if name in {"w", *(f"own{n}" for n in range(len(cuts)))}}
    world.save(full)
    before = done("fingerprint", world.src, "--strategy", world.old).out
    lose(world, lost)
    world.convert("--verify")
    assert world.verify().status == 0
    assert done("fingerprint", world.src, "--strategy", world.old).out == before
    right = cut_ranks(world.target, full, COPIED)
    right[1]["w"] = flipped(right[1]["w"])
    write_tree(world.dst, right, "rank_{rank}/checkpoint_{rank}.ckpt")
    assert ("content", "w", [1]) in differences(world)


def test_a_part_missing_in_all_stages_is_reported_with_its_ranks(tmp_path: Path) -> None:
    world = World(tmp_path, shared(2, 3), shared(1))
    full = {name: SHARED[name] for name in ("w", "own0", "own1")}
    world.save(full)
    converted(world, world.target, {name: full[name] for name in ("w", "own0")})
    lose(world, [0, 2])
    lost = "a missing slice, which one of ranks 0,2 should hold: 'w'"
    fails(3, "fingerprint", world.src, "--strategy", world.old, texts=[lost])
    result = world.verify()
    assert result.status == 3
    warns(result, lost)


# What has no elements.


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_parameter_without_elements_is_never_lost(tmp_path: Path, shape: tuple[int, int]) -> None:
    old = single({"z": layout([2, 2], [-1, 1]), "a": layout([4], [-1])})
    world = World(tmp_path, old, single({"z": layout([2], [-1, 0]), "a": layout([2], [-1])}))
    world.save({"z": value("z", shape), "a": value("a", (2,))}, "rank_{rank}/net-1_10.safetensors")
    before = done("fingerprint", world.src, "--strategy", world.old).out
    lose(world, [0, 1])
    world.convert("--verify")
    assert world.verify().status == 0
    assert done("fingerprint", world.src, "--strategy", world.old).out == before


def test_a_skipped_empty_slice_does_not_indicate_a_deduplicated_save(tmp_path: Path) -> None:
    old = single({"t": layout([3], [0, -1], uneven=[2, 0, 4]), "a": layout([3], [-1]), "never": layout([3], [-1])})
    world = World(tmp_path, old, single({"t": layout([2], [0, -1]), "a": layout([2], [-1])}))
    full = {"t": value("t", (6, 2)), "a": value("a", (2,))}
    ranks = cut_ranks(old, full, COPIED)
    write_tree(world.src, without(ranks, {1: ["t"]}))
    world.convert("--verify")
    # A rank is absent and no file has `never`: in a deduplicated save the rank may have had it.
    lose(world, [1])
    assert world.verify().status == 0
    write_tree(world.src, without(ranks, {0: ["a"], 1: ["t"]}))
    assert world.verify().status == 0
    lose(world, [1])
    result = fails(3, "fingerprint", world.src, "--strategy", world.old)
    warns(result, "rank 1 should hold: 'never'")


def test_slices_of_a_type_of_unknown_size_may_be_empty(tmp_path: Path) -> None:
    old = single({"t": layout([3], [0, -1], uneven=[2, 0, 4]), "a": layout([3], [-1])})
    world = World(tmp_path, old, single({"t": layout([3], [0, -1], uneven=[0, 1, 5]), "a": layout([3], [-1])}))
    for rank, rows in enumerate([2, 0, 4]):
        parts = {"t": ("Quux", (rows, 2), bytes(range(6 * rows))), "a": ("Float32", (1,), b"abcd")}
        write_ckpt(world.src / f"rank_{rank}" / "net-1_10.ckpt", parts)
    world.convert("--verify")
    assert world.verify().status == 0
    before = done("fingerprint", world.src, "--strategy", world.old).out
    assert done("fingerprint", world.dst, "--strategy", world.new).out == before
    back: list[Argument] = ["--src-strategy", world.new, "--dst-strategy", world.old, "--verify"]
    done("transform-dir", world.dst, tmp_path / "back", *back)


# Accumulated gradients.

SHARDED, WHOLE = layout([2], [-1, -1], 2, 1), layout([2], [-1, -1])
GRADIENTS = {name: value(name, (4, 2)) for name in ("emb", "accu_grads.emb", "b")}


def gradients(cut: Mapping[str, Any], *others: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{"emb": one, "accu_grads.emb": one} for one in (cut, *others)]


@pytest.mark.parametrize("options", [["--include", "accu_grads.*"], ["--exclude", "emb"], ["--exclude", "b"]])
def test_filters_select_comparisons_without_changing_the_reading(tmp_path: Path, options: Sequence[str]) -> None:
    (cut,) = gradients(SHARDED)
    world = World(tmp_path, single({**cut, "b": WHOLE}), single({**cut, "b": WHOLE}))
    write_tree(world.src, cut_ranks(world.source, GRADIENTS, COPIED, ["accu_grads.emb"]))
    world.convert("--verify", *options)
    assert world.verify().status == 0
    (world.dst / "reshard-manifest.json").unlink()
    assert world.verify(*options).status == 0
    assert done("fingerprint", world.src, "--strategy", world.old, *options).status == 0


ONE, OTHER = gradients(WHOLE, SHARDED)
PIPELINE = stages({**ONE, "b": WHOLE}, OTHER)
RECORDS_NONE = stages({**ONE, "b": WHOLE}, ONE)


@pytest.mark.parametrize(
    ("source", "stored_plain", "several", "plain"),
    [
        (PIPELINE, False, True, False),
        (PIPELINE, True, True, True),
        (PIPELINE, True, False, True),
        (RECORDS_NONE, True, True, True),
        (RECORDS_NONE, True, False, False),
    ],
)
def test_the_source_decides_the_sharding_of_accumulated_gradients(
    tmp_path: Path, source: Strategy, stored_plain: bool, several: bool, plain: bool
) -> None:
    target = stages(OTHER, {"b": WHOLE}) if several else single({**OTHER, "b": WHOLE})
    world = World(tmp_path, source, target)
    write_tree(world.src, cut_ranks(source, GRADIENTS, COPIED, ["accu_grads.emb"] if stored_plain else []))
    wrong = cut_ranks(target, GRADIENTS, COPIED, [] if plain else ["accu_grads.emb"])
    converted(world, target, GRADIENTS, unsharded=["accu_grads.emb"] if plain else [])
    assert differences(world) == []
    # Whatever most of the target's ranks hold.
    write_tree(world.dst, wrong, "rank_{rank}/checkpoint_{rank}.ckpt")
    assert differences(world) == [("shape", "accu_grads.emb", [0, 1])]


def test_sharding_known_only_from_lost_files_is_an_error(tmp_path: Path) -> None:
    world = World(tmp_path, PIPELINE, single({**OTHER, "b": WHOLE}))
    world.save(GRADIENTS)
    converted(world, world.target, GRADIENTS)
    assert differences(world) == []
    lose(world, [2, 3])
    result = world.verify()
    assert result.status == 3
    warns(result, "'accu_grads.emb': only files of ranks 2-3 show whether it has optimizer shards")
    assert differences(world, "--exclude", "accu_grads.*") == [("extra", "accu_grads.emb", [0, 1])]


# De-duplicated saves.

NAMES = ["a.w", "b.w", "c.w", "d.w"]
REPLICATED = single({name: WHOLE for name in NAMES})
ON_ONE = single({name: layout([1], [-1, -1]) for name in NAMES})
WEIGHTS = {name: value(name, (4, 2)) for name in NAMES}


def save_deduplicated(world: World, step: str, marked: bool, ranks: Sequence[int] = (0, 1)) -> Held:
    """Each rank saves two of the four weights."""
    shares = [{name: WEIGHTS[name] for name in NAMES[2 * rank : 2 * rank + 2]} for rank in (0, 1)]
    contents = {rank: {**shares[rank], **COPIED} for rank in ranks}
    ending, options = ("safetensors", {"metadata": {"remove_redundancy": "True"}}) if marked else ("ckpt", {})
    write_tree(world.src, contents, "rank_{rank}/net-" + step + "." + ending, **options)
    return contents


def test_a_torn_save_marked_as_deduplicated_is_incomplete(tmp_path: Path) -> None:
    world = World(tmp_path, REPLICATED, ON_ONE)
    save_deduplicated(world, "1_10", marked=True)
    save_deduplicated(world, "1_11", marked=True, ranks=[0])
    converted(world, ON_ONE, WEIGHTS)
    result = world.verify()
    assert result.status == 0
    warns(result, "step 1_11 is not complete and is skipped", "rank 1 should hold: 'c.w', 'd.w'")
    result = done("fingerprint", world.src, "--strategy", world.old)
    warns(result, "step 1_11 is not complete and is skipped", "step 1_10 is used")
    assert "c.w" in result.out
    fails(3, "fingerprint", world.src, "--strategy", world.old, "--step", "1_11", texts=["'c.w', 'd.w'", "rank 1"])


def test_a_target_without_the_parameters_of_a_torn_save_is_not_verified(tmp_path: Path) -> None:
    world = World(tmp_path, REPLICATED, ON_ONE)
    save_deduplicated(world, "1_11", marked=True)
    world.convert("--format", "ckpt")
    lose(world, [1], "1_11")
    # As if the rest of the save had been taken for all of it.
    write_tree(world.dst, without(cut_ranks(ON_ONE, WEIGHTS, COPIED), {0: ["c.w", "d.w"]}), "rank_0/checkpoint_0.ckpt")
    for options in ([], ["--step", "1_11"], ["--include", "a.w"]):
        result = world.verify(*options)
        assert result.status == 3
        warns(result, "rank 1 should hold: 'c.w', 'd.w'")


def test_differing_files_of_one_stage_show_a_deduplicated_save(tmp_path: Path) -> None:
    layouts = [{f"{name}{number}": WHOLE for name in "ab"} for number in (0, 1)]
    world = World(tmp_path, stages(*layouts), single({**layouts[0], **layouts[1]}))
    full = {name: value(name, (4, 2)) for some in layouts for name in some}
    ranks = cut_ranks(world.source, full, COPIED)
    shares = {0: ["b0"], 1: ["a0"], 2: ["b1"], 3: ["a1"]}
    write_tree(world.src, without(ranks, shares))
    converted(world, world.target, full)
    assert differences(world) == []
    # From the remaining files of the other stage, b1 seems unsaved.
    lose(world, [3])
    converted(world, world.target, {name: full[name] for name in full if name != "b1"})
    fails(3, "fingerprint", world.src, "--strategy", world.old, texts=["rank 3 should hold: 'b1'"])
    assert world.verify("--step", "1_10").status == 3


@pytest.mark.parametrize("remaining", [[0], [0, 1]])
def test_unsaved_parameters_are_not_expected(tmp_path: Path, remaining: Sequence[int]) -> None:
    world = World(tmp_path, REPLICATED, ON_ONE)
    saved = {name: WEIGHTS[name] for name in NAMES[:2]}
    world.save(saved, ranks=[*remaining])
    converted(world, ON_ONE, saved)
    assert differences(world) == []


def test_parameters_unsaved_according_to_another_stage_are_not_expected(tmp_path: Path) -> None:
    """A stage of nothing but a tied parameter, of whose ranks one is absent."""
    tied, own = {"tied": WHOLE}, {"w": layout([2], [0, -1])}
    world = World(tmp_path, stages({**tied, **own}, tied), stages({**tied, **own}))
    saved = {"w": value("w", (4, 2))}
    world.save(saved, ranks=[0, 1, 2])
    world.convert("--allow-missing", "tied")
    assert differences(world) == []


# Which step.

SAVED = {"w": value("w", (4, 2)), "adam_m.w": value("m", (4, 2)), "b": value("b", (4, 2))}
WITH_STATE = single({"w": WHOLE, "b": layout([2], [0, -1]), "adam_m.w": SHARDED})
OLDER = {name: value(f"old {name}", (4, 2)) for name in SAVED}


def save_steps(world: World, older: bool) -> None:
    """The newest step has lost half of the optimizer state and of b; an older one may be whole."""
    if older:
        world.save(OLDER, "rank_{rank}/net-1_9.ckpt")
    world.save(SAVED, ranks=[0])


@pytest.mark.parametrize("older", [False, True])
def test_a_complete_step_is_preferred_to_one_sufficient_for_the_target(tmp_path: Path, older: bool) -> None:
    world = World(tmp_path, WITH_STATE, single({"w": WHOLE}))
    save_steps(world, older)
    converted(world, world.target, OLDER if older else SAVED)
    result = world.verify()
    assert result.status == 0
    warns(result, "step 1_10 is not complete")
    # Filters play no part in it.
    assert differences(world, "--include", "w", "--include", "global_step") == []
    assert bool(differences(world, "--step", "1_10")) == older


@pytest.mark.parametrize("older", [False, True])
def test_the_needs_of_selected_ranks_decide_last(tmp_path: Path, older: bool) -> None:
    world = World(tmp_path, WITH_STATE, single({"b": layout([4], [0, -1])}))
    save_steps(world, older)
    converted(world, world.target, OLDER if older else SAVED)
    assert differences(world, "--ranks", "0-1") == []
    result = world.verify("--ranks", "2")
    assert result.status == (0 if older else 3)
    if not older:
        warns(result, "step 1_10", "is not complete", "rank 1 should hold: 'b'")


def test_the_recorded_step_is_compared_before_the_manifest_exists(tmp_path: Path) -> None:
    world = World(tmp_path, WITH_STATE, WITH_STATE)
    world.save(OLDER, "rank_{rank}/net-1_9.ckpt")
    world.save(SAVED)
    world.by_rank(1, "--step", "1_9", "--exclude", "b")
    assert not (world.dst / "reshard-manifest.json").exists()
    assert differences(world, "--ranks", "1") == []
    assert {name for _, name, _ in differences(world, "--ranks", "1", "--step", "1_10")} == {"w", "adam_m.w"}
    # Unreadable records are ignored.
    for path in world.dst.glob(".reshard/plan.json"):
        path.write_bytes(b"{}")
    result = world.verify("--ranks", "1", "--step", "1_9", "--exclude", "b")
    assert result.status == 0
    warns(result, "it is ignored")


def test_a_damaged_file_counts_as_absent(tmp_path: Path) -> None:
    world = World(tmp_path, WITH_STATE, single({"w": WHOLE}))
    world.save(SAVED)
    converted(world, world.target, SAVED)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    path.write_bytes(path.read_bytes()[:-3])
    result = world.verify()
    assert result.status == 0
    warns(
        result,
        path,
        "step 1_10 is not complete, but the target strategy does not need the rest",
    )
    path = world.src / "rank_0" / "net-1_10.ckpt"
    path.write_bytes(path.read_bytes()[:-3])
    result = world.verify()
    assert result.status == 3
    warns(result, "has a readable file")


def damage(path: Path, name: str) -> None:
    """Change a bit of a parameter, and not the CRC that the file records."""
    content = path.read_bytes()
    wrong = content.replace(SAVED[name].array.tobytes(), flipped(SAVED[name]).array.tobytes())
    assert wrong != content
    path.write_bytes(wrong)


def test_a_source_file_whose_crc_is_wrong_counts_as_absent(tmp_path: Path) -> None:
    replicas = single({"w": WHOLE, "b": WHOLE})
    world = World(tmp_path, replicas, replicas)
    full = {name: SAVED[name] for name in ("w", "b")}
    world.save(full, crc=True)
    damage(world.src / "rank_0" / "net-1_10.ckpt", "w")
    world.convert("--verify")
    result = world.verify()
    assert result.status == 0
    warns(result, "is damaged: its CRC is", "rank 0 counts as absent at step 1_10")
    # What no sound copy is like is different nevertheless.
    right = cut_ranks(replicas, full, COPIED)
    right[1]["w"] = flipped(right[1]["w"])
    write_tree(world.dst, right, "rank_{rank}/checkpoint_{rank}.ckpt")
    assert [difference for difference in differences(world) if difference[0] != "file"] == [("content", "w", [1])]


def test_a_step_with_damaged_contents_is_skipped(tmp_path: Path) -> None:
    world = World(tmp_path, WITH_STATE, WITH_STATE)
    world.save(OLDER, "rank_{rank}/net-1_9.ckpt", crc=True)
    world.save(SAVED, crc=True)
    damage(world.src / "rank_0" / "net-1_10.ckpt", "w")
    converted(world, world.target, OLDER)
    result = world.verify()
    assert result.status == 0
    warns(result, "step 1_10 is not complete and is skipped", "is damaged: its CRC is")


def test_a_checkpoint_of_another_model_is_not_compared(tmp_path: Path) -> None:
    world = World(tmp_path, WITH_STATE, WITH_STATE)
    write_tree(world.src, {rank: {"other": value("other", (2,))} for rank in (0, 1)})
    write_tree(world.dst, {rank: {"other": value("other", (2,))} for rank in (0, 1)})
    for options in ([], ["--step", "1_10"]):
        result = world.verify(*options)
        assert result.status == 3
        warns(result, "none of the 3 parameters of", "different models")


# Only some target ranks.


WHOLE4 = layout([4], [-1])


def test_ranks_verify_with_only_their_source_files(tmp_path: Path) -> None:
    rows = single({"w": layout([4], [0, -1]), "b": WHOLE4})
    world = World(tmp_path, rows, rows)
    full = {"w": value("w", (8, 2)), "b": value("b", (2,))}
    world.save(full, ranks=[1])
    world.by_rank(1, "--verify")
    done(*world.words("--ranks", "1", "--verify"))
    assert differences(world, "--ranks", "1") == []
    right = cut_ranks(rows, full, COPIED)[1]
    write_checkpoint(world.dst / "rank_1" / "checkpoint_1.ckpt", {**right, "w": flipped(right["w"])})
    assert differences(world, "--ranks", "1") == [("content", "w", [1])]
    result = world.verify("--ranks", "0-1")
    assert result.status == 3
    warns(result, "rank 0 should hold: 'w'")


def test_some_ranks_are_compared_by_reading_only_their_bytes(tmp_path: Path) -> None:
    rows = single({"w": layout([4], [0, -1]), "b": WHOLE4})
    columns = single({"w": layout([4], [-1, 0]), "b": WHOLE4})
    world = World(tmp_path, rows, columns)
    full = {"w": value("w", (8, 4)), "b": value("b", (2,))}
    world.save(full)
    converted(world, columns, full)
    progress = Quiet()
    with FileHandles() as handles:
        means = Reading(handles, Report(), 1, 64 << 20, progress)
        old, new = read_strategy(str(world.old)), read_strategy(str(world.new))
        assert compare_trees(files_of(world.src), old, files_of(world.dst), new, means, ranks=[2]) == []
    both = 2 * sum(tensor.array.nbytes for tensor in cut_ranks(columns, full, COPIED)[2].values())
    assert progress.read == progress.total == both


def test_values_are_compared_with_the_lowest_available_rank(tmp_path: Path) -> None:
    layouts = [{"a": WHOLE}, {"b": WHOLE}]
    world = World(tmp_path, stages(*layouts), stages(*layouts))
    full = {name: value(name, (4, 2)) for name in "ab"}
    ranks = cut_ranks(world.source, full, COPIED)
    for rank in ranks:
        ranks[rank]["cur_rank"] = scalar(rank)
        if rank >= 2:
            ranks[rank]["loss_scale"] = scalar(1024)
    write_tree(world.src, ranks)
    target = cut_ranks(world.target, full, {**COPIED, "loss_scale": scalar(1024)})
    for rank in target:
        target[rank]["cur_rank"] = scalar(rank)
    write_tree(world.dst, target, "rank_{rank}/checkpoint_{rank}.ckpt")
    assert differences(world) == []
    assert differences(world, "--ranks", "0") == []
    del target[0]["loss_scale"]
    target[1]["cur_rank"] = scalar(0)
    write_tree(world.dst, target, "rank_{rank}/checkpoint_{rank}.ckpt")
    assert differences(world, "--ranks", "0-1") == [("content", "cur_rank", [1]), ("missing", "loss_scale", [0])]


@pytest.mark.parametrize("words", [["--cast", "BFloat16"], ["--rename", "w=model.w"]])
def test_a_rank_with_names_and_casts_verifies_with_only_its_source_files(words: list[Argument], tmp_path: Path) -> None:
    cut = single({"w": layout([4], [0, -1])})
    world = World(tmp_path, cut, cut)
    world.save({"w": value("w", (8, 4))})
    for rank in (0, 2, 3):
        shutil.rmtree(world.src / f"rank_{rank}")
    strategies: list[Argument] = ["--src-strategy", world.old, "--dst-strategy", "same"]
    done("by-rank", 1, world.src, world.dst, *strategies, *words, "--verify")
    path = world.dst / "rank_1" / "checkpoint_1.ckpt"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    output = fails(4, "verify", world.dst, "--src", world.src, *strategies, *words, "--ranks", "1").out
    assert "on rank 1" in output
