"""Names that transformers publishes, in checkpoints of PyTorch: three types, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.names import apply_rules, published_table
from reshard.names.published import UnknownNamesError
from tests.names.test_fused_experts import trained
from tests.running import done, fails, warns
from tests.trees import Value, read_weights, same_checkpoints

#: Per type its config.json, the shapes of a model, and of every published tensor what it is made of: a tensor; several,
#: joined; or a tensor, the number of the expert and its first row.
MODELS = json.loads((Path(__file__).parent / "published.json").read_text())
NOTE = "published by transformers"


def model(model_type: str) -> dict[str, Value]:
    random = np.random.default_rng(5)
    shapes = MODELS[model_type]["shapes"]
    return {name: Value("Float32", random.integers(1, 1 << 30, shape, "u4")) for name, shape in shapes.items()}


def published(model_type: str) -> dict[str, Value]:
    tensors, made = model(model_type), MODELS[model_type]["published"]
    shapes = {name: each.shape for name, each in table_of(model_type).items()}

    def of(name: str, first: str, *others: Any) -> Any:
        if others and isinstance(others[0], str):
            return np.concatenate([tensors[each].array for each in (first, *others)])
        array = tensors[first].array
        if not others:
            return array
        number, row = (*others, 0)[:2]
        return array[number, row : row + shapes[name][0]]

    return {name: Value("Float32", of(name, *sources)) for name, sources in made.items()}


def table_of(model_type: str, **changed: object) -> dict[str, Any]:
    """The views that the table of a model makes."""
    shapes = {name: tuple(shape) for name, shape in MODELS[model_type]["shapes"].items()}
    config = {**MODELS[model_type]["config"], **changed}
    table = published_table(config, shapes)
    assert table is not None
    return {name: view for name, _, view in apply_rules(table, shapes, config).views()}


def config_in(root: Path, of: str, **changed: object) -> Path:
    root.mkdir()
    config = {**MODELS[of]["config"], **changed}
    (root / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    return root


@pytest.mark.parametrize(
    ("model_type", "form"), [("gemma3", "dcp"), ("sarvam_moe", "hf-sharded"), ("tipsv2_vision_model", "dcp")]
)
def test_a_model_gets_published_names(model_type: str, form: str, tmp_path: Path) -> None:
    source, config = trained(tmp_path, model(model_type), form), config_in(tmp_path / "model", model_type)
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    warns(done(*words), NOTE)
    same_checkpoints(read_weights(tmp_path / "out"), published(model_type))
    done("verify", tmp_path / "out", "--src", source)
    done("resume", tmp_path / "out")


def test_values_of_a_training_keep_their_names(tmp_path: Path) -> None:
    step = {"global_step": Value("Int32", np.array([7], "u4"))}
    source, config = trained(tmp_path, {**model("gemma3"), **step}), config_in(tmp_path / "model", "gemma3")
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    warns(done(*words), NOTE)
    same_checkpoints(read_weights(tmp_path / "out"), {**published("gemma3"), **step})


def test_names_none_keeps_names(tmp_path: Path) -> None:
    source, config = trained(tmp_path, model("gemma3")), config_in(tmp_path / "model", "gemma3")
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    assert NOTE not in done(*words, "--names", "none").err
    same_checkpoints(read_weights(tmp_path / "out"), model("gemma3"))


def test_without_a_configuration_names_stay_with_a_note(tmp_path: Path) -> None:
    source = trained(tmp_path, model("gemma3"))
    warns(done("convert", source, tmp_path / "out", "--to", "huggingface", "--verify"), "no config.json", "names stay")
    same_checkpoints(read_weights(tmp_path / "out"), model("gemma3"))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model_type": "some_new_model"}, "some_new_model"),
        ({"architectures": ["SomeNewClass"]}, "SomeNewClass"),
        ({"architectures": ["Gemma3Model"]}, "no tensor of Gemma3Model"),
        ({"text_config": {"model_type": "sarvam_moe"}}, "text_config"),
        ({"text_config": {"model_type": "some_new_text"}}, "some_new_text"),
    ],
)
def test_names_stay_with_a_note_where_others_could_be_wrong(changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    source, config = trained(tmp_path, model("gemma3")), config_in(tmp_path / "model", "gemma3", **changed)
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    warns(done(*words), text, "names stay")
    same_checkpoints(read_weights(tmp_path / "out"), model("gemma3"))


@pytest.mark.parametrize("model_type", ["gemma3", "tipsv2_vision_model"])
def test_published_names_of_a_source_stay(model_type: str, tmp_path: Path) -> None:
    """As in transformers 4."""
    source, config = trained(tmp_path, published(model_type)), config_in(tmp_path / "model", model_type)
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    warns(done(*words), "names stay")
    same_checkpoints(read_weights(tmp_path / "out"), published(model_type))


def test_fused_experts_without_known_names_are_an_error(tmp_path: Path) -> None:
    source = trained(tmp_path, model("sarvam_moe"))
    config = config_in(tmp_path / "model", "sarvam_moe", architectures=["SomeNewClass"])
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config)
    fails(3, *words, texts=["gate_up_proj", "SomeNewClass", "--names none"])


def test_another_number_of_experts_than_configured_is_an_error(tmp_path: Path) -> None:
    source = trained(tmp_path, model("sarvam_moe"))
    config = config_in(tmp_path / "model", "sarvam_moe", num_experts=5)
    fails(3, "convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, texts=["5"])


def test_without_architectures_names_decide() -> None:
    assert table_of("gemma3", architectures=None).keys() == MODELS["gemma3"]["published"].keys()


def test_a_tensor_beside_which_another_is_missing_is_not_joined() -> None:
    shapes = {name: tuple(each) for name, each in MODELS["tipsv2_vision_model"]["shapes"].items()}
    missing = next(name for name in shapes if ".k_proj." in name)
    del shapes[missing]
    with pytest.raises(UnknownNamesError, match="missing"):
        published_table(MODELS["tipsv2_vision_model"]["config"], shapes)


def test_filters_see_published_names(tmp_path: Path) -> None:
    source, config = trained(tmp_path, model("gemma3")), config_in(tmp_path / "model", "gemma3")
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    done(*words, "--include", "language_model.lm_head.*")
    expected = {"language_model.lm_head.weight": published("gemma3")["language_model.lm_head.weight"]}
    same_checkpoints(read_weights(tmp_path / "out"), expected)


def test_verification_finds_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the conversion of names, which also the rules of the verification have."""
    from reshard.names import published as room

    def wrong(self: Any, name: str) -> Any:
        found = own(self, name)
        return found if found is None else (found[0].replace("language_model.model.", "language_model."), found[1])

    own = room._Conversion.replaced
    monkeypatch.setattr(room._Conversion, "replaced", wrong)
    source, config = trained(tmp_path, model("gemma3")), config_in(tmp_path / "model", "gemma3")
    words = ("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    fails(3, *words, texts=["language_model.embed_tokens.weight"])
