"""The table `megatron`: checkpoints that Megatron wrote, and random models against a reference in NumPy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import NamesError, UsageError
from reshard.names import NameRules, apply_rules, rules_named, tables_named
from reshard.names.operations import Copy, Join, Pad, Stack
from reshard.names.rules import NameRule, with_options
from reshard.text.products import product
from tests.corpus_dcp import held_in
from tests.corpus_mcore import McoreCase, digest, mcore_cases
from tests.layouts import examples
from tests.names.models import deepseek, dense, fused, glm, mixture
from tests.names.naive import Array, Shapes, arrays_of, assert_equal, made_by, numbered, redone
from tests.running import done
from tests.trees import read_checkpoint

CASES = [case for case in mcore_cases() if case.expected["expect"] == "convert"]
STACKED = [case for case in CASES if case.name.startswith("td")]
MOE = ("qwen3_moe", "deepseek_v3")
TABLE = rules_named("megatron")
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")


_STATES = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v.", "fp32_param": "main_param."}
_COPY = re.compile(r"[0-9]\.(embed_tokens|shared_head\.head)\.")


def named(case: McoreCase) -> str:
    return case.name


def answers(expected: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {name: (each["dtype"], tuple(each["shape"]), each["sha256"]) for name, each in expected.items()}


@pytest.mark.parametrize("case", CASES, ids=named)
def test_tensors_of_megatron_are_those_of_its_model_in_transformers(case: McoreCase, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(case.expected["config"]))
    names, config = case.expected["names"], ("--config", tmp_path)
    state = ("--optimizer", "keep") if "optimizer" in case.expected else ()

    done("convert", case.root, tmp_path / "hf", "--to", "huggingface", "--names", names, *config, *state, "--verify")

    actual, optional = held_in(tmp_path / "hf"), answers(case.expected.get("tensors_optional", {}))
    expected, optimizer = answers(case.expected["tensors"]), case.expected.get("optimizer", {"state": {}})
    for key, values in optimizer["state"].items():
        expected.update({_STATES[key] + name: each for name, each in answers(values).items()})
    tensors = {
        name: each.array
        for path in (tmp_path / "hf").glob("*.safetensors")
        for name, each in read_checkpoint(path).items()
    }
    step = tensors.pop("global_step", None)
    assert step is None or step.item() == optimizer["step"]
    assert {name: each for name, each in actual.items() if name not in {*optional, "global_step"}} == expected
    assert {name: each for name, each in actual.items() if name in optional}.items() <= optional.items()
    if case not in STACKED:
        return
    # Back, as the names of Megatron's side were.
    tensors = {name: each for name, each in tensors.items() if not name.startswith((*_STATES.values(),))}
    native = answers(case.expected["native"])
    padded = {**case.expected["config"], "padded_vocab_size": case.expected["model"]["padded_vocab"]}
    table = rules_named(f"megatron,family={names}")
    before = {name: shape for name, (_, shape, _) in native.items()}
    options = apply_rules(table, before, padded, True).options
    keys = ("layer_keys", "attention_norm", "mla_norms", "dense_norm", "experts_norm")
    stated = "".join(f",{key}={options[key]}" for key in keys)
    back = apply_rules(rules_named(f"megatron,family={names}{stated}"), shapes_of(tensors), padded)
    arrays = {name: array.astype(np.int64) for name, array in tensors.items()}
    made = arrays_of(back, arrays)
    assert made.keys() == native.keys()
    for name, array in made.items():
        dtype, shape, expected_digest = native[name]
        rows = case.expected["model"]["vocab"]
        if name.split(".")[0] in ("embedding", "output_layer") and rows != shape[0]:
            # Megatron trains rows of padding.
            assert array.shape == shape and not array[rows:].any()
        else:
            words = array.astype("<u2" if dtype == "BF16" else "<i4")
            assert (words.shape, digest(words)) == (shape, expected_digest), name


class Layout(NamedTuple):
    """How Megatron keeps a model.

    Attributes:
        stacked: all layers in one tensor.
        attention: the norm before attention is inside of the linear layer behind it.
        mla: likewise, the norms of compressed queries, keys and values.
        dense: likewise, the norm before a dense MLP.
        experts: likewise, the norm before experts.
        apart: gate and up have their own keys, and so has every expert.
        rows: of the padded vocabulary.
    """

    stacked: bool = True
    attention: bool = True
    mla: bool = True
    dense: bool = True
    experts: bool = False
    apart: bool = False
    rows: int = 0

    @property
    def options(self) -> str:
        """The options that state it where nothing shows it."""
        norms = {
            "attention_norm": self.attention,
            "mla_norms": self.mla,
            "dense_norm": self.dense,
            "experts_norm": self.experts,
        }
        stated = [f"{name}={'inside' if inside else 'beside'}" for name, inside in norms.items()]
        stated.append("layer_keys=" + ("stacked" if self.stacked else "numbered"))
        return ",".join([*stated, "fc1=" + ("apart" if self.apart else "joined")])


def grouped(arrays: list[Array], groups: int) -> Array:
    """q, k and v group by group: the queries of a group, its key, its value."""
    parts = [array.reshape(groups, len(array) // groups, *array.shape[1:]) for array in arrays]
    return np.concatenate(parts, axis=1).reshape(-1, *arrays[0].shape[1:])


def padded(array: Array, rows: int) -> Array:
    return np.concatenate([array, np.zeros((rows - len(array), array.shape[1]), array.dtype)])


def fc1_of(gate: Array, up: Array, key: str, apart: bool) -> dict[str, Array]:
    """All rows of gate, then all rows of up."""
    return {f"{key}_w": gate, f"{key}_v": up} if apart else {key: np.concatenate([gate, up])}


def layer_of(arrays: Mapping[str, Array], config: Mapping[str, Any], layout: Layout) -> dict[str, Array]:
    """One layer in Megatron's names."""
    made: dict[str, Array] = {}
    norm = "self_attention.linear_qkv.layer_norm_weight" if layout.attention else "input_layernorm.weight"
    if "self_attn.kv_b_proj.weight" in arrays:
        made["input_layernorm.weight"] = arrays["input_layernorm.weight"]
        made["self_attention.linear_kv_down_proj.weight"] = arrays["self_attn.kv_a_proj_with_mqa.weight"]
        made["self_attention.linear_kv_up_proj.weight"] = arrays["self_attn.kv_b_proj.weight"]
        kv_norm = "linear_kv_up_proj.layer_norm_weight" if layout.mla else "kv_layernorm.weight"
        made[f"self_attention.{kv_norm}"] = arrays["self_attn.kv_a_layernorm.weight"]
        if "self_attn.q_proj.weight" in arrays:
            made["self_attention.linear_q_proj.weight"] = arrays["self_attn.q_proj.weight"]
        else:
            made["self_attention.linear_q_down_proj.weight"] = arrays["self_attn.q_a_proj.weight"]
            made["self_attention.linear_q_up_proj.weight"] = arrays["self_attn.q_b_proj.weight"]
            q_norm = "linear_q_up_proj.layer_norm_weight" if layout.mla else "q_layernorm.weight"
            made[f"self_attention.{q_norm}"] = arrays["self_attn.q_a_layernorm.weight"]
    else:
        made[norm] = arrays["input_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in arrays:
                parts = [arrays[f"self_attn.{one}_proj.{kind}"] for one in "qkv"]
                made[f"self_attention.linear_qkv.{kind}"] = grouped(parts, config["num_key_value_heads"])
        for one in "qk":
            if f"self_attn.{one}_norm.weight" in arrays:
                made[f"self_attention.{one}_layernorm.weight"] = arrays[f"self_attn.{one}_norm.weight"]
    made["self_attention.linear_proj.weight"] = arrays["self_attn.o_proj.weight"]
    if "self_attn.o_proj.bias" in arrays:
        made["self_attention.linear_proj.bias"] = arrays["self_attn.o_proj.bias"]
    has_experts = "mlp.gate.weight" in arrays
    inside = layout.experts if has_experts else layout.dense
    before_mlp = "mlp.linear_fc1.layer_norm_weight" if inside else "pre_mlp_layernorm.weight"
    made[before_mlp] = arrays["post_attention_layernorm.weight"]
    if not has_experts:
        fc1 = fc1_of(
            arrays["mlp.gate_proj.weight"], arrays["mlp.up_proj.weight"], "mlp.linear_fc1.weight", layout.apart
        )
        return {**made, **fc1, "mlp.linear_fc2.weight": arrays["mlp.down_proj.weight"]}
    made["mlp.router.weight"] = arrays["mlp.gate.weight"]
    if "mlp.gate.e_score_correction_bias" in arrays:
        made["mlp.router.expert_bias"] = arrays["mlp.gate.e_score_correction_bias"]
    count, experts = len(arrays["mlp.gate.weight"]), "mlp.experts.experts"
    all_fc1, all_fc2 = [], []
    for expert in range(count):
        gate, up, down = (arrays[f"mlp.experts.{expert}.{one}_proj.weight"] for one in ("gate", "up", "down"))
        if layout.apart:
            made.update(fc1_of(gate, up, f"{experts}.{expert}.linear_fc1.weight", True))
            made[f"{experts}.{expert}.linear_fc2.weight"] = down
        all_fc1.append(np.concatenate([gate, up]))
        all_fc2.append(down)
    if not layout.apart:
        made[f"{experts}.linear_fc1.weight"] = np.stack(all_fc1)
        made[f"{experts}.linear_fc2.weight"] = np.stack(all_fc2)
    if "mlp.shared_experts.down_proj.weight" in arrays:
        gate, up, down = (arrays[f"mlp.shared_experts.{one}_proj.weight"] for one in ("gate", "up", "down"))
        made.update(fc1_of(gate, up, "mlp.shared_experts.linear_fc1.weight", layout.apart))
        made["mlp.shared_experts.linear_fc2.weight"] = down
    return made


def megatron_of(arrays: Mapping[str, Array], config: Mapping[str, Any], layout: Layout) -> dict[str, Array]:
    """A model of Hugging Face's names and experts with numbers, as Megatron writes it to torch_dist."""
    made = {
        "embedding.word_embeddings.weight": padded(arrays["model.embed_tokens.weight"], layout.rows),
        "decoder.final_layernorm.weight": arrays["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        made["output_layer.weight"] = padded(arrays["lm_head.weight"], layout.rows)
    layers: dict[int, dict[str, Array]] = {}
    for name, array in arrays.items():
        match = re.fullmatch(r"model\.layers\.([0-9]+)\.(.*)", name)
        if match:
            layers.setdefault(int(match[1]), {})[match[2]] = array
    count = config["num_hidden_layers"]
    decoder = [layer_of(layers[number], config, layout) for number in range(count)]
    if layout.stacked:
        made.update({f"decoder.layers.{tail}": np.stack([layer[tail] for layer in decoder]) for tail in decoder[0]})
    else:
        made.update(
            {
                f"decoder.layers.{number}.{tail}": each
                for number, layer in enumerate(decoder)
                for tail, each in layer.items()
            }
        )
    for number in range(count, len(layers)):
        place = f"mtp.layers.{number - count}"
        inner = layer_of(layers[number], config, layout)
        made.update({f"{place}.transformer_layer.{tail}": array for tail, array in inner.items()})
        for one in ("enorm", "hnorm", "eh_proj"):
            made[f"{place}.{one}.weight"] = layers[number][f"{one}.weight"]
        made[f"{place}.final_layernorm.weight"] = layers[number]["shared_head.norm.weight"]
    return made


class Model(NamedTuple):
    """A random model: its family and configuration, its shapes in Hugging Face's names, and Megatron's layout."""

    family: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    layout: Layout


def model_of(family: str, config: dict[str, Any], layout: Layout, copies: bool = True) -> Model:
    """The tensors of a model with a configuration."""
    if family == "deepseek_v3":
        shapes = dict(deepseek(config))
        if config["q_lora_rank"] is None:
            shapes = dict(deepseek({**config, "q_lora_rank": 1}))
            full = (config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]),)
            for name in [name for name in shapes if ".self_attn.q_a_proj." in name]:
                layer = name.split(".self_attn")[0]
                shapes[f"{layer}.self_attn.q_proj.weight"] = (*full, config["hidden_size"])
            shapes = {name: shape for name, shape in shapes.items() if not re.search(r"\.q_[ab]_", name)}
        if not copies:
            shapes = {
                name: shape for name, shape in shapes.items() if not re.search(r"[0-9]\.(embed_|.*\.head\.)", name)
            }
    elif family == "glm4_moe":
        shapes = dict(glm(config, norms=True))
    elif family in MOE:
        shapes = dict(mixture(config))
    else:
        shapes = dict(dense(config, norms=family == "qwen3"))
    biased = "qkv" if family == "qwen2" else "qkvo" if config.get("attention_bias") else ""
    if biased:
        for name in [name for name in shapes if re.search(rf"self_attn\.[{biased}]_proj", name)]:
            shapes[name[: -len("weight")] + "bias"] = shapes[name][:1]
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    return Model(family, config, shapes, layout)


@st.composite
def random_models(draw: Any, families: Sequence[str] = FAMILIES) -> Model:
    chosen = draw(st.sampled_from(families))
    groups, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    vocab = draw(st.integers(1, 12))
    mtp = draw(st.integers(0, 2)) if chosen == "deepseek_v3" else 0
    config: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": draw(st.integers(1, 6)),
        "intermediate_size": draw(st.integers(1, 5)),
        "num_hidden_layers": layers,
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "num_key_value_heads": groups,
        "head_dim": draw(st.integers(1, 4)),
        "tie_word_embeddings": chosen != "deepseek_v3" and draw(st.booleans()),
        "model_type": chosen,
    }
    kinds = "dense"
    if chosen in MOE:
        kinds = draw(st.sampled_from(["experts", "dense", "both"] if layers > 1 and not mtp else ["experts"]))
        first = {"experts": 0, "dense": layers, "both": draw(st.integers(1, max(layers - 1, 1)))}[kinds]
        experts = draw(st.integers(1, 3))
        config.update(
            moe_intermediate_size=draw(st.integers(1, 4)),
            num_experts=experts,
            n_routed_experts=experts,
            mlp_only_layers=[*range(first)],
            first_k_dense_replace=first,
        )
    if chosen == "deepseek_v3":
        config.pop("head_dim")
        config.pop("num_experts")
        config.update(
            n_shared_experts=draw(st.integers(1, 2)),
            q_lora_rank=draw(st.one_of(st.none(), st.integers(1, 4))),
            kv_lora_rank=draw(st.integers(1, 4)),
            qk_rope_head_dim=draw(st.integers(1, 2)),
            qk_nope_head_dim=draw(st.integers(1, 3)),
            v_head_dim=draw(st.integers(1, 3)),
            num_nextn_predict_layers=mtp,
        )
    stacked = kinds != "both" and draw(st.booleans())
    # Transformer Engine's layers, local ones, and those of legacy trees.
    norms = draw(st.sampled_from([(True,) * 3 + (False,), (True,) * 4, (False,) * 4]))
    rows = vocab + draw(st.integers(0, 5))
    layout = Layout(stacked, norms[0], norms[1], norms[2], norms[3], not stacked and draw(st.booleans()), rows)
    if rows != vocab:
        config["padded_vocab_size"] = rows
    return model_of(chosen, config, layout, copies=mtp == 1 and draw(st.booleans()))


