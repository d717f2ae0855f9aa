"""Dequantising block FP8 file by file with torch, in the way of the scripts that are published with models.

A stand-in for them on CPUs: their arithmetic needs a GPU. As they do, it loads files whole, keeps the last two for
scales of other files, and writes a file for each.

    python benchmarks/whole_files.py SOURCE TARGET
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BLOCK = 128
MAX_LOADED = 2


def dequantise(codes: Any, scales: Any) -> Any:
    """The BFloat16 of FP8 codes with a scale per block."""
    import torch

    rows, columns = codes.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (codes.to(torch.float32) * spread).to(torch.bfloat16)


def main(source: Path, target: Path) -> None:
    """Dequantise a directory."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    places = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    loaded: dict[str, Any] = {}

    def tensors_of(name: str) -> Any:
        if name not in loaded:
            loaded[name] = load_file(source / name)
        return loaded[name]

    written = {}
    for name in sorted(set(places.values())):
        contents = {}
        for key, tensor in tensors_of(name).items():
            scale = f"{key}_scale_inv"
            if scale in places:
                contents[key] = dequantise(tensor, tensors_of(places[scale])[scale])
            elif not key.endswith("_scale_inv"):
                contents[key] = tensor
        save_file(contents, target / name)
        written.update(dict.fromkeys(contents, name))
        del contents, tensor
        while len(loaded) > MAX_LOADED:
            del loaded[next(iter(loaded))]
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": written}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
