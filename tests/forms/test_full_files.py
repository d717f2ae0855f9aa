"""Division of full weights into files, and their maps: as in Hugging Face and MindSpore."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from reshard.asked import parse_memory, parse_size
from reshard.forms.full.written_files import (
    huggingface_files,
    huggingface_index,
    split_for_huggingface,
    split_for_unified,
    unified_files,
    unified_map,
)
from tests.corpus import CORPUS2
from tests.forms.test_full_weights import CASES, read

GB, GIB = 10**9, 1 << 30


def sized(*sizes: int) -> list[tuple[str, int]]:
    return [(f"t{number}", size) for number, size in enumerate(sizes)]


def random_sizes(seed: int) -> tuple[list[tuple[str, int]], int]:
    """Tensors, some without elements or larger than the limit, and the limit."""
    chance = random.Random(seed)
    limit = chance.randint(1, 60)
    return sized(*(chance.choice([0, 1, 5, 17, limit, limit + 1, 90]) for _ in range(chance.randint(0, 40)))), limit


def test_hugging_face_files_are_filled_in_order() -> None:
    sizes = sized(6, 6, 2, 6, 2, 2)
    assert split_for_huggingface(sizes, 10) == [["t0"], ["t1", "t2"], ["t3", "t4", "t5"]]
    assert [file.name for file in huggingface_files(sizes, 10)] == [
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    one = huggingface_files(sizes)
    assert one == [("model.safetensors", [name for name, _ in sizes])] and huggingface_index(one, sizes) is None


def test_a_tensor_over_the_limit_gets_its_own_file() -> None:
    assert split_for_huggingface(sized(1, 11, 1, 9), 10) == [["t1"], ["t0", "t2"], ["t3"]]
    assert split_for_unified(sized(1, 11, 1, 9), 10) == [["t1"], ["t3"], ["t0", "t2"]]


def test_no_tensors_make_no_file() -> None:
    assert split_for_huggingface([]) == split_for_unified([]) == []


def test_files_are_divided_as_by_huggingface_hub() -> None:
    hub: Any = pytest.importorskip("huggingface_hub")
    for seed in range(60):
        divides_alike(hub, *random_sizes(seed))


def divides_alike(hub: Any, sizes: list[tuple[str, int]], limit: int) -> None:
    theirs = hub.split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    files = huggingface_files(sizes, limit)
    assert {file.name: file.tensors for file in files} == theirs.filename_to_tensors
    index = huggingface_index(files, sizes)
    assert (index is not None) == theirs.is_sharded or not files
    if index is not None:
        message = {"metadata": theirs.metadata, "weight_map": theirs.tensor_to_filename}
        assert index.decode() == json.dumps(message, indent=2, sort_keys=True) + "\n"


def test_mindspores_files_get_the_largest_tensor_in_the_smallest_file() -> None:
    sizes = sized(1 * GIB, 4 * GIB, 2 * GIB, 1 * GIB)
    # 8 GiB by 3 are three files.
    assert split_for_unified(sizes) == [["t1"], ["t2"], ["t0", "t3"]]
    assert split_for_unified(sized(3 * GIB)) == [["t0"]]
    # Never more files than tensors, and none without any.
    assert split_for_unified(sized(9 * GIB, 0, 0)) == [["t0"], ["t1", "t2"]]


@pytest.mark.parametrize("seed", range(60))
def test_no_file_exceeds_a_given_limit(seed: int) -> None:
    sizes, limit = random_sizes(seed)
    nbytes = dict(sizes)
    for split in (split_for_huggingface, split_for_unified):
        files = split(sizes, limit)
        assert sorted(name for names in files for name in names) == sorted(nbytes)
        assert all(names for names in files)
        # What has no bytes does not count.
        filled = [[nbytes[name] for name in names if nbytes[name]] for names in files]
        assert all(sum(tensors) <= limit or len(tensors) == 1 for tensors in filled)


@pytest.mark.parametrize("case", sorted(name for name in CASES if name.startswith("u")))
def test_files_are_divided_as_by_mindspore(case: str) -> None:
    directory = CASES[case] / "unified"
    index = json.loads((directory / "param_name_map.json").read_text())
    checkpoint = read(directory)
    nbytes = {name: math.prod(tensor.shape) * tensor.item_size for name, tensor in checkpoint.tensors.items()}
    # MindSpore takes equally large ones in the order in which rank after rank holds them, in files sorted as these.
    order = list(checkpoint.indexes[0].tensors) if len(checkpoint.files) == 2 else sorted(nbytes)
    if case.startswith("u05"):
        order.sort(key=lambda name: "embedding" not in name and "layers.0" not in name)
    sizes = [(name, nbytes[name]) for name in order]
    # Several parts were made of small data by a smaller unit.
    files = unified_files(sizes, None if len(set(index["weight_map"].values())) == 1 else 4096)
    total = sum(nbytes.values())
    expected = {"metadata": {"total_size": total}, "weight_map": index["weight_map"]}
    assert unified_map(files, sizes).decode() == json.dumps(expected, indent=4)


@pytest.mark.skipif(not CORPUS2.is_dir(), reason="the corpus of other forms is not on this machine")
def test_files_are_divided_as_by_hugging_face() -> None:
    directory = CORPUS2 / "h01_bf16_sharded"
    expected = json.loads((directory / "expected.json").read_text())["tensors"]
    sizes = [(name, 2 * math.prod(index["shape"])) for name, index in expected.items()]
    index = json.loads(huggingface_index(huggingface_files(sizes, 2000), sizes) or b"")
    document = json.loads((directory / "model/model.safetensors.index.json").read_text())
    assert index["weight_map"] == document["weight_map"]
    assert index["metadata"]["total_size"] == document["metadata"]["total_size"]


@pytest.mark.parametrize(
    "text, size",
    [
        ("5GB", 5 * GB),
        ("5gb", 5 * GB),
        (" 1.5 GB ", 15 * GB // 10),
        ("5GiB", 5 * GIB),
        ("200MB", 200 * 10**6),
        ("3KiB", 3072),
        ("2TB", 2 * 10**12),
        ("1000B", 1000),
    ],
)
def test_sizes_are_decimal_unless_the_unit_is_binary(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 gigabytes", "-5GB", "0GB", "0.0001KB", "1e9", "inf", "nanGB", "5GB5"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 5GB, 500M"):
        parse_size(text)


@pytest.mark.parametrize("text", ["5", " 300 ", "1.5"])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    for parse in (parse_size, parse_memory):
        with pytest.raises(ValueError, match="has no unit"):
            parse(text)
