"""MindSpore accepts arrays of reshard.open, and reshard.open reads checkpoints of MindSpore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.asking import open_checkpoint
from tests.conformance.mindspore_files import assert_same, load_tree, mindspore, plain, save_tree
from tests.running import done
from tests.trees import layout, single, write_strategy

pytestmark = pytest.mark.filterwarnings("default")

TYPES = ["float32", "float16", "bfloat16"]
#: Halves of rows to quarters of columns.
SOURCE = single({"weight": layout([2], [0, -1]), "bias": layout([2], [-1])})
TARGET = single({"weight": layout([4], [-1, 0]), "bias": layout([4], [-1])})


class Net(mindspore.nn.Cell):  # type: ignore[misc]
    """A network of two parameters."""

    def __init__(self, columns: int, dtype: Any) -> None:
        super().__init__()
        self.weight = mindspore.Parameter(mindspore.Tensor(np.zeros((6, columns)), dtype), name="weight")
        self.bias = mindspore.Parameter(mindspore.Tensor(np.zeros(5), dtype), name="bias")


def numbers(dtype: str) -> dict[str, Any]:
    random = np.random.default_rng(3)
    kind = getattr(mindspore, dtype)
    return {"weight": random.standard_normal((6, 8)), "bias": mindspore.Tensor(random.standard_normal(5), kind)}


def saved(root: Path, dtype: str) -> tuple[Path, Path, Path]:
    kind, full = getattr(mindspore, dtype), numbers(dtype)
    halves = {
        rank: {"weight": mindspore.Tensor(full["weight"][rank * 3 : rank * 3 + 3], kind), "bias": full["bias"]}
        for rank in range(2)
    }
    return save_tree(root / "src", halves), write_strategy(root / "old", SOURCE), write_strategy(root / "new", TARGET)


def parameters(opened: Any) -> dict[str, Any]:
    """What is opened as MindSpore's functions want it."""
    return {name: mindspore.Parameter(array, name=name) for name, array in opened.read_all()}


@pytest.mark.parametrize("dtype", TYPES)
def test_a_network_loads_full_tensors_and_slices_of_a_rank(dtype: str, tmp_path: Path) -> None:
    source, old, new = saved(tmp_path, dtype)
    kind = getattr(mindspore, dtype)
    net = Net(8, kind)
    with open_checkpoint(source, src_strategy=old) as opened:
        assert mindspore.load_param_into_net(net, parameters(opened)) == ([], [])
    full = {"weight": plain(mindspore.Tensor(numbers(dtype)["weight"], kind)), "bias": plain(numbers(dtype)["bias"])}
    assert_same({name: plain(value) for name, value in net.parameters_dict().items()}, full)
    done("convert", source, tmp_path / "dst", "--src-strategy", old, "--dst-strategy", new)
    converted = load_tree(tmp_path / "dst")
    for rank in range(4):
        net = Net(2, kind)
        with open_checkpoint(source, src_strategy=old, dst_strategy=new, rank=rank) as opened:
            assert mindspore.load_param_into_net(net, parameters(opened), strict_load=True) == ([], [])
        assert_same({name: plain(value) for name, value in net.parameters_dict().items()}, converted[rank])
