"""Distributed checkpoints of PyTorch: files of its libraries are read correctly or refused; written ones round-trip."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import shutil
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from reshard.asked import Conversion, Source, Target, Task
from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import Archive, archive_of_pickle, archived_tensor, lay_out_archives
from reshard.checkpoints.formats.output import Literal, OutputTensor
from reshard.checkpoints.formats.pickles import PickledInstance, inert, inert_class, pickled, plain, read_pickle
from reshard.checkpoints.placed import PlacedFile, Placement, Run, Stored
from reshard.convert import run
from reshard.convert.ends import request_of
from reshard.errors import CheckpointError
from reshard.forms.recorded import ChunkedCheckpoint
from reshard.forms.registry import form_of
from reshard.forms.request import Means, Request
from reshard.storage import FileStatus, ReadableFile
from reshard.text.messages import Report
from tests.checkpoint_writing import parts, record, write_safetensors
from tests.corpus import FIXTURES
from tests.corpus_dcp import Case, corpus, fixtures, held_in
from tests.running import Argument, done, fails, flat, reshard, warns
from tests.sampling import some_of
from tests.strategy_writing import layout, write_strategy
from tests.trees import value, write_checkpoint

CASES = fixtures()
WRITTEN = ("dcp", "hyper-parallel")


# Whole tensors in safetensors, under the names that they have.
WHOLE = ("--to", "hf-sharded", "--shards", "1")


def named(case: Case) -> str:
    return case.name


def read(path: Path, handles: FileHandles) -> ChunkedCheckpoint:
    form = form_of(str(path))
    checkpoint = form.read(Request.of_source(Source(str(path)), form), Means(handles, Report()))
    assert isinstance(checkpoint, ChunkedCheckpoint)
    return checkpoint


def objects_in(path: Path) -> dict[str, Any]:
    """The objects of a checkpoint, as JSON has them."""
    actual = {}
    with FileHandles() as handles:
        for name, value in read(path, handles).objects.items():
            data = Path(value.path).read_bytes()[value.offset : value.offset + value.length]
            if value.archived:
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    data = archive.read(next(each for each in archive.namelist() if each.endswith("/data.pkl")))
            actual[name] = plain(read_pickle(data, lambda name: False))
    return actual


@pytest.mark.deep
@pytest.mark.parametrize("case", [*CASES, *corpus()], ids=named)
def test_checkpoints_of_libraries_are_read_correctly_or_refused(case: Case, tmp_path: Path) -> None:
    result = reshard("convert", case.path, tmp_path / "out", *WHOLE, "--verify")
    masters = [name for name in case.tensors if ".fp32_param." in name]
    if masters and "is not that of its weights" in result.err:
        # Numbers that were made up: no training left them.
        kept = {name: content for name, content in case.tensors.items() if name not in masters}
        done("convert", case.path, tmp_path / "out", *WHOLE, "--verify", "--exclude", "*.fp32_param.*")
        assert tensors_of(case, tmp_path / "out") == kept
        return
    if case.refused or (case.may_refuse and result.status):
        assert result.status == 3
        assert not held_in(tmp_path / "out")
        assert not list(tmp_path.rglob("EXECUTED*"))
        return
    assert result.status == 0, result.err
    assert tensors_of(case, tmp_path / "out") == case.tensors


@pytest.mark.deep
@pytest.mark.parametrize("form", [*WRITTEN, "hf-sharded"])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_written_directory_is_read_again(case: Case, form: str, tmp_path: Path) -> None:
    done("convert", case.path, tmp_path / "there", "--to", form, "--shards", 3, "--verify")
    assert form_of(str(tmp_path / "there")).name == form
    done("convert", tmp_path / "there", tmp_path / "back", *WHOLE, "--verify")
    assert held_in(tmp_path / "back") == case.tensors
    if form in WRITTEN:
        assert objects_in(tmp_path / "there") == case.objects


@pytest.mark.deep
@pytest.mark.parametrize("case", some_of([(case,) for case in corpus() if not case.refused], 8), ids=named)
@pytest.mark.parametrize("through", ["dcp", "hyper-parallel", "hf-sharded", "same"])
def test_checkpoints_of_libraries_survive_every_other_form(case: Case, through: str, tmp_path: Path) -> None:
    words = ["dcp", "--dst-strategy", "same"] if through == "same" else [through]
    shards = [] if through == "same" else ["--shards", "5"]
    result = reshard("convert", case.path, tmp_path / "there", "--to", *words, *shards, "--verify")
    if result.status and case.may_refuse:
        assert result.status == 3
        return
    contents = case.tensors
    if result.status == 3 and "cannot hold" in result.err:
        contents = {name: actual for name, actual in contents.items() if f"'{name}'" not in result.err}
        remaining = [word for name in case.tensors.keys() - contents.keys() for word in ("--exclude", name)]
        assert remaining
        result = reshard("convert", case.path, tmp_path / "there", "--to", *words, *shards, "--verify", *remaining)
    assert result.status == 0, result.err
    done("convert", tmp_path / "there", tmp_path / "back", *WHOLE, "--verify")
    assert tensors_of(case, tmp_path / "back") == contents


def tensors_of(case: Case, directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """What the files hold, without the step, which Megatron has among objects."""
    held = held_in(directory)
    if case.name.startswith("mcore_"):
        held.pop("global_step", None)
    return held


def test_records_are_readable_as_plain_zip_files(tmp_path: Path) -> None:
    """Records are zip archives whose elements are aligned, and the directory is a pickle of the classes of torch."""
    values: dict[str, npt.NDArray[Any]] = {
        "w": np.arange(20, dtype="f4").reshape(5, 4),
        "v.s": np.array(7, "f4"),
        "v.e": np.empty((0, 3), "f4"),
    }
    write_safetensors(tmp_path / "src" / "model.safetensors", values)
    done("convert", tmp_path / "src", tmp_path / "out", "--to", "dcp", "--shards", 2, "--rename", "*=*")
    content = read_pickle((tmp_path / "out" / ".metadata").read_bytes(), lambda name: name.startswith("torch.")).fields
    visited = {}
    for index, info in content["storage_data"].items():
        record = info.fields
        data = (tmp_path / "out" / record["relative_path"]).read_bytes()
        data = data[record["offset"] : record["offset"] + record["length"]]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entry = archive.getinfo("archive/data/0")
            names = int.from_bytes(data[entry.header_offset + 26 : entry.header_offset + 28], "little")
            extra = int.from_bytes(data[entry.header_offset + 28 : entry.header_offset + 30], "little")
            start = entry.header_offset + 30 + names + extra
            assert start % 64 == 0
            visited[index.fields["fqn"], index.fields["offset"]] = data[start : start + entry.file_size]
            assert archive.read("archive/version") == b"3\n"
            assert archive.read("archive/byteorder") == b"little"
    rows = values["w"]
    assert visited == {
        ("w", (0, 0)): rows[:3].tobytes(),
        ("w", (3, 0)): rows[3:].tobytes(),
        ("v.s", ()): values["v.s"].tobytes(),
        ("v.e", (0, 0)): b"",
    }


@pytest.mark.deep
@pytest.mark.parametrize("jobs", [1, 3])
def test_archives_have_crcs_with_checksums(jobs: int, tmp_path: Path) -> None:
    """Those of tensors that several processes write in parts, too."""
    random = np.random.default_rng(3)
    values = {
        "a.large": random.standard_normal((2000, 1500), "f4"),
        "b.wide": random.standard_normal((2, 1 << 20), "f4"),
        **{f"c.{size}": random.standard_normal(size, "f4") for size in range(40)},
    }
    write_safetensors(tmp_path / "src" / "model.safetensors", values)
    words: list[Argument] = ["convert", tmp_path / "src", tmp_path / "out", "--to", "dcp", "--shards", 2]
    done(*words, "--checksum", "crc32", "--jobs", jobs, "--verify")
    assert all(archive.testzip() is None for archive in archives_in(tmp_path / "out"))
    # The manifest's checksums are those of the finished files.
    assert "no differences" in done("verify", tmp_path / "out").err
    assert "CRC" not in done("convert", tmp_path / "out", tmp_path / "back", *WHOLE, "--verify").err
    path = tmp_path / "out" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    assert reshard("convert", tmp_path / "out", tmp_path / "damaged", *WHOLE, "--verify").status == 3
    assert reshard("verify", tmp_path / "out").status == 4


def archives_in(directory: Path) -> Iterator[zipfile.ZipFile]:
    """The archive of every record."""
    content = read_pickle((directory / ".metadata").read_bytes(), lambda name: name.startswith("torch.")).fields
    for info in content["storage_data"].values():
        record = info.fields
        data = (directory / record["relative_path"]).read_bytes()
        yield zipfile.ZipFile(io.BytesIO(data[record["offset"] : record["offset"] + record["length"]]))


def test_planning_opens_no_file_of_tensors(tmp_path: Path) -> None:
    for case in CASES:
        with FileHandles() as handles:
            read(case.path, handles)
            assert handles.seen == 0


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint of torch with a flipped bit in one of the two slices of `a`."""
    (case,) = [case for case in CASES if case.name == "w2_old_metadata"]
    shutil.copytree(case.path, tmp_path / "src")
    with FileHandles() as handles, handles.borrow(str(tmp_path / "src" / "__0_0.distcp")) as file:
        begin = Archive(file, 0, 1577).entry("data/0").offset
    flip(tmp_path / "src" / "__0_0.distcp", begin + 3)
    return tmp_path / "src"


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("target", [WHOLE, ("--to", "hf-sharded", "--shards", "3"), ("--to", "dcp", "--shards", "2")])
def test_a_flipped_bit_is_found_before_anything_is_written(
    target: tuple[str, ...], damaged: Path, tmp_path: Path
) -> None:
    """Also where several target files have parts of the bytes that one CRC covers."""
    texts = ["__0_0.distcp", "CRC-32", "'a'", "--crc never"]
    fails(3, "convert", damaged, tmp_path / "out", *target, texts=texts)
    assert not [*(tmp_path / "out").rglob("*.safetensors"), *(tmp_path / "out").rglob("*.distcp")]
    done("convert", damaged, tmp_path / "unseen", *target, "--crc", "never", "--verify")
    assert reshard("verify", tmp_path / "unseen", "--src", damaged).status == 3


