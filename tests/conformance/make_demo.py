"""Writes the bundled checkpoints of `make demo` with MindSpore's own `save_checkpoint`.

Run it in the conformance environment, from the top of the repository::

    .venv-conformance/bin/python -m tests.conformance.make_demo

The network is that of the `10_` fixtures, its weights without optimizer state: every parameter counts
up from 0 as float32, so that `slices.json` holds the hash of every slice, cut by MindSpore itself.
"""

from __future__ import annotations

import json
import shutil

import numpy as np

from tests import cases
from tests.conformance.mindspore_files import save
from tests.corpus import FIXTURES
from tests.reference import slices

SOURCE, TARGET = "10o_dp2mp4pp1_optm1", "10_dp1mp4pp1"
DEMO = FIXTURES / "demo"
NOT_SAVED = ("adam_m.", "adam_v.", "accu_grads.")


def main() -> None:
    """Replace everything in `fixtures/demo`."""
    source, target = cases.load(SOURCE), cases.load(TARGET)
    weights = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in source.shapes.items()
        if not name.startswith(NOT_SAVED)
    }
    shutil.rmtree(DEMO, ignore_errors=True)
    for rank, tensors in slices(source.strategy, weights).items():
        for name, array in tensors.items():
            assert (list(array.shape), cases.sha256_16(array)) == source.expected(name, rank)
        directory = DEMO / "src_checkpoints" / f"rank_{rank}"
        directory.mkdir(parents=True)
        path = directory / "mlp-2_10.ckpt"
        tensors["global_step"] = np.array([20], np.int32)
        save(tensors, path, append_dict={"epoch_num": 2, "step_num": 20})
        path.chmod(0o644)
    for case, name in ((source, "src_strategy.ckpt"), (target, "dst_strategy.ckpt")):
        (file,) = sorted(case.directory.iterdir())
        shutil.copyfile(file, DEMO / name)
    expected = {str(rank): {name: target.expected(name, rank) for name in weights} for rank in target.slices["ranks"]}
    lines = ",\n".join(
        f' "{rank}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in tensors.items())
        + "\n }"
        for rank, tensors in expected.items()
    )
    (DEMO / "expected.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
