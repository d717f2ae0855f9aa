"""Random conversions against the naive reference."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st

from reshard.checkpoints import FileHandles
from reshard.execute import budget as execution
from reshard.forms.request import Means
from reshard.plan.pieces import GroupLimits
from reshard.plan.planner import make_plan
from reshard.storage import local as storage_module
from reshard.text.messages import Report
from tests.asking import request_between
from tests.layouts import examples, holders, json_is_ambiguous, layouts, strategies, tensors
from tests.reference import ONE_DEVICE, Strategy, axes_of, names_of, rank_count, stage_of, uncovered
from tests.running import fails
from tests.small import world_of
from tests.trees import (
    FORMATS,
    Value,
    cut_ranks,
    read_tree,
    same_ranks,
    scalar,
    shapes_of,
    single,
    subset,
    tree_bytes,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

FORMS = ["pb", "json", "nested", "merged", "merged-json", "directory", "directory-json"]
TREES = [
    "rank_{rank}/net-3_7",
    "rank{rank}/net_rank_{rank}-3_7",
    "{rank}/net",
    "rank_{rank}/checkpoint_{rank}",
]
COPIED = {"global_step": scalar(1234, shape=(1,)), "loss_scale": scalar(77, "Float32")}


def write_any_form(draw: st.DrawFn, path: Path, strategy: Strategy, full: dict[str, Value]) -> Path:
    """A strategy file or directory in a drawn form; JSON only where it has one meaning."""
    forms = [form for form in FORMS if "json" not in form or not json_is_ambiguous(strategy, full)]
    form = draw(st.sampled_from(forms))
    note(f"{path.name} is written as {form}")
    return write_strategy(path, strategy, shapes_of(full), form)


def drawn(data: st.DataObject, most_devices: int = 6) -> tuple[dict[str, Value], Strategy, Strategy]:
    """Tensors, and two strategies of theirs, the first of which has at most so many devices."""
    full = data.draw(tensors())
    source = data.draw(strategies(full, most_devices), label="source")
    return full, source, data.draw(strategies(full), label="target")


@pytest.mark.quick
@examples(80)
@given(st.data())
def test_any_layout_converts_to_any_other(data: st.DataObject) -> None:
    full = data.draw(tensors())
    source = data.draw(strategies(full), label="source")
    expected = data.draw(st.sets(st.sampled_from(sorted(full)), min_size=1), label="wanted")
    target = data.draw(strategies(subset(full, sorted(expected))), label="target")
    tree = data.draw(st.sampled_from(TREES))
    ending, output = data.draw(st.sampled_from(FORMATS)), data.draw(st.sampled_from(["same", *FORMATS]))
    options: dict[str, Any] = {}
    if ending == "ckpt":
        options = {"crc": data.draw(st.booleans()), "record_bytes": data.draw(st.sampled_from([None, 7, 64]))}
    with world_of(source, target) as world:
        world.save(full, f"{tree}.{ending}", copied=COPIED, **options)
        world.old = data.draw(st.composite(write_any_form)(world.root / "old", source, full))
        world.new = data.draw(st.composite(write_any_form)(world.root / "new", target, full))
        world.convert("--format", output)
        preserved = ending if output == "same" else output
        assert {path.suffix for path in world.dst.glob("rank_*/*")} == {f".{preserved}"}
        same_ranks(world.found(), world.expected(subset(full, sorted(expected)), COPIED))


@pytest.mark.deep
@examples(15)
@given(st.data())
def test_a_round_trip_is_the_identity(data: st.DataObject) -> None:
    full, source, target = drawn(data)
    with world_of(source, target) as world:
        world.save(full, copied=COPIED)
        world.convert()
        world.src, world.dst, world.old, world.new = world.dst, world.root / "back", world.new, world.old
        world.convert("--prefix", "again")
        same_ranks(world.found("again"), cut_ranks(source, full, COPIED))


@pytest.mark.deep
@examples(15)
@given(st.data())
def test_full_tensors_are_cut_and_joined(data: st.DataObject) -> None:
    full = data.draw(tensors(fewest=2))
    strategy = data.draw(strategies(full), label="strategy")
    ending = data.draw(st.sampled_from(FORMATS))
    with world_of(strategy, strategy) as world:
        world.src = write_checkpoint(world.root / f"full.{ending}", {**full, **COPIED})
        path = data.draw(st.composite(write_any_form)(world.root / "strategy", strategy, full))
        world.old, world.new = Path("none"), path
        world.convert()
        same_ranks(world.found(), world.expected(full, COPIED))
        world.src, world.dst, world.old, world.new = world.dst, world.root / "whole", path, Path("none")
        world.convert()
        same_ranks(world.found(), {0: {**full, **COPIED}})


def removable(strategy: Strategy, ranks: dict[int, dict[str, Value]], full: dict[str, Value], rank: int) -> bool:
    """Whether everything that this rank saves is saved by another rank of its stage too."""
    for (_, name, _box), group in holders(strategy, full).items():
        saved = [holder for holder in group if name in ranks.get(holder, {})]
        if saved == [rank]:
            return False
    return True


@pytest.mark.deep
@examples(40)
@given(st.data())
def test_replicas_replace_lost_and_deduplicated_ranks(data: st.DataObject) -> None:
    full, source, target = drawn(data, 8)
    ranks: dict[int, dict[str, Value]] = cut_ranks(source, full)
    if data.draw(st.booleans(), label="deduplicated"):
        for (_, name, _box), group in holders(source, full).items():
            keeper = data.draw(st.sampled_from(group))
            for other in set(group) - {keeper}:
                del ranks[other][name]
        ranks = {rank: contents for rank, contents in ranks.items() if contents}
    for rank in data.draw(st.permutations(sorted(ranks)), label="perhaps lost"):
        if removable(source, ranks, full, rank) and data.draw(st.booleans()):
            del ranks[rank]
    note(f"left: { {rank: sorted(contents) for rank, contents in ranks.items()} }")
    with world_of(source, target) as world:
        write_tree(world.src, {rank: {**contents, **COPIED} for rank, contents in ranks.items()})
        world.convert()
        same_ranks(world.found(), world.expected(full, COPIED))


@pytest.mark.deep
@examples(15)
@given(st.data())
def test_a_missing_slice_is_an_error(data: st.DataObject) -> None:
    full, source, target = drawn(data)
    ranks: dict[int, dict[str, Value]] = cut_ranks(source, full)
    lost = data.draw(st.sampled_from(sorted(ranks)), label="lost")
    del ranks[lost]
    missing = uncovered(source, target, shapes_of(full), None, ranks)
    assume(missing and ranks)
    with world_of(source, target) as world:
        write_tree(world.src, ranks)
        world.refuses(3)


@pytest.mark.deep
@examples(40)
@given(st.data())
def test_any_remaining_files_are_converted_correctly_or_refused(data: st.DataObject) -> None:
    """Any tensors may be missing in any files: the output is correct, and no slice is invented."""
    full, source, target = drawn(data, 8)
    ranks: dict[int, dict[str, Value]] = cut_ranks(source, full)
    entries = [(rank, name) for rank, contents in ranks.items() for name in contents]
    for rank, name in data.draw(st.lists(st.sampled_from(entries), max_size=6, unique=True), label="lacking"):
        del ranks[rank][name]
    for rank in data.draw(st.sets(st.sampled_from(sorted(ranks)), max_size=2), label="lost"):
        del ranks[rank]
    saved = {name for contents in ranks.values() for name in contents}
    with world_of(source, target) as world:
        write_tree(world.src, {rank: {**contents, **COPIED} for rank, contents in ranks.items()})
        result = world.run()
        if result.status:
            assert result.status == 3
            assert not list(world.dst.glob("rank_*/*"))
            assert missing_slices(source, full, ranks), result.err
        else:
            same_ranks(world.found(), world.expected(subset(full, sorted(saved)), COPIED))


def missing_slices(strategy: Strategy, full: dict[str, Value], ranks: dict[int, dict[str, Value]]) -> bool:
    """Whether some slice of some stage is in no file, or a stage has no file at all."""
    if any(
        not any(name in ranks.get(rank, {}) for rank in group)
        for (_, name, _box), group in holders(strategy, full).items()
    ):
        return True
    return any(not any(stage_of(strategy, rank)[0] == number for rank in ranks) for number in range(len(strategy)))


@examples(15)
@given(st.data())
def test_expanded_json_is_read_correctly_or_refused(data: st.DataObject) -> None:
    """Where the entries of a map go together in two ways that fit the slices, it is never a guess."""
    shape = data.draw(st.lists(st.sampled_from([2, 4, 8, 3, 6]), min_size=2, max_size=3))
    full = {"w": value("w", shape)}
    layout_record = data.draw(layouts(data.draw(st.sampled_from([4, 8, 6, 12])), shape))
    assume(any(len(axes) > 1 for axes in axes_of(layout_record["tensor_map"], len(shape))))
    source, target = single({"w": layout_record}), data.draw(strategies(full))
    with world_of(source, target) as world:
        world.save(full)
        world.old = write_strategy(world.root / "old", source, shapes_of(full), "json")
        result = world.run()
        if result.status == 0:
            same_ranks(world.found(), world.expected(full))
        else:
            assert result.status == 3 and json_is_ambiguous(source, full), result.err


@examples(15)
@given(st.data())
def test_accumulated_gradients_stay_sharded_or_unsharded(data: st.DataObject) -> None:
    """Laid out as their parameters in the strategy, and stored so or without optimizer shards."""
    full = data.draw(tensors())
    gradients = {f"accu_grads.{name}": value(f"accu_grads.{name}", full[name].array.shape) for name in full}
    source, target = (
        [
            {
                **stage,
                "layouts": {**stage["layouts"], **{f"accu_grads.{n}": m for n, m in stage["layouts"].items()}},
            }
            for stage in data.draw(strategies(full, fewest_stages=2), label=label)
        ]
        for label in ("source", "target")
    )
    everything = {**full, **gradients}
    untrue = sorted(gradients) if data.draw(st.booleans(), label="untrue") else []
    with world_of(source, target) as world:
        write_tree(world.src, cut_ranks(source, everything, COPIED, untrue))
        world.convert()
        # If the source has no shards, they are written as the compiler makes them.
        plain = [
            name for name in gradients
            if name in untrue
            or not any(stage["layouts"][name]["shard_size"] for stage in source if name in stage["layouts"])
        ]  # fmt: skip
        same_ranks(world.found(), cut_ranks(target, everything, COPIED, plain))


@examples(20)
@given(st.data())
def test_damage_is_reported_without_a_traceback(data: st.DataObject) -> None:
    """Bytes of a checkpoint or strategy file are changed, inserted or cut off."""
    full, source, target = drawn(data)
    ending = data.draw(st.sampled_from(FORMATS))
    with world_of(source, target) as world:
        world.save(full, f"rank_{{rank}}/net-1_1.{ending}", copied=COPIED)
        world.old = data.draw(st.composite(write_any_form)(world.root / "old", source, full))
        files = sorted(path for place in (world.old, world.src) for path in [place, *place.rglob("*")])
        path = data.draw(st.sampled_from([path for path in files if path.is_file()]))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(content)))
            more = data.draw(st.binary(max_size=3))
            content[at : at + data.draw(st.integers(0, 3))] = more
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content))) :]
        path.write_bytes(content)
        assert world.run().status in (0, 3)


@pytest.mark.deep
@examples(30)
@given(st.data())
def test_rank_lists_of_any_layouts_are_sufficient_and_irredundant(data: st.DataObject) -> None:
    full, source, target = drawn(data)
    shapes = shapes_of(full)
    with world_of(source, target) as world:
        ranks = cut_ranks(source, full, COPIED)
        write_tree(world.src, ranks)
        world.convert()
        whole = tree_bytes(world.dst)
        world.dst = world.root / "one"
        chosen = data.draw(st.sets(st.integers(0, rank_count(target) - 1), min_size=1, max_size=3))
        for rank in sorted(chosen):
            rank_list = world.rank_list(rank)
            assert rank_list == sorted(set(rank_list))
            assert not uncovered(source, target, shapes, rank, rank_list), "insufficient"
            for other in rank_list:
                rest = [entry for entry in rank_list if entry != other]
                assert uncovered(source, target, shapes, rank, rest), f"{other} of {rank_list} is not needed"
            world.src = write_tree(world.root / f"src{rank}", {entry: ranks[entry] for entry in rank_list})
            world.by_rank(rank)
        files = tree_bytes(world.dst)
        assert files == {path: data_ for path, data_ in whole.items() if int(path[5 : path.index("/")]) in chosen}


@examples(10)
@given(st.data())
def test_rank_lists_lack_the_ranks_that_are_left_out(data: st.DataObject) -> None:
    full, source, target = drawn(data, 8)
    available = data.draw(st.sets(st.integers(0, rank_count(source) - 1), min_size=1), label="available")
    rank = data.draw(st.integers(0, rank_count(target) - 1), label="rank")
    with world_of(source, target) as world:
        lost = sorted(set(range(rank_count(source))) - available)
        options = ("--without-ranks", ",".join(map(str, lost))) if lost else ()
        if uncovered(source, target, shapes_of(full), rank, available):
            fails(3, *world.needs(rank, *options))
            return
        if not covered_by_one_stage(source, target, full, rank, available):
            return
        rank_list = world.rank_list(rank, *options)
        assert set(rank_list) <= available
        assert not uncovered(source, target, shapes_of(full), rank, rank_list)


def covered_by_one_stage(
    source: Strategy, target: Strategy, full: dict[str, Value], rank: int, available: set[int]
) -> bool:
    """Whether each tensor can be had from the ranks of one stage, without piecing stages together."""
    first = 0
    covered: set[str] = set()
    for number, stage in enumerate(source):
        alone = [
            {"devices": other["devices"], "layouts": other["layouts"] if index == number else {}}
            for index, other in enumerate(source)
        ]
        names = set(stage["layouts"])
        covered |= names - uncovered(alone, target, shapes_of(full), rank, available)
        first += stage["devices"]
    return covered >= names_of(source)


@pytest.mark.deep
@examples(10)
@given(st.data())
def test_output_does_not_depend_on_io_options(data: st.DataObject) -> None:
    full, source, target = drawn(data)
    ending = data.draw(st.sampled_from(FORMATS))
    with world_of(source, target) as world:
        world.save(full, f"rank_{{rank}}/net.{ending}", copied=COPIED)
        ways = {
            "plain": [],
            "mmap": ["--io", "mmap", "--jobs", "1"],
            "pread": ["--io", "pread", "--jobs", "4"],
            "small": ["--max-memory", data.draw(st.sampled_from(["1M", "4M", "64K"])), "--jobs", "3"],
            "tiny": ["--max-memory", "1B", "--jobs", "2", "--io", data.draw(st.sampled_from(["mmap", "pread"]))],
            "remote": ["--jobs", "2"],
        }
        files: dict[str, dict[str, bytes]] = {}
        for name, options in ways.items():
            with contextlib.ExitStack() as changed:
                if name == "tiny":
                    # Buffers smaller than a row of most tensors; 16 bytes hold an element.
                    changed.enter_context(mock.patch.object(execution, "MIN_BLOCK_BYTES", 32))
                if name == "remote":
                    changed.enter_context(mock.patch.object(storage_module, "file_system_of", lambda path: "nfs"))
                world.dst = world.root / name
                world.convert(*options)
            files[name] = tree_bytes(world.dst)
            assert files[name] == files["plain"], name
        same_ranks(read_tree(world.root / "plain"), world.expected(full, COPIED))


@examples(10)
@given(st.data())
def test_some_ranks_equal_those_of_a_full_conversion(data: st.DataObject) -> None:
    full, source, target = drawn(data)
    chosen: set[int] | None = data.draw(st.sets(st.integers(0, rank_count(target) - 1), min_size=1), label="ranks")
    assert chosen is not None
    with world_of(source, target) as world:
        world.save(full, copied=COPIED)
        world.convert("--ranks", ",".join(map(str, sorted(chosen))))
        expected = world.expected(full, COPIED)
        same_ranks(world.found(), {rank: expected[rank] for rank in chosen})


def test_the_reference_for_one_device_lists_no_parameters() -> None:
    assert names_of(ONE_DEVICE) == set() and rank_count(ONE_DEVICE) == 1


@examples(40)
@given(st.data())
def test_a_targets_source_files_do_not_depend_on_other_targets(data: st.DataObject) -> None:
    full, source, target = drawn(data)
    remaining = data.draw(st.sets(st.sampled_from(range(rank_count(target))), min_size=1), label="left to write")
    with world_of(source, target) as world, FileHandles() as handles:
        world.save(full, copied=COPIED)
        request = request_between(world)
        whole, part = make_plan(request, Means(handles, Report())), make_plan(request, Means(handles, Report()))
        limits = GroupLimits(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
        expected = {created.rank: [*created.tensors] for group in whole.groups(whole.requested) for created in group}
        actual = {
            created.rank: [*created.tensors] for group in part.groups(sorted(remaining), limits) for created in group
        }
        assert actual == {rank: expected[rank] for rank in remaining}