def table_for(model: Model, options: str = "", family: str = "") -> NameRules:
    stated = dict(each.split("=") for each in options.split(",") if each)
    return with_options(TABLE, {"family": family or model.family, **stated})


def shapes_of(arrays: Mapping[str, Array]) -> Shapes:
    return {name: array.shape for name, array in arrays.items()}


def with_copies(arrays: dict[str, Array]) -> dict[str, Array]:
    """Tensors of which some are copies of others, as in releases of DeepSeek-V3."""
    for name in arrays:
        if re.search(r"[0-9]\.embed_tokens", name):
            arrays[name] = arrays["model.embed_tokens.weight"]
        if re.search(r"\.shared_head\.head\.", name):
            arrays[name] = arrays["lm_head.weight"]
    return arrays


@examples(300)
@given(random_models())
def test_a_random_model_becomes_what_megatron_writes_and_returns(model: Model) -> None:
    arrays = with_copies(numbered(model.shapes))
    expected = megatron_of(arrays, model.config, model.layout)

    options = model.layout.options
    if any(name.endswith(".mlp.gate.weight") for name in arrays) and ".mlp.gate_proj." in str(arrays.keys()):
        # Layers that differ have no other keys.
        options = options.replace("layer_keys=numbered,", "")
    forward = apply_rules(table_for(model, options), model.shapes, model.config)
    outputs = arrays_of(forward, arrays)

    assert not forward.reversed and not forward.dropped
    assert_equal(outputs, expected)
    assert_equal(redone(forward, arrays), outputs)
    # Megatron's names show how it keeps a model, but not whether releases have copies.
    copied = any(re.search(r"[0-9]\.embed_tokens", name) for name in arrays)
    layers = model.config.get("num_nextn_predict_layers", 0)
    mtp = "" if not layers else "mtp=copies" if copied else "mtp=shared"
    back = apply_rules(table_for(model, mtp), shapes_of(expected), model.config)
    assert back.reversed
    assert_equal(arrays_of(back, expected), arrays)
    assert_equal(redone(back, expected), arrays)


