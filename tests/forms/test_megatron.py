"""Checkpoints of Megatron-Core: recognised, read with their optimizer state, or refused by name."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import reshard
from reshard.asked import Edits
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import StoredObject
from reshard.checkpoints.formats.archives import archive_of_pickle, archived_tensor
from reshard.checkpoints.formats.pickles import pickled
from reshard.errors import CheckpointError
from reshard.forms.megatron.arguments import arguments_of, configuration_of
from reshard.forms.megatron.common import read_common
from reshard.forms.pytorch.dcp import read_metadata
from reshard.forms.registry import form_of
from tests.corpus import FIXTURES
from tests.corpus_dcp import held_in
from tests.corpus_mcore import McoreCase, digest, mcore_case, mcore_cases, to_hugging_face
from tests.running import Argument, done, fails
from tests.running import reshard as run
from tests.sampling import some_of

CASES = mcore_cases()
READABLE = [case for case in CASES if case.name.startswith("td")]
SOUND = [case for case in CASES if case.expected["expect"] == "convert"]
# Kinds of optimizer state that are read in the shapes of the weights.
SHAPED = ("plain", "fully_reshardable", "fully_sharded_model_space", "dp_reshardable", "dp_zero_gather_scatter")


def named(case: McoreCase) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=named)
def test_arguments_give_the_sizes_of_the_models_configuration(case: McoreCase) -> None:
    form = form_of(str(case.root))
    assert form.name == "megatron"
    assert form.training is not None
    config, expected = form.training.configuration(str(case.root), "latest", None), case.expected["config"]
    assert config is not None
    assert {key: value for key, value in config.items() if key in expected} == {
        key: value for key, value in expected.items() if key in config
    }
    required = {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings"}
    latent = {key for key in expected if key.endswith("_rank")}
    required |= latent or {"num_key_value_heads"}
    assert not required - config.keys()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_arguments_of_a_configuration_give_it_back(case: McoreCase) -> None:
    config: dict[str, Any] = case.expected["config"]
    back = configuration_of(arguments_of(config), "config.json")
    assert {key: value for key, value in back.items() if key in config and config[key] is not None} == {
        key: config[key] for key in back if key in config and config[key] is not None
    }
    assert back["tie_word_embeddings"] == config["tie_word_embeddings"]


@pytest.mark.parametrize("case", READABLE, ids=named)
def test_weights_are_those_that_megatron_holds(case: McoreCase) -> None:
    """As they are, and under Hugging Face's names by an oracle."""
    with reshard.open(case.root) as opened:
        native = {name: np.asarray(opened[name]) for name in case.expected["native"]}
    assert {name: (digest(value), [*value.shape]) for name, value in native.items()} == {
        name: (each["sha256"], each["shape"]) for name, each in case.expected["native"].items()
    }
    if case.expected["form"] == "megatron_torch_dist":
        assert digests(to_hugging_face(native, case.expected["config"])) == answers(case.expected["tensors"])


@pytest.mark.parametrize("case", [case for case in READABLE if case.optimizer in SHAPED], ids=named)
def test_optimizer_state_has_the_shapes_of_the_weights(case: McoreCase) -> None:
    expected = case.expected["optimizer"]
    with reshard.open(case.root) as opened:
        assert int(np.asarray(opened["global_step"])[0]) == expected["step"]
        master = "fp32_param" if any("fp32_param" in name for name in opened) else "param"
        for kind in expected["state"]:
            before = f"optimizer.state.{master if kind == 'fp32_param' else kind}."
            native = {name[len(before) :]: np.asarray(opened[name]) for name in opened if name.startswith(before)}
            found = to_hugging_face(native, case.expected["config"])
            assert digests(found) == answers(expected["state"][kind])


