"""Fingerprints: equal in every layout, different after any change of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.layout import Box, whole_box
from reshard.numbers.fingerprint import PRIME, Workspace, fingerprint
from tests import cases
from tests.layouts import DTYPES, examples, layouts, strategies, tensors
from tests.reference import Array, Strategy, boxes, cut
from tests.running import Result, done, fails, warns
from tests.small import COPIED, SOURCE, World, world_of
from tests.small import tensors as small_tensors
from tests.trees import (
    Value,
    cut_ranks,
    layout,
    scalar,
    single,
    text,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

MASK = 2**64 - 1


# The sum, by its definition.


def drawn(counter: int, stream: int) -> int:
    golden = 0x9E3779B97F4A7C15
    mixed = ((counter + (stream << 60)) * golden) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def defined_sum(array: Array) -> int:
    """The sum as its definition reads, byte by byte and in whole numbers."""
    content = np.frombuffer(array.tobytes(), np.uint8)
    shape = (*array.shape, array.itemsize)
    group = len(shape) - 1
    while group and math.prod(shape[group:]) < 1024:
        group -= 1
    row_bytes = math.prod(shape[group:])
    tiles = -(-row_bytes // 2048)
    totals = [0] * 8
    for row in range(len(content) // row_bytes if row_bytes else 0):
        contents = content[row * row_bytes : (row + 1) * row_bytes].tobytes()
        contents += bytes(-len(contents) % 4)
        for number, word in enumerate(np.frombuffer(contents, "<i4").tolist()):
            tile, place = divmod(number, 512)
            for column in range(8):
                inner = (drawn(place * 8 + column, 3) >> 50) - 2**13
                outer = drawn((row * tiles + tile) * 8 + column, 1) >> 16
                totals[column] += word * inner * outer
    factors = [(drawn(2 * column, 2) << 64 | drawn(2 * column + 1, 2)) % PRIME for column in range(8)]
    return sum(factor * total for factor, total in zip(factors, totals)) % PRIME


def box_sum(array: Array, box: Box | None = None, block: int = 1 << 20) -> int:
    """What the program makes of a box of an array, in blocks of so many bytes."""
    box = whole_box(array.shape) if box is None else box
    content = np.frombuffer(cut(array, box).tobytes(), np.uint8)
    return Workspace(block).sum(array.shape, array.itemsize, box, content)


#: Rows of less, about and more than a row's least length and a tile, odd sizes among them.
SHAPES = [
    (), (1,), (0,), (5,), (3000,), (7, 5), (40, 64), (6, 256), (5, 513), (3, 1100), (2, 3, 700), (300, 3, 3),
    (4, 2, 3, 129), (2, 0, 300), (4, 6, 8, 16), (9, 1023), (1025, 2),
]  # fmt: skip


def random_array(shape: Sequence[int], width: int, seed: int = 1) -> Array:
    return np.random.RandomState(seed).randint(0, 256, (*shape, width)).astype("u1").view(f"V{width}")[..., 0]


@pytest.mark.deep
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if math.prod(shape) < 3000], ids=str)
def test_the_sum_follows_its_definition(shape: tuple[int, ...], width: int) -> None:
    array = random_array(shape, width)
    assert box_sum(array) == defined_sum(array)


@examples(150)
@given(st.data())
def test_sums_of_boxes_add_up_in_blocks_of_any_size(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    array = random_array(shape, data.draw(st.sampled_from([1, 2, 4, 8])))
    parts = [whole_box(shape)]
    for dimension, size in enumerate(shape):
        at = sorted({0, *data.draw(st.lists(st.integers(0, size), max_size=2)), size})
        intervals = list(itertools.pairwise(at)) or [(0, 0)]
        parts = [(*box[:dimension], cut_, *box[dimension + 1 :]) for box in parts for cut_ in intervals]
    block = data.draw(st.sampled_from([1024, 1500, 4096, 1 << 16]))
    assert sum(box_sum(array, box, block) for box in parts) % PRIME == box_sum(array)


@examples(100)
@given(st.data())
def test_sums_of_the_slices_of_any_layout_add_up(data: st.DataObject) -> None:
    (full,) = list(data.draw(tensors()).values())[:1]
    layout_record = data.draw(layouts(data.draw(st.sampled_from([1, 2, 4, 6, 8])), full.array.shape))
    distinct = set(boxes(layout_record, full.array.shape))
    assert sum(box_sum(full.array, box) for box in distinct) % PRIME == box_sum(full.array)


def test_extreme_values_are_summed_exactly() -> None:
    for number in (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        array = np.full((3, 1200), number, "<u4")
        assert box_sum(array) == defined_sum(array)


# What changes it.


@pytest.mark.deep
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_the_sum(dtype: str) -> None:
    array = value("w", (3, 7), dtype).array
    sound = array.tobytes()
    sums = {box_sum(array)}
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        sums.add(box_sum(np.frombuffer(bytes(damaged), array.dtype).reshape(array.shape)))
    assert len(sums) == 8 * len(sound) + 1


@examples(150)
@given(st.data())
def test_swapping_elements_rows_columns_or_slices_changes_the_sum(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(32, 32), (4, 600), (600, 4), (6, 2, 256), (2048,)]))
    array = (np.arange(math.prod(shape)) + data.draw(st.integers(0, 1 << 20))).astype(
        data.draw(st.sampled_from(["<u2", "<u4", "<u8"]))
    ).reshape(shape)  # fmt: skip
    other = array.copy()
    axis = data.draw(st.integers(0, len(shape) - 1))
    length = data.draw(st.integers(1, shape[axis] // 2))
    one = data.draw(st.integers(0, shape[axis] - 2 * length))
    two = data.draw(st.integers(one + length, shape[axis] - length))
    moved, sound = np.moveaxis(other, axis, 0), np.moveaxis(array, axis, 0)
    moved[one : one + length], moved[two : two + length] = sound[two : two + length], sound[one : one + length]
    assert box_sum(other) != box_sum(array)


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.T,
        lambda array: array[::-1],
        lambda array: array[:, ::-1],
        lambda array: np.roll(array, 1),
        lambda array: np.roll(array, 1, axis=0),
        lambda array: np.roll(array, 512),
        lambda array: array.byteswap(),
        lambda array: np.where(np.arange(array.size).reshape(array.shape) < array.size // 2, array, 0),
        lambda array: array.reshape(2, -1).T.reshape(array.shape),
        lambda array: -array,
    ],
)
def test_a_transposed_square_matrix_has_another_sum(change: Any) -> None:
    array = np.random.RandomState(5).randint(1, 1 << 30, (512, 512)).astype("<u4")
    other = np.ascontiguousarray(change(array)).astype("<u4")
    assert box_sum(other) != box_sum(array)


def test_swapped_signs_change_the_sum() -> None:
    """Two flipped sign bits would cancel in a sum modulo a power of two."""
    array = np.random.RandomState(5).standard_normal(4096).astype("<f4").view("<u4")
    sums = set()
    for one in range(0, 4096, 97):
        other = array.copy()
        other[[one, (one + 1) % 4096]] ^= 0x80000000
        sums.add(box_sum(other))
    assert len(sums) == len(range(0, 4096, 97)) and box_sum(array) not in sums


def test_the_fingerprint_depends_on_name_type_and_shape() -> None:
    created = {
        fingerprint("w", "Float32", (4, 6), 7),
        fingerprint("v", "Float32", (4, 6), 7),
        fingerprint("w", "Int32", (4, 6), 7),
        fingerprint("w", "Float32", (6, 4), 7),
        fingerprint("w", "Float32", (24,), 7),
        fingerprint("w", "Float32", (4, 6), 8),
    }
    assert len(created) == 6 and all(len(entry) == 32 for entry in created)


def test_the_fingerprint_of_this_version_is_fixed() -> None:
    """Results are kept and compared years later: another value needs another version."""
    array = np.arange(4 * 1500, dtype="<u4").reshape(4, 1500)
    assert fingerprint("w", "Int32", (4, 1500), box_sum(array)) == "562cbb2825036fd165972ab2e2f3c0c3"


# The command.


def shown(*words: Any) -> str:
    return done("fingerprint", *words, "--quiet").out


def of_full(root: Path, full: dict[str, Value], copied: dict[str, Value]) -> str:
    return shown(write_checkpoint(root / "one" / "full.ckpt", {**full, **copied}), "--strategy", "none")


@pytest.mark.deep
@examples(40)
@given(st.data())
def test_a_conversion_keeps_fingerprints(data: st.DataObject) -> None:
    full = data.draw(tensors())
    source, target = data.draw(strategies(full)), data.draw(strategies(full))
    format_ = data.draw(st.sampled_from(["ckpt", "safetensors"]))
    memory = data.draw(st.sampled_from(["1M", "64M"]))
    copied = {"global_step": scalar(7, shape=(1,)), "loss_scale": scalar(77, "Float32")}
    with world_of(source, target) as world:
        world.save(full, copied=copied)
        world.convert("--format", format_)
        before = shown(world.src, "--strategy", world.old, "--max-memory", memory, "--jobs", "2")
        assert before == of_full(world.root, full, copied)
        assert before == shown(world.dst, "--strategy", world.new)
        assert len(before.splitlines()) == len(full) + 3


@pytest.mark.deep
@pytest.mark.parametrize("name", cases.all_cases())
def test_ranks_of_a_real_strategy_and_the_full_tensors_have_the_same_fingerprints(name: str, tmp_path: Path) -> None:
    case = cases.load(name)
    listing = {parameter for stage in case.strategy for parameter in stage["layouts"]}
    full = {parameter: tensor for parameter, tensor in case.full().items() if parameter in listing}
    unsharded = case.unsharded if len(case.strategy) > 1 else []
    write_tree(tmp_path / "src", cut_ranks(case.strategy, full, COPIED, unsharded))
    assert shown(tmp_path / "src", "--strategy", case.directory) == of_full(tmp_path, full, COPIED)


def lines(result: Result) -> dict[str, str]:
    return {line.split()[-1]: line.split()[0] for line in result.out.splitlines()}


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_a_trainers_state_has_the_fingerprints_of_the_model(form: str, tmp_path: Path) -> None:
    full = {name: value(name, (4, 3)) for name in ("a.weight", "b.weight", "adam_m.a.weight")}
    source = write_checkpoint(tmp_path / "full.safetensors", full)
    state = tmp_path / "state"
    done("convert", source, state, "--src-strategy", "none", "--to", form, "--shards", 2)
    whole = done("fingerprint", source, "--strategy", "none").out
    assert done("fingerprint", state).out == whole and "  a.weight\n" in whole
    stored = done("fingerprint", state, "--rename", "*=*").out
    assert "  model.a.weight\n" in stored and stored.splitlines()[-1] != whole.splitlines()[-1]


def test_a_missing_slice_is_an_error(world: World) -> None:
    world.save(small_tensors(), ranks=[0, 1, 2])
    fails(3, "fingerprint", world.src, "--strategy", world.old, texts=["m.w", "rank 3"])
    # What is left out plays no part in choosing the step, as in a conversion.
    fails(3, "fingerprint", world.src, "--strategy", world.old, "--exclude", "m.*", texts=["m.w", "rank 3"])


def test_lost_ranks_and_deduplicated_saves_keep_fingerprints(plain: World) -> None:
    full = small_tensors(names=["w", "v"])
    plain.save(full)
    expected = shown(plain.src, "--strategy", plain.old)
    ranks = cut_ranks(plain.source, full, COPIED)
    saved = {
        0: {"w": ranks[0]["w"], **COPIED},
        1: {"v": ranks[1]["v"], **COPIED},
        2: {**COPIED},
        3: {"w": ranks[3]["w"], **COPIED},
    }
    write_tree(plain.root / "once", saved)
    assert shown(plain.root / "once", "--strategy", plain.old) == expected
    write_tree(plain.root / "lost", {rank: ranks[rank] for rank in (1, 2)})
    assert shown(plain.root / "lost", "--strategy", plain.old) == expected


def test_stages_that_share_a_parameter_must_agree(tmp_path: Path) -> None:
    tied: Strategy = [
        {"devices": 2, "layouts": {"w": layout([2], [0, -1])}},
        {"devices": 1, "layouts": {"w": layout([1], [-1, -1])}},
    ]
    strategy = write_strategy(tmp_path / "strategy", tied)
    ranks = cut_ranks(tied, {"w": value("w", (8, 6))})
    write_tree(tmp_path / "src", ranks)
    assert lines(done("fingerprint", tmp_path / "src", "--strategy", strategy))["w"]
    ranks[2] = {"w": value("other", (8, 6))}
    write_tree(tmp_path / "src", ranks)
    fails(3, "fingerprint", tmp_path / "src", "--strategy", strategy, texts=["w", "stages 0-1"])


def test_text_and_values_of_one_rank_are_listed_outside_the_total(tmp_path: Path) -> None:
    w = single({"w": layout([2], [0, -1])})
    strategy = write_strategy(tmp_path / "strategy", w)
    whole = []
    for number, others in enumerate([{}, {"note": text("text"), "cur_rank": scalar(5)}]):
        write_tree(tmp_path / f"{number}", cut_ranks(w, {"w": value("w", (8, 6))}, {**COPIED, **others}))
        actual = lines(done("fingerprint", tmp_path / f"{number}", "--strategy", strategy))
        assert set(others) < set(actual)
        whole.append(actual["checkpoint"])
    assert len(set(whole)) == 1


def test_differing_copies_give_a_warning(world: World) -> None:
    ranks = cut_ranks(SOURCE, small_tensors(), COPIED)
    ranks[2]["global_step"] = scalar(42, shape=(1,))
    write_tree(world.src, ranks)
    warns(done("fingerprint", world.src, "--strategy", world.old), "global_step", "lowest")


def test_json_contains_every_fingerprint(world: World) -> None:
    world.save(small_tensors())
    report = done("fingerprint", world.src, "--strategy", world.old, "--json").json
    printed = lines(done("fingerprint", world.src, "--strategy", world.old))
    assert {entry["name"]: entry["fingerprint"] for entry in report["parameters"]} == {
        name: digest for name, digest in printed.items() if name != "checkpoint"
    }
    assert report["fingerprint"] == printed["checkpoint"]


def test_a_selection_of_nothing_is_an_error(saved: World) -> None:
    """Else any two checkpoints had the same value."""
    fails(3, "fingerprint", saved.src, "--strategy", saved.old, "--include", "nomatch*", texts=["--include"])