@examples(60)
@given(random_models(MOE))
def test_experts_that_transformers_5_fuses_become_the_same(model: Model) -> None:
    if model.layout.apart or not any(".experts." in name for name in model.shapes):
        return
    arrays = with_copies(numbered(model.shapes))
    expected = megatron_of(arrays, model.config, model.layout)
    together = {name: array for name, array in arrays.items() if ".mlp.experts." not in name}
    for name, shape in fused(model.shapes).items():
        if name not in arrays:
            place, kinds = name.rsplit(".", 1)[0], ("down",) if name.endswith("down_proj") else ("gate", "up")
            each = [[arrays[f"{place}.{number}.{kind}_proj.weight"] for kind in kinds] for number in range(shape[0])]
            together[name] = np.stack([np.concatenate(parts) for parts in each])

    forward = apply_rules(table_for(model, model.layout.options), shapes_of(together), model.config)

    assert_equal(arrays_of(forward, together), expected)


@examples(60)
@given(random_models(), st.sampled_from(FAMILIES))
def test_another_family_is_refused_or_has_the_same_names(model: Model, other: str) -> None:
    expected = shapes_of(megatron_of(with_copies(numbered(model.shapes)), model.config, model.layout))
    own = apply_rules(table_for(model), expected, model.config)
    try:
        made = apply_rules(table_for(model, family=other), expected, model.config)
    except NamesError:
        return
    assert {name: view.view for name, view in made_by(made).items()} == {
        name: view.view for name, view in made_by(own).items()
    }


