"""Quantised weights as BFloat16: processor time against what NumPy and the kernel need, and against torch."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.measure import Cell, Section, compare, directory_in, memory_backed, remove, reshard, run

ROOT = Path(__file__).resolve().parent.parent
TORCH = ROOT / ".venv-conformance-transformers" / "bin" / "python"
RUNS = 2
FILES = 3
# Matrices of the two sizes; a multiple of the files each.
SIZES = (3, 9)
ROWS, COLUMNS = 8192, 7168
# Rows that the limit decodes, and writes, at a time.
TILE_ROWS = 16
BLOCK_ROWS = 128

Words = npt.NDArray[Any]
Decode = Callable[[Words, Words, Words], None]


def _float8(codes: Words, memory: Words, out: Words) -> None:
    words = memory.view("u4")[: codes.size]
    np.copyto(words.view("i4"), codes.view("i1"))
    np.left_shift(words, 20, out=words)
    np.bitwise_and(words, 0x87F00000, out=words)
    _multiply(words, FACTORS[:1].repeat(128, axis=1), out)


def _int8(codes: Words, memory: Words, out: Words) -> None:
    words = memory.view("u4")[: codes.size]
    np.copyto(words.view("f4"), codes.view("i1"))
    _multiply(words, FACTORS[:, :1], out)


def _multiply(words: Words, factors: Words, out: Words) -> None:
    numbers = words.view("f4").reshape(-1, COLUMNS)
    np.multiply(numbers, factors, out=numbers)
    np.add(words, 0x8000, out=words)
    np.right_shift(words, 16, out=words)
    np.copyto(out, words, casting="unsafe")


def _e2m1(codes: Words, memory: Words, out: Words) -> None:
    places, indices = memory[: 8 * codes.size].view("i8"), memory[8 * codes.size :].view("u2")[: codes.size]
    np.copyto(indices, codes)
    np.add(indices, TABLES.repeat(16, axis=1).reshape(-1), out=indices)
    np.copyto(places, indices)
    np.take(PAIRS_OF_ELEMENTS, places, out=out.view("u4"), mode="wrap")


FACTORS = np.random.default_rng(1).uniform(1, 2, (TILE_ROWS, COLUMNS // 128)).astype("f4")
TABLES = np.random.default_rng(1).integers(100, 130, (TILE_ROWS, COLUMNS // 32)).astype("u2") << 8
PAIRS_OF_ELEMENTS = np.arange(1 << 16, dtype="u4")


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
        decode: computes elements of some codes like the scheme, given working memory.
    """

    name: str
    dtype: str
    per_byte: int
    scale: tuple[str, str]
    block: tuple[int, int]
    names: tuple[str, str]
    config: dict[str, Any]
    decode: Decode


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROWWISE = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"strategy": "channel"}}}}
SCHEMES = (
    Scheme(
        "FP8 in blocks of 128 x 128",
        "F8_E4M3",
        1,
        ("F32", "f4"),
        (128, 128),
        (".weight", ".weight_scale_inv"),
        FP8,
        _float8,
    ),
    Scheme(
        "Int8 with a scale per row", "I8", 1, ("F32", "f4"), (1, COLUMNS), (".weight", ".weight_scale"), ROWWISE, _int8
    ),
    Scheme("E2M1 with a scale per 32", "I8", 2, ("F8_E8M0", "u1"), (1, 32), (".weight", ".scale"), FP8, _e2m1),
)


