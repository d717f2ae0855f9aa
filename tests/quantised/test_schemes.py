"""Recognition of quantised tensors, and refusals."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from reshard.errors import CheckpointError
from reshard.quantised import Quantisation
from reshard.quantised.schemes import TypedShape, describe, looks_quantised, recognise

E4M3 = "Float8E4M3FN"
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
WHOLE = {"quantization_config": {"quant_method": "fp8"}}


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


WEIGHT = {"a.weight": TypedShape(E4M3, (576, 256))}
INT8 = {"a.weight": TypedShape("Int8", (8, 6)), "a.weight_scale": TypedShape("Float32", (8, 1))}
REFUSED = [
    ("no tensor holds its scales", WEIGHT, BLOCKS, None),
    (r"needs \[5, 2\]", {**WEIGHT, "a.weight_scale_inv": TypedShape("Float32", (4, 2))}, BLOCKS, None),
    ("has no quantization_config", {**WEIGHT, "a.weight_scale_inv": TypedShape("Float32", (5, 2))}, {}, None),
    ("config.json does not exist", {**WEIGHT, "a.weight_scale_inv": TypedShape("Float32", (5, 2))}, None, None),
    ("quantised weight that is not in", {"b.weight_scale_inv": TypedShape("Float32", (5, 2))}, BLOCKS, None),
    ("quant_method 'gptq'", WEIGHT, {"quantization_config": {"quant_method": "gptq"}}, None),
    ("packed into words", {"a.weight_packed": TypedShape("Int32", (5, 2))}, groups({"strategy": "group"}), None),
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
    ("quantised as W4A8", INT8, None, {"a.weight": "W4A8"}),
    ("quantised as W8A8_DYNAMIC, but", {"a.weight": TypedShape("Int8", (8, 6))}, None, {"a.weight": "W8A8_DYNAMIC"}),
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
    config: Optional[dict[str, Any]],
    description: Optional[dict[str, Any]],
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