_CONFIG: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "tie_word_embeddings": False,
}
_MIXTURE: dict[str, Any] = {
    **_CONFIG,
    "moe_intermediate_size": 4,
    "num_experts": 3,
    "mlp_only_layers": [],
}
_DEEPSEEK: dict[str, Any] = {
    **_CONFIG,
    "moe_intermediate_size": 4,
    "n_routed_experts": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 7,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 3,
    "v_head_dim": 2,
    "num_nextn_predict_layers": 1,
}
_FULL = {**_DEEPSEEK, "q_lora_rank": None}
_NUMBERED = Layout(stacked=False, rows=16)
_LEGACY = Layout(False, False, False, False, False, rows=11)
_APART = Layout(stacked=False, apart=True, rows=11)
_PADDED = {"padded_vocab_size": 16}
MODELS = [
    model_of("llama", {**_CONFIG, **_PADDED}, Layout(rows=16)),
    model_of("llama", {**_CONFIG, **_PADDED, "tie_word_embeddings": True}, Layout(rows=16)),
    model_of("qwen2", _CONFIG, _LEGACY),
    model_of("qwen3", _CONFIG, _APART),
    model_of("qwen3_moe", {**_MIXTURE, **_PADDED}, Layout(rows=16)),
    model_of("qwen3_moe", _MIXTURE, Layout(experts=True, rows=11)),
    model_of("qwen3_moe", {**_MIXTURE, **_PADDED, "mlp_only_layers": [1]}, _NUMBERED),
    model_of("qwen3_moe", {**_MIXTURE, "mlp_only_layers": [0]}, _APART),
    model_of("qwen3_moe", {**_MIXTURE, "mlp_only_layers": [0]}, _LEGACY),
    model_of("deepseek_v3", {**_DEEPSEEK, **_PADDED}, _NUMBERED),
    model_of("deepseek_v3", _DEEPSEEK, _LEGACY, copies=False),
    model_of("deepseek_v3", _DEEPSEEK, _APART, copies=False),
    model_of("deepseek_v3", {**_DEEPSEEK, "first_k_dense_replace": 3}, Layout(rows=11)),
    model_of("deepseek_v3", {**_DEEPSEEK, "first_k_dense_replace": 0}, _LEGACY._replace(stacked=True)),
    model_of("deepseek_v3", {**_DEEPSEEK, "first_k_dense_replace": 3, **_PADDED}, _APART._replace(rows=16)),
    model_of("deepseek_v3", {**_DEEPSEEK, "first_k_dense_replace": 3}, _LEGACY),
    model_of("deepseek_v3", _DEEPSEEK, _NUMBERED._replace(experts=True, rows=11)),
    model_of("qwen3", _CONFIG, _LEGACY._replace(stacked=True)),
    model_of("qwen2", _CONFIG, Layout(rows=11)),
    model_of("deepseek_v3", {**_FULL, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}, Layout(rows=11)),
    model_of("deepseek_v3", _FULL, _LEGACY),
    model_of("glm4_moe", {**_DEEPSEEK, **_PADDED}, _NUMBERED),
    model_of("glm4_moe", {**_DEEPSEEK, "first_k_dense_replace": 0}, _LEGACY),
    model_of("glm4_moe", {**_DEEPSEEK, "first_k_dense_replace": 0}, Layout(rows=11)),
    model_of("qwen3", {**_CONFIG, "attention_bias": True}, Layout(rows=11)),
    model_of("qwen3_moe", {**_MIXTURE, "attention_bias": True}, _LEGACY),
]


