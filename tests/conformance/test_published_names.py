"""Checkpoints of PyTorch get the names and bytes that `save_pretrained` of transformers writes, for every model type.

`make conformance-transformers` runs these tests, some minutes. Models are the library's defaults, with few elements and
layers, and the library names their tensors for saving. Whole models are loaded, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.names.published import PATH
from reshard.storage.toml_tables import TomlFile
from tests.conformance import oracles
from tests.running import Argument, done, reshard
from tests.trees import read_weights, same_checkpoints

pytestmark = pytest.mark.filterwarnings("default")

_FILE = TomlFile(PATH, Exception)  # type: ignore[arg-type]
DATA = _FILE.parse(_FILE.read())
TYPES = sorted([*DATA["plain"], *DATA["models"]])
LEAST_TYPES = 600


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, Any]]:
    """Of each type that can be made: a directory with the published names, its state, and the class."""
    root = tmp_path_factory.mktemp("models")
    jobs = [
        {"do": "published", "model_type": each, "directory": str(root / each), "state": str(root / f"{each}-dcp")}
        for each in TYPES
    ]
    answers = zip(TYPES, oracles.transformers(jobs))
    made = {each: answer["done"][0] for each, answer in answers if "done" in answer}
    assert len(made) >= LEAST_TYPES
    return {each: (root / each, root / f"{each}-dcp", name) for each, name in made.items()}


@pytest.mark.parametrize("model_type", TYPES)
def test_the_state_of_a_model_gets_published_names(
    models: dict[str, tuple[Path, Path, Any]], model_type: str, tmp_path: Path
) -> None:
    if model_type not in models:
        pytest.skip(f"the library makes no default {model_type}")
    directory, state, name = models[model_type]
    words: tuple[Argument, ...] = ("convert", state, tmp_path, "--to", "huggingface", "--config", directory, "--verify")
    left_out = DATA["models"].get(model_type, {}).get(name, {}).get("left_out")
    if left_out is not None:
        assert left_out in reshard(*words).err
        return
    done(*words)
    same_checkpoints(read_weights(tmp_path), read_weights(directory))


SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
SIZES_OF_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
WHOLE: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "text_config": SIZES,
        "vision_config": SIZES_OF_VISION,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    },
    "LlavaForConditionalGeneration": {
        "text_config": {**SIZES, "model_type": "llama"},
        "vision_config": {**SIZES_OF_VISION, "model_type": "clip_vision_model"},
    },
    "Qwen2VLForConditionalGeneration": {
        "text_config": SIZES,
        "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 4},
        "tie_word_embeddings": False,
    },
    "Dinov2Model": {**SIZES_OF_VISION, "use_swiglu_ffn": True},
}


@pytest.mark.parametrize("kind", WHOLE)
def test_the_library_loads_published_names(kind: str, tmp_path: Path) -> None:
    directory, state, out = (tmp_path / name for name in ("model", "state", "out"))
    job = {"do": "whole", "class": kind, "config": WHOLE[kind], "directory": str(directory), "state": str(state)}
    (weights,) = oracles.done(oracles.transformers([job]))
    done("convert", state, out, "--to", "huggingface", "--config", directory, "--verify")
    same_checkpoints(read_weights(out), read_weights(directory))
    (loaded,) = oracles.done(oracles.transformers([{"do": "load_whole", "class": kind, "directory": str(out)}]))
    assert loaded == {"missing": [], "unknown": [], "weights": weights}
