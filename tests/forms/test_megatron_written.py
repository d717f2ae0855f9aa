"""Checkpoints that --to megatron writes: what Megatron needs beside tensors, complete or not, certified or refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import archive_of_pickle
from reshard.checkpoints.formats.pickles import inert, inert_class, pickled
from reshard.forms.megatron.common import Common, common_of
from tests.conftest import LONG
from tests.corpus import ROOT
from tests.corpus_mcore import McoreCase, digest, mcore_case, mcore_cases
from tests.running import Argument, done, fails, warns
from tests.running import reshard as run
from tests.sampling import some_of
from tests.trees import Value, read_checkpoint, scalar, write_checkpoint

WRITABLE = [case for case in mcore_cases() if case.expected["expect"] == "convert"]
ITERATION = "iter_0000100"
TRACKER = "latest_checkpointed_iteration.txt"
MARKS = (f"{ITERATION}/common.pt", f"{ITERATION}/.metadata", f"{ITERATION}/metadata.json", TRACKER)
# What a JSON file of --args needs where no checkpoint of Megatron has it.
STATED = {
    "lr": 0.002,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_eps": 1e-8,
    "weight_decay": 0.05,
    "global_batch_size": 4,
    "train_iters": 1000,
    "lr_warmup_iters": 10,
}


def tensors_of(root: Path) -> dict[str, tuple[str, str]]:
    """Type and digest of every tensor; a master has one name."""
    with reshard.open(root) as opened:
        read = {name: np.asarray(opened[name]) for name in opened}
    return {
        name.replace(".state.fp32_param.", ".state.param."): (str(value.dtype), digest(value))
        for name, value in read.items()
    }


def common_in(directory: Path) -> Common:
    with FileHandles() as handles:
        common = common_of(str(directory), handles)
    assert common is not None
    return common


def written(case: McoreCase, root: Path, *options: Argument) -> Path:
    done("convert", case.root, root, "--to", "megatron", "--shards", 3, "--verify", *options)
    return root


@pytest.mark.parametrize("name", some_of([case.name for case in WRITABLE], 4, 1))
def test_a_checkpoint_of_megatron_is_written_as_one_that_it_loads_at_any_sizes(name: str, tmp_path: Path) -> None:
    case = mcore_case(name)
    root = written(case, tmp_path / "out")
    source, (directory,) = common_in(case.directory), root.glob("iter_*")
    tracked = (root / TRACKER).read_text()
    assert (directory.name, int(tracked)) == (case.directory.name, int(case.directory.name[5:]))
    assert tensors_of(root) == tensors_of(case.root)
    common = common_in(directory)
    assert common.iteration == source.iteration == int(tracked)
    if case.optimizer:
        assert common.steps == {case.expected["optimizer"]["step"]}
        assert common.state["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
        of_experts = [group["is_expert_parallel"] for group in common.groups]
        assert any(of_experts) == (case.expected["model"]["ep"] > 1)
        assert len(common.optimizers) == 1 + any(of_experts)
        assert {group["betas"] for group in common.groups} == {(0.9, 0.95)}
        assert {group["wd_mult"]: group["weight_decay"] for group in common.groups} == {1.0: 0.1, 0.0: 0.0}
        assert all(type(group["step"]) is int for group in common.groups)
    else:
        assert common.args["no_save_optim"] and not common.groups and "optimizer" not in common.state
    changed = {"iteration", "no_save_rng", "no_save_optim", "ckpt_format", "ckpt_fully_parallel_save"}
    changed |= {"use_distributed_optimizer", "dist_ckpt_optim_fully_reshardable", "consumed_train_samples"}
    for argument in source.args.keys() - changed:
        assert pickled(common.args[argument]) == pickled(source.args[argument]), argument
    assert common.args["no_save_rng"] is True


@pytest.mark.parametrize("name", some_of([case.name for case in WRITABLE], 6, 2))
def test_the_objects_of_the_source_are_there_and_empty_ones_for_all_other_modules(name: str, tmp_path: Path) -> None:
    case = mcore_case(name)
    root = written(case, tmp_path / "out", "--exclude", "optimizer.*")
    objects = {name for name in done("inspect", root, "--json").json["objects"] if "._extra_state/" in name}
    if case.expected["form"] == "megatron_torch_dist":
        found = done("inspect", case.root, "--json").json["objects"]
        assert objects >= {name for name in found if "._extra_state/" in name}
    modules = {name.rpartition("._extra_state")[0].rpartition(".")[2] for name in objects}
    assert {"linear_proj", "core_attention", "final_layernorm"} <= modules
    assert not modules & {"word_embeddings", "output_layer", "router"}


def damaged_common(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / ITERATION / "common.pt"
        state = dict(common_in(path.parent).state)
        change(state)
        path.write_bytes(archive_of_pickle(pickled(state)))

    return damage


def with_argument(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["args"] = inert("argparse.Namespace", state={**state["args"].fields, name: value})

    return change


def with_other_argument(source: Path, copy: Path, name: str, value: object) -> Path:
    """A copy of a checkpoint that Megatron wrote, with another argument."""

    def change(state: dict[str, Any]) -> None:
        with_argument(name, value)(state)
        # Tensors of the state stay behind with their archive.
        state["optimizer"]["optimizer"]["state"] = {"common_step": 3}

    shutil.copytree(source, copy)
    damaged_common(change)(copy)
    return copy


def with_group(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["optimizer"]["optimizer"]["param_groups"][0][name] = value

    return change


def replace(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        path = root / name
        data = path.read_bytes()
        assert old in data and len(old) == len(new)
        path.write_bytes(data.replace(old, new))

    return damage


DAMAGE: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "an argument": (damaged_common(with_argument("hidden_size", 16)), "hidden_size"),
    "how it is loaded": (
        damaged_common(with_argument("use_distributed_optimizer", False)),
        "use_distributed_optimizer",
    ),
    "format": (damaged_common(with_argument("ckpt_format", "torch")), "ckpt_format"),
    "kind of an optimizer": (
        damaged_common(lambda state: state["optimizer"].update(param_state_sharding_type="dp_reshardable")),
        "param_state_sharding_type",
    ),
    "iteration": (damaged_common(lambda state: state.update(iteration=7)), "iteration"),
    "betas": (damaged_common(with_group("betas", (0.9, 0.5))), "betas"),
    "step of a group": (damaged_common(with_group("step", 4)), "step"),
    "a group": (damaged_common(lambda state: state["optimizer"]["optimizer"]["param_groups"].pop()), "group"),
    "no groups": (damaged_common(lambda state: state.pop("optimizer")), "groups"),
    "schedule": (damaged_common(lambda state: state["opt_param_scheduler"].update(max_lr=0.5)), "max_lr"),
    "kind of state": (
        damaged_common(lambda state: state["content_metadata"].update(distrib_optim_sharding_type="dp_reshardable")),
        "common.pt",
    ),
    "names": (damaged_common(lambda state: state["content_metadata"].update(singleton_local_shards=True)), "content"),
    "position": (damaged_common(with_argument("consumed_train_samples", 1)), "consumed_train_samples"),
    "place in the schedule": (
        damaged_common(lambda state: state["opt_param_scheduler"].update(num_steps=1)),
        "num_steps",
    ),
    "two optimizers": (
        damaged_common(lambda state: state.update(optimizer={0: state["optimizer"], 1: state["optimizer"]})),
        "optimizers",
    ),
    "an optimizer by number": (
        damaged_common(lambda state: state.update(optimizer={0: state["optimizer"]})),
        "common.pt",
    ),
    "groups of experts": (damaged_common(with_group("is_expert_parallel", True)), "experts"),
    "no common.pt": (lambda root: os.unlink(root / ITERATION / "common.pt"), "common.pt"),
    "no metadata.json": (lambda root: os.unlink(root / ITERATION / "metadata.json"), "metadata.json"),
    "metadata.json of another": (replace(f"{ITERATION}/metadata.json", b"torch_dist", b"torch_dict"), "metadata.json"),
    "tracker": (replace(TRACKER, b"100", b"200"), ""),
    "a missing object": (
        replace(f"{ITERATION}/.metadata", b"linear_proj._extra_state", b"linear_pro_._extra_state"),
        "linear_proj._extra_state",
    ),
    "an object's content": (replace(f"{ITERATION}/__0_1.distcp", b"](Ne.", b"](KAe"), "__0_1.distcp"),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(mcore_case("td_dense_plain"), tmp_path_factory.mktemp("dense") / "out")


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_finds_damage_beside_the_tensors(kind: str, dense: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(dense, tmp_path / "out"))
    damage, text = DAMAGE[kind]
    damage(root)
    (root / "reshard-manifest.json").unlink()
    result = run("verify", root, "--src", mcore_case("td_dense_plain").root, "--shards", 3)
    assert result.status == 4 and text in result.out + result.err


def without_records(root: Path) -> Path:
    shutil.rmtree(root / ".reshard")
    (root / "reshard-manifest.json").unlink()
    return root


@pytest.mark.parametrize("name", ["td_dense_plain", "legacy_dense"])
def test_a_copy_of_a_checkpoint_has_no_differences(name: str, tmp_path: Path) -> None:
    """Also where the source lacks objects and entries that Megatron-Core of today writes."""
    root = mcore_case(name).root
    done("verify", shutil.copytree(root, tmp_path / "copy"), "--src", root)


def test_without_records_masters_have_either_name_and_all_else_is_compared(dense: Path, tmp_path: Path) -> None:
    root = mcore_case("td_dense_plain").root
    out = without_records(Path(shutil.copytree(dense, tmp_path / "out")))
    done("verify", out, "--src", root)
    for kind in ("a missing object", "betas", "tracker"):
        copy = Path(shutil.copytree(out, tmp_path / kind))
        DAMAGE[kind][0](copy)
        fails(4, "verify", copy, "--src", root)


def test_without_records_the_options_of_names_must_be_typed(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    names: list[Argument] = ["--names", str(case.expected["names"]), "--config", tmp_path / "config.json"]
    done("convert", case.root, tmp_path / "out", "--to", "huggingface", *names)
    out = without_records(tmp_path / "out")
    fails(2, "verify", out, "--src", case.root, texts=["--names"])
    done("verify", out, "--src", case.root, *names)


@pytest.mark.parametrize("name", ["max_lr", "lr_decay_steps", "lr_warmup_steps", "end_wd", "wd_incr_steps"])
def test_verify_finds_another_schedule_than_that_of_stated_arguments(name: str, tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    root = written(case, tmp_path / "out", "--args", stated(tmp_path))
    damaged_common(lambda state: state["opt_param_scheduler"].update({name: 7}))(root)
    (root / "reshard-manifest.json").unlink()
    result = run("verify", root, "--src", case.root, "--args", stated(tmp_path), "--shards", 3)
    assert result.status == 4 and name in result.out + result.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multi_latent_attention", True),
        ("kv_channels", None),
        ("num_layers", None),
        ("moe_layer_freq", [0, 0]),
        ("params_dtype", inert_class("torch.float64")),
        ("untie_embeddings_and_output_weights", False),
        ("tensor_model_parallel_size", 2),
    ],
)
def test_verify_finds_other_arguments_than_a_configuration_gives(name: str, value: object, tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    names: list[Argument] = ["--names", str(case.expected["names"]), "--config", tmp_path / "config.json"]
    done("convert", case.root, tmp_path / "model", "--to", "unified", *names)
    root = tmp_path / "out"
    done("convert", tmp_path / "model", root, "--to", "megatron", "--shards", 3, "--verify", *names)
    place = next(root.glob("*/common.pt")).parent
    state = dict(common_in(place).state)
    with_argument(name, value)(state)
    (place / "common.pt").write_bytes(archive_of_pickle(pickled(state)))
    (root / "reshard-manifest.json").unlink()
    result = run("verify", root, "--src", tmp_path / "model", *names)
    assert result.status == 4 and name in result.out + result.err


@pytest.mark.parametrize("mark", MARKS)
def test_the_manifest_finds_changed_marks(mark: str, dense: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(dense, tmp_path / "out"))
    data = bytearray((root / mark).read_bytes())
    data[len(data) // 2] ^= 1
    (root / mark).write_bytes(data)
    fails(4, "verify", root)


@pytest.mark.parametrize("number", range(len(MARKS)))
def test_an_unfinished_directory_is_none_of_megatrons_and_is_completed(number: int, tmp_path: Path) -> None:
    """Marks are missing from the last on; without the tracker or metadata.json Megatron finds no checkpoint."""
    case = mcore_case("td_moe_fully")
    root = written(case, tmp_path / "out")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and ".reshard" not in str(path)}
    (root / "reshard-manifest.json").unlink()
    for mark in MARKS[number:]:
        (root / mark).unlink()
    done("resume", root)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.deep
@pytest.mark.parametrize("other", ["types", "iteration"])
def test_a_killed_run_resumes_also_with_overwrite(other: str, tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    words: list[Argument] = ["--to", "megatron", "--shards", 2]
    if other == "types":
        done("convert", case.root, tmp_path / "before", *words, "--cast", "Float16")
    else:
        src = renamed_source(mcore_case("td_dense_plain"), tmp_path / "src", "--exclude", "optimizer.*")
        done(
            "convert", src, tmp_path / "before", *words, "--args", mcore_case("td_dense_plain").root, "--rename", "*=*"
        )
    done("convert", case.root, tmp_path / "after", *words)
    arguments = [sys.executable, "-m", "tests.stops", tmp_path, 1, 7 if LONG else 60]
    arguments += ["convert", case.root, tmp_path / "dst", *words, "--overwrite"]
    process = subprocess.run(list(map(str, arguments)), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) >= 2


def test_other_arguments_are_another_conversion(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    command: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "megatron", "--shards", 2]
    done(*command)
    (tmp_path / "args.json").write_text(json.dumps(STATED))
    fails(3, *command, "--args", tmp_path / "args.json")
    done(*command, "--args", tmp_path / "args.json", "--overwrite")
    before = (tmp_path / "out" / ITERATION / "common.pt").read_bytes()
    (tmp_path / "out" / "reshard-manifest.json").unlink()
    done("resume", tmp_path / "out")
    assert (tmp_path / "out" / ITERATION / "common.pt").read_bytes() == before


def test_a_json_file_of_arguments_gives_groups_and_schedule(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    (tmp_path / "args.json").write_text(json.dumps({**STATED, "consumed_train_samples": 1234}))
    root = written(case, tmp_path / "out", "--args", tmp_path / "args.json")
    common = common_in(root / ITERATION)
    groups = [(group["wd_mult"], group["betas"], group["eps"], group["weight_decay"]) for group in common.groups]
    assert groups == [(1.0, (0.9, 0.99), 1e-8, 0.05), (0.0, (0.9, 0.99), 1e-8, 0.0)]
    schedule = common.state["opt_param_scheduler"]
    assert (schedule["max_lr"], schedule["lr_decay_steps"], schedule["lr_warmup_steps"]) == (0.002, 4000, 40)
    assert schedule["num_steps"] == common.args["consumed_train_samples"] == 1234
    assert common.args["hidden_size"] == case.expected["model"]["hidden"]


@pytest.mark.parametrize("of", ["root", "directory", "file"])
def test_another_checkpoint_gives_its_arguments_and_groups(of: str, tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    other = written(case, tmp_path / "other", "--args", stated(tmp_path))
    place = {"root": other, "directory": other / ITERATION, "file": other / ITERATION / "common.pt"}[of]
    root = written(case, tmp_path / "out", "--args", place)
    common, named = common_in(root / ITERATION), common_in(other / ITERATION)
    assert [{**group} for group in common.groups] == [{**group} for group in named.groups]
    # The samples are those of the step, not of the other run.
    assert common.args["consumed_train_samples"] == 3 * STATED["global_batch_size"]


def stated(directory: Path, **more: Any) -> Path:
    path = directory / "stated.json"
    path.write_text(json.dumps({**STATED, **more}))
    return path


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        ({"hidden_size": 9}, ["hidden_size", "9", "8"]),
        ({"num_layers": 3}, ["num_layers", "3"]),
        ({"num_query_groups": 4}, ["num_query_groups"]),
        ({"padded_vocab_size": 64}, ["padded_vocab_size", "64"]),
        ({"moe_layer_freq": [1, 1]}, ["layers"]),
        ({"num_experts": 4}, ["num_experts"]),
        ({"untie_embeddings_and_output_weights": False}, ["output_layer.weight"]),
        (None, ["holds no arguments"]),
        ("", ["does not exist"]),
    ],
)
def test_arguments_that_contradict_the_tensors_are_refused(args: object, texts: list[str], tmp_path: Path) -> None:
    case, path = mcore_case("td_dense_plain"), tmp_path / "args.json"
    if args is None:
        path = tmp_path / "args.pt"
        path.write_bytes(archive_of_pickle(pickled({"iteration": 3})))
    elif args:
        path.write_text(json.dumps(args))
    fails(3, "convert", case.root, tmp_path / "out", "--to", "megatron", "--args", path, texts=[path, *texts])
    assert not (tmp_path / "out").exists()


def test_keys_of_one_layer_beside_those_of_all_layers_are_refused(tmp_path: Path) -> None:
    name = "mlp.linear_fc2.weight"
    renamed = ["--to", "megatron", "--rename", f"decoder.layers.0.{name}=decoder.layers.{name}"]
    case = mcore_case("td_moe_layer_keys")
    for options in ([], ["--format", "torch", "--sizes", "tp=2"]):
        options += [*renamed, "--exclude", "optimizer.*"]
        fails(3, "convert", case.root, tmp_path / "out", *options, texts=[f"decoder.layers.{name}"])


def test_an_argument_that_holds_itself_is_damage(tmp_path: Path) -> None:
    src = with_other_argument(mcore_case("td_dense_plain").root, tmp_path / "src", "recursive", "here")
    path = src / ITERATION / "common.pt"
    with zipfile.ZipFile(path) as archive:
        data = archive.read("archive/data.pkl")
    text = b"X\x04\x00\x00\x00here"
    assert data.count(text) == 1
    data = data[: data.index(text)] + b"]r\xff\xff\x00\x00j\xff\xff\x00\x00a" + data[data.index(text) + 13 :]
    path.write_bytes(archive_of_pickle(data))
    fails(3, "convert", src, tmp_path / "out", "--to", "megatron", "--verify", texts=["common.pt"])


@pytest.mark.parametrize("form", ["megatron", "dcp"])
def test_a_name_of_a_tensor_that_is_no_text_is_an_error(form: str, tmp_path: Path) -> None:
    src = Path(shutil.copytree(mcore_case("td_dense_plain").root, tmp_path / "src"))
    path = src / ITERATION / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"output_layer.weight", b"out\xed\xa0\x80_layer.weight"))
    texts: list[Argument] = [path.parent, "_layer.weight", "--exclude"]
    fails(3, "convert", src, tmp_path / "out", "--to", form, "--shards", 2, texts=texts)
    assert not (tmp_path / "out").exists()


def test_only_plain_arguments_are_carried_over(tmp_path: Path) -> None:
    """Others would run where Megatron loads the file, or name a package that is not there."""
    case = mcore_case("td_dense_plain")
    src = Path(shutil.copytree(case.root, tmp_path / "src"))
    values = {
        "a_dtype": inert_class("torch.float16"),
        "an_enum": inert("megatron.core.transformer.enums.AttnBackend", 5),
        "a_call": inert("torch.hub.load", "repository"),
        "a_class": inert_class("mindspeed.core.Optimizer"),
        "nested": [{"deep": inert("numpy.random.rand", 3)}],
        "noop_layers": "1",
        "num_layers": 3,
    }

    def change(state: dict[str, Any]) -> None:
        state["args"] = inert("argparse.Namespace", state={**state["args"].fields, **values})
        # Tensors of the state stay behind with their archive.
        state["optimizer"]["optimizer"]["state"] = {"common_step": 3}

    damaged_common(change)(src)
    result = done("convert", src, tmp_path / "out", "--to", "megatron", "--verify")
    warns(result, "a_call", "a_class", "nested")
    args = common_in(tmp_path / "out" / ITERATION).args
    assert {"a_dtype", "an_enum"} <= args.keys() and not {"a_call", "a_class", "nested"} & args.keys()
    assert (args["num_layers"], args["noop_layers"]) == (2, None)


def renamed_source(case: McoreCase, directory: Path, *options: Argument) -> Path:
    """The tensors of a case in a form that records no arguments, under Megatron's keys."""
    done("convert", case.root, directory, "--to", "hf-sharded", "--shards", 1, *options)
    return directory