def outcome(table: NameRules, model: Model) -> set[str]:
    """Convert a model both ways, as the reference does, otherwise an error; the rules that were applied."""
    arrays = with_copies(numbered(model.shapes))
    expected = megatron_of(arrays, model.config, model.layout)
    options = dict(each.split("=") for each in [f"family={model.family}", *model.layout.options.split(",")])
    forward = apply_rules(with_options(table, options), model.shapes, model.config)
    assert_equal(arrays_of(forward, arrays), expected)
    mtp = {"mtp": "copies" if any(map(_COPY.search, arrays)) else "shared"} if "mtp.layers.0" in str(expected) else {}
    back = apply_rules(with_options(table, {"family": model.family, **mtp}), shapes_of(expected), model.config)
    assert_equal(arrays_of(back, expected), arrays)
    return {step.rule for step in forward.steps}


# Per size the families that need it.
_NEEDED = {
    "num_hidden_layers": FAMILIES,
    "hidden_size": FAMILIES,
    "intermediate_size": ("llama", "qwen2", "qwen3"),
    "vocab_size": FAMILIES,
    "num_attention_heads": FAMILIES,
    "num_key_value_heads": ("llama", "qwen2", "qwen3", "qwen3_moe"),
    "head_dim": ("llama", "qwen2", "qwen3", "qwen3_moe"),
    "num_experts": ("qwen3_moe",),
    "n_routed_experts": ("deepseek_v3",),
    "moe_intermediate_size": MOE,
    "n_shared_experts": ("deepseek_v3",),
    "q_lora_rank": ("deepseek_v3",),
    "kv_lora_rank": ("deepseek_v3",),
    "v_head_dim": ("deepseek_v3",),
}


