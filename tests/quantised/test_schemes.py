"""Recognition of quantised tensors, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reshard.errors import CheckpointError
from reshard.quantised import Quantisation
from reshard.quantised import recognise as recognise_by
from reshard.quantised.schemes import Recognised, TypedShape, describe, looks_quantised
from reshard.quantised.values import INT4
from reshard.quantised.values import INT8 as INT8_IN_WORDS
from tests.quantised.models import packed

E4M3 = "Float8E4M3FN"
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
WHOLE = {"quantization_config": {"quant_method": "fp8"}}


def recognise(
    stored: dict[str, TypedShape], config: dict[str, Any] | None, description: dict[str, Any] | None = None
) -> Recognised:
    return recognise_by(stored, Quantisation("BFloat16", config, description))


def groups(*weights: dict[str, Any]) -> dict[str, Any]:
    """A configuration as compressed-tensors writes it."""
    named = {f"group_{number}": {"targets": ["Linear"], "weights": each} for number, each in enumerate(weights)}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": named}}


CASES = [
    ("blocks", BLOCKS, E4M3, (576, 256), ".weight_scale_inv", "Float32", (5, 2), (128, 128)),
    ("last blocks are partial", BLOCKS, E4M3, (200, 130), ".weight_scale", "BFloat16", (2, 2), (128, 128)),
    ("exponents as scales", BLOCKS, E4M3, (200, 64), ".scale", "Float8E8M0", (2, 1), (128, 128)),
    ("a scale per tensor", WHOLE, E4M3, (80, 96), ".weight_scale", "Float32", (), (80, 96)),
    (
        "a scale per tensor, [1]",
        groups({"strategy": "tensor"}),
        E4M3,
        (80, 96),
        ".weight_scale",
        "Float32",
        (1,),
        (80, 96),
    ),
    ("a scale per row", groups({"strategy": "channel"}), E4M3, (80, 96), ".weight_scale", "Float32", (80, 1), (1, 96)),
    ("a scale per row, [M]", WHOLE, E4M3, (80, 96), ".weight_scale", "Float32", (80,), (1, 96)),
    ("Int8 per row", groups({"strategy": "channel"}), "Int8", (8, 6), ".weight_scale", "Float32", (8, 1), (1, 6)),
    (
        "Int8 in groups",
        groups({"strategy": "group", "group_size": 4}),
        "Int8",
        (8, 6),
        ".weight_scale",
        "Float16",
        (8, 2),
        (1, 4),
    ),
    (
        "one of two schemes",
        groups({"strategy": "channel"}, {"strategy": "tensor"}),
        E4M3,
        (8, 6),
        ".weight_scale",
        "Float32",
        (1,),
        (8, 6),
    ),
]


@pytest.mark.parametrize(
    ("config", "dtype", "shape", "end", "scale_dtype", "scale_shape", "block"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_a_weight_with_scales_of_the_right_shape_is_recognised(
    config: dict[str, Any],
    dtype: str,
    shape: tuple[int, ...],
    end: str,
    scale_dtype: str,
    scale_shape: tuple[int, ...],
    block: tuple[int, ...],
) -> None:
    stored = {
        "a.weight": TypedShape(dtype, shape),
        "a" + end: TypedShape(scale_dtype, scale_shape),
        "a.input_scale": TypedShape("Float32", (1,)),
        "norm.weight": TypedShape("BFloat16", (6,)),
        "logit_scale": TypedShape("Float32", ()),
    }

    schemes = recognise(stored, config)

    assert list(schemes.tensors) == ["a.weight"]
    created = schemes.tensors["a.weight"]
    assert (created.shape, created.block, created.sources) == (shape, block, ("a.weight", "a" + end))
    assert list(schemes.left_out) == ["a.input_scale"]
    assert list(describe(schemes).values()) == [1]


def test_packed_codes_count_twice_in_the_last_dimension() -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    stored = {
        "e.down_proj_blocks": TypedShape("UInt8", (2, 96, 3, 16)),
        "e.down_proj_scales": TypedShape("UInt8", (2, 96, 3)),
        "e.down_proj_bias": TypedShape("BFloat16", (2, 96)),
    }

    schemes = recognise(stored, config).tensors["e.down_proj"]

    assert (schemes.shape, schemes.block, schemes.scale_shape) == ((2, 96, 96), (1, 1, 32), (2, 96, 3))


def test_a_byte_with_two_codes_has_a_scale_per_32_elements() -> None:
    stored = {"w1.weight": TypedShape("Int8", (64, 48)), "w1.scale": TypedShape("Float8E8M0", (64, 3))}

    schemes = recognise(stored, BLOCKS).tensors["w1.weight"]

    assert (schemes.shape, schemes.block, schemes.scale_shape) == ((64, 96), (1, 32), (64, 3))


def test_experts_in_one_tensor_have_blocks_of_their_last_two_dimensions() -> None:
    stored = {
        "experts.gate_up_proj": TypedShape(E4M3, (3, 256, 128)),
        "experts.gate_up_proj_scale_inv": TypedShape("Float32", (3, 2, 1)),
    }

    assert recognise(stored, BLOCKS).tensors["experts.gate_up_proj"].block == (1, 128, 128)


def test_weights_of_msmodelslim_have_a_scale_and_an_offset_per_row() -> None:
    stored = {
        "a.weight": TypedShape("Int8", (8, 6)),
        "a.weight_scale": TypedShape("Float32", (8, 1)),
        "a.weight_offset": TypedShape("Float32", (8, 1)),
        "norm.weight": TypedShape("BFloat16", (6,)),
    }
    description = {"a.weight": "W8A8_DYNAMIC", "norm.weight": "FLOAT", "model_quant_type": "W8A8_DYNAMIC"}

    schemes = recognise(stored, None, description).tensors["a.weight"]

    assert (schemes.offsets, schemes.block) == ("a.weight_offset", (1, 6))


INT8 = {"a.weight": TypedShape("Int8", (8, 6)), "a.weight_scale": TypedShape("Float32", (8, 1))}
BLOCK_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
BLOCK_TENSORS = {
    "a.weight": TypedShape(E4M3, (576, 256)),
    "a.weight_scale_inv": TypedShape("Float32", (5, 2)),
    "norm.weight": TypedShape("BFloat16", (256,)),
}
OF_ACTIVATIONS = {
    **dict.fromkeys(("actorder", "block_structure", "group_size", "observer")),
    **{"dynamic": True, "num_bits": 8, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "float"},
}
GLM = {
    "config_groups": {
        "group_0": {
            "input_activations": OF_ACTIVATIONS,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {**OF_ACTIVATIONS, "dynamic": False, "observer": "minmax", "strategy": "channel"},
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head", "model.layers.0.mlp.gate"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
SPARE = {
    "sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"},
    "transform_config": {},
    "version": "0.10.2",
}
CHANNEL_TENSORS = {"a.weight": TypedShape(E4M3, (64, 256)), "a.weight_scale": TypedShape("BFloat16", (64, 1))}
GPT_OSS_TENSORS = {
    "mlp.experts.down_proj_blocks": TypedShape("UInt8", (4, 96, 3, 16)),
    "mlp.experts.down_proj_scales": TypedShape("UInt8", (4, 96, 3)),
    "mlp.experts.down_proj_bias": TypedShape("BFloat16", (4, 96)),
}
MXFP4 = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
STATIC = {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None}
PUBLISHED: dict[str, tuple[Any, dict[str, TypedShape]]] = {
    "DeepSeek-V3 and R1": (BLOCK_FP8, BLOCK_TENSORS),
    "DeepSeek-V3.1": ({**BLOCK_FP8, "scale_fmt": "ue8m0"}, BLOCK_TENSORS),
    "Qwen3-FP8": ({**BLOCK_FP8, "modules_to_not_convert": ["lm_head", "model.norm"]}, BLOCK_TENSORS),
    "MiniMax-M2": (
        {**BLOCK_FP8, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        BLOCK_TENSORS,
    ),
    "saved by transformers 5": (
        {**BLOCK_FP8, **dict.fromkeys(("modules_to_convert", "modules_to_not_convert")), "expert_dtype": "fp8"},
        BLOCK_TENSORS,
    ),
    "GLM-4.5-FP8": (GLM, CHANNEL_TENSORS),
    "later compressed-tensors": ({**GLM, **SPARE}, CHANNEL_TENSORS),
    "Ministral": (STATIC, {"a.weight": TypedShape(E4M3, (4, 6)), "a.weight_scale_inv": TypedShape("BFloat16", ())}),
    "gpt-oss": (MXFP4, GPT_OSS_TENSORS),
}


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("place", ["top", "text_config", "both"])
def test_published_configurations_are_read(model: str, place: str) -> None:
    settings, stored = PUBLISHED[model]
    own = {"quantization_config": settings}
    config = {"top": own, "text_config": {"text_config": own}, "both": {**own, "text_config": own}}[place]

    assert len(recognise(stored, config).tensors) == 1


DESCRIPTION: dict[str, Any] = {
    "model_quant_type": "W8A8_DYNAMIC",
    "version": "1.0.0",
    **dict.fromkeys(("group_size", "kv_quant_type", "fa_quant_type", "reduce_quant_type"), None),
    "metadata": {},
    "optional": {},
    "a.weight": "W8A8_DYNAMIC",
    "a.weight_scale": "W8A8_DYNAMIC",
    "a.weight_offset": "W8A8_DYNAMIC",
    "norm.weight": "FLOAT",
}


@pytest.mark.parametrize("config", [None, {}, {"quantize": "w8a8", "quantization_config": {"kv_quant_type": None}}])
def test_published_weights_of_msmodelslim_are_read(config: dict[str, Any] | None) -> None:
    stored = {**INT8, "a.weight_offset": TypedShape("Float32", (8, 1)), "norm.weight": TypedShape("BFloat16", (6,))}

    assert [*recognise(stored, config, DESCRIPTION).tensors] == ["a.weight"]


def with_key(key: str, value: Any) -> dict[str, Any]:
    """The configuration of GLM-4.5-FP8 with one more key, at a path with points."""
    config = json.loads(json.dumps({"quantization_config": GLM}))
    place = config["quantization_config"]
    *path, last = key.split(".")
    for part in path:
        place = place[part]
    place[last] = value
    return dict(config)


ROTATIONS = {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transform_config", ROTATIONS),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("some_new_key", False),
        ("config_groups.group_0.some_new_key", 1),
        ("config_groups.group_0.weights.actorder", "group"),
        ("config_groups.group_0.weights.actorder", True),
        ("config_groups.group_0.weights.some_new_key", "x"),
    ],
)
def test_a_key_that_may_change_the_codes_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: .*{key}"):
        recognise(CHANNEL_TENSORS, with_key(key, value))


@pytest.mark.parametrize("value", [None, False, "static", "weight"])
def test_groups_in_the_order_of_weights_need_no_index(value: Any) -> None:
    config = with_key("config_groups.group_0.weights.actorder", value)
    assert len(recognise(CHANNEL_TENSORS, config).tensors) == 1


def test_different_configurations_in_one_file_are_refused() -> None:
    config = {"quantization_config": BLOCK_FP8, "text_config": {"quantization_config": {"quant_method": "fp8"}}}
    with pytest.raises(CheckpointError, match="text_config"):
        recognise(BLOCK_TENSORS, config)


def test_rotations_of_msmodelslim_are_refused() -> None:
    stored = {**INT8, "a.weight_offset": TypedShape("Float32", (8, 1))}
    with pytest.raises(CheckpointError, match="optional"):
        recognise(stored, None, {**DESCRIPTION, "optional": {"quarot": {"rotation_map": {}}}})


def words(columns: int, scales: int, dtype: str = "Int32", scale: str = "BFloat16") -> dict[str, TypedShape]:
    """A weight of 8 rows in words."""
    return {
        "a.weight_packed": TypedShape(dtype, (8, columns)),
        "a.weight_scale": TypedShape(scale, (8, scales)),
        "a.weight_shape": TypedShape("Int64", (2,)),
    }


FOUR: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
EIGHT = {**FOUR, "num_bits": 8}
CHANNEL = {"strategy": "channel", "group_size": None}


def in_config(*weights: dict[str, Any]) -> dict[str, Any]:
    return {"quantization_config": packed(*weights)}


@pytest.mark.parametrize(
    ("weights", "stored", "code", "shape", "block"),
    [
        ([FOUR], words(12, 3), INT4, (8, 96), (1, 32)),
        ([{**FOUR, **CHANNEL}], words(12, 1), INT4, (8, 96), (1, 96)),
        ([EIGHT], words(24, 3), INT8_IN_WORDS, (8, 96), (1, 32)),
        ([{**FOUR, "group_size": 64}, EIGHT], words(12, 1), None, None, None),
        ([FOUR, EIGHT], words(8, 2), INT4, (8, 64), (1, 32)),
        ([FOUR, EIGHT], words(8, 1), INT8_IN_WORDS, (8, 32), (1, 32)),
        ([FOUR, {**FOUR, "group_size": 16}], words(8, 4), INT4, (8, 64), (1, 16)),
    ],
)
def test_words_hold_the_bits_of_the_group_that_fits(
    weights: list[dict[str, Any]], stored: dict[str, TypedShape], code: str | None, shape: Any, block: Any
) -> None:
    if code is None:
        with pytest.raises(CheckpointError, match="needs"):
            recognise(stored, in_config(*weights))
        return

    created = recognise(stored, in_config(*weights)).tensors["a.weight"]

    assert (created.code, created.shape, created.block) == (code, shape, block)
    assert created.sources == ("a.weight_packed", "a.weight_scale", "a.weight_shape")


def test_words_and_bytes_have_their_own_groups() -> None:
    """Each group may have a format of its own."""
    config = in_config({**FOUR, **CHANNEL}, {"num_bits": 8, "strategy": "tensor"})
    config["quantization_config"]["config_groups"]["group_1"]["format"] = "int-quantized"
    stored = {**words(12, 1), "b.weight": TypedShape("Int8", (8, 6)), "b.weight_scale": TypedShape("Float32", (1,))}

    recognised = recognise(stored, config)

    assert {name: each.block for name, each in recognised.tensors.items()} == {"a.weight": (1, 96), "b.weight": (8, 6)}
    assert describe(recognised) == {"packed Int4 per channel": 1, "Int8 per tensor": 1}


WEIGHT = {"a.weight": TypedShape(E4M3, (576, 256))}
REFUSED = [
    ("no tensor holds its scales", WEIGHT, BLOCKS, None),
    (r"needs \[5, 2\]", {**WEIGHT, "a.weight_scale_inv": TypedShape("Float32", (4, 2))}, BLOCKS, None),
    ("has no quantization_config", {**WEIGHT, "a.weight_scale_inv": TypedShape("Float32", (5, 2))}, {}, None),
    ("config.json does not exist", {**WEIGHT, "a.weight_scale_inv": TypedShape("Float32", (5, 2))}, None, None),
    ("quantised weight that is not in", {"b.weight_scale_inv": TypedShape("Float32", (5, 2))}, BLOCKS, None),
    ("quant_method 'gptq'", WEIGHT, {"quantization_config": {"quant_method": "gptq"}}, None),
    ("scales of type Int32", {**WEIGHT, "a.weight_scale": TypedShape("Int32", (5, 2))}, BLOCKS, None),
    (
        "zero points of type UInt8",
        {**INT8, "a.weight_zero_point": TypedShape("UInt8", (8, 1))},
        groups({"strategy": "channel"}),
        None,
    ),
    (
        "elements of type BFloat16",
        {"a.weight": TypedShape("BFloat16", (8, 6)), "a.weight_scale": TypedShape("Float32", (8, 1))},
        BLOCKS,
        None,
    ),
    (
        "not two sizes",
        {**WEIGHT, "a.weight_scale": TypedShape("Float32", (5, 2))},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        None,
    ),
    (
        "fit two schemes",
        {"a.weight": TypedShape("Int8", (8, 200)), "a.weight_scale": TypedShape("Float32", (8, 2))},
        groups({"strategy": "group", "group_size": 100}, {"strategy": "group", "group_size": 128}),
        None,
    ),
    (
        "zero points, and no tensor",
        INT8,
        groups({"strategy": "channel", "symmetric": False}, {"strategy": "tensor"}),
        None,
    ),
    ("zero points, and no tensor", INT8, None, {"a.weight": "W8A8_DYNAMIC", "a.weight_offset": "W8A8_DYNAMIC"}),
    ("quantised as W4A8", INT8, None, {"a.weight": "W4A8"}),
    ("quantised as W8A8_DYNAMIC, but", {"a.weight": TypedShape("Int8", (8, 6))}, None, {"a.weight": "W8A8_DYNAMIC"}),
    ("needs 'a.weight_scale'", {"a.weight_packed": TypedShape("Int32", (8, 12))}, in_config(FOUR), None),
    ("needs 'a.weight_shape'", {k: v for k, v in words(12, 3).items() if "shape" not in k}, in_config(FOUR), None),
    ("weight_shape' belongs to", {"a.weight_shape": TypedShape("Int64", (2,))}, in_config(FOUR), None),
    ("num_bits 3", words(9, 3), in_config({**FOUR, "num_bits": 3}), None),
    ("num_bits 4.0", words(9, 3), in_config({**FOUR, "num_bits": 4.0}), None),
    ("num_bits 4 and type float", words(12, 3), in_config({**FOUR, "type": "float"}), None),
    ("symmetric: false", words(12, 3), in_config({**FOUR, "symmetric": False}), None),
    (
        "weight_zero_point': zero points",
        {**words(12, 3), "a.weight_zero_point": TypedShape("Int8", (8, 3))},
        in_config(FOUR),
        None,
    ),
    ("actorder", words(12, 3), in_config({**FOUR, "actorder": "group"}), None),
    ("weight_g_idx", {**words(12, 3), "a.weight_g_idx": TypedShape("Int32", (96,))}, in_config(FOUR), None),
    ("no weights of format pack-quantized", words(12, 3), groups(FOUR), None),
    ("no weights of format pack-quantized", words(12, 3), BLOCKS, None),
    (
        "needs no scales",
        {"b.weight": TypedShape("Int8", (8, 6)), "b.weight_scale": TypedShape("Float32", (8, 1))},
        in_config({"num_bits": 8, **CHANNEL}),
        None,
    ),
    (r"needs \[8, 3\] \(packed Int4", words(12, 4), in_config(FOUR), None),
    ("UInt8 of shape", words(12, 3, "UInt8"), in_config(FOUR), None),
    ("scales of type Float8E8M0", words(12, 3, scale="Float8E8M0"), in_config(FOUR), None),
    ("sizes of type Float32", {**words(12, 3), "a.weight_shape": TypedShape("Float32", (2,))}, in_config(FOUR), None),
    ("shape \\[3\\]", {**words(12, 3), "a.weight_shape": TypedShape("Int64", (3,))}, in_config(FOUR), None),
    ("whole words of 8", words(3, 2), in_config({**FOUR, "group_size": 12}), None),
    ("fit two schemes", words(8, 1), in_config({**FOUR, "group_size": 64}, EIGHT), None),
    ("fit two schemes", words(8, 1), in_config({**FOUR, **CHANNEL}, {**EIGHT, **CHANNEL}), None),
    ("is in the checkpoint, too", {**words(12, 3), "a.weight": TypedShape("BFloat16", (8, 96))}, in_config(FOUR), None),
    (
        "shape \\[8\\], but the scales",
        {**INT8, "a.weight_offset": TypedShape("Float32", (8,))},
        None,
        {"a.weight": "W8A8_DYNAMIC"},
    ),
]


@pytest.mark.parametrize(("message", "stored", "config", "description"), REFUSED, ids=[case[0] for case in REFUSED])
def test_unknown_schemes_are_refused_by_name(
    message: str,
    stored: dict[str, TypedShape],
    config: dict[str, Any] | None,
    description: dict[str, Any] | None,
) -> None:
    with pytest.raises(CheckpointError, match=message):
        recognise(stored, config, description)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_runs_with_other_settings_are_other_conversions(key: str) -> None:
    settings = [
        {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": each}}} for each in ({}, {"a": 1})
    ]
    one, other = (Quantisation("BFloat16", {key: each}).identity for each in settings)
    assert one != other


def test_a_checkpoint_without_scales_is_not_quantised() -> None:
    stored = {"a.weight": TypedShape("BFloat16", (8, 6)), "a.scale_bias": TypedShape("BFloat16", (8,))}

    assert not looks_quantised(stored)
    assert recognise(stored, {}) == ({}, [])


IN_WORDS = {
    "e.gate_up_proj_packed": TypedShape("Int32", (4, 16, 4)),
    "e.gate_up_proj_scale": TypedShape("BFloat16", (4, 16, 1)),
    "e.gate_up_proj_shape": TypedShape("Int64", (3,)),
}
FUSED_INT8 = {
    "e.gate_up_proj": TypedShape("Int8", (4, 16, 32)),
    "e.gate_up_proj_scale": TypedShape("BFloat16", (4, 16, 1)),
}


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("e.gate_up_proj_packed", IN_WORDS),
        ("e.gate_up_proj", FUSED_INT8),
        ("e.gate_up_proj", {**INT8, **FUSED_INT8}),
        ("e.gate_up_proj", {**INT8, "e.gate_up_proj": TypedShape("UInt8", (4, 16, 32))}),
        ("e.indices", {"e.indices": TypedShape("UInt16", (4, 16)), "e.centroids": TypedShape("Float16", (4, 16))}),
    ],
)
def test_codes_with_names_of_no_known_scheme_are_refused(name: str, stored: dict[str, TypedShape]) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        recognise(stored, groups({"strategy": "channel"}))


def test_values_of_the_training_are_no_codes() -> None:
    stored = {**INT8, "rng_state": TypedShape("UInt8", (16,)), "note": TypedShape("str", (3,))}
    assert [*recognise(stored, groups({"strategy": "channel"})).tensors] == ["a.weight"]