def measure() -> Section:
    """Measure all schemes."""
    section = Section("How fast are quantised weights dequantised?")
    gigabytes = [matrices * ROWS * COLUMNS * 2 / 1e9 for matrices in SIZES]
    section.say(
        f"`convert --dequantize BFloat16`, {gigabytes[1]:.1f} GB written: bytes per second of processor "
        "time, without the start. *Limit*: a loop of the same reads, NumPy calls and writes."
    )
    on_disk = ("disk", SCHEMES[0], directory_in(None))
    for on, scheme, base in (*(("memory", scheme, memory_backed()) for scheme in SCHEMES), on_disk):
        with base as place:
            section.row({"scheme": scheme.name, "files on": on, **_rates(place, scheme, gigabytes)})
    section.say("Against torch on the CPU: `benchmarks/whole_files.py`, like scripts that are published with models.")
    if not TORCH.exists():
        section.say("Skipped: there is no environment with torch; `make conformance-transformers` makes one.")
        return section
    with memory_backed() as place:
        write(place / "src", SCHEMES[0], SIZES[0])
        ours = run(reshard("convert", place / "src", place / "out", "--dequantize", "BFloat16", "--quiet"))
        theirs = run([TORCH, Path(__file__).with_name("whole_files.py"), place / "src", place / "copied"])
        assert _tensors(place / "out") == _tensors(place / "copied")
        section.row({"scheme": SCHEMES[0].name, **compare([ours], [theirs]).row("reshard", "torch")})
    return section


def _rates(place: Path, scheme: Scheme, gigabytes: Sequence[float]) -> dict[str, Cell]:
    """GB/s of processor time, as a part of a row."""
    for matrices in SIZES:
        write(place / str(matrices), scheme, matrices)
    out, copied = place / "out", place / "copied"
    least: dict[tuple[int, tuple[str, ...]], float] = {}
    limit = copy = math.inf
    jobs: Sequence[tuple[str, ...]] = (("-j", "1"), ())
    for _ in range(RUNS):
        for option in jobs:
            for matrices in SIZES:
                remove(out)
                words = ("convert", place / str(matrices), out, "--dequantize", "BFloat16", "--quiet", *option)
                key = matrices, option
                least[key] = min(least.get(key, math.inf), run(reshard(*words)).cpu)
        copy = min(copy, run(["cp", "-r", out, copied]).cpu)
        remove(out, copied)
        limit = min(limit, _limit(place / str(SIZES[1]), copied, scheme))
        remove(copied)
    small, large = SIZES
    more = gigabytes[1] - gigabytes[0]
    rates = {
        "-j 1, GB/s": gigabytes[1] / least[large, jobs[0]],
        "whole, GB/s": gigabytes[1] / least[large, jobs[1]],
        "marginal -j 1, GB/s": more / (least[large, jobs[0]] - least[small, jobs[0]]),
        "marginal, GB/s": more / (least[large, jobs[1]] - least[small, jobs[1]]),
        "limit, GB/s": gigabytes[1] / limit,
        "cp, GB/s": gigabytes[1] / copy,
    }
    return {column: round(rate, 2) for column, rate in rates.items()}


def _limit(directory: Path, target: Path, scheme: Scheme) -> float:
    """Processor time of reading codes, NumPy calls like those of the scheme, and writing, in seconds."""
    tile = TILE_ROWS * COLUMNS
    # Pages like those that reshard uses, at the start of a page.
    memory = np.frombuffer(mmap.mmap(-1, 5 * tile), "u1")
    out = np.frombuffer(mmap.mmap(-1, 2 * BLOCK_ROWS * COLUMNS), "u2")
    # Codes are at the end of the memory of their elements.
    codes = out.view("u1")[-(len(out) // scheme.per_byte) :]
    step = tile // scheme.per_byte
    target.mkdir()
    started = process_time()
    for path in directory.glob("*.safetensors"):
        with open(path, "rb", 0) as source, open(target / path.name, "wb", 0) as written:
            while source.readinto(codes.data) == len(codes):
                with np.errstate(all="ignore"):
                    for first in range(0, len(codes), step):
                        low = first * scheme.per_byte
                        scheme.decode(codes[first : first + step], memory, out[low : low + tile])
                written.write(out.data)
    return process_time() - started


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


def write(directory: Path, scheme: Scheme, matrices: int) -> None:
    """Write a Hugging Face directory of random codes."""
    directory.mkdir()
    random = np.random.default_rng(1)
    places: dict[str, str] = {}
    for first in range(0, matrices, matrices // FILES):
        name = f"model-{first // (matrices // FILES) + 1:05}-of-{FILES:05}.safetensors"
        tensors = {}
        for number in range(first, first + matrices // FILES):
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
