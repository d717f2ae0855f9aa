"""Files written besides the weights, and warnings about them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.running import Argument, done, fails, flat, warns
from tests.trees import layout, single, write_strategy

WEIGHTS = {"linear.weight": (4, 2), "a.w": (4, 2)}
STATE = {f"{prefix}a.w": (4, 2) for prefix in ("adam_m.", "adam_v.", "linear.", "accu_grads.")}


def huggingface(place: Path, step: int = 7, dtype: str = "f4", **names: tuple[int, ...]) -> Path:
    tensors = {name: np.ones(shape, dtype) for name, shape in {**WEIGHTS, **STATE, **names}.items()}
    place.mkdir()
    save_file({**tensors, "global_step": np.array(step, "i4")}, place / "model.safetensors", {"format": "pt"})
    return place


def test_options_suggested_by_a_warning_exclude_no_weight(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src")
    words: list[Argument] = ["convert", source, tmp_path / "out", "--to", "huggingface"]
    result = done(*words)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {*WEIGHTS, *STATE, "global_step"}
    [line] = [line for line in result.err.splitlines() if "leave them out with" in line]
    options = shlex.split(line.partition("leave them out with ")[2])
    assert "adam_m.*" in options and "linear.a.w" in options and "linear.*" not in options
    words[2] = tmp_path / "weights"
    assert "leave them out" not in done(*words, *options).err
    assert set(load_file(tmp_path / "weights" / "model.safetensors")) == set(WEIGHTS)


@pytest.mark.parametrize("message", ["float32", "bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_configuration_of_another_dtype_gives_a_warning(message: str, key: str, tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src")
    (source / "config.json").write_text(json.dumps({key: message}))
    result = done("convert", source, tmp_path / "out", "--to", "huggingface")
    output = f"has {key} '{message}', and the weights are float32" in flat(result.err)
    assert output == (message != "float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {key: message}


def test_values_alone_do_not_make_a_unified_directory(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src")
    words: list[Argument] = ["convert", source, tmp_path / "out", "--to", "unified"]
    fails(3, *words, "--include", "global_step", texts=["the selection contains only values such as 'global_step'"])
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_a_negative_step_becomes_iteration_0(tmp_path: Path) -> None:
    source = huggingface(tmp_path / "src", step=-1)
    names = {**WEIGHTS, **STATE}
    strategy = write_strategy(tmp_path / "s", single(dict.fromkeys(names, layout([1], [-1, -1]))))
    words: list[Argument] = ["convert", source, tmp_path / "out", "--to", "checkpoint2", "--dst-strategy", strategy]
    warns(done(*words, "--verify"), "global_step is -1")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "0"
    done("convert", tmp_path / "out", tmp_path / "back", "--to", "unified", "--verify")


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