@pytest.mark.parametrize(
    "words",
    [("stats",), ("stats", "--fail-on", "nan"), ("diff", "{0}"), ("diff", "{0}", "--include", "a")],
    ids=" ".join,
)
def test_a_flipped_bit_is_found_before_numbers_are_shown(words: tuple[str, ...], damaged: Path) -> None:
    line: list[Argument] = [words[0], damaged, *(word.format(damaged) for word in words[1:])]
    result = fails(3, *line, texts=["__0_0.distcp", "CRC-32", "'a'", "--crc never"])
    assert not result.out
    done(*line, "--crc", "never")
    done("stats", damaged, "--exclude", "a")


def test_a_crc_counts_only_where_its_bytes_are_converted(damaged: Path, tmp_path: Path) -> None:
    done("convert", damaged, tmp_path / "out", *WHOLE, "--exclude", "a", "--verify")
    assert held_in(tmp_path / "out") and "a" not in held_in(tmp_path / "out")


@pytest.mark.parametrize("form", WRITTEN)
def test_a_damaged_object_is_not_copied(form: str, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == "w2_old_metadata"]
    shutil.copytree(case.path, tmp_path / "src")
    with FileHandles() as handles:
        stored = read(tmp_path / "src", handles).objects["step"]
    with FileHandles() as handles, handles.borrow(stored.path) as file:
        begin = Archive(file, stored.offset, stored.length).entry("data.pkl").offset
    flip(Path(stored.path), begin + 3)
    fails(3, "convert", tmp_path / "src", tmp_path / "out", "--to", form, "--shards", 2, texts=["CRC-32", "data.pkl"])
    assert not (tmp_path / "out" / ".metadata").exists()


