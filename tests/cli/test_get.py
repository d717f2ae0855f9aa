"""get: prints or writes the whole tensor, whatever its layout."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpus import FIXTURES
from tests.running import LAUNCHER, Argument, done, fails
from tests.small import World, tensors
from tests.trees import Value, read_checkpoint, scalar, text, write_checkpoint


@pytest.fixture
def saved(plain: World) -> World:
    plain.save(tensors(names=["w", "v"]))
    return plain


def words(world: World, *more: Any) -> list[Any]:
    return ["get", world.src, *more, "--strategy", world.old]


def expected(name: str) -> Any:
    return tensors()[name].array.view("<f4")


def test_get_assembles_a_sliced_tensor(saved: World, tmp_path: Path) -> None:
    result = done(*words(saved, "w", "-o", tmp_path / "out" / "w.npy"))
    actual = np.load(tmp_path / "out" / "w.npy")
    assert actual.dtype == np.float32 and actual.tobytes() == expected("w").tobytes() and actual.shape == (8, 6)
    assert not result.out and "float32 [8,6]" in result.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["w.npy"]


@pytest.mark.parametrize("index", ["0:4,:", "-1", "...,2", "::-2,1::3", "3,4", "[1:2, 0]", ":"])
def test_get_slice_equals_numpy_slicing(index: str, saved: World, tmp_path: Path) -> None:
    done(*words(saved, "w", f"--slice={index}", "-o", tmp_path / "w.npy"))
    chosen = eval(f"array[{index.strip('[]')}]", {"array": expected("w")})
    actual = np.load(tmp_path / "w.npy")
    assert actual.shape == np.shape(chosen) and actual.tobytes() == np.ascontiguousarray(chosen).tobytes()
    (printed,) = done(*words(saved, "w", "--slice", index, "--json")).json
    assert np.array_equal(np.array(printed["values"], "f4").reshape(chosen.shape), chosen) and printed[
        "sliced_shape"
    ] == list(chosen.shape)


@pytest.mark.parametrize("index", ["8:", "5:5", ":,6:9"])
def test_a_slice_without_elements_is_an_error_that_names_the_shape(index: str, saved: World, tmp_path: Path) -> None:
    for output in ([], ["-o", tmp_path / "w.npy"]):
        fails(2, *words(saved, "w", f"--slice={index}", *output), texts=["selects no element", "[8,6]"])
    assert not (tmp_path / "w.npy").exists()


def test_standard_output_gets_an_array_for_numpy_or_text(saved: World) -> None:
    command = [sys.executable, "-c", LAUNCHER, *map(str, words(saved, "w", "-o", "-"))]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    assert np.load(BytesIO(printed)).tobytes() == expected("w").tobytes()
    output = done(*words(saved, "v")).out
    assert output.startswith("v  Float32  [4]\n[") and output.count(",") == 3 + output.splitlines()[0].count(",")


def test_get_with_a_pattern_prints_every_match(saved: World) -> None:
    report = done(*words(saved, "?", "--json")).json
    assert [row["name"] for row in report] == ["v", "w"]
    assert [row["dtype"] for row in report] == ["Float32", "Float32"]
    fails(2, *words(saved, "?", "-o", "all.npy"), texts=["matches 2 tensors", "'v'"])
    fails(3, *words(saved, "W"), texts=["no tensor 'W'", "did you mean 'w'"])


def test_npy_files_get_float32_for_dtypes_that_numpy_lacks_and_safetensors_files_get_the_dtype(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7FC0, 0x0001], "<u2")
    checkpoint = {
        "b": Value("BFloat16", bits),
        "f": Value("F8_E5M2", np.array([0x3C, 0xFC, 0x01], "u1")),
        "i": Value("Int4", np.array([0x12], "u1")),
        "s": Value("Float32", np.array(0x3F800000, "<u4")),
    }
    path = write_checkpoint(tmp_path / "all.safetensors", checkpoint)
    out, typed = tmp_path / "out.npy", tmp_path / "out.safetensors"
    result = done("get", path, "b", "--strategy", "none", "-o", out)
    actual = np.load(out)
    assert actual.dtype == np.float32 and actual.view("<u4").tolist() == [int(bit) << 16 for bit in bits]
    assert "note: 'b' is BFloat16" in result.err and "Float32" in result.err
    done("get", path, "f", "--strategy", "none", "-o", out)
    assert np.load(out).tolist() == [1.0, -np.inf, 2.0**-16]
    for name, stored in checkpoint.items():
        result = done("get", path, name, "--strategy", "none", "-o", typed)
        assert "Float32" not in result.err or name == "s"
        assert read_checkpoint(typed).keys() == {name}
        written = read_checkpoint(typed)[name]
        assert written.dtype == stored.dtype and written.array.tobytes() == stored.array.tobytes()
        assert written.array.shape == stored.array.shape
    done("get", path, "b", "--strategy", "none", "-o", typed, "--slice", "1:3")
    assert read_checkpoint(typed)["b"].array.tolist() == [0xC000, 0x7FC0]
    assert done("get", path, "b", "--strategy", "none", "--json").json[0]["values"] == [1.0, -2.0, "NaN", 2.0**-133]
    assert "two values a byte" in done("get", path, "i", "--strategy", "none").out


def test_a_text_is_not_written_as_safetensors(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "all.ckpt", {"says": text("grün")})
    fails(2, "get", path, "says", "--strategy", "none", "-o", tmp_path / "says.safetensors", texts=["'says'", ".npy"])
    assert not (tmp_path / "says.safetensors").exists()


def test_text_and_scalars_are_printed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "all.ckpt", {"says": text("grün"), "step": scalar(7)})
    assert done("get", path, "says", "--strategy", "none", "-q").out == "grün\n"
    assert done("get", path, "step", "--strategy", "none", "-q").out == "7\n"
    done("get", path, "says", "--strategy", "none", "-o", tmp_path / "says.npy")
    assert np.load(tmp_path / "says.npy") == "grün"


def test_memory_of_get_does_not_grow_with_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(6 << 20, dtype="<u4")
    path = write_checkpoint(tmp_path / "all.safetensors", {"w": Value("Float32", array)})
    created: list[int] = []
    from reshard.opened.tensor import LazyTensor

    empty = LazyTensor.empty

    def counting(tensor: LazyTensor, shape: tuple[int, ...]) -> Any:
        actual = empty(tensor, shape)
        created.append(actual.nbytes)
        return actual

    monkeypatch.setattr(LazyTensor, "empty", counting)
    done("get", path, "w", "--strategy", "none", "-o", tmp_path / "w.npy")
    assert np.array_equal(np.load(tmp_path / "w.npy").view("<u4"), array)
    assert max(created) <= 8 << 20 and sum(created) == array.nbytes


@pytest.mark.parametrize(
    "more, texts",
    [
        (["--slice", "a"], "no position, range or"),
        (["--slice", "1:2:3:4"], "no position, range or"),
        (["--slice", "::0"], "slice step cannot be zero"),
        (["--slice", "0,0,0"], "has the shape [8,6]"),
        (["--slice", "8"], "out of bounds"),
        (["-o", "w.ckpt"], "has to end in .npy or .safetensors"),
        (["-o", "w.npy", "--json"], "do not go together"),
    ],
)
def test_contradictory_options_of_get_are_wrong_usage(more: list[str], texts: str, saved: World) -> None:
    fails(2, *words(saved, "w", *more), texts=[texts])


def test_get_does_not_print_a_large_tensor(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "w.ckpt", {"w": Value("Int8", np.zeros((1 << 20) + 1, "u1"))})
    fails(2, "get", path, "w", "--strategy", "none", texts=["are too many to print", "--slice"])
    assert "..." in done("get", path, "w", "--strategy", "none", "--slice", "1:").out


def test_get_of_sliced_ranks_requires_a_strategy(saved: World) -> None:
    fails(2, "get", saved.src, "w", texts=["do not record how they are cut", "--strategy none"])
    fails(3, "get", saved.root / "nothing", "w", "--strategy", "none", texts=["does not exist"])


def test_a_missing_source_is_reported_before_a_missing_strategy(saved: World) -> None:
    mistyped = saved.src.with_name(saved.src.name[:-1])
    converted: list[Argument] = ["convert", mistyped, saved.root / "out", "--to", "unified"]
    for words in (converted, ["fingerprint", mistyped]):
        fails(3, *words, texts=["does not exist", f"did you mean {saved.src}"])
    fails(2, "fingerprint", saved.src, texts=["do not record how they are cut", "--strategy none"])


def test_targets_are_read_with_the_strategy_that_their_conversion_recorded(saved: World) -> None:
    saved.convert()
    commands: list[list[Argument]] = [["get", saved.dst, "w"], ["stats", saved.dst], ["fingerprint", saved.dst]]
    for words in commands:
        result = done(*words)
        assert result.out == done(*words, "--strategy", saved.new).out
        assert f"is read with its recorded strategy: --strategy {saved.new}" in result.err
    compared = done("diff", saved.src, saved.dst, "--a-strategy", saved.old, "--exit-code")
    assert f"--b-strategy {saved.new}" in compared.err


def test_a_recorded_strategy_is_not_used_for_files_that_the_conversion_did_not_write(saved: World) -> None:
    saved.convert()
    files = sorted(saved.dst.glob("rank_*/*"))
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, reversed(contents)):
        path.write_bytes(content)
        fails(2, "fingerprint", saved.dst, texts=["do not record how they are cut", "--strategy FILE"])
        fails(2, "diff", saved.src, saved.dst, "--a-strategy", saved.old, texts=["--b-strategy"])


def test_reading_an_unfinished_target_names_the_command_that_completes_it(saved: World) -> None:
    saved.by_rank(0)
    fails(3, "get", saved.dst, "w", texts=[f"to complete it: reshard resume {saved.dst}", "is not complete"])


def test_recorded_strategies_apply_to_the_files_of_their_conversion_only(saved: World) -> None:
    saved.convert()
    commands: list[list[Argument]] = [["get", saved.dst, "w"], ["fingerprint", saved.dst], ["stats", saved.dst]]
    # A training that went on there may have had another strategy.
    later = (saved.dst / "rank_0" / "checkpoint_0.ckpt").rename(saved.dst / "rank_0" / "net-2_10.ckpt")
    for words in commands:
        fails(2, *words, texts=["do not record how they are cut", "--strategy none"])
    texts = ["do not record how they are cut", "--b-strategy FILE"]
    fails(2, "diff", saved.src, saved.dst, "--a-strategy", saved.old, texts=texts)
    later.rename(saved.dst / "rank_0" / "checkpoint_0.ckpt")
    fails(2, "get", saved.dst / "rank_0" / "checkpoint_0.ckpt", "w", texts=["do not record how they are cut"])
    saved.new.rename(saved.new.with_name("moved"))
    fails(2, "get", saved.dst, "w", texts=["do not record how they are cut"])
    saved.old.rename(saved.new)
    fails(2, "get", saved.dst, "w", texts=["do not record how they are cut"])


def test_objects_are_printed_as_json(tmp_path: Path) -> None:
    src = FIXTURES / "dcp" / "hyper_w2_later" / "checkpoint"
    assert done("get", src, "optimizer.lr").out == "optimizer.lr  object\n0.001\n"
    assert done("get", src, "extra", "--json").json == [{"name": "extra", "object": {"names": ["a", "b"], "epoch": 2}}]
    fails(2, "get", src, "optimizer.lr", "--slice", "0", texts=["'optimizer.lr' is no tensor"])
    fails(3, "get", src, "optimizer.ls", texts=["did you mean 'optimizer.lr'"])
    # Commands that write nothing leave nothing out.
    assert "left out" not in done("get", src, "model.norm.weight").err


def test_a_pattern_matches_objects_too(tmp_path: Path) -> None:
    src = FIXTURES / "dcp" / "hyper_w2_later" / "checkpoint"
    report = done("get", src, "*", "--json").json
    assert {"name": "optimizer.lr", "object": 0.001} in report and any("values" in row for row in report)
    assert "optimizer.lr  object\n0.001\n" in done("get", src, "optimizer.l*").out
    fails(2, "get", src, "optimizer.l*", "-o", tmp_path / "lr.npy", texts=["matches no tensor"])
