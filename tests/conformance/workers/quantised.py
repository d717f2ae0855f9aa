"""Quantised weights by the libraries that define them: torch, transformers and compressed-tensors.

Jobs:

* ``{"do": "quantise", "source", "to", "plain", "scheme", "seed"}``: the weights of linear layers of a saved model in
  another directory, as ``fp8`` (blocks of 128 x 128, scales in another file), of gpt-oss' experts as ``mxfp4``, or of
  routed experts as ``pack-quantized`` of compressed-tensors, as Kimi-K2 has them (4 bits in groups of 32).
  In ``plain`` the same model with the numbers that codes and scales stand for by the library's own arithmetic.
* ``{"do": "int8", "to", "weights", "dtype", "seed"}``: a weight in Int8 by compressed-tensors with these settings and
  scales of this type, and hashes of what it restores, per type that is as precise as the scales or less.
* ``{"do": "words", "to", "weights", "dtype", "shape", "seed"}``: likewise a weight of this shape in words.
* ``{"do": "dequantise", "by", "directory", "dtype"}``: hashes of all weights as ``torch``, ``compressed-tensors`` or
  ``transformers`` dequantise them, by name; text where a library fails for one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conformance.workers.protocol import Job, described, serve

BLOCK = 128
Tensors = dict[str, torch.Tensor]


def quantise(job: Job) -> list[str]:
    torch.manual_seed(job["seed"])
    stored = _read(Path(job["source"]))
    schemes = {"fp8": _fp8, "mxfp4": _mxfp4, "pack-quantized": _pack_quantized}
    coded, plain, config = schemes[job["scheme"]](stored)
    for directory, tensors, settings in ((job["to"], coded, config), (job["plain"], plain, None)):
        shutil.copytree(job["source"], directory, ignore=shutil.ignore_patterns("*.safetensors*"))
        path = Path(directory, "config.json")
        model = json.loads(path.read_text())
        path.write_text(json.dumps({**model, **({} if settings is None else {"quantization_config": settings})}))
        scales = {name: tensor for name, tensor in tensors.items() if name.endswith(("_inv", "_scale", "_scales"))}
        files = {"model-00001-of-00002.safetensors": scales} if scales else {}
        files["model-00002-of-00002.safetensors"] = {n: t for n, t in tensors.items() if n not in scales}
        for name, part in files.items():
            save_file({key: value.contiguous() for key, value in part.items()}, Path(directory, name), {"format": "pt"})
        index = {name: file for file, part in files.items() for name in part}
        Path(directory, "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sorted(set(coded) - set(stored))


def _fp8(stored: Tensors) -> tuple[Tensors, Tensors, dict[str, Any]]:
    coded, plain = dict(stored), dict(stored)
    for name, weight in stored.items():
        if weight.dim() != 2 or any(part in name for part in ("embed", "lm_head", "norm", "mlp.gate.weight")):
            continue
        counts = [-(-size // BLOCK) for size in weight.shape]
        scale = (torch.rand(counts) + 0.5) * 0.01
        spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
        coded[name] = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        coded[f"{name}_scale_inv"] = scale
        plain[name] = (coded[name].float() * spread).to(torch.bfloat16)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    return coded, plain, config


def _mxfp4(stored: Tensors) -> tuple[Tensors, Tensors, dict[str, Any]]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    coded, plain = dict(stored), dict(stored)
    for name, weight in stored.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        del coded[name]
        coded[f"{name}_blocks"], coded[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    return coded, plain, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def _pack_quantized(stored: Tensors) -> tuple[Tensors, Tensors, dict[str, Any]]:
    coded, plain = dict(stored), dict(stored)
    settings = {"num_bits": 4, "strategy": "group", "group_size": 32}
    for name, weight in stored.items():
        if ".mlp.experts." in name:
            tensors, plain[name], config = _in_words(weight, settings, torch.bfloat16)
            del coded[name]
            coded.update((f"{name.removesuffix('.weight')}.{part}", tensor) for part, tensor in tensors.items())
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    return coded, plain, {**config, "ignore": ignored}


def _in_words(weight: torch.Tensor, weights: Job, dtype: torch.dtype) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """The tensors of a weight in words, what the library restores, and the configuration."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    settings = QuantizationArgs(type="int", **weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, -1, settings.group_size or columns)
    scale, zero_point = calculate_qparams(groups.amin(2), groups.amax(2), settings)
    state = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype), "weight_zero_point": zero_point}
    coded = PackedQuantizationCompressor.compress(state, scheme)
    restored = PackedQuantizationCompressor.decompress(coded, scheme)["weight"]
    config = QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized").model_dump(mode="json")
    return coded, restored, config