@pytest.mark.parametrize("checksum", ["none", "crc32"])
def test_a_changed_crc_alone_is_found(checksum: str, tmp_path: Path) -> None:
    """In the header of the elements or in the directory, of a target and of a source."""
    write_safetensors(tmp_path / "src" / "model.safetensors", {"a.w": np.arange(12, dtype="f4").reshape(4, 3)})
    path = tmp_path / "out" / "__0_0.distcp"
    done("convert", tmp_path / "src", path.parent, "--to", "dcp", "--shards", 1, "--checksum", checksum)
    (path.parent / "reshard-manifest.json").unlink()
    data = path.read_bytes()
    first, second = (match.start() for match in re.finditer(b"archive/data/0", data))
    for at in (first - 30 + 14, second - 46 + 16):
        path.write_bytes(data)
        flip(path, at)
        assert "__0_0.distcp" in fails(4, "verify", path.parent, "--src", tmp_path / "src").out
        fails(3, "convert", path.parent, tmp_path / "back", *WHOLE, texts=["__0_0.distcp"])


def test_a_flipped_bit_around_the_contents_of_a_written_archive_is_found(tmp_path: Path) -> None:
    """But in versions, times, padding, and attributes that no reader uses."""
    data = archive_of_pickle(b"\x80\x02K\x01.")
    path = tmp_path / "archive"
    ignored: set[int] = set()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        directory = archive.start_dir
        for entry in archive.infolist():
            header, length = entry.header_offset, len(entry.filename)
            padding = int.from_bytes(data[header + 28 : header + 30], "little")
            ignored.update([header + 4, header + 5, *range(header + 10, header + 14)])
            ignored.update(range(header + 30 + length, header + 30 + length + padding))
            ignored.update([*range(directory + 4, directory + 8), *range(directory + 12, directory + 16)])
            ignored.update(range(directory + 36, directory + 42))
            directory += 46 + length
    for at in sorted(set(range(len(data))) - ignored):
        for bit in range(8):
            path.write_bytes(data)
            flip(path, at, 1 << bit)
            with FileHandles() as handles, handles.borrow(str(path)) as file, pytest.raises(CheckpointError):
                Archive(file, 0, len(data)).check(memoryview(bytearray(64)))


def test_an_entry_that_is_a_directory_is_refused(saved: Saved) -> None:
    """torch loads uninitialised memory from it."""
    path = saved.path / "__0_0.distcp"
    flip(path, path.read_bytes().rindex(b"archive/data/0") - 46 + 38, 0x10)
    assert "__0_0.distcp" in fails(4, "verify", saved.path, "--src", saved.path.with_name("whole")).out
    saved.refused("__0_0.distcp", "directory")


