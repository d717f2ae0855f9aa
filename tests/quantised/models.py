"""Small quantised models as libraries write them, and their values by arithmetic on single elements."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.checkpoint_writing import Parts, write_safetensors
from tests.trees import Value

E2M1, INT4, INT8 = "E2M1", "Int4+8", "Int8+128"
_LAYOUTS = {"Float8E4M3FN": (4, 3, 7), "Float8E5M2": (5, 2, 15), E2M1: (2, 1, 1)}


def number(code: str, bits: int) -> float:
    """The value of a code of one element, by the definition of its type."""
    if code == "Int8":
        return float(bits - 256 if bits > 127 else bits)
    if code in (INT4, INT8):
        return float(bits - int(code.partition("+")[2]))
    exponent, mantissa, bias = _LAYOUTS[code]
    sign: float = -1.0 if bits >> (exponent + mantissa) else 1.0
    power, digits = bits >> mantissa & (2**exponent - 1), bits & (2**mantissa - 1)
    if code == "Float8E4M3FN" and (power, digits) == (15, 7):
        return math.nan
    if code == "Float8E5M2" and power == 31:
        return math.nan if digits else sign * math.inf
    if power == 0:
        return sign * math.ldexp(digits, 1 - bias - mantissa)
    return sign * math.ldexp(1 + digits / 2**mantissa, power - bias)


def numbers(code: str, byte: int) -> list[float]:
    """The numbers in a byte."""
    return [number(code, byte & 15), number(code, byte >> 4)] if code in (E2M1, INT4) else [number(code, byte)]


def narrowed(value: np.float32, dtype: str) -> int:
    """The bits of a Float32 in a type, to the nearest, ties to even."""
    if dtype == "Float32":
        return int(value.view("u4"))
    if dtype == "Float16":
        with np.errstate(over="ignore"):
            return int(np.float16(value).view("u2"))
    bits = int(value.view("u4"))
    upper, rest = bits >> 16, bits & 0xFFFF
    return upper + (rest > 0x8000 or (rest == 0x8000 and upper & 1))


class Coded(NamedTuple):
    """A quantised weight.

    Attributes:
        name: of the weight that it stands for.
        stored: its tensors in the file.
        values: its elements as Float32.
    """

    name: str
    stored: dict[str, Parts]
    values: npt.NDArray[np.float32]

    def as_type(self, dtype: str) -> Value:
        """What it has to become."""
        array = np.array([narrowed(value, dtype) for value in self.values.reshape(-1)])
        return Value(dtype, array.astype("u4" if dtype == "Float32" else "u2").reshape(self.values.shape))


def coded(
    names: Sequence[str],
    code: str,
    shape: Sequence[int],
    block: Sequence[int],
    scale: str = "Float32",
    scale_shape: Sequence[int] = (),
    dtype: str = "",
    stored_shape: Sequence[int] = (),
    swapped: bool = False,
    seed: int = 0,
    offset: str = "",
) -> Coded:
    """A weight of random codes and scales.

    Args:
        names: of the weight, of its codes, of its scales, and of its zero points if it has any.
        code: of its elements.
        shape: of the weight as it is stored, in elements.
        block: elements per scale, per dimension.
        scale: type of the scales.
        scale_shape: of the scales as they are stored, where it is not as many as there are blocks.
        dtype: type of the codes in the file, where it is not the code.
        stored_shape: of the codes in the file, where it is not the weight's.
        swapped: whether the weight's last two dimensions change places.
        seed: of the random numbers.
        offset: type of the zero points.
    """
    rng = np.random.default_rng(seed + sum(map(ord, names[0])))
    per_byte = 2 if code in (E2M1, INT4) else 1
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // per_byte), dtype="u1")
    if code == "Float8E4M3FN":
        codes[(codes & 0x7F) == 0x7F] = 0
    counts = [-(-size // length) for size, length in zip(shape, block)]
    if scale in ("Float8E8M0", "UInt8"):
        bits = rng.integers(110, 135, counts).astype("u1")
        scales = np.array([math.ldexp(1, int(each) - 127) for each in bits.reshape(-1)], "f4").reshape(counts)
    else:
        scales = rng.uniform(0.01, 3, counts).astype("f4")
        if scale == "BFloat16":
            scales = (scales.view("u4") & 0xFFFF0000).view("f4")
            bits = (scales.view("u4") >> 16).astype("u2")
        else:
            bits = scales
    offsets = rng.integers(-100, 100, counts if offset else [1] * len(counts)).astype(
        "i1" if offset == "Int8" else "f4"
    )
    values = np.empty(shape, "f4")
    for index in itertools.product(*map(range, shape)):
        byte = codes[(*index[:-1], index[-1] // per_byte)]
        place = tuple(at // length for at, length in zip(index, block))
        value = numbers(code, int(byte))[index[-1] % per_byte] - (float(offsets[place]) if offset else 0)
        values[index] = np.float32(value) * scales[place]
    name, codes_name, scales_name, *offsets_names = names
    stored: dict[str, Parts] = {
        codes_name: (dtype or code, stored_shape or codes.shape, codes.tobytes()),
        scales_name: (scale, scale_shape or counts, bits.tobytes()),
        **{each: (offset, scale_shape or counts, offsets.tobytes()) for each in offsets_names},
    }
    return Coded(name, stored, np.ascontiguousarray(np.swapaxes(values, -1, -2)) if swapped else values)


def in_words(
    name: str,
    code: str,
    rows: int,
    columns: int,
    block: Sequence[int] = (),
    scale: str = "BFloat16",
    sizes: str = "i4",
) -> Coded:
    """A weight of random codes in words, whose rows end in whole words, with the sizes that it has without padding.

    Args:
        name: of the weight.
        code: `INT4` or `INT8`.
        rows: of the weight.
        columns: of the weight.
        block: elements per scale, per dimension; a row if it is empty.
        scale: type of the scales.
        sizes: NumPy's name of the type of the sizes.
    """
    stem, per_word = name.removesuffix(".weight"), 8 if code == INT4 else 4
    words = -(-columns // per_word)
    names = (name, f"{stem}.weight_packed", f"{stem}.weight_scale")
    padded = (rows, words * per_word)
    scale_shape = (1,) if block == padded else ()
    whole = coded(
        names, code, padded, block or (1, padded[1]), scale, scale_shape, dtype="Int32", stored_shape=(rows, words)
    )
    listed: Parts = ("Int32" if sizes == "i4" else "Int64", (2,), np.array([rows, columns], f"<{sizes}").tobytes())
    return Coded(name, {**whole.stored, f"{stem}.weight_shape": listed}, whole.values[:, :columns].copy())


def packed(*weights: dict[str, Any]) -> dict[str, Any]:
    """A configuration of compressed-tensors for weights in words."""
    groups = {
        f"group_{n}": {"targets": ["Linear"], "weights": {"type": "int", **each}} for n, each in enumerate(weights)
    }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


FP8 = {"quant_method": "fp8", "weight_block_size": [4, 3]}
CHANNELS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"strategy": "channel"}}}}
GROUPS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"strategy": "group", "group_size": 4}}},
}
TENSORS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"strategy": "tensor"}}}}


def weights(scheme: str) -> tuple[dict[str, Any], list[Coded]]:
    """The quantised weights of a model, and its `quantization_config`."""
    a = ("a.weight", "a.weight", "a.weight_scale")
    if scheme == "fp8 blocks":
        return FP8, [
            coded(("a.weight", "a.weight", "a.weight_scale_inv"), "Float8E4M3FN", (10, 8), (4, 3)),
            coded(("b.weight", "b.weight", "b.weight_scale"), "Float8E4M3FN", (8, 6), (4, 3), "BFloat16"),
            coded(("e.up", "e.up", "e.up_scale_inv"), "Float8E4M3FN", (2, 6, 4), (1, 4, 3)),
        ]
    if scheme == "fp8 blocks, exponents":
        return FP8, [
            coded(("a.weight", "a.weight", "a.scale"), "Float8E4M3FN", (10, 8), (4, 3), "Float8E8M0"),
            coded(("b.weight", "b.weight", "b.scale"), E2M1, (6, 64), (1, 32), "Float8E8M0", dtype="Int8"),
        ]
    if scheme == "fp8 channels":
        b = ("b.weight", "b.weight", "b.weight_scale")
        return CHANNELS, [
            coded(a, "Float8E4M3FN", (6, 8), (1, 8)),
            coded(b, "Float8E5M2", (6, 8), (1, 8), "BFloat16", (6,)),
        ]
    if scheme == "int8 channels":
        symmetric = coded(("b.weight", "b.weight", "b.weight_scale"), "Int8", (6, 8), (1, 8))
        zeros: dict[str, Parts] = {"b.weight_zero_point": ("Int8", (6, 1), bytes(6))}
        return CHANNELS, [
            coded(a, "Int8", (6, 8), (1, 8)),
            symmetric._replace(stored={**symmetric.stored, **zeros}),
        ]
    if scheme == "int8 groups with zero points":
        return GROUPS, [
            coded((*a, "a.weight_zero_point"), "Int8", (6, 16), (1, 4), offset="Int8"),
            coded(
                ("b.weight", "b.weight", "b.weight_scale", "b.weight_zero_point"),
                "Int8",
                (6, 6),
                (1, 4),
                offset="Float32",
            ),
        ]
    if scheme == "fp8 tensors":
        return TENSORS, [coded(a, "Float8E4M3FN", (6, 8), (6, 8), "BFloat16", (1,))]
    if scheme == "packed int4 groups":
        return packed({"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 8}), [
            in_words("a.weight", INT4, 6, 16, (1, 8)),
            in_words("b.weight", INT4, 4, 24, (1, 8), "Float32", "i8"),
        ]
    if scheme == "packed int4 channels":
        return packed({"num_bits": 4, "strategy": "channel"}, {"num_bits": 4, "strategy": "tensor"}), [
            in_words("a.weight", INT4, 6, 34),
            in_words("b.weight", INT4, 4, 16, (), "Float32", "i8"),
            in_words("c.weight", INT4, 4, 10, (4, 16)),
        ]
    if scheme == "packed int8":
        settings = ({"strategy": "channel"}, {"num_bits": 8, "strategy": "group", "group_size": 4})
        return packed(*settings), [in_words("a.weight", INT8, 6, 10), in_words("b.weight", INT8, 6, 12, (1, 4))]
    assert scheme == "mxfp4"
    names = ("e.up", "e.up_blocks", "e.up_scales")
    blocks = (2, 4, 2, 16)
    return {"quant_method": "mxfp4"}, [
        coded(names, E2M1, (2, 4, 64), (1, 1, 32), "UInt8", (), "UInt8", blocks, swapped=True)
    ]


SCHEMES = [
    "fp8 blocks",
    "fp8 blocks, exponents",
    "fp8 channels",
    "int8 channels",
    "int8 groups with zero points",
    "fp8 tensors",
    "packed int4 groups",
    "packed int4 channels",
    "packed int8",
    "mxfp4",
]


def others() -> dict[str, Parts]:
    """Tensors that are not quantised."""
    return {
        "norm.weight": ("BFloat16", (8,), np.arange(8, dtype="u2").tobytes()),
        "router.bias": ("Float32", (4,), np.arange(4, dtype="f4").tobytes()),
    }


def write_model(directory: Path, scheme: str, apart: bool = True) -> list[Coded]:
    """Write a Hugging Face directory, with scales in another file than their weights if ``apart``."""
    config, quantised = weights(scheme)
    directory.mkdir()
    model = {"model_type": "tiny", "torch_dtype": "bfloat16", "quantization_config": config}
    (directory / "config.json").write_text(json.dumps(model))
    stored = {name: parts for each in quantised for name, parts in each.stored.items()}
    first = {name: parts for number, (name, parts) in enumerate(stored.items()) if number % 2 == 0 or not apart}
    second = {**{name: parts for name, parts in stored.items() if name not in first}, **others()}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for name, tensors in files.items():
        write_safetensors(directory / name, tensors, {"format": "pt"})
    index = {name: file for file, tensors in files.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return quantised
