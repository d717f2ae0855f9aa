"""Kimi-K2 and K2.5 by the table of DeepSeek-V3: other types of model, a prefix of names, and a vision tower beside."""

from __future__ import annotations

from pathlib import Path

from tests.model_weights import MODELS, mindformers, weights, write_huggingface
from tests.names.models import Config, table_of
from tests.running import Argument, done, fails
from tests.trees import Value, read_weights, same_checkpoints, value

NAMES = table_of("deepseek_v3")
TOWER = {
    name: value(name, [4, 3]) for name in ("vision_tower.encoder.blocks.0.wo.weight", "mm_projector.linear_1.weight")
}
LEAVE_OUT = ("--exclude", "vision_tower.*", "--exclude", "mm_projector.*")


def kimi_k2(root: Path) -> tuple[Path, dict[str, Value], Config]:
    """A model without a layer that predicts further tokens, as Kimi-K2 is."""
    config, _ = MODELS["deepseek_v3"]
    last = f"model.layers.{config['num_hidden_layers']}."
    model = {name: each for name, each in weights("deepseek_v3").items() if not name.startswith(last)}
    config = {**config, "num_nextn_predict_layers": 0, "model_type": "kimi_k2"}
    return write_huggingface(root, model, config), model, config


def kimi_k25(root: Path) -> tuple[Path, dict[str, Value], Config]:
    """The same with a prefix and a vision tower; its sizes are those of the language model."""
    _, model, config = kimi_k2(root / "text")
    prefixed = {f"language_model.{name}": each for name, each in model.items()}
    outer = {"model_type": "kimi_k25", "text_config": config, "tie_word_embeddings": False}
    return write_huggingface(root / "whole", {**prefixed, **TOWER}, outer), model, config


def test_kimi_k2_has_the_names_of_deepseek_v3(tmp_path: Path) -> None:
    hf, model, config = kimi_k2(tmp_path / "hf")
    out = done("suggest", hf).out
    assert "model: kimi_k2" in out
    assert "--names deepseek_v3" in out
    done("convert", hf, tmp_path / "mf", "--names", NAMES, "--to", "unified", "--verify")
    expected = mindformers("deepseek_v3", model, config, ["gate_up=interleaved"])
    same_checkpoints(read_weights(tmp_path / "mf"), expected)
    back: list[Argument] = ["convert", tmp_path / "mf", tmp_path / "back", "--names", NAMES, "--to", "huggingface"]
    done(*back, "--config", hf, "--verify")
    same_checkpoints(read_weights(tmp_path / "back"), model)


def test_the_language_model_of_kimi_k25_is_converted_without_its_vision_tower(tmp_path: Path) -> None:
    hf, model, config = kimi_k25(tmp_path / "hf")
    convert: list[Argument] = ["convert", hf, tmp_path / "mf", "--names", NAMES, "--to", "unified"]
    fails(3, *convert, texts=["no rule matches 'vision_tower.", *(f"--exclude '{each}'" for each in LEAVE_OUT[1::2])])
    assert not (tmp_path / "mf").exists()
    done(*convert, *LEAVE_OUT, "--verify")
    same_checkpoints(read_weights(tmp_path / "mf"), mindformers("deepseek_v3", model, config, ["gate_up=interleaved"]))

    back: list[Argument] = ["convert", tmp_path / "mf", "--to", "huggingface", "--config", hf, "--verify"]
    done(*back, tmp_path / "prefixed", "--names", NAMES)
    same_checkpoints(
        read_weights(tmp_path / "prefixed"), {f"language_model.{name}": each for name, each in model.items()}
    )
    done(*back, tmp_path / "plain", "--names", f"{NAMES},prefix=none")
    same_checkpoints(read_weights(tmp_path / "plain"), model)


def test_strategies_are_made_for_the_language_model(tmp_path: Path) -> None:
    hf, _, _ = kimi_k25(tmp_path / "hf")
    plain = tmp_path / "hf" / "text"
    words: list[Argument] = ["--sizes", "mp=2,ep=2", "--weights-only", "--set", "vocab_emb_dp=true"]
    words += ["--set", "sequence_parallel=true"]
    make: list[Argument] = ["strategy", "make", "mcore"]
    done(*make, tmp_path / "one.json", *words, "--shapes", plain, "--names", "deepseek_v3,mla=separate")
    make += [tmp_path / "two.json", *words, "--shapes", hf]
    fails(2, *make, *LEAVE_OUT, texts=["--exclude needs --names"])
    make += ["--names", "deepseek_v3,mla=separate"]
    fails(3, *make, texts=["--exclude 'vision_tower.*' --exclude 'mm_projector.*'"])
    done(*make, *LEAVE_OUT)
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()
    derive: list[Argument] = ["strategy", "derive", tmp_path / "one.json", tmp_path / "out.json", "--weights-only"]
    derive += ["--shapes", plain, "--names", "deepseek_v3,mla=separate"]
    texts = ["mp=2 cuts no parameter with certainty", "equal sizes of mp and ep", "--also FILE"]
    fails(3, *derive, "--src-sizes", "mp=2,ep=2", "--dst-sizes", "mp=2,ep=2", texts=texts)


def test_a_weight_that_the_table_lists_is_not_left_out_while_names_are_matched(tmp_path: Path) -> None:
    """Its pattern is one of written names, which no such weight has."""
    hf, model, config = kimi_k2(tmp_path / "hf")
    done("convert", hf, tmp_path / "mf", "--names", NAMES, "--to", "unified", "--exclude", "model.*", "--verify")
    same_checkpoints(read_weights(tmp_path / "mf"), mindformers("deepseek_v3", model, config, ["gate_up=interleaved"]))
