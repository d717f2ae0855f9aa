"""metadata.json of Checkpoint 2.0 is written in parts, for any number of slices."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.forms.checkpoint2.form import COMMON
from reshard.forms.checkpoint2.written_files import Checkpoint2Files
from reshard.forms.target import FinishingFile
from reshard.strategies.read import read_strategy
from tests.trees import layout, single, write_strategy


@pytest.mark.deep
def test_memory_for_metadata_does_not_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    ranks, peaks = 256, []
    for count in (10, 80):
        names = [f"layers.{number}.w" for number in range(count)]
        stages = single({name: layout([ranks], [0, -1]) for name in names})
        strategy = read_strategy(str(write_strategy(tmp_path / f"{count}", stages)))
        tensors = {name: GlobalTensor(name, "Float32", 4, (ranks, 2), ()) for name in names}
        common = FinishingFile(COMMON, lambda: [b""])
        metadata = Checkpoint2Files(strategy, tensors, tensors, (), 0, "", common).finishing()[0]
        tracemalloc.start()
        size = sum(map(len, metadata.make()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        document = json.loads(b"".join(metadata.make()))
        assert len(document["state_dict_metadata"]) == count and len(document["storage_data"]) == count * ranks
    assert size > 3 << 20 and peaks[1] < peaks[0] + (1 << 20)
