"""MindSpore's own compiler, on a machine without Ascend devices: which strategy it writes for one rank of a cluster.

A compile decides all layouts before it needs a device. MS_DEV_PRECOMPILE_ONLY ends it there, and three things that it
asks of a cluster are answered here: what device it is for, how many devices there are, and how many are in a group.

Job, one per process, since what a compile leaves behind would be the next one's::

    {"rank", "devices", "stages", "file", "optimizer": bool, "shards": {option of parallel_optimizer_config} | null,
     "operators": [operator, ...]}

An operator has one weight, and comes after the one before it::

    {"kind", "weight", "shape", "dtype", "shard": strategies of its inputs, "stage", "trained", "opted_out"}

A strategy has a number per dimension, or is ``{"matrix", "names", "map"}`` of the Layout interface. Between
operators there is a matrix of tokens and features, before the first a column of tokens. Kinds:

* ``gather``: rows of a table; inputs are table and tokens.
* ``matmul``: features by a weight (out, in); inputs are data and weight.
* ``left``: the same with the weight as left operand; inputs are weight and data.
* ``mul``: features times the weight; inputs are data and weight.
* ``experts``: a weight (experts, in, out); inputs are data in as many parts, and weight.
* ``morph``: as ``matmul``, in a Morph, whose shard is a Layout of data, weight and result.
* ``morph added``: the sum of the weight is added to all features, in a Morph.

Returns what the compiler wrote into ``file``; nothing if it refuses, and its error has the reason.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import Any

os.environ["MS_DEV_PRECOMPILE_ONLY"] = "1"
os.environ.setdefault("GLOG_v", "3")

import mindspore
import numpy as np
from mindspore import nn, ops
from mindspore._c_expression import AutoParallelContext, MSContext, ms_ctx_param

from tests.conformance.workers.protocol import Job, serve

_MICRO_BATCHES = 4
_TOKENS = 1920
_DEVICE = b"Ascend"
# What libstdc++ keeps before the characters of a string: length, capacity, references. So many are never given back.
_HEADER = struct.Struct("QQq")
_ours = ctypes.create_string_buffer(_HEADER.pack(len(_DEVICE), len(_DEVICE), 1 << 20) + _DEVICE)


def pretend_ascend() -> None:
    """Set the compiler's target to Ascend, which this build of MindSpore refuses as an option.

    The context's string is pointed at another one; MindSpore's own option has the new value afterwards.
    """
    context = MSContext.get_instance()
    start = ctypes.c_void_p.from_address(id(context) + object.__basicsize__).value
    assert start is not None
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for offset in range(0, 1024, 8):
            field = ctypes.c_uint64.from_address(start + offset)
            before = field.value
            try:
                actual = os.pread(memory.fileno(), _HEADER.size + 4, before - _HEADER.size)
            except (OSError, OverflowError):
                continue
            if not actual.endswith(b"CPU\0") or _HEADER.unpack(actual[:-4])[0] != 3:
                continue
            field.value = ctypes.addressof(_ours) + _HEADER.size
            if context.get_param(ms_ctx_param.device_target) == _DEVICE.decode():
                return
            field.value = before
    raise RuntimeError("the device target was not found in MindSpore's context")


def answer_for_groups(devices: int) -> None:
    """Say how large groups are; the compiler's names of them begin with it."""

    def size(group: str = "") -> int:
        first = str(group).partition("-")[0]
        return int(first) if first.isdecimal() else devices

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("mindspore") and hasattr(module, "get_group_size"):
            module.get_group_size = size  # type: ignore[attr-defined]
    # The compiler does not compare the number of devices with those that it sees.
    AutoParallelContext.get_instance().set_hccl_test_avaible(True)


def _strategy(operator: Any) -> Any:
    if isinstance(operator, list):
        return tuple(operator)
    layout = mindspore.parallel.Layout(tuple(operator["matrix"]), tuple(operator["names"]))
    return layout(*(tuple(part) if isinstance(part, list) else part for part in operator["map"]))


