"""Quantised weights as BFloat16: against copying the result, and against torch and whole files."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.measure import (
    COMPARED,
    Compared,
    Run,
    Section,
    directory_in,
    memory_backed,
    pairs,
    remove,
    reshard,
    run,
)

ROOT = Path(__file__).resolve().parent.parent
TORCH = ROOT / ".venv-conformance-transformers" / "bin" / "python"
PAIRS = 4
SCRIPT_PAIRS = 2
FILES = 3
MATRICES = 6
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
    written = MATRICES * ROWS * COLUMNS * 2
    section.say(
        f"`convert --dequantize BFloat16` of {MATRICES} matrices of {ROWS} x {COLUMNS} in {FILES} files, against `cp "
        "-r` of the result. The last columns are bytes written per second of processor time of all threads: the best "
        "run of reshard, and of `cp`."
    )
    section.table("scheme", "files on", *COMPARED, "per core", "cp")
    for scheme in SCHEMES:
        for on, base in (("memory", memory_backed()), ("disk", directory_in(None))):
            with base as place:
                write(place / "src", scheme)
                words = reshard("convert", place / "src", place / "out", "--dequantize", "BFloat16", "--quiet")
                run(words)
                (place / "out").rename(place / "pattern")
                copy = ["cp", "-r", place / "pattern", place / "copied"]
                compared, *rates = _compared(place, words, copy, PAIRS)
                section.row(scheme.name, on, *compared.cells(), *(f"{written / rate / 1e9:.2f} GB/s" for rate in rates))
    section.say(
        "Against torch: a script like those that are published with models, `benchmarks/whole_files.py`, on the CPU. "
        "It loads files whole. Files are in memory."
    )
    if not TORCH.exists():
        section.say("Skipped: there is no environment with torch; `make conformance-transformers` makes one.")
        return section
    section.table("scheme", *COMPARED)
    with memory_backed() as place:
        write(place / "src", SCHEMES[0])
        words = reshard("convert", place / "src", place / "out", "--dequantize", "BFloat16", "--quiet")
        script = [TORCH, Path(__file__).with_name("whole_files.py"), place / "src", place / "copied"]
        compared, _, _ = _compared(place, words, script, SCRIPT_PAIRS)
        remove(place / "out", place / "copied")
        run(words)
        run(script)
        assert _tensors(place / "out") == _tensors(place / "copied")
        section.row(SCHEMES[0].name, *compared.cells())
    return section


def _compared(
    place: Path, ours: Sequence[object], theirs: Sequence[object], count: int
) -> tuple[Compared, float, float]:
    """Two commands in pairs, neither with the output of the other beside it, and the least processor time of each."""
    least = [math.inf, math.inf]

    def measured(number: int, words: Sequence[object]) -> Run:
        remove(place / "out", place / "copied")
        result = run(words)
        least[number] = min(least[number], result.cpu)
        return result

    return pairs(lambda: measured(0, ours), lambda: measured(1, theirs), count), least[0], least[1]


def _tensors(directory: Path) -> dict[str, bytes]:
    """Hashes of the tensors of a directory."""
    hashes: dict[str, bytes] = {}
    for path in directory.glob("*.safetensors"):
        data = memoryview(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(bytes(data[8:start])).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                hashes[name] = hashlib.sha256(data[start + low : start + high]).digest()
    return hashes


def write(directory: Path, scheme: Scheme) -> None:
    """Write a Hugging Face directory of random codes."""
    directory.mkdir()
    random = np.random.default_rng(1)
    places: dict[str, str] = {}
    for first in range(0, MATRICES, MATRICES // FILES):
        name = f"model-{first // (MATRICES // FILES) + 1:05}-of-{FILES:05}.safetensors"
        tensors = {}
        for number in range(first, first + MATRICES // FILES):
            codes = random.integers(0, 256, (ROWS, COLUMNS // scheme.per_byte), dtype="u1")
            codes[(codes & 0x7F) == 0x7F] = 0
            counts = tuple(-(-size // block) for size, block in zip((ROWS, COLUMNS), scheme.block))
            # Scales of models use all digits of Float32.
            scales = random.integers(100, 130, counts, "u1")
            if scheme.scale[1] == "f4":
                scales = random.uniform(1e-4, 1e-3, counts).astype("f4")
            for end, dtype, array in zip(scheme.names, (scheme.dtype, scheme.scale[0]), (codes, scales)):
                tensors[f"model.{number}{end}"] = dtype, array
        places.update(dict.fromkeys(tensors, name))
        _write_file(directory / name, tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {"torch_dtype": "bfloat16", "quantization_config": scheme.config}
    (directory / "config.json").write_text(json.dumps(config))


def _write_file(path: Path, tensors: dict[str, tuple[str, npt.NDArray[Any]]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(array.tobytes() for _, array in tensors.values())
