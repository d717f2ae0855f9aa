"""Legacy trees of Megatron-Core and of MindSpeed-LLM's converter: read whole, or refused by name."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import Archive, Elements
from reshard.checkpoints.formats.pickles import pickled, read_pickle
from tests.corpus_mcore import McoreCase, mcore_case, mcore_cases
from tests.running import Argument, done, fails, warns
from tests.trees import SAFETENSORS_NAMES, read_checkpoint

CASES = [case for case in mcore_cases("legacy") if case.expected["expect"] == "convert"]
_LOCAL = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class Whole(NamedTuple):
    """A whole tensor: the type's name in safetensors, and elements as unsigned integers."""

    dtype: str
    array: np.ndarray[Any, Any]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.array.tobytes()).hexdigest()


def converted(source: Path, directory: Path, *options: Argument) -> dict[str, Whole]:
    """The tensors of a conversion to Hugging Face's form, by name."""
    done("convert", source, directory, "--to", "huggingface", "--verify", *options)
    return {
        name: Whole(SAFETENSORS_NAMES[dtype], array)
        for path in directory.glob("*.safetensors")
        for name, (dtype, array) in read_checkpoint(path).items()
    }


def live(tensors: Mapping[str, Whole], local: bool) -> dict[str, Whole]:
    """The tensors of the reader under the live names of a whole model, each expert by itself."""
    names = {}
    for name, (dtype, array) in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.experts\.(.*)", name)
        for inner, within in _LOCAL.items() if local else ():
            name = name[: -len(within)] + inner if name.endswith(within) else name
        if expert:
            for number, of_expert in enumerate(array):
                names[f"{expert[1]}.local_experts.{number}.{expert[2]}"] = Whole(dtype, of_expert)
        else:
            names[name] = Whole(dtype, array)
    return names


def copied(case: McoreCase, tmp_path: Path) -> Path:
    """A copy of a case's tree, and its directory."""
    shutil.copytree(case.root, tmp_path / "copy")
    return tmp_path / "copy" / case.directory.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_of_a_tree_are_those_that_megatron_held(case: McoreCase, tmp_path: Path) -> None:
    tensors = converted(case.root, tmp_path / "out", "--exclude", "optimizer.*", "--exclude", "global_step")
    local = not case.expected["model"].get("transformer_engine_names")
    expected = {
        name: (entry["dtype"], tuple(entry["shape"]), entry["sha256"])
        for name, entry in case.expected["native"].items()
    }
    actual = live(tensors, local)
    assert {name: (each.dtype, each.array.shape, each.digest) for name, each in actual.items()} == expected


@pytest.mark.parametrize("case", [case for case in mcore_cases("bad_missing_tp")], ids=lambda case: case.name)
def test_a_missing_rank_is_refused_by_its_name(case: McoreCase, tmp_path: Path) -> None:
    fails(3, "convert", case.root, tmp_path / "out", "--to", "huggingface", texts=case.expected["must_say"])
    done("inspect", case.root)


OPTIMIZERS = [case for case in CASES if case.expected.get("optimizer")]


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.name)
def test_state_of_the_optimizer_is_that_of_its_parameters(case: McoreCase, tmp_path: Path) -> None:
    options = ["--names", case.expected["names"], "--optimizer", "keep"]
    tensors = converted(case.root, tmp_path / "out", *options)
    step = tensors.pop("global_step")
    assert (step.dtype, step.array.tolist()) == ("I32", [case.expected["optimizer"]["step"]])
    kinds = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v.", "fp32_param": "main_param."}
    expected = {
        kinds[kind] + name: (entry["dtype"], tuple(entry["shape"]), entry["sha256"])
        for kind, of_kind in case.expected["optimizer"]["state"].items()
        for name, entry in of_kind.items()
    }
    expected |= {
        name: (entry["dtype"], tuple(entry["shape"]), entry["sha256"])
        for name, entry in case.expected["tensors"].items()
    }
    actual = {name: (each.dtype, each.array.shape, each.digest) for name, each in tensors.items()}
    assert {name: actual.get(name) for name in expected} == expected
    assert not actual.keys() - expected.keys() - case.expected.get("tensors_optional", {}).keys()


def elements_in(path: Path, *keys: Any) -> Elements:
    """Where a tensor of a file is, by the keys to it in its pickle."""
    with FileHandles() as handles, contextlib.closing(handles.open_file(str(path))) as file:
        archive = Archive(file, 0, file.size())
        value = archive.pickled(lambda name: True)
        for key in keys:
            value = next(iter(value.values())) if key is None else value[key]
        return archive.tensor(value)


def change(path: Path, elements: Elements, data: bytes) -> None:
    """Put other bytes at the beginning of a tensor, with the checksum that fits."""
    content = bytearray(path.read_bytes())
    content[elements.offset : elements.offset + len(data)] = data
    entry = elements.entry
    old, new = (struct.pack("<I", each) for each in (entry.crc or 0, zlib.crc32(content[entry.offset :][: entry.size])))
    path.write_bytes(content.replace(old, new))


