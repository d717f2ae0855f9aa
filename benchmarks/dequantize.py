"""Quantised weights as BFloat16, against copying the result."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import COMPARED, Section, against_copy, memory_backed, remove, reshard, run

PAIRS = 4
MATRICES = 8
ROWS, COLUMNS = 8192, 7168


class Scheme(NamedTuple):
    """How matrices are quantised.

    Attributes:
        name: of the row.
        dtype: safetensors' name of the type of the codes.
        per_byte: codes in a byte.
        scale: type of the scales, for safetensors and for NumPy.
        block: elements per scale in both dimensions.
        names: ends of the names of codes and scales.
        config: `quantization_config`.
    """

    name: str
    dtype: str
    per_byte: int
    scale: tuple[str, str]
    block: tuple[int, int]
    names: tuple[str, str]
    config: dict[str, Any]


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROWWISE = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"strategy": "channel"}}}}
SCHEMES = (
    Scheme(
        "FP8 in blocks of 128 x 128", "F8_E4M3", 1, ("F32", "f4"), (128, 128), (".weight", ".weight_scale_inv"), FP8
    ),
    Scheme("Int8 with a scale per row", "I8", 1, ("F32", "f4"), (1, COLUMNS), (".weight", ".weight_scale"), ROWWISE),
    Scheme("E2M1 with a scale per 32", "I8", 2, ("F8_E8M0", "u1"), (1, 32), (".weight", ".scale"), FP8),
)


def measure() -> Section:
    """Measure all schemes."""
    section = Section("Quantised weights")
    section.say(
        f"`convert --dequantize BFloat16` of {MATRICES} matrices of {ROWS} x {COLUMNS}, against `cp -r` of the result, "
        "in memory-backed files. The last column is bytes written per second of processor time."
    )
    section.table("scheme", *COMPARED, "per core")
    for scheme in SCHEMES:
        with memory_backed() as place:
            write(place / "src", scheme)
            words = reshard("convert", place / "src", place / "out", "--dequantize", "BFloat16", "--quiet")
            found = against_copy(words, place / "out", PAIRS)
            remove(place / "out")
            written = MATRICES * ROWS * COLUMNS * 2
            section.row(scheme.name, *found.cells(), f"{written / run(words).cpu / 1e9:.2f} GB/s")
    return section


def write(directory: Path, scheme: Scheme) -> None:
    """Write a Hugging Face directory of random codes."""
    directory.mkdir()
    random = np.random.default_rng(1)
    header: dict[str, Any] = {}
    contents: list[bytes] = []
    end = 0
    for number in range(MATRICES):
        codes = random.integers(0, 256, (ROWS, COLUMNS // scheme.per_byte), dtype="u1")
        codes[(codes & 0x7F) == 0x7F] = 0
        counts = tuple(-(-size // block) for size, block in zip((ROWS, COLUMNS), scheme.block))
        scales = random.integers(100, 130, counts).astype(scheme.scale[1])
        tensors = ((scheme.dtype, codes), (scheme.scale[0], scales))
        for name, (dtype, array) in zip(scheme.names, tensors):
            header[f"model.{number}{name}"] = {
                "dtype": dtype,
                "shape": list(array.shape),
                "data_offsets": [end, end + array.nbytes],
            }
            contents.append(array.tobytes())
            end += array.nbytes
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(contents)
    config = {"torch_dtype": "bfloat16", "quantization_config": scheme.config}
    (directory / "config.json").write_text(json.dumps(config))
