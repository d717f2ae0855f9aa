"""MindSpore's own conversions between rank trees and full weights.

Jobs:

* ``{"do": "merge", "directory", "file"}``: `merge_pipeline_strategys`.
* ``{"do": "unify", "src", "strategy", "dst"}``: `unified_safetensors` of a rank tree.
* ``{"do": "distribute", "unified", "strategy", "dst", "ranks"}``: `load_distributed_checkpoint` of a directory of full
  weights, for every rank of `ranks`; each writes ``dst/rank_R/net.safetensors``.
"""

from __future__ import annotations

import mindspore

from tests.conformance.workers.protocol import Job, serve


def merge(job: Job) -> None:
    mindspore.merge_pipeline_strategys(job["directory"], job["file"])


def unify(job: Job) -> None:
    mindspore.unified_safetensors(job["src"], job["strategy"], job["dst"])


def distribute(job: Job) -> None:
    for rank in job["ranks"]:
        mindspore.load_distributed_checkpoint(
            None,
            predict_strategy=job["strategy"],
            format="safetensors",
            unified_safetensors_dir=job["unified"],
            dst_safetensors_dir=job["dst"],
            rank_id=rank,
        )


if __name__ == "__main__":
    serve(lambda job: {"merge": merge, "unify": unify, "distribute": distribute}[job["do"]](job))