@pytest.mark.parametrize("name", ["td_dense_plain", "td_moe_fully"])
def test_what_no_checkpoint_of_megatron_records_is_stated_or_listed(name: str, tmp_path: Path) -> None:
    case = mcore_case(name)
    moe = "moe" in name
    rename = [] if moe else ["--rename", "optimizer.state.fp32_param.*=optimizer.state.param.*"]
    src = renamed_source(case, tmp_path / "src", *rename)
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    words: list[Argument] = ["convert", src, tmp_path / "out", "--to", "megatron", "--shards", 2, "--rename", "*=*"]
    fails(3, *words, texts=["--config", "--args"])
    words += ["--config", tmp_path / "config.json"]
    missing = [*STATED, *(["expert_model_parallel_size"] if moe else [])]
    missing.remove("lr_warmup_iters")
    fails(3, *words, texts=[*missing[:5], "--args"])
    args = stated(tmp_path, **({"expert_model_parallel_size": 2, "moe_layer_freq": 1} if moe else {}))
    done(*words, "--args", args, "--verify")
    common = common_in(tmp_path / "out" / "iter_0000003")
    model = case.expected["model"]
    assert common.iteration == 3 and common.steps == {3}
    assert (common.args["num_layers"], common.args["hidden_size"]) == (model["layers"], model["hidden"])
    assert len(common.optimizers) == (2 if moe else 1)
    assert tensors_of(tmp_path / "out") == tensors_of(case.root)


