"""`reshard` reads files that MindSpore saves, and MindSpore loads files that `reshard` writes."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.mindspore_files import (
    assert_same,
    assert_same_ranks,
    load,
    load_tree,
    mindspore,
    plain,
    save,
    save_tree,
)
from tests.corpus import FIXTURES
from tests.running import Argument, done, fails
from tests.trees import Value, layout, single, write_checkpoint, write_strategy

pytestmark = pytest.mark.filterwarnings("default")

FORMATS = ["ckpt", "safetensors"]


def tensors() -> dict[str, Any]:
    """Every dtype that MindSpore saves and loads, in several dimensions, and scalars."""
    random = np.random.RandomState(0)
    result: dict[str, Any] = {}
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        octets = random.randint(0, 256, (3, 4, np.dtype(name).itemsize)).astype(np.uint8)
        result[name] = octets.view(name).reshape(3, 4)
    result["bool"] = random.randint(0, 2, (3, 4)).astype(bool)
    for name in ("float16", "float32", "float64"):
        result[name] = random.standard_normal((3, 2, 2)).astype(name)
    result["bfloat16"] = mindspore.Tensor(random.standard_normal((5, 3)), mindspore.bfloat16)
    result["scalar"] = np.float32(2.5)
    result["scalar_int"] = np.int32(7)
    result["one"] = np.array([3], np.int64)
    return result


def values(saved: dict[str, Any]) -> dict[str, Any]:
    """What is saved, as `load` gives it."""
    return {name: np.asarray(plain(value)) for name, value in saved.items()}


def convert(source: Path, out: Path, *options: str) -> dict[str, Any]:
    """The file through `reshard` from one rank to one rank, as MindSpore loads it."""
    done("transform-dir", source, out, "--src-strategy", "none", "--dst-strategy", "none", *options)
    return load_tree(out)[0]


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_dtype_survives_both_formats(source: str, target: str, tmp_path: Path) -> None:
    saved = tensors()
    path = tmp_path / f"net.{source}"
    save(saved, path, format=source)
    assert_same(load(path), values(saved))
    assert_same(convert(path, tmp_path / "out", "--format", target), values(saved))


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_slices_of_every_dtype_are_joined(source: str, target: str, tmp_path: Path) -> None:
    full = {name: value for name, value in values(tensors()).items() if value.shape == (3, 4)}
    full["bfloat16"] = values({"b": mindspore.Tensor(np.arange(12).reshape(3, 4), mindspore.bfloat16)})["b"]
    strategy = single({name: layout([2], [-1, 0]) for name in full})
    halves = {}
    for rank in range(2):
        cut: dict[str, Any] = {name: value[:, rank * 2 : rank * 2 + 2] for name, value in full.items()}
        bits = np.ascontiguousarray(cut["bfloat16"]).astype(np.uint32) << 16
        cut["bfloat16"] = mindspore.Tensor(bits.view(np.float32), mindspore.bfloat16)
        halves[rank] = cut
    save_tree(tmp_path / "src", halves, format=source)
    path = write_strategy(tmp_path / "strategy", strategy)
    done(
        "transform-dir", tmp_path / "src", tmp_path / "out", "--src-strategy", path, "--dst-strategy", "none",
        "--format", target,
    )  # fmt: skip
    assert_same_ranks(load_tree(tmp_path / "out"), {0: full})


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_int4_stays_int4(source: str, target: str, tmp_path: Path) -> None:
    """MindSpore makes no Int4 tensors on a CPU but loads and saves them: it gets one made by hand."""
    packed = np.arange(0, 240, 20, dtype=np.uint8).reshape(3, 4)
    write_checkpoint(tmp_path / "by_hand.ckpt", {"q": Value("Int4", packed)})
    parameters = mindspore.load_checkpoint(str(tmp_path / "by_hand.ckpt"))
    mindspore.save_checkpoint(parameters, str(tmp_path / f"net.{source}"), format=source)
    convert(tmp_path / f"net.{source}", tmp_path / "out", "--format", target)
    converted = mindspore.load_checkpoint(str(tmp_path / "out" / "rank_0" / f"checkpoint_0.{target}"), format=target)
    assert str(converted["q"].dtype) == "Int4"
    assert_same({"q": plain(converted["q"])}, {"q": packed.view(np.int8)})


REAL = [
    path
    for path in sorted((FIXTURES / "ckpt_files").iterdir())
    if path.suffix in (".ckpt", ".safetensors") and not path.name.startswith("encrypted")
]


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_real_files_load_equally_after_conversion(path: Path, tmp_path: Path) -> None:
    """Files that were saved in many ways."""
    original = load(path, remove_redundancy=path.name.startswith("remove_redundancy"))
    assert_same(convert(path, tmp_path / "out"), original)


def test_text_and_numbers_of_append_dict_are_copied(tmp_path: Path) -> None:
    extra = {"epoch_num": 3, "loss": 0.25, "done": True, "note": "schön 雪 \N{SNOWMAN}", "empty": ""}
    saved = {"w": np.arange(6, dtype=np.float32)}
    save(saved, tmp_path / "net.ckpt", append_dict=extra)
    original = load(tmp_path / "net.ckpt")
    assert original["note"] == extra["note"]
    assert_same(convert(tmp_path / "net.ckpt", tmp_path / "out"), original)


def test_text_is_skipped_in_safetensors_and_listed(tmp_path: Path) -> None:
    save({"w": np.arange(6, dtype=np.float32)}, tmp_path / "net.ckpt", append_dict={"note": "text", "n": 1})
    result = done(
        "transform-dir", tmp_path / "net.ckpt", tmp_path / "out", "--src-strategy", "none",
        "--dst-strategy", "none", "--format", "safetensors",
    )  # fmt: skip
    assert "note" in result.err
    assert sorted(load_tree(tmp_path / "out")[0]) == ["n", "w"]


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("crc_check", [False, True])
def test_parameters_in_several_records_are_joined(
    crc_check: bool, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In KiB; MindSpore's own is 512 * 1024.
    monkeypatch.setattr(mindspore.train.serialization, "SLICE_SIZE", 1)
    saved = {"a": np.arange(1000, dtype=np.float32).reshape(8, 125), "b": np.arange(7, dtype=np.int8)}
    path = tmp_path / "net.ckpt"
    save(saved, path, crc_check=crc_check)
    monkeypatch.undo()
    assert path.read_bytes().count(b"Float32") == 4
    assert_same(convert(path, tmp_path / "out", "--format", target), saved)


@pytest.mark.parametrize("form", FORMATS)
def test_a_crc_is_accepted_and_checked(form: str, tmp_path: Path) -> None:
    # A 0-d integer counts in MindSpore's sum as that many zero bytes.
    saved = {"w": np.arange(100, dtype=np.float32), "n": np.int32(5)}
    path = tmp_path / f"net.{form}"
    save(saved, path, crc_check=True, format=form)
    assert_same(convert(path, tmp_path / "out"), values(saved))

    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    at = bytes(data).index(np.float32(50).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    fails(
        3, "transform-dir", path, tmp_path / "damaged", "--src-strategy", "none", "--dst-strategy", "none",
        texts=[path, "crc"],
    )  # fmt: skip
    assert not list((tmp_path / "damaged").glob("rank_*/checkpoint_*"))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("how", ["thread", "process"])
def test_asynchronous_saves_are_read(how: str, form: str, tmp_path: Path) -> None:
    saved = tensors()
    path = tmp_path / f"net.{form}"
    save(saved, path, async_save=how, format=form)
    wait_for_asynchronous_saves()
    assert_same(convert(path, tmp_path / "out"), values(saved))


def wait_for_asynchronous_saves() -> None:
    for thread in threading.enumerate():
        if thread.name == "asyn_save_ckpt":
            thread.join()
    for process in multiprocessing.active_children():
        if process.name == "asyn_save_ckpt":
            process.join()


@pytest.mark.parametrize("form", FORMATS)
def test_a_deduplicated_save_is_read(form: str, tmp_path: Path) -> None:
    """Two ranks hold the same; each saves some of the parameters only."""
    saved = {name: np.arange(8, dtype=np.float32) + 100 * index for index, name in enumerate("abcd")}
    for rank, names in enumerate(["ac", "bd"]):
        directory = tmp_path / "src" / f"rank_{rank}"
        directory.mkdir(parents=True)
        part = {name: saved[name] for name in names}
        save(part, directory / f"net-1_10.{form}", format=form, remove_redundancy=True)
    strategy = write_strategy(tmp_path / "strategy", single({name: layout([2], [-1]) for name in saved}))
    done(
        "transform-dir", tmp_path / "src", tmp_path / "out", "--src-strategy", strategy,
        "--dst-strategy", strategy,
    )  # fmt: skip
    # MindSpore refuses safetensors whose mark does not fit how they are loaded.
    assert_same_ranks(load_tree(tmp_path / "out"), {0: saved, 1: saved})


@pytest.mark.parametrize("size", [16, 24, 32])
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_an_encrypted_save_is_decrypted_with_its_key_alone(mode: str, size: int, tmp_path: Path) -> None:
    if mode == "SM4-CBC" and size != 16:
        pytest.skip("SM4 has keys of 16 bytes")
    key = bytes(range(65, 65 + size))
    # Two blocks of MindSpore's.
    saved = {"w": np.arange(18 << 20, dtype=np.float32), "v": np.arange(6, dtype=np.float16)}
    save(saved, tmp_path / "net.ckpt", enc_key=key, enc_mode=mode)
    words: list[Argument] = [tmp_path / "out", "--src-strategy", "none", "--dst-strategy", "none"]
    fails(3, "transform-dir", tmp_path / "net.ckpt", *words, texts=["net.ckpt", mode, "reshard decrypt"])
    (tmp_path / "key").write_bytes(key)
    done("decrypt", tmp_path / "net.ckpt", tmp_path / "plain", "--key-file", tmp_path / "key")
    done("transform-dir", tmp_path / "plain" / "net.ckpt", *words)
    assert_same_ranks(load_tree(tmp_path / "out"), {0: saved})


def network(width: int) -> Any:
    class Net(mindspore.nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = mindspore.nn.Dense(8, width)
            self.second = mindspore.nn.Dense(width, 3)
            self.norm = mindspore.nn.BatchNorm1d(3)

    return Net()


@pytest.mark.parametrize("form", FORMATS)
def test_a_network_loads_converted_files(form: str, tmp_path: Path) -> None:
    """A trained network, cut over two ranks by hand, comes back together and into a new network."""
    trained = network(6)
    for index, parameter in enumerate(trained.get_parameters()):
        numbers = np.arange(np.prod(parameter.shape), dtype=np.float32).reshape(parameter.shape)
        parameter.set_data(mindspore.Tensor(numbers + 1000 * index))
    full = {parameter.name: plain(parameter) for parameter in trained.get_parameters()}
    layouts = {
        name: layout([2], [0] + [-1] * (value.ndim - 1) if name.startswith("first") else [-1] * value.ndim)
        for name, value in full.items()
    }
    ranks = {
        rank: {
            name: value[rank * 3 : rank * 3 + 3] if name.startswith("first") else value for name, value in full.items()
        }
        for rank in range(2)
    }
    save_tree(tmp_path / "src", ranks, format=form)
    strategy = write_strategy(tmp_path / "strategy", single(layouts))
    done(
        "transform-dir", tmp_path / "src", tmp_path / "out", "--src-strategy", strategy,
        "--dst-strategy", "none",
    )  # fmt: skip

    fresh = network(6)
    path = tmp_path / "out" / "rank_0" / f"checkpoint_0.{form}"
    loaded = mindspore.load_checkpoint(str(path), format=form)
    not_loaded, unused = mindspore.load_param_into_net(fresh, loaded, strict_load=True)
    assert (not_loaded, unused) == ([], [])
    assert_same({parameter.name: plain(parameter) for parameter in fresh.get_parameters()}, full)
