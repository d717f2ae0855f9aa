"""MindSpore's own conversions between rank trees and full weights.

Jobs:

* ``{"do": "merge", "directory", "file"}``: `merge_pipeline_strategys`.
* ``{"do": "unify", "src", "strategy", "dst"}``: `unified_safetensors` of a rank tree; with ``"size"``, a file for every
  so many bytes instead of 3 GiB, with ``"dropped"``, without names that begin so and ``"renamed"`` before all others.
* ``{"do": "distribute", "unified", "strategy", "dst", "ranks"}``: `load_distributed_checkpoint` of a directory of full
  weights, for every rank of `ranks`; each writes ``dst/rank_R/net.safetensors``. With ``"names"``, its `name_map`.
* ``{"do": "signature", "function"}``: the parameters of a function, each with its default as Python writes it.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import mindspore
from mindspore.parallel import transform_safetensors

from tests.conformance.workers.protocol import Job, serve


def merge(job: Job) -> None:
    mindspore.merge_pipeline_strategys(job["directory"], job["file"])


def unify(job: Job) -> None:
    def choose(name: str) -> Any:
        return not name.startswith(job["dropped"]) and job["renamed"] + name

    scale = (3 << 30) / job.get("size", 3 << 30)
    transform_safetensors.math = SimpleNamespace(ceil=lambda number: math.ceil(number * scale), prod=math.prod)
    # It waits while half of the machine's memory is in use, by whomever.
    transform_safetensors.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(percent=0))
    mindspore.unified_safetensors(
        job["src"], job["strategy"], job["dst"], max_process_num=1, choice_func=choose if "dropped" in job else None
    )


def distribute(job: Job) -> None:
    for rank in job["ranks"]:
        mindspore.load_distributed_checkpoint(
            None,
            predict_strategy=job["strategy"],
            format="safetensors",
            unified_safetensors_dir=job["unified"],
            dst_safetensors_dir=job["dst"],
            rank_id=rank,
            name_map=job.get("names"),
        )


def signature(job: Job) -> list[list[str]]:
    parameters = inspect.signature(getattr(mindspore, job["function"])).parameters.values()
    return [[parameter.name, repr(parameter.default)] for parameter in parameters]


if __name__ == "__main__":
    known = {"merge": merge, "unify": unify, "distribute": distribute, "signature": signature}
    serve(lambda job: known[job["do"]](job))
