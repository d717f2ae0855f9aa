"""On every tree that transform-dir converts, one rank at a time gives the same bytes, verify agrees, and recover
gives back what was there.

The trees are what training leaves behind: de-duplicated, torn or cut short at the newest step, ranks lost, parameters
tied, listed or not, accumulated gradients, tensors without elements, hand-split tables with empty slices, text,
values on some of the ranks.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from tests.layouts import examples, holders, layouts, strategies, tensors
from tests.reference import Strategy, names_of, rank_count, stage_of
from tests.running import Argument, done, reshard
from tests.small import World, world_of
from tests.trees import (
    FORMATS,
    Checkpoint,
    Value,
    cut_ranks,
    layout,
    same_checkpoints,
    scalar,
    subset,
    text,
    tree_bytes,
    value,
    write_tree,
)


class Case(NamedTuple):
    """A checkpoint on disk, and its saved contents."""

    source: Strategy
    target: Strategy
    full: dict[str, Value]
    saved: dict[int, dict[str, Value]]
    left: dict[int, dict[str, Value]]
    deduplicated: bool
    ending: str
    plain: list[str]


@st.composite
def models(draw: st.DrawFn) -> dict[str, Value]:
    """Tensors, some of them without elements, one perhaps with accumulated gradients."""
    full = draw(tensors())
    if draw(st.integers(0, 3)) == 0:
        full["nothing"] = value("nothing", draw(st.sampled_from([(0, 4), (4, 0), (0,)])))
    for name in sorted(full):
        if draw(st.integers(0, 3)) == 0:
            full[f"accu_grads.{name}"] = value(f"accu_grads.{name}", full[name].array.shape)
    return full


def with_owners_layout(strategy: Strategy, full: Checkpoint) -> Strategy:
    """Accumulated gradients only, with the layouts and stages of their parameters."""
    created = []
    for stage in strategy:
        own = dict(stage["layouts"])
        own.update({f"accu_grads.{n}": m for n, m in stage["layouts"].items() if f"accu_grads.{n}" in full})
        created.append({**stage, "layouts": own})
    return created


@st.composite
def laid_out(draw: st.DrawFn, full: dict[str, Value], most: int = 6) -> Strategy:
    """A strategy of everything; perhaps with a table split by hand into slices of which one is empty."""
    owners = {name: tensor for name, tensor in full.items() if not name.startswith("accu_grads.") and name != "table"}
    strategy: Strategy = draw(strategies(owners, most))
    for stage in strategy:
        if "nothing" in stage["layouts"]:
            # Boxes without elements are all equal, so they show no step between shards.
            stage["layouts"]["nothing"].update(shard_size=0, shard_step=0)
    strategy = with_owners_layout(strategy, full)
    if "table" in full:
        stage = draw(st.sampled_from(strategy))
        devices, rows = stage["devices"], full["table"].array.shape[0]
        layout_record = draw(layouts(devices, full["table"].array.shape))
        if devices > 1 and draw(st.booleans()):
            uneven = [0] * devices
            for _ in range(rows):
                uneven[draw(st.integers(0, devices - 1))] += 1
            layout_record = layout([devices], [0, -1], uneven=uneven)
        stage["layouts"]["table"] = layout_record
    return strategy


@st.composite
def values(draw: st.DrawFn, ranks: list[int], ending: str) -> dict[int, dict[str, Value]]:
    """Values outside the strategies, each on all ranks or on some; equal wherever they are, but for cur_rank."""
    target = {"global_step": scalar(7, shape=(1,)), "loss_scale": scalar(9, "Float32")}
    if ending == "ckpt":
        target["note"] = text("sävéd")
    tensors_of_rank: dict[int, dict[str, Value]] = {rank: {} for rank in ranks}
    for name, contents in target.items():
        some = draw(st.sets(st.sampled_from(ranks), min_size=1)) if draw(st.integers(0, 3)) == 0 else ranks
        for rank in some:
            tensors_of_rank[rank][name] = contents
    if draw(st.booleans()):
        for rank in ranks:
            tensors_of_rank[rank]["cur_rank"] = scalar(rank)
    return tensors_of_rank


@st.composite
def cases(draw: st.DrawFn) -> Case:
    full = draw(models())
    if draw(st.integers(0, 2)) == 0:
        full["table"] = value("table", (draw(st.integers(2, 7)), 3))
    source = draw(laid_out(full, 8), label="source")
    target = draw(laid_out(full), label="target")
    gradients = sorted(name for name in full if name.startswith("accu_grads."))
    plain = gradients if draw(st.booleans()) else []
    ending = draw(st.sampled_from(FORMATS))
    ranks = list(range(rank_count(source)))
    saved = cut_ranks(source, full, unsharded=plain)
    remaining = {rank: dict(contents) for rank, contents in saved.items()}
    deduplicated = draw(st.integers(0, 2)) == 0
    if deduplicated:
        groups: dict[Any, list[int]] = {}
        unsharded = [
            {**stage, "layouts": {n: {**m, "shard_size": 0} if n in plain else m for n, m in stage["layouts"].items()}}
            for stage in source
        ]
        groups = holders(unsharded, full)
        for (_, name, _box), group in groups.items():
            keeper = draw(st.sampled_from(group))
            for other in group:
                if other != keeper:
                    del remaining[other][name]
    if ending == "ckpt" and draw(st.booleans()):
        # Synchronous saves skip tensors without elements.
        remaining = {rank: {n: v for n, v in contents.items() if v.array.size} for rank, contents in remaining.items()}
    for rank, contents in draw(values(ranks, ending)).items():
        remaining[rank].update(contents)
    for rank in draw(st.sets(st.sampled_from(ranks), max_size=min(2, len(ranks) - 1)), label="lost"):
        del remaining[rank]
    return Case(source, target, full, saved, remaining, deduplicated, ending, plain)


def write_source(case: Case, world: World) -> dict[str, Any]:
    """Write the remaining files of a checkpoint; returns the options for it."""
    options: dict[str, Any] = {}
    if case.ending == "safetensors":
        options["metadata"] = {"remove_redundancy": str(case.deduplicated)}
    write_tree(world.src, case.left, f"rank_{{rank}}/net-3_10.{case.ending}", **options)
    return options


def write_steps(draw: st.DrawFn, case: Case, world: World) -> None:
    """Write the source, perhaps with an older and a torn newer step."""
    options = write_source(case, world)
    if draw(st.integers(0, 2)) == 0:
        older = {rank: {n: v._replace(array=v.array ^ v.array) for n, v in h.items()} for rank, h in case.saved.items()}
        write_tree(world.src, older, f"rank_{{rank}}/net-3_9.{case.ending}")
    if draw(st.integers(0, 2)) == 0:
        some = draw(st.sets(st.sampled_from(sorted(case.left)), min_size=1, max_size=2), label="torn")
        torn = {rank: {n: v._replace(array=~v.array) for n, v in case.left[rank].items()} for rank in some}
        write_tree(world.src, torn, f"rank_{{rank}}/net-3_11.{case.ending}", **options)


@pytest.mark.deep
@examples(35)
@given(st.data())
def test_one_rank_at_a_time_equals_all_at_once(data: st.DataObject) -> None:
    case = data.draw(cases())
    with world_of(case.source, case.target) as world:
        data.draw(st.composite(write_steps)(case, world))
        result = world.run()
        note(result.err)
        if result.status:
            assert result.status == 3
            return
        whole = tree_bytes(world.dst)
        world.dst = world.root / "one"
        for rank in data.draw(st.permutations(range(rank_count(case.target)))):
            world.by_rank(rank)
        assert tree_bytes(world.dst) == whole
        assert (world.dst / "reshard-manifest.json").exists()
        done("verify", world.dst, "--src", world.src, "--src-strategy", world.old, "--dst-strategy", world.new)
        some = data.draw(st.sets(st.sampled_from(range(rank_count(case.target))), min_size=1))
        world.dst = world.root / "some"
        world.convert("--ranks", ",".join(map(str, sorted(some))))
        assert tree_bytes(world.dst).items() <= whole.items()


@pytest.mark.deep
@examples(25)
@given(st.data())
def test_the_files_of_a_rank_list_suffice_for_its_rank(data: st.DataObject) -> None:
    full = data.draw(models())
    source, target = data.draw(laid_out(full, 8), label="source"), data.draw(laid_out(full), label="target")
    gradients = [name for name in full if name.startswith("accu_grads.")]
    plain = gradients if data.draw(st.booleans()) else []
    copied = {"global_step": scalar(7, shape=(1,))}
    ending = data.draw(st.sampled_from(FORMATS))
    with world_of(source, target) as world:
        pattern = f"rank_{{rank}}/net-3_10.{ending}"
        saved = cut_ranks(source, full, copied, plain)
        write_tree(world.src, saved, pattern)
        world.convert()
        whole = tree_bytes(world.dst)
        rank = data.draw(st.sampled_from(range(rank_count(target))))
        rank_list = world.rank_list(rank)
        if not rank_list:
            return
        world.src = write_tree(world.root / "few", {r: saved[r] for r in rank_list}, pattern)
        world.dst = world.root / "one"
        world.by_rank(rank)
        assert tree_bytes(world.dst).items() <= whole.items()
        assert len(tree_bytes(world.dst)) == 1


@pytest.mark.deep
@examples(15)
@given(st.data())
def test_the_sources_of_a_plan_suffice_with_names_and_casts(data: st.DataObject) -> None:
    full = data.draw(tensors())
    source, target = data.draw(laid_out(full, 8), label="source"), data.draw(laid_out(full), label="target")
    # State follows its weight.
    alone = [
        name for name in full if not any(name.endswith(f".{other}") or other.endswith(f".{name}") for other in full)
    ]
    chosen = data.draw(st.sets(st.sampled_from(sorted(alone))) if alone else st.just(set()), label="renamed")
    new = {name: f"new.{name}" for name in chosen}
    named = [
        {**stage, "layouts": {new.get(name, name): layout_record for name, layout_record in stage["layouts"].items()}}
        for stage in target
    ]
    options: list[Argument] = [
        word for old, created in sorted(new.items()) for word in ("--rename", f"{old}={created}")
    ]
    if not new or data.draw(st.booleans()):
        options += ["--cast", "BFloat16"]
    with world_of(source, named) as world:
        saved = cut_ranks(source, full, {"global_step": scalar(7, shape=(1,))})
        write_tree(world.src, saved, "rank_{rank}/net-3_10.ckpt")
        world.convert(*options)
        whole = tree_bytes(world.dst)
        rank = data.draw(st.sampled_from(range(rank_count(target))))
        world.dst = world.root / "one"
        plan = done(*world.words("--ranks", rank, "--json", *options, command="plan")).out
        sources = [source["rank"] for source in json.loads(plan)["sources"]]
        if not sources:
            return
        world.src = write_tree(world.root / "few", {r: saved[r] for r in sources}, "rank_{rank}/net-3_10.ckpt")
        world.by_rank(rank, *options)
        assert tree_bytes(world.dst).items() <= whole.items()
        assert len(tree_bytes(world.dst)) == 1


@pytest.mark.deep
@examples(30)
@given(st.data())
def test_recover_restores_ranks_or_reports_missing_slices(data: st.DataObject) -> None:
    """With an unlisted tied parameter of a stage in an unrecorded layout."""
    case = data.draw(cases())
    saved = {rank: dict(contents) for rank, contents in case.saved.items()}
    remaining = case.left
    others = [
        (number, name)
        for number, stage in enumerate(case.source)
        for name, tensor in case.full.items()
        if name not in stage["layouts"] and tensor.array.size and not name.startswith("accu_grads.")
    ]
    if others and not case.deduplicated and data.draw(st.booleans()):
        number, name = data.draw(st.sampled_from(others), label="tied and unlisted")
        first = sum(stage["devices"] for stage in case.source[:number])
        stage = case.source[number]
        layout_record = data.draw(layouts(stage["devices"], case.full[name].array.shape), label="its layout there")
        tied = cut_ranks([{**stage, "layouts": {name: layout_record}}], subset(case.full, [name]))
        for local, part in tied.items():
            saved[first + local].update(part)
            if first + local in remaining:
                remaining[first + local].update(part)
    with world_of(case.source, case.source) as world:
        write_source(case, world)
        result = reshard("recover", world.src, world.dst, "--strategy", world.old, "--prefix", "checkpoint_")
        note(result.err)
        if result.status:
            assert result.status == 3
            return
        ranks = world.found()
        listing = names_of(case.source)
        skipped = {name for contents in remaining.values() for name in contents if name not in listing}
        nowhere = {name for name in listing if case.full[name].array.size} - {
            name for contents in remaining.values() for name in contents
        }
        if nowhere and case.deduplicated and case.ending == "ckpt":
            # Neither a mark nor other files show which parameters an absent rank saved.
            assert "count as not saved" in result.err
            skipped |= nowhere
        message = "no rank is left to tell whether" in result.err
        for rank, contents in saved.items():
            place = stage_of(case.source, rank)[0]
            unlisted: set[str] = set()
            if not any(stage_of(case.source, other)[0] == place for other in remaining):
                # Whether it held parameters that only other stages list is unknown.
                unlisted = set(listing) - set(case.source[place]["layouts"])
                assert message or not unlisted
            # Tensors without elements may be absent.
            empty = {name for name, tensor in contents.items() if not tensor.array.size}
            passed_over = skipped | empty | unlisted
            same_checkpoints(without(ranks[rank], passed_over), without(contents, passed_over), f"rank {rank}")
        done("verify", world.dst, "--src", world.src, "--src-strategy", world.old, "--dst-strategy", world.new)


def without(checkpoint: Checkpoint, names: set[str]) -> Checkpoint:
    return {name: tensor for name, tensor in checkpoint.items() if name not in names}