@pytest.mark.parametrize("model", MODELS[:12])
def test_sizes_that_contradict_shapes_or_are_missing_are_an_error(model: Model) -> None:
    expected = shapes_of(megatron_of(with_copies(numbered(model.shapes)), model.config, model.layout))
    for key, families in _NEEDED.items():
        if model.family not in families:
            continue
        # A padded vocabulary contradicts numbers of rows beyond it.
        wrong = model.config[key] + (6 if key == "vocab_size" else 1)
        for names, options in ((model.shapes, model.layout.options), (expected, "mtp=shared")):
            with pytest.raises(NamesError):
                apply_rules(table_for(model, options), names, {**model.config, key: wrong})
            # Other keys stand for the first two, and names show the number of layers.
            if key not in ("head_dim", "num_key_value_heads", "num_hidden_layers"):
                without = {name: value for name, value in model.config.items() if name != key}
                with pytest.raises(NamesError, match=key) as caught:
                    apply_rules(table_for(model, options), names, without)
                assert "--config" in str(caught.value.hint)


def test_a_lm_head_of_a_tied_model_must_equal_the_embedding() -> None:
    model = MODELS[1]
    shapes = {**model.shapes, "lm_head.weight": model.shapes["model.embed_tokens.weight"]}

    forward = apply_rules(table_for(model), shapes, model.config)

    assert forward.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "output_layer.weight" not in made_by(forward)
    back = apply_rules(
        table_for(model, "head=copied"),
        {name: each.view.shape for name, each in made_by(forward).items()},
        model.config,
    )
    assert {name: each.view.shape for name, each in made_by(back).items()} == shapes