def _morph(operator: Job) -> Any:
    """An operator that the compiler does not look into: the layouts of its ends are stated."""
    product, total = ops.MatMul(transpose_b=True), ops.ReduceSum()

    def multiplied(data: Any, weight: Any) -> Any:
        return product(data, weight)

    def added(data: Any, weight: Any) -> Any:
        return data + total(weight)

    def multiplied_shape(data: Any, weight: Any) -> Any:
        return [data[0], weight[0]]

    def first(data: Any, weight: Any) -> Any:
        return data

    adds = operator["kind"].endswith("added")
    data, weight, result = map(_strategy, operator["shard"])
    morph = ops.Morph(added if adds else multiplied, first if adds else multiplied_shape, first)
    morph.add_prim_attr("self_define_shard", True)
    return morph.shard(in_strategy=(data, weight), out_strategy=(result,))


class Operator(nn.Cell):  # type: ignore[misc]
    """An operator with its weight."""

    def __init__(self, said: Job) -> None:
        super().__init__(auto_prefix=False)
        shape = said["shape"]
        self.weight = mindspore.Parameter(
            mindspore.Tensor(np.zeros(shape), getattr(mindspore, said["dtype"])),
            name=said["weight"],
            requires_grad=said["trained"],
            parallel_optimizer=not said["opted_out"],
        )
        self.kind = said["kind"]
        self.shape: tuple[int, ...] = tuple(shape)
        if self.kind.startswith("morph"):
            self.operator = _morph(said)
        else:
            operator = {
                "gather": ops.Gather,
                "matmul": lambda: ops.MatMul(transpose_b=True),
                "left": lambda: ops.MatMul(transpose_b=True),
                "mul": ops.Mul,
                "experts": ops.BatchMatMul,
            }[self.kind]()
            self.operator = operator.shard(tuple(map(_strategy, said["shard"])))
        self.transposed = ops.Transpose()
        self.cast = ops.Cast()
        if said["stage"] is not None:
            self.pipeline_stage = said["stage"]

    def construct(self, data: Any) -> Any:
        weight = self.weight
        if self.kind == "gather":
            return self.cast(self.operator(weight, data, 0), mindspore.float32)
        weight = self.cast(weight, mindspore.float32)
        if self.kind == "left":
            return self.transposed(self.operator(weight, data), (1, 0))
        if self.kind == "experts":
            experts, inside, outside = self.shape
            return self.operator(data.reshape((experts, -1, inside)), weight).reshape((-1, outside))
        return self.operator(data, weight)


class Network(nn.Cell):  # type: ignore[misc]
    """Operators one after the other, and a loss."""

    def __init__(self, operators: list[Job]) -> None:
        super().__init__(auto_prefix=False)
        self.operators = nn.CellList([Operator(operator) for operator in operators], auto_prefix=False)
        self.loss = ops.ReduceSum()

    def construct(self, tokens: Any) -> Any:
        data = tokens
        for operator in self.operators:
            data = operator(data)
        return self.loss(data)


def compile_for(job: Job) -> None:
    """Compile, and leave the strategy where it is wanted."""
    # Where it fails, it leaves files in the working directory.
    os.chdir(os.path.dirname(job["file"]))
    pretend_ascend()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel",
        full_batch=True,
        device_num=job["devices"],
        global_rank=job["rank"],
        pipeline_stages=job["stages"],
        strategy_ckpt_config={"save_file": job["file"], "only_trainable_params": False},
        enable_parallel_optimizer=job["shards"] is not None,
        parallel_optimizer_config=job["shards"] or {},
    )
    answer_for_groups(job["devices"])
    network: Any = Network(job["operators"])
    weights = network.trainable_params()
    if job["optimizer"]:
        optimizer = nn.AdamWeightDecay(weights)
        if job["stages"] > 1:
            network = nn.PipelineCell(network, _MICRO_BATCHES)
            network = nn.wrap.cell_wrapper._TrainGradAccuStepCell(network, optimizer)
        else:
            network = nn.TrainOneStepCell(network, optimizer)
        network.set_train()
    network.compile(mindspore.Tensor(np.zeros(_TOKENS), mindspore.int32))
    if not os.path.exists(job["file"]):
        raise RuntimeError("the compiler wrote no strategy")


if __name__ == "__main__":
    serve(compile_for)
