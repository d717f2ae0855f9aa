"""`verify --src` compares what checkpoints hold beside tensors: pickled objects and the state of the training."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoints.formats.archives import archive_of_pickle
from reshard.checkpoints.formats.output import OutputLayout
from reshard.checkpoints.formats.pickles import inert, pickled, read_pickle
from reshard.forms.full import beside
from reshard.forms.pytorch.dcp_written import DcpFiles, HyperParallelFiles
from tests.corpus_dcp import fixtures
from tests.forms import to
from tests.running import Argument, done, fails, reshard
from tests.small import World, tensors
from tests.trees import write_checkpoint

(CASE,) = [case for case in fixtures() if case.name == "hyper_w4_2026_03_by_rank"]
RATE = struct.pack(">d", CASE.objects["optimizer.lr"])


@pytest.fixture(params=["dcp", "hyper-parallel"])
def converted(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with the objects of the case, without the manifest, which has a checksum of their metadata."""
    directory: Path = tmp_path / request.param
    done("convert", CASE.path, directory, "--to", request.param, "--shards", 2, "--verify")
    (directory / "reshard-manifest.json").unlink()
    return directory


def differences(*arguments: Argument) -> set[tuple[str, str]]:
    listed = fails(4, "verify", *arguments, "--json").json["differences"]
    return {(entry["kind"], entry["parameter"]) for entry in listed}