def words(job: Job) -> dict[str, Any]:
    torch.manual_seed(job["seed"])
    coded, restored, config = _in_words(torch.randn(job["shape"]) + 0.3, job["weights"], getattr(torch, job["dtype"]))
    directory = Path(job["to"])
    directory.mkdir(parents=True)
    save_file({f"a.{name}": each.contiguous() for name, each in coded.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "quantization_config": config}))
    types = ("float32", "bfloat16", "float16") if job["dtype"] == "float32" else (job["dtype"],)
    return {"stored": sorted(coded), **{name: _hash(restored.to(getattr(torch, name))) for name in types}}


def int8(job: Job) -> dict[str, Any]:
    from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(job["seed"])
    settings = QuantizationArgs(num_bits=8, type="int", **job["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    rows, columns = 48, 96
    weight = torch.randn(rows, columns) + 0.3
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, settings.group_size),
        "block": settings.block_structure,
    }[settings.strategy]
    blocks = weight.reshape(rows // height, height, columns // width, width)
    scale, zero_point = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), settings)
    if settings.strategy == "tensor":
        scale, zero_point = scale.reshape(1), zero_point.reshape(1)
    scale = scale.to(getattr(torch, job["dtype"]))
    coded = IntQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}, scheme
    )
    restored = IntQuantizationCompressor.decompress(coded, scheme)["weight"]
    directory = Path(job["to"])
    directory.mkdir(parents=True)
    save_file({f"a.{name}": each.contiguous() for name, each in coded.items()}, directory / "model.safetensors")
    config = QuantizationConfig(config_groups={"group_0": scheme}, format="int-quantized").model_dump(mode="json")
    (directory / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "quantization_config": config}))
    types = ("float32", "bfloat16") if job["dtype"] == "float32" else (job["dtype"],)
    return {"stored": sorted(coded), **{name: _hash(restored.to(getattr(torch, name))) for name in types}}


def dequantise(job: Job) -> dict[str, Any]:
    directory, dtype = Path(job["directory"]), getattr(torch, job["dtype"])
    stored = _read(directory)
    weights = [name for name in stored if f"{name}_scale_inv" in stored]
    actual: dict[str, Any] = {}
    if job["by"] == "torch":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

        state = {name: torch.empty(stored[name].shape, dtype=dtype) for name in weights}
        reader = QuantizedHuggingFaceStorageReader(str(directory), target_dtype=dtype, block_size=BLOCK)
        dcp.load(state, storage_reader=reader, no_dist=True)
        return {name: _hash(tensor) for name, tensor in state.items()}
    for name in weights:
        try:
            actual[name] = _hash(_by(job["by"], stored[name], stored[f"{name}_scale_inv"], dtype))
        except ValueError as error:
            actual[name] = str(error)
    return actual


def _by(library: str, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if library == "compressed-tensors":
        from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

        one = FP8BlockDequantizer(weight_block_size=(BLOCK, BLOCK), dtype=dtype)
        return one._create_dequantized_weight(weight, scale)
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)


def _read(directory: Path) -> Tensors:
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def _hash(tensor: torch.Tensor) -> Any:
    return described(tensor.contiguous().view(torch.uint8).numpy())


if __name__ == "__main__":
    serve(lambda job: {"quantise": quantise, "int8": int8, "words": words, "dequantise": dequantise}[job["do"]](job))