@pytest.mark.parametrize("held", [["lm_head"], ["model.embed_tokens"], ["lm_head", "model.embed_tokens"]])
def test_state_of_tied_weights_may_be_saved_once(held: Sequence[str]) -> None:
    model = MODELS[1]
    shapes = {**model.shapes, "lm_head.weight": model.shapes["model.embed_tokens.weight"]}
    state = {f"adam_m.{name}.weight": shapes["lm_head.weight"] for name in held}

    forward = apply_rules(table_for(model), {**shapes, **state}, model.config, optimizer=True)

    assert made_by(forward)["adam_m.embedding.word_embeddings.weight"].sources == (f"adam_m.{sorted(held)[-1]}.weight",)
    tied = {("model.embed_tokens.weight", "lm_head.weight")}
    assert {*forward.tied} == tied | (
        {("adam_m.model.embed_tokens.weight", "adam_m.lm_head.weight")} if held[1:] else set()
    )


def test_tensors_of_two_families_are_refused() -> None:
    experts = MODELS[4]
    both = {**MODELS[0].shapes, **experts.shapes}
    for family in FAMILIES:
        with pytest.raises(NamesError):
            apply_rules(table_for(experts, "layer_keys=numbered", family), both, experts.config)


def test_dense_layers_and_experts_are_never_stacked_together() -> None:
    model = MODELS[6]
    with pytest.raises(NamesError, match="both dense and experts are present"):
        apply_rules(table_for(model, "layer_keys=stacked"), model.shapes, model.config)


def test_an_mlp_without_gate_is_refused() -> None:
    model = MODELS[0]
    expected = dict(shapes_of(megatron_of(numbered(model.shapes), model.config, model.layout)))
    expected["decoder.layers.mlp.linear_fc1.weight"] = (2, 5, 6)
    with pytest.raises(NamesError, match="linear_fc1"):
        apply_rules(table_for(model), expected, model.config)


def test_layers_and_experts_are_told_apart_by_their_counts() -> None:
    """Six pairs of three layers and two experts are not those of two layers and three experts."""
    model = MODELS[4]
    expected = megatron_of(numbered(model.shapes), model.config, model.layout)
    turned = {name: array.swapaxes(0, 1) if ".experts." in name else array for name, array in expected.items()}
    with pytest.raises(NamesError, match="experts = 3"):
        apply_rules(table_for(model), shapes_of(turned), model.config)


def test_an_error_of_a_chain_names_the_family_that_the_user_states() -> None:
    model = MODELS[0]
    _, table = tables_named("qwen3,mtp=shared", "megatron", "huggingface")
    with pytest.raises(NamesError) as caught:
        apply_rules(table, model.shapes, model.config)
    assert "--names qwen3,mtp=shared,layer_keys=stacked" in str(caught.value.hint)