@pytest.mark.parametrize("case", [case for case in CASES if case.expected["expect"] == "refuse"], ids=named)
def test_damaged_checkpoints_are_refused_with_what_is_wrong(case: McoreCase, tmp_path: Path) -> None:
    result = fails(3, "convert", case.root, tmp_path / "out", "--to", "hf-sharded", "--shards", 1)
    assert any(word in result.err for word in case.expected["must_say"])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_distributed_checkpoint_under_other_names_is_not_megatrons(tmp_path: Path) -> None:
    """Its objects record where Megatron's tensors are, and the step is a value."""
    words: list[Argument] = ["--to", "dcp", "--shards", 2, "--optimizer", "keep", "--verify"]
    done("convert", mcore_case("td_dense_plain").root, tmp_path / "out", "--names", "llama", *words)
    assert form_of(str(tmp_path / "out")).name == "dcp"
    inspected = done("inspect", tmp_path / "out", "--json").json
    assert inspected["values"] == ["global_step"] and not inspected.get("objects")
    done("verify", tmp_path / "out", "--src", mcore_case("td_dense_plain").root)


@pytest.mark.parametrize("case", some_of(zip(READABLE), 3), ids=named)
def test_a_rewrite_keeps_what_metadata_describes(case: McoreCase, tmp_path: Path) -> None:
    """Names, shapes and objects stay Megatron's; blocks, which are no slices, are refused with what to do."""
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "dcp", "--shards", 3, "--verify"]
    if case.optimizer == "fully_sharded_model_space":
        fails(3, *words, texts=["--to megatron"])
        words += ["--exclude", "optimizer.state.*"]
    done(*words)
    done("verify", tmp_path / "out", "--src", case.root, *words[8:])
    with reshard.open(tmp_path / "out", edits=Edits(exclude=("optimizer.*", "chained_*"))) as opened:
        found = {name: digest(np.asarray(opened[name])) for name in case.expected["native"]}
    assert found == answers(case.expected["native"])
    objects = [done("inspect", place, "--json").json["objects"] for place in (case.root, tmp_path / "out")]
    assert {*objects[0]} == {*objects[1]} and objects[0]


def copied(case: McoreCase, to: Path) -> Path:
    """A copy of a case's root, which may be changed."""
    shutil.copytree(case.root, to)
    for each in (to, *to.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
    return to


@pytest.mark.parametrize("missing", ["metadata.json", ".metadata"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("td_dense_plain", "td19_common_state")], ids=named
)
def test_a_directory_without_the_file_that_is_written_last_is_refused(
    case: McoreCase, missing: str, tmp_path: Path
) -> None:
    root = copied(case, tmp_path / "root")
    (root / "iter_0000100" / missing).unlink()
    for place in (root, root / "iter_0000100"):
        fails(3, "convert", place, tmp_path / "out", "--to", "hf-sharded", "--shards", 1, texts=[missing])
        inspected = run("inspect", place)
        assert missing in inspected.out + inspected.err


def test_another_backend_is_refused_by_name(tmp_path: Path) -> None:
    root = copied(mcore_case("td_dense_plain"), tmp_path / "root")
    path = root / "iter_0000100" / "metadata.json"
    words: list[Argument] = ["convert", root, tmp_path / "out", "--to", "hf-sharded", "--shards", 1]
    for content in ('{"sharded_backend": "zarr"}', "[]", "{", '{"sharded_backend_version": 1}'):
        path.write_text(content)
        fails(3, *words, texts=["zarr" if "zarr" in content else "sharded_backend"])
    path.write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "later": [{}]}')
    done(*words)


