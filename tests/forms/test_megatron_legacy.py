"""Legacy trees of Megatron-Core and of MindSpeed-LLM's converter: read whole, or refused by name."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.corpus_mcore import McoreCase, mcore_cases
from tests.running import Argument, done, fails

CASES = [case for case in mcore_cases("legacy") if case.expected["expect"] == "convert"]
_NAMES = {"BF16": "<u2", "F32": "<f4"}
_LOCAL = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class Whole(NamedTuple):
    """A whole tensor: type and elements, those of BF16 as 16 bits."""

    dtype: str
    array: np.ndarray[Any, Any]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.array.tobytes()).hexdigest()


def whole_tensors(directory: Path) -> dict[str, Whole]:
    """The tensors of safetensors files, by name."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            array = np.frombuffer(data[start:stop], _NAMES.get(entry["dtype"], "<u4")).reshape(entry["shape"])
            tensors[name] = Whole(entry["dtype"], array)
    return tensors


def converted(source: Path, directory: Path, *options: Argument) -> dict[str, Whole]:
    done("convert", source, directory, "--to", "huggingface", "--verify", *options)
    return whole_tensors(directory)


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
