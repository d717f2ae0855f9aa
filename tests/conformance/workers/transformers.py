"""Hugging Face's own saving and loading, with random weights of a tiny Llama.

Jobs:

* ``{"do": "save", "directory", "dtype", "max_shard_size", "seed"}``: `save_pretrained`.
* ``{"do": "load", "directory"}``: `from_pretrained`. Answers the names that it misses or does not know, the dtypes of
  its weights, and the hash of the logits of one fixed text.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.conformance.workers.protocol import Job, described, serve


def save(job: Job) -> None:
    torch.manual_seed(job["seed"])
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, job["dtype"]))
    model.save_pretrained(job["directory"], max_shard_size=job["max_shard_size"])


def load(job: Job) -> dict[str, Any]:
    model, info = transformers.LlamaForCausalLM.from_pretrained(
        job["directory"], dtype="auto", local_files_only=True, output_loading_info=True
    )
    with torch.no_grad():
        logits = model.eval()(torch.arange(0, 96, 5)[None]).logits
    return {
        "missing": sorted(info["missing_keys"]),
        "unknown": sorted(info["unexpected_keys"]),
        "dtypes": sorted({str(value.dtype) for value in model.parameters()}),
        "logits": described(logits.float().numpy()),
    }


if __name__ == "__main__":
    serve(lambda job: {"save": save, "load": load}[job["do"]](job))