def test_a_flipped_bit_around_the_contents_of_an_archive_moves_no_element() -> None:
    data = (FIXTURES / "dcp" / "w2_old_metadata" / "checkpoint" / "__0_0.distcp").read_bytes()[:1577]

    def elements(changed: bytes) -> Any:
        with TemporaryDirectory() as directory, FileHandles() as handles:
            path = Path(directory, "archive")
            path.write_bytes(changed)
            with handles.borrow(str(path)) as file:
                return archived_tensor(file, 0, len(changed))[:4]

    expected = elements(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (entry,) = (each for each in archive.infolist() if each.filename.endswith("/data/0"))
    lengths = entry.header_offset + 26
    moved = refused = 0
    for at in [*range(entry.header_offset, entry.header_offset + 4), *range(lengths, expected[3])]:
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            try:
                moved += elements(bytes(changed)) != expected
            except CheckpointError:
                refused += 1
    assert not moved
    # The signature, both lengths and the name.
    assert refused >= 8 * (4 + 4 + len(entry.filename))


class _Counted:
    """A file that counts its reads, or fails at one of them."""

    descriptor: int | None = None
    cipher: str | None = None

    def __init__(self, file: ReadableFile, failing: int | None = None) -> None:
        self.path = file.path
        self.reads = 0
        self._file = file
        self._failing = failing

    def size(self) -> int:
        return self._file.size()

    def status(self) -> FileStatus:
        return self._file.status()

    def read(self, offset: int, count: int) -> bytes:
        self._count()
        return self._file.read(offset, count)

    def read_into(self, offset: int, out: memoryview) -> int:
        self._count()
        return self._file.read_into(offset, out)

    def _count(self) -> None:
        self.reads += 1
        if self.reads == self._failing:
            raise OSError(errno.EIO, "no answer")


def test_a_large_archive_is_opened_with_two_reads(tmp_path: Path) -> None:
    """In an object store, each is a request: one for the end, and one for all before the elements."""
    write_safetensors(tmp_path / "src" / "model.safetensors", {"a.w": np.zeros((400, 100), "f4")})
    done("convert", tmp_path / "src", tmp_path / "out", "--to", "dcp", "--shards", 1)
    path = tmp_path / "out" / "__0_0.distcp"
    with FileHandles() as handles, handles.borrow(str(path)) as file:
        counted = _Counted(file)
        assert archived_tensor(counted, 0, path.stat().st_size).shape == (400, 100)
        assert counted.reads == 2
        for failing in (1, 2):
            # A file that cannot be read is not damaged.
            with pytest.raises(OSError, match="no answer"):
                archived_tensor(_Counted(file, failing), 0, path.stat().st_size)


def test_metadata_that_exchanges_a_slice_for_a_replica_of_another_is_refused(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == "hyper_w4_2026_03_by_rank"]
    shutil.copytree(case.path, tmp_path / "src")
    path = tmp_path / "src" / ".rank0_metadata"
    data = bytearray(path.read_bytes())
    # The first offset of rank 0's slice: it has a replica, so nothing is missing if it is another slice.
    at = data.index(b"h%K\x00K\x00", data.index(b"model.up.weight")) + 3
    assert data[at] == 0
    data[at] ^= 4
    path.write_bytes(data)
    texts = [
        "'model.up.weight' differs from that in",
        "_rank0_.safetensors",
        "[[4, 8], [0, 4]]",
        "--check-replicas never",
    ]
    fails(3, "convert", tmp_path / "src", tmp_path / "out", *WHOLE, texts=texts)
    assert not held_in(tmp_path / "out")
    done("convert", tmp_path / "src", tmp_path / "out", *WHOLE, "--check-replicas", "never")


def instance(kind: str, **fields: Any) -> PickledInstance:
    return inert(f"torch.distributed.checkpoint.{kind}", state=fields)


def change(value: PickledInstance, **fields: Any) -> None:
    """Set fields of an instance."""
    value.state = {**value.fields, **fields}


class Saved:
    """A checkpoint of one tensor of 4 x 3 in two chunks of two rows, whose metadata can be made wrong."""

    def __init__(self, directory: Path, form: str = "dcp") -> None:
        self.path = directory
        self.values = np.arange(12, dtype="f4").reshape(4, 3)
        whole = directory.with_name("whole")
        write_safetensors(whole / "model.safetensors", {"x.w": self.values})
        done("convert", whole, directory, "--to", form, "--shards", 2, "--rename", "*=*")
        self.metadata = read_pickle((directory / ".metadata").read_bytes(), lambda name: True)
        self.fields = self.metadata.fields
        self.tensor = self.fields["state_dict_metadata"]["x.w"]
        self.stored = self.fields["storage_data"]
        self.records = {index.fields["offset"]: info for index, info in self.stored.items()}

    def write(self) -> None:
        (self.path / ".metadata").write_bytes(pickled(self.metadata))

    def refused(self, *words: str) -> None:
        self.write()
        result = reshard("convert", self.path, self.path.with_name("out"), *WHOLE)
        assert result.status == 3, result.err
        assert all(word in result.err for word in words), result.err
        assert not held_in(self.path.with_name("out"))


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Saved]:
    yield Saved(tmp_path / "src")


@pytest.mark.parametrize("path", ["../src/__0_0.distcp", "/etc/passwd", "a/../../b", "s3://b/k", "", "a\0b", "c:\\x"])
def test_files_outside_the_directory_are_refused(path: str, saved: Saved) -> None:
    change(saved.records[0, 0], relative_path=path)
    saved.refused("does not lie in its directory")


def test_a_hole_is_refused(saved: Saved) -> None:
    saved.tensor.fields["chunks"].pop()
    for index in [index for index in saved.stored if index.fields["offset"] == (2, 0)]:
        del saved.stored[index]
    saved.refused("'x.w'", "rows 2 to 3")


def test_an_overlap_is_refused(saved: Saved) -> None:
    change(saved.tensor.fields["chunks"][0], sizes=(3, 3))
    saved.refused("'x.w'", "overlap")


def test_a_chunk_outside_of_the_tensor_is_refused(saved: Saved) -> None:
    change(saved.tensor, size=(3, 3))
    saved.refused("'x.w'")


def test_a_tensor_that_another_save_made_larger_is_refused(saved: Saved) -> None:
    change(saved.tensor, size=(5, 3))
    saved.refused("'x.w'", "row 4")


def test_a_record_that_no_tensor_has_is_refused(saved: Saved) -> None:
    index = instance("metadata.MetadataIndex", fqn="other", offset=(0,), index=0)
    saved.stored[index] = next(iter(saved.stored.values()))
    saved.refused("'other'")


def test_a_chunk_without_a_record_is_refused(saved: Saved) -> None:
    del saved.stored[next(iter(saved.stored))]
    saved.refused("'x.w'", "without a record")


def test_records_of_another_shape_are_refused(saved: Saved) -> None:
    """The records of the two chunks have one shape, and so has half of either: the archive decides."""
    for chunk in saved.tensor.fields["chunks"]:
        change(chunk, sizes=(3, 2), offsets=tuple(reversed(chunk.fields["offsets"])))
    change(saved.tensor, size=(3, 4))
    for index in saved.stored:
        change(index, offset=tuple(reversed(index.fields["offset"])))
    saved.refused("[2, 3] in the file")


