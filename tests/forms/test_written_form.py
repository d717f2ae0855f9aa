"""Files written besides the weights, and warnings about them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.running import Argument, done, fails, flat
from tests.trees import layout, single, write_strategy

WEIGHTS = {"linear.weight": (4, 2), "a.w": (4, 2)}
STATE = {f"{prefix}a.w": (4, 2) for prefix in ("adam_m.", "adam_v.", "linear.", "accu_grads.")}


def huggingface(place: Path, step: int = 7, dtype: str = "f4", **names: tuple[int, ...]) -> Path:
    tensors = {name: np.ones(shape, dtype) for name, shape in {**WEIGHTS, **STATE, **names}.items()}
    place.mkdir()
    save_file({**tensors, "global_step": np.array(step, "i4")}, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.mark.parametrize("message", ["float32", "bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_configuration_of_another_dtype_gives_a_warning(message: str, key: str, tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src")
    (source / "config.json").write_text(json.dumps({key: message}))
    result = done("convert", source, tmp_path / "out", "--to", "huggingface")
    output = f"has {key} '{message}', and the weights are float32" in flat(result.err)
    assert output == (message != "float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {key: message}


def test_a_target_without_optimizer_state_is_verified_against_one_unsharded_file(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src") / "model.safetensors"
    strategy = write_strategy(tmp_path / "s", single(dict.fromkeys(WEIGHTS, layout([2], [0, -1]))))
    words: list[Argument] = [source, tmp_path / "out", "--src-strategy", "none", "--dst-strategy", strategy]
    done("convert", *words, "--to", "checkpoint2", "--verify")


def test_config_accepts_the_directory_of_a_configuration(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    table = tmp_path / "table.toml"
    rules = "".join(f'[[rule]]\nfrom = "{word}.*"\nto = "m.{word}.*"\n' for word in ("a", "linear"))
    table.write_text('title = "t"\nsides = ["l", "r"]\n' + rules)
    words: list[Argument] = ["convert", source, tmp_path / "out", "--to", "huggingface", "--names", table]
    done(*words, "--config", tmp_path / "model")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    fails(3, *words[:2], tmp_path / "other", *words[3:], "--config", tmp_path, texts=[tmp_path / "config.json"])
