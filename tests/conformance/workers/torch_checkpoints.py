"""PyTorch's own saving and loading of distributed checkpoints, by processes of gloo on a CPU.

Jobs:

* ``{"do": "train", "model", "directory", "form", "ranks", "tensor"}``: a model of Hugging Face's under FSDP2, with
  ``tensor`` ranks of tensor parallelism within, makes two steps with AdamW and is saved: as ``dcp``, model and
  optimizer, or its weights as ``hf-sharded``. Answers hashes of all whole tensors.
* ``{"do": "start", "model", "directory", "form", "ranks", "tensor"}``: the same model with other weights loads them.
  Answers hashes of all whole weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
import transformers
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.conformance.workers.protocol import Job, serve


def _together(job: Job, task: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(_rank, (dict(job), task, place), nprocs=job["ranks"])
        found: dict[str, str] = json.loads(Path(place, "answer").read_text())
        return found


def _rank(rank: int, job: dict[str, Any], task: str, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{place}/store", rank=rank, world_size=job["ranks"])
    model = _model(job)
    if task == "train":
        model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    _distribute(model, job)
    found = _train(model, job) if task == "train" else _start(model, job)
    if rank == 0:
        Path(place, "answer").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _model(job: dict[str, Any]) -> Any:
    """One with weights of its own."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(job["model"])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _distribute(model: Any, job: dict[str, Any]) -> None:
    ranks, tensor = job["ranks"], job["tensor"]
    if tensor == 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    else:
        mesh = init_device_mesh("cpu", (ranks // tensor, tensor), mesh_dim_names=("dp", "tp"))
        columns = ("gate_proj", "up_proj")
        for layer in model.model.layers:
            plan = {f"mlp.{name}": ColwiseParallel() for name in columns} | {"mlp.down_proj": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        mesh = mesh["dp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _train(model: Any, job: dict[str, Any]) -> dict[str, str]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.arange(24).reshape(2, 12)
    for _ in range(2):
        model(text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = get_model_state_dict(model)
    if job["form"] == "hf-sharded":
        dcp.save(weights, storage_writer=HuggingFaceStorageWriter(job["directory"], save_distributed=True))
        return _hashes(weights)
    state = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer), "step": 2}
    dcp.save(state, checkpoint_id=job["directory"])
    found = _hashes(weights)
    for name, entries in state["optimizer"]["state"].items():
        found.update({f"{key}.{name}": digest for key, digest in _hashes(entries).items()})
    return found


def _start(model: Any, job: dict[str, Any]) -> dict[str, str]:
    weights = get_model_state_dict(model)
    if job["form"] == "hf-sharded":
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(job["directory"]))
    else:
        dcp.load({"model": weights}, checkpoint_id=job["directory"])
    set_model_state_dict(model, weights)
    return _hashes(get_model_state_dict(model))


def _hashes(tensors: dict[str, Any]) -> dict[str, str]:
    """Of the bytes of whole tensors; all ranks have to ask."""
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        data = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(data).hexdigest()
    return found


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    serve(lambda job: _together(job, job["do"]))