def test_records_beyond_the_end_of_a_file_are_refused(saved: Saved) -> None:
    change(saved.records[2, 0], length=saved.records[2, 0].fields["length"] + 1)
    saved.refused("by the metadata")


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_two_chunks_in_one_record_are_refused(form: str, tmp_path: Path) -> None:
    """As after one flipped bit in a reference of the pickle; the record has the shape of both chunks."""
    saved = Saved(tmp_path / "src", form)
    first = saved.records[0, 0].fields
    change(saved.records[2, 0], **{name: first[name] for name in first if name in ("relative_path", "tensor_key")})
    saved.refused("'x.w'", "share bytes")


def test_extensions_are_refused_by_name_and_can_be_excluded(saved: Saved, tmp_path: Path) -> None:
    change(saved.records[2, 0], transform_descriptors=["stream.zstd/1"])
    saved.refused("'x.w'", "stream.zstd/1", "--exclude")


@pytest.mark.parametrize("dtype", ["complex32", "float4_e2m1fn_x2", "uint4"])
def test_a_tensor_of_an_unknown_type_is_named_and_can_be_left_out(dtype: str, saved: Saved, tmp_path: Path) -> None:
    whole = tmp_path / "more"
    write_safetensors(whole / "model.safetensors", {"x.w": saved.values, "y.w": saved.values})
    shutil.rmtree(saved.path)
    done("convert", whole, saved.path, "--to", "dcp", "--shards", 2, "--rename", "*=*")
    saved.metadata = read_pickle((saved.path / ".metadata").read_bytes(), lambda name: True)
    tensor = saved.metadata.fields["state_dict_metadata"]["x.w"]
    properties = tensor.fields["properties"]
    properties.state = (inert_class(f"torch.{dtype}"), *properties.state[1:])
    saved.refused("'x.w'", "elements of an unsupported type", "--exclude 'x.w'")
    done("convert", saved.path, tmp_path / "rest", *WHOLE, "--exclude", "x.w", "--verify")
    assert held_in(tmp_path / "rest").keys() == {"y.w"}


def test_compressed_archives_are_refused_by_name(saved: Saved) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    path = saved.path / "__0_0.distcp"
    path.write_bytes(packed.getvalue() + path.read_bytes())
    change(saved.records[0, 0], length=len(packed.getvalue()))
    saved.refused("compressed or encrypted")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_file_of_a_checkpoint_points_to_its_directory(command: str, name: str, saved: Saved, tmp_path: Path) -> None:
    words: list[Argument] = [tmp_path / "out", "--to", "hf"] if command == "convert" else []
    fails(3, command, saved.path / name, *words, texts=[f"give its directory: {saved.path}"])


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_the_directory_around_a_checkpoint_points_to_it(command: str, saved: Saved, tmp_path: Path) -> None:
    """Trainers have files of other state beside it."""
    root = tmp_path / "run" / "step"
    shutil.copytree(saved.path, root / "global_step_10")
    (root / "extra_state").mkdir()
    (root / "extra_state" / "extra_state_rank_0.pt").write_bytes(b"PK")
    words: list[Argument] = [tmp_path / "out", "--to", "hf"] if command == "convert" else []
    for place in (root, root.parent):
        fails(3, command, place, *words, texts=[f"did you mean {root / 'global_step_10'}?"])


def test_a_missing_file_is_named(saved: Saved) -> None:
    (saved.path / "__1_0.distcp").unlink()
    saved.refused("__1_0.distcp", "missing")


def test_metadata_of_another_kind_is_refused(saved: Saved) -> None:
    for content in (b"", b"{}", pickle.dumps({"a": 1}), pickle.dumps([1, 2])):
        (saved.path / ".metadata").write_bytes(content)
        result = reshard("inspect", saved.path)
        assert result.status == 3 and ".metadata" in result.err


