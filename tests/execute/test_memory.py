"""Memory stays within its documented limit for any size of checkpoint and tensor."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.measure import Run, reshard, run
from benchmarks.synthetic import Model, Scheme, strategy_bytes, write_checkpoint, write_strategy, wrong_slices
from reshard.checkpoints import (
    Data,
    FileHandles,
    OutputLayout,
    OutputTensor,
    lay_out_ckpt,
    lay_out_safetensors,
    read_index,
)
from reshard.execute import Budget
from reshard.execute.reader import FileReader
from reshard.plan.pieces import StoredSlice
from tests.running import Argument
from tests.sampling import some_of

MIB = 1 << 20


@pytest.fixture()
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory that is emptied at once: pytest keeps its own, and gigabytes add up."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def peaks(arguments: list[object]) -> Run:
    """Run the command and return the largest measured memory of all its processes together."""
    return run(reshard(*arguments, "--quiet"))


SCHEMES = {
    "shards to rows": (Scheme(data=2, model=4, sharded=True), Scheme(model=4)),
    "columns to columns": (Scheme(model=8, cut=1), Scheme(model=2, cut=1)),
    "rows to columns": (Scheme(model=4), Scheme(model=6, cut=1)),
}


@pytest.mark.deep
@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("io", some_of(["pread", "mmap"], 2))
def test_memory_stays_under_the_limit(kind: str, io: str, place: Path) -> None:
    convert(place, Model(layers=4, matrices=2, rows=2304, columns=2304), kind, io, "16M", 16 * MIB + 100 * MIB)


@pytest.mark.deep
@pytest.mark.parametrize("kind", some_of(SCHEMES, 3))
def test_mapped_pages_are_released(kind: str, place: Path) -> None:
    """Resident memory is that of the buffers and the pages looked at last, not that of the source."""
    model = Model(layers=4, matrices=4, rows=2304, columns=2304)
    assert model.nbytes > 320 * MIB
    assert convert(place, model, kind, "mmap", "16M", 116 * MIB, jobs=1).resident < 200 * MIB


@pytest.mark.deep
def test_sparsely_read_pages_are_released(tmp_path: Path) -> None:
    """Reading a few bytes makes a whole page resident, and the kernel adds cached pages around it."""
    size, step = 256 * MIB, 64 << 10
    path = tmp_path / "tensor"
    path.write_bytes(bytes(size))
    reader = FileReader(FileHandles(), Budget.of(1, io="mmap")._replace(threads=4))
    source = StoredSlice(str(path), 0, ((0, size),), ((0, size),))
    before = most = mapped_and_resident()
    for start in range(0, size, step):
        few = reader.view(source, start, 4)
        assert few is not None and not any(few)
        most = max(most, mapped_and_resident())
    assert most - before < 48 * MIB


def mapped_and_resident() -> int:
    """Bytes of files that are in this process's memory."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) << 10


@pytest.mark.long
@pytest.mark.parametrize(("io", "kind"), [("mmap", "columns to columns"), ("pread", "rows to columns")])
def test_memory_of_several_gigabytes_stays_under_half_a_gigabyte(io: str, kind: str, place: Path) -> None:
    convert(place, Model(layers=16, matrices=8, rows=2304, columns=2304), kind, io, "256M", 356 * MIB)


def convert(place: Path, model: Model, kind: str, io: str, limit: str, most: int, jobs: int = 2) -> Run:
    old, new = SCHEMES[kind]
    write_checkpoint(place / "src", model, old)
    write_strategy(place / "old", model, old)
    write_strategy(place / "new", model, new)
    outcome = transform(place, io, limit, jobs)
    assert outcome.anonymous < most
    assert wrong_slices(place / "dst", model, new) == 0
    return outcome


def transform(place: Path, io: str, limit: str, jobs: int, *more: Argument) -> Run:
    options = ["--src-strategy", place / "old", "--dst-strategy", place / "new", "--io", io, "--max-memory", limit]
    return peaks(["transform-dir", place / "src", place / "dst", *options, "--jobs", jobs, *more])


