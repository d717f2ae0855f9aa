"""`reshard` and MindSpore in one process: protobuf names do not clash, in either order of imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import cases
from tests.conformance.mindspore_files import mindspore
from tests.corpus import ROOT

pytestmark = pytest.mark.filterwarnings("default")

USE = {
    "reshard": "import reshard; print(reshard.{call})",
    "mindspore": "import mindspore; print(mindspore.{call})",
}
# What every other library in the process sees.
SHARED_POOL = """
from google.protobuf import descriptor_pool
try:
    descriptor_pool.Default().FindMessageTypeByName("reshard.strategies.ParallelStrategyMap")
except KeyError:
    print("untouched")
"""


@pytest.mark.parametrize(
    "implementation", [{}, {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}], ids=["C", "Python"]
)
@pytest.mark.parametrize("order", [["reshard", "mindspore"], ["mindspore", "reshard"]])
def test_mindspore_and_reshard_import_in_either_order(order: list[str], implementation: dict[str, str]) -> None:
    assert mindspore is not None
    strategy = cases.case_directory("08b_pp2dp2mp2_opt") / "merged" / "merged_strategy.ckpt"
    group = cases.case_directory("01_dp2mp4_adam") / "group_info" / "group_info_rank_0.pb"
    calls = [
        f"rank_list_for_transform(0, {str(strategy)!r}, None)",
        f"restore_group_info_list({str(group)!r})",
    ]
    # The first once more, now that the other has registered its messages.
    script = "\n".join(USE[library].format(call=call) for library in (*order, order[0]) for call in calls)
    process = subprocess.run(
        [sys.executable, "-c", script + SHARED_POOL],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, **implementation},
    )
    assert process.returncode == 0, process.stderr
    printed = process.stdout.splitlines()
    assert printed.count("[0, 4]") == 3
    assert printed[-1] == "untouched"


def test_importing_reshard_does_not_import_mindspore() -> None:
    script = "import sys, reshard, reshard.cli.main; print('mindspore' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert process.stdout == "False\n", process.stderr