def test_a_file_of_another_program_beside_a_distributed_checkpoint_is_ignored(tmp_path: Path) -> None:
    place = shutil.copytree(FIXTURES / "dcp" / "w2_old_metadata" / "checkpoint", tmp_path / "src")
    (place / "metadata.json").write_text('{"run": 7}')
    words: list[Argument] = ["--to", "hf-sharded", "--shards", 1]
    done("convert", place, tmp_path / "out", *words)
    (place / "metadata.json").unlink()
    done("convert", place, tmp_path / "same", *words)
    assert held_in(tmp_path / "out") == held_in(tmp_path / "same")


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("td_tied", "param.embedding.word_embeddings.weight"),
        ("td14_dense_model_space", "fp32_param.decoder.layers.mlp.linear_fc2.weight"),
        ("td14_grouped_model_space", "fp32_param.decoder.layers.mlp.experts.experts.linear_fc1.weight"),
    ],
)
def test_masters_that_only_values_prove_have_to_be_the_weights(name: str, state: str, tmp_path: Path) -> None:
    """Megatron 0.16.1 writes others for tied embeddings of odd sizes. All checksums are right."""
    case = mcore_case(name)
    root = copied(case, tmp_path / "root")
    change_an_element(root / "iter_0000100", f"optimizer.state.{state}")
    words: list[Argument] = ["convert", root, tmp_path / "out", "--to", "hf-sharded", "--shards", 1]
    fails(3, *words, texts=["differs", state, "--exclude"])
    fails(3, *words, "--exclude", "*param.*", texts=["differs", state])
    done(*words, "--exclude", "optimizer.*", "--verify")


@pytest.mark.parametrize(("name", "master"), [("td_dense_plain", "fp32_param"), ("td_dense_fully", "param")])
def test_masters_of_another_save_are_refused_beside_their_weights(name: str, master: str, tmp_path: Path) -> None:
    """State lies under the names of its weights: only runs that read both whole compare them, and verify."""
    root = copied(mcore_case(name), tmp_path / "root")
    state = f"optimizer.state.{master}.decoder.layers.mlp.linear_fc2.weight"
    change_an_element(root / "iter_0000100", state)
    words: list[Argument] = ["--to", "hf-sharded", "--shards", 2]
    fails(3, "convert", root, tmp_path / "out", *words, texts=["differs", state, "--exclude"])
    for at, names in enumerate(("*param.*", "optimizer.*")):
        done("convert", root, tmp_path / f"some{at}", *words, "--exclude", names, "--verify")
    for rank in range(2):
        done("convert", root, tmp_path / "out", *words, "--ranks", rank)
    differing = fails(4, "verify", tmp_path / "out", "--src", root, "--json").json["differences"]
    assert [each["parameter"] for each in differing] == ["decoder.layers.mlp.linear_fc2.weight"]


@pytest.mark.parametrize("arg", ["fp8_param_gather", "fp4_param_gather", "use_precision_aware_optimizer"])
def test_weights_that_are_no_casts_of_masters_are_converted_with_them(arg: str, tmp_path: Path) -> None:
    root = copied(mcore_case("td_dense_fully"), tmp_path / "root")
    change_an_element(root / "iter_0000100", "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight")
    path = root / "iter_0000100" / "common.pt"
    with FileHandles() as handles:
        state = read_common(StoredObject(str(path), 0, path.stat().st_size, True), handles).state
    state["args"].state[arg] = True
    path.write_bytes(archive_of_pickle(pickled(dict(state))))
    done("convert", root, tmp_path / "out", "--to", "hf-sharded", "--shards", 1, "--verify")


@pytest.mark.parametrize("name", ["td_dense_plain", "td19_common_state", "legacy_dense"])
def test_a_directory_named_as_another_iteration_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    root = copied(mcore_case(name), tmp_path / "root")
    (saved,) = root.glob("iter_*")
    words: list[Argument] = ["--to", "hf-sharded", "--shards", 1]
    for other in ("iter_0000200", "iter_0000000"):
        place = saved.rename(root / other)
        (root / "latest_checkpointed_iteration.txt").write_text(str(int(other[5:])))
        for source in (root, place):
            fails(3, "convert", source, tmp_path / "out", *words, texts=[saved.name, other])
        place.rename(saved)
    for other in ("release", "a copy"):
        place = saved.rename(root / other)
        done("convert", place, tmp_path / other, *words)
        place.rename(saved)


