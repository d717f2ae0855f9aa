"""PyTorch's own saving and loading of distributed checkpoints, by processes of gloo on a CPU.

A `mesh` is the number of replicas, of ranks that FSDP2 shards over, and of ranks of tensor parallelism within. Jobs:

* ``{"do": "train", "model", "directory", "form", "mesh"}``: a model of Hugging Face's makes two steps with AdamW, with
  two groups of parameters, and is saved: as ``dcp``, model, optimizer and a step, its weights as ``hf-sharded``, or
  both in files of ranks as ``verl``.
  Answers hashes of all full tensors, and of the logits of one fixed text as ``logits``.
* ``{"do": "start", "model", "directory", "form", "mesh", "optimizer"}``: the same model with other weights loads them,
  and the state of its optimizer. Answers the same.
* ``{"do": "resume", "model", "directory", "form", "mesh"}``: the same model loads weights and optimizer state, all keys
  of which have to be there, and AdamW makes a step with gradients that follow from names. Answers the same hashes.
* ``{"do": "alone", "tensors", "mesh"}``: plain AdamW makes this step from the master copies, moments and step in a file
  of safetensors. Answers the same.
* ``{"do": "save", "directory", "form", "mesh", "tensors"}``: tensors that are made by name, ``{name: [dtype, shape,
  placements]}``, are saved. A placement is the dimension that an axis of the mesh shards, or -1 for a replica.
  Answers hashes of the full tensors.
* ``{"do": "ranks", "directory", "form", "mesh", "tensors"}``: likewise with a layer of FSDP2 and tensor parallelism,
  and a second name of the first tensor.
* ``{"do": "load", "directory", "form", "mesh", "tensors"}``: they are loaded into these placements. Answers the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.conformance.workers.protocol import Job, serve

_SETTINGS: Mapping[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_AXES = ("replicas", "shards", "tensor")


def _on_all_ranks(job: Job) -> dict[str, str]:
    """The answer of rank 0 of a process for every device of the mesh."""
    with tempfile.TemporaryDirectory() as place:
        count = job["mesh"][0] * job["mesh"][1] * job["mesh"][2]
        # A process that is forked has torch loaded, which takes longer than the jobs.
        torch.multiprocessing.start_processes(_rank, (dict(job), place, count), count, start_method="fork")
        answer: dict[str, str] = json.loads(Path(place, "answer").read_text())
        return answer


def _rank(rank: int, job: Job, place: str, count: int) -> None:
    dist.init_process_group("gloo", f"file://{place}/store", rank=rank, world_size=count)
    answer = _JOBS[job["do"]](job, init_device_mesh("cpu", tuple(job["mesh"]), mesh_dim_names=_AXES))
    if rank == 0:
        Path(place, "answer").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _train(job: Job, mesh: DeviceMesh) -> dict[str, str]:
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    _distribute(model, mesh)
    optimizer = _optimizer(model)
    text = torch.arange(24).reshape(2, 12)
    for _ in range(2):
        model(text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = get_model_state_dict(model)
    if job["form"] == "hf-sharded":
        if model.config.tie_word_embeddings:
            # Directories of Hugging Face hold tied weights once.
            del weights["lm_head.weight"]
        _save(job, weights)
        return _hashes(weights) | _logits(model)
    if job["form"] == "verl":
        _save(job, weights)
        _save(job, optimizer.state_dict(), "optim")
        return _hashes(weights) | _logits(model)
    state = get_optimizer_state_dict(model, optimizer)
    _save(job, {"model": weights, "optimizer": state, "step": 2})
    return _hashes(weights) | _state_hashes(state) | _logits(model)


def _start(job: Job, mesh: DeviceMesh) -> dict[str, str]:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(_config(job), dtype=torch.float32)
    _distribute(model, mesh)
    optimizer = _optimizer(model)
    weights = get_model_state_dict(model)
    state = get_optimizer_state_dict(model, optimizer) if job["optimizer"] else {}
    if job["form"] == "hf-sharded":
        _load(job, weights)
    else:
        _load(job, {"model": weights, "optimizer": state} if state else {"model": weights})
    set_model_state_dict(model, weights)
    if state:
        set_optimizer_state_dict(model, optimizer, state)
        state = get_optimizer_state_dict(model, optimizer)
    return _hashes(get_model_state_dict(model)) | _state_hashes(state) | _logits(model)


def _config(job: Job) -> Any:
    return transformers.AutoConfig.from_pretrained(job["model"])


def _resume(job: Job, mesh: DeviceMesh) -> dict[str, str]:
    model = transformers.AutoModelForCausalLM.from_config(_config(job), dtype=torch.float32)
    _distribute(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **_SETTINGS)
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    _load(job, {"model": weights, "optimizer": {"state": state["state"]}})
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, state)
    for name, parameter in model.named_parameters():
        gradient = _gradient(name, parameter.shape)
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    optimizer.step()
    return _hashes(get_model_state_dict(model)) | _state_hashes(get_optimizer_state_dict(model, optimizer))


def _alone(job: Job, mesh: DeviceMesh) -> dict[str, str]:
    held = load_file(job["tensors"])
    step = float(held["global_step"].item())
    masters = {name[len("main_param.") :]: held[name] for name in held if name.startswith("main_param.")}
    weights = {name: torch.nn.Parameter(master) for name, master in masters.items()}
    optimizer = torch.optim.AdamW(weights.values(), **_SETTINGS)
    for name, weight in weights.items():
        moments = {"exp_avg": held[f"adam_m.{name}"], "exp_avg_sq": held[f"adam_v.{name}"]}
        optimizer.state[weight] = {"step": torch.tensor(step), **moments}
        weight.grad = _gradient(name, weight.shape)
    optimizer.step()
    return _hashes(weights) | _state_hashes({"state": {name: optimizer.state[each] for name, each in weights.items()}})


def _gradient(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _distribute(model: Any, mesh: DeviceMesh) -> None:
    layers = model.model.layers
    if mesh["tensor"].size() > 1:
        # The layer's own order: two of columns, one of rows.
        columns = ("gate_proj", "up_proj")
        plan = {f"mlp.{name}": ColwiseParallel() for name in columns} | {"mlp.down_proj": RowwiseParallel()}
        for layer in layers:
            parallelize_module(layer, mesh["tensor"], plan)
    data = mesh["replicas", "shards"] if mesh["replicas"].size() > 1 else mesh["shards"]
    for module in (*layers, model):
        fully_shard(module, mesh=data)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def _logits(model: Any) -> dict[str, str]:
    """Of the model on one device: sums over several are in another order."""
    weights = {name: _full(tensor) for name, tensor in get_model_state_dict(model).items()}
    alone = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    alone.load_state_dict(weights)
    with torch.no_grad():
        logits = alone.eval()(torch.arange(0, model.config.vocab_size, 5)[None]).logits
    return {"logits": _digest(logits)}


def _full_tensors(job: Job) -> dict[str, torch.Tensor]:
    """The tensors of a job, with bytes that follow from their names."""
    tensors = {}
    for name, (dtype, shape, _) in job["tensors"].items():
        kind = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        nbytes = torch.empty(shape, dtype=kind).nbytes
        data = torch.randint(0, 2 if kind == torch.bool else 256, (nbytes,), generator=generator)
        tensors[name] = data.to(torch.uint8).view(kind).reshape(shape)
    return tensors


def _placed(job: Job, mesh: DeviceMesh, full: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The same tensors in their placements; a plain tensor is one that every rank has."""
    tensors: dict[str, Any] = {}
    for name, (_, _, axes) in job["tensors"].items():
        placements: list[Placement] = [Replicate() if axis < 0 else Shard(axis) for axis in axes]
        # gloo sends only some types: every rank cuts its own.
        tensors[name] = distribute_tensor(full[name], mesh, placements, src_data_rank=None) if axes else full[name]
    return tensors


