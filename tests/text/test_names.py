"""Optimizer state by name: `linear.weight` is a weight, `linear.w` beside `w` is FTRL's state of `w`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from reshard.text.names import GRADIENTS, OPTIMIZER_STATE, OTHER, WEIGHTS, kind_of
from tests.running import Argument, done, fails
from tests.trees import layout, single, write_strategy

Array = npt.NDArray[Any]
AMBIGUOUS = ["linear.", "rms.", "stat.", "delta.", "prev.", "moments.", "accum."]
MASTERS = ["main_param.model.a.weight", "main_param.model.linear.weight"]


def full(shape: tuple[int, ...], value: float = 1) -> Array:
    return np.full(shape, value, np.float32)


def huggingface(place: Path, tensors: dict[str, Array]) -> Path:
    place.mkdir()
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def types(place: Path) -> dict[str, str]:
    with safe_open(place / "model.safetensors", "np") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("backbone.dense.weight", WEIGHTS),
        ("embedding", WEIGHTS),
        ("moments", WEIGHTS),
        ("linear.", WEIGHTS),
        ("adam_v.dense.weight", OPTIMIZER_STATE),
        ("exp_avg_sq_row.dense.weight", OPTIMIZER_STATE),
        ("main_param.dense.weight", OPTIMIZER_STATE),
        ("adam_m.placeholder.0", OPTIMIZER_STATE),
        ("optimizer.state.dense.weight.exp_avg", OPTIMIZER_STATE),
        ("chained_0.optimizer.state.exp_avg.dense.weight", OPTIMIZER_STATE),
        ("chained_0.dense.weight", WEIGHTS),
        ("accu_grads.dense.weight", GRADIENTS),
        ("beta1_power", OTHER),
        ("cur_rank", OTHER),
        ("generator_0._seed", OTHER),
    ],
)
def test_kinds_follow_from_names(name: str, kind: str) -> None:
    assert kind_of(name, 8, ()) == kind


@pytest.mark.parametrize("prefix", AMBIGUOUS)
def test_ambiguous_prefixes_mark_state_only_before_a_parameter(prefix: str) -> None:
    assert kind_of(f"{prefix}dense.weight", 8, {"dense.weight"}) == OPTIMIZER_STATE
    assert kind_of(f"{prefix}dense.weight", 8, {"weight", f"{prefix}dense.weight"}) == WEIGHTS


@pytest.mark.parametrize("name", [f"{prefix}weight" for prefix in AMBIGUOUS] + ["linear.0.weight"])
def test_a_weight_named_like_state_is_cast(name: str, tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src", {"bert.a.weight": full((4, 2)), name: full((4, 2))})
    done("convert", source, tmp_path / "out", "--to", "huggingface", "--cast", "BFloat16", "--verify")
    assert types(tmp_path / "out") == {"bert.a.weight": "BF16", name: "BF16"}


def test_state_beside_its_parameter_keeps_its_type(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src", {name: full((4, 2)) for name in ("a.w", "linear.a.w", "main_param.a.w")})
    done("convert", source, tmp_path / "out", "--to", "huggingface", "--cast", "BFloat16", "--verify")
    assert types(tmp_path / "out") == {"a.w": "BF16", "linear.a.w": "F32", "main_param.a.w": "F32"}


def test_rules_refuse_a_weight_named_like_state_that_they_do_not_list(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src", {"bert.a.weight": full((4, 2)), "linear.weight": full((4, 2))})
    table = tmp_path / "table.toml"
    table.write_text('title = "t"\nsides = ["l", "r"]\n[[rule]]\nfrom = "bert.*"\nto = "model.*"\n')
    words: list[Argument] = ["convert", source, tmp_path / "out", "--to", "huggingface", "--names", table]
    fails(3, *words, texts=["linear.weight"])
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").glob("*.safetensors"))


def test_masters_of_pynative_training_follow_their_weights_through_rules(tmp_path: Path) -> None:
    weights = {"bert.a.weight": full((4, 2)), "bert.linear.weight": full((4, 2), 2)}
    masters = {f"main_param.{name}": array + 0.5 for name, array in weights.items()}
    source = huggingface(tmp_path / "src", {**weights, **masters})
    table = tmp_path / "table.toml"
    table.write_text('title = "t"\nsides = ["l", "r"]\n[[rule]]\nfrom = "bert.*"\nto = "model.*"\n')
    words: list[Argument] = [
        "convert",
        source,
        tmp_path / "out",
        "--to",
        "huggingface",
        "--names",
        table,
        "--cast",
        "BFloat16",
    ]
    done(*words, "--optimizer", "keep", "--verify")
    names_by_file = types(tmp_path / "out")
    assert {name: names_by_file[name] for name in MASTERS} == dict.fromkeys(MASTERS, "F32")
    assert set(names_by_file) - set(MASTERS) == {"model.a.weight", "model.linear.weight"}
    words[2] = tmp_path / "weights"
    done(*words, "--verify")
    assert set(types(tmp_path / "weights")) == set(names_by_file) - set(MASTERS)


def test_checkpoint2_puts_state_beside_its_parameter_and_nothing_else_into_optimizer_files(tmp_path: Path) -> None:
    shape = (4, 2)
    names = ["bert.a.weight", "linear.weight", "linear.bert.a.weight", "main_param.bert.a.weight"]
    source = huggingface(tmp_path / "src", {name: full(shape) for name in names})
    strategy = write_strategy(tmp_path / "s", single(dict.fromkeys(names, layout([1], [-1, -1]))))
    done("convert", source, tmp_path / "out", "--to", "checkpoint2", "--dst-strategy", strategy, "--verify")
    names_by_file = {
        path.name[: path.name.index("-")]: sorted(load_file(path))
        for path in (tmp_path / "out" / "iteration_00000000").glob("*.safetensors")
    }
    assert names_by_file == {"model": sorted(names[:2]), "opt": sorted(names[2:])}


def test_an_adapter_changes_a_module_named_like_state(tmp_path: Path) -> None:
    base = huggingface(tmp_path / "base", {f"{name}.weight": full((4, 4), 0) for name in ("linear", "other")})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    pairs = {f"{name}.lora_A.weight": full((1, 4)) for name in ("linear", "other")}
    pairs.update({f"{name}.lora_B.weight": full((4, 1)) for name in ("linear", "other")})
    save_file(pairs, adapter / "adapter_model.safetensors", {"format": "pt"})
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 1, "r": 1}))
    done("merge-lora", base, adapter, tmp_path / "out", "--verify")
    for name, array in load_file(tmp_path / "out" / "model.safetensors").items():
        assert (array == 1).all(), name


def test_inspect_and_plan_count_a_weight_named_like_state_as_a_weight(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src", {name: full((4, 2)) for name in ("a.w", "linear.weight", "adam_m.a.w")})
    kinds = {tensor["name"]: tensor["kind"] for tensor in done("inspect", source, "--json").json["tensors"]}
    assert kinds == {"a.w": WEIGHTS, "linear.weight": WEIGHTS, "adam_m.a.w": OPTIMIZER_STATE}
    plan = done("plan", source, tmp_path / "out", "--to", "unified", "--json").json
    assert {kind: total["tensors"] for kind, total in plan["kinds"].items()} == {WEIGHTS: 2, OPTIMIZER_STATE: 1}