def test_the_master_of_an_embedding_beside_multi_token_prediction_has_to_be_the_weight(tmp_path: Path) -> None:
    """Its last stage has the embedding, too, and Megatron 0.16.1 writes other state at odd sizes."""
    case = mcore_case("td_dense_fully")
    norm, other = "decoder.final_layernorm.weight", "mtp.layers.0.enorm.weight"
    befores = ("", *(f"optimizer.state.{kind}." for kind in ("exp_avg", "exp_avg_sq", "param")))
    renamed = [word for before in befores for word in ("--rename", f"{before}{norm}={before}{other}")]
    done("convert", case.root, tmp_path / "root", "--to", "megatron", "--checksum", "crc32", *renamed)
    words: list[Argument] = ["convert", tmp_path / "root", tmp_path / "out", "--to", "hf-sharded", "--shards", 1]
    done(*words, "--dry-run")
    change_an_element(tmp_path / "root" / "iter_0000100", "optimizer.state.param.embedding.word_embeddings.weight")
    fails(3, *words, texts=["differs", "param.embedding.word_embeddings.weight", "--exclude"])


def change_an_element(directory: Path, name: str) -> None:
    """Change the first element of a tensor, with its checksums."""
    record = read_metadata([str(directory / ".metadata")]).tensors[name].chunks[0].record
    path = directory / record.file
    data = bytearray(path.read_bytes())
    with FileHandles() as handles, handles.borrow(str(path)) as file:
        elements = archived_tensor(file, record.offset, record.length)
    entry = elements.entry
    assert entry.crc
    data[elements.offset + 3] ^= 64
    crc = zlib.crc32(data[entry.offset : entry.offset + entry.size])
    end = record.offset + record.length
    old, new = (each.to_bytes(4, "little") for each in (entry.crc, crc))
    data[record.offset : end] = data[record.offset : end].replace(old, new)
    path.write_bytes(data)


def test_nothing_in_a_common_state_is_run(tmp_path: Path) -> None:
    root = copied(mcore_case("td_dense_plain"), tmp_path / "root")
    words: list[Argument] = ["convert", root, tmp_path / "out", "--to", "hf-sharded", "--shards", 1]
    for harmful in (b"cos\nsystem\n(S'touch EXECUTED'\ntR.", b"cbuiltins\neval\n(S'1'\ntR."):
        (root / "iter_0000100" / "common.pt").write_bytes(archive_of_pickle(harmful))
        fails(3, *words, texts=["common.pt", "nothing of the file is run"])
    (root / "iter_0000100" / "common.pt").write_bytes(archive_of_pickle(b"]."))
    fails(3, *words, texts=["common.pt"])
    assert not [*Path.cwd().glob("EXECUTED"), *tmp_path.rglob("EXECUTED")]


def test_optimizers_at_different_steps_are_refused(tmp_path: Path) -> None:
    root = copied(mcore_case("td_moe_fully"), tmp_path / "root")
    path = root / "iter_0000100" / "common.pt"
    with FileHandles() as handles:
        common = read_common(StoredObject(str(path), 0, path.stat().st_size, True), handles)
    common.groups[0]["step"] = 4.0  # type: ignore[index]
    path.write_bytes(archive_of_pickle(pickled(dict(common.state))))
    words: list[Argument] = ["convert", root, tmp_path / "out", "--to", "hf-sharded", "--shards", 1]
    fails(3, *words, texts=["global_step", "3 and 4"])
    done(*words, "--exclude", "global_step")


