"""MindFormers' own saving and loading of Checkpoint 2.0, on a CPU and without a cluster.

``python -m tests.conformance.workers.mindformers DIRECTORY``: DIRECTORY holds the package `mindformers` of one
version. Only `mindformers.checkpoint` and what it imports is loaded, as it is; its one stand-in is the context that
a training run would have set up, which is asked for the mode alone (graph). Ranks are threads, see `world`.

Jobs; a layout is ``{"device_matrix", "tensor_map", "rank_list"}`` in the terms of metadata.json:

* ``{"do": "load", "checkpoint", "ranks", "world", "tensors": {name: {"dtype", "shape", "layout"}}, "optimizer"}``:
  `load_checkpoint` into a network of every rank of `ranks` that holds its slices; with names in `optimizer`, into one
  that has these states and `global_step` as well. Answers ``{rank: {name: {"shape", "sha256"}}}``.
* ``{"do": "gather", "checkpoint", "tensors": {name: {"dtype", "shape"}}, "file"}``: `load_checkpoint` into a network on
  one device, which MindSpore's `save_checkpoint` then writes as ``FILE.safetensors``.
* ``{"do": "save", "root", "full": file, "world", "layouts": {name: layout}, "optimizer": [name], "iteration",
  "prefix", "remove_redundancy"}``: `save_checkpoint` as every rank, as the trainer's callback calls it. The tensors of
  `full` without a layout are values that every rank has.
"""

from __future__ import annotations

import importlib
import inspect
import string
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mindspore
import mindspore.parallel.strategy
import numpy as np

from tests.conformance.workers import tensors, world
from tests.conformance.workers.protocol import Job, described, serve

_PACKAGES = ("", ".tools", ".utils", ".core", ".core.context", ".pynative", ".pynative.pet")

#: What the compiler would say of the parameters of every rank: {rank: {name: [layout, dtype, shape]}}.
_strategy: dict[int, dict[str, list[Any]]] = {}


def main(directory: Path) -> None:
    """Answer the jobs on standard input with the package in `directory`."""
    world.install()
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.parallel.strategy.get_strategy_metadata = lambda network, rank_id=None: _strategy
    mindspore.parallel.strategy.get_current_strategy_metadata = lambda network: {0: _strategy[world.rank()]}
    _shorten(directory)
    checkpoint = importlib.import_module("mindformers.checkpoint.checkpoint")
    serve(lambda job: {"load": load, "gather": gather, "save": save}[job["do"]](checkpoint, job))


def _shorten(directory: Path) -> None:
    """Make the packages above `mindformers.checkpoint` mere directories, so that nothing else is imported."""
    for name in _PACKAGES:
        package = types.ModuleType(f"mindformers{name}")
        package.__path__ = [str(directory.joinpath("mindformers", *name.split(".")[1:]))]
        sys.modules[package.__name__] = package
    context = types.ModuleType("mindformers.core.context.build_context")
    context.get_context = {"mode": mindspore.GRAPH_MODE}.__getitem__  # type: ignore[attr-defined]
    sys.modules[context.__name__] = context
    utils = importlib.import_module("mindformers.tools.utils")
    sys.modules["mindformers.tools"].get_output_root_path = utils.get_output_root_path  # type: ignore[attr-defined]


class Holder(mindspore.nn.Cell):  # type: ignore[misc]
    """A network or an optimizer of which only the parameters matter.

    After a compilation a rank has the parameters of every pipeline stage; of those of other stages, `absent`,
    it has no slices.
    """

    def __init__(self, parameters: Mapping[str, Any], absent: Iterable[str] = ()) -> None:
        super().__init__(auto_prefix=False)
        nothing = mindspore.Tensor(np.zeros(1), mindspore.float32)
        for name, value in (*parameters.items(), *((name, nothing) for name in absent)):
            parameter = mindspore.Parameter(value, name=name)
            # What the compiler leaves behind in a parallel job; only sliced parameters are saved then.
            parameter.param_info.is_param_init = True
            parameter.sliced = name in parameters
            self.insert_param_to_cell(name, parameter, check_name_contain_dot=False)

    def convert_name(self, name: str) -> str:
        """The interface that 1.8.0 expects of a network: the checkpoint's names are the network's own."""
        return name

    def convert_concat_name(self, name: str) -> str:
        return name


def layout_of(plain: Mapping[str, Any]) -> Any:
    """MindSpore's object for a layout as metadata.json has it."""
    matrix = tuple(plain["device_matrix"])
    names = tuple(string.ascii_lowercase[: len(matrix)])

    def axis(number: int) -> str:
        return "None" if number == -1 else names[-1 - number]

    parts = [tuple(map(axis, part)) if isinstance(part, list) else axis(part) for part in plain["tensor_map"]]
    return mindspore.parallel.Layout(matrix, names, list(plain["rank_list"]))(*parts)


