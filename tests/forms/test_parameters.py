"""Which parameters come out, in what type, and what is said about the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.reference import Strategy, rank_count, uncovered
from tests.running import done, fails, warns
from tests.small import COPIED, PLAIN_TARGET, SOURCE, TARGET, World, tensors
from tests.trees import (
    Value,
    ckpt_bytes,
    cut_ranks,
    layout,
    read_checkpoint,
    safetensors_metadata,
    same_checkpoints,
    same_ranks,
    scalar,
    single,
    text,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)
from tests.wire import field

FULL = tensors()


# Copied: in neither strategy.


def test_unlisted_values_are_copied_to_every_target_rank(world: World) -> None:
    copied = {
        **COPIED,
        "learning_rate": scalar(3, "Float32"),
        "table": value("table", (5, 2)),
        "note": text("héllo"),
    }
    world.save(FULL, copied=copied)
    world.convert()
    same_ranks(world.found(), world.expected(FULL, copied))


def test_unlisted_values_of_some_ranks_are_copied(world: World) -> None:
    world.save(FULL)
    ranks = cut_ranks(world.source, FULL)
    write_checkpoint(world.src / "rank_3" / "net-1_10.ckpt", {**ranks[3], **COPIED, "epoch_num": scalar(7)})
    world.convert()
    same_ranks(world.found(), world.expected(FULL, {**COPIED, "epoch_num": scalar(7)}))


def save_with_own(world: World, name: str) -> None:
    for rank, contents in cut_ranks(world.source, FULL, COPIED).items():
        write_checkpoint(world.src / f"rank_{rank}" / "net-1_10.ckpt", {**contents, name: scalar(100 + rank)})


@pytest.mark.parametrize("name", ["loss_scale", "scaler.loss_scale"])
def test_differing_copies_give_a_warning_and_the_lowest_rank_wins(name: str, world: World) -> None:
    save_with_own(world, name)
    warns(world.convert(), name)
    same_ranks(world.found(), world.expected(FULL, {**COPIED, name: scalar(100)}))


def test_each_target_gets_the_cur_rank_of_its_own_number(world: World) -> None:
    save_with_own(world, "cur_rank")
    assert "cur_rank" not in world.convert("--quiet").err
    for rank, contents in world.found().items():
        assert contents["cur_rank"].same(scalar(100 + rank))


# Left out, and missing.


def test_parameters_of_the_source_strategy_only_are_skipped_and_counted(tmp_path: Path) -> None:
    world = World(tmp_path, SOURCE, PLAIN_TARGET)
    world.save(FULL)
    warns(world.convert(), "1")
    same_ranks(world.found(), world.expected({"w": FULL["w"], "v": FULL["v"]}))


def test_weights_only_in_the_source_give_a_warning_unlike_optimizer_state(tmp_path: Path) -> None:
    cut = layout([2], [0])
    names = ["both", "adam_m.both", "head", "adam_v.head"]
    world = World(tmp_path, single({name: cut for name in names}), single({"both": cut}))
    world.save({name: value(name, (4,)) for name in names})
    result = world.convert()
    warns(result, "1 weight that the checkpoint holds and the target strategy does not list (left out): 'head'")
    assert "warning" not in world.run("--overwrite", "--include", "both").err


def test_every_parameter_with_a_missing_slice_is_listed_with_its_ranks(tmp_path: Path) -> None:
    strategy = single({"first": layout([4], [0]), "second": layout([2, 2], [0]), "third": layout([4], [-1])})
    world = World(tmp_path, strategy, single({"first": layout([1], [-1]), "second": layout([1], [-1])}))
    world.save({name: value(name, (8,)) for name in ("first", "second", "third")}, ranks=[0, 2])
    output = world.refuses(3, "first", "second", "1", "3").err
    assert "third" not in output


# `none`.


def test_none_as_a_source_lists_every_tensor_of_more_than_one_element(world: World) -> None:
    """What the target does not list is left out if it has several elements, and copied if it has one."""
    one = {**COPIED, "scale": scalar(5, "Float32"), "bias": scalar(6, shape=(1, 1))}
    path = write_checkpoint(world.root / "full.ckpt", {**FULL, **one, "extra": value("extra", (10,))})
    done("transform-dir", path, world.dst, "--src-strategy", "none", "--dst-strategy", world.new)
    same_ranks(world.found(), world.expected(FULL, one))


def test_none_as_a_target_writes_everything_as_one_rank(world: World) -> None:
    copied = {**COPIED, "note": text("x"), "table": value("table", (3,))}
    world.save(FULL, copied=copied)
    done("transform-dir", world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", "none")
    same_ranks(world.found(), {0: {**FULL, **copied}})


# Tied parameters: shared by stages.

LISTED_TWICE: Strategy = [
    {"devices": 2, "layouts": {"emb": layout([2], [0, -1]), "a": layout([2], [0])}},
    {"devices": 2, "layouts": {"emb": layout([2], [-1, 0]), "b": layout([2], [0])}},
]
LISTED_ONCE: Strategy = [
    LISTED_TWICE[0],
    {"devices": 2, "layouts": {"b": layout([2], [0])}},
]
TIED = {"emb": value("emb", (4, 6)), "a": value("a", (4,)), "b": value("b", (4,))}
WHOLE = single({"emb": layout([1], [-1, -1]), "a": layout([1], [-1]), "b": layout([1], [-1])})


def test_a_parameter_shared_by_target_stages_is_written_to_each(tmp_path: Path) -> None:
    world = World(tmp_path, WHOLE, LISTED_TWICE)
    world.save(TIED)
    world.convert()
    same_ranks(world.found(), world.expected(TIED))


@pytest.mark.parametrize("lost", [[0, 1], [2, 3]])
def test_a_parameter_shared_by_source_stages_is_read_from_either(tmp_path: Path, lost: list[int]) -> None:
    world = World(tmp_path, LISTED_TWICE, LISTED_TWICE)
    ranks = cut_ranks(LISTED_TWICE, TIED, COPIED)
    for rank in lost:
        del ranks[rank]["emb"]
    write_tree(world.src, ranks, "rank_{rank}/net-1_10.ckpt")
    world.convert()
    same_ranks(world.found(), world.expected(TIED))


def save_unlisted(world: World) -> None:
    """Ranks of the last stage hold the table too, in an unrecorded layout, with other values."""
    for rank, contents in cut_ranks(LISTED_ONCE, TIED, COPIED).items():
        more = {"emb": value("not this one", (4, 6))} if rank >= 2 else {}
        write_checkpoint(world.src / f"rank_{rank}" / "net-1_10.ckpt", {**contents, **more})


def test_ranks_whose_stage_does_not_list_a_parameter_are_not_read_for_it(tmp_path: Path) -> None:
    world = World(tmp_path, LISTED_ONCE, WHOLE)
    save_unlisted(world)
    warns(world.convert(), "emb", "0", "1")
    same_ranks(world.found(), world.expected(TIED))


def test_a_table_that_only_unlisted_ranks_hold_is_not_read_from_them(tmp_path: Path) -> None:
    world = World(tmp_path, LISTED_ONCE, WHOLE)
    for rank, contents in cut_ranks(LISTED_ONCE, TIED, COPIED).items():
        preserved = {name: tensor for name, tensor in contents.items() if name != "emb"}
        more = {"emb": TIED["emb"]} if rank >= 2 else {}
        write_checkpoint(world.src / f"rank_{rank}" / "net-1_10.ckpt", {**preserved, **more})
    world.refuses(3, "'emb'")
    warns(world.convert("--allow-missing", "emb"), "emb")
    same_ranks(world.found(), world.expected({name: TIED[name] for name in ("a", "b")}))


def test_a_parameter_unlisted_in_the_source_strategy_cannot_be_cut(tmp_path: Path) -> None:
    cut = single({**TARGET[0]["layouts"], "table": layout([2], [0])})
    world = World(tmp_path, SOURCE, cut)
    world.save(FULL, copied={**COPIED, "table": value("table", (4,))})
    world.refuses(3, "table", "--exclude")


# Filters.


def test_include_and_exclude_select_parameters(world: World) -> None:
    world.save(FULL)
    world.convert("--include", "*w", "--include", "v", "--exclude", "m.*")
    expected = world.expected({"w": FULL["w"], "v": FULL["v"]}, {})
    same_ranks(world.found(), expected)


# Types and formats.


def test_text_is_skipped_in_safetensors_and_listed(world: World) -> None:
    world.save(FULL, copied={**COPIED, "note": text("hello")})
    warns(world.convert("--format", "safetensors"), "note")
    same_ranks(world.found(), world.expected(FULL))


FP8 = {name: value(name, FULL[name].array.shape, "F8_E4M3") for name in FULL}


def test_fp8_stays_fp8_in_safetensors(world: World) -> None:
    world.save(FP8, "rank_{rank}/net-1_10.safetensors")
    world.convert()
    same_ranks(world.found(), world.expected(FP8))


def test_fp8_has_no_ckpt_type(world: World) -> None:
    world.save({**FULL, "w": FP8["w"]}, "rank_{rank}/net-1_10.safetensors")
    world.refuses(3, "w", ".ckpt", options=("--format", "ckpt"))


def test_int4_marks_are_kept_through_both_formats(world: World) -> None:
    full = {name: value(name, FULL[name].array.shape, "Int4") for name in FULL}
    world.save(full)
    world.convert("--format", "safetensors")
    same_ranks(world.found(), world.expected(full))
    done(
        "transform-dir", world.dst, world.root / "back", "--src-strategy", world.new,
        "--dst-strategy", "none", "--format", "ckpt",
    )  # fmt: skip
    same_checkpoints(read_checkpoint(world.root / "back" / "rank_0" / "checkpoint_0.ckpt"), {**full, **COPIED})


def test_safetensors_metadata_is_mindspores(world: World) -> None:
    world.save(FULL, "rank_{rank}/net-1_10.safetensors", metadata={"remove_redundancy": "True"})
    world.convert()
    for path in world.dst.glob("rank_*/*.safetensors"):
        metadata = safetensors_metadata(path)
        assert metadata["format"] == "ms"
        assert metadata.get("remove_redundancy", "False") == "False"
        assert "crc_num" not in metadata
        with safe_open(path, "numpy") as opened:
            assert "w" in opened.keys()  # noqa: SIM118 (no mapping)


def test_the_crc_of_the_source_is_not_copied(world: World) -> None:
    world.save(FULL, crc=True)
    world.convert()
    for path in world.dst.glob("rank_*/*.ckpt"):
        assert b"crc_num" not in path.read_bytes()


def map_tensor(name: str) -> bytes:
    part = field(1, 2) + field(2, "int32") + field(3, b"\0" * 8)
    return field(1, field(1, name) + field(3, b"".join(field(1, part) for _ in range(3))))


def test_map_tensors_have_no_layout(world: World) -> None:
    world.save(FULL)
    for path in world.src.glob("rank_*/*.ckpt"):
        path.write_bytes(path.read_bytes() + map_tensor("hash_table"))
    world.refuses(3, "hash_table")


def test_zero_dimensional_and_empty_tensors_are_copied(world: World) -> None:
    copied = {"beta1_power": scalar(9, "Float32"), "none_yet": value("none_yet", (0,))}
    world.save(FULL, copied=copied)
    world.convert()
    same_ranks(world.found(), world.expected(FULL, copied))


def test_records_may_end_inside_a_row_and_be_empty(world: World) -> None:
    world.save(FULL)
    ranks = cut_ranks(world.source, FULL, COPIED)
    for rank, checkpoint in ranks.items():
        data = ckpt_bytes(checkpoint, record_bytes=5)
        path = world.src / f"rank_{rank}" / "net-1_10.ckpt"
        path.write_bytes(data)
    world.convert()
    same_ranks(world.found(), world.expected(FULL))


# Accumulated gradients, whose recorded optimizer shard may be untrue.

ACCU = "accu_grads.w"
PIPELINE: Strategy = [
    {
        "devices": 4,
        "layouts": {"w": layout([2, 2], [0, -1], -1, 2), ACCU: layout([2, 2], [0, -1], -1, 2)},
    },
    {"devices": 2, "layouts": {"b": layout([2], [0])}},
]
OTHER_PIPELINE: Strategy = [
    {"devices": 2, "layouts": {"w": layout([2], [-1, -1], -1, 1), ACCU: layout([2], [-1, -1], -1, 1)}},
    {"devices": 2, "layouts": {"b": layout([2], [0])}},
]
GRADIENTS = {"w": value("w", (8, 4)), ACCU: value(ACCU, (8, 4)), "b": value("b", (4,))}
PLAIN_PIPELINE: Strategy = [
    {"devices": 2, "layouts": {"w": layout([2], [0, -1]), ACCU: layout([2], [0, -1])}},
    {"devices": 2, "layouts": {"b": layout([2], [0])}},
]


@pytest.mark.parametrize("untrue", [True, False])
def test_accumulated_gradients_are_read_by_their_shapes_and_written_the_same_way(tmp_path: Path, untrue: bool) -> None:
    world = World(tmp_path, PIPELINE, OTHER_PIPELINE)
    unsharded = [ACCU] if untrue else []
    write_tree(world.src, cut_ranks(PIPELINE, GRADIENTS, COPIED, unsharded))
    world.convert()
    same_ranks(world.found(), cut_ranks(OTHER_PIPELINE, GRADIENTS, COPIED, unsharded))


def test_accumulated_gradients_of_a_source_without_shards_are_written_unsharded(tmp_path: Path) -> None:
    world = World(tmp_path, PLAIN_PIPELINE, PIPELINE)
    world.save(GRADIENTS)
    world.convert()
    same_ranks(world.found(), cut_ranks(PIPELINE, GRADIENTS, COPIED, [ACCU]))


def test_accumulated_gradients_can_become_full_tensors(tmp_path: Path) -> None:
    world = World(tmp_path, PIPELINE, WHOLE)
    write_tree(world.src, cut_ranks(PIPELINE, GRADIENTS, COPIED, [ACCU]))
    done("transform-dir", world.src, world.dst, "--src-strategy", world.old, "--dst-strategy", "none")
    same_ranks(world.found(), {0: {**GRADIENTS, **COPIED}})


def test_gradients_whose_shape_fits_neither_reading_are_an_error(tmp_path: Path) -> None:
    world = World(tmp_path, PIPELINE, PLAIN_PIPELINE)
    ranks = cut_ranks(PIPELINE, GRADIENTS, COPIED)
    for contents in ranks.values():
        if ACCU in contents:
            contents[ACCU] = value("odd", (3, 4))
    write_tree(world.src, ranks)
    world.refuses(3, ACCU)


def test_gradients_that_ranks_store_in_different_ways_are_an_error(tmp_path: Path) -> None:
    world = World(tmp_path, PIPELINE, PLAIN_PIPELINE)
    ranks = cut_ranks(PIPELINE, GRADIENTS, COPIED)
    ranks[0][ACCU] = cut_ranks(PIPELINE, GRADIENTS, COPIED, [ACCU])[0][ACCU]
    write_tree(world.src, ranks)
    world.refuses(3, ACCU)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_lists_cover_both_readings_of_accumulated_gradients(tmp_path: Path, rank: int) -> None:
    old = write_strategy(tmp_path / "old", PIPELINE)
    new = write_strategy(tmp_path / "new", PLAIN_PIPELINE)
    words = done("rank-list", rank, "--src-strategy", old, "--dst-strategy", new).out.split()
    shapes = {name: tensor.array.shape for name, tensor in GRADIENTS.items()}
    for unsharded in ([], [ACCU]):
        assert not uncovered(PIPELINE, PLAIN_PIPELINE, shapes, rank, [int(word) for word in words], unsharded)


# Tensors that contradict their layouts.


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("w", value("w", (5, 6))), ("v", value("v", (4, 1))), ("m.w", value("m.w", (2, 6), "Float16"))],
)
def test_a_slice_unlike_the_others_is_an_error_that_names_rank_and_parameter(
    world: World, name: str, wrong: Value
) -> None:
    world.save(FULL)
    contents = cut_ranks(world.source, FULL, COPIED)[1]
    write_checkpoint(world.src / "rank_1" / "net-1_10.ckpt", {**contents, name: wrong})
    world.refuses(3, name, str(world.src), "rank 1")


def test_a_tensor_of_another_rank_than_its_map_is_an_error(world: World) -> None:
    ranks = cut_ranks(world.source, FULL, COPIED)
    for contents in ranks.values():
        contents["w"] = value("w", (4, 3, 2))
    write_tree(world.src, ranks)
    world.refuses(3, "w")


def test_a_dimension_that_does_not_divide_by_its_shards_is_an_error(tmp_path: Path) -> None:
    world = World(tmp_path, single({"w": layout([2], [0])}), single({"w": layout([4], [0])}))
    world.save({"w": value("w", (6,))})
    world.refuses(3, "w", "6", "4")


def test_an_optimizer_shard_that_does_not_divide_is_an_error(tmp_path: Path) -> None:
    world = World(tmp_path, single({"w": layout([2], [0])}), single({"w": layout([4], [-1], -1, 1)}))
    world.save({"w": value("w", (6,))})
    world.refuses(3, "w", "6", "4")


def test_a_target_may_have_more_ranks_than_rows(tmp_path: Path) -> None:
    world = World(tmp_path, single({"w": layout([2], [0, -1])}), single({"w": layout([6, 1], [-1, 1])}))
    full = {"w": value("w", (2, 6))}
    world.save(full)
    world.convert()
    same_ranks(world.found(), world.expected(full))
    assert rank_count(world.target) == 6


def test_by_rank_lists_missing_slices(world: World) -> None:
    world.save(FULL, ranks=[0, 2])
    fails(3, *world.words(0, command="by-rank"), texts=["w", "1", "3"])


def test_gradients_without_their_saved_parameter_are_an_error(tmp_path: Path) -> None:
    """Four rows may be the half of 8 or the quarter of 16."""
    world = World(tmp_path, PIPELINE, PLAIN_PIPELINE)
    ranks = cut_ranks(PIPELINE, GRADIENTS, COPIED, [ACCU])
    for contents in ranks.values():
        contents.pop("w", None)
    write_tree(world.src, ranks)
    world.refuses(3, ACCU)


@pytest.mark.parametrize("devices", [1, 2])
def test_by_rank_reads_no_stage_whose_tensors_others_hold(tmp_path: Path, devices: int) -> None:
    """The last stage holds nothing but the tied table, so its files need not be present."""
    tied = [LISTED_TWICE[0], {"devices": 2, "layouts": {"emb": layout([2], [0, -1])}}]
    target = single({"emb": layout([devices], [-1, -1]), "a": layout([devices], [-1])})
    world = World(tmp_path, tied, target)
    full = {"emb": TIED["emb"], "a": TIED["a"]}
    words = done("rank-list", 0, "--src-strategy", world.old, "--dst-strategy", world.new).out.split()
    assert words == ["0", "1"]
    world.save(full, ranks=[0, 1])
    world.by_rank(0)
    same_ranks(world.found(), {0: world.expected(full)[0]})