def test_a_plain_distributed_checkpoint_is_megatrons_in_a_root_with_a_tracker(tmp_path: Path) -> None:
    """As ``fsdp_dtensor`` and ``torch_dcp`` are saved."""
    place = shutil.copytree(FIXTURES / "dcp" / "w2_old_metadata" / "checkpoint", tmp_path / "root" / "iter_0000010")
    assert form_of(str(place)).name == form_of(str(place.parent)).name == "dcp"
    words: list[Argument] = ["--to", "hf-sharded", "--shards", 1, "--verify"]
    done("convert", place, tmp_path / "dcp", *words)
    (tmp_path / "root" / "latest_checkpointed_iteration.txt").write_text("10")
    for number, source in enumerate((place, place.parent)):
        assert form_of(str(source)).name == "megatron"
        done("convert", source, tmp_path / f"out{number}", *words)
        assert held_in(tmp_path / f"out{number}") == held_in(tmp_path / "dcp")
    os.remove(place / ".metadata")
    fails(3, "convert", place.parent, tmp_path / "none", *words, texts=[".metadata"])


def test_a_release_is_read_by_name_and_where_the_tracker_names_it(tmp_path: Path) -> None:
    root = copied(mcore_case("td_dense_plain"), tmp_path / "root")
    shutil.copytree(root / "iter_0000100", root / "release")
    os.remove(root / "release" / "common.pt")
    release = str(root / "release")

    def directory(*more: Argument) -> str:
        return str(Path(done("inspect", root, "--json", *more).json["files"][0]["file"]).parent)

    assert directory() == str(root / "iter_0000100")
    assert directory("--step", "release") == release
    # Records name the step, for resume and verify.
    words: list[Argument] = ["--to", "hf-sharded", "--shards", 1, "--exclude", "optimizer.*", "--step", "release"]
    done("convert", root, tmp_path / "out", *words)
    (root / "iter_0000100" / "__0_0.distcp").unlink()
    done("verify", tmp_path / "out", "--src", root)
    shutil.copy(release + "/__0_0.distcp", root / "iter_0000100")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    assert directory() == release
    assert directory("--step", 100) == str(root / "iter_0000100")
    shutil.rmtree(root / "iter_0000100")
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert directory() == release


@pytest.mark.parametrize("case", some_of(zip(SOUND), 3), ids=named)
def test_the_family_of_the_model_is_suggested(case: McoreCase) -> None:
    commands = [each["command"] for each in done("suggest", case.root, "--json").json["suggestions"]]
    stated = [words[words.index("--names") + 1] for words in commands if "--names" in words]
    assert len(stated) == 2 and {*stated} == {case.expected["names"]}


def test_state_of_a_dump_in_progress_is_no_iteration(tmp_path: Path) -> None:
    root = copied(mcore_case("td_dense_plain"), tmp_path / "root")
    shutil.copytree(root / "iter_0000100", root / "iter_0000200_tmp")
    assert [each["iteration"] for each in done("inspect", root, "--json").json["iterations"]] == [100]


def digests(tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, str]:
    return {name: digest(value) for name, value in tensors.items()}


def answers(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: str(each["sha256"]) for name, each in tensors.items()}


@pytest.mark.parametrize(
    "argument",
    [
        {"moe_mlp_glu_interleave_size": 32},
        {"apply_layernorm_1p": True},
        {"layernorm_zero_centered_gamma": True},
        {"rotary_interleaved": True},
        {"attention_output_gate": True},
        {"quick_geglu": False, "swiglu": False},
        {"num_experts": 2, "num_layers": 2, "moe_layer_freq": "[0, 1]"},
    ],
)
def test_arguments_that_change_the_meaning_of_rows_are_refused_by_name(argument: dict[str, object]) -> None:
    with pytest.raises(CheckpointError) as refused:
        configuration_of(argument, "common.pt")
    assert list(argument)[-1] in str(refused.value)


def test_arrays_of_zarr_are_refused_by_name(tmp_path: Path) -> None:
    """Old Megatron saved them without metadata of torch."""
    place = tmp_path / "run" / "iter_0000005"
    (place / "decoder.weight").mkdir(parents=True)
    (place / "decoder.weight" / ".zarray").write_text("{}")
    (place / "common.pt").write_text("")
    (place / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    for source in (place, tmp_path / "run"):
        fails(3, "convert", source, tmp_path / "out", "--to", "huggingface", texts=["zarr", "--ckpt-format torch_dist"])
