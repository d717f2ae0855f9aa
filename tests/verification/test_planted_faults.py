"""Faults of one line in the code that writes legacy trees of Megatron, which its reader shares, are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.corpus import FIXTURES, ROOT

_CODE = "import sys; from tests.mutants.operators import plant; plant(*sys.argv[1:4]); del sys.argv[1:4]; "
_CODE += "from reshard.entry import main; main()"


class Fault(NamedTuple):
    """A text of a module of forms/megatron, and what is planted in its place."""

    module: str
    old: str
    new: str


_ATTENTION = r"self_attention\.linear_proj\.weight"
_ROWS = f'ROWS = re.compile(r"{_ATTENTION}|" + ROWS.pattern)\nCOLUMNS = re.compile(r"'
FAULTS = {
    "rows in place of columns": Fault("live", f'COLUMNS = re.compile(r"{_ATTENTION}|', _ROWS),
    "layers of other stages": Fault("stages", "in zip(counts, dealt)", "in [*zip(counts, dealt)][::-1]"),
    "neighbours exchanged": Fault(
        "parameters",
        '"self_attention.linear_proj",\n    "self_attention.linear_qkv"',
        '"self_attention.linear_qkv",\n    "self_attention.linear_proj"',
    ),
    "the other group": Fault("live", "or len(shape) == 1)", "or len(shape) == 2)"),
    "another key of the model": Fault("legacy_written", '"model" if chunks == 1', '"model" if chunks == 2'),
    "groups reversed": Fault("legacy_written", "in of_groups.items()", "in [*of_groups.items()][::-1]"),
    "names of other layers": Fault("live_forms", '*_IMPLEMENTATIONS) == "local"', '*_IMPLEMENTATIONS) != "local"'),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_that_writer_and_reader_share_is_found(fault: Fault, tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / "td_dense_plain" / "checkpoint"
    words = [f"reshard.forms.megatron.{fault.module}", fault.old, fault.new, "convert", source, tmp_path / "out"]
    words += ["--to", "megatron", "--format", "torch", "--sizes", "tp=2,pp=2", "--verify"]
    result = subprocess.run(
        [sys.executable, "-c", _CODE, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 4, result.stderr
    assert "model_optim_rng.pt" in result.stderr