def _save_tensors(job: Job, mesh: DeviceMesh) -> dict[str, str]:
    full = _full_tensors(job)
    _save(job, _placed(job, mesh, full))
    return {name: _digest(tensor) for name, tensor in full.items()}


def _save_with_layer(job: Job, mesh: DeviceMesh) -> dict[str, str]:
    torch.manual_seed(3)
    layer = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False))
    parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(layer, mesh=mesh["shards"])
    cut = {f"layer.{name}": tensor for name, tensor in layer.state_dict().items()}
    full, state = _full_tensors(job), {}
    state.update(_placed(job, mesh, full) | cut)
    full["second.name"], state["second.name"] = (next(iter(each.values())) for each in (full, state))
    _save(job, state)
    return _hashes(full) | _hashes(cut)


def _load_tensors(job: Job, mesh: DeviceMesh) -> dict[str, str]:
    full = _full_tensors(job)
    loaded = _placed(job, mesh, {name: torch.zeros_like(tensor) for name, tensor in full.items()})
    _load(job, loaded)
    expected = _placed(job, mesh, full)
    equal = {name: _digest(_local(loaded[name])) == _digest(_local(expected[name])) for name in full}
    ranks: list[dict[str, bool]] = [{} for _ in range(mesh.size())]
    dist.all_gather_object(ranks, equal)
    return {name: _digest(full[name]) if all(rank[name] for rank in ranks) else "differs" for name in full}


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _save(job: Job, state: dict[str, Any], prefix: str = "model") -> None:
    if job["form"] == "verl":
        os.makedirs(job["directory"], exist_ok=True)
        name = f"{prefix}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
        torch.save(state, os.path.join(job["directory"], name))
    elif job["form"] == "hf-sharded":
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(job["directory"], save_distributed=True))
    else:
        dcp.save(state, checkpoint_id=job["directory"])


def _load(job: Job, state: dict[str, Any]) -> None:
    if job["form"] == "hf-sharded":
        dcp.load(state, storage_reader=HuggingFaceStorageReader(job["directory"]))
    else:
        dcp.load(state, checkpoint_id=job["directory"])


def _state_hashes(state: Mapping[str, Any]) -> dict[str, str]:
    """Of what the optimizer has for each parameter, as ``exp_avg.NAME``."""
    return {
        f"{key}.{name}": digest
        for name, entries in state.get("state", {}).items()
        for key, digest in _hashes(entries).items()
    }


def _hashes(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Of the bytes of full tensors; all ranks have to call it."""
    return {name: _digest(_full(tensor)) for name, tensor in tensors.items()}


def _full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


_JOBS: Mapping[str, Callable[[Job, DeviceMesh], dict[str, str]]] = {
    "train": _train,
    "start": _start,
    "resume": _resume,
    "alone": _alone,
    "save": _save_tensors,
    "ranks": _save_with_layer,
    "load": _load_tensors,
}


def _main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Threads of the parent would be missing in forked processes.
    torch.set_num_threads(1)
    serve(_on_all_ranks)


if __name__ == "__main__":
    _main()