def change_metadata(directory: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Change the descriptions of objects, and the places of their contents, both by name."""
    path = directory / ".metadata"
    metadata = read_pickle(path.read_bytes(), lambda name: True)
    fields = metadata.fields
    described, stored = fields["state_dict_metadata"], fields["storage_data"]
    index_of = {index.fields["fqn"]: index for index in stored if index.fields["fqn"] in CASE.objects}
    places = {name: stored.pop(index) for name, index in index_of.items()}
    change(described, places)
    for name, place in places.items():
        index = inert(index_of["optimizer.lr"].name, state={**index_of["optimizer.lr"].fields, "fqn": name})
        stored[index] = place
    path.write_bytes(pickled(metadata))


def test_another_number_is_found(converted: Path) -> None:
    """Of the same length, with a right CRC."""
    dcp = converted.name == "dcp"
    path = converted / ("__0_1.distcp" if dcp else "_rank0_.bytes")
    data = path.read_bytes()
    before = data[data.rindex(b"\x80", 0, data.index(RATE)) : data.index(b".", data.index(RATE) + 8) + 1]
    after = before.replace(RATE, struct.pack(">d", 0.01))
    old, new = (archive_of_pickle(each) if dcp else each for each in (before, after))
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    assert differences(converted, "--src", CASE.path) == {("content", "optimizer.lr")}


def test_exchanged_objects_are_found(converted: Path) -> None:
    def exchange(described: dict[str, Any], places: dict[str, Any]) -> None:
        places["optimizer.lr"], places["optimizer.step"] = places["optimizer.step"], places["optimizer.lr"]

    change_metadata(converted, exchange)
    expected = {("content", "optimizer.lr"), ("content", "optimizer.step")}
    assert differences(converted, "--src", CASE.path) == expected


def test_missing_and_added_objects_are_found(converted: Path) -> None:
    def rename(described: dict[str, Any], places: dict[str, Any]) -> None:
        described["optimizer.rate"], places["optimizer.rate"] = (
            described.pop("optimizer.lr"),
            places.pop("optimizer.lr"),
        )

    change_metadata(converted, rename)
    expected = {("missing", "optimizer.lr"), ("extra", "optimizer.rate")}
    assert differences(converted, "--src", CASE.path) == expected


def test_objects_that_were_excluded_are_not_missing(converted: Path) -> None:
    def leave_out(described: dict[str, Any], places: dict[str, Any]) -> None:
        del described["optimizer.lr"], places["optimizer.lr"]

    change_metadata(converted, leave_out)
    done("verify", converted, "--src", CASE.path, "--exclude", "optimizer.lr")
    assert differences(converted, "--src", CASE.path) == {("missing", "optimizer.lr")}


@pytest.mark.parametrize("other", [False, True], ids=["from ranks", "from itself"])
def test_another_state_of_the_training_is_found(other: bool, world: World) -> None:
    world.save(tensors())
    words: list[Argument] = ["--src-strategy", world.old, *to("checkpoint2", world)]
    done("convert", world.src, world.dst, *words)
    source: list[Argument] = [world.src, "--src-strategy", world.old]
    target = world.dst
    if other:
        source, target = [world.dst], world.root / "again"
        done("convert", world.dst, target, *to("checkpoint2", world))
    (target / "reshard-manifest.json").unlink()
    done("verify", target, "--src", *source, "--dst-strategy", world.new)
    (path,) = target.rglob("common.json")
    recorded = json.loads(path.read_text())
    path.write_text(json.dumps({**recorded, "global_step": recorded["global_step"] + 1, "global_batch_size": 8}))
    found = differences(target, "--src", *source, "--dst-strategy", world.new)
    assert found == {("content", "global_step")}
    path.write_text(json.dumps({**recorded, "step_num": None}))
    assert differences(target, "--src", *source, "--dst-strategy", world.new) == {("content", "step_num")}


def test_a_changed_iteration_and_files_that_are_not_numbered_in_a_row_are_found(world: World) -> None:
    world.save(tensors())
    done("convert", world.src, world.dst, "--src-strategy", world.old, *to("checkpoint2", world), "--verify")
    (world.dst / "reshard-manifest.json").unlink()
    shutil.rmtree(world.dst / ".reshard")
    words: list[Argument] = ["--src", world.src, "--src-strategy", world.old, "--dst-strategy", world.new]
    done("verify", world.dst, *words)
    (iteration,) = world.dst.glob("iteration_*")
    other = iteration.rename(world.dst / "iteration_00000007")
    (world.dst / "latest_checkpointed_iteration.txt").write_text("7")
    assert {kind for kind, _ in differences(world.dst, *words)} == {"file"}
    other.rename(iteration)
    (world.dst / "latest_checkpointed_iteration.txt").write_text(str(int(iteration.name[-8:])))
    metadata = iteration / "metadata.json"
    for path in [*iteration.glob("*.safetensors")]:
        of_nine = path.name[: -len("0000002.safetensors")] + "0000009.safetensors"
        path.rename(path.with_name(of_nine))
        metadata.write_text(metadata.read_text().replace(path.name, of_nine))
    assert {kind for kind, _ in differences(world.dst, *words)} == {"file"}


def test_another_place_of_hyper_parallels_tensors_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loader goes by the key; the reader of `reshard` does without."""
    lay_out = HyperParallelFiles.lay_out

    def elsewhere(self: HyperParallelFiles, *arguments: Any) -> OutputLayout:
        layout = lay_out(self, *arguments)
        layout.records = [each._replace(offset=1) for each in layout.records]
        return layout

    monkeypatch.setattr(HyperParallelFiles, "lay_out", elsewhere)
    fails(4, "convert", CASE.path, tmp_path / "out", "--to", "hyper-parallel", "--shards", 2, "--verify")


def test_keys_that_the_source_does_not_record_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[Argument] = [CASE.path, tmp_path / "out", "--to", "dcp", "--shards", 2, "--verify"]
    monkeypatch.setattr(DcpFiles, "_keys", lambda self, names: {name: (name,) for name in names})
    fails(4, "convert", *words)


@pytest.mark.parametrize("kept", [False, True])
def test_another_configuration_than_the_sources_is_found_unless_the_directory_held_it(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "src" / "model.safetensors", tensors(), metadata={"format": "pt"})
    (tmp_path / "src" / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "float32"}))
    if kept:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("{}")
    monkeypatch.setattr(beside, "_rewritten", lambda config, left_out=(), dtype=None: {"dtype": dtype})
    words: list[Argument] = [
        tmp_path / "src",
        tmp_path / "out",
        "--to",
        "huggingface",
        "--cast",
        "BFloat16",
        "--verify",
    ]
    assert reshard("convert", *words).status == (0 if kept else 4)


def test_a_configuration_that_is_no_json_is_copied_as_it_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "src" / "model.safetensors", tensors(), metadata={"format": "pt"})
    (tmp_path / "src" / "config.json").write_text("{")
    done("convert", tmp_path / "src", tmp_path / "out", "--to", "huggingface", "--cast", "BFloat16", "--verify")
