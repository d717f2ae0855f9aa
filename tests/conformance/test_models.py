"""Models of Hugging Face keep their logits after a conversion to MindFormers and back.

`make conformance-transformers` runs these tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conformance import oracles
from tests.corpus import FIXTURES
from tests.model_weights import bfloat16, cut, float32, mindformers
from tests.names.models import table_of
from tests.reference import Strategy
from tests.running import Argument, done
from tests.trees import (
    Value,
    cut_ranks,
    read_tree,
    read_weights,
    same_checkpoints,
    same_ranks,
    write_checkpoint,
    write_strategy,
)

pytestmark = pytest.mark.filterwarnings("default")

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
INDEX = "model.safetensors.index.json"


class Model(NamedTuple):
    """A directory that `save_pretrained` wrote, and its configuration and weights."""

    family: str
    tied: bool
    directory: Path
    config: dict[str, Any]
    weights: dict[str, Value]

    def converted(self, source: Path, target: Path, *words: Argument) -> None:
        config = self.directory / "config.json"
        done("convert", source, target, "--names", table_of(self.family), "--config", config, "--quiet", *words)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Model]:
    """Every family with an output layer of its own, and with the embedding for it."""
    root = tmp_path_factory.mktemp("models")
    every = [(family, tied) for family in FAMILIES for tied in (False, True)]
    jobs = [
        {
            "do": "save",
            "directory": str(root / f"{family}-{tied}"),
            "family": family,
            "dtype": "float32",
            "max_shard_size": "60KB",
            "seed": 7,
            "config": {"tie_word_embeddings": tied},
        }
        for family, tied in every
    ]
    oracles.done(oracles.transformers(jobs))
    return {(family, tied): opened(family, tied, root / f"{family}-{tied}") for family, tied in every}


def opened(family: str, tied: bool, directory: Path) -> Model:
    config = json.loads((directory / "config.json").read_text())
    weights = read_weights(directory)
    assert ("lm_head.weight" in weights) != tied
    assert len([*directory.glob("*.safetensors")]) > 2
    if family in ("deepseek_v3", "glm4_moe"):
        predicting_further(directory, config, weights)
    return Model(family, tied, directory, config, weights)


def predicting_further(directory: Path, config: dict[str, Any], weights: dict[str, Value]) -> None:
    """Add the layer after the last, which the library's configuration counts, and which it neither makes nor saves."""
    assert config["num_nextn_predict_layers"] == 1
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    random = np.random.default_rng(7)
    last, more = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    added = {
        more + name[len(last) :]: float32(random.standard_normal(each.array.shape))
        for name, each in weights.items()
        if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{more}{name}.weight"] = float32(random.standard_normal(hidden))
    added[f"{more}eh_proj.weight"] = float32(random.standard_normal((hidden, 2 * hidden)))
    added[f"{more}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    if "lm_head.weight" in weights:
        added[f"{more}shared_head.head.weight"] = weights["lm_head.weight"]
    write_checkpoint(directory / "model-of-one-more.safetensors", added, metadata={"format": "pt"})
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"].update(dict.fromkeys(added, "model-of-one-more.safetensors"))
    (directory / INDEX).write_text(json.dumps(index))
    weights.update(added)


def load(directory: Path) -> dict[str, Any]:
    return {"do": "load", "directory": str(directory)}


def with_config_of(model: Model, dtype: str, *directories: Path) -> None:
    """Rank directories have no configuration, so it is copied with the model."""
    for directory in directories:
        (directory / "config.json").write_text(json.dumps({**model.config, "dtype": dtype}))


def cut_in_two(model: Model, root: Path) -> tuple[Strategy, Path, dict[str, Value]]:
    """Tensors in two, two pipeline stages: the strategy, its file, and the model under MindFormers' names."""
    arrays = mindformers(model.family, model.weights, model.config)
    strategy = cut(arrays, model.config["num_hidden_layers"], data=1, model=2, stages=2)
    shapes = {name: each.array.shape for name, each in arrays.items()}
    return strategy, write_strategy(root / f"d-{model.tied}", strategy, shapes), arrays


@pytest.mark.parametrize("norms", [False, True])
def test_glm_has_its_bytes_and_logits_after_megatron(norms: bool, tmp_path: Path) -> None:
    """GLM-4.5 with norms of queries and keys, and GLM-4.5-Air without."""
    place = tmp_path / "glm"
    save = {"do": "save", "directory": str(place), "family": "glm4_moe", "dtype": "bfloat16", "seed": 7}
    oracles.done(oracles.transformers([{**save, "max_shard_size": "60KB", "config": {"use_qk_norm": norms}}]))
    model = opened("glm4_moe", False, place)
    assert any("q_norm" in name for name in model.weights) == norms
    model.converted(place, tmp_path / "megatron", "--to", "megatron", "--verify")
    model.converted(tmp_path / "megatron", tmp_path / "back", "--to", "huggingface", "--verify")
    same_checkpoints(read_weights(tmp_path / "back"), model.weights)
    first, second = oracles.done(oracles.transformers([load(place), load(tmp_path / "back")]))
    assert second == first


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal_after_ranks_and_checkpoint2(
    models: dict[tuple[str, bool], Model], tmp_path: Path, family: str
) -> None:
    places = []
    for tied in (False, True):
        model, root = models[family, tied], tmp_path / f"tied-{tied}"
        strategy, written, created = cut_in_two(model, tmp_path)

        model.converted(model.directory, root / "ranks", "--dst-strategy", written)
        same_ranks(read_tree(root / "ranks"), cut_ranks(strategy, created))
        model.converted(model.directory, root / "two", "--to", "checkpoint2", "--dst-strategy", written)
        back = ["--to", "huggingface", "--max-shard-size", "60KB"]
        model.converted(root / "ranks", root / "back", *back, "--src-strategy", written)
        model.converted(root / "two", root / "back2", *back)

        for place in (root / "back", root / "back2"):
            same_checkpoints(read_weights(place), model.weights)
            with_config_of(model, "float32", place)
        places += [model.directory, root / "back", root / "back2"]

    answers = oracles.done(oracles.transformers([load(place) for place in places]))
    for first, *others in (answers[:3], answers[3:]):
        assert (first["missing"], first["dtypes"]) == ([], ["torch.float32"])
        # The library supports the layer after the last only in releases of that model, which have 61.
        assert bool(first["unknown"]) == (family == "deepseek_v3")
        assert all(name.startswith("model.layers.4.") for name in first["unknown"])
        assert others == [first] * 2
    assert answers[0]["logits"] != answers[3]["logits"]


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_from_ranks_equals_the_librarys(
    models: dict[tuple[str, bool], Model], tmp_path: Path, family: str
) -> None:
    model = models[family, False]
    _, written, _ = cut_in_two(model, tmp_path)
    model.converted(model.directory, tmp_path / "ranks", "--dst-strategy", written)
    words: list[Argument] = ["--src-strategy", written, "--to", "huggingface", "--cast", "BFloat16"]
    model.converted(tmp_path / "ranks", tmp_path / "short", *words)
    with_config_of(model, "bfloat16", tmp_path / "short")

    theirs = tmp_path / "theirs"
    cast = {"do": "cast", "directory": str(model.directory), "dtype": "bfloat16", "to": str(theirs)}
    _, ours, expected = oracles.done(oracles.transformers([cast, load(tmp_path / "short"), load(theirs)]))

    actual, required = read_weights(tmp_path / "short"), read_weights(theirs)
    same_checkpoints(actual, bfloat16(model.weights))
    same_checkpoints({name: actual[name] for name in required}, required)
    assert ours["logits"] == expected["logits"]


def test_the_model_of_the_documentation_loads() -> None:
    (answer,) = oracles.done(oracles.transformers([load(FIXTURES / "models" / "qwen3")]))
    assert (answer["missing"], answer["unknown"], answer["dtypes"]) == ([], [], ["torch.bfloat16"])