def test_weights_alone_become_a_release(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    src = renamed_source(case, tmp_path / "src", "--include", "decoder.*", "--include", "*.weight", "--exclude", "opt*")
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    config: list[Argument] = ["--config", tmp_path / "config.json"]
    done("convert", src, tmp_path / "out", "--to", "megatron", "--rename", "*=*", "--verify", *config)
    assert (tmp_path / "out" / TRACKER).read_text() == "release"
    common = common_in(tmp_path / "out" / "release")
    assert common.args["params_dtype"].name == "torch.bfloat16" and common.args["no_save_optim"] is True
    assert tensors_of(tmp_path / "out").keys() == {
        name for name in tensors_of(case.root) if "optimizer" not in name
    } - {"global_step"}


NAMES = {
    "td_dense_plain": "llama",
    "td_moe_fully": "qwen3_moe,gate_up=halves,qkv=grouped",
    "td_moe_layer_keys": "qwen3_moe,gate_up=interleaved,qkv=grouped",
    "td_dense_te_names": "qwen3,gate_up=halves,qkv=contiguous",
    "td_dense_buckets": "llama",
    "td14_dense_model_space": "llama",
    "td_mla_mtp": "deepseek_v3,gate_up=halves,mla=separate",
}


@pytest.mark.parametrize("name", some_of(NAMES, 4))
def test_a_run_goes_to_mindformers_and_back_with_every_bit(name: str, tmp_path: Path) -> None:
    """The source is named in --args: names of layers and norms, groups and schedule are as it has them."""
    case = mcore_case(name)
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    words: list[Argument] = ["--names", NAMES[name], "--config", tmp_path / "config.json", "--verify"]
    words += ["--optimizer", "keep"] if case.optimizer else []
    done("convert", case.root, tmp_path / "ranks", "--dst-strategy", "none", *words)
    back: list[Argument] = [tmp_path / "ranks", tmp_path / "back", "--src-strategy", "none", "--to", "megatron"]
    done("convert", *back, "--args", case.root, *words)
    assert tensors_of(tmp_path / "back") == tensors_of(case.root)
    if case.optimizer:
        common, source = common_in(tmp_path / "back" / "iter_0000003"), common_in(case.directory)
        assert common.steps == {case.expected["optimizer"]["step"]}
        batch = source.args.get("global_batch_size") or source.args["consumed_train_samples"] // 100
        assert common.state["opt_param_scheduler"] == {**source.state["opt_param_scheduler"], "num_steps": 3 * batch}
        assert {group["betas"] for group in common.groups} == {(0.9, 0.95)}


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", ["Int32", "Int64"])
def test_values_that_mindformers_saves_beside_the_step_are_left_out(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    case = mcore_case("td_dense_plain")
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    words: list[Argument] = ["--names", "llama", "--config", tmp_path / "config.json", "--optimizer", "keep"]
    done("convert", case.root, tmp_path / "ranks", "--dst-strategy", "none", "--format", "safetensors", *words)
    (path,) = (tmp_path / "ranks").glob("rank_0/*")
    others = {"epoch_num": scalar(1), "step_num": scalar(7), "loss_scale": scalar(0x47800000, "Float32")}
    saved = {**read_checkpoint(path), **others, "global_step": scalar(7, dtype, shape)}
    write_checkpoint(path, saved, metadata={"format": "ms"})
    words += ["--src-strategy", "none", "--to", "megatron", "--args", case.root]
    result = done("convert", tmp_path / "ranks", tmp_path / "out", *words, "--verify")
    assert "epoch_num" in result.err
    common = common_in(tmp_path / "out" / "iter_0000007")
    assert common.iteration == 7 and common.steps == {7}
    write_checkpoint(path, {**saved, "global_step": scalar(8, dtype, shape)}, metadata={"format": "ms"})
    (tmp_path / "out" / "reshard-manifest.json").unlink()
    verified = run("verify", tmp_path / "out", "--src", tmp_path / "ranks", *words[:-4], "--args", case.root)
    assert verified.status in (3, 4), verified.err
    write_checkpoint(path, {**saved, "global_step": scalar(2**31 - 1, "Float32", shape)}, metadata={"format": "ms"})
    fails(3, "convert", tmp_path / "ranks", tmp_path / "no", *words, texts=["global_step"])


@pytest.mark.parametrize("batch", [None, 5])
def test_step_and_batch_that_checkpoint2_records_are_used(batch: int | None, tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    words: list[Argument] = ["--names", "llama", "--config", tmp_path / "config.json", "--optimizer", "keep"]
    done("convert", case.root, tmp_path / "src", "--to", "checkpoint2", "--dst-strategy", "none", *words)
    (path,) = (tmp_path / "src").glob("*/common.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "global_batch_size": batch}))
    words += ["--to", "megatron", "--args", case.root, "--verify"]
    done("convert", tmp_path / "src", tmp_path / "out", "--exclude", "global_step", *words)
    common = common_in(tmp_path / "out" / "iter_0000003")
    expected = 3 * (batch or common_in(case.directory).args["global_batch_size"])
    assert common.args["consumed_train_samples"] == common.state["opt_param_scheduler"]["num_steps"] == expected


def as_value(array: Any) -> Value:
    dtypes = {"float32": "Float32", "bfloat16": "BFloat16", "int32": "Int32"}
    return Value(dtypes[str(array.dtype)], array.view(f"<u{array.dtype.itemsize}"))


def own_masters(case: McoreCase, directory: Path, *others: str) -> Path:
    """Float32 weights with moments and the step, and no other master copy; ``others`` keep the type of weights."""
    master = "optimizer.state.fp32_param."
    with reshard.open(case.root) as opened:
        read = {name: np.asarray(opened[name]) for name in opened}
    tensors = {
        name: value if name in others else read.get(master + name, value)
        for name, value in read.items()
        if not name.startswith(master)
    }
    return write_checkpoint(
        directory / "model.safetensors",
        {name: as_value(array) for name, array in tensors.items()},
        metadata={"format": "pt"},
    ).parent


def test_float32_weights_become_masters_and_their_type_is_stated(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    src = own_masters(case, tmp_path / "src")
    words: list[Argument] = ["convert", src, tmp_path / "out", "--to", "megatron", "--rename", "*=*"]
    words += ["--args", case.root]
    fails(3, *words, texts=["9 Float32 weights", "--cast"])
    fails(3, *words, "--cast", "*linear*weight=BFloat16", texts=["final_layernorm", "--cast"])
    fails(3, *words, "--cast", "*=BFloat16", texts=["optimizer.state"])
    done(*words, "--cast", "BFloat16", "--verify")
    assert tensors_of(tmp_path / "out") == tensors_of(case.root)


def test_float32_weights_of_mindformers_become_masters(tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    words: list[Argument] = ["--names", "qwen3_moe,gate_up=halves,qkv=grouped", "--config", tmp_path / "config.json"]
    words += ["--optimizer", "keep"]
    done("convert", case.root, tmp_path / "ranks", "--dst-strategy", "none", "--format", "safetensors", *words)
    (path,) = (tmp_path / "ranks").glob("rank_0/*")
    saved, master = read_checkpoint(path), "main_param."
    plain = {name: saved.get(master + name, each) for name, each in saved.items() if not name.startswith(master)}
    write_checkpoint(path, plain, metadata={"format": "ms"})
    words += ["--src-strategy", "none", "--to", "megatron", "--args", case.root, "--verify"]
    fails(3, "convert", tmp_path / "ranks", tmp_path / "out", *words, texts=["--cast"])
    done("convert", tmp_path / "ranks", tmp_path / "out", *words, "--cast", "BFloat16")
    assert tensors_of(tmp_path / "out") == tensors_of(case.root)


def test_verify_finds_masters_that_are_not_the_weights(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    src = own_masters(case, tmp_path / "src")
    words: list[Argument] = ["--to", "megatron", "--rename", "*=*", "--args", case.root, "--cast", "BFloat16"]
    done("convert", src, tmp_path / "out", *words)
    with reshard.open(src) as opened:
        weight = np.asarray(opened["decoder.final_layernorm.weight"]).tobytes()
    hit = 0
    for path in (tmp_path / "out" / "iter_0000003").glob("*.distcp"):
        data = path.read_bytes()
        hit += data.count(weight[:4])
        path.write_bytes(data.replace(weight[:4], bytes([weight[0] ^ 1]) + weight[1:4]))
    assert hit
    fails(4, "verify", tmp_path / "out", "--src", src, "--shards", 16)


def test_weights_of_lower_precision_are_no_masters(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    src = own_masters(case, tmp_path / "src", "output_layer.weight")
    words: list[Argument] = ["convert", src, tmp_path / "out", "--to", "megatron", "--rename", "*=*"]
    fails(3, *words, "--args", case.root, "--cast", "BFloat16", texts=["output_layer.weight"])
    done(*words, "--args", case.root, "--exclude", "optimizer.*", "--verify")


def test_experts_are_of_one_optimizer_without_expert_parallelism(tmp_path: Path) -> None:
    case = mcore_case("td_moe_fully")
    (tmp_path / "args.json").write_text(json.dumps({"expert_model_parallel_size": 1}))
    root = written(case, tmp_path / "out", "--args", tmp_path / "args.json")
    (optimizer,) = common_in(root / ITERATION).optimizers
    assert [group["is_expert_parallel"] for group in optimizer["optimizer"]["param_groups"]] == [False, False]
    assert len(common_in(written(case, tmp_path / "two") / ITERATION).optimizers) == 2


def test_biases_of_experts_that_a_cast_rounds_give_a_warning(tmp_path: Path) -> None:
    case = mcore_case("td_mla_mtp")
    words: list[Argument] = ["convert", case.root, tmp_path / "out", "--to", "megatron", "--cast", "BFloat16"]
    warns(done(*words, "--dry-run"), "expert_bias=Float32")
    assert "expert_bias" not in done(*words, "--cast", "*.expert_bias=Float32").err


def test_optimizer_state_of_some_parameters_is_refused(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    for pattern in ("optimizer.state.exp_avg.*norm*", "*.exp_avg_sq.*"):
        fails(3, "convert", case.root, tmp_path / "out", "--to", "megatron", "--exclude", pattern, texts=["optimizer"])


def test_other_names_than_megatrons_are_refused(tmp_path: Path) -> None:
    case = mcore_case("td_dense_plain")
    src = renamed_source(case, tmp_path / "src", "--exclude", "opt*", "--rename", "*=model.*")
    fails(3, "convert", src, tmp_path / "out", "--to", "megatron", "--rename", "*=*", texts=["--names"])


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (["--to", "dcp", "--shards", 1, "--args", "a.json"], ["--args", "megatron"]),
        (["--to", "dcp", "--shards", 1, "--sizes", "tp=2"], ["--sizes", "megatron"]),
        (["--to", "megatron", "--sizes", "tp=2"], ["--format torch"]),
        (["--to", "megatron", "--format", "torch", "--shards", 2], ["--sizes"]),
        (["--to", "megatron", "--sizes", "dp=2"], ["tp, pp, ep"]),
    ],
)
def test_options_go_with_what_they_are_for(options: list[Argument], texts: list[str], tmp_path: Path) -> None:
    fails(2, "convert", mcore_case("td_dense_plain").root, tmp_path / "out", *options, texts=texts)
