"""Experts that transformers 5 fuses get the names and bytes that its `save_pretrained` writes; names of others stay.

`make conformance-transformers` runs these tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.names import rules_named
from tests.conformance import oracles
from tests.running import done
from tests.trees import read_weights, same_checkpoints

pytestmark = pytest.mark.filterwarnings("default")

(OPTION,) = rules_named("fused_experts").options
MODELS = sorted({*dict(OPTION.config_values), *OPTION.values} - {"fused"})
# Published fused, with other names elsewhere.
RENAMED = ("hy_v4", "hy_v4_vl", "hy_v4_vl_text", "lara_mini")
FORMS = ("dcp", "hf-sharded")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Per model its directory, and its state in both forms."""
    root = tmp_path_factory.mktemp("models")
    jobs: list[dict[str, Any]] = []
    for model in MODELS:
        states = {form: str(root / f"{model}-{form}") for form in FORMS}
        jobs.append({"do": "state", "model_type": model, "directory": str(root / model), "states": states})
    for job, answer in zip(jobs, oracles.transformers(jobs)):
        fused = dict(OPTION.config_values).get(job["model_type"]) == "fused"
        # Some types that are published fused cannot be made small; a test below compares their names.
        assert fused or "error" not in answer, answer["error"]
        if "error" not in answer and job["model_type"] not in RENAMED:
            assert ({*answer["done"]} == read_weights(Path(job["directory"])).keys()) == fused
    return root


@pytest.mark.parametrize(("form", "mesh"), [("dcp", (1, 3, 1)), ("hf-sharded", (1, 2, 1)), ("verl", (2, 2, 1))])
def test_the_library_loads_experts_that_fsdp2_trained(form: str, mesh: tuple[int, int, int], tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    save = {"do": "save", "directory": str(model), "family": "qwen3_moe", "dtype": "float32", "max_shard_size": "60KB"}
    oracles.done(oracles.transformers([{**save, "seed": 7, "config": {}}]))
    train = {"do": "train", "model": str(model), "directory": str(tmp_path / form), "form": form, "mesh": mesh}
    (trained,) = oracles.done(oracles.torch_checkpoints([train]))
    done("convert", tmp_path / form, out, "--to", "huggingface", "--config", model, "--verify")
    assert read_weights(out).keys() == read_weights(model).keys()
    (loaded,) = oracles.done(oracles.transformers([{"do": "load", "directory": str(out)}]))
    assert (loaded["missing"], loaded["unknown"]) == ([], [])
    # Logits depend on the number of threads.
    assert loaded["weights"] == {name: trained[name] for name in loaded["weights"]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_the_state_of_a_model_becomes_what_the_library_saves(
    states: Path, model: str, form: str, tmp_path: Path
) -> None:
    if not (states / f"{model}-{form}").exists():
        pytest.skip(f"the library makes no small {model}")
    done("convert", states / f"{model}-{form}", tmp_path, "--to", "huggingface", "--config", states / model, "--verify")
    same_checkpoints(read_weights(tmp_path), read_weights(states / model))


def test_the_table_lists_the_models_that_are_published_fused() -> None:
    (names,) = oracles.done(oracles.transformers([{"do": "names"}]))
    assert len(names) > 500
    fused = {model for model, (_, _, saved_fused) in names.items() if saved_fused}
    assert {model for model, value in OPTION.config_values if value == "fused"}.intersection(names) == fused