@pytest.mark.long
@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_memory_of_a_hundred_thousand_tensors_stays_under_the_limit(ending: str, place: Path) -> None:
    names = [f"model.layers.{number // 20}.block.{number % 20}.dense.weight_{number}" for number in range(100_000)]
    outputs = [OutputTensor(name, "Float32", (1, 4), 16) for name in names]
    layout = lay_out_ckpt(outputs) if ending == "ckpt" else lay_out_safetensors(outputs)
    values = np.arange(2 * 4 * len(names), dtype=np.float32).reshape(2, -1, 4)
    for rank, content in enumerate(values):
        write_file(place / "src" / f"rank_{rank}" / f"net-1_10.{ending}", layout, content)
    (place / "old.ckpt").write_bytes(strategy_bytes(names, Scheme(model=2), 0))
    (place / "new.ckpt").write_bytes(strategy_bytes(names, Scheme(), 0))
    options = ["--src-strategy", place / "old.ckpt", "--dst-strategy", place / "new.ckpt"]
    memory = peaks(["transform-dir", place / "src", place / "dst", *options])
    path = str(place / "dst" / "rank_0" / f"checkpoint_0.{ending}")
    with FileHandles() as handles:
        stored = read_index(handles, path).tensors
    assert sorted(stored) == sorted(names)
    data = np.fromfile(path, dtype=np.uint8)
    for name, halves in zip(names, values.swapaxes(0, 1)):
        ((offset, size),) = stored[name].extents
        assert data[offset : offset + size].tobytes() == halves.tobytes()
    assert memory.anonymous < 64 * MIB + 100 * MIB


@pytest.mark.long
def test_memory_of_full_weights_in_many_files_stays_under_the_limit(place: Path) -> None:
    files, each = 60, 1500
    listing: dict[str, str] = {}
    values = np.arange(4 * files * each, dtype=np.float32).reshape(files, each, 4)
    for file in range(files):
        names = [f"model.layers.{file}.mlp.experts.{number // 3}.w{number % 3}" for number in range(each)]
        outputs = [OutputTensor(name, "Float32", (2, 2), 16) for name in names]
        name = f"model-{file + 1:05d}-of-{files:05d}.safetensors"
        layout = lay_out_safetensors(outputs, {"format": "pt"})
        write_file(place / "src" / name, layout, values[file])
        listing.update(dict.fromkeys(names, name))
    index = json.dumps({"metadata": {}, "weight_map": listing})
    (place / "src" / "model.safetensors.index.json").write_text(index)
    options = ["--to", "unified", "--max-shard-size", "10KB"]
    memory = peaks(["convert", place / "src", place / "dst", *options])
    weight_map = json.loads((place / "dst" / "param_name_map.json").read_text())["weight_map"]
    assert weight_map.keys() == listing.keys() and len(set(weight_map.values())) == 144
    assert memory.anonymous < 64 * MIB + 100 * MIB


