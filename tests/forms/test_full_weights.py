"""Directories of full weights of MindSpore and Hugging Face: their contents, and refusals."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.asked import Source
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, ReshardError
from reshard.forms.full.contents import FullWeights, read_huggingface, read_unified
from reshard.forms.full.form import full_weights_form
from reshard.forms.registry import form_named
from reshard.forms.request import Means, Request
from reshard.storage import names_in
from reshard.text.messages import Report
from tests.asking import open_checkpoint
from tests.checkpoint_writing import STORED, write_safetensors
from tests.corpus import CORPUS2, FIXTURES
from tests.running import Argument, done, fails

CASES = {path.name: path for path in (*CORPUS2.glob("[uh]*"), *(FIXTURES / "full_weights").iterdir())}

W, V = np.arange(12, dtype="f4").reshape(3, 4), np.arange(3, dtype="f2")


def read(path: Path, report: Report | None = None) -> FullWeights:
    readers = {"unified": read_unified, "huggingface": read_huggingface}
    form = full_weights_form(str(path), names_in(str(path)))
    assert form is not None
    with FileHandles() as handles:
        request = Request.of_source(Source(str(path)), form_named(form))
        return readers[form](request, Means(handles, report or Report()))


def refused(path: Path, *texts: str) -> ReshardError:
    """The error, which contains all of these texts."""
    with pytest.raises(ReshardError) as caught:
        read(path)
    for text in texts:
        assert text in caught.value.full, caught.value.full
    return caught.value


def content(tensors: Checkpoint, name: str) -> bytes:
    (number,) = tensors.holders(name)
    data = Path(tensors.files[number]).read_bytes()
    return b"".join(data[start : start + size] for start, size in tensors.indexes[number].tensors[name].extents)


def saved(directory: Path, files: Mapping[str, Mapping[str, Any]], listing: Mapping[str, str] | None = None) -> Path:
    """A Hugging Face directory of some files, and an index of their actual or given contents."""
    for name, tensors in files.items():
        write_safetensors(directory / name, tensors, {"format": "pt"})
    if listing is None:
        listing = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_parameters": 1, "total_size": 7.5}, "weight_map": listing}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("case", sorted(CASES))
def test_files_of_mindspore_and_hugging_face_are_read(case: str) -> None:
    directory = next(path for path in CASES[case].iterdir() if path.is_dir())
    expected = json.loads((CASES[case] / "expected.json").read_text())
    checkpoint = read(directory)
    assert checkpoint.form == ("unified" if case.startswith("u") else "huggingface")
    assert set(checkpoint.tensors) == set(checkpoint.order()) == set(expected["tensors"])
    for name, tensor in checkpoint.tensors.items():
        message = expected["tensors"][name]
        assert (STORED[tensor.dtype], tensor.shape) == (message["dtype"], tuple(message["shape"]))
        assert hashlib.sha256(content(checkpoint, name)).hexdigest() == message["sha256"]
        (sharding,) = tensor.shardings
        assert sharding.grid.shape == tensor.shape and sharding.grid.slice_count == 1
        assert list(sharding.holders(0)) == checkpoint.holders(name)
    # Scalars are read; a possible slice of rank 0 is not, even with one element.
    hyper_parameters = expected.get("hyper_param", {})
    scalars = {name for name, message in hyper_parameters.items() if message["shape"] in ([], [1]) and "." not in name}
    assert checkpoint.values() == sorted(scalars)
    for name in scalars:
        message = hyper_parameters[name]
        if "value" in message:
            kind = {"I64": "<i8", "I32": "<i4"}[message["dtype"]]
            assert np.frombuffer(content(checkpoint, name), kind).tolist() == np.ravel(message["value"]).tolist()


def test_possible_slices_of_rank_0_are_skipped_and_listed() -> None:
    report = Report()
    checkpoint = read(FIXTURES / "full_weights" / "u03_choice_ms210" / "unified", report)
    (warning,) = report.warnings
    assert "adam_m.layers.0.linear_fc1.weight" in warning and "adam_v.layers.0.scale" in warning
    assert "global_step" not in warning
    assert not checkpoint.holders("adam_m.layers.0.linear_fc1.weight")


def test_files_and_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    files = {f"part{number}.safetensors": {f"layers.{number}.w": W, f"layers.{number}.b": V} for number in range(12)}
    files["part3.safetensors"] = {"embedding": W, **files["part3.safetensors"]}
    for name, tensors in files.items():
        write_safetensors(tmp_path / name, tensors)
    flat = {name: file for file, tensors in files.items() for name in tensors}
    (tmp_path / "param_name_map.json").write_text(json.dumps(dict(reversed(flat.items()))))
    checkpoint = read(tmp_path)
    assert [os.path.basename(checkpoint.files[number]) for number in range(12)] == list(files)
    layers = [name for number in range(12) for name in (f"layers.{number}.w", f"layers.{number}.b")]
    assert checkpoint.order() == [*layers, "embedding"]
    assert checkpoint.files[3] == str(tmp_path / "part3.safetensors") and checkpoint.holders("layers.10.w") == [10]


def test_a_map_is_read_with_and_without_its_metadata(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "full_weights" / "u05_pp2_opt_ms270" / "unified", tmp_path / "w")
    nested = read(tmp_path / "w")
    document = json.loads((tmp_path / "w/param_name_map.json").read_text())
    (tmp_path / "w/param_name_map.json").write_text(json.dumps(document["weight_map"]))
    assert read(tmp_path / "w") == nested


def test_files_beside_the_model_are_listed_without_other_weights(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"b": V}})
    for name in (
        *("config.json", "tokenizer.json", "tokenizer.model", "README.md", "modeling_x.py"),
        *("pytorch_model.bin", "consolidated.safetensors", "pytorch_model.bin.index.json", "model.onnx"),
        *(".gitattributes", "reshard-manifest.json"),
    ):
        (directory / name).write_bytes(b"{}")
    (directory / "original").mkdir()
    os.mkfifo(directory / "pipe")
    (directory / "link.json").symlink_to("config.json")
    report = Report()
    checkpoint = read(directory, report)
    assert checkpoint.extra_files == (
        *("README.md", "config.json", "link.json", "modeling_x.py", "tokenizer.json", "tokenizer.model"),
    )
    (note,) = report.notes
    assert "consolidated.safetensors, model.onnx, pytorch_model.bin, pytorch_model.bin.index.json" in note


def test_files_of_another_save_give_a_warning(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"b": V}})
    write_safetensors(directory / "model-00003-of-00003.safetensors", {"c": W})
    report = Report()
    assert read(directory, report).order() == ["a", "b"]
    assert "model-00003-of-00003.safetensors; they may be left from another save" in report.warnings[0]


def test_a_missing_weight_file_is_an_error(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"b": V}})
    (directory / TWO).unlink()
    assert refused(directory, f"1 file of 2 missing: {TWO}", "copy or download").status == 3
    (directory / TWO).mkdir()
    refused(directory, TWO)
    (directory / TWO).rmdir()
    (directory / TWO).symlink_to("nowhere")
    refused(directory, TWO)


def test_a_file_known_to_be_damaged_is_not_used(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"b": V}})
    with FileHandles() as handles, pytest.raises(CheckpointError, match="its CRC differs"):
        damaged = {str(directory / TWO): f"{TWO}: its CRC differs"}
        request = Request.of_source(Source(str(directory)), form_named("huggingface"))
        read_huggingface(request._replace(damaged=damaged), Means(handles, Report()))


def test_a_git_lfs_pointer_is_named_as_such(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"b": V}})
    (directory / TWO).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n")
    refused(directory, TWO, "git lfs pull")


def test_an_index_that_names_the_wrong_file_of_a_tensor_is_an_error(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"b": V}}, {"a": TWO, "b": TWO, "c": ONE})
    refused(
        directory,
        f"'a' in {ONE}",
        "names another file",
        "lists 1 tensor that its files do not hold: 'c' (listed for " + ONE,
    )


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"a": W + 1, "b": V}}, {"a": ONE, "b": TWO})
    refused(directory, f"in several files, which need not agree: 'a' in {ONE} and {TWO}")


def test_a_name_of_both_a_value_and_a_tensor_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "full_weights" / "u05_pp2_opt_ms270" / "unified", tmp_path / "w")
    write_safetensors(tmp_path / "w/part9.safetensors", {"global_step": np.array([3], "i4")})
    document = json.loads((tmp_path / "w/param_name_map.json").read_text())
    document["weight_map"]["global_step"] = "part9.safetensors"
    (tmp_path / "w/param_name_map.json").write_text(json.dumps(document))
    refused(tmp_path / "w", "'global_step' in part9.safetensors and hyper_param.safetensors")


def test_unindexed_tensors_are_read_with_a_warning(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"b": V, "c": W}}, {"a": ONE, "b": TWO})
    report = Report()
    assert read(directory, report).order() == ["a", "b", "c"]
    assert "does not list 1 tensor of its files: 'c'; they are read all the same" in report.warnings[0]


@pytest.mark.parametrize(
    "text, texts",
    [
        ("", "is damaged: it is not valid JSON"),
        ("[]", "it is not an object"),
        ("{}", "its weight_map is missing"),
        ('{"weight_map": {}}', "it lists no tensors"),
        ('{"weight_map": {"a": 1}}', "the file of 'a' is not a text"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors' is no name of a file in a tree"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "'pytorch_model.bin', is no .safetensors file"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "it lists 'a' twice"),
    ],
)
def test_hostile_maps_are_refused(tmp_path: Path, text: str, texts: str) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": W})
    for name in ("model.safetensors.index.json", "param_name_map.json"):
        path = tmp_path / name
        path.write_text(text)
        if name == "param_name_map.json" and text == "{}":
            texts = "it lists no tensors"
        assert refused(tmp_path, str(path), texts).status == 3
        path.unlink()


def test_unified_weights_without_their_map_are_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "part0.safetensors", {"a": W})
    refused(tmp_path, "has no param_name_map.json")


def test_files_without_an_index_are_read(tmp_path: Path) -> None:
    one = tmp_path / "one"
    write_safetensors(one / "model.safetensors", {"a": W, "b": V})
    (one / "config.json").write_text("{}")
    assert read(one).order() == ["a", "b"] and read(one).extra_files == ("config.json",)
    several = tmp_path / "several"
    write_safetensors(several / ONE, {"a": W})
    refused(several, "has 1 file of the 2 in their names", "no model.safetensors.index.json")
    write_safetensors(several / TWO, {"b": V})
    report = Report()
    assert read(several, report).order() == ["a", "b"]
    assert "its 2 files are read; none is missing" in report.notes[0]
    write_safetensors(several / "model-00001-of-999999999.safetensors", {"c": V})
    refused(several, "its files may be of several models")
    (several / "model-00001-of-999999999.safetensors").unlink()
    write_safetensors(several / TWO, {"a": V})
    refused(several, f"'a' in {ONE} and {TWO}")
    write_safetensors(several / "model.safetensors", {"a": W})
    refused(several, "its files may be of several models", "give one file alone as SRC")


def test_an_index_selects_one_of_two_models_in_a_directory(tmp_path: Path) -> None:
    directory = saved(tmp_path, {ONE: {"a": W}, TWO: {"b": V}})
    write_safetensors(directory / "model.safetensors", {"a": W})
    index = directory / "model.safetensors.index.json"
    refused(directory, "two models", str(index))
    assert read(index).order() == ["a", "b"]
    (directory / "model.safetensors").unlink()
    write_safetensors(directory / "half.safetensors", {"a": V})
    other = directory / "half.safetensors.index.json"
    other.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "half.safetensors"}}))
    assert read(directory).order() == ["a", "b"] and read(other).tensors["a"].dtype == "Float16"
    index.rename(directory / "full.safetensors.index.json")
    refused(directory, "holds several models", str(directory / "full.safetensors.index.json"))


@pytest.mark.parametrize(
    "names, form",
    [
        ([], None),
        (["rank_0", "config.json"], None),
        (["model-0000000-0000004.safetensors", "opt-0000000-0000004.safetensors"], None),
        (["llm-model-0000000-0000004.safetensors", "metadata.json"], None),
        (["adapter_model.safetensors"], None),
        (["model.safetensors"], "huggingface"),
        (["x.safetensors", "x.safetensors.index.json"], "huggingface"),
        (["part0.safetensors"], "unified"),
        (["param_name_map.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"], "unified"),
    ],
)
def test_forms_are_recognised_by_file_names(tmp_path: Path, names: list[str], form: str | None) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert full_weights_form(str(tmp_path), sorted(names)) == form


def test_forms_are_recognised_by_a_given_map(tmp_path: Path) -> None:
    for name, form in (("param_name_map.json", "unified"), ("model.safetensors.index.json", "huggingface")):
        (tmp_path / name).touch()
        assert full_weights_form(str(tmp_path / name), []) == form
    (tmp_path / "model.safetensors").touch()
    assert full_weights_form(str(tmp_path / "model.safetensors"), []) is None


def test_a_directory_of_links_is_read_through_them(tmp_path: Path) -> None:
    preserved = saved(tmp_path / "blobs", {ONE: {"a": W}, TWO: {"b": V}})
    links = tmp_path / "snapshot"
    links.mkdir()
    for path in preserved.iterdir():
        (links / path.name).symlink_to(path)
    assert read(links).order() == ["a", "b"]


def test_the_one_file_of_a_model_needs_no_strategy(tmp_path: Path) -> None:
    src, whole = tmp_path / "src", FIXTURES / "models" / "qwen3"
    done("convert", whole, src, "--to", "huggingface", "--cast", "BFloat16")
    file = src / "model.safetensors"
    names = ["--names", "qwen3,gate_up=halves,qkv=grouped"]
    for source, dst in ((file, "file"), (src, "directory")):
        done("convert", source, tmp_path / dst, "--dst-strategy", "none", *names, "--verify")
    same = (tmp_path / dst / "rank_0" / "checkpoint_0.safetensors" for dst in ("file", "directory"))
    assert len({path.read_bytes() for path in same}) == 1
    # An index beside is that of another model.
    shutil.copy(whole / "model.safetensors.index.json", src)
    assert list(read(file).files.values()) == [str(file)]
    with open_checkpoint(file) as tensors:
        assert len(tensors) == 47


def test_a_file_without_the_configuration_of_a_model_may_be_that_of_a_rank(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": W}, {"format": "pt"})
    words: list[Argument] = ["convert", tmp_path / "model.safetensors", tmp_path / "out", "--to", "huggingface"]
    fails(2, *words, texts=["--src-strategy is missing"])
    done(*words, "--src-strategy", "none")


def test_a_file_of_a_rank_is_not_taken_for_a_whole_model(tmp_path: Path) -> None:
    for name in ("rank_3", "rank3", "3", "ckpt_dir3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_safetensors(tmp_path / name / "model.safetensors", {"w": W}, {"format": "pt"})
        words: list[Argument] = [
            "convert",
            tmp_path / name / "model.safetensors",
            tmp_path / "out",
            "--to",
            "huggingface",
        ]
        fails(2, *words, texts=["--src-strategy is missing"])


@pytest.mark.parametrize("form", ["huggingface", "unified"])
def test_an_unfinished_conversion_is_not_taken_for_a_whole_model(tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    done("convert", FIXTURES / "models" / "qwen3", out, "--to", form, "--max-shard-size", "10KB", "--cast", "Float32")
    (out / "reshard-manifest.json").unlink()
    for name in ("model.safetensors.index.json", "param_name_map.json"):
        (out / name).unlink(missing_ok=True)
    (out / "reshard-unfinished.safetensors").write_bytes(b"This checkpoint is not complete.")
    fails(3, "convert", out, tmp_path / "ranks", "--dst-strategy", "none", texts=[f"reshard resume {out}"])
    done("resume", out)
    done("convert", out, tmp_path / "ranks", "--dst-strategy", "none")
