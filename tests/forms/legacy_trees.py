"""Files of ``torch.save`` and legacy trees of random models, made with NumPy and zipfile."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.formats.pickles import NAMESPACE, PickledInstance, inert, inert_class, pickled

Array = npt.NDArray[Any]
_STORAGES = {"uint16": "torch.BFloat16Storage", "float32": "torch.FloatStorage"}


class Strided:
    """An array that is stored with its own strides, as `numpy.transpose` gives them."""

    def __init__(self, array: Array) -> None:
        self.array = array


class OnNpu:
    """An array of an NPU, as old versions of torch_npu save one."""

    def __init__(self, array: Array) -> None:
        self.array = array


def write_pt(path: Path, state: Any) -> None:
    """Write a file in which each array of a nested state is a tensor with a storage of its own."""
    storages: list[bytes] = []

    def described(value: Any) -> Any:
        if isinstance(value, (np.ndarray, Strided, OnNpu)):
            array = value if isinstance(value, np.ndarray) else value.array
            strided = isinstance(value, Strided)
            memory = array.T if strided else array
            storages.append(np.ascontiguousarray(memory).tobytes())
            kind = inert_class(_STORAGES[array.dtype.name])
            location = "npu:0" if isinstance(value, OnNpu) else "cpu"
            storage = PickledInstance(("storage", kind, str(len(storages) - 1), location, array.size))
            in_order = np.cumprod((1, *reversed(memory.shape[1:]))).tolist()[::-1] if memory.ndim else []
            strides = tuple(reversed(in_order)) if strided else tuple(in_order)
            args = (storage, 0, tuple(array.shape), strides, False, inert("collections.OrderedDict"))
            if isinstance(value, OnNpu):
                return inert("torch_npu.utils.storage._rebuild_npu_tensor", *args, 2)
            return inert("torch._utils._rebuild_tensor_v2", *args)
        if isinstance(value, Mapping):
            return {key: described(each) for key, each in value.items()}
        return [described(each) for each in value] if isinstance(value, list) else value

    data = pickled(described(state))
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", b"little")
        for number, content in enumerate(storages):
            archive.writestr(f"archive/data/{number}", content)
        archive.writestr("archive/version", b"3\n")


def write_rank(directory: Path, name: str, models: list[dict[str, Any]], args: Mapping[str, Any], **more: Any) -> None:
    """Write the file of a rank.

    Args:
        directory: the tree.
        name: of the rank's directory.
        models: the tensors of each model chunk.
        args: arguments of the run.
        more: further entries of the file.
    """
    names = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
    state: dict[str, Any] = {"args": inert(NAMESPACE, state=dict(args)), "checkpoint_version": 3.0, "iteration": 1}
    write_pt(directory / name / "model_optim_rng.pt", {**state, **dict(zip(names, models)), **more})


def values(seed: int, *shape: int, dtype: str | None = None) -> Array:
    """Random bits of BFloat16, or random numbers of FP32, that are all finite."""
    random = np.random.default_rng(seed)
    if dtype == "float32":
        return random.standard_normal(shape).astype(np.float32)
    return (random.integers(0, 1 << 14, shape) + (1 << 13)).astype(np.uint16)