def write_file(path: Path, layout: OutputLayout, content: np.ndarray) -> None:
    """Write a file of tensors of equal size, a row of ``content`` each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for segment in layout.segments():
            file.write(content[segment.tensor].tobytes() if isinstance(segment, Data) else segment.data)


@pytest.mark.long
@pytest.mark.parametrize("cut", [0, 1])
def test_a_tensor_over_four_gibibytes_is_converted(cut: int, place: Path) -> None:
    rows, columns = 80 * 1024, 16 * 1024
    tensor = OutputTensor("w", "Float32", (rows, columns), rows * columns * 4)
    layout = lay_out_ckpt([tensor])
    # A sparse file with a few marks: at both ends, around 4 GiB and at records' ends.
    places = [0, rows * columns - 1, 2**30 - 1, 2**30, 2**27 - 1, 2**27, 12345678]
    with open(place / "full.ckpt", "wb") as file:
        file.truncate(layout.size)
        for segment in layout.segments():
            if not isinstance(segment, Data):
                os.pwrite(file.fileno(), segment.data, segment.offset)
                continue
            for number in places:
                if segment.start <= number * 4 < segment.stop:
                    mark = np.uint32(number + 1).tobytes()
                    os.pwrite(file.fileno(), mark, segment.offset + number * 4 - segment.start)
    scheme = Scheme(model=2, cut=cut)
    (place / "new.ckpt").write_bytes(strategy_bytes(["w"], scheme, 0))
    options = ["--src-strategy", "none", "--dst-strategy", place / "new.ckpt", "--max-memory", "32M"]
    assert peaks(["transform-dir", place / "full.ckpt", place / "dst", *options]).anonymous < 132 * MIB
    actual = set()
    with FileHandles() as handles:
        for rank in range(2):
            path = str(place / "dst" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
            stored = read_index(handles, path).tensors["w"]
            box = scheme.layout().slice_box((rows, columns), rank)
            assert stored.shape == tuple(stop - start for start, stop in box)
            data = np.memmap(path, dtype=np.uint8, mode="r")
            position = 0
            for offset, size in stored.extents:
                words = data[offset : offset + size].view(np.uint32)
                for at in np.flatnonzero(words).tolist():
                    row, column = divmod(position + at, stored.shape[1])
                    number = (row + box[0][0]) * columns + column + box[1][0]
                    assert words[at] == number + 1
                    actual.add(number)
                position += size // 4
    assert actual == set(places)


@pytest.mark.long
def test_memory_of_an_adapter_of_many_ranks_stays_under_the_limit(place: Path) -> None:
    layers, size = 24, 1024
    weights = {f"model.layers.{layer}.w.weight": np.ones((size, size), np.float16) for layer in range(layers)}
    matrix = np.full((size, size), 1 / size, np.float32)
    matrices = {name.replace("weight", f"lora_{side}"): matrix for name in weights for side in "ab"}
    for name, tensors in (("base", weights), ("adapter", matrices)):
        (place / name).mkdir()
        save_file(tensors, place / name / "model.safetensors")
    words = ["merge-lora", place / "base", place / "adapter", place / "dst", "--alpha", size, "--max-memory", "16M"]
    memory = peaks([*words, "--jobs", 2])
    assert memory.anonymous < 16 * MIB + 100 * MIB
    merged = load_file(place / "dst" / "model.safetensors")
    assert merged.keys() == weights.keys()
    assert all(np.allclose(tensor, 1 + 1 / size, rtol=2**-10) for tensor in merged.values())


@pytest.mark.long
@pytest.mark.parametrize(("jobs", "limit"), [(2, 64), (16, 64), (16, 128), (64, 512)])
@pytest.mark.parametrize("kind", ["one file", "columns"])
def test_memory_of_all_processes_together_stays_under_the_limit(kind: str, jobs: int, limit: int, place: Path) -> None:
    model = Model(layers=8, matrices=4, rows=2304, columns=2304)
    old, new = Scheme(), Scheme(model=8, cut=1) if kind == "columns" else Scheme()
    write_checkpoint(place / "src", model, old, "safetensors")
    write_strategy(place / "old", model, old)
    write_strategy(place / "new", model, new)
    small = "from reshard import processes; processes.MIN_BYTES_PER_PROCESS = 1 << 20"
    code = f"{small}; from reshard.entry import main; main()"
    options = ["--src-strategy", place / "old", "--dst-strategy", place / "new", "--max-memory", f"{limit}M"]
    words = ["convert", place / "src", place / "dst", *options, "--jobs", jobs, "--quiet"]
    assert run([sys.executable, "-c", code, *words]).anonymous < limit * MIB + 100 * MIB
    assert wrong_slices(place / "dst", model, new, "safetensors") == 0