def change_args(path: Path, **args: Any) -> None:
    """Set arguments in a file, as a new archive without tensors moving: the pickle alone is another."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            if name.endswith("/data.pkl"):
                state = read_pickle(data, lambda name: True, persistent=True)
                for argument, value in args.items():
                    if argument in state:
                        state[argument] = value
                    else:
                        state["args"].state[argument] = value
                data = pickled(state)
            archive.writestr(name, data)


def test_a_lost_file_is_refused_and_its_dense_weights_come_from_replicas(tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_moe"), tmp_path)
    shutil.rmtree(directory / "mp_rank_00_001")
    fails(3, "convert", directory, tmp_path / "out", "--to", "huggingface", texts=["mp_rank_00_001"])
    result = done(
        "convert", directory, tmp_path / "some", "--to", "dcp", "--shards", 1, "--include", "embedding.*", "--verify"
    )
    warns(result, "mp_rank_00_001")


def test_directories_of_stages_in_another_order_are_refused(tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_dense"), tmp_path)
    for tensor in ("00", "01"):
        first, second = (directory / f"mp_rank_{tensor}_{stage}" for stage in ("000", "001"))
        first.rename(directory / "other")
        second.rename(first)
        (directory / "other").rename(second)
    fails(3, "convert", directory, tmp_path / "out", "--to", "huggingface", texts=["embedding"])


def test_a_changed_replica_is_refused(tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_dense"), tmp_path)
    path = directory / "mp_rank_01_000" / "model_optim_rng.pt"
    elements = elements_in(path, "model", "decoder.layers.0.input_layernorm.weight")
    change(path, elements, b"\1\2")
    fails(3, "convert", directory, tmp_path / "out", "--to", "huggingface", texts=["layer_norm_weight"])


@pytest.mark.parametrize("name", ["legacy_dense", "legacy_plain"])
def test_state_of_other_parameters_is_refused_and_weights_can_be_taken(name: str, tmp_path: Path) -> None:
    directory = copied(mcore_case(name), tmp_path)
    path = next(directory.glob("*/distrib_optim.pt"), None) or next(directory.glob("*/model_optim_rng.pt"))
    plain = ("optimizer", "fp32_from_fp16_params", 0, 1)
    elements = elements_in(path, *(plain if name == "legacy_plain" else (0, None, "param")))
    change(path, elements, bytes(16))
    options: list[Argument] = ["--to", "dcp", "--shards", 1]
    fails(3, "convert", directory, tmp_path / "out", *options, texts=["optimizer.state.param."])
    done("convert", directory, tmp_path / "some", *options, "--exclude", "optimizer.*")


def test_older_versions_are_refused(tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_te_names"), tmp_path)
    for path in directory.glob("*/model_optim_rng.pt"):
        change_args(path, checkpoint_version=2.0)
    fails(3, "convert", directory, tmp_path / "out", "--to", "huggingface", texts=["2.0"])


def test_directories_named_otherwise_than_their_ranks_are_refused(tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_te_names"), tmp_path)
    for path in directory.glob("*/model_optim_rng.pt"):
        change_args(path, rank=1 - int(path.parent.name[-1]), world_size=4)
    fails(3, "convert", directory, tmp_path / "out", "--to", "huggingface", texts=["saved by rank"])


def test_experts_in_the_directory_of_another_rank_are_refused(tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_moe"), tmp_path)
    for path in directory.glob("*/model_optim_rng.pt"):
        tensor, expert = (int(number) for number in path.parent.name.split("_")[2:])
        change_args(path, rank=tensor + 2 * (1 - expert), world_size=4)
    fails(3, "convert", directory, tmp_path / "out", "--to", "huggingface", texts=["saved by rank"])


@pytest.mark.parametrize("numbered", [False, True])
def test_a_copy_of_another_rank_is_refused(numbered: bool, tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_dense"), tmp_path)
    for path in directory.glob("*/model_optim_rng.pt"):
        tensor, stage = (int(number) for number in path.parent.name.split("_")[2:])
        if numbered:
            change_args(path, rank=tensor + 4 * stage, world_size=8)
    for path in directory.glob("mp_rank_00_000/*"):
        shutil.copy(path, directory / "mp_rank_01_000" / path.name)
    fails(3, "convert", directory, tmp_path / "out", "--to", "huggingface", texts=["mp_rank_01_000"])


@pytest.mark.parametrize("number", ["pipeline", "expert"])
def test_the_second_number_of_a_directory_is_told_from_contents(number: str, tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_vpp" if number == "pipeline" else "legacy_moe"), tmp_path)
    for path in directory.glob("*/model_optim_rng.pt"):
        sizes = {f"{kind}_model_parallel_size": None for kind in ("pipeline", "expert")}
        change_args(path, **sizes)
    converted(directory, tmp_path / "out", "--exclude", "optimizer.*")


def test_a_number_that_could_be_either_is_refused(tmp_path: Path) -> None:
    directory = copied(mcore_case("legacy_vpp"), tmp_path)
    for path in directory.glob("*/model_optim_rng.pt"):
        change_args(path, pipeline_model_parallel_size=None, expert_model_parallel_size=None)
    shutil.rmtree(directory / "mp_rank_00_000")
    fails(3, "convert", directory, tmp_path / "out", "--to", "huggingface", texts=["pipeline ranks"])