def test_interleaved_halves_cannot_be_stated() -> None:
    with pytest.raises(UsageError, match="gate_up"):
        rules_named("megatron,gate_up=interleaved")


def test_what_a_model_does_not_need_is_skipped() -> None:
    model = MODELS[9]
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (2,) for layer in (0, 1)}
    forward = apply_rules(table_for(model, "mtp=dropped,layer_keys=numbered"), {**model.shapes, **old}, model.config)

    last = {name for name in model.shapes if name.startswith("model.layers.2.")}
    assert {*forward.dropped} == last | old.keys() and not any(name.startswith("mtp.") for name in made_by(forward))
    expected = shapes_of(megatron_of(with_copies(numbered(model.shapes)), model.config, model.layout))
    back = apply_rules(table_for(model, "mtp=dropped"), expected, model.config)
    assert {name: each.view.shape for name, each in made_by(back).items()} == {
        name: shape for name, shape in model.shapes.items() if name not in last
    }


class Mutant(NamedTuple):
    """The table with a wrong rule."""

    rule: str
    change: str
    table: NameRules


@pytest.mark.parametrize(("layers", "copies"), [(0, False), (1, True), (2, False)])
def test_one_layer_that_predicts_a_token_gets_copies_as_in_releases(layers: int, copies: bool) -> None:
    model = model_of(
        "deepseek_v3", {**_DEEPSEEK, "num_nextn_predict_layers": layers}, _NUMBERED._replace(rows=11), copies
    )
    expected = megatron_of(with_copies(numbered(model.shapes)), model.config, model.layout)

    back = apply_rules(table_for(model), shapes_of(expected), model.config)

    assert {name: each.view.shape for name, each in made_by(back).items()} == model.shapes


def mutants() -> list[Mutant]:
    """The table with one rule wrong."""
    table = TABLE
    changed: list[tuple[str, int, NameRule | None]] = []
    for place, rule in enumerate(table.rules):
        families = [{*values} for name, values in rule.when if name == "family"]
        # The layer that predicts a further token is of one family.
        if rule.drops or rule.optional or (families and not set.intersection(*families)):
            continue
        # Other tests have models with these names; keys of halves are never stacked.
        if re.search(r"fused|copied|stacked.*apart|apart.*stacked", str(rule.when)):
            continue
        changed.append(("is missing", place, None))
        if len(rule.left) > 1 and not any(isinstance(each, Copy) for each in rule.operations):
            changed.append(("has its names in another order", place, replace(rule, left=rule.left[::-1])))
        for number, operation in enumerate(rule.operations):
            others = rule.operations[:number], rule.operations[number + 1 :]
            if isinstance(operation, Join) and operation.parts is None:
                swapped = replace(operation, block=product("1"))
                changed.append(("interleaves", place, replace(rule, operations=(*others[0], swapped, *others[1]))))
            elif isinstance(operation, Join):
                flat = replace(operation, groups=None)
                changed.append(("forgets groups", place, replace(rule, operations=(*others[0], flat, *others[1]))))
            elif isinstance(operation, Stack):
                swapped_stack = replace(operation, dimension=1)
                changed.append(
                    ("stacks elsewhere", place, replace(rule, operations=(*others[0], swapped_stack, *others[1])))
                )
            elif isinstance(operation, Pad):
                changed.append(("forgets padding", place, replace(rule, operations=(*others[0], *others[1]))))
    result: list[Mutant] = []
    for text, place, other in changed:
        rules = [*table.rules[:place], *([] if other is None else [other]), *table.rules[place + 1 :]]
        result.append(Mutant(table.rules[place].where, text, replace(table, rules=tuple(rules))))
    return result


@pytest.mark.deep
def test_a_wrong_rule_is_found() -> None:
    applied = [(model, outcome(TABLE, model)) for model in MODELS]
    unnoticed = []
    for mutant in mutants():
        try:
            for model, rules in applied:
                if mutant.rule in rules:
                    outcome(mutant.table, model)
        except (AssertionError, NamesError):
            continue
        unnoticed.append(f"{mutant.rule} {mutant.change}")
    assert not unnoticed, unnoticed