def megatron(root: Path, *steps: int) -> Path:
    """A root as Megatron makes it, with an iteration for each step; the same tensors in all."""
    for step in steps:
        place = root / f"iter_{step:07d}"
        shutil.copytree(Saved(root.with_name(f"step-{step}") / "src").path, place)
        shutil.rmtree(place / ".reshard")
        (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return root


def test_megatrons_common_file_survives_hyper_parallel(tmp_path: Path) -> None:
    """Megatron loads a directory with an archive of that name and the file beside it."""
    root = megatron(tmp_path / "run", 3)
    content = pickled({"iteration": 3, "lr": 0.5})
    (root / "iter_0000003" / "common.pt").write_bytes(archive_of_pickle(content))
    cut: list[Argument] = ["--shards", 2, "--verify"]
    done("convert", root, tmp_path / "between", "--to", "hyper-parallel", *cut)
    done("convert", tmp_path / "between", tmp_path / "back", "--to", "dcp", *cut)
    with zipfile.ZipFile(tmp_path / "back" / "common.pt") as archive:
        assert archive.read("archive/data.pkl") == content
    assert json.loads((tmp_path / "back" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


@pytest.mark.parametrize("left", [["reshard-manifest.json"], ["reshard-manifest.json", ".metadata"]])
def test_a_directory_with_objects_is_completed_by_the_same_command(left: list[str], tmp_path: Path) -> None:
    case = next(case for case in CASES if case.objects)
    command: list[Argument] = ["convert", case.path, tmp_path / "out", "--to", "dcp", "--shards", 2]
    done(*command)
    assert (tmp_path / "out" / "__0_1.distcp").exists()
    for name in left:
        (tmp_path / "out" / name).unlink()
    done(*command, "--verify")


@pytest.mark.parametrize("kind", ["td_dense_plain", "legacy_dense"])
def test_megatrons_names_in_a_directory_of_hugging_face_give_a_warning(kind: str, tmp_path: Path) -> None:
    root, out, warning = FIXTURES / "megatron" / kind / "checkpoint", tmp_path / "out", "warning: names and packing"
    words: list[Argument] = ["convert", root, out, "--dry-run", "--to"]
    assert warning in done(*words, "huggingface").err
    assert warning not in done(*words, "huggingface", "--names", "llama").err
    assert warning not in done(*words, "dcp", "--shards", 2).err
    done("convert", root, tmp_path / "dcp", "--to", "dcp", "--shards", 2)
    assert warning in done("convert", tmp_path / "dcp", out, "--to", "huggingface").err


def test_a_counter_in_a_directory_of_hugging_face_gives_a_warning(tmp_path: Path) -> None:
    """A parameter that is one number, such as CLIP's logit_scale, is no counter."""
    tensors = {"w": value("w", [4]), "scale": value("scale", []), "seen": value("seen", [], "Int64")}
    write_checkpoint(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    done("convert", tmp_path / "model.safetensors", tmp_path / "dcp", "--to", "dcp", "--shards", 2)
    words: list[Argument] = ["convert", tmp_path / "dcp", tmp_path / "out", "--to", "huggingface"]
    assert flat(done(*words, "--dry-run").err).endswith("leave them out with --exclude 'seen'")
    assert "leave them out" not in done(*words, "--exclude", "seen").err
    assert held_in(tmp_path / "out").keys() == {"w", "scale"}


def test_the_tracker_names_the_iteration_that_is_read(tmp_path: Path) -> None:
    root = megatron(tmp_path / "root", 10, 20, 30)
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    assert form_of(str(root)).name == "megatron"
    result = done("inspect", root, "--json")
    assert "20" in json.dumps(result.json)
    done("convert", root, tmp_path / "out", *WHOLE, "--step", 10)
    assert held_in(tmp_path / "out") == held_in(tmp_path / "step-10" / "whole")
    wrong = reshard("convert", root, tmp_path / "none", *WHOLE, "--step", 40)
    assert wrong.status == 3 and "iter_0000040" in wrong.err
    (root / "latest_checkpointed_iteration.txt").unlink()
    untold = reshard("convert", root, tmp_path / "none", *WHOLE)
    assert untold.status == 3 and "--step" in untold.err


def test_objects_that_contain_tensors_are_refused_in_hyper_parallel(saved: Saved, tmp_path: Path) -> None:
    """The object is the archive of a tensor."""
    index = instance("metadata.MetadataIndex", fqn="rng", offset=None, index=None)
    saved.stored[index] = next(iter(saved.stored.values()))
    saved.fields["state_dict_metadata"]["rng"] = instance("metadata.BytesStorageMetadata")
    saved.write()
    result = reshard("convert", saved.path, tmp_path / "out", "--to", "hyper-parallel", "--shards", 2)
    assert result.status == 3 and "'rng'" in result.err and "--exclude" in result.err
    done("convert", saved.path, tmp_path / "dcp", "--to", "dcp", "--shards", 2)


def test_parameter_groups_under_old_names_give_a_warning(saved: Saved, tmp_path: Path) -> None:
    name = next(iter(saved.fields["state_dict_metadata"]))
    group = f"optimizer.param_groups.{name}.lr"
    index = instance("metadata.MetadataIndex", fqn=group, offset=None, index=None)
    saved.stored[index] = next(iter(saved.stored.values()))
    saved.fields["state_dict_metadata"][group] = instance("metadata.BytesStorageMetadata")
    saved.write()
    (tmp_path / "table.toml").write_text(f'others = "keep"\n[[rule]]\nfrom = "{name}"\nto = "new"\n')
    words: list[Argument] = ["convert", saved.path, tmp_path / "out", "--to", "dcp", "--shards", 2]
    assert "parameter groups" not in done(*words, "--dry-run").err
    warns(done(*words, "--names", tmp_path / "table.toml"), "parameter groups keep the names", group)


@pytest.mark.parametrize("seed", range(6))
def test_strides_and_windows_read_every_element(seed: int, tmp_path: Path) -> None:
    """Elements in any order in the record, read in ranges of any size."""
    random = np.random.default_rng(seed)
    shape = tuple(int(size) for size in random.integers(1, 7, random.integers(1, 5)))
    order = random.permutation(len(shape))
    values = random.integers(0, 1 << 30, [shape[axis] for axis in order]).astype("<i4")
    strides = dict(zip(order.tolist(), [stride // 4 for stride in values.strides]))
    required = np.ascontiguousarray(values.transpose(np.argsort(order)))
    records, tensors, offset = b"", [], 0
    for number in range(3):
        archive = record_of(values.tobytes(), shape, [strides[axis] for axis in range(len(shape))])
        tensors.append(Stored(f"t{number}", "Int32", shape, offset, len(archive)))
        records += archive
        offset += len(archive)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(records)
    with FileHandles() as handles:
        placement = Placement(str(path), tensors)
        handles.place(str(path), placement)
        places = [tensor.extents[0] for tensor in placement.tensors()]
        expected = bytearray(placement.size)
        for start, size in places:
            expected[start : start + size] = required.tobytes()
        with handles.borrow(str(path)) as file:
            assert isinstance(file, PlacedFile)
            assert file.read(0, placement.size + 10) == expected
            for _ in range(50):
                begin = int(random.integers(0, placement.size))
                count = int(random.integers(0, placement.size))
                assert file.read(begin, count) == expected[begin : begin + count]


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_a_record_are_read_as_tensors_of_their_own(seed: int, tmp_path: Path) -> None:
    """Flat ranges and transposed blocks of one record, numbers of a pickle, and a checksum that is of all of it."""
    random = np.random.default_rng(seed)
    rows, columns = (int(size) for size in random.integers(2, 6, 2))
    values = random.integers(0, 1 << 30, 7 + 2 * rows * columns).astype("<i4")
    block = values[7 : 7 + rows * columns].reshape(rows, columns)
    archive = record_of(values.tobytes(), values.shape, [1])
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(archive)

    def run(first: int, count: int) -> tuple[Run, ...]:
        return (Run(str(path), 0, len(archive), first, count),)

    count = rows * columns
    tensors = [
        Stored("range", "Int32", (7,), runs=run(0, 7)),
        Stored("transposed", "Int32", (columns, rows), runs=run(7, count), strides=(1, columns)),
        Stored("block", "Int32", (rows, columns), runs=run(7 + count, count)),
        Stored("step", "Int32", (1,), data=b"\3\0\0\0"),
    ]
    expected = [values[:7], block.T, values[7 + count :], np.array([3], "<i4")]
    with FileHandles() as handles:
        placement = Placement(str(path), tensors)
        handles.place(str(path), placement)
        with handles.borrow(str(path)) as file:
            assert isinstance(file, PlacedFile)
            assert file.read(0, placement.size) == b"".join(each.tobytes() for each in expected)
            for _ in range(50):
                begin, count = (int(each) for each in random.integers(0, placement.size, 2))
                whole = b"".join(each.tobytes() for each in expected)
                assert file.read(begin, count) == whole[begin : begin + count]
            counted: list[int] = []
            file.check(placement.tensors(), 64, counted.append)
            assert sum(counted) == values.nbytes
        changed = bytearray(archive)
        changed[archive.index(values.tobytes())] ^= 1
        path.write_bytes(bytes(changed))
    with FileHandles() as handles:
        handles.place(str(path), Placement(str(path), tensors))
        with handles.borrow(str(path)) as file:
            assert isinstance(file, PlacedFile)
            with pytest.raises(CheckpointError):
                file.check(list(placement.tensors())[1:2], 64, lambda count: None)


def record_of(data: bytes, shape: tuple[int, ...], strides: list[int]) -> bytes:
    """An archive of ``torch.save`` as an older torch writes it, made by the library of Python."""
    text = b"".join(
        [
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nIntStorage\n",
            b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu",
            b"J" + (len(data) // 4).to_bytes(4, "little") + b"tQK\x00",
            b"(" + b"".join(b"J" + size.to_bytes(4, "little") for size in shape) + b"t",
            b"(" + b"".join(b"J" + stride.to_bytes(4, "little") for stride in strides) + b"t",
            b"\x89ccollections\nOrderedDict\n)RtR.",
        ]
    )
    contents = io.BytesIO()
    with zipfile.ZipFile(contents, "w") as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/data/0", data)
        archive.writestr("archive/version", "3\n")
    return contents.getvalue()


def test_a_large_transposed_record_is_read_in_bounded_memory(tmp_path: Path) -> None:
    values = np.arange(1 << 20, dtype="<i4").reshape(1024, 1024)
    archive = record_of(values.T.copy().tobytes(), (1024, 1024), [1, 1024])
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(archive)
    with FileHandles() as handles:
        handles.place(str(path), Placement(str(path), [Stored("t", "Int32", (1024, 1024), 0, len(archive))]))
        with handles.borrow(str(path)) as file:
            for start in range(0, 4 << 20, 8192):
                actual = np.frombuffer(file.read(start, 8192), "<i4")
                assert actual[0] == start // 4 and (np.diff(actual) == 1).all()


@pytest.mark.parametrize("form", WRITTEN)
def test_memory_for_written_metadata_is_a_few_times_its_size(form: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    write_safetensors(source / "model.safetensors", {f"layers.{at}.w": np.zeros((64, 1), "f4") for at in range(100)})
    asked = Conversion(Source(str(source)), Target(str(tmp_path / "out"), form=form, shards=64))
    metadata = run(request_of(asked, Report(), Task(dry_run=True))).plan.form.finishing()[-1]
    tracemalloc.start()
    try:
        size = sum(map(len, metadata.make()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 1 << 19
    assert peak < 5 * size


@pytest.mark.parametrize("elements", [(1 << 32) - 2, (1 << 32) - 1, (5 << 30) + 3], ids=["under", "at", "over"])
def test_records_around_and_over_4_gib_are_valid_archives(elements: int, tmp_path: Path) -> None:
    """As sparse files: a large tensor, and one after it in the same archive file."""
    tensors = [OutputTensor("large", "UInt8", (elements,), elements), OutputTensor("small", "UInt8", (3,), 3)]
    layout = lay_out_archives(tensors)
    path, ends = tmp_path / "__0_0.distcp", (b"first", b"last!")
    with open(path, "wb") as file:
        for segment in layout.segments():
            file.seek(segment.offset)
            if isinstance(segment, Literal):
                file.write(segment.data)
            elif segment.tensor == 0:
                file.write(ends[0])
                file.seek(segment.offset + elements - 5)
                file.write(ends[1])
            else:
                file.write(b"abc")
    assert path.stat().st_size == layout.size
    with FileHandles() as handles, handles.borrow(str(path)) as opened:
        for record, begin, end in zip(layout.records, (ends[0], b"abc"), (ends[1], b"abc")):
            actual = archived_tensor(opened, record.offset, record.length)
            assert (actual.dtype, actual.shape, actual.in_order) == ("UInt8", record.tensor.dims, True)
            assert (actual.offset - record.offset) % 64 == 0
            last = actual.offset + record.tensor.nbytes
            assert (opened.read(actual.offset, len(begin)), opened.read(last - len(end), len(end))) == (begin, end)
    # Another reader of zip archives: the first record is a file of its own.
    os.truncate(path, layout.records[0].length)
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("archive/data/0")
        assert entry.file_size == entry.compress_size == elements
        with archive.open(entry) as data:
            assert data.read(5) == ends[0]
        assert archive.read("archive/version") == b"3\n"


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_weights_of_a_lost_stage_are_missing_also_under_a_trainers_names(form: str, tmp_path: Path) -> None:
    cut = layout([2], [0, -1])
    first, last = {"embed.weight": cut}, {"head.weight": cut}
    (tmp_path / "strategy").mkdir()
    write_strategy(tmp_path / "strategy/strategy_0.ckpt", 0, first)
    write_strategy(tmp_path / "strategy/strategy_1.ckpt", 1, last)
    write_strategy(tmp_path / "target.ckpt", 0, {**first, **last})
    values = {name: np.arange(32, dtype="f4").reshape(4, 8) for name in (*first, *last)}

    def save(step: int, ranks: range) -> None:
        for rank in ranks:
            name = "embed.weight" if rank < 2 else "head.weight"
            file = tmp_path / f"ckpt/rank_{rank}/net-{step}_1.ckpt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(record(name, *parts(values[name] + rank)))

    words = ("--src-strategy", tmp_path / "strategy", "--to", form, "--dst-strategy", tmp_path / "target.ckpt")
    save(2, range(2))
    fails(3, "convert", tmp_path / "ckpt", tmp_path / "out", *words, texts=["head.weight"])
    save(1, range(4))
    result = done("convert", tmp_path / "ckpt", tmp_path / "out", *words, "--verify")
    assert "weights 2" in result.out + result.err
    assert "step 2_1 is not complete and is skipped" in flat(result.err)


@pytest.mark.deep
@pytest.mark.parametrize("form", ["dcp", "hyper-parallel"])
def test_a_models_strategy_cuts_a_trainers_state_too(form: str, tmp_path: Path) -> None:
    demo = FIXTURES / "demo"
    words = ("--to", form, "--dst-strategy", demo / "dst_strategy.ckpt", "--verify")
    source = ("--src-strategy", demo / "src_strategy.ckpt")
    done("convert", demo / "src_checkpoints", tmp_path / "whole", *source, "--to", "dcp", "--shards", "3")
    done("convert", demo / "src_checkpoints", tmp_path / "direct", *source, *words)
    done("convert", tmp_path / "whole", tmp_path / "again", *words)
    names = [path.name for path in (tmp_path / "direct").iterdir() if path.suffix in (".distcp", ".safetensors")]
    assert len(names) == 4
    for name in names:
        assert (tmp_path / "direct" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    done("convert", demo / "src_checkpoints", tmp_path / "renamed", *source, *words, "--rename", "*=model.*")
    for name in names:
        assert (tmp_path / "direct" / name).read_bytes() == (tmp_path / "renamed" / name).read_bytes()
    # Also with other types; a strategy of other names is refused as before.
    done("convert", tmp_path / "whole", tmp_path / "cast", *words, "--cast", "BFloat16")
    other = ("--to", form, "--dst-strategy", tmp_path / "other.ckpt")
    write_strategy(tmp_path / "other.ckpt", 0, {"embed.weight": layout([2], [0, -1])})
    fails(3, "convert", tmp_path / "whole", tmp_path / "out", *other, texts=["none of the 68 parameters"])


@pytest.mark.parametrize("form", ["ranks", "checkpoint2", "dcp", "hyper-parallel", "hf-sharded"])
def test_every_form_refuses_a_weight_of_the_strategy_that_the_source_lacks(form: str, tmp_path: Path) -> None:
    cut = layout([2], [0, -1])
    write_strategy(tmp_path / "source.ckpt", 0, {"embed.weight": cut})
    write_strategy(tmp_path / "target.ckpt", 0, {"embed.weight": cut, "foo.weight": cut})
    for rank in range(2):
        file = tmp_path / f"ckpt/rank_{rank}/net-1_1.ckpt"
        file.parent.mkdir(parents=True)
        file.write_bytes(record("embed.weight", *parts(np.zeros((4, 8), "f4"))))
    words = ("--src-strategy", tmp_path / "source.ckpt", "--to", form, "--dst-strategy", tmp_path / "target.ckpt")
    fails(3, "convert", tmp_path / "ckpt", tmp_path / "out", *words, texts=["'foo.weight'"])
    result = done("convert", tmp_path / "ckpt", tmp_path / "out", *words, "--allow-missing", "foo.*")
    assert "in the target strategy only: weights 1" in flat(result.err)


@pytest.mark.parametrize("form", ["dcp", "hf-sharded", "hyper-parallel"])
def test_a_tensor_without_elements_over_several_files_is_verified(tmp_path: Path, form: str) -> None:
    write_checkpoint(tmp_path / "src.safetensors", {"q": value("q", (2, 0)), "w": value("w", (4, 4))})
    words: list[Argument] = [tmp_path / "out", "--src-strategy", "none", "--to", form, "--shards", 2]
    done("convert", tmp_path / "src.safetensors", *words, "--checksum", "crc32", "--verify")
    done("verify", tmp_path / "out")
    done("verify", tmp_path / "out", "--src", tmp_path / "src.safetensors")