def area_of(plain: Mapping[str, Any], shape: list[int], rank: int) -> tuple[slice, ...]:
    """The place of a rank's slice according to MindFormers."""
    reshard = importlib.import_module("mindformers.checkpoint.reshard")
    area = reshard.infer_slice_area_by_rank(
        tuple(plain["device_matrix"]), plain["tensor_map"], plain["rank_list"].index(rank), tuple(shape)
    )
    return tuple(slice(start, stop) for start, stop in area)


def _state_strategy(layouts: Mapping[str, Any], shapes: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    """Replace the layouts that the compiler reports."""
    _strategy.clear()
    _strategy.update({rank: {} for rank in range(world.size())})
    for name, plain in layouts.items():
        entry = [layout_of(plain), dtypes[name], list(shapes[name])]
        for rank in plain["rank_list"]:
            _strategy[rank][name] = entry


def load(checkpoint: Any, job: Job) -> dict[str, Any]:
    """Load into networks of minus ones, and return their contents."""
    world.become(world.World(job["world"]))
    contents = job["tensors"]
    _state_strategy(
        {name: entry["layout"] for name, entry in contents.items()},
        {name: entry["shape"] for name, entry in contents.items()},
        {name: str(tensors.dtype_of(entry["dtype"])).lower() for name, entry in contents.items()},
    )
    answer = {}
    for rank in job["ranks"]:
        world.as_rank(rank)
        model: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for name, entry in contents.items():
            if rank in entry["layout"]["rank_list"]:
                area = area_of(entry["layout"], entry["shape"], rank)
                shape = [part.stop - part.start for part in area]
                empty = mindspore.Tensor(np.zeros(shape) - 1, tensors.dtype_of(entry["dtype"]))
                (states if name in job["optimizer"] else model)[name] = empty
        network, optimizer = Holder(model), None
        if job["optimizer"]:
            states.setdefault("global_step", mindspore.Tensor([-1], mindspore.int32))
            optimizer = Holder(states)
        checkpoint.load_checkpoint(job["checkpoint"], network, optimizer)
        loaded = {**network.parameters_dict(), **(optimizer.parameters_dict() if optimizer else {})}
        answer[str(rank)] = {name: described(tensors.plain(value)) for name, value in loaded.items()}
    return answer


def gather(checkpoint: Any, job: Job) -> None:
    """Load whole tensors, and save them."""
    world.become(world.World(1))
    whole = {
        name: mindspore.Tensor(np.zeros(entry["shape"]), tensors.dtype_of(entry["dtype"]))
        for name, entry in job["tensors"].items()
    }
    network = Holder(whole)
    checkpoint.load_checkpoint(job["checkpoint"], network)
    mindspore.save_checkpoint(network, job["file"], format="safetensors")


def save(checkpoint: Any, job: Job) -> None:
    """Save as every rank at once."""
    ranks = world.World(job["world"])
    world.become(ranks)
    full = tensors.read(job["full"])
    layouts = job["layouts"]
    _state_strategy(
        layouts,
        {name: array.shape for name, (_, array) in full.items()},
        {name: str(tensors.dtype_of(dtype)).lower() for name, (dtype, _) in full.items()},
    )

    def as_one(rank: int) -> None:
        # The mode is kept per thread.
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
        model: dict[str, Any] = {}
        states: dict[str, Any] = {}
        absent: list[str] = []
        for name, (dtype, array) in full.items():
            if name in layouts:
                if rank not in layouts[name]["rank_list"]:
                    absent.append(name)
                    continue
                array = array[area_of(layouts[name], list(array.shape), rank)]
            (states if name in job["optimizer"] else model)[name] = tensors.tensor(dtype, array)
        network = Holder(model, [name for name in absent if name not in job["optimizer"]])
        everything = Holder({**model, **states}, absent)
        _save_one(checkpoint, job, network, everything)

    ranks.run(as_one)


def _save_one(checkpoint: Any, job: Job, network: Any, everything: Any) -> None:
    """Save one rank; `everything` stands for the trainer's network, and for the optimizer, which has weights too."""
    optimizer = everything if job["optimizer"] else None
    names = None if optimizer else set(network.parameters_dict()).__contains__
    metas = None
    if world.size() > 1:
        sharded = importlib.import_module("mindformers.checkpoint.sharded_tensor")
        if hasattr(sharded, "get_all_sharded_tensor_on_rank0"):
            metas = sharded.get_all_sharded_tensor_on_rank0(
                network=everything, filter_func=names, optimizer=optimizer, saved_cells=[network, optimizer]
            )
        else:
            metas = sharded.get_all_sharded_tensor(network=everything, filter_func=names)
    common = checkpoint.CommonInfo(
        epoch_num=1, step_num=job["iteration"], global_step=job["iteration"], global_batch_size=16
    )
    options: dict[str, Any] = {}
    if "current_ckpt_step_list" in inspect.signature(checkpoint.save_checkpoint).parameters:
        options["current_ckpt_step_list"] = []
    checkpoint.save_checkpoint(
        iteration=job["iteration"],
        network=network,
        optimizer=optimizer,
        common_info=common,
        user_prefix=job["prefix"],
        save_checkpoint_path=job["root"],
        sharded_tensor_metas=metas,
        remove_redundancy=job["remove_redundancy"],
        **options,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
