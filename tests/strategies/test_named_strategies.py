"""--names of strategy make and derive: the strategy of a checkpoint with converted names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model_weights import MODELS, mindformers, weights, write_huggingface
from tests.names.models import table_of
from tests.running import Argument, done, fails
from tests.trees import read_tree, write_checkpoint

RULES = """
[pipeline]
first = ["*embedding*"]
last = ["*norm_out.*", "*final_layernorm.*", "*output_layer.*", "lm_head.*", "mtp.*"]
layers = ["decoder.layers.{layer}.*", "model.layers.{layer}.*"]
[[parameter]]
match = ["*linear_qkv.weight", "*linear_fc1.weight", "*.wq.weight", "*.weight1"]
map = ["mp", "None"]
[[parameter]]
match = ["*norm*.weight", "*.bias", "*_bias"]
map = ["None"]
[[parameter]]
match = "*"
map = ["None", "None"]
"""


@pytest.mark.deep
@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_strategy_made_with_names_equals_that_of_the_converted_checkpoint(tmp_path: Path, family: str) -> None:
    config, _ = MODELS[family]
    source = weights(family)
    hf = write_huggingface(tmp_path / "hf", source, config)
    (tmp_path / "rules.toml").write_text(RULES)
    # Made here without the program, in the order in which the program makes them.
    converted = write_checkpoint(tmp_path / "converted.safetensors", mindformers(family, source, config))
    words: list[Argument] = ["--sizes", "mp=2,pp=2", "--weights-only"]

    done("strategy", "make", tmp_path / "rules.toml", tmp_path / "one.json", *words, "--shapes", converted)
    # Packing that keeps names and shapes need not be stated.
    names = "deepseek_v3,mla=separate" if family == "deepseek_v3" else family
    for number, shapes in enumerate((hf, hf / "model.safetensors.index.json")):
        out = tmp_path / f"{number}.json"
        done("strategy", "make", tmp_path / "rules.toml", out, *words, "--shapes", shapes, "--names", names)
        assert layouts(out) == layouts(tmp_path / "one.json")

    done("convert", hf, tmp_path / "ranks", "--names", table_of(family), "--dst-strategy", tmp_path / "0.json")
    assert sorted(read_tree(tmp_path / "ranks")) == [0, 1, 2, 3]


def test_optimizer_state_in_shapes_follows_its_weights_to_their_new_names(tmp_path: Path) -> None:
    config, _ = MODELS["qwen3"]
    source = weights("qwen3")
    converted = mindformers("qwen3", source, config)
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words: list[Argument] = ["strategy", "make", tmp_path / "rules.toml"]
    for name, model in (("hf", source), ("mf", converted)):
        state = {f"{prefix}.{weight}": value for prefix in ("adam_m", "adam_v") for weight, value in model.items()}
        write_checkpoint(tmp_path / f"{name}.safetensors", {**model, **state})
    done(*words, tmp_path / "mf.json", "--sizes", "mp=2", "--shapes", tmp_path / "mf.safetensors")
    done(*words, tmp_path / "n.json", "--sizes", "mp=2", "--shapes", tmp_path / "hf.safetensors", "--names", "qwen3")
    assert layouts(tmp_path / "n.json") == layouts(tmp_path / "mf.json")
    write_checkpoint(tmp_path / "weights.safetensors", source)
    words += [tmp_path / "w.json", "--sizes", "mp=2", "--shapes", tmp_path / "weights.safetensors", "--names", "qwen3"]
    fails(3, *words, texts=["lists no optimizer state", "--weights-only"])


def layouts(path: Path) -> object:
    return json.loads(path.read_text())["parallel_layout_item"]


def test_sizes_are_read_from_a_configuration(tmp_path: Path) -> None:
    config, _ = MODELS["qwen3"]
    hf = write_huggingface(tmp_path / "hf", weights("qwen3"), config)
    output = (hf / "config.json").rename(tmp_path / "told.json")
    (tmp_path / "rules.toml").write_text(RULES)
    words: list[Argument] = ["strategy", "make", tmp_path / "rules.toml", tmp_path / "d.json", "--sizes", "mp=2"]
    words += ["--weights-only", "--shapes", hf]

    fails(3, *words, "--names", "qwen3", texts=["the rules need the size", "--config FILE"])
    fails(2, *words, "--config", output, texts=["--config needs --names"])
    assert not (tmp_path / "d.json").exists()
    done(*words, "--names", "qwen3", "--config", output)
    assert json.loads((tmp_path / "d.json.made").read_text())["names"] == "qwen3"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_derive_uses_shapes_of_a_checkpoint_with_other_names(tmp_path: Path, family: str) -> None:
    config, _ = MODELS[family]
    source = weights(family)
    hf = write_huggingface(tmp_path / "hf", source, config)
    (tmp_path / "rules.toml").write_text(RULES)
    converted = write_checkpoint(tmp_path / "converted.safetensors", mindformers(family, source, config))
    # A strategy of this format records no shapes.
    old = tmp_path / "old.ckpt"
    done(
        "strategy",
        "make",
        tmp_path / "rules.toml",
        old,
        "--sizes",
        "dp=2,mp=2",
        "--weights-only",
        "--shapes",
        converted,
    )

    words: list[Argument] = ["--src-sizes", "dp=2,mp=2", "--dst-sizes", "mp=2", "--weights-only"]
    done("strategy", "derive", old, tmp_path / "one.json", *words, "--shapes", converted)
    named: list[Argument] = ["--names", family]
    done("strategy", "derive", old, tmp_path / "two.json", *words, "--shapes", hf, *named)
    assert layouts(tmp_path / "two.json") == layouts(tmp_path / "one.json")
    assert json.loads((tmp_path / "two.json.made").read_text())["names"] == family
    fails(2, "strategy", "derive", old, tmp_path / "three.json", *words, *named, texts=["--shapes is missing"])
    fails(3, "strategy", "derive", old, tmp_path / "three.json", *words, "--shapes", hf)
    assert not (tmp_path / "three.json").exists()
